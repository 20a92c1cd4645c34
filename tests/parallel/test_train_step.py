"""The train step over ranks equals the step of one process: invariant 1."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from functional_moe import memory, optim, parallel
from functional_moe.chain import make_chain
from functional_moe.config import MoEConfig
from functional_moe.parameters import init
from functional_moe.sharding import make_sharding, model_layout
from functional_moe.train_step import init_state, make_train_step

# Sizes that no axis divides, every optional part, experts that get no token.
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
    shared_expert_gate=True,
    scoring_func="sigmoid",
    use_qk_norm=True,
    attention_bias=True,
    router_aux_loss_coef=0.05,
    router_z_loss_coef=0.01,
    balance_update_rate=0.01,
    initializer_range=0.3,
    compute_dtype="float64",
)
MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (3, 2, 1)]
KEEP_GRAPH = memory.Recipe()
RECIPES = {
    "keep": (KEEP_GRAPH, KEEP_GRAPH),
    "recompute": (memory.Recipe(record=False), memory.Recipe(record=False, input="recompute")),
    "offload": (
        memory.Recipe(record=False, input="offload", residuals={"core": "offload"}),
        memory.Recipe(record=False, input="offload", residuals={"decision": "offload"}),
    ),
    "attention kept": (memory.Recipe(record=False, residuals={"core": "keep"}), memory.Recipe(record=False)),
}
"""Of the two halves of a layer."""


def batches(rows: int) -> list[dict[str, torch.Tensor]]:
    """Two batches, rows of different lengths."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(2):
        tokens = torch.randint(CONFIG.vocab_size, (rows, 7), generator=generator)
        targets = torch.randint(CONFIG.vocab_size, (rows, 7), generator=generator)
        segment_ids = torch.ones(rows, 7, dtype=torch.int64)
        for row in range(rows):
            segment_ids[row, 7 - row % 5 :] = 0
        targets[0] = -100
        out.append({"tokens": tokens, "targets": targets, "segment_ids": segment_ids})
    return out


def two_steps(mesh_sizes: tuple[int, int, int] | None, rows: int, accumulate: int, recipe: str, tied: bool) -> Any:
    """Parameters after two steps, in full, and the metrics of both, on this rank's rows."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    params = torch.utils._pytree.tree_map(lambda leaf: leaf.to(torch.float64), init(config, seed=1))
    layout, norm = None, None
    if mesh_sizes is not None:
        layout = model_layout(config, parallel.make_mesh(*mesh_sizes))
        params = parallel.shard(params, layout)

        def norm(tree: Any) -> torch.Tensor:
            return parallel.global_norm(tree, layout)

    optimizer = optim.chain(optim.clip_by_global_norm(0.5, norm), optim.sgd(0.1, momentum=0.9))
    chain = make_chain(config)
    attention, feed_forward = RECIPES[recipe]
    recipes = {}
    for one in chain.segments[1:-1]:
        half = attention if one.kind == "attention" else feed_forward
        recipes[one.name] = half._replace(residuals={k: v for k, v in half.residuals.items() if k in one.residuals})
    layers = None
    if layout is not None:
        layers = memory.Gathers(make_sharding(config, layout, None, torch.float64).layers.sizes)
    schedule = memory.make_schedule(chain, recipes, microbatches=accumulate, gathers=layers)
    step = make_train_step(
        config,
        optimizer,
        layout=layout,
        schedule=schedule,
        slabs={memory.HOST: 1 << 20},
        copies=memory.AdversarialCopies(seed=0),
        accumulate=accumulate,
        reduce_dtype=torch.float64,
    )
    state, metrics = init_state(params, optimizer, config), []
    for batch in batches(rows):
        if mesh_sizes is not None:
            sizes = parallel.chunk_sizes(rows, dist.get_world_size())
            batch = {key: value.split(list(sizes))[dist.get_rank()] for key, value in batch.items()}
        state, one = step(state, batch)
        metrics.append(one._asdict())
    params, balance = state.params, state.balance
    if layout is not None:
        assert all(isinstance(leaf, DTensor) for leaf in torch.utils._pytree.tree_leaves(params))
        params = parallel.unshard(params)
    return params, balance, metrics


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_steps_equal_those_of_one_process(mesh: tuple[int, int, int], accumulate: int, recipe: str) -> None:
    ranks = mesh[0] * mesh[1] * mesh[2]
    rows = 5 if accumulate == 1 else 2 * ranks
    tied = accumulate == 2
    expected = two_steps(None, rows, 1, "keep", tied)
    for found in parallel.shared_pool().run(two_steps, ranks, mesh, rows, accumulate, recipe, tied):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def drawn_in_parts(sizes: tuple[int, int, int]) -> Any:
    config = dataclasses.replace(CONFIG, num_experts=12 if sizes[0] * sizes[1] == 4 else 6)
    mesh = parallel.make_mesh(*sizes)
    return config, parallel.unshard(init(config, seed=3, layout=model_layout(config, mesh)))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_initial_values_do_not_depend_on_the_mesh(mesh: tuple[int, int, int]) -> None:
    for config, found in parallel.shared_pool().run(drawn_in_parts, mesh[0] * mesh[1] * mesh[2], mesh):
        torch.testing.assert_close(found, init(config, seed=3), rtol=0, atol=0)
