"""Training states on disk by shards: saved at one mesh, restored at another.

A run's checkpoints are folders in one folder, named by their step::

    run/steps/000123/manifest.json             paths, shapes, dtypes, parts; whose state it is; what else was saved
                     rank_00000.safetensors    the parts that rank 0 wrote
                     rank_00001.safetensors    ...

A step's folder is written under another name, brought to the disk, and renamed when every rank is done: it is
complete or it is not there, whenever a process is killed. Nothing is overwritten. Parts that several ranks hold are
written once.

``torch.distributed.checkpoint`` plans and coordinates; :mod:`._checkpoint_storage` says what is stored otherwise than
it does by default, and why. Nothing on the disk is a pickle.
"""

from __future__ import annotations

import functools
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from functional_moe.optim import path_name

from ._collective_functions import Call, CollectiveError
from ._dtensor import is_dtensor
from ._layout import from_local, layout_of, local, local_slices
from ._manifest import (
    MANIFEST_FILE,
    CheckpointError,
    LeafEntry,
    LocalPart,
    LocalParts,
    Manifest,
    as_json,
    check_identity,
    check_leaves,
    dtype_name,
    partial_name,
    read_manifest,
)
from ._mesh import axis_sizes
from ._tree import Tree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_STEP_NAME = re.compile(r"\d{6,}")


def save_sharded(
    folder: Path, step: int, tree: Tree, *, identity: Any, extra: Any = None, keep: int | None = None
) -> Path:
    """Writes ``tree`` as the checkpoint of ``step``. Every rank must call it.

    Args:
      folder: of the run's checkpoints, on a disk that all ranks share; one job at a time writes there.
      step: names the checkpoint.
      tree: its leaves are DTensors on one mesh of all ranks, or plain tensors that are the same on every rank (counts,
        balance): their values are not compared.
      identity: whose state it is, as JSON: the model's configuration, say. :func:`load_sharded` wants the same.
      extra: whatever else belongs to the state, as JSON; :func:`read_manifest` gives it back.
      keep: how many checkpoints to keep, this one and the newest before it; the others are removed once this one is
        complete. ``None`` keeps all.

    Returns:
      the checkpoint's folder.

    Raises:
      CheckpointError: on every rank alike, when the step is there already, a rank cannot write (no room, no permission)
        or the ranks save different things; nothing is under the final name then. Also when what an asynchronous save
        met was never asked for.
      ValueError: a leaf is no tensor, or on another mesh than the first; the leaf is named.
    """
    _wait_for_earlier()
    return _prepare(folder, step, tree, identity, extra, keep, staged=False)(_group())


def save_sharded_async(
    folder: Path, step: int, tree: Tree, *, identity: Any, extra: Any = None, keep: int | None = None
) -> PendingSave:
    """:func:`save_sharded` in a thread, while training goes on.

    The tree is copied to host memory before this returns, so the checkpoint holds the values of this moment even if
    tensors are overwritten in place. Checkpoints have a process group of their own: its messages do not mix with those
    of the training. At most one save is under way; a second, or a load, waits for the first.

    Args: as :func:`save_sharded`.

    Returns:
      a handle. ``wait()`` on every rank tells whether the save succeeded. A program that ends without it finishes the
      save first, as Python does with threads.

    Raises: as :func:`save_sharded`, what is known at once; the rest from ``wait()``.
    """
    global _earlier
    _wait_for_earlier()
    _earlier = PendingSave(_prepare(folder, step, tree, identity, extra, keep, staged=True), _group())
    return _earlier


class PendingSave:
    """A save under way."""

    def __init__(self, write: Callable[[ProcessGroup | None], Path], group: ProcessGroup | None) -> None:
        self._group = group
        self._folder: Path | None = None
        self._error: BaseException | None = None
        self.told = False
        """Whether ``wait`` has told how it ended."""
        # The thread alone holds the staged copies, so they go when it ends.
        self._thread = threading.Thread(target=self._run, args=(write,), name="save_sharded")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether it is known already that ``wait`` will raise; the ranks may come to know at different times."""
        return self._error is not None

    def wait(self) -> Path:
        """Waits for the end of the save.

        Returns:
          the checkpoint's folder.

        Raises:
          CheckpointError: as :func:`save_sharded`.
        """
        self._thread.join()
        self.told = True
        if self._folder is None:
            raise self._error or RuntimeError("the save ended without a result")
        return self._folder

    def _run(self, write: Callable[[ProcessGroup | None], Path]) -> None:
        try:
            self._folder = write(self._group)
        except BaseException as error:
            self._error = error


def load_sharded(checkpoint: Path, template: Tree, *, identity: Any, partial: bool = False) -> Tree:
    """Reads a checkpoint into the placements of ``template``, whatever mesh it was saved from. Every rank must call it.

    Keys, shapes and dtypes are checked before any shard is read. Each rank reads the slices that it will hold.

    Args:
      checkpoint: a step's folder, such as :func:`latest` finds.
      template: a tree with the structure, shapes, dtypes and placements wanted: DTensors on one mesh of all ranks,
        plain tensors where every rank wants the whole. Both may be on ``meta`` (``shard(abstract_tree, layout)``):
        such DTensors come to the mesh's device, such plain tensors to the CPU.
      identity: as at the save.
      partial: read only what the template has at its top, such as ``{"params": ..., "balance": ...}``.

    Returns:
      a tree like ``template``, in memory of its own.

    Raises:
      CheckpointError: on every rank alike: no checkpoint there, one of another model, leaves that are missing, extra or
        of another shape or dtype, a shard file that is missing, truncated or another one. It names the leaf or file.
      ValueError: a leaf of the template is no tensor, or on another mesh than the first.

    Example:
      >>> template = TrainState(step, shard(abstract(config), layout), opt_state, balance)
      >>> state = load_sharded(latest(run / "steps"), template, identity=dataclasses.asdict(config))
    """
    # Here and below, because DCP takes half a second to import.
    from torch.distributed.checkpoint.state_dict_loader import load

    from ._checkpoint_storage import LoadParts, StepReader

    _wait_for_earlier()
    checkpoint = Path(checkpoint)
    leaves, spec = _named(template)
    wanted = _parts(leaves)
    group = _group()
    manifest = _together(group, functools.partial(_checked, checkpoint, wanted, identity, partial))
    parts = {name: _allocate(part, leaves[name]) for name, part in wanted.items()}
    _coordinated(
        f"cannot load {checkpoint}",
        lambda no_dist: load(
            parts,
            storage_reader=StepReader(checkpoint, manifest, parts),
            planner=LoadParts(),
            process_group=group,
            no_dist=no_dist,
        ),
    )
    values: dict[str, Tensor] = {name: part.tensor for name, part in parts.items()}
    if sharded := _dtensors(leaves):
        values |= from_local({name: values[name] for name in sharded}, layout_of(sharded))
    return pytree.tree_unflatten(list(values.values()), spec)


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in ``folder``, or ``None``."""
    steps = _complete_steps(Path(folder))
    return steps[max(steps)] if steps else None


_earlier: PendingSave | None = None  # the last asynchronous save of this process


def _wait_for_earlier() -> None:
    global _earlier
    earlier, _earlier = _earlier, None
    if earlier is not None and not earlier.told:
        earlier.wait()


def _prepare(
    folder: Path, step: int, tree: Tree, identity: Any, extra: Any, keep: int | None, *, staged: bool
) -> Callable[[ProcessGroup | None], Path]:
    """What to run on a group of all ranks to save ``tree``."""
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step = {step!r}: must be an integer of at least 0")
    if keep is not None and keep < 1:
        raise ValueError(f"keep = {keep}: must be at least 1, or None")
    leaves, _ = _named(tree)
    parts = _parts(leaves)
    if staged:
        parts = {name: part._replace(tensor=part.tensor.to("cpu", copy=True)) for name, part in parts.items()}
    entries = {name: LeafEntry(tuple(part.shape), dtype_name(part.tensor), ()) for name, part in parts.items()}
    manifest = Manifest(step, as_json("identity", identity), as_json("extra", extra), entries, {})
    return functools.partial(_write, Path(folder) / f"{step:06d}", manifest, parts, keep)


def _write(final: Path, manifest: Manifest, parts: LocalParts, keep: int | None, group: ProcessGroup | None) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    from ._checkpoint_storage import SaveParts, StepWriter

    writer = StepWriter(final, manifest, parts)
    try:
        _coordinated(
            f"cannot save {final}",
            lambda no_dist: save(
                parts,
                storage_writer=writer,
                planner=SaveParts(),
                process_group=group,
                no_dist=no_dist,
            ),
        )
    except CheckpointError:
        if _is_first(group):
            shutil.rmtree(writer.partial, ignore_errors=True)  # else the next save removes it
        raise
    if keep is not None:
        _together(group, lambda: _prune(final, manifest.step, keep) if _is_first(group) else None)
    return final


def _prune(final: Path, step: int, keep: int) -> None:
    steps = _complete_steps(final.parent)
    older = sorted(number for number in steps if number < step)
    for number in older[: len(older) - (keep - 1)]:
        # Renamed first, so that a kill leaves no half of a checkpoint under its name.
        doomed = partial_name(steps[number])
        try:
            steps[number].rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(f"{final} is saved, but {steps[number]} cannot be removed: {error}") from error


def _complete_steps(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    return {int(path.name): path for path in found if (path / MANIFEST_FILE).is_file()}


def _named(tree: Tree) -> tuple[dict[str, Tensor], pytree.TreeSpec]:
    """The leaves by dotted path."""
    pairs, spec = pytree.tree_flatten_with_path(tree)
    leaves: dict[str, Tensor] = {}
    for path, leaf in pairs:
        name = path_name(path)
        if not isinstance(leaf, Tensor):
            raise ValueError(f"leaf {name!r} is {leaf!r:.100}, expected a tensor")
        if name in leaves:
            raise ValueError(f"two leaves of the tree have the path {name!r}")
        leaves[name] = leaf
    return leaves, spec


def _dtensors(leaves: dict[str, Tensor]) -> dict[str, DTensor]:
    return {name: leaf for name, leaf in leaves.items() if is_dtensor(leaf)}


def _parts(leaves: dict[str, Tensor]) -> LocalParts:
    """What this rank holds of each leaf."""
    parts = {name: LocalPart(leaf.detach(), leaf.shape, torch.Size([0] * leaf.ndim)) for name, leaf in leaves.items()}
    if sharded := _dtensors(leaves):
        layout = layout_of(sharded)
        coordinate = layout.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank is not of the mesh {layout.mesh}")
        for name, tensor in local(sharded).items():
            held = local_slices(layout.shapes[name], layout.placements[name], axis_sizes(layout.mesh), coordinate)
            begins = torch.Size([part.start for part in held])
            parts[name] = LocalPart(tensor.detach(), layout.shapes[name], begins)
    return parts


def _allocate(part: LocalPart, leaf: Tensor) -> LocalPart:
    device: torch.device | str = part.tensor.device
    if part.tensor.is_meta:
        device = leaf.device_mesh.device_type if is_dtensor(leaf) else "cpu"
    return part._replace(tensor=torch.empty(part.tensor.shape, dtype=part.tensor.dtype, device=device))


def _checked(checkpoint: Path, wanted: LocalParts, identity: Any, partial: bool) -> Manifest:
    manifest = read_manifest(checkpoint)
    if partial:
        tops = {_top(name) for name in wanted}
        kept = {name: leaf for name, leaf in manifest.leaves.items() if _top(name) in tops}
        manifest = manifest._replace(leaves=kept)
    check_identity(checkpoint, manifest, identity)
    leaves = {name: (tuple(part.shape), dtype_name(part.tensor)) for name, part in wanted.items()}
    check_leaves(checkpoint, manifest, leaves)
    return manifest


def _top(name: str) -> str:
    return name.split(".")[0]


def _group() -> ProcessGroup | None:
    """All ranks, in a group for checkpoints alone; ``None`` for a process by itself."""
    return _group_beside(dist.group.WORLD) if dist.is_initialized() else None


@functools.lru_cache(maxsize=1)
def _group_beside(world: ProcessGroup | None) -> ProcessGroup:
    """Made once in a world, because every rank connects to every other.

    It has gloo, because plans are Python objects, and torch's own time-out, because a rank waits in it for the slowest
    to have written.
    """
    return dist.new_group(backend="gloo")  # type: ignore[no-any-return]


def _is_first(group: ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _together(group: ProcessGroup | None, function: Callable[[], Any]) -> Any:
    """Runs ``function`` on every rank; a ``CheckpointError`` of one is raised on all."""
    result, message = None, None
    try:
        result = function()
    except CheckpointError as error:
        message = str(error)
    messages: list[str | None] = [message]
    if group is not None:
        messages *= dist.get_world_size(group)
        with Call("exchange of a checkpoint's errors", torch.empty(0), group):
            dist.all_gather_object(messages, message, group=group)
    if failed := {rank: text for rank, text in enumerate(messages) if text is not None}:
        raise CheckpointError(_first_of(failed, len(messages)))
    return result


def _coordinated(what: str, run: Callable[[bool], Any]) -> None:
    """Runs one of DCP's functions, which raise on every rank when one fails; makes that one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    alone = not dist.is_initialized()
    try:
        if alone:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                run(True)
        else:
            run(False)
    except CheckpointException as error:  # a BaseException
        failed = {rank: _reason(problem) for rank, (problem, _) in sorted(error.failures.items())}
        ranks = 1 if alone else dist.get_world_size()
        raise CheckpointError(f"{what}: {_first_of(failed, ranks)}") from error
    except RuntimeError as error:
        if alone:
            raise
        raise CollectiveError(f"{what}: {_reason(error)}") from error


def _first_of(failed: dict[int, str], ranks: int) -> str:
    first = min(failed)
    if ranks == 1:
        return failed[first]
    return f"rank {first}: {failed[first]}" + (f" ({len(failed)} ranks failed)" if len(failed) > 1 else "")


def _reason(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, CheckpointError) else f"{type(error).__name__}: {line}"
