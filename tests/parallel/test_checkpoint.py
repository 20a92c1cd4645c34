"""States on disk by shards: the same tensors on any mesh, complete or absent, and a reason in one line when not."""

import functools
import json
import math
import os
import pickle
import resource
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from functional_moe import optim, parallel
from functional_moe.config import MoEConfig
from functional_moe.data import rank_rows
from functional_moe.parallel import CheckpointError, _checkpoint_storage
from functional_moe.parameters import init, labels, matrix_axes
from functional_moe.sharding import model_layout
from functional_moe.train_step import TrainState, init_state, make_train_step

EXAMPLES = settings(max_examples=12, deadline=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
WHOLE = (Replicate(), Replicate())
ROWS = (Shard(0), Shard(0))
IDENTITY = {"hidden_size": 6, "layers": [1, 2]}


# --- any tree, any two meshes ---


class Saved(NamedTuple):
    """A tree as it would be without ranks, and what is sharded of it."""

    sharded: dict[str, torch.Tensor]
    plain: dict[str, Any]


def random_leaf(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(shape, dtype=torch.float64)).to(dtype)


@st.composite
def placed(draw: st.DrawFn, shapes: dict[str, list[int]]) -> dict[str, tuple[Any, Any]]:
    def one(shape: list[int]) -> Any:
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        return Replicate() if dim is None else Shard(dim)

    return {name: (one(shape), one(shape)) for name, shape in shapes.items()}


@st.composite
def cases(draw: st.DrawFn) -> Any:
    shapes = {name: draw(st.lists(st.integers(0, 6), max_size=3)) for name in "abc"}
    full = {name: random_leaf(shape, draw(st.sampled_from(DTYPES))) for name, shape in shapes.items()}
    plain = {
        "count": torch.tensor(draw(st.integers(-(2**62), 2**62))),
        "balance": (random_leaf([2, 3], torch.float32),),
    }
    meshes = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)])
    return Saved(full, plain), (draw(meshes), draw(placed(shapes))), (draw(meshes), draw(placed(shapes)))


def on_mesh(full: Saved, where: Any) -> Saved:
    mesh_sizes, placements = where
    layout = parallel.make_layout(parallel.make_mesh(*mesh_sizes), placements, full.sharded)
    return full._replace(sharded=parallel.shard(full.sharded, layout))


def abstract(full: Saved) -> Saved:
    return pytree.tree_map(lambda leaf: leaf.to("meta"), full)


def save_on(folder: Path, full: Saved, where: Any, extra: Any = None) -> Path:
    return parallel.save_sharded(folder, 7, on_mesh(full, where), identity=IDENTITY, extra=extra)


def load_on(checkpoint: Path, full: Saved, where: Any, identity: Any = IDENTITY) -> tuple[Saved, Any, Any]:
    template = on_mesh(abstract(full), where)
    tree = parallel.load_sharded(checkpoint, template, identity=identity)
    same_layout = parallel.layout_of(tree.sharded) == parallel.layout_of(template.sharded)
    return tree._replace(sharded=parallel.unshard(tree.sharded)), parallel.local(tree.sharded), same_layout


def same(a: Any, b: Any) -> bool:
    leaves, others = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return pytree.tree_structure(a) == pytree.tree_structure(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(leaves, others, strict=True)
    )


def world_of(where: Any) -> int:
    return math.prod(where[0])


@EXAMPLES
@given(case=cases())
def test_a_tree_saved_on_one_mesh_comes_back_on_another_bit_for_bit(case: Any) -> None:
    full, there, here = case
    with tempfile.TemporaryDirectory() as folder:
        saved = parallel.spawn(save_on, world_of(there), Path(folder), full, there)
        assert saved == [Path(folder) / "000007"] * world_of(there)
        for tree, shards, same_layout in parallel.spawn(load_on, world_of(here), saved[0], full, here):
            assert same_layout
            assert same(tree, full)
            assert all(leaf.is_contiguous() for leaf in shards.values())
        # Every part is stored once, whoever holds copies of it.
        manifest = parallel.read_manifest(saved[0])
        stored = sum(sum(math.prod(part.sizes) for part in leaf.parts) for leaf in manifest.leaves.values())
        assert stored == sum(leaf.numel() for leaf in pytree.tree_leaves(full))


@pytest.mark.parametrize(("rows", "mesh_sizes"), [(5, (2, 2)), (1, (2, 1)), (1, (4, 1))])
def test_rows_that_ranks_do_not_divide_come_back(tmp_path: Path, rows: int, mesh_sizes: tuple[int, int]) -> None:
    # pytorch 168134, 144109
    full = Saved({"w": torch.arange(rows * 3.0).reshape(rows, 3)}, {})
    where = (mesh_sizes, {"w": ROWS})
    parallel.spawn(save_on, world_of(where), tmp_path, full, where)
    for target in (where, ((1, 1), {"w": WHOLE}), ((3, 1), {"w": ROWS}), ((1, 2), {"w": (Replicate(), Shard(1))})):
        for tree, _, _ in parallel.spawn(load_on, world_of(target), tmp_path / "000007", full, target):
            assert same(tree, full)


def test_leaves_that_lie_in_one_buffer_are_saved_apart(tmp_path: Path) -> None:
    buffer = torch.arange(12.0)
    tree = {"a": buffer[:4], "b": buffer[2:8].view(2, 3), "again": buffer[:4], "t": buffer.view(3, 4).t()}
    checkpoint = parallel.save_sharded(tmp_path, 0, tree, identity=None)
    assert same(parallel.load_sharded(checkpoint, abstract(tree), identity=None), tree)


def test_a_process_by_itself_reads_what_ranks_saved(tmp_path: Path) -> None:
    full, where = example()
    parallel.spawn(save_on, 2, tmp_path, full, where, {"tokens": 12, "data": ["a", 1]})
    loaded = parallel.load_sharded(tmp_path / "000007", abstract(full), identity=IDENTITY)
    assert same(loaded, full)
    manifest = parallel.read_manifest(tmp_path / "000007")
    assert (manifest.step, manifest.identity, manifest.extra) == (7, IDENTITY, {"tokens": 12, "data": ["a", 1]})


def test_torchs_own_reader_reads_it(tmp_path: Path) -> None:
    full, where = example()
    parallel.spawn(save_on, 4, tmp_path, full, ((2, 2), where[1]))
    # It cannot read scalars.
    target = {f"sharded.{name}": torch.zeros_like(leaf) for name, leaf in full.sharded.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "000007")), no_dist=True)
    assert all(torch.equal(target[f"sharded.{name}"], leaf) for name, leaf in full.sharded.items())


def example() -> tuple[Saved, Any]:
    """A tree and where it lies on two ranks."""
    generator = torch.Generator().manual_seed(0)
    sharded = {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(3, generator=generator)}
    plain = {"step": torch.tensor(3), "balance": torch.randn(2, 4, generator=generator)}
    return Saved(sharded, plain), ((2, 1), {"w": ROWS, "b": WHOLE})


# --- a training that is interrupted ---


class State(NamedTuple):
    step: torch.Tensor
    params: Any
    opt_state: Any
    balance: torch.Tensor


PLACED = {"embedding": ROWS, "experts": ROWS, "scale": WHOLE}


def initial(mesh: Any) -> State:
    generator = torch.Generator().manual_seed(1)
    full = {
        "embedding": torch.randn(7, 6, generator=generator),
        "experts": 0.3 * torch.randn(8, 6, 6, generator=generator),
        "scale": torch.ones(6),
    }
    params = parallel.shard(full, parallel.make_layout(mesh, PLACED, full))
    return State(torch.tensor(0), params, optimizer(params).init(params), torch.zeros(8))


def optimizer(params: Any) -> optim.GradientTransformation:
    """Muon on whole experts, which lie on one rank each; AdamW on the rest, with masked nodes where the other works."""
    by_label = {
        "muon": optim.muon(0.05, optim.MatrixAxes(out=-1, in_=-2)),
        "adamw": optim.adamw(lambda count: 0.03 / (1 + count)),
    }
    labels = {"embedding": "adamw", "experts": "muon", "scale": "adamw"}
    norm = functools.partial(parallel.global_norm, layout=parallel.layout_of(params))
    return optim.chain(optim.clip_by_global_norm(0.5, norm), optim.partition(by_label, labels))


def locals_of(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf._local_tensor if isinstance(leaf, DTensor) else leaf, tree)


def like(tree: Any, old: Any) -> Any:
    def wrap(leaf: torch.Tensor, before: Any) -> torch.Tensor:
        if not isinstance(before, DTensor):
            return leaf
        whole = {"shape": before.shape, "stride": before.stride()}
        return DTensor.from_local(leaf, before.device_mesh, before.placements, run_check=False, **whole)

    return pytree.tree_map(wrap, tree, old)


def train_step(state: State) -> State:
    """A step whose batch is a function of the step alone; each rank takes its rows, and the losses add."""
    layout = parallel.layout_of(state.params)
    step = int(state.step)
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 + step))
    rows = rank_rows(5, dist.get_rank(), dist.get_world_size())
    mine = batch[rows.start : rows.stop]

    def loss(params: Any) -> torch.Tensor:
        full = parallel.gather(params, layout)
        hidden = torch.tanh(mine @ full["embedding"].T) @ full["embedding"] * full["scale"]
        mixed = torch.einsum("rd,edf,e->rf", hidden, full["experts"], torch.softmax(state.balance, 0))
        return (mixed - mine).square().sum() / 5

    gradient, _ = grad_and_value(loss)(locals_of(state.params))
    params = locals_of(state.params)
    updates, opt_state = optimizer(state.params).update(gradient, locals_of(state.opt_state), params)
    return State(
        state.step + 1,
        like(optim.apply_updates(params, updates), state.params),
        like(opt_state, state.opt_state),
        state.balance + 0.1 * torch.sin(torch.arange(8.0) + step),
    )


def whole(state: Any) -> Any:
    return pytree.tree_map(lambda leaf: parallel.unshard({"": leaf})[""] if isinstance(leaf, DTensor) else leaf, state)


def train(mesh_sizes: tuple[int, int], folder: Path, save_at: int | None, steps: int) -> State:
    state = initial(parallel.make_mesh(*mesh_sizes))
    for _ in range(steps):
        if int(state.step) == save_at:
            parallel.save_sharded(folder, save_at, state, identity=IDENTITY)
        state = train_step(state)
    return whole(state)


def resume(mesh_sizes: tuple[int, int], checkpoint: Path, steps: int) -> tuple[State, State]:
    template = pytree.tree_map(lambda leaf: leaf.to("meta"), initial(parallel.make_mesh(*mesh_sizes)))
    loaded = state = parallel.load_sharded(checkpoint, template, identity=IDENTITY)
    for _ in range(steps):
        state = train_step(state)
    return whole(loaded), whole(state)


@pytest.mark.parametrize("mesh_sizes", [(2, 1), (1, 2), (1, 1), (4, 1), (2, 2)])
def test_six_steps_are_three_and_three_more_after_a_restore(tmp_path: Path, mesh_sizes: tuple[int, int]) -> None:
    # pytorch 91205, 172439; torchtitan 809, 848, 1222: moments, counts and balance are not reset
    undisturbed = parallel.spawn(train, 2, (2, 1), tmp_path, 3, 6)[0]
    at_three = parallel.spawn(train, 2, (2, 1), tmp_path, None, 3)[0]
    for loaded, resumed in parallel.spawn(resume, math.prod(mesh_sizes), mesh_sizes, tmp_path / "000003", 3):
        assert same(loaded, at_three)
        if math.prod(mesh_sizes) == 2:
            assert same(resumed, undisturbed)
        # Sums over other numbers of ranks are rounded otherwise.
        leaves, wanted = pytree.tree_leaves(resumed), pytree.tree_leaves(undisturbed)
        torch.testing.assert_close(leaves, wanted, rtol=1e-5, atol=1e-6)
    moments = [leaf for leaf in pytree.tree_leaves(at_three.opt_state) if leaf.numel() > 1]
    assert len(moments) == 5 and all(leaf.abs().sum() > 0 for leaf in moments)


# The same of the model's own step.

MODEL = MoEConfig(
    vocab_size=11,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    intermediate_size=7,
    first_k_dense_replace=1,
    balance_update_rate=0.05,
    initializer_range=0.3,
    compute_dtype="float64",  # so that sums over other numbers of ranks differ by nothing that Muon could amplify
)


def model_optimizer(layout: parallel.Layout) -> optim.GradientTransformation:
    """Clipping, Muon with owners and AdamW with a schedule."""
    of_leaves = labels(MODEL)
    adamw = optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.03, 2, 9))
    by_label = dict.fromkeys(pytree.tree_leaves(of_leaves), adamw)
    orthogonalize = parallel.owner_orthogonalize(layout)
    by_label["matrix"] = optim.muon(0.05, matrix_axes(MODEL), orthogonalize=orthogonalize)
    norm = functools.partial(parallel.global_norm, layout=layout)
    return optim.chain(optim.clip_by_global_norm(0.5, norm), optim.partition(by_label, of_leaves))


def model_batch(step: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a batch that follows from the step alone, as ``data.batch_at`` gives it."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, targets = torch.randint(MODEL.vocab_size, (2, 5, 6), generator=generator)
    rows = rank_rows(5, dist.get_rank(), dist.get_world_size())
    return {"tokens": tokens[rows.start : rows.stop], "targets": targets[rows.start : rows.stop]}


def train_model(
    mesh_sizes: tuple[int, int], folder: Path, save_at: int | None, steps: int, checkpoint: Path | None = None
) -> tuple[TrainState, TrainState, list[float]]:
    """The state before and after so many steps, in full, and the losses."""
    layout = model_layout(MODEL, parallel.make_mesh(*mesh_sizes))
    tx = model_optimizer(layout)
    params = pytree.tree_map(lambda leaf: leaf.double(), init(MODEL, seed=1))
    before = state = init_state(parallel.shard(params, layout), tx, MODEL)
    if checkpoint is not None:
        template = pytree.tree_map(lambda leaf: leaf.to("meta"), state)
        before = state = parallel.load_sharded(checkpoint, template, identity=IDENTITY)
    step = make_train_step(MODEL, tx, layout=layout, reduce_dtype=torch.float64)
    losses = []
    for _ in range(steps):
        if int(state.step) == save_at:
            parallel.save_sharded(folder, save_at, state, identity=IDENTITY)
        state, metrics = step(state, model_batch(int(state.step)))
        losses.append(float(metrics.loss))
    return whole(before), whole(state), losses


@pytest.mark.parametrize("mesh_sizes", [(2, 1), (1, 2), (1, 1), (4, 1), (2, 2)])
def test_six_steps_of_the_model_are_three_and_three_more(tmp_path: Path, mesh_sizes: tuple[int, int]) -> None:
    # pytorch 91205, 172439; torchtitan 809, 848; torchtitan 1222: the balance is part of the state
    _, undisturbed, losses = parallel.spawn(train_model, 2, (2, 1), tmp_path, 3, 6)[0]
    _, at_three, _ = parallel.spawn(train_model, 2, (2, 1), tmp_path, None, 3)[0]
    moments = [leaf for leaf in pytree.tree_leaves(at_three.opt_state) if leaf.ndim]
    assert all(leaf.any() for leaf in moments) and len(moments) > 20
    assert at_three.balance.any() and not torch.equal(at_three.balance, undisturbed.balance)
    checkpoint, ranks = tmp_path / "000003", math.prod(mesh_sizes)
    for loaded, resumed, later in parallel.spawn(train_model, ranks, mesh_sizes, tmp_path, None, 3, checkpoint):
        assert same(loaded, at_three)
        if mesh_sizes == (2, 1):
            assert same(resumed, undisturbed) and later == losses[3:]
        assert torch.equal(resumed.balance, undisturbed.balance) and int(resumed.step) == 6
        assert later == pytest.approx(losses[3:], rel=1e-5)
        leaves, wanted = pytree.tree_leaves(resumed), pytree.tree_leaves(undisturbed)
        torch.testing.assert_close(leaves, wanted, rtol=1e-4, atol=1e-5)  # float32 in the norm and in Newton-Schulz


# --- what does not fit ---


def refused(message: str, checkpoint: Path, full: Saved, where: Any, identity: Any = IDENTITY) -> None:
    """Every rank raises the same line."""
    for text in parallel.spawn(load_error, world_of(where), checkpoint, full, where, identity):
        assert text is not None and message in text
        assert "\n" not in text


def load_error(checkpoint: Path, full: Saved, where: Any, identity: Any) -> str | None:
    try:
        load_on(checkpoint, full, where, identity)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda full: full.sharded.update(extra=full.sharded["w"]), "lacks the leaf 'sharded.extra'"),
        (lambda full: full.plain.pop("balance"), "has a leaf 'plain.balance' that is not expected"),
        (
            lambda full: full.sharded.update(w=full.sharded["w"].T),
            "leaf 'sharded.w' has shape (5, 4) there, expected (4, 5)",
        ),
        (
            lambda full: full.sharded.update(w=full.sharded["w"].bfloat16()),
            "leaf 'sharded.w' has dtype float32 there, expected bfloat16",
        ),
        (
            lambda full: full.plain.update(step=torch.tensor(3.0)),
            "leaf 'plain.step' has dtype int64 there, expected float32",
        ),
    ],
)
def test_another_tree_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    full, where = example()
    parallel.spawn(save_on, 2, tmp_path, full, where)
    change(full)
    placements = {name: where[1].get(name, ROWS) for name in full.sharded}
    refused(message, tmp_path / "000007", full, (where[0], placements))


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    full, where = example()
    parallel.spawn(save_on, 2, tmp_path, full, where)
    other = {"hidden_size": 8, "layers": (1, 2)}
    refused("'identity.hidden_size' is 6 in the checkpoint, 8 here", tmp_path / "000007", full, where, other)
    refused("'identity' is {'hidden_size'", tmp_path / "000007", full, where, 3)
    refused("is no complete checkpoint", tmp_path / "000008", full, where)


def rewrite(path: Path, value: bytes) -> None:
    path.write_bytes(value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "rank_00001.safetensors: No such file"),
        (lambda path: rewrite(path, path.read_bytes()[:-4]), "bytes, expected"),
        (lambda path: rewrite(path, b""), "has 0 bytes, expected"),
        (lambda path: rewrite(path, bytes(len(path.read_bytes()))), "cannot read"),
        (lambda path: rewrite(path, b"\xff" * len(path.read_bytes())), "cannot read"),
        (lambda path: rewrite(path, path.read_bytes().replace(b'"sharded.w":{', b'"sharded.v":{')), "cannot read"),
        (lambda path: rewrite(path, path.read_bytes().replace(b'"shape":[2,4]', b'"shape":[4,2]')), "has shape (4, 2)"),
        (lambda path: rewrite(path, path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"')), "has dtype int32"),
    ],
)
def test_a_damaged_shard_file_is_refused_on_every_rank(tmp_path: Path, damage: Any, message: str) -> None:
    full, where = example()
    parallel.spawn(save_on, 2, tmp_path, full, where)
    damage(tmp_path / "000007" / "rank_00001.safetensors")
    # Rank 1 alone reads that file.
    refused(message, tmp_path / "000007", full, where)


def manifest_with(**changes: Any) -> Any:
    def change(text: str) -> str:
        value = json.loads(text)
        for key, new in changes.items():
            value[key] = new(value[key]) if callable(new) else new
        return json.dumps(value)

    return change


def part_of_w(part: list[Any]) -> Any:
    """The manifest with the first part of ``w`` replaced."""
    return manifest_with(leaves=lambda leaves: leaves | {"sharded.w": [[5, 4], "float32", [part]]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "truncated or no manifest"),
        (lambda text: "[" * 100_000, "truncated or no manifest"),
        (lambda text: "[]", "is of the format []"),
        (lambda text: "null", "is of the format None"),
        (manifest_with(version=2), "'version': 2"),
        (manifest_with(format="x\ny"), "'x\\ny'"),
        (manifest_with(files=[]), "is damaged"),
        (manifest_with(files=None), "is damaged"),
        (manifest_with(files=lambda files: files | {"../../etc/passwd": 3}), "no name of a file of shards"),
        (manifest_with(files=lambda files: dict.fromkeys(files, -1)), "-1 is no size"),
        (manifest_with(step="3"), "is no size"),
        (manifest_with(leaves=lambda leaves: leaves | {"sharded.w": None}), "is damaged"),
        (part_of_w(["/etc/passwd", [0, 0], [5, 4]]), "that is not listed"),
        (part_of_w(["rank_00000.safetensors", [0, 0], [3, 4]]), "do not cover its shape (5, 4) once"),
        (part_of_w(["rank_00000.safetensors", [4, 0], [5, 4]]), "has a part at (4, 0)"),
        (part_of_w(["rank_00000.safetensors", [0], [20]]), "is damaged"),
        (part_of_w(["rank_00000.safetensors", [0, 0], [5, 4.0]]), "4.0 is no size"),
        (part_of_w(["rank_00000.safetensors", [0, 0], [2**62, 2**62]]), "has a part at"),
        (part_of_w(["rank_00001.safetensors", [0, 0], [5, 4]]), "has shape (2, 4), expected (5, 4)"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    full, where = example()
    parallel.spawn(save_on, 2, tmp_path, full, where)
    path = tmp_path / "000007" / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError) as caught:
        parallel.load_sharded(tmp_path / "000007", abstract(full), identity=IDENTITY)
    assert message in str(caught.value) and "\n" not in str(caught.value)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    full, _ = example()
    checkpoint = parallel.save_sharded(tmp_path / "steps", 7, full, identity=IDENTITY)
    assert {path.suffix for path in checkpoint.iterdir()} == {".json", ".safetensors"}
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    parallel.load_sharded(checkpoint, abstract(full), identity=IDENTITY)
    (checkpoint / "rank_00000.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CheckpointError):
        parallel.load_sharded(checkpoint, abstract(full), identity=IDENTITY)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": None}, "leaf 'a' is None, expected a tensor"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two leaves of the tree have the path 'a.b'"),
    ],
)
def test_a_tree_that_has_no_names_is_refused(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.save_sharded(tmp_path, 0, tree, identity=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {1, 2}}, "extra cannot be saved as JSON"),
        ({"identity": math.nan}, "identity cannot be saved as JSON"),
        ({"keep": 0}, "keep = 0"),
        ({"step": -1}, "step = -1"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments = {"step": 1, "identity": None} | options
    with pytest.raises(ValueError, match=message):
        parallel.save_sharded(tmp_path, tree={"a": torch.ones(1)}, **arguments)
    assert not list(tmp_path.iterdir())


# --- complete, or not there ---


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_steps_are_kept_and_nothing_is_overwritten(tmp_path: Path) -> None:
    assert parallel.latest(tmp_path / "steps") is None
    tree = {"a": torch.ones(2)}
    for step in (5, 1_000_000, 30, 40):
        saved = parallel.save_sharded(tmp_path, step, tree, identity=None)
        assert saved.name == f"{step:06d}"
    (tmp_path / "000050").mkdir()  # not complete
    (tmp_path / "notes").mkdir()
    (tmp_path / ".notes.partial").touch()
    assert parallel.latest(tmp_path) == tmp_path / "1000000"
    with pytest.raises(CheckpointError, match="000040 exists already; nothing is overwritten"):
        parallel.save_sharded(tmp_path, 40, {"a": torch.zeros(2)}, identity=None)
    assert same(parallel.load_sharded(tmp_path / "000040", tree, identity=None), tree)
    parallel.save_sharded(tmp_path, 60, tree, identity=None, keep=2)
    # Steps after this one are not its to remove.
    assert names(tmp_path) == [".notes.partial", "000040", "000050", "000060", "1000000", "notes"]


def save_and_die(folder: Path, full: Saved, where: Any, rank: int, at: int) -> None:
    """Saves; ``rank`` is killed when it brings its ``at``-th thing to the disk."""
    fsync, count = os.fsync, 0

    def counting(descriptor: int) -> None:
        nonlocal count
        count += 1
        if dist.get_rank() == rank and count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = counting  # the process ends, or its world does
    save_on(folder, full, where)


@pytest.mark.parametrize(
    ("rank", "at", "complete"),
    [(1, 1, False), (0, 1, False), (0, 2, False), (0, 3, False), (0, 4, True)],
    ids=["a shard", "the first rank's shard", "the manifest", "before the rename", "after the rename"],
)
def test_a_save_that_is_killed_leaves_all_or_nothing(tmp_path: Path, rank: int, at: int, complete: bool) -> None:
    full, where = example()
    with parallel.Pool() as pool:
        with pytest.raises(parallel.WorkerError, match="SIGKILL"):
            pool.run(save_and_die, 2, tmp_path, full, where, rank, at)
        left = names(tmp_path)
        assert left == (["000007"] if complete else [".000007.partial"])
        assert parallel.latest(tmp_path) == (tmp_path / "000007" if complete else None)
        if not complete:
            pool.run(save_on, 2, tmp_path, full, where)
        assert names(tmp_path) == ["000007"]
        for tree, _, _ in pool.run(load_on, 2, tmp_path / "000007", full, where):
            assert same(tree, full)


def save_error(folder: Path, full: Saved, where: Any, limit: dict[int, int]) -> str | None:
    """What a save says on a disk with room for so many bytes on some ranks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit[dist.get_rank()], before[1]))
    try:
        save_on(folder, full, where)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({1: 100}, "rank 1: cannot write"),
        ({0: 100}, "rank 0: cannot write"),
        ({0: 100, 1: 100}, "(2 ranks failed)"),
        ({0: 400}, "rank 0: cannot write"),  # room for the shards, none for the manifest
    ],
)
def test_a_rank_without_room_fails_the_save_on_all(tmp_path: Path, limit: dict[int, int], message: str) -> None:
    full, where = example()
    errors = parallel.spawn(save_error, 2, tmp_path, full, where, limit)
    assert errors[0] == errors[1] and errors[0] is not None
    assert message in errors[0] and "File too large" in errors[0] and "\n" not in errors[0]
    assert names(tmp_path) == []
    assert parallel.spawn(save_error, 2, tmp_path, full, where, {}) == [None, None]


def test_a_folder_that_cannot_be_made_fails_the_save_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    full, where = example()
    errors = parallel.spawn(save_error, 2, tmp_path / "file" / "steps", full, where, {})
    assert errors[0] == errors[1] and errors[0] is not None
    assert "rank 0: NotADirectoryError" in errors[0] and "\n" not in errors[0]


def save_otherwise(folder: Path, full: Saved, where: Any, change: str) -> str | None:
    tree, extra = on_mesh(full, where), 0
    if dist.get_rank() == 1:
        if change == "extra":
            extra = 1
        elif change == "dtype":
            tree.plain["balance"] = tree.plain["balance"].double()
        else:
            tree.plain["other"] = tree.plain.pop("balance")
    try:
        parallel.save_sharded(folder, 7, tree, identity=IDENTITY, extra=extra)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("change", ["extra", "dtype", "path"])
def test_ranks_that_save_different_things_are_told(tmp_path: Path, change: str) -> None:
    full, where = example()
    for error in parallel.spawn(save_otherwise, 2, tmp_path, full, where, change):
        assert error is not None and "rank 1 saves another" in error
    assert names(tmp_path) == []


# --- while training goes on ---


def held(release: threading.Event) -> Any:
    """Writing waits until it is released."""
    write = _checkpoint_storage.save_file

    def save_file(*args: Any) -> None:
        assert release.wait(30)
        write(*args)

    return write, save_file


def save_and_go_on(folder: Path, full: Saved, where: Any) -> tuple[list[bool], float, Path, Path]:
    tree = on_mesh(full, where)
    before = pytree.tree_map(torch.clone, locals_of(tree))
    release = threading.Event()
    write, waiting = held(release)
    _checkpoint_storage.save_file = waiting
    try:
        pending = parallel.save_sharded_async(folder, 7, tree, identity=IDENTITY)
        running = [pending._thread.is_alive()]
        for leaf in pytree.tree_leaves(locals_of(tree)):
            leaf.fill_(-1)
        total = torch.ones(())
        for _ in range(20):
            dist.all_reduce(total)
        running.append(pending._thread.is_alive() and not (folder / "000007").exists())
        release.set()
        first = pending.wait()
    finally:
        _checkpoint_storage.save_file = write
    # One at a time: the next waits for this one.
    for now, then in zip(pytree.tree_leaves(locals_of(tree)), pytree.tree_leaves(before), strict=True):
        now.copy_(then)
    earlier = parallel.save_sharded_async(folder, 8, tree, identity=IDENTITY)
    second = parallel.save_sharded(folder, 9, tree, identity=IDENTITY)
    running.append(earlier.told and not earlier._thread.is_alive())
    return running, float(total), first, second


def test_an_asynchronous_save_holds_the_values_of_its_step(tmp_path: Path) -> None:
    # torchtitan 930
    full, where = example()
    for running, total, first, second in parallel.spawn(save_and_go_on, 2, tmp_path, full, where):
        assert running == [True, True, True]
        assert total == 2.0**20
        assert (first, second) == (tmp_path / "000007", tmp_path / "000009")
    assert names(tmp_path) == ["000007", "000008", "000009"]
    for step in names(tmp_path):
        assert same(parallel.load_sharded(tmp_path / step, abstract(full), identity=IDENTITY), full)


def fail_later(folder: Path, full: Saved, where: Any) -> list[str]:
    tree = on_mesh(full, where)
    parallel.save_sharded(folder, 7, tree, identity=IDENTITY)
    errors = []
    pending = parallel.save_sharded_async(folder, 7, tree, identity=IDENTITY)
    for _ in range(2):
        try:
            pending.wait()
        except CheckpointError as error:
            errors.append(str(error))
    # One that nobody waits for tells the next save.
    parallel.save_sharded_async(folder, 7, tree, identity=IDENTITY)
    try:
        parallel.save_sharded(folder, 8, tree, identity=IDENTITY)
    except CheckpointError as error:
        errors.append(str(error))
    parallel.save_sharded(folder, 9, tree, identity=IDENTITY)
    return errors


def test_an_error_of_an_asynchronous_save_is_not_lost(tmp_path: Path) -> None:
    full, where = example()
    for errors in parallel.spawn(fail_later, 2, tmp_path, full, where):
        assert len(errors) == 3
        assert all("000007 exists already" in error for error in errors)
    assert names(tmp_path) == ["000007", "000009"]
