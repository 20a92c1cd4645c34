"""The global norm of a sharded tree."""

from __future__ import annotations

import torch
from torch import Tensor

from ._collectives import reduce_replicated
from ._dtensor import is_dtensor, is_replicate
from ._layout import Layout
from ._mesh import axis_group
from ._placements import Placements
from ._tree import Tree, zip_leaves


def global_norm(tree: Tree, layout: Layout) -> Tensor:
    """The 2-norm of all elements of all leaves together, each element counted once. For ``optim.clip_by_global_norm``::

        clip_by_global_norm(1.0, functools.partial(global_norm, layout=layout))

    A replicated leaf is counted on the first of the ranks that hold it, a sharded one on every rank: so mixed
    placements add up, in one message of one number.

    Args:
      tree: local shards, or DTensors.
      layout: of the tree.

    Returns:
      float32 [], the same on every rank.

    Raises:
      ValueError: when tree and layout differ; the leaf is named.
    """
    coordinate = tuple(layout.mesh.get_coordinate() or ())
    square = torch.zeros((), device=layout.mesh.device_type)
    for _, (leaf, placements) in zip_leaves(tree, "the tree", ("the placements", layout.placements)):
        if _is_mine(placements, coordinate):
            part = leaf._local_tensor if is_dtensor(leaf) else leaf
            norm = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
            square = square + norm.to(torch.float32).square()
    axes = layout.mesh.mesh_dim_names or ()
    return reduce_replicated(square, axis_group(layout.mesh, *axes)).sqrt()


def _is_mine(placements: Placements, coordinate: tuple[int, ...]) -> bool:
    held = zip(placements, coordinate, strict=True)
    return all(index == 0 for placement, index in held if is_replicate(placement))
