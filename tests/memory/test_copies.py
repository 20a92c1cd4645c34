"""Copies on CUDA's streams, as far as a machine without CUDA can look at them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from functional_moe.memory import CudaCopies


class Stream:
    """Notes what it is given to do."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def wait_stream(self, stream: Stream) -> None:
        self.given.append("wait for the work so far")

    def wait_event(self, event: object) -> None:
        self.given.append("wait for the copy")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: stream.given.append("record"))
    )
    return stream


def test_a_copy_holds_its_tensors_until_somebody_waits(current: Stream) -> None:
    copies = CudaCopies()
    source, destination = torch.ones(3), torch.zeros(3)
    side, held = copies.stream(source), [weakref.ref(source), weakref.ref(destination)]
    copy = copies.start(source, destination)
    del source, destination
    gc.collect()
    assert all(one() is not None for one in held)
    assert side.given == ["wait for the work so far", "record"]  # type: ignore[attr-defined]
    assert current.given == []
    copy.wait()
    assert current.given == ["wait for the copy"]
    assert all(one() is None for one in held)
    copy.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_memory_that_cannot_be_pinned_is_refused_and_says_what_it_would_cost(current: Stream) -> None:
    with pytest.raises(
        MemoryError, match=r"^4,096 bytes of host memory \(3,000, rounded up\) cannot be pinned"
    ) as info:
        CudaCopies().slab(3000)
    assert "several times slower" in str(info.value)
    assert "\n" not in str(info.value)
