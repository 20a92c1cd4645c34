"""Every command answers nonsense in one line: a wrong type, what is missing, what is forbidden, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from functional_moe import __main__ as command_line
from functional_moe.commands import calibrate, exchange, plan, sample, train
from functional_moe.commands import tokenize as tokenize_module
from functional_moe.commands.output import check_writable
from functional_moe.commands.program import end
from functional_moe.commands.settings import SettingsError

SMALL = """
--model.hidden-size 16 --model.num-hidden-layers 2 --model.num-attention-heads 2 --model.num-key-value-heads 1
--model.head-dim 8 --model.num-experts 4 --model.moe-intermediate-size 12 --model.balance-update-rate 0
--seq-len 32 --batch-size 4 --eval-windows 4 --sample-tokens 0 --steps 1
""".split()
PLAN = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a run of them, that run as a model directory, a configuration, and a file that is none of these."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text").mkdir()
    for number in range(10):
        (folder / "text" / f"{number}.py").write_text("\n".join(f"x_{line} = {line}" for line in range(40)))
    train_run = ["train", *SMALL, "--data", str(folder / "text"), "--out", str(folder / "run")]
    assert command_line.run(train_run) == 0
    assert command_line.run(["export", str(folder / "run"), "--out", str(folder / "model")]) == 0
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "file").write_bytes(b"\xff\xfe nothing of use")
    return folder


@pytest.fixture
def answer(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[int, str]]:
    """Runs a command line in ``home``: its exit status, and its standard error, which must be one line."""

    def run(line: str) -> tuple[int, str]:
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "argv", ["functional-moe", *line.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            command_line.main()
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert error.startswith("functional-moe: ")
        return int(str(raised.value.code)), error

    return run


TRAIN = f"train {' '.join(SMALL)}"
PLAN_SMALL = "plan --config plan.json --nodes 1"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nonsense", "nonsense"),
        # of another type
        (f"{TRAIN} --steps many", "--steps"),
        (f"{TRAIN} --steps 1.5", "--steps"),
        (f"{TRAIN} --steps 0", "--steps 0"),
        (f"{TRAIN} --model.num-experts none", "num-experts"),
        ("sample --run run --tokens many", "--tokens"),
        ("sample --run run --temperature nan", "temperature = nan"),
        ("info --preset 3", "unknown preset '3'"),
        ("tokenize text --out x.bin --format prose", "--format"),
        ("tokenize text --out x.txt", ".txt"),
        ("import model --out x --nonsense 1", "--nonsense"),
        ("export run --out x --dtype int8", "--dtype"),
        ("export run --out x --max-shard-size 0", "max_shard_size"),
        ("export run --out x --max-shard-size many", "--max-shard-size"),
        ("plan --nodes some", "--nodes"),
        ("plan --seq-len 0", "seq_len = 0"),
        (f"{PLAN_SMALL} --rows 0", "--rows 0"),
        ("calibrate --ranks 0", "--ranks 0"),
        ("calibrate --ranks two", "--ranks"),
        # missing
        (f"{TRAIN} --data missing --out x", "missing"),
        (f"{TRAIN} --data text --tokenizer missing.json --out x", "missing.json"),
        ("train --out missing --resume", "missing holds no run"),
        ("train --init-from missing", "missing holds no run"),
        ("sample --run missing", "missing holds no run"),
        ("tokenize missing --out x.bin", "missing"),
        ("tokenize text --out x.bin --tokenizer missing.json", "missing.json"),
        ("import missing --out x", "missing/config.json"),
        ("export missing --out x", "missing holds no run"),
        ("plan --config missing.json", "missing.json"),
        ("plan --hardware missing.toml", "missing.toml"),
        # there, but no such thing
        (f"{TRAIN} --data file --out x", "file"),
        (f"{TRAIN} --data text --tokenizer file --out x", "file"),
        ("train --out file --resume", "file"),
        ("train --init-from file", "file"),
        ("sample --run file", "file"),
        ("sample --run text", "text holds no run"),
        ("tokenize file --out x.bin", "file"),
        ("import file --out x", "file"),
        ("import text --out x", "config.json"),
        ("export file --out x", "file"),
        ("plan --config file", "file"),
        ("plan --config text", "text"),
        ("plan --hardware file", "file"),
        ("plan --hardware text", "text"),
        # may not be written: below a file, and in /proc, where nobody may make anything, root neither
        (f"{TRAIN} --data text --out file/x", "file"),
        (f"{TRAIN} --data text --out /proc/x", "/proc/x"),
        ("tokenize text --out file/x.bin", "file"),
        ("tokenize text --out /proc/x.bin", "/proc"),
        # a folder that is missing is made, but not below a file
        ("tokenize text --out file/missing/x.bin", "file"),
        ("import model --out file/x", "file"),
        ("import model --out /proc/x", "/proc"),
        ("export run --out file/x", "file"),
        ("export run --out /proc/x", "/proc"),
        (f"{PLAN_SMALL} --plot file/x.png", "--plot file/x.png"),
        (f"{PLAN_SMALL} --plot /proc/x.png", "--plot /proc/x.png"),
        (f"{PLAN_SMALL} --plot x.nonsense", "--plot x.nonsense"),
        (f"{PLAN_SMALL} --trace file/x.json", "--trace file/x.json"),
        (f"{PLAN_SMALL} --trace /proc/x.json", "--trace /proc/x.json"),
        ("calibrate --ranks 1 --out file/x.toml", "file/x.toml"),
        ("calibrate --ranks 1 --out /proc/x.toml", "/proc/x.toml"),
    ],
)
def test_nonsense_is_one_line(
    answer: Callable[[str], tuple[int, str]], monkeypatch: pytest.MonkeyPatch, line: str, named: str
) -> None:
    # Nobody should wait a minute for what can be said at once.
    monkeypatch.setattr(calibrate, "describe_machine", lambda *_: pytest.fail("it was measured first"))
    status, error = answer(line)
    assert status == 2
    assert named in error


def test_a_picture_without_matplotlib_is_one_line(
    answer: Callable[[str], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    status, error = answer(f"{PLAN_SMALL} --plot x.png")
    assert status == 2
    assert "--plot x.png: matplotlib is not installed" in error


def test_a_taken_folder_is_refused_before_weights_are_read(
    home: Path, answer: Callable[[str], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "load_state", lambda *_, **__: pytest.fail("the weights were read first"))
    for out, named in (("model", "model exists"), ("file/x", "cannot write"), ("/proc/x", "cannot write /proc/x")):
        before = set(home.iterdir())
        status, error = answer(f"export run --out {out}")
        assert (status, named in error, set(home.iterdir())) == (2, True, before)


def test_what_is_there_is_kept_and_asked_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be written is refused though its folder may; a device is taken though its folder may not."""
    there = tmp_path / "there.toml"
    there.write_text("kept")
    check_writable("--out", there)
    assert there.read_text() == "kept"
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write all
    with pytest.raises(SettingsError, match=r"--out .*there\.toml: may not be written"):
        check_writable("--out", there)
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: pytest.fail("something was made in /dev"))
    check_writable("--out", Path(os.devnull))
    assert list(tmp_path.iterdir()) == [there]


INTERRUPTED: dict[str, tuple[Any, str, str]] = {
    "train, before its steps": (train, "fit_bigram", f"{TRAIN} --data text --out x"),
    "sample": (sample, "generate", "sample --run run"),
    "tokenize": (tokenize_module, "write_tokens", "tokenize text --out x.bin"),
    "import": (exchange, "write_state", "import model --out y"),
    "export": (exchange.hf, "save", "export run --out z"),
    "plan": (plan, "predict", PLAN_SMALL),
    "plan --search": (plan, "search", f"{PLAN_SMALL} --search"),
    "calibrate": (calibrate, "measure_products", "calibrate --ranks 1 --out x.toml"),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_is_one_line_and_leaves_nothing_half_made(
    home: Path, answer: Callable[[str], tuple[int, str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, function, line = INTERRUPTED[name]
    before = set(home.iterdir())
    monkeypatch.setattr(module, function, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert answer(line) == (130, "functional-moe: interrupted\n")
    left = set(home.iterdir()) - before
    # A run that did not begin leaves its folder free for the next try.
    assert not left or (name.startswith("train") and not (home / "x" / "settings.json").exists())


@pytest.mark.parametrize("line", ["plan", "calibrate --ranks 2 --out x.toml"])
def test_ctrl_c_reaches_all_processes_and_is_told_once(tmp_path: Path, line: str) -> None:
    """As a terminal sends it: to the whole group, the workers too."""
    ready = "from functional_moe import __main__ as c; print('ready', flush=True); c.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", ready, *line.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)  # at any moment from here on the answer is the same
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.splitlines()[-1:]) == (130, ["functional-moe: interrupted"]), errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "start", ["import functional_moe.__main__", "import runpy; runpy.run_module('functional_moe', {}, '__main__')"]
)
def test_ctrl_c_while_torch_is_imported_is_one_line(start: str) -> None:
    early = f"""
import signal, sys
class Slow:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Slow())
{start}
"""
    ended = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "functional-moe: interrupted\n")


def test_ctrl_c_after_the_work_is_done_leaves_the_result_and_its_status(tmp_path: Path) -> None:
    """While the interpreter ends, which takes longer than to write these tokens."""
    late = (
        "import atexit, os, signal; from functional_moe import __main__ as c; "
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); c.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", late, "tokenize", "--out", "x.bin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_an_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "functional_moe", "info"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (2, "functional-moe: No space left on device\n")


def test_what_is_no_mistake_of_the_users_keeps_its_traceback() -> None:
    def broken() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        end(broken, "program")
