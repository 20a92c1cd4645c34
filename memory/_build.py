"""From a policy for every saved value to the instructions of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from ._chain import Chain, Segment, check_chain
from ._schedule import (
    HBM,
    HOST,
    Backward,
    ChainIndex,
    Drop,
    Fetch,
    Forward,
    Gather,
    Instruction,
    Norm,
    Offload,
    ReduceScatter,
    Release,
    Schedule,
    Update,
    Value,
)

Policy: TypeAlias = Literal["keep", "offload", "recompute"]
Order: TypeAlias = Literal["depth_first", "layer_major"]


class Recipe(NamedTuple):
    """What becomes of the saved values of one segment between its forward and its backward."""

    record: bool = True
    """Keep the graph: nothing is recomputed, and nothing can be moved."""
    input: Policy = "keep"
    """Of the boundary in front of it. ``recompute`` replays the segment before it too."""
    residuals: Mapping[str, Policy] = {}
    """Of each residual; one that is not named is recomputed, a decision kept. Empty where the graph is kept."""
    tier: str = HOST
    """Where what is offloaded goes."""


class Gathers(NamedTuple):
    """How layers are gathered that are not whole here."""

    sizes: Mapping[str, int]
    """Bytes of each such layer. Layers of one size share buffers."""
    prefetch: int = 1
    """How many gathers are on their way, or waiting, while a layer computes."""
    again: bool = True
    """Release after the forward, and gather again for the backward."""
    settle: int = 1
    """After how many further runs of segments a gradient's memory is given back: time for its reduction to end."""


class Updates(NamedTuple):
    """How the optimizer runs: layer by layer, each layer's state in HBM for its update."""

    homes: Mapping[str, str] = {}
    """The tier in which each layer's state lies between steps; of one that is not named, HBM."""
    lag: int = 1
    """After how many further updates a state that lies elsewhere leaves HBM: time for its copy to end."""
    lead: int = 1
    """How many updates before its own it is fetched."""


def make_schedule(
    chain: Chain,
    recipes: Mapping[str, Recipe] | None = None,
    *,
    microbatches: int = 1,
    order: Order = "depth_first",
    gathers: Gathers | None = None,
    updates: Updates | None = None,
    lag: int = 1,
    lead: int = 1,
) -> Schedule:
    """The instructions that follow from the recipes.

    Args:
      chain: the segments.
      recipes: of each segment by name; one that is not named keeps its graph.
      microbatches: how many, one after the other.
      order: ``depth_first`` takes each microbatch through all segments before the next; ``layer_major`` takes all
        through a segment before the next segment, so that a gather serves all of them.
      gathers: of layers that are not whole here; by default all are resident.
      updates: of the optimizer; by default it is not part of the schedule.
      lag: after how many further runs of segments an offloaded value leaves HBM: time for its copy to end.
      lead: how many runs of segments before its use a value is fetched.

    Returns:
      a schedule that ``verify`` passes.

    Raises:
      ValueError: for a recipe of an unknown segment or residual, one that contradicts itself or its neighbour, a home
        of an unknown layer, or numbers below 0 (microbatches below 1).
    """
    check_chain(chain)
    recipes = _complete(chain, recipes or {})
    for name, number, least in (("microbatches", microbatches, 1), ("lag", lag, 0), ("lead", lead, 0)):
        if number < least:
            raise ValueError(f"{name} = {number}: must be at least {least}")
    if order not in ("depth_first", "layer_major"):
        raise ValueError(f"order = {order!r}: must be 'depth_first' or 'layer_major'")
    if gathers is not None:
        if gathers.prefetch < 0:
            raise ValueError(f"prefetch = {gathers.prefetch}: must be at least 0")
        if gathers.settle < 0:
            raise ValueError(f"settle = {gathers.settle}: must be at least 0")
        if unknown := sorted(set(gathers.sizes) - set(chain.layers)):
            raise ValueError(f"gathers are for the layers {unknown}; the chain has {chain.layers}")
        for layer, size in gathers.sizes.items():
            if size < 0:
                raise ValueError(f"gathers: {layer} has {size} bytes; must be at least 0")
    if updates is not None:
        for name, number in (("updates.lag", updates.lag), ("updates.lead", updates.lead)):
            if number < 0:
                raise ValueError(f"{name} = {number}: must be at least 0")
        if unknown := sorted(set(updates.homes) - set(chain.layers)):
            raise ValueError(f"updates have homes of the layers {unknown}; the chain has {chain.layers}")
    program = _Program(_compute(chain, recipes, microbatches, order))
    _move(program, chain, recipes, lag, lead)
    resident = frozenset(chain.layers)
    if gathers is not None:
        _gather(program, chain, gathers)
        _reduce(program, chain, gathers)
        resident -= set(gathers.sizes)
    if updates is None:
        return Schedule(program.instructions(), microbatches, resident)
    homes = {layer: updates.homes.get(layer, HBM) for layer in chain.layers}
    instructions = (*program.instructions(), *_update(homes, updates.lag, updates.lead))
    return Schedule(instructions, microbatches, resident, homes)


def _update(homes: Mapping[str, str], lag: int, lead: int) -> list[Instruction]:
    """The norm, and the update of every layer; states come a few updates early and leave a few late."""
    layers = list(homes)
    away = [homes[layer] != HBM for layer in layers]
    out: list[Instruction] = []

    def fetch(number: int) -> None:
        if number < len(layers) and away[number]:
            out.append(Fetch(Value("state", layers[number]), homes[layers[number]]))

    def drop(number: int) -> None:
        if number >= 0 and away[number]:
            out.append(Drop(Value("state", layers[number])))

    for number in range(lead):
        fetch(number)
    out.append(Norm())
    for number, layer in enumerate(layers):
        fetch(number + lead)
        out.append(Update(layer))
        if away[number]:
            out.append(Offload(Value("state", layer), homes[layer]))
        drop(number - lag)
    for number in range(max(0, len(layers) - lag), len(layers)):
        drop(number)
    return out


def _complete(chain: Chain, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """A recipe for every segment and residual."""
    names = [segment.name for segment in chain.segments]
    if unknown := sorted(set(recipes) - set(names)):
        raise ValueError(f"recipes for the segments {unknown}; the chain has {names}")
    out: dict[str, Recipe] = {}
    before: Segment | None = None
    for segment in chain.segments:
        recipe = recipes.get(segment.name, Recipe())
        _check_recipe(segment, recipe, first=before is None)
        if recipe.input == "recompute" and before is not None and out[before.name].record:
            raise ValueError(
                f"recipe of {segment.name}: its input is to be recomputed by {before.name}, which keeps its graph and "
                "is not replayed; keep or offload the input"
            )
        if not recipe.record:
            policies: dict[str, Policy] = dict.fromkeys(segment.residuals, "recompute")
            policies |= dict.fromkeys(segment.decisions, "keep")
            recipe = recipe._replace(residuals={**policies, **recipe.residuals})
        out[segment.name] = recipe
        before = segment
    return out


def _check_recipe(segment: Segment, recipe: Recipe, first: bool) -> None:
    where = f"recipe of {segment.name}"
    for name, policy in (("input", recipe.input), *recipe.residuals.items()):
        if policy not in ("keep", "offload", "recompute"):
            raise ValueError(f"{where}: {name} = {policy!r}; a policy is 'keep', 'offload' or 'recompute'")
    if unknown := sorted(set(recipe.residuals) - set(segment.residuals)):
        raise ValueError(f"{where}: a policy for {unknown}; the segment has the residuals {segment.residuals}")
    if decided := [name for name in segment.decisions if recipe.residuals.get(name) == "recompute"]:
        raise ValueError(f"{where}: {decided} are decisions, which are never made twice; keep or offload them")
    if recipe.record and (recipe.residuals or recipe.input != "keep"):
        raise ValueError(f"{where}: it keeps its graph, which refers to its input; give no other policy")
    if recipe.tier == HBM:
        raise ValueError(f"{where}: tier = {HBM!r} is where values are computed; offload goes to a further one")
    if first and recipe.input != "keep":
        raise ValueError(f"{where}: the first segment has no input to {recipe.input}")


def _compute(chain: Chain, recipes: Mapping[str, Recipe], microbatches: int, order: Order) -> list[Forward | Backward]:
    """The runs of segments, forwards and backwards, in their order."""
    batches = range(microbatches)
    forward = {
        segment.name: Forward(
            segment.name,
            record=recipes[segment.name].record,
            kept=tuple(name for name, policy in recipes[segment.name].residuals.items() if policy != "recompute"),
        )
        for segment in chain.segments
    }

    def forwards(names: list[str], batch: int) -> list[Forward | Backward]:
        return [_of_microbatch(forward[name], batch) for name in names]

    def backwards(names: list[str], batch: int) -> list[Forward | Backward]:
        """A run of segments of which all but the first recompute their input."""
        replays: list[Forward | Backward] = [
            Forward(name, batch, record=True, given=forward[name].kept, output=name != names[-1])
            for name in names
            if not recipes[name].record
        ]
        return replays + [Backward(name, batch) for name in reversed(names)]

    names = [segment.name for segment in chain.segments]
    runs: list[list[str]] = []
    for name in names:
        if recipes[name].input == "recompute":
            runs[-1].append(name)
        else:
            runs.append([name])
    runs.reverse()
    if order == "depth_first":
        return [
            one
            for batch in batches
            for part in (forwards(names, batch), *(backwards(run, batch) for run in runs))
            for one in part
        ]
    out = [one for name in names for batch in batches for one in forwards([name], batch)]
    return out + [one for run in runs for batch in batches for one in backwards(run, batch)]


def _of_microbatch(one: Forward, batch: int) -> Forward:
    return Forward(one.segment, batch, one.record, one.given, one.kept, one.output)


class _Program:
    """Runs of segments, and what is issued just before and just after each."""

    def __init__(self, compute: list[Forward | Backward]) -> None:
        self.compute = compute
        self.before: list[list[Instruction]] = [[] for _ in compute]
        self.after: list[list[Instruction]] = [[] for _ in compute]

    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(
            one
            for before, compute, after in zip(self.before, self.compute, self.after, strict=True)
            for one in (*before, compute, *after)
        )


def _move(program: _Program, chain: Chain, recipes: Mapping[str, Recipe], lag: int, lead: int) -> None:
    """Drops what is not needed any more, and takes what is to be offloaded out and back."""
    index = ChainIndex(chain)
    # Of each value, when it is made, and when it is used: first by its own segment, last by the backward.
    made: dict[Value, int] = {}
    uses: dict[Value, list[int]] = {}
    for position, one in enumerate(program.compute):
        following = index.following[one.segment]
        own_input = Value("input", one.segment, one.microbatch)
        if isinstance(one, Forward):
            if one.output and following is not None:
                made.setdefault(Value("input", following, one.microbatch), position)
            made |= {Value("residual", one.segment, one.microbatch, name): position for name in one.kept}
            used = [Value("residual", one.segment, one.microbatch, name) for name in one.given]
        else:
            residuals = recipes[one.segment].residuals
            handed = [Value("residual", one.segment, one.microbatch, name) for name in residuals]
            used = [value for value in handed if value in made]
        for value in (*used, *((own_input,) if own_input in made else ())):
            uses.setdefault(value, []).append(position)
    for value, begin in made.items():
        recipe = recipes[value.of]
        policy = recipe.input if value.kind == "input" else recipe.residuals[value.name]
        last = uses[value][-1]
        # An input is used by the first forward of its segment; from then on it waits for the replay.
        idle = uses[value][0] if value.kind == "input" else begin
        again = next(position for position in uses[value] if position > idle)
        if policy == "offload" and again > idle + 1:
            program.after[begin].append(Offload(value, recipe.tier))
            leaves = min(idle + lag, again - 1)
            program.after[leaves].append(Drop(value))
            program.before[max(again - lead, leaves + 1)].append(Fetch(value, recipe.tier))
            program.before[again].append(Drop(value, recipe.tier))
        if policy == "recompute":
            # Made again for the replay: two lives, each with its own end.
            program.after[idle].append(Drop(value))
        program.after[last].append(Drop(value))


class _Use(NamedTuple):
    """A layer's stay in its buffer: it computes from ``start`` to ``stop``, both included."""

    layer: str
    start: int
    stop: int
    issued: int  # before which run the gather is issued


def _stays(program: _Program, chain: Chain, gathers: Gathers) -> list[_Use]:
    """When each layer must be there, in the order of their starts."""
    index = ChainIndex(chain)
    stays: list[tuple[int, int, str]] = []
    open_stays: dict[str, tuple[int, int]] = {}
    for position, one in enumerate(program.compute):
        segment = index[one.segment]
        read = segment.layers_backward if isinstance(one, Backward) else segment.layers
        needed = [layer for layer in read if layer in gathers.sizes]
        if gathers.again:
            for layer in [layer for layer in open_stays if layer not in needed]:
                stays.append((*open_stays.pop(layer), layer))
        for layer in needed:
            start = open_stays[layer][0] if layer in open_stays else position
            open_stays[layer] = (start, position)
    stays += [(*stay, layer) for layer, stay in open_stays.items()]
    stays.sort()
    uses = []
    for number, (start, stop, layer) in enumerate(stays):
        ahead = max(0, number - gathers.prefetch)
        # Not before the layer's own last stay has ended.
        earlier = max((end + 1 for _, end, other in stays[:number] if other == layer), default=0)
        uses.append(_Use(layer, start, stop, max(stays[ahead][0], earlier)))
    return uses


def _gather(program: _Program, chain: Chain, gathers: Gathers) -> None:
    """Gathers each layer before it is needed, and releases it after."""
    uses = _stays(program, chain, gathers)
    buffers = _buffers(uses, gathers)
    for use in uses:
        program.before[use.issued].append(Gather(use.layer, buffers[use.layer]))
        # Before whatever else is issued there: a gather may want the buffer.
        program.after[use.stop].insert(0, Release(use.layer))


def _buffers(uses: list[_Use], gathers: Gathers) -> dict[str, int]:
    """A buffer for each layer, always the same, shared by layers of one size that are never there together."""
    taken: dict[str, int] = {}
    for layer in dict.fromkeys(use.layer for use in uses):
        mine = [use for use in uses if use.layer == layer]
        blocked = {
            taken[other.layer]
            for other in uses
            if other.layer in taken
            and (
                gathers.sizes[other.layer] != gathers.sizes[layer]
                or any(other.issued <= use.stop and use.issued <= other.stop for use in mine)
            )
        }
        taken[layer] = next(number for number in range(len(taken) + 1) if number not in blocked)
    return taken


def _reduce(program: _Program, chain: Chain, gathers: Gathers) -> None:
    """Reduces each layer's gradient after its last addition before another layer's turn."""
    index = ChainIndex(chain)
    for layer in gathers.sizes:
        positions = [
            position
            for position, one in enumerate(program.compute)
            if isinstance(one, Backward) and layer in index[one.segment].layers
        ]
        touched = [position for position, one in enumerate(program.compute) if layer in index[one.segment].layers]
        for position, following in zip(positions, [*positions[1:], None], strict=True):
            if following is not None and all(step in touched for step in range(position, following)):
                continue  # the layer's turn goes on
            program.after[position].append(ReduceScatter(layer))
            limit = len(program.compute) - 1 if following is None else following - 1
            program.after[min(position + gathers.settle, limit)].append(Drop(Value("gradient", layer)))
