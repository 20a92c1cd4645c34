"""Who orthogonalises which matrix, and what each rank sends for it: data, computed without communication.

Every rank computes the same assignment from the same layout, so nothing about it is ever exchanged. A region of a leaf
is a :data:`Box`, in coordinates of the full leaf: a rank's shard is one, a matrix (or a fused block, or a head) is one,
and what a rank holds of a matrix is their intersection. That serves every placement alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from functional_moe.optim import MatrixAxes
from functional_moe.optim._matrix_axes import check_axes, check_blocks

from ._dtensor import is_shard
from ._layout import check_placements, local_slices
from ._placements import Placements

#: ``(start, stop)`` along each dimension.
Box: TypeAlias = tuple[tuple[int, int], ...]
Slices: TypeAlias = tuple[slice, ...]

_STEPS = 5  # of Newton-Schulz, as a rule; only ratios of costs matter, but for `flops_per_byte`


class PlacedLeaf(NamedTuple):
    """What is known of one leaf that Muon sees."""

    path: str
    shape: tuple[int, ...]  # in full
    placements: Placements
    axes: MatrixAxes


class Route(NamedTuple):
    """One end of a part of a matrix that changes ranks."""

    peer: int
    array: int  # which shard or matrix of this rank
    where: Slices  # in that array

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(part.stop - part.start for part in self.where)


class Exchange(NamedTuple):
    """One all-to-all as one rank sees it."""

    send: tuple[Route, ...]  # by peer
    receive: tuple[Route, ...]  # by peer
    kept: tuple[tuple[Route, Route], ...]  # from, to: what stays on this rank


class Owned(NamedTuple):
    """A matrix that this rank owns."""

    leaf: int
    shape: tuple[int, ...]  # as many dimensions as the leaf; batch dimensions of length 1
    axes: MatrixAxes  # without blocks


class Bucket(NamedTuple):
    """Matrices that are exchanged together."""

    owned: tuple[Owned, ...]
    collect: Exchange  # from shards to owned matrices
    give_back: Exchange  # from owned matrices to shards


class Plan(NamedTuple):
    """What one rank does."""

    shard_shapes: tuple[tuple[int, ...], ...]
    leaves_here: tuple[int, ...]  # shards that hold whole matrices only
    matrices_here: tuple[tuple[int, Slices, MatrixAxes], ...]  # whole matrices in other shards: leaf, where, axes
    buckets: tuple[Bucket, ...]


class _Part(NamedTuple):
    box: Box
    ranks: tuple[int, ...]  # that hold it


class _Matrix(NamedTuple):
    box: Box
    cost: int
    parts: tuple[_Part, ...]
    candidates: tuple[int, ...]  # all ranks, those that hold most of it first

    @property
    def numel(self) -> int:
        return _numel(self.box)


class _LeafMatrices(NamedTuple):
    shards: tuple[Box, ...]  # by rank
    cut: bool  # whether placements cut matrices
    matrices: tuple[_Matrix, ...]


def newton_schulz_flops(rows: int, cols: int) -> int:
    """Operations of Newton-Schulz on one matrix in the standard form: ``5 (4 m^2 n + 2 m^3)``, ``m <= n``.

    Args:
      rows, cols: of the matrix, in either order.
    """
    m, n = sorted((rows, cols))
    return _STEPS * (4 * m * m * n + 2 * m**3)


def assign_owners(costs: Sequence[int], ranks: Sequence[Sequence[int]], initial_load: Sequence[int]) -> list[int]:
    """Longest processing time first: the dearest item goes to the rank with the least to do, and so on.

    Deterministic: equal costs go in the order given, and equal loads to the rank that an item names first. Without
    initial load and with every rank open to every item, the largest load is at most ``4/3 - 1/(3 n)`` of the best
    possible for ``n`` ranks (Graham 1969, https://doi.org/10.1137/0117039).

    Args:
      costs: of each item.
      ranks: that may own each item, the preferred one first.
      initial_load: what each rank has to do anyway, in the unit of ``costs``.

    Returns:
      the owner of each item.

    Raises:
      ValueError: for a negative cost or load, or an item without ranks.

    Example:
      >>> assign_owners([3, 5, 2], [(0, 1)] * 3, [4, 0])
      [0, 1, 1]
    """
    if len(costs) != len(ranks):
        raise ValueError(f"assign_owners: {len(costs)} costs and ranks for {len(ranks)} items")
    for name, values in (("a cost", costs), ("an initial load", initial_load)):
        if min(values, default=0) < 0:
            raise ValueError(f"assign_owners: {name} of {min(values)}; it must be at least 0")
    load, owners = list(initial_load), [0] * len(costs)
    for item in _longest_first(costs):
        if not ranks[item]:
            raise ValueError(f"assign_owners: no rank may own item {item}")
        owners[item] = min(ranks[item], key=load.__getitem__)
        load[owners[item]] += costs[item]
    return owners


def make_plan(
    leaves: Sequence[PlacedLeaf],
    sizes: Mapping[str, int],
    rank: int,
    *,
    itemsize: int,
    bucket_bytes: int,
    flops_per_byte: float,
) -> Plan:
    """What ``rank`` does.

    Args:
      leaves: those that Muon sees.
      sizes: of the mesh axes, outermost first.
      rank: of the mesh, the last axis changing fastest.
      itemsize: bytes of an element on its way.
      bucket_bytes: most bytes of matrices that a rank owns in a bucket, and of shards that it gives to one.
      flops_per_byte: see :func:`.owner_orthogonalize`.

    Raises:
      ValueError: for placements or axes that do not fit a leaf; names it.
    """
    coordinates = list(itertools.product(*map(range, sizes.values())))
    # Layers are alike: what a leaf's matrices are is found once for all leaves of a kind.
    find = functools.cache(functools.partial(_leaf_matrices, sizes=sizes, coordinates=coordinates))
    load = [0] * len(coordinates)
    shapes, leaves_here, matrices_here, sent = [], [], [], list[tuple[int, _Matrix]]()
    for index, leaf in enumerate(leaves):
        check_blocks(leaf.axes, leaf.shape, leaf.path)
        check_placements(leaf.path, leaf.shape, leaf.placements, sizes)
        found = find(leaf.shape, leaf.placements, leaf.axes)
        mine = found.shards[rank]
        shapes.append(tuple(stop - start for start, stop in mine))
        away = [_is_sent(matrix, itemsize, flops_per_byte) for matrix in found.matrices]
        as_it_is = not found.cut and not any(away)
        if as_it_is and _numel(mine):
            leaves_here.append(index)
        for matrix, goes in zip(found.matrices, away, strict=True):
            if goes:
                sent.append((index, matrix))
                continue
            (part,) = matrix.parts
            for holder in part.ranks:
                load[holder] += matrix.cost
            if rank in part.ranks and not as_it_is:
                matrices_here.append((index, _within(matrix.box, mine), _unblocked(leaf.axes)))

    owners = assign_owners([matrix.cost for _, matrix in sent], [matrix.candidates for _, matrix in sent], load)
    return Plan(
        tuple(shapes),
        tuple(leaves_here),
        tuple(matrices_here),
        tuple(
            _bucket_of(rank, [(*sent[item], owners[item]) for item in items], leaves, find, coordinates)
            for items in _fill_buckets(sent, owners, load, bucket_bytes // itemsize)
        ),
    )


def _longest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda item: (-costs[item], item))


def _is_sent(matrix: _Matrix, itemsize: int, flops_per_byte: float) -> bool:
    """Whether a matrix goes to an owner.

    One that is cut must. One that ``n`` ranks hold whole takes each of them ``cost`` to compute; spread, ``cost / n``
    and ``(n - 1) / n`` of its bytes to send, on average: less if ``cost > flops_per_byte * bytes``.
    """
    if len(matrix.parts) > 1:
        return True
    return len(matrix.parts[0].ranks) > 1 and matrix.cost > flops_per_byte * matrix.numel * itemsize


def _leaf_matrices(
    shape: tuple[int, ...],
    placements: Placements,
    axes: MatrixAxes,
    *,
    sizes: Mapping[str, int],
    coordinates: Sequence[tuple[int, ...]],
) -> _LeafMatrices:
    """Every matrix of a leaf, and where its parts are."""
    out, in_ = check_axes(axes, shape, "")
    outs, ins = check_blocks(axes, shape, "")
    shards = [
        tuple((part.start, part.stop) for part in local_slices(shape, placements, sizes, at)) for at in coordinates
    ]
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(shards):
        if _numel(box):
            holders.setdefault(box, []).append(rank)

    cut = any(
        is_shard(placed) and placed.dim in (out, in_) and parts > 1
        for placed, parts in zip(placements, sizes.values(), strict=True)
    )

    def matrix(box: Box) -> _Matrix:
        overlaps = [(_overlap(box, shard), ranks) for shard, ranks in holders.items()]
        parts = tuple(_Part(common, tuple(ranks)) for common, ranks in overlaps if _numel(common))
        held = {rank: _numel(part.box) for part in parts for rank in part.ranks}
        # Any rank may own it; at equal loads, one that holds much of it saves sending that.
        candidates = sorted(range(len(coordinates)), key=lambda rank: (-held.get(rank, 0), rank))
        cost = newton_schulz_flops(box[out][1] - box[out][0], box[in_][1] - box[in_][0])
        return _Matrix(box, cost, parts, tuple(candidates))

    choices: list[list[tuple[int, int]]] = [[(i, i + 1) for i in range(length)] for length in shape]
    choices[out], choices[in_] = _stretches(outs), _stretches(ins)
    return _LeafMatrices(
        tuple(shards),
        cut,
        tuple(matrix(box) for box in itertools.product(*choices)),
    )


def _stretches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    stops = list(itertools.accumulate(lengths))
    return list(zip([0, *stops], stops, strict=False))


def _fill_buckets(
    sent: Sequence[tuple[int, _Matrix]], owners: Sequence[int], initial_load: Sequence[int], elements: int
) -> list[list[int]]:
    """Cut the matrices, in the order in which their owners come to them, into buckets.

    In a bucket no rank owns more than ``elements``, nor has more of them in its shards; but for a single matrix.
    """
    if not sent:
        return []
    load, start = list(initial_load), [0] * len(sent)
    for item in _longest_first([matrix.cost for _, matrix in sent]):
        start[item] = load[owners[item]]
        load[owners[item]] += sent[item][1].cost
    limit = max(elements, *(matrix.numel for _, matrix in sent))
    buckets: list[list[int]] = [[]]
    owned, given = [0] * len(load), [0] * len(load)
    for item in sorted(range(len(sent)), key=lambda item: (start[item], -sent[item][1].cost, item)):
        matrix, owner = sent[item][1], owners[item]
        held = [(rank, _numel(part.box)) for part in matrix.parts for rank in part.ranks]
        if owned[owner] + matrix.numel > limit or any(given[rank] + numel > limit for rank, numel in held):
            buckets.append([])
            owned, given = [0] * len(load), [0] * len(load)
        buckets[-1].append(item)
        owned[owner] += matrix.numel
        for rank, numel in held:
            given[rank] += numel
    return buckets


def _bucket_of(
    rank: int,
    matrices: Sequence[tuple[int, _Matrix, int]],
    leaves: Sequence[PlacedLeaf],
    find: Callable[..., _LeafMatrices],
    coordinates: Sequence[tuple[int, ...]],
) -> Bucket:
    """A bucket of ``(leaf, matrix, owner)`` as ``rank`` sees it."""
    owned: list[Owned] = []
    collect, give_back = list[_Move](), list[_Move]()
    for index, matrix, owner in matrices:
        leaf = leaves[index]
        shard = find(leaf.shape, leaf.placements, leaf.axes).shards[rank]
        for part in matrix.parts:
            if rank != owner and rank not in part.ranks:
                continue
            in_shard = _Place(index, _within(part.box, shard))
            in_matrix = _Place(len(owned), _within(part.box, matrix.box))
            # Of several copies the owner takes the nearest: its own, or one that differs in inner axes alone.
            source = min(part.ranks, key=lambda holder: _distance(coordinates[holder], coordinates[owner]))
            collect.append(_Move(source, owner, in_shard, in_matrix))
            give_back += [_Move(owner, holder, in_matrix, in_shard) for holder in part.ranks]
        if owner == rank:
            owned.append(Owned(index, tuple(stop - start for start, stop in matrix.box), _unblocked(leaf.axes)))
    return Bucket(tuple(owned), _exchange_of(rank, collect), _exchange_of(rank, give_back))


class _Place(NamedTuple):
    array: int
    where: Slices


class _Move(NamedTuple):
    sender: int
    receiver: int
    source: _Place
    target: _Place


def _exchange_of(rank: int, moves: Sequence[_Move]) -> Exchange:
    """The ends of ``moves`` on ``rank``. A pair of ranks lists what it moves in one order on both sides."""
    send = [Route(move.receiver, *move.source) for move in moves if move.sender == rank != move.receiver]
    receive = [Route(move.sender, *move.target) for move in moves if move.receiver == rank != move.sender]
    kept = [move for move in moves if move.sender == move.receiver == rank]
    return Exchange(
        tuple(sorted(send, key=lambda route: route.peer)),
        tuple(sorted(receive, key=lambda route: route.peer)),
        tuple((Route(rank, *move.source), Route(rank, *move.target)) for move in kept),
    )


def _distance(a: Sequence[int], b: Sequence[int]) -> tuple[bool, ...]:
    return tuple(x != y for x, y in zip(a, b, strict=True))


def _unblocked(axes: MatrixAxes) -> MatrixAxes:
    return MatrixAxes(out=axes.out, in_=axes.in_)


def _numel(box: Box) -> int:
    return math.prod(max(0, stop - start) for start, stop in box)


def _overlap(a: Box, b: Box) -> Box:
    return tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))


def _within(box: Box, outer: Box) -> Slices:
    """Where ``box`` is in an array that holds ``outer``."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))
