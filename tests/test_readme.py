"""The README runs as printed: every block of code, every command, the commands with flags that make them short."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from functional_moe import __main__ as command_line

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
]
TRAIN = "--batch-size 4 --seq-len 64 --eval-windows 4 --sample-tokens 8"
RANKS = "torchrun --nproc-per-node 4 -m functional_moe train --fsdp 2 --ep 2 --out runs/four --steps 20 --stop-after 10"

SHORTER = {
    "functional-moe train": f"{TRAIN} --steps 3 --stop-after 2",
    'functional-moe sample --run runs/tiny-1 --prompt "def "': "--tokens 4",
    "functional-moe train --out runs/tiny-1 --resume": "",
    "functional-moe info --preset jupiter-952b": "",
    "functional-moe train --help": "",
    "functional-moe train --data my/texts --steps 2000": f"{TRAIN} --stop-after 1",
    "functional-moe tokenize my/texts --out texts.bin --tokenizer tokenizer.json": "",
    "functional-moe import Qwen3-MoE-dir --out runs/qwen": "",
    "functional-moe export runs/qwen --out qwen-dir": "",
    RANKS: f"{TRAIN} --steps 2 --stop-after 1",
    "functional-moe train --out runs/four --resume --fsdp 1 --ep 1": "",
    "functional-moe train --hbm-budget 200MiB --host-budget 1GiB --steps 40": f"{TRAIN} --steps 1",
    "functional-moe plan --preset jupiter-952b --hardware jupiter --nodes 96 --seq-len 65536": "",
    "functional-moe calibrate --out this-cpu.toml": "--ranks 1",
}
"""What is appended to each command, in the order of the README: a later one reads what an earlier one wrote."""

HELP = "--help"
"""All that is asked of scripts here: benchmarks take minutes, and examples have tests of their own."""


def kind(command: str) -> str:
    """How a command is tested: as one of ``SHORTER``, a script, by ``.ci/run``, or not at all."""
    if command in SHORTER:
        return "shortened"
    if re.fullmatch(r"python (benchmarks|examples)/\w+\.py", command):
        return "script"
    if command.startswith(("python -m pip install", "OMP_NUM_THREADS=1 python -m pytest")):
        return "ci"
    if command.startswith("sbatch "):
        return "batch"
    raise AssertionError(f"README: no test knows the command {command!r}")


def test_every_command_is_known_and_in_order() -> None:
    assert [command for command in COMMANDS if kind(command) == "shortened"] == list(SHORTER)
    assert COMMANDS[1] == "functional-moe train"  # .ci/run runs the first two in an environment made from nothing


@pytest.mark.parametrize("command", [command for command in COMMANDS if kind(command) == "ci"])
def test_what_installs_and_tests_is_done_by_the_checks(command: str) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    plain = script.replace("install -q", "install")
    assert command in plain or (command == COMMANDS[0] and 'eval "${commands[0]}"' in script)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README takes for granted: texts, a tokenizer, a model of somebody else's."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my" / "texts").mkdir(parents=True)
    for number in range(8):
        lines = "\n".join(f"value_{line} = {number + line}" for line in range(60))
        (folder / "my" / "texts" / f"{number}.py").write_text(lines)
    finetune = runpy.run_path(str(ROOT / "examples" / "finetune.py"))
    finetune["make_model"](folder / "Qwen3-MoE-dir")
    (folder / "tokenizer.json").write_bytes((folder / "Qwen3-MoE-dir" / "tokenizer.json").read_bytes())
    return folder


def torchrun(home: Path, arguments: str) -> str:
    """What the ranks printed, one thread each."""
    own_port = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *own_port, *shlex.split(arguments)],
        cwd=home,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_command_runs(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for command, flags in SHORTER.items():
        program, _, arguments = f"{command} {flags}".partition(" ")
        if program == "torchrun":
            torchrun(home, arguments)
            continue
        try:
            status = command_line.run(shlex.split(arguments))
        except SystemExit as stop:  # --help
            status = stop.code
        assert status == 0, command
    assert "held-out loss" in capsys.readouterr().out
    for left in ("runs/tiny-1/training.png", "runs/tiny-1/sample.txt", "texts.bin", "qwen-dir/model.safetensors"):
        assert (home / left).stat().st_size, left


@pytest.mark.parametrize("command", [command for command in COMMANDS if kind(command) == "script"])
def test_every_script_has_its_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / command.split()[1]
    monkeypatch.setattr(sys, "argv", [str(script), HELP])
    monkeypatch.syspath_prepend(script.parent)  # as Python does, and run_path does not
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    assert HELP in capsys.readouterr().out


def test_every_batch_script_is_one() -> None:
    for command in COMMANDS:
        if kind(command) == "batch":
            subprocess.run(["bash", "-n", ROOT / command.split()[1]], check=True)


def is_of_ranks(block: str) -> bool:
    return "init_process_group" in block


def test_the_code_runs_as_printed(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks in one namespace, but for the one that ``torchrun`` runs after the first, on two ranks."""
    monkeypatch.chdir(home)
    assert len(CODE[0].strip().splitlines()) <= 25
    first = CODE[0].replace("range(20)", "range(2)")
    scope: dict[str, object] = {}
    for block in [first, *(block for block in CODE[1:] if not is_of_ranks(block))]:
        exec(block, scope)
    loss = re.findall(r"^0 ([\d.]+)", capsys.readouterr().out, flags=re.MULTILINE)[0]
    (of_ranks,) = (block for block in CODE if is_of_ranks(block))
    (home / "ranks.py").write_text(CODE[0].replace("range(20)", "range(0)") + of_ranks)
    torchrun(home, "--redirects 1 --log-dir logs --nproc-per-node 2 ranks.py")  # else their lines may mix
    for rank in range(2):
        (log,) = home.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        said, other = log.read_text().split()
        assert int(said) == rank
        assert float(other) == pytest.approx(float(loss), rel=1e-5)  # fp32, sums in another order


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_what_a_document_links_to_exists(document: str) -> None:
    for target in re.findall(r"\]\(([^):#]+)\)", (ROOT / document).read_text()):
        assert (ROOT / target).exists(), target
