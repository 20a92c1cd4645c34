"""``functional-moe tokenize``: text to a tokenised file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..data import Form, find_sources, load_tokenizer, standard_library
from ..data import tokenize as write_tokens
from .settings import chat_template


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """Writes text as a tokenised .bin file, which ``train --data`` takes."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Files or folders of .txt, .md, .py, .jsonl (each also .gz). Nothing: the Python standard library's sources."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.bin")]
    """The file to write; it must not exist."""
    text_field: str = "text"
    """The field of a .jsonl line that holds the text."""
    format: Form = "text"
    """What .jsonl lines hold: text, completion (a prompt and a completion) or chat (messages)."""
    tokenizer: Path | None = None
    """A ``tokenizers`` JSON file. Without one, text is written as bytes."""
    separator_token: str | None = None
    """The tokenizer's special token that stands between documents."""


def tokenize(settings: TokenizeSettings) -> int:
    """Writes the file and says what is in it."""
    tokenizer = load_tokenizer(settings.tokenizer, settings.separator_token)
    template = chat_template(settings.format, settings.tokenizer)
    sources = find_sources(settings.paths) if settings.paths else standard_library()
    with Console(stderr=True).status("tokenising") as status:
        summary = write_tokens(
            sources,
            settings.out,
            tokenizer,
            text_field=settings.text_field,
            form=settings.format,
            template=template,
            progress=lambda documents: status.update(f"tokenising: {documents:,} documents"),
        )
    print(f"{settings.out}: {summary}, vocabulary {tokenizer.vocab_size}")
    return 0
