"""Descriptions of machines: figures that cannot be are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from functional_moe.memory import Hardware, Link, Tier


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan, math.inf, 2.0**61, True, "fast"])
def test_a_bandwidth_is_above_zero_and_a_number(bandwidth: Any) -> None:
    with pytest.raises(ValueError, match=f"bandwidth = {bandwidth!r}".replace("+", r"\+")):
        Link(bandwidth)


@pytest.mark.parametrize("latency", [-1e-6, math.nan, math.inf, 61.0])
def test_a_latency_is_short(latency: float) -> None:
    with pytest.raises(ValueError, match="latency = "):
        Link(1.0, latency)


@pytest.mark.parametrize("size", [-1, 2**60 + 1, 2**63, 1e9, True])
def test_a_size_is_one_that_memory_has(size: Any) -> None:
    with pytest.raises(ValueError, match="bytes = "):
        Tier(size)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flops": 0.0}, "flops = 0.0"),
        ({"flops": -1e12}, "flops = -1"),
        ({"memory_bandwidth": 0.0}, "memory_bandwidth = 0.0"),
        ({"tiers": {"host": Tier(1, Link(1.0), Link(1.0))}}, r"tiers = \['host'\]: one must be 'hbm'"),
        ({"tiers": {"hbm": Tier(1), "nvme": Tier(1, Link(1.0))}}, r"tiers\['nvme'\].read is missing"),
        ({"tiers": {"hbm": Tier(1), "nvme": Tier(1, read=Link(1.0))}}, r"tiers\['nvme'\].write is missing"),
        ({"tiers": {"hbm": Tier(1, Link(1.0))}}, r"tiers\['hbm'\].write: values are computed there"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hardware(**({"flops": 1e12, "tiers": {"hbm": Tier(1)}} | fields))


def test_a_link_takes_its_latency_and_its_bytes() -> None:
    assert Link(100.0, 0.5).seconds(50) == 1.0
    assert Link(100.0, 0.5).seconds(0) == 0.0


def test_the_budgets_are_all_there_is() -> None:
    machine = Hardware(1e12, {"hbm": Tier(96), "host": Tier(120, Link(1.0), Link(2.0))})
    assert machine.budgets == {"hbm": 96, "host": 120}
