"""How long a schedule takes, and what bounds it: the instructions on their streams, without running them.

Each stream runs its instructions in order. An instruction starts when its stream is free and all that it depends on is
done: who wrote what it reads, who used what it writes or frees, who had its gather buffer. One that takes memory on a
stream beside ``compute`` also waits for the last instruction before it in the program that gave memory of that tier
back, as the executor does. Memory is given back on ``compute`` alone, in the program's order. So at any moment no
more is taken than the program's order allows: if J is the latest instruction in the program that has begun to hold
memory, all that gave memory back before J are done, and what is held is at most what the program holds at J. Hence the
memory over time never exceeds the peak that ``verify`` reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ._chain import Chain
from ._costs import Costs
from ._pool import FirstFit, aligned
from ._profile import Sizes
from ._schedule import (
    HBM,
    Backward,
    ChainIndex,
    Drop,
    Fetch,
    Forward,
    Gather,
    Instruction,
    Offload,
    Place,
    ReduceScatter,
    Release,
    Schedule,
    Stream,
    Update,
    Value,
    effects,
    stream_of,
)
from ._verify import TierReport, fixed_contents, verify


class Part(NamedTuple):
    """What a step's time goes to along its longest chain of dependencies."""

    what: str  # "forward attention", "again attention", "backward attention", "gather", "fetch", ...
    stream: Stream
    seconds: float


class Timeline(NamedTuple):
    """When each instruction runs, and what that means."""

    seconds: float
    """Of the whole step."""
    start: tuple[float, ...]
    """Of each instruction, in seconds."""
    end: tuple[float, ...]
    busy: dict[Stream, float]
    """Seconds in which a stream has work."""
    memory: dict[str, tuple[tuple[float, int], ...]]
    """Of each tier: (seconds, bytes from then on)."""
    critical: tuple[int, ...]
    """The chain of instructions, each waiting for the one before, that ends last."""
    bound: tuple[Part, ...]
    """That chain's seconds by what they go to, the largest first; they add up to ``seconds``."""
    reports: dict[str, TierReport]
    """Of ``verify``."""


class Times(NamedTuple):
    """Starts and ends alone."""

    start: list[float]
    end: list[float]
    waits_for: list[int]
    """The instruction whose end each start is; -1 for none."""


def simulate(schedule: Schedule, chain: Chain, sizes: Sizes, costs: Costs) -> Timeline:
    """Goes through a schedule without computing anything.

    Args:
      schedule: the instructions; ``verify`` must pass them.
      chain: what it is for.
      sizes: bytes of the values.
      costs: seconds of the instructions.

    Raises:
      ScheduleError: when ``verify`` refuses the schedule.
      ValueError: when ``costs`` do not cover an instruction.
    """
    reports = verify(schedule, chain, sizes)
    seconds = costs.of(schedule, sizes)
    times = run_times(schedule, chain, seconds, one_link=costs.one_link)
    busy: dict[Stream, float] = dict.fromkeys(("compute", "gather", "reduce", "to_host", "from_host"), 0.0)
    for one, taken in zip(schedule, seconds, strict=True):
        busy[stream_of(one)] += taken
    last = max(range(len(schedule)), key=lambda index: times.end[index])
    critical = []
    while last >= 0:
        critical.append(last)
        last = times.waits_for[last]
    critical.reverse()
    return Timeline(
        max(times.end),
        tuple(times.start),
        tuple(times.end),
        busy,
        _memory(schedule, sizes, times, reports),
        tuple(critical),
        _bound(schedule, chain, seconds, critical),
        reports,
    )


def run_times(schedule: Schedule, chain: Chain, seconds: Sequence[float], *, one_link: bool = False) -> Times:
    """Start and end of each instruction, given how long each takes.

    Args:
      schedule, chain: as :func:`simulate` takes them.
      seconds: of each instruction.
      one_link: gathers and reductions go over one link, one after the other in the program's order.
    """
    index = ChainIndex(chain, schedule.resident)
    begin = (0.0, -1)
    # Of streams, places, buffers and tiers: when the last instruction that matters there is done, and which it is.
    streams: dict[Stream, tuple[float, int]] = {}
    written: dict[Place, tuple[float, int]] = {}
    used: dict[Place, tuple[float, int]] = {}
    buffers: dict[int, tuple[float, int]] = {}
    gathered: dict[str, int] = {}
    freed: dict[str, tuple[float, int]] = {}
    times = Times([], [], [])
    for number, (one, taken) in enumerate(zip(schedule, seconds, strict=True)):
        stream, known = stream_of(one), effects(one, index)
        link: Stream = "gather" if one_link and stream == "reduce" else stream
        waits = [streams.get(link, begin)]
        waits += [written.get(place, begin) for place in known.reads]
        for place in (*known.writes, *known.adds, *known.frees):
            waits += (written.get(place, begin), used.get(place, begin))
        match one:
            case Gather(layer, buffer):
                waits.append(buffers.get(buffer, begin))
                gathered[layer] = buffer
            case Fetch() | ReduceScatter():
                waits.append(freed.get(HBM, begin))
            case Offload(_, tier):
                waits.append(freed.get(tier, begin))
        start, cause = waits[0]
        for end, who in waits:
            if end > start:
                start, cause = end, who
        done = (start + taken, number)
        times.start.append(start)
        times.end.append(done[0])
        times.waits_for.append(cause)
        streams[link] = done
        for place in known.reads:
            if done > used.get(place, begin):
                used[place] = done
        for place in (*known.writes, *known.adds, *known.frees):
            written[place] = done
        match one:
            case Release(layer):
                buffers[gathered.pop(layer)] = done
            case Forward() | Backward() | Update():
                freed[HBM] = done
            case Drop(_, tier):
                freed[tier] = done
    return times


def _memory(
    schedule: Schedule, sizes: Sizes, times: Times, reports: dict[str, TierReport]
) -> dict[str, tuple[tuple[float, int], ...]]:
    """Bytes of each tier over time. What an instruction of ``compute`` makes is part of its working memory at first."""
    levels = reports[HBM].levels
    changes: list[tuple[float, int, int]] = []  # seconds; what is given back first; bytes
    fixed = {tier: sum(contents.values()) for tier, contents in fixed_contents(sizes, schedule).items()}
    before = fixed[HBM]
    needed = working_bytes(schedule, sizes)
    for one, start, end, level, working in zip(schedule, times.start, times.end, levels, needed, strict=True):
        at = end if stream_of(one) == "compute" else start
        changes += [(start, 1, working), (end, 0, -working), (at, int(level > before), level - before)]
        before = level
    out = {HBM: _steps(fixed[HBM], changes)}
    for tier in reports:
        if tier != HBM:
            out[tier] = _slab(schedule, sizes, times, tier, fixed.get(tier, 0))
    return out


def working_bytes(schedule: Schedule, sizes: Sizes) -> list[int]:
    """What each instruction of ``compute`` needs while it runs."""
    given: dict[tuple[str, int], tuple[str, ...]] = {}
    out = []
    for one in schedule:
        working = 0
        if isinstance(one, Forward):
            working = sizes.forward(one.segment, one.record, one.given)
            if one.record:
                given[one.segment, one.microbatch] = one.given
        elif isinstance(one, Backward):
            working = sizes.backward(one.segment, given[one.segment, one.microbatch])
        elif isinstance(one, Update):
            working = sizes.updates[one.bucket].working
        out.append(working)
    return out


def _steps(level: int, changes: list[tuple[float, int, int]]) -> tuple[tuple[float, int], ...]:
    """The level after each moment at which something changes."""
    steps = {0.0: level}
    for moment, _, change in sorted(changes):
        level += change
        steps[moment] = level
    return tuple(steps.items())


def _slab(schedule: Schedule, sizes: Sizes, times: Times, tier: str, fixed: int) -> tuple[tuple[float, int], ...]:
    """Of a further tier: up to the end of the last piece that is held."""
    fit = FirstFit()
    pieces: dict[Value, tuple[int, int, int]] = {}  # which; where it begins, and ends
    moments: list[tuple[float, int, int, int]] = []  # seconds; what is given back first; which; its end
    for number, one in enumerate(schedule):
        match one:
            case Offload(value, to) if to == tier and value.kind != "state":
                offset = fit.allocate(sizes.value(value))
                end = offset + aligned(sizes.value(value))
                pieces[value] = (number, offset, end)
                moments.append((times.start[number], 1, number, end))
            case Drop(value, of) if of == tier:
                which, offset, end = pieces.pop(value)
                fit.free(offset)
                moments.append((times.end[number], 0, which, end))
    held: dict[int, int] = {}
    steps = {0.0: fixed}
    for moment, begins, which, end in sorted(moments):
        if begins:
            held[which] = end
        else:
            del held[which]
        steps[moment] = fixed + max(held.values(), default=0)
    return tuple(steps.items())


def _bound(schedule: Schedule, chain: Chain, seconds: Sequence[float], critical: Sequence[int]) -> tuple[Part, ...]:
    kinds = {segment.name: segment.kind for segment in chain.segments}
    labels = work_labels(schedule, kinds)
    totals: dict[tuple[str, Stream], float] = {}
    for number in critical:
        key = (labels[number], stream_of(schedule.instructions[number]))
        totals[key] = totals.get(key, 0.0) + seconds[number]
    parts = [Part(what, stream, total) for (what, stream), total in totals.items() if total]
    return tuple(sorted(parts, key=lambda part: (-part.seconds, part.what)))


def work_labels(schedule: Schedule, kinds: dict[str, str]) -> list[str]:
    """What each instruction does, in two words: runs of segments by the segment's kind."""
    seen: set[tuple[str, int]] = set()

    def label(one: Instruction) -> str:
        match one:
            case Forward(segment, microbatch):
                again = (segment, microbatch) in seen
                seen.add((segment, microbatch))
                return f"{'again' if again else 'forward'} {kinds[segment]}"
            case Backward(segment):
                return f"backward {kinds[segment]}"
            case ReduceScatter():
                return "reduce"
            case _:
                return type(one).__name__.lower()

    return [label(one) for one in schedule]
