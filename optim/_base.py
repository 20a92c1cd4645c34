"""The contract of every optimizer here, and how they compose.

A :class:`GradientTransformation` is two pure functions: ``init(params) -> state`` and
``update(updates, state, params) -> (updates, state)``. The last one of a chain returns what is
*added* to the parameters by :func:`apply_updates`. The idea and the names are optax's (https://github.com/google-deepmind/optax).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from . import _tree
from ._elementwise import add, check_no_transform
from ._tree import Tree


class UpdateFn(Protocol):
    """``update(updates, state, params) -> (updates, state)``; the inputs are left as they are."""

    def __call__(self, updates: Tree, state: Tree, params: Tree | None = None, /) -> tuple[Tree, Tree]:
        """Return the transformed updates and the next state."""
        ...


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    ``init(params)`` returns the state, a tree. ``update(updates, state, params)`` returns new updates,
    congruent with ``params``, and the new state. Neither changes its inputs.
    """

    init: Callable[[Tree], Tree]
    update: UpdateFn


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def stateless(function: Callable[[Tree, Tree | None], Tree]) -> GradientTransformation:
    """Make a transformation of a function ``(updates, params) -> updates``."""

    def update(updates: Tree, state: EmptyState, params: Tree | None = None, /) -> tuple[Tree, EmptyState]:
        return function(updates, params), state

    return GradientTransformation(lambda params: EmptyState(), update)


def identity() -> GradientTransformation:
    """Return the transformation that changes nothing."""
    return stateless(lambda updates, params: updates)


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after another; the state is the tuple of their states.

    Raises:
        ValueError: in ``update``, when the state does not have one entry per transformation.
    """

    def init(params: Tree) -> tuple[Tree, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Tree, state: tuple[Tree, ...], params: Tree | None = None, /) -> tuple[Tree, tuple[Tree, ...]]:
        if len(state) != len(transforms):
            raise ValueError(f"chain of {len(transforms)} transformations got a state of {len(state)} entries")
        new_state = []
        for transform, inner in zip(transforms, state, strict=True):
            updates, inner = transform.update(updates, inner, params)
            new_state.append(inner)
        return updates, tuple(new_state)

    return GradientTransformation(init, update)


def checked(inner: GradientTransformation, name: str) -> GradientTransformation:
    """Make ``inner`` refuse gradients that are not congruent with the parameters.

    Args:
        inner: a transformation that is given gradients, not yet transformed ones.
        name: the optimizer's name, for the messages.

    Raises:
        ValueError: in ``init``, for a leaf that is no floating-point tensor; in ``update``, without
            parameters, when the tree or a shape of the gradients differs from the parameters', or when a
            dtype is neither its parameter's nor a wider floating-point one. The leaf's path is named.
    """

    def init(params: Tree) -> Tree:
        _tree.check_floating(params, name)
        return inner.init(params)

    def update(updates: Tree, state: Tree, params: Tree | None = None, /) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError(f"{name}: update needs the parameters as its third argument, got None")
        _tree.check_congruent(params, updates, f"{name}: the gradients")
        return inner.update(updates, state, params)

    return GradientTransformation(init, update)


def apply_updates(params: Tree, updates: Tree, *, foreach: bool = True) -> Tree:
    """Return ``params + updates``, each sum in the parameter's dtype.

    Args:
        params: tree of tensors.
        updates: congruent tree; a dtype may be wider than its parameter's (the sum is rounded once).
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: the trees or a shape differ; the leaf's path is named.
        NotImplementedError: ``foreach=True`` inside a ``torch.func`` transform.
    """
    leaves, spec = _tree.flatten(params)
    new = _tree.check_congruent(params, updates, "apply_updates: the updates", dtype=False)
    if foreach:
        check_no_transform([*leaves, *new], "apply_updates")
    out = add(leaves, new, foreach=foreach)
    # A wider update promotes the sum; the parameter keeps its dtype.
    out = [y if x.dtype == y.dtype else y.to(x.dtype) for x, y in zip(leaves, out, strict=True)]
    return _tree.unflatten(out, spec)


def apply_updates_in_place(params: Tree, updates: Tree) -> None:
    """Write what :func:`apply_updates` returns, bit for bit, over ``params``: for those that nobody else needs.

    Args:
        params: tree of tensors that do not require a gradient.
        updates: congruent tree.

    Raises:
        ValueError: the trees or a shape differ; the leaf's path is named.
    """
    leaves, _ = _tree.flatten(params)
    new = _tree.check_congruent(params, updates, "apply_updates_in_place: the updates", dtype=False)
    if leaves:
        torch._foreach_add_(leaves, new)
