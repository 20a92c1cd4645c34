"""Where values lie in a tier of fixed size: one slab, reserved once, handed out in pieces."""

from __future__ import annotations

import bisect

from torch import Tensor
from torch.utils import _pytree as pytree

from ._chain import Tree

ALIGNMENT = 256
"""Every piece begins at a multiple of so many bytes: enough for any dtype and for copies by DMA engines."""


def aligned(size: int) -> int:
    """``size`` bytes, rounded up to whole units of the slab."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def tree_bytes(tree: Tree) -> int:
    """Bytes of the tensors of a tree, each rounded up as it would lie in a slab."""
    return sum(aligned(leaf.numel() * leaf.element_size()) for leaf in pytree.tree_leaves(tree) if is_tensor(leaf))


def is_tensor(leaf: object) -> bool:
    """Whether a leaf has memory to count and to copy."""
    return isinstance(leaf, Tensor)


class FirstFit:
    """Offsets in a slab: each piece goes to the first gap that holds it.

    Deterministic, so the verifier and the executor, who ask for the same pieces in the same order, get the same
    offsets, and the largest end that the verifier saw is the size of the slab.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # (begin, end), ascending
        self.peak = 0
        """The largest end so far: bytes that the slab must have."""

    @property
    def end(self) -> int:
        """Where the last piece ends, in bytes."""
        return self._pieces[-1][1] if self._pieces else 0

    def allocate(self, size: int) -> int:
        """The offset of ``size`` bytes that are free."""
        size, begin = aligned(size), 0
        for index, (taken, end) in enumerate(self._pieces):
            if taken - begin >= size:
                self._pieces.insert(index, (begin, begin + size))
                return begin
            begin = end
        self._pieces.append((begin, begin + size))
        self.peak = max(self.peak, begin + size)
        return begin

    def free(self, offset: int) -> None:
        """Takes the piece at ``offset`` back."""
        # Pieces of no bytes may stand at the offset of the one after them: either is as good.
        index = bisect.bisect_left(self._pieces, (offset,))
        del self._pieces[index]
