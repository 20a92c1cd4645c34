"""Matrix products, by the fastest kernel of the machine.

On CPUs torch multiplies fp32 matrices by MKL, which on AMD processors uses half the vector width: on two Zen 5 cores
oneDNN is 2.3 times as fast forward and 1.3 to 1.8 times in a weight's gradient. oneDNN is reached through the operator
that ``torch.compile`` uses for ``Linear``; it has no derivative, so the rule is here. Rounding is all that differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Kernels, ReverseModeFunction, inside_transform

_SMALL = 1 << 19
"""Multiply-adds below which the call costs more than the faster kernel saves."""


def _uses_onednn(x: Tensor) -> bool:
    return (
        type(x) is Tensor  # neither a fake tensor nor another subclass
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def rows_per_shape(x: Tensor) -> int:
    """The multiple to which the rows of a product of ``x`` are best rounded when their number never repeats.

    oneDNN prepares code for every shape it meets, which takes longer (0.3 ms) than it saves an expert's product.
    """
    return 64 if _uses_onednn(x) else 1


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` of two plain matrices of any strides: [n, k], [k, m] to [n, m]. Without a derivative."""
    if _uses_onednn(x) and y.dtype == x.dtype and x.shape[0] * x.shape[1] * y.shape[1] > _SMALL:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")
        return out
    return x @ y


class _Product(ReverseModeFunction):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return product(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        differentiable = torch.is_grad_enabled() or inside_transform()
        function = _Product.apply if differentiable else product
        # oneDNN is slow on expanded cotangents, such as that of a sum.
        grad = grad.contiguous()
        need_x, need_y = ctx.needs_input_grad
        return function(grad, y.t()) if need_x else None, function(x.t(), grad) if need_y else None


def matmul(x: Tensor, weight: Tensor, kernels: Kernels = "fused") -> Tensor:
    """``x @ weight`` in ``x``'s dtype; with the fused kernels differentiable in reverse mode, to any order.

    Args:
      x: ``[..., in]``.
      weight: ``[in, out]``.
      kernels: ``"reference"`` is torch's own product, with every transform's rule.

    Returns:
      ``[..., out]``.
    """
    weight = weight.to(x.dtype)
    if kernels == "reference":
        return x @ weight
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[-1])
