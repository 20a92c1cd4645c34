"""Safetensors files read slice by slice and written tensor by tensor.

The library's own reader maps whole files into memory and its writer wants all tensors at once. Here a tensor's bytes
are read by position, so a rank reads what it holds and a file that is cut short while it is read is an error and no
signal; and a file is written as its tensors are made. The header of a file from elsewhere is believed in nothing:
everything it says is held against the file's size before anything is allocated.

The format: 8 bytes, little-endian, the length of the header; the header, a JSON object of ``name: {dtype, shape,
data_offsets}`` and ``__metadata__``; the tensors' bytes, row by row, without a hole between them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ._errors import HFError

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""What weights may be stored in: each of these is exact in fp32."""

_LARGEST_HEADER = 100_000_000  # bytes; the format's own bound
_PAGE = 4096  # bytes that a disk reads at least


class Entry(NamedTuple):
    """Where a tensor lies."""

    name: str
    path: Path
    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
      HFError: it cannot be read, or is none.
    """
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_object)
    except OSError as error:
        raise HFError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HFError(f"{path} is not JSON: {str(error).splitlines()[0]:.200}") from error
    if not isinstance(value, dict):
        raise HFError(f"{path} is not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.100} twice")
    return found


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name.

    Raises:
      HFError: the file is missing, cut short, or its header contradicts itself or the file; the tensor is named.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise HFError(f"{path} is cut short or no safetensors file: a header of {length} bytes in {size}")
            if length > _LARGEST_HEADER:
                raise HFError(f"{path}: a header of {length} bytes; the format allows {_LARGEST_HEADER}")
            head = file.read(length)
    except OSError as error:
        raise HFError(f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(head, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise HFError(f"{path}: its header is not JSON: {str(error).splitlines()[0]:.200}") from error
    if not isinstance(header, dict):
        raise HFError(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, value in header.items():
        dtype, shape, begin, end = _described(path, name, value)
        entries[name] = Entry(name, path, dtype, shape, 8 + length + begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the one before" if begin < position else "leaves a hole before it"
            raise HFError(f"{path}: tensor {name!r:.100} at bytes {begin} to {end} {what}, which ends at {position}")
        position = end
    if position != size - 8 - length:
        raise HFError(f"{path} is cut short or too long: its tensors have {position} bytes, it {size - 8 - length}")
    return entries


def _described(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte of a tensor, as far as they agree with each other."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(number) is int and number >= 0 for number in values)

    known = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(value) != known:
        raise HFError(f"{path}: tensor {name!r:.100} is described as {value!r:.100}, expected {sorted(known)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise HFError(f"{path}: tensor {name!r:.100} has the dtype {dtype!r:.100}")
    if not whole(shape) or not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HFError(f"{path}: tensor {name!r:.100} has shape {shape!r:.100} and offsets {offsets!r:.100}")
    begin, end = offsets
    # Other dtypes are refused by whoever wants the tensor; one that nobody wants may be of any.
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise HFError(
            f"{path}: tensor {name!r:.100} of shape {shape!r:.100} and dtype {dtype} is given {end - begin} bytes"
        )
    return dtype, tuple(shape), begin, end


class Reader:
    """Reads slices of tensors by position; keeps one file open at a time. A context manager.

    Attributes:
      bytes_read: from files, so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._buffer = bytearray()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def blocks(
        self, entry: Entry, part: tuple[slice, slice, slice], rows_at_once: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """A part of a tensor in blocks of rows.

        Args:
          entry: a tensor of 3 axes: matrices, rows, columns.
          part: the slices of it that are wanted, each with a start and a stop.
          rows_at_once: rows in a block.

        Yields:
          number of the matrix and of the first row, counted within ``part``, and the block ``[rows, columns]`` in
          the tensor's own dtype. Its memory is that of the next block too.

        Raises:
          HFError: the file cannot be read, or has become shorter.
        """
        dtype = DTYPES[entry.dtype]
        matrices, rows, columns = part
        count = columns.stop - columns.start
        _, height, width = entry.shape
        # A piece of a row shorter than a page saves the disk nothing, and costs a call.
        first, taken = (columns.start, count) if count * dtype.itemsize >= _PAGE else (0, width)
        for matrix in range(matrices.start, matrices.stop):
            for row in range(rows.start, rows.stop, rows_at_once):
                number = min(rows_at_once, rows.stop - row)
                size = number * taken * dtype.itemsize
                if len(self._buffer) < size:
                    self._buffer = bytearray(size)
                view = memoryview(self._buffer)[:size]
                at = matrix * height + row
                if taken == width:
                    self._read(entry, at * width * dtype.itemsize, view)
                else:
                    step = taken * dtype.itemsize
                    for index in range(number):
                        offset = ((at + index) * width + first) * dtype.itemsize
                        self._read(entry, offset, view[index * step : (index + 1) * step])
                block = torch.frombuffer(self._buffer, dtype=dtype, count=number * taken).view(number, taken)
                yield (
                    matrix - matrices.start,
                    row - rows.start,
                    block[:, columns.start - first : columns.stop - first],
                )

    def _read(self, entry: Entry, offset: int, into: memoryview) -> None:
        try:
            if self._path != entry.path or self._file is None:
                if self._file is not None:
                    self._file.close()
                self._file, self._path = entry.path.open("rb", buffering=0), entry.path
            done = 0
            while done < len(into):
                got = os.preadv(self._file.fileno(), [into[done:]], entry.offset + offset + done)
                if not got:
                    raise HFError(f"{entry.path} ends at byte {entry.offset + offset + done}, within a tensor")
                done += got
        except OSError as error:
            raise HFError(f"cannot read {entry.path}: {error.strerror}") from error
        self.bytes_read += done


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str  # as the format spells it
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def in_shards(planned: Sequence[Planned], max_bytes: int) -> list[list[Planned]]:
    """Tensors in their order, in runs of at most ``max_bytes``; a larger one has a run of its own."""
    shards: list[list[Planned]] = []
    filled = 0
    for tensor in planned:
        if not shards or filled + tensor.size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    return shards


def write_tensors(path: Path, planned: Sequence[Planned], tensors: Iterator[Tensor]) -> None:
    """Writes a safetensors file, taking each tensor when it is its turn.

    Raises:
      OSError: the disk is full, or the folder cannot be written; what was written so far stays.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told
    position = 0
    for tensor in planned:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.size],
        }
        position += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, values in zip(planned, tensors, strict=True):
            if tuple(values.shape) != tensor.shape or values.dtype != DTYPES[tensor.dtype]:
                raise ValueError(f"tensor {tensor.name!r} is {values.dtype} {tuple(values.shape)}, planned as {tensor}")
            file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
