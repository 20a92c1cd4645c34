"""From files to the two parts of a corpus, through a tokenised file on disk."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ._binary import VERSION, Header, TokenDocument, TokenFile, open_tokens, write_tokens
from ._corpus import Corpus, make_corpus, split
from ._errors import DataError
from ._examples import Form, Template, encode_spans, read_examples
from ._sources import Sources, find_sources, read_documents, standard_library
from ._tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer


class Summary(NamedTuple):
    """What a corpus was made of, and what was left out.

    Attributes:
        num_files: Text files and tokenised files.
        num_documents: In training and held-out part together.
        num_tokens: Likewise, separators included.
        num_empty: Documents (files, lines of a ``.jsonl``) without text, which are left out.
        num_ignored: Files of other suffixes in the given folders.
    """

    num_files: int
    num_documents: int
    num_tokens: int
    num_empty: int
    num_ignored: int

    def __str__(self) -> str:
        left_out = [
            f"{count} {what}"
            for count, what in (
                (self.num_empty, "empty documents left out"),
                (self.num_ignored, "files of other kinds ignored"),
            )
            if count
        ]
        documents = f"{self.num_documents:,} documents of {self.num_tokens:,} tokens"
        return ", ".join([f"{documents} from {self.num_files:,} files", *left_out])


class Data(NamedTuple):
    """A corpus in its two parts, and what it was made of."""

    train: Corpus
    held_out: Corpus
    summary: Summary


def load(
    paths: Sequence[str | Path] | None,
    cache: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    text_field: str = "text",
    form: Form = "text",
    template: Template | None = None,
) -> Data:
    """Open the data of a run.

    Text is tokenised once, to a file in ``cache`` whose name is made of the text files' names, sizes and
    times and of the tokenizer; a second call opens that file. Tokenised files are opened where they are. Text
    documents come before those of tokenised files.

    Args:
        paths: Files and folders as ``find_sources`` takes them; None or nothing is the standard library.
        cache: Folder for the tokenised text, such as the run's.
        tokenizer: For the text; tokenised files must have been made with the same. None is bytes for text,
            and whatever they were made with for tokenised files.
        text_field: Where a line of a ``.jsonl`` has its text.
        form: What the lines of a ``.jsonl`` are; of other than text, only answers are learned.
        template: Writes conversations, for ``form="chat"``.

    Raises:
        DataError: Anything is wrong with the data; see ``find_sources``, ``tokenize``, ``open_tokens``,
            ``split``.
    """
    if isinstance(paths, str | Path):
        raise DataError(f"paths is {paths!r}: give a list of files and folders")
    sources = find_sources(paths) if paths else standard_library()
    files: list[TokenFile] = []
    if sources.texts:
        encoder = tokenizer or ByteTokenizer()
        path = Path(cache) / f"corpus-{_identity(sources, encoder, text_field, form, template)}.bin"
        if not path.exists():
            _write(sources, path, encoder, text_field, form, template, None)
        files.append(open_tokens(path))
    files += map(open_tokens, sources.tokens)
    if tokenizer is not None:
        for file in files:
            if file.header.tokenizer != tokenizer.fingerprint:
                raise DataError(
                    f"{file.path} was made with the tokenizer {file.header.tokenizer}, not with the given "
                    f"{tokenizer.fingerprint}; give that one or tokenise again"
                )
    corpus = make_corpus(files)
    summary = Summary(
        num_files=len(sources.texts) + len(sources.tokens),
        num_documents=corpus.num_documents,
        num_tokens=corpus.num_tokens,
        num_empty=sum(file.header.num_empty for file in files),
        num_ignored=sources.num_ignored,
    )
    return Data(*split(corpus), summary)


def tokenize(
    sources: Sources,
    out_path: str | Path,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    form: Form = "text",
    template: Template | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Write the text of ``sources`` as a tokenised file, streaming.

    The file appears when it is complete: a kill leaves at most a hidden ``.partial`` file beside it.

    Args:
        sources: From ``find_sources`` or ``standard_library``; text only.
        out_path: A ``.bin`` that does not exist yet.
        tokenizer: What makes the ids.
        text_field: Where a line of a ``.jsonl`` has its text.
        form: As for ``load``.
        template: As for ``load``.
        progress: Called after each document with the number of documents read so far.

    Returns:
        What was written, and what was left out.

    Raises:
        DataError: ``out_path`` exists or has another suffix; a source is tokenised already, is not readable,
            not UTF-8 or not what its suffix says; all text is empty; the disk is full.
    """
    out_path = Path(out_path)
    if out_path.suffix != ".bin":
        raise DataError(f"{out_path} has the suffix {out_path.suffix!r}; tokenised files are called .bin")
    if out_path.exists():
        raise DataError(f"{out_path} exists; remove it or choose another name")
    if sources.tokens:
        raise DataError(f"{sources.tokens[0]} is tokenised already; give text")
    header = _write(sources, out_path, tokenizer, text_field, form, template, progress)
    return Summary(header.num_files, header.num_documents, header.num_tokens, header.num_empty, sources.num_ignored)


def _write(
    sources: Sources,
    path: Path,
    tokenizer: Tokenizer,
    text_field: str,
    form: Form,
    template: Template | None,
    progress: Callable[[int], None] | None,
) -> Header:
    def plain() -> Iterator[TokenDocument]:
        for document in read_documents(sources.texts, text_field):
            yield TokenDocument(document.name, tokenizer.encode_pieces(document.pieces))

    def examples() -> Iterator[TokenDocument]:
        encode = tokenizer.encode
        special_tokens: tuple[str, ...] = ()
        if template is not None and isinstance(tokenizer, JsonTokenizer):
            encode, special_tokens = tokenizer.encode_special, tokenizer.special_tokens
        for name, spans in read_examples(sources.texts, form, template, special_tokens):
            yield TokenDocument(name, iter((encode_spans(spans, encode),)))

    def documents() -> Iterator[TokenDocument]:
        for count, document in enumerate(plain() if form == "text" else examples(), start=1):
            yield document
            if progress is not None:
                progress(count)

    return write_tokens(
        path,
        documents(),
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        tokenizer=tokenizer.fingerprint,
        num_files=len(sources.texts),
        marked=form != "text",
    )


def _identity(sources: Sources, tokenizer: Tokenizer, text_field: str, form: Form, template: Template | None) -> str:
    """Names the tokenised form of text files without reading them."""
    digest = hashlib.blake2b(digest_size=8)
    written = None if template is None else template.fingerprint
    digest.update(json.dumps([VERSION, tokenizer.fingerprint, text_field, form, written]).encode())
    for path in sources.texts:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        digest.update(json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()
