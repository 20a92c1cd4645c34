"""Clipping by the global norm, whose computation is an argument because it is not elementwise."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _tree
from ._base import GradientTransformation, stateless
from ._elementwise import cast, check_no_transform, scale
from ._tree import Tree


def global_norm(tree: Tree, *, foreach: bool = True) -> Tensor:
    """Return the 2-norm of all elements of all leaves together, float32 [].

    Args:
        tree: tensors of any floating dtype on one device.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        NotImplementedError: ``foreach=True`` inside a ``torch.func`` transform.
    """
    leaves = _tree.flatten(tree)[0]
    if not leaves:
        return torch.zeros((), dtype=torch.float32)
    if foreach:
        check_no_transform(leaves, "global_norm")
        norms: list[Tensor] = list(torch._foreach_norm(cast(leaves, torch.float32)))
    else:
        norms = [torch.linalg.vector_norm(leaf) for leaf in cast(leaves, torch.float32)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


_norm_here = global_norm
"""The same function, where the argument of :func:`clip_by_global_norm` hides its name."""


def clip_by_global_norm(
    max_norm: float, global_norm: Callable[[Tree], Tensor] | None = None, *, foreach: bool = True
) -> GradientTransformation:
    """Scale the updates down so that their global norm is at most ``max_norm``.

    Args:
        max_norm: the largest norm that is left alone; above 0.
        global_norm: returns the norm of a tree, [], on the leaves' device. ``None`` for :func:`global_norm`
            with this ``foreach``; give one that reduces over ranks where leaves are sharded.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: ``max_norm`` is not above 0.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")

    def clip(updates: Tree, params: Tree | None) -> Tree:
        leaves, spec = _tree.flatten(updates)
        if foreach:
            check_no_transform(leaves, "clip_by_global_norm")
        norm = _norm_here(updates, foreach=foreach) if global_norm is None else global_norm(updates)
        factor = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return _tree.unflatten(scale(leaves, factor, foreach=foreach), spec)

    return stateless(clip)
