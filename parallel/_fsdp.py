"""Fully sharded layers: brought together before they compute, their gradients summed and scattered after.

What a layer sends, per rank and gather, with ``n`` ranks along the axes that split a leaf of ``p`` elements evenly:
``(n - 1) / n * p`` elements of the gather dtype; a reduction, as much of the reduce dtype. Uneven parts are padded to
the largest. A leaf that several ranks hold whole is not gathered; its gradient is summed over them, which sends
``2 (n - 1) / n * p``.

A leaf may travel in fp8, a byte for each element and one for each of the blocks that :mod:`._fp8` describes; it is
computed with in its own dtype. Every rank computes with what was sent, the owner of a part too, and a leaf that is
whole already is rounded likewise. Its gradient is that of the rounded values, and goes to the shards as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from functional_moe.memory import Gather, Schedule, add_leaves, leaf_paths

from . import _fp8
from ._collective_functions import Call, all_gather_single, reduce_scatter_single
from ._layout import Layout
from ._mesh import axis_group, axis_sizes
from ._packing import LayerPlan, Packed, Wire, leaf_offsets, plan_layer, plan_leaf
from ._placements import Placements
from ._tree import Tree, map_leaves, zip_leaves


class _Layer(NamedTuple):
    """What is known of a layer before anything runs."""

    plan: LayerPlan
    paths: tuple[str, ...]
    wires: tuple[Wire, ...]  # in what each leaf travels, and is computed with
    offsets: tuple[int, ...]  # of each leaf in a buffer, in bytes
    size: int  # bytes of a buffer


class _Declared(NamedTuple):
    """What is given of a leaf; leaves of which it is the same travel alike."""

    shape: torch.Size
    placements: Placements
    kept: frozenset[str]
    wire: Wire


class LayerBytes(NamedTuple):
    """What a layer takes on this rank besides its shards, in bytes."""

    gathered: int  # its part of a gather buffer, its messages on their way, and shards in another dtype
    reduced: int  # this rank's part of its gradient
    reduction: int  # what reducing needs besides the gradient in full and the result


class ShardedLayers:
    """How layers travel on a mesh, and the buffers they are gathered in. Make it once, and a store for every step."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        *,
        kept: Mapping[str, Tree] | None = None,
        gather_dtypes: Mapping[str, Tree] | None = None,
        fp8_dims: Mapping[str, Tree] | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Plans every layer's messages; nothing is communicated.

        Args:
          layouts: of each layer's tree, all on one mesh.
          kept: for each leaf a ``frozenset`` of the mesh axes along which it stays split (``expert_axes``); by default
            none.
          gather_dtypes: in which each leaf travels and is computed with; by default float32.
          fp8_dims: for each leaf None, or the dimension along which its blocks of fp8 run: then it travels in fp8, and
            the gather dtype is what it is computed with. How a leaf is rounded depends on the mesh only where that
            dimension is split, other than at multiples of ``_fp8.BLOCK``.
          reduce_dtype: in which gradients are summed over ranks.

        Raises:
          ValueError: for no layers, or trees that differ; the leaf is named.
        """
        if not layouts:
            raise ValueError("no layers to shard")
        self.mesh: DeviceMesh = next(iter(layouts.values())).mesh
        self.reduce_dtype = reduce_dtype
        # Layers are alike: how leaves travel is found once for all layers of a kind.
        of_leaf = functools.cache(
            functools.partial(
                plan_leaf, sizes=axis_sizes(self.mesh), coordinate=tuple(self.mesh.get_coordinate() or ())
            )
        )

        @functools.cache
        def of_leaves(leaves: tuple[_Declared, ...]) -> LayerPlan:
            return plan_layer(
                [of_leaf(leaf.shape, leaf.placements, kept=leaf.kept) for leaf in leaves],
                [leaf.wire for leaf in leaves],
            )

        self._layers: dict[str, _Layer] = {}
        for name, layout in layouts.items():
            trees = ((given or {}).get(name) for given in (kept, gather_dtypes, fp8_dims))
            declared = _declared(layout, *trees)
            plan, wires = of_leaves(tuple(declared.values())), tuple(leaf.wire for leaf in declared.values())
            offsets, size = leaf_offsets(plan, [wire.dtype.itemsize for wire in wires])
            self._layers[name] = _Layer(plan, tuple(declared), wires, offsets, size)
        self._buffers: dict[int, Tensor] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each layer's gathered parameters, for ``memory.Gathers``."""
        return {name: layer.size for name, layer in self._layers.items()}

    def layer_bytes(self, name: str) -> LayerBytes:
        """What the layer ``name`` takes on this rank. Shards are taken to be float32."""
        known = self._layers[name]
        plan, width = known.plan, self.reduce_dtype.itemsize
        gathered, reduction, rounding = known.size, 0, 0

        def received(sent: int, ranks: int) -> int:
            return sent if self.mesh.device_type == "cpu" else sent // ranks  # see _reduce_start

        for index, (leaf, wire) in enumerate(zip(plan.leaves, known.wires, strict=True)):
            numel, dtype, part = math.prod(leaf.shape), wire.dtype, leaf.part.shape
            if wire.fp8_dim is not None:
                whole = 0 if leaf.gathered else wire.numel(part)
                rounding = max(rounding, _fp8.working_bytes(part) + whole)
            if not leaf.gathered:
                gathered += numel * dtype.itemsize * (dtype != torch.float32 or wire.fp8_dim is not None)
            elif index in plan.alone:
                gathered += wire.numel(part) * wire.travels.itemsize * (wire.travels != torch.float32)
                reduction += received(numel * width, len(leaf.parts))
            reduction += numel * width * (dtype != self.reduce_dtype and index in plan.alone)
        for (_, dtype), packed in plan.packed.items():
            ranks = len(plan.leaves[packed.leaves[0]].parts)
            gathered += (ranks + 1) * packed.sent_size * dtype.itemsize
            reduction += ranks * packed.size * width + received(ranks * packed.size * width, ranks)
        for members in plan.summed.values():
            reduction += sum(math.prod(plan.leaves[index].part.shape) for index in members) * width
        return LayerBytes(
            gathered + rounding, sum(math.prod(leaf.part.shape) for leaf in plan.leaves) * width, reduction
        )

    @property
    def plans(self) -> dict[str, LayerPlan]:
        """How each layer travels, on this rank."""
        return {name: layer.plan for name, layer in self._layers.items()}

    def dtypes(self, layer: str) -> tuple[torch.dtype, ...]:
        """In which the leaves of ``layer`` are computed with."""
        return tuple(wire.dtype for wire in self._layers[layer].wires)

    def messages(self, layer: str) -> dict[tuple[str, ...], int]:
        """Bytes of the gathered leaves of ``layer`` as they travel, all parts together, by the axes of their gather."""
        known, found = self._layers[layer], dict[tuple[str, ...], int]()
        for leaf, wire in zip(known.plan.leaves, known.wires, strict=True):
            if leaf.gathered:
                size = wire.travels.itemsize * sum(wire.numel(part.shape) for part in leaf.parts)
                found[leaf.gathered] = found.get(leaf.gathered, 0) + size
        return found

    def store(self, shards: Mapping[str, Tree]) -> ShardedStore:
        """A store for one step.

        Args:
          shards: this rank's part of every layer.
        """
        return ShardedStore(self, shards)

    def reserve(self, schedule: Schedule) -> None:
        """Makes the gather buffers of ``schedule``, each as large as the largest layer that comes to it.

        Before the first gather: a graph that is kept refers to a buffer's memory, which must not change afterwards.
        """
        largest: dict[int, int] = {}
        for one in schedule:
            if isinstance(one, Gather):
                largest[one.buffer] = max(largest.get(one.buffer, 0), self.sizes[one.layer])
        for number, size in largest.items():
            self.buffer(number, size)

    def buffer(self, number: int, size: int) -> Tensor:
        """Gather buffer ``number``, uint8 of at least ``size``: the same memory in every step."""
        held = self._buffers.get(number)
        if held is None or held.numel() < size:
            held = self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=self.mesh.device_type)
        return held

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        """The ranks along ``axes``."""
        return axis_group(self.mesh, *axes)


class _Gathered(NamedTuple):
    """A layer that is here or on its way."""

    leaves: list[Tensor]
    finish: list[Callable[[], None]]  # to be called before the leaves are read


class ShardedStore:
    """The layers of one step; see ``memory.Store``."""

    def __init__(self, layers: ShardedLayers, shards: Mapping[str, Tree]) -> None:
        self._layers = layers
        self._shards: dict[str, list[Tensor]] = {}
        self._specs = {}
        for name, tree in shards.items():
            self._shards[name], self._specs[name] = pytree.tree_flatten(tree)
        self._here: dict[str, _Gathered] = {}
        self._sums: dict[str, dict[str, Tensor]] = {name: {} for name in shards}
        self._reduced: dict[str, dict[str, Tensor]] = {name: {} for name in shards}
        self._reducing: dict[str, list[Callable[[], dict[str, Tensor]]]] = {}

    def gather(self, layer: str, buffer: int) -> None:
        """Begins to bring the layer's leaves together in ``buffer``."""
        known, shards = self._layers._layers[layer], self._shards[layer]
        memory = self._layers.buffer(buffer, known.size)
        with torch.no_grad():
            gathered = _in_buffer(known, memory)
            leaves = [
                gathered[index] if index in gathered else _whole(shard, wire)
                for index, (shard, wire) in enumerate(zip(shards, known.wires, strict=True))
            ]
            # What is written has a version of its own. Graphs that are kept refer to the leaves, and trust that what
            # they saved comes back the same; the backend writes at any time, from its own threads.
            written = _in_buffer(known, memory.data)
            finish = [
                self._gather_alone(known, index, shards[index], memory.data, written) for index in known.plan.alone
            ]
            for (axes, dtype), packed in known.plan.packed.items():
                finish.append(self._gather_packed(known, packed, shards, written, axes, dtype))
        self._here[layer] = _Gathered(leaves, finish)

    def _gather_alone(
        self, known: _Layer, index: int, shard: Tensor, memory: Tensor, written: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        plan, wire, leaf = known.plan.leaves[index], known.wires[index], written[index]
        group = self._layers.group(plan.gathered)
        if wire.fp8_dim is None:
            return _gather_start(leaf.view(-1), shard.to(wire.dtype).contiguous().view(-1), group)
        own = torch.empty(wire.numel(plan.part.shape), dtype=torch.uint8, device=shard.device)
        wire.write(own, shard)
        # Messages arrive at the end of the leaf's own room, and are read from the first to the last: what is written
        # reaches no message that is still to come, because a message has no more bytes than its part.
        end = known.offsets[index] + leaf.nbytes
        everyone = memory[end - len(plan.parts) * own.numel() : end].view(len(plan.parts), -1)
        wait = _gather_start(everyone.view(-1), own, group)

        def finish() -> None:
            wait()
            for message, part in zip(everyone, plan.parts, strict=True):
                out = leaf[part.at]
                if out.data_ptr() + out.nbytes > message.data_ptr():
                    message = own.copy_(message)  # it would be overwritten while it is read
                wire.read(message, out)

        return finish

    def _gather_packed(
        self,
        known: _Layer,
        packed: Packed,
        shards: Sequence[Tensor],
        written: Mapping[int, Tensor],
        axes: tuple[str, ...],
        dtype: torch.dtype,
    ) -> Callable[[], None]:
        group = self._layers.group(axes)
        # Backends do not know fp8: its bytes travel.
        sent = torch.uint8 if dtype == _fp8.E4M3 else dtype
        own = torch.empty(packed.sent_size, dtype=sent, device=self._layers.mesh.device_type)
        for index, offset in zip(packed.leaves, packed.sent_offsets, strict=True):
            wire, shard = known.wires[index], shards[index]
            wire.write(own[offset : offset + wire.numel(shard.shape)], shard)
        everyone = own.new_empty(dist.get_world_size(group), packed.sent_size)
        wait = _gather_start(everyone.view(-1), own, group)

        def finish() -> None:
            wait()
            for index, offset in zip(packed.leaves, packed.sent_offsets, strict=True):
                wire = known.wires[index]
                for share, part in zip(everyone, known.plan.leaves[index].parts, strict=True):
                    wire.read(share[offset : offset + wire.numel(part.shape)], written[index][part.at])

        return finish

    def parameters(self, layer: str) -> Tree:
        """The leaves as they are computed with, once they are there."""
        here = self._here[layer]
        with torch.no_grad():
            while here.finish:
                here.finish.pop(0)()
        return pytree.tree_unflatten(here.leaves, self._specs[layer])

    def release(self, layer: str) -> None:
        """Waits for what is still on its way: the buffer is free for the next layer."""
        self.parameters(layer)
        del self._here[layer]

    def add_gradient(self, layer: str, gradient: Mapping[str, Tensor]) -> None:
        """Adds leaf by leaf."""
        add_leaves(self._sums[layer], gradient)

    def reduce(self, layer: str) -> None:
        """Begins to sum the layer's gradient over the ranks that have a part of it, or a copy."""
        known, sums = self._layers._layers[layer], self._sums[layer]
        full = [self._full(known, index, sums) for index in range(len(known.paths))]
        waits: dict[int, Callable[[], Tensor]] = {}
        with torch.no_grad():
            for index in known.plan.alone:
                plan = known.plan.leaves[index]
                start = _reduce_start(
                    full[index].to(self._layers.reduce_dtype).contiguous().view(-1), self._layers.group(plan.gathered)
                )
                waits[index] = _shaped(start, plan.part.shape)
            for (axes, _), packed in known.plan.packed.items():
                waits |= self._reduce_packed(known, packed, full, axes)
        for index, leaf in enumerate(known.plan.leaves):
            if not leaf.gathered:
                waits[index] = _ready(full[index].to(self._layers.reduce_dtype))

        def finish() -> dict[str, Tensor]:
            done = {index: wait() for index, wait in waits.items()}
            for axes, members in known.plan.summed.items():
                _sum_over([done[index] for index in members], self._layers.group(axes))
            return {known.paths[index]: leaf for index, leaf in done.items()}

        self._reducing.setdefault(layer, []).append(finish)

    def _full(self, known: _Layer, index: int, sums: Mapping[str, Tensor]) -> Tensor:
        found = sums.get(known.paths[index])
        if found is not None:
            return found
        plan = known.plan.leaves[index]
        return torch.zeros(plan.shape, dtype=known.wires[index].dtype, device=self._layers.mesh.device_type)

    def _reduce_packed(
        self, known: _Layer, packed: Packed, full: Sequence[Tensor], axes: tuple[str, ...]
    ) -> dict[int, Callable[[], Tensor]]:
        group = self._layers.group(axes)
        ranks = dist.get_world_size(group)
        shares = torch.zeros(ranks, packed.size, dtype=self._layers.reduce_dtype, device=full[0].device)
        for index, offset in zip(packed.leaves, packed.offsets, strict=True):
            for share, part in zip(shares, known.plan.leaves[index].parts, strict=True):
                _cut(share, offset, part.shape).copy_(full[index][part.at])
        wait = _once(_reduce_start(shares.view(-1), group))
        return {
            index: _cut_later(wait, offset, known.plan.leaves[index].part.shape)
            for index, offset in zip(packed.leaves, packed.offsets, strict=True)
        }

    def drop_gradient(self, layer: str) -> None:
        """Waits for the sums over ranks, adds them to this rank's part, and frees the rest."""
        for finish in self._reducing.pop(layer, []):
            add_leaves(self._reduced[layer], finish())
        self._sums[layer].clear()

    def gradients(self) -> dict[str, Tree]:
        """What this rank keeps of every layer's gradient, in the shards' dtype; zeros where nothing was added."""
        out = {}
        for layer, shards in self._shards.items():
            paths, reduced = self._layers._layers[layer].paths, self._reduced.pop(layer)
            leaves = [
                reduced[path].to(shard.dtype) if path in reduced else torch.zeros_like(shard)
                for path, shard in zip(paths, shards, strict=True)
            ]
            out[layer] = pytree.tree_unflatten(leaves, self._specs[layer])
        return out


def _declared(layout: Layout, kept: Tree | None, dtypes: Tree | None, fp8_dims: Tree | None) -> dict[str, _Declared]:
    """The leaves of a layer by their paths."""
    shapes, what = layout.shapes, "the layout's shapes"
    none = map_leaves(lambda path, shape: frozenset(), shapes, what)
    dtypes = map_leaves(lambda path, shape: torch.float32, shapes, what) if dtypes is None else dtypes
    fp8_dims = map_leaves(lambda path, shape: None, shapes, what) if fp8_dims is None else fp8_dims
    others = (
        ("the placements", layout.placements),
        ("the kept axes", none if kept is None else kept),
        ("the gather dtypes", dtypes),
        ("the dimensions of fp8", fp8_dims),
    )
    leaves = [
        _Declared(shape, placements, axes, Wire(dtype, dim))
        for _, (shape, placements, axes, dtype, dim) in zip_leaves(shapes, what, *others)
    ]
    return dict(zip(leaf_paths(none), leaves, strict=True))


def _in_buffer(known: _Layer, memory: Tensor) -> dict[int, Tensor]:
    """The leaves that are brought together, as they lie in a buffer."""
    return {
        index: memory[offset : offset + math.prod(plan.shape) * wire.dtype.itemsize].view(wire.dtype).view(plan.shape)
        for index, (plan, wire, offset) in enumerate(zip(known.plan.leaves, known.wires, known.offsets, strict=True))
        if plan.gathered
    }


def _whole(leaf: Tensor, wire: Wire) -> Tensor:
    """A leaf that need not travel, as if it had."""
    return leaf.to(wire.dtype) if wire.fp8_dim is None else _fp8.round_to_fp8(leaf, wire.fp8_dim, wire.dtype)


def _cut(share: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    return share[offset : offset + math.prod(shape)].view(tuple(shape))


def _gather_start(out: Tensor, own: Tensor, group: ProcessGroup) -> Callable[[], None]:
    """Begins an all-gather of ``own`` [m] into ``out`` [n * m]."""
    call = Call("all_gather", own, group)
    with call:
        work = all_gather_single(out, own, group=group, async_op=True)

    def wait() -> None:
        # ``own`` must live until here.
        with Call("all_gather", own, group):
            work.wait()

    return wait


def _reduce_start(shares: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Begins a reduce-scatter of ``shares`` [n * m]; waiting gives the sum of this rank's [m]."""
    ranks = dist.get_world_size(group)
    with Call("reduce_scatter", shares, group):
        if dist.get_backend(group) == "gloo":
            # gloo reduces everything on every rank and keeps a part: twice the bytes, and twice the time.
            received = torch.empty_like(shares)
            work = dist.all_to_all_single(received, shares, group=group, async_op=True)
        else:
            received = shares.new_empty(shares.numel() // ranks)
            work = reduce_scatter_single(received, shares, group=group, async_op=True)

    def wait() -> Tensor:
        with Call("reduce_scatter", shares, group):
            work.wait()
        return received if received.numel() != shares.numel() else received.view(ranks, -1).sum(0)

    return wait


def _sum_over(leaves: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sums the leaves over ``group`` in place, in one message."""
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    with Call("all_reduce", flat, group):
        dist.all_reduce(flat, group=group)
    for leaf, part in zip(leaves, flat.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.copy_(part.view(leaf.shape))


def _once(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``function``, called at most once."""
    found: list[Tensor] = []

    def call() -> Tensor:
        if not found:
            found.append(function())
        return found[0]

    return call


def _shaped(wait: Callable[[], Tensor], shape: Sequence[int]) -> Callable[[], Tensor]:
    return lambda: wait().view(tuple(shape))


def _cut_later(wait: Callable[[], Tensor], offset: int, shape: Sequence[int]) -> Callable[[], Tensor]:
    return lambda: _cut(wait(), offset, shape)


def _ready(leaf: Tensor) -> Callable[[], Tensor]:
    return lambda: leaf
