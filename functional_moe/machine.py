"""Machines as small TOML files: tiers, links with a bandwidth per direction, rates at their peak and sustained.

The files that come along lie in ``hardware/``; ``functional-moe calibrate`` writes one of the machine it runs on. Every
figure is one that a user can replace by what they measured.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .memory import HBM

HARDWARE = Path(__file__).parent / "hardware"
"""Where the files are that come along."""

_MOST = {"bytes": 2.0**50, "bandwidth": 1e15, "sustained": 1e21, "peak": 1e21, "write": 1e15, "read": 1e15}


class MachineError(ValueError):
    """A machine that does not exist, or a description that cannot be one."""


@dataclasses.dataclass(frozen=True)
class MemoryTier:
    """Memory of one kind, of one device."""

    bytes: int
    bandwidth: float
    """Bytes per second, reads and writes together."""
    write: float = 0.0
    """Bytes per second from the first tier; 0 for the first tier itself."""
    read: float = 0.0
    """Bytes per second back to it."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """What connects two devices, one direction."""

    bandwidth: float
    """Bytes per second, as specified."""
    sustained: float
    """As seen."""
    latency: float = 0.0
    """Seconds of a message besides."""
    crosses: str = ""
    """A tier whose links its traffic uses too."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Of products in one dtype."""

    peak: float
    """Floating-point operations per second."""
    sustained: float
    whole_steps: bool = False
    """``sustained`` was measured over whole training steps: other operators are in it. Otherwise they are timed by the
    bytes they move."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run has."""

    name: str
    devices_per_node: int
    tiers: Mapping[str, MemoryTier]
    node: Wire
    """Between two devices of a node: to every other device at once."""
    network: Wire
    """Of one device to other nodes."""
    products: Mapping[str, Rate]
    """By dtype."""
    host_products: Mapping[str, Rate]
    """On one device's share of the host."""

    def rate(self, dtype: str) -> Rate:
        """Of products in ``dtype``.

        Raises:
          MachineError: when the description has none.
        """
        if dtype not in self.products:
            raise MachineError(
                f"{self.name}: products.{dtype} is missing; there are {', '.join(sorted(self.products))}"
            )
        return self.products[dtype]


def known_machines() -> list[str]:
    """Names that :func:`read_machine` takes besides paths."""
    return sorted(path.stem for path in HARDWARE.glob("*.toml"))


def read_machine(name: str) -> Machine:
    """The machine of a file that comes along, by name, or of any file, by path.

    Raises:
      MachineError: for a name that is neither (lists the near ones), or a field that is missing, unknown or absurd
        (names it).
    """
    path = HARDWARE / f"{name}.toml" if name in known_machines() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, known_machines(), n=3, cutoff=0.3) or known_machines()
        raise MachineError(f"unknown hardware {name!r}, and no such file; did you mean {' or '.join(map(repr, near))}?")
    try:
        fields = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: not TOML: {error}") from None
    try:
        return _machine(fields)
    except MachineError as error:
        raise MachineError(f"{path}: {error}") from None


def _machine(fields: dict[str, Any]) -> Machine:
    allowed = ("name", "devices_per_node", "tiers", "links", "products", "host_products")
    _only(fields, allowed, "")
    name = fields.get("name", "")
    if not isinstance(name, str) or not name:
        raise MachineError("name is missing: a text")
    devices = _number(fields, "devices_per_node", "", most=1024, whole=True)
    tiers = {key: _tier(table, f"tiers.{key}", key) for key, table in _tables(fields, "tiers").items()}
    if HBM not in tiers:
        raise MachineError(f"tiers.{HBM} is missing: the tier in which everything is computed")
    links = _tables(fields, "links")
    _only(links, ("node", "network"), "links.")
    wires = {}
    for key in ("node", "network"):
        if key not in links:
            raise MachineError(f"links.{key} is missing")
        wires[key] = _wire(links[key], f"links.{key}", tiers)
    products = {key: _rate(table, f"products.{key}") for key, table in _tables(fields, "products").items()}
    if not products:
        raise MachineError("products is empty: at least one dtype")
    host = {key: _rate(table, f"host_products.{key}") for key, table in _tables(fields, "host_products").items()}
    return Machine(name, int(devices), tiers, wires["node"], wires["network"], products, host)


def _tier(table: Mapping[str, Any], where: str, name: str) -> MemoryTier:
    links = () if name == HBM else ("write", "read")
    _only(table, ("bytes", "bandwidth", *links), where + ".")
    size, bandwidth = _number(table, "bytes", where, whole=True), _number(table, "bandwidth", where)
    return MemoryTier(int(size), bandwidth, *(_number(table, link, where) for link in links))


def _wire(table: Mapping[str, Any], where: str, tiers: Mapping[str, MemoryTier]) -> Wire:
    _only(table, ("bandwidth", "sustained", "latency", "crosses"), where + ".")
    bandwidth = _number(table, "bandwidth", where)
    sustained = _number(table, "sustained", where, default=bandwidth)
    if sustained > bandwidth:
        raise MachineError(f"{where}.sustained = {sustained:g} exceeds the bandwidth {bandwidth:g}")
    crosses = table.get("crosses", "")
    if crosses and (crosses not in tiers or crosses == HBM):
        raise MachineError(f"{where}.crosses = {crosses!r}: no tier behind {HBM}; there are {sorted(tiers)}")
    latency = _number(table, "latency", where, default=0.0, least=0.0, most=60.0)
    return Wire(bandwidth, sustained, latency, crosses)


def _rate(table: Mapping[str, Any], where: str) -> Rate:
    _only(table, ("peak", "sustained", "whole_steps"), where + ".")
    peak, sustained = _number(table, "peak", where), _number(table, "sustained", where)
    if sustained > peak:
        raise MachineError(f"{where}.sustained = {sustained:g} exceeds the peak {peak:g}")
    whole_steps = table.get("whole_steps", False)
    if not isinstance(whole_steps, bool):
        raise MachineError(f"{where}.whole_steps = {whole_steps!r}: must be true or false")
    return Rate(peak, sustained, whole_steps)


def _tables(fields: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    found = fields.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise MachineError(f"{key} must be a table of tables")
    return found


def _only(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise MachineError(f"{where}{key} is unknown; there are {', '.join(allowed)}")


def _number(
    table: Mapping[str, Any],
    key: str,
    where: str,
    *,
    default: float | None = None,
    least: float | None = None,
    most: float | None = None,
    whole: bool = False,
) -> float:
    """A figure of ``table``: above 0 (or at least ``least``), and at most what a machine can have."""
    name = f"{where}.{key}" if where else key
    value = table.get(key, default)
    if value is None:
        raise MachineError(f"{name} is missing")
    most = _MOST.get(key, math.inf) if most is None else most
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and value != int(value)):
        raise MachineError(f"{name} = {value!r}: must be {'a whole' if whole else 'a'} number")
    if (value <= 0 if least is None else value < least) or value > most:
        raise MachineError(
            f"{name} = {value!r}: must be {'above 0' if least is None else 'at least 0'} and at most {most:g}"
        )
    return float(value)
