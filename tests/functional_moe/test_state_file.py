"""A run's state on disk: whole or not at all, one at a time, and checked when it comes back."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import NamedTuple

import chex
import pytest
import torch

from functional_moe.config import MoEConfig, preset
from functional_moe.parallel import CheckpointError
from functional_moe.state_file import StateError, latest_state, load_state, save_state, write_text

CONFIG = preset("tiny")


class State(NamedTuple):
    step: torch.Tensor
    params: dict[str, object]


def make_state(offset: float = 0.0) -> State:
    layers = ({"w": torch.arange(6.0).reshape(2, 3) + offset}, {"w": torch.ones(2, 3, dtype=torch.float16)})
    return State(torch.tensor(7), {"embedding": torch.full((3,), offset), "layers": layers})


def save(run: Path, step: int, state: object, config: MoEConfig = CONFIG) -> None:
    save_state(run, step, state, config).wait()


def test_the_last_state_comes_back_bit_for_bit_and_replaces_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 7, make_state(0.1))
    save(tmp_path, 8, make_state(0.2))
    loaded = load_state(latest_state(tmp_path), make_state(), CONFIG)
    chex.assert_trees_all_equal(loaded, make_state(0.2))
    assert isinstance(loaded, State)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["000008"]


def test_one_part_comes_back_alone_into_a_template_without_memory(tmp_path: Path) -> None:
    save(tmp_path, 7, make_state(0.1))
    with torch.device("meta"):
        template = {"params": make_state().params}
    loaded = load_state(latest_state(tmp_path), template, CONFIG, partial=True)
    chex.assert_trees_all_equal(loaded, {"params": make_state(0.1).params})
    with pytest.raises(CheckpointError, match=r"a leaf 'step' that is not expected"):
        load_state(latest_state(tmp_path), template, CONFIG)
    fewer = {"params": {"embedding": make_state().params["embedding"]}}
    with pytest.raises(CheckpointError, match=r"a leaf 'params\.layers\.0\.w' that is not expected"):
        load_state(latest_state(tmp_path), fewer, CONFIG, partial=True)


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_a_failed_save_keeps_the_previous_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    save(tmp_path, 7, make_state(1.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "rename")}[moment], full)
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        save(tmp_path, 8, make_state(2.0))
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    chex.assert_trees_all_equal(load_state(latest_state(tmp_path), make_state(), CONFIG), make_state(1.0))
    save(tmp_path, 8, make_state(3.0))
    chex.assert_trees_all_equal(load_state(latest_state(tmp_path), make_state(), CONFIG), make_state(3.0))


def test_what_is_missing_or_of_another_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no state in"):
        latest_state(tmp_path)
    save(tmp_path, 7, make_state())
    with pytest.raises(CheckpointError, match=r"another model: 'identity\.num_experts' is 16 .* 8 here"):
        load_state(latest_state(tmp_path), make_state(), dataclasses.replace(CONFIG, num_experts=8))


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    write_text(path, "first")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StateError, match=r"cannot write .*settings\.json: .*No space left on device"):
        write_text(path, "second")
    assert path.read_text() == "first"
