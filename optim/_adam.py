"""Adam's scaling and AdamW (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import _tree
from ._base import EmptyState, GradientTransformation, UpdateFn, chain, checked
from ._decay import add_decayed_weights
from ._elementwise import cast, check_no_transform, lerp, number
from ._learning_rate import RateState, ScalarOrSchedule, next_rate, scale_by_learning_rate
from ._tree import Tree

# Measured on two cores: 69 ms for 1,000 leaves of 65,536 elements, against 84 ms all at once.
_CACHE_ELEMENTS = 1 << 20


class ScaleByAdamState(NamedTuple):
    """Adam's moments."""

    count: Tensor  # type: ignore[assignment]  # int64 [], updates made so far
    mu: Tree  # float32, congruent with the parameters: average of the gradients
    nu: Tree  # float32, congruent with the parameters: average of their squares


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    nesterov: bool = False,
    foreach: bool = True,
) -> GradientTransformation:
    """Divide the average gradient by the root of the average squared gradient, both bias-corrected.

    Moments and results are float32 whatever the gradients' dtype. The bias corrections are computed in
    float64 from the count, as in torch; optax computes them in float32, where ``b2 = 0.999`` costs up to 1e-5
    relative in the first steps.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root.
        eps_root: added under the root. Above 0 it keeps the derivative finite where a gradient is 0.
        nesterov: look ahead as NAdam does (Dozat 2016), in optax's form.
        foreach: a fused kernel over all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``update``, gradients that are not congruent with
            the moments.
        NotImplementedError: ``foreach=True`` inside a ``torch.func`` transform.
    """
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
    for name, value in (("eps", eps), ("eps_root", eps_root)):
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")

    def init(params: Tree) -> ScaleByAdamState:
        count = torch.zeros((), dtype=torch.int64, device=_tree.scalar_device(params))
        return ScaleByAdamState(count, zero_moments(params), zero_moments(params))

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None, /) -> tuple[Tree, ScaleByAdamState]:
        mu, spec = _tree.flatten(state.mu)
        nu = _tree.check_congruent(state.mu, state.nu, "scale_by_adam: the second moments", "the first moments")
        grads = _tree.check_congruent(state.mu, updates, "scale_by_adam: the gradients", "the moments", dtype=False)
        grads = cast(grads, torch.float32)
        count = state.count + 1
        if foreach:
            check_no_transform([state.count, *grads, *mu, *nu], "scale_by_adam")
        if not grads:
            return _tree.unflatten([], spec), ScaleByAdamState(count, state.mu, state.nu)
        if foreach and not nesterov and eps_root == 0.0:
            out, mu, nu = _fused(grads, mu, nu, count, b1, b2, eps)
        else:
            out, mu, nu = _plain(grads, mu, nu, count, b1, b2, eps, eps_root, nesterov, foreach)
        new_state = ScaleByAdamState(count, _tree.unflatten(mu, spec), _tree.unflatten(nu, spec))
        return _tree.unflatten(out, spec), new_state

    return GradientTransformation(init, update)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    *,
    nesterov: bool = False,
    foreach: bool = True,
) -> GradientTransformation:
    """Adam with decoupled weight decay: the decay of a step is ``weight_decay`` times its learning rate.

    Args:
        learning_rate: a constant or a schedule, see :func:`scale_by_learning_rate`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        eps_root: added under the root.
        weight_decay: times the rate and the parameter.
        mask: where decay applies, see :func:`add_decayed_weights`.
        nesterov: NAdam's first moment.
        foreach: fused kernels over all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``update``, gradients that differ from the
            parameters in tree, shape or dtype.

    Example:
        >>> tx = adamw(3e-4, weight_decay=0.1)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params)
        >>> params = apply_updates(params, updates)
    """
    steps = chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov, foreach=foreach),
        add_decayed_weights(weight_decay, mask, foreach=foreach),
        scale_by_learning_rate(learning_rate, foreach=foreach),
    )
    if foreach and mask is None and not nesterov and eps_root == 0.0:
        # The same in one pass: three transformations would write every leaf three times.
        one = _one_pass(learning_rate, b1, b2, eps, weight_decay)
        return checked(GradientTransformation(steps.init, one), "adamw")
    return checked(steps, "adamw")


def _one_pass(learning_rate: ScalarOrSchedule, b1: float, b2: float, eps: float, weight_decay: float) -> UpdateFn:
    """Return the update of the chain that :func:`adamw` is, on its state, by the fused kernel."""

    def update(
        updates: Tree, state: tuple[ScaleByAdamState, EmptyState, RateState], params: Tree | None = None, /
    ) -> tuple[Tree, tuple[ScaleByAdamState, EmptyState, RateState]]:
        adam, empty, rate_state = state
        leaves, spec = _tree.flatten(params)
        mu = _tree.check_congruent(params, adam.mu, "adamw: the first moments", dtype=False)
        nu = _tree.check_congruent(params, adam.nu, "adamw: the second moments", dtype=False)
        grads = cast(_tree.flatten_like(params, updates, "adamw: the gradients"), torch.float32)
        rate, rate_state = next_rate(learning_rate, rate_state)
        check_no_transform([adam.count, rate, *leaves, *grads, *mu, *nu], "adamw")
        count = adam.count + 1
        out: list[Tensor] = []
        if grads:
            decayed = cast(leaves, torch.float32) if weight_decay else None
            out, mu, nu = _fused(grads, mu, nu, count, b1, b2, eps, number(rate), decayed, weight_decay)
        new = ScaleByAdamState(count, _tree.unflatten(mu, spec), _tree.unflatten(nu, spec))
        return _tree.unflatten(out, spec), (new, empty, rate_state)

    return update


def zero_moments(params: Tree, dtype: torch.dtype = torch.float32) -> Tree:
    """Return zeros of the parameters' shapes, contiguous, on their devices."""
    leaves, spec = _tree.flatten(params)
    return _tree.unflatten([torch.zeros_like(leaf, dtype=dtype).contiguous() for leaf in leaves], spec)


def bias_correction(decay: float, count: Tensor) -> Tensor:
    """Return ``1 - decay ** count``, float64 []: what an average that started at 0 has to be divided by."""
    return 1.0 - torch.pow(torch.tensor(decay, dtype=torch.float64), count)


def _fused(
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
    rate: float = -1.0,
    params: list[Tensor] | None = None,
    weight_decay: float = 0.0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Torch's fused AdamW kernel on fresh copies: parameters of 0 become minus ``rate`` times it.

    Some leaves at a time, so that what one kernel has written is still in cache for the next.
    """
    # A device is given the number, as a copy of the tensor would wait for all that it has to do.
    step = torch.full((), number(count), dtype=torch.float32, device=grads[0].device)
    out: list[Tensor] = []
    new_mu: list[Tensor] = []
    new_nu: list[Tensor] = []
    for part in _cachefuls(grads):
        # The kernel walks raw memory and does not look at strides, so everything has to be contiguous.
        some = _contiguous(grads[part])
        some_mu, some_nu = (_clones(_contiguous(moments[part])) for moments in (mu, nu))
        some_out = [torch.zeros_like(grad) for grad in some]
        # fmt: off
        torch._fused_adamw_(
            some_out, some, some_mu, some_nu, [], [step] * len(some), lr=rate, beta1=b1, beta2=b2, weight_decay=0.0,
            eps=eps, amsgrad=False, maximize=False,
        )
        # fmt: on
        if params is not None:
            torch._foreach_add_(some_out, params[part], alpha=-rate * weight_decay)
        out += some_out
        new_mu += some_mu
        new_nu += some_nu
    return out, new_mu, new_nu


def _cachefuls(xs: list[Tensor]) -> Iterator[slice]:
    """Cut a list into runs of a million elements or one tensor; on a device, where calls cost more, into one."""
    if xs[0].device.type != "cpu":
        yield slice(0, len(xs))
        return
    start, elements = 0, 0
    for index, x in enumerate(xs):
        if elements and elements + x.numel() > _CACHE_ELEMENTS:
            yield slice(start, index)
            start, elements = index, 0
        elements += x.numel()
    yield slice(start, len(xs))


def _clones(xs: list[Tensor]) -> list[Tensor]:
    """Copies. Torch 2.11 has no list kernel that makes them; that of products takes 1.4 ms on a CPU where single copies
    of 1,000 leaves of 64 elements take 0.8 ms.
    """
    return [x.clone() for x in xs] if xs[0].device.type == "cpu" else list(torch._foreach_mul(xs, 1.0))


def _contiguous(xs: list[Tensor]) -> list[Tensor]:
    return [x if x.is_contiguous() else x.contiguous() for x in xs]


def _plain(
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    nesterov: bool,
    foreach: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Adam leaf by leaf."""
    mu = lerp(mu, grads, 1.0 - b1, foreach=foreach)
    nu = [b2 * v + (1.0 - b2) * (g * g) for v, g in zip(nu, grads, strict=True)]
    if nesterov:
        next_weight = (b1 / bias_correction(b1, count + 1)).to(torch.float32)
        weight = ((1.0 - b1) / bias_correction(b1, count)).to(torch.float32)
        mean = [next_weight * m + weight * g for m, g in zip(mu, grads, strict=True)]
    else:
        correction = (1.0 / bias_correction(b1, count)).to(torch.float32)
        mean = [correction * m for m in mu]
    square_correction = (1.0 / bias_correction(b2, count)).to(torch.float32)
    out = [m / (_root(v * square_correction + eps_root) + eps) for m, v in zip(mean, nu, strict=True)]
    return out, mu, nu


def _root(x: Tensor) -> Tensor:
    """The square root, with derivative 0 where it is 0: an element that never had a gradient does not move.

    Both branches have to be finite, because the derivative of the one not taken is multiplied by 0.
    """
    positive = x > 0
    return torch.where(positive, torch.sqrt(torch.where(positive, x, 1.0)), 0.0)
