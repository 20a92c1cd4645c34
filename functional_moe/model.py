"""What the model is made of: its batches, and the parts that ``chain`` puts one after the other.

Each part is a pure function over one slice of the parameters with one tensor in and one out: ``embed``, each layer's
``attention_half`` (in ``attention``) and ``feed_forward_half``, and ``head_norm`` with the loss after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import MoEConfig
from .cross_entropy import IGNORE_INDEX
from .dispatch import Decision, decide
from .experts import feed_forward, routed_experts
from .kernels import Kernels
from .norm import rms_norm
from .parallel import ExpertParallel
from .parameters import Params
from .products import matmul
from .routing import RouterStats, route, router_stats

Batch = Mapping[str, Tensor]
"""``tokens`` and ``targets``, and optionally ``segment_ids``: int64 or int32 [batch, seq].

A target of -100 is not predicted. ``segment_ids`` number the documents packed into a row, 0 being padding, whose
targets are not predicted either; without them each row is one document without padding.
"""

_BATCH_KEYS = frozenset({"tokens", "targets", "segment_ids"})


class Totals(NamedTuple):
    """What the losses of a step are divided by: counted once, over all ranks and microbatches."""

    targets: Tensor  # int64 []; targets that are predicted
    tokens: Tensor  # int64 []; tokens that are not padding


class Metrics(NamedTuple):
    """What ``loss_fn`` reports, without gradient: differentiate the loss it returns beside this.

    Each field is a sum that adds over the parts of a step to the step's own value.
    """

    loss: Tensor  # [] nats per predicted token, cross-entropy alone
    aux_loss: Tensor  # [] balance loss, mean over MoE layers; 1.0 when uniform
    z_loss: Tensor  # [] squared log-sum-exp of the router logits, mean over MoE layers
    counts: Tensor  # int64 [moe_layers, experts]; tokens that chose each expert


class FeedForwardHalf(NamedTuple):
    """What a layer's second half hands out. The last two are ``None`` in a dense layer."""

    x: Tensor  # [batch, seq, hidden]; the residual stream
    stats: RouterStats | None  # the sums for the router's losses
    decision: Decision | None  # a residual: a replay takes it back and decides nothing


def check_batch(batch: Batch, config: MoEConfig) -> None:
    """Raises ``ValueError`` for a batch whose keys, shapes or dtypes are not those of ``Batch``."""
    if unknown := sorted(set(batch) - _BATCH_KEYS):
        raise ValueError(f"batch: unknown keys {unknown}; it holds {sorted(_BATCH_KEYS)}")
    if missing := sorted({"tokens", "targets"} - set(batch)):
        raise ValueError(f"batch: missing keys {missing}")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"batch[{key!r}] is of type {type(value).__name__}; it must be a torch.Tensor")
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise ValueError(f"batch['tokens'] has shape {tuple(shape)}; it must be [batch, seq]")
    for key, value in batch.items():
        if value.shape != shape:
            raise ValueError(f"batch[{key!r}] has shape {tuple(value.shape)}, tokens have {tuple(shape)}")
        if value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"batch[{key!r}] has dtype {value.dtype}; it must be int64 or int32")
    if shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"batch: sequences of {shape[1]} tokens exceed max_position_embeddings = {config.max_position_embeddings}"
        )


def check_balance(balance: Tensor, config: MoEConfig) -> None:
    """Raises ``ValueError`` unless ``balance`` has a row for each MoE layer and a column for each expert."""
    shape = (config.num_moe_layers, config.num_experts)
    if balance.shape != shape:
        raise ValueError(f"balance has shape {tuple(balance.shape)}; [moe_layers, experts] is {shape}")


def valid_tokens(batch: Batch) -> Tensor:
    """Bool [batch, seq]: the tokens that are not padding."""
    if "segment_ids" in batch:
        return batch["segment_ids"] != 0
    return torch.ones_like(batch["tokens"], dtype=torch.bool)


def predicted_targets(batch: Batch) -> Tensor:
    """int64 [batch, seq]: the targets, ``IGNORE_INDEX`` at padding whatever the batch holds there."""
    return torch.where(valid_tokens(batch), batch["targets"].to(torch.int64), IGNORE_INDEX)


def count_totals(batch: Batch) -> Totals:
    """The divisors of a batch that is a whole step."""
    return Totals((predicted_targets(batch) != IGNORE_INDEX).sum(), valid_tokens(batch).sum())


def embed(params: Params, tokens: Tensor, config: MoEConfig) -> Tensor:
    """The segment from tokens [batch, seq] to the residual stream [batch, seq, hidden]."""
    return F.embedding(tokens, params["embedding"]).to(config.dtype)


def feed_forward_half(
    params: Params,
    bias: Tensor | None,
    x: Tensor,
    valid: Tensor,
    config: MoEConfig,
    kernels: Kernels = "fused",
    expert_parallel: ExpertParallel | None = None,
    decision: Decision | None = None,
    needed: bool = True,
    expert_parts: int = 1,
) -> FeedForwardHalf:
    """The segment ``x + experts(norm(x))`` of one layer, or its dense form.

    Args:
      params: one layer's tree; with expert parallelism, the experts of this rank.
      bias: fp32 [experts], the layer's row of ``balance``; ``None`` in a dense layer.
      x: [batch, seq, hidden].
      valid: bool [batch, seq].
      config: the model.
      kernels: see ``kernels``.
      expert_parallel: how the experts are spread over ranks; ``None`` where all are here.
      decision: what an earlier call decided of the same tokens: it is followed, and returned again.
      needed: whether the values of ``x`` are; a replay for their derivative alone does without the last products.
      expert_parts: in how many parts the tokens go through their experts, see ``decide``.
    """
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps, kernels)
    if bias is None:
        return FeedForwardHalf(x + feed_forward(params["mlp"], normed, kernels, needed), None, None)
    tokens = normed.flatten(0, 1)
    routing = route(tokens, params["router"], bias, config, kernels, None if decision is None else decision.experts)
    if decision is None:
        decision = decide(routing.experts, config.num_experts, expert_parallel, expert_parts)
    out = routed_experts(params["experts"], tokens, decision, routing.weights, kernels, expert_parallel, needed)
    if config.num_shared_experts:
        # A gate's derivative wants what it is multiplied with.
        shared = feed_forward(params["shared"], tokens, kernels, needed or config.shared_expert_gate)
        if config.shared_expert_gate:
            shared = shared * torch.sigmoid(matmul(tokens, params["shared_gate"], kernels))
        out = out + shared
    return FeedForwardHalf(x + out.view_as(x), router_stats(routing, valid, config), decision)


def head_norm(params: Params, x: Tensor, config: MoEConfig, kernels: Kernels = "fused") -> Tensor:
    """The final normalisation, [batch, seq, hidden]."""
    return rms_norm(x, params["final_norm"], config.rms_norm_eps, kernels)


def head_weight(params: Params, config: MoEConfig) -> Tensor:
    """The output projection [hidden, vocab] in the compute dtype: its own, or the embedding's transpose when tied."""
    weight: Tensor = params["embedding"].t() if config.tie_word_embeddings else params["head"]
    return weight.to(config.dtype)


def init_balance(config: MoEConfig, device: torch.device | str = "cpu") -> Tensor:
    """The routers' selection bias before the first step: zeros, fp32 [moe_layers, experts]."""
    return torch.zeros(config.num_moe_layers, config.num_experts, device=device)
