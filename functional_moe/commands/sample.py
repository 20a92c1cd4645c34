"""``functional-moe sample``: text from a trained run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..data import load_tokenizer
from ..model import init_balance
from ..parameters import abstract
from ..sampling import generate
from ..state_file import latest_state, load_state
from .progress import printable
from .settings import SettingsError, read_settings
from .train import SETTINGS_FILE, check_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Continues a prompt with the model of a run."""

    run: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder of the run."""
    prompt: str = ""
    """What the text starts with; nothing starts a document."""
    tokens: int = 256
    """Most tokens to write; the text may end before."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_p: float = 0.95
    """Considers the fewest tokens whose probabilities reach this sum."""
    seed: int = 0
    """Of the random numbers."""


def sample(settings: SampleSettings) -> int:
    """Prints the prompt and its continuation."""
    run = read_settings(settings.run / SETTINGS_FILE)
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.separator_token)
    check_tokenizer(settings.run, tokenizer)
    template: dict[str, Any] = {"params": abstract(run.model), "balance": init_balance(run.model)}
    state = load_state(latest_state(settings.run), template, run.model, partial=True)
    try:
        prompt = [tokenizer.separator, *map(int, tokenizer.encode(settings.prompt))]
    except UnicodeEncodeError as error:
        raise SettingsError(f"--prompt {settings.prompt!r} is not UTF-8") from error
    if not 0 <= settings.seed < 2**63:
        raise SettingsError(f"--seed {settings.seed}: must lie in 0..2^63 - 1")
    try:
        tokens = generate(
            state["params"],
            state["balance"],
            run.model,
            prompt,
            settings.tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            stop=tokenizer.separator,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
    print(printable(settings.prompt + tokenizer.decode(tokens)))
    return 0
