"""The autograd Functions of the collectives, each over dimension 0 and equal sizes.

A Function that ``torch.func`` takes has ``setup_context``. Its backward calls the ``apply`` of its dual, because
cotangents arrive wrapped, and so that they can be differentiated again. ``static`` arguments come after the operand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed these two and deprecated the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveError(RuntimeError):
    """A collective that failed while running, with its name, operand and ranks; most often a peer died or hangs."""


class Pending:
    """What a Function started and somebody will wait for."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.work: Any = None
        self.operand: Tensor | None = None  # must live until the work is done

    def start(self, call: Call, work: Any, operand: Tensor) -> None:
        self.call, self.work, self.operand = call, work, operand

    def wait(self) -> None:
        if self.call is not None and self.work is not None:
            with self.call:
                self.work.wait()
        self.work = self.operand = None


class Call(NamedTuple):
    """A context that gives an error from the backend the name of the collective and its ranks."""

    name: str
    x: Tensor
    group: ProcessGroup

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            dtype = str(self.x.dtype).removeprefix("torch.")
            raise CollectiveError(
                f"{self.name} of {dtype} {list(self.x.shape)} on rank {dist.get_rank()}, over ranks "
                f"{dist.get_process_group_ranks(self.group)}, failed: {error}"
            ) from error


class Collective(torch.autograd.Function):
    """Base of the Functions below. Arguments: the operand, then what ``static`` keeps, all of it hashable or opaque."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.static = inputs[1:]


def _along_last(function: Any) -> Any:
    """The ``vmap`` rule of a collective over dimension 0 or over none: the batch goes along as the last dimension."""

    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor, *static: Any) -> tuple[Tensor, int]:
        out = function.apply(x.movedim(in_dims[0], -1), *static)
        return out, out.ndim - 1

    return staticmethod(vmap)


class AllGather(Collective):
    """``[m, ...] -> [n * m, ...]``; with ``pending``, the result is there only after its ``wait``."""

    @staticmethod
    def forward(x: Tensor, group: ProcessGroup, pending: Pending | None) -> Tensor:
        if dist.get_world_size(group) == 1:
            return x.view_as(x)
        x = x.contiguous()
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        call = Call("all_gather", x, group)
        with call:
            work = all_gather_single(out, x, group=group, async_op=pending is not None)
        if pending is not None:
            pending.start(call, work, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ReduceScatter.apply(grad, ctx.static[0], None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return AllGather.apply(tangent, ctx.static[0], None)  # type: ignore[no-any-return]


class ReduceScatter(Collective):
    """``[n * m, ...] -> [m, ...]``; with ``pending``, the result is there only after its ``wait``."""

    @staticmethod
    def forward(x: Tensor, group: ProcessGroup, pending: Pending | None) -> Tensor:
        if dist.get_world_size(group) == 1:
            return x.view_as(x)
        x = x.contiguous()
        out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        call = Call("reduce_scatter", x, group)
        with call:
            work = reduce_scatter_single(out, x, group=group, async_op=pending is not None)
        if pending is not None:
            pending.start(call, work, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllGather.apply(grad, ctx.static[0], None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return ReduceScatter.apply(tangent, ctx.static[0], None)  # type: ignore[no-any-return]


class Wait(Collective):
    """The identity, once the data is there.

    A Function, because gloo's ``wait`` may copy into the result, which a transform around would refuse.
    """

    @staticmethod
    def forward(x: Tensor, pending: Pending) -> Tensor:
        pending.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent


def _sum(x: Tensor, group: ProcessGroup, name: str) -> Tensor:
    if dist.get_world_size(group) == 1:
        return x.view_as(x)
    out = x.clone(memory_format=torch.contiguous_format)
    with Call(name, x, group):
        dist.all_reduce(out, group=group)
    return out


class AllReduce(Collective):
    @staticmethod
    def forward(x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group, "all_reduce")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(grad, *ctx.static), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return AllReduce.apply(tangent, *ctx.static)  # type: ignore[no-any-return]


class Replicate(Collective):
    @staticmethod
    def forward(x: Tensor, group: ProcessGroup) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ReduceReplicated.apply(grad, *ctx.static), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Replicate.apply(tangent, *ctx.static)  # type: ignore[no-any-return]


class ReduceReplicated(Collective):
    @staticmethod
    def forward(x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group, "reduce_replicated")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Replicate.apply(grad, *ctx.static), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return ReduceReplicated.apply(tangent, *ctx.static)  # type: ignore[no-any-return]


class AllToAll(Collective):
    """Uneven parts of rows; with ``pending``, the result is there only after its ``wait``."""

    @staticmethod
    def forward(
        x: Tensor,
        group: ProcessGroup,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        needed: bool,
        pending: Pending | None,
    ) -> Tensor:
        if dist.get_world_size(group) == 1:
            return x.view_as(x)
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        if not needed:
            return out
        call = Call("all_to_all", x, group)
        with call:
            work = dist.all_to_all_single(out, x, list(receive), list(send), group=group, async_op=pending is not None)
        if pending is not None:
            pending.start(call, work, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        group, send, receive, *_ = ctx.static
        return AllToAll.apply(grad, group, receive, send, True, None), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return AllToAll.apply(tangent, *ctx.static[:4], None)  # type: ignore[no-any-return]


class BroadcastFrom(Collective):
    @staticmethod
    def forward(x: Tensor, owner: int, group: ProcessGroup) -> Tensor:
        if dist.get_world_size(group) == 1:
            return x.view_as(x)
        out = x.clone(memory_format=torch.contiguous_format)
        with Call(f"broadcast_from owner {owner}", x, group):
            dist.broadcast(out, group_src=owner, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ReduceTo.apply(grad, *ctx.static), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return BroadcastFrom.apply(tangent, *ctx.static)  # type: ignore[no-any-return]


class ReduceTo(Collective):
    @staticmethod
    def forward(x: Tensor, owner: int, group: ProcessGroup) -> Tensor:
        if dist.get_world_size(group) == 1:
            return x.view_as(x)
        out = x.clone(memory_format=torch.contiguous_format)
        with Call(f"reduce_to owner {owner}", x, group):
            dist.reduce(out, group_dst=owner, group=group)
        # A backend may leave a partial sum where it was not asked for one.
        return out if dist.get_rank(group) == owner else out.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return BroadcastFrom.apply(grad, *ctx.static), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return ReduceTo.apply(tangent, *ctx.static)  # type: ignore[no-any-return]


for _function in (
    AllGather,
    ReduceScatter,
    Wait,
    AllReduce,
    Replicate,
    ReduceReplicated,
    AllToAll,
    BroadcastFrom,
    ReduceTo,
):
    _function.vmap = _along_last(_function)  # type: ignore[method-assign]
