"""Copies between tiers that go on while something else is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy on its way."""

    def wait(self) -> None:
        """What is computed after this sees the copy done. May be called again."""
        ...


class Copies(Protocol):
    """How values get from one tier to another."""

    spoils: bool
    """Whether memory that is given back must be passed to ``spoil``."""

    def slab(self, size: int) -> Tensor:
        """``size`` bytes of a further tier, uint8: reserved once, before the step."""
        ...

    def reserved(self, size: int) -> int:
        """Bytes that a slab of ``size`` takes; the more, the larger it is."""
        ...

    def start(self, source: Tensor, destination: Tensor) -> Copy:
        """Begins to copy what was computed so far; neither tensor may be touched before the copy's ``wait``."""
        ...

    def spoil(self, tensor: Tensor) -> None:
        """Overwrites what nobody may read any more."""
        ...


class _Deferred:
    """A copy that is made when somebody waits for it."""

    def __init__(self, source: Tensor, destination: Tensor, before: Callable[[], None]) -> None:
        self._tensors: tuple[Tensor, Tensor] | None = (source, destination)
        self._before = before

    @property
    def done(self) -> bool:
        return self._tensors is None

    def run(self) -> None:
        if self._tensors is not None:
            source, destination = self._tensors
            destination.copy_(source)
            self._tensors = None

    def wait(self) -> None:
        self._before()
        self.run()


class HostCopies:
    """Both tiers in the host's memory; a copy is made when somebody waits for it."""

    spoils = False

    def slab(self, size: int) -> Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=torch.uint8)

    def reserved(self, size: int) -> int:
        """As many."""
        return size

    def start(self, source: Tensor, destination: Tensor) -> Copy:
        """Remembers what to copy."""
        return _Deferred(source, destination, lambda: None)

    def spoil(self, tensor: Tensor) -> None:
        """Nothing."""


class AdversarialCopies:
    """Copies that make a race visible on any machine.

    A copy is done as late as it may be, or at any moment before; what has not arrived and what was given back holds
    NaN. So whoever reads too early or too late gets NaN.
    """

    spoils = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pending: list[_Deferred] = []

    def slab(self, size: int) -> Tensor:
        """Bytes that are NaN in every floating dtype."""
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def reserved(self, size: int) -> int:
        """As many."""
        return size

    def start(self, source: Tensor, destination: Tensor) -> Copy:
        """Spoils the destination, and perhaps completes some of the copies before."""
        self.spoil(destination)
        copy = _Deferred(source, destination, self._complete_some)
        self._pending.append(copy)
        self._complete_some()
        return copy

    def spoil(self, tensor: Tensor) -> None:
        """Overwrites it with NaN, or the largest integer."""
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)

    def _complete_some(self) -> None:
        self._random.shuffle(self._pending)
        for copy in self._pending:
            if self._random.random() < 0.3:
                copy.run()
        self._pending = [copy for copy in self._pending if not copy.done]


class _OnStream:
    """A copy on a CUDA stream of its own.

    Until somebody waits for it, it holds both tensors: their memory belongs to another stream, which would use it for
    something else as soon as nobody had them.
    """

    def __init__(self, event: torch.cuda.Event, source: Tensor, destination: Tensor) -> None:
        self._event = event
        self._tensors: tuple[Tensor, Tensor] | None = (source, destination)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = None


class CudaCopies:
    """Copies on two streams of their own, one per direction, to and from pinned memory."""

    spoils = False

    def __init__(self) -> None:
        self._from_device, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()

    def slab(self, size: int) -> Tensor:
        """Pinned memory, in one piece: pinning each tensor costs milliseconds, and torch rounds each up.

        Torch rounds the piece up too, and gives one of the same size out again, without pinning anew, once all copies
        to and from it are done.

        Raises:
          MemoryError: when it cannot be pinned. Nothing falls back to memory that is not: its copies would hold up the
            computation.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(
                f"{self.reserved(size):,} bytes of host memory ({size:,}, rounded up) cannot be pinned, and copies to "
                "memory that is not pinned are several times slower and hold up the computation: choose a smaller host "
                f"budget ({str(error).splitlines()[0]})"
            ) from error

    def reserved(self, size: int) -> int:
        """Torch rounds pinned memory up to a power of two."""
        return 1 << (size - 1).bit_length() if size else 0

    def stream(self, source: Tensor) -> torch.cuda.Stream:
        """The stream on which ``source`` is copied."""
        return self._from_device if source.is_cuda else self._to_device

    def start(self, source: Tensor, destination: Tensor) -> Copy:
        """Begins once all that the current stream was given before is done."""
        stream = self.stream(source)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _OnStream(event, source, destination)

    def spoil(self, tensor: Tensor) -> None:
        """Nothing."""
