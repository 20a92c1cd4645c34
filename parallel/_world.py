"""The processes that torchrun started, as ranks that agree, fail and end together.

What a job of many processes needs besides collectives: one message instead of one per rank, no rank that goes on alone,
and no rank that waits for one that is gone. An error that the user can mend is raised on every rank alike
(:class:`RankError`); anything else ends its rank at once, which closes its sockets, so that the collectives of its
peers fail too; and a collective that runs out of time tells which ranks gave no sign.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ._collective_functions import Call, CollectiveError

Result = TypeVar("Result")

_LOOK = 1.0  # seconds between looks at whether a rank has failed
_SIGN = 2.0  # seconds in which the ranks that live give a sign once a collective has failed


class RankError(ValueError):
    """What keeps one rank, or all, from going on: one line, raised on every rank alike."""


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of a job. Made by :func:`join_world`; without arguments, a process by itself.

    Every rank must make the same calls in the same order.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """Where this rank computes."""
    store: Store | None = None
    """What the ranks reach when their collectives have failed; ``None`` for a process by itself."""
    control: ProcessGroup | None = None
    """All ranks, with gloo: for words and signals, which are on the host."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks and writes."""
        return self.rank == 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank.

        Args:
          what: names the exchange in errors.
          value: anything that pickles.

        Raises:
          CollectiveError: a peer died or hangs.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        with Call(f"exchange of {what}", torch.empty(0), self.control):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, what: str, function: Callable[[], Result], *errors: type[Exception]) -> Result:
        """Runs ``function`` on every rank. When it raises one of ``errors`` on some, all raise.

        Args:
          what: names it in errors.
          function: what to do.
          errors: what counts as a message to the user.

        Returns:
          what ``function`` returned on this rank.

        Raises:
          RankError: on every rank, with the message of the first that failed.
          CollectiveError: a peer died or hangs.
        """
        if self.control is None:
            return function()
        result, message = None, None
        try:
            result = function()
        except errors as error:
            message = (str(error).splitlines() or [type(error).__name__])[0]
        said = self.gather(f"errors of {what}", message)
        if any(one is not None for one in said):
            first = next(rank for rank, one in enumerate(said) if one is not None)
            alike = all(one == said[0] for one in said)
            raise RankError(said[first] if alike or first == 0 else f"rank {first}: {said[first]}")
        return result  # type: ignore[return-value]

    def from_first(self, what: str, function: Callable[[], Result], *errors: type[Exception]) -> Result:
        """Runs ``function`` on rank 0; every rank gets its result, or raises, as in :meth:`together`."""
        result = self.together(what, lambda: function() if self.leads else None, *errors)
        return self.gather(what, result)[0]  # type: ignore[no-any-return]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compares what must be the same everywhere.

        Args:
          facts: by name; compared as text.

        Raises:
          RankError: on every rank, naming the first fact that differs, its values, and the ranks that have each.
          CollectiveError: a peer died or hangs.
        """
        everywhere = self.gather("settings", {name: str(value) for name, value in facts.items()})
        for name in dict.fromkeys(name for of_rank in everywhere for name in of_rank):
            ranks: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(everywhere):
                ranks.setdefault(of_rank.get(name, "missing"), []).append(rank)
            if len(ranks) > 1:
                sides = "; ".join(f"{value!r:.100} on {_ranks(members)}" for value, members in ranks.items())
                raise RankError(f"the ranks disagree on {name}: {sides}")

    def largest(self, what: str, *values: int) -> list[int]:
        """The largest that any rank gives, of each value.

        Raises:
          CollectiveError: a peer died or hangs.
        """
        numbers = torch.tensor(values)
        if self.control is not None:
            with Call(f"exchange of {what}", numbers, self.control):
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control)
        return numbers.tolist()

    def silent_ranks(self, failed: bool) -> str:
        """After a collective failed: gives a sign, and tells who gave none.

        Args:
          failed: whether this rank failed by itself, rather than with its peers.

        Returns:
          a phrase for the message; empty when nothing is known.
        """
        if self.store is None:
            return ""
        try:
            self.store.append(  # type: ignore[attr-defined]
                "signs", f"{self.rank}{'!' if failed else ''},"
            )
            if failed:
                return ""
            time.sleep(_SIGN)
            signs = self.store.get("signs").decode().split(",")[:-1]
        except RuntimeError:  # its server is gone
            return ""
        by_themselves = sorted(int(sign[:-1]) for sign in signs if sign.endswith("!"))
        if by_themselves:
            return f"{_ranks(by_themselves)} failed before"
        silent = sorted({*range(self.size)} - {int(sign) for sign in signs})
        return f"no sign of {_ranks(silent)}" if silent else ""

    def watch(self, end: Callable[[], None]) -> Callable[[], None]:
        """Calls ``end`` in a thread some seconds after any rank gave a sign of failure.

        For a rank that would not notice: one that computes or reads, or whose device waits for a collective, which the
        host cannot interrupt. Others have ended before.

        Returns:
          what stops the watch; call it before :meth:`leave`.
        """
        stopped = threading.Event()
        store = self.store
        if store is None:
            return stopped.set

        def look() -> None:
            while not stopped.wait(_LOOK):
                try:
                    failed = store.check(["signs"])
                except RuntimeError:  # its server is gone, and so is the job
                    failed = True
                if failed:
                    if not stopped.wait(2 * _SIGN):
                        end()
                    return

        threading.Thread(target=look, name="watch", daemon=True).start()
        return stopped.set

    def leave(self) -> None:
        """Waits for the others, so that none misses this one, and leaves the job."""
        if self.control is not None:
            self.largest("goodbyes", 0)
            dist.destroy_process_group()


def launched() -> int | None:
    """The number of processes that torchrun started, this one among them; ``None`` for a process by itself."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size is not None and "RANK" in os.environ else None


def find_device(wish: str = "auto") -> torch.device:
    """Where this process computes. A GPU becomes its current one.

    Args:
      wish: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU where torch sees one. Of the processes that torchrun started on
        this machine each takes its own.

    Raises:
      RankError: ``"cuda"`` where torch sees no GPU; more processes than GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cpu" or (wish == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise RankError("--device cuda: torch sees no GPU here; auto computes on the CPU then")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > gpus:
        raise RankError(
            f"{here} processes on a machine of {gpus} GPUs: start as many as there are GPUs, or compute on CPUs with "
            "--device cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join_world(timeout: float, device: str = "auto") -> World:
    """Joins the processes that torchrun started, as its environment variables describe them.

    Collectives use NCCL on GPUs, gloo on CPUs.

    Args:
      timeout: seconds that a collective waits for its peers.
      device: as for :func:`find_device`.

    Raises:
      RankError: no GPU where one is wanted, or more processes than GPUs on this machine.
      CollectiveError: not all ranks came within ``timeout``.
    """
    wait = datetime.timedelta(seconds=timeout)
    found = find_device(device)
    on_gpus = found.type == "cuda"
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
        store.set_timeout(wait)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            store=PrefixStore("world", store),
            rank=rank,
            world_size=size,
            timeout=wait,
            device_id=found if on_gpus else None,
        )
        control = dist.new_group(backend="gloo", timeout=wait) if on_gpus else dist.group.WORLD
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CollectiveError(f"the ranks did not come together within {timeout:g} s: {reason}") from error
    return World(rank, size, found, PrefixStore("signs", store), control)


def _ranks(numbers: list[int]) -> str:
    """``rank 1``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
