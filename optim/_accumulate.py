"""Gradient accumulation over microbatches as a transformation."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _tree
from ._adam import zero_moments
from ._base import GradientTransformation
from ._elementwise import add, cast, check_no_transform
from ._tree import Tree


class AccumulateState(NamedTuple):
    """The sum so far, and the inner state."""

    count: Tensor  # type: ignore[assignment]  # int64 [], microbatches in the sum, in [0, n)
    total: Tree  # float32, congruent with the parameters: sum of the gradients since the last inner update
    inner_state: Tree


def accumulate(inner: GradientTransformation, n: int, *, foreach: bool = True) -> GradientTransformation:
    """Update ``inner`` with the mean of every ``n`` gradients; return zeros on the calls between.

    The inner update does not run on those: no decay, no count, no orthogonalisation. The sum is
    float32, and so is the mean that ``inner`` gets: rounded to bfloat16 it would lose what the sum has kept.
    (Of float64 gradients it is float64.) Which call it is is read from the state, so the count cannot be a
    batched tensor of ``torch.func.vmap`` (everything else can, with ``foreach=False``).

    Args:
        inner: the transformation.
        n: microbatches per update, at least 1.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: ``n`` below 1; in ``update``, gradients that are not congruent with the sum.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 microbatch, got {n}")

    def init(params: Tree) -> AccumulateState:
        count = torch.zeros((), dtype=torch.int64, device=_tree.scalar_device(params))
        return AccumulateState(count, zero_moments(params), inner.init(params))

    def update(updates: Tree, state: AccumulateState, params: Tree | None = None, /) -> tuple[Tree, AccumulateState]:
        old, spec = _tree.flatten(state.total)
        grads = _tree.check_congruent(state.total, updates, "accumulate: the gradients", "the sums", dtype=False)
        if params is not None:
            _tree.check_congruent(params, updates, "accumulate: the gradients")
        if foreach:
            check_no_transform([*old, *grads], "accumulate")
        total = add(old, cast(grads, torch.float32), foreach=foreach)
        if int(state.count) + 1 < n:
            zeros = [torch.zeros_like(grad, dtype=_mean_dtype(grad)) for grad in grads]
            return _tree.unflatten(zeros, spec), AccumulateState(
                state.count + 1, _tree.unflatten(total, spec), state.inner_state
            )
        mean = [(x / n).to(_mean_dtype(grad)) for x, grad in zip(total, grads, strict=True)]
        out, inner_state = inner.update(_tree.unflatten(mean, spec), state.inner_state, params)
        fresh = _tree.unflatten([torch.zeros_like(x) for x in total], spec)
        return out, AccumulateState(torch.zeros_like(state.count), fresh, inner_state)

    return GradientTransformation(init, update)


def _mean_dtype(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32
