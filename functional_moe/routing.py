"""Which experts a token visits, with what weight, and how the load is kept even.

A routing decision is made once per token and layer. Its choice (``experts``) is discrete and carries no gradient;
its ``weights`` carry the gradient into the router. The selection bias (``balance``) moves the choice alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import MoEConfig
from .kernels import Kernels
from .products import matmul


class Routing(NamedTuple):
    """The decision for the tokens of one layer."""

    experts: Tensor  # int64 [tokens, top_k], distinct in each row
    weights: Tensor  # fp32 [tokens, top_k]
    logits: Tensor  # fp32 [tokens, experts]
    scores: Tensor  # fp32 [tokens, experts]


class RouterStats(NamedTuple):
    """Sums over tokens of one layer, or of several stacked; they add over microbatches and ranks."""

    aux_loss: Tensor  # fp32 []; the sum over rows of (tokens in the row x the row's balance loss)
    z_loss: Tensor  # fp32 []; the sum over tokens of logsumexp(logits)^2
    counts: Tensor  # int64 [experts]; how many tokens chose each expert


def select(scores: Tensor, bias: Tensor, config: MoEConfig) -> Tensor:
    """The experts of each token: the top-k of ``scores + bias``, within the best groups.

    With groups, a token may choose from ``topk_group`` of the ``n_group`` groups; a group's rank is the sum of its
    two best biased scores (arXiv 2412.19437). Groups out of the choice are excluded by -inf: a zero would win
    over a negative biased score (transformers 45440).

    Args:
      scores: fp32 ``[tokens, experts]``.
      bias: fp32 ``[experts]``.

    Returns:
      int64 ``[tokens, top_k]``, without gradient.
    """
    biased = scores.detach() + bias.detach()
    if config.n_group > 1:
        groups = biased.unflatten(-1, (config.n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        chosen = best.topk(config.topk_group, dim=-1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        biased = torch.where(allowed[..., None], groups, -torch.inf).flatten(-2)
    return biased.topk(config.num_experts_per_tok, dim=-1).indices


def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    config: MoEConfig,
    kernels: Kernels = "fused",
    experts: Tensor | None = None,
) -> Routing:
    """Routes normalised tokens, in fp32 whatever the compute dtype.

    Args:
      x: ``[tokens, hidden]``.
      router: ``[hidden, experts]``.
      bias: fp32 ``[experts]``, the selection bias; it never reaches a weight or a gradient.
      config: the model.
      kernels: see ``kernels``.
      experts: int64 ``[tokens, top_k]``, a choice made before, which a replay must not make again; then the bias does
        nothing, and the weights and their gradient are those of this choice.

    Raises:
      ValueError: for ``experts`` of another shape.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    logits = matmul(x.to(dtype), router, kernels)
    scores = torch.softmax(logits, dim=-1) if config.scoring_func == "softmax" else torch.sigmoid(logits)
    if experts is None:
        experts = select(scores, bias, config)
    elif experts.shape != (x.shape[0], config.num_experts_per_tok):
        raise ValueError(
            f"experts of shape {tuple(experts.shape)} for [tokens, top_k] = {(x.shape[0], config.num_experts_per_tok)}"
        )
    weights = scores.gather(-1, experts)
    if config.norm_topk_prob:
        # Sigmoid scores can all underflow to 0; the epsilon is DeepSeek-V3's.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * config.routed_scaling_factor, logits, scores)


def router_stats(routing: Routing, valid: Tensor, config: MoEConfig) -> RouterStats:
    """What a layer's routing adds to the losses and to the expert counts. Padding adds nothing.

    The balance loss of a row of n tokens is ``sum_e f_e P_e`` with ``f_e = experts / (top_k n) x (choices of e)`` and
    ``P_e`` the mean over the row of the scores, normalised per token when they are sigmoids. Uniform routing gives
    1. It is defined per row, and weighted by the row's tokens, so that no split of a batch over ranks or
    microbatches changes it.

    Args:
      routing: for ``tokens = batch * seq`` tokens.
      valid: bool ``[batch, seq]``, False at padding.
    """
    batch, seq = valid.shape
    dtype = routing.scores.dtype
    keep = valid.reshape(batch, seq, 1)
    choices = routing.experts.reshape(batch, seq * config.num_experts_per_tok)
    counted = keep.expand(batch, seq, config.num_experts_per_tok).reshape(choices.shape)
    counts = torch.zeros(batch, config.num_experts, dtype=torch.int64, device=choices.device)
    counts = counts.scatter_add(1, choices, counted.to(torch.int64))

    probabilities = routing.scores
    if config.scoring_func == "sigmoid":
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + 1e-20)
    mass = torch.where(keep, probabilities.reshape(batch, seq, config.num_experts), 0.0).sum(1)
    tokens = valid.sum(1, keepdim=True).clamp(min=1).to(dtype)
    share = counts.to(dtype) * (config.num_experts / config.num_experts_per_tok) / tokens
    aux_loss = (share * mass).sum()
    z_loss = torch.where(valid.reshape(-1), torch.logsumexp(routing.logits, dim=-1).square(), 0.0).sum()
    return RouterStats(aux_loss, z_loss, counts.sum(0))


def update_balance(balance: Tensor, counts: Tensor, config: MoEConfig) -> Tensor:
    """The selection bias after one optimizer step (arXiv 2408.15664).

    Each expert moves by ``balance_update_rate``: up when it got fewer tokens than the mean, down when more. With
    ``balance_centred`` the mean of a layer's moves is subtracted: counts [10, 1, 1, 0] give [-1.5, .5, .5, .5]
    instead of [-1, 1, 1, 1], times the rate.

    Args:
      balance: fp32 ``[moe_layers, experts]``.
      counts: int64 ``[moe_layers, experts]``, over the whole step: all ranks, all microbatches, each token once.
    """
    if config.balance_update_rate == 0:
        return balance
    # count < total / experts, in integers: exact at any size.
    move = torch.sign(counts.sum(-1, keepdim=True) - counts * counts.shape[-1]).to(balance.dtype)
    if config.balance_centred:
        move = move - move.mean(-1, keepdim=True)
    return balance + config.balance_update_rate * move
