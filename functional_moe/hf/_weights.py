"""Parameter trees out of model directories and into them, tensor by tensor.

Where each tensor of a file stands in a leaf follows from ``parameters.declare``: its blocks, its names, and whether
files hold it transposed. Reading allocates every leaf once, or this rank's shard of it, and fills it from blocks of
rows that fit into a cache: nothing else of the model is ever in memory. Everything that headers tell (names, shapes,
dtypes, that the bytes are there) is checked before.

Half of the time goes to the system, which finds and clears the memory that the leaves come to lie in, and the rest to
turning matrices. So a thread for each processor takes runs of the file in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..config import MoEConfig
from ..model import check_balance
from ..optim import path_name
from ..parallel import Layout, axis_sizes, from_local, is_dtensor, local_slices
from ..parameters import Leaf, Params, declare
from ..tree import named_leaves
from ._config import Family, config_from_hf, config_to_hf, family_of
from ._errors import HFError
from ._files import DTYPES, Entry, Planned, Reader, in_shards, read_header, read_json, write_tensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_SELECTION_BIAS = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Matrices are turned in blocks of rows: of many, so that what is written next to each other is long, and of few
# enough that a block and its turned copy stay in a cache.
_BLOCK_ROWS = (16, 1024)
_BLOCK_NUMBERS = 1 << 19
# What a thread takes at once: long runs of a file, as disks like them, and of neighbours in a leaf, as two threads that
# write into one page both ask the system for it; short enough that all end together.
_RUN_NUMBERS = 1 << 22
# More add nothing: then memory is what is waited for.
_MOST_THREADS = 8


class Imported(NamedTuple):
    """A model from elsewhere."""

    config: MoEConfig
    params: Params  # fp32, or as asked for; DTensors when a layout was given
    balance: Tensor  # fp32 [moe_layers, experts]; the selection bias, zeros for families without one
    left_out: tuple[str, ...]  # tensors that are no part of the model: those of heads that predict later tokens


class _Part(NamedTuple):
    """Matrices of a tensor of a file, or rows of one, and the memory that they go to."""

    entry: Entry  # of 3 axes: matrices, rows, columns
    source: tuple[slice, slice, slice]
    target: Tensor  # as ``source``, its last two axes exchanged where ``is_transposed``
    is_transposed: bool

    @property
    def size(self) -> int:
        """Numbers."""
        return self.target.numel()


class _Piece(NamedTuple):
    """One tensor of a file, and where it stands in a leaf."""

    leaf: str  # its dotted path
    name: str  # as ``parameters`` has it
    where: tuple[slice, ...]  # in the leaf, one for each of its axes
    shape: tuple[int, ...]  # in the file
    is_transposed: bool


def load(model_dir: str | Path, layout: Layout | None = None, *, dtype: torch.dtype = torch.float32) -> Imported:
    """Reads a model directory of Hugging Face's, whole or this rank's part.

    Args:
      model_dir: a folder with ``config.json`` and ``model.safetensors``, or several such files and their index. Experts
        may lie one by one or stacked.
      layout: of the parameter tree; a rank then reads the slices that it holds, and ``params`` are DTensors.
      dtype: of ``params``, whatever the files have. A bf16 model takes half the memory as bf16, and with
        ``compute_dtype="bfloat16"`` computes the same logits, bit for bit, as when it is widened. The routers of
        architectures with a selection bias stay fp32. What is trained is fp32.

    Raises:
      HFError: anything is missing, unknown, of another shape or dtype, cut short or hostile; the file and the tensor
        or key are named. All headers are checked before anything is allocated.
    """
    if dtype not in DTYPES.values():
        raise HFError(f"dtype = {dtype}: weights are read as {', '.join(map(str, DTYPES.values()))}")
    folder = Path(model_dir)
    hf_config = read_json(folder / CONFIG_FILE)
    family, config = family_of(hf_config), config_from_hf(hf_config)
    entries = _entries(folder)
    if config.num_hidden_layers > len(entries):  # before a tree of as many layers is declared
        raise HFError(
            f"config.json: num_hidden_layers = {config.num_hidden_layers}, but {folder} has {len(entries)} tensors"
        )
    found = _find(entries, config, family)
    left_out = _check_rest(folder, entries, {entry.name for _, entry in found}, hf_config, config)

    declared = _declared(config)
    held = {path: _held(layout, path, leaf) for path, leaf in declared.items()}
    leaves = {
        path: torch.empty(
            [part.stop - part.start for part in held[path]],
            dtype=torch.float32 if family.selection_bias and leaf.label == "router" else dtype,
        )
        for path, leaf in declared.items()
    }
    balance = torch.zeros(config.num_moe_layers, config.num_experts)
    leaves["balance"], held["balance"] = balance, tuple(slice(0, size) for size in balance.shape)
    in_files_order = sorted(found, key=lambda pair: (pair[1].path, pair[1].offset))
    parts = (_part(leaves[piece.leaf], held[piece.leaf], piece, entry) for piece, entry in in_files_order)
    _read(_runs(short for part in parts if part is not None for short in _shortened(part)))
    _, spec = pytree.tree_flatten(declare(config), is_leaf=_is_leaf)
    params = pytree.tree_unflatten([leaves[path] for path in declared], spec)
    return Imported(config, params if layout is None else from_local(params, layout), balance, left_out)


def _is_leaf(node: object) -> bool:
    return isinstance(node, Leaf)


def _declared(config: MoEConfig) -> dict[str, Leaf]:
    """Every leaf by its dotted path, in the tree's order."""
    leaves, _ = pytree.tree_flatten_with_path(declare(config), is_leaf=_is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def _held(layout: Layout | None, path: str, leaf: Leaf) -> tuple[slice, ...]:
    """The part of a leaf that this rank holds."""
    if layout is None:
        return tuple(slice(0, size) for size in leaf.shape)
    placed: Any = layout.placements
    for key in path.split("."):
        placed = placed[int(key) if key.isdecimal() else key]
    coordinate = layout.mesh.get_coordinate()
    if coordinate is None:
        raise HFError(f"this rank is not of the layout's mesh {layout.mesh}")
    return local_slices(leaf.shape, placed, axis_sizes(layout.mesh), coordinate)


def _pieces(path: str, leaf: Leaf, *, stacked: bool = False) -> list[_Piece]:
    """The tensors that a leaf is made of; ``stacked``: all experts in one."""
    layer = int(path.split(".")[1]) if path.startswith("layers.") else None
    whole = tuple(slice(0, size) for size in leaf.shape)

    def piece(name: str, index: tuple[slice, ...], axes: int) -> _Piece:
        shape = [part.stop - part.start for part in index][-axes:]
        if leaf.is_transposed:
            shape[-2:] = shape[-1], shape[-2]
        return _Piece(path, name, index, tuple(shape), leaf.is_transposed)

    if stacked:
        return [piece(leaf.stack_name.format(layer=layer), whole, len(whole))]
    pieces = []
    for expert in range(leaf.shape[0]) if leaf.stack_name else (None,):
        first = () if expert is None else (slice(expert, expert + 1),)
        start = 0
        for name, width in zip(leaf.names, leaf.blocks or leaf.shape[-1:], strict=True):
            index = (*first, *whole[len(first) : -1], slice(start, start + width))
            pieces.append(piece(name.format(layer=layer, expert=expert), index, len(whole) - len(first)))
            start += width
    return pieces


def _bias_pieces(config: MoEConfig) -> list[_Piece]:
    """The tensors of the selection bias, whose leaf is the whole ``balance``."""
    layers = filter(config.is_moe_layer, range(config.num_hidden_layers))
    columns, shape = slice(0, config.num_experts), (config.num_experts,)
    return [
        _Piece("balance", _SELECTION_BIAS.format(layer=layer), (slice(row, row + 1), columns), shape, False)
        for row, layer in enumerate(layers)
    ]


def _renamed(name: str, family: Family) -> str:
    """A name as the family's files have it."""
    for ours, theirs in family.renames:
        name = name.replace(ours, theirs)
    return name


def _entries(folder: Path) -> dict[str, Entry]:
    """All tensors of a directory."""
    if (folder / WEIGHTS_FILE).exists():
        return read_header(folder / WEIGHTS_FILE)
    index = folder / INDEX_FILE
    if not index.exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise HFError(
                f"{folder} has no {WEIGHTS_FILE}, only {pickles[0]}: a pickle may run any code and is not read; "
                "convert it to safetensors"
            )
        raise HFError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise HFError(f"{index} has no weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise HFError(f"{index}: tensor {name!r:.100} is in {file!r:.100}, which is no safetensors file beside it")
    entries: dict[str, Entry] = {}
    for file in sorted(set(files.values())):
        if not (folder / file).exists():
            lost = next(name for name, where in files.items() if where == file)
            raise HFError(f"{folder / file} is missing: {INDEX_FILE} has the tensor {lost!r:.100} in it")
        for name, entry in read_header(folder / file).items():
            if files.get(name) != file:
                raise HFError(f"{folder / file} has the tensor {name!r:.100}, which {INDEX_FILE} does not say")
            entries[name] = entry
    for name, file in files.items():
        if name not in entries:
            raise HFError(f"{folder / file} lacks the tensor {name!r:.100}, which {INDEX_FILE} has in it")
    return entries


def _find(entries: Mapping[str, Entry], config: MoEConfig, family: Family) -> list[tuple[_Piece, Entry]]:
    """Every piece of the model with the tensor it is read from."""

    def entry_of(name: str) -> Entry | None:
        # Files of transformers 5 that were not written for others have the one spelling it uses inside.
        return entries.get(_renamed(name, family), entries.get(name))

    pieces = []
    for path, leaf in _declared(config).items():
        together = _pieces(path, leaf, stacked=True) if leaf.stack_name else []
        stacked = bool(together) and entry_of(together[0].name) is not None
        if together and not stacked and config.num_experts > len(entries):
            raise HFError(f"config.json: num_experts = {config.num_experts}, but there are {len(entries)} tensors")
        pieces += together if stacked else _pieces(path, leaf)
    if family.selection_bias:
        pieces += _bias_pieces(config)
    found, missing = [], []
    for piece in pieces:
        entry = entry_of(piece.name)
        if entry is None:
            missing.append(_renamed(piece.name, family))
            continue
        if entry.shape != piece.shape:
            raise HFError(
                f"{entry.path}: tensor {entry.name!r} has shape {list(entry.shape)}, config.json makes it "
                f"{list(piece.shape)}"
            )
        if entry.dtype not in DTYPES:
            raise HFError(
                f"{entry.path}: tensor {entry.name!r} has dtype {entry.dtype!r:.100}, not {', '.join(DTYPES)}"
            )
        found.append((piece, entry))
    if missing:
        raise HFError(
            f"the tensor {missing[0]!r} is missing ({len(missing)} in all) among the {len(entries)} there are"
        )
    return found


def _check_rest(
    folder: Path, entries: Mapping[str, Entry], used: set[str], hf_config: Mapping[str, Any], config: MoEConfig
) -> tuple[str, ...]:
    """Raises for a tensor that the model has no place for; returns those of heads that predict later tokens."""
    rest = entries.keys() - used
    if config.tie_word_embeddings and "lm_head.weight" in rest:
        head, embedding = entries["lm_head.weight"], entries["model.embed_tokens.weight"]
        if not _are_equal(head, embedding):
            raise HFError(
                f"{head.path}: tensor 'lm_head.weight' differs from the embedding, though config.json has "
                "tie_word_embeddings = True"
            )
        rest -= {"lm_head.weight"}
    later = hf_config.get("num_nextn_predict_layers", hf_config.get("num_mtp_layers")) or 0
    first = config.num_hidden_layers
    left_out = {
        name
        for name in rest
        if isinstance(later, int) and any(name.startswith(f"model.layers.{first + i}.") for i in range(min(later, 8)))
    }
    if extra := sorted(rest - left_out):
        raise HFError(
            f"{entries[extra[0]].path}: the model has no place for the tensor {extra[0]!r:.100} ({len(extra)} in all)"
        )
    return tuple(sorted(left_out))


def _are_equal(a: Entry, b: Entry) -> bool:
    """Whether two matrices have the same values."""
    if a.shape != b.shape or a.dtype not in DTYPES:
        return False
    part = (slice(0, 1), slice(0, a.shape[0]), slice(0, a.shape[1]))
    with Reader() as ours, Reader() as theirs:
        pairs = zip(
            ours.blocks(_in_three(a), part, _BLOCK_ROWS[0]),
            theirs.blocks(_in_three(b), part, _BLOCK_ROWS[0]),
            strict=True,
        )
        return all(torch.equal(x.to(torch.float32), y.to(torch.float32)) for (_, _, x), (_, _, y) in pairs)


def _in_three(entry: Entry) -> Entry:
    """A tensor as matrices, rows and columns."""
    return entry._replace(shape=(1,) * (3 - len(entry.shape)) + entry.shape)


def _part(leaf: Tensor, held: tuple[slice, ...], piece: _Piece, entry: Entry) -> _Part | None:
    """What this rank holds of a piece, if anything.

    Args:
      leaf: this rank's shard.
      held: the part of the whole leaf that it is.
    """
    target, source = [], []
    for part, have in zip(piece.where, held, strict=True):
        start, stop = max(part.start, have.start), min(part.stop, have.stop)
        if start >= stop:
            return None
        target.append(slice(start - have.start, stop - have.start))
        source.append(slice(start - part.start, stop - part.start))
    view = leaf[tuple(target)]
    while view.ndim < 3:
        view, source = view[None], [slice(0, 1), *source]
    matrices, rows, columns = source
    if piece.is_transposed:
        rows, columns = columns, rows
    return _Part(_in_three(entry), (matrices, rows, columns), view, piece.is_transposed)


def _shortened(part: _Part) -> Iterator[_Part]:
    """A part that is longer than a run, by matrices and rows."""
    if part.size <= _RUN_NUMBERS:
        yield part
        return
    matrices, rows, columns = part.source
    at_once = max(1, _RUN_NUMBERS // (columns.stop - columns.start))
    for number, matrix in enumerate(range(matrices.start, matrices.stop)):
        for start in range(rows.start, rows.stop, at_once):
            stop = min(start + at_once, rows.stop)
            here = slice(start - rows.start, stop - rows.start)
            target = part.target[number : number + 1]
            target = target[:, :, here] if part.is_transposed else target[:, here]
            yield part._replace(source=(slice(matrix, matrix + 1), slice(start, stop), columns), target=target)


def _runs(parts: Iterable[_Part]) -> deque[list[_Part]]:
    """Neighbouring parts together."""
    runs: deque[list[_Part]] = deque()
    size = _RUN_NUMBERS
    for part in parts:
        if size >= _RUN_NUMBERS:
            runs.append([])
            size = 0
        runs[-1].append(part)
        size += part.size
    return runs


def _read(runs: deque[list[_Part]]) -> None:
    """Fills all memory, in as many threads as this process has processors.

    Raises:
      HFError: what went wrong first; the other threads then end with the run they have.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(processors, _MOST_THREADS, len(runs)))
    widest = max((part.entry.shape[-1] for run in runs for part in run), default=0)

    def work() -> None:
        torch.set_num_threads(1)  # or each would start as many again
        scratch = torch.empty(max(_BLOCK_NUMBERS, _BLOCK_ROWS[0] * widest))
        try:
            with Reader() as reader:
                while True:
                    try:
                        run = runs.popleft()
                    except IndexError:
                        return
                    for part in run:
                        _fill(reader, part, scratch)
        except BaseException:
            runs.clear()
            raise

    torch_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, "hf.load") as pool:
            try:
                for working in [pool.submit(work) for _ in range(count)]:
                    working.result()
            except BaseException:  # Ctrl-C, say
                runs.clear()
                raise
    finally:
        torch.set_num_threads(torch_threads)  # a part of this setting is the whole process's


def _fill(reader: Reader, part: _Part, scratch: Tensor) -> None:
    """Reads a part, a block of rows at a time; ``scratch`` has room for one."""
    few, many = _BLOCK_ROWS
    columns = part.source[-1]
    width = columns.stop - columns.start
    at_once = min(many, max(few, _BLOCK_NUMBERS // max(1, part.entry.shape[-1])))
    for matrix, row, block in reader.blocks(part.entry, part.source, at_once):
        count = len(block)
        if part.is_transposed:
            # In two steps: torch turns a block into contiguous memory several times faster than into columns.
            turned = scratch.view(block.dtype)[: width * count].view(width, count)
            turned.copy_(block.t())
            part.target[matrix, :, row : row + count] = turned
        else:
            part.target[matrix, row : row + count] = block


def save(
    model_dir: str | Path,
    config: MoEConfig,
    params: Params,
    balance: Tensor,
    *,
    model_type: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int = 5_000_000_000,
    generation: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a model directory that ``transformers.AutoModelForCausalLM.from_pretrained`` loads.

    It appears under its name when it is complete. One tensor of the model is in memory besides the parameters.

    Args:
      model_dir: must not exist yet, or be an empty folder.
      config: the model.
      params: full tensors.
      balance: the routers' selection bias; must be zero for architectures without one.
      model_type: the architecture; by default the first that computes the same.
      dtype: of the weights in the files, rounded where it is narrower than fp32. The selection bias, and the routers of
        architectures that have one, are fp32.
      max_shard_size: bytes of a file; a larger tensor has a file of its own.
      generation: for ``generation_config.json``; its ids of tokens also go to ``config.json``.
      beside: more files to put in, such as a tokenizer's: their contents by name.

    Raises:
      HFError: no architecture computes the same, the tree is not the configuration's, ``model_dir`` is taken or cannot
        be written. Nothing is then left under its name.
    """
    folder = Path(model_dir)
    hf_config = config_to_hf(config, model_type)
    family = family_of(hf_config)
    leaves = _check_tree(config, params, balance, family)
    spelled = {kind: name for name, kind in DTYPES.items()}
    if dtype not in spelled:
        raise HFError(f"dtype = {dtype}: weights are written in {', '.join(map(str, spelled))}")
    if max_shard_size < 1:
        raise HFError(f"max_shard_size = {max_shard_size}: must be at least 1 byte")
    pieces = [piece for path, leaf in _declared(config).items() for piece in _pieces(path, leaf)]
    if family.selection_bias:
        pieces += _bias_pieces(config)
    planned = {
        _renamed(piece.name, family): Planned(
            _renamed(piece.name, family),
            "F32" if family.selection_bias and ".mlp.gate." in piece.name else spelled[dtype],
            piece.shape,
        )
        for piece in pieces
    }
    shards = in_shards(list(planned.values()), max_shard_size)
    by_name = dict(zip(planned, pieces, strict=True))
    ids = {name: (generation or {}).get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    with appearing(folder) as partial:
        files: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(partial / file, shard, (_cut(leaves, by_name[plan.name], plan) for plan in shard))
            files |= dict.fromkeys((plan.name for plan in shard), file)
        if len(shards) > 1:
            total = sum(plan.size for plan in planned.values())
            _write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
        _write_json(partial / CONFIG_FILE, {**hf_config, **ids, "dtype": str(dtype).removeprefix("torch.")})
        _write_json(partial / GENERATION_FILE, {"_from_model_config": True, **ids, **(generation or {})})
        for name, content in (beside or {}).items():
            (partial / name).write_bytes(content)


def _check_tree(config: MoEConfig, params: Params, balance: Tensor, family: Family) -> dict[str, Tensor]:
    """The leaves by name, and ``balance`` with them."""
    declared, leaves = _declared(config), named_leaves(params)
    if wrong := sorted(declared.keys() ^ leaves.keys()):
        raise HFError(f"leaf {wrong[0]!r} is {'missing' if wrong[0] in declared else 'not of the configuration'}")
    for path, leaf in leaves.items():
        if is_dtensor(leaf):
            raise HFError(f"leaf {path!r} is sharded; parallel.unshard makes it whole")
        if leaf.shape != declared[path].shape:
            raise HFError(f"leaf {path!r} has shape {list(leaf.shape)}, the configuration {list(declared[path].shape)}")
    try:
        check_balance(balance, config)
    except ValueError as error:
        raise HFError(str(error)) from error
    if not family.selection_bias and bool(balance.any()):
        raise HFError(
            f"the selection bias is up to {float(balance.abs().max()):.3g}, and {family.architecture} has none: it "
            "would route otherwise"
        )
    return {**leaves, "balance": balance}


def _cut(leaves: Mapping[str, Tensor], piece: _Piece, plan: Planned) -> Tensor:
    """A piece of a leaf as a file has it."""
    part = leaves[piece.leaf].detach()[piece.where]
    part = part.transpose(-1, -2) if piece.is_transposed else part
    return part.reshape(plan.shape).to(DTYPES[plan.dtype]).contiguous()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_free(folder: str | Path) -> None:
    """Makes sure that a folder can appear there, for those who compute long before it does, and leaves nothing behind.

    Raises:
      HFError: ``folder`` is taken, or cannot be written.
    """
    folder = Path(folder).absolute()
    with _written(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise HFError(f"{folder} exists; remove it or choose another name")
        above = next(parent for parent in folder.parents if parent.exists())
        with tempfile.TemporaryDirectory(dir=above, prefix=f".{folder.name}."):
            pass


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` to be filled, which takes its name when the context ends well, and else vanishes.

    Raises:
      HFError: ``folder`` is taken, or cannot be written.
    """
    folder = folder.absolute()
    check_free(folder)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    try:
        with _written(folder):
            partial.mkdir(parents=True)
            yield partial
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HFError(
            f"cannot write {folder}: {error.strerror or error}; make room or choose another folder"
        ) from error
