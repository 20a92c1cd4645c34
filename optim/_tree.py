"""Trees of tensors: flattening, leaf paths for messages, congruence and prefixes.

A tree is what ``torch.utils._pytree`` sees: nested dicts, tuples, lists and NamedTuples with tensors as
leaves. ``None`` is a *leaf* there, a :class:`MaskedNode` is a node without leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor

Tree: TypeAlias = Any
#: What :func:`unflatten` rebuilds: any tree of the structure.
TreeSpec: TypeAlias = Any


class MaskedNode:
    """The place of a leaf that a transformation does not see: a registered tree node with no children.

    :func:`masked` and :func:`partition` put one where a leaf belongs to somebody else, so a masked tree keeps
    its shape and a transformation that maps over leaves passes it by.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "MaskedNode()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskedNode)

    def __hash__(self) -> int:
        return hash(MaskedNode)


def _flatten_masked(node: MaskedNode) -> tuple[list[Any], None]:
    return [], None


def _flatten_masked_with_keys(node: MaskedNode) -> tuple[list[tuple[Any, Any]], None]:
    return [], None


def _unflatten_masked(children: Any, context: None) -> MaskedNode:
    return MaskedNode()


pytree.register_pytree_node(
    MaskedNode,
    _flatten_masked,
    _unflatten_masked,
    serialized_type_name="functional_moe.optim.MaskedNode",
    flatten_with_keys_fn=_flatten_masked_with_keys,
)


def leaves_of(tree: Tree) -> list[Any]:
    """Return the leaves of ``tree`` in order.

    The same as torch's pytree, several times faster for dicts, tuples, NamedTuples and lists: an optimizer over a
    thousand leaves flattens a dozen trees per step, which would cost more than its arithmetic.
    """
    out: list[Any] = []
    _collect(tree, out)
    return out


def _collect(node: Tree, out: list[Any]) -> None:
    kind = type(node)
    if kind is dict:
        for child in node.values():
            if isinstance(child, Tensor):
                out.append(child)
            else:
                _collect(child, out)
    elif _is_sequence(kind):
        for child in node:
            _collect(child, out)
    elif isinstance(node, Tensor):
        out.append(node)
    elif kind is not MaskedNode:
        out.extend(pytree.tree_leaves(node))


def is_part(tree: Tree) -> bool:
    """Return whether a :class:`MaskedNode` stands for anything in ``tree``."""
    if isinstance(tree, MaskedNode):
        return True
    children = _children(tree)
    return children is not None and any(is_part(child) for child in children.values())


def flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``tree`` in order, and its structure: the tree itself, for :func:`unflatten`."""
    return leaves_of(tree), tree


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Tree:
    """Inverse of :func:`flatten`: the tree ``spec`` with other leaves.

    Raises:
        ValueError: another number of leaves than the structure has.
    """
    rest = iter(leaves)
    try:
        tree = _rebuild(spec, rest)
    except StopIteration:
        raise ValueError(f"{len(leaves)} leaves are too few for the tree") from None
    if next(rest, None) is not None:
        raise ValueError(f"{len(leaves)} leaves are too many for the tree")
    return tree


def _rebuild(node: Tree, rest: Iterator[Any]) -> Tree:
    kind = type(node)
    if kind is dict:
        out = {}
        for key, child in node.items():
            out[key] = next(rest) if isinstance(child, Tensor) else _rebuild(child, rest)
        return out
    if kind is tuple:
        return tuple([_rebuild(child, rest) for child in node])
    if kind is list:
        return [_rebuild(child, rest) for child in node]
    if _is_sequence(kind):
        return kind(*[_rebuild(child, rest) for child in node])
    if kind is MaskedNode:
        return node
    if isinstance(node, Tensor):
        return next(rest)
    spec = pytree.tree_structure(node)
    return pytree.tree_unflatten([next(rest) for _ in range(spec.num_leaves)], spec)


def _is_sequence(kind: type) -> bool:
    """Return whether a node of this type is a tuple, a list or a NamedTuple."""
    return kind is tuple or kind is list or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def _same_structure(a: Tree, b: Tree) -> bool:
    """Return whether two trees have one structure, with dict keys in the same order."""
    kind = type(a)
    if kind is dict:
        if type(b) is not dict or len(a) != len(b):
            return False
        for (key, child), (other, twin) in zip(a.items(), b.items(), strict=True):
            if key != other:
                return False
            if not (isinstance(child, Tensor) and isinstance(twin, Tensor)) and not _same_structure(child, twin):
                return False
        return True
    if _is_sequence(kind):
        if type(b) is not kind or len(a) != len(b):
            return False
        return all(_same_structure(child, twin) for child, twin in zip(a, b, strict=True))
    if kind is MaskedNode:
        return type(b) is MaskedNode
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            return True
        return pytree.tree_structure(b).is_leaf()
    return bool(pytree.tree_structure(a) == pytree.tree_structure(b))


def path_name(path: Sequence[Any]) -> str:
    """Write a key path as ``layers.0.experts.down``; the root is ``<root>``."""
    names = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
    return ".".join(names) or "<root>"


def leaf_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of every leaf of ``tree``, in the order of :func:`flatten`."""
    return [path_name(path) for path, _ in pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def flatten_like(reference: Tree, tree: Tree, name: str, reference_name: str = "the parameters") -> list[Any]:
    """Return the leaves of ``tree`` in the order of ``reference``'s leaves.

    Args:
        reference: the tree whose structure is right.
        tree: the tree that should have it; dicts may hold their keys in another order.
        name: what ``tree`` is called in an error, as in "the gradients".
        reference_name: what ``reference`` is called in an error.

    Raises:
        ValueError: the structures differ; the first path that only one of them has is named.
    """
    if _same_structure(reference, tree):
        return leaves_of(tree)
    spec, own = pytree.tree_structure(reference), pytree.tree_structure(tree)
    if pytree.tree_structure(_sorted_dicts(tree)) == pytree.tree_structure(_sorted_dicts(reference)):
        # The same dicts with their keys in another order.
        return list(spec.flatten_up_to(tree))
    here, there = leaf_paths(tree), leaf_paths(reference)
    extra = [path for path in here if path not in set(there)]
    missing = [path for path in there if path not in set(here)]
    if extra:
        raise ValueError(f"{name} have a leaf {extra[0]!r} that {reference_name} do not have")
    if missing:
        raise ValueError(f"{name} lack the leaf {missing[0]!r} that {reference_name} have")
    raise ValueError(f"{name} have the structure {own}, {reference_name} have {spec}")


def _sorted_dicts(tree: Tree) -> Tree:
    """Return ``tree`` with the keys of each plain dict sorted."""
    if type(tree) is dict:
        return {key: _sorted_dicts(tree[key]) for key in sorted(tree, key=str)}
    if pytree.tree_structure(tree).is_leaf():
        return tree
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return pytree.tree_unflatten([_sorted_dicts(child) for child in children], spec)


def check_congruent(
    reference: Tree,
    tree: Tree,
    name: str,
    reference_name: str = "the parameters",
    *,
    dtype: bool = True,
) -> list[Any]:
    """As :func:`flatten_like`, and check that every leaf is a tensor of the shape of its counterpart.

    With ``dtype``, also that it is of its dtype or of a wider floating-point one: float32 gradients of bfloat16
    parameters are more than was asked for, the reverse has lost something.

    Raises:
        ValueError: structure or shape differ, or a dtype does not hold its counterpart's numbers; the leaf's
            path and both values are named.
    """
    expected = leaves_of(reference)
    leaves = flatten_like(reference, tree, name, reference_name)
    for index, (want, have) in enumerate(zip(expected, leaves, strict=True)):
        if not isinstance(have, Tensor):
            path = leaf_paths(reference)[index]
            raise ValueError(f"{name}: leaf {path!r} is {have!r}, expected a tensor")
        if have.shape != want.shape:
            path = leaf_paths(reference)[index]
            shapes = f"{tuple(have.shape)}, {reference_name} have {tuple(want.shape)}"
            raise ValueError(f"{name}: leaf {path!r} has shape {shapes}")
        if dtype and have.dtype != want.dtype and not _is_wider(have.dtype, want.dtype):
            path = leaf_paths(reference)[index]
            dtypes = f"{have.dtype}, {reference_name} have {want.dtype}"
            raise ValueError(f"{name}: leaf {path!r} has dtype {dtypes}; expected that or a wider one")
    return leaves


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a floating-point dtype holds every number of another."""
    if not (dtype.is_floating_point and other.is_floating_point):
        return False
    mine, its = torch.finfo(dtype), torch.finfo(other)
    return mine.eps <= its.eps and mine.max >= its.max and mine.tiny <= its.tiny


def check_floating(params: Tree, user: str) -> None:
    """Raise ``ValueError`` naming the first leaf of ``params`` that is not a floating-point tensor."""
    for index, leaf in enumerate(leaves_of(params)):
        if not isinstance(leaf, Tensor) or not leaf.dtype.is_floating_point:
            path = leaf_paths(params)[index]
            value = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(f"{user}: leaf {path!r} is {value}, expected a floating-point tensor")


def broadcast_prefix(prefix: Tree, tree: Tree, is_prefix_leaf: Callable[[Any], bool], what: str) -> list[Any]:
    """Spread a tree of annotations over the leaves of ``tree``.

    ``prefix`` may stop early: an annotation above a subtree holds for all its leaves, a single one for the
    whole tree. Where ``tree`` holds a :class:`MaskedNode`, whatever ``prefix`` says there is skipped.

    Args:
        prefix: tree of annotations, congruent with ``tree`` or a prefix of it.
        tree: tree of tensors.
        is_prefix_leaf: tells an annotation from a node of the prefix.
        what: what an annotation is called in an error, as in "label".

    Returns:
        One annotation per leaf of ``tree``.

    Raises:
        ValueError: an annotation for no leaf, a leaf without one, or another kind of node; the path is named.
    """
    out: list[Any] = []
    _broadcast(prefix, tree, is_prefix_leaf, what, (), out)
    return out


def _broadcast(
    prefix: Tree,
    tree: Tree,
    is_prefix_leaf: Callable[[Any], bool],
    what: str,
    path: tuple[Any, ...],
    out: list[Any],
) -> None:
    if isinstance(tree, MaskedNode):
        return
    if is_prefix_leaf(prefix):
        out.extend([prefix] * len(leaves_of(tree)))
        return
    children = _children(tree)
    if children is None:
        raise ValueError(f"leaf {path_name(path)!r} has no {what}: got {prefix!r} there")
    annotations = _children(prefix)
    if annotations is None:
        raise ValueError(f"the subtree {path_name(path)!r} has no {what}: got {prefix!r} there")
    for key in annotations:
        if key not in children:
            raise ValueError(f"a {what} at {path_name((*path, key))!r} is for no leaf of the tree")
    for key, child in children.items():
        if key not in annotations:
            raise ValueError(f"leaf {path_name((*path, key))!r} has no {what}")
        _broadcast(annotations[key], child, is_prefix_leaf, what, (*path, key), out)


def _children(tree: Tree) -> dict[Any, Any] | None:
    """Return the children one level down by name, or ``None`` for a leaf."""
    if isinstance(tree, Tensor):
        return None
    if type(tree) is dict:
        return {str(key): child for key, child in tree.items()}
    if pytree.tree_structure(tree).is_leaf():
        return None
    items, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return {path_name(path): child for path, child in items}


def scalar_device(params: Tree) -> torch.device:
    """Return where counts and rates live: the CPU, or ``meta`` for a tree of abstract leaves.

    Scalars stay on the CPU because a kernel over many leaves takes them by value, and reading a scalar from
    an accelerator would make the host wait for it.
    """
    leaves = leaves_of(params)
    abstract = bool(leaves) and isinstance(leaves[0], Tensor) and leaves[0].is_meta
    return torch.device("meta" if abstract else "cpu")
