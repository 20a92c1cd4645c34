"""Schedules that a run could take, the fastest first, each with what it assumes beyond this code and known figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .dry_run import DryRun
from .machine import Machine, MachineError
from .memory import HBM, PlanError
from .predict import Choice, Prediction, predict

EFFORT = 3_000
"""Instructions to go through for each choice; see ``memory.plan``."""


class Found(NamedTuple):
    """A schedule that fits."""

    ep: int
    prediction: Prediction
    assumptions: tuple[str, ...]  # empty: the code runs it as it is


class Searched(NamedTuple):
    """What a search went through."""

    found: tuple[Found, ...]  # the fastest first
    tried: int
    refused: int  # for memory, or a dtype without a rate


_ASSUMPTIONS: Mapping[str, Callable[[Choice], str]] = {
    "reduce": lambda c: "gradients summed in fp8" if c.reduce_dtype == "float8" else "",
    "exchange": lambda c: "tokens exchanged in parts, beside the experts' products" if c.exchange_hidden else "",
    "router": lambda c: "the router's fp32 products on tensor cores (TF32)" if c.router_dtype == "tfloat32" else "",
}


def assumptions_of(choice: Choice) -> tuple[str, ...]:
    """What a choice takes for granted that the code does not do."""
    return tuple(text for one in _ASSUMPTIONS.values() if (text := one(choice)))


def search(
    runs: Mapping[int, DryRun],
    machine: Machine,
    start: Choice,
    budgets: Mapping[str, int] | None = None,
    *,
    effort: int = EFFORT,
    tell: Callable[[str], None] = lambda text: None,
) -> Searched:
    """Changes one thing at a time, from the best so far, until nothing helps.

    Args:
      runs: a dry run for each width of expert parallelism.
      machine: where.
      start: to begin with; its ``optimizer_on`` and ``optimizer_dtype`` stay.
      budgets: bytes of each tier; by default all that the machine has.
      effort: see ``memory.plan``.
      tell: is told what is being tried.

    Raises:
      PlanError: when nothing fits; of the start.
    """
    found: dict[tuple[int, Choice], Prediction | None] = {}
    first_error: PlanError | None = None

    def trial(ep: int, choice: Choice) -> Prediction | None:
        nonlocal first_error
        if (ep, choice) not in found:
            try:
                found[ep, choice] = predict(runs[ep], machine, choice, budgets, effort=effort)
            except PlanError as error:
                first_error = first_error or error
                found[ep, choice] = None
            except MachineError:
                found[ep, choice] = None
            one = found[ep, choice]
            tell(f"{len(found)}: {'does not fit' if one is None else f'{one.tokens_per_second:.0f} tokens/s'}")
        return found[ep, choice]

    def speed(one: Prediction | None) -> float:
        return 0.0 if one is None else one.tokens_per_second

    first_ep = next(iter(runs))
    best = (first_ep, start)
    trial(*best)
    improved = True
    while improved:
        improved = False
        for ep, choice in _neighbours(best, runs, machine):
            if speed(trial(ep, choice)) > 1.001 * speed(found[best]):
                best, improved = (ep, choice), True
                break
    # Each assumption by itself, and all but each: which of them carries the result.
    for plain in (best[1], *_without(best[1])):
        trial(best[0], plain)
    fitting = [(ep, choice, one) for (ep, choice), one in found.items() if one is not None]
    if not fitting:
        raise first_error or PlanError("the machine has no rates for any choice", HBM, 0)
    fitting.sort(key=lambda item: -item[2].tokens_per_second)
    return Searched(
        tuple(Found(ep, one, assumptions_of(choice)) for ep, choice, one in fitting),
        len(found),
        len(found) - len(fitting),
    )


def _neighbours(best: tuple[int, Choice], runs: Mapping[int, DryRun], machine: Machine) -> list[tuple[int, Choice]]:
    """One thing changed."""
    ep, choice = best
    changed = [choice._replace(gather_dtype=dtype) for dtype in ("bfloat16", "float8", "float32")]
    changed += [choice._replace(reduce_dtype=dtype) for dtype in ("bfloat16", "float8", "float32")]
    changed += [choice._replace(exchange_hidden=hidden) for hidden in (True, False)]
    changed += [choice._replace(router_dtype=dtype) for dtype in ("float32", "tfloat32")]
    changed += [choice._replace(microbatches=1, order="depth_first")]
    changed += [choice._replace(microbatches=2, order="layer_major")]
    changed += [choice._replace(prefetch=number) for number in (1, 2)]
    changed += [choice._replace(settle=number) for number in (1, 4)]
    changed += [choice._replace(state_in=tier) for tier in machine.tiers]
    fp8 = "float8" in machine.products
    allowed = [one for one in changed if fp8 or "float8" not in (one.gather_dtype, one.reduce_dtype)]
    allowed = [one for one in allowed if one.router_dtype in machine.products]
    out = [(ep, one) for one in allowed if one != choice]
    return out + [(other, choice) for other in runs if other != ep]


def _without(choice: Choice) -> list[Choice]:
    """The choice with one assumption less."""
    plain = Choice()
    names = ("reduce_dtype", "exchange_hidden", "router_dtype")
    return [choice._replace(**{name: getattr(plain, name)}) for name in names]
