"""Hypothesis strategies for what a sharded function must not depend on."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from ._tree import Tree


def meshes(max_ranks: int = 4) -> st.SearchStrategy[dict[str, int]]:
    """Sizes of ``fsdp`` and ``ep``, of at most ``max_ranks`` ranks together; shrinks towards one rank."""
    sizes = [
        {"fsdp": fsdp, "ep": ep}
        for fsdp in range(1, max_ranks + 1)
        for ep in range(1, max_ranks + 1)
        if fsdp * ep <= max_ranks
    ]
    return st.sampled_from(sorted(sizes, key=lambda mesh: math.prod(mesh.values())))


def uneven_shapes(dims: int, max_size: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of ``dims`` dimensions of 1 to ``max_size``: sizes that ranks do not divide, fewer rows than ranks."""
    return st.tuples(*[st.integers(1, max_size)] * dims)


def any_placements(tree: Tree, axes: int = 2) -> st.SearchStrategy[Tree]:
    """For each leaf of ``tree``, ``Replicate`` or any ``Shard`` on each of ``axes`` mesh axes."""
    leaves, spec = pytree.tree_flatten(tree)

    def one(dims: int) -> st.SearchStrategy[Replicate | Shard]:
        return st.sampled_from([Replicate(), *map(Shard, range(dims))])

    placements = st.tuples(*[st.tuples(*[one(len(leaf.shape))] * axes) for leaf in leaves])
    return placements.map(lambda chosen: pytree.tree_unflatten(list(chosen), spec))
