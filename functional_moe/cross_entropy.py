"""Cross-entropy over a vocabulary too wide to hold for all tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Kernels, first_order_kernel
from .products import product, product_over_rows

IGNORE_INDEX = -100
"""The target that asks for no prediction."""


def _logits(x: Tensor, head: Tensor) -> Tensor:
    """Logits in fp32 or better, of a product in ``x``'s dtype."""
    return product(x, head).to(torch.promote_types(x.dtype, torch.float32))


def _classes(targets: Tensor) -> Tensor:
    """The targets, and any class at all where they are ignored. Other numbers outside the vocabulary stay errors."""
    return torch.where(targets == IGNORE_INDEX, 0, targets)


def _loss(x: Tensor, head: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor]:
    """The summed loss, a chunk of tokens at a time."""
    total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
        # Its kernel takes a third of the time of logsumexp's.
        chosen = torch.log_softmax(_logits(part, head), dim=-1).gather(-1, _classes(target)[:, None]).squeeze(-1)
        total -= torch.where(target == IGNORE_INDEX, 0.0, chosen).sum()
    return (total,)


def _loss_gradient(cotangent: Tensor, x: Tensor, head: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Makes each chunk's logits again: one more product with the head is the price of not keeping them."""
    grad_x = torch.empty_like(x)
    # Sums over chunks are kept in fp32: in bf16 the later chunks would be rounded away.
    grad_head = torch.zeros(head.shape, dtype=torch.promote_types(head.dtype, torch.float32), device=head.device)
    for part, grad_part, target in zip(x.split(chunk), grad_x.split(chunk), targets.split(chunk), strict=True):
        delta = torch.softmax(_logits(part, head), dim=-1)
        rows = torch.arange(len(target), device=target.device)
        delta[rows, _classes(target)] -= 1.0
        delta *= torch.where(target == IGNORE_INDEX, 0.0, cotangent)[:, None]
        delta = delta.to(x.dtype)
        grad_part.copy_(product(delta, head.t()))
        grad_head += product_over_rows(part, delta)
    return grad_x, grad_head.to(head.dtype)


_chunked = first_order_kernel(_loss, _loss_gradient, 2)


def summed_cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, *, chunk: int = 1024, kernels: Kernels = "fused"
) -> Tensor:
    """The sum over tokens of the cross-entropy of ``x @ head``, in fp32 or better.

    Args:
      x: ``[tokens, hidden]``.
      head: ``[hidden, vocab]``.
      targets: int64 ``[tokens]``; ``IGNORE_INDEX`` contributes nothing, every other number is a class of the
        vocabulary or an indexing error.
      chunk: tokens whose logits exist at one time: ``2 * chunk * vocab * 4`` bytes, beside the head's gradient, which
        is summed in fp32.
      kernels: ``"reference"`` holds all logits and knows every transform.

    Returns:
      A scalar; 0 when every target is ignored.
    """
    if kernels == "fused":
        return _chunked(x, head, targets, chunk)
    logits = (x @ head).to(torch.promote_types(x.dtype, torch.float32))
    losses = torch.log_softmax(logits, dim=-1).gather(-1, _classes(targets)[:, None]).squeeze(-1)
    return torch.where(targets == IGNORE_INDEX, 0.0, -losses).sum()
