"""A rank of ``functional-moe`` that fails on purpose: ``torchrun faulty_rank.py HOW RANK STEP train ...``."""

import os
import signal
import sys
import time
from typing import Any

from functional_moe import __main__ as command_line
from functional_moe.commands import train as train_module

how, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
batch_at = train_module.batch_at


def fault(corpus: Any, number: int, **options: Any) -> Any:
    """The batch of a step; at the chosen one, on the chosen rank, what was asked for."""
    if number == step and how == "raise alone" and options.get("rank") != rank and "world_size" in options:
        time.sleep(1000)
    if number == step and options.get("rank") == rank and "world_size" in options:
        if how in ("raise", "raise alone"):
            raise KeyError("the reason")
        if how == "full":
            train_module.os.fsync = _full  # type: ignore[assignment]
        if how in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            print(f"pid {os.getpid()}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), getattr(signal, how))
    return batch_at(corpus, number, **options)


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


train_module.batch_at = fault
command_line.main()
