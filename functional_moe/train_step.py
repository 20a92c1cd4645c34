"""The training step, ``(state, batch) -> (state, metrics)``, as one pure function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .chain import Microbatch, by_layer, collect_metrics, from_layers, loss_fn, make_chain
from .config import MoEConfig
from .gradient import value_and_grad
from .kernels import Kernels, check_kernels, inside_transform
from .memory import (
    Chain,
    Copies,
    Execution,
    Gathers,
    ResidentStore,
    Schedule,
    Store,
    Updates,
    execute,
    make_schedule,
    trace_range,
    verify,
)
from .model import Batch, Metrics, Totals, check_batch, count_totals, init_balance
from .optim import GradientTransformation, apply_updates, global_norm, learning_rates
from .parallel import Layout, all_reduce, axis_group, from_local_parts, local_parts
from .parallel import global_norm as sharded_norm
from .parameters import Params
from .routing import update_balance
from .sharding import Sharding, as_gathered, check_gather_dtype, make_sharding
from .tree import named_leaves
from .updates import LayerUpdates, StepUpdates, Verdict, discard, renewed


class TrainState(NamedTuple):
    """Everything that a step reads and writes."""

    step: Tensor  # int64 []; batches consumed, those of refused steps too
    params: Params  # fp32 leaves
    opt_state: Any
    balance: Tensor  # fp32 [moe_layers, experts]; what the routers carry without gradient


class StepMetrics(NamedTuple):
    """What one step reports, over all of its microbatches."""

    loss: Tensor  # [] nats per predicted token, cross-entropy alone
    aux_loss: Tensor  # [] balance loss, mean over MoE layers; 1.0 when uniform
    z_loss: Tensor  # [] router z-loss, mean over MoE layers
    grad_norm: Tensor  # [] before any clipping
    finite: Tensor  # bool []; False when the step was refused
    tokens: Tensor  # int64 []; tokens that are not padding
    load_max_over_mean: Tensor  # [moe_layers]; the fullest expert's tokens over the mean
    load_idle: Tensor  # [moe_layers]; share of experts without a token
    learning_rates: dict[str, Tensor]  # by optimizer label


def init_state(params: Params, optimizer: GradientTransformation, config: MoEConfig) -> TrainState:
    """The state before the first step. Of DTensors, so that their moments are DTensors too.

    Raises:
      ValueError: a parameter is narrower than fp32, in which most updates would be rounded away; the leaf is named.
    """
    for name, leaf in named_leaves(params).items():
        if leaf.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(f"leaf {name!r} is {leaf.dtype}; what is trained is fp32 or better: hf.load gives that")
    device = params["embedding"].device
    step = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(step, params, optimizer.init(params), init_balance(config, device))


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """``batch`` in ``count`` equal runs of rows.

    Raises:
      ValueError: when ``count`` does not divide the rows.
    """
    rows = batch["tokens"].shape[0]
    if rows % count:
        raise ValueError(f"accumulate = {count} does not divide the {rows} rows of the batch")
    parts = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: parts[key][index] for key in parts} for index in range(count)]


class _Sums(NamedTuple):
    """What one process computes of a step; over the ranks these add."""

    loss: Tensor
    metrics: Metrics
    gradient: Params


def make_train_step(
    config: MoEConfig,
    optimizer: GradientTransformation,
    *,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    slabs: Mapping[str, int] | None = None,
    copies: Copies | None = None,
    accumulate: int = 1,
    expert_parts: int = 1,
    donate: bool = False,
    kernels: Kernels = "fused",
    gather_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The step that trains ``config`` with ``optimizer``.

    The step counts the predicted tokens of the whole batch first, and every microbatch's losses are divided by
    that count, so gradients are sums and neither ``accumulate`` nor the number of ranks changes anything but rounding
    and memory. The selection bias moves once, from the counts of the whole batch. A step whose loss or gradient norm is
    not finite leaves parameters, optimizer state and balance as they were, counts the batch as consumed, and reports
    ``finite = False``.

    Args:
      config: the model.
      optimizer: a gradient transformation over the parameter tree; of shards, where there is a layout.
      layout: where the parameters live (``model_layout``). Then the state holds DTensors, every rank of the mesh calls
        the step, and each brings its own rows of the batch.
      schedule: when layers are gathered and values moved or recomputed, for ``make_chain(config)``; by default every
        graph is kept, and with a layout each layer is gathered one layer ahead and released after use. It may have the
        optimizer's updates (``memory.Updates``), layer by layer; the values are the same.
      slabs: bytes of the tiers that the schedule offloads to, as ``memory.verify`` reports them.
      copies: how values get there, see ``memory``.
      accumulate: microbatches per step; must divide the rows of a batch.
      expert_parts: in how many parts a microbatch's tokens go through the experts of a layer, which bounds what their
        rows take and lets one part travel between ranks while another is computed; see ``experts.routed_experts``.
      donate: the step takes over the memory of the state that it is given, whose tensors raise from then on. Then the
        schedule must have the updates; the default one has.
      kernels: ``"reference"`` when the step itself is transformed (``vmap`` over learning rates, say).
      gather_dtype: in which matrices are gathered; by default the compute dtype of ``config``. Routers, norms and
        biases are gathered in float32. In ``torch.float8_e4m3fn`` they travel with a scale for each block, see
        ``make_sharding``; the gradient is that of the rounded matrices, and updates the fp32 ones. One process rounds
        as ranks do, so that a step on any mesh equals its; over many steps a difference of 1e-7 rounds some matrices
        the other way (5e-3 of a gradient's norm after six steps of a small model).
      reduce_dtype: in which gradients are summed over ranks.

    Returns:
      ``step(state, batch) -> (state, metrics)``; it changes neither argument, but for a state that is donated. In a
      trace of ``torch.profiler`` each instruction of the schedule is a range (``forward layers.0.attention (microbatch
      0)``), and so are the gradient's norm and the optimizer.

    Raises:
      ValueError: for ``accumulate`` or ``expert_parts`` below 1, unknown kernels, a dtype in which nothing travels, a
        layout, schedule, gather dtype or ``donate`` with the reference kernels, ``donate`` with a schedule without
        updates, or an optimizer that does not work layer by layer, here; for a batch of other keys, shapes or dtypes,
        or of rows that ``accumulate`` does not divide, from the step.
      ScheduleError: for a schedule that does not compute the gradient of this model.
      NotImplementedError: from the step, inside a transform with ``kernels="fused"``.
    """
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate = {accumulate!r}: must be an integer of at least 1")
    if not isinstance(expert_parts, int) or isinstance(expert_parts, bool) or expert_parts < 1:
        raise ValueError(f"expert_parts = {expert_parts!r}: must be an integer of at least 1")
    check_kernels(kernels)
    check_gather_dtype(gather_dtype)
    run: _Run | None = None
    if kernels == "reference":
        if layout is not None or schedule is not None or gather_dtype is not None or donate:
            raise ValueError(
                "kernels = 'reference' is for one process, no schedule, no gather_dtype and no donation: transforms "
                "have rules for those"
            )
        ranks = _ONE_PROCESS
    else:
        sharding = None if layout is None else make_sharding(config, layout, gather_dtype, reduce_dtype)
        chain = make_chain(config, "fused", None if sharding is None else sharding.expert_parallel, expert_parts)
        schedule = _checked(chain, sharding, schedule, accumulate, donate)
        run = _by_schedule(chain, config, sharding, schedule, slabs, copies, gather_dtype)
        ranks = _ONE_PROCESS_FUSED if layout is None else _ranks_of(layout)
    differentiate = _plainly(config) if run is None else _at_once(run)
    layers = LayerUpdates(optimizer, config) if schedule is not None and schedule.homes else None

    def judge(sums: _Sums) -> Verdict:
        loss, metrics = ranks.add((sums.loss, sums.metrics))
        with trace_range("gradient norm"):
            norm = ranks.norm(sums.gradient)
        return Verdict(metrics, norm, torch.isfinite(loss) & torch.isfinite(norm))

    def at_once(state: TrainState, parts: list[Microbatch]) -> tuple[TrainState, Verdict]:
        sums = differentiate(state.params, parts)
        verdict = judge(sums)
        choose = _chooser(verdict.finite)
        with trace_range("optimizer"):
            updates, opt_state = optimizer.update(sums.gradient, state.opt_state, state.params)
            del sums  # the gradient's memory is enough for the new parameters
            params = apply_updates(state.params, updates, foreach=kernels == "fused")
        balance = update_balance(state.balance, verdict.metrics.counts, config)
        return choose(TrainState(state.step, params, opt_state, balance), state), verdict

    def by_layers(
        state: TrainState, parts: list[Microbatch], updates: StepUpdates, run: _Run
    ) -> tuple[TrainState, Verdict]:
        run(state.params, parts, updates)
        params, opt_state = updates.results()
        verdict = updates.verdict
        balance = update_balance(state.balance, verdict.metrics.counts, config)
        # The verdict is known by now.
        balance = _chooser(verdict.finite)(balance, state.balance)
        return TrainState(state.step, params, opt_state, balance), verdict

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        if kernels == "fused" and (inside_transform() or _requires_grad(state)):
            raise NotImplementedError(
                "the train step was called inside a torch.func transform, or on a state that requires a gradient; make "
                "it with kernels='reference', and its optimizer with foreach=False"
            )
        check_batch(batch, config)
        given = state
        state = local_parts(given)
        totals = Totals(*ranks.add(count_totals(batch)))
        parts = [Microbatch(part, state.balance, totals) for part in microbatches(batch, accumulate)]
        updates = None
        try:
            if layers is None or schedule is None or run is None:
                kept, verdict = at_once(state, parts)
            else:
                updates = StepUpdates(
                    layers,
                    state.params,
                    state.opt_state,
                    schedule.homes,
                    lambda done: judge(_summed(done, parts)),
                    donate,
                    copies,
                )
                kept, verdict = by_layers(state, parts, updates, run)
            kept = kept._replace(step=state.step + 1)
            kept = from_local_parts(renewed(kept) if donate else kept, given)
        finally:
            # From the first update on the old state may be overwritten, even if the step fails.
            if donate and updates is not None and updates.begun:
                discard(given)
        metrics = verdict.metrics
        load = metrics.counts.to(torch.float32)
        return kept, StepMetrics(
            loss=metrics.loss,
            aux_loss=metrics.aux_loss,
            z_loss=metrics.z_loss,
            grad_norm=verdict.norm,
            finite=verdict.finite,
            tokens=totals.tokens,
            load_max_over_mean=load.amax(-1) / load.mean(-1).clamp(min=torch.finfo(load.dtype).tiny),
            load_idle=(load == 0).to(torch.float32).mean(-1),
            # Tensors of their own: those of the state may be donated to the next step.
            learning_rates=renewed(learning_rates(kept.opt_state)),
        )

    return step


_Differentiate: TypeAlias = Callable[[Params, list[Microbatch]], _Sums]


def _plainly(config: MoEConfig) -> _Differentiate:
    """By differentiating ``loss_fn``, which transforms can see through."""

    def differentiate(params: Params, parts: list[Microbatch]) -> _Sums:
        def sums(part: Microbatch) -> _Sums:
            def loss(params: Params) -> tuple[Tensor, Metrics]:
                return loss_fn(params, part.balance, part.batch, config, totals=part.totals, kernels="reference")

            return _Sums(*value_and_grad(loss, params))

        # Every part is a sum already divided by the totals of the whole step: they add.
        return functools.reduce(
            lambda total, part: pytree.tree_map(torch.add, total, sums(part)), parts[1:], sums(parts[0])
        )

    return differentiate


def _checked(
    chain: Chain, sharding: Sharding | None, schedule: Schedule | None, accumulate: int, donate: bool
) -> Schedule:
    """The schedule, or the default one."""
    if schedule is None:
        gathers = None if sharding is None else Gathers(sharding.layers.sizes)
        updates = Updates() if donate else None
        schedule = make_schedule(chain, microbatches=accumulate, gathers=gathers, updates=updates)
    if schedule.microbatches != accumulate:
        raise ValueError(f"accumulate = {accumulate}; the schedule is for {schedule.microbatches} microbatches")
    verify(schedule, chain)
    if donate and not schedule.homes:
        raise ValueError("donate = True: the schedule has no updates; make it with updates=memory.Updates()")
    return schedule


_Run: TypeAlias = Callable[[Params, list[Microbatch], StepUpdates | None], Execution]


def _by_schedule(
    chain: Chain,
    config: MoEConfig,
    sharding: Sharding | None,
    schedule: Schedule,
    slabs: Mapping[str, int] | None,
    copies: Copies | None,
    gather_dtype: torch.dtype | None,
) -> _Run:
    """By running a schedule."""
    if sharding is not None:
        sharding.layers.reserve(schedule)

    def run(params: Params, parts: list[Microbatch], updates: StepUpdates | None) -> Execution:
        if sharding is None:
            store: Store = ResidentStore(by_layer(as_gathered(params, config, gather_dtype)))
        else:
            store = sharding.layers.store(by_layer(params))
        return execute(schedule, chain, store, parts, slabs=slabs, copies=copies, updater=updates)

    return run


def _at_once(run: _Run) -> _Differentiate:
    """By a schedule without updates."""
    return lambda params, parts: _summed(run(params, parts, None), parts)


def _summed(done: Execution, parts: list[Microbatch]) -> _Sums:
    """What a schedule computed, over its microbatches."""
    metrics = [collect_metrics(of_part, parts[0].totals, parts[0].balance) for of_part in done.metrics]
    summed = functools.reduce(lambda total, part: pytree.tree_map(torch.add, total, part), metrics)
    return _Sums(done.loss, summed, from_layers(done.gradients))


class _Ranks(NamedTuple):
    """How the ranks of a step come to one value."""

    add: Callable[[Any], Any]  # a tree of scalars and counts, summed over the ranks
    norm: Callable[[Params], Tensor]  # of a gradient, all of its elements counted once


_ONE_PROCESS = _Ranks(lambda tree: tree, functools.partial(global_norm, foreach=False))
_ONE_PROCESS_FUSED = _Ranks(lambda tree: tree, global_norm)


def _ranks_of(layout: Layout) -> _Ranks:
    group = axis_group(layout.mesh, *(layout.mesh.mesh_dim_names or ()))

    def add(tree: Any) -> Any:
        leaves, spec = pytree.tree_flatten(tree)
        # One message: in float64 counts are exact up to 2^53.
        flat = all_reduce(torch.cat([leaf.reshape(-1).to(torch.float64) for leaf in leaves]), group)
        parts = flat.split([leaf.numel() for leaf in leaves])
        summed = [part.view(leaf.shape).to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return pytree.tree_unflatten(summed, spec)

    return _Ranks(add, lambda gradient: sharded_norm(gradient, layout))


def _requires_grad(tree: Any) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in _tensors(tree))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _chooser(condition: Tensor) -> Callable[[Any, Any], Any]:
    """``choose(new, old)``: ``new`` where ``condition`` holds, else ``old``.

    A device is asked for the condition now and waited for when something is chosen: what it was given in between, the
    optimizer's update, it computes while the host goes on. To choose on the device would write the whole state again.
    """
    if inside_transform():
        return lambda new, old: pytree.tree_map(lambda a, b: torch.where(condition.to(a.device), a, b), new, old)
    holds = _on_host(condition)
    return lambda new, old: new if holds() else old


def _on_host(condition: Tensor) -> Callable[[], bool]:
    """The value of a bool [] for the host, which waits for it, and for no later work of the device, when it calls."""
    if not condition.is_cuda:
        return lambda: bool(condition)
    here = torch.empty((), dtype=torch.bool, pin_memory=True)
    here.copy_(condition, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def value() -> bool:
        arrived.synchronize()
        return bool(here)

    return value
