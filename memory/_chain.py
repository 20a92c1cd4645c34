"""A model as a chain of segments: what a schedule arranges, and the plain computation it must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ._trace import trace_range

Tree: TypeAlias = Any
Parameters: TypeAlias = Mapping[str, Tree]
"""The parameter trees of layers, by the layer's name."""


class Result(NamedTuple):
    """What a segment returns."""

    output: Tensor | None  # the next segment's input; None from the last
    loss: Tensor | None = None  # []; what the segment adds to the loss that is differentiated
    residuals: Mapping[str, Tree] = {}  # by name; without gradient
    metrics: Tree = None  # without gradient


SegmentFunction: TypeAlias = Callable[[Parameters, Tensor | None, Any, Mapping[str, Tree]], Result]
"""``function(parameters, x, context, residuals) -> Result``.

``parameters`` holds the trees of the segment's layers, and those alone. ``x`` is the previous segment's output,
``None`` for the first. ``context`` is what the chain prepared of the microbatch. ``residuals`` holds those that an
earlier call with the same arguments returned and that are given back: with them the result is the same, bit for bit,
for less work. A residual that is not given back is computed again.
"""


class Segment(NamedTuple):
    """A pure function over one slice of the parameters, one tensor in and one out."""

    name: str
    layers: tuple[str, ...]
    """Names of the parameter trees it reads."""
    function: SegmentFunction
    kind: str
    """Segments of one kind cost the same."""
    residuals: tuple[str, ...] = ()
    """Names of what it can hand out, so that replaying it is cheaper."""
    decisions: tuple[str, ...] = ()
    """Those of ``residuals`` that every replay must be given: what must not be decided twice, such as routing."""
    unread: tuple[str, ...] = ()
    """Layers whose values the backward does not need, such as an embedding's: they are not gathered for it."""

    @property
    def layers_backward(self) -> tuple[str, ...]:
        """Layers whose values the backward needs."""
        return tuple(layer for layer in self.layers if layer not in self.unread)


class Chain(NamedTuple):
    """Segments, each reading its predecessor's output."""

    segments: tuple[Segment, ...]
    prepare: Callable[[Any], Any]
    """From a microbatch to the ``context`` of every segment: masks, positions, targets."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the parameter trees, in the order of their first use."""
        return tuple(dict.fromkeys(layer for segment in self.segments for layer in segment.layers))


def check_chain(chain: Chain) -> None:
    """Raises ``ValueError`` for a chain without segments, two of one name, or names of nothing."""
    if not chain.segments:
        raise ValueError("a chain needs at least one segment")
    names = [segment.name for segment in chain.segments]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two segments have the name {name!r}")
    for segment in chain.segments:
        if unknown := sorted(set(segment.unread) - set(segment.layers)):
            raise ValueError(f"segment {segment.name!r}: the unread layers {unknown} are not among its layers")
        if unknown := sorted(set(segment.decisions) - set(segment.residuals)):
            raise ValueError(f"segment {segment.name!r}: the decisions {unknown} are not among its residuals")


class Outcome(NamedTuple):
    """What the chain computes of one microbatch."""

    loss: Tensor  # []; the segments' losses, added in their order
    metrics: tuple[Tree, ...]  # of each segment


def run_chain(chain: Chain, parameters: Parameters, batch: Any) -> Outcome:
    """The plain computation: one segment after the other.

    Pure, and what ``torch.func`` may differentiate; every schedule computes the same.

    Args:
      chain: the segments.
      parameters: the parameter trees by layer.
      batch: one microbatch, as ``chain.prepare`` takes it.

    Raises:
      ValueError: when no segment adds to the loss.
    """
    context = chain.prepare(batch)
    x: Tensor | None = None
    loss: Tensor | None = None
    metrics = []
    for segment in chain.segments:
        with trace_range(f"forward {segment.name}"):
            result = segment.function({layer: parameters[layer] for layer in segment.layers}, x, context, {})
        x = result.output
        loss = add_losses(loss, result.loss)
        metrics.append(result.metrics)
    if loss is None:
        raise ValueError("no segment of the chain adds to the loss")
    return Outcome(loss, tuple(metrics))


def add_losses(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum of what there is; ``None`` when there is nothing."""
    if total is None or part is None:
        return part if total is None else total
    return total + part
