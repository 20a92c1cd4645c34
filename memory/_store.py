"""Where the parameters of layers come from, and their gradients go to."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._chain import Tree


class Store(Protocol):
    """Parameters by layer. ``gather`` and ``reduce`` begin something; who needs the result waits."""

    def gather(self, layer: str, buffer: int) -> None:
        """Begins to bring a layer's parameters together in a buffer.

        A graph may refer to that memory, and autograd takes a write for a change of what it has saved: write through
        ``buffer.data``, whose version is its own. The layer lies in the buffer as it did the time before.
        """
        ...

    def parameters(self, layer: str) -> Tree:
        """The layer's parameters in full."""
        ...

    def release(self, layer: str) -> None:
        """Gives the layer's buffer back."""
        ...

    def add_gradient(self, layer: str, gradient: Mapping[str, Tensor]) -> None:
        """Adds to the layer's gradient, by leaf path. The tensors are the store's from now on."""
        ...

    def reduce(self, layer: str) -> None:
        """Begins to sum the layer's gradient over the ranks and to keep this rank's part."""
        ...

    def drop_gradient(self, layer: str) -> None:
        """Frees the layer's gradient in full, once it is reduced."""
        ...

    def gradients(self) -> dict[str, Tree]:
        """What came of it, by layer: trees like the parameters that the store was made of. Its own no longer."""
        ...


class ResidentStore:
    """Every layer whole on this process: nothing to gather, nothing to reduce."""

    def __init__(self, parameters: Mapping[str, Tree]) -> None:
        self._parameters = parameters
        self._sums: dict[str, dict[str, Tensor]] = {layer: {} for layer in parameters}

    def parameters(self, layer: str) -> Tree:
        """As they were given."""
        return self._parameters[layer]

    def add_gradient(self, layer: str, gradient: Mapping[str, Tensor]) -> None:
        """Adds leaf by leaf, in place from the second time on."""
        add_leaves(self._sums[layer], gradient)

    def gradients(self) -> dict[str, Tree]:
        """Trees like the parameters; zeros where nothing was added."""
        return {layer: _filled(tree, self._sums.pop(layer)) for layer, tree in self._parameters.items()}

    def gather(self, layer: str, buffer: int) -> None:
        """Refused."""
        self._refuse(layer)

    def release(self, layer: str) -> None:
        """Refused."""
        self._refuse(layer)

    def reduce(self, layer: str) -> None:
        """Refused."""
        self._refuse(layer)

    def drop_gradient(self, layer: str) -> None:
        """Refused."""
        self._refuse(layer)

    def _refuse(self, layer: str) -> NoReturn:
        raise ValueError(f"{layer} is whole on this process: the schedule must have it among its resident layers")


def add_leaves(sums: dict[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
    """Adds ``gradient`` to ``sums`` by leaf path, in place; takes the tensors over where there is no sum yet."""
    for path, leaf in gradient.items():
        if path in sums:
            sums[path].add_(leaf)
        else:
            sums[path] = leaf


def leaf_paths(tree: Tree) -> tuple[str, ...]:
    """The paths of a tree's leaves, in its order."""
    return structure_paths(pytree.tree_structure(tree))


@functools.lru_cache(maxsize=64)
def structure_paths(structure: pytree.TreeSpec) -> tuple[str, ...]:
    """The same of a structure. Made once: to write them takes as long as some small operations."""
    indexed = pytree.tree_unflatten(range(structure.num_leaves), structure)
    return tuple(pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(indexed)[0])


def _filled(tree: Tree, sums: Mapping[str, Tensor]) -> Tree:
    leaves, spec = pytree.tree_flatten(tree)
    filled: Iterable[Tensor] = (
        sums[path] if path in sums else torch.zeros_like(leaf)
        for path, leaf in zip(structure_paths(spec), leaves, strict=True)
    )
    return pytree.tree_unflatten(list(filled), spec)
