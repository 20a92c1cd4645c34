"""``functional-moe train``: data, steps, validation, states on disk, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from ..bigram import MAX_VOCABULARY, fit_bigram
from ..chain import loss_fn
from ..config import MoEConfig
from ..cross_entropy import IGNORE_INDEX
from ..data import Corpus, Data, Tokenizer, batch_at, check_vocabulary, load, load_tokenizer, windows_for_eval
from ..flops import measure_matmul_rate, train_flops_per_token
from ..generate import generate
from ..model import Batch, init_balance
from ..optim import GradientTransformation
from ..optimizers import make_optimizer
from ..parameters import abstract, init
from ..state_file import StateError, load_state, save_state, write_text, writing
from ..train_step import StepMetrics, TrainState, init_state, make_train_step
from .progress import Progress, printable, save_picture
from .settings import SettingsError, TrainSettings, chat_template, check_same_run, read_settings, resolved, to_json

SETTINGS_FILE = "settings.json"
LOCK_FILE = ".lock"
DATA_FILE = "data.json"
STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"
SAMPLE_FILE = "sample.txt"
PICTURE_FILE = "training.png"


class Interrupt:
    """Notes Ctrl-C or SIGTERM, so that a run can finish its step and save; a second one ends it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Takes the two signals over for as long as the context lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread alone.
            return
        previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Evaluation(NamedTuple):
    """The held-out windows, and what a bigram model scores on them."""

    batches: list[Batch]
    bigram: float | None  # nats per token; None when the vocabulary is too large for one, or not all is learned


def train(settings: TrainSettings) -> int:
    """Runs ``settings``; returns the exit status (0, 1 for a run that gave up, 128 + n when stopped by signal n)."""
    settings = resolved(settings)
    with _claimed(settings) as folder:
        return _train_in(folder, settings)


def _train_in(folder: Path, settings: TrainSettings) -> int:
    tokenizer = load_tokenizer(settings.data.tokenizer, settings.data.separator_token)
    if settings.init_from is not None and not settings.resume:
        check_tokenizer(settings.init_from, tokenizer)
    data = load(
        settings.data.paths,
        folder,
        tokenizer=tokenizer,
        text_field=settings.data.text_field,
        form=settings.data.format,
        template=chat_template(settings.data.format, settings.data.tokenizer),
    )
    check_vocabulary("the data", data.train.vocab_size, settings.model.vocab_size)
    evaluation = _evaluation(data, settings)
    state, first_records = _resumed(settings, folder, data) if settings.resume else (_begun(settings, folder, data), [])
    progress = Progress(settings.steps, train_flops_per_token(settings.model, settings.seq_len))
    progress.say(f"data: {data.summary}")
    progress.say(
        f"model: {settings.preset}, {settings.model.num_params:,} parameters, "
        f"{settings.model.num_active_params:,} active; run: {folder}"
    )
    progress.start(measure_matmul_rate(settings.model.dtype))

    interrupt = Interrupt()
    with interrupt.noted(), _Log(folder, first_records) as log, progress:
        state, refused = _loop(settings, folder, state, data.train, evaluation, interrupt, log, progress)
    if refused:
        last = int(state.step)
        progress.say(
            f"stopped at step {last}: the loss or the gradient norm was not finite in {settings.max_refused} steps in "
            f"a row, from step {last - settings.max_refused + 1} on; the state before them is kept in "
            f"{folder / STATE_FILE}"
        )
        return 1
    if int(state.step) < settings.steps:
        progress.say(f"stopped at step {int(state.step)} of {settings.steps}; --out {folder} --resume goes on")
        return 0 if interrupt.signal is None else 128 + interrupt.signal
    _finish(settings, folder, state, tokenizer, evaluation, progress)
    return 0


@contextlib.contextmanager
def _claimed(settings: TrainSettings) -> Iterator[Path]:
    """The run's folder, for this process alone: of the run to resume, or one that holds none yet."""
    if settings.resume:
        if settings.out is None:
            raise SettingsError("--resume: say which run with --out")
        check_same_run(read_settings(settings.out / SETTINGS_FILE), settings)
        if not read_identity(settings.out)["fingerprint"]:
            raise SettingsError(f"--resume: the run {settings.out} has no steps to resume; start with --init-from")
        candidates: Iterable[Path] = (settings.out,)
    elif settings.out is not None:
        candidates = (settings.out,)
    else:
        candidates = (Path("runs") / f"{settings.preset}-{number}" for number in itertools.count(1))
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK_FILE, timeout=0)
            lock.acquire()
        except Timeout as error:
            if settings.out is None:
                continue
            raise SettingsError(
                f"--out {folder} is in use by another process; wait for it or choose another"
            ) from error
        except OSError as error:
            raise SettingsError(f"--out {folder}: {error.strerror}; choose a folder that can be written") from error
        with lock:
            if settings.resume or not (folder / SETTINGS_FILE).exists():
                yield folder
                return
        if settings.out is not None:
            raise SettingsError(
                f"--out {folder} already holds a run; choose another folder, or continue it with --resume"
            )


def _begun(settings: TrainSettings, folder: Path, data: Data) -> TrainState:
    """A new run. Its settings are written last: a folder with them in it holds a run that can be resumed."""
    state = _first_state(settings)
    identity = {
        "fingerprint": data.train.fingerprint,
        "tokenizer": data.train.tokenizer,
        "summary": str(data.summary),
    }
    write_text(folder / DATA_FILE, json.dumps(identity, indent=2) + "\n")
    save_state(folder / STATE_FILE, state)
    write_text(folder / SETTINGS_FILE, to_json(dataclasses.replace(settings, out=folder)))
    return state


def _first_state(settings: TrainSettings) -> TrainState:
    """Random parameters, or those of another run with its routers' selection bias."""
    if settings.init_from is None:
        return init_state(init(settings.model, settings.seed), _optimizer(settings), settings.model)
    template: dict[str, Any] = {"params": abstract(settings.model), "balance": init_balance(settings.model)}
    stored = load_state(settings.init_from / STATE_FILE, template, partial=True)
    return init_state(stored["params"], _optimizer(settings), settings.model)._replace(balance=stored["balance"])


def _resumed(settings: TrainSettings, folder: Path, data: Data) -> tuple[TrainState, list[dict[str, Any]]]:
    """The state of a run and the metrics of the steps before it."""
    identity = read_identity(folder)
    if identity["fingerprint"] != data.train.fingerprint:
        raise SettingsError(
            f"--resume: the data has changed since the run began: then {identity['summary']}; now {data.summary}; "
            "restore it or start a new run"
        )
    template = init_state(abstract(settings.model), _optimizer(settings), settings.model)
    state = load_state(folder / STATE_FILE, template)
    return state, _read_records(folder / METRICS_FILE, int(state.step))


def read_identity(folder: Path) -> dict[str, str]:
    """What a run learned from: ``fingerprint``, ``tokenizer`` and ``summary`` of its data.

    Raises:
      StateError: the file is missing or says something else.
    """
    path = folder / DATA_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {name: str(stored[name]) for name in ("fingerprint", "tokenizer", "summary")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises ``SettingsError`` when ``tokenizer`` is not the one whose tokens the run in ``folder`` has learned."""
    learned = read_identity(folder)["tokenizer"]
    if tokenizer.fingerprint != learned:
        raise SettingsError(
            f"the run {folder} learned the tokens of {learned}, but the tokenizer is now {tokenizer.fingerprint}: "
            "restore the tokenizer"
        )


def _optimizer(settings: TrainSettings) -> GradientTransformation:
    return make_optimizer(settings.model, settings.optimizer, settings.steps)


def _evaluation(data: Data, settings: TrainSettings) -> Evaluation:
    batches: list[Batch] = list(
        windows_for_eval(data.held_out, settings.eval_windows, seq_len=settings.seq_len, batch_size=settings.batch_size)
    )
    # Asked for here, so that a corpus shorter than a window is refused before anything is computed.
    batch_at(data.train, 0, batch_size=settings.batch_size, seq_len=settings.seq_len, seed=settings.seed)
    if not any(_targets(batch) for batch in batches):
        raise SettingsError(
            "the held-out windows have no token to be learned: give more examples, or a longer --seq-len"
        )
    if data.train.is_marked or data.train.vocab_size > MAX_VOCABULARY:
        return Evaluation(batches, None)
    bigram = fit_bigram(data.train)
    return Evaluation(batches, _mean([(float(bigram.loss(b["tokens"], b["targets"])), b) for b in batches]))


def _mean(losses: list[tuple[float, Batch]]) -> float:
    """The mean over predicted tokens of batches' means."""
    return sum(loss * _targets(batch) for loss, batch in losses) / sum(_targets(batch) for _, batch in losses)


def _targets(batch: Batch) -> int:
    return int((batch["targets"] != IGNORE_INDEX).sum())


def evaluate(state: TrainState, batches: list[Batch], config: MoEConfig) -> float:
    """Mean nats per token on ``batches``. Changes nothing."""
    with torch.no_grad():
        return _mean([(float(loss_fn(state.params, state.balance, b, config)[1].loss), b) for b in batches])


def _loop(
    settings: TrainSettings,
    folder: Path,
    state: TrainState,
    corpus: Corpus,
    evaluation: Evaluation,
    interrupt: Interrupt,
    log: _Log,
    progress: Progress,
) -> tuple[TrainState, bool]:
    """Steps until the end, an interrupt or too many refused steps; says whether it was the last."""
    step_fn = make_train_step(settings.model, _optimizer(settings), accumulate=settings.accumulate)
    last = settings.steps if settings.stop_after is None else min(settings.steps, settings.stop_after)
    refused = 0
    for step in range(int(state.step), last):
        start = time.perf_counter()
        batch = batch_at(corpus, step, batch_size=settings.batch_size, seq_len=settings.seq_len, seed=settings.seed)
        state, metrics = step_fn(state, batch)
        record = _record(step + 1, metrics)
        seconds = time.perf_counter() - start
        refused = 0 if record["finite"] else refused + 1
        done = step + 1
        if done % settings.eval_every == 0 or done == settings.steps:
            record["held_out_loss"] = evaluate(state, evaluation.batches, settings.model)
        log.write(record, seconds)
        progress.step(record, seconds, evaluation.bigram)
        gave_up, stopped = refused >= settings.max_refused, interrupt.signal is not None
        if done % settings.save_every == 0 or done == last or gave_up or stopped:
            log.sync()
            save_state(folder / STATE_FILE, state)
        if gave_up or stopped:
            return state, gave_up
    return state, False


def _record(step: int, metrics: StepMetrics) -> dict[str, Any]:
    """Metrics as plain values, in the order they are written."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(part) for name, part in value.items()}
        return value.tolist() if isinstance(value, Tensor) else value

    return {"step": step, **{name: plain(value) for name, value in metrics._asdict().items()}}


class _Log:
    """The metrics of a run: a line of JSON per step, and TensorBoard's files when it is installed."""

    def __init__(self, folder: Path, records: list[dict[str, Any]]) -> None:
        self._path = folder / METRICS_FILE
        self._kept = records

    def __enter__(self) -> _Log:
        # A run that was killed may have written steps that its last state has not seen: they come again.
        write_text(self._path, "".join(json.dumps(_finite(record)) + "\n" for record in self._kept))
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        self._board = _tensorboard(self._path.parent, len(self._kept))
        return self

    def write(self, record: dict[str, Any], seconds: float) -> None:
        """Adds a step; ``seconds`` stands apart from what the step computed."""
        with writing(self._path):
            # JSON has no NaN: what is not finite becomes null.
            self._file.write(json.dumps({**_finite(record), "seconds": round(seconds, 4)}, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in _scalars(record).items():
                self._board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Makes sure that the disk has what was written, so that no state is ahead of its metrics."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been reported
            self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    """Plain values with ``None`` in place of every number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    """What ``_finite`` took, with NaN in place of ``None``."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return math.nan if value is None else value


def _scalars(value: Any, name: str = "") -> dict[str, float]:
    """Every number in plain values, by its path: ``learning_rates/matrix``, ``load_idle/3``."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            path: number
            for key, part in parts
            for path, number in _scalars(part, f"{name}/{key}" if name else str(key)).items()
        }
    return {name: float(value)}


def _tensorboard(folder: Path, steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=steps + 1)


def _read_records(path: Path, steps: int) -> list[dict[str, Any]]:
    if steps == 0:
        return []  # a run that was killed before its first step may have no file yet
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:steps]
        records: list[dict[str, Any]] = [_numbers(json.loads(line)) for line in lines]
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if len(records) != steps:
        raise StateError(f"{path} has {len(records)} steps, the state has {steps}; restore it from a copy")
    return records


def _finish(
    settings: TrainSettings,
    folder: Path,
    state: TrainState,
    tokenizer: Tokenizer,
    evaluation: Evaluation,
    progress: Progress,
) -> None:
    """The verdict, a sample and a picture."""
    records = _read_records(folder / METRICS_FILE, settings.steps)
    loss = records[-1]["held_out_loss"]
    progress.say(f"held-out loss {loss:.3f} nats per token")
    if evaluation.bigram is not None:
        progress.say(f"a bigram model of the same text: {evaluation.bigram:.3f}, {evaluation.bigram - loss:+.3f} away")
    if settings.sample_tokens:
        room = settings.model.max_position_embeddings - 1
        tokens = generate(
            state.params,
            state.balance,
            settings.model,
            [tokenizer.separator],
            min(settings.sample_tokens, room),
            seed=settings.seed,
            stop=tokenizer.separator,
        )
        text = tokenizer.decode(tokens)
        write_text(folder / SAMPLE_FILE, text)
        progress.say(f"a sample, also in {folder / SAMPLE_FILE}:\n{printable(text)}")
    picture = folder / PICTURE_FILE
    with writing(picture):
        drawn = save_picture(picture, records, evaluation.bigram)
    if drawn:
        progress.say(f"picture: {picture}")
    else:
        progress.say("no picture: matplotlib is not installed (the extra 'plot' brings it)")
    prompt = "" if settings.data.paths else " --prompt 'def '"
    progress.say(f"go on with: functional-moe sample --run {os.fspath(folder)}{prompt}")
