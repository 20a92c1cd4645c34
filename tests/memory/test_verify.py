"""What verify accepts computes the gradient; what it refuses is named, and so is what fills a tier."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from functional_moe.memory import (
    HBM,
    HOST,
    AdversarialCopies,
    Backward,
    Chain,
    Drop,
    Fetch,
    Forward,
    Gather,
    Gathers,
    Instruction,
    Offload,
    Recipe,
    ReduceScatter,
    Schedule,
    ScheduleError,
    Segment,
    Sizes,
    Updates,
    Value,
    buffer_sizes,
    describe,
    execute,
    make_schedule,
    verify,
)
from tests.memory.conftest import (
    Counter,
    Momentum,
    Reference,
    RingStore,
    check_equal,
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

DEPTH = 2


def mutants(schedule: Schedule, chain: Chain, random_: random.Random) -> Iterator[Schedule]:
    """Schedules with one thing changed."""
    names = [segment.name for segment in chain.segments]
    residuals = sorted({name for segment in chain.segments for name in segment.residuals})

    def other(current: Any, choices: list[Any]) -> Any:
        return random_.choice([choice for choice in choices if choice != current])

    def value(one: Value) -> Value:
        field = random_.choice(["kind", "of", "microbatch", "name"])
        choices = {
            "kind": [
                *("parameters", "input", "residual", "graph", "cotangent", "gradient", "reduced"),
                *("norm", "state", "updated"),
            ],
            "of": [*names, *chain.layers, "nothing"],
            "microbatch": [-1, *range(schedule.microbatches + 1)],
            "name": ["", "nothing", *residuals],
        }[field]
        return one._replace(**{field: other(getattr(one, field), choices)})

    def field_changed(one: Instruction) -> Instruction:
        field = random_.choice(dataclasses.fields(one)).name
        current = getattr(one, field)
        match field:
            case "layer" | "bucket":
                new: Any = other(current, [*chain.layers, "nothing"])
            case "segment":
                new = other(current, [*names, "nothing"])
            case "buffer":
                new = other(current, [-1, 0, 1, 2, 3, 7])
            case "microbatch":
                new = other(current, [-1, *range(schedule.microbatches + 1)])
            case "record" | "output":
                new = not current
            case "given" | "kept":
                new = tuple(name for name in current if random_.random() < 0.5)
                new += tuple(name for name in (*residuals, "nothing") if random_.random() < 0.3)
                new = (*current, *residuals[:1]) if new == current else new
            case "value":
                new = value(current)
            case "tier":
                new = other(current, [HBM, HOST, "nvme"])
        return dataclasses.replace(one, **{field: new})

    instructions = schedule.instructions
    while True:
        changed = list(instructions)
        index = random_.randrange(len(changed))
        near = min(max(0, index + random_.randint(-3, 3)), len(changed) - 1)
        match random_.choice(
            ["drop", "swap", "swap near", "double", "move", "field", "field", "field", "forget", "of all"]
        ):
            case "drop":
                del changed[index]
            case "swap":
                to = random_.randrange(len(changed))
                changed[index], changed[to] = changed[to], changed[index]
            case "swap near":
                changed[index], changed[near] = changed[near], changed[index]
            case "double":
                changed.insert(near, changed[index])
            case "move":
                changed.insert(near, changed.pop(index))
            case "field" if dataclasses.fields(changed[index]):
                changed[index] = field_changed(changed[index])
            case "forget":
                given = [index for index, one in enumerate(changed) if isinstance(one, Forward) and one.given]
                if given:
                    index = random_.choice(given)
                    one = changed[index]
                    assert isinstance(one, Forward)
                    lost = random_.choice(one.given)
                    changed[index] = dataclasses.replace(one, given=tuple(name for name in one.given if name != lost))
            case "of all":
                layer = random_.choice(chain.layers)
                match random_.choice(["microbatches", "resident", "homes"]):
                    case "microbatches":
                        count = schedule.microbatches + random_.choice([-1, 1])
                        yield dataclasses.replace(schedule, microbatches=count)
                    case "resident":
                        yield dataclasses.replace(schedule, resident=schedule.resident ^ {layer})
                    case "homes":
                        home = other(schedule.homes.get(layer), [HBM, HOST, "nvme"])
                        yield dataclasses.replace(schedule, homes={**schedule.homes, layer: home})
                continue
        if tuple(changed) != instructions:
            yield dataclasses.replace(schedule, instructions=tuple(changed))


def some_schedule(chain: Chain, sizes: dict[str, int], random_: random.Random) -> tuple[Schedule, dict[str, int]]:
    """With something of everything."""
    recipes: dict[str, Recipe] = {}
    record = True
    for segment in chain.segments:
        before, record = record, random_.random() < 0.3
        if record:
            continue
        inputs = (
            ["keep", "offload", *([] if before else ["recompute"])] if recipes or segment.name != "embed" else ["keep"]
        )
        recipes[segment.name] = Recipe(
            False,
            random_.choice(inputs),
            {
                name: random_.choice(["keep", "offload", *([] if name in segment.decisions else ["recompute"])])
                for name in segment.residuals
            },
        )
    gathered = {layer: sizes[layer] for layer in chain.layers if random_.random() < 0.6}
    homes = {layer: random_.choice([HBM, HOST, HOST, "nvme"]) for layer in chain.layers}
    updates = Updates(homes, random_.randint(0, 2), random_.randint(0, 2)) if random_.random() < 0.5 else None
    schedule = make_schedule(
        chain,
        recipes,
        microbatches=random_.randint(1, 2),
        order=random_.choice(["depth_first", "layer_major"]),
        gathers=Gathers(gathered, random_.randint(0, 2), random_.random() < 0.7) if gathered else None,
        updates=updates,
        lag=random_.randint(0, 2),
        lead=random_.randint(0, 2),
    )
    return schedule, gathered


def backwards(schedule: Schedule) -> list[Instruction]:
    return [one for one in schedule if isinstance(one, (Backward, ReduceScatter))]


def check_mutants(count: int, seed: int) -> tuple[int, int]:
    """How many of ``count`` were rejected, and how many were accepted and computed the same gradients."""
    random_ = random.Random(seed)
    counter = Counter()
    chain, parameters = make_chain(DEPTH, counter), make_parameters(DEPTH)
    batches = [make_batch(0), make_batch(1)]
    expected: dict[int, Reference] = {number: reference(chain, parameters, batches[:number]) for number in (1, 2)}
    whole = dataclasses.replace(make_sizes(chain, parameters, batches[0]), updates=update_bytes(parameters))
    states = make_states(parameters)
    rejected = equal = 0
    while rejected + equal < count:
        schedule, gathered = some_schedule(chain, layer_bytes(parameters), random_)
        sizes = dataclasses.replace(whole, gathered_layers=gathered, reduced_layers=gathered)
        verify(schedule, chain, sizes)
        made = mutants(schedule, chain, random_)
        for _ in range(min(25, count - rejected - equal)):
            mutant = next(made)
            try:
                reports = verify(mutant, chain, sizes)
            except ScheduleError as error:
                check_message(str(error), mutant)
                rejected += 1
                continue
            store = RingStore(parameters, set(chain.layers) - mutant.resident, buffer_sizes(sizes, mutant))
            slabs = {tier: report.slab for tier, report in reports.items() if tier != HBM}
            copies = AdversarialCopies(random_.randrange(100))
            counter.decisions = 0
            # The states that it was given may lie where new ones go: as if they were donated.
            given = pytree.tree_map(torch.clone, states)
            updater = Momentum(parameters, given)
            updater.homes = given
            found = execute(
                mutant, chain, store, batches[: mutant.microbatches], slabs=slabs, copies=copies, updater=updater
            )
            assert not store.held
            if mutant.homes:
                assert not found.gradients
                check_updated(updater, mutant, parameters, states, expected[mutant.microbatches])
            else:
                check_equal(found, expected[mutant.microbatches], exact=backwards(mutant) == backwards(schedule))
            assert counter.decisions == DEPTH * mutant.microbatches
            equal += 1
    return rejected, equal


def check_message(message: str, schedule: Schedule) -> None:
    if match := re.match(r"instruction (\d+), ", message):
        assert describe(schedule.instructions[int(match[1])]) in message
    else:
        assert re.match("at the end: |the schedule (has|keeps) ", message), message
    assert "\n" not in message


def test_a_mutant_is_rejected_or_computes_the_same_gradients() -> None:
    rejected, equal = check_mutants(500, seed=0)
    assert rejected > 300
    assert equal > 20


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 21))
def test_ten_thousand_mutants(seed: int) -> None:
    check_mutants(500, seed)


def offloading() -> tuple[Chain, Schedule, list[Instruction]]:
    chain = make_chain(1)
    schedule = make_schedule(chain, {"layer0.choose": Recipe(False, "offload")}, gathers=Gathers({"layer0": 4096}))
    return chain, schedule, list(schedule.instructions)


def changed(schedule: Schedule, instructions: list[Instruction]) -> Schedule:
    return dataclasses.replace(schedule, instructions=tuple(instructions))


INPUT = Value("input", "layer0.choose")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (Offload(INPUT), None, "fetch input of layer0.choose .microbatch 0. from host: reads .* not in host"),
        (Fetch(INPUT), None, "reads the input of layer0.choose .microbatch 0., which is not in hbm$"),
        (Drop(INPUT, HOST), Drop(INPUT), "reads the input of layer0.choose .*, which is not in hbm; it is in host"),
        (Drop(INPUT), None, "which is in hbm already"),
        (Drop(INPUT, HOST), None, "at the end: the input of layer0.choose .microbatch 0. is still in host"),
        (Backward("head"), None, "frees the input of head .*, which the graph of head .* refers to"),
        (Gather("layer0", 0), None, "forward layer0.mix .*: reads the parameters of layer0"),
        (Gather("layer0", 0), Gather("layer0", -1), "buffers are numbered from 0"),
        (Gather("layer0", 0), Gather("layer1", 0), r"the chain has the layers \('table', 'layer0', 'head'\)"),
        (Gather("layer0", 0), Gather("table", 0), "gather table into buffer 0: writes the parameters of table"),
        (ReduceScatter("layer0"), None, "loses the gradient of layer0, which was not reduced"),
        (Drop(Value("gradient", "layer0")), None, "at the end: the gradient of layer0 is still in hbm"),
        (Offload(INPUT), Offload(INPUT, HBM), "hbm is where values are computed"),
        (Offload(INPUT), Offload(Value("graph", "layer0.mix")), "a graph cannot leave hbm"),
        # torchtune 1867: parameters are never offloaded as activations.
        (Offload(INPUT), Offload(Value("parameters", "layer0")), "a parameters cannot leave hbm"),
        (
            Offload(INPUT),
            Offload(Value("gradient", "layer0")),
            "offload gradient of layer0 to host: reads .* not in hbm",
        ),
        (Offload(INPUT), Offload(Value("input", "layer9.mix")), "the chain has the segments"),
        (Offload(INPUT), Offload(Value("input", "layer0.choose", 1)), "the schedule has 1 microbatches"),
        (Backward("embed"), None, "at the end: embed of microbatch 0 never ran backwards"),
        (Backward("embed"), Drop(Value("cotangent", "layer0.mix")), "a cotangent is not dropped"),
    ],
)
def test_what_is_refused_is_named(old: Instruction, new: Instruction | None, message: str) -> None:
    chain, schedule, instructions = offloading()
    index = instructions.index(old)
    instructions[index : index + 1] = [] if new is None else [new]
    with pytest.raises(ScheduleError, match=message):
        verify(changed(schedule, instructions), chain)


def test_a_replay_that_would_decide_again_is_refused() -> None:
    chain, schedule, instructions = offloading()
    replay = next(one for one in instructions if isinstance(one, Forward) and one.given)
    instructions[instructions.index(replay)] = dataclasses.replace(replay, given=())
    with pytest.raises(ScheduleError, match=r"a replay would decide \['choice'\] again"):
        verify(changed(schedule, instructions), chain)


def test_what_a_graph_refers_to_stays() -> None:
    chain, schedule, instructions = offloading()
    replay = next(one for one in instructions if isinstance(one, Forward) and one.given)
    instructions.insert(instructions.index(replay) + 1, Drop(INPUT))
    with pytest.raises(ScheduleError, match=r"frees the input of layer0.choose .*, which the graph of layer0.choose"):
        verify(changed(schedule, instructions), chain)


def test_a_graph_wants_its_layer_back_in_the_same_buffer() -> None:
    chain = make_chain(1)
    schedule = make_schedule(chain, gathers=Gathers({"layer0": 4096}, prefetch=0))
    instructions = list(schedule.instructions)
    last = max(index for index, one in enumerate(instructions) if isinstance(one, Gather))
    instructions[last] = Gather("layer0", 5)
    with pytest.raises(ScheduleError, match="layer0 is in buffer 5; the graph refers to buffer 0"):
        verify(changed(schedule, instructions), chain)


def test_a_schedule_for_another_chain_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the chain has the segments"):
        verify(
            make_schedule(make_chain(1), gathers=Gathers({"table": 1, "layer0": 1, "head": 1})), renamed(make_chain(1))
        )
    with pytest.raises(ScheduleError, match=r"keeps \['layer1'\] resident; the chain has the layers"):
        verify(make_schedule(make_chain(2)), make_chain(1))
    with pytest.raises(ScheduleError, match="reads the input of head"):
        verify(make_schedule(make_chain(1)), make_chain(2))
    with pytest.raises(ScheduleError, match="has 0 microbatches; at least 1"):
        verify(Schedule((), 0), make_chain(1))


def renamed(chain: Chain) -> Chain:
    return Chain(tuple(one._replace(name=f"other.{one.name}") for one in chain.segments), chain.prepare)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipes": {"layer7.mix": Recipe()}}, r"recipes for the segments \['layer7.mix'\]; the chain has"),
        (
            {"recipes": {"layer0.mix": Recipe(False, "keep", {"nothing": "keep"})}},
            r"policy for \['nothing'\]; .*'mixed'",
        ),
        ({"recipes": {"layer0.mix": Recipe(False, "forget")}}, "layer0.mix: input = 'forget'; a policy is"),
        ({"recipes": {"layer0.mix": Recipe(False, "keep", {"mixed": "no"})}}, "layer0.mix: mixed = 'no'; a policy is"),
        ({"recipes": {"layer0.choose": Recipe(False, "keep", {"choice": "recompute"})}}, "never made twice"),
        ({"recipes": {"layer0.mix": Recipe(True, "offload")}}, "layer0.mix: it keeps its graph"),
        ({"recipes": {"layer0.mix": Recipe(True, "keep", {"mixed": "keep"})}}, "layer0.mix: it keeps its graph"),
        ({"recipes": {"embed": Recipe(False, "offload")}}, "embed: the first segment has no input to offload"),
        ({"recipes": {"layer0.mix": Recipe(False, "recompute")}}, "recomputed by embed, which keeps its graph"),
        ({"microbatches": 0}, "microbatches = 0: must be at least 1"),
        ({"lag": -1}, "lag = -1: must be at least 0"),
        ({"lead": -2}, "lead = -2: must be at least 0"),
        ({"order": "random"}, "order = 'random'"),
        ({"gathers": Gathers({"layer0": 1}, -1)}, "prefetch = -1"),
        ({"gathers": Gathers({"layer9": 1})}, r"gathers are for the layers \['layer9'\]"),
        ({"gathers": Gathers({"layer0": -1})}, "gathers: layer0 has -1 bytes"),
        ({"recipes": {"layer0.mix": Recipe(False, "offload", tier=HBM)}}, "tier = 'hbm'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(make_chain(1), **arguments)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "a chain needs at least one segment"),
        ([Segment("a", (), print, "a")] * 2, "two segments have the name 'a'"),
        ([Segment("a", (), print, "a", (), ("x",))], r"'a': the decisions \['x'\] are not among its residuals"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(Chain(tuple(segments), lambda batch: batch))


def counted() -> tuple[Chain, Schedule, Sizes]:
    chain, parameters = make_chain(2), make_parameters(2)
    schedule = make_schedule(chain, {"layer0.mix": Recipe(False, "offload")}, microbatches=2, order="layer_major")
    return chain, schedule, make_sizes(chain, parameters, make_batch(0))


def test_a_budget_is_kept_to_the_byte() -> None:
    chain, schedule, sizes = counted()
    peaks = {tier: report.peak for tier, report in verify(schedule, chain, sizes).items()}
    assert peaks.keys() == {HBM, HOST}
    verify(schedule, chain, sizes, peaks)
    for tier, peak in peaks.items():
        with pytest.raises(ScheduleError, match=rf"instruction \d+, .*: {tier} would hold {peak:,} bytes, 1 over"):
            verify(schedule, chain, sizes, {**peaks, tier: peak - 1})


def test_over_budget_the_contents_are_named() -> None:
    chain, schedule, sizes = counted()
    report = verify(schedule, chain, sizes)[HBM]
    name, size = report.contents[0]
    with pytest.raises(ScheduleError, match="the largest are ") as error:
        verify(schedule, chain, sizes, {HBM: report.peak - 1})
    assert f"{name}: {size:,}" in str(error.value)
    assert sum(size for _, size in report.contents) == report.peak


def test_budgets_that_mean_nothing_are_refused() -> None:
    chain, schedule, sizes = counted()
    with pytest.raises(ValueError, match="the budget of host is -1 bytes"):
        verify(schedule, chain, sizes, {HOST: -1})
    with pytest.raises(ValueError, match="budgets without sizes"):
        verify(schedule, chain, None, {HOST: 1})


def test_sizes_of_another_chain_are_refused() -> None:
    chain, schedule, sizes = counted()
    fewer = dataclasses.replace(sizes, segments={name: sizes.segments[name] for name in ("embed", "head")})
    with pytest.raises(ValueError, match=r"the sizes are of other segments: \['layer0.mix'"):
        verify(schedule, chain, fewer)
    with pytest.raises(ValueError, match=r"the sizes have no gathered bytes of \['layer1'\], which are not resident"):
        verify(make_schedule(chain, gathers=Gathers({"layer1": 1})), chain, sizes)


def test_what_is_there_all_the_time_counts() -> None:
    chain, schedule, sizes = counted()
    more = dataclasses.replace(sizes, resident={HBM: {"shards": 1000}, HOST: {"optimizer": 50}, "nvme": {"rest": 7}})
    before, after = (verify(schedule, chain, each) for each in (sizes, more))
    added = {tier: after[tier].peak - (before[tier].peak if tier in before else 0) for tier in after}
    assert added == {HBM: 1000, HOST: 50, "nvme": 7}


def test_residuals_may_be_given_in_any_order() -> None:
    sizes = counted()[2]
    profile = dataclasses.replace(
        sizes.segments["layer0.choose"], residuals={"a": 1, "b": 2}, graph={("a", "b"): 5}, backward={("a", "b"): 6}
    )
    some = dataclasses.replace(sizes, segments={"s": profile})
    assert some.value(Value("graph", "s"), ("b", "a")) == 5
    assert some.backward("s", ("b", "a")) == 6
