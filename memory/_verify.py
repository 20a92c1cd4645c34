"""Whether a schedule computes the gradient, and within which memory: proved before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, TypeAlias

from ._chain import Chain
from ._pool import FirstFit
from ._profile import Sizes
from ._schedule import (
    HBM,
    NORM,
    OF_LAYERS,
    Backward,
    ChainIndex,
    Drop,
    Effects,
    Fetch,
    Forward,
    Gather,
    Instruction,
    Norm,
    Offload,
    Place,
    ReduceScatter,
    Release,
    Schedule,
    ScheduleError,
    Update,
    Value,
    describe,
    effects,
)

STATES = "optimizer state"
"""What the states at home are called among a tier's contents."""


class TierReport(NamedTuple):
    """The memory of one tier over a step."""

    peak: int  # bytes
    at: int  # the instruction during which it is reached
    contents: tuple[tuple[str, int], ...]  # what the tier holds then, in bytes, the largest first
    levels: tuple[int, ...]  # bytes after each instruction
    slab: int = 0  # bytes to reserve for what is moved to a further tier and back, states at home not among them


def verify(
    schedule: Schedule, chain: Chain, sizes: Sizes | None = None, budgets: Mapping[str, int] | None = None
) -> dict[str, TierReport]:
    """Goes through ``schedule`` without computing anything.

    A schedule that passes computes the gradient of :func:`run_chain`'s loss, summed over the microbatches:

    - what an instruction reads exists, in the first tier; nothing is written where it stands already;
    - a graph's input, and the residuals it was given, stay as long as the graph, and its layers' parameters are back in
      the same buffers when it runs backwards;
    - decisions are handed to every replay; no residual is handed out twice;
    - every segment of every microbatch runs backwards once; every gradient is reduced once, after its last addition;
    - the optimizer's states, where they are part of it, are each updated once, after every gradient is summed and while
      the layer is not gathered, and are at home in the end; no older state is taken for a new one;
    - at the end nothing else is left anywhere.

    And within memory: the bytes of each tier after each instruction, and while it runs, are within ``budgets``.

    Args:
      schedule: the instructions.
      chain: what it is for.
      sizes: of the values, the buffers and what instructions need while they run. Without it no memory is counted.
      budgets: bytes of each tier; one that is missing has no limit.

    Returns:
      a report for each tier (none without ``sizes``).

    Raises:
      ScheduleError: names the instruction and the value; over budget, what fills the tier.
      ValueError: for budgets that are negative, or given without sizes; for sizes of another chain.
    """
    if budgets and sizes is None:
        raise ValueError("budgets without sizes: nothing to compare them with")
    for tier, budget in (budgets or {}).items():
        if budget < 0:
            raise ValueError(f"the budget of {tier} is {budget} bytes; it must be at least 0")
    state = _State(ChainIndex(chain, schedule.resident), schedule)
    found: list[Effects] = []
    for index, instruction in enumerate(schedule):
        found.append(state.check(index, instruction))
        state.apply(instruction, found[-1])
    state.check_end()
    if sizes is None:
        return {}
    _check_sizes(sizes, schedule, chain)
    memory = _Memory(sizes, schedule, dict(budgets or {}))
    for index, (instruction, known) in enumerate(zip(schedule, found, strict=True)):
        memory.apply(index, instruction, known)
    return memory.reports()


def _check_sizes(sizes: Sizes, schedule: Schedule, chain: Chain) -> None:
    if missing := [segment.name for segment in chain.segments if segment.name not in sizes.segments]:
        raise ValueError(f"the sizes are of other segments: {missing} are missing")
    for text, known in (("gathered", sizes.gathered_layers), ("reduced", sizes.reduced_layers)):
        if missing := [layer for layer in chain.layers if layer not in schedule.resident and layer not in known]:
            raise ValueError(f"the sizes have no {text} bytes of {missing}, which are not resident")
    if missing := [layer for layer in schedule.homes if layer not in sizes.updates]:
        raise ValueError(f"the sizes have no bytes of the updates of {missing}")


Refuse: TypeAlias = Callable[[str], NoReturn]


@dataclasses.dataclass
class _Graph:
    """What a recorded graph refers to."""

    pinned: frozenset[Place]
    buffers: dict[str, int | None]


class _State:
    """Which values exist where, while going through a schedule."""

    def __init__(self, chain: ChainIndex, schedule: Schedule) -> None:
        self.chain = chain
        self.schedule = schedule
        self.live: set[Place] = {Place(Value("parameters", layer)) for layer in schedule.resident}
        self.buffers: dict[int, str] = {}
        self.graphs: dict[Value, _Graph] = {}
        self.forward: set[tuple[str, int]] = set()
        self.backward: set[tuple[str, int]] = set()
        self.unreduced: set[str] = set()
        self.live |= {Place(Value("state", layer), tier) for layer, tier in schedule.homes.items()}
        self.ahead: set[str] = set()  # layers whose state at home is older than the one in HBM
        if schedule.homes and (odd := sorted(set(schedule.homes) ^ set(chain.layers))):
            raise ScheduleError(
                f"the schedule has homes of other states, {odd}; the chain has the layers {chain.layers}"
            )
        if unknown := sorted(schedule.resident - set(chain.layers)):
            raise ScheduleError(f"the schedule keeps {unknown} resident; the chain has the layers {chain.layers}")
        if schedule.microbatches < 1:
            raise ScheduleError(f"the schedule has {schedule.microbatches} microbatches; at least 1")

    def check(self, index: int, instruction: Instruction) -> Effects:
        """Raises unless ``instruction`` can run now."""

        def refuse(why: str) -> NoReturn:
            raise ScheduleError(f"instruction {index}, {describe(instruction)}: {why}")

        self._check_names(instruction, refuse)
        known = effects(instruction, self.chain)
        for place in known.reads:
            if place not in self.live:
                elsewhere = [held.tier for held in self.live if held.value == place.value]
                where = f"; it is in {', '.join(sorted(elsewhere))}" if elsewhere else ""
                refuse(f"reads the {place.value}, which is not in {place.tier}{where}")
        for place in known.writes:
            if place in self.live:
                refuse(f"writes the {place.value}, which is in {place.tier} already")
        for place in known.frees:
            if place not in self.live:
                refuse(f"frees the {place.value}, which is not in {place.tier}")
            for graph, held in self.graphs.items():
                if place in held.pinned:
                    refuse(f"frees the {place.value}, which the {graph} refers to")
        match instruction:
            case Gather(layer, buffer):
                if layer in self.schedule.resident:
                    refuse("the layer is resident")
                if Place(Value("updated", layer)) in self.live:
                    refuse("the layer was updated already")
                if buffer < 0:
                    refuse("buffers are numbered from 0")
                if buffer in self.buffers:
                    refuse(f"buffer {buffer} holds {self.buffers[buffer]}")
            case Release(layer):
                if layer in self.schedule.resident:
                    refuse("the layer is resident")
            case Forward():
                self._check_forward(instruction, refuse)
            case Backward(segment, microbatch):
                self._check_backward(segment, microbatch, refuse)
            case Offload(value) | Fetch(value) if value.kind == "state":
                if instruction.tier != (home := self.schedule.homes[value.of]):
                    refuse(f"the state is at home in {home}")
                if isinstance(instruction, Fetch) and value.of in self.ahead:
                    refuse("reads a state that was updated since")
            case Offload(value) | Fetch(value):
                if value.kind not in ("input", "residual"):
                    refuse(f"a {value.kind} cannot leave {HBM}")
            case Drop(Value("state") as value, tier):
                if tier == self.schedule.homes[value.of]:
                    refuse("a state stays at home")
                if value.of in self.ahead:
                    refuse(f"loses the {value}, which was updated since it left home")
            case Norm():
                self._check_norm(refuse)
            case Update(bucket):
                if bucket not in self.schedule.resident and Place(Value("parameters", bucket)) in self.live:
                    refuse("the layer is gathered")
            case Drop(value):
                if value.kind not in ("input", "residual", "gradient"):
                    refuse(f"a {value.kind} is not dropped")
                if value.kind == "gradient" and value.of in self.schedule.resident:
                    refuse("the gradient of a resident layer is a result")
                if value.kind == "gradient" and value.of in self.unreduced:
                    refuse(f"loses the {value}, which was not reduced since its last addition")
            case ReduceScatter(layer):
                if layer in self.schedule.resident:
                    refuse("the layer is resident")
                if layer not in self.unreduced:
                    refuse("the gradient was reduced already")
        return known

    def _check_names(self, instruction: Instruction, refuse: Refuse) -> None:
        match instruction:
            case Norm():
                if not self.schedule.homes:
                    refuse("the schedule has no homes of states: the optimizer is not part of it")
            case Gather(layer) | Release(layer) | ReduceScatter(layer) | Update(layer):
                if layer not in self.chain.layers:
                    refuse(f"the chain has the layers {self.chain.layers}")
            case Forward(name, microbatch) | Backward(name, microbatch):
                self._check_segment(name, microbatch, refuse)
            case Offload(value) | Fetch(value) | Drop(value):
                if instruction.tier == HBM and not isinstance(instruction, Drop):
                    refuse(f"{HBM} is where values are computed; a copy goes to a further tier")
                if value.kind in OF_LAYERS:
                    if value.of not in self.chain.layers:
                        refuse(f"the chain has the layers {self.chain.layers}")
                else:
                    self._check_segment(value.of, value.microbatch, refuse)

    def _check_segment(self, name: str, microbatch: int, refuse: Refuse) -> None:
        if name not in self.chain.segments:
            refuse(f"the chain has the segments {tuple(self.chain.segments)}")
        if not 0 <= microbatch < self.schedule.microbatches:
            refuse(f"the schedule has {self.schedule.microbatches} microbatches")

    def _check_forward(self, one: Forward, refuse: Refuse) -> None:
        segment = self.chain[one.segment]
        for name in (*one.given, *one.kept):
            if name not in segment.residuals:
                refuse(f"the segment has the residuals {segment.residuals}, not {name!r}")
        for names in (one.given, one.kept):
            if len(set(names)) != len(names):
                refuse(f"a residual is named twice in {names}")
        if both := sorted(set(one.given) & set(one.kept)):
            refuse(f"hands out {both}, which it is given")
        if (one.segment, one.microbatch) in self.backward:
            refuse("the segment ran backwards already")
        if (one.segment, one.microbatch) in self.forward:
            if decided := [name for name in segment.decisions if name not in one.given]:
                refuse(f"a replay would decide {decided} again; it must be given")
        elif one.output is False and self.chain.following[one.segment] is not None:
            refuse("the first run must give the next segment its input")

    def _check_backward(self, segment: str, microbatch: int, refuse: Refuse) -> None:
        graph = self.graphs[Value("graph", segment, microbatch)]
        for layer in self.chain[segment].layers:
            needed = layer in self.chain[segment].layers_backward
            if needed and self._buffer(layer) != graph.buffers[layer]:
                refuse(f"{layer} is in buffer {self._buffer(layer)}; the graph refers to buffer {graph.buffers[layer]}")
            reducible = layer not in self.schedule.resident
            if reducible and Place(Value("gradient", layer)) in self.live and layer not in self.unreduced:
                refuse(f"adds to the gradient of {layer}, which was reduced and not dropped")

    def _check_norm(self, refuse: Refuse) -> None:
        for name in self.chain.segments:
            for microbatch in range(self.schedule.microbatches):
                if (name, microbatch) not in self.backward:
                    refuse(f"{name} of microbatch {microbatch} has not run backwards")
        for layer in self.chain.layers:
            if layer not in self.schedule.resident and Place(Value("gradient", layer)) in self.live:
                refuse(f"the gradient of {layer} in full is still there; its part is complete once that is dropped")

    def _buffer(self, layer: str) -> int | None:
        return next((buffer for buffer, held in self.buffers.items() if held == layer), None)

    def apply(self, instruction: Instruction, known: Effects) -> None:
        """Goes on to the state after ``instruction``."""
        self.live.update(known.writes, known.adds)
        self.live.difference_update(known.frees)
        match instruction:
            case Gather(layer, buffer):
                self.buffers[buffer] = layer
            case Release(layer):
                self.buffers = {buffer: held for buffer, held in self.buffers.items() if held != layer}
            case Forward(segment, microbatch, record):
                self.forward.add((segment, microbatch))
                if record:
                    layers = self.chain[segment].layers
                    pinned = frozenset(place for place in known.reads if place.value.kind != "parameters")
                    graph = _Graph(pinned, {layer: self._buffer(layer) for layer in layers})
                    self.graphs[Value("graph", segment, microbatch)] = graph
            case Backward(segment, microbatch):
                self.backward.add((segment, microbatch))
                del self.graphs[Value("graph", segment, microbatch)]
                self.unreduced.update(set(self.chain[segment].layers) - self.schedule.resident)
            case ReduceScatter(layer):
                self.unreduced.discard(layer)
            case Update(bucket) if self.schedule.homes[bucket] != HBM:
                self.ahead.add(bucket)
            case Offload(Value("state") as value):
                self.ahead.discard(value.of)

    def check_end(self) -> None:
        """Raises unless everything was done and nothing is left."""
        for name in self.chain.segments:
            for microbatch in range(self.schedule.microbatches):
                if (name, microbatch) not in self.backward:
                    raise ScheduleError(f"at the end: {name} of microbatch {microbatch} never ran backwards")
        if self.unreduced:
            raise ScheduleError(f"at the end: the gradients of {sorted(self.unreduced)} are not reduced")
        expected = {Place(Value("reduced", layer)) for layer in self.chain.layers}
        for layer in self.schedule.resident:
            expected |= {Place(Value("parameters", layer)), Place(Value("gradient", layer))}
        for layer, home in self.schedule.homes.items():
            if Place(Value("updated", layer)) not in self.live:
                raise ScheduleError(f"at the end: {layer} was never updated")
            if layer in self.ahead:
                raise ScheduleError(f"at the end: the new state of {layer} is not in {home}")
            expected |= {Place(NORM), Place(Value("updated", layer)), Place(Value("state", layer), home)}
        if left := sorted(self.live - expected):
            raise ScheduleError(f"at the end: the {left[0].value} is still in {left[0].tier} ({len(left)} such)")


class _Memory:
    """The bytes of each tier, while going through a schedule that is otherwise right."""

    def __init__(self, sizes: Sizes, schedule: Schedule, budgets: dict[str, int]) -> None:
        self.sizes, self.budgets = sizes, budgets
        self.fixed = fixed_contents(sizes, schedule)
        self.runs: dict[int, int] = {}  # of each microbatch, the runs of segments that are still to come
        for one in schedule:
            if isinstance(one, (Forward, Backward)):
                self.runs[one.microbatch] = self.runs.get(one.microbatch, 0) + 1
        self.prepared: set[int] = set()
        self.held: dict[str, dict[Value, int]] = {tier: {} for tier in self.fixed}
        for layer, tier in schedule.homes.items():
            self.held[tier][Value("state", layer)] = 0  # counted among what is fixed
        self.slabs: dict[str, FirstFit] = {}
        self.offsets: dict[Place, int] = {}
        self.given: dict[Value, tuple[str, ...]] = {}
        self.added: dict[str, set[str]] = {}
        self.peaks: dict[str, TierReport] = {}
        self.levels: dict[str, list[int]] = {tier: [] for tier in self.fixed}
        self.issued = 0
        for tier in self.fixed:
            self._note(tier, -1, "before the first instruction")

    def apply(self, index: int, instruction: Instruction, known: Effects) -> None:
        """Counts the memory while ``instruction`` runs, and after it."""
        if isinstance(instruction, Forward) and instruction.record:
            self.given[Value("graph", instruction.segment, instruction.microbatch)] = instruction.given
        if isinstance(instruction, (Forward, Backward)):
            self.prepared.add(instruction.microbatch)
        if transient := self._transient(instruction):
            self._note(HBM, index, describe(instruction), transient)
        for place in (*known.writes, *known.adds):
            self.held.setdefault(place.tier, {})
            self.levels.setdefault(place.tier, [0] * self.issued)
            if place.value in self.held[place.tier] and place.value.kind != "gradient":
                continue
            size = self._size(place.value, instruction)
            if place.tier != HBM:
                self.offsets[place] = self.slabs.setdefault(place.tier, FirstFit()).allocate(size)
            self.held[place.tier][place.value] = self.held[place.tier].get(place.value, 0) + size
        for place in known.frees:
            del self.held[place.tier][place.value]
            if place.tier != HBM:
                self.slabs[place.tier].free(self.offsets.pop(place))
            if place.value.kind == "gradient":
                del self.added[place.value.of]
        if isinstance(instruction, ReduceScatter):
            # In use until the sum is done, which the gradient's drop waits for.
            self.held[HBM][Value("gradient", instruction.layer)] += self.sizes.reduction(instruction.layer)
        if isinstance(instruction, (Forward, Backward)):
            self.runs[instruction.microbatch] -= 1
            if not self.runs[instruction.microbatch]:
                self.prepared.discard(instruction.microbatch)
        self.issued += 1
        for tier, levels in self.levels.items():
            self._note(tier, index, describe(instruction))
            levels.append(self._level(tier))

    def _transient(self, instruction: Instruction) -> int:
        if isinstance(instruction, Backward):
            given = self.given.pop(Value("graph", instruction.segment, instruction.microbatch))
            return self.sizes.backward(instruction.segment, given)
        if isinstance(instruction, Forward):
            return self.sizes.forward(instruction.segment, instruction.record, instruction.given)
        if isinstance(instruction, Update):
            return self.sizes.updates[instruction.bucket].working
        return 0

    def _size(self, value: Value, instruction: Instruction) -> int:
        if value.kind == "gradient" and isinstance(instruction, Backward):
            # The segments of a layer bring their own leaves; what a leaf has already is added to.
            leaves = self.sizes.gradient(instruction.segment, value.of)
            added = self.added.setdefault(value.of, set())
            new = sum(size for leaf, size in leaves.items() if leaf not in added)
            added.update(leaves)
            return new
        return self.sizes.value(value, self.given.get(value, ()))

    def _level(self, tier: str) -> int:
        """Bytes of a tier: in HBM of its contents; of a slab, up to the end of its last piece."""
        fixed = sum(self.fixed.get(tier, {}).values())
        if tier == HBM:
            fixed += self.sizes.context * len(self.prepared)
        return fixed + (self.slabs[tier].end if tier in self.slabs else sum(self.held[tier].values()))

    def _note(self, tier: str, index: int, text: str, transient: int = 0) -> None:
        level, budget = self._level(tier) + transient, self.budgets.get(tier)
        if tier in self.peaks and level <= self.peaks[tier].peak:
            return
        held = {str(value): size for value, size in self.held[tier].items()} | self.fixed.get(tier, {})
        if tier == HBM and self.sizes.context:
            held |= {f"context of microbatch {microbatch}": self.sizes.context for microbatch in self.prepared}
        if transient:
            held[f"working memory of {text}"] = transient
        contents = tuple(sorted(held.items(), key=lambda item: -item[1]))
        if budget is not None and level > budget:
            largest = ", ".join(f"{name}: {size:,}" for name, size in contents[:6])
            raise ScheduleError(
                f"instruction {index}, {text}: {tier} would hold {level:,} bytes, {level - budget:,} over the budget "
                f"of {budget:,}; the largest are {largest}"
            )
        self.peaks[tier] = TierReport(level, index, contents, ())

    def reports(self) -> dict[str, TierReport]:
        """What was found of each tier."""
        return {
            tier: report._replace(
                levels=tuple(self.levels[tier]), slab=self.slabs[tier].peak if tier in self.slabs else 0
            )
            for tier, report in self.peaks.items()
        }


def fixed_contents(sizes: Sizes, schedule: Schedule) -> dict[str, dict[str, int]]:
    """Bytes that are there all the time, by tier and name: what is resident, states at home, the gather buffers."""
    fixed: dict[str, dict[str, int]] = {HBM: {}}
    for tier, contents in sizes.resident.items():
        fixed[tier] = dict(contents)
    for layer, tier in schedule.homes.items():
        states = fixed.setdefault(tier, {})
        states[STATES] = states.get(STATES, 0) + sizes.updates[layer].state
    for buffer, size in buffer_sizes(sizes, schedule).items():
        fixed[HBM][f"gather buffer {buffer}"] = size
    return fixed


def buffer_sizes(sizes: Sizes, schedule: Schedule) -> dict[int, int]:
    """Bytes of each gather buffer: of the largest layer that comes to it."""
    buffers: dict[int, int] = {}
    for instruction in schedule:
        if isinstance(instruction, Gather):
            size = sizes.gathered(instruction.layer)
            buffers[instruction.buffer] = max(size, buffers.get(instruction.buffer, 0))
    return buffers
