"""Arithmetic over lists of tensors, out of place, by one kernel for all (``foreach=True``) or leaf by leaf.

``torch._foreach_*`` has no batching rule for ``torch.func.vmap`` and mutates nothing in the forms used here.
With ``foreach=False`` every operation is a plain torch call per leaf, which every ``torch.func`` transform
can see through.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor


def check_no_transform(tensors: Sequence[Tensor], user: str) -> None:
    """Raise if a tensor is inside a ``torch.func`` transform, which the list kernels cannot see through.

    Raises:
        NotImplementedError: names the argument that chooses the other path.
    """
    if not torch._C._are_functorch_transforms_active():
        return
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"{user} was called inside a torch.func transform (vmap, grad, ...) with foreach=True, "
            "whose kernels have no batching or differentiation rule; build it with foreach=False"
        )


def number(value: Scalar) -> float:
    """Return a 0-dimensional CPU tensor (or a float) as a float."""
    return float(value)


def scale(xs: Sequence[Tensor], factor: Scalar, *, foreach: bool) -> list[Tensor]:
    """Return ``x * factor`` for each ``x``; ``factor`` is a float or a tensor [] on their device."""
    if not xs:
        return []
    if foreach:
        return list(torch._foreach_mul(list(xs), factor))
    return [x * factor for x in xs]


def add(xs: Sequence[Tensor], ys: Sequence[Tensor], *, alpha: float = 1.0, foreach: bool) -> list[Tensor]:
    """Return ``x + alpha y`` for each pair."""
    if not xs:
        return []
    if foreach:
        return list(torch._foreach_add(list(xs), list(ys), alpha=alpha))
    return [torch.add(x, y, alpha=alpha) for x, y in zip(xs, ys, strict=True)]


def lerp(xs: Sequence[Tensor], ys: Sequence[Tensor], weight: Scalar, *, foreach: bool) -> list[Tensor]:
    """Return ``x + weight (y - x)`` for each pair; ``weight`` is a float or a tensor []."""
    if not xs:
        return []
    if foreach:
        return list(torch._foreach_lerp(list(xs), list(ys), number(weight)))
    if isinstance(weight, Tensor):
        return [torch.lerp(x, y, weight.to(x.dtype)) for x, y in zip(xs, ys, strict=True)]
    return [torch.lerp(x, y, weight) for x, y in zip(xs, ys, strict=True)]


def cast(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return each tensor in ``dtype``; one that has it already is returned as it is, not copied."""
    return [x if x.dtype == dtype else x.to(dtype) for x in xs]
