"""A machine in figures: how many bytes each tier holds, and how fast values are computed and moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ._schedule import HBM

LARGEST = 2**60
"""Bytes, and bytes a second, above which a figure is taken for a slip."""


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of a connection."""

    bandwidth: float
    """Bytes per second, as measured."""
    latency: float = 0.0
    """Seconds that every copy takes besides."""

    def __post_init__(self) -> None:
        _check_rate("bandwidth", self.bandwidth, LARGEST)
        if not (math.isfinite(self.latency) and 0 <= self.latency < 60):
            raise ValueError(f"latency = {self.latency!r} seconds: must be from 0 to 60")

    def seconds(self, size: int) -> float:
        """How long ``size`` bytes take; nothing takes no time."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclasses.dataclass(frozen=True)
class Tier:
    """Memory of one kind. All but the first are reached over two links, which may differ."""

    bytes: int
    write: Link | None = None
    """From HBM."""
    read: Link | None = None
    """Back to HBM."""

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or not 0 <= self.bytes <= LARGEST:
            raise ValueError(f"bytes = {self.bytes!r}: must be an integer from 0 to 2^60")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one process has.

    Every figure is one that a user can replace by what they measured: two directions of a link are two figures, and a
    tier more is one more entry of ``tiers``.

    Example:
      >>> c2c = Tier(120 * 10**9, write=Link(160e9), read=Link(415e9))
      >>> gh200 = Hardware(flops=600e12, tiers={"hbm": Tier(96 * 10**9), "host": c2c}, gather=Link(22.9e9))

    Raises:
      ValueError: for a rate that is not above 0, a size that no memory has, a tier without links, or no tier "hbm".
    """

    flops: float
    """Floating-point operations a second that training sustains."""
    tiers: Mapping[str, Tier]
    """By name; the one called "hbm" is where everything is computed."""
    memory_bandwidth: float = math.inf
    """Bytes a second of HBM, for what is not arithmetic."""
    gather: Link | None = None
    """Over which parameters come together."""
    reduce: Link | None = None
    """Over which gradients are summed."""

    def __post_init__(self) -> None:
        _check_rate("flops", self.flops, 1e21)
        if self.memory_bandwidth != math.inf:
            _check_rate("memory_bandwidth", self.memory_bandwidth, LARGEST)
        if HBM not in self.tiers:
            raise ValueError(f"tiers = {sorted(self.tiers)}: one must be {HBM!r}")
        for name, tier in self.tiers.items():
            for direction in ("write", "read"):
                if name == HBM and getattr(tier, direction) is not None:
                    raise ValueError(f"tiers[{name!r}].{direction}: values are computed there; no link leads to it")
                if name != HBM and getattr(tier, direction) is None:
                    raise ValueError(f"tiers[{name!r}].{direction} is missing: a further tier needs both links")

    @property
    def budgets(self) -> dict[str, int]:
        """All the bytes of every tier."""
        return {name: tier.bytes for name, tier in self.tiers.items()}


def _check_rate(name: str, rate: float, largest: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= largest:
        raise ValueError(f"{name} = {rate!r}: must be above 0 and at most {largest:.3g}")
