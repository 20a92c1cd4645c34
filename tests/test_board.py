"""The board: what benchmarks hand over, and the table that comes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import _report  # noqa: E402
import board  # noqa: E402

RATIO = _report.Ratio("step", "a | peer", 1.234, 1.3)


def test_a_bar_is_met_from_its_own_side():
    assert not RATIO.met
    assert RATIO._replace(value=1.3).met
    assert RATIO._replace(at_least=False).met
    assert not RATIO._replace(value=1.31, at_least=False).met


def test_ratios_survive_the_file(tmp_path):
    path = tmp_path / "ratios.json"
    _report.write(path, [RATIO])
    assert _report.read(path) == [RATIO]
    _report.write(None, [RATIO])
    assert json.loads(path.read_text())[0]["bar"] == 1.3


def test_contenders_take_turns():
    called = []
    clock = iter(range(100))
    steps = {name: lambda name=name: called.append(name) for name in "ab"}
    assert _report.interleaved(steps, 2, clock=lambda: next(clock)) == {"a": 1, "b": 1}
    assert called == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import sys, _report; _report.write(_report.make_parser('x').parse_args().json, [])", ""),
        ("raise SystemExit('no such peer')", "no such peer"),
        ("pass", "ended with status 0"),
        ("import time; time.sleep(60)", "took longer than 3 s"),
    ],
)
def test_a_benchmark_is_run_alone(tmp_path, monkeypatch, script, error):
    monkeypatch.setattr(board, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    (tmp_path / "some.py").write_text(script)
    limit = 3 if "sleep" in script else 60
    assert board.run("some", board.Entry((), (), 1, limit), False) == ([], error)


def test_every_benchmark_is_on_the_board():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"_report", "board", "gpu"}
    assert set(board.BENCHMARKS) == scripts


def test_the_board_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(board, "HERE", tmp_path)
    monkeypatch.setattr(board, "measure_limits", lambda seconds: board.Limits(100.0, 200.0, 10.0))
    monkeypatch.setattr(
        board, "run", lambda name, *_: ([], "no peer") if name == "plan" else ([RATIO._replace(peer="peer")], "")
    )
    monkeypatch.setattr(sys, "argv", ["board.py", "--only", "muon", "plan"])
    assert board.main() == 1
    assert not (tmp_path / "BOARD.md").exists()
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "| muon | step | peer | 1.23 | ≥ 1.3 | **no** |" in lines
    assert "| plan | no peer | | | | **failed** |" in lines
    monkeypatch.setattr(sys, "argv", ["board.py"])
    board.main()
    assert "fp32 products 100 and 100 GFLOP/s" in (tmp_path / "BOARD.md").read_text()
