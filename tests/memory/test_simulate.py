"""When instructions run: closed forms, what waits for what, and memory within what the program's order allows."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.memory import (
    HBM,
    HOST,
    Costs,
    Fetch,
    Gather,
    Gathers,
    Hardware,
    Link,
    Offload,
    Recipe,
    ReduceScatter,
    Release,
    Schedule,
    SegmentSeconds,
    Sizes,
    Tier,
    make_costs,
    make_schedule,
    measure_seconds,
    profile_chain,
    simulate,
    stream_of,
    verify,
)
from tests.memory.conftest import make_batch, make_chain, make_parameters
from tests.memory.synthetic import Layer, Problem, make_problem

# Dyadic figures: every sum below is exact.
EIGHTHS = st.integers(1, 32).map(lambda count: count / 8)
BOUNDARY = st.integers(1, 16).map(lambda count: 256 * count)


@st.composite
def layers(draw: st.DrawFn) -> list[Layer]:
    kinds = [
        Layer(boundary=draw(BOUNDARY), forward=draw(EIGHTHS), replay=draw(EIGHTHS), backward=draw(EIGHTHS))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))


@st.composite
def recipes(draw: st.DrawFn, problem: Problem) -> dict[str, Recipe]:
    out: dict[str, Recipe] = {}
    replayed = False  # whether the segment before is
    for number, segment in enumerate(problem.chain.segments):
        if draw(st.booleans()):
            out[segment.name], replayed = Recipe(), False
            continue
        inputs = ["keep"] if number == 0 else ["keep", "offload"] + ["recompute"] * replayed
        policies = {name: draw(st.sampled_from(["keep", "offload", "recompute"])) for name in segment.residuals}
        out[segment.name], replayed = Recipe(False, draw(st.sampled_from(inputs)), policies), True
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    seconds = st.sampled_from([0.0, 0.25, 1.0, 4.0])
    bandwidth = st.sampled_from([256.0, 1024.0, 8192.0])
    problem = make_problem(draw(layers()), draw(bandwidth), draw(bandwidth), gather=draw(seconds), reduce=draw(seconds))
    gathered = draw(st.sets(st.sampled_from(problem.chain.layers)))
    gathers = Gathers(
        dict.fromkeys(gathered, 2048), draw(st.integers(0, 3)), draw(st.booleans()), draw(st.integers(0, 5))
    )
    schedule = make_schedule(
        problem.chain,
        draw(recipes(problem)),
        microbatches=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["depth_first", "layer_major"])),
        gathers=gathers if gathered else None,
        lag=draw(st.integers(0, 3)),
        lead=draw(st.integers(0, 3)),
    )
    return problem, schedule


def test_without_copies_the_seconds_add_up() -> None:
    problem = make_problem([Layer()] * 3)
    timeline = simulate(make_schedule(problem.chain), *problem)
    assert timeline.seconds == 3 * (1 + 2) + 2 * 0.125
    assert timeline.busy["compute"] == timeline.seconds
    assert {part.what: part.seconds for part in timeline.bound} == {
        "forward kind0": 3.0,
        "backward kind0": 6.0,
        "forward head": 0.125,
        "backward head": 0.125,
    }


@settings(deadline=None)
@given(layers(), st.sampled_from([256.0, 1024.0, 4096.0]), st.sampled_from([256.0, 1024.0, 4096.0]))
def test_an_offload_is_hidden_exactly_when_its_bytes_take_no_longer_than_its_layer(
    drawn: list[Layer], write: float, read: float
) -> None:
    """Each boundary leaves during its layer's forward and comes back during the next layer's replay and backward."""
    problem = make_problem(drawn, write, read, residual=False)
    names = [segment.name for segment in problem.chain.segments]
    offloaded = {name: Recipe(False, "offload") for name in names[1:-1]}
    kept = {name: Recipe(False) for name in names[1:-1]}
    first, head = {names[0]: Recipe(False)}, {names[-1]: Recipe()}
    plain = simulate(make_schedule(problem.chain, first | kept | head), *problem)
    timeline = simulate(make_schedule(problem.chain, first | offloaded | head, lag=0, lead=2), *problem)
    exposed = 0.0
    for number in range(1, len(drawn)):
        size = drawn[number - 1].boundary
        exposed += max(0.0, size / write - drawn[number].forward)
        following = drawn[number + 1] if number + 1 < len(drawn) else None
        # Without residuals a replay is a forward. Behind the last layer stands the head alone.
        meanwhile = 0.25 if following is None else following.forward + following.backward
        exposed += max(0.0, size / read - meanwhile)
    assert timeline.seconds == plain.seconds + exposed


@settings(deadline=None)
@given(EIGHTHS, st.integers(2, 12))
def test_a_gather_is_hidden_exactly_when_it_takes_no_longer_than_a_layer(seconds: float, depth: int) -> None:
    problem = make_problem([Layer(forward=1.0)] * depth, residual=False, gather=seconds)
    gathers = Gathers({f"layer{number}": 2048 for number in range(depth)}, prefetch=1, again=False)
    plain = simulate(make_schedule(problem.chain), *problem)
    timeline = simulate(make_schedule(problem.chain, gathers=gathers), *problem)
    assert timeline.seconds == plain.seconds + seconds + (depth - 1) * max(0.0, seconds - 1.0)


@settings(deadline=None)
@given(EIGHTHS, st.integers(2, 8))
def test_a_gradient_that_stays_a_layer_longer_hides_its_reduction(seconds: float, depth: int) -> None:
    problem = make_problem([Layer(forward=1.0, backward=2.0)] * depth, residual=False, reduce=seconds)
    gathers = Gathers({f"layer{number}": 2048 for number in range(depth)})
    replayed = {f"layer{number}": Recipe(False) for number in range(depth)}
    soon = simulate(make_schedule(problem.chain, replayed, gathers=gathers._replace(settle=1)), *problem)
    later = simulate(make_schedule(problem.chain, replayed, gathers=gathers._replace(settle=2)), *problem)
    # Beside the next layer's replay alone, or beside its backward too; behind the last layer is nothing.
    hidden = (depth - 1) * (max(0.0, seconds - 1.0) - max(0.0, seconds - 3.0))
    assert soon.seconds - later.seconds == hidden
    assert soon.reports[HBM].peak < later.reports[HBM].peak


@settings(deadline=None)
@given(cases())
def test_on_one_link_gathers_and_reductions_take_turns(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline = simulate(schedule, problem.chain, problem.sizes, dataclasses.replace(problem.costs, one_link=True))
    carried = [number for number, one in enumerate(schedule) if stream_of(one) in ("gather", "reduce")]
    for before, after in itertools.pairwise(carried):
        assert timeline.end[before] <= timeline.start[after]
    assert timeline.seconds >= timeline.busy["gather"] + timeline.busy["reduce"]
    assert timeline.seconds >= simulate(schedule, *problem).seconds


def test_a_replay_for_the_graph_alone_may_take_less() -> None:
    problem = make_problem([Layer(forward=1.0, replay=0.5)] * 2)
    known = problem.costs.segments
    less = {
        name: one._replace(without_output=dict.fromkeys(one.forward, 0.125)) if name != "head" else one
        for name, one in known.items()
    }
    schedule = make_schedule(problem.chain, {f"layer{number}": Recipe(False) for number in range(2)})
    plain = simulate(schedule, *problem)
    found = simulate(schedule, problem.chain, problem.sizes, dataclasses.replace(problem.costs, segments=less))
    assert plain.seconds - found.seconds == 2 * (1.0 - 0.125)  # the core is made again, so replays are forwards


@settings(deadline=None, max_examples=200)
@given(cases())
def test_memory_over_time_stays_within_what_the_verifier_counted(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline = simulate(schedule, *problem)
    reports = verify(schedule, problem.chain, problem.sizes)
    assert timeline.memory.keys() == reports.keys()
    for tier, steps in timeline.memory.items():
        assert max(level for _, level in steps) <= reports[tier].peak
        assert steps[-1][1] == reports[tier].levels[-1]
        assert [moment for moment, _ in steps] == sorted({moment for moment, _ in steps})


@settings(deadline=None)
@given(layers(), st.data())
def test_on_one_stream_memory_over_time_peaks_where_the_verifier_says(drawn: list[Layer], data: st.DataObject) -> None:
    problem = make_problem(drawn)
    chosen = {name: recipe for name, recipe in data.draw(recipes(problem)).items() if "offload" not in str(recipe)}
    chosen = {name: recipe for name, recipe in chosen.items() if recipe.input == "keep"}
    timeline = simulate(make_schedule(problem.chain, chosen), *problem)
    assert max(level for _, level in timeline.memory[HBM]) == timeline.reports[HBM].peak


@settings(deadline=None)
@given(cases())
def test_streams_run_in_order_and_something_is_always_waited_for(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline = simulate(schedule, *problem)
    free: dict[str, float] = {}
    buffers: dict[int, float] = {}
    where: dict[str, int] = {}
    for one, start, end in zip(schedule, timeline.start, timeline.end, strict=True):
        if isinstance(one, Gather):
            assert start >= buffers.get(one.buffer, 0.0)
            where[one.layer] = one.buffer
        if isinstance(one, Release):
            buffers[where[one.layer]] = end
        assert start >= free.get(stream_of(one), 0.0)
        free[stream_of(one)] = end
    for before, after in zip(timeline.critical, timeline.critical[1:], strict=False):
        assert timeline.end[before] == timeline.start[after]
    assert timeline.start[timeline.critical[0]] == 0.0
    assert sum(part.seconds for part in timeline.bound) == timeline.seconds
    assert timeline.seconds >= max(timeline.busy.values())


def test_a_drop_waits_for_the_copy_and_a_fetch_for_the_offload() -> None:
    problem = make_problem([Layer(forward=1.0)] * 3, write=1024 / 8, read=1024 / 16, residual=False)
    schedule = make_schedule(problem.chain, {"layer1": Recipe(False, "offload")}, lag=0, lead=1)
    timeline = simulate(schedule, *problem)
    numbers = {type(one): number for number, one in enumerate(schedule) if isinstance(one, Offload | Fetch)}
    assert timeline.start[numbers[Offload]] == 1.0
    assert timeline.end[numbers[Offload]] == 9.0  # layer1 computed meanwhile; then compute waits to drop its input
    assert ("offload", "to_host", 8.0) in timeline.bound
    assert ("fetch", "from_host", 16.0) in timeline.bound


def test_what_a_reduction_works_on_is_held_until_its_gradient_is_dropped() -> None:
    problem = make_problem([Layer()] * 2, reduce=8.0)
    gathers = Gathers({"layer0": 2048, "layer1": 2048})
    schedule = make_schedule(problem.chain, gathers=gathers)
    reduction = next(number for number, one in enumerate(schedule) if one == ReduceScatter("layer1"))
    levels = verify(schedule, problem.chain, problem.sizes)[HBM].levels
    assert levels[reduction] - levels[reduction - 1] == 256 + 512  # this rank's part, and the working memory


def test_costs_that_do_not_cover_an_instruction_are_refused() -> None:
    problem = make_problem([Layer()] * 2)
    schedule = make_schedule(problem.chain, {"layer1": Recipe(False, "offload", tier="nvme")})
    with pytest.raises(ValueError, match=r"Offload.*nothing is known of 'nvme'"):
        simulate(schedule, *problem)


def test_a_further_tier_needs_a_description_alone() -> None:
    problem = make_problem([Layer()] * 4)
    slow = {HOST: Link(1024.0), "nvme": Link(64.0)}
    costs = Costs(problem.costs.segments, write=slow, read=slow)
    chosen = {"layer1": Recipe(False, "offload"), "layer2": Recipe(False, "offload", tier="nvme")}
    timeline = simulate(make_schedule(problem.chain, chosen), problem.chain, problem.sizes, costs)
    assert {tier: report.peak for tier, report in timeline.reports.items() if tier != HBM} == {HOST: 1024, "nvme": 1024}
    assert timeline.busy["to_host"] == 1 + 16


def sizes_of_model(depth: int) -> Sizes:
    chain = make_chain(depth)
    names = [segment.name for segment in chain.segments]
    profiles = profile_chain(chain, make_parameters(depth), make_batch(0))
    nothing = dict.fromkeys(chain.layers, 0)
    return Sizes(profiles, dict(zip(names, [None, *names[:-1]], strict=True)), nothing, nothing, nothing)


def test_seconds_follow_from_arithmetic_and_from_memory() -> None:
    sizes = sizes_of_model(1)
    machine = Hardware(flops=1e3, tiers={HBM: Tier(10**9)}, gather=Link(100.0, 0.5), reduce=Link(50.0))
    costs = make_costs(machine, sizes)
    profile = sizes.segments["layer0.mix"]
    assert costs.segments["layer0.mix"].forward[()] == profile.forward_flops[()] / 1e3
    assert costs.segments["layer0.mix"].backward[("mixed",)] == profile.backward_flops[("mixed",)] / 1e3
    assert costs.segments["layer0.mix"].forward[("mixed",)] < costs.segments["layer0.mix"].forward[()]
    assert costs.segments["embed"].forward[()] == 0  # no arithmetic
    bounded = make_costs(Hardware(flops=1e3, tiers=machine.tiers, memory_bandwidth=1e3), sizes)
    assert bounded.segments["embed"].forward[()] > 0
    assert costs.gather["layer0"] == 0.0
    gradient = sum(size for layer in sizes.segments["layer0.mix"].gradient.values() for size in layer.values())
    assert costs.reduce["layer0"] >= gradient / 50.0


def test_measured_seconds_cover_every_way_to_run() -> None:
    chain, parameters, batch = make_chain(2), make_parameters(2), make_batch(0)
    sizes = sizes_of_model(2)
    seconds = measure_seconds(chain, parameters, batch, repeats=1)
    assert seconds["layer0.mix"] is seconds["layer1.mix"]
    machine = Hardware(flops=1e12, tiers={HBM: Tier(10**9), HOST: Tier(10**9, Link(1e9), Link(1e9))})
    costs = make_costs(machine, sizes, seconds)
    chosen = {
        "layer1.mix": Recipe(False, "offload", {"mixed": "offload"}),
        "layer1.choose": Recipe(False, "recompute"),
        "layer0.choose": Recipe(False),
    }
    timeline = simulate(make_schedule(chain, chosen), chain, sizes, costs)
    assert math.isfinite(timeline.seconds) and timeline.seconds > 0
    counted = measure_seconds(chain, parameters, batch, repeats=2, typical=len)  # type: ignore[arg-type]
    ways = counted["layer0.mix"]
    assert {*ways.forward.values(), *ways.backward.values(), *ways.without_output.values()} == {2}
    assert ways.forward.keys() == ways.without_output.keys()
    with pytest.raises(ValueError, match=r"no seconds were measured of the segments \['embed'"):
        make_costs(machine, sizes, {})
    with pytest.raises(ValueError, match="repeats = 0"):
        measure_seconds(chain, parameters, batch, repeats=0)


def test_seconds_by_segment_are_those_given() -> None:
    problem = make_problem([Layer()])
    longer = problem.costs.segments | {"layer0": SegmentSeconds({(): 10.0}, {(): 20.0})}
    timeline = simulate(make_schedule(problem.chain), problem.chain, problem.sizes, Costs(longer))
    assert timeline.seconds == 30.25
