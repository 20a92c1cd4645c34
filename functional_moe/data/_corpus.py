"""A corpus: numbered documents of tokens in one or more tokenised files."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._binary import TokenFile
from ._errors import DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents numbered through the files in their order. Holds memory maps, no tokens.

    Attributes:
        files: At least one; all have one tokenizer, vocabulary and separator.
        fingerprint: Names the whole data it was cut from, by content: equal for train and held-out part.
        starts_in_text: The first document is the rest of one that was cut, so it does not start with the
            separator.
    """

    files: tuple[TokenFile, ...]
    fingerprint: str
    starts_in_text: bool = False
    # What ``batch_at`` found out about an epoch, so that it need not be found again for each batch. Holds no
    # information that is not a function of the corpus and the key.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.files[0].header.vocab_size

    @property
    def separator(self) -> int:
        """The id before each document."""
        return self.files[0].header.separator

    @property
    def is_marked(self) -> bool:
        """Some tokens may be read without being learned."""
        return any(file.header.marked for file in self.files)

    @property
    def tokenizer(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.files[0].header.tokenizer

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """int64 [files + 1]: the number of each file's first document, and the number of all documents."""
        return np.cumsum([0] + [len(file.offsets) - 1 for file in self.files], dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Documents in all files."""
        return int(self.first_documents[-1])

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in all documents, separators included."""
        return sum(int(file.offsets[-1]) - int(file.offsets[0]) for file in self.files)


def make_corpus(files: Sequence[TokenFile]) -> Corpus:
    """Join tokenised files to one corpus.

    Raises:
        DataError: No file; or two that differ in tokenizer, vocabulary or separator.
    """
    if not files:
        raise DataError("a corpus needs at least one tokenised file")
    first = files[0]
    for file in files[1:]:
        for name in ("tokenizer", "vocab_size", "separator"):
            ours, theirs = getattr(first.header, name), getattr(file.header, name)
            if ours != theirs:
                raise DataError(
                    f"{first.path} has {name} {ours} but {file.path} has {theirs}; tokenise both with one tokenizer"
                )
    names = "\n".join(file.header.fingerprint for file in files)
    return Corpus(tuple(files), hashlib.blake2b(names.encode(), digest_size=16).hexdigest())


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Cut a corpus into training and held-out part: the last 5% of its documents, at least one, are held out.

    A corpus of one document is cut within it instead: the last 5% of its tokens are held out. That part then
    starts in the middle of the text, without separator.

    Returns:
        Training and held-out part, in this order.

    Raises:
        DataError: One document of fewer than two tokens.
    """
    count = corpus.num_documents
    if count > 1:
        first_held_out = count - max(1, round(count / 20))
        return _documents(corpus, 0, first_held_out), _documents(corpus, first_held_out, count)
    file = corpus.files[0]
    start, stop = int(file.offsets[0]), int(file.offsets[-1])
    if stop - start < 2:
        raise DataError(f"{file.path} has one document of one token: nothing to hold out; give more text")
    cut = stop - max(1, round((stop - start) / 20))
    before, after = np.array([start, cut], np.uint64), np.array([cut, stop], np.uint64)
    return (
        replace(corpus, files=(file._replace(offsets=before),), memo={}),
        replace(corpus, files=(file._replace(offsets=after),), memo={}, starts_in_text=True),
    )


def _documents(corpus: Corpus, first: int, stop: int) -> Corpus:
    """The documents ``first`` to ``stop - 1`` as a corpus."""
    files = []
    for file, number in zip(corpus.files, corpus.first_documents.tolist(), strict=False):
        low, high = max(0, first - number), min(len(file.offsets) - 1, stop - number)
        if low < high:
            files.append(file._replace(offsets=file.offsets[low : high + 1]))
    return replace(corpus, files=tuple(files), memo={})
