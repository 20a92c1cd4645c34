"""The mesh: order of ranks, groups, and sizes that do not fit the world."""

import time

import pytest
import torch
import torch.distributed as dist

from functional_moe import parallel


def groups(fsdp: int, ep: int, replicate: int) -> dict[str, list[int]]:
    mesh = parallel.make_mesh(fsdp, ep, replicate)
    names = tuple(parallel.axis_sizes(mesh))
    found = {axis: dist.get_process_group_ranks(parallel.axis_group(mesh, axis)) for axis in names}
    found["fsdp, ep"] = dist.get_process_group_ranks(parallel.axis_group(mesh, "fsdp", "ep"))
    found["all"] = dist.get_process_group_ranks(parallel.axis_group(mesh, *names))
    return found


def test_expert_parallel_peers_are_neighbours():
    assert parallel.spawn(groups, 4, 2, 2, 1)[3] == {
        "fsdp": [1, 3],
        "ep": [2, 3],
        "fsdp, ep": [0, 1, 2, 3],
        "all": [0, 1, 2, 3],
    }
    assert parallel.spawn(groups, 4, 1, 2, 2)[2] == {
        "replicate": [0, 2],
        "fsdp": [2],
        "ep": [2, 3],
        "fsdp, ep": [2, 3],
        "all": [0, 1, 2, 3],
    }


def refusals() -> list[str]:
    messages = []
    for call in (
        lambda: parallel.make_mesh(3, 2),
        lambda: parallel.make_mesh(2, 0),
        lambda: parallel.axis_group(parallel.make_mesh(2, 1), "tensor"),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_sizes_that_are_not_the_world_raise():
    assert parallel.spawn(refusals, 2)[0] == [
        "mesh of fsdp 3 x ep 2 has 6 ranks, the world has 2",
        "mesh of fsdp 2 x ep 0: ep = 0 must be at least 1",
        "axis 'tensor' is not of the mesh, which has ('fsdp', 'ep')",
    ]


def test_a_mesh_needs_a_world():
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel.make_mesh(1, 1)


def skip_in_mesh() -> None:
    mesh = parallel.make_mesh(2, 2)
    if dist.get_rank() == 2:  # its peer, rank 3, does not come
        parallel.all_reduce(torch.ones(1), mesh.get_group("ep"))


def test_the_groups_of_a_mesh_time_out_with_the_world():
    # torch gives them 30 minutes of their own.
    start = time.monotonic()
    with pytest.raises(parallel.WorkerError, match=r"CollectiveError: all_reduce of float32 \[1\]"):
        parallel.spawn(skip_in_mesh, 4, timeout=1.0)
    assert time.monotonic() - start < 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert parallel.find_device("auto") == parallel.find_device("cpu") == torch.device("cpu")
    with pytest.raises(parallel.RankError, match=r"^--device cuda: torch sees no GPU here"):
        parallel.find_device("cuda")
