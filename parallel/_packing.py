"""How a layer's leaves travel: which go by themselves, which share a message, and where each rank's part belongs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _fp8
from ._dtensor import is_shard
from ._layout import local_slices

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

ALONE = 1 << 18
"""A leaf of so many elements travels by itself when its parts lie one after the other: then nothing is copied."""


class Part(NamedTuple):
    """One rank's part of a leaf that is being brought together."""

    shape: tuple[int, ...]
    at: tuple[slice, ...]  # within the leaf as it is computed with


class LeafPlan(NamedTuple):
    """How one leaf travels."""

    gathered: tuple[str, ...]  # the mesh axes along which it is brought together; () when it is whole already
    replicated: tuple[str, ...]  # the mesh axes that hold copies: its gradient is summed over them
    shape: tuple[int, ...]  # as it is computed with
    parts: tuple[Part, ...]  # of the ranks of ``gathered``, the last axis changing fastest
    rank: int  # this one, among them

    @property
    def part(self) -> Part:
        """What this rank has of it."""
        return self.parts[self.rank]

    @property
    def stacked(self) -> bool:
        """Whether the parts are equal runs along the first dimension: one after the other they are the leaf."""
        return all(part.shape[1:] == self.shape[1:] and part.shape == self.parts[0].shape for part in self.parts)


class Wire(NamedTuple):
    """In what a leaf travels to where it is computed with."""

    dtype: torch.dtype  # in which it is computed with
    fp8_dim: int | None = None  # along which its blocks of fp8 run; None: it travels as it is computed with

    @property
    def travels(self) -> torch.dtype:
        """The dtype of its message, when it is gathered."""
        return self.dtype if self.fp8_dim is None else _fp8.E4M3

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of ``travels`` in the message of a part: its own, and a scale for each block."""
        return math.prod(shape) if self.fp8_dim is None else _fp8.message_bytes(shape, self.fp8_dim)

    def write(self, message: Tensor, part: Tensor) -> None:
        """Puts a part into a message [numel] of ``travels``, in fp8 of uint8."""
        if self.fp8_dim is None:
            message.view(part.shape).copy_(part)
        else:
            _fp8.write_message(message, part, self.fp8_dim)

    def read(self, message: Tensor, out: Tensor) -> None:
        """Writes the part that a message carries into ``out``, of the part's shape."""
        if self.fp8_dim is None:
            out.copy_(message.view(out.shape))
        else:
            _fp8.read_message(message, out, self.fp8_dim)


class Packed(NamedTuple):
    """Leaves that share a message: each rank's parts one after the other."""

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]  # of each leaf within a rank's share, in elements
    size: int  # of the largest rank's share, in elements: messages are equal
    sent_offsets: tuple[int, ...]  # the same when they are gathered, in elements of what travels
    sent_size: int


class LayerPlan(NamedTuple):
    """How one layer travels."""

    leaves: tuple[LeafPlan, ...]
    alone: tuple[int, ...]
    packed: Mapping[tuple[tuple[str, ...], torch.dtype], Packed]  # by the axes of their gather and what travels
    summed: Mapping[tuple[str, ...], tuple[int, ...]]  # leaves whose gradient is summed over copies, by the axes


def plan_leaf(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Mapping[str, int],
    coordinate: Sequence[int],
    kept: Collection[str],
) -> LeafPlan:
    """How a leaf is brought together along every axis that splits it, except those of ``kept``.

    Args:
      shape: of the full leaf.
      placements: one per mesh axis.
      sizes: of the mesh axes, outermost first.
      coordinate: of this rank.
      kept: mesh axes along which it stays split, as experts do over ``ep``. They neither gather nor reduce.
    """
    axes = list(sizes)
    gathered = [
        index
        for index, (axis, placement) in enumerate(zip(axes, placements, strict=True))
        if is_shard(placement) and axis not in kept and sizes[axis] > 1
    ]
    replicated = tuple(
        axis
        for axis, placement in zip(axes, placements, strict=True)
        if not is_shard(placement) and axis not in kept and sizes[axis] > 1
    )

    def places(dims: Sequence[int]) -> list[tuple[int, ...]]:
        """Coordinates like this rank's along all axes but ``dims``."""
        ranges = [range(sizes[axis]) if index in dims else [coordinate[index]] for index, axis in enumerate(axes)]
        return list(itertools.product(*ranges))

    def runs(dim: int, split: tuple[int, ...]) -> dict[tuple[int, ...], slice]:
        """Where parts begin and end along ``dim`` among the gathered ones, by their place on the axes that split it."""
        found: dict[tuple[int, ...], slice] = {}
        before = 0
        for place in places(split):
            part = local_slices(shape, placements, sizes, place)[dim]
            stop = before + part.stop - part.start
            found[tuple(place[index] for index in split)] = slice(before, stop)
            before = stop
        return found

    splits = [
        tuple(index for index in gathered if placements[index].dim == dim)  # type: ignore[attr-defined]
        for dim in range(len(shape))
    ]
    along = [runs(dim, split) for dim, split in enumerate(splits)]
    parts = []
    for place in places(gathered):
        at = tuple(found[tuple(place[index] for index in split)] for found, split in zip(along, splits, strict=True))
        parts.append(Part(tuple(part.stop - part.start for part in at), at))
    whole = tuple(max(part.at[dim].stop for part in parts) for dim in range(len(shape)))
    own = places(gathered).index(tuple(coordinate))
    return LeafPlan(tuple(axes[index] for index in gathered), replicated, whole, tuple(parts), own)


def plan_layer(leaves: Sequence[LeafPlan], wires: Sequence[Wire]) -> LayerPlan:
    """Large leaves whose parts are stacked go alone, the others together, one message per set of axes and dtype."""
    alone = tuple(
        index for index, leaf in enumerate(leaves) if leaf.gathered and leaf.stacked and math.prod(leaf.shape) >= ALONE
    )
    together: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
    summed: dict[tuple[str, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.gathered and index not in alone:
            together.setdefault((leaf.gathered, wires[index].travels), []).append(index)
        if leaf.replicated:
            summed.setdefault(leaf.replicated, []).append(index)
    packed = {}
    for key, members in together.items():
        room = [max(math.prod(part.shape) for part in leaves[index].parts) for index in members]
        sent = [max(wires[index].numel(part.shape) for part in leaves[index].parts) for index in members]
        packed[key] = Packed(tuple(members), _offsets(room), sum(room), _offsets(sent), sum(sent))
    return LayerPlan(tuple(leaves), alone, packed, {axes: tuple(members) for axes, members in summed.items()})


def _offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]


def leaf_offsets(plan: LayerPlan, itemsizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where each gathered leaf lies in a buffer, in bytes, and the bytes of all; leaves that are whole take none."""
    offsets, end = [], 0
    for leaf, itemsize in zip(plan.leaves, itemsizes, strict=True):
        offsets.append(end)
        if leaf.gathered:
            size = math.prod(leaf.shape) * itemsize
            end += -(-size // 256) * 256
    return tuple(offsets), end
