"""A linear model of a chain's schedules: which recipe each segment takes, as a small integer program.

Time is a graph of moments, each at least another plus the seconds of one segment's work (max-plus, so linear in a
program that makes it small): the runs of segments in a row, and the copies of each direction in a row beside them.
Memory is a sum: what a segment's recipe holds at each run. Both follow the instructions of ``make_schedule`` up to
details (a run of recomputed inputs changes the order of replays); what is not of the recipes is taken from a schedule
that the verifier has counted. So the program's answer is close, and the exact check decides.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._build import Gathers, Policy, Recipe
from ._chain import Chain, Segment
from ._costs import Costs
from ._pool import aligned
from ._profile import Sizes, Variant
from ._schedule import HBM

Numbers: TypeAlias = NDArray[np.float64]
Choices: TypeAlias = tuple[int, ...]
"""For each segment, which of its recipes."""


class Edge(NamedTuple):
    """A moment is at least another, plus the seconds that one segment's recipe takes."""

    target: int
    source: int  # -1: the beginning
    segment: int
    seconds: Numbers  # [recipes of the segment]


@dataclasses.dataclass(frozen=True)
class Model:
    """The program's data. Moments are numbered so that sources come before targets."""

    recipes: tuple[tuple[Recipe, ...], ...]
    """Of each segment."""
    edges: tuple[Edge, ...]
    moments: int
    last: tuple[int, ...]
    """The step ends when these have come."""
    hbm: tuple[Numbers, ...]
    """Of each segment: [recipes, runs], the bytes it has in HBM during each run: the forwards, then replay and backward
    of each segment from the last to the first."""
    behind: tuple[Numbers, ...]
    """Of each segment: [recipes], the bytes it holds after its replay while those that recompute their inputs from it
    are replayed and run backwards."""
    further: Mapping[str, tuple[Numbers, ...]]
    """By tier, of each segment: [recipes], bytes."""

    @property
    def recomputed(self) -> list[NDArray[np.bool_]]:
        """Of each segment: [recipes], whether its input is."""
        return [np.array([recipe.input == "recompute" for recipe in some]) for some in self.recipes]

    def levels(self, choices: NDArray[np.int64]) -> Numbers:
        """Bytes in HBM: choices [n, segments] -> [n, runs]."""
        out = np.zeros((len(choices), self.hbm[0].shape[1]))
        for number, table in enumerate(self.hbm):
            out += table[choices[:, number]]
        count, carried = len(self.hbm), np.zeros(len(choices))
        for number, recomputed in enumerate(self.recomputed):
            if number:
                before = carried + self.behind[number - 1][choices[:, number - 1]]
                carried = np.where(recomputed[choices[:, number]], before, 0.0)
                replay = count + 2 * (count - 1 - number)
                out[:, replay : replay + 2] += carried[:, None]
        return out

    def seconds(self, choices: NDArray[np.int64]) -> Numbers:
        """Seconds of a microbatch: choices [n, segments] -> [n]."""
        moments = np.zeros((self.moments, len(choices)))
        for edge in self.edges:
            reached = edge.seconds[choices[:, edge.segment]]
            if edge.source >= 0:
                reached = reached + moments[edge.source]
            np.maximum(moments[edge.target], reached, out=moments[edge.target])
        out: Numbers = moments[list(self.last)].max(axis=0)
        return out

    def held(self, tier: str, choices: NDArray[np.int64]) -> Numbers:
        """Bytes in a further tier: choices [n, segments] -> [n]."""
        out = np.zeros(len(choices))
        for number, table in enumerate(self.further[tier]):
            out += table[choices[:, number]]
        return out

    def allowed(self, choices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether every recomputed input has a segment before it that is replayed."""
        good = np.ones(len(choices), dtype=bool)
        for number, recomputed in list(enumerate(self.recomputed))[1:]:
            recorded = np.array([recipe.record for recipe in self.recipes[number - 1]])
            good &= ~(recomputed[choices[:, number]] & recorded[choices[:, number - 1]])
        return good


def make_model(
    chain: Chain,
    recipes: Sequence[Sequence[Recipe]],
    sizes: Sizes,
    costs: Costs,
    *,
    batches_at_once: int,
    lag: int,
    lead: int,
    gathers: Gathers | None,
) -> Model:
    """The model of a chain.

    Args:
      chain: the segments.
      recipes: what each may take.
      sizes, costs: of the chain.
      batches_at_once: microbatches whose values are saved together: all when layers are taken one by one.
      lag, lead, gathers: as ``make_schedule`` takes them.
    """
    rows = [
        [_figures(segment, recipe, sizes, costs) for recipe in some]
        for segment, some in zip(chain.segments, recipes, strict=True)
    ]
    tiers = sorted({recipe.tier for some in recipes for recipe in some})
    further = {
        tier: tuple(
            np.array([batches_at_once * row.offloaded if row.tier == tier else 0.0 for row in some]) for some in rows
        )
        for tier in tiers
    }
    moments = _Moments(rows, batches_at_once, lag, lead)
    if gathers is not None:
        moments.add_gathers(chain, gathers, costs)
    hbm = _contents(rows, batches_at_once, lag, lead)
    behind = tuple(
        np.array(
            [
                0.0 if row.recipe.record else row.graph + row.moved + row.input * (row.recipe.input != "keep")
                for row in some
            ]
        )
        for some in rows
    )
    edges = tuple(sorted(moments.edges, key=lambda edge: edge.target))
    return Model(tuple(map(tuple, recipes)), edges, moments.count, tuple(moments.last), hbm, behind, further)


class _Figures(NamedTuple):
    """What one recipe of one segment means; bytes and seconds of a microbatch."""

    recipe: Recipe
    tier: str
    input: int
    kept: int  # residuals, in HBM
    moved: int  # residuals, to the further tier
    offloaded: int  # in the further tier, the input included
    graph: int
    working: tuple[int, int, int]  # of the forward, the replay, the backward
    seconds: tuple[float, float, float]  # of the forward, the replay, the backward
    write_input: float
    write_residuals: float
    read: float


def _figures(segment: Segment, recipe: Recipe, sizes: Sizes, costs: Costs) -> _Figures:
    profile, seconds = sizes.segments[segment.name], costs.segments[segment.name]
    before = sizes.previous[segment.name]
    entering = 0 if before is None else sizes.segments[before].output
    if recipe.record:
        working = (profile.forward[Variant(True, ())], 0, profile.backward[()])
        taken = (seconds.forward[()], 0.0, seconds.backward[()])
        return _Figures(recipe, "", entering, 0, 0, 0, profile.graph[()], working, taken, 0.0, 0.0, 0.0)
    policies = policies_of(segment, recipe)
    given = tuple(name for name in segment.residuals if policies[name] != "recompute")
    moved = [profile.residuals[name] for name in given if policies[name] == "offload"]
    kept = sum(profile.residuals[name] for name in given if policies[name] == "keep")
    inputs = [entering] if recipe.input == "offload" else []
    tier = recipe.tier if inputs or moved else ""
    write_input = write_residuals = read = 0.0
    if tier:
        write, back = costs.write[tier], costs.read[tier]
        write_input = sum(map(write.seconds, inputs))
        write_residuals = sum(map(write.seconds, moved))
        read = sum(map(back.seconds, (*inputs, *moved)))
    replay = seconds.without_output.get(given, seconds.forward[given])
    if recipe.input == "recompute" and before is not None:
        # Then the replay of the one before is for its output too. What that takes hardly depends on what it is given.
        known = costs.segments[before]
        replay += max(0.0, known.forward[()] - known.without_output.get((), known.forward[()]))
    return _Figures(
        recipe,
        tier,
        entering,
        kept,
        sum(moved),
        sum(map(aligned, (*inputs, *moved))),
        profile.graph[given],
        (profile.forward[Variant(False, ())], profile.forward[Variant(True, given)], profile.backward[given]),
        (seconds.forward[()], replay, seconds.backward[given]),
        write_input,
        write_residuals,
        read,
    )


def policies_of(segment: Segment, recipe: Recipe) -> dict[str, Policy]:
    """Of every residual, those that the recipe does not name included."""
    return {
        name: recipe.residuals.get(name, "keep" if name in segment.decisions else "recompute")
        for name in segment.residuals
    }


def _contents(rows: list[list[_Figures]], batches: int, lag: int, lead: int) -> tuple[Numbers, ...]:
    count = len(rows)
    tables = []
    for number, some in enumerate(rows):
        forward, replay = number, count + 2 * (count - 1 - number)
        backward = replay + 1
        table = np.zeros((len(some), 3 * count))
        for row, table_row in zip(some, table, strict=True):
            table_row[[forward, replay, backward]] += row.working
            away = slice(min(forward + lag, replay - 1) + 1, max(replay - lead, forward + 1))
            saved = np.full(3 * count, float(row.kept * batches))
            saved[: forward + 1] = saved[backward + 1 :] = 0
            moved = np.full(3 * count, float(row.moved * batches))
            moved[: forward + 1] = moved[backward + 1 :] = moved[away] = 0
            entering = np.full(3 * count, float(row.input * batches))
            entering[:forward] = entering[backward + 1 :] = 0
            if row.recipe.input == "offload":
                entering[away] = 0
            if row.recipe.input == "recompute":
                entering[forward + 1 : replay] = 0
                entering[replay : backward + 1] = row.input
            table_row += saved + moved + entering
            if row.recipe.record:
                table_row[forward + 1 : backward + 1] += row.graph * batches
                table_row[forward] += row.graph * (batches - 1)
            else:
                table_row[backward] += row.graph
        tables.append(table)
    return tuple(tables)


class _Moments:
    """The graph of moments, built run by run."""

    def __init__(self, rows: list[list[_Figures]], batches: int, lag: int, lead: int) -> None:
        self.edges: list[Edge] = []
        self.count = 0
        self.batches = batches
        count = len(rows)
        order = [(number, 0) for number in range(count)]
        order += [(number, part) for number in reversed(range(count)) for part in (1, 2)]
        self.segment_of = [number for number, _ in order]
        self.work = [np.array([row.seconds[part] for row in rows[number]]) * batches for number, part in order]
        self.runs = [-1] * len(order)
        replays = {number: place for place, (number, part) in enumerate(order) if part == 1}
        write_input = [np.array([row.write_input for row in some]) * batches for some in rows]
        write_residuals = [np.array([row.write_residuals for row in some]) * batches for some in rows]
        read = [np.array([row.read for row in some]) * batches for some in rows]
        waits: dict[int, list[int]] = {}  # before which run what must have come
        written = fetched = -1
        out: dict[int, list[int]] = {number: [] for number in range(count)}
        for place, (number, part) in enumerate(order):
            if part == 1 and read[number].any():
                sources = [fetched, self.runs[max(replays[number] - lead, number + 1) - 1]]
                if min(number + lag, replays[number] - 1) + 1 >= replays[number] - lead:
                    sources += out[number]
                fetched = self.moment(sources, number, read[number])
                waits.setdefault(place, []).append(fetched)
            before = self.runs[place - 1] if place else -1
            self.runs[place] = self.moment([before, *waits.get(place, [])], number, self.work[place])
            if part:
                continue
            for mover, seconds in ((number + 1, write_input), (number, write_residuals)):
                if mover < count and seconds[mover].any():
                    written = self.moment([written, self.runs[place]], mover, seconds[mover])
                    out[mover].append(written)
                    waits.setdefault(min(mover + lag + 1, replays[mover]), []).append(written)
        self.last = [self.runs[-1]]

    def moment(self, sources: Sequence[int], segment: int, seconds: Numbers) -> int:
        """A new one, ``seconds`` after the last of ``sources``."""
        self.edges += [Edge(self.count, source, segment, seconds) for source in dict.fromkeys(sources)]
        self.count += 1
        return self.count - 1

    def add_gathers(self, chain: Chain, gathers: Gathers, costs: Costs) -> None:
        """Gathers before the runs that wait for them, and reductions after; moments are numbered anew."""
        turns: list[tuple[str, int, int]] = []  # a layer's runs in a row
        for place, number in enumerate(self.segment_of):
            for layer in chain.segments[number].layers:
                if layer in gathers.sizes:
                    if turns and turns[-1][0] == layer:
                        turns[-1] = (layer, turns[-1][1], place)
                    else:
                        turns.append((layer, place, place))
        if not gathers.again:
            stays: dict[str, tuple[str, int, int]] = {}
            for layer, first, last in turns:
                stays[layer] = (layer, stays[layer][1] if layer in stays else first, last)
            turns = list(stays.values())
        edges, self.edges = self.edges, []
        place_of = {moment: place for place, moment in enumerate(self.runs)}
        renumbered: dict[int, int] = {-1: -1}
        needed = {first: index for index, (_, first, _) in enumerate(turns)}
        issued: dict[int, list[int]] = {}  # before which run, which turns' gathers
        ended: dict[str, int] = {}
        for index, (layer, _, end) in enumerate(turns):
            ahead = turns[max(0, index - gathers.prefetch)][1]
            issued.setdefault(max(ahead, ended.get(layer, -1) + 1), []).append(index)
            ended[layer] = end
        gathered: dict[int, int] = {}
        last_gather = reduced = -1
        pending: dict[int, list[int]] = {}
        by_target: dict[int, list[Edge]] = {}
        for edge in edges:
            by_target.setdefault(edge.target, []).append(edge)
        count, self.count = self.count, 0
        for moment in range(count):
            some = by_target[moment]
            sources = [renumbered[edge.source] for edge in some]
            place = place_of.get(moment, -1)
            for index in issued.get(place, []):
                taken = np.full(len(some[0].seconds), costs.gather[turns[index][0]])
                earlier = index - gathers.prefetch - 1
                buffer = renumbered[self.runs[turns[earlier][2]]] if earlier >= 0 and turns[earlier][2] < place else -1
                before = [last_gather, reduced] if costs.one_link else [last_gather]
                gathered[index] = last_gather = self.moment([*before, buffer], some[0].segment, taken)
            if place in needed:
                sources.append(gathered[needed[place]])
            sources += pending.pop(place, [])
            renumbered[moment] = self.moment(sources, some[0].segment, some[0].seconds)
            if place >= len(chain.segments) and (place - len(chain.segments)) % 2:
                number = self.segment_of[place]
                following = chain.segments[number - 1].layers if number else ()
                for layer in chain.segments[number].layers:
                    if layer in gathers.sizes and layer not in following:
                        taken = np.full(len(some[0].seconds), costs.reduce[layer])
                        before = [reduced, last_gather] if costs.one_link else [reduced]
                        reduced = self.moment([*before, renumbered[moment]], number, taken)
                        pending.setdefault(place + 1 + gathers.settle, []).append(reduced)
        self.last = [renumbered[self.runs[-1]]] + [reduced] * (reduced >= 0)


RUN, FEW = 8, 16
"""Graphs of the largest size that a run of recomputed inputs may hold in a chain of few segments; in others, one."""


def solve(
    model: Model,
    base: Numbers,
    budgets: Mapping[str, float],
    *,
    smallest: bool = False,
    gap: float,
    nodes: int,
) -> Choices | None:
    """The recipes of least predicted time within the budgets, or of least memory.

    Args:
      model: of the chain.
      base: [runs], bytes in HBM besides what the recipes hold.
      budgets: bytes of each tier; in the further ones, for the recipes. That of HBM is exceeded as little as can be.
      smallest: minimise the peak of HBM, whatever its budget and the time.
      gap: how far from the best the answer may be, relative.
      nodes: of the tree of programs to look at, at most.

    Returns:
      for each segment which recipe, or ``None`` when there is no answer.
    """
    starts = np.cumsum([0, *map(len, model.recipes)])
    binaries = int(starts[-1])
    end, peak = binaries + model.moments, binaries + model.moments + 1
    count = len(model.recipes)
    carried, level = peak + 1, peak + 1 + count
    columns = level + len(base)
    table = _Rows()
    for number in range(len(model.recipes)):
        table.add({int(starts[number]) + one: 1.0 for one in range(len(model.recipes[number]))}, 1.0, 1.0)
    for number in range(1, len(model.recipes)):
        recomputed = [o for o, recipe in enumerate(model.recipes[number]) if recipe.input == "recompute"]
        recorded = [o for o, recipe in enumerate(model.recipes[number - 1]) if recipe.record]
        if recomputed and recorded:
            entries = {int(starts[number]) + o: 1.0 for o in recomputed}
            table.add(entries | {int(starts[number - 1]) + o: 1.0 for o in recorded}, -np.inf, 1.0)
    unit = max(max(float(edge.seconds.max()) for edge in model.edges), 1e-30)
    for edge in () if smallest else model.edges:
        entries = {binaries + edge.target: 1.0}
        least = float(edge.seconds.min())
        for option, taken in enumerate(edge.seconds):
            if taken != least:
                entries[int(starts[edge.segment]) + option] = -(float(taken) - least) / unit
        if edge.source >= 0:
            entries[binaries + edge.source] = -1.0
        table.add(entries, least / unit, np.inf)
    for moment in model.last:
        table.add({end: 1.0, binaries + moment: -1.0}, 0.0, np.inf)
    scale = max(float(base.max()), max(float(part.max()) for part in model.hbm), 1.0)
    limit = budgets.get(HBM, np.inf)
    # Of what is held behind runs of replays: the most for one segment, and for all.
    most = max(float(part.max()) for part in model.behind) / scale
    runs = RUN if count <= FEW else 1
    longest = runs * most
    margin = longest + most if runs > 1 else most
    alike = model.recomputed
    for number in range(1, count):
        flags = alike[number]
        if runs == 1 and flags.any() and alike[number - 1].any():
            both = {int(starts[number]) + int(option): 1.0 for option in np.flatnonzero(flags)}
            both |= {int(starts[number - 1]) + int(option): 1.0 for option in np.flatnonzero(alike[number - 1])}
            table.add(both, -np.inf, 1.0)
        if flags.any():
            # What is held behind the segment before counts here too, if this one recomputes its input.
            entries = {carried + number: 1.0} | ({carried + number - 1: -1.0} if runs > 1 else {})
            entries |= {int(starts[number]) + int(option): -margin for option in np.flatnonzero(flags)}
            entries |= {
                int(starts[number - 1]) + option: -float(size) / scale
                for option, size in enumerate(model.behind[number - 1])
                if size
            }
            table.add(entries, -margin, np.inf)
    changes = [np.diff(part, axis=1, prepend=0.0) for part in model.hbm]
    for run in range(len(base)):
        # The level is the one before, and what changes: few recipes have something to change.
        entries = {level + run: 1.0} | ({level + run - 1: -1.0} if run else {})
        entries |= {
            int(starts[number]) + option: -float(size) / scale
            for number, part in enumerate(changes)
            for option, size in enumerate(part[:, run])
            if size
        }
        table.add(entries, 0.0, 0.0)
        entries = {level + run: 1.0}
        if run >= count:
            entries[carried + count - 1 - (run - count) // 2] = 1.0
        if smallest:
            table.add(entries | {peak: -1.0}, -np.inf, -float(base[run]) / scale)
        elif np.isfinite(limit):
            # Soft: that nothing fits would take long to prove.
            table.add(entries | {peak: -1.0}, -np.inf, (limit - float(base[run])) / scale)
    for tier, parts in model.further.items():
        held = {
            int(starts[number]) + option: float(size)
            for number, part in enumerate(parts)
            for option, size in enumerate(part)
            if size
        }
        if held and tier in budgets:
            largest = max(held.values())
            table.add({key: size / largest for key, size in held.items()}, -np.inf, budgets[tier] / largest)
    # A third of a second that only a planner needs.
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import coo_array  # type: ignore[import-untyped]

    cost = np.zeros(columns)
    cost[peak] = 1e3 * len(model.edges)
    cost[end] = 0.0 if smallest else 1.0
    whole = np.zeros(columns)
    whole[:binaries] = 1
    upper = np.full(columns, np.inf)
    upper[:binaries] = 1
    upper[carried:level] = longest
    lower = np.zeros(columns)
    lower[level:] = -np.inf  # less than in the schedule that the rest was counted in
    shape = (len(table.lower), columns)
    entries = coo_array((table.values, (table.rows, table.columns)), shape)
    result = milp(
        cost,
        constraints=LinearConstraint(entries.tocsr(), table.lower, table.upper),
        integrality=whole,
        bounds=Bounds(lower, upper),
        options={"mip_rel_gap": gap, "node_limit": nodes},
    )
    if result.x is None:
        return None
    return tuple(int(np.argmax(result.x[begin:stop])) for begin, stop in itertools.pairwise(starts))


class _Rows:
    """Constraints, row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        self.rows += [len(self.lower)] * len(entries)
        self.columns += entries.keys()
        self.values += entries.values()
        self.lower.append(lower)
        self.upper.append(upper)
