"""Transformations over part of a tree: :func:`masked` and :func:`partition`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from . import _tree
from ._base import GradientTransformation
from ._tree import MaskedNode, Tree

Labels: TypeAlias = Tree | Callable[[Tree], Tree]


class MaskedState(NamedTuple):
    """The state of a transformation that sees part of the leaves."""

    inner_state: Tree


class PartitionState(NamedTuple):
    """The states of the transformations of a partition, by label."""

    inner_states: dict[str, Tree]


def masked(inner: GradientTransformation, mask: Tree | Callable[[Tree], Tree]) -> GradientTransformation:
    """Apply ``inner`` to the leaves whose mask is true; the others pass through unchanged.

    Args:
        inner: sees a :class:`MaskedNode` in place of each other leaf, and keeps no state for it.
        mask: tree of bools congruent with the parameters or a prefix of them, or a function that returns one.

    Raises:
        ValueError: in ``init`` and ``update``, a mask for no leaf or a leaf without one; the path is named.
    """

    def init(params: Tree) -> MaskedState:
        return MaskedState(inner.init(_keep(params, _mask_leaves(mask, params))))

    def update(updates: Tree, state: MaskedState, params: Tree | None = None, /) -> tuple[Tree, MaskedState]:
        keep = _mask_leaves(mask, updates if params is None else params)
        inner_params = None if params is None else _keep(params, keep)
        if params is not None:
            # The mask is in the order of the parameters' leaves.
            updates = _tree.unflatten(_tree.flatten_like(params, updates, "masked: the updates"), params)
        new, inner_state = inner.update(_keep(updates, keep), state.inner_state, inner_params)
        return _merge(updates, [(keep, new)]), MaskedState(inner_state)

    return GradientTransformation(init, update)


def partition(transforms: Mapping[str, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Give each leaf to the transformation that its label names.

    Args:
        transforms: transformations by label.
        labels: tree of str congruent with the parameters or a prefix of them, or a function from the
            parameters to one.

    Returns:
        A transformation whose state holds the inner states by label. Inside, other transformations' leaves
        are :class:`MaskedNode`.

    Raises:
        ValueError: in ``init`` and ``update``: a leaf without a label, a label for no leaf, a label that no
            transformation has, a transformation that no leaf uses (unless leaves are masked). The path and the label
            are named.

    Example:
        >>> tx = partition({"muon": muon(0.02, axes), "adamw": adamw(3e-4)}, labels)
    """
    transforms = dict(transforms)
    if not transforms:
        raise ValueError("partition needs at least one transformation, got {}")

    def label_leaves(params: Tree) -> list[str]:
        tree = labels(params) if callable(labels) else labels
        leaves = _tree.broadcast_prefix(tree, params, lambda node: isinstance(node, str), "label")
        for index, label in enumerate(leaves):
            if label not in transforms:
                path = _tree.leaf_paths(params)[index]
                raise ValueError(f"leaf {path!r} has the label {label!r}; transformations are {list(transforms)}")
        unused = [label for label in transforms if label not in set(leaves)]
        # A part of a tree need not have every label.
        if unused and not _tree.is_part(params):
            raise ValueError(f"no leaf has the label {unused[0]!r}; labels in use are {sorted(set(leaves))}")
        return leaves

    def init(params: Tree) -> PartitionState:
        leaves = label_leaves(params)
        return PartitionState(
            {
                label: transform.init(_keep(params, [leaf == label for leaf in leaves]))
                for label, transform in transforms.items()
            }
        )

    def update(updates: Tree, state: PartitionState, params: Tree | None = None, /) -> tuple[Tree, PartitionState]:
        if set(state.inner_states) != set(transforms):
            raise ValueError(f"partition of {list(transforms)} got the state of {list(state.inner_states)}")
        reference = updates if params is None else params
        leaves = label_leaves(reference)
        # The labels are in the order of the parameters' leaves.
        updates = _tree.unflatten(_tree.flatten_like(reference, updates, "partition: the updates"), reference)
        parts, inner_states = [], {}
        for label, transform in transforms.items():
            keep = [leaf == label for leaf in leaves]
            inner_params = None if params is None else _keep(params, keep)
            new, inner_states[label] = transform.update(_keep(updates, keep), state.inner_states[label], inner_params)
            parts.append((keep, new))
        return _merge(updates, parts), PartitionState(inner_states)

    return GradientTransformation(init, update)


def _mask_leaves(mask: Tree | Callable[[Tree], Tree], tree: Tree) -> list[bool]:
    value = mask(tree) if callable(mask) else mask
    return _tree.broadcast_prefix(value, tree, lambda node: isinstance(node, bool), "mask")


def _keep(tree: Tree, keep: list[bool]) -> Tree:
    """Put a :class:`MaskedNode` in place of each leaf that is not kept."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([leaf if kept else MaskedNode() for leaf, kept in zip(leaves, keep, strict=True)], spec)


def _merge(tree: Tree, parts: list[tuple[list[bool], Tree]]) -> Tree:
    """Replace the kept leaves of ``tree`` by those of each part."""
    leaves, spec = _tree.flatten(tree)
    for keep, part in parts:
        new = iter(_tree.leaves_of(part))
        leaves = [next(new) if kept else leaf for leaf, kept in zip(leaves, keep, strict=True)]
        left = len(list[Any](new))
        if left:
            raise ValueError(f"a masked transformation returned {left} more leaves than it was given")
    return _tree.unflatten(leaves, spec)
