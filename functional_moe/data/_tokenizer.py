"""Text to token ids and back: bytes, or a ``tokenizers`` JSON file."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ._errors import DataError

if TYPE_CHECKING:
    import tokenizers

# The end-of-document tokens of the well-known families; the first that the tokenizer has serves.
_KNOWN_SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek spells it with full-width bars)
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)
# Characters that are encoded in one call. The library's encoding of a text takes some hundred bytes for each
# token.
_CHARACTERS_PER_CALL = 1 << 20


class Tokenizer(Protocol):
    """What the data modules ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, the separator's included."""

    @property
    def separator(self) -> int:
        """The id that stands before each document and ends the one before it."""

    @property
    def fingerprint(self) -> str:
        """Names the mapping from text to ids: equal for equal mappings. Stored in every tokenised file."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids of ``text``: uint32 [tokens], without separator."""

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """Token ids of one document that comes in pieces, as arrays to be joined: bounded memory."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; separators are left out, broken UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and the separator 256."""

    vocab_size = 257
    separator = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids of ``text``: uint32 [bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """Token ids of each piece."""
        return map(self.encode, pieces)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; ids of 256 and more are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class JsonTokenizer:
    """A ``tokenizers`` JSON file.

    A special token that is spelled out in a text is encoded as ordinary text, so that no text can end a
    document. A document longer than about a million characters is encoded in parts, cut behind a line break
    between two visible characters. That is where the usual pre-tokenizers cut too; one that puts a space
    before each text (SentencePiece's ``add_dummy_prefix``) puts one at each cut.

    Args:
        path: The ``tokenizer.json``.
        separator_token: The token that separates documents, such as ``"<|endoftext|>"``; None takes the first
            well-known one that the tokenizer has.

    Raises:
        DataError: The file cannot be read, is no tokenizer, or has no such separator (its special tokens are
            listed).
    """

    def __init__(self, path: str | Path, separator_token: str | None = None) -> None:
        # Late, because bytes as tokens need none of it and the import costs a tenth of a second.
        import tokenizers

        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; give a tokenizers JSON file"
            ) from error
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        # The library raises a bare Exception for whatever is wrong in the JSON.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path} is not a tokenizers JSON file: {reason}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer: tokenizers.Tokenizer = tokenizer
        self.separator_token, self.separator = _find_separator(tokenizer, path, separator_token)
        # Ids may have holes: the number of tokens is no bound for them.
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        identity = content + b"\0" + self.separator_token.encode()
        self.fingerprint: str = "json:" + hashlib.blake2b(identity, digest_size=16).hexdigest()

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids of ``text``: uint32 [tokens], without the tokens a template would add."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_special(self, text: str) -> NDArray[np.uint32]:
        """Token ids of a text whose special tokens are meant as such, as in what a chat template writes."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The spelling of each."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """Token ids of one document, in parts of about a million characters cut at line breaks."""
        return map(self.encode, _cut_at_line_breaks(pieces, _CHARACTERS_PER_CALL))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(path: str | Path | None, separator_token: str | None = None) -> Tokenizer:
    """The tokenizer of a command: bytes when ``path`` is None, else that JSON file.

    Raises:
        DataError: As ``JsonTokenizer``; or a separator is named for bytes, which have a fixed one.
    """
    if path is not None:
        return JsonTokenizer(path, separator_token)
    if separator_token is not None:
        raise DataError(
            f"separator token {separator_token!r} without a tokenizer: bytes have their own separator, leave it out"
        )
    return ByteTokenizer()


def check_vocabulary(name: str, vocab_size: int, config_vocab_size: int) -> None:
    """Refuse tokens that a model has no embedding for.

    Args:
        name: What has the tokens, for the message: a tokenizer's or a corpus's name.
        vocab_size: One more than the largest id that may occur.
        config_vocab_size: Rows of the model's embedding.

    Raises:
        DataError: ``vocab_size`` is the larger.
    """
    if vocab_size > config_vocab_size:
        raise DataError(
            f"{name} has {vocab_size} token ids but the model's vocab_size is {config_vocab_size}: "
            f"set vocab_size to at least {vocab_size}"
        )


def _find_separator(tokenizer: "tokenizers.Tokenizer", path: str | Path, wanted: str | None) -> tuple[str, int]:
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    candidates = _KNOWN_SEPARATORS if wanted is None else (wanted,)
    for candidate in candidates:
        if candidate in special:
            return candidate, special[candidate]
    listed = ", ".join(repr(token) for token in list(special)[:20]) or "none"
    more = f" and {len(special) - 20} more" if len(special) > 20 else ""
    problem = "no well-known separator" if wanted is None else f"no special token {wanted!r}"
    raise DataError(f"{path} has {problem}; name one of its special tokens as separator token: {listed}{more}")


def _cut_at_line_breaks(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Cut the text of ``pieces`` anew, at line breaks, into parts of about ``size`` characters."""
    parts: list[str] = []
    length, wanted = 0, size
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length < wanted:
            continue
        text = "".join(parts)
        cut = _last_cut(text)
        if cut > 0:
            yield text[:cut]
            text = text[cut:]
        parts, length = [text], len(text)
        # Text without line breaks is searched again only when it has doubled, lest it cost quadratic time.
        wanted = max(size, 2 * length)
    if length:
        yield "".join(parts)


def _last_cut(text: str) -> int:
    """The last position behind a lone line break between two visible characters, or 0."""
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, end)) > 0:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
        end = newline
    return 0
