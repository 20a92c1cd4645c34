"""Floating-point operations of a training step: by formula, for the utilisation a run reports, and by counting.

Importing this gives ``torch.utils.flop_counter.FlopCounterMode`` the formulas of the operators used here that it lacks:
flash attention on CPUs and, in torch 2.11, of grouped heads on CUDA; oneDNN's products; grouped products. Attention is
counted as torch counts it on CUDA: every pair of a query and a key of one call, as if nothing were causal, with five
products in the backward, one of which makes the scores again. A grouped product counts the rows it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .config import MoEConfig
from .products import product


def train_flops_per_token(config: MoEConfig, seq_len: int) -> float:
    """Multiply-adds, counted as two, of forward and backward for one token; nothing recomputed.

    Six per parameter of the matrices a token meets (the embedding is looked up, not multiplied), and the two
    products of causal attention, over half of ``seq_len`` on average.
    """
    matrices = config.num_active_params
    if not config.tie_word_embeddings:
        matrices -= config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim * seq_len / 2
    return 6.0 * (matrices + attention)


def measure_matmul_rate(
    dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None, seconds: float = 0.2
) -> float:
    """FLOP/s of a square matrix product on this machine: the best of several.

    Args:
      dtype: of the matrices.
      device: where they lie.
      size: their edge; by default 1024 on CPUs and 8192 elsewhere, which fills the machine.
      seconds: that it takes, about.
    """
    on_device = torch.device(device).type != "cpu"
    if size is None:
        size = 8192 if on_device else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # A device is given several at once, so that it never waits for the host.
    products = 8 if on_device else 1
    best = float("inf")
    product(a, b)
    deadline = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        if a.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(products):
            product(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / products)
    return 2.0 * size**3 / best


def _attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_backward(cotangent: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def _linear(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


def _over_rows(x: torch.Size, y: torch.Size, *_: Any, **__: Any) -> int:
    """``[rows, in]`` transposed times ``[rows, out]``."""
    return 2 * prod(x) * y[-1]


def _grouped_product(x: torch.Size, y: torch.Size, *_: Any, **__: Any) -> int:
    """``[rows, in] x [groups, in, out]``, or ``[out, rows] x [rows, in]`` with a result for each group of rows."""
    return 2 * prod(x) * y[-1]


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    # Torch 2.11 has formulas for these two that refuse heads which share keys and values.
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped_product,
}
if torch._C._has_mkldnn:
    _FORMULAS[torch.ops.mkldnn._linear_pointwise] = _linear
    _FORMULAS[torch.ops.aten.mkldnn_linear_backward_weights] = _over_rows
for _operator, _formula in _FORMULAS.items():
    flop_registry.pop(_operator, None)
    register_flop_formula(_operator)(_formula)
