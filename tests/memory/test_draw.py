"""Traces that Perfetto opens, and pictures."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from functional_moe.memory import (
    HBM,
    HOST,
    Gathers,
    Recipe,
    Schedule,
    Timeline,
    UpdateBytes,
    Updates,
    describe,
    draw,
    make_schedule,
    simulate,
    write_trace,
)
from tests.memory.synthetic import Layer, Problem, make_problem


def simulated() -> tuple[Problem, Schedule, Timeline]:
    problem = make_problem([Layer()] * 4, gather=0.5, reduce=0.5)
    recipes = {f"layer{number}": Recipe(False, "offload", {"core": "keep"}) for number in (1, 2)}
    layers = problem.chain.layers
    problem = problem._replace(
        sizes=dataclasses.replace(problem.sizes, updates=dict.fromkeys(layers, UpdateBytes(512, 64))),
        costs=dataclasses.replace(problem.costs, update=dict.fromkeys(layers, 0.5)),
    )
    gathers, updates = Gathers({"layer0": 2048, "layer1": 2048}), Updates({"layer0": HOST, "head": HOST})
    schedule = make_schedule(problem.chain, recipes, gathers=gathers, updates=updates)
    return problem, schedule, simulate(schedule, *problem)


def test_a_trace_has_every_instruction_on_its_stream_and_the_memory_of_every_tier(tmp_path: Path) -> None:
    _, schedule, timeline = simulated()
    write_trace(tmp_path / "trace.json", schedule, timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(rows.values()) == ["compute", "from_host", "gather", "reduce", "to_host"]
    runs = [event for event in events if event["ph"] in "Xi"]
    assert [event["name"] for event in runs] == [describe(one) for one in schedule]
    for event, start, end in zip(runs, timeline.start, timeline.end, strict=True):
        assert event["ts"] == start * 1e6
        assert event.get("dur", 0.0) == pytest.approx((end - start) * 1e6)
    # Nothing overlaps on a row.
    for row in rows:
        lasting = [event for event in runs if event["tid"] == row and event["ph"] == "X"]
        for before, after in itertools.pairwise(lasting):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"hbm bytes", "host bytes"}
    peak = max(event["args"]["bytes"] for event in events if event["name"] == "hbm bytes")
    assert peak == max(level for _, level in timeline.memory[HBM])
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    assert sum(event["args"]["critical"] for event in runs) == len(timeline.critical)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_shows_streams_and_tiers(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    problem, schedule, timeline = simulated()
    path = tmp_path / f"schedule.{ending}"
    draw(path, schedule, timeline, problem.chain, {HBM: 60_000, HOST: 4096})
    assert path.stat().st_size > 5_000
