"""What a chain's segments cost, found by running them: bytes of every value, working memory, arithmetic.

The same functions that train are run, on real tensors or on fake ones: there is no second set of formulas.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ._chain import Chain, Parameters, Segment
from ._pool import tree_bytes
from ._replay import first_of_each_kind, record_segment, run_backward, run_segment
from ._schedule import Value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live. Fake tensors count as real ones would.

    What an operator allocates inside itself and frees again is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._track(leaf, counted=False)  # was there before
        out = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._track(leaf, counted=True)
        return out

    def _track(self, tensor: Tensor, counted: bool) -> None:
        if tensor.is_mkldnn:
            # oneDNN's own copy of a matrix: it shows no storage, so the tensor stands for its memory.
            self._note(tensor, id(tensor), tensor.nbytes if counted else 0)
        else:
            storage = tensor.untyped_storage()
            self._note(storage, storage._cdata, storage.nbytes() if counted else 0)

    def _note(self, memory: Any, key: int, size: int) -> None:
        if key in self._known:
            return

        def forget(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(memory, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


class Variant(NamedTuple):
    """One way to run a segment."""

    record: bool
    given: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SegmentProfile:
    """What one segment costs, for one microbatch."""

    output: int
    """Bytes of the next segment's input."""
    residuals: Mapping[str, int]
    """Bytes of each."""
    graph: Mapping[tuple[str, ...], int]
    """Bytes that a graph holds besides its input and the residuals it was given, by their names."""
    gradient: Mapping[str, Mapping[str, int]]
    """Bytes of each leaf's gradient, by layer and leaf."""
    forward: Mapping[Variant, int]
    """Bytes at the peak of a run over those before it."""
    backward: Mapping[tuple[str, ...], int]
    """The same for the backward of a graph, by the residuals it was given."""
    forward_flops: Mapping[tuple[str, ...], int]
    """Floating-point operations of matrix products and attention, by the residuals given."""
    backward_flops: Mapping[tuple[str, ...], int]


class UpdateBytes(NamedTuple):
    """What the optimizer's update of one layer takes."""

    state: int
    """Of the state; the new one is as large."""
    working: int
    """At the peak of the update, over what is there before it."""
    kept: int = 0
    """What comes to stay: new parameters, and in HBM a new state, beside the old ones. Nothing where they take their
    memory."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of everything that a schedule moves, in the terms of :func:`verify`."""

    segments: Mapping[str, SegmentProfile]
    previous: Mapping[str, str | None]
    """The segment whose output is the input."""
    gathered_layers: Mapping[str, int]
    """Bytes of each layer's gathered parameters."""
    reduced_layers: Mapping[str, int]
    """Bytes of this rank's part of each layer's gradient."""
    reductions: Mapping[str, int]
    """Bytes that reducing a layer's gradient needs besides it and the result."""
    resident: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """What is there all the time, by tier and name: shards, optimizer state."""
    context: int = 0
    """Bytes of a microbatch's context (:func:`profile_context`), from its first run of a segment to its last."""
    updates: Mapping[str, UpdateBytes] = dataclasses.field(default_factory=dict)
    """Of each layer, where the optimizer is part of the schedule."""

    def value(self, value: Value, given: tuple[str, ...] = ()) -> int:
        """Bytes of a value; of a graph, for the residuals it was given."""
        match value.kind:
            case "parameters":
                return 0  # they lie in a buffer that is counted once
            case "input" | "cotangent":
                before = self.previous[value.of]
                return 0 if before is None else self.segments[before].output
            case "residual":
                return self.segments[value.of].residuals[value.name]
            case "graph":
                return self.segments[value.of].graph[self._in_order(value.of, given)]
            case "reduced":
                return self.reduced_layers[value.of]
            case "norm":
                return 0  # a number
            case "state":
                return self.updates[value.of].state
            case "updated":
                return self.updates[value.of].kept
            case "gradient":
                raise ValueError("a gradient grows by its segments' leaves: see gradient()")

    def gathered(self, layer: str) -> int:
        """Bytes that a gather buffer needs for ``layer``."""
        return self.gathered_layers[layer]

    def gradient(self, segment: str, layer: str) -> Mapping[str, int]:
        """Bytes of the leaves of ``layer`` to which ``segment`` gives a gradient."""
        return self.segments[segment].gradient.get(layer, {})

    def forward(self, segment: str, record: bool, given: tuple[str, ...]) -> int:
        """Working memory of a run, in bytes over those before it."""
        return self.segments[segment].forward[Variant(record, self._in_order(segment, given))]

    def backward(self, segment: str, given: tuple[str, ...]) -> int:
        """Working memory of a graph's backward, in bytes over those before it."""
        return self.segments[segment].backward[self._in_order(segment, given)]

    def reduction(self, layer: str) -> int:
        """Working memory of reducing a layer's gradient, in bytes."""
        return self.reductions.get(layer, 0)

    def _in_order(self, segment: str, given: tuple[str, ...]) -> tuple[str, ...]:
        """Residuals in the order in which the segment declares them."""
        return tuple(name for name in self.segments[segment].residuals if name in given)


def profile_chain(chain: Chain, parameters: Parameters, batch: Any) -> dict[str, SegmentProfile]:
    """Runs every kind of segment once in each way a schedule may, and notes what it costs.

    Args:
      chain: the segments.
      parameters: by layer; real or fake tensors.
      batch: one microbatch.

    Returns:
      the profile of every segment, by name; segments of one kind are alike but for the names of their layers.
    """
    context = chain.prepare(batch)
    kinds = {
        segment.kind: _profile_segment(segment, own, x, context)
        for segment, own, x in first_of_each_kind(chain, parameters, context)
    }
    found: dict[str, SegmentProfile] = {}
    for segment in chain.segments:
        profile = kinds[segment.kind]
        gradient = dict(zip(segment.layers, profile.gradient.values(), strict=True))
        found[segment.name] = dataclasses.replace(profile, gradient=gradient)
    return found


def profile_context(chain: Chain, batch: Any) -> int:
    """Bytes of what ``chain.prepare`` makes of a microbatch, besides the microbatch itself."""
    with LiveBytes() as memory:
        context = chain.prepare(batch)
        size: int = memory.live
    del context
    return size


def profile_here(chain: Chain, parameters: Parameters, batch: Any) -> Sizes:
    """The sizes of a chain whose layers are all whole on this process.

    Args:
      chain: the segments.
      parameters: by layer; real or fake tensors.
      batch: one microbatch.
    """
    names = [segment.name for segment in chain.segments]
    previous = dict(zip(names, [None, *names[:-1]], strict=True))
    profile = profile_chain(chain, parameters, batch)
    return Sizes(profile, previous, {}, {}, {}, context=profile_context(chain, batch))


def least(counts: Sequence[SegmentProfile]) -> SegmentProfile:
    """Of several counts of one segment, what none of them has more than it must.

    What is still held of something before adds to a graph, or to a peak. Where it adds to the graph, the backward,
    which is counted from there, has as much less: so the least of both together is taken.
    """
    first = counts[0]
    graph = {given: min(one.graph[given] for one in counts) for given in first.graph}
    forward = {variant: min(one.forward[variant] for one in counts) for variant in first.forward}
    both = {given: min(one.graph[given] + one.backward[given] for one in counts) for given in first.backward}
    backward = {given: peak - graph[given] for given, peak in both.items()}
    return dataclasses.replace(first, graph=graph, forward=forward, backward=backward)


def variants_of(segment: Segment) -> tuple[tuple[str, ...], ...]:
    """The residuals that a run may be given: none the first time, later the decisions and any of the others."""
    others = [name for name in segment.residuals if name not in segment.decisions]
    chosen: Iterable[tuple[str, ...]] = itertools.chain.from_iterable(
        itertools.combinations(others, count) for count in range(len(others) + 1)
    )
    given = [tuple(name for name in segment.residuals if name in (*segment.decisions, *some)) for some in chosen]
    return tuple(dict.fromkeys([(), *given]))


def _profile_segment(segment: Segment, parameters: Parameters, x: Tensor | None, context: Any) -> SegmentProfile:
    first = run_segment(segment, parameters, x, context, {})
    output = 0 if first.output is None else tree_bytes(first.output)
    residuals = dict(first.residuals)
    if missing := sorted(set(segment.residuals) - set(residuals)):
        raise ValueError(f"segment {segment.name!r} declares the residuals {missing} and did not return them")
    cotangent = None if first.output is None else torch.ones_like(first.output)
    forward, graph, backward, forward_flops, backward_flops = {}, {}, {}, {}, {}
    gradient: dict[str, dict[str, int]] = {}
    for given in variants_of(segment):
        handed = {name: residuals[name] for name in given}
        with LiveBytes() as memory, FlopCounterMode(display=False) as flops:
            result = run_segment(segment, parameters, x, context, handed)
            forward[Variant(False, given)] = memory.peak
            forward_flops[given] = flops.get_total_flops()
            del result
        with LiveBytes() as memory:
            recorded = record_segment(segment, parameters, x, context, handed)
            forward[Variant(True, given)] = memory.peak
            tape = recorded.tape
            del recorded
            before = graph[given] = memory.live
            memory.peak = before
            with FlopCounterMode(display=False) as flops:
                gradients = run_backward(tape, cotangent)
            backward[given] = memory.peak - before
            backward_flops[given] = flops.get_total_flops()
            for layer, leaves in gradients.parameters.items():
                gradient[layer] = {name: tree_bytes(leaf) for name, leaf in leaves.items()}
            del gradients, tape
    sizes = {name: tree_bytes(residuals[name]) for name in segment.residuals}
    return SegmentProfile(output, sizes, graph, gradient, forward, backward, forward_flops, backward_flops)
