"""Learning-rate schedules: pure functions of the count of updates made so far.

Each factory returns ``schedule(count) -> value``: ``count`` is an int or an int64 tensor of any shape (0 at
the first update), the value a float32 tensor of that shape, computed in float64. Nothing depends on the value
of ``count`` in Python, so a schedule works under ``torch.func.vmap``.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ._learning_rate import Schedule, check_rate

Tail: TypeAlias = Literal["linear", "cosine", "inverse_sqrt"]


def constant_schedule(value: float) -> Schedule:
    """Return ``value`` at every count.

    Raises:
        ValueError: a negative value.
    """
    check_rate(value, "value")

    def schedule(count: Tensor) -> Tensor:
        return torch.full_like(_float(count), value).to(torch.float32)

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """Go from ``init_value`` to ``end_value`` in a straight line, and stay there.

    Args:
        init_value: up to ``transition_begin``.
        end_value: from ``transition_begin + transition_steps`` on.
        transition_steps: updates that the line takes, at least 1.
        transition_begin: updates before it starts.

    Raises:
        ValueError: a negative value or length.
    """
    check_rate(init_value, "init_value")
    check_rate(end_value, "end_value")
    _check_steps(transition_steps, "transition_steps", 1)
    _check_steps(transition_begin, "transition_begin", 0)

    def schedule(count: Tensor) -> Tensor:
        fraction = _fraction(_float(count) - transition_begin, transition_steps)
        return (init_value + (end_value - init_value) * fraction).to(torch.float32)

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine from ``init_value`` to ``alpha * init_value`` (Loshchilov and Hutter, arXiv 1608.03983).

    Args:
        init_value: at count 0.
        decay_steps: updates that the decay takes, at least 1.
        alpha: the last value as a fraction of the first.
        exponent: power to which the half cosine is raised.

    Raises:
        ValueError: a negative value, or no steps.
    """
    check_rate(init_value, "init_value")
    check_rate(alpha, "alpha")
    _check_steps(decay_steps, "decay_steps", 1)
    if not exponent > 0.0:
        raise ValueError(f"exponent must be above 0, got {exponent}")

    def schedule(count: Tensor) -> Tensor:
        wave = 0.5 * (1.0 + torch.cos(math.pi * _fraction(_float(count), decay_steps)))
        return (init_value * ((1.0 - alpha) * wave**exponent + alpha)).to(torch.float32)

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Follow each schedule up to its boundary, then the next one, which counts from there.

    Args:
        schedules: one more than boundaries.
        boundaries: ascending counts at which the next schedule takes over.

    Raises:
        ValueError: the numbers do not fit or the boundaries do not ascend.
    """
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(f"{len(schedules)} schedules need {len(schedules) - 1} boundaries, got {list(boundaries)}")
    if any(a > b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"boundaries must ascend, got {list(boundaries)}")

    def schedule(count: Tensor) -> Tensor:
        value = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            after = _float(count) >= boundary
            value = torch.where(after, following(torch.as_tensor(count) - boundary), value)
        return value

    return schedule


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """Rise in a straight line from ``init_value`` to ``peak_value`` in ``warmup_steps`` updates, and stay."""
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Linear warm-up, then half a cosine.

    Args:
        init_value: at count 0.
        peak_value: after the warm-up; above 0.
        warmup_steps: updates of the warm-up, at least 1.
        decay_steps: updates in all, *the warm-up included* (as in optax).
        end_value: from ``decay_steps`` on.
        exponent: power to which the half cosine is raised.

    Raises:
        ValueError: a negative value, or nothing left to decay in.
    """
    if decay_steps <= warmup_steps:
        raise ValueError(f"decay_steps counts the warm-up: {decay_steps} must be above warmup_steps={warmup_steps}")
    check_rate(end_value, "end_value")
    if not peak_value > 0.0:
        raise ValueError(f"peak_value must be above 0, got {peak_value}")
    rise = linear_schedule(init_value, peak_value, warmup_steps)
    fall = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, end_value / peak_value, exponent)
    return join_schedules([rise, fall], [warmup_steps])


def warmup_stable_decay_schedule(
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    *,
    tail: Tail = "linear",
    init_value: float = 0.0,
    end_value: float = 0.0,
) -> Schedule:
    """Warm-up, a plateau, and a decay (WSD; Hu et al., arXiv 2404.06395; Hägele et al., arXiv 2405.18392).

    Args:
        peak_value: on the plateau; above 0.
        warmup_steps: updates of the linear rise, at least 1.
        stable_steps: updates of the plateau, from 0.
        decay_steps: updates of the tail, at least 1.
        tail: ``"linear"``; ``"cosine"`` (half a wave); ``"inverse_sqrt"``: one over the square root of a
            straight line from ``peak_value ** -2`` to ``end_value ** -2``, which needs an ``end_value`` above
            0.
        init_value: at count 0.
        end_value: from the end of the tail on.

    Raises:
        ValueError: a negative value or length, an unknown tail, or ``inverse_sqrt`` down to 0.
    """
    check_rate(end_value, "end_value")
    if not peak_value > 0.0:
        raise ValueError(f"peak_value must be above 0, got {peak_value}")
    _check_steps(stable_steps, "stable_steps", 0)
    rise = linear_schedule(init_value, peak_value, warmup_steps)
    if tail == "linear":
        fall = linear_schedule(peak_value, end_value, decay_steps)
    elif tail == "cosine":
        fall = cosine_decay_schedule(peak_value, decay_steps, end_value / peak_value)
    elif tail == "inverse_sqrt":
        fall = inverse_sqrt_schedule(peak_value, end_value, decay_steps)
    else:
        raise ValueError(f"tail must be 'linear', 'cosine' or 'inverse_sqrt', got {tail!r}")
    return join_schedules([rise, constant_schedule(peak_value), fall], [warmup_steps, warmup_steps + stable_steps])


def inverse_sqrt_schedule(init_value: float, end_value: float, decay_steps: int) -> Schedule:
    """Fall like one over a square root from ``init_value`` to ``end_value`` in ``decay_steps`` updates, and
    stay.

    ``value ** -2`` is a straight line in the count.

    Raises:
        ValueError: a value that is not above 0, or no steps.
    """
    for name, value in (("init_value", init_value), ("end_value", end_value)):
        if not value > 0.0:
            raise ValueError(f"{name} of an inverse square root must be above 0, got {value}")
    _check_steps(decay_steps, "decay_steps", 1)
    first, last = init_value**-2, end_value**-2

    def schedule(count: Tensor) -> Tensor:
        fraction = _fraction(_float(count), decay_steps)
        return torch.rsqrt(first + (last - first) * fraction).to(torch.float32)

    return schedule


def _float(count: Tensor | int) -> Tensor:
    return torch.as_tensor(count).to(torch.float64)


def _fraction(count: Tensor, steps: int) -> Tensor:
    return torch.clamp(count / steps, 0.0, 1.0)


def _check_steps(value: int, name: str, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
