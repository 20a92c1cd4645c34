"""What was predicted is what is measured: live bytes of HBM within 5%, the slab to the byte."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from functional_moe.memory import (
    HBM,
    HOST,
    Chain,
    Gathers,
    HostCopies,
    LiveBytes,
    Recipe,
    ResidentStore,
    Result,
    Segment,
    SegmentProfile,
    Variant,
    buffer_sizes,
    execute,
    least,
    make_schedule,
    profile_chain,
    profile_context,
    verify,
)
from functional_moe.memory._pool import FirstFit, tree_bytes
from tests.memory.conftest import RingStore, layer_bytes, make_batch, make_chain, make_parameters, make_sizes

DEPTH, WIDTH, ROWS = 4, 128, 128  # 640 tokens


def recipes(record: bool, inputs: str, residuals: str) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    if record:
        return found
    for index in range(DEPTH):
        first = "offload" if inputs == "offload" else "keep"  # embed keeps its graph
        decisions = "offload" if residuals == "offload" else "keep"
        found[f"layer{index}.mix"] = Recipe(False, first, {"mixed": residuals})  # type: ignore[dict-item, arg-type]
        found[f"layer{index}.choose"] = Recipe(False, inputs, {"choice": decisions})  # type: ignore[dict-item, arg-type]
    return found


WAYS = [(True, "keep", "keep")] + [
    (False, inputs, residuals)
    for inputs in ("keep", "offload", "recompute")
    for residuals in ("keep", "offload", "recompute")
]


class SlabsElsewhere(HostCopies):
    """Slabs that are not among the live bytes of the first tier."""

    def slab(self, size: int) -> Tensor:
        return torch.frombuffer(bytearray(max(1, size)), dtype=torch.uint8)[:size]


@pytest.mark.parametrize("order", ["depth_first", "layer_major"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_measured_peak_is_the_predicted_one(way: tuple[bool, str, str], microbatches: int, order: Any) -> None:
    chain, parameters = make_chain(DEPTH), make_parameters(DEPTH, width=WIDTH)
    batches = [make_batch(index, ROWS) for index in range(microbatches)]
    schedule = make_schedule(chain, recipes(*way), microbatches=microbatches, order=order)
    sizes = make_sizes(chain, parameters, batches[0])
    reports = verify(schedule, chain, sizes)
    slabs = {tier: report.slab for tier, report in reports.items() if tier != HBM}
    copies = SlabsElsewhere()
    gc.collect()
    with LiveBytes() as memory:
        execute(schedule, chain, ResidentStore(parameters), batches, slabs=slabs, copies=copies)
    assert memory.peak == pytest.approx(reports[HBM].peak, rel=0.05)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_measured_peak_with_gathers(prefetch: int) -> None:
    chain, parameters = make_chain(DEPTH), make_parameters(DEPTH, width=WIDTH)
    batches = [make_batch(index, ROWS) for index in range(2)]
    gathered = {layer: size for layer, size in layer_bytes(parameters).items() if layer.startswith("layer")}
    schedule = make_schedule(
        chain, recipes(False, "keep", "keep"), microbatches=2, gathers=Gathers(gathered, prefetch), order="layer_major"
    )
    sizes = make_sizes(chain, parameters, batches[0], gathered)
    report = verify(schedule, chain, sizes)[HBM]
    with LiveBytes() as memory:
        store = RingStore(parameters, gathered, buffer_sizes(sizes, schedule))
        execute(schedule, chain, store, batches)
    assert memory.peak == pytest.approx(report.peak, rel=0.05)


def test_the_slab_is_used_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[FirstFit] = []
    monkeypatch.setattr(
        "functional_moe.memory._execute.FirstFit",
        lambda: used.append(FirstFit()) or used[-1],  # type: ignore[func-returns-value]
    )
    chain, parameters = make_chain(DEPTH), make_parameters(DEPTH)
    batches = [make_batch(index) for index in range(2)]
    for order in ("depth_first", "layer_major"):
        schedule = make_schedule(chain, recipes(False, "offload", "offload"), microbatches=2, order=order)  # type: ignore[arg-type]
        peak = verify(schedule, chain, make_sizes(chain, parameters, batches[0]))[HOST].peak
        execute(schedule, chain, ResidentStore(parameters), batches, slabs={HOST: peak})
        assert used[-1].peak == peak
        with pytest.raises(MemoryError, match="do not fit"):
            execute(schedule, chain, ResidentStore(parameters), batches, slabs={HOST: peak - 1})


def test_live_bytes_are_those_of_storages_that_operations_made() -> None:
    before = torch.zeros(100)
    with LiveBytes() as memory:
        a = before + 1
        assert (memory.live, memory.peak) == (400, 400)
        b = a[:50].view(5, 10)  # no memory of its own
        c = torch.cat([a, before])
        assert memory.live == 400 + 800
        del a
        assert memory.live == 1200  # a view holds it
        del b
        assert memory.live == 800
        del c
        assert (memory.live, memory.peak) == (0, 1200)


def test_live_bytes_see_what_graphs_hold() -> None:
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes() as memory:
        y = x.exp().sin().sum()
        assert memory.live == 400 + 4  # sin has saved its input; exp its output, which is the same
        y.backward()
        assert memory.peak >= 400 + 400
        del y
        assert memory.live == 400  # the gradient


def test_a_profile_says_what_tensors_take() -> None:
    chain, parameters, batch = make_chain(2), make_parameters(2, width=WIDTH), make_batch(0, ROWS)
    tokens = 5 * ROWS
    profile = profile_chain(chain, parameters, batch)
    boundary = tokens * WIDTH * 4
    mix, choose = profile["layer1.mix"], profile["layer1.choose"]
    assert mix.output == choose.output == boundary
    assert mix.residuals == {"mixed": boundary}
    assert choose.residuals == {"choice": tokens * 8}
    assert mix.gradient == {"layer1": {"['mix']": WIDTH * WIDTH * 4}}
    assert set(choose.gradient["layer1"]) == {"['router']", "['experts']"}
    # Two products of [tokens, width] by [width, width], one when "mixed" is given; two per product backwards.
    product = 2 * tokens * WIDTH * WIDTH
    assert mix.forward_flops == {(): 2 * product, ("mixed",): product}
    assert mix.backward_flops == {(): 4 * product, ("mixed",): 4 * product}
    # tanh of the product; what was given is not counted again.
    assert mix.graph[("mixed",)] == boundary
    assert profile_context(chain, batch) == tokens * 8
    assert profile["head"].output == 0


def test_fake_tensors_have_the_same_profile() -> None:
    chain, parameters, batch = make_chain(2), make_parameters(2, width=WIDTH), make_batch(0, ROWS)
    mode = FakeTensorMode()
    with mode:
        fake = pytree.tree_map(mode.from_tensor, (parameters, batch))
        found = profile_chain(chain, *fake)
    assert found == profile_chain(chain, parameters, batch)


def test_segments_of_one_kind_are_profiled_once() -> None:
    runs = []

    def half(parameters: Any, x: Any, context: Any, residuals: Any) -> Result:
        runs.append(x)
        return Result(context if x is None else x + 1)

    segments = [Segment("first", (), half, "first")]
    segments += [Segment(f"later{index}", (), half, "later") for index in range(20)]
    profile = profile_chain(Chain(tuple(segments), lambda batch: batch), {}, torch.ones(3))
    assert profile["later0"] == profile["later19"]
    assert len(runs) < 3 * 3 + 21


def test_a_residual_that_is_not_returned_raises() -> None:
    chain = Chain((Segment("a", (), lambda *_: Result(None), "a", ("kept",)),), lambda batch: batch)
    with pytest.raises(ValueError, match=r"segment 'a' declares the residuals \['kept'\]"):
        profile_chain(chain, {}, 0)


def test_a_tree_is_counted_as_it_lies_in_a_slab() -> None:
    assert tree_bytes({"a": torch.zeros(1), "b": (torch.zeros(65), 3, None)}) == 256 + 512


def test_the_least_of_counts_has_nothing_of_what_was_held_late() -> None:
    """A message of 5 that is held on in one count's graph, in another's backward, in a third's forward."""
    variant = Variant(True, ())
    clean = SegmentProfile(1, {}, {(): 10}, {}, {variant: 30}, {(): 20}, {(): 7}, {(): 7})
    in_graph = dataclasses.replace(clean, graph={(): 15}, backward={(): 15})
    in_backward = dataclasses.replace(clean, backward={(): 25})
    in_forward = dataclasses.replace(clean, forward={variant: 35})
    for counts in ([in_graph, in_backward, in_forward], [in_forward, in_graph], [clean]):
        assert least(counts) == clean


def test_what_onednn_holds_is_counted() -> None:
    x = torch.ones(64, 64)
    with LiveBytes() as memory:
        held = x.to_mkldnn()
        assert memory.live == 4 * 64 * 64
        del held
        assert (memory.live, memory.peak) == (0, 4 * 64 * 64)
