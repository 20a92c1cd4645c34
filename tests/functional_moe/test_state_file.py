"""A state on disk: whole or not at all, and checked when it comes back."""

import errno
from pathlib import Path
from typing import NamedTuple

import chex
import pytest
import torch

from functional_moe import state_file
from functional_moe.state_file import StateError, load_state, save_state


class State(NamedTuple):
    step: torch.Tensor
    params: dict[str, object]


def make_state(offset: float = 0.0) -> State:
    layers = ({"w": torch.arange(6.0).reshape(2, 3) + offset}, {"w": torch.ones(2, 3, dtype=torch.float16)})
    return State(torch.tensor(7), {"embedding": torch.full((3,), offset), "layers": layers})


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_state(tmp_path / "state", make_state(0.1))
    loaded = load_state(tmp_path / "state", make_state())
    chex.assert_trees_all_equal(loaded, make_state(0.1))
    assert isinstance(loaded, State)


def test_one_part_comes_back_alone_into_a_template_without_memory(tmp_path: Path) -> None:
    save_state(tmp_path / "state", make_state(0.1))
    with torch.device("meta"):
        template = {"params": make_state().params}
    loaded = load_state(tmp_path / "state", template, partial=True)
    chex.assert_trees_all_equal(loaded, {"params": make_state(0.1).params})
    with pytest.raises(StateError, match="unexpected 'step'"):
        load_state(tmp_path / "state", template)


def test_leaves_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    shared = torch.ones(4)
    save_state(tmp_path / "state", {"a": shared, "b": shared, "c": shared[1:3]})
    loaded = load_state(tmp_path / "state", {"a": shared, "b": shared, "c": shared[1:3]})
    chex.assert_trees_all_equal(loaded, {"a": shared, "b": shared, "c": shared[1:3]})


@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming"])
def test_a_failed_save_keeps_the_previous_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(1.0))

    def full(*_: object) -> None:
        if moment == "writing":
            (tmp_path / ".state.partial").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {"writing": (state_file, "save_file"), "syncing": (state_file.os, "fsync"), "renaming": (Path, "replace")}
    monkeypatch.setattr(*where[moment], full)
    with pytest.raises(StateError, match=r"No space left on device.*previous state is kept") as raised:
        save_state(path, make_state(2.0))
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    chex.assert_trees_all_equal(load_state(path, make_state()), make_state(1.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_kill_in_mid_save_keeps_the_previous_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kill(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Kill

    path = tmp_path / "state"
    save_state(path, make_state(1.0))
    monkeypatch.setattr(state_file.os, "fsync", kill)
    with pytest.raises(Kill):
        save_state(path, make_state(2.0))
    monkeypatch.undo()
    chex.assert_trees_all_equal(load_state(path, make_state()), make_state(1.0))
    save_state(path, make_state(3.0))  # what the kill left behind is in nobody's way
    chex.assert_trees_all_equal(load_state(path, make_state()), make_state(3.0))


@pytest.mark.parametrize("keep", [0, 1, 7, 20, 300, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "state"
    save_state(path, make_state())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StateError, match="truncated or no state file") as raised:
        load_state(path, make_state())
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    torch.save({"step": torch.tensor(1)}, path)
    with pytest.raises(StateError, match="no state file"):
        load_state(path, {"step": torch.tensor(1)})


def test_what_differs_from_the_template_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state())
    with pytest.raises(StateError, match=r"lacks 'params\.more'"):
        load_state(path, make_state()._replace(params={**make_state().params, "more": torch.ones(1)}))
    fewer = {"embedding": make_state().params["embedding"]}
    with pytest.raises(StateError, match=r"unexpected 'params\.layers\.0\.w' \(2 in all\)"):
        load_state(path, make_state()._replace(params=fewer))
    with pytest.raises(StateError, match=r"'params\.embedding' has shape .*3.* expected .*4"):
        load_state(path, make_state()._replace(params={**make_state().params, "embedding": torch.ones(4)}))
    with pytest.raises(StateError, match=r"'step' has dtype torch\.int64, expected torch\.float32"):
        load_state(path, make_state()._replace(step=torch.tensor(1.0)))
    with pytest.raises(StateError, match="there is no state"):
        load_state(tmp_path / "elsewhere", make_state())
