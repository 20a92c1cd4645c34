"""Examples to learn an answer from: prompts with completions, and conversations, of which only answers are learned."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ._binary import UNLEARNED
from ._errors import DataError
from ._sources import read_lines, text_of

Form = Literal["text", "completion", "chat"]
"""What the lines of a ``.jsonl`` hold: text; ``prompt`` and ``completion``; or ``messages`` of roles and contents."""


class Span(NamedTuple):
    """A stretch of an example."""

    text: str
    is_learned: bool


class Template(Protocol):
    """Writes conversations as text."""

    @property
    def fingerprint(self) -> str:
        """Names the mapping from conversations to text."""

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The text of ``messages``, and what stands before the next answer.

        Raises:
            DataError: The template refuses them.
        """


class ChatTemplate:
    """The Jinja template of a tokenizer, run in a sandbox: it comes with the model and is not trusted.

    Args:
        tokenizer: The tokenizer's JSON file; the template is beside it, in ``chat_template.jinja`` or in
            ``tokenizer_config.json``.

    Raises:
        DataError: There is none, or it is no template.
    """

    def __init__(self, tokenizer: Path) -> None:
        # Late, because only conversations need it.
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        config = _tokenizer_config(tokenizer)
        try:
            source: Any = tokenizer.with_name("chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            source = config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {tokenizer.with_name('chat_template.jinja')}: {error}") from error
        if not isinstance(source, str):
            raise DataError(
                f"there is no chat template beside {tokenizer}: neither chat_template.jinja nor a text in "
                "tokenizer_config.json; give prompts and completions instead"
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._tokens = {name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template beside {tokenizer} is none: {_one_line(error)}") from error
        identity = json.dumps([source, self._tokens]).encode()
        self.fingerprint: str = hashlib.blake2b(identity, digest_size=16).hexdigest()

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The text of ``messages``, and what stands before the next answer."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._tokens
            )
        # A template is a program: it may fail in any way.
        except Exception as error:
            raise DataError(f"the chat template refuses the conversation: {_one_line(error)}") from error


def read_examples(
    texts: Iterable[Path], form: Form, template: Template | None, special_tokens: Sequence[str] = ()
) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """The examples of ``.jsonl`` files: a name for messages, and spans that make the document when joined.

    Of a conversation, what the template writes for an answer is learned, its end included.

    Args:
        texts: Files, all ``.jsonl`` (also ``.gz``).
        form: ``"completion"`` or ``"chat"``.
        template: For conversations.
        special_tokens: What no content may hold: it would pass for the template's.

    Raises:
        DataError: While iterating: a file of another kind, a line that is no such example, a conversation without an
            answer or that the template writes otherwise when it goes on.
    """
    for path in texts:
        if ".jsonl" not in path.suffixes[-2:]:
            raise DataError(f"{path} holds no examples: the format {form!r} is of .jsonl files")
        for name, fields in read_lines(path):
            if fields is None:
                yield name, ()
            elif template is None:
                prompt, completion = (text_of(name, fields, field) for field in ("prompt", "completion"))
                yield name, (Span(prompt, False), Span(completion, True))
            else:
                yield name, tuple(_conversation(name, fields, template, special_tokens))


def encode_spans(spans: Iterable[Span], encode: Callable[[str], NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Token ids of an example, each span by itself, as a prompt is when it is answered: uint32 [tokens].

    Args:
        spans: Of the example.
        encode: Text to ids.

    Returns:
        Ids, with the bit ``UNLEARNED`` where the span is not learned.
    """
    parts = [encode(span.text) | np.uint32(0 if span.is_learned else UNLEARNED) for span in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _conversation(name: str, fields: Any, template: Template, special_tokens: Sequence[str]) -> Iterator[Span]:
    messages = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(messages, list) or not messages:
        there = ", ".join(map(repr, fields)) if isinstance(fields, dict) else "no fields"
        raise DataError(f"{name} has no list in the field 'messages'; it has {there:.200}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise DataError(f"{name}: message {number} is {message!r:.100}, expected a role and a content")
        for field in ("role", "content"):
            text = text_of(f"{name}: message {number}", message, field)
            if held := [token for token in special_tokens if token in text]:
                raise DataError(f"{name}: message {number} holds the special token {held[0]!r}; write it otherwise")
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{name} has no message of the role 'assistant': there is nothing to learn")
    try:
        whole, done = template.render(messages, False), 0
        for number in answers:
            before, after = template.render(messages[:number], True), template.render(messages[: number + 1], False)
            if not (done <= len(before) <= len(after) and after.startswith(before) and whole.startswith(after)):
                raise DataError(f"the chat template writes message {number} otherwise when the conversation goes on")
            yield Span(whole[done : len(before)], False)
            yield Span(whole[len(before) : len(after)], True)
            done = len(after)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    yield Span(whole[done:], False)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _tokenizer_config(tokenizer: Path) -> dict[str, Any]:
    path = tokenizer.with_name("tokenizer_config.json")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {_one_line(error)}") from error
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    """A special token as the configuration has it: its text, or an object around it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
