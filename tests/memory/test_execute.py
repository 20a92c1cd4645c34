"""A schedule computes what torch.func.grad_and_value does, whatever is recomputed, moved or gathered."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from functional_moe.memory import (
    HBM,
    HOST,
    AdversarialCopies,
    Chain,
    Drop,
    Forward,
    Gathers,
    Recipe,
    ResidentStore,
    Result,
    Schedule,
    Segment,
    Value,
    buffer_sizes,
    describe,
    execute,
    make_schedule,
    output_is_needed,
    run_chain,
    trace_range,
    verify,
)
from tests.memory.conftest import (
    Counter,
    RingStore,
    check_equal,
    layer_bytes,
    make_batch,
    make_chain,
    make_parameters,
    make_sizes,
    reference,
)

EXAMPLES = settings(max_examples=60, deadline=None)
POLICIES = ["keep", "offload", "recompute"]


@st.composite
def recipes(draw: Any, depth: int) -> dict[str, Recipe]:
    """Any that do not contradict each other."""
    chain = make_chain(depth)
    found: dict[str, Recipe] = {}
    record_before = draw(st.booleans())
    for index, segment in enumerate(chain.segments):
        record = draw(st.booleans()) if index else record_before
        if record:
            found[segment.name] = Recipe()
        else:
            inputs = ["keep"] if index == 0 else POLICIES[:2] if record_before else POLICIES
            residuals = {
                name: draw(st.sampled_from(POLICIES[:2] if name in segment.decisions else POLICIES))
                for name in segment.residuals
            }
            found[segment.name] = Recipe(False, draw(st.sampled_from(inputs)), residuals)
        record_before = record
    return found


def run(
    schedule: Schedule, chain: Chain, parameters: Any, batches: Any, seed: int, gathered: dict[str, int] | None = None
) -> Any:
    """Verifies and executes, with copies that do their worst; the slab's use is what was predicted."""
    sizes = make_sizes(chain, parameters, batches[0], gathered)
    reports = verify(schedule, chain, sizes)
    slabs = {tier: report.slab for tier, report in reports.items() if tier != HBM}
    store = RingStore(parameters, gathered or {}, buffer_sizes(sizes, schedule))
    return execute(schedule, chain, store, batches, slabs=slabs, copies=AdversarialCopies(seed))


@EXAMPLES
@given(data=st.data())
def test_any_schedule_computes_the_gradient_bit_for_bit(data: st.DataObject) -> None:
    depth, microbatches = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    chosen = data.draw(recipes(depth))
    order = data.draw(st.sampled_from(["depth_first", "layer_major"]))
    lag, lead, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    counter = Counter()
    chain, parameters = make_chain(depth, counter), make_parameters(depth)
    batches = [make_batch(index) for index in range(microbatches)]
    schedule = make_schedule(chain, chosen, microbatches=microbatches, order=order, lag=lag, lead=lead)
    expected = reference(chain, parameters, batches)
    sizes = make_sizes(chain, parameters, batches[0])
    slabs = {tier: report.slab for tier, report in verify(schedule, chain, sizes).items() if tier != HBM}
    counter.decisions = counter.mixed = 0
    found = execute(schedule, chain, ResidentStore(parameters), batches, slabs=slabs, copies=AdversarialCopies(seed))
    check_equal(found, expected)
    assert counter.decisions == depth * microbatches
    replayed = sum(
        not recipe.record and recipe.residuals["mixed"] == "recompute"
        for name, recipe in chosen.items()
        if name.endswith("mix")
    )
    assert counter.mixed == (depth + replayed) * microbatches


@EXAMPLES
@given(data=st.data())
def test_any_gathers_compute_the_same(data: st.DataObject) -> None:
    depth, microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chain, parameters = make_chain(depth), make_parameters(depth)
    batches = [make_batch(index) for index in range(microbatches)]
    sizes = layer_bytes(parameters)
    gathered = {layer: sizes[layer] for layer in data.draw(st.sets(st.sampled_from(chain.layers), min_size=1))}
    gathers = Gathers(gathered, data.draw(st.integers(0, 3)), data.draw(st.booleans()))
    order = data.draw(st.sampled_from(["depth_first", "layer_major"]))
    schedule = make_schedule(chain, data.draw(recipes(depth)), microbatches=microbatches, order=order, gathers=gathers)
    found = run(schedule, chain, parameters, batches, data.draw(st.integers(0, 99)), gathered)
    check_equal(found, reference(chain, parameters, batches))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("again", [True, False])
def test_gather_buffers_are_used_again(prefetch: int, again: bool) -> None:
    depth = 6
    chain, parameters = make_chain(depth), make_parameters(depth)
    gathered = {layer: size for layer, size in layer_bytes(parameters).items() if layer.startswith("layer")}
    schedule = make_schedule(
        chain,
        {f"layer{index}.{half}": Recipe(False) for index in range(depth) for half in ("mix", "choose")},
        microbatches=2,
        gathers=Gathers(gathered, prefetch, again),
    )
    buffers = buffer_sizes(make_sizes(chain, parameters, make_batch(0), gathered), schedule)
    assert len(buffers) == (prefetch + 1 if again else depth)
    assert set(buffers.values()) == set(gathered.values())


class Leaves(torch.autograd.Function):
    """Hands the cotangent itself to one leaf, its expansion to another, and one saved value to a third."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return x + a + b.sum() + (c * x).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[2], inputs[3])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, b, c = ctx.saved_tensors
        # The sum's cotangent is taken to be 1: what matters here is whose memory comes back.
        return g + c, g, g.sum().expand_as(b), x


def test_gradients_that_share_memory_are_added_up_apart() -> None:
    def first(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(context["x"] * parameters["p"]["scale"])

    def middle(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        leaves = parameters["q"]
        return Result(Leaves.apply(x, leaves["a"], leaves["b"], leaves["c"]) + leaves["d"] + leaves["e"])

    def last(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        return Result(None, x.square().sum())

    chain = Chain(
        (
            Segment("first", ("p",), first, "first"),
            Segment("middle", ("q",), middle, "middle"),
            Segment("last", (), last, "last"),
        ),
        lambda batch: batch,
    )
    parameters = {"p": {"scale": torch.ones(3)}, "q": {key: torch.full((3,), 0.5) for key in "abcde"}}
    batches = [{"x": torch.arange(3.0) + index} for index in range(3)]
    for chosen in ({}, {"middle": Recipe(False)}):
        schedule = make_schedule(chain, chosen, microbatches=3)
        check_equal(run(schedule, chain, parameters, batches, 0), reference(chain, parameters, batches))


def aliasing(depth: int) -> Chain:
    """Every residual is a view of another, of the segment's input or output, or the same tensor under another name."""

    def first(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(context["x"] * parameters["p"]["scale"])

    def middle(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        scale = parameters["p"]["scale"]
        found = residuals.get("hidden")
        hidden = torch.tanh(x * scale).detach() if found is None else found["itself"]
        again = residuals.get("again", hidden)
        columns = residuals.get("columns", hidden.T[1:])
        of_input = residuals.get("of input", x.detach()[:, ::2])
        # Each is read, and the gradient goes through the input and the parameter alone.
        mixed = hidden + 2 * again + columns.T.repeat(1, 2)[:, :3] + of_input.sum()
        out = torch.sin(x) * mixed * scale
        kept = {"hidden": {"itself": hidden, "twice": hidden}, "again": again, "columns": columns, "of input": of_input}
        return Result(out, residuals=kept)

    def last(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        return Result(None, x.square().sum())

    names = ("hidden", "again", "columns", "of input")
    middles = [Segment(f"middle{index}", ("p",), middle, "middle", names) for index in range(depth)]
    return Chain((Segment("first", ("p",), first, "first"), *middles, Segment("last", (), last, "last")), lambda b: b)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_views_and_tensors_that_are_saved_twice_come_back(data: st.DataObject) -> None:
    """torchtune 1867, Megatron 7398, torchtitan PR 2581: pooled buffers, a tensor saved twice, views."""
    depth, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    chain = aliasing(depth)
    parameters = {"p": {"scale": torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)}}
    batches = [{"x": torch.arange(12.0, dtype=torch.float64).view(4, 3) / 9 + index} for index in range(microbatches)]
    chosen = {}
    for index, segment in enumerate(chain.segments[1:-1]):
        policies = {name: data.draw(st.sampled_from(POLICIES)) for name in segment.residuals}
        chosen[segment.name] = Recipe(False, data.draw(st.sampled_from(POLICIES if index else POLICIES[:2])), policies)
    lag, lead = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    order = data.draw(st.sampled_from(["depth_first", "layer_major"]))
    schedule = make_schedule(chain, chosen, microbatches=microbatches, order=order, lag=lag, lead=lead)
    found = run(schedule, chain, parameters, batches, data.draw(st.integers(0, 99)))
    expected = reference(chain, parameters, batches)
    assert torch.equal(found.loss, expected.loss)
    # One leaf of all segments, whose summands come in another order and may cancel: in float32 by 2e-5.
    torch.testing.assert_close(found.gradients["p"], expected.gradients["p"], rtol=1e-9, atol=1e-9)


def test_an_output_that_its_own_graph_has_saved_outlives_its_drop() -> None:
    # The next segment's input goes before this segment runs backwards, whose graph has kept the same memory.
    def first(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(torch.tanh(context["x"] * parameters["p"]["scale"]))

    def last(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        return Result(None, x.square().sum())

    chain = Chain((Segment("first", ("p",), first, "first"), Segment("last", (), last, "last")), lambda batch: batch)
    parameters, batches = {"p": {"scale": torch.ones(3)}}, [{"x": torch.arange(3.0)}]
    check_equal(run(make_schedule(chain), chain, parameters, batches, 0), reference(chain, parameters, batches))


class Square(torch.autograd.Function):
    """Does not compute what nobody reads."""

    needed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Square.needed.append(output_is_needed())
        return x * x if Square.needed[-1] else x.new_full((), torch.nan).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def test_a_replay_for_the_graph_alone_needs_no_output() -> None:
    def first(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(context["x"] * parameters["p"]["scale"])

    def square(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        return Result(Square.apply(x + parameters["p"]["scale"]))

    def last(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        assert output_is_needed()
        return Result(None, x.square().sum())

    chain = Chain(
        (
            Segment("first", ("p",), first, "first"),
            Segment("second", ("p",), square, "square"),
            Segment("third", ("p",), square, "square"),
            Segment("last", (), last, "last"),
        ),
        lambda batch: batch,
    )
    parameters, batches = {"p": {"scale": torch.ones(3)}}, [{"x": torch.arange(3.0)}]
    expected = reference(chain, parameters, batches)
    Square.needed.clear()
    # The third's input is recomputed by the second: it is read.
    schedule = make_schedule(chain, {"second": Recipe(False), "third": Recipe(False, "recompute")})
    found = execute(schedule, chain, ResidentStore(parameters), batches)
    assert Square.needed == [True, True, True, False]
    check_equal(found, expected)
    assert output_is_needed()


def test_a_trace_has_every_instruction_by_its_printed_name_and_changes_nothing() -> None:
    chain, parameters, batches = make_chain(2), make_parameters(2), [make_batch(0), make_batch(1)]
    recipes = {"layer0.mix": Recipe(False, "offload", {"mixed": "recompute"})}
    schedule = make_schedule(chain, recipes, microbatches=2)
    plain = run(schedule, chain, parameters, batches, 0)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        traced = run(schedule, chain, parameters, batches, 0)
    check_equal(traced, plain)
    ranges = [event for event in trace.events() if event.is_user_annotation]
    assert [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)] == [
        describe(one) for one in schedule
    ]
    (backward,) = (event for event in ranges if event.name == "backward layer1.mix (microbatch 1)")
    assert backward.cpu_children, "what the backward runs lies within its range"


def test_without_a_trace_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: object) -> None:
        raise AssertionError(f"a range {name} while nobody traces")

    monkeypatch.setattr(sys.modules[trace_range.__module__], "record_function", never)
    chain, parameters, batches = make_chain(1), make_parameters(1), [make_batch(0)]
    check_equal(run(make_schedule(chain), chain, parameters, batches, 0), reference(chain, parameters, batches))
    with trace_range(lambda: never("made")):  # type: ignore
        pass


def test_a_leaf_that_nothing_reads_has_a_gradient_of_zeros() -> None:
    chain, parameters, batches = make_chain(1), make_parameters(1), [make_batch(0)]
    parameters["layer0"]["unused"] = torch.ones(2)
    found = execute(make_schedule(chain), chain, ResidentStore(parameters), batches)
    assert torch.equal(found.gradients["layer0"]["unused"], torch.zeros(2))
    check_equal(found, reference(chain, parameters, batches))


def test_nothing_that_was_passed_is_changed() -> None:
    chain, parameters, batches = make_chain(2), make_parameters(2), [make_batch(0), make_batch(1)]
    copies = pytree.tree_map(torch.clone, (parameters, batches))
    schedule = make_schedule(chain, {"layer0.mix": Recipe(False, "offload")}, microbatches=2)
    given = list(batches)
    run(schedule, chain, parameters, given, 0)
    assert given == batches
    for a, b in zip(pytree.tree_leaves((parameters, batches)), pytree.tree_leaves(copies), strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


def offloading(chain: Chain) -> Schedule:
    return make_schedule(chain, {"layer0.mix": Recipe(False, "offload")})


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_has_arrived(seed: int) -> None:
    # The copy in the host stays to the end: nothing waits for the fetch but the run that reads its value.
    chain, parameters, batches = make_chain(1), make_parameters(1), [make_batch(0)]
    schedule = offloading(chain)
    dropped = Drop(Value("input", "layer0.mix"), HOST)
    instructions = tuple(one for one in schedule if one != dropped)
    late = Schedule((*instructions, dropped), 1, schedule.resident)
    check_equal(run(late, chain, parameters, batches, seed), reference(chain, parameters, batches))


@pytest.mark.parametrize(
    ("slabs", "error", "message"),
    [
        ({}, MemoryError, "input of layer0.mix .microbatch 0.: the tier 'host' has no memory"),
        ({"host": 512}, MemoryError, "input of layer0.mix .microbatch 0.: 1,024 bytes do not fit in the 512 of 'host'"),
        ({"host": -1}, ValueError, "slabs: -1 bytes of 'host'"),
    ],
)
def test_a_slab_that_is_too_small_raises(slabs: dict[str, int], error: type[Exception], message: str) -> None:
    chain = make_chain(1)
    with pytest.raises(error, match=message):
        execute(offloading(chain), chain, ResidentStore(make_parameters(1)), [make_batch(0)], slabs=slabs)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_microbatches_raises(count: int) -> None:
    chain = make_chain(1)
    with pytest.raises(ValueError, match=f"{count} microbatches for a schedule of 2"):
        execute(
            make_schedule(chain, microbatches=2),
            chain,
            ResidentStore(make_parameters(1)),
            [make_batch(index) for index in range(count)],
        )


def test_a_segment_that_breaks_its_word_raises() -> None:
    def silent(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(parameters["p"])

    def nothing(parameters: Any, x: Any, context: Any, residuals: Any) -> Result:
        return Result(None)

    def chain(first: Any) -> Chain:
        segments = (Segment("first", ("p",), first, "first", ("kept",)), Segment("last", (), nothing, "last"))
        return Chain(segments, lambda batch: batch)

    store = ResidentStore({"p": torch.ones(1)})
    with pytest.raises(ValueError, match="'first' declares the residual 'kept' and did not return it"):
        execute(
            make_schedule(chain(silent), {"first": Recipe(False, residuals={"kept": "keep"})}),
            chain(silent),
            store,
            [0],
        )
    with pytest.raises(ValueError, match="'first' returned no output, which 'last' needs"):
        execute(make_schedule(chain(nothing)), chain(nothing), store, [0])
    with pytest.raises(ValueError, match="no segment of the chain adds to the loss"):
        execute(make_schedule(chain(silent)), chain(silent), store, [0])
    with pytest.raises(ValueError, match="no segment of the chain adds to the loss"):
        run_chain(chain(silent), {"p": torch.ones(1)}, 0)


def test_a_gather_of_what_is_whole_here_raises() -> None:
    chain, parameters = make_chain(1), make_parameters(1)
    schedule = make_schedule(chain, gathers=Gathers({"layer0": 1}))
    with pytest.raises(ValueError, match="layer0 is whole on this process"):
        execute(schedule, chain, ResidentStore(parameters), [make_batch(0)])


def test_losses_and_metrics_are_those_of_the_first_run() -> None:
    chain, parameters, batches = make_chain(1), make_parameters(1), [make_batch(0)]
    schedule = make_schedule(chain)
    # A run more of the head, which changes nothing.
    twice = Schedule((*schedule.instructions[:4], Forward("head"), *schedule.instructions[4:]), 1, schedule.resident)
    verify(twice, chain)
    check_equal(run(twice, chain, parameters, batches, 0), reference(chain, parameters, batches))
