"""``functional-moe import`` and ``export``: runs from Hugging Face's model directories, and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from .. import hf
from ..data import check_vocabulary, load_tokenizer
from ..model import init_balance
from ..parameters import abstract
from ..state_file import StateError, latest_state, load_state, write_state, writing
from .settings import DataSettings, SettingsError, TrainSettings, read_settings, to_json
from .train import DATA_FILE, SETTINGS_FILE, check_tokenizer

TOKENIZER_FILE = "tokenizer.json"
# What may belong to a tokenizer besides; it goes along unread, but for the chat template.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tiktoken.model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Makes a run of a released model, for ``sample`` and ``train --init-from``."""

    model_dir: tyro.conf.Positional[Path]
    """Folder with config.json and safetensors files, as Hugging Face has them."""
    out: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Folder of the run to make; it must not exist."""
    separator_token: str | None = None
    """The tokenizer's special token that stands between documents; nothing takes a well-known one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Writes the model of a run as a folder that transformers loads."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    out: Annotated[Path, tyro.conf.arg(metavar="MODEL_DIR")]
    """Folder to make; it must not exist."""
    model_type: str | None = None
    """Hugging Face's name of the architecture; nothing takes the one it was imported as, or the first that fits."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights in the files."""
    max_shard_size: int = 5_000_000_000
    """Bytes of one file."""


def import_model(settings: ImportSettings) -> int:
    """Makes the run's folder: the state without an optimizer's part, and the tokenizer when there is one."""
    source = settings.model_dir
    hf_config = hf.read_json(source / hf.CONFIG_FILE)
    config = hf.config_from_hf(hf_config)
    tokenizer_file = source / TOKENIZER_FILE
    has_tokenizer = tokenizer_file.exists()
    if not has_tokenizer and (other := next((name for name in _OTHER_TOKENIZERS if (source / name).exists()), None)):
        raise SettingsError(f"{source} has {other} but no {TOKENIZER_FILE}; convert it with transformers")
    tokenizer = load_tokenizer(tokenizer_file if has_tokenizer else None, settings.separator_token)
    if has_tokenizer:
        check_vocabulary(str(tokenizer_file), tokenizer.vocab_size, config.vocab_size)

    out = settings.out.absolute()
    run = TrainSettings(
        preset=str(hf_config["model_type"]),
        model=config,
        data=DataSettings(
            tokenizer=out / TOKENIZER_FILE if has_tokenizer else None, separator_token=settings.separator_token
        ),
        seq_len=min(256, config.max_position_embeddings),
        out=out,
    )
    identity = {"fingerprint": "", "tokenizer": tokenizer.fingerprint, "summary": f"imported from {source}"}
    with hf.appearing(out) as folder, writing(out):
        model = hf.load(source)
        for name in (TOKENIZER_FILE, *_BESIDE) if has_tokenizer else ():
            if (source / name).exists():
                (folder / name).write_bytes((source / name).read_bytes())
        (folder / hf.GENERATION_FILE).write_text(_json(_generation(source, hf_config)), encoding="utf-8")
        (folder / DATA_FILE).write_text(_json(identity), encoding="utf-8")
        (folder / SETTINGS_FILE).write_text(to_json(run), encoding="utf-8")
        write_state(folder, 0, {"params": model.params, "balance": model.balance}, config)
    told = f"{out}: {run.preset}, {config.num_params:,} parameters, {config.num_active_params:,} active"
    if model.left_out:
        told += f"; left out {len(model.left_out)} tensors that predict later tokens, {model.left_out[0]} and on"
    print(told if has_tokenizer else f"{told}; without a tokenizer: text is read as bytes")
    return 0


def export_model(settings: ExportSettings) -> int:
    """Writes the folder."""
    run = read_settings(settings.run / SETTINGS_FILE)
    hf.check_free(settings.out)  # before the weights are read
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.separator_token)
    check_tokenizer(settings.run, tokenizer)
    template: dict[str, Any] = {"params": abstract(run.model), "balance": init_balance(run.model)}
    state = load_state(latest_state(settings.run), template, run.model, partial=True)
    beside, generation = {}, {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
    if run.data.tokenizer is not None:
        beside[TOKENIZER_FILE] = _read(run.data.tokenizer)
        known = [run.data.tokenizer.with_name(name) for name in _BESIDE]
        beside |= {path.name: _read(path) for path in known if path.exists()}
        if (path := run.data.tokenizer.with_name(hf.GENERATION_FILE)).exists():
            generation = hf.read_json(path)
    hf.save(
        settings.out,
        run.model,
        state["params"],
        state["balance"],
        model_type=settings.model_type or (run.preset if run.preset in hf.FAMILIES else None),
        dtype=getattr(torch, settings.dtype),
        max_shard_size=settings.max_shard_size,
        generation=generation,
        beside=beside,
    )
    print(f"{settings.out}: {run.model.num_params:,} parameters in {settings.dtype}")
    return 0


def _generation(source: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """What ends a text, from its own file or as older models have it."""
    if (source / hf.GENERATION_FILE).exists():
        return hf.read_json(source / hf.GENERATION_FILE)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: hf_config[name] for name in names if name in hf_config}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}") from error
