"""Clipping by the global norm, whose computation is an argument because it is not elementwise."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

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


class _Part(NamedTuple):
    """A part of a gradient whose norm is known."""

    leaves: frozenset[int]  # ids
    norm: Tensor

    def norm_of(self, leaves: list[Tensor]) -> Tensor:
        if frozenset(map(id, leaves)) != self.leaves:
            raise ValueError(
                "clip_by_global_norm in a bucket is given something else than the bucket's gradient; in buckets it can "
                "only clip the whole gradient, before anything changes it"
            )
        return self.norm


_PART: ContextVar[_Part | None] = ContextVar("part of a gradient", default=None)


@contextlib.contextmanager
def part_of_gradient(updates: Tree, norm: Tensor) -> Iterator[None]:
    """Within it :func:`clip_by_global_norm` is given ``updates``, a part of a gradient whose norm is ``norm``.

    An argument of every transformation in between would be the other way to tell it.
    """
    token = _PART.set(_Part(frozenset(map(id, _tree.leaves_of(updates))), norm))
    try:
        yield
    finally:
        _PART.reset(token)


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
        part = _PART.get()
        if part is not None:
            norm = part.norm_of(leaves)
        else:
            norm = _norm_here(updates, foreach=foreach) if global_norm is None else global_norm(updates)
        factor = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return _tree.unflatten(scale(leaves, factor, foreach=foreach), spec)

    return stateless(clip)
