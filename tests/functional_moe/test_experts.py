"""Dispatch is a permutation, the grouped product is a loop over experts, and both differentiate as such."""

from __future__ import annotations

import chex
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functional_moe import experts as module
from functional_moe import memory
from functional_moe.dispatch import decide, from_rows, plan_dispatch, to_rows, weights_to_rows
from functional_moe.experts import feed_forward, routed_experts, swiglu

# fp64 comparisons: sums in another order of a few dozen terms of size 1 to 10.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
# fp32: the same with an epsilon of 6e-8 and up to three products after each other.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
# bf16 has 8 bits: results of size 1 to 10 are rounded by up to 2^-8 of themselves, several times.
HALF = {"rtol": 4e-2, "atol": 4e-2}
TOLERANCE = {torch.float64: EXACT, torch.float32: SINGLE, torch.bfloat16: HALF}


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def choices(draw, max_tokens=9, max_experts=6):
    """Distinct experts for each of some tokens."""
    num_experts = draw(st.integers(1, max_experts))
    top_k = draw(st.integers(1, num_experts))
    row = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    rows = draw(st.lists(row, max_size=max_tokens))
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), top_k), num_experts


@st.composite
def groups(draw, max_rows=5):
    """Rows of each expert: some have none."""
    return draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=5))


def loop_matmul(x, weight, counts):
    """The definition of the grouped product."""
    return torch.cat([rows @ weight[e] for e, rows in enumerate(x.split(counts))])


def offsets_of(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@given(choices())
def test_dispatch_sorts_by_expert_and_keeps_the_order_of_tokens(drawn):
    experts, num_experts = drawn
    dispatch = plan_dispatch(experts, num_experts)
    expected = sorted((int(e), token, k) for token, row in enumerate(experts) for k, e in enumerate(row))
    top_k = experts.shape[1]
    assert dispatch.token_of_row.tolist() == [token for _, token, _ in expected]
    assert dispatch.choice_of_row.tolist() == [token * top_k + k for _, token, k in expected]
    assert dispatch.offsets.tolist() == [sum(e <= last for e, _, _ in expected) for last in range(num_experts)]
    assert dispatch.offsets.dtype == torch.int32
    assert torch.equal(dispatch.row_of_choice.flatten()[dispatch.choice_of_row], torch.arange(experts.numel()))


@given(choices(max_experts=4), st.integers(1, 4))
def test_dispatch_and_combine_are_indexing_and_each_others_transpose(drawn, width):
    experts, num_experts = drawn
    tokens, top_k = experts.shape
    dispatch = plan_dispatch(experts, num_experts)
    x, y, w = random(tokens, width), random(tokens * top_k, width, seed=1), random(tokens, top_k, seed=2)
    assert torch.equal(to_rows(x, dispatch), x[dispatch.token_of_row])
    assert torch.equal(weights_to_rows(w, dispatch), w.flatten()[dispatch.choice_of_row][:, None])
    summed = torch.zeros_like(x).index_add(0, dispatch.token_of_row, y)
    torch.testing.assert_close(from_rows(y, dispatch), summed, **EXACT)
    # <to_rows(x), y> = <x, from_rows(y)>
    torch.testing.assert_close((to_rows(x, dispatch) * y).sum(), (x * from_rows(y, dispatch)).sum(), **EXACT)


def test_dispatch_and_combine_differentiate_to_second_order():
    experts = torch.tensor([[0, 3], [3, 1], [0, 1]])
    dispatch = plan_dispatch(experts, 5)
    x, y, w = random(3, 2), random(6, 2, seed=1), random(3, 2, seed=2)
    for function, argument in ((to_rows, x), (from_rows, y), (weights_to_rows, w)):
        argument = argument.requires_grad_()

        def cubed(a, function=function):
            return function(a, dispatch) ** 3  # so that the second derivative is not zero

        assert torch.autograd.gradcheck(cubed, (argument,))
        assert torch.autograd.gradgradcheck(cubed, (argument,))


@given(counts=groups(), inner=st.integers(1, 9), outer=st.integers(1, 9), dtype=st.sampled_from(list(TOLERANCE)))
@example(counts=[2, 0, 3], inner=8, outer=16, dtype=torch.float32)  # torch's grouped product applies
@example(counts=[2, 0, 3], inner=8, outer=16, dtype=torch.bfloat16)
@example(counts=[0, 0], inner=8, outer=8, dtype=torch.float32)  # a rank of expert parallelism may get no row
@example(counts=[0, 0], inner=8, outer=8, dtype=torch.bfloat16)
@example(counts=[1, 2], inner=1, outer=4, dtype=torch.float32)
@example(counts=[3, 2], inner=4, outer=1, dtype=torch.float32)
@settings(max_examples=100)
def test_grouped_products_are_loops_over_experts(counts, inner, outer, dtype):
    x, weight = random(sum(counts), inner, dtype=dtype), random(len(counts), inner, outer, seed=1, dtype=dtype)
    z = random(sum(counts), outer, seed=2, dtype=dtype)
    ours = module._matmul(x, weight, offsets_of(counts))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, loop_matmul(x, weight, counts), **TOLERANCE[dtype])
    sums = module._outer(x, z, offsets_of(counts))
    assert sums.dtype == dtype
    for expert, (rows, others) in enumerate(zip(x.split(counts), z.split(counts), strict=True)):
        torch.testing.assert_close(sums[expert], rows.t() @ others, **TOLERANCE[dtype])
        if counts[expert] == 0:
            assert torch.equal(sums[expert], torch.zeros(inner, outer, dtype=dtype))


def test_both_implementations_of_the_grouped_product_are_reached():
    """Otherwise the test above could have tested one of them only."""
    assert module._grouped_mm_takes(random(5, 8, dtype=torch.float32), random(3, 8, 16, dtype=torch.float32))
    assert not module._grouped_mm_takes(random(5, 8))
    assert not module._grouped_mm_takes(random(5, 7, dtype=torch.float32))


@given(counts=groups(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_grouped_products_take_any_strides(counts, dtype):
    """Transposed, sliced and expanded operands; a cotangent of stride 0 is what ``.sum()`` gives."""
    rows, experts = sum(counts), len(counts)
    x = random(4, rows, dtype=dtype).t()
    weight = random(experts, 8, 8, seed=1, dtype=dtype)[:, 3:7, 1:]
    expanded = random(1, 1, dtype=dtype).expand(rows, 4)
    for operand in (x, expanded):
        y = module._matmul(operand, weight, offsets_of(counts))
        torch.testing.assert_close(y, loop_matmul(operand, weight, counts), **TOLERANCE[dtype])
        sums = module._outer(x, operand, offsets_of(counts))
        for expert, (left, right) in enumerate(zip(x.split(counts), operand.split(counts), strict=True)):
            torch.testing.assert_close(sums[expert], left.t() @ right, **TOLERANCE[dtype])


def reference_experts(params, x, experts, weights):
    """One token at a time."""
    out = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for k in range(experts.shape[1]):
            gate_up, down = (params[name][experts[token, k]] for name in ("gate_up", "down"))
            gate, up = gate_up.chunk(2, dim=-1)
            total = total + weights[token, k] * ((F.silu(x[token] @ gate) * (x[token] @ up)) @ down)
        out.append(total)
    return torch.stack(out) if out else x * weights.sum()


def expert_tree(num_experts, hidden, width, dtype):
    return {
        "gate_up": random(num_experts, hidden, 2 * width, seed=3, dtype=dtype),
        "down": random(num_experts, width, hidden, seed=5, dtype=dtype),
    }


SIZES = [(5, 3), (8, 4)]  # odd; and such that torch's grouped product applies


@pytest.mark.parametrize("path", ["fused", "fused, all experts at a time", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("hidden", "width"), SIZES)
@given(drawn=choices(max_tokens=6), parts=st.integers(1, 4))
@example(drawn=(torch.tensor([[2], [2], [2]]), 5), parts=1)  # every token to one expert
@example(drawn=(torch.tensor([[2], [2], [2]]), 5), parts=2)
@example(drawn=(torch.tensor([[0, 1, 2]]), 3), parts=3)  # top_k = experts, one token, parts without tokens
@settings(max_examples=20)
def test_routed_experts_are_a_loop_over_tokens_in_value_and_gradient(path, dtype, hidden, width, drawn, parts):
    """On both orders of the fused steps: the one for CPUs and the one for devices with grouped products."""
    kernels, *all_at_a_time = path.split(", ")
    experts, num_experts = drawn
    tokens, top_k = experts.shape
    params = expert_tree(num_experts, hidden, width, dtype)
    x, weights = random(tokens, hidden, dtype=dtype), random(tokens, top_k, seed=1, dtype=dtype)
    cotangent = random(tokens, hidden, seed=2, dtype=dtype)

    def run(function, choice):
        value, pull_back = torch.func.vjp(lambda p, a, w: function(p, a, choice, w), params, x, weights)
        return value, pull_back(cotangent)

    with pytest.MonkeyPatch.context() as patch:
        if all_at_a_time:
            patch.setattr(module, "_one_by_one", lambda x: False)
        ours = run(lambda *a: routed_experts(*a, kernels), decide(experts, num_experts, parts=parts))
    reference = run(reference_experts, experts)
    chex.assert_trees_all_close(ours, reference, **TOLERANCE[dtype])
    unused = sorted(set(range(num_experts)) - set(experts.flatten().tolist()))
    for gradient in ours[1][0].values():
        assert torch.equal(gradient[unused], torch.zeros_like(gradient[unused]))


@pytest.mark.parametrize("path", ["one by one", "all at a time"])
def test_parts_take_less_memory_and_sum_in_fp32(path):
    """256 tokens of 4 choices: rows are what fills memory, and of 8 parts two are there at once at most."""
    width, hidden, num_experts = 32, 64, 4
    params = {name: leaf / 16 for name, leaf in expert_tree(num_experts, hidden, width, torch.bfloat16).items()}
    x, weights = random(256, hidden, dtype=torch.bfloat16), random(256, 4, seed=1, dtype=torch.float32).softmax(-1)
    experts = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(one)) for one in range(256)])
    peaks = {}

    def run(x, weights, decision):
        leaves = [leaf.detach().requires_grad_() for leaf in (*params.values(), x)]
        out = routed_experts(dict(zip(params, leaves, strict=False)), leaves[-1], decision, weights)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_one_by_one", lambda x: path == "one by one")
        for parts in (1, 8):
            decision = decide(experts, num_experts, parts=parts)
            with memory.LiveBytes() as live:
                found = run(x, weights, decision)
            peaks[parts] = live.peak
        alone = [
            run(*part, decide(choice, num_experts))
            for *part, choice in zip(x.chunk(8), weights.chunk(8), experts.chunk(8), strict=True)
        ]
    gradients = 4 * num_experts * 3 * hidden * width  # of the experts, in fp32
    rows = 256 * 4 * hidden * 2
    assert peaks[1] > 5 * rows
    assert peaks[8] < peaks[1] - 2 * rows + gradients
    for index in (0, 1):
        total = sum(part[index].float() for part in alone)
        assert torch.equal(found[index], total.bfloat16())
    assert torch.equal(found[2], torch.cat([part[2] for part in alone]))


def test_a_replay_in_parts_for_its_derivative_alone_computes_nothing():
    params, experts = expert_tree(3, 8, 4, torch.float32), torch.tensor([[0], [2], [1], [0]])
    decision = decide(experts, 3, parts=2)
    x, weights = random(4, 8, dtype=torch.float32), torch.ones(4, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_experts", None)
        routed_experts(params, x, decision, weights, needed=False)
    with pytest.raises(ValueError, match="parts = 0: must be at least 1"):
        decide(experts, 3, parts=0)


def test_an_expert_without_tokens_may_hold_nan():
    """What no token visits reaches no result: the fused path does not even read it."""
    params = expert_tree(3, 5, 4, torch.float32)
    params["gate_up"][1] = torch.nan
    decision = decide(torch.tensor([[0], [2]]), 3)
    out = routed_experts(params, random(2, 5, dtype=torch.float32), decision, torch.ones(2, 1))
    assert out.isfinite().all()


@pytest.mark.parametrize("path", ["one by one", "one by one, rounded slices", "all at a time"])
@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_rows_of_others_reach_no_result_and_no_gradient(path, hidden, width):
    """pytorch 154557, 172439: what lies past an expert's last row, and past the last offset, may be anything.

    Slices may reach into neighbours' rows so that few lengths occur; expert 1's are NaN here, and expert 2 has none.
    """
    params = expert_tree(4, hidden, width, torch.float32)
    decision = decide(torch.tensor([[0], [1], [3], [3], [1], [0], [3]]), 4)
    assert int(decision.parts[0].offsets[-1]) == 7  # so that no row is past it
    x, weights = random(7, hidden, dtype=torch.float32), random(7, 1, seed=1, dtype=torch.float32)
    poisoned = x.clone()
    poisoned[[1, 4]] = torch.nan

    def run(x):
        value, pull_back = torch.func.vjp(lambda p, a, w: routed_experts(p, a, decision, w), params, x, weights)
        return value, *pull_back(torch.ones_like(value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_one_by_one", lambda x: path != "all at a time")
        patch.setattr(module, "rows_per_shape", lambda x: 4 if path.endswith("slices") else 1)
        clean, found = run(x), run(poisoned)
    expected = routed_experts(params, x, decision, weights, "reference")
    torch.testing.assert_close(clean[0], expected, **TOLERANCE[torch.float32])
    others, alive = [0, 2, 3, 5, 6], [0, 2, 3]
    for index in (0, 2, 3):  # the outputs, and the gradients by tokens and weights
        assert torch.equal(found[index][others], clean[index][others])
        assert bool(found[index][[1, 4]].isnan().all())
    for name, gradient in found[1].items():
        assert torch.equal(gradient[alive], clean[1][name][alive])
        assert torch.equal(gradient[2], torch.zeros_like(gradient[2]))


def test_bf16_experts_stay_close_to_fp32():
    params = expert_tree(4, 16, 8, torch.float32)
    x, weights = random(6, 16, dtype=torch.float32), random(6, 2, seed=1, dtype=torch.float32).softmax(-1)
    experts = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [0, 3], [1, 0]])
    decision = decide(experts, 4)
    exact = routed_experts(params, x, decision, weights)
    for kernels in ("fused", "reference"):
        half = routed_experts(params, x.bfloat16(), decision, weights, kernels)
        assert half.dtype == torch.bfloat16
        # 8 bits of mantissa, three products: a few parts in a hundred of the largest value.
        assert float((half.float() - exact).abs().max() / exact.abs().max()) < 0.03


def test_feed_forward_is_swiglu():
    gate_matrix, up_matrix = random(4, 3), random(4, 3, seed=1)
    params = {"gate_up": torch.cat([gate_matrix, up_matrix], dim=-1), "down": random(3, 4, seed=2)}
    x = random(2, 5, 4, seed=3)
    gate = x @ gate_matrix
    expected = (gate / (1 + torch.exp(-gate)) * (x @ up_matrix)) @ params["down"]
    for kernels in ("fused", "reference"):
        torch.testing.assert_close(feed_forward(params, x, kernels), expected, **EXACT)


def test_the_fused_swiglu_has_the_gradient_of_its_definition():
    x, cotangent = random(3, 4, 10), random(3, 4, 5, seed=1)

    def gradient(kernels):
        return torch.func.vjp(lambda x: swiglu(x, kernels), x)[1](cotangent)[0]

    torch.testing.assert_close(gradient("fused"), gradient("reference"), **EXACT)
