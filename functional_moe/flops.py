"""Floating-point operations of a training step, for the utilisation a run reports."""

from __future__ import annotations

import time

import torch

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


def measure_matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu", size: int = 1024) -> float:
    """FLOP/s of a square matrix product on this machine: the best of several, in a fifth of a second or so."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        product(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
