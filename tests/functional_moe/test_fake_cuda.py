"""The CUDA paths, as far as a machine without CUDA can run them: on fake tensors that say they lie there.

Every operator has a rule for the device, nothing lies on the wrong one, and in a step the host waits for the device
once: for whether the gradient was finite, while the optimizer's update is being computed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from functional_moe import memory, optim, train_step
from functional_moe.chain import make_chain
from functional_moe.parameters import labels, matrix_axes

sys.path.insert(0, str(Path(__file__).parent))
from fake_cuda import HostReads, draw_state, gradients_by_hand, pretended

# Rows at 16-byte boundaries, so that torch's grouped product applies.
ALIGNED = {"hidden_size": 16, "moe_intermediate_size": 8, "head_dim": 8, "num_shared_experts": 1}


def make_optimizer(config):
    by_label = dict.fromkeys(("embedding", "router", "vector"), optim.adamw(3e-3))
    by_label["matrix"] = optim.muon(0.01, matrix_axes(config), weight_decay=0.1, dtype=torch.bfloat16)
    return optim.chain(optim.clip_by_global_norm(1.0), optim.partition(by_label, labels(config)))


def run_step(config, monkeypatch, packed, **options):
    optimizer = make_optimizer(config)
    asked = []

    def on_host(condition):
        asked.append(condition.device.type)
        return lambda: True

    monkeypatch.setattr(train_step, "_on_host", on_host)
    with pretended():
        state = draw_state(config, optimizer)
        tokens = torch.empty(4, 8, dtype=torch.int64, device="cuda")
        batch = {"tokens": tokens, "targets": tokens, **({"segment_ids": tokens} if packed else {})}
        step = train_step.make_train_step(config, optimizer, accumulate=2, **options)
        with HostReads() as reads:
            new, metrics = step(state, batch)
        assert metrics.loss.device.type == "cuda"
        for a, b in zip(pytree.tree_leaves(new), pytree.tree_leaves(state), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return reads.found, asked


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_waits_for_the_device_once(make_config, monkeypatch, packed):
    config = make_config(compute_dtype="bfloat16", n_group=1, **ALIGNED)
    assert run_step(config, monkeypatch, packed) == ([], ["cuda"])


def test_a_step_that_replays_and_moves_values_copies_those_alone(make_config, monkeypatch):
    config = make_config(compute_dtype="bfloat16", **ALIGNED)
    chain = make_chain(config)
    recipes = {
        one.name: memory.Recipe(record=False, input="offload", residuals={"core": "offload", "decision": "offload"})
        if one.kind == "attention"
        else memory.Recipe(record=False, residuals={"decision": "offload"})
        for one in chain.segments
        if one.kind in ("attention", "experts")
    }
    recipes = {
        name: recipe._replace(
            residuals={
                key: policy
                for key, policy in recipe.residuals.items()
                if key in {one.name: one.residuals for one in chain.segments}[name]
            }
        )
        for name, recipe in recipes.items()
    }
    schedule = memory.make_schedule(chain, recipes, microbatches=2)
    found, asked = run_step(config, monkeypatch, False, schedule=schedule, slabs={memory.HOST: 1 << 22})
    assert set(found) == {"aten.copy_.default"}
    moved = sum(isinstance(one, memory.Offload | memory.Fetch) for one in schedule)
    assert len(found) >= moved
    assert asked == ["cuda"]


def test_a_value_that_the_host_reads_is_found():
    with pretended(), HostReads() as reads:
        x = torch.ones(3, device="cuda")
        x.cpu()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            x.sum().item()
    assert reads.found == ["aten._to_copy.default", "aten._local_scalar_dense.default"]


def test_the_walk_through_a_graph_is_autograds(make_config, make_params, make_balance, make_batch):
    from functional_moe.chain import loss_fn

    config = make_config(**ALIGNED)
    params = pytree.tree_map(lambda x: x.requires_grad_(), make_params(config))
    leaves = pytree.tree_leaves(params)
    loss, _ = loss_fn(params, make_balance(config), make_batch(config), config)
    expected = torch.autograd.grad(loss, leaves, [torch.ones_like(loss)], allow_unused=True, retain_graph=True)
    found = gradients_by_hand([loss], leaves, [torch.ones_like(loss)], allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
