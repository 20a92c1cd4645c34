"""The chunked loss is torch's cross-entropy, in value and gradient, without the logits of all tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe.cross_entropy import IGNORE_INDEX, summed_cross_entropy

# fp64 sums of a few dozen terms in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(x, head, targets):
    """torch's own, of all logits at once."""
    return F.cross_entropy((x @ head).to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="sum")


def value_and_gradients(function, x, head):
    x, head = x.clone().requires_grad_(), head.clone().requires_grad_()
    value = function(x, head)
    return value.detach(), *torch.autograd.grad(3.0 * value, (x, head))


VOCAB = 7
targets_strategy = st.lists(st.sampled_from([IGNORE_INDEX, *range(VOCAB)]), max_size=12)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@given(targets=targets_strategy, chunk=st.integers(1, 14))
@example(targets=[IGNORE_INDEX] * 6, chunk=2)  # nothing to predict
@example(targets=[1, 2, IGNORE_INDEX, IGNORE_INDEX, 3], chunk=2)  # an ignored chunk
@example(targets=[4], chunk=1)
@example(targets=[], chunk=3)
def test_loss_is_torchs_in_value_and_gradient(kernels, targets, chunk):
    targets = torch.tensor(targets, dtype=torch.int64)
    x, head = random(len(targets), 5), random(5, VOCAB, seed=1)
    ours = value_and_gradients(lambda a, b: summed_cross_entropy(a, b, targets, chunk=chunk, kernels=kernels), x, head)
    reference = value_and_gradients(lambda a, b: dense(a, b, targets), x, head)
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, expected, **EXACT)
    ignored = ours[1][targets == IGNORE_INDEX]
    assert torch.equal(ignored, torch.zeros_like(ignored))
    if bool((targets == IGNORE_INDEX).all()):
        assert float(ours[0]) == 0.0
        assert torch.equal(ours[2], torch.zeros_like(head))


def test_gradcheck():
    targets = torch.tensor([0, IGNORE_INDEX, 3, 6, 2])
    x, head = random(5, 4).requires_grad_(), random(4, VOCAB, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: summed_cross_entropy(a, b, targets, chunk=2), (x, head))

    def reference(a, b):
        return summed_cross_entropy(a, b, targets, kernels="reference")

    assert torch.autograd.gradgradcheck(reference, (x, head))


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("target", [-1, -99, VOCAB, VOCAB + 100])
def test_a_target_outside_the_vocabulary_raises(kernels, target):
    """-1 too, which other libraries use for 'ignore': it must not count as class 0 or as the last one."""
    x, head, targets = random(3, 5), random(5, VOCAB), torch.tensor([1, target, 2])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        summed_cross_entropy(x, head, targets, chunk=2, kernels=kernels)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_huge_logits_neither_overflow_nor_lose_the_gradient(kernels):
    x = torch.tensor([[1e4, 0.0], [0.0, 1e4]])
    head = torch.eye(2)
    targets = torch.tensor([1, 1])
    value, grad_x, _ = value_and_gradients(lambda a, b: summed_cross_entropy(a, b, targets, kernels=kernels), x, head)
    assert float(value) == 1e4
    torch.testing.assert_close(grad_x, torch.tensor([[3.0, -3.0], [0.0, 0.0]]))


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_bf16_products_give_an_fp32_loss_and_bf16_gradients(kernels):
    x, head = random(64, 16, dtype=torch.bfloat16), random(16, 32, seed=1, dtype=torch.bfloat16)
    targets = torch.arange(64) % 32
    value, grad_x, grad_head = value_and_gradients(
        lambda a, b: summed_cross_entropy(a, b, targets, chunk=8, kernels=kernels), x, head
    )
    assert (value.dtype, grad_x.dtype, grad_head.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    exact = value_and_gradients(lambda a, b: dense(a, b, targets), x.double(), head.double())
    # The logits are bf16 products (2^-8 each); their errors average over 64 tokens.
    assert abs(float(value / exact[0]) - 1) < 2e-3
    for got, expected in ((grad_x, exact[1]), (grad_head, exact[2])):
        assert float((got.double() - expected).norm() / expected.norm()) < 1e-2


def test_the_loss_of_many_tokens_is_summed_in_fp32():
    """In bf16 a sum stops growing at 256 times its terms."""
    x, head = torch.zeros(4096, 8, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    value = summed_cross_entropy(x, head, torch.zeros(4096, dtype=torch.int64), chunk=1)
    # 4096 additions in fp32, each rounded by up to 6e-8 of the sum.
    assert float(value) == pytest.approx(4096 * 2.7725887, rel=2e-4)


def test_the_gradient_of_the_head_is_summed_over_chunks_in_fp32():
    """Each of 1024 chunks adds the same; a bf16 sum would stall."""
    x, head = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16)
    *_, grad = value_and_gradients(
        lambda a, b: summed_cross_entropy(a, b, torch.zeros(1024, dtype=torch.int64), chunk=1), x, head
    )
    torch.testing.assert_close(grad.float(), torch.tensor([[-1536.0, 1536.0]]), rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_tokens_never_exist(dtype):
    tokens, hidden, vocab, chunk = 240, 4, 50, 16
    x, head = random(tokens, hidden, dtype=dtype), random(hidden, vocab, seed=1, dtype=dtype)
    targets = torch.arange(tokens) % vocab
    with Largest() as chunked:
        value_and_gradients(lambda a, b: summed_cross_entropy(a, b, targets, chunk=chunk), x, head)
    with Largest() as whole:
        value_and_gradients(lambda a, b: dense(a, b, targets), x, head)
    assert whole.elements == tokens * vocab  # the watch sees forward and backward
    assert chunked.elements <= max(chunk * vocab, tokens * hidden)
