"""The commands: a run learns, stops, goes on bit for bit, and answers every mistake in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from functional_moe import __main__ as command_line
from functional_moe.commands import train as train_module
from functional_moe.commands.progress import printable
from functional_moe.commands.settings import TrainSettings
from functional_moe.data import DataError
from functional_moe.state_file import StateError
from functional_moe.train_step import StepMetrics, TrainState

SMALL = """
--model.hidden-size 16 --model.num-hidden-layers 2 --model.num-attention-heads 2 --model.num-key-value-heads 1
--model.head-dim 8 --model.num-experts 4 --model.moe-intermediate-size 12 --seq-len 32 --batch-size 4
--eval-windows 8 --eval-every 5 --sample-tokens 20
""".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of documents with some structure."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line}\n" for line in range(6)]
        (folder / f"{number:02}.py").write_text("\n".join(lines))
    return folder


def run(*arguments: object) -> int:
    return command_line.run([str(argument) for argument in arguments])


def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """Runs a command that must exit with status 2 and one line; returns the line."""
    monkeypatch.setattr(sys, "argv", ["functional-moe", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        command_line.main()
    error = capsys.readouterr().err
    assert raised.value.code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("functional-moe: ")
    return error


def records(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run without the times, which no two runs share."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("seconds") > 0
    return lines


def state(folder: Path) -> dict[str, bytes]:
    """The last state of a run of one process, which keeps no other."""
    (path,) = (folder / "states").glob("*/*.safetensors")
    return {name: leaf.numpy().tobytes() for name, leaf in load_file(path).items()}


def test_a_run_leaves_everything_that_was_promised(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 10, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert "a bigram model of the same text" in printed
    names = {entry.name for entry in out.iterdir()}
    assert {"settings.json", "states", "metrics.jsonl", "sample.txt", "training.png", "tensorboard"} <= names
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    lines = records(out)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["step"] for line in lines if "held_out_loss" in line] == [5, 10]
    assert lines[-1]["loss"] < lines[0]["loss"]  # type: ignore[operator]
    assert set(lines[0]["learning_rates"]) == {"embedding", "matrix", "router", "vector"}  # type: ignore[call-overload]
    assert lines[0]["tokens"] == 4 * 32

    assert run("sample", "--run", out, "--prompt", "def ", "--tokens", 12, "--seed", 1) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert run("sample", "--run", out, "--prompt", "def ", "--tokens", 12, "--seed", 1) == 0
    assert capsys.readouterr().out == first


def test_ten_steps_and_ten_more_equal_twenty(tmp_path: Path, text: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ["train", *SMALL, "--data", text, "--steps", 20]
    assert run(*common, "--out", whole) == 0
    assert run(*common, "--out", parts, "--stop-after", 10) == 0
    assert not (parts / "sample.txt").exists()
    # steps that a killed run wrote after its last state come again
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "half')
    assert run("train", "--out", parts, "--resume") == 0
    assert state(parts) == state(whole)
    assert records(parts) == records(whole)
    assert (parts / "sample.txt").read_bytes() == (whole / "sample.txt").read_bytes()


def test_matrices_are_rounded_to_fp8_on_one_process_too(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("train", *SMALL, "--data", text, "--steps", 4)
    wide, out, small = (tmp_path / name for name in ("wide", "out", "small"))
    assert run(*common, "--out", wide) == 0
    assert run(*common, "--out", out, "--gather-dtype", "float8", "--stop-after", 2) == 0
    other = fails(capsys, monkeypatch, "train", "--out", out, "--resume", "--gather-dtype", "bfloat16")
    assert "gather_dtype is float8 there and bfloat16 here" in other
    assert run("train", "--out", out, "--resume") == 0
    assert run(*common, "--out", small, "--gather-dtype", "float8", "--hbm-budget", "2MB") == 0
    assert state(small) == state(out) != state(wide)
    losses = [[line["loss"] for line in records(folder)] for folder in (out, wide)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]


def test_a_budget_changes_no_value_and_may_change_itself(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("train", *SMALL, "--data", text, "--steps", 4, "--accumulate", 2)
    assert run(*common, "--out", tmp_path / "whole") == 0
    out = tmp_path / "out"
    capsys.readouterr()
    assert run(*common, "--out", out, "--hbm-budget", "600kB", "--host-budget", "1MiB", "--stop-after", 2) == 0
    printed = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(printed) if line.startswith("step: "))
    starts = [line.split(":")[0] for line in printed[first : first + 5]]
    assert starts == ["step", "saved", "beside compute", "bound by", "instead"]
    assert "hbm" in printed[first]
    assert "of 586 KiB" in printed[first]
    assert run("train", "--out", out, "--resume", "--hbm-budget", "2GiB", "--stop-after", 3) == 0
    assert run("train", "--out", out, "--resume", "--hbm-budget", "None", "--host-budget", "None") == 0
    assert state(out) == state(tmp_path / "whole")
    assert records(out) == records(tmp_path / "whole")


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (("--hbm-budget", "many"), "--hbm-budget many: is no size in bytes; write it as 2GiB, 800MB or 1000000"),
        (("--hbm-budget", "2 GiBi"), "--hbm-budget 2 GiBi: is no size"),
        (("--hbm-budget", "nan"), "--hbm-budget nan: is no size"),
        (("--hbm-budget", "0MB"), "--hbm-budget 0MB: must be above 0"),
        (("--hbm-budget", "-1"), "--hbm-budget -1: must be above 0"),
        (("--hbm-budget", "9" * 400), "must be above 0 and at most 1 EiB"),
        (("--hbm-budget", "1GB", "--host-budget", "0"), "--host-budget 0: must be above 0"),
        (("--host-budget", "1GB"), "--host-budget 1GB: has no use without --hbm-budget"),
        (("--hbm-budget", "1000"), "the smallest budget found that works is "),
    ],
)
def test_a_budget_that_cannot_be_is_named_and_makes_no_folder(
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    budgets: tuple[str, ...],
    message: str,
) -> None:
    out = tmp_path / "run"
    assert message in fails(capsys, monkeypatch, "train", *SMALL, "--data", text, "--out", out, *budgets)
    assert not out.exists()


def test_budgets_are_read_as_people_write_them() -> None:
    for written, size in (
        ("2GiB", 2 << 30),
        ("800MB", 800_000_000),
        ("1.5 kb", 1500),
        ("12", 12),
        ("3TiB", 3 << 40),
        ("1EiB", 1 << 60),
    ):
        assert TrainSettings(hbm_budget=written).budgets == {"hbm": size}


def trace_ranges(path: Path) -> list[str]:
    """The names of the ranges of a trace that are not torch's own, in the order in which they began."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    return [str(e["name"]) for e in sorted(events, key=lambda e: float(e["ts"]))]


def test_a_profile_names_segments_and_changes_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["train", *SMALL, "--data", text, "--steps", 5]
    assert run(*common, "--out", tmp_path / "plain") == 0
    capsys.readouterr()
    assert run(*common, "--out", tmp_path / "traced", "--profile", 2) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("profile of step"))
    assert "2 to 3" in line and str(tmp_path / "traced" / "profile.json") in line
    assert state(tmp_path / "plain") == state(tmp_path / "traced")
    names = trace_ranges(tmp_path / "traced" / "profile.json")
    segments = ["embed", *[f"layers.{i}.{half}" for i in range(2) for half in ("attention", "feed_forward")], "head"]
    for name in (*[f"{way} {segment} (" for way in ("forward", "backward") for segment in segments], "optimizer"):
        assert sum(found.startswith(name) for found in names) == 2, name  # the first step warmed up, two are traced
    order = [next(i for i, found in enumerate(names) if f"backward {segment} (" in found) for segment in segments]
    assert order == sorted(order, reverse=True)
    assert not list((tmp_path / "traced").glob("*partial*"))


def test_a_profile_of_a_resumed_run_needs_steps_that_are_left(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 6, "--stop-after", 4, "--profile", 1, "--out", out) == 0
    (out / "profile.json").unlink()
    resume = ["train", "--out", out, "--resume"]
    assert "--profile 2: 2 steps are left" in fails(capsys, monkeypatch, *resume, "--profile", 2)
    assert run(*resume, "--profile", 1) == 0
    assert len(trace_ranges(out / "profile.json")) > 10


def test_a_finished_run_resumes_to_nothing(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 5, "--out", out) == 0
    before = state(out)
    assert run("train", "--out", out, "--resume") == 0
    assert state(out) == before
    assert len(records(out)) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_its_state_saved(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "functional_moe", "train", *SMALL, "--data", text, "--steps", "100000", "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "--resume goes on" in output
    assert errors == ""
    steps = len(records(out))
    assert run("train", "--out", out, "--resume", "--stop-after", steps + 2) == 0
    assert len(records(out)) == steps + 2


def test_a_run_whose_steps_are_refused_gives_up_and_names_the_step(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = train_module.make_train_step

    def spoiled(*arguments: object, **options: object) -> object:
        step = real(*arguments, **options)  # type: ignore[arg-type]

        def refuse(state: TrainState, batch: object) -> tuple[TrainState, StepMetrics]:
            new, metrics = step(state, batch)  # type: ignore[arg-type]
            if int(state.step) < 3:
                return new, metrics
            nothing = torch.tensor(float("nan"))
            return state._replace(step=new.step), metrics._replace(finite=torch.tensor(False), loss=nothing)

        return refuse

    monkeypatch.setattr(train_module, "make_train_step", spoiled)
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 50, "--max-refused", 4, "--out", out) == 1
    printed = capsys.readouterr().out
    assert "stopped at step 7" in printed
    assert "from step 4 on" in printed
    assert "4 steps in a row" in printed
    # JSON as others read it has no NaN
    assert [line["loss"] is None for line in records(out)] == [False] * 3 + [True] * 4
    assert "NaN" not in (out / "metrics.jsonl").read_text()
    monkeypatch.undo()
    assert run("train", "--out", out, "--resume", "--stop-after", 9) == 0
    assert len(records(out)) == 9


def test_a_run_learns_from_a_tokenised_file(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenize", text, "--out", tmp_path / "text.bin") == 0
    assert "30 documents" in capsys.readouterr().out
    assert run("train", *SMALL, "--data", tmp_path / "text.bin", "--steps", 5, "--out", tmp_path / "bin") == 0
    assert run("train", *SMALL, "--data", text, "--steps", 5, "--out", tmp_path / "text-run") == 0
    assert records(tmp_path / "bin") == records(tmp_path / "text-run")


def test_info_prints_the_published_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--preset", "jupiter-952b") == 0
    printed = capsys.readouterr().out
    assert "951.87 billion" in printed
    assert "32.84 billion" in printed
    assert "inferred, not published" in printed
    assert "384 experts x 1792 expert_intermediate x 6144 hidden" in printed


def test_the_default_folder_is_the_next_free_one(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("train", *SMALL, "--data", text, "--steps", 1) == 0
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == ["tiny-1", "tiny-2"]


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_bad_data_is_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(*arguments: object) -> str:
        return fails(capsys, monkeypatch, "train", *SMALL, "--steps", 2, "--out", tmp_path / "run", *arguments)

    (tmp_path / "nothing").mkdir()
    assert "missing" in message("--data", tmp_path / "missing")
    assert "nothing" in message("--data", tmp_path / "nothing")
    assert "empty.txt" in message("--data", _write(tmp_path / "empty.txt", b""))
    assert "latin.txt" in message("--data", _write(tmp_path / "latin.txt", b"caf\xe9 au lait"))
    assert "window" in message("--data", _write(tmp_path / "short.txt", b"short"))
    assert "tokenizer" in message("--data", text, "--tokenizer", tmp_path / "no.json")
    assert "vocab_size is 100" in message("--data", text, "--model.vocab-size", 100)
    # a start that failed is no run: the folder is free for the next try
    assert run("train", *SMALL, "--steps", 1, "--out", tmp_path / "run", "--data", text) == 0


def make_tokenizer(path: Path, words: int) -> Path:
    import tokenizers

    vocabulary = {f"word{number}": number for number in range(words)} | {"</s>": words}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    return path


def test_tokens_of_another_tokenizer_are_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, tokens, out = make_tokenizer(tmp_path / "t.json", 200), tmp_path / "text.bin", tmp_path / "run"
    assert run("tokenize", text, "--out", tokens, "--tokenizer", tokenizer) == 0
    common = ["train", *SMALL, "--data", tokens, "--steps", 2, "--out", out]
    assert "give that one or tokenise again" in fails(capsys, monkeypatch, *common)
    assert run(*common, "--tokenizer", tokenizer) == 0
    make_tokenizer(tokenizer, 201)
    assert "restore the tokenizer" in fails(capsys, monkeypatch, "sample", "--run", out, "--tokens", 3)


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 6, "--stop-after", 2, "--out", out) == 0
    before = state(out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train_module.os, "fsync", full)
        assert "No space left on device" in fails(capsys, patch, "train", "--out", out, "--resume")
    assert state(out) == before
    assert run("train", "--out", out, "--resume") == 0
    assert len(records(out)) == 6


def test_a_tokenizer_larger_than_the_vocabulary_is_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json", 300)
    options = ["train", *SMALL, "--data", text, "--tokenizer", path, "--steps", 2]
    error = fails(capsys, monkeypatch, *options, "--out", tmp_path / "small")
    assert "301" in error
    assert "257" in error
    assert run(*options, "--model.vocab-size", 301, "--out", tmp_path / "large") == 0
    assert run("sample", "--run", tmp_path / "large", "--prompt", "word7 word8", "--tokens", 3) == 0


def test_bad_settings_are_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(*arguments: object) -> str:
        return fails(capsys, monkeypatch, "train", "--data", text, "--out", tmp_path / "run", *arguments)

    assert "num_experts_per_tok = 17" in message("--model.num-experts-per-tok", 17)
    assert "topk_group = 3" in message("--model.n-group", 2, "--model.topk-group", 3)
    grouped = ("--model.n-group", 16, "--model.topk-group", 1)
    assert "num_experts_per_tok = 2" in message(*grouped)
    assert "num_key_value_heads = 3" in message("--model.num-key-value-heads", 3)
    assert "partial_rotary_factor" in message("--model.head-dim", 7)
    assert "norm_topk_prob" in message("--model.num-experts-per-tok", 1)
    assert "--accumulate 3" in message("--accumulate", 3)
    assert "--steps 0" in message("--steps", 0)
    assert "--seq-len 4096" in message("--seq-len", 4096)
    assert "optimizer.muon_learning_rate = -1.0" in message("--optimizer.muon-learning-rate", -1.0)
    adamw = ("--optimizer.name", "adamw", "--optimizer.muon-learning-rate", 0.1)
    assert "uses no Muon" in message(*adamw)
    assert "decay_fraction = 0.3" in message("--optimizer.schedule", "cosine", "--optimizer.decay-fraction", 0.3)
    for count in (0, -1):
        assert f"--profile {count}: must be at least 1" in message("--profile", count)
    assert "--profile 300: 300 steps are left" in message("--profile", 300)
    assert "--profile 1: 1 steps are left" in message("--profile", 1, "--stop-after", 1)
    assert "--profile" in message("--profile", "x")
    assert not (tmp_path / "run").exists()
    assert "--out" in fails(capsys, monkeypatch, "train", "--out")
    assert "--seed" in message("--seed", 10**30)
    assert message("--steps", 0).startswith("functional-moe: --steps 0: must be at least 1")
    assert "'tiny'" in message("--preset", "tinny")
    assert "'jupiter-952b'" in fails(capsys, monkeypatch, "info", "--preset", "jupiter")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--nonsense", "1"], "--nonsense"),
        (["train", "--steps", "many"], "--steps: invalid literal for int() with base 10: 'many'"),
        (["walk"], "walk"),
        ([], "train, sample, info, tokenize"),
        (["sample"], "--run"),
        (["tokenize"], "--out"),
    ],
)
def test_what_is_no_flag_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    assert message in fails(capsys, monkeypatch, *arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["sample", "--help"]])
def test_help_is_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(*arguments)
    assert raised.value.code == 0
    assert "usage: functional-moe" in capsys.readouterr().out


def test_a_run_is_never_overwritten(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 1, "--out", out) == 0
    before = state(out)
    again = fails(capsys, monkeypatch, "train", *SMALL, "--data", text, "--steps", 1, "--out", out)
    assert f"{out} already holds a run" in again
    assert "--resume" in again
    assert state(out) == before


def test_resuming_with_other_settings_names_each(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 4, "--stop-after", 2, "--out", out) == 0
    resume = ("train", "--out", out, "--resume")
    error = fails(capsys, monkeypatch, *resume, "--seed", 3, "--model.num-experts", 8, "--optimizer.name", "adamw")
    assert "seed is 0 there and 3 here" in error
    assert "model.num_experts is 4 there and 8 here" in error
    assert "optimizer.name is muon there and adamw here" in error
    assert "preset is tiny there" in fails(capsys, monkeypatch, *resume, "--preset", "jupiter-952b")
    assert run(*resume, "--seed", 0, "--save-every", 1, "--max-refused", 3) == 0


def test_a_folder_serves_one_process(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "tiny-1"
    out.mkdir(parents=True)
    with FileLock(out / ".lock"):
        common = ["train", *SMALL, "--data", text, "--steps", 1]
        assert "in use by another process" in fails(capsys, monkeypatch, *common, "--out", out)
        assert run(*common) == 0  # takes the next free one
    assert [path.name for path in sorted((tmp_path / "runs").iterdir()) if (path / "settings.json").exists()] == [
        "tiny-2"
    ]


def test_a_run_killed_before_its_first_step_resumes(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 2, "--stop-after", 1, "--out", out) == 0
    expected = records(out)
    again = tmp_path / "again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "measure_matmul_rate", lambda *_: sys.exit(9))  # the end comes in between
        with pytest.raises(SystemExit):
            run("train", *SMALL, "--data", text, "--steps", 2, "--out", again)
    assert not (again / "metrics.jsonl").exists()
    assert run("train", "--out", again, "--resume", "--stop-after", 1) == 0
    assert records(again) == expected


def test_a_run_resumes_from_another_working_directory(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", *SMALL, "--data", "text", "--steps", 2, "--stop-after", 1, "--out", "run") == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    assert run("train", "--out", tmp_path / "moved", "--resume") == 0


def test_a_reader_who_leaves_ends_no_run(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "functional_moe", "train", *SMALL, "--data", text, "--steps", "3", "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors, errors
    assert len(records(out)) == 3


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x07é") == "a\tb\n\ufffd[2Jc\ufffdé"


def test_resuming_with_other_data_is_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 4, "--stop-after", 2, "--out", out) == 0
    (text / "00.py").write_text("x = 1\n" * 100)
    assert "the data has changed" in fails(capsys, monkeypatch, "train", "--out", out, "--resume")


def test_a_resume_of_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "say which run with --out" in fails(capsys, monkeypatch, "train", "--resume")
    assert "holds no run" in fails(capsys, monkeypatch, "train", "--resume", "--out", tmp_path / "none")
    assert "holds no run" in fails(capsys, monkeypatch, "sample", "--run", tmp_path / "none")


@pytest.mark.parametrize(
    "victim",
    [
        "states/000002/rank_00000.safetensors",
        "states/000002/manifest.json",
        "settings.json",
        "metrics.jsonl",
        "data.json",
    ],
)
def test_a_truncated_run_is_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 4, "--stop-after", 2, "--out", out) == 0
    path = out / victim
    path.write_bytes(path.read_bytes()[:20])
    assert victim in fails(capsys, monkeypatch, "train", "--out", out, "--resume")


def test_a_state_of_another_model_is_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    common = ("train", *SMALL, "--data", text, "--steps", 4, "--stop-after", 2)
    assert run(*common, "--out", a) == 0
    assert run(*common, "--model.num-experts", 8, "--out", b) == 0
    (a / "states").rename(tmp_path / "states")
    assert "there is no state" in fails(capsys, monkeypatch, "train", "--out", a, "--resume")
    (b / "states").rename(a / "states")
    other = "'identity.num_experts' is 8 in the checkpoint, 4 here"
    assert other in fails(capsys, monkeypatch, "train", "--out", a, "--resume")
    assert other in fails(capsys, monkeypatch, "sample", "--run", a)


def test_bad_sampling_arguments_are_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--data", text, "--steps", 1, "--out", out) == 0
    sample = ("sample", "--run", out)
    assert "temperature = -1.0" in fails(capsys, monkeypatch, *sample, "--temperature", -1.0)
    assert "top_p = 2.0" in fails(capsys, monkeypatch, *sample, "--top-p", 2.0)
    assert "0 new tokens" in fails(capsys, monkeypatch, *sample, "--tokens", 0)
    assert "--seed" in fails(capsys, monkeypatch, *sample, "--seed", -1)
    assert "not UTF-8" in fails(capsys, monkeypatch, *sample, "--prompt", "a\udcff")
    assert "the model takes fewer than 2048" in fails(capsys, monkeypatch, *sample, "--prompt", "x" * 3000)


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write(tmp_path / "file", b"in the way")
    error = fails(capsys, monkeypatch, "train", *SMALL, "--data", text, "--steps", 1, "--out", file / "run")
    assert str(file) in error


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(command_line, "info", broken)
    with pytest.raises(ValueError, match="ours") as raised:
        run("info")
    assert not isinstance(raised.value, DataError | StateError)
