"""A training state as one file, written whole or not at all.

The file is in safetensors format: no pickle, so a file from elsewhere can run no code. Every leaf stands under its
dotted path (``params.layers.0.experts.down``). It is written beside its final name and renamed over it, so a full
disk or a kill leaves the previous state as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from .tree import named_leaves

Tree = TypeVar("Tree")


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


def save_state(path: Path, state: object) -> None:
    """Writes the tree of tensors ``state`` to ``path``, replacing what was there only when it is complete.

    Raises:
      StateError: the disk is full or the folder cannot be written; the previous file is untouched.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, leaf in named_leaves(state).items():
        # The format wants every tensor alone in its memory.
        storage = leaf.untyped_storage().data_ptr()
        tensors[name] = (
            leaf.detach().clone(memory_format=torch.contiguous_format)
            if storage in seen
            else leaf.detach().contiguous()
        )
        seen.add(storage)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial)
        partial.chmod(0o644)  # safetensors makes files that nobody else can read
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StateError(
            f"cannot write the state to {path}: {_one_line(error)}; the previous state is kept; free some space "
            "or choose another --out"
        ) from error


def load_state(path: Path, template: Tree, *, partial: bool = False) -> Tree:
    """Reads the leaves of ``template`` from ``path``.

    Args:
      path: a file of ``save_state``.
      template: a tree whose leaves have the expected shapes and dtypes (they may be on ``meta``).
      partial: read only what the template has at its top, such as ``{"params": ..., "balance": ...}``.

    Returns:
      A tree like ``template``. Nothing of the template's values remains in it.

    Raises:
      StateError: no such file, a truncated or foreign one, or one whose names, shapes or dtypes differ from the
        template's; names the first that does.
    """
    expected = named_leaves(template)
    wanted = {name.split(".")[0] for name in expected}
    loaded: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if partial:
                names = {name for name in names if name.split(".")[0] in wanted}
            if missing := sorted(expected.keys() - names):
                raise StateError(f"{path} lacks {missing[0]!r} ({len(missing)} in all): it is of another model")
            if extra := sorted(names - expected.keys()):
                raise StateError(f"{path} has an unexpected {extra[0]!r} ({len(extra)} in all): it is of another model")
            for name, leaf in expected.items():
                # A copy in memory of its own: what lies in the file is aligned to 8 bytes only, and the file may
                # be replaced while the tensor lives.
                loaded[name] = file.get_tensor(name).clone()
                for what in ("shape", "dtype"):
                    if getattr(loaded[name], what) != getattr(leaf, what):
                        raise StateError(
                            f"{path}: {name!r} has {what} {getattr(loaded[name], what)}, expected {getattr(leaf, what)}"
                        )
    except FileNotFoundError as error:
        raise StateError(f"there is no state at {path}") from error
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"{path} is truncated or no state file ({_one_line(error)}); restore it from a copy or start a new run"
        ) from error
    leaves, spec = pytree.tree_flatten(template)
    devices = [torch.device("cpu") if leaf.is_meta else leaf.device for leaf in leaves]
    values = [value.to(device) for value, device in zip(loaded.values(), devices, strict=True)]
    return pytree.tree_unflatten(values, spec)  # type: ignore[no-any-return]


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
