"""The training step, ``(state, batch) -> (state, metrics)``, as one pure function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .chain import loss_fn
from .config import MoEConfig
from .gradient import value_and_grad, value_and_grad_once
from .kernels import Kernels, check_kernels, inside_transform
from .model import Batch, Metrics, check_batch, count_totals, init_balance
from .optim import GradientTransformation, apply_updates, global_norm, learning_rates
from .parameters import Params
from .routing import update_balance


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
    """The state before the first step."""
    balance = init_balance(config, params["embedding"].device)
    step = torch.zeros((), dtype=torch.int64, device=params["embedding"].device)
    return TrainState(step, params, optimizer.init(params), balance)


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


def make_train_step(
    config: MoEConfig,
    optimizer: GradientTransformation,
    *,
    accumulate: int = 1,
    kernels: Kernels = "fused",
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The step that trains ``config`` with ``optimizer``.

    The step counts the predicted tokens of the whole batch first, and every microbatch's losses are divided by
    that count, so gradients are sums and ``accumulate`` changes nothing but rounding and memory. The selection bias
    moves once, from the counts of the whole batch. A step whose loss or gradient norm is not finite leaves
    parameters, optimizer state and balance as they were, counts the batch as consumed, and reports ``finite = False``.

    Args:
      config: the model.
      optimizer: a gradient transformation over the parameter tree.
      accumulate: microbatches per step; must divide the rows of a batch.
      kernels: ``"reference"`` when the step itself is transformed (``vmap`` over learning rates, say).

    Returns:
      ``step(state, batch) -> (state, metrics)``; it changes neither argument.

    Raises:
      ValueError: for ``accumulate < 1`` or unknown kernels here; for a batch of other keys, shapes or dtypes, or
        of rows that ``accumulate`` does not divide, from the step.
      NotImplementedError: from the step, inside a transform with ``kernels="fused"``.
    """
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate = {accumulate!r}: must be an integer of at least 1")
    check_kernels(kernels)
    differentiate = value_and_grad_once if kernels == "fused" else value_and_grad

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        if kernels == "fused" and (inside_transform() or _requires_grad(state)):
            raise NotImplementedError(
                "the train step was called inside a torch.func transform, or on a state that requires a gradient; make "
                "it with kernels='reference', and its optimizer with foreach=False"
            )
        check_batch(batch, config)
        totals, parts = count_totals(batch), microbatches(batch, accumulate)

        def sums(part: Batch) -> tuple[Tensor, Metrics, Params]:
            return differentiate(
                lambda params: loss_fn(params, state.balance, part, config, totals=totals, kernels=kernels),
                state.params,
            )

        # Every part is a sum already divided by the totals of the whole step: they add.
        loss, metrics, gradient = functools.reduce(
            lambda total, part: pytree.tree_map(torch.add, total, sums(part)),
            parts[1:],
            sums(parts[0]),
        )

        grad_norm = global_norm(gradient, foreach=kernels == "fused")
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        advanced = TrainState(
            state.step,
            apply_updates(state.params, updates, foreach=kernels == "fused"),
            opt_state,
            update_balance(state.balance, metrics.counts, config),
        )
        kept = _choose(finite, advanced, state)
        load = metrics.counts.to(torch.float32)
        return kept._replace(step=state.step + 1), StepMetrics(
            loss=metrics.loss,
            aux_loss=metrics.aux_loss,
            z_loss=metrics.z_loss,
            grad_norm=grad_norm,
            finite=finite,
            tokens=totals.tokens,
            load_max_over_mean=load.amax(-1) / load.mean(-1).clamp(min=torch.finfo(load.dtype).tiny),
            load_idle=(load == 0).to(torch.float32).mean(-1),
            learning_rates=learning_rates(opt_state),
        )

    return step


def _requires_grad(tree: Any) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in _tensors(tree))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _choose(condition: Tensor, new: TrainState, old: TrainState) -> TrainState:
    """``new`` where ``condition`` holds, else ``old``."""
    if condition.device.type == "cpu" and not inside_transform():
        # Looking at a value costs nothing here; elsewhere it would make the host wait for the device.
        return new if bool(condition) else old
    # The optimizer's counts and rates may lie on the host: for them the device is waited for, once.
    return pytree.tree_map(  # type: ignore[no-any-return]
        lambda a, b: torch.where(condition.to(a.device), a, b), new, old
    )
