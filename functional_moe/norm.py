"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Kernels, first_order_kernel


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalize(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What :func:`rms_norm` computes, without a derivative, and the inverse of each row's root mean square."""
    wide = _wide(x)
    # One pass over x; squares and their mean would be two and a temporary.
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(scale).to(x.dtype), inverse


def normalize_gradient(cotangent: Tensor, x: Tensor, scale: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """With ``y = x / rms`` and ``g = scale x cotangent``: ``(g - y mean(g y)) / rms``; then that of ``scale``."""
    y, grad = _wide(x) * inverse, _wide(cotangent)
    grad_scale = (grad * y).reshape(-1, *scale.shape).sum(0)
    grad_y = grad * scale
    mean = torch.linalg.vecdot(grad_y, y)[..., None].div_(x.shape[-1])
    return grad_y.addcmul_(y, mean, value=-1).mul_(inverse).to(x.dtype), grad_scale.to(scale.dtype)


_fused = first_order_kernel(
    normalize, lambda cotangent, x, scale, eps, inverse: normalize_gradient(cotangent, x, scale, inverse), 2
)


def rms_norm(x: Tensor, scale: Tensor, eps: float, kernels: Kernels = "fused") -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis (arXiv 1910.07467), with fp32 statistics.

    Args:
      x: ``[..., size]``.
      scale: ``[size]``, or with leading axes of ``x``; fp32 or better.
      eps: added to the mean square.
      kernels: ``"fused"`` keeps one number per row for the backward, instead of three tensors like ``x``.
    """
    if kernels == "fused":
        return _fused(x, scale, eps)
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)
