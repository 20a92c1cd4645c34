"""Collectives that ``torch.func`` can differentiate, to any order.

One rule says what their derivatives mean. The function that is differentiated is the *sum over the ranks* of what each
rank returns, and a value that stands on several ranks is several values, one per rank. Each collective is linear in
them, so its derivative forward (``jvp``) is itself, and backward (``vjp``) it is its transpose: the dual collective,
which is called through its own Function so that it can be differentiated again. Nothing here divides.

==========================  ============================  ==========================
collective                  what it does                  its dual
==========================  ============================  ==========================
:func:`all_gather`          ``A[I_Y, J] -> A[I, J]``      :func:`reduce_scatter`
:func:`reduce_scatter`      ``A[I, J] {U_Y} -> A[I_Y, J]``  :func:`all_gather`
:func:`all_reduce`          ``A[I] {U_Y} -> A[I]``        :func:`all_reduce`
:func:`all_to_all`          rows change ranks             :func:`all_to_all`, sizes swapped
:func:`broadcast_from`      the owner's, to all           :func:`reduce_to`
:func:`reduce_to`           the sum, to the owner         :func:`broadcast_from`
:func:`replicate`           one value, a copy each        :func:`reduce_replicated`
:func:`reduce_replicated`   ``A[I] {U_Y}``, one value     :func:`replicate`
==========================  ============================  ==========================

(``A[I_Y, J]``: axis I sharded over the ranks Y; ``{U_Y}``: unreduced, each rank holds a summand. The notation is
that of https://jax-ml.github.io/scaling-book/sharding.)

The last pair is for what DTensor calls ``Replicate``: *one* value, of which every rank holds the same copy, such as a
parameter that is not sharded. ``replicate`` is how it enters a computation (JAX: ``lax.pcast``; Megatron: f) and sums
its gradient over the ranks; ``reduce_replicated`` is how a sum becomes one such value (JAX: ``lax.psum``; Megatron:
g), so that a loss it returns counts once. A loss that ``all_reduce`` returned counts once *per rank*: its gradient is
``n`` times larger, by the rule above. The kit in :mod:`.testing` finds the wrong choice.

Every rank of the group must make the same calls in the same order, backward included: a result that one rank alone
leaves unused gives that rank no backward call, and the others wait. A group of one rank communicates nothing, but
every rule is the same. Cotangents may be non-contiguous or have stride 0. Under ``vmap`` the batch goes along in one
message; every rank must map over the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective_functions import (
    AllGather,
    AllReduce,
    AllToAll,
    BroadcastFrom,
    Pending,
    ReduceReplicated,
    ReduceScatter,
    ReduceTo,
    Replicate,
    Wait,
)


def axis_index(group: ProcessGroup) -> int:
    """The calling rank's index within ``group``, from 0."""
    return dist.get_rank(group)


def axis_size(group: ProcessGroup) -> int:
    """How many ranks ``group`` has."""
    return dist.get_world_size(group)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """How many of ``size`` rows each of ``parts`` ranks holds, by the rule of ``torch.chunk`` and of DTensor.

    Every rank holds ``ceil(size / parts)`` rows until they run out: 5 over 4 is ``(2, 2, 1, 0)``.
    """
    full = -(-size // parts)
    return tuple(max(0, min(full, size - part * full)) for part in range(parts))


def all_gather(x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's ``x``, joined along ``dim`` in the order of ranks: ``A[I_Y, J] -> A[I, J]``.

    Sends ``(n - 1) * max(sizes)`` rows per rank. Dual: :func:`reduce_scatter`.

    Args:
      x: ``[..., rows of this rank, ...]``.
      group: the ranks ``Y``, ``n`` of them.
      dim: the axis ``I``.
      sizes: rows of each rank, where they differ (0 is fine); equal everywhere when not given.

    Returns:
      ``[..., sum of rows, ...]``, the same on every rank.

    Raises:
      ValueError: when ``sizes`` does not fit the group or ``x``.
      CollectiveError: when the group fails.
    """
    return all_gather_start(x, group, dim, sizes).wait()


def all_gather_start(
    x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Handle[Tensor]:
    """:func:`all_gather` that returns before the data is there, to overlap it with computation.

    Returns:
      a :class:`Handle`, whose ``wait()`` gives the result. Its derivative is that of ``all_gather``, and not
      overlapped.
    """
    rows, dim, sizes, even = _rows_first(x, group, dim, sizes, "all_gather")
    if not even:
        rows = _pad(rows, max(sizes))
    pending = Pending()
    started = AllGather.apply(rows, group, pending)

    def finish() -> Tensor:
        joined = Wait.apply(started, pending)
        if not even:
            blocks = joined.unflatten(0, (len(sizes), max(sizes)))
            joined = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
        return joined.movedim(0, dim)  # type: ignore[no-any-return]

    return Handle(finish)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The sum of every rank's ``x``, each rank keeping its rows along ``dim``: ``A[I, J] {U_Y} -> A[I_Y, J]``.

    Sends ``(n - 1) * max(sizes)`` rows per rank. Dual: :func:`all_gather`.

    Args:
      x: ``[..., sum of rows, ...]``; each rank's summand.
      group: the ranks ``Y``, ``n`` of them.
      dim: the axis ``I``.
      sizes: rows that each rank keeps, where they differ (0 is fine); equal parts when not given.

    Returns:
      ``[..., rows of this rank, ...]``.

    Raises:
      ValueError: when ``sizes`` does not fit the group or ``x``, or equal parts are impossible.
      CollectiveError: when the group fails.
    """
    return reduce_scatter_start(x, group, dim, sizes).wait()


def reduce_scatter_start(
    x: Tensor, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Handle[Tensor]:
    """:func:`reduce_scatter` that returns before the data is there.

    Returns:
      a :class:`Handle`, whose ``wait()`` gives the result. Its derivative is that of ``reduce_scatter``, and not
      overlapped.
    """
    rows, dim, sizes, even = _rows_first(x, group, dim, sizes, "reduce_scatter")
    if not even:
        rows = torch.cat([_pad(part, max(sizes)) for part in rows.split(list(sizes))])
    pending = Pending()
    started = ReduceScatter.apply(rows, group, pending)
    kept = sizes[axis_index(group)]
    return Handle(lambda: Wait.apply(started, pending)[:kept].movedim(0, dim))


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's ``x``, of which each rank has a copy of its own: ``A[I] {U_Y} -> A[I]``.

    Its own dual. A scalar loss that it returns is ``n`` losses, whose sum is differentiated; for one loss that all
    ranks hold, see :func:`reduce_replicated`.

    Args:
      x: this rank's summand, any shape, the same on every rank.
      group: the ranks ``Y``.

    Raises:
      CollectiveError: when the group fails.
    """
    return AllReduce.apply(x, group)  # type: ignore[no-any-return]


def all_to_all(
    x: Tensor,
    group: ProcessGroup,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    needed: bool = True,
) -> Tensor:
    """Sends the first rows of ``x`` to rank 0, the next to rank 1, and so on; returns what arrives, in rank order.

    Its dual is itself with the two sizes exchanged.

    Args:
      x: ``[sum of send_sizes, ...]``.
      group: ``n`` ranks.
      send_sizes: how many rows go to each rank; equal parts when neither is given.
      receive_sizes: how many rows come from each rank: their ``send_sizes`` at this rank's index.
      needed: when False, on every rank, nothing is sent and the result is unfilled: for a replay, which wants its
        derivative alone.

    Returns:
      ``[sum of receive_sizes, ...]``.

    Raises:
      ValueError: when the sizes do not fit the group or ``x``, or only one of them is given.
      CollectiveError: when the group fails.
    """
    sizes = _split_sizes(x, group, send_sizes, receive_sizes)
    return AllToAll.apply(x, group, *sizes, needed, None)  # type: ignore[no-any-return]


def all_to_all_start(
    x: Tensor,
    group: ProcessGroup,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Handle[Tensor]:
    """:func:`all_to_all` that returns before the data is there.

    Returns:
      a :class:`Handle`, whose ``wait()`` gives the result. Its derivative is that of ``all_to_all``, and not
      overlapped.
    """
    pending = Pending()
    started = AllToAll.apply(x, group, *_split_sizes(x, group, send_sizes, receive_sizes), True, pending)
    return Handle(lambda: Wait.apply(started, pending))


def broadcast_from(x: Tensor, owner: int, group: ProcessGroup) -> Tensor:
    """The owner's ``x``, on every rank. Dual: :func:`reduce_to`.

    Args:
      x: of the owner, the value; of the others, anything of its shape and dtype (their gradient is 0).
      owner: index within ``group``.
      group: the ranks.

    Raises:
      ValueError: when ``group`` has no such index.
      CollectiveError: when the group fails.
    """
    _check_owner(owner, group, "broadcast_from")
    return BroadcastFrom.apply(x, owner, group)  # type: ignore[no-any-return]


def reduce_to(x: Tensor, owner: int, group: ProcessGroup) -> Tensor:
    """The sum of every rank's ``x`` on the owner, zeros on the others. Dual: :func:`broadcast_from`.

    Args:
      x: this rank's summand, any shape, the same on every rank.
      owner: index within ``group``.
      group: the ranks.

    Raises:
      ValueError: when ``group`` has no such index.
      CollectiveError: when the group fails.
    """
    _check_owner(owner, group, "reduce_to")
    return ReduceTo.apply(x, owner, group)  # type: ignore[no-any-return]


def replicate(x: Tensor, group: ProcessGroup) -> Tensor:
    """Each rank's own copy of one value that all hold: no communication, but the gradient is summed over ``group``.

    What :func:`all_gather` is for a sharded parameter, this is for a replicated one. Dual: :func:`reduce_replicated`.

    Args:
      x: the same on every rank of ``group``; that is not checked.
      group: the ranks whose uses of ``x`` count.
    """
    return Replicate.apply(x, group)  # type: ignore[no-any-return]


def reduce_replicated(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's ``x`` as one value that all hold: forward as :func:`all_reduce`, but it counts once.

    What depends on it must be the same on every rank, as a loss that all ranks return is; then its cotangent is too,
    and passes to each summand unchanged. A rank that uses it in its own way takes :func:`replicate` of it first, or
    ``all_reduce``. Dual: :func:`replicate`.

    Args:
      x: this rank's summand, any shape, the same on every rank.
      group: the ranks.

    Raises:
      CollectiveError: when the group fails.
    """
    return ReduceReplicated.apply(x, group)  # type: ignore[no-any-return]


Result_co = TypeVar("Result_co", covariant=True)


class Handle(Generic[Result_co]):
    """A collective on its way."""

    def __init__(self, finish: Callable[[], Result_co]) -> None:
        self._finish = finish

    def wait(self) -> Result_co:
        """The result. Blocks the host on the CPU, the current stream on a GPU; may be called again.

        Raises:
          CollectiveError: when the group fails.
        """
        return self._finish()


def _rows_first(
    x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int] | None, name: str
) -> tuple[Tensor, int, tuple[int, ...], bool]:
    """``x`` with ``dim`` in front, ``dim`` from 0, the rows of every rank, and whether they are equal."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}: dim = {dim} for a tensor of shape {tuple(x.shape)}")
    dim, count, index = dim % x.ndim, axis_size(group), axis_index(group)
    rows = x.shape[dim]
    if sizes is None:
        sizes = (rows,) * count if name == "all_gather" else _even_sizes(rows, count, name)
    sizes = tuple(sizes)
    if len(sizes) != count or min(sizes) < 0:
        raise ValueError(f"{name}: sizes = {sizes} for a group of {count} ranks: one size >= 0 for each")
    expected = sizes[index] if name == "all_gather" else sum(sizes)
    if rows != expected:
        raise ValueError(
            f"{name}: x has {rows} rows along dim {dim} on rank {index} of the group; sizes = {sizes} mean {expected}"
        )
    return x.movedim(dim, 0), dim, sizes, len(set(sizes)) == 1


def _split_sizes(
    x: Tensor, group: ProcessGroup, send_sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of an all-to-all, checked."""
    count = axis_size(group)
    if (send_sizes is None) != (receive_sizes is None):
        raise ValueError("all_to_all: give both send_sizes and receive_sizes, or neither for equal parts")
    if send_sizes is None or receive_sizes is None:
        send_sizes = receive_sizes = _even_sizes(x.shape[0], count, "all_to_all")
    for name, sizes in (("send_sizes", send_sizes), ("receive_sizes", receive_sizes)):
        if len(sizes) != count or min(sizes) < 0:
            raise ValueError(
                f"all_to_all: {name} = {tuple(sizes)} for a group of {count} ranks: one size >= 0 for each"
            )
    if sum(send_sizes) != x.shape[0]:
        raise ValueError(
            f"all_to_all: send_sizes = {tuple(send_sizes)} add up to {sum(send_sizes)}, x has {x.shape[0]} rows"
        )
    return tuple(send_sizes), tuple(receive_sizes)


def _even_sizes(rows: int, count: int, name: str) -> tuple[int, ...]:
    if rows % count:
        raise ValueError(f"{name}: {rows} rows are no equal parts for {count} ranks; give the sizes")
    return (rows // count,) * count


def _pad(x: Tensor, rows: int) -> Tensor:
    """``x`` with zeros after it, ``[rows, ...]``: messages of one size, whatever each rank holds."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _check_owner(owner: int, group: ProcessGroup, name: str) -> None:
    if not 0 <= owner < axis_size(group):
        raise ValueError(f"{name}: owner = {owner} for a group of {axis_size(group)} ranks")
