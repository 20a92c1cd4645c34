"""The script for a machine with a GPU runs: on the CPU, at toy sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu  # noqa: E402

DRY = gpu.Here("cpu", True)


@pytest.mark.parametrize("name", [name for name in gpu.SECTIONS if name != "tests"])
def test_a_section_runs_and_writes_plain_values(name):
    torch.set_num_threads(1)
    assert json.loads(json.dumps(gpu.SECTIONS[name](DRY)))


def test_memory_is_as_verified():
    for found in gpu.peak(DRY).values():
        assert 0.95 < found["ratio"] < 1.05


def test_a_section_that_fails_is_written_down_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--dry", "--only", "bits", "waits", "--out", str(tmp_path / "gpu.json")]
    )
    results = {"bits": {"seconds": 1.0, "error": "RuntimeError: no"}, "waits": {"seconds": 1.0, "result": {"x": 1}}}
    monkeypatch.setattr(gpu, "run_alone", lambda name, here, limit: results[name])
    assert gpu.main() == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["sections"] == results
    assert report["versions"]["torch"] == torch.__version__


def test_an_error_is_one_line_and_a_limit_is_kept(tmp_path, monkeypatch):
    script = tmp_path / "gpu.py"
    monkeypatch.setattr(gpu, "__file__", str(script))
    script.write_text("raise ValueError('no such thing')")
    assert gpu.run_alone("bits", DRY, 60)["error"] == "ValueError: no such thing"
    script.write_text("import time; time.sleep(60)")
    assert gpu.run_alone("bits", DRY, 0.5)["error"] == "took longer than its 0.5 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu.sh")],
        capture_output=True,
        text=True,
        env={"PYTHON": sys.executable, "PATH": "/bin"},
    )
    assert (done.returncode, done.stderr) == (2, "gpu.py: torch sees no GPU here; --dry runs the script on the CPU\n")
