"""The optimizer as part of a schedule: layer by layer, its state in any tier, streamed through HBM."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from functional_moe.memory import (
    HBM,
    HOST,
    PACES,
    AdversarialCopies,
    Chain,
    Drop,
    Fetch,
    Gather,
    Gathers,
    Instruction,
    LiveBytes,
    Norm,
    Offload,
    PlanError,
    Recipe,
    Release,
    ResidentStore,
    Schedule,
    ScheduleError,
    Update,
    UpdateBytes,
    Updates,
    Value,
    buffer_sizes,
    describe,
    execute,
    explain,
    make_schedule,
    plan,
    simulate,
    stream_of,
    verify,
)
from tests.memory.conftest import (
    Momentum,
    RingStore,
    check_updated,
    layer_bytes,
    make_batch,
    make_chain,
    make_parameters,
    make_sizes,
    make_states,
    reference,
    update_bytes,
)
from tests.memory.synthetic import Layer, Problem, make_problem

ALL_ON_HOST = Updates(dict.fromkeys(("table", "layer0", "head"), HOST))
STATE = Value("state", "layer0")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_schedule_with_updates_computes_the_same_bit_for_bit(data: st.DataObject) -> None:
    depth, microbatches = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))
    chain, parameters = make_chain(depth), make_parameters(depth)
    batches = [make_batch(index) for index in range(microbatches)]
    sizes = layer_bytes(parameters)
    gathered = {layer: sizes[layer] for layer in data.draw(st.sets(st.sampled_from(chain.layers)))}
    homes = {layer: data.draw(st.sampled_from([HBM, HOST, "nvme"])) for layer in chain.layers}
    schedule = make_schedule(
        chain,
        {f"layer{index}.mix": Recipe(False, "offload") for index in range(depth)},
        microbatches=microbatches,
        gathers=Gathers(gathered) if gathered else None,
        updates=Updates(homes, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))),
    )
    whole = dataclasses.replace(make_sizes(chain, parameters, batches[0], gathered), updates=update_bytes(parameters))
    slabs = {tier: report.slab for tier, report in verify(schedule, chain, whole).items() if tier != HBM}
    donated = data.draw(st.booleans())
    states, kept = make_states(parameters), make_states(parameters)
    updater = Momentum(parameters, states, data.draw(st.sampled_from([0.0, float("inf")])))
    if donated:
        updater.homes = states
    store = RingStore(parameters, gathered, buffer_sizes(whole, schedule))
    copies = AdversarialCopies(data.draw(st.integers(0, 99)))
    found = execute(schedule, chain, store, batches, slabs=slabs, copies=copies, updater=updater)
    assert found.gradients == {}
    check_updated(updater, schedule, parameters, kept, reference(chain, parameters, batches))
    if not donated:
        pairs = zip(pytree.tree_leaves(states), pytree.tree_leaves(kept), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def streaming() -> tuple[Chain, Schedule]:
    chain = make_chain(1)
    return chain, make_schedule(chain, gathers=Gathers({"layer0": 4096}), updates=ALL_ON_HOST)


def with_states(depth: int, updates: Updates) -> tuple[Chain, Schedule, Any]:
    chain, parameters = make_chain(depth), make_parameters(depth)
    sizes = dataclasses.replace(make_sizes(chain, parameters, make_batch(0)), updates=update_bytes(parameters))
    return chain, make_schedule(chain, updates=updates), sizes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ([Norm()], [], "update table: reads the norm of the gradient, which is not in hbm"),
        ([Update("head")], [], "at the end: head was never updated|loses"),
        ([Update("layer0")], [Update("layer0")] * 2, "update layer0: reads the reduced of layer0, which is not in hbm"),
        ([Update("layer0")], [Update("layer9")], r"update layer9: the chain has the layers"),
        ([Fetch(STATE)], [], "update layer0: reads the state of layer0, which is not in hbm; it is in host"),
        ([Offload(STATE, HOST)], [], "drop state of layer0 from hbm: loses the state of layer0, which was updated"),
        ([Offload(STATE, HOST)], [Offload(STATE, "nvme")], "offload state of layer0 to nvme: the state is at home in"),
        ([Drop(STATE)], [], "at the end: the state of layer0 is still in hbm"),
        ([Drop(STATE)], [Drop(STATE), Drop(STATE, HOST)], "drop state of layer0 from host: a state stays at home"),
        (
            [Drop(STATE)],
            [Drop(Value("updated", "layer0"))],
            "drop updated of layer0 from hbm: a updated is not dropped",
        ),
        ([Release("layer0")], [], "update layer0: the layer is gathered"),
        (
            [Update("layer0")],
            [Update("layer0"), Gather("layer0", 0)],
            "gather layer0 .*: the layer was updated already",
        ),
        ([Drop(Value("gradient", "layer0"))], [], "norm of the gradient: the gradient of layer0 in full is still"),
    ],
)
def test_what_is_refused_is_named(old: list[Instruction], new: list[Instruction], message: str) -> None:
    chain, schedule = streaming()
    instructions = list(schedule)
    # The last of its kind: the gather for the backward, not the one for the forward.
    index = len(instructions) - 1 - instructions[::-1].index(old[0])
    instructions[index : index + 1] = new
    with pytest.raises(ScheduleError, match=message):
        verify(dataclasses.replace(schedule, instructions=tuple(instructions)), chain)


def test_no_norm_before_every_backward_is_done() -> None:
    chain, schedule = streaming()
    instructions = [one for one in schedule if not isinstance(one, Norm)]
    last = max(index for index, one in enumerate(instructions) if describe(one) == "backward embed (microbatch 0)")
    with pytest.raises(ScheduleError, match="norm of the gradient: embed of microbatch 0 has not run backwards"):
        verify(dataclasses.replace(schedule, instructions=(*instructions[:last], Norm(), *instructions[last:])), chain)


def test_a_state_that_was_updated_since_is_not_fetched() -> None:
    chain, schedule = streaming()
    instructions = list(schedule)
    at = instructions.index(Offload(STATE))
    instructions[at:at] = [Fetch(STATE)]
    with pytest.raises(ScheduleError, match=r"fetch state of layer0 from host: writes .* which is in hbm already"):
        verify(dataclasses.replace(schedule, instructions=tuple(instructions)), chain)
    # A copy more on either side changes nothing.
    instructions[at] = Offload(STATE)
    verify(dataclasses.replace(schedule, instructions=tuple(instructions)), chain)


def test_homes_are_for_every_layer_or_for_none() -> None:
    chain, schedule = streaming()
    with pytest.raises(ScheduleError, match=r"homes of other states, \['head'\]; the chain has the layers"):
        homes = {layer: home for layer, home in schedule.homes.items() if layer != "head"}
        verify(dataclasses.replace(schedule, homes=homes), chain)
    with pytest.raises(ScheduleError, match=r"which is not in host|the optimizer is not part of it"):
        verify(dataclasses.replace(schedule, homes={}), chain)
    plain = make_schedule(chain)
    with pytest.raises(ScheduleError, match="norm of the gradient: the schedule has no homes of states"):
        verify(dataclasses.replace(plain, instructions=(*plain.instructions, Norm())), chain)
    with pytest.raises(ScheduleError, match="at the end: table was never updated"):
        verify(dataclasses.replace(plain, homes=dict.fromkeys(chain.layers, HBM)), chain)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (Updates({"layer9": HOST}), r"updates have homes of the layers \['layer9'\]; the chain has"),
        (Updates(lag=-1), "updates.lag = -1: must be at least 0"),
        (Updates(lead=-1), "updates.lead = -1: must be at least 0"),
    ],
)
def test_updates_that_cannot_be_are_refused(updates: Updates, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(make_chain(1), updates=updates)


def test_a_schedule_with_updates_needs_an_updater_and_their_sizes() -> None:
    chain, schedule = streaming()
    with pytest.raises(ValueError, match="the schedule has updates: it needs an updater"):
        execute(schedule, chain, ResidentStore(make_parameters(1)), [make_batch(0)])
    sizes = make_sizes(chain, make_parameters(1), make_batch(0), {"layer0": 4096})
    with pytest.raises(ValueError, match=r"no bytes of the updates of \['table', 'layer0', 'head'\]"):
        verify(schedule, chain, sizes)


@pytest.mark.parametrize(("lag", "lead"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)])
def test_a_ring_of_states_is_in_hbm(lag: int, lead: int) -> None:
    """Those that wait for their update, the one under way, and those on their way out."""
    depth = 8
    layers = {f"layer{index}": HOST for index in range(depth)}
    chain, schedule, sizes = with_states(depth, Updates(layers, lag, lead))
    updates = {name: UpdateBytes(1000 if name in layers else 0, 0) for name in chain.layers}
    sizes = dataclasses.replace(sizes, updates=updates)
    held = most = 0
    for one in schedule:
        held += isinstance(one, Fetch) - (isinstance(one, Drop) and one.value.kind == "state")
        most = max(most, held)
    assert most == 1 + lag + lead
    assert verify(schedule, chain, sizes)[HOST].peak == 1000 * depth


def test_memory_is_counted_to_the_byte() -> None:
    """A layer's gradient goes with its update, its new parameters stay, and a budget of a byte less is refused."""
    chain, schedule, sizes = with_states(2, Updates({"layer0": HOST, "layer1": HOST}))
    updates = {
        name: UpdateBytes(state, 10**6, kept)
        for name, state, kept in zip(chain.layers, (4000, 300, 200, 1000), (7, 11, 13, 17), strict=True)
    }
    sizes = dataclasses.replace(sizes, updates=updates)
    reports = verify(schedule, chain, sizes)
    levels = dict(zip(map(describe, schedule), reports[HBM].levels, strict=True))
    assert levels["norm of the gradient"] == levels["backward embed (microbatch 0)"]
    assert levels["fetch state of layer0 from host"] - levels["norm of the gradient"] == 300
    gradient = sum(sizes.gradient("layer0.mix", "layer0").values()) + sum(
        sizes.gradient("layer0.choose", "layer0").values()
    )
    assert levels["update layer0"] - levels["fetch state of layer1 from host"] == 11 - gradient
    assert reports[HOST].peak == 300 + 200
    assert reports[HOST].slab == 0
    assert reports[HBM].levels[-1] == 5000 + 7 + 11 + 13 + 17
    assert describe(schedule.instructions[reports[HBM].at]) == "update table"
    assert ("working memory of update table", 10**6) in reports[HBM].contents
    assert ("optimizer state", 5000) in reports[HBM].contents
    peaks = {tier: report.peak for tier, report in reports.items()}
    verify(schedule, chain, sizes, peaks)
    for tier in peaks:
        with pytest.raises(ScheduleError, match=f"{tier} would hold .* 1 over the budget"):
            verify(schedule, chain, sizes, {**peaks, tier: peaks[tier] - 1})


def test_the_memory_of_a_real_step_is_what_was_counted() -> None:
    """With gradients and states that are larger than what segments keep."""
    depth, width = 3, 64
    chain, parameters = make_chain(depth), make_parameters(depth, width=width)
    batch = make_batch(0)
    schedule = make_schedule(chain, updates=Updates(dict.fromkeys(chain.layers, HOST)))
    sizes = make_sizes(chain, parameters, batch)

    class InPlace(Momentum):
        def begin(self, done: Any) -> None:
            self.loss, self.factor = done.loss, 1.0

        def update(self, layer: str, gradient: Any, state: Any) -> Any:
            new = pytree.tree_map(lambda m, g: torch.add(g, m, alpha=0.9), state, gradient)
            for leaf, step in zip(pytree.tree_leaves(self.parameters[layer]), pytree.tree_leaves(new), strict=True):
                leaf.add_(step, alpha=-0.1)
            return new

    states = make_states(parameters)
    size = {layer: sum(leaf.nbytes for leaf in pytree.tree_leaves(tree)) for layer, tree in states.items()}
    updates = {layer: UpdateBytes(each, each) for layer, each in size.items()}
    sizes = dataclasses.replace(sizes, updates=updates)
    reports = verify(schedule, chain, sizes)
    updater = InPlace(pytree.tree_map(torch.clone, parameters), states)
    updater.homes = states
    with LiveBytes() as memory:
        execute(schedule, chain, ResidentStore(parameters), [batch], updater=updater)
    assert memory.peak == pytest.approx(reports[HBM].peak, rel=0.05)


def problem_with_states(states: int, update: float, write: float, read: float, depth: int) -> Problem:
    problem = make_problem([Layer()] * depth, write, read)
    layers = problem.chain.layers
    sizes = dataclasses.replace(
        problem.sizes, updates={layer: UpdateBytes(states if layer != "head" else 0, 64) for layer in layers}
    )
    costs = dataclasses.replace(problem.costs, update={layer: update if layer != "head" else 0.0 for layer in layers})
    return problem._replace(sizes=sizes, costs=costs)


EIGHTHS = st.integers(1, 32).map(lambda count: count / 8)


@settings(deadline=None)
@given(EIGHTHS, EIGHTHS, EIGHTHS, st.integers(3, 8))
def test_a_state_s_way_is_hidden_exactly_when_it_takes_no_longer_than_an_update(
    out: float, back: float, update: float, depth: int
) -> None:
    """Per direction: with a state ahead and one behind, the slowest of the three sets the pace."""
    problem = problem_with_states(1024, update, 1024 / out, 1024 / back, depth)
    layers = {f"layer{number}": HOST for number in range(depth)}
    here = simulate(make_schedule(problem.chain, updates=Updates()), *problem)
    there = simulate(make_schedule(problem.chain, updates=Updates(layers, lag=1, lead=1)), *problem)
    more = there.seconds - here.seconds
    # The first comes and the last goes beside nothing.
    if out <= update and back <= update:
        assert more == back + out
    else:
        assert more >= back + out + (depth - 2) * (max(out, back) - update)
    assert there.busy["to_host"] == depth * out
    assert there.busy["from_host"] == depth * back
    assert here.seconds == simulate(make_schedule(problem.chain), *problem).seconds + depth * update


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_memory_over_time_stays_within_what_the_verifier_counted(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 5))
    problem = problem_with_states(
        data.draw(st.integers(0, 4096)), *(data.draw(EIGHTHS) * scale for scale in (1, 1024, 1024)), depth
    )
    homes = {layer: data.draw(st.sampled_from([HBM, HOST])) for layer in problem.chain.layers}
    schedule = make_schedule(
        problem.chain,
        {f"layer{number}": Recipe(False, "offload") for number in range(1, depth)},
        updates=Updates(homes, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))),
        gathers=Gathers({"layer0": 2048}) if data.draw(st.booleans()) else None,
    )
    timeline = simulate(schedule, *problem)
    for tier, steps in timeline.memory.items():
        assert max(level for _, level in steps) <= timeline.reports[tier].peak
        assert steps[-1][1] == timeline.reports[tier].levels[-1]
    free: dict[str, float] = {}
    for one, start, end in zip(schedule, timeline.start, timeline.end, strict=True):
        assert start >= free.get(stream_of(one), 0.0)
        free[stream_of(one)] = end


def test_a_plan_has_the_updates_in_its_seconds_and_its_budgets() -> None:
    problem = problem_with_states(4096, 0.5, 1024.0, 1024.0, 4)
    layers = {f"layer{number}": HOST for number in range(4)}
    plain = plan(*problem, {}, paces=PACES[:1])
    here, there = (plan(*problem, {}, updates=Updates(homes), paces=PACES[:1]) for homes in ({}, layers))
    assert here.timeline.seconds == plain.timeline.seconds + 4 * 0.5
    assert there.timeline.seconds > here.timeline.seconds
    assert there.timeline.reports[HOST].peak == 4 * 4096
    assert "; optimizer state in hbm" in explain(here)
    assert "; optimizer state of 4 of 5 layers in host, fetched for each update" in explain(there)
    assert "optimizer state" not in explain(plain)

    def smallest(updates: Updates) -> int:
        with pytest.raises(PlanError) as refused:
            plan(*problem, {HBM: 1, HOST: 10**6}, updates=updates, paces=PACES[:1])
        return 1 + refused.value.missing

    assert smallest(Updates(layers, lag=0, lead=0)) < smallest(Updates(layers)) < smallest(Updates())
    with pytest.raises(PlanError, match=r"the budget of host is 16,000 .* \(optimizer state: 16,384\)"):
        plan(*problem, {HBM: 10**6, HOST: 16_000}, updates=Updates(layers))
    # What the states leave of the budget is for values.
    room = 4 * 4096 + 2000
    tight = plan(*problem, {HBM: smallest(Updates(layers)), HOST: room}, updates=Updates(layers))
    assert tight.timeline.reports[HOST].peak <= room


def test_the_norm_waits_for_every_reduction() -> None:
    problem = make_problem([Layer()] * 2, reduce=64.0)
    problem = problem._replace(
        sizes=dataclasses.replace(problem.sizes, updates={layer: UpdateBytes(0, 0) for layer in problem.chain.layers}),
        costs=dataclasses.replace(problem.costs, update=dict.fromkeys(problem.chain.layers, 1.0)),
    )
    schedule = make_schedule(problem.chain, gathers=Gathers({"layer0": 2048}), updates=Updates())
    timeline = simulate(schedule, *problem)
    reduced = max(end for one, end in zip(schedule, timeline.end, strict=True) if describe(one) == "reduce layer0")
    assert timeline.start[schedule.instructions.index(Norm())] == reduced
    assert timeline.seconds == reduced + 3.0
