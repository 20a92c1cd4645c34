"""How a model is spread over a mesh: where its parameters live, and how its layers travel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .chain import by_layer
from .config import MoEConfig
from .parallel import (
    ExpertParallel,
    Layout,
    Rules,
    ShardedLayers,
    expert_axes,
    expert_parallel,
    make_layout,
    placements,
)
from .parameters import Leaf, declare


class Sharding(NamedTuple):
    """What the train step needs of a layout."""

    layers: ShardedLayers
    expert_parallel: ExpertParallel | None


def model_layout(config: MoEConfig, mesh: DeviceMesh, rules: Rules | None = None) -> Layout:
    """Where the parameters of ``config`` live: its declaration, placed by ``rules`` (``parallel.default_rules``).

    Raises:
      ValueError: see ``parallel.placements``.
    """
    declared = declare(config)
    return make_layout(mesh, placements(declared, mesh, rules), declared)


def make_sharding(
    config: MoEConfig, layout: Layout, gather_dtype: torch.dtype | None, reduce_dtype: torch.dtype
) -> Sharding:
    """How the layers of ``config`` travel: experts stay split over ``ep``, everything else is brought together.

    Args:
      config: the model.
      layout: of its parameters.
      gather_dtype: of matrices and embeddings; by default the compute dtype. The rest is gathered in float32, because
        it is small and computed with in float32.
      reduce_dtype: in which gradients are summed over ranks.
    """
    declared = declare(config)
    narrow = config.dtype if gather_dtype is None else gather_dtype

    exact = torch.promote_types(narrow, torch.float32)

    def dtype(leaf: Leaf) -> torch.dtype:
        return narrow if leaf.label in ("matrix", "embedding") else exact

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Leaf)

    dtypes = pytree.tree_map(dtype, declared, is_leaf=is_leaf)
    placed, shapes = by_layer(layout.placements), by_layer(layout.shapes)
    layers = ShardedLayers(
        {name: Layout(layout.mesh, placed[name], shapes[name]) for name in placed},
        kept=by_layer(expert_axes(declared)),
        gather_dtypes=by_layer(dtypes),
        reduce_dtype=reduce_dtype,
    )
    return Sharding(layers, expert_parallel(declared, layout))
