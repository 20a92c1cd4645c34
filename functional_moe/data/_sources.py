"""Text documents from files, folders and the standard library."""

import codecs
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ._errors import DataError

_TEXT_SUFFIXES = (".txt", ".md", ".py")
_LINES_SUFFIX = ".jsonl"
_TOKENS_SUFFIX = ".bin"
_KNOWN = ".txt, .md, .py, .jsonl (each also with .gz) and .bin"
# Left out of the standard library: what other people installed, and the tests, which many systems do not
# ship.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_READ_BYTES = 1 << 20


class Sources(NamedTuple):
    """Files to make a corpus of, in the order of the documents.

    Attributes:
        texts: Files of text: one document each, or one for each line of a ``.jsonl``.
        tokens: Tokenised files.
        num_ignored: Files in the given folders that have other suffixes.
    """

    texts: tuple[Path, ...]
    tokens: tuple[Path, ...]
    num_ignored: int


class TextDocument(NamedTuple):
    """A document: a name for messages (file, or file:line), and its text in pieces."""

    name: str
    pieces: Iterator[str]


def standard_library() -> Sources:
    """The ``.py`` files of the running interpreter's standard library, sorted by relative path.

    Left out are installed packages and folders of tests, so that the corpus is much the same on systems that
    ship them and systems that do not.

    Raises:
        DataError: The interpreter has no sources on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise DataError(f"no sources of the standard library in {root}; give text with --data")
    return Sources(tuple(sorted(found, key=lambda path: path.relative_to(root).parts)), (), 0)


def find_sources(paths: Sequence[str | Path]) -> Sources:
    """The files that ``paths`` name, folders searched through and sorted by relative path.

    Files of other suffixes in a folder are counted in ``num_ignored``.

    Raises:
        DataError: A path is missing or cannot be read; a file that is named itself has another suffix or is
            empty; a folder has no file of a known suffix; a file is reached twice.
    """
    texts: list[Path] = []
    tokens: list[Path] = []
    num_ignored = 0
    seen: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found, ignored = _walk(path, seen)
            num_ignored += ignored
            if not found:
                raise DataError(f"{path} holds no file of the kinds {_KNOWN} ({ignored} others)")
        else:
            found = [_named_file(path, seen)]
        for file in found:
            (tokens if file.suffix == _TOKENS_SUFFIX else texts).append(file)
    return Sources(tuple(texts), tuple(tokens), num_ignored)


def read_documents(texts: Iterable[Path], text_field: str = "text") -> Iterator[TextDocument]:
    """The documents of text files, streaming; each must be read before the next is asked for.

    Args:
        texts: Files of the kinds ``find_sources`` returns.
        text_field: Where a line of a ``.jsonl`` has its text.

    Raises:
        DataError: While iterating: a file cannot be read or is not UTF-8, a line is not JSON or has no such
            field.
    """
    for path in texts:
        if _kind(path) == _LINES_SUFFIX:
            yield from _read_lines(path, text_field)
        else:
            yield TextDocument(str(path), _read_text(path))


def _kind(path: Path) -> str | None:
    """The suffix that says what is in a file, ``.gz`` set aside; None for a file of another kind."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] == ".gz":
        suffix = suffixes[-2] if len(suffixes) > 1 else ""
        return suffix if suffix in (*_TEXT_SUFFIXES, _LINES_SUFFIX) else None
    return path.suffix if path.suffix in (*_TEXT_SUFFIXES, _LINES_SUFFIX, _TOKENS_SUFFIX) else None


def _named_file(path: Path, seen: dict[Path, Path]) -> Path:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a file or folder that exists") from error
    if _kind(path) is None:
        raise DataError(f"{path} has the unknown suffix {path.suffix!r}; known are {_KNOWN}")
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    if size == 0:
        raise DataError(f"{path} is empty; give a file with text")
    _note(path, seen)
    return path


def _walk(folder: Path, seen: dict[Path, Path]) -> tuple[list[Path], int]:
    """Files of known kinds under ``folder``, sorted, and the number of others."""
    found: list[Path] = []
    num_ignored = 0
    _note(folder, seen)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir():
            inner, ignored = _walk(path, seen)
            found += inner
            num_ignored += ignored
        elif _kind(path) is None:
            num_ignored += 1
        elif not entry.is_file():
            raise DataError(f"{path} is not a regular file, or a link to nothing; remove it")
        else:
            _note(path, seen)
            found.append(path)
    return found, num_ignored


def _note(path: Path, seen: dict[Path, Path]) -> None:
    """Refuse what is reached twice, also through links: its documents would not be once in an epoch."""
    real = path.resolve()
    if real in seen:
        raise DataError(f"{path} is the same as {seen[real]}, which was given too; give it once")
    seen[real] = path


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, unpacking ``.gz``, and turn what goes wrong while it is read into one line."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream  # type: ignore[misc]  # gzip's class has all of BinaryIO that is used here
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _read_text(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with _reading(path) as stream:
        while True:
            chunk = stream.read(_READ_BYTES)
            # A character may have been cut at the end of the last chunk; its first bytes wait in the decoder.
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = position - waiting + error.start
                raise DataError(f"{path} is not UTF-8 at byte {offset}; convert it to UTF-8") from error
            position += len(chunk)
            if text:
                yield text
            if not chunk:
                return


def _read_lines(path: Path, text_field: str) -> Iterator[TextDocument]:
    for name, fields in read_lines(path):
        yield TextDocument(name, iter(() if fields is None else (text_of(name, fields, text_field),)))


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The name (file:line) and the JSON value of each line of a ``.jsonl``; None of a line without text.

    Raises:
        DataError: While iterating: the file cannot be read, or a line is not UTF-8 or not JSON.
    """
    with _reading(path) as stream:
        position = 0
        for number, line in enumerate(stream, start=1):
            name = f"{path}:{number}"
            yield name, _line_value(name, line, position)
            position += len(line)


def _line_value(name: str, line: bytes, position: int) -> Any:
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {position + error.start} of the file; convert it to UTF-8"
        ) from error
    if not decoded.strip():
        return None
    try:
        return json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {error}") from error


def text_of(name: str, fields: Any, text_field: str) -> str:
    """The text in a field of a line.

    Raises:
        DataError: There is no such field, or something else in it.
    """
    text = fields.get(text_field) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        if isinstance(fields, dict) and text_field in fields:
            raise DataError(f"{name} has {text!r:.50} in the field {text_field!r}, which is no text")
        there = ", ".join(map(repr, fields)) if isinstance(fields, dict) else "no fields"
        raise DataError(f"{name} has no text in the field {text_field!r}; it has {there:.200}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half a surrogate pair at character {error.start} of its text; repair it"
        ) from error
    return text
