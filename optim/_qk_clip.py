"""QK-Clip: keep attention logits below a bound by shrinking the projections that make them (MuonClip, arXiv
2507.20534).

Two pure functions. :func:`max_attention_logits` finds the largest logit of each head without a score matrix;
:func:`qk_clip` shrinks the query and key projections of the heads whose logit passed the bound.
"""

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from . import _tree
from ._tree import Tree


def max_attention_logits(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    segment_ids: Tensor | None = None,
    block: int = 512,
) -> Tensor:
    """Return the largest attention logit ``scale * q . k`` of each query head, over the pairs that attend.

    Scores exist for one block of queries and keys at a time: memory is ``batch * num_heads * block ** 2``,
    and the blocks above the diagonal are never computed.

    Args:
        q: [batch, num_heads, q_len, head_dim], as attention uses it (after rotary embedding and
            normalisation).
        k: [batch, num_kv_heads, kv_len, head_dim]; head ``h`` of ``q`` meets head ``h // (num_heads //
            num_kv_heads)``.
        scale: factor of the logits; ``None`` for ``1 / sqrt(head_dim)``.
        causal: position i attends to positions up to i; needs q_len = kv_len.
        segment_ids: [batch, length] integers; pairs in different segments (documents) do not attend. Needs
            q_len = kv_len.
        block: queries and keys per block.

    Returns:
        float32 [num_heads], the largest over the batch, without gradient; -inf for a head without a pair.

    Raises:
        ValueError: shapes that do not fit together, or an empty block.
    """
    batch, num_heads, q_len, head_dim = _four(q, "q")
    kv_batch, num_kv_heads, kv_len, kv_dim = _four(k, "k")
    if (batch, head_dim) != (kv_batch, kv_dim) or num_heads % num_kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head_dim, "
            f"and {num_kv_heads} key heads must divide {num_heads} query heads"
        )
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if (causal or segment_ids is not None) and q_len != kv_len:
        raise ValueError(f"causal or segmented attention needs q_len = kv_len, got {q_len} and {kv_len}")
    if segment_ids is not None and segment_ids.shape != (batch, q_len):
        raise ValueError(f"segment_ids must be {(batch, q_len)}, got {tuple(segment_ids.shape)}")
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    # The scale goes onto the queries, as a negative one would turn maxima into minima.
    queries = rearrange(q.detach().float() * factor, "b (kv g) s d -> b kv g s d", kv=num_kv_heads)
    keys = rearrange(k.detach().float(), "b kv s d -> b kv 1 s d")
    largest = queries.new_full((num_heads,), -math.inf)
    for i in range(0, q_len, block):
        rows = slice(i, min(i + block, q_len))
        for j in range(0, kv_len, block):
            cols = slice(j, min(j + block, kv_len))
            if causal and cols.start >= rows.stop:
                break
            scores = queries[..., rows, :] @ keys[..., cols, :].mT
            keep = _attends(rows, cols, causal, segment_ids, scores.device)
            if keep is not None:
                scores = torch.where(keep, scores, -math.inf)
            largest = torch.maximum(largest, scores.amax(dim=(0, 3, 4)).flatten())
    return largest


def qk_clip(tau: float) -> Callable[[Tree, Tree, Tree], Tree]:
    """Return a function that bounds the attention logits of each head by ``tau``.

    A head ``h`` whose largest logit ``s`` exceeds ``tau`` has its logits multiplied by ``gamma_h = tau / s``:
    its query and its key projection by ``sqrt(gamma_h)`` each. Grouped query heads share a key head, which is
    shrunk by the least ``sqrt(gamma)`` of its group; their queries are multiplied by ``gamma_h`` over that,
    so that the logits of every head change by its own ``gamma_h`` alone.

    Args:
        tau: the bound, above 0 (100 in Kimi K2).

    Returns:
        ``clip(q_weights, k_weights, logits) -> (q_weights, k_weights)`` on congruent trees. A query weight is
        [..., num_heads * head_dim], a key weight [..., num_kv_heads * head_dim], a leaf of ``logits`` the
        float32 [num_heads] of :func:`max_attention_logits`. It applies where nothing between projection and
        logit undoes a scale: not after a normalisation of queries and keys.

    A maximum of inf or NaN has no factor. Where values are visible it raises, which reads one flag from the
    leaves' device; inside a ``torch.func`` transform the head's weights become NaN.

    Raises:
        ValueError: ``tau`` is not above 0; on the call, trees or shapes that do not fit, with the leaf's
            path; a maximum that is inf or NaN, with the leaf's path and the head.
    """
    if not 0.0 < tau < math.inf:
        raise ValueError(f"tau must be a finite number above 0, got {tau}")

    def clip(q_weights: Tree, k_weights: Tree, logits: Tree) -> tuple[Tree, Tree]:
        queries, spec = _tree.flatten(q_weights)
        keys = _tree.flatten_like(q_weights, k_weights, "qk_clip: the key weights", "the query weights")
        maxima = _tree.flatten_like(q_weights, logits, "qk_clip: the logits", "the query weights")
        pairs = []
        for index, (query, key, maximum) in enumerate(zip(queries, keys, maxima, strict=True)):
            num_kv_heads = _key_heads(query, key, maximum)
            if num_kv_heads is None:
                path = _tree.leaf_paths(q_weights)[index]
                shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, maximum))
                raise ValueError(
                    f"qk_clip: leaf {path!r} has query, key and logit shapes {shapes}; expected "
                    "[..., num_heads * head_dim], [..., num_kv_heads * head_dim] and [num_heads]"
                )
            pairs.append(_clip_pair(query, key, maximum, num_kv_heads, tau))
        _check_maxima(q_weights, maxima)
        return (
            _tree.unflatten([query for query, _ in pairs], spec),
            _tree.unflatten([key for _, key in pairs], spec),
        )

    return clip


def _clip_pair(query: Tensor, key: Tensor, maximum: Tensor, num_kv_heads: int, tau: float) -> tuple[Tensor, Tensor]:
    """Shrink one layer's projections: [..., num_heads * head_dim], [..., num_kv_heads * head_dim]."""
    gamma = torch.where(maximum > tau, tau / maximum, 1.0).float()
    gamma = torch.where(maximum < math.inf, gamma, math.nan)
    groups = rearrange(gamma, "(kv group) -> kv group", kv=num_kv_heads)
    key_factor = groups.amin(dim=1).sqrt()
    query_factor = (groups / key_factor[:, None]).flatten()
    head_dim = key.shape[-1] // num_kv_heads
    return (
        (query * query_factor.repeat_interleave(head_dim)).to(query.dtype),
        (key * key_factor.repeat_interleave(head_dim)).to(key.dtype),
    )


def _check_maxima(q_weights: Tree, maxima: list[Tensor]) -> None:
    """Raise for a maximum that is inf or NaN, where its value can be seen."""
    if any(x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in maxima) or not maxima:
        return
    # One flag for all leaves: an accelerator is waited for once.
    if bool(torch.stack([(x < math.inf).all().to(maxima[0].device) for x in maxima]).all()):
        return
    for path, maximum in zip(_tree.leaf_paths(q_weights), maxima, strict=True):
        for head, value in enumerate(maximum.tolist()):
            if not value < math.inf:
                raise ValueError(
                    f"qk_clip: leaf {path!r} has a largest logit of {value} in head {head}; expected a finite number, "
                    "or -inf for a head without a pair"
                )


def _key_heads(query: Tensor, key: Tensor, maximum: Tensor) -> int | None:
    """Return the number of key heads, ``None`` where the three shapes do not fit together."""
    if maximum.dim() != 1 or not maximum.numel() or query.shape[:-1] != key.shape[:-1] or not query.dim():
        return None
    num_heads = maximum.shape[0]
    head_dim, rest = divmod(query.shape[-1], num_heads)
    if rest or not head_dim or not key.shape[-1] or key.shape[-1] % head_dim:
        return None
    num_kv_heads = key.shape[-1] // head_dim
    return None if num_heads % num_kv_heads else num_kv_heads


def _attends(rows: slice, cols: slice, causal: bool, segment_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which pairs of a block attend, broadcastable to [batch, kv, group, rows, cols], or ``None``."""
    keep: Tensor | None = None
    if causal and cols.stop - 1 > rows.start:
        i = torch.arange(rows.start, rows.stop, device=device)
        j = torch.arange(cols.start, cols.stop, device=device)
        keep = i[:, None] >= j
    if segment_ids is not None:
        same = segment_ids[:, rows, None] == segment_ids[:, None, cols]
        same = rearrange(same, "b i j -> b 1 1 i j")
        keep = same if keep is None else keep & same
    return keep


def _four(x: Tensor, name: str) -> tuple[int, int, int, int]:
    if x.dim() != 4:
        raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {tuple(x.shape)}")
    a, b, c, d = x.shape
    return a, b, c, d
