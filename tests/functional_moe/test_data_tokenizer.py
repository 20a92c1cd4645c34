from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from functional_moe.data import ByteTokenizer, DataError, JsonTokenizer, check_vocabulary, load_tokenizer
from functional_moe.data import _tokenizer as module


def save_bpe(path: Path, *special: str) -> Path:
    """A byte-level BPE, trained on a few lines, with these special tokens."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["def f(x):\n    return x\n\n\ndef g(y):\n\treturn [y]\n"] * 5, trainer)
    bpe.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = save_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json", "<pad>", "<|endoftext|>")
    return JsonTokenizer(path)


@settings(deadline=None)
@given(text=st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([256, *tokens.tolist(), 256]) == text


def test_a_cut_character_is_replaced() -> None:
    assert ByteTokenizer().decode([97, 0xC3]) == "a\ufffd"


@settings(deadline=None)
@given(text=st.text())
def test_text_of_a_json_tokenizer_comes_back(bpe: JsonTokenizer, text: str) -> None:
    tokens = bpe.encode(text).tolist()
    assert bpe.decode([bpe.separator, *tokens, bpe.separator]) == text
    assert all(token < bpe.vocab_size for token in tokens)


def test_text_cannot_contain_the_separator(bpe: JsonTokenizer) -> None:
    text = "a <|endoftext|> b<pad>"
    assert bpe.separator not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text).tolist()) == text


# Words that the tokenizer has as one token, so that a cut within one is seen.
words = st.sampled_from(["return", "def", "(x)", "é", " ", "\t", "\n", "\n"])
lines = st.lists(words, max_size=30).map("".join)


@settings(deadline=None, max_examples=200)
@given(text=lines, size=st.integers(1, 20), data=st.data())
def test_a_document_in_parts_has_the_tokens_of_the_whole(
    bpe: JsonTokenizer, text: str, size: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHARACTERS_PER_CALL", size)
        parts = list(bpe.encode_pieces(pieces))
    assert np.concatenate([np.empty(0, np.uint32), *parts]).tolist() == bpe.encode(text).tolist()


def test_a_long_document_is_encoded_in_bounded_parts(bpe: JsonTokenizer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHARACTERS_PER_CALL", 100)
        parts = list(bpe.encode_pieces(["some text (x)\n"] * 100))
    assert max(map(len, parts)) < 120
    assert len(parts) > 10


def test_the_separator_is_found_or_named(tmp_path: Path) -> None:
    path = save_bpe(tmp_path / "a.json", "<s>", "</s>", "<doc>")
    assert JsonTokenizer(path).separator_token == "</s>"
    named = JsonTokenizer(path, "<doc>")
    assert (named.separator_token, named.separator) == ("<doc>", 2)
    assert named.fingerprint != JsonTokenizer(path).fingerprint
    with pytest.raises(DataError, match=r"no special token '<x>'; name one .*: '<s>', '</s>', '<doc>'$"):
        JsonTokenizer(path, "<x>")
    with pytest.raises(DataError, match=r"no well-known separator; name one .*: '<doc>'$"):
        JsonTokenizer(save_bpe(tmp_path / "b.json", "<doc>"))
    with pytest.raises(DataError, match=r"no well-known separator; name one .*: none$"):
        JsonTokenizer(save_bpe(tmp_path / "c.json"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"version": "1.0"}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizers JSON file") as caught:
        JsonTokenizer(path)
    assert "\n" not in str(caught.value)


def test_load_tokenizer(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(None), ByteTokenizer)
    path = save_bpe(tmp_path / "a.json", "<eos>")
    assert load_tokenizer(path).fingerprint == JsonTokenizer(path).fingerprint
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*none\.json: No such file"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match="separator token '<eos>' without a tokenizer"):
        load_tokenizer(None, "<eos>")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    check_vocabulary("t.json", 257, 257)
    with pytest.raises(DataError, match=r"t\.json has 258 token ids but the model's vocab_size is 257: set"):
        check_vocabulary("t.json", 258, 257)
