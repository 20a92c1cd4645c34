"""What a run keeps on disk: its states, and small files written whole or not at all.

States are sharded checkpoints (:func:`.save_sharded`) in the run's folder ``states``, whatever the number of processes:
a run that one process began, many can continue, on any mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from .config import MoEConfig
from .parallel import PendingSave, latest, load_sharded, save_sharded, save_sharded_async

Tree = TypeVar("Tree")

STATES_FOLDER = "states"


class StateError(ValueError):
    """A state that cannot be written or read; the message is one line."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says against writing ``path`` (a full disk, say) into a ``StateError`` of one line."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"cannot write {path}: {_one_line(error)}; free some space or choose another --out, then --resume"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all.

    Raises:
      StateError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def save_state(run: Path, step: int, state: Any, config: MoEConfig) -> PendingSave:
    """Begins to write the tree ``state`` as that of ``step``, in place of the run's earlier one. Every rank calls it.

    Args:
      run: the run's folder.
      step: batches consumed.
      state: a ``TrainState``, or what is known of one; DTensors are written by shards. Its values are taken now.
      config: the model, which must be the same when the state is read.

    Returns:
      a handle; ``wait()`` tells whether the state is on the disk. The earlier state goes only then.

    Raises:
      CheckpointError: here what is known at once, and what the save before met; the rest from ``wait()``.
    """
    return save_sharded_async(run / STATES_FOLDER, step, state, identity=dataclasses.asdict(config), keep=1)


def write_state(run: Path, step: int, state: Any, config: MoEConfig) -> None:
    """As ``save_state``, but ends when the state is on the disk, and makes no copy of it in memory.

    Raises:
      CheckpointError: it cannot be written.
    """
    save_sharded(run / STATES_FOLDER, step, state, identity=dataclasses.asdict(config), keep=1)


def latest_state(run: Path) -> Path:
    """The newest complete state of a run, for :func:`load_state`.

    Raises:
      StateError: there is none.
    """
    found = latest(run / STATES_FOLDER)
    if found is None:
        raise StateError(f"there is no state in {run / STATES_FOLDER}; restore it from a copy or start a new run")
    return found


def load_state(checkpoint: Path, template: Tree, config: MoEConfig, *, partial: bool = False) -> Tree:
    """Reads a state into the placements of ``template``. Every rank calls it.

    Args:
      checkpoint: a folder that ``latest_state`` found.
      template: a tree whose leaves have the expected shapes, dtypes and placements (they may be on ``meta``).
      config: the model.
      partial: read only what the template has at its top, such as ``{"params": ..., "balance": ...}``.

    Returns:
      A tree like ``template``. Nothing of the template's values remains in it.

    Raises:
      CheckpointError: the state is of another model, or a file is missing or damaged; names the leaf or file.
    """
    return load_sharded(  # type: ignore[no-any-return]
        checkpoint, template, identity=dataclasses.asdict(config), partial=partial
    )


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
