"""Muon across ranks: each matrix that placements cut is brought together on one rank, its owner, and sent back.

Momentum, decay and rate stay elementwise on shards. Orthogonalisation needs whole matrices, and there are three kinds:

- *whole on one rank* (expert stacks split into whole experts, blocks that no placement cuts): computed there, without
  communication;
- *cut*: its parts go to an owner, which computes and gives each holder its part back;
- *whole on several ranks* (replicated): the owner computes and sends the result, where that is cheaper than computing
  it on each (``flops_per_byte``); else computed on each.

Owners are chosen by :func:`.assign_owners`, longest processing time first by the operations of Newton-Schulz, on top
of what each rank computes without communication. With copies of the whole (the mesh axis ``replicate``), matrices are
spread over the ranks of all copies: ``(1 + R) |U|`` bytes for a matrix of ``|U|`` in ``R`` copies, where an owner per
copy would take ``2 R |U|``, and an ``R``-th of the operations. Parts come from the copy of the owner.

Matrices travel in buckets, each packed in one all-to-all on the way in and one on the way back: bucket 0 is on its way
in while this rank computes what it holds whole, bucket ``i + 1`` is on its way in, and bucket ``i - 1`` on its way
back, while bucket ``i`` is computed. The same idea is in dion (https://github.com/microsoft/dion) and, for gathers of
whole matrices, in https://kellerjordan.github.io/posts/muon.

What it lacks: local work is not spread between the buckets, so a rank that holds much more of it than others lets them
wait for its share of bucket 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from functional_moe.optim import Orthogonalize
from functional_moe.optim._muon import WholeFn

from ._collective_functions import Call, Pending
from ._collectives import axis_index, axis_size
from ._layout import Layout
from ._mesh import axis_group, axis_sizes
from ._muon_plan import Exchange, PlacedLeaf, Plan, Route, Slices, make_plan
from ._tree import Tree, is_leaf, named_leaves, zip_leaves


def owner_orthogonalize(
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 1 << 26,
    flops_per_byte: float = 1e4,
) -> Orthogonalize:
    """How :func:`functional_moe.optim.muon` orthogonalises local shards: equal to the whole, each matrix once.

    Every rank of the mesh must call this, and then each update, together. It has no derivative.

    **Bytes sent.** Rank ``r`` sends per step, with ``|U|`` the bytes of matrix ``U`` in ``dtype``, ``U_r`` what ``r``
    holds of it, and both sums over the matrices that are cut, or replicated and sent::

        sum |U_r|  for U that others own, where r is the nearest copy      (way in; nothing for replicated ones)
        + sum |U_q|  for U that r owns, over all other holders q           (way back)

    For ``N`` bytes of matrices cut evenly over ``n`` ranks in ``R`` copies, and owned evenly, that is
    ``N / n * ((1 - R / n) + R * (n - 1) / n)`` per rank; with one copy ``2 N (n - 1) / n^2``, against
    ``N (n - 1) / n`` for gathering every matrix on every rank. Nothing is padded. There are two all-to-alls per
    bucket, in which every rank takes part.

    **Memory.** Besides the results, a rank holds the matrices that it owns of one bucket, before and after
    orthogonalisation, and the messages (sent and received) of one bucket on its way in and of one on its way back.

    Args:
      layout: of all parameters. ``muon`` may see some of them only, as inside ``optim.partition``.
      dtype: of what is sent, both ways. With less than float32, what is sent is rounded to it, on the owner too, so
        that a result depends on no rank and copies stay equal; float16 loses gradients below 6e-8.
      bucket_bytes: most bytes of matrices, in ``dtype``, that a rank owns in a bucket, and most bytes of its shards
        that are of a bucket's matrices. One matrix that is larger makes a bucket of its size.
      flops_per_byte: operations that a rank computes in the time in which it sends a byte. A matrix that several ranks
        hold whole is computed by one and sent where ``5 (4 m^2 n + 2 m^3)`` exceeds this times its bytes. The default
        is that of an accelerator of 5e14 operations per second behind 50 GB/s; for processes of one machine, about 50.

    Returns:
      a function for the argument ``orthogonalize`` of ``optim.muon``. Its updates are local shards, its results too.
      It raises ``ValueError`` for updates that are not shards of this layout, and axes that do not fit a leaf, which
      is named; :class:`.CollectiveError` when the group fails.

    Raises:
      ValueError: for a ``dtype`` that is not floating-point, ``bucket_bytes`` below 1, ``flops_per_byte`` below 0, or
        a rank that is not of the mesh.

    Example:
      >>> tx = optim.muon(0.02, axes, orthogonalize=owner_orthogonalize(layout, dtype=torch.bfloat16))
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if not flops_per_byte >= 0:
        raise ValueError(f"flops_per_byte must be at least 0, got {flops_per_byte}")
    if layout.mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not of the mesh {layout.mesh}")
    sizes = axis_sizes(layout.mesh)
    group = axis_group(layout.mesh, *sizes)
    known = {
        path: (tuple(shape), placements)
        for path, (placements, shape) in zip_leaves(
            layout.placements, "the placements", ("the layout's shapes", layout.shapes)
        )
    }

    @functools.cache  # axes are the same at every step; there is one plan, or one for each bucket of layers
    def plan(leaves: tuple[PlacedLeaf, ...]) -> Plan:
        return make_plan(
            leaves,
            sizes,
            axis_index(group),
            itemsize=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            flops_per_byte=flops_per_byte,
        )

    def orthogonalize(updates: Tree, axes: Tree, whole: WholeFn, /) -> Tree:
        leaves = []
        for path, (_, leaf_axes) in zip_leaves(updates, "the updates", ("the axes", axes)):
            if path not in known:
                raise ValueError(f"the updates have a leaf {path!r} that the layout lacks")
            leaves.append(PlacedLeaf(path, *known[path], leaf_axes))
        todo, shards = plan(tuple(leaves)), list(named_leaves(updates).values())
        _check_shards(leaves, todo, shards)
        results = _orthogonalize_shards(todo, leaves, shards, whole, dtype, group)
        return pytree.tree_unflatten(results, pytree.tree_structure(updates, is_leaf=is_leaf))

    return orthogonalize


def _check_shards(leaves: Sequence[PlacedLeaf], plan: Plan, shards: Sequence[Tensor]) -> None:
    for leaf, expected, shard in zip(leaves, plan.shard_shapes, shards, strict=True):
        if tuple(shard.shape) != expected:
            raise ValueError(
                f"leaf {leaf.path!r} has a shard of shape {tuple(shard.shape)}; of {leaf.shape} with "
                f"{leaf.placements}, this rank holds {expected}"
            )
        if shard.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"leaf {leaf.path!r} requires a gradient, and orthogonalising over ranks has none")


def _orthogonalize_shards(
    plan: Plan,
    leaves: Sequence[PlacedLeaf],
    shards: Sequence[Tensor],
    whole: WholeFn,
    dtype: torch.dtype,
    group: ProcessGroup,
) -> list[Tensor]:
    here = set(plan.leaves_here)
    # Contiguous, and nobody else's: an update may be the momentum itself.
    out = [
        shard if index in here else torch.empty_like(shard, memory_format=torch.contiguous_format)
        for index, shard in enumerate(shards)
    ]
    coming = _Message(shards, plan.buckets[0].collect, shards[0].device, dtype, group) if plan.buckets else None

    places: list[tuple[int, Slices]] = [(index, ()) for index in plan.leaves_here]
    places += [(index, where) for index, where, _ in plan.matrices_here]
    local_axes = [leaves[index].axes for index in plan.leaves_here] + [axes for _, _, axes in plan.matrices_here]
    if places:
        results = whole([shards[index][where] for index, where in places], local_axes)
        for (index, where), result in zip(places, results, strict=True):
            if index in here:
                out[index] = result
            else:
                out[index][where].copy_(result)

    going: _Message | None = None
    for bucket, following in itertools.zip_longest(plan.buckets, plan.buckets[1:]):
        matrices = [shards[item.leaf].new_empty(item.shape) for item in bucket.owned]
        _copy_kept(bucket.collect, shards, matrices, dtype)
        if coming is not None:
            coming.arrive(matrices)
        coming = None  # and its memory is free
        if following is not None:
            coming = _Message(shards, following.collect, shards[0].device, dtype, group)
        results = whole(matrices, [item.axes for item in bucket.owned]) if matrices else []
        del matrices
        if going is not None:
            going.arrive(out)
        going = None
        _copy_kept(bucket.give_back, results, out, dtype)
        going = _Message(results, bucket.give_back, shards[0].device, dtype, group)
        del results
    if going is not None:
        going.arrive(out)
    return out


def _copy_kept(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Copy what stays on this rank, rounded as if it had been sent."""
    for source, target in exchange.kept:
        targets[target.array][target.where].copy_(sources[source.array][source.where].to(dtype))


class _Message:
    """An all-to-all on its way: parts of ``arrays``, packed."""

    def __init__(
        self,
        arrays: Sequence[Tensor],
        exchange: Exchange,
        device: torch.device,
        dtype: torch.dtype,
        group: ProcessGroup,
    ) -> None:
        send_sizes, receive_sizes = (_sizes(routes, group) for routes in (exchange.send, exchange.receive))
        sent = torch.empty(sum(send_sizes), dtype=dtype, device=device)
        for part, piece in _pieces(sent, exchange.send, arrays):
            part.copy_(piece)
        self._received = torch.empty(sum(receive_sizes), dtype=dtype, device=device)
        self._routes, self._pending = exchange.receive, Pending()
        call = Call("all_to_all of matrices", sent, group)
        with call:
            work = dist.all_to_all_single(self._received, sent, receive_sizes, send_sizes, group=group, async_op=True)
        self._pending.start(call, work, sent)

    def arrive(self, arrays: Sequence[Tensor]) -> None:
        """Wait for it, and copy what came into ``arrays``."""
        self._pending.wait()
        for part, piece in _pieces(self._received, self._routes, arrays):
            piece.copy_(part)


def _sizes(routes: Sequence[Route], group: ProcessGroup) -> list[int]:
    """How many elements go to, or come from, each rank."""
    sizes = [0] * axis_size(group)
    for route in routes:
        sizes[route.peer] += route.numel
    return sizes


def _pieces(packed: Tensor, routes: Sequence[Route], arrays: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each stretch of ``packed`` beside the part of an array that it is for, in one shape."""
    parts = torch.split(packed, [route.numel for route in routes])
    for part, route in zip(parts, routes, strict=True):
        piece = arrays[route.array][route.where]
        yield part.view(piece.shape), piece
