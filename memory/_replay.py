"""Running one segment: plainly, with its graph kept, and that graph backwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ._chain import Chain, Parameters, Result, Segment, Tree
from ._store import structure_paths


class _Needs(threading.local):
    """For each function that is running, the innermost last. Autograd has threads of its own."""

    def __init__(self) -> None:
        self.stack: list[bool] = []


_needs = _Needs()


def output_is_needed() -> bool:
    """Whether anybody will read the values that the segment, or the function under ``remat``, that asks is to return.

    In a replay for the graph alone nobody does: a last operation with a backward of its own, such as a product, may
    then return memory that it has not filled. ``torch.utils.checkpoint`` has the same from stopping early.
    """
    return not _needs.stack or _needs.stack[-1]


@contextmanager
def need_output(needed: bool) -> Iterator[None]:
    """Says so for the function that runs inside."""
    _needs.stack.append(needed)
    try:
        yield
    finally:
        _needs.stack.pop()


class Tape(NamedTuple):
    """A recorded graph, ready to run backwards once. It does not keep the segment's output alive."""

    output: GradientEdge | None
    loss: Tensor | None
    x: Tensor | None
    leaves: dict[str, dict[str, Tensor]]  # by layer and leaf path: what was differentiated


class Recorded(NamedTuple):
    """A segment's result, detached, with its graph."""

    result: Result
    tape: Tape


class Gradients(NamedTuple):
    """What a graph gives."""

    x: Tensor | None  # of the segment's input
    parameters: dict[str, dict[str, Tensor]]  # by layer and leaf path; only the leaves that the segment reads


def run_segment(
    segment: Segment, parameters: Parameters, x: Tensor | None, context: Any, residuals: Mapping[str, Tree]
) -> Result:
    """The segment without a graph."""
    with torch.no_grad():
        return segment.function(parameters, x, context, residuals)


def first_of_each_kind(
    chain: Chain, parameters: Parameters, context: Any
) -> Iterator[tuple[Segment, Parameters, Tensor | None]]:
    """The first segment of each kind, its parameters, and an input such as it has one.

    Segments of one kind are alike, so the others are not run: what comes after one of them gets the first one's output.
    """
    outputs: dict[str, Tensor | None] = {}
    x: Tensor | None = None
    for segment in chain.segments:
        if segment.kind not in outputs:
            own = {layer: parameters[layer] for layer in segment.layers}
            yield segment, own, x
            last = segment is chain.segments[-1]
            outputs[segment.kind] = None if last else run_segment(segment, own, x, context, {}).output
        x = outputs[segment.kind]


def record_segment(
    segment: Segment,
    parameters: Parameters,
    x: Tensor | None,
    context: Any,
    residuals: Mapping[str, Tree],
    output_needed: bool = True,
) -> Recorded:
    """The segment with its graph, which refers to ``x``, to the parameters and to ``residuals``.

    The output is detached: what is computed from it belongs to other graphs. Without ``output_needed`` its values may
    be anything (:func:`output_is_needed`).
    """
    x = None if x is None else x.detach().requires_grad_()
    leaves: dict[str, dict[str, Tensor]] = {}
    trees: dict[str, Tree] = {}
    for layer, tree in parameters.items():
        plain, spec = pytree.tree_flatten(tree)
        tracked = [leaf.detach().requires_grad_() for leaf in plain]
        leaves[layer] = dict(zip(structure_paths(spec), tracked, strict=True))
        trees[layer] = pytree.tree_unflatten(tracked, spec)
    with torch.enable_grad(), need_output(output_needed):
        result = segment.function(trees, x, context, residuals)
    edge = None
    output, loss = result.output, result.loss
    if output is not None:
        edge = get_gradient_edge(output) if output.requires_grad else None
        output = output.detach()
    detached = pytree.tree_map_only(Tensor, torch.Tensor.detach, (result.residuals, result.metrics))
    tape = Tape(edge, loss, x, leaves)
    return Recorded(Result(output, None if loss is None else loss.detach(), *detached), tape)


def run_backward(tape: Tape, cotangent: Tensor | None) -> Gradients:
    """The gradient by the segment's input and parameters; the tape cannot run again.

    Args:
      tape: of :func:`record_segment`.
      cotangent: of the output, ``None`` where there is no output. The loss's own is 1.
    """
    outputs: list[Tensor | GradientEdge] = []
    cotangents: list[Tensor] = []
    if tape.output is not None and cotangent is not None:
        outputs.append(tape.output)
        cotangents.append(cotangent)
    if tape.loss is not None and tape.loss.requires_grad:
        outputs.append(tape.loss)
        cotangents.append(torch.ones_like(tape.loss))
    named = [(layer, name, leaf) for layer, leaves in tape.leaves.items() for name, leaf in leaves.items()]
    inputs = ([] if tape.x is None else [tape.x]) + [leaf for *_, leaf in named]
    found: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if outputs:
        found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)  # type: ignore[arg-type]
    parameters: dict[str, dict[str, Tensor]] = {layer: {} for layer in tape.leaves}
    x = None
    if tape.x is not None:
        x = torch.zeros_like(tape.x) if found[0] is None else found[0]
        found = found[1:]
    for (layer, name, _), gradient in zip(named, found, strict=True):
        if gradient is not None:
            parameters[layer][name] = gradient
    return Gradients(x, parameters)
