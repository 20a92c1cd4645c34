"""Cross-entropy over a vocabulary too wide to hold for all tokens at once."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .kernels import Kernels, ReverseModeFunction, refuse

IGNORE_INDEX = -100
"""The target that asks for no prediction."""


def _logits(x: Tensor, head: Tensor) -> Tensor:
    """Logits in fp32 or better, of a product in ``x``'s dtype."""
    return (x @ head).to(torch.promote_types(x.dtype, torch.float32))


def _classes(targets: Tensor) -> Tensor:
    """The targets, and any class at all where they are ignored. Other numbers outside the vocabulary stay errors."""
    return torch.where(targets == IGNORE_INDEX, 0, targets)


class _ChunkedCrossEntropy(ReverseModeFunction):
    """The summed loss, a chunk of tokens at a time; the backward makes each chunk's logits again.

    Only the log-sum-exp of each token is kept between the two: one more product with the head is the price.
    """

    @staticmethod
    def forward(x: Tensor, head: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        log_sum_exp = []
        for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
            logits = _logits(part, head)
            log_sum_exp.append(torch.logsumexp(logits, dim=-1))
            chosen = logits.gather(-1, _classes(target)[:, None]).squeeze(-1)
            total = total + torch.where(target == IGNORE_INDEX, 0.0, log_sum_exp[-1] - chosen).sum()
        return total, torch.cat(log_sum_exp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        x, head, targets, ctx.chunk = inputs
        ctx.save_for_backward(x, head, targets, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_head = _CrossEntropyGradient.apply(grad, *ctx.saved_tensors, ctx.chunk)
        return grad_x, grad_head, None, None


class _CrossEntropyGradient(ReverseModeFunction):
    """The gradients of the summed loss. Their own derivative is the reference path's business."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, head: Tensor, targets: Tensor, log_sum_exp: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        grads_x = []
        # Sums over chunks are kept in fp32: in bf16 the later chunks would be rounded away.
        grad_head = torch.zeros(head.shape, dtype=torch.promote_types(head.dtype, torch.float32), device=head.device)
        for part, target, lse in zip(x.split(chunk), targets.split(chunk), log_sum_exp.split(chunk), strict=True):
            delta = torch.exp_(_logits(part, head).sub_(lse[:, None]))
            rows = torch.arange(len(target), device=target.device)
            delta[rows, _classes(target)] -= 1.0
            delta *= torch.where(target == IGNORE_INDEX, 0.0, grad)[:, None]
            delta = delta.to(x.dtype)
            grads_x.append(delta @ head.t())
            grad_head += part.t() @ delta
        return torch.cat(grads_x), grad_head.to(head.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse("second-order differentiation")


def summed_cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, *, chunk: int = 1024, kernels: Kernels = "fused"
) -> Tensor:
    """The sum over tokens of the cross-entropy of ``x @ head``, in fp32 or better.

    Args:
      x: ``[tokens, hidden]``.
      head: ``[hidden, vocab]``.
      targets: int64 ``[tokens]``; ``IGNORE_INDEX`` contributes nothing, every other number is a class of the
        vocabulary or an indexing error.
      chunk: tokens whose logits exist at one time: the extra memory is ``2 * chunk * vocab * 4`` bytes.
      kernels: ``"reference"`` holds all logits and knows every transform.

    Returns:
      A scalar; 0 when every target is ignored.
    """
    if kernels == "fused":
        total, _ = _ChunkedCrossEntropy.apply(x, head, targets, chunk)
        return total  # type: ignore[no-any-return]
    losses = torch.log_softmax(_logits(x, head), dim=-1).gather(-1, _classes(targets)[:, None]).squeeze(-1)
    return torch.where(targets == IGNORE_INDEX, 0.0, -losses).sum()
