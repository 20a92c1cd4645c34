"""Training under torchrun: equal to one process, resumed on any mesh; every failure ends all ranks with one line."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from functional_moe import __main__ as command_line
from functional_moe import parallel
from functional_moe.commands.settings import SettingsError, TrainSettings
from functional_moe.parallel import RankError, World

SMALL = """
--model.hidden-size 16 --model.num-hidden-layers 2 --model.num-attention-heads 2 --model.num-key-value-heads 1
--model.head-dim 8 --model.num-experts 4 --model.moe-intermediate-size 12 --seq-len 32 --batch-size 5
--eval-windows 7 --eval-every 2 --sample-tokens 8 --steps 8
""".split()
FAULTY = Path(__file__).with_name("faulty_rank.py")
MODULE = ("-m", "functional_moe")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents with some structure."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line}\n" for line in range(6)]
        (folder / f"{number:02}.py").write_text("\n".join(lines))
    return folder


def started(ranks: int, program: tuple[object, ...], *arguments: object) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*launcher, *map(str, program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


class Ended(NamedTuple):
    status: int
    output: str
    errors: str

    @property
    def told(self) -> list[str]:
        """What our processes said of errors; torchrun says more."""
        return [line for line in self.errors.splitlines() if line.startswith("functional-moe: ")]

    @property
    def exit_codes(self) -> set[int]:
        """Of the ranks that failed, as torchrun reports them."""
        return set(map(int, re.findall(r"exitcode *: (-?\d+) \(pid", self.errors)))


def launch(ranks: int, program: tuple[object, ...], *arguments: object) -> Ended:
    process = started(ranks, program, *arguments)
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return Ended(process.returncode, output, errors)


def run(*arguments: object) -> int:
    return command_line.run([str(argument) for argument in arguments])


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return lines


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "states").iterdir())


def test_a_run_goes_from_mesh_to_mesh_as_if_one_process_had_run_it(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    common = ("train", *SMALL, "--data", text)
    assert run(*common, "--out", whole) == 0
    assert run(*common, "--out", out, "--stop-after", 2) == 0
    capsys.readouterr()
    # A save after every step: each holds the values of its own, whatever is trained meanwhile.
    resume = ("train", "--out", out, "--resume", "--save-every", 1)
    for ranks, mesh, steps in ((2, ("--fsdp", 2), 4), (2, ("--fsdp", 1, "--ep", 2), 6)):
        ended = launch(ranks, MODULE, *resume, *mesh, "--stop-after", steps)
        assert ended.status == 0, ended.errors
        assert ended.told == []
        assert ended.output.count("run: ") == 1  # rank 0 alone talks
        assert f"stopped at step {steps} of 8" in ended.output
        assert states(out) == [f"{steps:06}"]
        assert len(list((out / "states" / f"{steps:06}").glob("rank_*.safetensors"))) == ranks
    assert run("sample", "--run", out, "--prompt", "def ", "--tokens", 4) == 0
    assert capsys.readouterr().out.startswith("def ")
    assert run(*resume, "--fsdp", 1, "--ep", 1) == 0
    expected, found = records(whole), records(out)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert [line["step"] for line in found if "held_out_loss" in line] == [2, 4, 6, 8]
    for line, reference in zip(found, expected, strict=True):
        assert set(line) == set(reference)
        assert line["tokens"] == reference["tokens"] == 5 * 32
        for name in {"loss", "aux_loss", "z_loss", "grad_norm", "learning_rates", "held_out_loss"} & set(line):
            # fp32 sums in another order, and Muon's polynomial on them
            assert line[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("gather", [(), ("--gather-dtype", "float8")], ids=["wide", "fp8"])
def test_four_ranks_train_with_copies_and_more_ranks_than_rows(
    tmp_path: Path, text: Path, gather: tuple[str, ...]
) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    common = ("train", *SMALL, "--data", text, "--steps", 2, "--batch-size", 3, *gather)
    assert run(*common, "--out", reference) == 0
    ended = launch(4, MODULE, *common, "--out", out, "--replicate", 2, "--ep", 2)
    assert ended.status == 0, ended.errors
    assert (out / "training.png").exists()
    assert not (out / "sample.txt").exists()
    for line, expected in zip(records(out), records(reference), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert records(out)[-1]["held_out_loss"] == pytest.approx(records(reference)[-1]["held_out_loss"], rel=1e-4)


def test_two_ranks_train_within_a_budget_and_refuse_another_in_one_line(tmp_path: Path, text: Path) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    common = ("train", *SMALL, "--data", text, "--steps", 2)
    assert run(*common, "--out", reference) == 0
    ended = launch(2, MODULE, *common, "--out", out, "--ep", 2, "--hbm-budget", "1000")
    assert ended.status != 0
    assert len(ended.told) == 1
    assert "the smallest budget" in ended.told[0]
    assert not out.exists()
    ended = launch(2, MODULE, *common, "--out", out, "--ep", 2, "--hbm-budget", "1MB", "--host-budget", "1MB")
    assert ended.status == 0, ended.errors
    assert ended.output.count("step: ") == 1
    for line, expected in zip(records(out), records(reference), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_another_number_of_processes_is_one_line_and_makes_no_folder(tmp_path: Path, text: Path) -> None:
    ended = launch(2, MODULE, "train", *SMALL, "--data", text, "--out", tmp_path / "out", "--fsdp", 3)
    assert ended.status != 0
    assert ended.told == ["functional-moe: --replicate 1 x --fsdp 3 x --ep 1 is 3 processes, torchrun started 2"], (
        ended.errors
    )
    assert ended.exit_codes == {2}
    assert not (tmp_path / "out").exists()


def test_ranks_that_disagree_are_named_and_nothing_is_overwritten(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    assert run("train", *SMALL, "--data", text, "--out", out, "--stop-after", 1) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    arguments = f"train --out {out} --resume --fsdp 2 --save-every $((7 + RANK))"
    shell = ("--no-python", "sh", "-c", f"exec {sys.executable} -m functional_moe {arguments}")
    ended = launch(2, shell)
    assert ended.status != 0
    assert ended.told == ["functional-moe: the ranks disagree on save_every: '7' on rank 0; '8' on rank 1"], (
        ended.errors
    )
    assert ended.exit_codes == {2}
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_missing_shard_is_one_line_and_the_run_stays(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    assert run("train", *SMALL, "--data", text, "--out", out, "--stop-after", 1) == 0
    shard = out / "states" / "000001" / "rank_00000.safetensors"
    shard.unlink()
    ended = launch(2, MODULE, "train", "--out", out, "--resume", "--ep", 2)
    assert ended.status != 0
    assert len(ended.told) == 1, ended.errors
    assert str(shard) in ended.told[0]
    assert ended.exit_codes == {2}
    assert states(out) == ["000001"]


def test_a_rank_that_raises_shows_its_traceback_first_and_ends_all(tmp_path: Path, text: Path) -> None:
    faulty = (FAULTY, "raise", 1, 2)
    ended = launch(2, faulty, "train", *SMALL, "--data", text, "--out", tmp_path / "out", "--fsdp", 2)
    assert ended.status != 0
    assert ended.told[0] == "functional-moe: rank 1 failed:", ended.errors
    assert "KeyError: 'the reason'" in ended.errors
    assert ended.errors.index("KeyError: 'the reason'") < ended.errors.index(ended.told[1])
    assert ended.told[1].startswith("functional-moe: rank 0: rank 1 failed before: ")
    assert len(ended.told) == 2
    assert states(tmp_path / "out") == ["000000"]


def test_a_rank_that_would_not_notice_ends_with_the_one_that_failed(tmp_path: Path, text: Path) -> None:
    faulty = (FAULTY, "raise alone", 1, 2)
    ended = launch(2, faulty, "train", *SMALL, "--data", text, "--out", tmp_path / "out", "--fsdp", 2)
    assert ended.told == [
        "functional-moe: rank 1 failed:",
        "functional-moe: rank 0: ended because another failed",
    ], ended.errors
    assert ended.exit_codes == {1}  # torchrun did not have to kill


def test_a_full_disk_on_rank_0_is_its_line(tmp_path: Path, text: Path) -> None:
    faulty = (FAULTY, "full", 0, 2)
    out = tmp_path / "out"
    ended = launch(2, faulty, "train", *SMALL, "--data", text, "--out", out, "--fsdp", 2, "--save-every", 3)
    assert ended.status != 0
    assert ended.told[0].startswith("functional-moe: rank 0: cannot write"), ended.errors
    assert "No space left on device" in ended.told[0]
    assert states(out) == ["000000"]


def test_a_killed_rank_ends_all_and_leaves_nothing_half_written(tmp_path: Path, text: Path) -> None:
    faulty, out = (FAULTY, "SIGKILL", 1, 3), tmp_path / "out"
    ended = launch(2, faulty, "train", *SMALL, "--data", text, "--out", out, "--fsdp", 2, "--save-every", 2)
    assert ended.status != 0
    assert len(ended.told) == 1, ended.errors
    assert re.match(r".*: rank 0: no sign of rank 1: all_reduce .* over ranks \[0, 1\], failed: ", ended.told[0])
    assert "Traceback" not in ended.errors.split(ended.told[0])[0]
    assert ended.exit_codes == {1, -9}
    # The save of step 2 was under way: it is there whole, or the one before is.
    assert [name for name in states(out) if not name.startswith(".")] in (["000000"], ["000000", "000002"], ["000002"])
    assert run("train", "--out", out, "--resume", "--fsdp", 1) == 0
    assert [line["step"] for line in records(out)] == list(range(1, 9))


def test_a_peer_that_hangs_is_named_after_the_time_out(tmp_path: Path, text: Path) -> None:
    faulty = (FAULTY, "SIGSTOP", 1, 2)
    arguments = ("train", *SMALL, "--data", text, "--out", tmp_path / "out", "--ep", 2, "--timeout", 15)
    process = started(2, faulty, *arguments)
    stuck, lines = 0, []
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("pid "):
                stuck = int(line.split()[1])
            if line.startswith("functional-moe: "):
                os.kill(stuck, signal.SIGCONT)  # else torchrun waits for half a minute before it kills
        assert process.wait() != 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    told = [line for line in lines if line.startswith("functional-moe: ")]
    assert re.match(r".*: rank 0: no sign of rank 1: all_reduce .* failed: .*[Tt]imed out", told[0]), lines


def test_a_signal_to_one_rank_stops_all_at_one_step_with_the_state_saved(tmp_path: Path, text: Path) -> None:
    faulty, out = (FAULTY, "SIGTERM", 1, 3), tmp_path / "out"
    ended = launch(2, faulty, "train", *SMALL, "--data", text, "--out", out, "--fsdp", 2)
    assert "stopped at step 4 of 8" in ended.output, ended.errors
    assert ended.told == []
    assert ended.exit_codes == {128 + signal.SIGTERM}
    assert states(out) == ["000004"]
    assert len(records(out)) == 4


def test_a_process_by_itself_is_told_how_to_start_many() -> None:
    with pytest.raises(SettingsError, match=r"--replicate 1 x --fsdp 2 x --ep 2 is 4 processes.*--nproc-per-node 4 "):
        run("train", "--fsdp", 2, "--ep", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep": 3}, r"--ep 3: does not divide model.num_experts 16"),
        ({"fsdp": 0}, r"--fsdp 0: must be at least 1"),
        ({"fsdp": 3, "batch_size": 4, "accumulate": 2}, r"--accumulate 2: .* each of 3 processes .* --batch-size 4"),
        ({"timeout": 0.0}, r"--timeout 0: must lie between"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        TrainSettings(**settings)


def _world() -> World:
    import torch.distributed as dist

    return World(dist.get_rank(), dist.get_world_size(), control=dist.group.WORLD)


def _told(kind: str) -> Any:
    world = _world()
    try:
        if kind == "data":
            world.agree({"seed": 1, "the data": "abc" if world.rank == 1 else "xyz"})
        if kind == "same":
            world.agree({"seed": 1})
        if kind == "missing":
            world.agree({"seed": 1} if world.rank else {"seed": 1, "rate": 2})
        if kind == "one":
            world.together("a test", lambda: [1, 2, 1 / (world.rank - 2)], ZeroDivisionError)
        if kind == "all":
            world.together("a test", lambda: 1 / 0, ZeroDivisionError)
        if kind == "first":
            return world.from_first("a test", lambda: f"from {world.rank}")
        if kind == "largest":
            return world.largest("a test", world.rank, -world.rank)
    except RankError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("data", "the ranks disagree on the data: 'xyz' on ranks 0, 2-3; 'abc' on rank 1"),
        ("same", None),
        ("missing", "the ranks disagree on rate: '2' on rank 0; 'missing' on ranks 1-3"),
        ("one", "rank 2: division by zero"),
        ("all", "division by zero"),
        ("first", "from 0"),
        ("largest", [3, 0]),
    ],
)
def test_what_the_ranks_say_is_the_same_on_each(kind: str, message: Any) -> None:
    assert parallel.shared_pool().run(_told, 4, kind) == [message] * 4
