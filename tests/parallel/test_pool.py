"""The pool: results by rank, and what happens when a rank raises, dies, hangs, or loses its parent."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from functional_moe import parallel


class Pair(NamedTuple):
    rank: int
    value: torch.Tensor


def where() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def scaled(factor: float, tree: dict[str, torch.Tensor]) -> Pair:
    return Pair(dist.get_rank(), factor * tree["x"].t())


def echo(tree: object) -> object:
    return tree


def process() -> int:
    return os.getpid()


def add_up() -> torch.Tensor:
    return parallel.all_reduce(torch.ones(3), dist.group.WORLD)


def fail_at(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise KeyError("the reason")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "sleep":
            time.sleep(1000)
        if how == "skip":
            return
    parallel.all_gather(torch.ones(2, 3), dist.group.WORLD)


@pytest.fixture(scope="module")
def pool():
    with parallel.Pool() as pool:
        yield pool


def test_one_pool_serves_every_world_size(pool):
    for world_size in (2, 4, 1, 2):
        assert pool.run(where, world_size) == [(rank, world_size) for rank in range(world_size)]


def test_workers_stay(pool):
    first = pool.run(process, 2)
    assert pool.run(process, 2) == first
    assert os.getpid() not in first


def test_trees_come_back_with_their_types(pool):
    x = torch.arange(6.0).view(2, 3)
    results = pool.run(functools.partial(scaled, 2.0), 2, {"x": x})
    for rank, pair in enumerate(results):
        assert isinstance(pair, Pair)
        assert pair.rank == rank
        torch.testing.assert_close(pair.value, 2 * x.t(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_of_any_dtype_and_size_travel(pool, dtype, shape):
    x = torch.ones(shape, dtype=dtype)
    (back,) = pool.run(echo, 1, [x])[0]
    assert back.dtype == dtype
    assert torch.equal(back, x)
    assert len(pool.run(echo, 1, x)) == 1


def test_spawn_uses_one_pool():
    assert parallel.spawn(process, 2) == parallel.spawn(process, 2)


def test_a_function_without_importable_name_is_refused(pool):
    def local() -> None:
        pass

    with pytest.raises(ValueError, match=r"test_pool\.test_a_func.*local.*top level of a module"):
        pool.run(local, 2)
    with pytest.raises(ValueError, match=r"lambda.*top level of a module"):
        pool.run(lambda: 0, 2)
    with pytest.raises(ValueError, match="world_size = 0"):
        pool.run(where, 0)


def test_a_rank_that_raises_ends_the_call_with_its_traceback_first(pool):
    start = time.monotonic()
    with pytest.raises(parallel.WorkerError) as caught:
        pool.run(fail_at, 4, 2, "raise")
    message = str(caught.value)
    assert time.monotonic() - start < 10
    assert message.startswith("rank 2 of 4 raised KeyError: 'the reason'\nTraceback")
    assert "in fail_at" in message
    assert message.index("the reason") < message.index("then rank 0 ")
    assert pool.run(where, 2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("how", "words"), [("die", "died of SIGKILL"), ("exit", "died with exit code 7")])
def test_a_rank_that_dies_is_named(pool, how, words):
    with pytest.raises(parallel.WorkerError, match=f"^rank 1 of 2 {words}"):
        pool.run(fail_at, 2, 1, how)
    assert pool.run(where, 2) == [(0, 2), (1, 2)]


def test_a_collective_that_a_rank_skips_times_out_and_is_named(pool):
    start = time.monotonic()
    with pytest.raises(parallel.WorkerError) as caught:
        pool.run(fail_at, 2, 1, "skip", timeout=1.0)
    assert time.monotonic() - start < 10
    assert "rank 0 of 2 raised CollectiveError: all_gather of float32 [2, 3] on rank 0, over ranks [0, 1], failed" in (
        str(caught.value)
    )


def test_a_rank_that_hangs_tells_where(pool):
    start = time.monotonic()
    with pytest.raises(parallel.WorkerError) as caught:
        pool.run(fail_at, 2, 1, "sleep", timeout=1.0)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert message.startswith("rank 1 of 2 hangs; it is here:")
    assert "time.sleep(1000)" in message
    assert "then rank 0 raised CollectiveError: all_gather" in message


_PARENT = """
import os, sys, time
import torch.distributed as dist
from functional_moe import parallel

def report_and(how):
    os.write(1, b"%d\\n" % os.getpid())
    if how == "wait" and dist.get_rank() == 0:
        parallel.all_reduce(__import__("torch").ones(1), dist.group.WORLD)
    if how == "wait":
        time.sleep(1000)

if __name__ == "__main__":
    parallel.spawn(report_and, 2, sys.argv[1])
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["wait", "exit"])
def test_no_worker_outlives_its_parent(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(_PARENT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(
        [sys.executable, str(script), how], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        if how == "wait":
            assert all(map(_alive, pids))
            parent.kill()
    assert parent.returncode == (-signal.SIGKILL if how == "wait" else 0)
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_alive, pids))
