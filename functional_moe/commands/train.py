"""``functional-moe train``: data, steps, validation, states on disk, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from ..bigram import MAX_VOCABULARY, fit_bigram
from ..budget import StepPlan, plan_step
from ..cross_entropy import IGNORE_INDEX
from ..data import (
    Corpus,
    Data,
    Tokenizer,
    batch_at,
    check_vocabulary,
    load,
    load_tokenizer,
    rank_rows,
    windows_for_eval,
)
from ..evaluate import make_evaluate
from ..flops import measure_matmul_rate, train_flops_per_token
from ..memory import Copies, CudaCopies, PlanError, explain
from ..model import Batch, init_balance
from ..optim import GradientTransformation
from ..optimizers import make_optimizer
from ..parallel import Layout, PendingSave, RankError, World, find_device, from_local, local_parts, make_mesh, shard
from ..parameters import abstract, init
from ..sampling import generate
from ..sharding import model_layout
from ..state_file import STATES_FOLDER, StateError, latest_state, load_state, save_state, write_text, writing
from ..train_step import StepMetrics, TrainState, init_state, make_train_step
from ..updates import at_home
from .progress import Progress, printable, save_picture
from .settings import (
    USER_ERRORS,
    SettingsError,
    TrainSettings,
    chat_template,
    check_profile,
    check_same_run,
    flat,
    read_settings,
    resolved,
    to_json,
)

SETTINGS_FILE = "settings.json"
LOCK_FILE = ".lock"
DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
SAMPLE_FILE = "sample.txt"
PICTURE_FILE = "training.png"
PROFILE_FILE = "profile.json"


class Interrupt:
    """Notes Ctrl-C or SIGTERM, so that a run can finish its step and save; a second one ends it at once.

    Args:
      launched: by torchrun, which passes signals on that its processes may have got themselves, so that a second one is
        no second wish; it kills what does not end.
    """

    def __init__(self, launched: bool = False) -> None:
        self.signal: int | None = None
        self._launched = launched

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and not self._launched:
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


class _Run(NamedTuple):
    """A run as one rank sees it."""

    settings: TrainSettings
    folder: Path
    world: World
    layout: Layout | None  # of the parameters; None in a process by itself
    optimizer: GradientTransformation
    planned: StepPlan | None  # what the step does to keep the budgets, if there are any


def train(settings: TrainSettings, world: World | None = None) -> int:
    """Runs ``settings``; returns the exit status (0, 1 for a run that gave up, 128 + n when stopped by signal n).

    Args:
      settings: of the run.
      world: the ranks, each of which calls this; by default this process by itself, on the device of the settings.

    Raises:
      SettingsError, DataError, StateError, CheckpointError: whatever the user can mend, in a process by itself.
      RankError: the same over ranks, on each of them; also when the ranks disagree.
      CollectiveError: a peer died or hangs.
    """
    settings, world = resolved(settings), world or _alone(settings)
    world.agree({**flat(settings), **_versions()})
    world.together("the mesh", lambda: _check_ranks(settings, world), *USER_ERRORS)
    layout = None
    if world.control is not None:
        layout = model_layout(settings.model, make_mesh(settings.fsdp, settings.ep, settings.replicate))
    optimizer = make_optimizer(settings.model, settings.optimizer, settings.steps, layout=layout)
    planned = None
    if settings.budgets:
        planned = world.together("the budget", lambda: _planned(settings, world, layout, optimizer), *USER_ERRORS)
    with contextlib.ExitStack() as stack:
        folder = world.from_first("the folder", lambda: stack.enter_context(_claimed(settings)), *USER_ERRORS)
        return _train(_Run(settings, folder, world, layout, optimizer, planned))


def _alone(settings: TrainSettings) -> World:
    try:
        return World(device=find_device(settings.device))
    except RankError as error:
        raise SettingsError(str(error)) from error


def _planned(
    settings: TrainSettings, world: World, layout: Layout | None, optimizer: GradientTransformation
) -> StepPlan:
    """A step within the budgets, planned on a state and a batch of the run's shapes; no schedule asks for more."""
    model, generator = settings.model, torch.Generator().manual_seed(settings.seed)
    params = abstract(model) if layout is None else shard(abstract(model), layout)

    def like(leaf: Tensor) -> Tensor:
        # About as large as initial ones, so that routers spread the tokens.
        return (0.02 * torch.randn(leaf.shape, generator=generator)).to(world.device)

    drawn = pytree.tree_map(like, local_parts(params))
    state = init_state(drawn if layout is None else from_local(drawn, layout), optimizer, model)
    rows = rank_rows(settings.batch_size, world.rank, world.size)
    tokens = torch.randint(model.vocab_size, (rows.stop - rows.start, settings.seq_len), generator=generator)
    tokens = tokens.to(world.device)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": torch.ones_like(tokens)}
    try:
        planned = plan_step(
            model,
            optimizer,
            state,
            batch,
            settings.budgets,
            layout=layout,
            accumulate=settings.accumulate,
            expert_parts=(1, 2, 4, 8) if settings.expert_parts is None else (settings.expert_parts,),
            donate=True,
            copies=_copies(world.device),
            gather_dtype=settings.gathered_in,
            gather=functools.partial(world.gather, "measurements"),
        )
    except PlanError as error:
        raise SettingsError(f"--hbm-budget {settings.hbm_budget}: {error}") from error
    if world.device.type == "cuda":
        # Reserved and given back, so that what cannot be pinned is known before a step: torch keeps it for the first.
        try:
            reserved = [CudaCopies().slab(size) for size in (*planned.slabs.values(), *planned.states.values())]
            del reserved
        except MemoryError as error:
            raise SettingsError(f"--host-budget {settings.host_budget}: {error}") from error
    return planned


def _copies(device: torch.device) -> Copies | None:
    return CudaCopies() if device.type == "cuda" else None


def _versions() -> dict[str, str]:
    """What the ranks must run alike, besides the settings."""
    try:
        own = version("functional_moe")
    except PackageNotFoundError:
        own = "a checkout that is not installed"
    return {"the version of python": platform.python_version(), "of torch": torch.__version__, "of functional_moe": own}


def _check_ranks(settings: TrainSettings, world: World) -> None:
    mesh = f"--replicate {settings.replicate} x --fsdp {settings.fsdp} x --ep {settings.ep}"
    if settings.ranks == world.size:
        return
    if world.control is None:
        raise SettingsError(
            f"{mesh} is {settings.ranks} processes, and this is one by itself; start it with: torchrun "
            f"--nproc-per-node {settings.ranks} -m functional_moe train ..."
        )
    raise SettingsError(f"{mesh} is {settings.ranks} processes, torchrun started {world.size}")


def _train(run: _Run) -> int:
    settings, folder, world, *_ = run
    tokenizer, data = _read_data(run)
    evaluation = world.together("the data", lambda: _evaluation(data, run), *USER_ERRORS)
    world.agree({"the data": data.train.fingerprint, "the tokenizer": data.train.tokenizer})
    state, first_records = _resumed(run, data) if settings.resume else (_begun(run, data), [])
    world.together("the profile", lambda: check_profile(settings, int(state.step)), *USER_ERRORS)
    progress = Progress(settings.steps, train_flops_per_token(settings.model, settings.seq_len), quiet=not world.leads)
    progress.say(f"data: {data.summary}")
    progress.say(
        f"model: {settings.preset}, {settings.model.num_params:,} parameters, "
        f"{settings.model.num_active_params:,} active; run: {folder}"
    )
    if run.planned is not None:
        progress.say(explain(run.planned.plan))
        if run.planned.expert_parts > 1:
            progress.say(f"experts: a layer's tokens go through them in {run.planned.expert_parts} parts")
    if world.leads:
        progress.start(measure_matmul_rate(settings.model.dtype, world.device), world.size)

    interrupt = Interrupt(world.control is not None)
    with interrupt.noted(), contextlib.ExitStack() as stack:
        log = stack.enter_context(_Log(folder, first_records)) if world.leads else None
        stack.enter_context(progress)
        count = settings.profile if world.leads else None
        trace = stack.enter_context(_Profile(folder / PROFILE_FILE, int(state.step) + 1, count, progress))
        ended = _loop(run, state, data.train, evaluation, interrupt, log, progress, trace)
    last = int(ended.state.step)
    if ended.gave_up:
        progress.say(
            f"stopped at step {last}: the loss or the gradient norm was not finite in {settings.max_refused} steps in "
            f"a row, from step {last - settings.max_refused + 1} on; the state before them is kept in "
            f"{folder / STATES_FOLDER}"
        )
        return 1
    if last < settings.steps:
        progress.say(f"stopped at step {last} of {settings.steps}; --out {folder} --resume goes on")
        return 0 if ended.signal == 0 else 128 + ended.signal
    if world.leads:
        _finish(run, ended.state, tokenizer, evaluation, progress)
    return 0


def _read_data(run: _Run) -> tuple[Tokenizer, Data]:
    """Rank 0 reads first, because it may write the tokenised text that the others then open."""
    data = run.settings.data

    def read() -> tuple[Tokenizer, Data]:
        tokenizer = load_tokenizer(data.tokenizer, data.separator_token)
        if run.settings.init_from is not None and not run.settings.resume:
            check_tokenizer(run.settings.init_from, tokenizer)
        found = load(
            data.paths,
            run.folder,
            tokenizer=tokenizer,
            text_field=data.text_field,
            form=data.format,
            template=chat_template(data.format, data.tokenizer),
        )
        check_vocabulary("the data", found.train.vocab_size, run.settings.model.vocab_size)
        return tokenizer, found

    first = run.world.together("the data", lambda: read() if run.world.leads else None, *USER_ERRORS)
    return run.world.together("the data", lambda: first or read(), *USER_ERRORS)


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


def _begun(run: _Run, data: Data) -> TrainState:
    """A new run. Its settings are written last: a folder with them in it holds a run that can be resumed."""
    settings, folder, world = run.settings, run.folder, run.world
    identity = {
        "fingerprint": data.train.fingerprint,
        "tokenizer": data.train.tokenizer,
        "summary": str(data.summary),
    }

    def describe() -> None:
        # A start that was killed may have left a state, but no settings: that was no run.
        shutil.rmtree(folder / STATES_FOLDER, ignore_errors=True)
        write_text(folder / DATA_FILE, json.dumps(identity, indent=2) + "\n")

    state = _first_state(run)
    world.from_first("the new run", describe, *USER_ERRORS)
    save_state(folder, 0, state, settings.model).wait()
    described = to_json(dataclasses.replace(settings, out=folder))
    world.from_first("the new run", lambda: write_text(folder / SETTINGS_FILE, described), *USER_ERRORS)
    return state


def _first_state(run: _Run) -> TrainState:
    """Random parameters, or those of another run with its routers' selection bias."""
    model, start = run.settings.model, run.settings.init_from
    if start is None:
        params = init(model, run.settings.seed, device=run.world.device, layout=run.layout)
        return init_state(params, run.optimizer, model)
    params = abstract(model)
    params = params if run.layout is None else shard(params, run.layout)
    template: dict[str, Any] = {"params": params, "balance": init_balance(model)}
    checkpoint = run.world.from_first("the state", lambda: latest_state(start), *USER_ERRORS)
    # As the model it was; the leaves' shapes are compared with this one's.
    was = run.world.together("the model", lambda: read_settings(start / SETTINGS_FILE).model, *USER_ERRORS)
    stored = _on_device(load_state(checkpoint, template, was, partial=True), run.world.device)
    return init_state(stored["params"], run.optimizer, model)._replace(balance=stored["balance"])


def _resumed(run: _Run, data: Data) -> tuple[TrainState, list[dict[str, Any]]]:
    """The state of a run and, on rank 0, the metrics of the steps before it."""
    folder, model, world = run.folder, run.settings.model, run.world

    def check() -> None:
        identity = read_identity(folder)
        if identity["fingerprint"] != data.train.fingerprint:
            raise SettingsError(
                f"--resume: the data has changed since the run began: then {identity['summary']}; now {data.summary}; "
                "restore it or start a new run"
            )

    world.together("the run", check, *USER_ERRORS)
    checkpoint = world.from_first("the state", lambda: latest_state(folder), *USER_ERRORS)
    params = abstract(model)
    params = params if run.layout is None else shard(params, run.layout)
    loaded = load_state(checkpoint, init_state(params, run.optimizer, model), model)
    state: TrainState = _on_device(loaded, world.device)
    state = state._replace(step=state.step.to(world.device))
    steps = int(state.step)
    read = world.together(
        "the metrics", lambda: _read_records(folder / METRICS_FILE, steps) if world.leads else [], *USER_ERRORS
    )
    return state, read


def _on_device(tree: Any, device: torch.device) -> Any:
    """What was read from a disk, where a rank computes. Shards are there already; an optimizer's counts and rates,
    which are single numbers, stay on the host.
    """
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device) if leaf.ndim else leaf, tree)


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


def _evaluation(data: Data, run: _Run) -> Evaluation:
    settings = run.settings
    batches: list[Batch] = list(
        # As many at once as a microbatch has, so that they take no more memory than a step.
        windows_for_eval(
            data.held_out,
            settings.eval_windows,
            seq_len=settings.seq_len,
            batch_size=settings.batch_size // settings.accumulate,
        )
    )
    # Asked for here, so that a corpus shorter than a window is refused before anything is computed.
    batch_at(data.train, 0, batch_size=settings.batch_size, seq_len=settings.seq_len, seed=settings.seed)
    if not any(_targets(batch) for batch in batches):
        raise SettingsError(
            "the held-out windows have no token to be learned: give more examples, or a longer --seq-len"
        )
    if data.train.is_marked or data.train.vocab_size > MAX_VOCABULARY or not run.world.leads:
        return Evaluation(batches, None)
    bigram = fit_bigram(data.train)
    losses = [(float(bigram.loss(b["tokens"], b["targets"])), b["targets"].numel()) for b in batches]
    # All targets count, as packed text has none to ignore.
    return Evaluation(batches, sum(loss * count for loss, count in losses) / sum(count for _, count in losses))


def _targets(batch: Batch) -> int:
    return int((batch["targets"] != IGNORE_INDEX).sum())


class _Ended(NamedTuple):
    """How the steps ended, alike on every rank."""

    state: TrainState
    gave_up: bool = False  # too many refused steps
    signal: int = 0  # that stopped them


def _loop(
    run: _Run,
    state: TrainState,
    corpus: Corpus,
    evaluation: Evaluation,
    interrupt: Interrupt,
    log: _Log | None,
    progress: Progress,
    trace: _Profile,
) -> _Ended:
    """Steps until the end, an interrupt or too many refused steps; the last state is on the disk."""
    settings, folder, world, layout, optimizer, planned = run
    if planned is not None:
        placed = at_home(
            state.params, state.opt_state, optimizer, settings.model, planned.plan.schedule, _copies(world.device)
        )
        state = state._replace(opt_state=placed)
    step_fn = make_train_step(
        settings.model,
        optimizer,
        layout=layout,
        schedule=None if planned is None else planned.plan.schedule,
        slabs=None if planned is None else planned.slabs,
        copies=_copies(world.device),
        accumulate=settings.accumulate,
        expert_parts=(settings.expert_parts or 1) if planned is None else planned.expert_parts,
        donate=planned is not None,
        gather_dtype=settings.gathered_in,
    )
    evaluate = make_evaluate(settings.model, layout)
    last = settings.steps if settings.stop_after is None else min(settings.steps, settings.stop_after)
    refused, saving = 0, _Saving()
    for step in range(int(state.step), last):
        trace.begin(step)
        start = time.perf_counter()
        batch = batch_at(
            corpus,
            step,
            batch_size=settings.batch_size,
            seq_len=settings.seq_len,
            seed=settings.seed,
            rank=world.rank,
            world_size=world.size,
        )
        state, metrics = step_fn(state, {name: value.to(world.device) for name, value in batch.items()})
        record = _record(step + 1, metrics)
        seconds = time.perf_counter() - start
        trace.end(step)
        refused = 0 if record["finite"] else refused + 1
        done = step + 1
        if done % settings.eval_every == 0 or done == settings.steps:
            record["held_out_loss"] = evaluate(state, evaluation.batches)
        if log is not None:
            log.write(record, seconds)
        progress.step(record, seconds, evaluation.bigram)
        # A signal that one rank got stops all at this step; a save that failed is known to some ranks before others.
        signal_number, save_failed = world.largest("signals", interrupt.signal or 0, saving.failed)
        if save_failed:
            saving.wait()
        gave_up = refused >= settings.max_refused
        ends = done == last or gave_up or signal_number != 0
        if ends or done % settings.save_every == 0:
            if log is not None:
                log.sync()
            saving.begin(folder, done, state, settings)
        if ends:
            saving.wait()
        if gave_up or signal_number:
            return _Ended(state, gave_up, signal_number)
    return _Ended(state)


class _Profile:
    """A trace of ``count`` steps from ``first`` on; without a count, of none."""

    def __init__(self, path: Path, first: int, count: int | None, progress: Progress) -> None:
        self._path, self._first, self._count, self._progress = path, first, count, progress
        devices = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        self._profiler = None if count is None else profile(activities=devices)
        self._running = False

    def __enter__(self) -> _Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None and self._running:  # an interrupted trace is not written
            self._profiler.stop()

    def begin(self, step: int) -> None:
        if self._profiler is not None and step == self._first:
            self._profiler.start()
            self._running = True

    def end(self, step: int) -> None:
        """After the step's numbers have come, so that a device is done with it."""
        if self._profiler is None or self._count is None or step != self._first + self._count - 1:
            return
        self._profiler.stop()
        self._running = False
        partial = self._path.with_name(f".partial.{self._path.name}")
        with writing(self._path):
            self._profiler.export_chrome_trace(str(partial))
            partial.replace(self._path)  # torch says nothing when it could not write
        steps = f"{self._first + 1} to {self._first + self._count}" if self._count > 1 else f"{self._first + 1}"
        self._progress.say(f"profile of step {steps}: {self._path}; open it in ui.perfetto.dev or chrome://tracing")


class _Saving:
    """The save that is under way while steps go on."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None

    @property
    def failed(self) -> bool:
        return self._pending is not None and self._pending.failed

    def begin(self, folder: Path, step: int, state: TrainState, settings: TrainSettings) -> None:
        self._pending = save_state(folder, step, state, settings.model)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()


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


def _finish(run: _Run, state: TrainState, tokenizer: Tokenizer, evaluation: Evaluation, progress: Progress) -> None:
    """The verdict, a picture, and a sample where this process has the whole model."""
    settings, folder, _, layout, *_ = run
    records = _read_records(folder / METRICS_FILE, settings.steps)
    loss = records[-1]["held_out_loss"]
    progress.say(f"held-out loss {loss:.3f} nats per token")
    if evaluation.bigram is not None:
        progress.say(f"a bigram model of the same text: {evaluation.bigram:.3f}, {evaluation.bigram - loss:+.3f} away")
    if settings.sample_tokens and layout is None:
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
