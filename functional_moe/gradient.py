"""Value and gradient of a loss over a parameter tree, without the graph nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def value_and_grad(function: Callable[[Any], tuple[Tensor, Any]], params: Any) -> tuple[Tensor, Any, Any]:
    """``torch.func.grad_and_value`` of ``function`` with auxiliary output, at the price of plain autograd.

    ``torch.func.grad`` always runs its backward with ``create_graph=True``, in case an outer transform differentiates
    it again. That keeps every intermediate of the backward alive and costs about a sixth of the time of a step.
    When no transform is around and nothing requires a gradient, nobody can ask, and the backward runs without.

    Args:
      function: ``params -> (loss, auxiliary)``, the loss a scalar.
      params: a tree of floating-point tensors.

    Returns:
      loss, auxiliary, gradient (a tree like ``params``).
    """
    if _is_differentiated(params):
        gradient, (loss, auxiliary) = torch.func.grad_and_value(function, has_aux=True)(params)
        return loss, auxiliary, gradient
    loss, pull_back, auxiliary = torch.func.vjp(function, params, has_aux=True)  # type: ignore[misc]
    with torch.no_grad():
        (gradient,) = pull_back(torch.ones_like(loss))
    return loss, auxiliary, gradient


def inside_transform() -> bool:
    """Whether a ``torch.func`` transform (grad, vjp, vmap, jvp, ...) is running the caller."""
    return torch._C._are_functorch_transforms_active()


def _is_differentiated(params: Any) -> bool:
    """Whether an outer transform, or autograd, may differentiate what is computed from ``params``."""
    return inside_transform() or (
        torch.is_grad_enabled() and any(leaf.requires_grad for leaf in pytree.tree_leaves(params))
    )
