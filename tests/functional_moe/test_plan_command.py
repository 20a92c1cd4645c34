"""What ``plan`` and ``calibrate`` print, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from functional_moe.__main__ import run
from functional_moe.commands.calibrate import Products, Wire, describe_machine
from functional_moe.commands.settings import SettingsError
from functional_moe.machine import HARDWARE, read_machine

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "compute_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_json_is_one_object(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(config), "--nodes", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["mesh"] == {"fsdp": 2, "ep": 4}
    assert printed["tokens_per_second"] == pytest.approx(64 / printed["step_seconds"])
    assert printed["assumptions"] == []
    assert sum(printed["memory"]["hbm"]["contents"].values()) <= printed["memory"]["hbm"]["peak"]


def test_report_names_every_stream_and_tier(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "timeline.png", tmp_path / "trace.json"
    arguments = ["--nodes", "2", "--plot", str(picture), "--trace", str(trace)]
    assert run(["plan", "--config", str(config), *arguments]) == 0
    printed = capsys.readouterr().out
    for words in ("compute", "gather", "reduce", "memory hbm", "bound by", "optimizer", "tokens/s", "utilisation"):
        assert words in printed
    assert picture.stat().st_size > 10_000
    assert json.loads(trace.read_text())["traceEvents"]


def test_search_says_what_each_schedule_assumes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(config), "--nodes", "2", "--ep", "4", "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    speeds = [one["tokens_per_second"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    for one in found:
        # Gathers in fp8 are something that the code does.
        assert (one["choice"]["reduce_dtype"] == "float8") == any("fp8" in text for text in one["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "jupitr"], "unknown preset 'jupitr'; did you mean 'jupiter-952b'"),
        (["--hardware", "jupter"], "unknown hardware 'jupter'.*'jupiter'"),
        (["--nodes", "97"], "--nodes 97: 388 devices do not divide the 384 experts"),
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--ep", "5"], "--ep 5: must divide"),
        (["--seq-len", "131072"], "seq_len = 131072 exceeds max_position_embeddings"),
        (["--hbm-gb", "-1"], "--hbm-gb -1.0"),
        (["--state-in", "disk"], "--state-in disk: the machine has hbm, host"),
        (["--config", "/nowhere.json"], "/nowhere.json: No such file"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        run(["plan", *arguments])
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_said_in_gib(config: Path) -> None:
    with pytest.raises(SettingsError, match=r"fits in no schedule on jupiter: [\d.]+ GiB are missing in hbm"):
        run(["plan", "--config", str(config), "--nodes", "2", "--hbm-gb", "1e-5"])


def test_unknown_fields_of_a_model_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**SMALL, "hidden": 3}))
    with pytest.raises(SettingsError, match=r"unknown fields \['hidden'\]"):
        run(["plan", "--config", str(path)])


def test_a_calibrated_machine_can_be_read(tmp_path: Path) -> None:
    rates = Products("float32", {256: 1e10, 512: 2e10, 1024: 3e10, 2048: 2.5e10})
    path = tmp_path / "this-cpu.toml"
    path.write_text(describe_machine(2, "cpu", [rates], Wire(1e9, 1e-4)))
    machine = read_machine(str(path))
    assert (machine.products["float32"].peak, machine.products["float32"].sustained) == (3e10, 2e10)
    assert (machine.node.sustained, machine.node.latency) == (1e9, 1e-4)
    assert machine.devices_per_node == 2
    assert not machine.products["float32"].whole_steps


def test_files_that_come_along_are_packed() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "hardware/*.toml" in text
    assert HARDWARE.is_dir()
