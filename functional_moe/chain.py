"""The model as a chain of segments (``memory.Chain``), and its loss: what every schedule must equal.

The segments are ``embed``, ``layers.I.attention`` and ``layers.I.feed_forward`` of each layer, and ``head``; each reads
one layer's tree (``by_layer``), the head also the embedding's where the two are tied. ``loss_fn`` runs them one after
the other, and is what ``torch.func.grad`` differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import Positions, attention_half, make_positions
from .config import MoEConfig
from .cross_entropy import summed_cross_entropy
from .kernels import Kernels, check_kernels
from .memory import Chain, Result, Segment, output_is_needed, run_chain
from .model import (
    Batch,
    Metrics,
    Totals,
    check_balance,
    check_batch,
    count_totals,
    embed,
    feed_forward_half,
    head_norm,
    head_weight,
    predicted_targets,
    valid_tokens,
)
from .parallel import ExpertParallel
from .parameters import Params
from .routing import RouterStats


class Microbatch(NamedTuple):
    """All that the chain reads besides parameters."""

    batch: Batch
    balance: Tensor  # fp32 [moe_layers, experts]
    totals: Totals  # of the whole step


class Context(NamedTuple):
    """What the segments need of a microbatch."""

    tokens: Tensor  # int [batch, seq]
    targets: Tensor  # int64 [batch * seq]; IGNORE_INDEX where nothing is predicted
    valid: Tensor  # bool [batch, seq]
    positions: Positions
    balance: Tensor
    targets_total: Tensor  # int64 []; at least 1
    tokens_total: Tensor  # int64 []; at least 1


def by_layer(tree: Params) -> dict[str, Any]:
    """A tree like the parameters, by the names of the chain's layers: ``embed``, ``layers.I``, ``head``."""
    layers = {f"layers.{index}": layer for index, layer in enumerate(tree["layers"])}
    head = {name: tree[name] for name in ("final_norm", "head") if name in tree}
    return {"embed": {"embedding": tree["embedding"]}, **layers, "head": head}


def from_layers(layers: dict[str, Any]) -> Params:
    """The inverse of ``by_layer``."""
    inner = tuple(layers[f"layers.{index}"] for index in range(len(layers) - 2))
    return {**layers["embed"], "layers": inner, **layers["head"]}


def make_chain(
    config: MoEConfig,
    kernels: Kernels = "fused",
    expert_parallel: ExpertParallel | None = None,
    expert_parts: int = 1,
) -> Chain:
    """The chain of ``config``: from a :class:`Microbatch` to the training loss.

    Args:
      config: the model.
      kernels: ``"fused"``, or ``"reference"`` for transforms other than one reverse-mode derivative.
      expert_parallel: how the experts are spread over ranks; ``None`` where all are here.
    """
    check_kernels(kernels)
    segments = [Segment("embed", ("embed",), _embed(config), "embed", unread=("embed",))]
    for index in range(config.num_hidden_layers):
        name = f"layers.{index}"
        attention = _attention(config, name, kernels)
        segments.append(Segment(f"{name}.attention", (name,), attention, "attention", ("core",)))
        if config.is_moe_layer(index):
            row = index - config.first_k_dense_replace
            function = _experts(config, name, row, kernels, expert_parallel, expert_parts)
            moe = Segment(f"{name}.feed_forward", (name,), function, "experts", ("decision",), ("decision",))
            segments.append(moe)
        else:
            segments.append(Segment(f"{name}.feed_forward", (name,), _dense(config, name, kernels), "dense"))
    layers = ("head", "embed") if config.tie_word_embeddings else ("head",)
    segments.append(Segment("head", layers, _head(config, kernels), "head"))

    def prepare(microbatch: Microbatch) -> Context:
        batch, balance, totals = microbatch
        tokens = batch["tokens"]
        like = torch.empty(0, dtype=config.dtype, device=tokens.device)
        return Context(
            tokens=tokens,
            targets=predicted_targets(batch).reshape(-1),
            valid=valid_tokens(batch),
            positions=make_positions(tokens.shape[1], batch.get("segment_ids"), config, like),
            balance=balance,
            targets_total=totals.targets.clamp(min=1),
            tokens_total=totals.tokens.clamp(min=1),
        )

    return Chain(tuple(segments), prepare)


def _embed(config: MoEConfig) -> Any:
    def function(parameters: Any, x: None, context: Context, residuals: Any) -> Result:
        return Result(embed(parameters["embed"], context.tokens, config))

    return function


def _attention(config: MoEConfig, layer: str, kernels: Kernels) -> Any:
    def function(parameters: Any, x: Tensor, context: Context, residuals: Any) -> Result:
        half = attention_half(
            parameters[layer], x, context.positions, config, kernels, residuals.get("core"), output_is_needed()
        )
        return Result(half.x, residuals={} if half.core is None else {"core": half.core})

    return function


def _dense(config: MoEConfig, layer: str, kernels: Kernels) -> Any:
    def function(parameters: Any, x: Tensor, context: Context, residuals: Any) -> Result:
        half = feed_forward_half(parameters[layer], None, x, context.valid, config, kernels, needed=output_is_needed())
        return Result(half.x)

    return function


def _experts(
    config: MoEConfig,
    layer: str,
    row: int,
    kernels: Kernels,
    expert_parallel: ExpertParallel | None,
    expert_parts: int,
) -> Any:
    def function(parameters: Any, x: Tensor, context: Context, residuals: Any) -> Result:
        half = feed_forward_half(
            parameters[layer],
            context.balance[row],
            x,
            context.valid,
            config,
            kernels,
            expert_parallel,
            residuals.get("decision"),
            output_is_needed(),
            expert_parts,
        )
        stats = half.stats
        if stats is None:
            raise ValueError(f"{layer} routes no tokens")
        loss = None
        if config.router_aux_loss_coef:
            loss = config.router_aux_loss_coef * stats.aux_loss / context.tokens_total
        if config.router_z_loss_coef:
            z_loss = config.router_z_loss_coef * stats.z_loss / context.tokens_total
            loss = z_loss if loss is None else loss + z_loss
        detached = RouterStats(stats.aux_loss.detach(), stats.z_loss.detach(), stats.counts)
        return Result(half.x, loss, {"decision": half.decision}, detached)

    return function


def _head(config: MoEConfig, kernels: Kernels) -> Any:
    def function(parameters: Any, x: Tensor, context: Context, residuals: Any) -> Result:
        tree = {**parameters["head"], **parameters.get("embed", {})}
        loss = summed_cross_entropy(
            head_norm(tree, x, config, kernels).flatten(0, 1),
            head_weight(tree, config),
            context.targets,
            chunk=config.loss_chunk_size,
            kernels=kernels,
        )
        loss = loss / context.targets_total
        return Result(None, loss, metrics=loss.detach())

    return function


def collect_metrics(metrics: Sequence[Any], totals: Totals, balance: Tensor) -> Metrics:
    """What the segments of one microbatch report, as one value."""
    stats = [one for one in metrics if isinstance(one, RouterStats)]
    cross_entropy: Tensor = metrics[-1]
    tokens, layers = totals.tokens.clamp(min=1), max(1, len(stats))
    if not stats:
        none = torch.zeros_like(cross_entropy)
        return Metrics(cross_entropy, none, none, torch.zeros_like(balance, dtype=torch.int64))
    stacked = RouterStats(*map(torch.stack, zip(*stats, strict=True)))
    return Metrics(
        loss=cross_entropy,
        aux_loss=stacked.aux_loss.sum() / tokens / layers,
        z_loss=stacked.z_loss.sum() / tokens / layers,
        counts=stacked.counts,
    )


def loss_fn(
    params: Params,
    balance: Tensor,
    batch: Batch,
    config: MoEConfig,
    *,
    totals: Totals | None = None,
    kernels: Kernels = "fused",
    expert_parallel: ExpertParallel | None = None,
) -> tuple[Tensor, Metrics]:
    """The training loss, a pure function of everything it depends on.

    Cross-entropy summed over the predicted tokens, plus the weighted balance and z losses of each MoE layer summed
    over its tokens, each divided by ``totals``. So the parts of a step add up: over ranks and over microbatches the
    losses and the gradients of the parts are summed, and nothing is divided again.

    Args:
      params: the parameter tree.
      balance: fp32 [moe_layers, experts].
      batch: see ``Batch``.
      config: the model.
      totals: the divisors of the whole step; by default ``batch`` is the whole step.
      kernels: ``"fused"``, or ``"reference"`` for transforms other than one reverse-mode derivative.
      expert_parallel: how the experts are spread over ranks, each of which calls this with its own rows, ``totals`` of
        the whole step, and of the expert stacks the experts that it holds; ``None`` where all are here.

    Returns:
      The loss (a scalar in fp32 or better) and its ``Metrics``.

    Raises:
      ValueError: for a batch of other keys, shapes or dtypes, or a balance of another shape.
      NotImplementedError: from the fused kernels, under a transform they have no rule for; for expert parallelism with
        the reference kernels.
    """
    check_batch(batch, config)
    check_balance(balance, config)
    totals = count_totals(batch) if totals is None else totals
    chain = make_chain(config, kernels, expert_parallel)
    loss, metrics = run_chain(chain, by_layer(params), Microbatch(batch, balance, totals))
    return loss, collect_metrics(metrics, totals, balance)


def logits(params: Params, balance: Tensor, batch: Batch, config: MoEConfig, kernels: Kernels = "fused") -> Tensor:
    """fp32 logits of every token, [batch, seq, vocab]: for looking at, not for training."""
    chain, layers = make_chain(config, kernels), by_layer(params)
    context = chain.prepare(Microbatch(batch, balance, count_totals(batch)))
    x: Tensor | None = None
    for segment in chain.segments[:-1]:
        x = segment.function({name: layers[name] for name in segment.layers}, x, context, {}).output
    if x is None:
        raise ValueError("the chain has no output")
    out = head_norm(params, x, config, kernels) @ head_weight(params, config)
    return out.to(torch.promote_types(x.dtype, torch.float32))
