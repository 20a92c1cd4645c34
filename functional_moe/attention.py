"""The attention half of a layer: rotary positions, grouped queries, causal and document masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from .config import MoEConfig
from .kernels import Kernels, first_order_kernel, first_order_reverse
from .norm import rms_norm
from .parameters import Params
from .products import matmul


class Positions(NamedTuple):
    """What attention knows of the places of tokens, made once per batch and shared by all layers."""

    cos: Tensor  # [1 | batch, seq, rotary_dim / 2], fp32 or better
    sin: Tensor  # like cos
    mask: Tensor | None  # [batch, 1, seq, seq], True where a query may look; None: causal and nothing else


class Projected(NamedTuple):
    """Queries, keys and values, rotated and normalised."""

    q: Tensor  # [batch, heads, seq, head_dim]
    k: Tensor  # [batch, kv_heads, seq, head_dim]
    v: Tensor  # [batch, kv_heads, seq, head_dim]


def rotary_tables(positions: Tensor, config: MoEConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles (arXiv 2104.09864).

    The angles are made in fp64: in bf16, and for long sequences in fp32, they lose the position
    (transformers PR 29285).

    Args:
      positions: int64 ``[..., seq]``.
      config: gives ``rotary_dim`` and ``rope_theta``.
      dtype: of the result; at least fp32.

    Returns:
      cos, sin: ``[..., seq, rotary_dim / 2]``.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = config.rope_theta ** (-exponents / config.rotary_dim)
    angles = positions[..., None].to(torch.float64) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def document_starts(segment_ids: Tensor) -> Tensor:
    """Where each token's document begins: int64 [batch, seq].

    Documents are runs of one number: two that happen to carry the same one (1, 2, 1) have different starts.
    """
    first = torch.ones_like(segment_ids[:, :1], dtype=torch.bool)
    is_start = torch.cat([first, segment_ids[:, 1:] != segment_ids[:, :-1]], dim=1)
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    return torch.cummax(torch.where(is_start, index, 0), dim=1).values


def make_positions(seq: int, segment_ids: Tensor | None, config: MoEConfig, like: Tensor) -> Positions:
    """Positions and mask of a batch.

    Args:
      seq: its length.
      segment_ids: int ``[batch, seq]``, one number per packed document; equal neighbours belong together,
        positions restart where the number changes, and no token sees another document. ``None``: each row is one
        document.
      config: the model.
      like: a tensor whose device is used, and whose dtype the tables have at least.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    index = torch.arange(seq, device=like.device)
    if segment_ids is None:
        cos, sin = rotary_tables(index[None], config, dtype)
        return Positions(cos, sin, None)
    start_of = document_starts(segment_ids)
    cos, sin = rotary_tables(index - start_of, config, dtype)
    same = start_of[:, :, None] == start_of[:, None, :]
    causal = index[:, None] >= index[None, :]
    return Positions(cos, sin, (same & causal)[:, None])


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    return x[..., :half], x[..., half : 2 * half]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    # The tables keep their precision: bf16 cosines are off by 4e-3.
    wide = x.to(cos.dtype)
    out = wide.clone() if x.shape[-1] > 2 * cos.shape[-1] else torch.empty_like(wide)
    (first, second), (out_first, out_second) = _halves(wide, cos.shape[-1]), _halves(out, cos.shape[-1])
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return (out.to(x.dtype),)


_fused_rotate = first_order_kernel(
    _rotate, lambda cotangent, x, cos, sin: _rotate(cotangent.contiguous(), cos, -sin), differentiable=1
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels = "fused") -> Tensor:
    """Rotates the first ``2 * cos.shape[-1]`` entries of every head, pairing entry i with i + half of them.

    Args:
      x: ``[batch, seq, heads, head_dim]``.
      cos, sin: ``[1 | batch, seq, rotary_dim / 2]``.
      kernels: see ``kernels``.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    if kernels == "fused":
        return _fused_rotate(x, cos, sin)
    first, second = _halves(x, cos.shape[-1])
    rest = x[..., 2 * cos.shape[-1] :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def project(
    params: Params, x: Tensor, cos: Tensor, sin: Tensor, config: MoEConfig, kernels: Kernels = "fused"
) -> Projected:
    """Queries, keys and values of normalised tokens ``x``: [batch, seq, hidden].

    One product makes all three, and queries and keys are normalised and rotated together.
    """
    y = matmul(x, params["qkv"], kernels)
    if config.attention_bias:
        y = y + params["qkv_bias"].to(x.dtype)
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    heads = rearrange(y, "batch seq (heads dim) -> batch seq heads dim", dim=config.attention_head_dim)
    to_rotate, v = heads.split([queries + keys, keys], dim=2)
    if config.qk_norm_over_heads:
        parts = zip(to_rotate.split([queries, keys], dim=2), (params["q_norm"], params["k_norm"]), strict=True)
        normed = [rms_norm(x.flatten(2), scale, config.rms_norm_eps, kernels) for x, scale in parts]
        to_rotate = torch.cat(normed, dim=-1).unflatten(-1, (queries + keys, -1))
    elif config.use_qk_norm:
        scale = torch.cat([params["q_norm"].expand(queries, -1), params["k_norm"].expand(keys, -1)])
        to_rotate = rms_norm(to_rotate, scale, config.rms_norm_eps, kernels)
    if config.clip_qkv is not None:
        to_rotate, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (to_rotate, v))
    q, k = rotate(to_rotate, cos, sin, kernels).split([queries, keys], dim=2)
    return Projected(*(rearrange(part, "batch seq heads dim -> batch heads seq dim") for part in (q, k, v)))


def attend(projected: Projected, mask: Tensor | None, kernels: Kernels = "fused") -> Tensor:
    """Scaled dot-product attention.

    Args:
      projected: queries ``[batch, heads, queries, head_dim]``; keys and values ``[batch, kv_heads, keys, head_dim]``,
        each shared by ``heads / kv_heads`` neighbouring query heads (arXiv 2305.13245).
      mask: ``[batch, 1, queries, keys]``, True where a query may look; ``None``: causal, for as many queries as keys.
      kernels: ``"reference"`` writes the scores out, and has every transform's rule.

    Returns:
      ``[batch, queries, heads * head_dim]``.
    """
    q, k, v = projected
    if mask is None and q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries on {k.shape[2]} keys: say with a mask which of them are seen")
    if kernels == "fused":
        out = F.scaled_dot_product_attention(
            first_order_reverse(q),
            first_order_reverse(k),
            first_order_reverse(v),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        shared = q.shape[1] // k.shape[1]
        k = repeat(k, "batch heads seq dim -> batch (heads shared) seq dim", shared=shared)
        v = repeat(v, "batch heads seq dim -> batch (heads shared) seq dim", shared=shared)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = torch.where(mask, scores.to(torch.promote_types(q.dtype, torch.float32)), -torch.inf)
        out = torch.softmax(scores, dim=-1).to(q.dtype) @ v
    return rearrange(out, "batch heads seq dim -> batch seq (heads dim)")


def project_back(params: Params, attended: Tensor, config: MoEConfig, kernels: Kernels = "fused") -> Tensor:
    """The output projection of ``attended``: [batch, seq, heads * head_dim] to [batch, seq, hidden]."""
    out = matmul(attended, params["o"], kernels)
    return out + params["o_bias"].to(out.dtype) if config.attention_output_bias else out


def attention_half(
    params: Params, x: Tensor, positions: Positions, config: MoEConfig, kernels: Kernels = "fused"
) -> Tensor:
    """The segment ``x + attention(norm(x))`` of one layer.

    Args:
      params: one layer's tree.
      x: ``[batch, seq, hidden]``.
      positions: of the batch.
    """
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps, kernels)
    projected = project(params["attention"], normed, positions.cos, positions.sin, config, kernels)
    return x + project_back(params["attention"], attend(projected, positions.mask, kernels), config, kernels)
