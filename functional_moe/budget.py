"""The training step within budgets of memory: what a process holds is measured, and the schedule that fits is found.

The schedule is of the whole step, the optimizer's updates included: layer by layer, with each layer's state where there
is room for it, in HBM or in a further tier.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .chain import Microbatch, by_layer, from_layers, make_chain
from .config import MoEConfig
from .evaluate import GatheredLayers
from .memory import (
    HBM,
    Chain,
    Copies,
    Costs,
    Execution,
    Gathers,
    HostCopies,
    Link,
    LiveBytes,
    Plan,
    PlanError,
    Policy,
    Recipe,
    SegmentSeconds,
    Sizes,
    UpdateBytes,
    Updates,
    candidate_recipes,
    least,
    measure_seconds,
    of_optimizer,
    plan,
    profile_here,
    tree_bytes,
)
from .model import Batch, count_totals
from .optim import GradientTransformation
from .parallel import Layout, ShardedLayers, local_parts
from .sharding import Sharding, as_gathered, make_sharding
from .train_step import TrainState, microbatches
from .updates import LayerUpdates, StepUpdates, Verdict

_LINK_BYTES = 1 << 24
"""Copied to measure a link: enough for latency not to matter, and soon done."""


COUNTS = 6
"""How often memory is counted where ranks exchange tokens or matrices, for the least."""

_RUNS = 3
"""Of which the first does not count for time."""


class StepPlan(NamedTuple):
    """What ``make_train_step`` needs to stay within budgets."""

    plan: Plan
    """Its schedule has the optimizer's updates; states that it has in a further tier are put there by ``at_home``."""
    slabs: dict[str, int]
    """Bytes of the tiers that values are moved to."""
    states: dict[str, int]
    """Bytes of the optimizer's state that lies in further tiers."""
    expert_parts: int
    """In which tokens go through their experts."""

    @property
    def peak(self) -> int:
        """Bytes of HBM at the peak of the step."""
        return self.plan.timeline.reports[HBM].peak


class _Measured(NamedTuple):
    """What one rank finds; over ranks the largest counts."""

    sizes: Sizes
    seconds: dict[str, SegmentSeconds]
    gather: dict[str, float]  # seconds, by layer
    reduce: dict[str, float]
    update: dict[str, float]


class _MeasuredUpdate(NamedTuple):
    """What the optimizer's update of one layer takes."""

    size: UpdateBytes  # with its state in HBM
    seconds: float


def plan_step(
    config: MoEConfig,
    optimizer: GradientTransformation,
    state: TrainState,
    batch: Batch,
    budgets: Mapping[str, int],
    *,
    layout: Layout | None = None,
    accumulate: int = 1,
    expert_parts: Sequence[int] = (1,),
    donate: bool = False,
    copies: Copies | None = None,
    gather_dtype: torch.dtype | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> StepPlan:
    """The fastest schedule of a step whose memory fits, with the first of ``expert_parts`` for which there is one.

    Runs every kind of segment, and the update of every kind of layer, some times on the arguments or copies of them:
    memory is counted, and time taken, where training will be. Nothing is changed.

    Counted in ``"hbm"``: parameters, optimizer state, batch and gradients of this process, in the bytes of their
    tensors; gather buffers and the messages of sharded layers; what segments keep; and the working memory of segments,
    reductions and updates. Not counted: what an operator of torch allocates within itself, what the allocator rounds
    up to, and, where experts are spread over ranks, tokens that a rank gets beyond what it got here.

    Where ranks exchange tokens, what a router decided stays in HBM: its size differs from batch to batch.

    With a further tier, the optimizer's state lies there, of as many layers as fit, where that makes the step possible
    or faster; not where it is sharded over devices, whose DTensors hold no host tensors.

    Args:
      config: the model.
      optimizer: as the step has it.
      state: as the step takes it. Values do not matter, but for how evenly its routers spread tokens.
      batch: this rank's rows of a step.
      budgets: bytes of each tier on this process: ``"hbm"``, and further ones that values may go to.
      layout: where the parameters live; then every rank calls this.
      accumulate: microbatches per step.
      expert_parts: as the step takes it; the later ones are for when nothing fits, because every part is rounded and
        added by itself: a choice by measured time would not be the same in another run.
      donate: as the step has it; without it old and new state are there together.
      copies: how values get to further tiers; by default within the host's memory.
      gather_dtype: as the step has it.
      gather: the values of all ranks from this rank's; needed with a layout, because all run one schedule.

    Raises:
      PlanError: nothing fits; names the smallest budget of HBM that works, and what fills it.
      ValueError: for a batch whose rows ``accumulate`` does not divide, or an optimizer that does not work layer by
        layer.
    """
    here = local_parts(state)
    updates = LayerUpdates(optimizer, config)
    measured = _measure_updates(updates, here, donate, 1 if layout is None else COUNTS)
    copies = HostCopies() if copies is None else copies
    refused = []
    for parts in expert_parts:
        step = _Step(config, updates, here, batch, layout, accumulate, parts, donate, copies, gather_dtype, gather)
        try:
            return _plan_step(step, measured, budgets)
        except PlanError as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.missing)


class _Step(NamedTuple):
    """What is planned."""

    config: MoEConfig
    updates: LayerUpdates
    here: TrainState  # local parts
    batch: Batch
    layout: Layout | None
    accumulate: int
    expert_parts: int
    donate: bool
    copies: Copies
    gather_dtype: torch.dtype | None
    gather: Callable[[Any], list[Any]]


def _plan_step(step: _Step, updates: Mapping[str, _MeasuredUpdate], budgets: Mapping[str, int]) -> StepPlan:
    sharding = None
    if step.layout is not None:
        sharding = make_sharding(step.config, step.layout, step.gather_dtype, torch.float32)
    expert_parallel = None if sharding is None else sharding.expert_parallel
    chain = make_chain(step.config, "fused", expert_parallel, step.expert_parts)
    found = _largest(step.gather(_measure(step, chain, sharding, updates)))
    further = [tier for tier in budgets if tier != HBM]
    write: dict[str, Link] = {}
    read: dict[str, Link] = {}
    if further:
        # Of one rank, because all plan with the same figures.
        out, back = step.gather(_links(step.copies, step.here.balance.device))[0]
        write, read = dict.fromkeys(further, out), dict.fromkeys(further, back)
    costs = Costs(found.seconds, found.gather, found.reduce, write, read, found.update)
    planned, refused = [], []
    for homes in _homes(chain, found.sizes, budgets, step):
        sizes = found.sizes if step.donate else _beside(found.sizes, homes)
        limits = _limits(budgets, _states(found.sizes, homes), step)
        try:
            planned.append(_with_homes(homes, chain, sizes, costs, limits, step.accumulate, sharding))
        except PlanError as error:
            refused.append(error)
    if not planned:
        raise min(refused, key=lambda error: error.missing)
    best = min(planned, key=lambda one: one.timeline.seconds)
    slabs = {tier: report.slab for tier, report in best.timeline.reports.items() if tier != HBM}
    return StepPlan(best, slabs, _states(found.sizes, best.schedule.homes), step.expert_parts)


def _measure(step: _Step, chain: Chain, sharding: Sharding | None, updates: Mapping[str, _MeasuredUpdate]) -> _Measured:
    here = step.here
    part = Microbatch(microbatches(step.batch, step.accumulate)[0], here.balance, count_totals(step.batch))
    layers: Mapping[str, Any] = by_layer(here.params)
    # One process computes with a copy where its parameters are rounded.
    rounded = here.params if sharding is not None else as_gathered(here.params, step.config, step.gather_dtype)
    parameters = by_layer(rounded) if sharding is None else GatheredLayers(sharding.layers.store(layers))
    exchanges = sharding is not None and sharding.expert_parallel is not None

    # gloo's threads hold what an exchange of tokens sent for a moment after it is done: in every fifth count or so.
    counts = [profile_here(chain, parameters, part) for _ in range(COUNTS if exchanges else 1)]
    sizes = dataclasses.replace(
        counts[0],
        segments={name: least([one.segments[name] for one in counts]) for name in counts[0].segments},
        resident={
            HBM: {
                "parameters": _bytes(here.params),
                "rounded parameters": _bytes((here.params, rounded)) - _bytes(here.params),
                "counts and rates": _bytes(step.updates.buckets.split(here.opt_state).shared),
                "batch": _bytes((dict(step.batch), here.balance)),
            }
        },
        updates={layer: one.size for layer, one in updates.items()},
    )
    seconds = measure_seconds(chain, parameters, part)
    gathering: dict[str, float] = {}
    reducing: dict[str, float] = {}
    if sharding is not None:
        sizes = _with_messages(sizes, sharding.layers)
        gathering, reducing = _message_seconds(sharding, layers)
    return _Measured(sizes, seconds, gathering, reducing, {layer: one.seconds for layer, one in updates.items()})


def _homes(chain: Chain, sizes: Sizes, budgets: Mapping[str, int], step: _Step) -> list[dict[str, str]]:
    """Where the states may lie: in HBM, or of as many layers as fit in a further tier."""
    choices: list[dict[str, str]] = [{}]
    if step.layout is not None and step.layout.mesh.device_type != "cpu":
        return choices  # a DTensor there holds no host tensor
    for tier in budgets:
        away: dict[str, str] = {}
        for layer in chain.layers if tier != HBM else ():
            more = {**away, layer: tier}
            if _limits(budgets, _states(sizes, more), step)[tier] >= 0:
                away = more
        if _states(sizes, away):
            choices.append(away)
    return choices


def _states(sizes: Sizes, homes: Mapping[str, str]) -> dict[str, int]:
    """Bytes of the states in further tiers."""
    found: dict[str, int] = {}
    for layer, tier in homes.items():
        if tier != HBM and sizes.updates[layer].state:
            found[tier] = found.get(tier, 0) + sizes.updates[layer].state
    return found


def _limits(budgets: Mapping[str, int], states: Mapping[str, int], step: _Step) -> dict[str, int]:
    """The budgets less what reserving memory of further tiers rounds up: of states, and of the slab beside them."""
    found = dict(budgets)
    times = 1 if step.donate else 2  # the old states, and the new ones
    for tier in found:
        if tier != HBM:
            taken = times * states.get(tier, 0)
            left = found[tier] - times * step.copies.reserved(states.get(tier, 0))
            found[tier] = taken + _largest_slab(step.copies, left) if left >= 0 else -1
    return found


def _largest_slab(copies: Copies, limit: int) -> int:
    """Bytes of the largest slab that takes no more than ``limit``."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if copies.reserved(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _beside(sizes: Sizes, homes: Mapping[str, str]) -> Sizes:
    """The sizes of a step that donates nothing: what it makes anew for further tiers is there beside the old."""
    updates = {
        layer: one._replace(kept=one.kept - (one.state if homes.get(layer, HBM) != HBM else 0))
        for layer, one in sizes.updates.items()
    }
    anew = {tier: {"new optimizer state": size} for tier, size in _states(sizes, homes).items()}
    return dataclasses.replace(sizes, updates=updates, resident={**sizes.resident, **anew})


def _with_homes(
    homes: Mapping[str, str],
    chain: Chain,
    sizes: Sizes,
    costs: Costs,
    limits: Mapping[str, int],
    accumulate: int,
    sharding: Sharding | None,
) -> Plan:
    """A plan, layers gathered and states fetched ahead of time if there is room for that."""
    exchanges = sharding is not None and sharding.expert_parallel is not None
    recipes = _with_decisions_here(chain, sizes, costs) if exchanges else None
    refused = []
    for prefetch in (1,) if sharding is None else (1, 0):
        gathers = None if sharding is None else Gathers(sharding.layers.sizes, prefetch)
        for ahead in (1, 0) if homes else (1,):
            updates = Updates(homes, lag=ahead, lead=ahead)
            try:
                return plan(
                    chain,
                    sizes,
                    costs,
                    limits,
                    microbatches=accumulate,
                    gathers=gathers,
                    updates=updates,
                    recipes=recipes,
                )
            except PlanError as error:
                refused.append(error)
                if error.instruction is None or not of_optimizer(error.instruction):
                    break
    raise min(refused, key=lambda error: error.missing)


def _with_decisions_here(chain: Chain, sizes: Sizes, costs: Costs) -> dict[str, list[Recipe]]:
    """What segments may take where ranks exchange tokens: a decision is as large as what a rank gets, which differs
    from batch to batch, and a further tier has the room that was planned. So decisions stay in HBM.
    """
    found: dict[str, list[Recipe]] = {}
    for segment in chain.segments:
        if segment.decisions and segment.kind not in found:
            here: dict[str, Policy] = dict.fromkeys(segment.decisions, "keep")
            found[segment.kind] = [
                recipe if recipe.record else recipe._replace(residuals={**recipe.residuals, **here})
                for recipe in candidate_recipes(segment, sizes, costs)
            ]
    return found


def _measure_updates(layers: LayerUpdates, state: TrainState, donate: bool, counts: int) -> dict[str, _MeasuredUpdate]:
    """The update of each layer, on a copy; layers of the same shapes are alike."""
    own = layers.buckets.split(state.opt_state).own
    params = by_layer(state.params)
    found: dict[tuple[Any, ...], _MeasuredUpdate] = {}
    keys = {layer: _shapes((params[layer], own[layer])) for layer in params}
    for layer, key in keys.items():
        if key not in found:
            found[key] = _measure_update(layers, state, layer, donate, counts)
    return {layer: found[key] for layer, key in keys.items()}


def _measure_update(layers: LayerUpdates, state: TrainState, layer: str, donate: bool, counts: int) -> _MeasuredUpdate:
    params = by_layer(state.params)
    states = layers.buckets.split(state.opt_state)
    one = torch.ones((), device=state.balance.device)
    no_metrics: Any = None

    def make() -> Callable[[], Any]:
        """An update of the layer, with all that it changes made for it."""
        tree, own = pytree.tree_map(torch.clone, (params[layer], states.own[layer]))
        gradient = pytree.tree_map(torch.ones_like, tree)
        step = StepUpdates(
            layers,
            from_layers({**params, layer: tree}),
            layers.buckets.join({**states.own, layer: own}, states.shared),
            dict.fromkeys(params, HBM),
            lambda done: Verdict(no_metrics, one, one > 0),
            donate,
            None,
        )
        step.begin(Execution(one, {}, ()))
        return lambda: step.update(layer, gradient, own)

    peaks, taken = [], []
    with torch.no_grad():
        for _ in range(counts):
            update = make()
            with LiveBytes() as memory:
                update()
            peaks.append(memory.peak)
        for _ in range(_RUNS):
            taken.append(_timed(make(), one.device.type))
    size = tree_bytes(states.own[layer])
    kept = 0 if donate else _bytes(params[layer]) + size
    return _MeasuredUpdate(UpdateBytes(size, min(peaks), kept), min(taken[1:]))


def _with_messages(sizes: Sizes, layers: ShardedLayers) -> Sizes:
    known = {name: layers.layer_bytes(name) for name in layers.sizes}
    return dataclasses.replace(
        sizes,
        gathered_layers={name: one.gathered for name, one in known.items()},
        reduced_layers={name: one.reduced for name, one in known.items()},
        reductions={name: one.reduction for name, one in known.items()},
    )


def _message_seconds(sharding: Sharding, layers: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of gathering and of reducing each layer. Layers of one size take the same."""
    store = sharding.layers.store(layers)
    gathering: dict[str, float] = {}
    reducing: dict[str, float] = {}
    for size in sorted(set(sharding.layers.sizes.values())):
        alike = [name for name, other in sharding.layers.sizes.items() if other == size]
        layer = alike[0]

        def gather(layer: str = layer) -> None:
            store.gather(layer, 0)
            store.release(layer)

        def reduce(layer: str = layer) -> None:
            store.reduce(layer)
            store.drop_gradient(layer)

        gathering |= dict.fromkeys(alike, _seconds(gather, sharding.layers.mesh.device_type))
        reducing |= dict.fromkeys(alike, _seconds(reduce, sharding.layers.mesh.device_type))
    return gathering, reducing


def _timed(run: Callable[[], Any], device: str) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begin


def _seconds(run: Callable[[], Any], device: str) -> float:
    """The best of some runs."""
    return min([_timed(run, device) for _ in range(_RUNS)][1:])


def _links(copies: Copies, device: torch.device) -> tuple[Link, Link]:
    """To a further tier and back, as measured."""
    slab = copies.slab(_LINK_BYTES)
    near = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)

    def link(source: Tensor, destination: Tensor) -> Link:
        return Link(_LINK_BYTES / _seconds(lambda: copies.start(source, destination).wait(), device.type))

    return link(near, slab), link(slab, near)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _bytes(tree: Any) -> int:
    """Of a tree's tensors; memory that several share counts once."""
    storages = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return sum(storages.values())


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(tree)
    return spec, *((leaf.shape, leaf.dtype) for leaf in leaves)


def _largest(values: Sequence[Any]) -> Any:
    """Of trees that differ in their numbers alone, the largest of each number."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, Mapping):
        return {key: _largest([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return type(first)(*map(_largest, zip(*values, strict=True)))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: _largest([getattr(value, name) for value in values]) for name in names}
        )
    return max(values)
