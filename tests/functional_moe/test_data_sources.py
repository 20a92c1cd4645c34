import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.data import DataError, find_sources, read_documents, standard_library
from functional_moe.data import _sources as sources_module


def texts_of(*paths: Path, field: str = "text") -> dict[str, str]:
    documents = read_documents(find_sources(paths).texts, field)
    return {document.name: "".join(document.pieces) for document in documents}


def test_the_standard_library_is_there_without_tests_and_installed_packages() -> None:
    sources = standard_library()
    names = [path.as_posix() for path in sources.texts]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("-packages/" in name or "/test/" in name or "/tests/" in name for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    # All of it must be readable text, or the default run could not start.
    assert sum(len(piece) for document in read_documents(sources.texts) for piece in document.pieces) > 5e6


def test_an_interpreter_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no sources of the standard library.*--data"):
        standard_library()


def test_a_folder_is_searched_through_in_order_and_the_rest_is_counted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.jsonl", "image.png", "a/notes", "archive.gz", "d.txt.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    sources = find_sources([tmp_path])
    names = [path.relative_to(tmp_path).as_posix() for path in sources.texts]
    assert names == ["a/b/c.py", "a/z.md", "b.txt", "c.jsonl", "d.txt.gz"]
    assert sources.num_ignored == 3


def test_given_files_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "c.bin").write_text("x")
    sources = find_sources([tmp_path / "b.txt", tmp_path / "c.bin", tmp_path / "a.txt"])
    assert [path.name for path in sources.texts] == ["b.txt", "a.txt"]
    assert [path.name for path in sources.tokens] == ["c.bin"]


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=30), size=st.integers(1, 7))
def test_text_is_kept_to_the_byte_wherever_it_is_cut(
    text: str, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A byte order mark and every kind of line end are text like any other.
    text = "\ufeff" + text + "\r\n\ré𝄞"
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_bytes(text.encode())
    (folder / "b.md.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "c.jsonl").write_text(json.dumps({"text": text}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "_READ_BYTES", size)
        assert list(texts_of(folder).values()) == [text] * 3


def test_each_line_of_a_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "one"}\n\n{"body": "two\\n", "text": "no"}\n{"body": ""}'))
    texts = texts_of(path, field="body")
    assert texts == {f"{path}:1": "one", f"{path}:2": "", f"{path}:3": "two\n", f"{path}:4": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', r"\.jsonl:2 is not JSON"),
        (
            b'{"text": "a"}\n{"body": "b", "id": 1}\n',
            r":2 has no text in the field 'text'; it has 'body', 'id'",
        ),
        (b'{"text": 5}\n', ":1 has 5 in the field 'text', which is no text"),
        (b'["text"]\n', ":1 has no text in the field 'text'; it has no fields"),
        (b"[" * 100_000, ":1 is not JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ":2 is not UTF-8 at byte 24 of the file"),
        (b'{"text": "a\\ud800"}\n', ":1 has half a surrogate pair at character 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts_of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize("ending", [b"\xff", b"\xc3", b"\xe2\x82x"])
def test_text_that_is_not_utf8_is_named_with_its_byte(
    tmp_path: Path, size: int, ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "_READ_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes("déjà".encode() + ending)
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 6; convert it"):
        texts_of(path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(1000).hex().encode())
    for content in (whole[:-20], b"no archive", whole[:50] + b"\0" * 50 + whole[100:]):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*a\.txt\.gz"):
            texts_of(tmp_path / "a.txt.gz")


def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.docx").write_text("x")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("none.txt", "cannot read .*none.txt: No such file or directory; give a file or folder that exists"),
        ("empty.txt", "empty.txt is empty"),
        ("a.docx", "unknown suffix '.docx'; known are .txt, .md"),
        ("folder", "folder holds no file of the kinds"),
    ):
        with pytest.raises(DataError, match=message):
            find_sources([tmp_path / name])


def test_a_file_reached_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt is the same as .*a\.txt"):
        find_sources([tmp_path, tmp_path / "a.txt"])
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"b\.txt is the same as .*a\.txt"):
        find_sources([tmp_path])


def test_links_in_a_circle_and_to_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="loop is the same as"):
        find_sources([tmp_path])
    (tmp_path / "loop").unlink()
    (tmp_path / "b.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"b\.txt is not a regular file, or a link to nothing"):
        find_sources([tmp_path])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match=r"not a regular file|neither a file nor a folder"):
            find_sources([path])


def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand, because the superuser may read everything.
    def refuse(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("x")
    sources = find_sources([tmp_path])
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        next(next(read_documents(sources.texts)).pieces)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read the folder .*: Permission denied"):
        find_sources([tmp_path])
