"""One of many processes that torchrun started: what it says when it ends, and that it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from ..parallel import CheckpointError, CollectiveError, RankError, World, join_world
from .settings import USER_ERRORS, SettingsError, TrainSettings
from .train import train


def run_as_rank(parse: Callable[[], object]) -> NoReturn:
    """Trains over the ranks of the job, and ends this process.

    What all ranks meet alike is told by rank 0 alone. A rank that fails by itself tells why before its peers can
    notice, and ends without goodbyes: closed sockets end the collectives of the others, and torchrun ends the rest.

    Args:
      parse: the settings of the command line, or raises one of ``USER_ERRORS``.
    """
    world = World(rank=int(os.environ["RANK"]))  # until it has joined
    try:
        settings, wrong = None, None
        try:
            settings = parse()
        except USER_ERRORS as error:
            wrong = error

        def given() -> TrainSettings:
            if wrong is not None:
                raise wrong
            if not isinstance(settings, TrainSettings):
                raise SettingsError("only train runs in several processes; start this without torchrun")
            return settings

        wishes = settings if isinstance(settings, TrainSettings) else TrainSettings
        world = join_world(wishes.timeout, wishes.device)
        stop_watch = world.watch(functools.partial(_ended_with_another, world))
        status = train(world.together("the command line", given, *USER_ERRORS), world)
        stop_watch()
        world.leave()
    except (RankError, CheckpointError) as error:
        if world.leads:
            _tell(f"functional-moe: {error}")
        _end(world, 2)
    except USER_ERRORS as error:
        _tell(f"functional-moe: rank {world.rank}: {error}")
        _end(world, 2)
    except CollectiveError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may be ending the job already
        why = world.silent_ranks(failed=False)
        _tell(f"functional-moe: rank {world.rank}: {f'{why}: ' if why else ''}{str(error).splitlines()[0]}")
        _end(None, 1)
    except KeyboardInterrupt:
        _end(world, 130)
    except Exception:
        _tell(f"functional-moe: rank {world.rank} failed:\n{traceback.format_exc()}".rstrip())
        _end(world, 1)
    _end(None, status)


def _ended_with_another(world: World) -> None:
    _tell(f"functional-moe: rank {world.rank}: ended because another failed")
    os._exit(1)


def _tell(text: str) -> None:
    """In one piece, as all ranks write to the same place."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _end(world: World | None, status: int) -> NoReturn:
    if world is not None:
        world.silent_ranks(failed=True)
    # A reader may have left, or the disk be full.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Not by sys.exit: a save under way or a group's destructor would wait for peers that have gone.
    os._exit(status)
