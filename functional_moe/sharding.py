"""How a model is spread over a mesh: where its parameters live, and how its layers travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
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
    round_to_fp8,
)
from .parameters import Leaf, Params, declare

GatherDtype: TypeAlias = Literal["float32", "bfloat16", "float8"]
GATHER_DTYPES: Mapping[GatherDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
"""In which matrices may travel, by the names of settings."""


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
        it is small and computed with in float32. In ``float8_e4m3fn`` matrices travel with a scale for each block of
        128 (``parallel._fp8``) and are computed with in the compute dtype. Embedding and head travel in the compute
        dtype then: DeepSeek-V3 (arXiv 2412.19437, 3.3.1) leaves those wide too.
      reduce_dtype: in which gradients are summed over ranks.

    Raises:
      ValueError: for a ``gather_dtype`` in which parameters cannot travel.
    """
    dtypes, fp8_dims = _travel(config, gather_dtype)
    placed, shapes = by_layer(layout.placements), by_layer(layout.shapes)
    declared = declare(config)
    layers = ShardedLayers(
        {name: Layout(layout.mesh, placed[name], shapes[name]) for name in placed},
        kept=by_layer(expert_axes(declared)),
        gather_dtypes=by_layer(dtypes),
        fp8_dims=by_layer(fp8_dims),
        reduce_dtype=reduce_dtype,
    )
    return Sharding(layers, expert_parallel(declared, layout))


def check_gather_dtype(gather_dtype: torch.dtype | None) -> None:
    """Raises ``ValueError`` for a dtype in which no parameter travels."""
    if gather_dtype not in (None, torch.float64, *GATHER_DTYPES.values()):
        known = ", ".join(map(str, GATHER_DTYPES.values()))
        raise ValueError(f"gather_dtype = {gather_dtype}: parameters travel in {known}")


def as_gathered(params: Params, config: MoEConfig, gather_dtype: torch.dtype | None) -> Params:
    """The values that a step over ranks computes with, for a process by itself: rounded as if they had travelled.

    Args:
      params: in full.
      config: the model.
      gather_dtype: see :func:`make_sharding`.

    Returns:
      a tree like ``params``, in its dtypes. A leaf that travels as the model computes with it is the same tensor.
    """
    dtypes, fp8_dims = _travel(config, gather_dtype)

    def arrive(leaf: Tensor, dtype: torch.dtype, fp8_dim: int | None) -> Tensor:
        if fp8_dim is not None:
            return round_to_fp8(leaf, fp8_dim)
        return leaf if dtype == config.dtype else leaf.to(dtype).to(leaf.dtype)

    with torch.no_grad():
        return pytree.tree_map(arrive, params, dtypes, fp8_dims)  # type: ignore[no-any-return]


def _travel(config: MoEConfig, gather_dtype: torch.dtype | None) -> tuple[Params, Params]:
    """In which dtype each leaf is computed with, and along which dimension its blocks of fp8 run, if it has some."""
    check_gather_dtype(gather_dtype)
    fp8 = gather_dtype == torch.float8_e4m3fn
    narrow = config.dtype if fp8 or gather_dtype is None else gather_dtype
    exact = torch.promote_types(narrow, torch.float32)

    def dtype(leaf: Leaf) -> torch.dtype:
        return narrow if leaf.label in ("matrix", "embedding") else exact

    def fp8_dim(leaf: Leaf) -> int | None:
        if not fp8 or leaf.label != "matrix":
            return None
        # Not along the axis that the default rules split: so rounding is the same on every mesh.
        return len(leaf.shape) - (2 if leaf.axes[-1] == "hidden" else 1)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Leaf)

    declared = declare(config)
    return pytree.tree_map(dtype, declared, is_leaf=is_leaf), pytree.tree_map(fp8_dim, declared, is_leaf=is_leaf)
