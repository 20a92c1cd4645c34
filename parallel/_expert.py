"""Tokens to the ranks that hold their experts and back, without a dropped token: an uneven all-to-all over ``ep``.

A rank sorts its choices by (rank that holds the expert, its index there), so what goes to each rank is one run of
rows. The ranks tell each other the sizes of their runs (:func:`plan_exchange`: one small message, and the one moment at
which the host waits for the device), then the rows travel (:func:`exchange`) and are sorted by local expert, so that
one grouped product serves them all. :func:`exchange_back` is the transpose.

An :class:`Exchange` is all that is needed to do the same again, without that message and without waiting: whoever
recomputes a layer hands it back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from ._collectives import Handle, all_to_all, all_to_all_start, axis_size, chunk_sizes
from ._layout import Layout, local_slices
from ._mesh import axis_group, axis_sizes
from ._placements import Placements
from ._tree import Tree, map_leaves, zip_leaves


@dataclasses.dataclass(frozen=True)
class Splits:
    """How many rows go to each rank and come from each, as numbers of the host.

    Part of a tree's structure, not a leaf of it, because ``torch.func.vjp(..., has_aux=True)`` hands out tensors alone.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]


pytree.register_constant(Splits)


class Exchange(NamedTuple):
    """What travels where, of one layer's rows. A residual: with it the exchange is repeated as it was."""

    splits: Splits
    order: Tensor  # int64 [received]; which of the received rows stands at each place, sorted by local expert
    inverse: Tensor  # int64 [received]; its inverse permutation
    offsets: Tensor  # int32 [experts_per_rank]; where each local expert's rows end


class ExpertParallel(NamedTuple):
    """How the experts of a layer are spread over ranks. Made by :func:`expert_parallel`."""

    group: ProcessGroup
    position: Tensor  # int64 [experts]; where each stands when rank after rank lists its own


def plan_exchange(counts: Tensor, group: ProcessGroup, balanced: int | None = None) -> Exchange:
    """Tells every rank how many rows it will get for each of its experts.

    Sends ``8 (ep - 1) experts_per_rank`` bytes per rank, in one message, and synchronises the host once.

    Args:
      counts: int64 ``[ep, experts_per_rank]``, this rank's rows for each expert of each rank; zeros are fine.
      group: the ``ep`` ranks.
      balanced: how many rows every rank sends, evenly spread, where ``counts`` has no numbers to look at (a fake
        tensor in a dry run).

    Raises:
      ValueError: when ``counts`` has another number of rows than ``group`` has ranks.
      CollectiveError: when the group fails.
    """
    if counts.ndim != 2 or counts.shape[0] != axis_size(group):
        raise ValueError(_wrong_counts("plan_exchange", counts, "", group))
    (plan,) = plan_exchanges(counts[None], group, None if balanced is None else (balanced,))
    return plan


def plan_exchanges(counts: Tensor, group: ProcessGroup, balanced: Sequence[int] | None = None) -> tuple[Exchange, ...]:
    """:func:`plan_exchange` of several parts of a rank's rows, which travel one after the other; still one message.

    Args:
      counts: int64 ``[parts, ep, experts_per_rank]``; as many parts on every rank, of any sizes.
      group: the ``ep`` ranks.
      balanced: of each part, as ``plan_exchange`` takes it.

    Raises:
      ValueError: when ``counts`` has another number of rows than ``group`` has ranks.
      CollectiveError: when the group fails.
    """
    ranks = axis_size(group)
    if counts.ndim != 3 or counts.shape[1] != ranks:
        raise ValueError(_wrong_counts("plan_exchanges", counts, "parts, ", group))
    arriving = all_to_all(counts.transpose(0, 1).contiguous(), group).transpose(0, 1)
    if balanced is None:
        send, receive = torch.stack([counts.sum(2), arriving.sum(2)]).tolist()
    else:
        send = receive = [chunk_sizes(rows, ranks) for rows in balanced]
    splits = [Splits(tuple(there), tuple(here)) for there, here in zip(send, receive, strict=True)]
    return tuple(_sorting(part, split) for part, split in zip(arriving.unbind(), splits, strict=True))


def _wrong_counts(name: str, counts: Tensor, parts: str, group: ProcessGroup) -> str:
    return f"{name}: counts of shape {tuple(counts.shape)}; [{parts}ep, experts_per_rank] has ep = {axis_size(group)}"


def _sorting(arriving: Tensor, splits: Splits) -> Exchange:
    """How rows are sorted that arrive in runs by (source, expert), as counted in ``arriving`` [ep, experts_per_rank].

    Each run moves as one to its place by (expert, source).
    """
    received = sum(splits.receive)
    runs, sorted_runs = arriving.flatten(), arriving.t().flatten()
    shift = (_starts(runs).view_as(arriving).t() - _starts(sorted_runs).view(arriving.shape[::-1])).flatten()
    back = -shift.view(arriving.shape[::-1]).t().flatten()
    row = torch.arange(received, device=arriving.device)
    return Exchange(
        splits,
        row + torch.repeat_interleave(shift, sorted_runs, output_size=received),
        row + torch.repeat_interleave(back, runs, output_size=received),
        arriving.sum(0).cumsum(0).to(torch.int32),
    )


def exchange(rows: Tensor, plan: Exchange, group: ProcessGroup, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Rows to the ranks of their experts, in one message.

    Sends ``width`` numbers for each row that goes to another rank: at even load, ``(ep - 1) / ep`` of all rows.
    Differentiable in reverse and forward mode, to any order; its dual is :func:`exchange_back`.

    Args:
      rows: ``[sent, width]``, sorted by (rank, expert).
      plan: of this layer.
      group: the ``ep`` ranks.
      widths: columns of each part; they add up to ``width``. What belongs to a row (such as its weight) travels beside
        it, and is taken apart in the pass that sorts the rows.

    Returns:
      the parts, each ``[received, its width]``, sorted by local expert, then by source rank.

    Raises:
      ValueError: when ``rows`` has not the rows of ``plan`` or the columns of ``widths``.
      CollectiveError: when the group fails.
    """
    _check_widths(rows, widths)
    arrived = all_to_all(rows, group, plan.splits.send, plan.splits.receive)
    return _SplitRows.apply(arrived, plan.order, plan.inverse, tuple(widths))  # type: ignore[no-any-return]


def exchange_start(
    rows: Tensor, plan: Exchange, group: ProcessGroup, widths: Sequence[int]
) -> Handle[tuple[Tensor, ...]]:
    """:func:`exchange` that returns before the rows are there."""
    _check_widths(rows, widths)
    arriving = all_to_all_start(rows, group, plan.splits.send, plan.splits.receive)
    return Handle(lambda: _SplitRows.apply(arriving.wait(), plan.order, plan.inverse, tuple(widths)))


def _check_widths(rows: Tensor, widths: Sequence[int]) -> None:
    if sum(widths) != rows.shape[1]:
        raise ValueError(
            f"exchange: widths = {tuple(widths)} add up to {sum(widths)}, rows have {rows.shape[1]} columns"
        )


def exchange_back(parts: Sequence[Tensor], plan: Exchange, group: ProcessGroup, needed: bool = True) -> Tensor:
    """Rows home again, in one message: the inverse of :func:`exchange`, and its dual.

    Sends the summed widths for each row that came from another rank.

    Args:
      parts: each ``[received, its width]``, sorted as ``exchange`` returns them.
      plan: of this layer.
      group: the ``ep`` ranks.
      needed: when False, the rows stay and the result is unfilled, see :func:`.all_to_all`.

    Returns:
      ``[sent, sum of widths]``, sorted as ``exchange`` takes them.

    Raises:
      ValueError: when the parts have not the rows of ``plan``.
      CollectiveError: when the group fails.
    """
    joined = _JoinRows.apply(plan.inverse, plan.order, *parts)
    return all_to_all(joined, group, plan.splits.receive, plan.splits.send, needed)


def exchange_back_start(parts: Sequence[Tensor], plan: Exchange, group: ProcessGroup) -> Handle[Tensor]:
    """:func:`exchange_back` that returns before the rows are home."""
    joined = _JoinRows.apply(plan.inverse, plan.order, *parts)
    return all_to_all_start(joined, group, plan.splits.receive, plan.splits.send)


def experts_of_rank(
    num_experts: int, placements: Placements, sizes: Mapping[str, int], dim: int = 0, axis: str = "ep"
) -> Tensor:
    """Which experts each rank along ``axis`` holds once an expert stack is gathered over the other axes.

    Not a contiguous run where another axis splits the experts first: 8 experts over ``fsdp 2 x ep 2`` lie as ``[[0, 1,
    4, 5], [2, 3, 6, 7]]``, because the gather over ``fsdp`` joins two runs of two.

    Args:
      num_experts: of the stack.
      placements: of the stack, one per mesh axis.
      sizes: of the mesh axes, outermost first.
      dim: the stack's dimension of experts.
      axis: the mesh axis of expert parallelism.

    Returns:
      int64 ``[ep, num_experts / ep]``, in the order of the gathered stack.

    Raises:
      ValueError: when the mesh has no such axis, it does not split the experts, or they are split unevenly.
    """
    from torch.distributed.tensor import Replicate, Shard

    if axis not in sizes:
        raise ValueError(f"the mesh has the axes {tuple(sizes)}; expert parallelism over {axis!r} needs that one")
    index = list(sizes).index(axis)
    if placements[index] != Shard(dim):
        raise ValueError(f"experts stand on dimension {dim}, which {axis!r} does not split: placements {placements}")
    split = tuple(Shard(0) if placement == Shard(dim) else Replicate() for placement in placements)
    splitting = [size if placement == Shard(0) else 1 for size, placement in zip(sizes.values(), split, strict=True)]
    if num_experts % math.prod(splitting):
        raise ValueError(
            f"num_experts = {num_experts} is not a multiple of the {math.prod(splitting)} ranks that split them"
        )
    table = []
    for rank in range(sizes[axis]):
        # The gather joins along the innermost axis first, so the outermost changes slowest.
        indices = [range(size) for size in splitting]
        indices[index] = range(rank, rank + 1)
        runs = [local_slices([num_experts], split, sizes, coordinate)[0] for coordinate in itertools.product(*indices)]
        table.append([expert for run in runs for expert in range(run.start, run.stop)])
    return torch.tensor(table)


def expert_axes(declared: Tree, axis: str = "ep") -> Tree:
    """What ``gather(..., keep=...)`` leaves as it is: ``axis`` of the leaves that have experts, nothing of the others.

    Args:
      declared: a tree of :class:`.Declared`.
      axis: the mesh axis of expert parallelism.

    Returns:
      a tree like ``declared``, of ``frozenset({axis})`` and ``frozenset()``.
    """
    return map_leaves(
        lambda path, leaf: frozenset({axis} if "experts" in leaf.axes else ()), declared, "the declaration"
    )


def expert_parallel(declared: Tree, layout: Layout, axis: str = "ep") -> ExpertParallel | None:
    """Expert parallelism for parameters that :func:`.gather` gives with ``keep=expert_axes(declared)``.

    Args:
      declared: a tree of :class:`.Declared`.
      layout: of the parameters.
      axis: the mesh axis of expert parallelism.

    Returns:
      ``None`` where ``axis`` has size 1 or there are no experts: then every rank holds all, and nothing travels.

    Raises:
      ValueError: when the trees differ, or a stack's experts are not split by ``axis``, or not as another's are; the
        leaf is named.
    """
    sizes = axis_sizes(layout.mesh)
    if sizes.get(axis) == 1:
        return None
    first: tuple[str, Tensor] | None = None
    # The stacks of one model lie in few ways.
    table_of = functools.cache(lambda count, placed, dim: experts_of_rank(count, placed, sizes, dim, axis))
    for path, (leaf, placements) in zip_leaves(declared, "the declaration", ("the placements", layout.placements)):
        if "experts" not in leaf.axes:
            continue
        dim = leaf.axes.index("experts")
        try:
            table = table_of(leaf.shape[dim], placements, dim)
        except ValueError as error:
            raise ValueError(f"leaf {path!r}: {error}") from None
        first = first or (path, table)
        if not torch.equal(table, first[1]):
            raise ValueError(f"leaves {first[0]!r} and {path!r} do not have the same experts on each {axis!r} rank")
    if first is None:
        return None
    position = torch.argsort(first[1].flatten()).to(layout.mesh.device_type)
    return ExpertParallel(axis_group(layout.mesh, axis), position)


def _starts(lengths: Tensor) -> Tensor:
    """Where each run begins when they stand one after the other."""
    return lengths.cumsum(0) - lengths


class _SplitRows(torch.autograd.Function):
    """``rows[order]``, in parts of some columns each."""

    @staticmethod
    def forward(rows: Tensor, order: Tensor, inverse: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(part.index_select(0, order) for part in rows.split(widths, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, order, inverse, ctx.widths = inputs
        ctx.save_for_backward(order, inverse)
        ctx.save_for_forward(order, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return _JoinRows.apply(inverse, order, *grads), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, ...]:
        return _SplitRows.apply(tangent, *ctx.saved_tensors, ctx.widths)  # type: ignore[no-any-return]


class _JoinRows(torch.autograd.Function):
    """``cat(parts, 1)[order]`` in one pass: the transpose of ``_SplitRows`` when given the inverse order."""

    @staticmethod
    def forward(order: Tensor, inverse: Tensor, *parts: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0].index_select(0, order)
        widths = [part.shape[1] for part in parts]
        rows = parts[0].new_empty(len(order), sum(widths))
        for part, columns in zip(parts, rows.split(widths, 1), strict=True):
            torch.index_select(part, 0, order, out=columns)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        order, inverse, *parts = inputs
        ctx.widths = tuple(part.shape[1] for part in parts)
        ctx.save_for_backward(order, inverse)
        ctx.save_for_forward(order, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return None, None, *_SplitRows.apply(grad, inverse, order, ctx.widths)

    @staticmethod
    def jvp(ctx: Any, _order: None, _inverse: None, *tangents: Tensor) -> Tensor:
        return _JoinRows.apply(*ctx.saved_tensors, *tangents)  # type: ignore[no-any-return]
