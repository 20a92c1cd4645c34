"""Rounding to fp8 by blocks: as e4m3 rounds (ml_dtypes), nothing hidden, the same wherever a block lies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_moe.parallel import _fp8, round_to_fp8

E4M3 = ml_dtypes.float8_e4m3fn
EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def parts(draw: Any) -> tuple[Tensor, int]:
    """A part of any shape, empty ones too, whose values differ in magnitude from block to block and within."""
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    shape = [draw(st.integers(0, 4)) for _ in range(dims)]
    shape[dim] = draw(st.sampled_from([0, 1, 5, 127, 128, 129, 256, 300]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    spread = draw(st.integers(0, 12))
    exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    return (values * 2.0 ** draw(st.integers(-90, 90))).to(torch.float32), dim


def blocks(x: Tensor, dim: int) -> list[np.ndarray]:
    """Views of the blocks, one after the other: [fibres, size]."""
    fibres = np.moveaxis(x.double().numpy(), dim, -1).reshape(-1, x.shape[dim])
    return [fibres[:, start : start + 128] for start in range(0, x.shape[dim], 128)]


def scales(block: np.ndarray) -> np.ndarray:
    """The least power of two with which a block fits into e4m3: [fibres, 1]."""
    largest = np.abs(block).max(-1, keepdims=True)
    found = np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest) / 448)))
    return np.maximum(found, 2.0**-117)


@EXAMPLES
@given(case=parts())
def test_values_arrive_as_e4m3_rounds_them_times_a_power_of_two(case: Any) -> None:
    x, dim = case
    if not x.numel():
        assert round_to_fp8(x, dim).shape == x.shape
        return
    for found, block in zip(blocks(round_to_fp8(x, dim), dim), blocks(x, dim), strict=True):
        scale = scales(block)
        expected = (block / scale).astype(np.float32).astype(E4M3).astype(np.float64) * scale
        np.testing.assert_array_equal(found, expected)
        assert (np.abs(found - block) <= np.maximum(np.abs(block) / 16, scale / 1024)).all()
        # Down to a share of the largest, relative precision is e4m3's.
        large = np.abs(block) >= np.abs(block).max(-1, keepdims=True) / 14336
        assert (np.abs(found - block) <= np.abs(block) / 16)[large].all()


@EXAMPLES
@given(case=parts())
def test_rounding_is_the_same_in_every_dtype_and_done_once(case: Any) -> None:
    x, dim = case
    once = round_to_fp8(x, dim)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        found = round_to_fp8(x, dim, dtype)
        assert found.dtype == dtype
        assert torch.equal(found.double(), once.double())
        assert torch.equal(round_to_fp8(found, dim), found)
    assert torch.equal(round_to_fp8(x.double(), dim), once.double())


@EXAMPLES
@given(case=parts(), piece=st.sampled_from([1, 100, 129, 1000]))
def test_working_in_pieces_changes_nothing(case: Any, piece: int) -> None:
    x, dim = case
    expected = round_to_fp8(x, dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fp8, "PIECE", piece)
        assert torch.equal(round_to_fp8(x, dim), expected)


@EXAMPLES
@given(case=parts())
def test_a_message_has_a_byte_for_each_element_and_block(case: Any) -> None:
    x, dim = case
    fibres = x.numel() // x.shape[dim] if x.shape[dim] else 0
    assert _fp8.message_bytes(x.shape, dim) == x.numel() + fibres * math.ceil(x.shape[dim] / 128)


def test_what_e4m3_has_arrives_as_it_was() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    for scale in (2.0**-100, 2.0**-9, 1.0, 2.0**100):
        x = every[None] * scale
        found = round_to_fp8(x, 0)  # each with a scale of its own
        assert torch.equal(found, x)
        found = round_to_fp8(x.t()[:128].contiguous(), 0)  # the non-negative ones with one scale
        assert torch.equal(found, x.t()[:128])
    assert torch.equal(torch.signbit(round_to_fp8(torch.tensor([-0.0, 0.0]), 0)), torch.tensor([True, False]))


def test_a_block_of_zeros_is_zeros_beside_large_ones() -> None:
    x = torch.zeros(3, 256)
    x[1, 128:] = 1e30
    found = round_to_fp8(x, 1)
    assert torch.equal(found[x == 0], torch.zeros(640))
    torch.testing.assert_close(found[1, 128:], x[1, 128:], rtol=2**-4, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(value: float, dtype: torch.dtype) -> None:
    x = torch.ones(3, 300)
    x[1, 130] = value
    found = round_to_fp8(x, 1, dtype)
    assert bool(found[1, 128:256].isnan().all())
    found[1, 128:256] = 1
    assert torch.equal(found.float(), torch.ones(3, 300))


def test_the_smallest_and_the_largest_numbers() -> None:
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 3e-38, 2.0**-110])
    for one in (tiny, tiny[:, None]):
        found = round_to_fp8(one, one.ndim - 1)
        assert float((found.double() - one.double()).abs().max()) <= 2.0**-114  # a sixteenth of 2^-110
        assert bool(((found == 0) | (found.abs() >= torch.finfo(torch.float32).tiny)).all())
    small = round_to_fp8(tiny[:5], 0)
    assert float((small.double() - tiny[:5].double()).abs().max()) <= 2.0**-127
    large = torch.tensor([2.0**127, -(2.0**127), 1.0])
    assert torch.equal(round_to_fp8(large, 0), torch.tensor([2.0**127, -(2.0**127), 0.0]))


def test_parts_cut_between_blocks_are_rounded_as_the_whole() -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 5, 300)

    def in_parts(*cuts: int) -> Tensor:
        edges = [0, *cuts, 300]
        return torch.cat([round_to_fp8(x[:, a:b], 1) for a, b in itertools.pairwise(edges)], dim=1)

    whole = round_to_fp8(x, 1)
    assert torch.equal(in_parts(128), whole)
    assert torch.equal(in_parts(128, 256), whole)
    # Elsewhere blocks begin anew: another rounding, within the same bound of relative precision.
    assert not torch.equal(in_parts(100), whole)
    torch.testing.assert_close(in_parts(100), x, rtol=2**-4, atol=float(x.abs().max()) / 14336)
    # Along another dimension a cut is never one of a block.
    assert torch.equal(torch.cat([round_to_fp8(x[:1], 1), round_to_fp8(x[1:], 1)]), whole)
