r"""The tokenised file: documents of token ids in one memory map.

Layout, little-endian::

    0       magic b"FMOETOK\n"
    8       header: a JSON object, filled up with spaces to byte 4096
    4096    tokens: num_tokens of uint16 or uint32
    ...     zeros up to a multiple of 8
    ...     offsets: num_documents + 1 of uint64; document i is tokens[offsets[i]:offsets[i + 1]]

Each document is the separator followed by its tokens. In a marked file the highest bit of a token says that it is
read but not learned, as the prompt of an example is. The header has a fixed place so that a writer can
stream the tokens first and say how many there were at the end.
"""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._errors import DataError

VERSION = 2
UNLEARNED = 1 << 31
"""The bit of a token that is no target, in pieces and in marked files."""
_MAGIC = b"FMOETOK\n"
_HEADER_BYTES = 4096
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET: np.dtype[np.uint64] = np.dtype("<u8")
# Offsets are checked and copied in pieces of this many documents: 8 MiB, whatever the file holds.
_OFFSETS_AT_ONCE = 1 << 20

Tokens = NDArray[np.unsignedinteger[Any]]


class Header(NamedTuple):
    """What a tokenised file says about itself.

    Attributes:
        version: Of the format.
        dtype: Of the tokens, "uint16" or "uint32".
        vocab_size: Every id is below it.
        separator: The id before each document.
        num_tokens: Separators included.
        num_documents: At least 1.
        num_files: Text files the documents came from.
        num_empty: Documents without text, which are left out.
        tokenizer: Fingerprint of the tokenizer that made the ids.
        fingerprint: Hash of tokens and offsets; names the data, is not checked on opening.
        marked: Tokens are uint32 and may carry the bit ``UNLEARNED``.
    """

    version: int
    dtype: str
    vocab_size: int
    separator: int
    num_tokens: int
    num_documents: int
    num_files: int
    num_empty: int
    tokenizer: str
    fingerprint: str
    marked: bool = False


class TokenFile(NamedTuple):
    """An open tokenised file, or a range of its documents.

    Attributes:
        path: Where it is, for messages.
        tokens: uint16 or uint32 [tokens of the file], a memory map.
        offsets: uint64 [documents + 1], positions in ``tokens``; a memory map.
        header: Of the whole file.
    """

    path: Path
    tokens: Tokens
    offsets: NDArray[np.uint64]
    header: Header


class TokenDocument(NamedTuple):
    """A document on its way into a file: a name for messages, and its ids in pieces (uint32 [any length])."""

    name: str
    pieces: Iterator[NDArray[np.uint32]]


def write_tokens(
    path: Path,
    documents: Iterable[TokenDocument],
    *,
    vocab_size: int,
    separator: int,
    tokenizer: str,
    num_files: int = 0,
    marked: bool = False,
) -> Header:
    """Write documents to ``path``, streaming; the file appears complete or not at all.

    Args:
        path: The file to make or replace; its folder is made when it is missing.
        documents: In the order they get in the file. Those without tokens are left out and counted.
        vocab_size: Every id must be below it; decides between uint16 and uint32.
        separator: Put before each document.
        tokenizer: Fingerprint for the header.
        num_files: Text files the documents come from, for the header.
        marked: Pieces may carry the bit ``UNLEARNED``.

    Returns:
        The header of the file.

    Raises:
        DataError: The disk is full or the folder not writable, an id is outside the vocabulary or the
            separator, or no document has a token. ``path`` is then as it was before.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 and not marked else "uint32"
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because only a rename within a file system is atomic. The name is unique, so
        # that two processes that make the same file do not disturb each other: the last one wins, and both
        # wrote the same.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        with partial.open("xb") as stream, tempfile.TemporaryFile(dir=path.parent) as offsets:
            stream.write(b" " * _HEADER_BYTES)
            header = _write_documents(
                stream,
                offsets,
                documents,
                Header(VERSION, dtype, vocab_size, separator, 0, 0, num_files, 0, tokenizer, "", marked),
            )
            if not header.num_documents:
                raise DataError(
                    f"no text to write to {path}: all {header.num_empty} documents are empty; give some text"
                )
            _append_offsets(stream, offsets)
            stream.seek(0)
            stream.write(_MAGIC + json.dumps(header._asdict()).encode().ljust(_HEADER_BYTES - len(_MAGIC)))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        partial = None
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another folder"
        ) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    return header


def open_tokens(path: Path) -> TokenFile:
    """Map a tokenised file into memory, checking all that can be checked without reading its tokens.

    The ids themselves are checked as they are read, window by window: a scan of a large file would take
    hours.

    Raises:
        DataError: The file cannot be read, is none of ours, is cut short, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    header = _parse_header(path, head)
    dtype = _DTYPES[header.dtype]
    offsets_at = _aligned(_HEADER_BYTES + header.num_tokens * dtype.itemsize)
    expected = offsets_at + (header.num_documents + 1) * _OFFSET.itemsize
    if size != expected:
        cut = "is cut short" if size < expected else "is too long"
        raise DataError(
            f"{path} {cut}: its header asks for {expected} bytes, it has {size}; remove it and tokenise the text again"
        )
    try:
        tokens = np.memmap(path, dtype, "r", offset=_HEADER_BYTES, shape=(header.num_tokens,))
        offsets = np.memmap(path, _OFFSET, "r", offset=offsets_at, shape=(header.num_documents + 1,))
    except OSError as error:
        raise DataError(f"cannot map {path}: {error.strerror}") from error
    # As plain arrays: slicing a memmap object costs a microsecond, which short documents would feel.
    file = TokenFile(path, np.asarray(tokens), np.asarray(offsets), header)
    _check_offsets(file)
    return file


def _write_documents(stream: BinaryIO, offsets: BinaryIO, documents: Iterable[TokenDocument], header: Header) -> Header:
    """Append the tokens to ``stream`` and the offsets to ``offsets``; returns the completed header."""
    dtype = _DTYPES[header.dtype]
    separator = np.array([header.separator], dtype).tobytes()
    digest = hashlib.blake2b(digest_size=16)
    num_tokens = num_documents = num_empty = 0

    def write(part: bytes) -> None:
        digest.update(part)
        stream.write(part)

    for document in documents:
        start = num_tokens
        for piece in document.pieces:
            if not piece.size:
                continue
            _check_piece(document.name, piece, header)
            if num_tokens == start:
                write(separator)
                num_tokens += 1
            write(piece.astype(dtype).tobytes())
            num_tokens += piece.size
        if num_tokens == start:
            num_empty += 1
            continue
        offsets.write(start.to_bytes(_OFFSET.itemsize, "little"))
        num_documents += 1
    offsets.write(num_tokens.to_bytes(_OFFSET.itemsize, "little"))
    stream.write(bytes(_aligned(stream.tell()) - stream.tell()))
    # The digest covers the offsets too: other borders between the same tokens are other data.
    offsets.seek(0)
    while part := offsets.read(_OFFSETS_AT_ONCE * _OFFSET.itemsize):
        digest.update(part)
    return header._replace(
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_empty=num_empty,
        fingerprint=digest.hexdigest(),
    )


def _append_offsets(stream: BinaryIO, offsets: BinaryIO) -> None:
    offsets.seek(0)
    while part := offsets.read(_OFFSETS_AT_ONCE * _OFFSET.itemsize):
        stream.write(part)


def _check_piece(name: str, piece: NDArray[np.uint32], header: Header) -> None:
    largest = int((piece & np.uint32(UNLEARNED - 1)).max() if header.marked else piece.max())
    if largest >= header.vocab_size:
        raise DataError(
            f"{name}: token id {largest} is outside the vocabulary of {header.vocab_size}; "
            "the tokenizer and the vocabulary do not belong together"
        )
    # A chat template may write it; the offsets say where documents end.
    if not header.marked and (piece == header.separator).any():
        raise DataError(f"{name}: its text is encoded to the separator {header.separator}; choose another one")


def _parse_header(path: Path, head: bytes) -> Header:
    if not head:
        raise DataError(f"{path} is empty; write it with tokenize")
    if head[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path} is not a tokenised file of this project; write it with tokenize")
    if len(head) < _HEADER_BYTES:
        raise DataError(
            f"{path} is cut short: the header has {_HEADER_BYTES} bytes, the file {len(head)}; "
            "remove it and tokenise the text again"
        )
    try:
        fields = json.loads(head[len(_MAGIC) :])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its header is not JSON; remove it and tokenise the text again") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}: its header is not a JSON object; remove it and tokenise the text again")
    for name, kind in Header.__annotations__.items():
        # bool is an int to isinstance, but true is no count.
        if type(fields.get(name)) is not kind:
            raise DataError(
                f"{path}: header field {name} is {fields.get(name)!r:.60}, expected {kind.__name__}; "
                "remove it and tokenise the text again"
            )
    header = Header(**{name: fields[name] for name in Header._fields})
    _check_header(path, header)
    return header


def _check_header(path: Path, header: Header) -> None:
    largest_vocabulary = {"uint16": 1 << 16, "uint32": 1 << 32}
    if header.version != VERSION:
        raise DataError(f"{path}: format version {header.version!r:.60}, this program reads {VERSION}")
    if header.dtype not in largest_vocabulary:
        raise DataError(f"{path}: header field dtype is {header.dtype!r:.60}, expected uint16 or uint32")
    if not 1 <= header.vocab_size <= largest_vocabulary[header.dtype]:
        raise DataError(
            f"{path}: header field vocab_size is {header.vocab_size!r:.60}, "
            f"{header.dtype} holds 1 to {largest_vocabulary[header.dtype]}"
        )
    if header.marked and (header.dtype != "uint32" or header.vocab_size > UNLEARNED):
        raise DataError(
            f"{path}: header field marked is True with dtype {header.dtype} and vocab_size {header.vocab_size}; "
            f"marks need uint32 and at most {UNLEARNED}"
        )
    if not 0 <= header.separator < header.vocab_size:
        raise DataError(
            f"{path}: header field separator is {header.separator!r:.60}, outside the vocabulary of {header.vocab_size}"
        )
    # No file is that large, and the sizes computed from these numbers are to fit into a message.
    for name in ("num_tokens", "num_documents"):
        if not 0 <= getattr(header, name) < 1 << 48:
            raise DataError(f"{path}: header field {name} is {getattr(header, name)!r:.60}, outside 0 to 2**48")
    if not 1 <= header.num_documents <= header.num_tokens:
        raise DataError(
            f"{path}: header has {header.num_documents} documents and {header.num_tokens} tokens; "
            "there must be a document, and each has at least its separator"
        )


def _check_offsets(file: TokenFile) -> None:
    """Offsets start at 0, end at num_tokens and increase; read in pieces."""
    offsets, num_tokens = file.offsets, file.header.num_tokens
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise DataError(
            f"{file.path}: document offsets go from {offsets[0]} to {offsets[-1]}, "
            f"expected 0 to {num_tokens}; remove it and tokenise the text again"
        )
    for first in range(0, file.header.num_documents, _OFFSETS_AT_ONCE):
        part = offsets[first : first + _OFFSETS_AT_ONCE + 1]
        wrong = np.flatnonzero(part[1:] <= part[:-1])
        if wrong.size:
            raise DataError(
                f"{file.path}: document {first + int(wrong[0])} ends where it starts or before; "
                "remove it and tokenise the text again"
            )


def _aligned(position: int) -> int:
    return -(-position // _OFFSET.itemsize) * _OFFSET.itemsize
