"""QK-Clip on the model (MuonClip, arXiv 2507.20534): its largest attention logits, and parameters that bound them.

>>> maxima = attention_maxima(params, balance, batch, config)
>>> params = clip_attention(params, maxima, tau=100.0, config=config)
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import optim
from .attention import attention_half, document_starts, make_positions, project
from .config import MoEConfig
from .model import Batch, check_batch, embed, feed_forward_half, valid_tokens
from .norm import rms_norm
from .parameters import Params, declare


def attention_maxima(params: Params, balance: Tensor, batch: Batch, config: MoEConfig, *, block: int = 512) -> Tensor:
    """The largest attention logit of every head over the pairs of a batch that attend, without a score matrix.

    Padding is left to itself: as its own document it may hold the maximum, as in attention it is computed.

    Args:
      params: the parameter tree.
      balance: fp32 [moe_layers, experts].
      batch: see ``Batch``.
      config: the model.
      block: queries and keys whose logits exist at one time.

    Returns:
      fp32 [layers, heads], without gradient.
    """
    check_batch(batch, config)
    tokens, segment_ids, valid = batch["tokens"], batch.get("segment_ids"), valid_tokens(batch)
    documents = None if segment_ids is None else document_starts(segment_ids)
    maxima = []
    with torch.no_grad():
        x = embed(params, tokens, config)
        positions = make_positions(tokens.shape[1], segment_ids, config, x)
        for index, layer in enumerate(params["layers"]):
            normed = rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
            q, k, _ = project(layer["attention"], normed, positions.cos, positions.sin, config)
            maxima.append(optim.max_attention_logits(q, k, segment_ids=documents, block=block))
            x = attention_half(layer, x, positions, config).x
            bias = balance[index - config.first_k_dense_replace] if config.is_moe_layer(index) else None
            x = feed_forward_half(layer, bias, x, valid, config).x
    return torch.stack(maxima)


def clip_attention(params: Params, maxima: Tensor, tau: float, config: MoEConfig) -> Params:
    """Parameters whose heads' logits are smaller by ``tau / maximum`` where the maximum exceeds ``tau``.

    Args:
      params: the parameter tree; not changed.
      maxima: fp32 [layers, heads], of ``attention_maxima``.
      tau: the bound, above 0.
      config: the model.

    Raises:
      ValueError: ``use_qk_norm``, which undoes any scale of queries and keys; ``clip_qkv``, which undoes some;
        maxima of another shape; ``tau`` not above 0.
    """
    if config.use_qk_norm:
        raise ValueError("clip_attention: use_qk_norm = True normalises queries and keys, so a scale has no effect")
    if config.clip_qkv is not None:
        raise ValueError(f"clip_attention: clip_qkv = {config.clip_qkv} hides how large queries and keys are")
    shape = (config.num_hidden_layers, config.num_attention_heads)
    if maxima.shape != shape:
        raise ValueError(f"clip_attention: maxima have shape {tuple(maxima.shape)}; [layers, heads] is {shape}")
    clip = optim.qk_clip(tau)
    layers = []
    for layer, declared, maximum in zip(params["layers"], declare(config)["layers"], maxima, strict=True):
        blocks = declared["attention"]["qkv"].blocks
        fused = {name: layer["attention"][name] for name in ("qkv", "qkv_bias") if name in layer["attention"]}
        parts = {name: leaf.split(blocks, dim=-1) for name, leaf in fused.items()}
        queries, keys = clip(
            {name: q for name, (q, _, _) in parts.items()},
            {name: k for name, (_, k, _) in parts.items()},
            dict.fromkeys(parts, maximum),
        )
        joined = {name: torch.cat([queries[name], keys[name], v], dim=-1) for name, (_, _, v) in parts.items()}
        layers.append({**layer, "attention": {**layer["attention"], **joined}})
    return {**params, "layers": tuple(layers)}
