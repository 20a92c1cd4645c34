"""What the benchmarks share: contenders that take turns, and ratios that say which bar they are to meet."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}


class Ratio(NamedTuple):
    """One figure against its peer, or its limit."""

    what: str
    peer: str
    value: float
    bar: float
    at_least: bool = True  # else at most

    @property
    def met(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser that describes a benchmark by its first line, with the flag ``--json``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios and their bars there")
    return parser


def write(path: Path | None, ratios: Sequence[Ratio]) -> None:
    """Writes what ``board.py`` reads, if a file is given."""
    if path is not None:
        path.write_text(json.dumps([ratio._asdict() for ratio in ratios], indent=2) + "\n")


def read(path: Path) -> list[Ratio]:
    """What ``write`` wrote."""
    return [Ratio(**fields) for fields in json.loads(path.read_text())]


def interleaved(
    steps: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The median time in seconds of each step, run in turn ``repeats`` times after one warm-up.

    What else the machine does falls on all of them.

    Args:
      steps: the contenders.
      repeats: rounds.
      clock: one of ``CLOCKS``.
      wait: called before a clock is read; waits for a device.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            wait()
            start = clock()
            step()
            wait()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}
