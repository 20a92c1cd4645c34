import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.data import Corpus, DataError, Header, TokenFile, batch_at, rank_rows, split, windows_for_eval
from functional_moe.data import _windows as windows

SEPARATOR = 256
# Without a deadline, because the machine is shared.
QUICK = settings(deadline=None, max_examples=40)


def corpus_of(*files: list[list[int]]) -> Corpus:
    """A corpus of documents that are given without their separators, in as many files."""
    made = []
    for number, documents in enumerate(files):
        tokens = np.array([token for text in documents for token in (SEPARATOR, *text)], np.uint16)
        offsets = np.cumsum([0] + [1 + len(text) for text in documents]).astype(np.uint64)
        header = Header(1, "uint16", 257, SEPARATOR, len(tokens), len(documents), 1, 0, "bytes", "")
        made.append(TokenFile(Path(f"file{number}.bin"), tokens, offsets, header))
    return Corpus(tuple(made), "")


def distinct_documents(lengths: list[int]) -> list[list[int]]:
    """Documents that no two are equal: each starts with its number in two digits of base 256."""
    return [[number // 256, number % 256, *[7] * length] for number, length in enumerate(lengths)]


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    documents = distinct_documents(draw(st.lists(st.integers(0, 9), min_size=1, max_size=40)))
    cut = draw(st.integers(0, len(documents) - 1))
    return corpus_of(documents) if cut == 0 else corpus_of(documents[:cut], documents[cut:])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three documents, so that these small corpora have many."""
    monkeypatch.setattr(windows, "_MIN_BLOCK_DOCUMENTS", 3)


def documents_in(corpus: Corpus) -> list[tuple[int, ...]]:
    return [
        tuple(file.tokens[file.offsets[i] : file.offsets[i + 1]].tolist())
        for file in corpus.files
        for i in range(len(file.offsets) - 1)
    ]


def in_stream_order(corpus: Corpus, count: int, seq_len: int, seed: int) -> dict[str, torch.Tensor]:
    """The first ``count`` or more windows as a batch, put back from the order of the run into that of the stream."""
    stretch = max(1, corpus.num_tokens // seq_len)
    rows = -(-count // stretch) * stretch
    batch = batch_at(corpus, 0, batch_size=rows, seq_len=seq_len, seed=seed)
    order = windows._window_numbers(corpus, np.arange(rows), seq_len, seed).argsort()
    return {name: value[order] for name, value in batch.items()}


def stream_of(corpus: Corpus, count: int, seq_len: int, seed: int) -> list[int]:
    """The first ``count`` or more input tokens of the stream."""
    return in_stream_order(corpus, -(-count // seq_len), seq_len, seed)["tokens"].flatten().tolist()


def documents_of_epoch(corpus: Corpus, epoch: int, seed: int) -> list[tuple[int, ...]]:
    size = corpus.num_tokens
    seq_len = min(5, size - 1)
    tokens = stream_of(corpus, (epoch + 1) * size, seq_len, seed)[epoch * size : (epoch + 1) * size]
    starts = [index for index, token in enumerate(tokens) if token == SEPARATOR]
    return [tuple(tokens[a:b]) for a, b in zip(starts, [*starts[1:], size], strict=True)]


@QUICK
@given(corpus=corpora(), epoch=st.integers(0, 2), seed=st.integers(0, 2**40))
def test_an_epoch_holds_every_document_once(corpus: Corpus, epoch: int, seed: int) -> None:
    assert sorted(documents_of_epoch(corpus, epoch, seed)) == sorted(documents_in(corpus))


def test_epochs_and_seeds_have_different_orders() -> None:
    corpus = corpus_of(distinct_documents([3] * 30))
    orders = [documents_of_epoch(corpus, epoch, seed) for epoch in (0, 1) for seed in (0, 1)]
    orders.append(documents_in(corpus))
    for index, order in enumerate(orders):
        assert order not in orders[:index]


@QUICK
@given(corpus=corpora(), rows=st.integers(1, 5), data=st.data())
def test_windows_tile_the_stream(corpus: Corpus, rows: int, data: st.DataObject) -> None:
    seq_len = data.draw(st.integers(1, corpus.num_tokens - 1))
    batch = in_stream_order(corpus, rows, seq_len, seed=3)
    tokens, targets = batch["tokens"].flatten(), batch["targets"].flatten()
    assert torch.equal(tokens[1:], targets[:-1])
    assert tokens[0] == SEPARATOR


@QUICK
@given(corpus=corpora(), seq_len=st.integers(1, 9), seed=st.integers(0, 2**40), stretches=st.integers(1, 3))
def test_a_run_takes_every_window_of_a_stretch_once(corpus: Corpus, seq_len: int, seed: int, stretches: int) -> None:
    stretch = max(1, corpus.num_tokens // seq_len)
    numbers = windows._window_numbers(corpus, np.arange(stretches * stretch), seq_len, seed).reshape(stretches, -1)
    assert np.array_equal(np.sort(numbers), np.arange(stretches * stretch).reshape(stretches, -1))


def test_neighbouring_rows_are_not_neighbouring_windows() -> None:
    corpus = corpus_of(distinct_documents([9] * 300))
    numbers = windows._window_numbers(corpus, np.arange(400), 8, 0)
    # of 400 steps in a uniform shuffle one is expected to be to the next window
    assert (np.diff(numbers) == 1).sum() < 8
    assert not np.array_equal(numbers, windows._window_numbers(corpus, np.arange(400), 8, 1))


@QUICK
@given(corpus=corpora(), world_size=st.sampled_from([1, 2, 3, 5, 12, 16]), step=st.integers(0, 50))
def test_samples_do_not_depend_on_the_ranks(corpus: Corpus, world_size: int, step: int) -> None:
    arguments = {"batch_size": 12, "seq_len": min(7, corpus.num_tokens - 1), "seed": 5}
    whole = batch_at(corpus, step, **arguments)
    parts = [batch_at(corpus, step, **arguments, rank=rank, world_size=world_size) for rank in range(world_size)]
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_the_order_survives_a_change_of_ranks_in_the_middle_of_the_second_epoch() -> None:
    # torchtitan 811, 816
    corpus = corpus_of(distinct_documents([5, 2, 9, 0, 4] * 6))
    seq_len, batch_size = 4, 5
    steps_of_epoch = corpus.num_tokens // (seq_len * batch_size)
    changed_at = steps_of_epoch + steps_of_epoch // 2

    def samples(step: int, world_size: int) -> list[list[int]]:
        arguments = {"batch_size": batch_size, "seq_len": seq_len, "seed": 3, "world_size": world_size}
        return [
            row
            for rank in range(world_size)
            for row in batch_at(corpus, step, rank=rank, **arguments)["tokens"].tolist()
        ]

    steps = range(2 * steps_of_epoch)
    undisturbed = [samples(step, 1) for step in steps]
    assert undisturbed[:steps_of_epoch] != undisturbed[steps_of_epoch:]
    for before, after in [(2, 1), (2, 4), (4, 3), (1, 8)]:
        assert [samples(step, before if step < changed_at else after) for step in steps] == undisturbed


@QUICK
@given(batch_size=st.integers(1, 40), world_size=st.integers(1, 12))
def test_ranks_take_every_row_once_and_as_many_as_each_other(batch_size: int, world_size: int) -> None:
    rows = [rank_rows(batch_size, rank, world_size) for rank in range(world_size)]
    assert [row for of_rank in rows for row in of_rank] == list(range(batch_size))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@QUICK
@given(corpus=corpora(), step=st.integers(0, 50))
def test_samples_do_not_depend_on_the_batch_size(corpus: Corpus, step: int) -> None:
    arguments = {"seq_len": min(7, corpus.num_tokens - 1), "seed": 5}
    whole = batch_at(corpus, step, batch_size=4, **arguments)
    parts = [batch_at(corpus, 4 * step + row, batch_size=1, **arguments) for row in range(4)]
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


@QUICK
@given(corpus=corpora(), steps=st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_a_batch_does_not_depend_on_the_batches_before_it(corpus: Corpus, steps: list[int]) -> None:
    seq_len = min(7, corpus.num_tokens - 1)
    for step in steps:
        used = batch_at(corpus, step, batch_size=2, seq_len=seq_len, seed=0)
        fresh = batch_at(Corpus(corpus.files, ""), step, batch_size=2, seq_len=seq_len, seed=0)
        assert torch.equal(used["tokens"], fresh["tokens"])
    assert len(corpus.memo) <= 4


@QUICK
@given(corpus=corpora(), step=st.integers(0, 50))
def test_segments_count_the_documents_of_a_row(corpus: Corpus, step: int) -> None:
    batch = batch_at(corpus, step, batch_size=3, seq_len=min(9, corpus.num_tokens - 1), seed=1)
    is_start = batch["tokens"] == SEPARATOR
    is_start[:, 0] = True
    assert torch.equal(batch["segment_ids"], is_start.cumsum(1).int())


def test_dtypes_and_shapes() -> None:
    batch = batch_at(corpus_of([[1] * 50]), 0, batch_size=6, seq_len=8, seed=0, rank=1, world_size=2)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "tokens": (torch.int64, (3, 8)),
        "targets": (torch.int64, (3, 8)),
        "segment_ids": (torch.int32, (3, 8)),
    }
    before = batch["targets"].clone()
    batch["tokens"].zero_()
    assert torch.equal(batch["targets"], before)


def test_the_window_at_the_end_of_an_epoch_runs_on_into_the_next() -> None:
    # 4 tokens an epoch, windows of 3 and the next: every alignment occurs.
    corpus = corpus_of([[1, 2, 3]])
    batch = in_stream_order(corpus, 4, seq_len=3, seed=0)
    assert batch["tokens"].tolist() == [[256, 1, 2], [3, 256, 1], [2, 3, 256], [1, 2, 3]]
    assert batch["targets"].tolist() == [[1, 2, 3], [256, 1, 2], [3, 256, 1], [2, 3, 256]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1], [1, 2, 2], [1, 1, 2], [1, 1, 1]]


@QUICK
@given(corpus=corpora(), num_windows=st.integers(1, 30), batch_size=st.integers(1, 7), data=st.data())
def test_eval_windows_are_spread_evenly_in_stored_order(
    corpus: Corpus, num_windows: int, batch_size: int, data: st.DataObject
) -> None:
    seq_len = data.draw(st.integers(1, min(8, corpus.num_tokens - 1)))
    flat = torch.tensor([token for document in documents_in(corpus) for token in document])
    batches = list(windows_for_eval(corpus, num_windows, seq_len=seq_len, batch_size=batch_size))
    tokens = torch.cat([batch["tokens"] for batch in batches])
    targets = torch.cat([batch["targets"] for batch in batches])
    available = (len(flat) - 1) // seq_len
    assert len(tokens) == min(num_windows, available)
    assert all(len(batch["tokens"]) == batch_size for batch in batches[:-1])
    chosen = [index * available // len(tokens) for index in range(len(tokens))]
    for row, window in enumerate(chosen):
        stretch = flat[window * seq_len : (window + 1) * seq_len + 1]
        assert torch.equal(tokens[row], stretch[:-1])
        assert torch.equal(targets[row], stretch[1:])


def test_memory_does_not_grow_with_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    count = 200_000
    tokens = np.tile(np.array([SEPARATOR, 1, 2], np.uint16), count)
    offsets = np.arange(0, 3 * count + 1, 3, dtype=np.uint64)
    header = Header(1, "uint16", 257, SEPARATOR, 3 * count, count, 1, 0, "bytes", "")
    corpus = Corpus((TokenFile(Path("large.bin"), tokens, offsets, header),), "")
    batch_at(corpus, 0, batch_size=1, seq_len=8, seed=1)
    tracemalloc.start()
    for step in (0, 75_000, 149_999):
        batch_at(corpus, step, batch_size=1, seq_len=8, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The offsets alone are 1.6 MB; a block of 4096 documents needs a dozen arrays of 32 KiB.
    assert peak < 600_000


def test_block_sums_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MAX_BLOCKS", 4)
    corpus = corpus_of(distinct_documents([1] * 50))
    assert len(documents_of_epoch(corpus, 0, 0)) == 50
    assert all(len(blocks.starts) <= 5 for blocks in corpus.memo.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"seq_len": 10},
            r"training text has 10 tokens, fewer than one window of seq_len 10 \+ 1; .* at most 9",
        ),
        ({"seq_len": 0}, "seq_len 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"world_size": 0}, "world_size 0 must be at least 1"),
        ({"rank": 1}, r"rank 1 is not in \[0, 1\)"),
        ({"step": -1}, "step -1"),
    ],
)
def test_impossible_requests_are_refused(changed: dict[str, int], message: str) -> None:
    arguments = {"step": 0, "batch_size": 4, "seq_len": 4, "seed": 0} | changed
    with pytest.raises(DataError, match=message):
        batch_at(corpus_of([[1] * 9]), **arguments)


def test_eval_windows_of_a_short_text_are_refused_at_the_call() -> None:
    with pytest.raises(DataError, match=r"the held-out text has 3 tokens.*seq_len of at most 2"):
        windows_for_eval(corpus_of([[1, 2]]), 1, seq_len=3, batch_size=1)
    with pytest.raises(DataError, match="num_windows 0"):
        windows_for_eval(corpus_of([[1, 2]]), 0, seq_len=1, batch_size=1)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    corpus = corpus_of([[1, 300, 2]])
    with pytest.raises(DataError, match=r"token id 300 is outside the vocabulary of 257 of file0\.bin"):
        batch_at(corpus, 0, batch_size=1, seq_len=3, seed=0)
    with pytest.raises(DataError, match="token id 300"):
        next(windows_for_eval(corpus, 1, seq_len=3, batch_size=1))


def test_a_document_without_its_separator_is_refused() -> None:
    corpus = corpus_of([[1, 2], [3, 4]])
    corpus.files[0].tokens[3] = 9
    with pytest.raises(DataError, match=r"file0\.bin: token 3 is 9 where a document starts"):
        batch_at(corpus, 0, batch_size=2, seq_len=3, seed=0)


def test_the_held_out_half_of_a_single_document_starts_in_its_middle() -> None:
    train, held_out = split(corpus_of([list(range(99))]))
    (batch,) = windows_for_eval(held_out, 1, seq_len=4, batch_size=1)
    assert batch["tokens"].tolist() == [[94, 95, 96, 97]]
    assert train.num_tokens == 95
    assert batch_at(train, 0, batch_size=1, seq_len=94, seed=0)["targets"][0, -1] == 93


@QUICK
@given(lengths=st.lists(st.integers(0, 4), min_size=2, max_size=90), cut=st.integers(0, 89))
def test_the_last_twentieth_of_the_documents_is_held_out(lengths: list[int], cut: int) -> None:
    documents = distinct_documents(lengths)
    parts = [part for part in (documents[:cut], documents[cut:]) if part]
    corpus = corpus_of(*parts)
    train, held_out = split(corpus)
    assert held_out.num_documents == max(1, round(len(documents) / 20))
    assert documents_in(train) + documents_in(held_out) == documents_in(corpus)
    assert train.num_tokens + held_out.num_tokens == corpus.num_tokens
