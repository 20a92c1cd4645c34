"""The leaves of a tree by name."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from .optim import path_name


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` by their dotted paths (``layers.0.experts.down``), in the tree's order."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}
