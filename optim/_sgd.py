"""Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

from typing import NamedTuple

import torch

from . import _tree
from ._adam import zero_moments
from ._base import GradientTransformation, chain, checked
from ._elementwise import add, cast, check_no_transform
from ._learning_rate import ScalarOrSchedule, scale_by_learning_rate
from ._tree import Tree


class TraceState(NamedTuple):
    """The momentum."""

    trace: Tree  # float32, congruent with the parameters: decaying sum of the gradients


def trace(decay: float, *, nesterov: bool = False, foreach: bool = True) -> GradientTransformation:
    """Replace gradients by their decaying sum ``t = g + decay t``; with Nesterov, by ``g + decay t``.

    Args:
        decay: in [0, 1).
        nesterov: look one step ahead.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: ``decay`` out of its range; in ``update``, updates that are not congruent with the trace.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay must be in [0, 1), got {decay}")

    def init(params: Tree) -> TraceState:
        return TraceState(zero_moments(params))

    def update(updates: Tree, state: TraceState, params: Tree | None = None, /) -> tuple[Tree, TraceState]:
        old, spec = _tree.flatten(state.trace)
        grads = _tree.check_congruent(state.trace, updates, "trace: the updates", "the trace", dtype=False)
        if foreach:
            check_no_transform([*old, *grads], "trace")
        grads = cast(grads, torch.float32)
        new = add(grads, old, alpha=decay, foreach=foreach)
        out = add(grads, new, alpha=decay, foreach=foreach) if nesterov else new
        return _tree.unflatten(out, spec), TraceState(_tree.unflatten(new, spec))

    return GradientTransformation(init, update)


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    *,
    nesterov: bool = False,
    foreach: bool = True,
) -> GradientTransformation:
    """Gradient descent, with momentum if asked.

    Args:
        learning_rate: a constant or a schedule, see :func:`scale_by_learning_rate`.
        momentum: decay of the sum of gradients; ``None`` keeps none.
        nesterov: Nesterov's momentum.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``update``, gradients that differ from the
            parameters.
    """
    if momentum is None and nesterov:
        raise ValueError("nesterov=True needs a momentum, got momentum=None")
    rate = scale_by_learning_rate(learning_rate, foreach=foreach)
    momenta = [] if momentum is None else [trace(momentum, nesterov=nesterov, foreach=foreach)]
    return checked(chain(*momenta, rate), "sgd")
