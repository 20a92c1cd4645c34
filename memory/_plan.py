"""The schedule of least predicted time within every tier's budget.

A small integer program over the recipes of the segments (``_plan_model``) proposes; ``verify`` counts its bytes and
``simulate`` its seconds, exactly; where they differ from the program's, it is corrected and asked again. Then the
neighbours of the best are tried, those first that the program's model holds for good. All of it is counted in
instructions gone through, never in seconds: the same input gives the same plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from ._build import Gathers, Order, Policy, Recipe, Updates, make_schedule
from ._chain import Chain, Segment, check_chain
from ._costs import Costs
from ._plan_model import Choices, Model, Numbers, make_model, policies_of, solve
from ._profile import Sizes
from ._schedule import HBM, HOST, Backward, Forward, Instruction, Schedule, describe, of_optimizer
from ._simulate import Timeline, run_times, simulate, working_bytes
from ._verify import TierReport, fixed_contents, verify


class Pace(NamedTuple):
    """How much time copies get, in runs of segments; see ``make_schedule``."""

    lag: int
    lead: int


PACES = (Pace(1, 2), Pace(0, 1), Pace(0, 2), Pace(1, 1), Pace(2, 2), Pace(2, 4))
EFFORT = 12_000
"""Instructions gone through, over all schedules that are tried."""


SMALL = 8
"""Segments, up to which every pace gets a program of its own."""
MOVES = 4_000
"""Neighbours of a schedule that are ranked by the model."""
TOLERANCE = 1.2
"""How far the model may be off for few segments, where details weigh more."""


class PlanError(ValueError):
    """No schedule fits the budgets.

    Attributes:
      tier: which is too small.
      missing: bytes that it lacks for the smallest schedule found.
      instruction: of that schedule, during which it lacks them; ``None`` where what is there all the time is too much.
    """

    def __init__(self, message: str, tier: str, missing: int, instruction: Instruction | None = None) -> None:
        super().__init__(message)
        self.tier, self.missing, self.instruction = tier, missing, instruction


class Plan(NamedTuple):
    """A schedule, and what is known of it."""

    schedule: Schedule
    timeline: Timeline
    chain: Chain
    recipes: dict[str, Recipe]
    """Of each segment by name."""
    pace: Pace
    budgets: dict[str, int]
    uniform: dict[str, Uniform]
    """What one policy for all would give."""
    tried: int
    """Schedules that were gone through."""


class Uniform(NamedTuple):
    """One policy for all segments."""

    seconds: float
    peaks: dict[str, int]  # bytes by tier
    fits: bool


def keep_all(chain: Chain) -> dict[str, Recipe]:
    """Every graph is kept: nothing is recomputed."""
    return {segment.name: Recipe() for segment in chain.segments}


def recompute_all(chain: Chain) -> dict[str, Recipe]:
    """Boundaries and decisions stay in HBM; all else is recomputed."""
    return {segment.name: Recipe(record=False) for segment in chain.segments}


def offload_all(chain: Chain, tier: str = HOST) -> dict[str, Recipe]:
    """Boundaries and residuals leave HBM; all else is recomputed."""
    first = chain.segments[0]
    return {
        segment.name: Recipe(
            False, "keep" if segment is first else "offload", dict.fromkeys(segment.residuals, "offload"), tier
        )
        for segment in chain.segments
    }


def plan(
    chain: Chain,
    sizes: Sizes,
    costs: Costs,
    budgets: Mapping[str, int],
    *,
    microbatches: int = 1,
    order: Order = "depth_first",
    gathers: Gathers | None = None,
    updates: Updates | None = None,
    recipes: Mapping[str, Sequence[Recipe]] | None = None,
    paces: Sequence[Pace] = PACES,
    effort: int = EFFORT,
) -> Plan:
    """Chooses for every segment what is kept, offloaded and recomputed, and when copies are issued.

    Args:
      chain: the segments.
      sizes: bytes of everything.
      costs: seconds of everything; values may go to the tiers that it has links for.
      budgets: bytes of each tier; one that is missing has no limit.
      microbatches, order, gathers, updates: as :func:`make_schedule` takes them.
      recipes: what segments may take, by their kind; a kind that is not named may take all that is not worse in every
        respect (:func:`candidate_recipes`).
      paces: among which copies' times are chosen, the likeliest first.
      effort: instructions to go through, over all schedules that are tried. The first ones are tried in any case.

    Returns:
      the fastest schedule found.

    Raises:
      PlanError: when nothing fits: the smallest budget of HBM that works, and what fills it.
      ValueError: for budgets below 0, recipes of an unknown kind, or no pace.
    """
    check_chain(chain)
    for tier, budget in budgets.items():
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ValueError(f"the budget of {tier} is {budget!r} bytes; it must be an integer of at least 0")
    kinds = {segment.kind for segment in chain.segments}
    if unknown := sorted(set(recipes or {}) - kinds):
        raise ValueError(f"recipes for segments of the kinds {unknown}; the chain has {sorted(kinds)}")
    if not paces:
        raise ValueError("paces is empty: at least one is needed")
    chosen = tuple(_recipes_of(segment, chain, sizes, costs, recipes or {}) for segment in chain.segments)
    problem = _Problem(chain, sizes, costs, dict(budgets), microbatches, order, gathers, updates, chosen)
    return _Search(problem, tuple(paces), effort).run()


def candidate_recipes(segment: Segment, sizes: Sizes, costs: Costs, first: bool = False) -> tuple[Recipe, ...]:
    """What a segment may take: of two recipes that differ in nothing but being worse, the better.

    Residuals that are small beside the input share its policy: their number would multiply the choices for nothing.

    Args:
      segment: which.
      sizes, costs: of the chain.
      first: whether it has no input.
    """
    profile, before = sizes.segments[segment.name], sizes.previous[segment.name]
    entering = 0 if before is None else sizes.segments[before].output
    small = [name for name in segment.residuals if profile.residuals[name] * 64 <= entering]
    large = [name for name in segment.residuals if name not in small]
    found = [Recipe()]
    for tier in costs.write:
        inputs: tuple[Policy, ...] = ("keep",) if first else ("keep", "offload", "recompute")
        for entry in inputs:
            policies: list[tuple[Policy, ...]] = [
                ("keep", "offload") if name in segment.decisions else ("keep", "offload", "recompute") for name in large
            ]
            beside: Policy = "offload" if entry == "offload" else "keep"
            for some in itertools.product(*policies):
                residuals = {**dict.fromkeys(small, beside), **dict(zip(large, some, strict=True))}
                leaves = "offload" in (entry, *residuals.values())
                found.append(Recipe(False, entry, residuals, tier if leaves else HOST))
    if not costs.write:
        entries: tuple[Policy, ...] = ("keep",) if first else ("keep", "recompute")
        for entry in entries:
            kept: list[tuple[Policy, ...]] = [
                ("keep",) if name in segment.decisions else ("keep", "recompute") for name in segment.residuals
            ]
            for some in itertools.product(*kept):
                found.append(Recipe(False, entry, dict(zip(segment.residuals, some, strict=True))))
    unique = [recipe for number, recipe in enumerate(found) if recipe not in found[:number]]
    return tuple(
        recipe for recipe in unique if not any(_better(other, recipe, segment, sizes, costs) for other in unique)
    )


def _better(one: Recipe, other: Recipe, segment: Segment, sizes: Sizes, costs: Costs) -> bool:
    """Whether ``one`` is as good as ``other`` in every respect, and better in some."""
    if one.record or other.record or one.input != other.input or one == other:
        return False
    a, b = (_respects(recipe, segment, sizes, costs) for recipe in (one, other))
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _respects(recipe: Recipe, segment: Segment, sizes: Sizes, costs: Costs) -> tuple[float, ...]:
    profile, seconds = sizes.segments[segment.name], costs.segments[segment.name]
    policies = policies_of(segment, recipe)
    given = tuple(name for name in segment.residuals if policies[name] != "recompute")
    moved = [name for name in given if policies[name] == "offload"]
    tiers = sorted(costs.write)
    return (
        seconds.forward[given] + seconds.backward[given],
        profile.graph[given] + sum(profile.residuals[name] for name in given),
        sum(profile.residuals[name] for name in given if name not in moved),
        *(
            sum(profile.residuals[name] for name in moved) + (recipe.input == "offload") if recipe.tier == tier else 0
            for tier in tiers
        ),
    )


def _recipes_of(
    segment: Segment, chain: Chain, sizes: Sizes, costs: Costs, given: Mapping[str, Sequence[Recipe]]
) -> tuple[Recipe, ...]:
    first = segment is chain.segments[0]
    if segment.kind not in given:
        found = list(candidate_recipes(segment, sizes, costs, first))
        policies = (recompute_all(chain), *(offload_all(chain, tier) for tier in costs.write))
        for recipe in (recipes[segment.name] for recipes in policies):
            if not any(_same(segment, other, recipe) for other in found):
                found.append(recipe)
        return tuple(found)
    if not given[segment.kind]:
        raise ValueError(f"recipes of the kind {segment.kind!r} are empty: at least one is needed")
    some = [recipe._replace(input="keep") if first else recipe for recipe in given[segment.kind]]
    return tuple(recipe for number, recipe in enumerate(some) if recipe not in some[:number])


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What a plan is for."""

    chain: Chain
    sizes: Sizes
    costs: Costs
    budgets: dict[str, int]
    microbatches: int
    order: Order
    gathers: Gathers | None
    updates: Updates | None
    recipes: tuple[tuple[Recipe, ...], ...]

    def schedule(self, recipes: Mapping[str, Recipe], pace: Pace) -> Schedule:
        return make_schedule(
            self.chain,
            recipes,
            microbatches=self.microbatches,
            order=self.order,
            gathers=self.gathers,
            updates=self.updates,
            lag=pace.lag,
            lead=pace.lead,
        )

    def named(self, choices: Choices) -> dict[str, Recipe]:
        return {
            segment.name: some[choice]
            for segment, some, choice in zip(self.chain.segments, self.recipes, choices, strict=True)
        }

    def model(self, pace: Pace) -> Model:
        return make_model(
            self.chain,
            self.recipes,
            self.sizes,
            self.costs,
            batches_at_once=1 if self.order == "depth_first" else self.microbatches,
            lag=pace.lag,
            lead=pace.lead,
            gathers=self.gathers,
        )


class _Trial(NamedTuple):
    """A schedule, gone through."""

    choices: Choices
    pace: Pace
    schedule: Schedule
    reports: dict[str, TierReport]
    seconds: float
    over: int  # bytes over the budgets of further tiers
    over_hbm: int

    @property
    def fits(self) -> bool:
        return not (self.over or self.over_hbm)

    @property
    def at(self) -> Instruction | None:
        """During which HBM holds the most."""
        at = self.reports[HBM].at
        return self.schedule.instructions[at] if at >= 0 else None


class _Search:
    """Proposals, and what exact counting says of them."""

    def __init__(self, problem: _Problem, paces: tuple[Pace, ...], effort: int) -> None:
        self.problem, self.paces, self.effort = problem, paces, effort
        self.work = 0
        self.trials: dict[tuple[Choices, Pace], _Trial] = {}
        self.models: dict[Pace, Model] = {}
        self.bases: dict[Pace, Numbers] = {}
        plain = problem.schedule(recompute_all(problem.chain), paces[0])
        self.fixed = fixed_contents(problem.sizes, plain)
        self.limits = {
            tier: budget - sum(self.fixed.get(tier, {}).values())
            for tier, budget in problem.budgets.items()
            if tier != HBM
        }

    def run(self) -> Plan:
        self._check_residents()
        uniform = self._uniform()
        paces = self.paces if len(self.problem.recipes) <= SMALL else self.paces[:1]
        for pace in paces:
            self._propose(pace, smallest=False)
        if not self._fitting():
            for pace in paces:
                self._propose(pace, smallest=True)
            self._refine(smallest=True)
            if not self._fitting():
                self._refuse()
        self._refine(smallest=False)
        best = min(self._fitting(), key=_by_time)
        timeline = simulate(best.schedule, self.problem.chain, self.problem.sizes, self.problem.costs)
        recipes = self.problem.named(best.choices)
        budgets = self.problem.budgets
        return Plan(best.schedule, timeline, self.problem.chain, recipes, best.pace, budgets, uniform, len(self.trials))

    def _check_residents(self) -> None:
        for tier, left in self.limits.items():
            if left < 0:
                contents = self.fixed[tier]
                listed = ", ".join(f"{name}: {size:,}" for name, size in contents.items())
                raise PlanError(
                    f"the budget of {tier} is {self.problem.budgets[tier]:,} bytes; what is there all the time takes "
                    f"{sum(contents.values()):,} ({listed})",
                    tier,
                    -left,
                )

    def _fitting(self) -> list[_Trial]:
        return [trial for trial in self.trials.values() if trial.fits]

    def _uniform(self) -> dict[str, Uniform]:
        """Each policy for all, and as a place to start from where every segment may take it."""
        chain = self.problem.chain
        policies = {"keep all": keep_all(chain), "recompute all": recompute_all(chain)}
        policies |= {f"offload all to {tier}": offload_all(chain, tier) for tier in self.problem.costs.write}
        out = {}
        for name, recipes in policies.items():
            pairs = list(zip(chain.segments, self.problem.recipes, strict=True))
            places = [
                next((number for number, other in enumerate(some) if _same(segment, other, recipe)), -1)
                for (segment, some), recipe in zip(pairs, recipes.values(), strict=True)
            ]
            pace = self.paces[0]
            trial = self.trial(tuple(places), pace) if min(places) >= 0 else self._go_through((), pace, recipes)
            peaks = {tier: report.peak for tier, report in trial.reports.items()}
            out[name] = Uniform(trial.seconds, peaks, trial.fits)
        return out

    def trial(self, choices: Choices, pace: Pace) -> _Trial:
        """Goes through a schedule, unless that was done."""
        if (choices, pace) not in self.trials:
            self.trials[choices, pace] = self._go_through(choices, pace, self.problem.named(choices))
        return self.trials[choices, pace]

    def _go_through(self, choices: Choices, pace: Pace, recipes: Mapping[str, Recipe]) -> _Trial:
        problem = self.problem
        schedule = problem.schedule(recipes, pace)
        self.work += len(schedule)
        reports = verify(schedule, problem.chain, problem.sizes)
        times = run_times(
            schedule,
            problem.chain,
            problem.costs.of(schedule, problem.sizes),
            one_link=problem.costs.one_link,
        )
        excess = {
            tier: max(0, report.peak - problem.budgets.get(tier, report.peak)) for tier, report in reports.items()
        }
        over_hbm = excess.pop(HBM)
        return _Trial(choices, pace, schedule, reports, max(times.end), sum(excess.values()), over_hbm)

    def _model(self, pace: Pace) -> Model:
        """The model, and the memory that is not the recipes': what the verifier counts of a plain schedule."""
        if pace not in self.models:
            plain = recompute_all(self.problem.chain)
            self.bases[pace] = self._besides(plain, pace)
            self.models[pace] = self._corrected(self.problem.model(pace), plain, pace)
        return self.models[pace]

    def _besides(self, recipes: Mapping[str, Recipe], pace: Pace) -> Numbers:
        """[runs]: bytes in HBM that the verifier counts of a schedule beyond those that the model does."""
        alone = dataclasses.replace(self.problem, recipes=tuple((recipe,) for recipe in recipes.values())).model(pace)
        levels = alone.levels(np.zeros((1, len(recipes)), dtype=np.int64))[0]
        besides: Numbers = self._counted(self._go_through((), pace, recipes)) - levels
        return besides

    def _corrected(self, model: Model, plain: Mapping[str, Recipe], pace: Pace) -> Model:
        """The model with what a recomputed input changes besides the values of its recipe.

        It puts replays of several segments in a row, so that gradients and fetched values are there with others than
        in a plain schedule. Every second segment's is counted at once: neighbours would make longer rows.
        """
        hbm, count = [part.copy() for part in model.hbm], len(model.hbm)
        names = [segment.name for segment in self.problem.chain.segments]
        for parity in (0, 1):
            some = [number for number in range(1, count) if number % 2 == parity and model.recomputed[number].any()]
            if not some:
                continue
            again = {names[number]: plain[names[number]]._replace(input="recompute") for number in some}
            off = self._besides({**plain, **again}, pace) - self.bases[pace]
            for number in some:
                # The replays and backwards of this segment, and of the one before.
                runs = slice(count + 2 * (count - 1 - number), count + 2 * (count + 1 - number))
                hbm[number][model.recomputed[number], runs] += np.nan_to_num(off[runs])
        return dataclasses.replace(model, hbm=tuple(hbm))

    def _counted(self, trial: _Trial) -> Numbers:
        """[runs]: bytes in HBM during each run and until the next, the most over microbatches."""
        count = len(self.problem.chain.segments)
        number = {segment.name: place for place, segment in enumerate(self.problem.chain.segments)}
        out = np.full(3 * count, np.nan)
        levels = trial.reports[HBM].levels
        working = working_bytes(trial.schedule, self.problem.sizes)
        fixed = fixed_contents(self.problem.sizes, trial.schedule)
        before = sum(fixed[HBM].values())
        seen: set[tuple[str, int]] = set()
        run = 0
        for index, one in enumerate(trial.schedule):
            if of_optimizer(one):
                break
            if isinstance(one, Forward | Backward):
                place = number[one.segment]
                replay = count + 2 * (count - 1 - place)
                if isinstance(one, Backward):
                    run = replay + 1
                else:
                    run = replay if (one.segment, one.microbatch) in seen else place
                    seen.add((one.segment, one.microbatch))
            out[run] = np.nanmax([out[run], before + working[index], levels[index]])
            before = levels[index]
        return out

    def _propose(self, pace: Pace, smallest: bool) -> None:
        """Asks the program, and again where the exact count differs."""
        model = self._model(pace)
        limits: dict[str, float] = dict(self.limits)
        if HBM in self.problem.budgets:
            limits[HBM] = self.problem.budgets[HBM]
        base = self.bases[pace]
        small = len(self.problem.recipes) <= SMALL
        gap, nodes = (1e-3, 2000) if small else (5e-3, 20)
        for attempt in range(4):
            choices = solve(model, base, limits, smallest=smallest, gap=gap, nodes=nodes)
            if choices is None:
                return
            known = (choices, pace) in self.trials
            trial = self.trial(choices, pace)
            if known or (trial.fits and not small):
                return
            if not small and any(self.trial(choices, other).fits for other in self.paces):
                return
            if attempt:
                # The correction of one answer was not that of the next: some room for both.
                limits[HBM] = limits.get(HBM, math.inf) - trial.over_hbm
            counted = self._counted(trial)
            off = counted - base - model.levels(np.array([choices]))[0]
            base = base + np.where(np.isnan(counted), 0.0, off)
            for tier in self.limits:
                if tier in trial.reports:
                    limits[tier] -= max(0, trial.reports[tier].peak - self.problem.budgets[tier])

    def _refine(self, smallest: bool) -> None:
        """Tries neighbours of the best while that helps."""
        key = _by_peak if smallest else _by_time
        while self.work < self.effort:
            known = [trial for trial in self.trials.values() if self._counts(trial, smallest)]
            if not known:
                return
            best = min(known, key=key)
            if smallest and best.at is not None and of_optimizer(best.at):
                return
            for choices, pace in self._neighbours(best, smallest):
                trial = self.trial(choices, pace)
                if self._counts(trial, smallest) and key(trial) < key(best):
                    break
                if self.work >= self.effort:
                    return
            else:
                return

    def _counts(self, trial: _Trial, smallest: bool) -> bool:
        return not trial.over and (smallest or trial.fits)

    def _neighbours(self, best: _Trial, smallest: bool) -> Iterator[tuple[Choices, Pace]]:
        """The best with another pace and some segments changed, the most promising first.

        What the model takes to be over a limit, or slower, by more than its own error is left out.
        """
        moves = self._moves(best.choices)
        table = np.tile(np.array(best.choices), (len(moves), 1))
        for row, move in zip(table, moves, strict=True):
            for number, option in move:
                row[number] = option
        model, base = self._model(best.pace), self.bases[best.pace]
        table = table[model.allowed(table)]
        now = np.array([best.choices])
        seconds, peak = model.seconds(now)[0], np.max(base + model.levels(now)[0])
        ranked: list[tuple[float, float, Choices, Pace]] = []
        small = len(self.problem.recipes) <= SMALL
        for pace in self.paces if small else (best.pace,):
            model, base = self._model(pace), self.bases[pace]
            taken, peaks = model.seconds(table) / seconds, np.max(base + model.levels(table), axis=1)
            good = peaks <= (peak if smallest else self.problem.budgets.get(HBM, np.inf)) * (
                TOLERANCE if small else 1.02
            )
            for tier, limit in self.limits.items():
                if tier in model.further:
                    good &= model.held(tier, table) <= limit
            if not smallest:
                good &= taken <= (TOLERANCE if small else 1.0)
            for row in np.flatnonzero(good):
                keys = (float(peaks[row]), float(taken[row]))
                choices = tuple(int(option) for option in table[row])
                ranked.append((*(keys if smallest else keys[::-1]), choices, pace))
        for pace in self.paces:
            yield best.choices, pace
        for _, _, choices, pace in sorted(ranked):
            yield choices, pace

    def _moves(self, choices: Choices) -> list[tuple[tuple[int, int], ...]]:
        """Up to three segments changed, as far as there are not too many ways."""
        changes = [
            (number, option)
            for number, some in enumerate(self.problem.recipes)
            for option in range(len(some))
            if option != choices[number]
        ]
        moves: list[tuple[tuple[int, int], ...]] = [()]
        for count in (1, 2, 3):
            if count == 1 or math.comb(len(changes), count) <= MOVES:
                found = itertools.combinations(changes, count)
                moves += [move for move in found if len({number for number, _ in move}) == count]
        return moves

    def _refuse_tier(self) -> NoReturn:
        """Says which further tier is too small for any schedule that was found."""
        trials = list(self.trials.values()) or [self.trial((0,) * len(self.problem.recipes), self.paces[0])]
        best = min(trials, key=lambda trial: (trial.over, *_by_peak(trial)))
        budgets = self.problem.budgets
        excess = {tier: one.peak - budgets.get(tier, one.peak) for tier, one in best.reports.items() if tier != HBM}
        tier = max(excess, key=excess.__getitem__)
        raise PlanError(
            f"no schedule fits {budgets[tier]:,} bytes of {tier}: the smallest budget found that works is "
            f"{best.reports[tier].peak:,}; the recipes leave no value in {HBM} or to be computed again instead",
            tier,
            excess[tier],
        )

    def _refuse(self) -> None:
        within = [trial for trial in self.trials.values() if not trial.over]
        if not within:
            self._refuse_tier()
        best = min(within, key=_by_peak)
        report = best.reports[HBM]
        where = "the beginning" if best.at is None else describe(best.at)
        further = ", ".join(f"{limit:,} of {tier}" for tier, limit in self.problem.budgets.items() if tier != HBM)
        listed = ", ".join(f"{name}: {size:,}" for name, size in report.contents[:8])
        more = len(report.contents) - 8
        raise PlanError(
            f"no schedule fits {self.problem.budgets[HBM]:,} bytes of {HBM}"
            + (f" and {further}" if further else "")
            + f": the smallest budget found that works is {report.peak:,}, reached at {where} by {listed}"
            + (f" and {more} smaller" if more > 0 else ""),
            HBM,
            report.peak - self.problem.budgets[HBM],
            best.at,
        )


def _same(segment: Segment, one: Recipe, other: Recipe) -> bool:
    """Whether two recipes mean the same; the tier matters where something goes there."""
    if one.record or other.record:
        return one.record == other.record
    a, b = policies_of(segment, one), policies_of(segment, other)
    moved = "offload" in (one.input, *a.values())
    return one.input == other.input and a == b and (one.tier == other.tier or not moved)


def _by_time(trial: _Trial) -> tuple[float, int, Choices, Pace]:
    return trial.seconds, trial.reports[HBM].peak, trial.choices, trial.pace


def _by_peak(trial: _Trial) -> tuple[int, float, Choices, Pace]:
    return trial.reports[HBM].peak, trial.seconds, trial.choices, trial.pace
