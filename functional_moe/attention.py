"""The attention half of a layer: rotary positions, grouped queries, packed documents.

Attention is causal, and within documents. The core is flash attention (arXiv 2205.14135), whose backward needs the
output and the log-sum-exp of every query besides queries, keys and values: that pair, ``AttentionCore``, is handed
out, and with it a replay runs no attention forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor

from .config import MoEConfig
from .kernels import Kernels, first_order_kernel, first_order_kernel_with_residuals
from .norm import normalize, normalize_gradient, rms_norm
from .parameters import Params
from .products import matmul

_PIECE = 1 << 19
"""Elements of a piece that goes through several operations at a time: 2 MiB in fp32, the cache of two cores. Making
queries, keys and values of 8192 tokens, 6 heads of 64, and their gradient takes 4.7 ms so (5.7, 4.7, 4.4, 4.6 for
2^18 to 2^21; within a step 2^18 to 2^20 differ by less than 1%)."""


class Positions(NamedTuple):
    """What attention knows of the places of tokens, made once per batch and shared by all layers."""

    cos: Tensor  # [1 | batch, seq, rotary_dim / 2], fp32 or better
    sin: Tensor  # like cos
    starts: Tensor | None  # int64 [batch, seq], where each token's document begins; None: each row is one document


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
    """Positions and documents of a batch.

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
    starts = document_starts(segment_ids)
    cos, sin = rotary_tables(index - starts, config, dtype)
    return Positions(cos, sin, starts)


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


def _pieces(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and places of ``x``, [batch, seq, ...], about ``_PIECE`` elements at a time; on a device all at once.

    A fake tensor is one piece too: its pieces would cost the same.
    """
    batch, seq = x.shape[:2]
    rows, places = batch, seq
    if x.device.type == "cpu" and type(x) is Tensor:
        tokens = max(1, _PIECE // max(1, x[:1, :1].numel()))
        rows, places = max(1, tokens // max(1, seq)), min(seq, tokens)
    for row in range(0, batch, max(1, rows)):
        for place in range(0, seq, max(1, places)):
            yield slice(row, row + rows), slice(place, place + places)


def _spread(table: Tensor, batch: int, heads: int) -> Tensor:
    """A table that many rows share, written out for every head, so that loops over memory run on through the heads."""
    return table.expand(-1, -1, heads, -1).contiguous() if len(table) == 1 and batch > 2 else table


def _tables(cos: Tensor, sin: Tensor, rows: slice, places: slice) -> tuple[Tensor, Tensor]:
    rows = rows if len(cos) > 1 else slice(None)
    return cos[rows, places], sin[rows, places]


def _prepare(
    y: Tensor, scale: Tensor | None, cos: Tensor, sin: Tensor, keys: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [batch, seq, heads, head_dim], and the inverse norms of queries and keys.

    Values are a view of ``y``.
    """
    batch, seq, heads, dim = y.shape
    to_rotate, v = y.split([heads - keys, keys], dim=2)
    out = y.new_empty(batch, seq, heads - keys, dim)
    inverse = y.new_empty(batch, seq, 0 if scale is None else heads - keys, 1, dtype=cos.dtype)
    cos, sin = _spread(cos, batch, heads - keys), _spread(sin, batch, heads - keys)
    for at in _pieces(out):
        # Operations on a part of the heads run over short stretches of memory: one copy, and they do not.
        part = to_rotate[at].contiguous()
        if scale is not None:
            part, inverse[at] = normalize(part, scale, eps)
        out[at] = _rotate(part, *_tables(cos, sin, *at))[0]
    q, k = out.split([heads - 2 * keys, keys], dim=2)
    return q, k, v, inverse


def _prepare_gradient(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    y: Tensor,
    scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: int,
    eps: float,
    inverse: Tensor,
) -> tuple[Tensor, Tensor | None]:
    batch, _, heads, _ = y.shape
    to_rotate = y[:, :, : heads - keys]
    grad = torch.empty_like(y)
    grad_scale = None if scale is None else torch.zeros_like(scale)
    cos, sin = _spread(cos, batch, heads - keys), _spread(-sin, batch, heads - keys)
    for at in _pieces(to_rotate):
        grad_part, grad_of_v = grad[at].split([heads - keys, keys], dim=2)
        grad_of_v.copy_(grad_v[at])
        # Two copies use every core, as concatenation here does not.
        turned = y.new_empty(grad_part.shape)
        turned[:, :, : grad_q.shape[2]], turned[:, :, grad_q.shape[2] :] = grad_q[at], grad_k[at]
        (turned,) = _rotate(turned, *_tables(cos, sin, *at))
        if scale is not None and grad_scale is not None:
            turned, of_scale = normalize_gradient(turned, to_rotate[at].contiguous(), scale, inverse[at])
            grad_scale += of_scale
        grad_part.copy_(turned)
    return grad, grad_scale


_fused_prepare = first_order_kernel_with_residuals(_prepare, _prepare_gradient, differentiable=2, results=3)


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
    if kernels == "fused" and not config.qk_norm_over_heads and config.clip_qkv is None:
        scale = None
        if config.use_qk_norm:
            scale = torch.cat([params["q_norm"].expand(queries, -1), params["k_norm"].expand(keys, -1)])
        q, k, v, _ = _fused_prepare(heads, scale, cos[:, :, None], sin[:, :, None], keys, config.rms_norm_eps)
        return Projected(*(rearrange(part, "batch seq heads dim -> batch heads seq dim") for part in (q, k, v)))
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


class AttentionCore(NamedTuple):
    """What the backward of attention wants of its forward, without gradient: a residual. Handed back, the forward is
    not run again.

    Its leaves are contiguous tensors.
    """

    output: Tensor  # [batch, queries, heads * head_dim]
    log_sum_exp: Tensor  # fp32 or better; [batch, queries, heads] on CPUs, [batch, heads, queries or more] on CUDA


class Attended(NamedTuple):
    """What ``attend`` returns."""

    out: Tensor  # [batch, queries, heads * head_dim]
    core: AttentionCore | None  # None from the reference kernels, whose derivatives are those of their operations


def attend(
    projected: Projected, starts: Tensor | None, kernels: Kernels = "fused", core: AttentionCore | None = None
) -> Attended:
    """Causal scaled dot-product attention. The queries are the last of the keys.

    On CPUs every document is computed by itself, so memory grows with the tokens and time with the documents' squares.
    On CUDA documents take a mask, [batch, 1, seq, seq] in the forward and in the backward, kept by neither.

    Args:
      projected: queries ``[batch, heads, queries, head_dim]``; keys and values ``[batch, kv_heads, keys, head_dim]``,
        each shared by ``heads / kv_heads`` neighbouring query heads (arXiv 2305.13245).
      starts: int64 ``[batch, seq]``, where each token's document begins, for as many queries as keys; ``None``: each
        row is one document.
      kernels: ``"reference"`` writes the scores out, and has every transform's rule.
      core: what an earlier call returned for the same arguments: the result and its gradients are the same, bit for
        bit, without the forward.

    Raises:
      ValueError: shapes that do not belong together; a core for the reference kernels, which cannot use it.
      NotImplementedError: from the fused kernels, under a transform they have no rule for, and on a device or in a
        dtype without one.
    """
    q, k, v = projected
    _check(q, k, starts, core)
    if kernels == "fused":
        given = (None, None) if core is None else core
        out, *residuals = _fused_attention(q, k, v, starts, *given)
        return Attended(out, AttentionCore(*residuals))
    if core is not None:
        raise ValueError("kernels = 'reference' computes attention from its operations; a core is of no use to it")
    shared = q.shape[1] // k.shape[1]
    k, v = _share(k, shared), _share(v, shared)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = torch.where(_seen(q, k, starts), scores.to(torch.promote_types(q.dtype, torch.float32)), -torch.inf)
    out = torch.softmax(scores, dim=-1).to(q.dtype) @ v
    return Attended(_join_heads(out), None)


def _check(q: Tensor, k: Tensor, starts: Tensor | None, core: AttentionCore | None) -> None:
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    if queries > keys:
        raise ValueError(f"{queries} queries on {keys} keys: the queries must be the last of the keys")
    if starts is not None and not (queries == keys and starts.shape == (batch, queries)):
        raise ValueError(
            f"starts has shape {tuple(starts.shape)}; with documents it must be [batch, queries] = {(batch, queries)}, "
            f"and keys as many as queries, not {keys}"
        )
    if core is None:
        return
    if core.output.shape != (batch, queries, heads * dim) or core.output.dtype != q.dtype:
        raise ValueError(
            f"core.output is {core.output.dtype} {tuple(core.output.shape)}; these queries have {q.dtype} "
            f"[batch, queries, heads * head_dim] = {(batch, queries, heads * dim)}"
        )
    if core.log_sum_exp.numel() < batch * queries * heads:
        raise ValueError(f"core.log_sum_exp has shape {tuple(core.log_sum_exp.shape)}; it needs one for every query")


def _seen(q: Tensor, k: Tensor, starts: Tensor | None) -> Tensor:
    """Bool [1 | batch, 1, queries, keys], True where a query may look."""
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(keys - queries, keys, device=k.device)
    seen = place.view(1, 1, -1, 1) >= torch.arange(keys, device=k.device)
    if starts is not None:
        seen = seen & (starts.view(-1, 1, keys, 1) == starts.view(-1, 1, 1, keys))
    return seen


def _bias(q: Tensor, k: Tensor, starts: Tensor | None) -> Tensor:
    """``_seen`` as what is added to the scores: 0 where a query may look, else -inf, in the dtype of ``q``."""
    seen = _seen(q, k, starts)
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(seen.logical_not(), -torch.inf)


def _share(x: Tensor, shared: int) -> Tensor:
    return repeat(x, "batch heads seq dim -> batch (heads shared) seq dim", shared=shared)


def _join_heads(x: Tensor) -> Tensor:
    return rearrange(x, "batch heads seq dim -> batch seq (heads dim)")


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return rearrange(x, "batch seq (heads dim) -> batch heads seq dim", heads=heads)


def _core(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, output: Tensor | None, log_sum_exp: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the core: the one given, or that of a forward."""
    if q.numel() == 0:  # torch's operator divides by such sizes, and the process ends
        batch, heads, queries, dim = q.shape
        output, log_sum_exp = q.new_empty(batch, queries, heads * dim), q.new_empty(batch, queries, heads)
    elif output is None or log_sum_exp is None:
        output, log_sum_exp = _operators(q).forward(q, k, v, starts)
    # Views, because a Function's input may not be its output.
    return output.view_as(output), output.view_as(output), log_sum_exp.view_as(log_sum_exp)


def _core_gradient(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    _output: Tensor | None,
    _log_sum_exp: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
) -> tuple[Tensor, ...]:
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return _operators(q).backward(cotangent.contiguous(), q, k, v, starts, output, log_sum_exp)


_fused_attention = first_order_kernel_with_residuals(_core, _core_gradient, differentiable=3)


class _Operators(NamedTuple):
    """Attention on one kind of device, between tensors without derivatives."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    """``(q, k, v, starts)`` to the core."""
    backward: Callable[..., tuple[Tensor, ...]]
    """``(cotangent, q, k, v, starts, output, log_sum_exp)`` to the gradients of q, k and v."""


def _operators(q: Tensor) -> _Operators:
    if q.device.type == "cpu":
        return _Operators(_cpu_forward, _cpu_backward)
    if q.device.type == "cuda" and q.dtype != torch.float64:
        return _Operators(_cuda_forward, _cuda_backward)
    raise NotImplementedError(
        f"the fused kernels have no attention in {q.dtype} on {q.device.type}; pass kernels='reference'"
    )


def _documents(starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """The row and the places of each document."""
    batch, seq = starts.shape
    first = (starts == torch.arange(seq, device=starts.device)).flatten().nonzero().flatten().tolist()
    for start, stop in zip(first, [*first[1:], batch * seq], strict=True):
        row, place = divmod(start, seq)
        yield slice(row, row + 1), slice(place, place + stop - start)


def _per_document(
    operator: Callable[..., tuple[Tensor, ...]], starts: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """``operator`` of each document's part of the tensors, [batch, heads, seq, ...] like what it returns, put together.

    Against a mask, on one core: 2.6 times as fast for 32 rows of 256 tokens in documents of 64, 55 times for rows of
    4096 in documents of 64, 1.05 times where a document fills its row; slower for documents of fewer than some eight
    tokens, 1.4 times for those of four.
    """
    # A fake tensor has no numbers to look at: the rows count as documents, which is the most they can cost.
    if starts is None or type(starts) is not Tensor:
        return operator(*tensors)
    whole: list[Tensor] = []
    for row, places in _documents(starts):
        parts = operator(*(x[row, :, places] for x in tensors))
        if not whole:
            sizes = [(starts.shape[0], starts.shape[1], x.shape[1], *x.shape[3:]) for x in parts]
            whole = [x.new_empty(size).transpose(1, 2) for x, size in zip(parts, sizes, strict=True)]
        for x, part in zip(whole, parts, strict=True):
            x[row, :, places] = part
    return tuple(whole)


def _cpu_arguments(q: Tensor, k: Tensor) -> tuple[bool, Tensor | None]:
    """Whether the operator is to be causal, which it is for as many queries as keys, and what it adds to scores."""
    return (True, None) if q.shape[2] == k.shape[2] else (False, _bias(q, k, None))


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    # The operator takes heads that are shared, and repeats nothing.
    def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        causal, bias = _cpu_arguments(q, k)
        found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
        return found

    output, log_sum_exp = _per_document(operator, starts, q, k, v)
    return _join_heads(output), log_sum_exp.transpose(1, 2).contiguous()


def _cpu_backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, ...]:
    def operator(
        cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, ...]:
        causal, bias = _cpu_arguments(q, k)
        found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            cotangent, q, k, v, output, log_sum_exp, 0.0, causal, attn_mask=bias
        )
        return found

    heads = q.shape[1]
    cotangent, output = _split_heads(cotangent, heads), _split_heads(output, heads)
    return _per_document(operator, starts, cotangent, q, k, v, output, log_sum_exp.transpose(1, 2))


def _takes_flash(q: Tensor, k: Tensor, starts: Tensor | None) -> bool:
    """Whether CUDA's flash attention applies, which has no mask and no wide dtype; else it is efficient attention."""
    return starts is None and q.shape[2] == k.shape[2] and q.dtype in (torch.float16, torch.bfloat16)


def _aligned(x: Tensor) -> Tensor:
    """``x`` with as many zeros behind each head as CUDA's kernels want; they add nothing to a score."""
    return F.pad(x, (0, -x.shape[-1] % 8))


def _cuda_bias(q: Tensor, k: Tensor, starts: Tensor | None) -> Tensor | None:
    """What efficient attention adds to the scores of every head, its rows at 16-byte boundaries; ``None``: causal."""
    if starts is None and q.shape[2] == k.shape[2]:
        return None
    bias = _bias(q, k, starts)
    keys = bias.shape[-1]
    aligned = F.pad(bias, (0, -keys % 16)).narrow(-1, 0, keys)
    return aligned.expand(q.shape[0], q.shape[1], -1, -1)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    dim, shared = q.shape[-1], q.shape[1] // k.shape[1]
    scale = dim**-0.5
    flash = _takes_flash(q, k, starts)
    bias = None if flash else _cuda_bias(q, k, starts)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if flash:
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
    else:
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, _share(k, shared), _share(v, shared), bias, True, 0.0, bias is None, scale=scale
        )
    return _join_heads(output.narrow(-1, 0, dim)).contiguous(), log_sum_exp.contiguous()


def _cuda_backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, ...]:
    heads, dim, shared = q.shape[1], q.shape[-1], q.shape[1] // k.shape[1]
    scale = dim**-0.5
    flash = _takes_flash(q, k, starts)
    bias = None if flash else _cuda_bias(q, k, starts)
    cotangent, output = _aligned(_split_heads(cotangent, heads)), _aligned(_split_heads(output, heads))
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    grads: tuple[Tensor, ...]
    # The operators read the state of dropout's random numbers only where there is dropout.
    if flash:
        seed, offset = (torch.zeros(size, dtype=torch.uint64, device=q.device) for size in (2, ()))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(cotangent, q, k, v, output, log_sum_exp, None, None, q.shape[2], k.shape[2]),
            *(0.0, True, seed, offset),
            scale=scale,
        )
    else:
        seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
        grad_q, *shared_grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(cotangent, q, _share(k, shared), _share(v, shared), bias, output, log_sum_exp, seed, offset),
            *(0.0, [True, True, True, False], bias is None),
            scale=scale,
        )
        summed = (reduce(x, "b (heads shared) s d -> b heads s d", "sum", shared=shared) for x in shared_grads)
        grads = (grad_q, *summed)
    return tuple(x.narrow(-1, 0, dim) for x in grads)


class AttentionHalf(NamedTuple):
    """What a layer's first half hands out."""

    x: Tensor  # [batch, seq, hidden]; the residual stream
    core: AttentionCore | None  # a residual: a replay takes it back and runs no attention forward


def project_back(
    params: Params, attended: Tensor, config: MoEConfig, kernels: Kernels = "fused", needed: bool = True
) -> Tensor:
    """The output projection of ``attended``: [batch, seq, heads * head_dim] to [batch, seq, hidden].

    ``needed`` as in ``matmul``.
    """
    out = matmul(attended, params["o"], kernels, needed)
    return out + params["o_bias"].to(out.dtype) if config.attention_output_bias else out


def attention_half(
    params: Params,
    x: Tensor,
    positions: Positions,
    config: MoEConfig,
    kernels: Kernels = "fused",
    core: AttentionCore | None = None,
    needed: bool = True,
) -> AttentionHalf:
    """The segment ``x + attention(norm(x))`` of one layer.

    Args:
      params: one layer's tree.
      x: ``[batch, seq, hidden]``.
      positions: of the batch.
      config: the model.
      kernels: see ``kernels``.
      core: what an earlier call returned for the same arguments; see ``attend``.
    """
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps, kernels)
    projected = project(params["attention"], normed, positions.cos, positions.sin, config, kernels)
    out, core = attend(projected, positions.starts, kernels, core)
    return AttentionHalf(x + project_back(params["attention"], out, config, kernels, needed), core)
