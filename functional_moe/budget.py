"""The training step within budgets of memory: what a process holds is measured, and the schedule that fits is found.

A step has two parts. While it differentiates, memory holds the parameters, the optimizer's state, the batch, gradients
as they grow, and what the schedule keeps; this part the planner fits into the budget. Then the optimizer's update makes
new parameters and a new state beside the old ones; no schedule changes that, so it is a floor of the budget.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .chain import Microbatch, by_layer, make_chain
from .config import MoEConfig
from .evaluate import GatheredLayers
from .memory import (
    HBM,
    Chain,
    Copies,
    Costs,
    Gathers,
    HostCopies,
    Link,
    LiveBytes,
    Plan,
    PlanError,
    SegmentSeconds,
    Sizes,
    least,
    measure_seconds,
    plan,
    profile_here,
)
from .model import Batch, count_totals
from .optim import GradientTransformation, apply_updates
from .parallel import Layout, ShardedLayers, local_parts
from .sharding import Sharding, as_gathered, make_sharding
from .train_step import TrainState, microbatches

_LINK_BYTES = 1 << 24
"""Copied to measure a link: enough for latency not to matter, and soon done."""


COUNTS = 6
"""How often the memory of segments that exchange tokens is counted, for the least."""


_ROUNDED = "rounded parameters"
"""Of one process, while it differentiates; see ``sharding.as_gathered``."""


class StepPlan(NamedTuple):
    """What ``make_train_step`` needs to stay within budgets."""

    plan: Plan
    slabs: dict[str, int]
    """Bytes of the tiers that values are moved to."""
    update: int
    """Bytes of HBM at the peak of the optimizer's update, with all that stands then."""
    expert_parts: int
    """In which tokens go through their experts."""

    @property
    def peak(self) -> int:
        """Bytes of HBM at the peak of the whole step."""
        return max(self.update, self.plan.timeline.reports[HBM].peak)


class _Measured(NamedTuple):
    """What one rank finds; over ranks the largest counts."""

    sizes: Sizes
    seconds: dict[str, SegmentSeconds]
    gather: dict[str, float]  # seconds, by layer
    reduce: dict[str, float]
    update: int  # bytes of the update besides what stands before it
    gradient: int  # bytes


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
    copies: Copies | None = None,
    gather_dtype: torch.dtype | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> StepPlan:
    """The fastest schedule of a step whose memory fits, with the first of ``expert_parts`` for which there is one.

    Runs every kind of segment, and the update, some times on the arguments: memory is counted, and time taken, where
    training will be. Nothing is changed.

    Counted in ``"hbm"``: parameters, optimizer state, batch and gradients of this process, in the bytes of their
    tensors; gather buffers and the messages of sharded layers; what segments keep; and the working memory of segments,
    reductions and the update. Not counted: what an operator of torch allocates within itself, what the allocator rounds
    up to, and, where experts are spread over ranks, tokens that a rank gets beyond what it got here.

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
      copies: how values get to further tiers; by default within the host's memory.
      gather_dtype: as the step has it.
      gather: the values of all ranks from this rank's; needed with a layout, because all run one schedule.

    Raises:
      PlanError: nothing fits; names the smallest budget of HBM that works, and what fills it.
      ValueError: for a batch whose rows ``accumulate`` does not divide.
    """
    refused = []
    for parts in expert_parts:
        try:
            return _plan_step(
                config, optimizer, state, batch, budgets, layout, accumulate, parts, copies, gather_dtype, gather
            )
        except PlanError as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.missing)


def _plan_step(
    config: MoEConfig,
    optimizer: GradientTransformation,
    state: TrainState,
    batch: Batch,
    budgets: Mapping[str, int],
    layout: Layout | None,
    accumulate: int,
    expert_parts: int,
    copies: Copies | None,
    gather_dtype: torch.dtype | None,
    gather: Callable[[Any], list[Any]],
) -> StepPlan:
    sharding = None if layout is None else make_sharding(config, layout, gather_dtype, torch.float32)
    expert_parallel = None if sharding is None else sharding.expert_parallel
    chain = make_chain(config, "fused", expert_parallel, expert_parts)
    here = local_parts(state)
    part = Microbatch(microbatches(batch, accumulate)[0], here.balance, count_totals(batch))
    layers: Mapping[str, Any] = by_layer(here.params)
    # One process computes with a copy where its parameters are rounded.
    rounded = here.params if sharding is not None else as_gathered(here.params, config, gather_dtype)
    parameters = by_layer(rounded) if sharding is None else GatheredLayers(sharding.layers.store(layers))

    # gloo's threads hold what an exchange of tokens sent for a moment after it is done: in every fifth count or so.
    counts = [profile_here(chain, parameters, part) for _ in range(1 if expert_parallel is None else COUNTS)]
    sizes = dataclasses.replace(
        counts[0], segments={name: least([one.segments[name] for one in counts]) for name in counts[0].segments}
    )
    resident = {
        "parameters": _bytes(here.params),
        _ROUNDED: _bytes((here.params, rounded)) - _bytes(here.params),
        "optimizer state": _bytes(here.opt_state),
        "batch": _bytes((dict(batch), here.balance)),
    }
    sizes = dataclasses.replace(sizes, resident={HBM: resident})
    seconds = measure_seconds(chain, parameters, part)
    gathering: dict[str, float] = {}
    reducing: dict[str, float] = {}
    if sharding is not None:
        sizes = _with_messages(sizes, sharding.layers)
        gathering, reducing = _message_seconds(sharding, layers)
    gradient = sum(sizes.reduced_layers.values()) if sharding is not None else resident["parameters"]
    found = _Measured(sizes, seconds, gathering, reducing, _update_bytes(optimizer, here), gradient)
    found = _largest(gather(found))

    further = [tier for tier in budgets if tier != HBM]
    write: dict[str, Link] = {}
    read: dict[str, Link] = {}
    if further:
        # Of one rank, because all plan with the same figures.
        out, back = gather(_links(HostCopies() if copies is None else copies, part.balance.device))[0]
        write, read = dict.fromkeys(further, out), dict.fromkeys(further, back)
    costs = Costs(found.seconds, found.gather, found.reduce, write, read)
    standing = {name: size for name, size in found.sizes.resident[HBM].items() if name != _ROUNDED}
    update = sum(standing.values()) + found.gradient + found.update
    planned, refused = _within(budgets, found, costs, chain, accumulate, sharding)
    if planned is not None and update <= budgets.get(HBM, update):
        slabs = {tier: report.peak for tier, report in planned.timeline.reports.items() if tier != HBM}
        return StepPlan(planned, slabs, update, expert_parts)
    if refused is not None and budgets[HBM] + refused.missing >= update:
        raise refused
    listed = ", ".join(f"{name}: {size:,}" for name, size in standing.items())
    raise PlanError(
        f"no schedule fits {budgets[HBM]:,} bytes of {HBM}: the smallest budget that works is {update:,}, reached in "
        f"the optimizer's update by {listed}, gradient: {found.gradient:,}, new state and working memory: "
        f"{found.update:,}",
        HBM,
        update - budgets[HBM],
    )


def _within(
    budgets: Mapping[str, int],
    found: _Measured,
    costs: Costs,
    chain: Chain,
    accumulate: int,
    sharding: Sharding | None,
) -> tuple[Plan | None, PlanError | None]:
    """A plan, layers gathered ahead of time if there is room for that; or what the smallest lacks."""
    refused = []
    for prefetch in (1,) if sharding is None else (1, 0):
        gathers = None if sharding is None else Gathers(sharding.layers.sizes, prefetch)
        try:
            return plan(chain, found.sizes, costs, budgets, microbatches=accumulate, gathers=gathers), None
        except PlanError as error:
            refused.append(error)
    return None, min(refused, key=lambda error: error.missing)


def _with_messages(sizes: Sizes, layers: ShardedLayers) -> Sizes:
    known = {name: layers.layer_bytes(name) for name in layers.sizes}
    return dataclasses.replace(
        sizes,
        gathered_layers={name: one.gathered for name, one in known.items()},
        reduced_layers={name: one.reduced for name, one in known.items()},
        reductions={name: one.reduction for name, one in known.items()},
    )


def _update_bytes(optimizer: GradientTransformation, state: TrainState) -> int:
    """Bytes of the optimizer's update at its peak, besides the old state and the gradient, which the step lets go once
    there are updates.
    """
    with torch.no_grad(), LiveBytes() as memory:
        gradient = pytree.tree_map(torch.ones_like, state.params)
        size = _bytes(gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        del gradient
        params = apply_updates(state.params, updates)
    del updates, opt_state, params
    peak: int = memory.peak
    return max(0, peak - size)


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

        gathering |= dict.fromkeys(alike, _seconds(gather, sharding))
        reducing |= dict.fromkeys(alike, _seconds(reduce, sharding))
    return gathering, reducing


def _seconds(run: Callable[[], None], sharding: Sharding) -> float:
    """The better of two runs, after one that does not count."""
    taken = []
    for _ in range(3):
        _synchronize(sharding.layers.mesh.device_type)
        begin = time.perf_counter()
        run()
        _synchronize(sharding.layers.mesh.device_type)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def _links(copies: Copies, device: torch.device) -> tuple[Link, Link]:
    """To a further tier and back, as measured."""
    slab = copies.slab(_LINK_BYTES)
    near = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)
    links = []
    for source, destination in ((near, slab), (slab, near)):
        taken = []
        for _ in range(3):
            _synchronize(device.type)
            begin = time.perf_counter()
            copies.start(source, destination).wait()
            _synchronize(device.type)
            taken.append(time.perf_counter() - begin)
        links.append(Link(_LINK_BYTES / min(taken[1:])))
    return links[0], links[1]


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
