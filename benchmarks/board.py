"""Every benchmark against its peer in one go: one table of ratios and bars, into BOARD.md.

    python benchmarks/board.py                    # on two quiet cores some ten minutes
    python benchmarks/board.py --only muon adamw  # some; BOARD.md is left alone
    python benchmarks/board.py --quick            # few rounds: do they run? BOARD.md is left alone

The machine's own limits are measured in the same run, before and after: where the two differ, something else was
running. A benchmark that fails has a row that says so; the exit status is 1 then, or where a bar is not met.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from _report import Ratio, read

from functional_moe.flops import measure_matmul_rate

HERE = Path(__file__).parent
PEERS = ("torch", "transformers", "optax", "jax", "safetensors")


class Entry(NamedTuple):
    """How a benchmark is run."""

    flags: tuple[str, ...]  # that give the bar's own sizes
    quick: tuple[str, ...]  # fewer rounds of smaller things
    threads: int | None = None  # of each process; None for torch's own choice
    limit: int = 240  # seconds


BENCHMARKS = {
    "train_step": Entry((), ("--rounds", "2", "--batch-size", "4")),
    "muon": Entry((), ("--experts", "2", "--repeats", "1")),
    "adamw": Entry(("--repeats", "21"), ("--repeats", "2", "--leaves", "100")),
    "sharded_step": Entry(("--layers", "4"), ("--layers", "2", "--rounds", "1"), 1),
    "sharded_muon": Entry((), ("--layers", "1", "--repeats", "1"), 1),
    "memory": Entry((), ("--rounds", "1", "--layers", "2", "--hidden-size", "64"), 1),
    "plan": Entry((), ("--layers", "8"), 1),
    "simulator": Entry((), ("--rounds", "1"), 1),
    "hf_load": Entry(("--repeats", "5"), ("--repeats", "1"), limit=420),
}


class Limits(NamedTuple):
    """What the machine does at best."""

    float32: float  # GFLOP/s of a matrix product
    bfloat16: float
    copy: float  # GB/s, read and written


def measure_limits(seconds: float) -> Limits:
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - start)
    rates = (measure_matmul_rate(dtype, seconds=seconds) / 1e9 for dtype in (torch.float32, torch.bfloat16))
    return Limits(*rates, 2 * source.nbytes / min(taken) / 1e9)


def run(name: str, entry: Entry, quick: bool) -> tuple[list[Ratio], str]:
    """The ratios of a benchmark, and why there are none."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [environment.get("PYTHONPATH")])])
    if entry.threads is not None:
        environment["OMP_NUM_THREADS"] = str(entry.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratios.json"
        command = [
            sys.executable,
            str(HERE / f"{name}.py"),
            "--json",
            str(path),
            *(entry.quick if quick else entry.flags),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=entry.limit)
        except subprocess.TimeoutExpired:
            return [], f"took longer than {entry.limit} s"
        if done.returncode or not path.exists():
            lines = done.stderr.strip().splitlines()
            return [], lines[-1] if lines else f"ended with status {done.returncode}"
        return read(path), ""


def processor() -> str:
    """The model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def rows(found: dict[str, tuple[list[Ratio], str]]) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = [("benchmark", "what", "against", "ratio", "bar", "met")]
    for name, (ratios, error) in found.items():
        for one in ratios:
            bar = f"{'≥' if one.at_least else '≤'} {one.bar:g}"
            out.append((name, one.what, one.peer, f"{one.value:.2f}", bar, "yes" if one.met else "**no**"))
        if error:
            out.append((name, error.replace("|", "/"), "", "", "", "**failed**"))
    return out


def markdown(table: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def describe(before: Limits, after: Limits, minutes: float) -> str:
    known = {one: importlib.metadata.version(one) for one in PEERS if importlib.util.find_spec(one)}
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    limits = "; ".join(
        f"{name} {a:.0f} and {b:.0f} {unit}"
        for name, unit, a, b in zip(
            ("fp32 products", "bf16 products", "memory copies"),
            ("GFLOP/s", "GFLOP/s", "GB/s"),
            before,
            after,
            strict=True,
        )
    )
    return (
        f"{datetime.date.today().isoformat()}, {processor()}, {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, {versions}; {minutes:.0f} minutes.\n\n"
        f"The machine's own limits, before and after: {limits}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(BENCHMARKS), nargs="+", default=list(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="few rounds of smaller things; the figures mean nothing")
    parser.add_argument("--out", type=Path, help="default: BOARD.md beside this script, for a whole board")
    arguments = parser.parse_args()
    start = time.perf_counter()
    before = measure_limits(0.02 if arguments.quick else 1.0)
    found = {}
    for name in arguments.only:
        begin = time.perf_counter()
        found[name] = run(name, BENCHMARKS[name], arguments.quick)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    after = measure_limits(0.02 if arguments.quick else 1.0)
    table = markdown(rows(found))
    described = describe(before, after, (time.perf_counter() - start) / 60)
    print(f"{table}\n\n{described}")
    whole = not arguments.quick and arguments.only == list(BENCHMARKS)
    out = arguments.out or (HERE / "BOARD.md" if whole else None)
    if out is not None:
        out.write_text(
            "# The board\n\nWritten by `python benchmarks/board.py`. A ratio is ours against the peer's in the same "
            f"run: with a bar of ≥, higher is better; with ≤, lower.\n\n{table}\n\n{described}\n"
        )
    return int(any(error or not all(one.met for one in ratios) for ratios, error in found.values()))


if __name__ == "__main__":
    sys.exit(main())
