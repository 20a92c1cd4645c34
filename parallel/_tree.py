"""Trees whose leaves are named in messages: ``layers.0.experts.down``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from functional_moe.optim import path_name

from ._dtensor import is_placement

Tree: TypeAlias = Any


def is_leaf(node: Any) -> bool:
    """Whether ``node`` belongs to one leaf though torch sees a tree in it: placements, a size, a declaration."""
    if isinstance(node, torch.Size) or (hasattr(node, "shape") and hasattr(node, "axes")):
        return True
    return type(node) is tuple and bool(node) and all(map(is_placement, node))


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of ``tree`` by their names, in the tree's order. What :func:`is_leaf` tells is one leaf."""
    leaves, _ = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def zip_leaves(tree: Tree, name: str, *others: tuple[str, Tree]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The leaves of congruent trees, side by side, each with its name.

    Args:
      tree: the tree that names the leaves.
      name: what it is called in a message.
      others: what each of the others is called, and the tree.

    Raises:
      ValueError: when a tree has a leaf that another lacks; names it.
    """
    first = named_leaves(tree)
    rest = [(other_name, named_leaves(other)) for other_name, other in others]
    for other_name, leaves in rest:
        if missing := [path for path in first if path not in leaves]:
            raise ValueError(f"{other_name} lack the leaf {missing[0]!r} that {name} have")
        if extra := [path for path in leaves if path not in first]:
            raise ValueError(f"{other_name} have a leaf {extra[0]!r} that {name} lack")
    for path, leaf in first.items():
        yield path, (leaf, *(leaves[path] for _, leaves in rest))


def map_leaves(function: Callable[..., Any], tree: Tree, name: str, *others: tuple[str, Tree]) -> Tree:
    """``tree`` with each leaf replaced by ``function(path, leaf, *others' leaves)``. Else as :func:`zip_leaves`."""
    spec = pytree.tree_structure(tree, is_leaf=is_leaf)
    return pytree.tree_unflatten([function(path, *leaves) for path, leaves in zip_leaves(tree, name, *others)], spec)
