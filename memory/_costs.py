"""Seconds of every instruction: from arithmetic and a machine's figures, or measured."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._chain import Chain, Parameters, Segment
from ._hardware import Hardware, Link
from ._profile import Sizes, Variant, variants_of
from ._replay import first_of_each_kind, record_segment, run_backward, run_segment
from ._schedule import HBM, Backward, Fetch, Forward, Gather, Instruction, Offload, ReduceScatter, Schedule, Update


class SegmentSeconds(NamedTuple):
    """Seconds of a segment's runs, by the residuals they are given."""

    forward: Mapping[tuple[str, ...], float]
    backward: Mapping[tuple[str, ...], float]
    without_output: Mapping[tuple[str, ...], float] = {}
    """Of replays for the graph alone, where that is known; else they take as long as a forward."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of everything that a schedule does. Freeing takes none, nor does the norm of the gradient."""

    segments: Mapping[str, SegmentSeconds]
    gather: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By layer."""
    reduce: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By layer."""
    write: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    """From HBM, by tier."""
    read: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    """To HBM, by tier."""
    update: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of the optimizer, by layer."""
    one_link: bool = False
    """Gathers and reductions go over one link, one after the other."""

    def of(self, schedule: Schedule, sizes: Sizes) -> list[float]:
        """Seconds of each instruction.

        Raises:
          ValueError: for a tier, a layer or a way to run a segment that has no figure.
        """
        given: dict[tuple[str, int], tuple[str, ...]] = {}
        out = []
        for one in schedule:
            if isinstance(one, Forward) and one.record:
                given[one.segment, one.microbatch] = one.given
            try:
                out.append(self._seconds(one, sizes, given))
            except KeyError as error:
                raise ValueError(f"no seconds for {one}: nothing is known of {error.args[0]!r}") from None
        return out

    def _seconds(self, one: Instruction, sizes: Sizes, given: Mapping[tuple[str, int], tuple[str, ...]]) -> float:
        match one:
            case Forward(segment):
                known = self.segments[segment]
                if not one.output and one.given in known.without_output:
                    return known.without_output[one.given]
                return known.forward[one.given]
            case Backward(segment, microbatch):
                return self.segments[segment].backward[given[segment, microbatch]]
            case Gather(layer):
                return self.gather[layer]
            case ReduceScatter(layer):
                return self.reduce[layer]
            case Update(bucket):
                return self.update[bucket]
            case Offload(value, tier):
                return self.write[tier].seconds(sizes.value(value))
            case Fetch(value, tier):
                return self.read[tier].seconds(sizes.value(value))
            case _:
                return 0.0


def make_costs(hardware: Hardware, sizes: Sizes, seconds: Mapping[str, SegmentSeconds] | None = None) -> Costs:
    """Costs on a described machine.

    A run of a segment takes as long as its arithmetic, or as long as HBM needs to take what the run allocates at its
    peak and to read its input, whichever is longer. Both are lower bounds: measured ``seconds`` are better.

    Args:
      hardware: the machine.
      sizes: bytes and arithmetic of the segments.
      seconds: measured on the machine, by segment; of :func:`measure_seconds`.
    """
    if seconds is None:
        seconds = {name: _segment_seconds(hardware, sizes, name) for name in sizes.segments}
    elif missing := sorted(set(sizes.segments) - set(seconds)):
        raise ValueError(f"no seconds were measured of the segments {missing}")
    gather, reduce = hardware.gather, hardware.reduce
    return Costs(
        seconds,
        {} if gather is None else {name: gather.seconds(size) for name, size in sizes.gathered_layers.items()},
        {} if reduce is None else {name: reduce.seconds(gradient_bytes(sizes, name)) for name in sizes.gathered_layers},
        {name: tier.write for name, tier in hardware.tiers.items() if name != HBM and tier.write is not None},
        {name: tier.read for name, tier in hardware.tiers.items() if name != HBM and tier.read is not None},
    )


def gradient_bytes(sizes: Sizes, layer: str) -> int:
    """Bytes of a layer's gradient in full."""
    leaves: dict[str, int] = {}
    for segment in sizes.segments:
        leaves |= sizes.gradient(segment, layer)
    return sum(leaves.values())


def _segment_seconds(hardware: Hardware, sizes: Sizes, name: str) -> SegmentSeconds:
    profile, previous = sizes.segments[name], sizes.previous[name]
    read = 0 if previous is None else sizes.segments[previous].output

    def longer(flops: int, size: int) -> float:
        return max(flops / hardware.flops, size / hardware.memory_bandwidth)

    return SegmentSeconds(
        {
            given: longer(flops, read + profile.forward[Variant(False, given)])
            for given, flops in profile.forward_flops.items()
        },
        {
            given: longer(flops, read + profile.graph[given] + profile.backward[given])
            for given, flops in profile.backward_flops.items()
        },
    )


def measure_seconds(
    chain: Chain,
    parameters: Parameters,
    batch: Any,
    *,
    repeats: int = 3,
    typical: Callable[[Sequence[float]], float] = min,
) -> dict[str, SegmentSeconds]:
    """Runs every kind of segment in each way a schedule may, and takes the time.

    Args:
      chain: the segments.
      parameters: by layer, where training will have them.
      batch: one microbatch.
      repeats: how often each is run; one more comes first and does not count.
      typical: what stands for several times: the least, where nothing else is running. Where processes share
        processors it is the mean, because the least is that of a run beside which nobody else's turn came.

    Returns:
      seconds of every segment, by name; segments of one kind share theirs.
    """
    if repeats < 1:
        raise ValueError(f"repeats = {repeats}: must be at least 1")
    leaves = pytree.tree_leaves((dict(parameters), batch))
    cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)

    def timed(run: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def segment_seconds(segment: Segment, own: Parameters, x: Tensor | None) -> SegmentSeconds:
        first = run_segment(segment, own, x, context, {})
        cotangent = None if first.output is None else torch.ones_like(first.output)
        forward, backward, without_output = {}, {}, {}
        for given in variants_of(segment):
            handed = {name: first.residuals[name] for name in given}
            forwards, backwards, replays = [], [], []
            for _ in range(repeats + 1):
                forwards.append(timed(functools.partial(run_segment, segment, own, x, context, handed)))
                tape = record_segment(segment, own, x, context, handed).tape
                backwards.append(timed(functools.partial(run_backward, tape, cotangent)))
                replays.append(timed(functools.partial(record_segment, segment, own, x, context, handed, False)))
            forward[given], backward[given] = typical(forwards[1:]), typical(backwards[1:])
            without_output[given] = typical(replays[1:])
        return SegmentSeconds(forward, backward, without_output)

    context = chain.prepare(batch)
    kinds = {
        segment.kind: segment_seconds(segment, own, x)
        for segment, own, x in first_of_each_kind(chain, parameters, context)
    }
    return {segment.name: kinds[segment.kind] for segment in chain.segments}
