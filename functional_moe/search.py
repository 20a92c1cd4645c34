"""Schedules that a run could take, the fastest first, each with what it assumes beyond this code and known figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .dry_run import DryRun
from .machine import Machine, MachineError
from .memory import HBM, PlanError
from .predict import Choice, Prediction, predict

EFFORT = 3_000
"""Instructions to go through for each choice; see ``memory.plan``."""


class Shape(NamedTuple):
    """What a dry run is of, besides the model and its tokens."""

    ep: int
    expert_parts: int


class Found(NamedTuple):
    """A schedule that fits."""

    shape: Shape
    prediction: Prediction
    assumptions: tuple[str, ...]  # empty: the code runs it as it is


class Searched(NamedTuple):
    """What a search went through."""

    found: tuple[Found, ...]  # the fastest first
    tried: int
    refused: int  # for memory, or a dtype without a rate


_ASSUMPTIONS: Mapping[str, Callable[[Choice], str]] = {
    "reduce": lambda c: "gradients summed in fp8" if c.reduce_dtype == "float8" else "",
    "router": lambda c: "the router's fp32 products on tensor cores (TF32)" if c.router_dtype == "tfloat32" else "",
}


def assumptions_of(choice: Choice) -> tuple[str, ...]:
    """What a choice takes for granted that the code does not do."""
    return tuple(text for one in _ASSUMPTIONS.values() if (text := one(choice)))


def search(
    run: Callable[[Shape], DryRun],
    shapes: Sequence[Shape],
    machine: Machine,
    start: Choice,
    budgets: Mapping[str, int] | None = None,
    *,
    effort: int = EFFORT,
    tell: Callable[[str], None] = lambda text: None,
) -> Searched:
    """Changes one thing at a time, from the best so far, until nothing helps.

    Args:
      run: the dry run of a shape.
      shapes: that may be taken; the first is begun with.
      machine: where.
      start: to begin with; its ``optimizer_on`` and ``optimizer_dtype`` stay.
      budgets: bytes of each tier; by default all that the machine has.
      effort: see ``memory.plan``.
      tell: is told what is being tried.

    Raises:
      PlanError: when nothing fits; of the start.
    """
    found: dict[tuple[Shape, Choice], Prediction | None] = {}
    runs: dict[Shape, DryRun] = {}
    first_error: PlanError | None = None

    def trial(shape: Shape, choice: Choice) -> Prediction | None:
        nonlocal first_error
        if (shape, choice) not in found:
            if shape not in runs:
                runs[shape] = run(shape)
            try:
                found[shape, choice] = predict(runs[shape], machine, choice, budgets, effort=effort)
            except PlanError as error:
                first_error = first_error or error
                found[shape, choice] = None
            except MachineError:
                found[shape, choice] = None
            one = found[shape, choice]
            tell(f"{len(found)}: {'does not fit' if one is None else f'{one.tokens_per_second:.0f} tokens/s'}")
        return found[shape, choice]

    def speed(one: Prediction | None) -> float:
        return 0.0 if one is None else one.tokens_per_second

    best = (shapes[0], start)
    trial(*best)
    improved = True
    while improved:
        improved = False
        for shape, choice in _neighbours(best, shapes, machine):
            if speed(trial(shape, choice)) > 1.001 * speed(found[best]):
                best, improved = (shape, choice), True
                break
    # Each assumption by itself, and all but each: which of them carries the result.
    for plain in (best[1], *_without(best[1])):
        trial(best[0], plain)
    fitting = [(shape, choice, one) for (shape, choice), one in found.items() if one is not None]
    if not fitting:
        raise first_error or PlanError("the machine has no rates for any choice", HBM, 0)
    fitting.sort(key=lambda item: -item[2].tokens_per_second)
    return Searched(
        tuple(Found(shape, one, assumptions_of(choice)) for shape, choice, one in fitting),
        len(found),
        len(found) - len(fitting),
    )


def _neighbours(best: tuple[Shape, Choice], shapes: Sequence[Shape], machine: Machine) -> list[tuple[Shape, Choice]]:
    """One thing changed."""
    shape, choice = best
    changed = [choice._replace(gather_dtype=dtype) for dtype in ("bfloat16", "float8", "float32")]
    changed += [choice._replace(reduce_dtype=dtype) for dtype in ("bfloat16", "float8", "float32")]
    changed += [choice._replace(router_dtype=dtype) for dtype in ("float32", "tfloat32")]
    changed += [choice._replace(microbatches=1, order="depth_first")]
    changed += [choice._replace(microbatches=2, order="layer_major")]
    changed += [choice._replace(prefetch=number) for number in (1, 2)]
    changed += [choice._replace(settle=number) for number in (1, 4)]
    changed += [choice._replace(state_in=tier) for tier in machine.tiers]
    fp8 = "float8" in machine.products
    allowed = [one for one in changed if fp8 or "float8" not in (one.gather_dtype, one.reduce_dtype)]
    allowed = [one for one in allowed if one.router_dtype in machine.products]
    out = [(shape, one) for one in allowed if one != choice]
    return out + [(other, choice) for other in shapes if sum(a != b for a, b in zip(shape, other, strict=True)) == 1]


def _without(choice: Choice) -> list[Choice]:
    """The choice with one assumption less."""
    plain = Choice()
    names = ("reduce_dtype", "router_dtype")
    return [choice._replace(**{name: getattr(plain, name)}) for name in names]
