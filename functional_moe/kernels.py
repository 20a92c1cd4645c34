"""Which implementation computes a thing: the fast kernels, or ordinary operations that every transform knows.

The fast kernels (flash attention, grouped matrix products) differentiate once, in reverse mode, which is what
training needs. ``kernels="reference"`` computes the same values from operations with every rule, for
``jvp``, ``vmap``, Hessians and checks. Nothing falls back from one to the other: a transform the fast kernels
lack raises and says which argument to give.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

Kernels = Literal["fused", "reference"]


def check_kernels(kernels: str) -> None:
    """Raises ``ValueError`` unless ``kernels`` is one of the two names."""
    if kernels not in ("fused", "reference"):
        raise ValueError(f"kernels = {kernels!r}: must be 'fused' or 'reference'")


def refuse(transform: str) -> NoReturn:
    """Raises the error of a transform that the fused kernels lack; it names the argument to give."""
    raise NotImplementedError(
        f"the fused kernels have no rule for {transform}; pass kernels='reference' to compute with operations that do"
    )


class ReverseModeFunction(torch.autograd.Function):
    """A Function with a reverse rule alone: forward mode and vmap raise, and say which argument to give."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuses."""
        refuse("forward-mode differentiation (jvp, hessian, jvp of grad)")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        """Refuses."""
        refuse("vmap")


class _FirstOrderReverse(ReverseModeFunction):
    """The identity, differentiable once in reverse mode; every other transform raises our message."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _NoSecondOrder.apply(grad)  # type: ignore[no-any-return]


class _NoSecondOrder(ReverseModeFunction):
    """The identity on a cotangent, which itself may not be differentiated."""

    @staticmethod
    def forward(grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        refuse("second-order differentiation")


def first_order_reverse(x: Tensor) -> Tensor:
    """``x`` unchanged, on its way into a kernel that has a first-order reverse rule and no other.

    Raises:
      NotImplementedError: when a transform asks for another rule; names ``kernels="reference"``.
    """
    return _FirstOrderReverse.apply(x)  # type: ignore[no-any-return]
