"""``functional-moe calibrate``: this machine in figures, as a file that ``functional-moe plan --hardware`` takes."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..flops import measure_matmul_rate
from ..machine import read_machine
from ..parallel import spawn
from ..parallel._collective_functions import all_gather_single
from .output import check_writable
from .settings import SettingsError

SIZES = (256, 512, 1024, 2048)
"""Of square products."""
COPY = 1 << 28
"""Bytes of a copy."""
MESSAGES = (1 << 12, 1 << 24)
"""Bytes that each rank brings to an all-gather: for the latency, and for the bandwidth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """Measures this machine, in a minute or two, and writes a hardware file."""

    out: Path = Path("this-cpu.toml")
    """Where to."""
    ranks: int = 2
    """Processes of a node, when they are not launched already (by torchrun)."""


class Products(NamedTuple):
    """Rates by size, FLOP/s."""

    dtype: str
    rates: dict[int, float]


class Wire(NamedTuple):
    """Between two ranks."""

    bandwidth: float  # bytes per second that a rank receives from each other rank
    latency: float  # seconds


def calibrate(settings: CalibrateSettings) -> int:
    """Measures, writes, and reads back what was written."""
    if not 1 <= settings.ranks <= 64:
        raise SettingsError(f"--ranks {settings.ranks}: must be from 1 to 64")
    check_writable("--out", settings.out)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = launched if launched > 1 else settings.ranks
    if launched > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        wire = measure_wire()
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not first:
            return 0
    else:
        wire = spawn(measure_wire, ranks)[0] if ranks > 1 else Wire(measure_copies("cpu") / 2, 0.0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device == "cuda" else [])
    products = [measure_products(dtype, device) for dtype in dtypes]
    text = describe_machine(ranks, device, products, wire)
    settings.out.write_text(text)
    read_machine(str(settings.out))
    print(text, end="")
    print(f"written to {settings.out}")
    return 0


def measure_products(dtype: torch.dtype, device: str) -> Products:
    """Square products of every size; the best of some repetitions each."""
    name = str(dtype).removeprefix("torch.")
    return Products(name, {size: measure_matmul_rate(dtype, device, size) for size in SIZES})


def measure_copies(device: str) -> float:
    """Bytes per second that memory takes, reads and writes together."""
    source = torch.ones(COPY // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY / _median_seconds(lambda: target.copy_(source), device)


def measure_link(write: bool) -> float:
    """Bytes per second between a CUDA device and pinned memory of the host, one way."""
    here = torch.ones(COPY // 4, device="cuda")
    there = torch.ones(COPY // 4).pin_memory()
    source, target = (here, there) if write else (there, here)
    return COPY / _median_seconds(lambda: target.copy_(source, non_blocking=True), "cuda")


def measure_wire() -> Wire:
    """An all-gather over the default group, small and large."""
    ranks = dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    seconds = []
    for size in MESSAGES:
        own = torch.ones(size, dtype=torch.uint8, device=device)
        everyone = torch.empty(ranks * size, dtype=torch.uint8, device=device)

        def gather(own: torch.Tensor = own, everyone: torch.Tensor = everyone) -> None:
            all_gather_single(everyone, own)

        seconds.append(_median_seconds(gather, device))
    return Wire(MESSAGES[1] / max(seconds[1] - seconds[0], 1e-9), seconds[0])


def _median_seconds(run: Callable[[], object], device: str, repeats: int = 9) -> float:
    found = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def describe_machine(ranks: int, device: str, products: list[Products], wire: Wire) -> str:
    """The file's text."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    lines = [
        f"# Measured by `functional-moe calibrate`: {ranks} ranks, {threads} threads each, torch {torch.__version__}.",
        "",
        f'name = "{platform.processor() or platform.machine()}, {ranks} ranks on one machine"',
        f"devices_per_node = {ranks}",
        "",
        "[tiers.hbm]",
    ]
    if device == "cuda":
        _, total = torch.cuda.mem_get_info()
        lines += [f"bytes = {total}", f"bandwidth = {measure_copies(device):.4g}", "", "[tiers.host]"]
        lines += [f"bytes = {memory // ranks}", f"bandwidth = {measure_copies('cpu') / ranks:.4g}"]
        lines += [f"write = {measure_link(write=True):.4g}", f"read = {measure_link(write=False):.4g}"]
    else:
        lines += [f"bytes = {memory // ranks}  # a share of the machine's", f"bandwidth = {measure_copies(device):.4g}"]
    for link in ("node", "network"):
        comment = "  # there is one node; as within it" if link == "network" else ""
        lines += ["", f"[links.{link}]{comment}", f"bandwidth = {wire.bandwidth:.4g}", f"latency = {wire.latency:.3g}"]
    for one in products:
        rates = ", ".join(f"{size}: {rate:.3g}" for size, rate in one.rates.items())
        best, usual = max(one.rates.values()), statistics.median_low(list(one.rates.values()))
        lines += ["", f"[products.{one.dtype}]  # square products by size, FLOP/s: {rates}"]
        lines += [f"peak = {best:.4g}", f"sustained = {usual:.4g}"]
    host = measure_products(torch.float32, "cpu") if device == "cuda" else products[0]
    share = 1 if device == "cpu" else ranks
    best, usual = max(host.rates.values()) / share, statistics.median_low(list(host.rates.values())) / share
    lines += ["", "[host_products.float32]", f"peak = {best:.4g}", f"sustained = {usual:.4g}"]
    return "\n".join(lines) + "\n"
