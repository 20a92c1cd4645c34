"""Parameters in fp8 with a scale for each block: how matrices travel in half the bytes of bf16.

A block is ``BLOCK`` consecutive elements along one dimension of a part, counted from the part's first; the last one may
be shorter. It travels as its elements in e4m3 and one scale in e8m0, a byte: the least power of two with which the
block's largest magnitude is at most 448, e4m3's largest number. With it the values that arrive are::

    |y - x| <= max(2^-4 |x|, 2^-10 scale),    max |block| / 448 <= scale < max |block| / 224

so a value keeps its relative precision down to 1 / 14336 of its block's largest. (For ``|x|`` below ``2^127``; beyond,
as in bf16, what rounds up may be infinite.) Scales go no lower than ``2^-117``: what arrives is never subnormal in fp32
or bf16, whatever the device makes of such numbers.

Why a power of two. Multiplying by it is exact, and bf16 has its exponents: what arrives is the same number in bf16,
fp32 and fp64, and a value that e4m3 has comes back as it was, so rounding twice is rounding once. A scale of
``max / 448`` would reach at most one binade lower of the eighteen that e4m3 spans, at four bytes and a second rounding;
the relative precision is that of three mantissa bits either way.

A block with a value that is not finite arrives as NaN in every element: e8m0 has a NaN of its own. e4m3 has no
infinity, and casts to it saturate, so nothing else would show it.

Rounding depends on where blocks begin. Ranks agree bit for bit with each other, because all of them, the owner too, use
what was sent; they agree with other meshes and with one process wherever the dimension of the blocks is not split, or
split at multiples of ``BLOCK``. Elsewhere values below 1 / 14336 of a block's largest may be rounded otherwise.

OCP Microscaling Formats (MX) 1.0 has these scales, for blocks of 32. DeepSeek-V3 (arXiv 2412.19437, 3.3.2) scales
weights by blocks of 128 x 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale."""

PIECE = 1 << 22
"""Elements that are worked on at once: bounds the memory beside message and result, and stays in a GPU's cache."""

E4M3 = torch.float8_e4m3fn
_E8M0 = torch.float8_e8m0fnu
_BIAS = 127
_NAN = 255
_LEAST = _BIAS - 117


def message_bytes(shape: Sequence[int], dim: int) -> int:
    """Bytes of a part's message: one for each element, and one for each block."""
    return math.prod(shape) + math.prod(_scales_shape(shape, dim))


def working_bytes(shape: Sequence[int]) -> int:
    """Bytes that :func:`write_message` takes besides its arguments, for a part of fp32: one scaled copy of a piece."""
    return 4 * min(math.prod(shape), PIECE)


def write_message(message: Tensor, part: Tensor, dim: int) -> None:
    """Rounds a part into the message that carries it.

    Args:
      message: uint8 [message_bytes]; overwritten: scales first, then elements in the part's order.
      part: floating-point, of any shape; of fp64, it is first rounded to fp32.
      dim: along which blocks run.
    """
    scales, elements = _views(message, part.shape, dim)
    for x, element, scale in _pieces(_in_blocks(part, scales, elements, dim), dim):
        x = x.to(torch.float32)
        exponent = _scale(x.abs().amax(dim + 1, keepdim=True))
        scale.copy_(exponent)
        # 2^-e is e8m0's 254 - e, and NaN's is NaN.
        element.copy_(x * (2 * _BIAS - exponent).view(_E8M0).to(torch.float32))


def read_message(message: Tensor, out: Tensor, dim: int) -> None:
    """Writes the part that a message carries.

    Args:
      message: uint8 [message_bytes], as :func:`write_message` left it.
      out: floating-point, of the part's shape and any strides; overwritten.
      dim: along which blocks run.
    """
    scales, elements = _views(message, out.shape, dim)
    for x, element, scale in _pieces(_in_blocks(out, scales, elements, dim), dim):
        x.copy_(element)
        x.mul_(scale.view(_E8M0).to(x.dtype))


def round_to_fp8(part: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """What arrives of a part.

    Args:
      part: floating-point, of any shape.
      dim: along which blocks run.
      dtype: of the result; by default the part's. It changes no value, unless it is narrower than bf16.
    """
    message = torch.empty(message_bytes(part.shape, dim), dtype=torch.uint8, device=part.device)
    out = torch.empty(part.shape, dtype=dtype or part.dtype, device=part.device)
    write_message(message, part, dim)
    read_message(message, out, dim)
    return out


def _scales_shape(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], -(-shape[dim] // BLOCK), *shape[dim + 1 :])


def _views(message: Tensor, shape: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """A message's scales, uint8 [..., blocks, ...], and its elements, e4m3 of the part's shape."""
    of_scales = _scales_shape(shape, dim)
    scales, elements = message.split([math.prod(of_scales), math.prod(shape)])
    return scales.view(of_scales), elements.view(E4M3).view(tuple(shape))


def _in_blocks(part: Tensor, scales: Tensor, elements: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Part, elements and scales cut into whole blocks, then the shorter ones at the end.

    Each as [..., blocks, size, ...], the blocks along ``dim``; of the scales ``size`` is 1.
    """
    blocks, rest = divmod(part.shape[dim], BLOCK)
    for begin, count, size in ((0, blocks, BLOCK), (blocks, 1, rest)):
        if count and size:
            cut = [x.narrow(dim, begin * BLOCK, count * size).unflatten(dim, (count, size)) for x in (part, elements)]
            yield cut[0], cut[1], scales.narrow(dim, begin, count).unsqueeze(dim + 1)


def _pieces(blocks: Iterator[tuple[Tensor, ...]], dim: int) -> Iterator[tuple[Tensor, ...]]:
    """The same in pieces of at most ``PIECE`` elements; no block is cut."""
    for cut in blocks:
        shape = cut[0].shape
        along = next((axis for axis, size in enumerate(shape) if size > 1 and axis != dim + 1), None)
        if shape.numel() <= PIECE or along is None:
            yield cut
        else:
            yield from _pieces(zip(*(x.chunk(2, along) for x in cut), strict=True), dim)


def _scale(largest: Tensor) -> Tensor:
    """e8m0, as uint8, of the least power of two with which ``largest`` is at most 448; NaN of what is not finite."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [1/2, 1); 448 is 7/8 of 2^9
    biased = (exponent - 9 + (mantissa > 0.875) + _BIAS).clamp(min=_LEAST)
    return torch.where(largest.isfinite(), biased, _NAN).to(torch.uint8)
