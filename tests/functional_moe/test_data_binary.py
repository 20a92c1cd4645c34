import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.data import DataError, Header, TokenDocument, TokenFile, open_tokens, write_tokens

HEADER_BYTES = 4096


def write(path: Path, documents: list[list[int]], vocab_size: int = 257, separator: int = 256) -> Header:
    made = (
        # Each document in two pieces, as a reader of large files hands them over.
        TokenDocument(f"document {number}", iter(np.array_split(np.array(tokens, np.uint32), 2)))
        for number, tokens in enumerate(documents)
    )
    return write_tokens(path, made, vocab_size=vocab_size, separator=separator, tokenizer="bytes", num_files=1)


def documents_of(file: TokenFile) -> list[list[int]]:
    return [file.tokens[a:b].tolist() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)]


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 255), max_size=20), max_size=20).filter(any),
    vocab_size=st.sampled_from([257, 65536, 65537, 2**32]),
)
def test_what_is_written_is_read(
    documents: list[list[int]], vocab_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    # The largest id must survive, so the separator is it.
    header = write(path, documents, vocab_size, separator=vocab_size - 1)
    file = open_tokens(path)
    filled = [[vocab_size - 1, *tokens] for tokens in documents if tokens]
    assert documents_of(file) == filled
    assert file.header == header
    assert header.num_empty == len(documents) - len(filled)
    assert header.num_tokens == sum(map(len, filled))
    assert file.tokens.dtype == (np.uint16 if vocab_size <= 65536 else np.uint32)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    texts = [[[1, 2], [3]], [[1, 2], [4]], [[1], [2, 3]]]
    prints = [write(tmp_path / f"{number}.bin", text).fingerprint for number, text in enumerate(texts)]
    assert len(set(prints)) == 3
    assert write(tmp_path / "again.bin", texts[0]).fingerprint == prints[0]


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 1: token id 300 is outside the vocabulary of 257"):
        write(tmp_path / "corpus.bin", [[1], [2, 300]])
    assert list(tmp_path.iterdir()) == []


def test_a_separator_within_a_document_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 0: its text is encoded to the separator 256"):
        write(tmp_path / "corpus.bin", [[1, 256]])


def test_nothing_but_empty_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 2 documents are empty"):
        write(tmp_path / "corpus.bin", [[], []])
    assert list(tmp_path.iterdir()) == []


def test_a_failing_source_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    write(path, [[1, 2]])

    def documents() -> Iterator[TokenDocument]:
        yield TokenDocument("first", iter([np.arange(9, dtype=np.uint32)]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, documents(), vocab_size=257, separator=256, tokenizer="bytes")
    assert documents_of(open_tokens(path)) == [[256, 1, 2]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    program = """
import os, pathlib, signal, sys
import numpy as np
from functional_moe.data import TokenDocument, write_tokens
def documents():
    for _ in range(100):
        yield TokenDocument("text", iter([np.zeros(100_000, np.uint32)]))
    os.kill(os.getpid(), signal.SIGKILL)
write_tokens(pathlib.Path(sys.argv[1]), documents(), vocab_size=257, separator=256, tokenizer="bytes")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".partial"
    with pytest.raises(DataError, match="not a tokenised file"):
        open_tokens(left)
    write(path, [[1]])
    assert documents_of(open_tokens(path)) == [[256, 1]]


def test_a_full_disk_is_one_line_and_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    write(path, [[1, 2]])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files fails in the same calls as a disk without room.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write .*corpus\.bin: File too large; make room") as caught:
            write(path, [[1] * 200_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert documents_of(open_tokens(path)) == [[256, 1, 2]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot write .*file/corpus\.bin: .*choose another folder"):
        write(tmp_path / "file" / "corpus.bin", [[1]])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.bin"
    write(path, [[1, 2, 3], [4, 5], [6]])
    return path


def change_header(path: Path, **fields: object) -> None:
    content = path.read_bytes()
    header = json.loads(content[8:HEADER_BYTES]) | fields
    path.write_bytes(content[:8] + json.dumps(header).encode().ljust(HEADER_BYTES - 8) + content[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 1}, "format version 1, this program reads 2"),
        ({"version": True}, "version is True, expected int"),
        ({"dtype": "float64"}, "dtype is 'float64', expected uint16 or uint32"),
        ({"vocab_size": 65537}, "vocab_size is 65537, uint16 holds 1 to 65536"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 10**900}, "vocab_size is 1000"),
        ({"separator": 257}, "separator is 257, outside the vocabulary of 257"),
        ({"separator": -1}, "separator is -1"),
        ({"num_tokens": 10}, "offsets go from 0 to 9, expected 0 to 10"),
        ({"num_tokens": 20}, r"is cut short: its header asks for 41\d\d bytes"),
        ({"num_tokens": 3, "num_documents": 1}, "is too long"),
        ({"num_tokens": 2**60}, "num_tokens is 1152921504606846976, outside 0 to"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": 9.0}, "num_tokens is 9.0, expected int"),
        ({"num_tokens": None}, "num_tokens is None, expected int"),
        ({"num_documents": 2**40}, "header has 1099511627776 documents and 9 tokens"),
        ({"num_documents": 0}, "header has 0 documents"),
        ({"num_documents": -3}, "num_documents is -3"),
        ({"num_documents": 4}, "is cut short"),
        ({"tokenizer": ["bytes"]}, "tokenizer is .*, expected str"),
        ({"marked": 1}, "marked is 1, expected bool"),
        ({"marked": True}, "marked is True with dtype uint16"),
    ],
)
def test_a_header_that_lies_is_refused(corpus: Path, fields: dict[str, object], message: str) -> None:
    change_header(corpus, **fields)
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(corpus)
    assert str(corpus) in str(caught.value)
    assert len(str(caught.value)) < len(str(corpus)) + 200


@pytest.mark.parametrize("header", [b"", b"[1]", b"{", b"[" * 4000, b"\xff\xfe", b'{"version": 1}'])
def test_a_header_that_is_no_header_is_refused(corpus: Path, header: bytes) -> None:
    content = corpus.read_bytes()
    corpus.write_bytes(content[:8] + header.ljust(HEADER_BYTES - 8) + content[HEADER_BYTES:])
    with pytest.raises(DataError, match="header"):
        open_tokens(corpus)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 4, 9], "document 1 ends where it starts or before"),
        ([0, 7, 4, 9], "document 1 ends"),
        ([0, 2**63, 7, 9], "document 1 ends"),
        ([1, 4, 7, 9], "offsets go from 1 to 9, expected 0 to 9"),
        ([0, 4, 7, 8], "offsets go from 0 to 8"),
    ],
)
def test_offsets_that_do_not_increase_are_refused(corpus: Path, offsets: list[int], message: str) -> None:
    content = corpus.read_bytes()
    corpus.write_bytes(content[:-32] + np.array(offsets, "<u8").tobytes())
    with pytest.raises(DataError, match=message):
        open_tokens(corpus)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    write(path, [[1, 2, 3], [4, 5], [6]])
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError, match=r"cut short|empty|not a tokenised file"):
        open_tokens(path)


def test_another_file_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(os.urandom(10_000))
    with pytest.raises(DataError, match=r"model\.bin is not a tokenised file"):
        open_tokens(tmp_path / "model.bin")
    with pytest.raises(DataError, match=r"cannot read .*none\.bin: No such file"):
        open_tokens(tmp_path / "none.bin")
