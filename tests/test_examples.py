"""The examples: each prints what it claims, and answers nonsense in one line."""

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from functional_moe.commands import program

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = (
    "compose_train_step",
    "shard_your_own_function",
    "remat_under_torch_func",
    "muon_in_your_code",
    "plan_your_cluster",
    "finetune",
)


def printed(tmp_path: Path, name: str, *arguments: object) -> str:
    """What an example writes, run as a reader runs it; nothing may be on standard error."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def numbers(text: str, pattern: str) -> list[tuple[float, ...]]:
    """The groups of every match, as numbers; there is one at least."""
    found = [tuple(map(float, match.groups())) for match in re.finditer(pattern, text)]
    assert found, text
    return found


def test_all_are_here_and_short() -> None:
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80, name


def test_a_step_by_hand_equals_the_built_in_one_and_is_transformed(tmp_path: Path) -> None:
    text = printed(tmp_path, "compose_train_step", "--steps", 3)
    ((by_hand, built_in, apart),) = numbers(text, r"by hand: loss ([\d.]+), built in: ([\d.]+); parameters (\S+) apart")
    assert by_hand == built_in
    assert apart < 1e-4  # fp32, other kernels
    sweep = numbers(text, r"rate ([\d.]+): loss ([\d.]+) in one vmap, ([\d.]+) by itself")
    assert [rate for rate, *_ in sweep] == [0.005, 0.01, 0.02, 0.04]
    assert all(together == pytest.approx(alone, abs=1e-4) for _, together, alone in sweep)
    ((slope, difference),) = numbers(text, r"3 steps: (-?[\d.]+), by finite difference (-?[\d.]+)")
    # The difference is over a fifth of the rate, and routing jumps in it.
    assert slope == pytest.approx(difference, rel=0.1)
    assert slope < -1


def test_a_function_of_ones_own_is_sharded_and_the_mistake_is_explained(tmp_path: Path) -> None:
    text = printed(tmp_path, "shard_your_own_function", "--examples", 12)
    right, _, mesh, *problems = text.splitlines()
    assert re.fullmatch(r"equal to one process within 1e-12: on \[.*\] ranks, \d+ placements of the weights", right)
    assert re.search(r"[234]", right.split("[")[1])  # not on one rank alone
    assert mesh == "on the mesh fsdp 2 x ep 1, against one process:"
    assert [line.split(" differs")[0] for line in problems] == ["gradient of weights.text", "gradient of text"]


def test_remat_gives_the_same_bits_in_less_memory_where_torch_raises(tmp_path: Path) -> None:
    text = printed(tmp_path, "remat_under_torch_func", "--layers", 4)
    assert "torch.utils.checkpoint under torch.func.grad: " in text
    assert "don't yet support saved tensor hooks" in text
    assert len(re.findall(r"^grad, .* MiB, equal bit for bit$", text, flags=re.MULTILINE)) == 3
    (plain,), (remat,), (kept,) = numbers(text, r"grad, .*: ([\d.]+) MiB")
    assert remat < kept < plain / 3
    assert "vmap of grad: equal bit for bit" in text
    ((apart,),) = numbers(text, r"jvp of grad: (\S+) apart")
    assert apart < 1e-5


def test_muon_learns_faster_than_adamw_and_as_torchs_does(tmp_path: Path) -> None:
    text = printed(tmp_path, "muon_in_your_code", "--steps", 100)
    loss = {line.split(":")[0]: numbers(line, r": ([\d.]+) nats per byte")[0][0] for line in text.splitlines()}
    assert set(loss) == {"AdamW", "Muon and AdamW", "torch.optim.Muon and AdamW"}
    assert loss["Muon and AdamW"] < loss["AdamW"]
    # torch's iterates in bf16, and takes q, k and v for one matrix.
    assert loss["Muon and AdamW"] == pytest.approx(loss["torch.optim.Muon and AdamW"], rel=0.05)


def test_a_cluster_is_planned_in_five_lines_for_each_size(tmp_path: Path) -> None:
    text = printed(tmp_path, "plan_your_cluster", "--nodes", 2, "--tokens", 4096)
    assert text.startswith("30.5 billion parameters, 3.4 active; nodes of 8 x 80 GB\n")
    plans = text.split(" on each device: ")[1:]
    assert len(plans) == 3
    for plan in plans:
        starts = [line.split(":")[0] for line in plan.splitlines()[1:6]]
        assert starts == ["step", "saved", "beside compute", "bound by", "instead"]
    assert all(0.05 < share / 100 < 1 for (share,) in numbers(text, r"tokens/s each, (\d+)% of the peak"))


def test_answers_alone_are_learned_and_transformers_agrees(tmp_path: Path) -> None:
    text = printed(tmp_path, "finetune")
    (learned,) = re.findall("learned of a row: (.*)", text)
    assert re.fullmatch("(Paris|Rome|Tokyo)+", learned)
    ((before, after),) = numbers(text, r"60 steps: loss ([\d.]+) -> ([\d.]+) nats")
    assert after < 0.1 < before
    assert "Capital of France? Paris\nCapital of Italy? Rome\nCapital of Japan? Tokyo\n" in text
    ((apart,),) = numbers(text, r"finetuned: logits of transformers are (\S+) from ours")
    assert apart < 1e-4  # fp32
    assert (tmp_path / "finetuned" / "chat_template.jinja").exists()


def answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object
) -> tuple[int, str]:
    """Exit status and standard error of an example, which must be one line that begins with its name."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith(f"{name}.py: ")
    return int(str(raised.value.code)), error


NUMBERS = {
    "compose_train_step": "--steps",
    "shard_your_own_function": "--examples",
    "remat_under_torch_func": "--layers",
    "muon_in_your_code": "--steps",
    "plan_your_cluster": "--nodes",
    "finetune": "--steps",
    "muon_vs_adamw": "--steps",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_nonsense_is_one_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flag = NUMBERS[name]
    for value in ("many", "0", "-1", "1.5", "9" * 30):
        status, error = answer(capsys, monkeypatch, name, f"{flag}={value}")
        assert (status, f"{flag}: {value!r} is no whole number of at least 1" in error) == (2, True)
    assert answer(capsys, monkeypatch, name, flag)[0] == 2
    assert "--nonsense" in answer(capsys, monkeypatch, name, "--nonsense")[1]


@pytest.mark.parametrize("name", NUMBERS)
def test_ctrl_c_is_one_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "read_flags", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert answer(capsys, monkeypatch, name) == (130, f"{name}.py: interrupted\n")


def test_what_cannot_be_read_or_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, *arguments: object) -> str:
        status, error = answer(capsys, monkeypatch, name, *arguments)
        assert status == 2
        return error

    file = tmp_path / "file"
    file.write_text("no = model")
    for nowhere in (file / "below", Path("/proc/nowhere")):  # which not even root may make
        assert str(nowhere) in refused("compose_train_step", "--cache", nowhere)
    assert "no such file" in refused("plan_your_cluster", "--hardware", tmp_path / "missing.toml")
    assert "no such file" in refused("plan_your_cluster", "--hardware", tmp_path)
    assert "not TOML" in refused("plan_your_cluster", "--hardware", file)
    assert "max_position_embeddings" in refused("plan_your_cluster", "--tokens", 99_999)
    assert "config.json" in refused("finetune", "--model", tmp_path / "missing")
    assert "config.json" in refused("finetune", "--model", file)
    # Asked before anything is made, loaded or trained.
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    monkeypatch.setattr(
        transformers.PreTrainedTokenizerFast, "save_pretrained", lambda *_: pytest.fail("a model first")
    )
    assert "taken exists" in refused("finetune", "--out", tmp_path / "taken")
    assert f"cannot write {file}/below" in refused("finetune", "--out", file / "below")
    assert "cannot write /proc/nowhere" in refused("finetune", "--out", "/proc/nowhere")


@pytest.mark.parametrize(("name", "package"), [("shard_your_own_function", "hypothesis"), ("finetune", "transformers")])
def test_what_the_extra_brings_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = f"{name}.py: {package} is not installed (the extra 'test' brings it)\n"
    assert answer(capsys, monkeypatch, name) == (2, expected)
