"""Plans: as good as trying everything, within the budget, faster than one policy for all, and the same every time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.memory import (
    HBM,
    HOST,
    PACES,
    Costs,
    Gathers,
    Link,
    Order,
    Pace,
    PlanError,
    Recipe,
    candidate_recipes,
    explain,
    keep_all,
    make_schedule,
    offload_all,
    plan,
    recompute_all,
    simulate,
    verify,
)
from functional_moe.memory._plan_model import make_model
from tests.memory.synthetic import Layer, Problem, make_problem

MENU = (
    Recipe(False, "keep", {"core": "keep"}),
    Recipe(False, "keep", {"core": "offload"}),
    Recipe(False, "offload", {"core": "keep"}),
    Recipe(False, "offload", {"core": "offload"}),
    Recipe(False, "offload"),
    Recipe(False, "recompute"),
    Recipe(False, "recompute", {"core": "offload"}),
)


class Instance(NamedTuple):
    problem: Problem
    recipes: dict[str, list[Recipe]]
    paces: tuple[Pace, ...]
    microbatches: int
    order: Order
    gathers: Gathers | None


class Found(NamedTuple):
    seconds: float
    hbm: int
    host: int


@st.composite
def instances(draw: st.DrawFn, deepest: int) -> Instance:
    def size(most: int, least: int = 1) -> int:
        return 256 * draw(st.integers(least, most))

    def kind() -> Layer:
        forward = draw(st.integers(1, 32)) / 8
        replay = forward * draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
        backward = draw(st.integers(1, 48)) / 8
        last = replay * draw(st.sampled_from([0.0, 0.5]))
        return Layer(size(16), size(16), size(64), size(16, 0), size(16, 0), forward, replay, backward, last)

    bandwidth = st.sampled_from([2.0**power for power in range(7, 14)])
    kinds = [kind() for _ in range(draw(st.integers(1, 2)))]
    problem = make_problem(
        draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=deepest)),
        draw(bandwidth),
        draw(bandwidth),
        gather=draw(st.sampled_from([0.0, 1.0, 3.0])),
        reduce=draw(st.sampled_from([0.0, 0.5, 2.0])),
    )
    menu = [Recipe(), Recipe(False), *draw(st.lists(st.sampled_from(MENU), min_size=2, max_size=2, unique_by=str))]
    gathered = draw(st.sets(st.sampled_from(problem.chain.layers)))
    return Instance(
        problem,
        {segment.kind: menu for segment in problem.chain.segments} | {"head": [Recipe()]},
        PACES[: draw(st.integers(1, 2))] if len(problem.chain.segments) <= 5 else PACES[:1],
        draw(st.integers(1, 2)),
        draw(st.sampled_from(["depth_first", "layer_major"])),
        Gathers(dict.fromkeys(gathered, 2048), draw(st.integers(0, 2)), draw(st.booleans()), draw(st.integers(0, 3)))
        if gathered
        else None,
    )


def everything(case: Instance) -> list[Found]:
    """All schedules there are, gone through."""
    problem, found = case.problem, []
    names = [segment.name for segment in problem.chain.segments]
    menus: list[Sequence[Recipe]] = [case.recipes[segment.kind] for segment in problem.chain.segments]
    menus[0] = [recipe for recipe in menus[0] if recipe.input == "keep"]
    for pace in case.paces:
        for recipes in itertools.product(*menus):
            if any(b.input == "recompute" and a.record for a, b in itertools.pairwise(recipes)):
                continue
            schedule = make_schedule(
                problem.chain,
                dict(zip(names, recipes, strict=True)),
                microbatches=case.microbatches,
                order=case.order,
                gathers=case.gathers,
                lag=pace.lag,
                lead=pace.lead,
            )
            timeline = simulate(schedule, *problem)
            host = timeline.reports[HOST].peak if HOST in timeline.reports else 0
            found.append(Found(timeline.seconds, timeline.reports[HBM].peak, host))
    return found


def check_against_everything(case: Instance, data: st.DataObject) -> None:
    found = everything(case)
    hbm = data.draw(st.sampled_from(sorted({one.hbm for one in found}))) - data.draw(st.sampled_from([0, 1, 500]))
    host = data.draw(st.sampled_from(sorted({one.host for one in found})))
    fitting = [one.seconds for one in found if one.hbm <= hbm and one.host <= host]
    arguments = {
        "microbatches": case.microbatches,
        "order": case.order,
        "gathers": case.gathers,
        "recipes": case.recipes,
        "paces": case.paces,
    }
    budgets = {HBM: hbm, HOST: host}
    if not fitting:
        smallest = min(one.hbm for one in found if one.host <= host)
        with pytest.raises(PlanError, match=f"the smallest budget found that works is {smallest:,}, reached at"):
            plan(*case.problem, budgets, **arguments)
        return
    best = plan(*case.problem, budgets, **arguments)
    assert best.timeline.seconds <= 1.01 * min(fitting)
    verify(best.schedule, case.problem.chain, case.problem.sizes, budgets)


@settings(deadline=None, max_examples=25)
@given(instances(3), st.data())
def test_a_plan_is_within_a_hundredth_of_trying_everything(case: Instance, data: st.DataObject) -> None:
    check_against_everything(case, data)


@pytest.mark.nightly
@settings(deadline=None, max_examples=200)
@given(instances(6), st.data())
def test_a_plan_of_six_layers_is_within_a_hundredth_of_trying_everything(case: Instance, data: st.DataObject) -> None:
    check_against_everything(case, data)


def uniform_seconds(problem: Problem, recipes: Mapping[str, Recipe], budgets: Mapping[str, int]) -> float:
    """Infinite where it does not fit."""
    timeline = simulate(make_schedule(problem.chain, recipes, lag=1, lead=2), *problem)
    fits = all(report.peak <= budgets[tier] for tier, report in timeline.reports.items())
    return timeline.seconds if fits else float("inf")


def halfway(problem: Problem) -> int:
    """The budget between what recomputing all and keeping all need."""
    peaks = [
        verify(make_schedule(problem.chain, recipes), problem.chain, problem.sizes)[HBM].peak
        for recipes in (recompute_all(problem.chain), keep_all(problem.chain))
    ]
    return sum(peaks) // 2


@pytest.mark.parametrize(("write", "read"), [(1024.0, 4096.0), (256.0, 256.0), (8192.0, 512.0)])
def test_a_plan_for_half_the_memory_beats_every_uniform_policy_that_fits(write: float, read: float) -> None:
    problem = make_problem([Layer()] * 12, write, read)
    budgets = {HBM: halfway(problem), HOST: 10**6}
    best = plan(*problem, budgets)
    uniform = [
        uniform_seconds(problem, recipes, budgets)
        for recipes in (keep_all(problem.chain), recompute_all(problem.chain), offload_all(problem.chain))
    ]
    assert best.timeline.seconds < min(uniform) < uniform[0] == float("inf")
    assert best.timeline.reports[HBM].peak <= budgets[HBM]


def test_without_limits_nothing_is_recomputed_or_moved() -> None:
    problem = make_problem([Layer()] * 3)
    best = plan(*problem, {})
    assert best.recipes == keep_all(problem.chain)


def test_graphs_are_kept_late_and_values_leave_early() -> None:
    """Late layers wait the least for their backward: what they keep is soon gone, and early copies have the time."""
    problem = make_problem([Layer()] * 10, 512.0, 512.0)
    best = plan(*problem, {HBM: halfway(problem), HOST: 10**6})
    kept = [best.recipes[f"layer{number}"].record for number in range(10)]
    assert sum(kept[5:]) > sum(kept[:5])


def test_seventy_four_layers_are_planned_with_bounded_work() -> None:
    problem = make_problem([Layer()] * 74, 2048.0, 4096.0, residual=True)
    budgets = {HBM: halfway(problem), HOST: 10**6}
    best = plan(*problem, budgets)
    assert best.tried * len(best.schedule) < 20_000
    assert best.timeline.seconds < uniform_seconds(problem, recompute_all(problem.chain), budgets)
    assert best.timeline.reports[HBM].peak <= budgets[HBM]


@pytest.mark.parametrize("layers", [8, 16, 24])
def test_the_memory_of_a_schedule_by_hand_is_enough_for_a_plan(layers: int) -> None:
    """Two microbatches per gather, gradients that stay longer: a recomputed input changes what is there together."""
    attention, experts = Layer(2048, 2048, 8192, 4096, 4096), Layer(2048, 0, 32768, 65536, 12288)
    problem = paired(make_problem([attention, experts] * layers, 2.0**14, 2.0**15, gather=1.0, reduce=0.5))
    first, second, *_ = problem.chain.segments
    menu = {
        first.kind: [Recipe(False, entry, {"core": "recompute"}) for entry in ("keep", "offload")],
        second.kind: [Recipe(False, entry) for entry in ("keep", "offload", "recompute")],
        "head": [Recipe()],
    }
    gathers = Gathers(dict.fromkeys(problem.chain.layers, 16384), 1, settle=4)
    by_hand = {
        segment.name: Recipe(False, "recompute" if number % 2 else "offload" if number else "keep")
        for number, segment in enumerate(problem.chain.segments[:-1])
    }
    schedule = make_schedule(
        problem.chain,
        by_hand,
        microbatches=2,
        order="layer_major",
        gathers=gathers,
        lag=PACES[0].lag,
        lead=PACES[0].lead,
    )
    timeline = simulate(schedule, *problem)
    budgets = {tier: report.peak for tier, report in timeline.reports.items()}
    best = plan(*problem, budgets, microbatches=2, order="layer_major", gathers=gathers, recipes=menu, paces=PACES[:1])
    assert best.timeline.seconds <= timeline.seconds


@settings(deadline=None, max_examples=20)
@given(st.data(), st.integers(0, 6), st.sampled_from([0.25, 1.0, 3.0]), st.sampled_from([0.5, 2.0, 4.0]))
def test_of_a_long_chain_the_program_knows_the_time(
    data: st.DataObject, settle: int, gather: float, reduce: float
) -> None:
    """What the program holds to be the fastest is so: its seconds are those of the simulator."""
    kinds = [Layer(forward=1.0, replay=0.25, last=0.25), Layer(forward=2.0, replay=2.0, backward=4.0, last=0.75)]
    problem = paired(make_problem(kinds * 12, 2.0**11, 2.0**12, gather=gather, reduce=reduce))
    problem = problem._replace(costs=dataclasses.replace(problem.costs, one_link=data.draw(st.booleans())))
    gathers = Gathers(dict.fromkeys(problem.chain.layers, 2048), 1, settle=settle)
    menu = [Recipe(False, entry, {"core": core}) for entry in ("keep", "offload") for core in ("keep", "offload")]
    again = [Recipe(False, "recompute", {"core": core}) for core in ("keep", "offload")]
    within = menu + again * data.draw(st.booleans())  # what a layer's second half may take
    recipes = [menu[:2], *(within if number % 2 else menu for number in range(1, 24)), [Recipe()]]
    choices = [data.draw(st.integers(0, len(some) - 1)) for some in recipes]
    chosen = {
        segment.name: some[one] for segment, some, one in zip(problem.chain.segments, recipes, choices, strict=True)
    }
    pace = PACES[0]
    schedule = make_schedule(problem.chain, chosen, gathers=gathers, lag=pace.lag, lead=pace.lead)
    model = make_model(
        problem.chain,
        recipes,
        problem.sizes,
        problem.costs,
        batches_at_once=1,
        lag=pace.lag,
        lead=pace.lead,
        gathers=gathers,
    )
    # A recomputed input changes the order of replays, and so what a gradient's reduction has to end.
    off = 0.1 if any(recipe.input == "recompute" for recipe in chosen.values()) else 0.01
    assert model.seconds(np.array([choices]))[0] == pytest.approx(simulate(schedule, *problem).seconds, rel=off)


def paired(problem: Problem) -> Problem:
    """Every two segments read one layer, as those of a transformer do."""
    names = [segment.name for segment in problem.chain.segments]
    layer = {name: names[number - number % 2] for number, name in enumerate(names)}
    segments = tuple(segment._replace(layers=(layer[segment.name],)) for segment in problem.chain.segments)
    profiles = {
        name: dataclasses.replace(profile, gradient={layer[name]: {name: profile.gradient[name]["weight"]}})
        for name, profile in problem.sizes.segments.items()
    }
    return problem._replace(
        chain=problem.chain._replace(segments=segments), sizes=dataclasses.replace(problem.sizes, segments=profiles)
    )


def test_equal_inputs_give_the_same_plan() -> None:
    problem = make_problem([Layer()] * 8, 512.0, 2048.0)
    budgets = {HBM: halfway(problem), HOST: 4096}
    first, second = plan(*problem, budgets), plan(*problem, budgets)
    assert first == second


def smallest_in(error: PlanError) -> int:
    return int(str(error).split("that works is ")[1].split(", reached")[0].replace(",", ""))


def test_a_budget_that_no_schedule_meets_names_the_smallest_and_what_fills_it() -> None:
    problem = make_problem([Layer()] * 4)
    with pytest.raises(PlanError) as refused:
        plan(*problem, {HBM: 10_000, HOST: 10**6})
    message = str(refused.value)
    assert message.startswith("no schedule fits 10,000 bytes of hbm and 1,000,000 of host: the smallest budget found")
    for part in ("graph of layer", "optimizer: 4,096", "working memory of "):
        assert part in message
    smallest = smallest_in(refused.value)
    assert plan(*problem, {HBM: smallest, HOST: 10**6}).timeline.reports[HBM].peak == smallest
    with pytest.raises(PlanError, match=f"no schedule fits {smallest - 1:,} "):
        plan(*problem, {HBM: smallest - 1, HOST: 10**6})


def test_what_is_always_in_a_further_tier_must_fit_there() -> None:
    chain, sizes, costs = make_problem([Layer()] * 2)
    sizes = type(sizes)(**(vars(sizes) | {"resident": {HOST: {"optimizer": 5000}}}))
    with pytest.raises(
        PlanError, match=r"host is 4,000 bytes; what is there all the time takes 5,000 \(optimizer: 5,000"
    ):
        plan(chain, sizes, costs, {HOST: 4000})


def test_a_third_tier_takes_what_the_second_has_no_room_for() -> None:
    chain, sizes, costs = make_problem([Layer(gradient=0)] * 6)  # else gradients make the peak
    links = {HOST: Link(2048.0), "nvme": Link(1024.0)}
    costs = Costs(costs.segments, write=links, read=links)
    menu = [Recipe(), Recipe(False), Recipe(False, "offload")]
    with pytest.raises(PlanError) as refused:
        plan(chain, sizes, costs, {HBM: 10_000, HOST: 1024}, recipes={"kind0": menu})
    smallest, menu = smallest_in(refused.value), [*menu, Recipe(False, "offload", tier="nvme")]
    best = plan(chain, sizes, costs, {HBM: smallest - 1, HOST: 1024}, recipes={"kind0": menu})
    assert {recipe.tier for recipe in best.recipes.values() if "offload" in str(recipe)} >= {"nvme"}


def test_a_decision_is_never_recomputed() -> None:
    problem = make_problem([Layer(residual=4096)] * 5, decision=True)
    best = plan(*problem, {HBM: halfway(problem), HOST: 10**6})
    assert all(recipe.record or recipe.residuals["core"] != "recompute" for recipe in list(best.recipes.values())[:-1])


def test_candidates_leave_out_what_is_worse_in_every_respect() -> None:
    # Replay with the residual takes as long as without: to keep it is only a cost.
    problem = make_problem([Layer(replay=1.0, graph=8192)] * 2)
    sizes = problem.sizes
    some = candidate_recipes(problem.chain.segments[1], sizes, problem.costs)
    assert Recipe() in some
    assert len({str(recipe) for recipe in some}) == len(some)
    chosen = [recipe for recipe in some if not recipe.record]
    assert chosen and all(recipe.residuals["core"] == "recompute" for recipe in chosen)
    first = candidate_recipes(problem.chain.segments[0], sizes, problem.costs, first=True)
    assert {recipe.input for recipe in first} == {"keep"}


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_a_budget_is_a_number_of_bytes(budget: int) -> None:
    with pytest.raises(ValueError, match="the budget of hbm is"):
        plan(*make_problem([Layer()]), {HBM: budget})


def test_recipes_are_for_kinds_that_there_are() -> None:
    problem = make_problem([Layer()])
    with pytest.raises(ValueError, match=r"kinds \['attention'\]; the chain has \['head', 'kind0'\]"):
        plan(*problem, {}, recipes={"attention": [Recipe()]})
    with pytest.raises(ValueError, match="'kind0' are empty"):
        plan(*problem, {}, recipes={"kind0": []})
    with pytest.raises(ValueError, match="paces is empty"):
        plan(*problem, {}, paces=())
    with pytest.raises(ValueError, match=r"policy for \['cor'\]"):
        plan(*problem, {}, recipes={"kind0": [Recipe(False, residuals={"cor": "keep"})]})


def test_it_is_explained_in_five_lines() -> None:
    problem = make_problem([Layer()] * 8, 512.0, 2048.0)
    lines = explain(plan(*problem, {HBM: halfway(problem), HOST: 10**6})).splitlines()
    assert [line.split(":")[0] for line in lines] == ["step", "saved", "beside compute", "bound by", "instead"]
    assert "kind0 (8): " in lines[1] and "graph kept" in lines[1]
    assert "keep all needs" in lines[4] and "recompute all" in lines[4]


def test_a_further_tier_that_no_recipe_fits_is_named() -> None:
    chain, sizes, costs = make_problem([Layer()] * 3)
    offloading = {chain.segments[0].kind: [Recipe(False, "keep", {"core": "offload"})]}
    with pytest.raises(PlanError, match=r"no schedule fits 10 bytes of host: the smallest .* is 1,536") as refused:
        plan(chain, sizes, costs, {HBM: 10**6, HOST: 10}, recipes=offloading)
    assert refused.value.tier == HOST
    enough = 10 + refused.value.missing
    assert (
        plan(chain, sizes, costs, {HBM: 10**6, HOST: enough}, recipes=offloading).timeline.reports[HOST].peak == enough
    )
