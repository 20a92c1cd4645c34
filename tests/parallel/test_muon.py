"""Muon over ranks equals Muon on one process: for any mesh, placements, blocks and scale, with the bytes it says."""

import functools
import itertools
import math
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import optim, parallel
from functional_moe.config import MoEConfig
from functional_moe.optim import MatrixAxes
from functional_moe.parallel._mesh import mesh_of
from functional_moe.parallel._muon_plan import newton_schulz_flops
from functional_moe.parameters import declare, init, labels, matrix_axes

IN_OUT = MatrixAxes(out=-1, in_=-2)

# Each leaf with what is special about it; sizes that no mesh divides.
LEAVES = {
    "matrix": ((7, 10), IN_OUT),
    "few_rows": ((3, 11), MatrixAxes(out=0, in_=1)),
    "fused": ((6, 15), MatrixAxes(out=-1, in_=-2, out_blocks=(9, 3, 3))),
    "heads_out": ((5, 12), MatrixAxes(out=-1, in_=-2, out_blocks=4)),
    "heads_in": ((12, 5), MatrixAxes(out=-1, in_=-2, in_blocks=3)),
    "stack": ((5, 4, 6), IN_OUT),
    "fused_stack": ((3, 4, 10), MatrixAxes(out=-1, in_=-2, out_blocks=2)),
    "stacks_behind": ((4, 3, 2, 2), MatrixAxes(out=0, in_=1)),
}


def leaf_of(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tree_of(names):
    return {name: leaf_of(LEAVES[name][0], seed) for seed, name in enumerate(names)}


def axes_of(names):
    return {name: LEAVES[name][1] for name in names}


MESHES = (
    {"fsdp": 1, "ep": 1},
    {"fsdp": 2, "ep": 1},
    {"fsdp": 1, "ep": 3},
    {"fsdp": 2, "ep": 2},
    {"replicate": 2, "fsdp": 2, "ep": 1},
    {"fsdp": 5, "ep": 1},
    {"fsdp": 3, "ep": 2},
    {"replicate": 3, "fsdp": 1, "ep": 2},
    {"fsdp": 7, "ep": 1},
    {"replicate": 2, "fsdp": 2, "ep": 2},
)


@st.composite
def cases(draw, axes):
    """Some leaves with any placements on a mesh of so many axes, and how to spread them."""
    names = draw(st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=5, unique=True))
    placed = {}
    for name in names:
        any_dim = st.none() | st.integers(0, len(LEAVES[name][0]) - 1)
        placed[name] = tuple(Replicate() if dim is None else Shard(dim) for dim in (draw(any_dim) for _ in range(axes)))
    options = {
        "bucket_bytes": draw(st.sampled_from([1, 200, 400, 1 << 20])),
        "flops_per_byte": draw(st.sampled_from([0.0, 50.0, math.inf])),
    }
    return names, placed, options, draw(st.sampled_from(["shape", "match_rms", "spectral"]))


def trained(tree, axes, scale, orthogonalize=optim.orthogonalize_here, cut=lambda tree: tree):
    """Parameters after two steps of Muon with decay. Its update is the momentum itself, which must stay as it is."""
    tx = optim.muon(
        0.1, axes, weight_decay=0.1, scale=scale, momentum="sum", nesterov=False, orthogonalize=orthogonalize
    )
    params = cut(tree)
    state = tx.init(params)
    for step in range(2):
        grads = cut({name: leaf_of(leaf.shape, 100 * step + len(name)) for name, leaf in tree.items()})
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params


def trained_on_mesh(sizes, names, placed, options, scale):
    tree = tree_of(names)
    layout = parallel.make_layout(mesh_of(sizes), placed, tree)
    orthogonalize = parallel.owner_orthogonalize(layout, **options)
    params = trained(
        tree, axes_of(names), scale, orthogonalize, lambda tree: parallel.local(parallel.shard(tree, layout))
    )
    return parallel.unshard(parallel.from_local(params, layout)), params


def assert_close(found, wanted):
    for name in wanted:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_sharded_equals_unsharded(sizes, data):
    # dion 74, 76: counts and rows that ranks do not divide; also ranks without rows, and more ranks than matrices.
    case = data.draw(cases(len(sizes)))
    names, _, _, scale = case
    wanted = trained(tree_of(names), axes_of(names), scale)
    for found, _ in parallel.spawn(trained_on_mesh, math.prod(sizes.values()), sizes, *case):
        assert_close(found, wanted)


def hook(layout, updates, axes, whole, **options):
    return parallel.owner_orthogonalize(layout, **options)(updates, axes, whole)


def whole_by(scale="shape"):
    return functools.partial(optim.orthogonalize_whole, scale=scale)


def direction(sizes, tree, placed, axes, by_shard=True):
    """The orthogonalised tree in full, and that of the shards taken for matrices."""
    layout = parallel.make_layout(mesh_of(sizes), placed, tree)
    shards = parallel.local(parallel.shard(tree, layout))
    right = hook(layout, shards, axes, whole_by())
    wrong = optim.orthogonalize_here(shards, axes, whole_by()) if by_shard else shards
    return tuple(parallel.unshard(parallel.from_local(found, layout)) for found in (right, wrong))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_is_not_taken_for_the_matrix(dim):
    # DeepSpeed 8437, KellerJordan/Muon 45.
    tree = {"w": leaf_of((256, 256), 0)}
    wanted = whole_by()(tree, {"w": IN_OUT})["w"]
    sizes, placed = {"fsdp": 2, "ep": 1}, {"w": (Shard(dim), Replicate())}
    for right, wrong in parallel.spawn(direction, 2, sizes, tree, placed, {"w": IN_OUT}):
        assert (right["w"] - wanted).norm() / wanted.norm() < 1e-5
        # The bug, up to the scale of the shards' shape.
        per_shard = wrong["w"] / (math.sqrt(2) if dim == 0 else 1)
        assert 0.5 < (per_shard - wanted).norm() / wanted.norm() < 0.6


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_matrix_of_a_stack_is_by_itself(dim):
    # dion 119, torchtitan PR 1584.
    stack = leaf_of((4, 32, 16), 0)
    stack[1] *= 1000
    stack[2] = 0
    wanted = [whole_by()([expert], [IN_OUT])[0] for expert in stack]
    sizes, placed = {"fsdp": 3, "ep": 1}, {"w": (Shard(dim), Replicate())}
    for right, _ in parallel.spawn(direction, 3, sizes, {"w": stack}, placed, {"w": IN_OUT}):
        assert torch.equal(right["w"][2], torch.zeros(32, 16))
        for expert in (0, 1, 3):
            assert (right["w"][expert] - wanted[expert]).norm() / wanted[expert].norm() < 1e-5


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_blocks_on_shards_keep_their_own_matrices_and_scales(dim, axis):
    # xtuner PR 2030, Megatron PR 6326: concat(Q, 1e-3 K, V), cut through its blocks or across them.
    blocks = [leaf_of((16, width), width) * factor for width, factor in ((40, 1.0), (8, 1e-3), (9, 1.0))]
    wanted = [whole_by()([block], [IN_OUT])[0] for block in blocks]
    axes = MatrixAxes(out=axis, in_=-3 - axis, out_blocks=(40, 8, 9))
    leaf = torch.cat(blocks, 1) if axis == -1 else torch.cat(blocks, 1).T.contiguous()
    sizes, placed = {"fsdp": 3, "ep": 1}, {"w": (Shard(dim), Replicate())}
    for right, _ in parallel.spawn(direction, 3, sizes, {"w": leaf}, placed, {"w": axes}, False):
        found = right["w"] if axis == -1 else right["w"].T
        for block, expected in zip(found.split([40, 8, 9], 1), wanted, strict=True):
            assert (block - expected).norm() / expected.norm() < 1e-5


def first_step(sizes, factor):
    """The first update of both groups for a gradient of so many times its size, and the rates over eight steps."""
    names = ["matrix", "fused", "stack"]
    params = {**tree_of(names), "bias": leaf_of((5,), 9)}
    placed = {name: (Shard(0), Replicate()) for name in params}
    layout = parallel.make_layout(mesh_of(sizes), placed, params)
    cut = parallel.local(parallel.shard(params, layout))

    def schedule(peak):
        return optim.warmup_cosine_decay_schedule(peak / 10, peak, 2, 9)

    by_label = {
        "muon": optim.muon(
            schedule(0.2), {**axes_of(names), "bias": IN_OUT}, orthogonalize=parallel.owner_orthogonalize(layout)
        ),
        "adamw": optim.adamw(schedule(0.01), eps=1e-12),
    }
    tx = optim.chain(
        optim.clip_by_global_norm(1.0, functools.partial(parallel.global_norm, layout=layout)),
        optim.partition(by_label, {**dict.fromkeys(names, "muon"), "bias": "adamw"}),
    )
    grads = pytree.tree_map(lambda leaf: factor * leaf, cut)
    state, updates, rates = tx.init(cut), [], []
    for _ in range(8):
        update, state = tx.update(grads, state, cut)
        updates.append(update)
        rates.append({name: float(rate) for name, rate in optim.learning_rates(state).items()})
    return parallel.unshard(parallel.from_local(updates[0], layout)), rates


def test_the_first_step_on_shards_does_not_see_the_gradients_scale():
    # DeepSpeed 7713: clipping came after Muon, and a scheduler overwrote one group's rate.
    sizes = {"fsdp": 3, "ep": 1}
    results = {factor: parallel.spawn(first_step, 3, sizes, factor) for factor in (0.01, 1.0, 10.0)}
    for factor, found in results.items():
        for (update, rates), (wanted, _) in zip(found, results[1.0], strict=True):
            assert_close(update, wanted)
            assert all(rate["muon"] == pytest.approx(20 * rate["adamw"], rel=1e-6) for rate in rates), factor
            assert len({rate["muon"] for rate in rates}) > 5


CONFIG = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    intermediate_size=9,
    first_k_dense_replace=1,
    num_shared_experts=1,
    use_qk_norm=True,
)


def model_steps(sizes):
    """Two steps of Muon and AdamW on the model's parameters; on one process without sizes."""
    params, tree, layout = init(CONFIG, seed=0), labels(CONFIG), None
    orthogonalize = optim.orthogonalize_here
    if sizes:
        mesh = mesh_of(sizes)
        layout = parallel.make_layout(mesh, parallel.placements(declare(CONFIG), mesh), params)
        orthogonalize = parallel.owner_orthogonalize(layout, bucket_bytes=1024)

    def cut(tree):
        return parallel.local(parallel.shard(tree, layout)) if layout else tree

    by_label = {label: optim.adamw(0.01) for label in set(pytree.tree_leaves(tree))}
    by_label["matrix"] = optim.muon(0.01, matrix_axes(CONFIG), orthogonalize=orthogonalize)
    tx = optim.partition(by_label, tree)
    shards = cut(params)
    state = tx.init(shards)
    for seed in (1, 2):
        grads = cut(pytree.tree_map(functools.partial(gradient_like, seed), params))
        updates, state = tx.update(grads, state, shards)
        shards = optim.apply_updates(shards, updates)
    return parallel.unshard(parallel.from_local(shards, layout)) if layout else shards


def gradient_like(seed, leaf):
    return leaf_of(leaf.shape, 1000 * leaf.numel() + seed)


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2, "ep": 1}, {"fsdp": 1, "ep": 2}, {"fsdp": 3, "ep": 2}, {"replicate": 2, "fsdp": 2, "ep": 1}],
    ids=str,
)
def test_inside_partition_over_the_whole_model(sizes):
    wanted = pytree.tree_leaves(model_steps(None))
    for found in parallel.spawn(model_steps, math.prod(sizes.values()), sizes):
        for leaf, expected in zip(pytree.tree_leaves(found), wanted, strict=True):
            assert (leaf - expected).norm() <= 1e-5 * expected.norm()


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("c10d::"):
            assert func._schema.name == "c10d::alltoall_base_"
            _, sent, _, _, sizes, *_ = args
            assert sum(sizes) == sent.numel()
            self.bytes += (sent.numel() - sizes[dist.get_rank()]) * sent.element_size()
        return func(*args, **(kwargs or {}))


def sent_by(sizes, shapes, placement, axes, options):
    """What a rank sends, in how many all-to-alls, and which leaves and how much of them it orthogonalises."""
    tree = {str(i): torch.full(shape, 1.0 + i) for i, shape in enumerate(shapes)}
    layout = parallel.make_layout(mesh_of(sizes), dict.fromkeys(tree, placement), tree)
    shards = parallel.local(parallel.shard(tree, layout))
    orthogonalize = parallel.owner_orthogonalize(layout, **options)
    owned = []

    def whole(updates, axes):
        owned.extend(int(leaf.flatten()[0]) - 1 for leaf in updates)
        return [leaf.clone() for leaf in updates]

    with CommDebugMode() as comm, Sent() as sent:
        orthogonalize(shards, dict.fromkeys(tree, axes), whole)
    return sent.bytes, comm.get_total_counts(), sorted(owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "ep": 1}, {"fsdp": 2, "ep": 2}, {"replicate": 2, "fsdp": 2, "ep": 1}], ids=str
)
def test_the_bytes_of_even_shards_are_those_of_the_formula(sizes, dtype):
    n, copies = math.prod(sizes.values()), sizes.get("replicate", 1)
    shapes = [(8, 12)] * (2 * n)
    placement = tuple(Replicate() if axis == "replicate" else Shard(0) for axis in sizes)
    per_bucket = 8 * 12 * dtype.itemsize  # so that there are two
    options = {"dtype": dtype, "bucket_bytes": per_bucket}
    total = 2 * n * per_bucket
    formula = total / n * ((1 - copies / n) + copies * (n - 1) / n)
    if copies == 1:
        assert formula == 2 * total * (n - 1) / n**2
    owners = []
    for sent, calls, owned in parallel.spawn(sent_by, n, sizes, shapes, placement, IN_OUT, options):
        assert sent == formula
        assert calls == 2 * len(owned) == 4 * copies if copies == 1 else calls % 2 == 0
        owners += owned
    assert sorted(owners) == list(range(2 * n))  # each matrix once


@settings(max_examples=15, deadline=None)
@given(
    world=st.integers(2, 5),
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    dim=st.integers(0, 1),
)
def test_the_bytes_of_uneven_shards_are_those_of_the_formula(world, shapes, dim):
    sizes, placement = {"fsdp": world, "ep": 1}, (Shard(dim), Replicate())
    results = parallel.spawn(sent_by, world, sizes, shapes, placement, IN_OUT, {"bucket_bytes": 40})
    for rank, (sent, calls, owned) in enumerate(results):
        held = [
            math.prod(part.stop - part.start for part in parallel.local_slices(shape, placement, sizes, (rank, 0)))
            for shape in shapes
        ]
        # A matrix that one rank holds whole is not sent.
        cut = [shape[dim] > 1 for shape in shapes]
        way_in = sum(held[i] for i in range(len(shapes)) if cut[i] and i not in owned)
        way_back = sum(math.prod(shapes[i]) - held[i] for i in owned if cut[i])
        assert sent == 4 * (way_in + way_back)
        assert calls == results[0][1] and (calls > 0) == any(cut)
    assert sorted(itertools.chain.from_iterable(owned for _, _, owned in results)) == list(range(len(shapes)))


def test_what_is_whole_on_a_rank_is_not_sent():
    sizes, split = {"fsdp": 2, "ep": 2}, (Shard(0), Shard(0))
    heads = MatrixAxes(out=-2, in_=-1, out_blocks=8)
    for shape, axes in (((8, 3, 5), IN_OUT), ((5, 3, 5), IN_OUT), ((16, 6), heads)):
        for sent, calls, _ in parallel.spawn(sent_by, 4, sizes, [shape], split, axes, {}):
            assert sent == calls == 0
    # A rank's share of 12 heads of 8 rows over 8 ranks is a head and a half: every third one is cut, and it alone sent.
    heads = MatrixAxes(out=-2, in_=-1, out_blocks=12)
    results = parallel.spawn(sent_by, 8, {"fsdp": 8, "ep": 1}, [(96, 4)], (Shard(0), Replicate()), heads, {})
    assert sum(sent for sent, _, _ in results) == 4 * 4 * 2 * (4 * 8 // 2)


def test_replicated_matrices_are_computed_once_where_sending_them_is_cheaper():
    sizes, everywhere, size = {"fsdp": 2, "ep": 2}, (Replicate(), Replicate()), 8 * 12 * 4
    border = newton_schulz_flops(8, 12) / size
    for factor, sent_wanted, owned_wanted in ((0.99, 3 * size, 1), (1.01, 0, 4)):
        options = {"flops_per_byte": border * factor}
        results = parallel.spawn(sent_by, 4, sizes, [(8, 12)] * 4, everywhere, IN_OUT, options)
        assert [(sent, len(owned)) for sent, _, owned in results] == [(sent_wanted, owned_wanted)] * 4


def rounded(updates, axes, whole):
    """What goes through bfloat16 on both ways, on one process."""
    short = pytree.tree_map(lambda leaf: leaf.to(torch.bfloat16).float(), updates)
    return pytree.tree_map(lambda leaf: leaf.to(torch.bfloat16).float(), whole(short, axes))


def test_a_short_dtype_rounds_alike_everywhere():
    sizes, names = {"replicate": 2, "fsdp": 2, "ep": 1}, ["matrix", "heads_in", "stack"]
    placed = {name: (Replicate(), Shard(1), Replicate()) for name in names}
    results = parallel.spawn(trained_on_mesh, 4, sizes, names, placed, {"dtype": torch.bfloat16}, "shape")
    exact = trained(tree_of(names), axes_of(names), "shape")
    wanted = trained(tree_of(names), axes_of(names), "shape", rounded)
    for full, _ in results:
        for name in names:
            assert (full[name] - exact[name]).norm() > 1e-5 * exact[name].norm()
            assert (full[name] - wanted[name]).norm() < 1e-4 * wanted[name].norm()
            assert torch.equal(full[name], results[0][0][name])
    # Copies stay equal, bit for bit: the owner's own, too.
    for rank in (0, 1):
        for name in names:
            assert torch.equal(results[rank][1][name], results[rank + 2][1][name])


def events():
    """The order of what one rank starts and computes; one stack is whole on it, three matrices are cut."""
    tree = {"stack": torch.ones(4, 2, 2), **{str(i): torch.ones(6, 6) for i in range(6)}}
    placed = {name: (Shard(0), Replicate()) for name in tree}
    layout = parallel.make_layout(mesh_of({"fsdp": 2, "ep": 1}), placed, tree)
    shards = parallel.local(parallel.shard(tree, layout))
    orthogonalize = parallel.owner_orthogonalize(layout, bucket_bytes=6 * 6 * 4)
    seen, start = [], dist.all_to_all_single

    def recorded(*args, async_op, **kwargs):
        seen.append("start")
        assert async_op
        return start(*args, async_op=async_op, **kwargs)

    def whole(updates, axes):
        seen.append(tuple(updates[0].shape))
        return [leaf.clone() for leaf in updates]

    dist.all_to_all_single = recorded
    try:
        orthogonalize(shards, dict.fromkeys(tree, IN_OUT), whole)
    finally:
        dist.all_to_all_single = start
    return seen


def test_exchanges_are_on_their_way_while_matrices_are_computed():
    matrix = (6, 6)
    in_0, in_1, in_2, back_0, back_1, back_2 = ["start"] * 6
    for seen in parallel.spawn(events, 2):
        assert seen == [in_0, (2, 2, 2), in_1, matrix, back_0, in_2, matrix, back_1, matrix, back_2]


class Held(TorchDispatchMode):
    """The most bytes that live tensors made inside hold at a time."""

    def __init__(self):
        super().__init__()
        self.uses, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._add(tensor)
        return out

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self.uses[key] = self.uses.get(key, 0) + 1
        if self.uses[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key, size):
        self.uses[key] -= 1
        if not self.uses[key]:
            self.now -= size


def peak_bytes(bucket_bytes):
    tree = {str(i): torch.ones(64, 64) for i in range(32)}
    layout = parallel.make_layout(mesh_of({"fsdp": 4, "ep": 1}), dict.fromkeys(tree, (Shard(0), Replicate())), tree)
    shards = parallel.local(parallel.shard(tree, layout))
    orthogonalize = parallel.owner_orthogonalize(layout, bucket_bytes=bucket_bytes)
    axes = dict.fromkeys(tree, IN_OUT)
    peaks = []
    # gloo's threads let go of a message a moment after it is done, which can only add: the least of some counts.
    for _ in range(6):
        with Held() as held:
            out = orthogonalize(shards, axes, lambda updates, axes: [x.clone() for x in updates])
        peaks.append(held.peak - sum(leaf.nbytes for leaf in out.values()))
    return min(peaks)


def test_no_rank_holds_more_than_its_matrices_of_a_bucket_and_a_bucket_each_way():
    matrix = 64 * 64 * 4
    for count in (1, 2, 8):
        # Matrices before and after, and what is sent and received of one bucket each way.
        for peak in parallel.spawn(peak_bytes, 4, count * matrix):
            assert 2 * count * matrix <= peak <= 6 * count * matrix


def refusals():
    tree = {"a": {"w": torch.ones(3, 4)}}
    layout = parallel.make_layout(mesh_of({"fsdp": 2, "ep": 1}), {"a": {"w": (Shard(0), Replicate())}}, tree)
    shards = parallel.local(parallel.shard(tree, layout))
    other = {"a": {"v": torch.ones(2, 4)}}
    needs_gradient = {"a": {"w": shards["a"]["w"].clone().requires_grad_()}}
    messages = []
    for call in (
        lambda: hook(layout, other, {"a": {"v": IN_OUT}}, whole_by()),
        lambda: hook(layout, shards, {"a": {}}, whole_by()),
        lambda: hook(layout, tree, {"a": {"w": IN_OUT}}, whole_by()),
        lambda: hook(layout, shards, {"a": {"w": MatrixAxes(out=2, in_=0)}}, whole_by()),
        lambda: hook(layout, shards, {"a": {"w": MatrixAxes(out=1, in_=0, in_blocks=2)}}, whole_by()),
        lambda: hook(layout, needs_gradient, {"a": {"w": IN_OUT}}, whole_by()),
        lambda: parallel.owner_orthogonalize(layout, dtype=torch.int64),
        lambda: parallel.owner_orthogonalize(layout, bucket_bytes=0),
        lambda: parallel.owner_orthogonalize(layout, flops_per_byte=-1.0),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_bad_input_is_refused():
    assert parallel.spawn(refusals, 2)[0] == [
        "the updates have a leaf 'a.v' that the layout lacks",
        "the axes lack the leaf 'a.w' that the updates have",
        "leaf 'a.w' has a shard of shape (3, 4); of (3, 4) with (Shard(dim=0), Replicate()), this rank holds (2, 4)",
        "leaf 'a.w' of shape (3, 4) has no axis out=2",
        "leaf 'a.w': in_blocks=2 does not divide the axis of length 3",
        "leaf 'a.w' requires a gradient, and orthogonalising over ranks has none",
        "dtype must be a floating-point dtype, got torch.int64",
        "bucket_bytes must be at least 1, got 0",
        "flops_per_byte must be at least 0, got -1.0",
    ]


def dying():
    tree = {"w": torch.ones(4, 4)}
    layout = parallel.make_layout(mesh_of({"fsdp": 2, "ep": 1}), {"w": (Shard(0), Replicate())}, tree)
    orthogonalize = parallel.owner_orthogonalize(layout)
    if dist.get_rank() == 1:
        os._exit(3)
    orthogonalize(parallel.local(parallel.shard(tree, layout)), {"w": IN_OUT}, whole_by())


def test_a_dead_peer_is_an_error_that_names_the_exchange():
    with pytest.raises(parallel.WorkerError, match=r"all_to_all of matrices of float32 \[\d+\] on rank 0, over ranks"):
        parallel.spawn(dying, 2)
