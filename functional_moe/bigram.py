"""The bigram baseline: how well the previous token alone predicts the next one."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .data import Corpus, DataError

# The counts are vocabulary x vocabulary: 128 MiB at this size, and few pairs of a larger one are seen often
# enough.
MAX_VOCABULARY = 4096
_TOKENS_AT_ONCE = 1 << 20
# Candidates for the smoothing constant: from almost none to far more than one count for each pair.
_ALPHAS = np.logspace(-5, 1, 61)


class Bigram(NamedTuple):
    """A fitted bigram model.

    Attributes:
        log_probs: float32 [vocab_size, vocab_size], row: the previous token, column: the next; nats.
        alpha: The smoothing constant that was chosen.
    """

    log_probs: torch.Tensor
    alpha: float

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats per token over the targets that are not negative.

        Args:
            tokens: Integers [...], the previous token.
            targets: Integers [...], the next token; negative ones (-100) are ignored.

        Returns:
            float32 scalar; NaN when every target is ignored.
        """
        valid = targets >= 0
        return -self.log_probs[tokens[valid], targets[valid]].mean()


def fit_bigram(corpus: Corpus) -> Bigram:
    """Count the pairs of a corpus and smooth them.

    ``p(next | token) = (count(token, next) + alpha) / (count(token) + alpha * vocab_size)``. ``alpha``
    maximises the leave-one-out likelihood: each pair of the corpus is predicted from the counts without it.
    So the baseline is as strong as such a model gets, and no held-out text is looked at.

    Args:
        corpus: The training part. Read once, in pieces.

    Returns:
        The model. Scored on the windows that a language model is scored on, it is a like-for-like baseline:
        both see the separator before a document, and both predict the one behind it.

    Raises:
        DataError: The vocabulary is larger than 4096, or the files hold a token outside it.

    References:
        Leave-one-out smoothing: Ney, Essen and Kneser, *On the Estimation of 'Small' Probabilities by
        Leaving-One-Out*, IEEE PAMI 1995.
    """
    if corpus.vocab_size > MAX_VOCABULARY:
        raise DataError(
            f"a bigram baseline needs vocab_size**2 counts and vocab_size is {corpus.vocab_size}; "
            f"it is offered up to {MAX_VOCABULARY}, leave it out"
        )
    counts = _count_pairs(corpus)
    alpha = _leave_one_out_alpha(counts)
    smoothed = counts + alpha
    log_probs = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
    return Bigram(torch.from_numpy(log_probs.astype(np.float32)), alpha)


def _count_pairs(corpus: Corpus) -> NDArray[np.int64]:
    """int64 [vocab_size, vocab_size]: how often the column follows the row.

    Documents lie one behind the other, each starting with the separator, so neighbours in a file are the
    pairs of the training stream, but for the end of the file, which a separator follows.
    """
    size = corpus.vocab_size
    counts = np.zeros(size * size, np.int64)
    for file in corpus.files:
        first, stop = int(file.offsets[0]), int(file.offsets[-1])
        for start in range(first, stop, _TOKENS_AT_ONCE):
            part = file.tokens[start : min(start + _TOKENS_AT_ONCE + 1, stop)].astype(np.int64)
            if part.max() >= size:
                raise DataError(
                    f"{file.path}: token id {part.max()} is outside the vocabulary of {size}; "
                    "remove it and tokenise the text again"
                )
            counts += np.bincount(part[:-1] * size + part[1:], minlength=size * size)
        counts[int(file.tokens[stop - 1]) * size + corpus.separator] += 1
    return counts.reshape(size, size)


def _leave_one_out_alpha(counts: NDArray[np.int64]) -> float:
    seen = counts[counts > 0]
    # Few distinct counts occur, and many times each.
    values, times = np.unique(seen, return_counts=True)
    totals = counts.sum(axis=1)
    totals = totals[totals > 0]
    vocab_size = len(counts)

    def log_likelihood(alpha: float) -> float:
        numerators = (times * values * np.log(values - 1 + alpha)).sum()
        denominators = (totals * np.log(totals - 1 + alpha * vocab_size)).sum()
        return float(numerators - denominators)

    return float(max(_ALPHAS.tolist(), key=log_likelihood))
