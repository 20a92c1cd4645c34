"""The property "this function on this mesh equals the same function on one process"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from ._collectives import all_reduce
from ._layout import Layout, check_placements, local_slices, make_layout
from ._mesh import mesh_of
from ._placements import Placements
from ._pool import Pool, shared_pool
from ._tree import Tree, is_leaf, named_leaves, zip_leaves

Sizes: TypeAlias = Mapping[str, int]
PlacementTree: TypeAlias = Tree | Callable[[Sizes], Tree]

MESHES: tuple[Sizes, ...] = ({"fsdp": 2, "ep": 1}, {"fsdp": 1, "ep": 2}, {"fsdp": 2, "ep": 2})
"""One axis at a time first, so that a factor tells which axis it comes from."""


def assert_equivalent(
    function: Callable[[Tree, Layout], Tree],
    inputs: Tree,
    placements: PlacementTree,
    meshes: Sequence[Sizes] = MESHES,
    *,
    outputs: PlacementTree | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    timeout: float = 60.0,
    pool: Pool | None = None,
) -> None:
    """Checks that ``function`` on each mesh computes what it computes on one process.

    ``function(shards, layout) -> outputs`` gets this rank's shards and the layout of the whole, communicates over
    ``layout.mesh``, and returns this rank's part of the outputs. The reference is the same function on a mesh of one
    rank, where every collective is the identity. Compared are:

    - every output, put together as its placements say, and its local shape on each rank;
    - the gradient of every floating-point input, for random cotangents of the outputs: it must lie as the input does
      (a replicated input has the whole gradient on every rank).

    A change in place of an input raises in torch, because the function runs under ``torch.func.vjp``.

    Example::

        def loss(shards, layout):
            params = gather(shards["params"], layout["params"])
            return ((shards["x"] @ params["w"]) ** 2).sum()  # of this rank's rows: a summand

        rows, both = (Shard(0), Shard(0)), (Shard(1), Replicate())
        assert_equivalent(loss, {"params": {"w": w}, "x": x}, {"params": {"w": both}, "x": rows})

    Args:
      function: importable (or a ``functools.partial`` of such a function), pure.
      inputs: a tree of full tensors. Sizes that no axis divides find most mistakes; values that differ between the
        ranks' shards are necessary.
      placements: ``Shard`` and ``Replicate`` for each leaf, one per mesh axis, or a function of the axis sizes that
        returns them.
      meshes: sizes by axis, outermost first, all with the same axes.
      outputs: placements of the outputs, a tree of them or one for all, or a function of the axis sizes.
        ``Partial()`` is a summand, ``Replicate()`` one value that every rank returns, counted once. All ``Partial``
        when not given, as the losses of data-parallel ranks are.
      rtol: tolerance relative to the largest element of a leaf: sums in another order.
      atol: tolerance for leaves that are 0.
      timeout: seconds for each collective.
      pool: the processes to run on; the shared ones when not given.

    Raises:
      AssertionError: naming the mesh, each leaf that differs, its ratio to the reference when that is one number, and
        its placements.
      WorkerError: when a rank raises, dies or hangs.
      ValueError: when the placements do not fit the inputs or the outputs.
    """
    pool = pool or shared_pool()
    axes = tuple(meshes[0]) if meshes else ()
    for sizes in meshes:
        if tuple(sizes) != axes:
            raise ValueError(f"meshes with other axes cannot share placements: {axes} and {tuple(sizes)}")
    alone = dict.fromkeys(axes, 1)
    whole = pytree.tree_map(lambda leaf: (Replicate(),) * len(axes), inputs)
    (reference,) = pool.run(_run, 1, function, inputs, whole, None, None, alone, timeout=timeout)
    shapes = pytree.tree_map(lambda leaf: leaf.shape, reference.outputs)
    for sizes in meshes:
        placed = placements(sizes) if callable(placements) else placements
        returned = _output_placements(outputs, reference.outputs, sizes)
        for path, (leaf, placement) in zip_leaves(inputs, "the inputs", ("the placements", placed)):
            check_placements(path, leaf.shape, placement, sizes)
        world = math.prod(sizes.values())
        results = pool.run(_run, world, function, inputs, placed, returned, shapes, sizes, timeout=timeout)
        tolerance = _Tolerance(rtol, atol)
        problems = [
            *_compare("output", reference.outputs, [result.outputs for result in results], returned, sizes, tolerance),
            *_compare("gradient", reference.gradients, [r.gradients for r in results], placed, sizes, tolerance),
        ]
        if problems:
            mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise AssertionError("\n".join([f"on the mesh {mesh}, against one process:", *problems]))


class _Result(NamedTuple):
    """What one rank found."""

    outputs: Tree
    gradients: Tree  # like the inputs, an empty tensor for integers; None when an output has a wrong shape


class _Tolerance(NamedTuple):
    relative: float
    absolute: float


def _output_placements(outputs: PlacementTree | None, reference: Tree, sizes: Sizes) -> Tree:
    if outputs is None:
        outputs = (Partial(),) * len(sizes)
    outputs = outputs(sizes) if callable(outputs) else outputs
    if is_leaf(outputs):
        outputs = pytree.tree_map(lambda leaf: outputs, reference)
    for path, (_, placed) in zip_leaves(reference, "the outputs", ("the outputs' placements", outputs)):
        if len(placed) != len(sizes):
            raise ValueError(f"output {path!r} has the placements {placed}; the mesh has the axes {tuple(sizes)}")
    return outputs


def _run(
    function: Callable[[Tree, Layout], Tree],
    inputs: Tree,
    placements: Tree,
    outputs: Tree | None,
    shapes: Tree | None,
    sizes: Sizes,
) -> _Result:
    """One rank's part. Without ``shapes``, of a world of one rank, whose outputs are whole."""
    mesh = mesh_of(sizes)
    layout = make_layout(mesh, placements, inputs)
    coordinate = mesh.get_coordinate() or ()
    full, spec = pytree.tree_flatten(inputs)
    placed = pytree.tree_leaves(placements, is_leaf=is_leaf)
    shards = [
        leaf[local_slices(leaf.shape, placement, sizes, coordinate)].clone()
        for leaf, placement in zip(full, placed, strict=True)
    ]
    smooth = [index for index, shard in enumerate(shards) if shard.is_floating_point()]
    structure: list[pytree.TreeSpec] = []

    def differentiable(*values: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        arguments = list(shards)
        for index, value in zip(smooth, values, strict=True):
            arguments[index] = value
        returned, out_spec = pytree.tree_flatten(function(pytree.tree_unflatten(arguments, spec), layout))
        structure.append(out_spec)
        return tuple(leaf for leaf in returned if leaf.is_floating_point()), returned

    if not smooth:
        raise ValueError("the inputs have no floating-point leaf, so there is no gradient to compare")
    slopes, pull_back, returned = torch.func.vjp(  # type: ignore[misc]
        differentiable, *[shards[index] for index in smooth], has_aux=True
    )
    result = pytree.tree_unflatten([leaf.detach() for leaf in returned], structure[-1])
    cotangents = _cotangents(result, outputs, shapes, sizes, coordinate)
    gradients = None
    if _everywhere(cotangents is not None) and cotangents is not None:
        leaves = [shard.new_empty(0) for shard in shards]
        if slopes:
            for index, gradient in zip(smooth, pull_back(cotangents), strict=True):
                leaves[index] = gradient.detach()
        gradients = pytree.tree_unflatten(leaves, spec)
    return _Result(result, gradients)


def _everywhere(fine: bool) -> bool:
    """Whether all ranks are fine: a backward that some of them skip would leave the others waiting."""
    return not all_reduce(torch.tensor(int(not fine)), dist.group.WORLD).item()  # type: ignore[arg-type]


def _cotangents(
    outputs: Tree, placements: Tree | None, shapes: Tree | None, sizes: Sizes, coordinate: Sequence[int]
) -> tuple[Tensor, ...] | None:
    """A rank's part of one random cotangent per floating-point output; ``None`` if an output has a wrong shape.

    A shard has its part. A summand and a copy have all of it: the derivative of a sum passes unchanged to each summand,
    and the cotangent of one value that all hold is one value too.
    """
    found = []
    leaves = named_leaves(outputs)
    whole = {path: leaf.shape for path, leaf in leaves.items()} if shapes is None else named_leaves(shapes)
    placed = dict.fromkeys(leaves, (Replicate(),) * len(sizes)) if placements is None else named_leaves(placements)
    if leaves.keys() != whole.keys():
        return None
    for index, (path, leaf) in enumerate(leaves.items()):
        slices = local_slices(whole[path], placed[path], sizes, coordinate)
        if tuple(leaf.shape) != tuple(part.stop - part.start for part in slices):
            return None
        if leaf.is_floating_point():
            # Positive and all different: neither cancels nor hides a permutation.
            generator = torch.Generator().manual_seed(index)
            cotangent = 0.5 + torch.rand(whole[path], generator=generator, dtype=torch.float64)
            found.append(cotangent[slices].to(leaf.dtype))
    return tuple(found)


def _compare(
    kind: str, reference: Tree, found: Sequence[Tree], placements: Tree, sizes: Sizes, tolerance: _Tolerance
) -> Iterator[str]:
    """One message for each leaf that differs."""
    if any(tree is None for tree in found):  # the outputs' message tells why
        return
    ranks = [named_leaves(tree) for tree in found]
    for path, (expected, placed) in zip_leaves(reference, "the reference", ("the placements", placements)):
        for rank, leaves in enumerate(ranks):
            if leaves.keys() != (names := named_leaves(reference)).keys():
                yield f"the outputs of rank {rank} are the leaves {list(leaves)}, those of one process {list(names)}"
                return
        if kind == "gradient" and not expected.is_floating_point():
            continue
        problem = _shape_problem([leaves[path] for leaves in ranks], expected, placed, sizes)
        problem = problem or _value_problem([leaves[path] for leaves in ranks], expected, placed, sizes, tolerance)
        if problem:
            name = "the output" if path == "<root>" and kind == "output" else f"{kind} of {path}"
            name = f"output {path}" if kind == "output" and path != "<root>" else name
            yield f"{name} {problem}; placements {_show(placed, sizes)}"


def _shape_problem(parts: Sequence[Tensor], expected: Tensor, placed: Placements, sizes: Sizes) -> str:
    for coordinate, part in zip(_coordinates(sizes), parts, strict=True):
        slices = local_slices(expected.shape, placed, sizes, coordinate)
        shape = tuple(one.stop - one.start for one in slices)
        if tuple(part.shape) != shape:
            where = ", ".join(f"{axis} {index}" for axis, index in zip(sizes, coordinate, strict=True))
            return f"has shape {tuple(part.shape)} at {where}, where {tuple(expected.shape)} is {shape}"
        if part.dtype != expected.dtype:
            return f"has dtype {part.dtype}, on one process {expected.dtype}"
    return ""


def _value_problem(
    parts: Sequence[Tensor], expected: Tensor, placed: Placements, sizes: Sizes, tolerance: _Tolerance
) -> str:
    copies = _assemble(parts, expected, placed, sizes)
    wanted = expected.to(torch.float64)
    exact = not expected.is_floating_point()
    wrong = {copy: value for copy, value in copies.items() if not _close(value, wanted, tolerance, exact)}
    if not wrong:
        return ""
    copy, value = next(iter(wrong.items()))
    names = [axis for axis, placement in zip(sizes, placed, strict=True) if isinstance(placement, Replicate)]
    repeated = [axis for axis in names if sizes[axis] > 1]
    lost = bool((value == 0).all()) and len(wrong) == len(copies)
    if repeated and not lost and _close(sum(copies.values(), torch.zeros_like(wanted)), wanted, tolerance, exact):
        return (
            f"is not summed over {_list(repeated)}: the sum of its copies is the reference (parallel.replicate it "
            "where it enters, or reduce it)"
        )
    where = ""
    if len(copies) > 1 and not all(_close(other, value, tolerance, exact) for other in copies.values()):
        at = ", ".join(f"{axis} {index}" for axis, index in zip(names, copy, strict=True))
        where = f" at {at}, and not the same on all ranks"
    if lost:
        return "is lost: 0 everywhere, unlike the reference"
    ratio = float((value * wanted).sum() / (wanted * wanted).sum()) if bool((wanted != 0).any()) else math.nan
    axes = _explain(ratio, sizes)
    # Any two numbers have a ratio: of a single one it says something only if it is that of some axes.
    if math.isfinite(ratio) and _close(value, ratio * wanted, tolerance, False) and (axes or wanted.numel() > 1):
        return f"is {ratio:.2f} x the reference{axes}{where}"
    difference = (value - wanted).abs()
    largest = int(difference.nan_to_num(math.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(largest), wanted.shape))
    return f"differs{where}: at index {index} it is {value[index].item():.6g}, the reference {wanted[index].item():.6g}"


def _assemble(
    parts: Sequence[Tensor], expected: Tensor, placed: Placements, sizes: Sizes
) -> dict[tuple[int, ...], Tensor]:
    """The full value of each copy, in float64, by its coordinate along the axes that replicate."""
    copies: dict[tuple[int, ...], Tensor] = {}
    for coordinate, part in zip(_coordinates(sizes), parts, strict=True):
        copy = tuple(
            index for index, placement in zip(coordinate, placed, strict=True) if isinstance(placement, Replicate)
        )
        value = copies.setdefault(copy, torch.zeros(expected.shape, dtype=torch.float64))
        value[local_slices(expected.shape, placed, sizes, coordinate)] += part.to(torch.float64)
    return copies


def _close(value: Tensor, wanted: Tensor, tolerance: _Tolerance, exact: bool) -> bool:
    if exact or not wanted.numel():
        return torch.equal(value, wanted)
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(value, wanted, rtol=0.0, atol=tolerance.absolute + tolerance.relative * scale, equal_nan=True)


def _explain(ratio: float, sizes: Sizes) -> str:
    """Which axes' sizes multiply to the ratio, or to one over it; the fewest that do."""
    for count in range(1, len(sizes) + 1):
        guesses = [
            axes
            for axes in itertools.combinations([axis for axis in sizes if sizes[axis] > 1], count)
            if any(math.isclose(value, math.prod(sizes[axis] for axis in axes), rel_tol=1e-3) for value in _both(ratio))
        ]
        if guesses:
            return " (" + " or ".join(_sized(axes, sizes) for axes in guesses) + ")"
    return ""


def _both(ratio: float) -> tuple[float, float]:
    return ratio, (1 / ratio if ratio else math.inf)


def _sized(axes: Sequence[str], sizes: Sizes) -> str:
    if len(axes) == 1:
        return f"axis {axes[0]} has size {sizes[axes[0]]}"
    return f"axes {' x '.join(axes)} have size {math.prod(sizes[axis] for axis in axes)}"


def _show(placed: Sequence[Placement], sizes: Sizes) -> str:
    def word(placement: Placement) -> str:
        return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"

    return ", ".join(f"{axis}: {word(placement)}" for axis, placement in zip(sizes, placed, strict=True))


def _list(axes: Sequence[str]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else "axes " + " and ".join(axes)


def _coordinates(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """The coordinate of each rank, in the order of ranks."""
    return itertools.product(*[range(size) for size in sizes.values()])
