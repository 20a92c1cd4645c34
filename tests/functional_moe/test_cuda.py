"""On a CUDA device: the same numbers as on the CPU, races that would show, and no waiting."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from functional_moe import memory, optim
from functional_moe.chain import Microbatch, by_layer, loss_fn, make_chain
from functional_moe.experts import _matmul, _outer
from functional_moe.model import count_totals
from functional_moe.parameters import labels, matrix_axes
from functional_moe.train_step import init_state, make_train_step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"

# Rows at 16-byte boundaries, so that torch's grouped product applies; the odd sizes take the padded one.
ALIGNED = {"hidden_size": 16, "moe_intermediate_size": 8, "head_dim": 8}


def there(tree):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), tree)


def all_offloaded(chain):
    recipes = {
        one.name: memory.Recipe(record=False, input="offload", residuals=dict.fromkeys(one.residuals, "offload"))
        for one in chain.segments
        if one.kind in ("attention", "experts")
    }
    return memory.make_schedule(chain, recipes)


@pytest.mark.parametrize("sizes", [{}, ALIGNED])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradient_are_those_of_the_cpu(make_config, make_params, make_balance, make_batch, sizes, packed):
    config = make_config(**sizes)
    given = make_params(config), make_balance(config), make_batch(config, packed=packed)

    def gradient(params, balance, batch, kernels):
        return torch.func.grad_and_value(lambda p: loss_fn(p, balance, batch, config, kernels=kernels)[0])(params)

    grads, loss = gradient(*there(given), "fused")
    expected_grads, expected = gradient(*given, "reference")
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-3, atol=2e-3)
    for a, b in zip(pytree.tree_leaves(grads), pytree.tree_leaves(expected_grads), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_expert_and_an_expert_without_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    counts = [5, 0, 9, 1, 0]
    x, z = (torch.randn(sum(counts), size, generator=generator) for size in (16, 24))
    weight = torch.randn(len(counts), 16, 24, generator=generator)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    split = list(zip(x.split(counts), z.split(counts), strict=True))
    rows = torch.cat([part @ one for (part, _), one in zip(split, weight, strict=True)])
    outer = torch.stack([part.t() @ other for part, other in split])
    found = _matmul(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), ends.to(DEVICE)).float().cpu()
    found_outer = _outer(x.to(DEVICE, dtype), z.to(DEVICE, dtype), ends.to(DEVICE)).float().cpu()
    torch.testing.assert_close(found, rows, rtol=3e-2, atol=0.3)
    torch.testing.assert_close(found_outer, outer, rtol=3e-2, atol=0.3)
    assert not found_outer[[1, 4]].any()


def test_offloaded_values_come_back_the_same(make_config, make_params, make_balance, make_batch):
    config = make_config(compute_dtype="bfloat16", hidden_size=64, moe_intermediate_size=32, head_dim=8)
    chain = make_chain(config)
    layers, balance = there((by_layer(make_params(config)), make_balance(config)))
    batch = there(make_batch(config, rows=8, packed=False))
    part = Microbatch(batch, balance, count_totals(batch))
    sizes = memory.profile_here(chain, layers, part)

    def run(schedule, copies=None):
        slabs = {
            tier: report.slab for tier, report in memory.verify(schedule, chain, sizes).items() if tier != memory.HBM
        }
        done = memory.execute(schedule, chain, memory.ResidentStore(layers), [part], slabs=slabs, copies=copies)
        return pytree.tree_leaves(done[:2])

    torch.use_deterministic_algorithms(True)
    try:
        plain = run(memory.make_schedule(chain))
        copies = memory.CudaCopies()
        for _ in range(10):
            assert all(map(torch.equal, run(all_offloaded(chain), copies), plain))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_function_under_remat_gets_back_what_it_offloaded():
    def inner(x, weight):
        return torch.tanh(memory.name(x @ weight, "product") @ weight)

    x, weight = (torch.randn(256, 256, device=DEVICE) / 16 for _ in range(2))
    offloading = memory.remat(inner, offload=["product"], copies=memory.CudaCopies())

    def gradient(function):
        return torch.func.grad(lambda w: function(function(x, w), w).square().sum())(weight)

    expected = gradient(inner)
    for _ in range(5):
        torch.testing.assert_close(gradient(offloading), expected, rtol=0, atol=0)


def test_a_copy_that_nobody_has_waited_for_keeps_its_source():
    copies = memory.CudaCopies()
    size = 1 << 24
    for number in range(20):
        source = torch.full((size,), number % 100, dtype=torch.uint8, device=DEVICE)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        copy = copies.start(source, host)
        del source
        torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # would get the memory of the source
        copy.wait()
        torch.cuda.synchronize()
        assert bool((host == number % 100).all())


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_makes_the_host_wait_for_nothing(make_config, make_params, make_batch, packed):
    config = make_config(compute_dtype="bfloat16", **ALIGNED)
    by_label = dict.fromkeys(("embedding", "router", "vector"), optim.adamw(3e-3))
    by_label["matrix"] = optim.muon(0.01, matrix_axes(config), weight_decay=0.1, dtype=torch.bfloat16)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.partition(by_label, labels(config)))
    step = make_train_step(config, optimizer, accumulate=2)
    state = init_state(there(make_params(config)), optimizer, config)
    batch = there(make_batch(config, packed=packed))
    state, _ = step(state, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state, metrics = step(state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(metrics.finite)
    assert int(state.step) == 2


def test_a_refused_step_leaves_the_state(make_config, make_params, make_batch):
    config = make_config(compute_dtype="bfloat16", **ALIGNED)
    optimizer = optim.adamw(3e-3)
    step = make_train_step(config, optimizer)
    params = there(make_params(config))
    params["head"] = params["head"] * torch.inf
    state = init_state(params, optimizer, config)
    after, metrics = step(state, there(make_batch(config)))
    assert not bool(metrics.finite)
    for a, b in zip(pytree.tree_leaves(after[1:]), pytree.tree_leaves(state[1:]), strict=True):
        assert a is b
