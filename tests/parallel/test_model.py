"""The model's own loss, gathered from shards on every mesh, equals one process: what everything faster is held to."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from functional_moe import parallel
from functional_moe.config import MoEConfig
from functional_moe.model import Metrics, Totals, init_balance, loss_fn
from functional_moe.parallel.testing import assert_equivalent
from functional_moe.parameters import declare, init

# Sizes that no axis divides, every optional part.
CONFIG = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=2,
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
    initializer_range=0.3,
    compute_dtype="float64",
)


def step_inputs(config: MoEConfig = CONFIG) -> dict[str, Any]:
    """Five rows of different lengths, with padding and a row that predicts nothing."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (5, 8), generator=generator)
    targets = torch.randint(config.vocab_size, (5, 8), generator=generator)
    segment_ids = torch.ones(5, 8, dtype=torch.int64)
    for row in range(5):
        segment_ids[row, 8 - row :] = 0
        targets[row, 8 - row :] = -100
    targets[0] = -100
    params = torch.utils._pytree.tree_map(lambda leaf: leaf.to(torch.float64), init(config, seed=1))
    return {"params": params, "batch": {"tokens": tokens, "targets": targets, "segment_ids": segment_ids}}


def summands(shards: dict[str, Any], layout: parallel.Layout, mean_of_means: bool = False) -> tuple[Any, Metrics]:
    """This rank's part of the loss: its rows, over the tokens of all ranks."""
    params = parallel.gather(shards["params"], layout["params"])
    batch = shards["batch"]
    totals = Totals((batch["targets"] != -100).sum(), (batch["segment_ids"] != 0).sum())
    if not mean_of_means:
        group = parallel.axis_group(layout.mesh, *(layout.mesh.mesh_dim_names or ()))
        totals = Totals(*(parallel.all_reduce(count, group) for count in totals))
    return loss_fn(params, init_balance(CONFIG), batch, CONFIG, totals=totals)


def spread(sizes: dict[str, int], config: MoEConfig = CONFIG) -> dict[str, Any]:
    rows = (Shard(0),) * len(sizes)
    batch = {"tokens": rows, "targets": rows, "segment_ids": rows}
    return {"params": parallel.placements(declare(config), sizes), "batch": batch}


def test_the_loss_of_shards_equals_the_loss_of_one_process():
    assert_equivalent(summands, step_inputs(), spread)


def test_also_with_copies_of_the_whole():
    mesh = {"replicate": 2, "fsdp": 1, "ep": 2}
    assert spread(mesh)["params"]["final_norm"] == (Replicate(), Shard(0), Shard(0))
    assert_equivalent(summands, step_inputs(), spread, [mesh], outputs=(Partial(),) * 3)


def mean_of_means(shards: dict[str, Any], layout: parallel.Layout) -> tuple[Any, Metrics]:
    return summands(shards, layout, mean_of_means=True)


def test_a_mean_of_means_is_caught():
    # torchtitan PR 4167, transformers 35203.
    with pytest.raises(AssertionError, match=r"output 1\.loss differs|output 0 differs"):
        assert_equivalent(mean_of_means, step_inputs(), spread, [{"fsdp": 2, "ep": 1}])


def expert_parallel_summands(
    shards: dict[str, Any], layout: parallel.Layout, config: MoEConfig, unused: tuple[int, ...] = ()
) -> tuple[Any, Metrics]:
    """As ``summands``, each rank with its own experts alone."""
    declared = declare(config)
    params = parallel.gather(shards["params"], layout["params"], parallel.expert_axes(declared))
    held = params["layers"][-1]["experts"]["gate_up"].shape[0]
    assert held == config.num_experts // parallel.axis_sizes(layout.mesh)["ep"]
    group = parallel.axis_group(layout.mesh, *(layout.mesh.mesh_dim_names or ()))
    batch = shards["batch"]
    totals = Totals((batch["targets"] != -100).sum(), (batch["segment_ids"] != 0).sum())
    balance = init_balance(config)
    balance[:, list(unused)] = -100.0
    return loss_fn(
        params,
        balance,
        batch,
        config,
        totals=Totals(*(parallel.all_reduce(count, group) for count in totals)),
        expert_parallel=parallel.expert_parallel(declared, layout["params"]),
    )


def check_expert_parallelism(
    config: MoEConfig, meshes: list[dict[str, int]], inputs: Any = None, **options: Any
) -> None:
    assert_equivalent(
        functools.partial(expert_parallel_summands, config=config, **options),
        inputs or step_inputs(config),
        functools.partial(spread, config=config),
        meshes,
    )


TWELVE = dataclasses.replace(CONFIG, num_experts=12, num_experts_per_tok=3)


def test_experts_spread_over_ranks_compute_the_same():
    # pytorch 160285, torchtitan PR 1551, Megatron PR 5956: each expert's gradient was ep times too large.
    meshes = [{"fsdp": 2, "ep": 1}, {"fsdp": 1, "ep": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 3}]
    check_expert_parallelism(CONFIG, meshes)


def test_also_where_a_rank_holds_no_contiguous_run_of_experts():
    meshes = [{"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 4}, {"fsdp": 3, "ep": 2}, {"fsdp": 2, "ep": 4}]
    down = [spread(mesh, TWELVE)["params"]["layers"][1]["experts"]["down"] for mesh in meshes]
    assert down == [(Shard(0), Shard(0))] * 3 + [(Shard(2), Shard(0))]
    check_expert_parallelism(TWELVE, meshes)


def test_also_with_one_expert_on_each_rank():
    # pytorch PR 167178: ep is the world size, where the FSDP degree is 1.
    check_expert_parallelism(CONFIG, [{"fsdp": 1, "ep": 6}])


def test_also_with_copies_of_the_experts():
    check_expert_parallelism(CONFIG, [{"replicate": 2, "fsdp": 1, "ep": 2}, {"replicate": 2, "fsdp": 2, "ep": 2}])


@pytest.mark.parametrize("coefficient", [0.05, 0.0])
def test_also_with_an_expert_without_tokens_and_ranks_without_valid_ones(coefficient):
    """On four ranks the third has a row of padding alone, the fourth no row."""
    config = dataclasses.replace(TWELVE, router_aux_loss_coef=coefficient, router_z_loss_coef=coefficient / 5)
    inputs = step_inputs(config)
    inputs["batch"]["segment_ids"][3:] = 0
    inputs["batch"]["targets"][3:] = -100
    check_expert_parallelism(
        config, [{"fsdp": 1, "ep": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 4}], inputs, unused=(7,)
    )


def test_also_where_a_rank_holds_no_expert_with_tokens():
    check_expert_parallelism(CONFIG, [{"fsdp": 1, "ep": 3}], unused=(2, 3))
