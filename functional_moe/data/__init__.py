"""Text as batches: sources, tokenizers, tokenised files, and windows as a pure function of seed and step.

>>> data = load(None, cache="run")  # the standard library, as bytes
>>> batch = batch_at(data.train, step=0, batch_size=8, seq_len=256, seed=0)
>>> sorted(batch)
['segment_ids', 'targets', 'tokens']
"""

from ._binary import Header, TokenDocument, TokenFile, open_tokens, write_tokens
from ._corpus import Corpus, make_corpus, split
from ._errors import DataError
from ._examples import ChatTemplate, Form, Span, Template, read_examples
from ._load import Data, Summary, load, tokenize
from ._sources import Sources, TextDocument, find_sources, read_documents, standard_library
from ._tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
)
from ._windows import batch_at, rank_rows, windows_for_eval

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "Corpus",
    "Data",
    "DataError",
    "Form",
    "Header",
    "JsonTokenizer",
    "Sources",
    "Span",
    "Summary",
    "Template",
    "TextDocument",
    "TokenDocument",
    "TokenFile",
    "Tokenizer",
    "batch_at",
    "check_vocabulary",
    "find_sources",
    "load",
    "load_tokenizer",
    "make_corpus",
    "open_tokens",
    "rank_rows",
    "read_documents",
    "read_examples",
    "split",
    "standard_library",
    "tokenize",
    "windows_for_eval",
    "write_tokens",
]
