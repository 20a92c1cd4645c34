"""Examples: only answers are targets, and nothing that a line holds can pass for what a template writes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from functional_moe import __main__ as command_line
from functional_moe.cross_entropy import IGNORE_INDEX
from functional_moe.data import (
    ByteTokenizer,
    ChatTemplate,
    DataError,
    Span,
    batch_at,
    load,
    load_tokenizer,
    make_corpus,
    open_tokens,
    read_examples,
    windows_for_eval,
)
from functional_moe.data._binary import UNLEARNED, TokenDocument, write_tokens
from functional_moe.data._examples import encode_spans

# In the manner of Qwen's and ChatML's.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
WORDS = ["system", "user", "assistant", *(f"w{number}" for number in range(20))]
CONVERSATION = {
    "messages": [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "w5 w6"},
    ]
}


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer of words with the special tokens of the template, and the template beside it."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer" / "tokenizer.json"


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def spans_of(path: Path, form: Any, template: Any = None, special: tuple[str, ...] = ()) -> list[tuple[Span, ...]]:
    return [spans for _, spans in read_examples([path], form, template, special)]


def test_completions_are_learned_and_prompts_are_not(tmp_path: Path) -> None:
    lines = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(100, 160)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    data = load([path], tmp_path / "cache", form="completion")
    assert data.train.is_marked
    batch = batch_at(data.train, 0, batch_size=4, seq_len=64, seed=0)
    for tokens, targets, segments in zip(*batch.values(), strict=True):
        assert int(tokens.max()) <= 256
        for position, target in enumerate(targets.tolist()):
            document = tokens[segments == segments[position]].tolist()
            within = position - int((segments == segments[position]).nonzero()[0])
            if document[0] != 256:
                continue  # its beginning is in another window
            # The separator, six bytes of prompt, three of completion; then the separator of the next is learned too.
            assert (target == IGNORE_INDEX) == (within < 6), (document, within, target)
            if target != IGNORE_INDEX and position + 1 < len(tokens):
                assert target == int(tokens[position + 1])


def test_a_conversation_is_what_transformers_writes_and_answers_are_learned(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", CONVERSATION)
    template, tokenizer = ChatTemplate(tokenizer_file), load_tokenizer(tokenizer_file)
    (spans,) = spans_of(path, "chat", template)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_file.parent)
    assert "".join(span.text for span in spans) == theirs.apply_chat_template(CONVERSATION["messages"], tokenize=False)
    assert [span.text for span in spans if span.is_learned] == ["w3 <|im_end|> ", "w5 w6 <|im_end|> "]
    ids = encode_spans(spans, tokenizer.encode_special)  # type: ignore[attr-defined]
    expected = theirs.apply_chat_template(CONVERSATION["messages"], return_dict=False)
    assert (ids & (UNLEARNED - 1)).tolist() == list(expected)
    learned = ids[ids < UNLEARNED].tolist()
    assert learned == theirs.encode("w3 <|im_end|> w5 w6 <|im_end|>")
    # The tokenizer goes on reading special tokens in plain text as text.
    assert tokenizer.encode("<|im_end|>").tolist() != theirs.encode("<|im_end|>")


def test_a_file_of_conversations_trains(tmp_path: Path, tokenizer_file: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[CONVERSATION] * 40)
    small = """--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2
    --model.num-key-value-heads 1 --model.head-dim 8 --model.num-experts 4 --model.moe-intermediate-size 12
    --model.vocab-size 26 --seq-len 32 --batch-size 2 --eval-windows 2 --sample-tokens 0 --steps 2""".split()
    arguments = ["--data", path, "--format", "chat", "--tokenizer", tokenizer_file, "--out", tmp_path / "run"]
    assert command_line.run(["train", *small, *map(str, arguments)]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["finite"] for line in metrics)
    out = tmp_path / "a.bin"
    arguments = [path, "--out", out, "--format", "chat", "--tokenizer", tokenizer_file]
    assert command_line.run(["tokenize", *map(str, arguments)]) == 0
    assert open_tokens(out).header.marked


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 255), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=9)
)
def test_marks_follow_their_tokens(documents: list[list[tuple[int, bool]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pieces = [
            TokenDocument(
                str(number),
                iter((np.array([token | (0 if learned else UNLEARNED) for token, learned in doc], np.uint32),)),
            )
            for number, doc in enumerate(documents)
        ]
        path = Path(folder) / "a.bin"
        write_tokens(path, pieces, vocab_size=257, separator=256, tokenizer="bytes", marked=True)
        corpus = make_corpus([open_tokens(path)])
        stream = [pair for doc in documents for pair in ((256, True), *doc)]
        (batch,) = windows_for_eval(corpus, 1, seq_len=len(stream) - 1, batch_size=1)
        assert batch["tokens"][0].tolist() == [token for token, _ in stream[:-1]]
        expected = [token if learned else IGNORE_INDEX for token, learned in stream[1:]]
        assert batch["targets"][0].tolist() == expected


@pytest.mark.parametrize(
    ("line", "form", "why"),
    [
        ({"prompt": "a"}, "completion", "no text in the field 'completion'"),
        ({"prompt": "a", "completion": 3}, "completion", "which is no text"),
        ([1], "completion", "no fields"),
        ("{", "completion", "not JSON"),
        ({"text": "a"}, "chat", "no list in the field 'messages'; it has 'text'"),
        ({"messages": []}, "chat", "no list"),
        ({"messages": [3]}, "chat", "message 0 is 3"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "chat", "message 0 is"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "chat", "message 0 has ['a']"),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat", "no message of the role 'assistant'"),
        (
            {"messages": [{"role": "assistant", "content": "w1 <|im_end|> w2"}]},
            "chat",
            "the special token '<|im_end|>'",
        ),
    ],
)
def test_a_line_that_is_no_example_is_named(
    tmp_path: Path, tokenizer_file: Path, line: Any, form: Any, why: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", line)
    template = ChatTemplate(tokenizer_file) if form == "chat" else None
    special = load_tokenizer(tokenizer_file).special_tokens  # type: ignore[attr-defined]
    with pytest.raises(DataError) as raised:
        spans_of(path, form, template, special)
    assert "a.jsonl:1" in str(raised.value)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for", "is none"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages | length }}", "otherwise when the conversation goes on"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path: Path, tokenizer_file: Path, template: str, why: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", CONVERSATION)
    tokenizer_file.with_name("chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=why) as raised:
        spans_of(path, "chat", ChatTemplate(tokenizer_file))
    assert "\n" not in str(raised.value)


def test_no_template_and_other_files_are_named(tmp_path: Path, tokenizer_file: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        tokenizer_file.with_name(name).unlink(missing_ok=True)
    with pytest.raises(DataError, match="there is no chat template beside"):
        ChatTemplate(tokenizer_file)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.txt holds no examples"):
        spans_of(tmp_path / "a.txt", "completion")


def test_a_template_in_the_configuration_serves_too(tokenizer_file: Path) -> None:
    tokenizer_file.with_name("chat_template.jinja").unlink(missing_ok=True)
    config = tokenizer_file.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert ChatTemplate(tokenizer_file).render([], False) == "<s>"


def test_unmarked_text_is_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text that is long enough")
    data = load([tmp_path / "a.txt"], tmp_path / "cache", tokenizer=ByteTokenizer())
    assert not data.train.is_marked
    batch = batch_at(data.train, 0, batch_size=1, seq_len=8, seed=0)
    assert torch.equal(batch["targets"][0, :-1], batch["tokens"][0, 1:])
