"""What a run shows while it goes on, and the picture at its end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_LINES = 20
"""Lines a run prints in all where the output is no terminal."""


class _Console(Console):
    """A console whose reader may leave: rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Goes on without printing; Python's own flush at the end finds somewhere to write, too."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """One live line on a terminal; elsewhere a line every twentieth of the run.

    Args:
      steps: of the whole run.
      flops_per_token: of forward and backward, for the utilisation.
      quiet: show nothing, as on all ranks but one.
    """

    def __init__(self, steps: int, flops_per_token: float, quiet: bool = False) -> None:
        self._console = _Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._live = Live(console=self._console, auto_refresh=False)
        self._steps = steps
        self._flops_per_token = flops_per_token
        self._rate = float("inf")
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._held_out = ""

    def start(self, matmul_rate: float, processes: int = 1) -> None:
        """Takes a process's matrix-product rate, FLOP/s, against which the utilisation of all is given."""
        self._rate = matmul_rate * processes
        times = f"{processes} x " if processes > 1 else ""
        self.say(f"machine: {times}{matmul_rate / 1e9:,.0f} GFLOP/s in a matrix product")

    def say(self, text: str) -> None:
        """Prints a line above the live one. A run outlives whoever reads it: a closed or full output is no end."""
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False)

    def step(self, record: dict[str, Any], seconds: float, bigram: float | None) -> None:
        """Shows a step."""
        self._recent.append((seconds, record["tokens"]))
        if "held_out_loss" in record:
            self._held_out = f"  held-out {record['held_out_loss']:.3f}"
            if bigram is not None:
                self._held_out += f" (bigram {bigram:.3f})"
        spent, tokens = (sum(column) for column in zip(*self._recent, strict=True))
        per_second = tokens / spent
        left = (self._steps - record["step"]) * spent / len(self._recent)
        refused = "" if record["finite"] else "  REFUSED: not finite"
        line = (
            f"step {record['step']}/{self._steps}  loss {record['loss']:.3f}{self._held_out}  "
            f"{per_second:,.0f} tokens/s  MFU {per_second * self._flops_per_token / self._rate:.0%}  "
            f"{_clock(left)} left{refused}"
        )
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._live.update(Text(line), refresh=True)
        elif refused or record["step"] % max(1, self._steps // _LINES) == 0 or record["step"] == self._steps:
            self.say(line)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()


def printable(text: str) -> str:
    """``text`` without the control characters that an untrained model may write to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(seconds))


def save_picture(path: Path, records: Sequence[dict[str, Any]], bigram: float | None) -> bool:
    """Draws losses and expert load over the steps; returns False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # Figure and canvas directly: pyplot would keep global state and look for a display.
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, load = figure.subplots(1, 2)
    steps = [record["step"] for record in records]
    losses.plot(steps, [record["loss"] for record in records], color="0.6", linewidth=0.8, label="training")
    held_out = [(record["step"], record["held_out_loss"]) for record in records if "held_out_loss" in record]
    losses.plot(*zip(*held_out, strict=True), "o-", color="tab:blue", label="held out")
    if bigram is not None:
        losses.axhline(bigram, color="tab:red", linestyle="--", label="bigram, held out")
    losses.set(xlabel="step", ylabel="nats per token", title="Loss")
    losses.legend()
    for layer, values in enumerate(zip(*(record["load_max_over_mean"] for record in records), strict=True)):
        load.plot(steps, values, linewidth=0.8, label=f"MoE layer {layer}")
    load.axhline(1.0, color="0.6", linestyle="--")
    load.set(xlabel="step", ylabel="fullest expert's tokens / mean", title="Expert load")
    if records and 0 < len(records[0]["load_max_over_mean"]) <= 8:
        load.legend()
    figure.savefig(path, dpi=120)
    return True
