"""The schedule of a training step: which instruction runs after which, as data.

A schedule is a tuple of instructions in the order in which they are issued. Each runs on one stream; what it reads,
writes and frees follows from what it is (:func:`effects`), so nobody writes waits by hand. The values:

================  ==============================================================================================
``parameters``    a layer's parameters, gathered; between :class:`Gather` and :class:`Release`
``input``         a boundary: a segment's input, its predecessor's output
``residual``      a named value that makes replaying a segment cheaper or exact
``graph``         all that a segment's backward needs, as autograd has saved it: it cannot be moved
``cotangent``     the gradient of the loss by a segment's input
``gradient``      a layer's gradient in full, summed over microbatches until it is reduced
``reduced``       this rank's part of a layer's gradient, summed over ranks
``norm``          of the whole gradient, and with it whether the step is made
``state``         what the optimizer keeps of a layer: there before the first instruction and after the last
``updated``       a layer's new parameters
================  ==============================================================================================

Recomputing is one more :class:`Forward`, written out where it happens. A value may have a copy in more than one tier;
only ``input``, ``residual`` and ``state`` can leave the first.

The optimizer may be part of a schedule or not. If it is, ``homes`` says in which tier each layer's state lies between
steps, and its buckets are the layers: one :class:`Norm`, once every gradient is summed, then an :class:`Update` of
each. A state in a further tier is fetched for it, and its home is overwritten with the new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from ._chain import Chain, Segment

Kind: TypeAlias = Literal[
    "parameters", "input", "residual", "graph", "cotangent", "gradient", "reduced", "norm", "state", "updated"
]
Stream: TypeAlias = Literal["compute", "gather", "reduce", "to_host", "from_host"]

OF_LAYERS = frozenset({"parameters", "gradient", "reduced", "state", "updated"})
"""Kinds whose values belong to a layer; the others belong to a segment and a microbatch, ``norm`` to the step."""

HBM = "hbm"
"""The tier in which everything is computed."""
HOST = "host"
"""The host's memory (Grace)."""


class Value(NamedTuple):
    """A value that a schedule moves."""

    kind: Kind
    of: str
    """Its segment; of the kinds in ``OF_LAYERS``, its layer."""
    microbatch: int = 0
    name: str = ""
    """Of a residual."""

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        batch = "" if self.kind in OF_LAYERS or self == NORM else f" (microbatch {self.microbatch})"
        return f"{self.kind}{name} of {self.of}{batch}"


NORM = Value("norm", "the gradient")
"""There is one in a step."""


@dataclasses.dataclass(frozen=True)
class Gather:
    """Brings a layer's parameters together in a gather buffer."""

    layer: str
    buffer: int = 0
    """Which one. A layer whose graph is kept comes back to the same: the graph refers to the memory."""


@dataclasses.dataclass(frozen=True)
class Release:
    """Gives the layer's gather buffer free."""

    layer: str


@dataclasses.dataclass(frozen=True)
class Forward:
    """Runs a segment, the first time or again."""

    segment: str
    microbatch: int = 0
    record: bool = False
    """Keeps the graph for :class:`Backward`."""
    given: tuple[str, ...] = ()
    """Residuals that are handed in."""
    kept: tuple[str, ...] = ()
    """Residuals of those it hands out that become values."""
    output: bool = True
    """Whether its output becomes the next segment's input; a replay for the graph alone needs none."""


@dataclasses.dataclass(frozen=True)
class Backward:
    """Runs a segment's graph backwards; consumes it, and the cotangent of its output."""

    segment: str
    microbatch: int = 0


@dataclasses.dataclass(frozen=True)
class Offload:
    """Copies a value to a further tier."""

    value: Value
    tier: str = HOST


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copies a value back from a further tier."""

    value: Value
    tier: str = HOST


@dataclasses.dataclass(frozen=True)
class Drop:
    """Frees a value's memory in one tier, once every instruction before that uses it is done."""

    value: Value
    tier: str = HBM


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """Adds a layer's gradient, summed over the ranks, to the part that stays. Its memory goes with :class:`Drop`."""

    layer: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """Takes the norm of the whole gradient; whether the step is made follows from it."""


@dataclasses.dataclass(frozen=True)
class Update:
    """Makes a layer's new parameters and the optimizer's new state of it, and frees its gradient."""

    bucket: str
    """The layer."""


Instruction: TypeAlias = Gather | Release | Forward | Backward | Offload | Fetch | Drop | ReduceScatter | Norm | Update


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The instructions of one step."""

    instructions: tuple[Instruction, ...]
    microbatches: int = 1
    resident: frozenset[str] = frozenset()
    """Layers whose parameters are whole here all the time: never gathered, and their gradients are results as they
    stand."""
    homes: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """The tier in which the optimizer's state of each layer lies between steps. Empty: the optimizer is not part of the
    schedule, and gradients are its results."""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        """A table: number, stream, instruction."""
        rows = ((str(index), stream_of(one), describe(one)) for index, one in enumerate(self))
        return "\n".join(f"{index:>5}  {stream:<9}  {text}" for index, stream, text in rows)


class ScheduleError(ValueError):
    """A schedule that would read what is not there, lose what is needed, or exceed a budget."""


def stream_of(instruction: Instruction) -> Stream:
    """Where an instruction runs. Freeing belongs to ``compute``: what comes after may take the memory."""
    match instruction:
        case Gather():
            return "gather"
        case ReduceScatter():
            return "reduce"
        case Offload():
            return "to_host"
        case Fetch():
            return "from_host"
        case _:
            return "compute"


def describe(instruction: Instruction) -> str:
    """An instruction in words."""
    match instruction:
        case Gather(layer, buffer):
            return f"gather {layer} into buffer {buffer}"
        case Release(layer):
            return f"release {layer}"
        case Forward(segment, microbatch, record, given, kept, output):
            parts = [f"forward {segment} (microbatch {microbatch})"]
            parts += ["records its graph"] * record
            parts += [f"given {', '.join(given)}"] * bool(given)
            parts += [f"keeps {', '.join(kept)}"] * bool(kept)
            parts += ["without output"] * (not output)
            return ", ".join(parts)
        case Backward(segment, microbatch):
            return f"backward {segment} (microbatch {microbatch})"
        case Offload(value, tier):
            return f"offload {value} to {tier}"
        case Fetch(value, tier):
            return f"fetch {value} from {tier}"
        case Drop(value, tier):
            return f"drop {value} from {tier}"
        case ReduceScatter(layer):
            return f"reduce {layer}"
        case Norm():
            return "norm of the gradient"
        case Update(bucket):
            return f"update {bucket}"


def of_optimizer(instruction: Instruction) -> bool:
    """Whether an instruction is part of the optimizer's updates, which no recipe of a segment changes."""
    match instruction:
        case Norm() | Update():
            return True
        case Offload(value) | Fetch(value) | Drop(value):
            return value.kind == "state"
        case _:
            return False


class Place(NamedTuple):
    """A value's copy in one tier."""

    value: Value
    tier: str = HBM


class Effects(NamedTuple):
    """What an instruction does to the values."""

    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    """Come to exist by it."""
    adds: tuple[Place, ...] = ()
    """Come to exist by it, or are added to."""
    frees: tuple[Place, ...] = ()


class ChainIndex:
    """A chain's segments by name, who comes before and after, and what their gradients become.

    Args:
      chain: the segments.
      resident: layers whose gradients are not reduced.
    """

    def __init__(self, chain: Chain, resident: Collection[str] = ()) -> None:
        self.segments = {segment.name: segment for segment in chain.segments}
        names = list(self.segments)
        self.following: dict[str, str | None] = dict(zip(names, [*names[1:], None], strict=True))
        self.preceding: dict[str, str | None] = dict(zip(names, [None, *names[:-1]], strict=True))
        self.layers = chain.layers
        self.resident = frozenset(resident)

    def __getitem__(self, name: str) -> Segment:
        return self.segments[name]

    def summed(self, layer: str) -> Value:
        """What the optimizer reads of a layer's gradient."""
        return Value("gradient" if layer in self.resident else "reduced", layer)


def effects(instruction: Instruction, chain: ChainIndex) -> Effects:
    """What ``instruction`` reads, writes and frees. The chain must have its segment or layer."""
    match instruction:
        case Gather(layer):
            return Effects(writes=(Place(Value("parameters", layer)),))
        case Release(layer):
            return Effects(frees=(Place(Value("parameters", layer)),))
        case Forward(name, microbatch, record, given, kept, output):
            following = chain.following[name]
            writes = [Value("residual", name, microbatch, residual) for residual in kept]
            if output and following is not None:
                writes.append(Value("input", following, microbatch))
            if record:
                writes.append(Value("graph", name, microbatch))
            given_values = [Value("residual", name, microbatch, residual) for residual in given]
            reads = (*_read_by_segment(chain, name, microbatch, chain[name].layers), *map(Place, given_values))
            return Effects(reads=reads, writes=tuple(map(Place, writes)))
        case Backward(name, microbatch):
            consumed = [Value("graph", name, microbatch)]
            following = chain.following[name]
            if following is not None:
                consumed.append(Value("cotangent", following, microbatch))
            written = [] if chain.preceding[name] is None else [Value("cotangent", name, microbatch)]
            places = tuple(map(Place, consumed))
            return Effects(
                reads=(*_read_by_segment(chain, name, microbatch, chain[name].layers_backward), *places),
                writes=tuple(map(Place, written)),
                adds=tuple(Place(Value("gradient", layer)) for layer in chain[name].layers),
                frees=places,
            )
        case Offload(Value("state") as value, tier):
            # Its home has an older one, which is overwritten.
            return Effects(reads=(Place(value),), adds=(Place(value, tier),))
        case Offload(value, tier):
            return Effects(reads=(Place(value),), writes=(Place(value, tier),))
        case Fetch(value, tier):
            return Effects(reads=(Place(value, tier),), writes=(Place(value),))
        case Drop(value, tier):
            return Effects(frees=(Place(value, tier),))
        case ReduceScatter(layer):
            return Effects(reads=(Place(Value("gradient", layer)),), adds=(Place(Value("reduced", layer)),))
        case Norm():
            return Effects(reads=tuple(Place(chain.summed(layer)) for layer in chain.layers), writes=(Place(NORM),))
        case Update(bucket):
            state, gradient = Place(Value("state", bucket)), Place(chain.summed(bucket))
            return Effects(
                reads=(Place(NORM), state, gradient),
                writes=(Place(Value("updated", bucket)),),
                adds=(state,),
                frees=(gradient,),
            )


def _read_by_segment(chain: ChainIndex, name: str, microbatch: int, layers: tuple[str, ...]) -> tuple[Place, ...]:
    values = [Value("parameters", layer) for layer in layers]
    if chain.preceding[name] is not None:
        values.append(Value("input", name, microbatch))
    return tuple(map(Place, values))
