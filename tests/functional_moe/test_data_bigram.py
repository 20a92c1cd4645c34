import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe import bigram as module
from functional_moe.bigram import fit_bigram
from functional_moe.data import Corpus, DataError, Header, TokenFile, batch_at, split

VOCABULARY = 6
SEPARATOR = 5


def corpus_of(*files: list[list[int]], vocab_size: int = VOCABULARY) -> Corpus:
    made = []
    for number, documents in enumerate(files):
        tokens = np.array([token for text in documents for token in (SEPARATOR, *text)], np.uint16)
        offsets = np.cumsum([0] + [1 + len(text) for text in documents]).astype(np.uint64)
        header = Header(1, "uint16", vocab_size, SEPARATOR, len(tokens), len(documents), 1, 0, "", "")
        made.append(TokenFile(Path(f"file{number}.bin"), tokens, offsets, header))
    return Corpus(tuple(made), "")


texts = st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(first=texts, second=texts, at_once=st.integers(1, 9))
def test_the_model_is_the_smoothed_frequencies_of_the_stream(
    first: list[list[int]], second: list[list[int]], at_once: int
) -> None:
    corpus = corpus_of(first, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS_AT_ONCE", at_once)
        bigram = fit_bigram(corpus)
    # One epoch of the training stream has each pair that was counted, whatever the order of the documents.
    batch = batch_at(corpus, 0, batch_size=corpus.num_tokens, seq_len=1, seed=0)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for token, target in zip(batch["tokens"].flatten(), batch["targets"].flatten(), strict=True):
        counts[token, target] += 1
    expected = (counts + bigram.alpha) / (counts.sum(1, keepdims=True) + VOCABULARY * bigram.alpha)
    np.testing.assert_allclose(bigram.log_probs.exp(), expected, rtol=1e-5)


def test_alpha_is_the_best_for_a_corpus_that_leaves_one_pair_out() -> None:
    generator = np.random.default_rng(0)
    text = generator.choice(5, size=60, p=[0.5, 0.3, 0.1, 0.05, 0.05]).tolist()
    corpus = corpus_of([text])
    stream = [SEPARATOR, *text, SEPARATOR]
    pairs = list(itertools.pairwise(stream))

    def left_out(alpha: float) -> float:
        total = 0.0
        for index, (token, target) in enumerate(pairs):
            others = pairs[:index] + pairs[index + 1 :]
            numerator = others.count((token, target)) + alpha
            total += np.log(numerator / (sum(a == token for a, _ in others) + VOCABULARY * alpha))
        return total

    best = max(module._ALPHAS.tolist(), key=left_out)
    assert fit_bigram(corpus).alpha == best


def test_the_loss_is_the_mean_over_what_is_not_ignored() -> None:
    bigram = fit_bigram(corpus_of([[0, 1, 0, 1, 2]]))
    tokens = torch.tensor([[0, 1, 2], [3, 4, 5]])
    targets = torch.tensor([[1, 0, -100], [-100, 0, 0]])
    pairs = [(0, 1), (1, 0), (4, 0), (5, 0)]
    expected = -sum(bigram.log_probs[pair] for pair in pairs) / 4
    torch.testing.assert_close(bigram.loss(tokens, targets), expected)


def test_only_the_training_part_is_counted() -> None:
    documents = [[0, 1]] * 19 + [[3, 3]]
    train, _ = split(corpus_of(documents))
    uniform = torch.full((VOCABULARY,), -np.log(VOCABULARY), dtype=torch.float32)
    torch.testing.assert_close(fit_bigram(train).log_probs[3], uniform)


def test_a_large_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match=r"vocab_size is 4097; it is offered up to 4096, leave it out"):
        fit_bigram(corpus_of([[1]], vocab_size=4097))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match=r"file0\.bin: token id 9 is outside the vocabulary of 6"):
        fit_bigram(corpus_of([[1, 9]]))
