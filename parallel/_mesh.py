"""The mesh of ranks: axes ``fsdp`` and ``ep``, with ``replicate`` outside them where there are copies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(fsdp: int, ep: int, replicate: int = 1) -> DeviceMesh:
    """All ranks of the world as a grid, ``ep`` innermost, so that expert-parallel peers are neighbours.

    Data is split over every axis. Parameters are split over ``fsdp`` and ``ep`` and repeated over ``replicate``, an
    axis that exists only when it is larger than 1. The groups get the time-out of the default group. Every rank must
    call it.

    Args:
      fsdp: ranks that share the parameters.
      ep: ranks that share the experts.
      replicate: copies of the whole (HSDP).

    Returns:
      a mesh on the devices of the default group: CUDA with NCCL, else the CPU.

    Raises:
      ValueError: when a size is below 1, or they do not multiply to the world size.
      RuntimeError: when there is no default process group.
    """
    sizes = {"replicate": replicate} if replicate != 1 else {}
    return mesh_of({**sizes, "fsdp": fsdp, "ep": ep})


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    """:func:`make_mesh` with any axes, outermost first."""
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh of {product}: {axis} = {size} must be at least 1")
    if not dist.is_initialized():
        raise RuntimeError("a mesh needs torch.distributed.init_process_group first (or parallel.spawn, or torchrun)")
    if math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError(
            f"mesh of {product} has {math.prod(sizes.values())} ranks, the world has {dist.get_world_size()}"
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    _copy_time_out(mesh)
    return mesh


def _copy_time_out(mesh: DeviceMesh) -> None:
    """Gives the mesh's groups the default group's time-out: torch gives them its own of 30 minutes."""
    backend = dist.group.WORLD._get_backend(torch.device(mesh.device_type))  # type: ignore[union-attr]
    options = getattr(backend, "options", None)
    if options is not None:
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def axis_sizes(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    """The ranks along each axis, outermost first, of a mesh or of a plan for one, ``{"fsdp": 32, "ep": 12}``."""
    if isinstance(mesh, DeviceMesh):
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return dict(mesh)


def axis_group(mesh: DeviceMesh, *axes: str) -> ProcessGroup:
    """The group of ranks that differ from the calling one along ``axes`` alone, the last axis changing fastest.

    Every rank must call it for several axes at a time (the first call makes the group).

    Raises:
      ValueError: for an axis that the mesh lacks.
    """
    names = tuple(mesh.mesh_dim_names or ())
    for axis in axes:
        if axis not in names:
            raise ValueError(f"axis {axis!r} is not of the mesh, which has {names}")
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    ordered = tuple(axis for axis in names if axis in axes)
    if ordered == names and dist.group.WORLD is not None:
        return dist.group.WORLD
    return mesh[ordered]._flatten().get_group()
