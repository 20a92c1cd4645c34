"""Trees on a mesh: full tensors, DTensors at the boundary, and local shards inside."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from ._collectives import all_gather, chunk_sizes, replicate
from ._dtensor import is_dtensor, is_replicate, is_shard
from ._mesh import axis_sizes
from ._placements import Placements
from ._tree import Tree, map_leaves, named_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a tree lives. Made by :func:`make_layout`."""

    mesh: DeviceMesh
    placements: Tree
    """``(Shard(d) | Replicate(), ...)`` for each leaf, one per mesh axis."""
    shapes: Tree
    """``torch.Size`` of each leaf in full: a shard of an uneven axis does not know it."""

    def __getitem__(self, key: Any) -> Layout:
        """The layout of a subtree, ``layout["layers"][0]``."""
        return Layout(self.mesh, self.placements[key], self.shapes[key])


def make_layout(mesh: DeviceMesh, placements: Tree, tree: Tree) -> Layout:
    """A layout of ``tree``.

    Args:
      mesh: the mesh.
      placements: a tuple of ``Shard`` and ``Replicate`` for each leaf, one per mesh axis.
      tree: anything with the full shapes: a declaration, an abstract tree, or full tensors.

    Raises:
      ValueError: when the trees differ, a leaf has not one placement per mesh axis, or one that its shape cannot have.
    """

    def size(path: str, leaf: Any, placed: Placements) -> torch.Size:
        check_placements(path, tuple(leaf.shape), placed, axis_sizes(mesh))
        return torch.Size(leaf.shape)

    return Layout(mesh, placements, map_leaves(size, tree, "the tree", ("the placements", placements)))


def check_placements(path: str, shape: Sequence[int], placements: Placements, sizes: Mapping[str, int]) -> None:
    """Raises ``ValueError`` unless ``placements`` are possible for a leaf of this shape on this mesh."""
    if len(placements) != len(sizes):
        raise ValueError(
            f"leaf {path!r} has the placements {placements}; the mesh has {len(sizes)} axes {tuple(sizes)}"
        )
    for placement in placements:
        if is_shard(placement):
            if not 0 <= placement.dim < len(shape):
                raise ValueError(f"leaf {path!r} of shape {tuple(shape)} cannot have the placement {placement}")
        elif not is_replicate(placement):
            raise ValueError(f"leaf {path!r} has the placement {placement}; a layout takes Shard and Replicate")


def local_slices(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Mapping[str, int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Which part of a full tensor one rank holds.

    Args:
      shape: of the full tensor.
      placements: one per mesh axis; a dimension split by several is split by the outermost first.
      sizes: of the mesh axes, outermost first.
      coordinate: of the rank, one number per mesh axis.

    Returns:
      a slice for each dimension; may be empty.
    """
    starts, stops = [0] * len(shape), list(shape)
    for placement, parts, index in zip(placements, sizes.values(), coordinate, strict=True):
        if is_shard(placement):
            dim = placement.dim
            rows = chunk_sizes(stops[dim] - starts[dim], parts)
            starts[dim] += sum(rows[:index])
            stops[dim] = starts[dim] + rows[index]
    return tuple(map(slice, starts, stops))


def held(layout: Layout, placements: Placements, shape: Sequence[int]) -> tuple[slice, ...]:
    """Which part of a full tensor of ``layout`` this rank holds: :func:`local_slices` at its coordinate."""
    return local_slices(shape, placements, axis_sizes(layout.mesh), _coordinate(layout.mesh))


def shard(tree: Tree, layout: Layout) -> Tree:
    """Full tensors to DTensors. Each rank takes its part of what it holds: no communication.

    Args:
      tree: full tensors, the same on every rank; that is not checked.
      layout: of the tree.

    Returns:
      DTensors. A part that is cut out is a copy, so the full tensor's memory can go.

    Raises:
      ValueError: when tree and layout differ; the leaf is named.
    """
    sizes, coordinate = axis_sizes(layout.mesh), _coordinate(layout.mesh)

    def cut(path: str, leaf: Tensor, placements: Placements, shape: torch.Size) -> Tensor:
        if leaf.shape != shape:
            raise ValueError(f"leaf {path!r} has shape {tuple(leaf.shape)}, the layout says {tuple(shape)}")
        part = leaf[local_slices(shape, placements, sizes, coordinate)]
        return part.clone(memory_format=torch.contiguous_format) if part.shape != shape else part

    return from_local(map_leaves(cut, tree, "the tree", *_parts(layout)), layout)


def from_local(tree: Tree, layout: Layout) -> Tree:
    """Local shards to DTensors, without communication or copy.

    Raises:
      ValueError: when tree and layout differ, or a shard has not the shape this rank should hold; the leaf is named.
    """
    from torch.distributed.tensor import DTensor

    sizes, coordinate = axis_sizes(layout.mesh), _coordinate(layout.mesh)

    def wrap(path: str, leaf: Tensor, placements: Placements, shape: torch.Size) -> DTensor:
        slices = local_slices(shape, placements, sizes, coordinate)
        expected = tuple(part.stop - part.start for part in slices)
        if tuple(leaf.shape) != expected:
            raise ValueError(
                f"leaf {path!r} has a shard of shape {tuple(leaf.shape)}; of {tuple(shape)} with {placements}, this "
                f"rank {dict(zip(sizes, coordinate, strict=True))} holds {expected}"
            )
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(leaf, layout.mesh, placements, run_check=False, shape=shape, stride=stride)

    return map_leaves(wrap, tree, "the tree", *_parts(layout))


def local(tree: Tree) -> Tree:
    """DTensors to this rank's shards: plain tensors that share their memory."""

    def unwrap(path: str, leaf: Any) -> Tensor:
        return _dtensor(path, leaf)._local_tensor

    return map_leaves(unwrap, tree, "the tree")


def local_parts(tree: Tree) -> Tree:
    """Any tree with every DTensor replaced by this rank's shard; other leaves, such as counts, as they are."""
    return pytree.tree_map(lambda leaf: leaf._local_tensor if is_dtensor(leaf) else leaf, tree)


def from_local_parts(tree: Tree, like: Tree) -> Tree:
    """The inverse of :func:`local_parts`: DTensors where ``like``, a congruent tree, has them."""

    def wrap(leaf: Any, template: Any) -> Any:
        if not is_dtensor(template) or is_dtensor(leaf):
            return leaf
        from torch.distributed.tensor import DTensor

        spec = template._spec
        return DTensor.from_local(
            leaf, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    return pytree.tree_map(wrap, tree, like)


def layout_of(tree: Tree) -> Layout:
    """The layout of a tree of DTensors.

    Raises:
      ValueError: for a tree without leaves, a leaf that is no DTensor, or another mesh than the first leaf's.
    """
    leaves = {path: _dtensor(path, leaf) for path, leaf in named_leaves(tree).items()}
    if not leaves:
        raise ValueError("a tree without leaves has no mesh")
    mesh = next(iter(leaves.values())).device_mesh
    for path, leaf in leaves.items():
        if leaf.device_mesh != mesh:
            raise ValueError(f"leaf {path!r} is on {leaf.device_mesh}, the first leaf on {mesh}")
    placements = map_leaves(lambda path, leaf: tuple(leaf.placements), tree, "the tree")
    return make_layout(mesh, placements, tree)


def unshard(tree: Tree) -> Tree:
    """DTensors to full tensors, on every rank.

    Exact for uneven shards too, where ``DTensor.full_tensor`` once was not (pytorch 168134).
    """
    return gather(local(tree), layout_of(tree))


def gather(tree: Tree, layout: Layout, keep: Tree | None = None) -> Tree:
    """Local shards to full tensors, as parameters enter a computation: ``A[I_Y, J] -> A[I, J]``.

    Differentiable to any order, under the transforms that the collectives know. A gradient has the placements of
    its leaf: that of a sharded one is reduced and scattered, that of a replicated one summed over the ranks
    (:func:`.replicate`). One message per leaf and mesh axis; nothing is packed.

    Args:
      tree: this rank's shards.
      layout: of the tree.
      keep: for each leaf, a ``frozenset`` of the mesh axes over which it stays split, and its gradient unreduced,
        because the computation itself is split over them: ``expert_axes(declared)``. None when not given.

    Raises:
      ValueError: when the trees differ, a leaf is to keep an axis that does not split it, or one that splits a
        dimension unevenly together with others; the leaf is named.
    """
    sizes, coordinate = axis_sizes(layout.mesh), _coordinate(layout.mesh)
    keep = map_leaves(lambda path, leaf: frozenset(), tree, "the tree") if keep is None else keep

    def join(path: str, leaf: Tensor, placements: Placements, shape: torch.Size, kept: frozenset[str]) -> Tensor:
        even = _dims_kept(path, placements, shape, kept, sizes)
        # The innermost axis was split last.
        for index, (axis, placement) in reversed(list(enumerate(zip(sizes, placements, strict=True)))):
            if axis in kept:
                continue
            group = layout.mesh.get_group(axis)
            if not is_shard(placement):
                leaf = replicate(leaf, group)
                continue
            outer = dict(list(sizes.items())[:index])
            held = local_slices(shape, placements[:index], outer, coordinate[:index])[placement.dim]
            rows = None if placement.dim in even else chunk_sizes(held.stop - held.start, sizes[axis])
            try:
                leaf = all_gather(leaf, group, placement.dim, rows)
            except ValueError as error:
                raise ValueError(f"leaf {path!r} with {placements}: {error}") from error
        return leaf

    return map_leaves(join, tree, "the tree", *_parts(layout), ("the kept axes", keep))


def _dims_kept(
    path: str, placements: Placements, shape: torch.Size, kept: frozenset[str], sizes: Mapping[str, int]
) -> set[int]:
    """The dimensions that stay split over a kept axis, of which every rank must hold as many rows."""
    dims = set()
    by_axis = dict(zip(sizes, placements, strict=True))
    for axis in kept:
        if sizes.get(axis) == 1:
            continue
        placement = by_axis.get(axis)
        if not is_shard(placement):
            raise ValueError(f"leaf {path!r} is to stay split over {axis!r}, which does not split it: {by_axis}")
        parts = math.prod(sizes[other] for other in sizes if by_axis[other] == placement)
        if shape[placement.dim] % parts:
            raise ValueError(
                f"leaf {path!r} of shape {tuple(shape)} cannot stay split over {axis!r}: its {parts} parts are uneven"
            )
        dims.add(placement.dim)
    return dims


def _parts(layout: Layout) -> tuple[tuple[str, Tree], tuple[str, Tree]]:
    return ("the placements", layout.placements), ("the layout's shapes", layout.shapes)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not of the mesh {mesh}")
    return tuple(coordinate)


def _dtensor(path: str, leaf: Any) -> DTensor:
    if not is_dtensor(leaf):
        raise ValueError(f"leaf {path!r} is a {type(leaf).__name__}, expected a DTensor")
    return leaf
