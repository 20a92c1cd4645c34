"""The held-out loss: the mean over all tokens, the same over ranks, and nothing is changed."""

import dataclasses
from typing import Any

import pytest
import torch

from functional_moe import parallel
from functional_moe.chain import loss_fn
from functional_moe.config import MoEConfig
from functional_moe.evaluate import make_evaluate
from functional_moe.parameters import init
from functional_moe.sharding import model_layout
from functional_moe.train_step import TrainState

# Sizes that no axis divides, a dense layer, a shared expert.
CONFIG = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    intermediate_size=9,
    first_k_dense_replace=1,
    num_shared_experts=1,
    initializer_range=0.3,
)


def state_and_batches(config: MoEConfig) -> tuple[TrainState, list[dict[str, torch.Tensor]]]:
    """Parameters, a balance that decides, and batches of 5 and 1 rows, of which some targets are ignored."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows in (5, 1):
        tokens, targets = torch.randint(config.vocab_size, (2, rows, 7), generator=generator)
        targets[0, :3] = -100
        batches.append({"tokens": tokens, "targets": targets})
    balance = torch.randn(config.num_moe_layers, config.num_experts, generator=generator)
    return TrainState(torch.tensor(0), init(config, seed=1), None, balance), batches


def evaluated(mesh: tuple[int, int, int], tied: bool) -> tuple[float, float]:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    layout = model_layout(config, parallel.make_mesh(*mesh))
    state, batches = state_and_batches(config)
    state = state._replace(params=parallel.shard(state.params, layout))
    before = torch.utils._pytree.tree_map(torch.clone, parallel.local(state.params))
    evaluate = make_evaluate(config, layout)
    twice = evaluate(state, batches), evaluate(state, batches)
    torch.testing.assert_close(parallel.local(state.params), before, rtol=0, atol=0)
    return twice


def expected(tied: bool) -> float:
    """The mean over the predicted tokens of both batches, from the training loss."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    state, batches = state_and_batches(config)
    counts = [int((batch["targets"] >= 0).sum()) for batch in batches]
    losses = [float(loss_fn(state.params, state.balance, batch, config)[1].loss) for batch in batches]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_mean_over_tokens(tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    found: Any = make_evaluate(config)(*state_and_batches(config))
    assert found == pytest.approx(expected(tied), rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "mesh", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 2)], ids=lambda mesh: "x".join(map(str, mesh))
)
def test_ranks_come_to_the_value_of_one_process(mesh: tuple[int, int, int], tied: bool) -> None:
    ranks = mesh[0] * mesh[1] * mesh[2]
    for first, second in parallel.shared_pool().run(evaluated, ranks, mesh, tied):
        assert first == second == pytest.approx(expected(tied), rel=1e-5)
