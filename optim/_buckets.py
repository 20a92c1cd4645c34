"""A transformation applied to a part of the parameters at a time, its state cut and joined accordingly.

Everything here is per leaf, but for the norm of the whole gradient, which the caller gives. So the update of a part is
the part of the update. The state of the whole stays what it is: which of its leaves belong to a bucket is found by
initialising the bucket by itself, and what every bucket has (counts, rates) is shared.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from . import _tree
from ._base import GradientTransformation
from ._clipping import part_of_gradient
from ._tree import MaskedNode, Tree


class BucketStates(NamedTuple):
    """The leaves of a state."""

    own: dict[str, list[Tensor]]  # by bucket
    shared: list[Tensor]  # of all buckets: counts and rates


class BucketUpdate(NamedTuple):
    """What the update of one bucket returns."""

    updates: Tree  # like the bucket's parameters
    state: list[Tensor]  # the bucket's own leaves
    shared: list[Tensor]


class Buckets:
    """A transformation in buckets.

    Args:
        inner: per leaf, apart from :func:`clip_by_global_norm` of the whole gradient.
        buckets: tree of str congruent with the parameters or a prefix of them: the bucket of each leaf.
        params: the parameters; abstract ones will do.

    Raises:
        ValueError: a leaf of the state that belongs to some buckets, but neither to one nor to all.

    Example:
        >>> buckets = Buckets(tx, {"embedding": "first", "layers": "second"}, params)
        >>> old, new, norm = buckets.split(state), {}, global_norm(grads)
        >>> for name in buckets.names:
        ...     part, gradient = buckets.select(params, name), buckets.select(grads, name)
        ...     done = buckets.update(name, gradient, old.own[name], old.shared, part, norm)
        ...     new[name], part = done.state, apply_updates(part, done.updates)
        >>> state = buckets.join(new, done.shared)
    """

    def __init__(self, inner: GradientTransformation, buckets: Tree, params: Tree) -> None:
        self.inner = inner
        self._buckets = buckets
        self.names = tuple(dict.fromkeys(pytree.tree_leaves(buckets)))
        abstract = pytree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        self._whole = inner.init(abstract)
        paths = _tree.leaf_paths(self._whole)
        place = {path: index for index, path in enumerate(paths)}
        self._parts = {name: inner.init(self.select(abstract, name)) for name in self.names}
        where: dict[str, list[int]] = {}
        users: list[list[str]] = [[] for _ in paths]
        for name, part in self._parts.items():
            where[name] = [place[path] for path in _tree.leaf_paths(part)]
            for index in where[name]:
                users[index].append(name)
        for path, names in zip(paths, users, strict=True):
            if len(names) not in (1, len(self.names)):
                raise ValueError(f"the state's leaf {path!r} is of the buckets {names}; expected one, or all")
        shared = [index for index, names in enumerate(users) if len(names) > 1]
        self._shared = {index: number for number, index in enumerate(shared)}
        self._shared_paths = [paths[index] for index in shared]
        self._where = where

    def select(self, tree: Tree, name: str) -> Tree:
        """The bucket of a tree like the parameters; a :class:`MaskedNode` stands for the others."""
        return pytree.tree_map(lambda bucket, part: part if bucket == name else MaskedNode(), self._buckets, tree)

    def split(self, state: Tree) -> BucketStates:
        """The leaves of the whole state, by the bucket that they belong to."""
        leaves = _tree.flatten_like(self._whole, state, "the state", "the transformation's state")
        own = {
            name: [leaves[index] for index in where if index not in self._shared] for name, where in self._where.items()
        }
        return BucketStates(own, [leaves[index] for index in self._shared])

    def join(self, own: Mapping[str, Sequence[Tensor]], shared: Sequence[Tensor]) -> Tree:
        """The whole state; the inverse of :meth:`split`."""
        leaves: dict[int, Tensor] = dict(zip(self._shared, shared, strict=True))
        for name, where in self._where.items():
            leaves |= dict(zip((index for index in where if index not in self._shared), own[name], strict=True))
        return _tree.unflatten([leaves[index] for index in range(len(leaves))], self._whole)

    def update(
        self,
        name: str,
        updates: Tree,
        own: Sequence[Tensor],
        shared: Sequence[Tensor],
        params: Tree,
        norm: Tensor,
    ) -> BucketUpdate:
        """The update of one bucket: of each leaf what ``inner.update`` of the whole tree gives.

        Args:
            name: which.
            updates: its gradient, as :meth:`select` cuts it.
            own, shared: the state before the step.
            params: its parameters, as :meth:`select` cuts them.
            norm: [], of the whole gradient, which :func:`clip_by_global_norm` takes for what it would find.

        Raises:
            ValueError: a clip that is given anything but the gradient itself.
        """
        kept = iter(own)
        part = self._parts[name]
        leaves = [shared[self._shared[index]] if index in self._shared else next(kept) for index in self._where[name]]
        with part_of_gradient(updates, norm):
            new, state = self.inner.update(updates, _tree.unflatten(leaves, part), params)
        after = dict(zip(self._where[name], _tree.flatten_like(part, state, "the new state", "the state"), strict=True))
        return BucketUpdate(
            new,
            [leaf for index, leaf in after.items() if index not in self._shared],
            [after[index] for index in self._shared],
        )

    def check_shared(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
        """Raises ``ValueError``, naming the leaf, where two buckets came to different values of what they share."""
        for path, a, b in zip(self._shared_paths, one, other, strict=True):
            if not torch.equal(a, b):
                raise ValueError(
                    f"the state's leaf {path!r} is {a.tolist()} after one bucket and {b.tolist()} after another: the "
                    "transformation is not per leaf"
                )
