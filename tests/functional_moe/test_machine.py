"""Machines are read from TOML, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_moe.machine import HARDWARE, MachineError, known_machines, read_machine

TEXT = (HARDWARE / "jupiter.toml").read_text()


@pytest.mark.parametrize("name", known_machines())
def test_files_that_come_along_are_read(name: str) -> None:
    machine = read_machine(name)
    assert machine.tiers["hbm"].bytes > 10**9
    assert all(rate.sustained <= rate.peak for rate in machine.products.values())


def test_directions_differ() -> None:
    host = read_machine("jupiter").tiers["host"]
    assert (host.write, host.read) == (160e9, 415e9)


def test_unknown_names_list_the_near_ones() -> None:
    with pytest.raises(MachineError, match=r"unknown hardware 'jupter'.*'jupiter'"):
        read_machine("jupter")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("write = 160e9", "", "tiers.host.write is missing"),
        ("write = 160e9", "write = -1", "tiers.host.write = -1: must be above 0"),
        ("write = 160e9", "write = nan", "tiers.host.write = nan"),
        ("write = 160e9", "write = true", "tiers.host.write = True"),
        ("write = 160e9", "wrote = 160e9", "tiers.host.wrote is unknown"),
        ("bytes = 96_000_000_000", "bytes = 96e30", "tiers.hbm.bytes"),
        ("sustained = 600e12", "sustained = 990e12", "products.bfloat16.sustained = 9.9e.14 exceeds the peak"),
        ("sustained = 22.9e9", "sustained = 26e9", "links.network.sustained"),
        ("devices_per_node = 4", "devices_per_node = 0", "devices_per_node = 0"),
        ("devices_per_node = 4", "devices_per_node = 1.5", "devices_per_node = 1.5: must be a whole number"),
        ('crosses = "host"', 'crosses = "hbm"', "links.network.crosses"),
        ("[tiers.hbm]", "[tiers.vram]", "tiers.vram.write is missing"),
        ("[links.network]", "[links.net]", "links.net is unknown"),
        ('name = "JUPITER', 'name = 3\nother = "', "other is unknown"),
        ("[tiers.hbm]", "[tiers.hbm", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = tmp_path / "machine.toml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(MachineError, match=message) as caught:
        read_machine(str(path))
    assert "\n" not in str(caught.value)
