"""Which axes of a leaf form matrices: data that says what orthogonalisation works on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

#: A number of equal blocks, or the size of each block.
Blocks: TypeAlias = int | tuple[int, ...]

ScaleRule: TypeAlias = Literal["shape", "match_rms", "spectral"]


@dataclass(frozen=True)
class MatrixAxes:
    """The matrices in a leaf.

    Two axes form a matrix, all others are batch axes. An axis may be cut into blocks, each of which is a
    matrix of its own, normalised, orthogonalised and scaled by its own shape.

    Attributes:
        out: the axis of outputs (fan-out; a matrix's rows in ``W x``), from -ndim to ndim - 1.
        in_: the axis of inputs (fan-in).
        out_blocks: cuts of the output axis: a number of equal blocks (heads), or the sizes of unequal ones
            (the columns of fused q | k | v).
        in_blocks: cuts of the input axis, likewise (the heads of an attention output projection).

    Raises:
        ValueError: at construction, for one axis used twice or blocks that are not positive.

    Example:
        >>> MatrixAxes(out=-1, in_=-2)  # [in, out] used as x @ W; also a stack of experts [E, in, out]
        >>> MatrixAxes(out=-1, in_=-2, out_blocks=(1024, 256, 256))  # [hidden, q | k | v]
        >>> MatrixAxes(out=-1, in_=-2, out_blocks=16)  # [hidden, 16 heads * head_dim], each head a matrix
    """

    out: int
    in_: int
    out_blocks: Blocks = 1
    in_blocks: Blocks = 1

    def __post_init__(self) -> None:
        if self.out == self.in_:
            raise ValueError(f"out and in_ must be two axes, got {self.out} for both")
        for name, blocks in (("out_blocks", self.out_blocks), ("in_blocks", self.in_blocks)):
            sizes = (blocks,) if isinstance(blocks, int) else blocks
            if not sizes or any(size < 1 for size in sizes):
                raise ValueError(f"{name} must be a positive number of blocks or positive sizes, got {blocks!r}")


def check_axes(axes: MatrixAxes, shape: Sequence[int], path: str) -> tuple[int, int]:
    """Return (out, in) as non-negative axes of a leaf of this shape.

    Raises:
        ValueError: the leaf has fewer than two axes, or one of the two does not exist or is the other; names
            ``path``.
    """
    ndim = len(shape)
    if ndim < 2:
        raise ValueError(f"leaf {path!r} of shape {tuple(shape)} has no matrix: muon needs two axes or more")
    for name, axis in (("out", axes.out), ("in_", axes.in_)):
        if not -ndim <= axis < ndim:
            raise ValueError(f"leaf {path!r} of shape {tuple(shape)} has no axis {name}={axis}")
    out, in_ = axes.out % ndim, axes.in_ % ndim
    if out == in_:
        raise ValueError(f"leaf {path!r}: out={axes.out} and in_={axes.in_} are one axis of shape {tuple(shape)}")
    return out, in_


def check_blocks(axes: MatrixAxes, shape: Sequence[int], path: str) -> tuple[list[int], list[int]]:
    """Return the sizes of the blocks along (out, in) of a whole leaf.

    Raises:
        ValueError: as :func:`check_axes`, for an axis without elements, and for blocks that do not add up to
            their axis; names ``path``.
    """
    out, in_ = check_axes(axes, shape, path)
    # Only here: the shard of a leaf may well be empty.
    for name, axis in (("out", out), ("in_", in_)):
        if not shape[axis]:
            raise ValueError(f"leaf {path!r} of shape {tuple(shape)} has empty matrices: axis {name} has length 0")
    return (
        _sizes(axes.out_blocks, shape[out], "out_blocks", path),
        _sizes(axes.in_blocks, shape[in_], "in_blocks", path),
    )


def _sizes(blocks: Blocks, length: int, name: str, path: str) -> list[int]:
    if isinstance(blocks, int):
        if length % blocks:
            raise ValueError(f"leaf {path!r}: {name}={blocks} does not divide the axis of length {length}")
        return [length // blocks] * blocks
    if sum(blocks) != length:
        raise ValueError(f"leaf {path!r}: {name}={blocks} add up to {sum(blocks)}, the axis has length {length}")
    return list(blocks)


def split_matrices(x: Tensor, axes: MatrixAxes, path: str) -> list[Tensor]:
    """Cut a leaf into stacks of matrices, all of them views: what is written to a stack is written to the leaf.

    Args:
        x: the whole leaf, with any strides.
        axes: its matrices.
        path: its path, for errors.

    Returns:
        Stacks [batch, rows = out, cols = in], one per block and per index of all batch axes but the last.

    Raises:
        ValueError: a leaf without matrices, axes out of range, blocks that do not add up; names ``path``.
    """
    outs, ins = check_blocks(axes, x.shape, path)
    out, in_ = check_axes(axes, x.shape, path)
    return [
        block
        for stack in _stacks(x.movedim((out, in_), (-2, -1)))
        for rows in _cut(stack, outs, -2)
        for block in _cut(rows, ins, -1)
    ]


def join_matrices(stacks: Sequence[Tensor], axes: MatrixAxes, shape: Sequence[int], path: str) -> Tensor:
    """Inverse of :func:`split_matrices` for a leaf of this shape that is not empty, out of place."""
    outs, ins = check_blocks(axes, shape, path)
    out, in_ = check_axes(axes, shape, path)
    items = iter(stacks)

    def joined(batch: Sequence[int]) -> Tensor:
        if len(batch) > 1:
            return torch.stack([joined(batch[1:]) for _ in range(batch[0])])
        y = _cat([_cat([next(items) for _ in ins], -1) for _ in outs], -2)
        return y if batch else y[0]

    batch = [length for axis, length in enumerate(shape) if axis not in (out, in_)]
    return joined(batch).movedim((-2, -1), (out, in_))


def matrix_scale(rule: ScaleRule, rows: int, cols: int) -> float:
    """Return the factor of an orthogonalised matrix of ``rows`` outputs and ``cols`` inputs.

    - ``"shape"``: sqrt(max(1, rows / cols)) (Keller Jordan, https://kellerjordan.github.io/posts/muon).
    - ``"match_rms"``: 0.2 sqrt(max(rows, cols)), the root mean square of AdamW's updates (arXiv 2502.16982).
    - ``"spectral"``: sqrt(rows / cols), a spectral norm that transfers across widths (arXiv 2310.17813).

    Raises:
        ValueError: an unknown rule.
    """
    if rule == "shape":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "match_rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if rule == "spectral":
        return math.sqrt(rows / cols)
    raise ValueError(f"scale must be 'shape', 'match_rms' or 'spectral', got {rule!r}")


def _stacks(x: Tensor) -> list[Tensor]:
    """Return [..., rows, cols] as stacks of one batch axis."""
    if x.dim() <= 3:
        return [x if x.dim() == 3 else x[None]]
    return [stack for part in x.unbind() for stack in _stacks(part)]


def _cut(x: Tensor, sizes: Sequence[int], axis: int) -> Sequence[Tensor]:
    return [x] if len(sizes) == 1 else x.split(list(sizes), axis)


def _cat(xs: Sequence[Tensor], axis: int) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), axis)
