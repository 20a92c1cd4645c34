"""Counted floating-point operations are those of the formulas."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from functional_moe.attention import Projected, attend
from functional_moe.chain import loss_fn
from functional_moe.dispatch import decide
from functional_moe.experts import routed_experts
from functional_moe.flops import train_flops_per_token
from functional_moe.model import init_balance
from functional_moe.products import product, product_over_rows


def counted(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def heads(number, seq, requires_grad=True):
    return torch.randn(2, number, seq, 8, requires_grad=requires_grad)


@pytest.mark.parametrize("fake", [False, True])
def test_attention_forward_is_two_products_and_its_backward_five(fake):
    """Causal or not, as torch counts it on CUDA; shared keys are multiplied for every query head."""
    pairs = 2 * 6 * 10 * 10 * 8  # batch, query heads, queries, keys, head_dim

    def run():
        projected = Projected(heads(6, 10), heads(3, 10), heads(3, 10))
        found = []
        assert counted(lambda: found.append(attend(projected, None))) == 2 * 2 * pairs
        out, core = found[0]
        assert counted(lambda: torch.autograd.grad(out.sum(), projected)) == 5 * 2 * pairs
        assert counted(lambda: attend(projected, None, core=core)) == 0

    if fake:
        with FakeTensorMode():
            run()
    else:
        run()


def test_documents_count_their_own_pairs():
    starts = torch.tensor([[0] * 3 + [3] * 7, [0] * 10])
    projected = Projected(*(heads(6, 10, requires_grad=False) for _ in range(3)))
    assert counted(attend, projected, starts) == 2 * 2 * 6 * 8 * (3 * 3 + 7 * 7 + 10 * 10)


def test_onednn_products_are_counted():
    x, y = torch.randn(256, 128), torch.randn(128, 512)
    assert counted(product, x, y) == 2 * 256 * 128 * 512
    x, y = torch.randn(300, 128), torch.randn(300, 512)  # 256 rows by oneDNN, 44 by torch
    assert counted(product_over_rows, x, y) == 2 * 300 * 128 * 512


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cpu", torch.float64)]
)
def test_experts_count_every_row_once(device, dtype):
    """On fake tensors in bf16 by torch's grouped product; on real ones in fp64 an expert at a time."""
    tokens, top_k, hidden, width = 24, 2, 16, 8
    experts = torch.stack([torch.arange(tokens) % 4, (torch.arange(tokens) + 1) % 4], dim=1)

    def run():
        params = {
            "gate_up": torch.zeros(4, hidden, 2 * width, dtype=dtype, device=device),
            "down": torch.zeros(4, width, hidden, dtype=dtype, device=device),
        }
        x = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        weights = torch.zeros(tokens, top_k, dtype=dtype, device=device)
        decision = decide(torch.empty_like(experts, device=device) if dtype == torch.bfloat16 else experts, 4)
        return counted(routed_experts, params, x, decision, weights)

    if dtype == torch.bfloat16:
        with FakeTensorMode(allow_non_fake_inputs=True):
            flops = run()
    else:
        flops = run()
    assert flops == tokens * top_k * 2 * 3 * hidden * width


@pytest.mark.parametrize("changes", [{}, {"num_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 9}])
def test_a_gradient_counts_what_the_formula_says(make_config, make_params, changes):
    """``train_flops_per_token`` differs by what it says: half of the pairs, six products of them instead of seven
    double ones, every parameter a matrix; and the loss makes its logits twice.
    """
    config = make_config(compute_dtype="float64", use_qk_norm=False, attention_bias=False, **changes)
    params, seq = make_params(config), 8
    tokens = torch.arange(2 * seq).view(2, seq) % config.vocab_size
    batch = {"tokens": tokens, "targets": tokens}
    flops = counted(torch.func.grad(lambda p: loss_fn(p, init_balance(config), batch, config)[0]), params)
    vectors = sum(leaf.numel() for leaf in pytree.tree_leaves(params) if leaf.ndim == 1)
    matrices = train_flops_per_token(config, 0) - 6 * vectors
    logits = 2 * config.vocab_size * config.hidden_size
    pairs = config.num_hidden_layers * config.num_attention_heads * config.attention_head_dim * seq
    assert flops == tokens.numel() * (matrices + logits + 7 * 2 * pairs)
    assert train_flops_per_token(config, seq) - train_flops_per_token(config, 0) == 6 * pairs
