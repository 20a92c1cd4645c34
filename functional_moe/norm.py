"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis (arXiv 1910.07467), with fp32 statistics.

    Args:
      x: ``[..., size]``.
      scale: ``[size]``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * scale).to(x.dtype)
