"""What a run is made of: settings that can be written beside it and held against those of a later call."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from ..config import MoEConfig, preset
from ..data import ChatTemplate, DataError, Form, Template
from ..hf import HFError
from ..memory import HBM, HOST
from ..optimizers import OptimizerSettings
from ..parallel import CheckpointError
from ..sharding import GATHER_DTYPES, GatherDtype
from ..state_file import StateError


class SettingsError(ValueError):
    """Settings that make no run; the message is one line."""


USER_ERRORS = (SettingsError, DataError, StateError, CheckpointError, HFError)
"""What the user can mend: told in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is learned from."""

    paths: Annotated[tuple[Path, ...], tyro.conf.arg(name="data", metavar="PATH ...")] = ()
    """Files or folders of .txt, .md, .py, .jsonl (each also .gz), or tokenised .bin files. Nothing: the sources of
    the Python standard library, as bytes."""
    text_field: str = "text"
    """The field of a .jsonl line that holds the text."""
    format: Form = "text"
    """What .jsonl lines hold: text; completion: a prompt and a completion; chat: messages, each a role and a content,
    which the tokenizer's chat template writes. Of the last two only completions and the assistant's messages are
    learned."""
    tokenizer: Path | None = None
    """A ``tokenizers`` JSON file. Without one, text is read as bytes."""
    separator_token: str | None = None
    """The tokenizer's special token that stands between documents."""


def chat_template(form: Form, tokenizer: Path | None) -> Template | None:
    """The template that a format needs.

    Raises:
      SettingsError: conversations without a tokenizer.
      DataError: the tokenizer has no template.
    """
    if form != "chat":
        return None
    if tokenizer is None:
        raise SettingsError("--format chat: bytes have no chat template; give a tokenizer")
    return ChatTemplate(tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Trains a Mixture-of-Experts language model and shows that it learned.

    With no flags it trains the tiny preset on the sources of the Python standard library, in a few minutes on two
    cores.
    """

    preset: str = "tiny"
    """Named model; ``--model.*`` changes single fields of it."""
    model: MoEConfig = dataclasses.field(default_factory=lambda: preset("tiny"))
    """The model."""
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    """What to minimise with."""
    data: Annotated[DataSettings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DataSettings)
    """What to learn from."""
    steps: int = 300
    """Optimizer steps of the whole run; the schedule spans them."""
    batch_size: int = 32
    """Sequences per step."""
    seq_len: int = 256
    """Tokens per sequence."""
    accumulate: int = 1
    """Microbatches per step: the same result in less memory."""
    expert_parts: int | None = None
    """Parts in which a layer's tokens go through its experts, so that their rows take less memory; every part is
    rounded by itself. By default 1, and with --hbm-budget the fewest of 1, 2, 4 and 8 with which a schedule fits."""
    fsdp: int = 1
    """Processes that share the parameters, started by torchrun: replicate x fsdp x ep in all."""
    ep: int = 1
    """Processes that share the experts, neighbours on the fastest links; divides the number of experts."""
    replicate: int = 1
    """Copies of the whole model, each on fsdp x ep processes."""
    gather_dtype: GatherDtype | None = None
    """In which matrices travel between processes; by default as they are computed with. float8: e4m3, with a scale for
    each block of 128, half the bytes of bfloat16. One process rounds its matrices alike."""
    hbm_budget: Annotated[str | None, tyro.conf.arg(metavar="BYTES")] = None
    """Memory that a training step may take on each process, such as 2GiB, 800MB or plain bytes: parameters, optimizer
    state, batch, gradients, activations, gather buffers, and the working memory of segments and of the optimizer. What
    does not fit is recomputed, or goes to --host-budget. Not counted: Python and torch themselves, what an operator
    allocates within itself, data, and the copy of the state that is being saved."""
    host_budget: Annotated[str | None, tyro.conf.arg(metavar="BYTES")] = None
    """Further memory of each process, to which activations may be moved, and where the optimizer's state may lie; on a
    CPU it is memory like the other, counted apart. Nothing: they stay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute: auto takes the GPU where torch sees one; of several processes each takes its own."""
    timeout: float = 600.0
    """Seconds that processes wait for one of them before the run ends with its name."""
    seed: int = 0
    """Of the initial parameters and of the order of the data."""
    eval_every: int = 50
    """Steps between validations."""
    eval_windows: int = 128
    """Held-out sequences per validation, the same ones each time."""
    max_refused: int = 10
    """Steps in a row whose loss or gradient is not finite before the run gives up."""
    sample_tokens: int = 240
    """Length of the sample at the end; 0 for none."""
    out: Path | None = None
    """Folder of the run; must not hold one already, unless it is resumed. Default: the next free runs/PRESET-N."""
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Folder of a run, such as an imported one, whose model, tokenizer and weights to start from."""
    resume: bool = False
    """Continue the run in ``--out``. Its own settings are taken; flags given besides must agree with them."""
    save_every: int = 100
    """Steps between saved states; one is always saved at the end and on Ctrl-C."""
    stop_after: int | None = None
    """Stop after this step as if interrupted; ``--resume`` goes on from there."""

    profile: int | None = None
    """Trace this many steps with torch.profiler, after the first one of this start, which warms up; the trace, named by
    segments and instructions, is profile.json in the run's folder, for ui.perfetto.dev."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "seq_len",
            "accumulate",
            "eval_every",
            "eval_windows",
            "save_every",
            "fsdp",
            "ep",
            "replicate",
        ):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.expert_parts is not None and self.expert_parts < 1:
            raise SettingsError(f"--expert-parts {self.expert_parts}: must be at least 1")
        if self.max_refused < 1:
            raise SettingsError(f"--max-refused {self.max_refused}: must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"--seed {self.seed}: must lie in 0..2^63 - 1")
        if self.sample_tokens < 0:
            raise SettingsError(f"--sample-tokens {self.sample_tokens}: must be at least 0")
        if self.stop_after is not None and self.stop_after < 1:
            raise SettingsError(f"--stop-after {self.stop_after}: must be at least 1")
        if self.profile is not None and self.profile < 1:
            raise SettingsError(f"--profile {self.profile}: must be at least 1")
        check_profile(self, 0)
        if self.batch_size % self.accumulate:
            raise SettingsError(f"--accumulate {self.accumulate}: does not divide --batch-size {self.batch_size}")
        if self.accumulate > 1 and self.batch_size % (self.accumulate * self.ranks):
            raise SettingsError(
                f"--accumulate {self.accumulate}: does not divide the rows that each of {self.ranks} processes has of "
                f"--batch-size {self.batch_size}"
            )
        if self.model.num_moe_layers and self.model.num_experts % self.ep:
            raise SettingsError(f"--ep {self.ep}: does not divide model.num_experts {self.model.num_experts}")
        if not 0 < self.timeout < 1e6:
            raise SettingsError(f"--timeout {self.timeout:g}: must lie between 0 and 1e6 seconds")
        if self.host_budget is not None and self.hbm_budget is None:
            raise SettingsError(f"--host-budget {self.host_budget}: has no use without --hbm-budget; give both")
        _ = self.budgets  # raises for what is no size
        if self.seq_len > self.model.max_position_embeddings:
            raise SettingsError(
                f"--seq-len {self.seq_len}: exceeds the model's max_position_embeddings "
                f"{self.model.max_position_embeddings}"
            )

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.replicate * self.fsdp * self.ep

    @property
    def gathered_in(self) -> torch.dtype | None:
        """``gather_dtype`` as torch knows it."""
        return None if self.gather_dtype is None else GATHER_DTYPES[self.gather_dtype]

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes of each tier that has a budget."""
        given = {HBM: ("--hbm-budget", self.hbm_budget), HOST: ("--host-budget", self.host_budget)}
        return {tier: _parse_bytes(flag, text) for tier, (flag, text) in given.items() if text is not None}


def check_profile(settings: TrainSettings, done: int) -> None:
    """Raises ``SettingsError`` unless enough steps are left after ``done`` to warm up and to trace."""
    last = settings.steps if settings.stop_after is None else min(settings.steps, settings.stop_after)
    if settings.profile is not None and last - done < settings.profile + 1:
        raise SettingsError(
            f"--profile {settings.profile}: {max(0, last - done)} steps are left, and one before the trace warms up"
        )


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTPE", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTPE", 1)},
}


def _parse_bytes(flag: str, text: str) -> int:
    """``2GiB``, ``1.5 GB``, ``800MB`` or ``1000`` in bytes."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or match[2].upper() not in _UNITS:
        raise SettingsError(f"{flag} {text}: is no size in bytes; write it as 2GiB, 800MB or 1000000")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= LARGEST_BUDGET:
        raise SettingsError(f"{flag} {text}: must be above 0 and at most 1 EiB")
    return int(size)


LARGEST_BUDGET = 2**60
"""Bytes above which a budget is taken for a slip."""

# What may differ between a run and its continuation: it changes no value the run computes, but for rounding.
_FREE = frozenset(
    {
        "out",
        "resume",
        "save_every",
        "stop_after",
        "max_refused",
        "sample_tokens",
        "fsdp",
        "ep",
        "replicate",
        "timeout",
        "device",
        "hbm_budget",
        "host_budget",
        "profile",
    }
)


def resolved(settings: TrainSettings) -> TrainSettings:
    """The settings with absolute paths to the data, so that a run can be resumed from another folder."""
    tokenizer = settings.data.tokenizer
    data = dataclasses.replace(
        settings.data,
        paths=tuple(path.absolute() for path in settings.data.paths),
        tokenizer=None if tokenizer is None else tokenizer.absolute(),
    )
    init_from = None if settings.init_from is None else settings.init_from.absolute()
    return dataclasses.replace(settings, data=data, init_from=init_from)


def to_json(settings: TrainSettings) -> str:
    """The settings as JSON text."""
    return json.dumps(dataclasses.asdict(settings), indent=2, default=str) + "\n"


def read_settings(path: Path) -> TrainSettings:
    """The settings that ``to_json`` wrote to ``path``.

    Raises:
      StateError: the file is missing, or not such settings.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        data = values.pop("data")
        paths = tuple(map(Path, data.pop("paths")))
        tokenizer = data.pop("tokenizer")
        out, init_from = values.pop("out"), values.pop("init_from")
        return TrainSettings(
            model=MoEConfig(**values.pop("model")),
            optimizer=OptimizerSettings(**values.pop("optimizer")),
            data=DataSettings(paths=paths, tokenizer=Path(tokenizer) if tokenizer else None, **data),
            out=Path(out) if out else None,
            init_from=Path(init_from) if init_from else None,
            **values,
        )
    except FileNotFoundError as error:
        raise StateError(f"{path.parent} holds no run: there is no {path.name} in it") from error
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise StateError(f"{path} does not describe a run: {str(error).splitlines()[0]}") from error


def check_same_run(stored: TrainSettings, given: TrainSettings) -> None:
    """Raises ``SettingsError``, naming each field that differs, unless ``given`` continues ``stored``."""
    differing = [
        f"{name} is {then} there and {now} here"
        for (name, then), now in zip(flat(stored).items(), flat(given).values(), strict=True)
        if then != now and name not in _FREE
    ]
    if differing:
        raise SettingsError(f"--resume: the run has other settings: {'; '.join(differing)}")


def flat(settings: object, prefix: str = "") -> dict[str, Any]:
    """Every single setting by its dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found
