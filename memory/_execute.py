"""Running a schedule: the instructions that were verified and simulated, on real memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._chain import Chain, Tree, add_losses
from ._copies import Copies, Copy, HostCopies
from ._pool import FirstFit, aligned, is_tensor, tree_bytes
from ._replay import Tape, record_segment, run_backward, run_segment
from ._schedule import (
    HBM,
    Backward,
    ChainIndex,
    Drop,
    Fetch,
    Forward,
    Gather,
    Instruction,
    Norm,
    Offload,
    Place,
    ReduceScatter,
    Release,
    Schedule,
    Update,
    Value,
    describe,
)
from ._store import Store
from ._trace import trace_range


class Execution(NamedTuple):
    """What a schedule computed."""

    loss: Tensor  # []; summed over the microbatches
    gradients: dict[str, Tree]  # by layer, as the store gives them; none where the schedule has updates
    metrics: tuple[tuple[Tree, ...], ...]  # of each microbatch, of each segment


class Updater(Protocol):
    """The optimizer of a step, layer by layer. The parameters are its own; states come and go by the schedule."""

    def state(self, layer: str) -> Tree:
        """The layer's state before the step, in its home."""
        ...

    def home(self, layer: str) -> Tree:
        """Where the layer's new state goes, if its home is a further tier: tensors like ``state``'s, or those."""
        ...

    def begin(self, done: Execution) -> None:
        """Told once, before the first update, what was computed. It must not keep the gradients.

        Takes the norm of the gradient, and decides whether the step is made.
        """
        ...

    def update(self, layer: str, gradient: Tree, state: Tree) -> Tree:
        """Makes the layer's new parameters, and returns the new state: ``state`` itself when no step is made.

        Changes neither argument.
        """
        ...


def execute(
    schedule: Schedule,
    chain: Chain,
    store: Store,
    batches: Sequence[Any],
    *,
    slabs: Mapping[str, int] | None = None,
    copies: Copies | None = None,
    updater: Updater | None = None,
) -> Execution:
    """Runs a schedule that :func:`verify` passed.

    Equal to ``torch.func.grad_and_value`` of :func:`run_chain`, summed over the microbatches: bit for bit on one
    process, whatever is recomputed or moved. A leaf that two segments read is the exception with several microbatches:
    its summands are added in the order in which the segments run backwards, not microbatch by microbatch. Uses plain
    autograd inside, so it is no place for transforms. In a trace of ``torch.profiler`` every instruction is a range,
    named as the schedule prints it.

    Args:
      schedule: the instructions.
      chain: what they are for.
      store: the parameters, and where gradients go.
      batches: the microbatches, ``schedule.microbatches`` of them.
      slabs: bytes of each further tier: what ``verify`` reported as ``slab``. Reserved at once; a tier that is not
        named has none.
      copies: how values get to further tiers; by default within the host's memory.
      updater: the optimizer, where the schedule has its updates: the results are with it.

    Raises:
      ValueError: for another number of microbatches, a slab of less than 0 bytes, or updates without an updater.
      MemoryError: when a tier's slab is too small.
    """
    if len(batches) != schedule.microbatches:
        raise ValueError(f"{len(batches)} microbatches for a schedule of {schedule.microbatches}")
    for tier, size in (slabs or {}).items():
        if size < 0:
            raise ValueError(f"slabs: {size} bytes of {tier!r}; at least 0")
    copies = HostCopies() if copies is None else copies
    run = _Run(schedule, chain, store, batches, dict(slabs or {}), copies, updater)
    for instruction in schedule:
        with trace_range(functools.partial(describe, instruction)):
            run.step(instruction)
    return run.outcome()


class _Piece(NamedTuple):
    """A value's copy in a further tier."""

    offset: int  # in its slab; -1 of a state, which is at home
    tree: Tree


class _Run:
    """The values of a step while it runs."""

    def __init__(
        self,
        schedule: Schedule,
        chain: Chain,
        store: Store,
        batches: Sequence[Any],
        slabs: dict[str, int],
        copies: Copies,
        updater: Updater | None,
    ) -> None:
        self.chain, self.index, self.store, self.copies = chain, ChainIndex(chain), store, copies
        self.batches: list[Any] = list(batches)
        self.device = next((leaf.device for leaf in pytree.tree_leaves(self.batches) if is_tensor(leaf)), None)
        self.contexts: dict[int, Any] = {}
        self.values: dict[Value, Tree] = {}
        self.tapes: dict[Value, Tape] = {}
        self.saved: dict[Value, set[int]] = {}  # the storages that a tape keeps, where values are spoiled
        self.pieces: dict[Place, _Piece] = {}
        self.fits = {tier: FirstFit() for tier in slabs}
        self.slabs = {tier: copies.slab(size) for tier, size in slabs.items()}
        # The copies on their way to a place, and those that read one: a place is touched when both are done.
        self.arriving: dict[Place, list[Copy]] = {}
        self.leaving: dict[Place, list[Copy]] = {}
        self.losses: dict[tuple[int, str], Tensor | None] = {}
        self.metrics: dict[tuple[int, str], Tree] = {}
        self.backwards_left = dict.fromkeys(range(len(batches)), len(chain.segments))
        self.homes = schedule.homes
        self.gradients: dict[str, Tree] | None = None  # once the norm is taken
        self._updater = updater
        for layer, tier in schedule.homes.items():
            state = Value("state", layer)
            if tier == HBM:
                self.values[state] = self.updater.state(layer)
            else:
                self.pieces[Place(state, tier)] = _Piece(-1, self.updater.state(layer))

    @property
    def updater(self) -> Updater:
        if self._updater is None:
            raise ValueError("the schedule has updates: it needs an updater")
        return self._updater

    def step(self, instruction: Instruction) -> None:
        match instruction:
            case Gather(layer, buffer):
                self.store.gather(layer, buffer)
            case Release(layer):
                self.store.release(layer)
            case Forward():
                self._forward(instruction)
            case Backward(segment, microbatch):
                self._backward(segment, microbatch)
            case Offload(value, tier):
                self._offload(value, tier)
            case Fetch(value, tier):
                self._fetch(value, tier)
            case Drop(value, tier):
                self._drop(value, tier)
            case ReduceScatter(layer):
                self.store.reduce(layer)
            case Norm():
                done = self.outcome()
                self.updater.begin(done)
                self.gradients = done.gradients
            case Update(bucket):
                self._update(bucket)

    def outcome(self) -> Execution:
        loss: Tensor | None = None
        for microbatch in range(len(self.batches)):
            part: Tensor | None = None
            for segment in self.chain.segments:
                part = add_losses(part, self.losses[microbatch, segment.name])
            loss = add_losses(loss, part)
        if loss is None:
            raise ValueError("no segment of the chain adds to the loss")
        metrics = tuple(
            tuple(self.metrics[microbatch, segment.name] for segment in self.chain.segments)
            for microbatch in range(len(self.batches))
        )
        return Execution(loss, self.store.gradients() if self.gradients is None else {}, metrics)

    def _forward(self, one: Forward) -> None:
        segment = self.index[one.segment]
        parameters = {layer: self.store.parameters(layer) for layer in segment.layers}
        x = self._input(one.segment, one.microbatch)
        given = {name: self._value(Value("residual", one.segment, one.microbatch, name)) for name in one.given}
        context = self._context(one.microbatch)
        first = (one.microbatch, one.segment) not in self.metrics
        needed = one.output or first
        if one.record:
            graph = Value("graph", one.segment, one.microbatch)
            saved: set[int] = set()

            def note(tensor: Tensor) -> Tensor:
                saved.add(tensor.untyped_storage()._cdata)
                return tensor

            hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
            with hooks if self.copies.spoils else nullcontext():
                result, self.tapes[graph] = record_segment(segment, parameters, x, context, given, needed)
            # Not what it was given, which must stay as long: that is for the schedule to see to.
            self.saved[graph] = saved - _storages((x, given, parameters)) if saved else saved
        else:
            result = run_segment(segment, parameters, x, context, given)
        following = self.index.following[one.segment]
        if following is not None and result.output is None:
            raise ValueError(f"segment {one.segment!r} returned no output, which {following!r} needs")
        if one.output and following is not None:
            self.values[Value("input", following, one.microbatch)] = result.output
        for name in one.kept:
            if name not in result.residuals:
                raise ValueError(f"segment {one.segment!r} declares the residual {name!r} and did not return it")
            self.values[Value("residual", one.segment, one.microbatch, name)] = result.residuals[name]
        if first:
            self.metrics[one.microbatch, one.segment] = result.metrics
            self.losses[one.microbatch, one.segment] = result.loss

    def _backward(self, segment: str, microbatch: int) -> None:
        for layer in self.index[segment].layers_backward:
            self.store.parameters(layer)  # the graph refers to them: they must have arrived
        own_input = self._input(segment, microbatch)
        graph = Value("graph", segment, microbatch)
        tape = self.tapes.pop(graph)
        self.saved.pop(graph)
        following = self.index.following[segment]
        cotangent = None if following is None else self.values.pop(Value("cotangent", following, microbatch))
        gradients = run_backward(tape, cotangent)
        del tape
        x = gradients.x
        if x is not None:
            self.values[Value("cotangent", segment, microbatch)] = x
        shared = {leaf.untyped_storage()._cdata for leaf in (x, cotangent, own_input) if leaf is not None}
        for layer, leaves in gradients.parameters.items():
            self.store.add_gradient(layer, {path: _owned(leaf, shared) for path, leaf in leaves.items()})
        self._spoil(cotangent)
        self.backwards_left[microbatch] -= 1
        if not self.backwards_left[microbatch]:
            self.contexts.pop(microbatch, None)
            self.batches[microbatch] = None

    def _update(self, layer: str) -> None:
        value = Value("state", layer)
        state = self._value(value)
        if self.gradients is None:
            raise ValueError(f"update of {layer} before the norm of the gradient")
        self.values[value] = self.updater.update(layer, self.gradients.pop(layer), state)
        if self.homes[layer] != HBM:
            self._left(Place(value))
            self._spoil(state)

    def _offload(self, value: Value, tier: str) -> None:
        tree = self._value(value)
        if value.kind == "state":
            place = Place(value, tier)
            self._arrived(place)
            self._left(place)
            home = self.updater.home(value.of)
            self.pieces[place] = _Piece(-1, home)
            self._copy(tree, home, Place(value), place)
            return
        fit = self.fits.get(tier)
        size = tree_bytes(tree)
        if fit is None:
            raise MemoryError(f"offload of the {value}: the tier {tier!r} has no memory; give its slab")
        offset = fit.allocate(size)
        slab = self.slabs[tier]
        if fit.peak > len(slab):
            raise MemoryError(f"offload of the {value}: {size:,} bytes do not fit in the {len(slab):,} of {tier!r}")
        copied = in_slab(tree, slab[offset : offset + size])
        self.pieces[Place(value, tier)] = _Piece(offset, copied)
        self._copy(tree, copied, Place(value), Place(value, tier))

    def _fetch(self, value: Value, tier: str) -> None:
        place = Place(value, tier)
        self._arrived(place)
        source = self.pieces[place].tree
        # Made like the slab's copies, whose strides are those of the original.
        tree = pytree.tree_map_only(Tensor, lambda leaf: torch.empty_like(leaf, device=self.device), source)
        self.values[value] = tree
        self._copy(source, tree, place, Place(value))

    def _copy(self, source: Tree, destination: Tree, origin: Place, target: Place) -> None:
        pairs = zip(pytree.tree_leaves(source), pytree.tree_leaves(destination), strict=True)
        started = [self.copies.start(a, b) for a, b in pairs if is_tensor(a)]
        self.arriving[target] = started
        self.leaving.setdefault(origin, []).extend(started)

    def _drop(self, value: Value, tier: str) -> None:
        if value.kind == "gradient":
            self.store.drop_gradient(value.of)
            return
        place = Place(value, tier)
        self._arrived(place)
        self._left(place)
        if tier == HBM:
            self._spoil(self.values.pop(value))
        else:
            piece = self.pieces.pop(place)
            self._spoil(piece.tree)
            self.fits[tier].free(piece.offset)

    def _input(self, segment: str, microbatch: int) -> Tensor | None:
        if self.index.preceding[segment] is None:
            return None
        x: Tensor = self._value(Value("input", segment, microbatch))
        return x

    def _value(self, value: Value) -> Tree:
        self._arrived(Place(value))
        return self.values[value]

    def _arrived(self, place: Place) -> None:
        for copy in self.arriving.pop(place, ()):
            copy.wait()

    def _left(self, place: Place) -> None:
        for copy in self.leaving.pop(place, ()):
            copy.wait()

    def _context(self, microbatch: int) -> Any:
        if microbatch not in self.contexts:
            with torch.no_grad():
                self.contexts[microbatch] = self.chain.prepare(self.batches[microbatch])
        return self.contexts[microbatch]

    def _spoil(self, tree: Tree) -> None:
        """Overwrites what was given back, unless a value that is still here has the same memory."""
        if not self.copies.spoils:
            return
        held = _storages((self.values, self.metrics, self.losses, self.contexts, self.batches)).union(
            *self.saved.values()
        )
        for leaf in pytree.tree_leaves(tree):
            if is_tensor(leaf) and leaf.untyped_storage()._cdata not in held:
                self.copies.spoil(leaf)


def _storages(tree: Tree) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(tree) if is_tensor(leaf)}


def in_slab(tree: Tree, piece: Tensor) -> Tree:
    """Tensors like those of ``tree``, strides included, one after the other in ``piece`` (uint8)."""
    leaves, spec = pytree.tree_flatten(tree)
    placed, offset = [], 0
    for leaf in leaves:
        if not is_tensor(leaf):
            placed.append(leaf)
            continue
        size = leaf.numel() * leaf.element_size()
        flat = piece[offset : offset + size].view(leaf.dtype)
        placed.append(flat.as_strided(leaf.shape, torch.empty_like(leaf, device="meta").stride()))
        offset += aligned(size)
    return pytree.tree_unflatten(placed, spec)


def _owned(gradient: Tensor, shared: set[int]) -> Tensor:
    """``gradient`` as memory that may be added to, which joins what is ``shared`` (storages).

    Autograd may hand out the cotangent itself, an expanded value, or the same tensor for two leaves that are added.
    """
    expanded = any(size > 1 and stride == 0 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    owned = gradient.clone() if expanded or gradient.untyped_storage()._cdata in shared else gradient
    shared.add(owned.untyped_storage()._cdata)
    return owned
