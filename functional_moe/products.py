"""Matrix products by the fastest kernel of the machine, with a derivative.

On CPUs that is oneDNN for large fp32 matrices (``optim.matrix_product`` chooses): on two Zen 5 cores it is 2.3 times as
fast forward and 1.3 to 1.8 times in a weight's gradient. It has no derivative, so the rule is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Kernels, ReverseModeFunction, inside_transform
from .optim import ROWS_PER_SHAPE, matrix_product, uses_onednn
from .optim import product_over_rows as product_over_rows

product = matrix_product
"""``x @ y`` of two plain matrices of any strides, [n, k] and [k, m], where no derivative is wanted."""


def rows_per_shape(x: Tensor) -> int:
    """The multiple to which the rows of a product of ``x`` are best rounded when their number never repeats.

    oneDNN prepares code for every shape it meets, which takes longer than it saves an expert's product.
    """
    return ROWS_PER_SHAPE if uses_onednn(x) else 1


class _Product(ReverseModeFunction):
    @staticmethod
    def forward(x: Tensor, y: Tensor, needed: bool) -> Tensor:
        return product(x, y) if needed else x.new_empty(x.shape[0], y.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        differentiable = torch.is_grad_enabled() or inside_transform()

        # Expanded ones, such as that of a sum, are copied once here instead of once per product.
        grad = grad.contiguous()
        need_x, need_y, _ = ctx.needs_input_grad
        if differentiable:
            grad_x = _Product.apply(grad, y.t(), True) if need_x else None
            return grad_x, _Product.apply(x.t(), grad, True) if need_y else None, None
        return product(grad, y.t()) if need_x else None, product_over_rows(x, grad) if need_y else None, None


def matmul(x: Tensor, weight: Tensor, kernels: Kernels = "fused", needed: bool = True) -> Tensor:
    """``x @ weight`` in ``x``'s dtype; with the fused kernels differentiable in reverse mode, to any order.

    Args:
      x: ``[..., in]``.
      weight: ``[in, out]``.
      kernels: ``"reference"`` is torch's own product, with every transform's rule.
      needed: when False, the fused kernels leave the result unfilled: for a replay, which wants its derivative alone.

    Returns:
      ``[..., out]``.
    """
    weight = weight.to(x.dtype)
    if kernels == "reference":
        return x @ weight
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, needed)
    return rows.view(*x.shape[:-1], weight.shape[-1])
