import json
import os
import tracemalloc
from pathlib import Path

import pytest

from functional_moe.data import (
    ByteTokenizer,
    Corpus,
    DataError,
    batch_at,
    find_sources,
    load,
    make_corpus,
    open_tokens,
    tokenize,
)
from functional_moe.data import _load as module


class UpperCase(ByteTokenizer):
    """Another mapping with the same ids."""

    fingerprint = "upper"


def texts_of(corpus: Corpus) -> list[str]:
    return [
        ByteTokenizer().decode(file.tokens[a:b].tolist())
        for file in corpus.files
        for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name * 20)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("d1", "", "d2")))
    (folder / "e.md").touch()
    (folder / "f.png").touch()
    return folder


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    data = load(None, tmp_path)
    assert data.train.num_tokens > 5e6
    assert data.held_out.num_documents == round(data.summary.num_documents / 20)
    batch = batch_at(data.train, 0, batch_size=4, seq_len=64, seed=0)
    assert int(batch["tokens"].max()) <= 256
    assert load(None, tmp_path).train.fingerprint == data.train.fingerprint


def test_everything_is_read_or_counted(folder: Path, tmp_path: Path) -> None:
    data = load([folder], tmp_path / "run")
    assert texts_of(data.train) + texts_of(data.held_out) == ["a" * 20, "b" * 20, "c" * 20, "d1", "d2"]
    assert data.summary._asdict() == {
        "num_files": 5,
        "num_documents": 5,
        "num_tokens": 3 * 21 + 2 * 3,
        "num_empty": 2,
        "num_ignored": 1,
    }
    assert str(data.summary) == (
        "5 documents of 69 tokens from 5 files, 2 empty documents left out, 1 files of other kinds ignored"
    )


def test_text_is_tokenised_once_and_again_when_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load([folder], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tokens", None)
        again = load([folder], tmp_path)
    assert again.summary == first.summary
    before = (folder / "a.txt").stat()
    (folder / "a.txt").write_text("A" * 20)
    # Of the same size, and later by a second because the clock of a file system may be coarse.
    os.utime(folder / "a.txt", (before.st_atime, before.st_mtime + 1))
    changed = load([folder], tmp_path)
    assert texts_of(changed.train)[0] == "A" * 20
    assert changed.train.fingerprint != first.train.fingerprint
    assert load([folder], tmp_path, tokenizer=UpperCase()).train.tokenizer == "upper"


def test_a_tokenised_file_is_the_text_it_was_made_of(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "corpus.bin"
    seen: list[int] = []
    summary = tokenize(find_sources([folder]), out, ByteTokenizer(), progress=seen.append)
    assert seen == list(range(1, 8))
    from_text, from_tokens = load([folder], tmp_path / "run"), load([out], tmp_path / "unused")
    assert not (tmp_path / "unused").exists()
    assert from_tokens.train.fingerprint == from_text.train.fingerprint
    assert texts_of(from_tokens.train) == texts_of(from_text.train)
    assert summary == from_text.summary


def test_text_and_tokenised_files_join_when_they_have_one_tokenizer(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus.bin"
    tokenize(find_sources([folder / "a.txt"]), out, ByteTokenizer())
    data = load([out, folder / "b.txt", folder / "c.txt"], tmp_path)
    assert texts_of(data.train) + texts_of(data.held_out) == ["b" * 20, "c" * 20, "a" * 20]
    other = tmp_path / "other.bin"
    tokenize(find_sources([folder / "a.txt"]), other, UpperCase())
    with pytest.raises(DataError, match=r"corpus\.bin has tokenizer bytes but .*other\.bin has upper"):
        load([out, other], tmp_path)
    with pytest.raises(DataError, match=r"other\.bin was made with the tokenizer upper, not with the given bytes"):
        load([other], tmp_path, tokenizer=ByteTokenizer())
    assert load([other], tmp_path).train.tokenizer == "upper"


def test_tokenize_refuses_what_it_would_overwrite_or_misread(folder: Path, tmp_path: Path) -> None:
    sources = find_sources([folder])
    out = tmp_path / "corpus.bin"
    with pytest.raises(DataError, match=r"corpus\.txt has the suffix '\.txt'; tokenised files are called \.bin"):
        tokenize(sources, tmp_path / "corpus.txt", ByteTokenizer())
    tokenize(sources, out, ByteTokenizer())
    with pytest.raises(DataError, match=r"corpus\.bin exists; remove it or choose another name"):
        tokenize(sources, out, ByteTokenizer())
    with pytest.raises(DataError, match=r"corpus\.bin is tokenised already"):
        tokenize(find_sources([out]), tmp_path / "again.bin", ByteTokenizer())


def test_bad_text_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    (folder / "c.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"c\.txt is not UTF-8 at byte 3"):
        load([folder], tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_corpus_of_nothing_to_hold_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="all 1 documents are empty"):
        load([tmp_path], tmp_path / "run")
    with pytest.raises(DataError, match="at least one tokenised file"):
        make_corpus([])


def test_tokenising_holds_no_corpus_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("a line of text that is repeated\n" * 600_000)
    with (tmp_path / "many.jsonl").open("w") as stream:
        for _ in range(50_000):
            stream.write('{"text": "' + "x" * 100 + '"}\n')
    sources = find_sources([path, tmp_path / "many.jsonl"])
    tracemalloc.start()
    tokenize(sources, tmp_path / "out.bin", ByteTokenizer())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 19 MB of text in one document, 5 MB in others. A piece of 1 MiB is held as text, bytes and 32-bit ids.
    assert os.path.getsize(tmp_path / "out.bin") > 48e6
    assert peak < 15e6
    assert open_tokens(tmp_path / "out.bin").header.num_documents == 50_001
