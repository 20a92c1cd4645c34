"""A plan to look at: a trace for Perfetto, a picture, and five lines in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._chain import Chain
from ._plan import Plan
from ._schedule import (
    HBM,
    Backward,
    Forward,
    Schedule,
    Update,
    describe,
    stream_of,
)
from ._simulate import Timeline, work_labels

STREAMS = ("compute", "gather", "reduce", "to_host", "from_host")
MICROSECONDS = 1e6
COLOURS = [f"C{number}" for number in range(10)] + [
    *("#393b79", "#8ca252", "#e7ba52", "#ad494a", "#a55194", "#9edae5", "#c7c7c7", "#ffbb78", "#98df8a", "#ff9896")
]
"""No two works of one colour."""


def trace_events(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """A timeline as a trace that chrome://tracing and ui.perfetto.dev open.

    Args:
      schedule: the instructions.
      timeline: of them.

    Returns:
      a tree for ``json.dump``: an event for every instruction, on a row for each stream; those that free memory are
      moments, the others last. A counter for each tier: its bytes over time. Times are in microseconds.
    """
    critical = set(timeline.critical)
    rows = {stream: number for number, stream in enumerate(STREAMS)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}}
        for stream, number in rows.items()
    ]
    events.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "schedule"}})
    for number, (one, start, end) in enumerate(zip(schedule, timeline.start, timeline.end, strict=True)):
        event: dict[str, Any] = {
            "name": describe(one),
            "cat": type(one).__name__,
            "pid": 0,
            "tid": rows[stream_of(one)],
            "ts": start * MICROSECONDS,
            "args": {"instruction": number, "critical": number in critical},
        }
        lasts = isinstance(one, Forward | Backward | Update) or stream_of(one) != "compute"
        event |= {"ph": "X", "dur": (end - start) * MICROSECONDS} if lasts else {"ph": "i", "s": "t"}
        events.append(event)
    for tier, steps in timeline.memory.items():
        events += [
            {"ph": "C", "pid": 0, "name": f"{tier} bytes", "ts": moment * MICROSECONDS, "args": {"bytes": level}}
            for moment, level in steps
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, schedule: Schedule, timeline: Timeline) -> None:
    """Writes :func:`trace_events` as JSON."""
    Path(path).write_text(json.dumps(trace_events(schedule, timeline), allow_nan=False))


def draw(
    path: str | Path, schedule: Schedule, timeline: Timeline, chain: Chain, budgets: Mapping[str, int] | None = None
) -> None:
    """Draws the streams over time, coloured by what they do, and below the memory of each tier with its budget.

    Args:
      path: of the picture; its ending says the format.
      schedule, timeline, chain: what is drawn.
      budgets: bytes of each tier, drawn as lines.

    Raises:
      ImportError: without matplotlib, which the extra ``plot`` brings.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = list(timeline.memory)
    figure = Figure(figsize=(12, 3 + 1.6 * len(tiers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(tiers), 1, sharex=True, height_ratios=[2.0] + [1.0] * len(tiers))
    top = axes[0]
    what = work_labels(schedule, {segment.name: segment.kind for segment in chain.segments})
    bars: dict[str, list[tuple[int, float, float]]] = {}
    for label, one, start, end in zip(what, schedule, timeline.start, timeline.end, strict=True):
        if end > start:
            bars.setdefault(label, []).append((STREAMS.index(stream_of(one)), start, end - start))
    for number, (label, some) in enumerate(bars.items()):
        streams, starts, lengths = zip(*some, strict=True)
        top.barh(
            streams, lengths, left=starts, label=label, color=COLOURS[number % 20], edgecolor="white", linewidth=0.2
        )
    top.set_yticks(range(len(STREAMS)), STREAMS)
    top.invert_yaxis()
    top.set_title(f"{timeline.seconds:.4g} s")
    if bars:
        top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    for tier, below in zip(tiers, axes[1:], strict=True):
        moments, levels = zip(*timeline.memory[tier], strict=True)
        unit, name = _unit(max((*levels, (budgets or {}).get(tier, 0))))
        scaled = [level / unit for level in (*levels, levels[-1])]
        below.fill_between((*moments, timeline.seconds), scaled, step="post", alpha=0.5)
        if tier in (budgets or {}):
            below.axhline((budgets or {})[tier] / unit, color="black", linestyle="--", linewidth=1)
        below.set_ylabel(f"{tier}, {name}")
        below.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)


def explain(plan: Plan) -> str:
    """Five lines: the result, what becomes of saved values and of the optimizer's state, the copies, what bounds the
    step, what else there is.
    """
    return "\n".join((_result(plan), _saved(plan), _copies(plan), _bounds(plan), _alternatives(plan)))


def _result(plan: Plan) -> str:
    memory = []
    for tier, report in plan.timeline.reports.items():
        budget = plan.budgets.get(tier)
        memory.append(f"{tier} {in_bytes(report.peak)}" + (f" of {in_bytes(budget)}" if budget is not None else ""))
    return f"step: {plan.timeline.seconds:.4g} s; " + ", ".join(memory)


def _saved(plan: Plan) -> str:
    """Of each kind, how many segments take which recipe, and where."""
    found: dict[str, dict[str, list[int]]] = {}
    places: dict[str, int] = {}
    for segment in plan.chain.segments:
        place = places[segment.kind] = places.get(segment.kind, -1) + 1
        words = _recipe(plan, segment.name)
        found.setdefault(segment.kind, {}).setdefault(words, []).append(place)
    kinds = []
    for kind, recipes in found.items():
        total = places[kind] + 1
        if total == 1:
            kinds.append(f"{kind}: {next(iter(recipes))}")
        else:
            parts = [f"{_ranges(numbers)} {words}" for words, numbers in recipes.items()]
            kinds.append(f"{kind} ({total}): " + ", ".join(parts))
    return "saved: " + "; ".join(kinds) + _states(plan)


def _states(plan: Plan) -> str:
    """Where the optimizer's state is, if it is part of the schedule."""
    homes = list(plan.schedule.homes.values())
    away = {tier: homes.count(tier) for tier in dict.fromkeys(homes) if tier != HBM}
    if not away:
        return "; optimizer state in hbm" if homes else ""
    return "; optimizer state " + " and ".join(
        f"of {count} of {len(homes)} layers in {tier}, fetched for each update" for tier, count in away.items()
    )


def _recipe(plan: Plan, name: str) -> str:
    recipe = plan.recipes[name]
    if recipe.record:
        return "graph kept"
    chosen: dict[str, list[str]] = {}
    if name != plan.chain.segments[0].name:
        chosen.setdefault(recipe.input, []).append("input")
    for residual, policy in recipe.residuals.items():
        chosen.setdefault(policy, []).append(residual)
    words = {"keep": "keep", "offload": f"offload to {recipe.tier}", "recompute": "recompute"}
    parts = [f"{words[policy]} {' + '.join(chosen[policy])}" for policy in ("keep", "offload") if policy in chosen]
    return " and ".join([*parts, "replay"]) if parts else "replay"


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _copies(plan: Plan) -> str:
    busy = plan.timeline.busy
    moved = [f"{stream} {busy[stream]:.4g} s" for stream in STREAMS[1:] if busy[stream]]  # type: ignore[index]
    if not moved:
        return "beside compute: nothing"
    idle = plan.timeline.seconds - busy["compute"]
    pace = f"; values leave after {plan.pace.lag} and come back {plan.pace.lead} runs of segments ahead"
    return f"beside compute: {', '.join(moved)}; compute waits {idle:.4g} s" + pace


def _bounds(plan: Plan) -> str:
    total = plan.timeline.seconds
    parts = [f"{part.what} {100 * part.seconds / total:.0f}%" for part in plan.timeline.bound[:6]]
    return "bound by: " + (", ".join(parts) if total else "nothing")


def _alternatives(plan: Plan) -> str:
    parts = []
    for name, one in plan.uniform.items():
        if one.fits:
            parts.append(f"{name} {one.seconds:.4g} s")
        else:
            over = [
                f"{in_bytes(peak)} of {tier}" for tier, peak in one.peaks.items() if peak > plan.budgets.get(tier, peak)
            ]
            parts.append(f"{name} needs {' and '.join(over)}")
    return "instead: " + ", ".join(parts)


def in_bytes(size: int) -> str:
    """Bytes as people read them: "1.5 GiB"."""
    unit, name = _unit(size)
    return f"{size / unit:.3g} {name}" if unit > 1 else f"{size} {name}"


def _unit(size: int) -> tuple[int, str]:
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return 1 << power, name
    return 1, "bytes"
