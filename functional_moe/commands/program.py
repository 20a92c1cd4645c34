"""How a program begins and ends: flags, and a mistake of the user's in one line on standard error.

The commands end so, and the examples begin and end so.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from ..machine import MachineError
from ..memory import PlanError
from .settings import USER_ERRORS

MISTAKES = (*USER_ERRORS, MachineError, PlanError, OSError)
"""What is told in one line: of files and the system, too, nobody needs to know where they were asked for."""


def end(run: Callable[[], int | None], name: str | None = None) -> NoReturn:
    """Runs a program and ends the process with its exit status.

    The status is what ``run`` returns, nothing being 0; 2 for one of ``MISTAKES``, told in one line; 130 for Ctrl-C,
    told too; 141 when whoever read the output has left, which is no mistake. Any other exception is one of ours.

    Args:
      run: the program.
      name: what the line begins with; by default the script's.
    """
    name = os.path.basename(sys.argv[0]) if name is None else name
    try:
        status = run() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_output()
        status = 141
    except MISTAKES as error:
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        status = 130
    try:
        sys.stdout.flush()
    except OSError:  # what was told already
        _leave_output()
    # All is done or told: Ctrl-C while the interpreter takes itself apart would change the status, and nothing else.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Imports of what an extra of this project brings: without it the program ends with one line that says so.

    Args:
      extra: its name.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = os.path.basename(sys.argv[0])
        print(f"{name}: {error.name} is not installed (the extra {extra!r} brings it)", file=sys.stderr)
        sys.exit(2)


def read_flags(description: str, **defaults: int | str) -> argparse.Namespace:
    """The flags of a small script, ``--name VALUE``, by their defaults: whole numbers of at least 1, or text.

    A flag that is wrong ends the process with one line, as does ``--help`` with what there is.

    Args:
      description: what ``--help`` begins with: the first line of it.
      defaults: by the flag's name.
    """
    # Without a usage, of which argparse would write a line before that of a mistake.
    parser = argparse.ArgumentParser(description=description.splitlines()[0], usage=argparse.SUPPRESS)
    for name, default in defaults.items():
        kind = _at_least_one if isinstance(default, int) else str
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _leave_output() -> None:
    """Nobody takes the output any more; Python must not try to flush what is left of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
