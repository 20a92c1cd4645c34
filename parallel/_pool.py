"""Processes that run a function as the ranks of a world, on one machine.

A pool's workers start when first needed and stay, so that a call costs milliseconds: the packages are imported once,
in a server process from which workers are forked before they have threads. A world of ``n`` ranks is the first ``n``
workers; one pool serves every size. Each world has its own default process group (gloo), so code sees in
``torch.distributed.get_world_size()`` the world that it was called with.

Failure ends the call on every rank. A worker that raises reports and exits; that closes its sockets, and its peers'
collectives fail at once. A collective that waits longer than ``timeout`` seconds fails and names itself. Then the
pool ends the world's workers, and the next call starts fresh ones. A worker whose parent is gone, however it went,
exits.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ._collective_functions import CollectiveError
from ._reference import dumps, loads

_GRACE = 2.0  # seconds to wait for the rank that failed by itself, once a collective has failed on another
_IMPORT = 120.0  # seconds for a worker to start and to import the function's module
_REST = 0.5  # seconds to wait for the others after that
_HUNG = 1.0  # seconds after the collectives' own time-out at which a rank that is still busy tells where


class WorkerError(RuntimeError):
    """A call that failed on some rank. The message begins with the traceback of the rank that failed by itself."""


def spawn(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs ``function(*args)`` as every rank of a world of this machine's processes.

    In a script, call it below ``if __name__ == "__main__":``, as always with processes.

    Args:
      function: importable, that is, defined at the top level of a module; its arguments and result are trees of CPU
        tensors and other values that pickle takes.
      world_size: how many ranks; ``torch.distributed`` is set up with gloo, each rank has one thread.
      timeout: seconds for each collective, and for the call as a whole.

    Returns:
      What each rank returned, by rank.

    Raises:
      WorkerError: when a rank raises, dies or hangs; the others are ended.
      ValueError: for ``world_size < 1`` or a function that has no importable name.

    Example:
      >>> spawn(torch.distributed.get_rank, 2)
      [0, 1]
    """
    return shared_pool().run(function, world_size, *args, timeout=timeout)


@functools.cache
def shared_pool() -> Pool:
    """The pool behind :func:`spawn`: empty until used, closed when the interpreter exits."""
    return Pool()


class Pool:
    """A growing set of workers. A context manager; ``close`` ends them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._world: tuple[int, float] | None = None  # size and time-out of the last call's world
        self._worlds = 0  # how many there have been
        self._store: TCPStore | None = None
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        """As :func:`spawn`, on this pool's workers."""
        if world_size < 1:
            raise ValueError(f"world_size = {world_size}: must be at least 1")
        work = dumps((function, args))
        self._start(world_size)
        if self._world != (world_size, timeout):
            self._world, self._worlds = (world_size, timeout), self._worlds + 1
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.connection.send_bytes(dumps(_Request(self._worlds, rank, world_size, timeout)))
            worker.connection.send_bytes(work)
        # Imports may take long, and not alike: the clock starts once every rank has its function.
        self._collect(workers, _IMPORT)
        for worker in workers:
            worker.connection.send_bytes(b"go")
        return [loads(report.payload) for report in self._collect(workers, timeout)]

    def _collect(self, workers: list[_Worker], timeout: float) -> list[_Report]:
        try:
            reports = _collect(workers, timeout)
        except BaseException:
            self._end()
            raise
        if any(not report.done for report in reports):
            self._end()
            raise WorkerError(_describe(reports))
        return reports

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        self._end()
        atexit.unregister(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _start(self, count: int) -> None:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if any(not worker.process.is_alive() for worker in self._workers):
            self._end()
        while len(self._workers) < count:
            self._workers.append(_start_worker(self._store.port))

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
        self._workers, self._world = [], None


class _Worker(NamedTuple):
    process: Any
    connection: Connection


class _Request(NamedTuple):
    world: int  # number of the world, of which the process group is kept as long as it is the same
    rank: int
    world_size: int
    timeout: float


class _Report(NamedTuple):
    """What became of one rank."""

    done: bool
    payload: bytes = b""
    summary: str = ""
    details: str = ""
    by_itself: bool = True  # False for a failed collective, which a failed peer explains


def _start_worker(port: int) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    # What takes long to import and starts no thread. Only what every path finds: the server does not know sys.path.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor"])
    _ensure_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, port), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _ensure_server() -> None:
    """Starts the server that workers come from, if there is none, to ignore Ctrl-C from its first moment on.

    A terminal sends it to all processes: who made the pool ends its workers, and they have nothing to say.
    """
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(workers: list[_Worker], timeout: float) -> list[_Report]:
    """The reports of all ranks; those that do not come are written here."""
    reports: dict[int, _Report] = {}
    deadline, failed = time.monotonic() + timeout + 2 * _HUNG, False
    while len(reports) < len(workers):
        waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in reports}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                why = "was still waiting when it was ended" if failed else f"did not answer within {timeout:g} s"
                reports[rank] = _Report(False, summary=why, by_itself=False)
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            try:
                reports[rank] = loads(workers[rank].connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                reports[rank] = _Report(False, summary=_death(workers[rank].process))
            if not reports[rank].done:
                failed = True
                deadline = min(deadline, time.monotonic() + (_REST if reports[rank].by_itself else _GRACE))
    return [reports[rank] for rank in range(len(workers))]


def _death(process: Any) -> str:
    process.join(_GRACE)
    code = process.exitcode
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name} (process {process.pid})"
    return f"died with exit code {code} (process {process.pid})"


def _describe(reports: list[_Report]) -> str:
    failed = [rank for rank, report in enumerate(reports) if not report.done]
    first = next((rank for rank in failed if reports[rank].by_itself), failed[0])
    lines = [f"rank {first} of {len(reports)} {reports[first].summary}", reports[first].details]
    lines += [f"then rank {rank} {reports[rank].summary}" for rank in failed if rank != first]
    return "\n".join(line for line in lines if line)


def _serve(connection: Connection, port: int) -> None:
    """The life of a worker."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mail = _Mail(connection)
    store = TCPStore("127.0.0.1", port, is_master=False)
    world = 0
    while True:
        try:
            request = loads(mail.receive())
            function, args = loads(mail.receive())
            mail.send(_Report(True))
            mail.receive()
            mail.expect(request.timeout + _HUNG)
            if world != request.world:
                if world:
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=PrefixStore(str(request.world), store),
                    rank=request.rank,
                    world_size=request.world_size,
                    timeout=datetime.timedelta(seconds=request.timeout),
                )
                world = request.world
            report = _Report(True, dumps(function(*args)))
        except BaseException as error:
            kind = type(error).__name__
            mail.send(
                _Report(
                    False,
                    summary=f"raised {kind}: {error}",
                    details=traceback.format_exc(),
                    by_itself=not isinstance(error, CollectiveError | dist.DistError),
                )
            )
            # Without goodbyes: closed sockets tell the peers.
            os._exit(1)
        mail.expect(None)
        mail.send(report)


class _Mail:
    """A worker's end of its connection, read in a thread of its own: the end of the parent is noticed at any time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._deadline: float | None = None
        self._main = threading.get_ident()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> bytes:
        return self._requests.get()

    def send(self, report: _Report) -> None:
        with self._sending:
            self._connection.send_bytes(dumps(report))

    def expect(self, seconds: float | None) -> None:
        """From now, a main thread busy for longer than ``seconds`` is reported with where it is."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _read(self) -> None:
        try:
            while True:
                while not self._connection.poll(_HUNG / 2):
                    if self._deadline is not None and time.monotonic() > self._deadline:
                        self._report_hang()
                self._requests.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)

    def _report_hang(self) -> None:
        stack = "".join(traceback.format_stack(sys._current_frames()[self._main]))
        self.send(_Report(False, summary="hangs; it is here:", details=stack))
        os._exit(1)
