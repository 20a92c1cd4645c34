"""Lion: the sign of an interpolated momentum (Chen et al., arXiv 2302.06675)."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _tree
from ._adam import zero_moments
from ._base import GradientTransformation, chain, checked
from ._decay import add_decayed_weights
from ._elementwise import cast, check_no_transform, lerp
from ._learning_rate import ScalarOrSchedule, scale_by_learning_rate
from ._tree import Tree


class ScaleByLionState(NamedTuple):
    """Lion's momentum."""

    mu: Tree  # float32, congruent with the parameters: average of the gradients


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, *, foreach: bool = True) -> GradientTransformation:
    """Replace gradients by ``sign(b1 mu + (1 - b1) g)``, then average them into ``mu`` with decay ``b2``.

    Args:
        b1: weight of the momentum in the step, in [0, 1).
        b2: decay of the momentum, in [0, 1).
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``update``, gradients not congruent with the
            momentum.
    """
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {value}")

    def init(params: Tree) -> ScaleByLionState:
        return ScaleByLionState(zero_moments(params))

    def update(updates: Tree, state: ScaleByLionState, params: Tree | None = None, /) -> tuple[Tree, ScaleByLionState]:
        mu, spec = _tree.flatten(state.mu)
        grads = _tree.check_congruent(state.mu, updates, "scale_by_lion: the gradients", "the momenta", dtype=False)
        if foreach:
            check_no_transform([*mu, *grads], "scale_by_lion")
        grads = cast(grads, torch.float32)
        out = [torch.sign(x) for x in lerp(mu, grads, 1.0 - b1, foreach=foreach)]
        mu = lerp(mu, grads, 1.0 - b2, foreach=foreach)
        return _tree.unflatten(out, spec), ScaleByLionState(_tree.unflatten(mu, spec))

    return GradientTransformation(init, update)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    *,
    foreach: bool = True,
) -> GradientTransformation:
    """Lion with decoupled weight decay.

    Args:
        learning_rate: a constant or a schedule, see :func:`scale_by_learning_rate`.
        b1: weight of the momentum in the step.
        b2: decay of the momentum.
        weight_decay: times the rate and the parameter.
        mask: where decay applies, see :func:`add_decayed_weights`.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``update``, gradients that differ from the
            parameters.
    """
    return checked(
        chain(
            scale_by_lion(b1, b2, foreach=foreach),
            add_decayed_weights(weight_decay, mask, foreach=foreach),
            scale_by_learning_rate(learning_rate, foreach=foreach),
        ),
        "lion",
    )
