"""The one odd-sized problem of these tests, as functions that make its parts.

No size divides another and no row of it starts at a 16-byte boundary, so torch's grouped product does not apply;
``make_config(hidden_size=16, ...)`` gives sizes where it does. The weights are far from degenerate: norms and
biases are random too, and large enough that a mistake in any of them shows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils import _pytree as pytree

from functional_moe.config import MoEConfig
from functional_moe.cross_entropy import IGNORE_INDEX
from functional_moe.optim import path_name
from functional_moe.parameters import abstract

# Derandomised: a failure here must be a failure everywhere. No deadline: nothing depends on the machine's load.
settings.register_profile("functional_moe", deadline=None, derandomize=True, database=None)
settings.load_profile("functional_moe")

ODD = MoEConfig(
    vocab_size=13,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    use_qk_norm=True,
    attention_bias=True,
    max_position_embeddings=64,
    rope_theta=100.0,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.01,
    loss_chunk_size=4,
)


def _seed(*parts: Any) -> torch.Generator:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@pytest.fixture(scope="session")
def make_config() -> Callable[..., MoEConfig]:
    return lambda **changes: dataclasses.replace(ODD, **changes)


@pytest.fixture(scope="session")
def make_params() -> Callable[..., Any]:
    """Random values in every leaf; in fp64 when the model computes in fp64."""

    def make(config: MoEConfig, seed: int = 0) -> Any:
        dtype = torch.float64 if config.compute_dtype == "float64" else torch.float32

        def draw(path: tuple[Any, ...], leaf: torch.Tensor) -> torch.Tensor:
            name = path_name(path)
            values = torch.randn(leaf.shape, generator=_seed(seed, name), dtype=torch.float64)
            if "norm" in name:
                return (1 + 0.3 * values).to(dtype)
            if "router" in name:  # wide apart, so that no choice hangs on rounding
                return (2.0 * values / leaf.shape[0] ** 0.5).to(dtype)
            return (0.9 * values / (leaf.shape[-2] ** 0.5 if leaf.ndim > 1 and name != "embedding" else 2)).to(dtype)

        return pytree.tree_map_with_path(draw, abstract(config))

    return make


@pytest.fixture(scope="session")
def make_balance() -> Callable[..., torch.Tensor]:
    def make(config: MoEConfig, seed: int = 0) -> torch.Tensor:
        shape = (config.num_moe_layers, config.num_experts)
        return 0.1 * torch.randn(shape, generator=_seed(seed, "balance"))

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, torch.Tensor]]:
    """Rows of 8 tokens; packed: documents of 3 and 4 tokens and one of padding, then one of 8. Some targets ignored."""

    def make(
        config: MoEConfig, seed: int = 0, *, rows: int = 2, seq: int = 8, packed: bool = True
    ) -> dict[str, torch.Tensor]:
        generator = _seed(seed, "batch")
        tokens = torch.randint(config.vocab_size, (rows, seq), generator=generator)
        targets = torch.randint(config.vocab_size, (rows, seq), generator=generator)
        targets[0, 1] = IGNORE_INDEX
        batch = {"tokens": tokens, "targets": targets}
        if packed:
            segments = torch.ones(rows, seq, dtype=torch.int64)
            segments[0, 3:] = 2
            segments[0, -1:] = 0
            batch["segment_ids"] = segments
            batch["targets"][segments == 0] = IGNORE_INDEX
        return batch

    return make
