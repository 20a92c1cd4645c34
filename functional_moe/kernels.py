"""Which implementation computes a thing: the fast kernels, or ordinary operations that every transform knows.

The fast kernels (flash attention, grouped matrix products) differentiate once, in reverse mode, which is what
training needs. ``kernels="reference"`` computes the same values from operations with every rule, for
``jvp``, ``vmap``, Hessians and checks. Nothing falls back from one to the other: a transform the fast kernels
lack raises and says which argument to give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

Kernels = Literal["fused", "reference"]


def check_kernels(kernels: str) -> None:
    """Raises ``ValueError`` unless ``kernels`` is one of the two names."""
    if kernels not in ("fused", "reference"):
        raise ValueError(f"kernels = {kernels!r}: must be 'fused' or 'reference'")


def inside_transform() -> bool:
    """Whether a ``torch.func`` transform (grad, vjp, vmap, jvp, ...) is running the caller."""
    return torch._C._are_functorch_transforms_active()


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


def first_order_kernel_with_residuals(
    forward: Callable[..., tuple[Tensor, ...]],
    gradient: Callable[..., tuple[Tensor | None, ...]],
    differentiable: int,
    results: int = 1,
) -> Callable[..., tuple[Tensor, ...]]:
    """A function with a first-order reverse rule of its own, and a refusal for every other transform.

    Both parts get plain tensors, also inside ``torch.func.grad`` or ``vjp``, so they may work in place on what they
    have allocated.

    Args:
      forward: ``(*inputs) -> (*results, *residuals)``; the residuals are what the gradient wants besides the inputs.
      gradient: ``(*cotangents, *inputs, *residuals) -> gradients`` of the first ``differentiable`` inputs. The
        cotangents, one of each result, may have any strides.
      differentiable: how many inputs, from the first, have a gradient; the others may be tensors or plain values.
      results: how many of the outputs are results.

    Returns:
      ``(*inputs) -> (*results, *residuals)``, the residuals without gradient.
    """

    class Gradient(ReverseModeFunction):
        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
            return gradient(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> NoReturn:
            refuse("second-order differentiation")

    class Kernel(ReverseModeFunction):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            residuals = output[results:]
            ctx.zeros = [partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in output[:results]]
            ctx.mark_non_differentiable(*residuals)
            # Else every residual would get a cotangent full of zeros.
            ctx.set_materialize_grads(False)
            ctx.plain = [None if isinstance(value, Tensor) else value for value in inputs]
            ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
            ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), *residuals)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            count = len(ctx.plain)
            given = cotangents[:results]
            if all(cotangent is None for cotangent in given):
                return (None,) * count
            whole = [zeros() if x is None else x for x, zeros in zip(given, ctx.zeros, strict=True)]
            saved = iter(ctx.saved_tensors)
            inputs = [
                next(saved) if is_tensor else plain for is_tensor, plain in zip(ctx.is_tensor, ctx.plain, strict=True)
            ]
            # A Function is for who may differentiate the gradient; without a graph there is nobody.
            function = Gradient.apply if torch.is_grad_enabled() or inside_transform() else gradient
            grads: tuple[Tensor | None, ...] = function(*whole, *inputs, *saved)
            return (*grads, *(None,) * (count - differentiable))

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = Kernel.apply(*inputs)
        return outputs

    return call


def first_order_kernel(
    forward: Callable[..., tuple[Tensor, ...]], gradient: Callable[..., tuple[Tensor, ...]], differentiable: int
) -> Callable[..., Tensor]:
    """``first_order_kernel_with_residuals`` for who wants the result alone: ``(*inputs) -> result``."""
    kernel = first_order_kernel_with_residuals(forward, gradient, differentiable)
    return lambda *inputs: kernel(*inputs)[0]
