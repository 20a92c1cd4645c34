"""Value and gradient of a loss over a parameter tree, without the graph nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels import inside_transform


def value_and_grad(function: Callable[[Any], tuple[Tensor, Any]], params: Any) -> tuple[Tensor, Any, Any]:
    """``torch.func.grad_and_value`` of ``function`` with auxiliary output, at the price of plain autograd.

    ``torch.func.grad`` always runs its backward with ``create_graph=True``, in case an outer transform differentiates
    it again. That keeps every intermediate of the backward alive and costs about a sixth of the time of a step.
    When no transform is around and nothing the loss depends on requires a gradient, nobody can ask, and the backward
    runs without.

    Args:
      function: ``params -> (loss, auxiliary)``, the loss a scalar, the auxiliary a tree of tensors.
      params: a tree of floating-point tensors.

    Returns:
      loss, auxiliary, gradient (a tree like ``params``).

    Raises:
      ValueError: for a loss that is no scalar.
    """
    enabled = torch.is_grad_enabled()
    # In inference mode torch 2.11 returns zeros; to leave it turns gradients on.
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        loss, pull_back, auxiliary = torch.func.vjp(function, params, has_aux=True)  # type: ignore[misc]
        if loss.ndim:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}; it must be a scalar")
        with torch.set_grad_enabled(enabled and _may_be_differentiated(loss)):
            (gradient,) = pull_back(torch.ones_like(loss))
    return loss, auxiliary, gradient


def _may_be_differentiated(loss: Tensor) -> bool:
    """Whether an outer transform, or autograd, may differentiate what ``loss`` was computed from.

    Autograd may for the sake of the parameters or of anything else the loss closes over; ``loss`` knows of both.
    """
    return inside_transform() or loss.requires_grad
