"""Root-mean-square normalisation is torch's, with fp32 statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from functional_moe.norm import rms_norm


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_equals_torchs_in_value_and_gradient(eps):
    x, scale = random(2, 3, 7).requires_grad_(), random(7, seed=1).requires_grad_()
    ours, reference = rms_norm(x, scale, eps), F.rms_norm(x, (7,), scale, eps)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)  # fp64, 7 terms
    cotangent = random(2, 3, 7, seed=2)
    for a, b in zip(*(torch.autograd.grad(y, (x, scale), cotangent) for y in (ours, reference)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_bf16_is_rounded_once(size):
    """Statistics, scale and product are fp32; the result alone is rounded, by at most half of 2^-7 of itself."""
    x, scale = (size * random(16, 513)).bfloat16(), random(513, seed=1, dtype=torch.float32)
    out = rms_norm(x, scale, 1e-12)
    assert out.dtype == torch.bfloat16
    exact = F.rms_norm(x.double(), (513,), scale.double(), 1e-12)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 * 1.01, atol=1e-12)


def test_a_row_of_zeros_stays_zero_and_differentiable():
    x = torch.zeros(1, 4, requires_grad=True)
    out = rms_norm(x, torch.ones(4), 1e-6)
    assert torch.equal(out.detach(), torch.zeros(1, 4))
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
