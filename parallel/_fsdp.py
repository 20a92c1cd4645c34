"""Fully sharded layers: brought together before they compute, their gradients summed and scattered after.

What a layer sends, per rank and gather, with ``n`` ranks along the axes that split a leaf of ``p`` elements evenly:
``(n - 1) / n * p`` elements of the gather dtype; a reduction, as much of the reduce dtype. Uneven parts are padded to
the largest. A leaf that several ranks hold whole is not gathered; its gradient is summed over them, which sends
``2 (n - 1) / n * p``.
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

from ._collective_functions import Call, all_gather_single, reduce_scatter_single
from ._layout import Layout
from ._mesh import axis_group, axis_sizes
from ._packing import LayerPlan, LeafPlan, Packed, leaf_offsets, plan_layer, plan_leaf
from ._tree import Tree, map_leaves, zip_leaves


class _Layer(NamedTuple):
    """What is known of a layer before anything runs."""

    plan: LayerPlan
    paths: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # in which each leaf is gathered and computed with
    offsets: tuple[int, ...]  # of each leaf in a buffer, in bytes
    size: int  # bytes of a buffer


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
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Plans every layer's messages; nothing is communicated.

        Args:
          layouts: of each layer's tree, all on one mesh.
          kept: for each leaf a ``frozenset`` of the mesh axes along which it stays split (``expert_axes``); by default
            none.
          gather_dtypes: in which each leaf travels and is computed with; by default float32.
          reduce_dtype: in which gradients are summed over ranks.

        Raises:
          ValueError: for no layers, or trees that differ; the leaf is named.
        """
        if not layouts:
            raise ValueError("no layers to shard")
        self.mesh: DeviceMesh = next(iter(layouts.values())).mesh
        self.reduce_dtype = reduce_dtype
        # Layers are alike: how a leaf travels is found once for all leaves of a kind.
        find = functools.cache(
            functools.partial(
                plan_leaf, sizes=axis_sizes(self.mesh), coordinate=tuple(self.mesh.get_coordinate() or ())
            )
        )
        self._layers = {
            name: self._plan(layout, (kept or {}).get(name), (gather_dtypes or {}).get(name), find)
            for name, layout in layouts.items()
        }
        self._buffers: dict[int, Tensor] = {}

    def _plan(
        self, layout: Layout, kept: Tree | None, dtypes: Tree | None, plan_leaf: Callable[..., LeafPlan]
    ) -> _Layer:
        none = map_leaves(lambda path, shape: frozenset(), layout.shapes, "the layout's shapes")
        single = map_leaves(lambda path, shape: torch.float32, layout.shapes, "the layout's shapes")
        leaves, leaf_dtypes = [], []
        for _, (shape, placements, axes, dtype) in zip_leaves(
            layout.shapes,
            "the layout's shapes",
            ("the placements", layout.placements),
            ("the kept axes", none if kept is None else kept),
            ("the gather dtypes", single if dtypes is None else dtypes),
        ):
            leaves.append(plan_leaf(shape, placements, kept=axes))
            leaf_dtypes.append(dtype)
        plan = plan_layer(leaves, leaf_dtypes)
        offsets, size = leaf_offsets(plan, [dtype.itemsize for dtype in leaf_dtypes])
        return _Layer(plan, tuple(leaf_paths(none)), tuple(leaf_dtypes), offsets, size)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each layer's gathered parameters, for ``memory.Gathers``."""
        return {name: layer.size for name, layer in self._layers.items()}

    def layer_bytes(self, name: str) -> LayerBytes:
        """What the layer ``name`` takes on this rank. Shards are taken to be float32."""
        known = self._layers[name]
        plan, width = known.plan, self.reduce_dtype.itemsize
        gathered, reduction = known.size, 0

        def received(sent: int, ranks: int) -> int:
            return sent if self.mesh.device_type == "cpu" else sent // ranks  # see _reduce_start

        for index, (leaf, dtype) in enumerate(zip(plan.leaves, known.dtypes, strict=True)):
            numel = math.prod(leaf.shape)
            if not leaf.gathered:
                gathered += 2 * numel * dtype.itemsize * (dtype != torch.float32)
            elif index in plan.alone:
                gathered += math.prod(leaf.part.shape) * dtype.itemsize * (dtype != torch.float32)
                reduction += received(numel * width, len(leaf.parts))
            reduction += numel * width * (dtype != self.reduce_dtype and index in plan.alone)
        for (_, dtype), packed in plan.packed.items():
            ranks = len(plan.leaves[packed.leaves[0]].parts)
            gathered += (ranks + 1) * packed.size * dtype.itemsize
            reduction += ranks * packed.size * width + received(ranks * packed.size * width, ranks)
        for members in plan.summed.values():
            reduction += sum(math.prod(plan.leaves[index].part.shape) for index in members) * width
        return LayerBytes(gathered, sum(math.prod(leaf.part.shape) for leaf in plan.leaves) * width, reduction)

    @property
    def plans(self) -> dict[str, LayerPlan]:
        """How each layer travels, on this rank."""
        return {name: layer.plan for name, layer in self._layers.items()}

    def dtypes(self, layer: str) -> tuple[torch.dtype, ...]:
        """In which the leaves of ``layer`` travel and are computed with."""
        return self._layers[layer].dtypes

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
        # What is written has a version of its own. Graphs that are kept refer to the leaves, and trust that what they
        # saved comes back the same; the backend writes at any time, from its own threads.
        leaves, written = _leaves(known, memory, shards), _leaves(known, memory.data, shards)
        finish: list[Callable[[], None]] = []
        with torch.no_grad():
            for index in known.plan.alone:
                shard = shards[index].to(known.dtypes[index]).contiguous()
                group = self._layers.group(known.plan.leaves[index].gathered)
                finish.append(_gather_start(written[index].view(-1), shard.view(-1), group))
            for (axes, dtype), packed in known.plan.packed.items():
                finish.append(self._gather_packed(known, packed, shards, written, axes, dtype))
        self._here[layer] = _Gathered(leaves, finish)

    def _gather_packed(
        self,
        known: _Layer,
        packed: Packed,
        shards: Sequence[Tensor],
        written: Sequence[Tensor],
        axes: tuple[str, ...],
        dtype: torch.dtype,
    ) -> Callable[[], None]:
        group = self._layers.group(axes)
        own = torch.empty(packed.size, dtype=dtype, device=self._layers.mesh.device_type)
        for index, offset in zip(packed.leaves, packed.offsets, strict=True):
            _cut(own, offset, shards[index].shape).copy_(shards[index])
        everyone = own.new_empty(dist.get_world_size(group), packed.size)
        wait = _gather_start(everyone.view(-1), own, group)

        def finish() -> None:
            wait()
            for index, offset in zip(packed.leaves, packed.offsets, strict=True):
                for share, part in zip(everyone, known.plan.leaves[index].parts, strict=True):
                    written[index][part.at].copy_(_cut(share, offset, part.shape))

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
        return torch.zeros(plan.shape, dtype=known.dtypes[index], device=self._layers.mesh.device_type)

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


def _leaves(known: _Layer, memory: Tensor, shards: Sequence[Tensor]) -> list[Tensor]:
    """The leaves as they lie in a buffer; those that are whole already, as they are."""
    leaves = []
    for plan, dtype, offset, shard in zip(known.plan.leaves, known.dtypes, known.offsets, shards, strict=True):
        if plan.gathered:
            leaves.append(memory[offset : offset + math.prod(plan.shape) * dtype.itemsize].view(dtype).view(plan.shape))
        else:
            leaves.append(shard.to(dtype))
    return leaves


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
