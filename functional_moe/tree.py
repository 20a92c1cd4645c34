"""Names for the leaves of a tree."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree


def leaf_path(path: tuple[Any, ...]) -> str:
    """A pytree key path as the dotted name used in every message: ``layers.0.experts.down``."""
    names = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
    return ".".join(names)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` by their dotted names, in the tree's order."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {leaf_path(path): leaf for path, leaf in leaves}
