"""Each operator that a chain's segments run: its arithmetic, the bytes it reads and writes, the bytes it sends.

A segment's total says little of its time: half of a layer's operators multiply nothing and move gigabytes. This goes
one level deeper, by running the same functions, on fake tensors or real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ._chain import Chain, Parameters, Segment
from ._profile import variants_of
from ._replay import first_of_each_kind, record_segment, run_backward, run_segment


class Operator(NamedTuple):
    """One call of an operator."""

    name: str  # "aten.mm"
    dtype: torch.dtype  # of the first floating-point tensor that it is given
    flops: int  # of products; of causal attention half of all pairs
    moved: int  # bytes read and written
    sent: int  # bytes that a collective is given


@dataclasses.dataclass(frozen=True)
class SegmentOperators:
    """The operators of a segment's runs, by the residuals they are given."""

    forward: Mapping[tuple[str, ...], tuple[Operator, ...]]
    backward: Mapping[tuple[str, ...], tuple[Operator, ...]]
    without_output: Mapping[tuple[str, ...], tuple[Operator, ...]]
    """Of replays for the graph alone."""


class OperatorLog(TorchDispatchMode):
    """Notes every operator that runs; views and allocations, which do nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        one = _operator(func, args, kwargs, out)
        if one is not None:
            self.operators.append(one)
        return out


def _operator(func: Any, args: Any, kwargs: Any, out: Any) -> Operator | None:
    packet = func._overloadpacket
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    dtype = next((x.dtype for x in (*given, *made) if x.dtype.is_floating_point), torch.int64)
    if func.namespace == "c10d":
        # The collectives take (output, input, ...) or lists of them.
        sent = max((x.numel() * x.element_size() for x in given), default=0)
        return Operator(str(packet), dtype, 0, 0, sent)
    if func.namespace not in ("aten", "mkldnn") or func.is_view or "empty" in func.name():
        return None
    held = {id(x) for x in given}
    moved = sum(x.numel() * x.element_size() for x in given)
    moved += sum(x.numel() * x.element_size() for x in made if id(x) not in held)
    # What is changed in place is read and written.
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            moved += value.numel() * value.element_size()
    if not moved or not made:
        return None
    flops = 0
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if _is_causal(func, args, kwargs):
            flops //= 2
    return Operator(str(packet), dtype, flops, moved, 0)


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return bool(kwargs.get("is_causal", False))


def list_operators(chain: Chain, parameters: Parameters, batch: Any) -> dict[str, SegmentOperators]:
    """Runs every kind of segment in each way a schedule may, and notes its operators.

    Args:
      chain: the segments.
      parameters: by layer; real or fake tensors.
      batch: one microbatch.

    Returns:
      the operators of every segment, by name; segments of one kind share theirs.
    """
    context = chain.prepare(batch)
    kinds = {
        segment.kind: _list_of_segment(segment, own, x, context)
        for segment, own, x in first_of_each_kind(chain, parameters, context)
    }
    return {segment.name: kinds[segment.kind] for segment in chain.segments}


def _list_of_segment(segment: Segment, parameters: Parameters, x: Tensor | None, context: Any) -> SegmentOperators:
    first = run_segment(segment, parameters, x, context, {})
    cotangent = None if first.output is None else torch.ones_like(first.output)
    forward, backward, without_output = {}, {}, {}
    for given in variants_of(segment):
        handed = {name: first.residuals[name] for name in given}
        with OperatorLog() as log:
            record_segment(segment, parameters, x, context, handed, output_needed=False)
        without_output[given] = tuple(log.operators)
        with OperatorLog() as log:
            tape = record_segment(segment, parameters, x, context, handed).tape
        forward[given] = tuple(log.operators)
        with OperatorLog() as log:
            run_backward(tape, cotangent)
        backward[given] = tuple(log.operators)
        del tape
    return SegmentOperators(forward, backward, without_output)
