"""What a sharded checkpoint holds, as a JSON file beside the shards: read, and checked, before any of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

MANIFEST_FILE = "manifest.json"
_FORMAT = {"format": "functional_moe sharded checkpoint", "version": 1}
#: A file name from a manifest is opened only if it is one of these: none leads out of the folder.
_SHARD_FILE = re.compile(r"rank_\d{5,}\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message is one line, the same on every rank."""


class Part(NamedTuple):
    """A box of a leaf, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class LeafEntry(NamedTuple):
    """One leaf of a saved tree; its parts cover it once."""

    shape: tuple[int, ...]  # in full
    dtype: str  # as torch prints it, without "torch."
    parts: tuple[Part, ...]


class Manifest(NamedTuple):
    """What a complete checkpoint holds."""

    step: int
    identity: Any  # JSON: whose state this is, such as the model's configuration
    extra: Any  # JSON: whatever else was saved with it
    leaves: dict[str, LeafEntry]  # by dotted path
    files: dict[str, int]  # bytes of each file of shards


class LocalPart(NamedTuple):
    """The part of one leaf that this rank holds."""

    tensor: Tensor
    shape: torch.Size  # of the whole leaf
    offsets: torch.Size  # where the part begins in it


LocalParts: TypeAlias = dict[str, LocalPart]


def partial_name(final: Path) -> Path:
    """Where a checkpoint stands while it is not complete, or no more."""
    return final.with_name(f".{final.name}.partial")


def read_manifest(checkpoint: Path) -> Manifest:
    """What the complete checkpoint in the folder ``checkpoint`` holds.

    Raises:
      CheckpointError: there is no such checkpoint, or its manifest is truncated, foreign, or of another format version.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MANIFEST_FILE}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or no manifest ({type(error).__name__})") from error
    found = {key: value.get(key) for key in _FORMAT} if isinstance(value, dict) else value
    if found != _FORMAT:
        raise CheckpointError(f"{path} is of the format {found!r:.100}, expected {_FORMAT}")
    try:
        files = {_shard_file(name): _size(size) for name, size in value["files"].items()}
        leaves = {name: _leaf(name, entry, files) for name, entry in value["leaves"].items()}
        return Manifest(_size(value["step"]), value["identity"], value["extra"], leaves, files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {_one_line(error)}") from error


def manifest_text(manifest: Manifest) -> str:
    """The file's content.

    Raises:
      TypeError, ValueError: when ``identity`` or ``extra`` is nothing that JSON holds.
    """
    return json.dumps({**_FORMAT, **manifest._asdict()}, allow_nan=False)  # leaves and parts become lists


def as_json(name: str, value: Any) -> Any:
    """``value`` as it comes back from a file (tuples as lists), so that it can be compared.

    Raises:
      CheckpointError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be saved as JSON: {_one_line(error)}") from error


def check_identity(checkpoint: Path, manifest: Manifest, identity: Any) -> None:
    """Raises ``CheckpointError`` naming the first field in which a checkpoint's identity differs from ``identity``."""
    for field, saved, wanted in _differences("identity", manifest.identity, as_json("identity", identity)):
        raise CheckpointError(
            f"{checkpoint} is of another model: {field!r} is {saved!r:.200} in the checkpoint, {wanted!r:.200} here"
        )


def check_leaves(checkpoint: Path, manifest: Manifest, expected: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Raises ``CheckpointError`` naming the first leaf that is missing, extra, or has another shape or dtype.

    Args:
      checkpoint: for messages.
      manifest: of the checkpoint.
      expected: shape and dtype of each leaf.
    """
    for name in expected:
        if name not in manifest.leaves:
            raise CheckpointError(f"{checkpoint} lacks the leaf {name!r}: it is of another model or optimizer")
    for name in manifest.leaves:
        if name not in expected:
            raise CheckpointError(
                f"{checkpoint} has a leaf {name!r} that is not expected: it is of another model or optimizer"
            )
    for name, (shape, dtype) in expected.items():
        saved = manifest.leaves[name]
        if saved.shape != shape:
            raise CheckpointError(f"{checkpoint}: leaf {name!r} has shape {saved.shape} there, expected {shape}")
        if saved.dtype != dtype:
            raise CheckpointError(f"{checkpoint}: leaf {name!r} has dtype {saved.dtype} there, expected {dtype}")


def dtype_name(tensor: Tensor) -> str:
    """``float32``, ``int64``, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def _differences(field: str, saved: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in sorted({*saved, *wanted}):
            yield from _differences(f"{field}.{key}", saved.get(key), wanted.get(key))
    elif saved != wanted or type(saved) is not type(wanted):  # True is no 1
        yield field, saved, wanted


def _leaf(name: str, entry: Any, files: dict[str, int]) -> LeafEntry:
    shape, dtype, stored = entry
    shape = _sizes(shape)
    parts = tuple(Part(file, _sizes(offsets), _sizes(sizes)) for file, offsets, sizes in stored)
    for part in parts:
        if part.file not in files:
            raise ValueError(f"leaf {name!r} is in a file {part.file!r} that is not listed")
        inside = all(begin + size <= end for begin, size, end in zip(part.offsets, part.sizes, shape, strict=True))
        if not inside:
            raise ValueError(f"leaf {name!r} of shape {shape} has a part at {part.offsets} of sizes {part.sizes}")
    covered = sum(math.prod(part.sizes) for part in parts)
    if covered != math.prod(shape) or len({part.offsets for part in parts}) != len(parts):
        raise ValueError(f"the parts of leaf {name!r} do not cover its shape {shape} once")
    return LeafEntry(shape, str(dtype), parts)


def _shard_file(name: str) -> str:
    if not _SHARD_FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file of shards")
    return name


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.100} is no list of sizes")
    return tuple(_size(size) for size in value)


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.100} is no size")
    return value


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
