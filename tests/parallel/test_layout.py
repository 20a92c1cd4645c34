"""Sharding and gathering: exact for any size, with gradients that lie as their parameters do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad
from torch.utils import _pytree as pytree

from functional_moe import parallel

EXAMPLES = settings(max_examples=12, deadline=None)
MESHES = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])


@st.composite
def cases(draw):
    """A mesh, and leaves of any shape with placements."""
    fsdp, ep = draw(MESHES)
    tree, placed = {}, {}
    for name in "ab":
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        tree[name] = torch.randn(shape, dtype=torch.float64)
        any_dim = st.none() | st.integers(0, len(shape) - 1)
        placed[name] = tuple(Replicate() if dim is None else Shard(dim) for dim in (draw(any_dim), draw(any_dim)))
    return (fsdp, ep), tree, placed


def round_trip(mesh_sizes, tree, placed):
    mesh = parallel.make_mesh(*mesh_sizes)
    layout = parallel.make_layout(mesh, placed, tree)
    before = pytree.tree_map(torch.clone, tree)
    sharded = parallel.shard(tree, layout)
    again = parallel.from_local(parallel.local(sharded), layout)
    kinds = all(isinstance(leaf, DTensor) and leaf.shape == tree[name].shape for name, leaf in sharded.items())
    assert parallel.layout_of(sharded) == layout
    coefficients = {name: torch.cos(leaf) for name, leaf in tree.items()}
    rank = torch.distributed.get_rank()

    def loss(shards):
        full = parallel.gather(shards, layout)
        return sum((rank + 1) * (full[name] ** 2 * coefficients[name]).sum() for name in full)

    gradient = parallel.from_local(grad(loss)(parallel.local(sharded)), layout)
    return kinds, before, tree, parallel.unshard(again), parallel.unshard(gradient), parallel.local(sharded)


@EXAMPLES
@given(case=cases())
def test_a_tree_comes_back_bit_for_bit_and_gradients_lie_as_it_does(case):
    (fsdp, ep), tree, placed = case
    world = fsdp * ep
    factor = world * (world + 1) / 2  # the ranks' losses add
    wanted = {name: factor * 2 * leaf * torch.cos(leaf) for name, leaf in tree.items()}
    results = parallel.spawn(round_trip, world, (fsdp, ep), tree, placed)
    for rank, (kinds, before, after, full, gradient, shards) in enumerate(results):
        assert kinds
        assert all(torch.equal(before[name], after[name]) for name in tree)
        assert all(torch.equal(full[name], tree[name]) for name in tree)
        torch.testing.assert_close(gradient, wanted)
        sizes, coordinate = {"fsdp": fsdp, "ep": ep}, divmod(rank, ep)
        for name in tree:
            slices = parallel.local_slices(tree[name].shape, placed[name], sizes, coordinate)
            assert torch.equal(shards[name], tree[name][slices])


@pytest.mark.parametrize(("rows", "mesh_sizes", "held"), [(5, (2, 2), [2, 1, 1, 1]), (1, (2, 1), [1, 0])])
def test_rows_that_ranks_do_not_divide(rows, mesh_sizes, held):
    # pytorch 168134, 144109: 5 rows over 2 x 2, 1 row over 2.
    tree = {"w": torch.arange(rows * 3.0, dtype=torch.float64).view(rows, 3)}
    results = parallel.spawn(round_trip, len(held), mesh_sizes, tree, {"w": (Shard(0), Shard(0))})
    assert [len(result[-1]["w"]) for result in results] == held
    assert all(torch.equal(result[3]["w"], tree["w"]) for result in results)


def refusals() -> list[str]:
    mesh = parallel.make_mesh(2, 1)
    tree = {"a": {"w": torch.ones(3, 2)}}
    rows = (Shard(0), Replicate())
    layout = parallel.make_layout(mesh, {"a": {"w": rows}}, tree)
    messages = []
    for call in (
        lambda: parallel.make_layout(mesh, {"a": {}}, tree),
        lambda: parallel.make_layout(mesh, {"a": {"w": rows, "v": rows}}, tree),
        lambda: parallel.make_layout(mesh, {"a": {"w": (Shard(2), Replicate())}}, tree),
        lambda: parallel.make_layout(mesh, {"a": {"w": (Shard(0),)}}, tree),
        lambda: parallel.shard({"a": {"w": torch.ones(2, 2)}}, layout),
        lambda: parallel.from_local(tree, layout),
        lambda: parallel.gather(tree, layout),
        lambda: parallel.local(tree),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_trees_and_layouts_that_differ_are_refused():
    assert parallel.spawn(refusals, 2)[0] == [
        "the placements lack the leaf 'a.w' that the tree have",
        "the placements have a leaf 'a.v' that the tree lack",
        "leaf 'a.w' of shape (3, 2) cannot have the placement S(2)",
        "leaf 'a.w' has the placements (Shard(dim=0),); the mesh has 2 axes ('fsdp', 'ep')",
        "leaf 'a.w' has shape (2, 2), the layout says (3, 2)",
        "leaf 'a.w' has a shard of shape (3, 2); of (3, 2) with (Shard(dim=0), Replicate()), this rank "
        "{'fsdp': 0, 'ep': 0} holds (2, 2)",
        "leaf 'a.w' with (Shard(dim=0), Replicate()): all_gather: x has 3 rows along dim 0 on rank 0 of the group; "
        "sizes = (2, 1) mean 2",
        "leaf 'a.w' is a Tensor, expected a DTensor",
    ]


def norms(tree, mesh_sizes, placed):
    layout = parallel.make_layout(parallel.make_mesh(*mesh_sizes), placed, tree)
    sharded = parallel.shard(tree, layout)
    return parallel.global_norm(sharded, layout), parallel.global_norm(parallel.local(sharded), layout)


@EXAMPLES
@given(case=cases())
def test_the_global_norm_is_that_of_the_full_tree(case):
    mesh_sizes, tree, placed = case
    wanted = torch.cat([leaf.flatten() for leaf in tree.values()]).norm().to(torch.float32)
    for found in parallel.spawn(norms, mesh_sizes[0] * mesh_sizes[1], tree, mesh_sizes, placed):
        torch.testing.assert_close(list(found), [wanted, wanted], rtol=1e-6, atol=0)


def test_norms_of_expert_and_replicated_leaves():
    # DeepSpeed 8475, Megatron PR 5916: experts of norm sqrt(20) and sqrt(100) on two ranks.
    experts = {"experts": torch.tensor([[2.0, 4.0], [6.0, 8.0]])}
    for norm, _ in parallel.spawn(norms, 2, experts, (1, 2), {"experts": (Replicate(), Shard(0))}):
        torch.testing.assert_close(norm, torch.tensor(120.0).sqrt())
    # Four replicated gradients of 3, and one expert gradient of 4 on each of four ranks.
    mixed = {"dense": torch.full((4,), 3.0), "experts": torch.full((4, 1), 4.0)}
    placed = {"dense": (Replicate(), Replicate()), "experts": (Shard(0), Shard(0))}
    for mesh_sizes in ((2, 2), (1, 4), (4, 1)):
        for norm, _ in parallel.spawn(norms, 4, mixed, mesh_sizes, placed):
            torch.testing.assert_close(norm, torch.tensor(10.0))
