"""Windows of a corpus as batches: a pure function of seed, step, rank and world size.

The stream is the endless chain of epochs. Epoch ``e`` holds every document once, in the order that
(seed, e) names. Window ``w`` is stream positions ``[w * seq_len, (w + 1) * seq_len]``: neighbours share one
token, which is target in one and input in the other, so every token is predicted once and nothing is dropped;
the window at the end of an epoch runs on into the next. A run takes the windows in an order that is shuffled
within stretches as long as an epoch, because neighbours are mostly of one document and a batch of them would be
a poor sample of the corpus. The order depends neither on ranks nor on batches: a run that continues with other
ones at the same row sees the same samples in the same order.

Where a position lies in the shuffled order follows from the sums of the lengths before it. Only sparse sums
are kept: one for each block of documents, and at most ``_MAX_BLOCKS`` whatever the size of the corpus. The
lengths within a block are read again when they are needed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..cross_entropy import IGNORE_INDEX
from ._binary import UNLEARNED
from ._corpus import Corpus
from ._errors import DataError
from ._permutation import permute

# A block is read for every row, so it should be short; its sum is held in memory, so there should be few.
_MIN_BLOCK_DOCUMENTS = 1 << 10
_MAX_BLOCKS = 1 << 16
# Epochs whose block sums are remembered: a batch touches two as a rule, a run goes forward.
_REMEMBERED_EPOCHS = 4


def batch_at(
    corpus: Corpus,
    step: int,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, torch.Tensor]:
    """The batch of one rank at one step.

    Global rows ``[step * batch_size, (step + 1) * batch_size)`` of the run, of which the rank takes ``rank_rows``. So
    a run that continues on other ranks, at the same step and batch size, sees the same samples in the same order.

    Args:
        corpus: At least ``seq_len + 1`` tokens.
        step: From 0.
        batch_size: Rows of all ranks together.
        seq_len: Tokens in a row.
        seed: Names the order of the documents.
        rank: In ``[0, world_size)``.
        world_size: Ranks among which the rows are divided.

    Returns:
        ``tokens`` int64 [rows, seq_len]; ``targets`` int64 [rows, seq_len], the next token of each, or -100 where
        a marked file says that it is not learned; ``segment_ids`` int32 [rows, seq_len], 1, 2, ... for the documents
        in a row in their order. Packed text has no padding.

    Raises:
        DataError: An argument is out of range, the corpus is shorter than a window, or the file holds a token
            that its header rules out.
    """
    _check_window(corpus, seq_len, "the training text")
    rows = rank_rows(batch_size, rank, world_size)
    if step < 0:
        raise DataError(f"step {step} is negative; steps count from 0")
    if not rows:
        # More ranks than rows: a batch of none, which the model takes.
        whole = _row(corpus, 0, seq_len, seed)
        return {name: value[:0] for name, value in whole.items()}
    numbers = np.arange(step * batch_size + rows.start, step * batch_size + rows.stop)
    windows = _window_numbers(corpus, numbers, seq_len, seed)
    return _stack([_row(corpus, int(window) * seq_len, seq_len, seed) for window in windows])


def rank_rows(batch_size: int, rank: int, world_size: int) -> range:
    """The rows of a global batch that one rank takes: contiguous, in the order of the ranks.

    The first ``batch_size % world_size`` ranks take one row more than the others; with more ranks than rows, some take
    none. A loss that is a sum over all ranks' tokens, divided by their number, does not change with the cut.

    Args:
        batch_size: Rows of all ranks together.
        rank: In ``[0, world_size)``.
        world_size: Ranks among which the rows are divided.

    Raises:
        DataError: An argument is out of range.
    """
    if batch_size < 1 or world_size < 1:
        raise DataError(f"batch_size {batch_size} and world_size {world_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} is not in [0, {world_size})")
    each, more = divmod(batch_size, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _window_numbers(corpus: Corpus, rows: NDArray[np.int64], seq_len: int, seed: int) -> NDArray[np.int64]:
    """The window of the stream that each row of the run is; ``rows`` and the result are int64 [rows]."""
    stretch = max(1, corpus.num_tokens // seq_len)
    numbers, slots = np.divmod(rows, stretch)
    windows = [
        number * stretch + permute(slots[numbers == number], stretch, (seed, int(number), seq_len))
        for number in np.unique(numbers)
    ]
    return np.concatenate(windows)


def windows_for_eval(
    corpus: Corpus, num_windows: int, *, seq_len: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Windows spread evenly over a corpus in its stored order, the same at every call.

    The corpus is cut into windows once through, not shuffled; of these, ``num_windows`` at equal distances
    are taken, or all if there are fewer. The text behind the last whole window is left out.

    Args:
        corpus: The held-out part, at least ``seq_len + 1`` tokens.
        num_windows: Windows to take, at least 1.
        seq_len: Tokens in a window.
        batch_size: Rows of a batch; the last may have fewer.

    Returns:
        An iterator of batches as ``batch_at`` returns them.

    Raises:
        DataError: As ``batch_at``; at the call, before the first batch.
    """
    _check_window(corpus, seq_len, "the held-out text")
    if num_windows < 1 or batch_size < 1:
        raise DataError(f"num_windows {num_windows} and batch_size {batch_size} must be at least 1")
    available = (corpus.num_tokens - 1) // seq_len
    count = min(num_windows, available)
    chosen = [index * available // count for index in range(count)]

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for first in range(0, count, batch_size):
            yield _stack(
                [_row(corpus, window * seq_len, seq_len, None) for window in chosen[first : first + batch_size]]
            )

    return batches()


class _Pieces(NamedTuple):
    """A stretch of the stream as pieces of documents, in stream order; arrays are int64 [pieces].

    Attributes:
        documents: Number of the document each piece is of.
        starts: Position of the piece's first token in its document.
        lengths: Tokens of the piece.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class _Blocks(NamedTuple):
    """Where the blocks of documents of one epoch start.

    Attributes:
        num_documents: In a block; the last may have fewer.
        starts: int64 [blocks + 1], tokens of the epoch before each block, and of the whole epoch.
    """

    num_documents: int
    starts: NDArray[np.int64]


def _row(corpus: Corpus, position: int, seq_len: int, seed: int | None) -> dict[str, torch.Tensor]:
    """The window at stream ``position`` as a batch of one row; ``seed`` None means the stored order, for each epoch."""
    remaining = seq_len + 1
    tokens, ordinals = [], []
    num_pieces = 0
    while remaining:
        epoch, within = divmod(position, corpus.num_tokens)
        pieces = _pieces(corpus, None if seed is None else (seed, epoch), within, remaining)
        tokens.append(_read(corpus, pieces))
        count = len(pieces.lengths)
        ordinals.append(np.repeat(np.arange(num_pieces, num_pieces + count), pieces.lengths))
        # A block ends between documents, so the next piece is of another document.
        num_pieces += count
        taken = int(pieces.lengths.sum())
        position += taken
        remaining -= taken
    marked = np.concatenate(tokens)
    stream = torch.from_numpy(marked & (UNLEARNED - 1)) if corpus.is_marked else torch.from_numpy(marked)
    # A copy: two views of one storage would surprise whoever changes one of them in place.
    targets = stream[None, 1:].clone()
    if corpus.is_marked:
        targets[torch.from_numpy(marked >= UNLEARNED)[None, 1:]] = IGNORE_INDEX
    segments = (np.concatenate(ordinals)[:-1] + 1).astype(np.int32)
    return {
        "tokens": stream[None, :-1],
        "targets": targets,
        "segment_ids": torch.from_numpy(segments)[None],
    }


def _pieces(corpus: Corpus, key: tuple[int, int] | None, within: int, count: int) -> _Pieces:
    """At most ``count`` tokens from position ``within`` of the epoch ``key``, up to the end of a block."""
    blocks = _blocks(corpus, key)
    block = int(np.searchsorted(blocks.starts, within, side="right")) - 1
    documents = _block_documents(corpus, key, block * blocks.num_documents, blocks.num_documents)
    ends = blocks.starts[block] + np.cumsum(_lengths(corpus, documents))
    first = int(np.searchsorted(ends, within, side="right"))
    last = min(int(np.searchsorted(ends, within + count, side="left")), len(ends) - 1)
    begins = np.concatenate([blocks.starts[block : block + 1], ends[:-1]])[first : last + 1]
    starts = np.maximum(within - begins, 0)
    stops = np.minimum(ends[first : last + 1], within + count) - begins
    return _Pieces(documents[first : last + 1], starts, stops - starts)


def _blocks(corpus: Corpus, key: tuple[int, int] | None) -> _Blocks:
    """The block sums of an epoch: one pass over the document lengths, remembered for the last few epochs."""
    memo = corpus.memo
    if key in memo:
        found: _Blocks = memo[key]
        return found
    num_documents = max(_MIN_BLOCK_DOCUMENTS, -(-corpus.num_documents // _MAX_BLOCKS))
    sums = [0]
    for first in range(0, corpus.num_documents, num_documents):
        documents = _block_documents(corpus, key, first, num_documents)
        sums.append(sums[-1] + int(_lengths(corpus, documents).sum()))
    blocks = _Blocks(num_documents, np.array(sums, np.int64))
    while len(memo) >= _REMEMBERED_EPOCHS:
        memo.pop(next(iter(memo)))
    memo[key] = blocks
    return blocks


def _block_documents(corpus: Corpus, key: tuple[int, int] | None, first: int, count: int) -> NDArray[np.int64]:
    """int64 [up to count]: the documents at slots ``first``, ``first + 1``, ... of the epoch."""
    slots = np.arange(first, min(first + count, corpus.num_documents))
    return slots if key is None else permute(slots, corpus.num_documents, key)


def _lengths(corpus: Corpus, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [documents]: the tokens of each document, its separator included."""
    if len(corpus.files) == 1:
        offsets = corpus.files[0].offsets
        return (offsets[documents + 1] - offsets[documents]).astype(np.int64)
    lengths = np.empty(len(documents), np.int64)
    file_of = np.searchsorted(corpus.first_documents, documents, side="right") - 1
    for number in np.unique(file_of).tolist():
        here = file_of == number
        local = documents[here] - corpus.first_documents[number]
        offsets = corpus.files[number].offsets
        lengths[here] = offsets[local + 1] - offsets[local]
    return lengths


def _read(corpus: Corpus, pieces: _Pieces) -> NDArray[np.int64]:
    """int64 [tokens]: the tokens of the pieces, checked; with the bit ``UNLEARNED`` in a marked file."""
    file_of = np.searchsorted(corpus.first_documents, pieces.documents, side="right") - 1
    local = pieces.documents - corpus.first_documents[file_of]
    out = np.empty(int(pieces.lengths.sum()), np.int64)
    at = 0
    for number, document, start, length in zip(
        file_of.tolist(), local.tolist(), pieces.starts.tolist(), pieces.lengths.tolist(), strict=True
    ):
        file = corpus.files[number]
        begin = int(file.offsets[document]) + start
        part = file.tokens[begin : begin + length]
        starts_in_text = corpus.starts_in_text and number == 0 and document == 0
        if start == 0 and not starts_in_text and part[0] != corpus.separator:
            raise DataError(
                f"{file.path}: token {begin} is {part[0]} where a document starts, expected the separator "
                f"{corpus.separator}; remove it and tokenise the text again"
            )
        out[at : at + length] = part
        at += length
    ids = out & (UNLEARNED - 1) if corpus.is_marked else out
    if out.size and int(ids.max()) >= corpus.vocab_size:
        _raise_outside(corpus, int(ids.max()))
    return out


def _raise_outside(corpus: Corpus, token: int) -> None:
    names = ", ".join(str(file.path) for file in corpus.files[:3])
    raise DataError(
        f"token id {token} is outside the vocabulary of {corpus.vocab_size} of {names}; "
        "remove the file and tokenise the text again"
    )


def _check_window(corpus: Corpus, seq_len: int, name: str) -> None:
    if seq_len < 1:
        raise DataError(f"seq_len {seq_len} must be at least 1")
    if corpus.num_tokens < seq_len + 1:
        raise DataError(
            f"{name} has {corpus.num_tokens} tokens, fewer than one window of seq_len {seq_len} + 1; give more text"
            + (f" or a seq_len of at most {corpus.num_tokens - 1}" if corpus.num_tokens > 1 else "")
        )
