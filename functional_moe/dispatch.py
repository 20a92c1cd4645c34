"""Tokens to their experts and back, without a dropped token or a scatter-add.

Each token chooses exactly ``top_k`` experts, so sorting the choices by expert is a permutation of
``tokens * top_k`` rows. Dispatch gathers a token's row for each of its choices; its backward gathers each choice's
gradient row and sums over the ``top_k``. Combine is the same pair the other way round. Gathers alone are
deterministic, and several times faster than ``index_put`` with accumulation.

With expert parallelism experts are numbered in the order of the ranks that hold them; then the same sorting puts what
goes to a rank into one run of rows, which travel there (``parallel.exchange``), and their outputs back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .kernels import ReverseModeFunction, first_order_kernel
from .parallel import Exchange, ExpertParallel, axis_size, chunk_sizes, plan_exchanges


class Dispatch(NamedTuple):
    """The permutation that sorts the choices of tokens by expert. Rows are choices in sorted order."""

    token_of_row: Tensor  # int64 [tokens * top_k]
    row_of_choice: Tensor  # int64 [tokens, top_k]; the inverse
    choice_of_row: Tensor  # int64 [tokens * top_k]; choices are numbered token * top_k + k
    offsets: Tensor  # int32 [experts]; where each expert's rows end


class Part(NamedTuple):
    """How a run of tokens goes to its experts."""

    dispatch: Dispatch  # with expert parallelism, over experts in the order of ranks
    exchange: Exchange | tuple[()]  # () where every expert is here

    @property
    def offsets(self) -> Tensor:
        """int32 [experts of this rank]; where each one's rows end."""
        return self.exchange.offsets if isinstance(self.exchange, Exchange) else self.dispatch.offsets


class Decision(NamedTuple):
    """All that a layer decides of its tokens, without gradient: a residual. Handed back, nothing is decided again.

    Its leaves are tensors alone (not even ``None``), so ``torch.func.vjp(..., has_aux=True)`` hands it out.
    """

    experts: Tensor  # int64 [tokens, top_k], as the router numbers them
    parts: tuple[Part, ...]  # of the tokens, in their order


def decide(
    experts: Tensor, num_experts: int, expert_parallel: ExpertParallel | None = None, parts: int = 1
) -> Decision:
    """What follows from the choices of tokens. With expert parallelism, one small message; see ``plan_exchange``.

    Args:
      experts: int64 ``[tokens, top_k]``.
      num_experts: of the layer, on all ranks together.
      expert_parallel: how they are spread; ``None`` where every expert is here.
      parts: in how many runs of tokens they go through the experts, one after the other; the same on every rank.

    Raises:
      ValueError: when ``expert_parallel`` is of another number of experts, or for ``parts < 1``.
    """
    if parts < 1:
        raise ValueError(f"parts = {parts}: must be at least 1")
    sizes = chunk_sizes(len(experts), parts)
    if expert_parallel is None:
        some = experts.split(sizes)
        return Decision(experts, tuple(Part(plan_dispatch(part, num_experts), ()) for part in some))
    group, position = expert_parallel
    if len(position) != num_experts:
        raise ValueError(f"expert_parallel spreads {len(position)} experts; the layer has {num_experts}")
    dispatches = [plan_dispatch(part, num_experts) for part in position[experts].split(sizes)]
    ends = torch.stack([dispatch.offsets for dispatch in dispatches]).to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(parts, 1)).view(parts, axis_size(group), -1)
    # Without numbers to look at, every rank is taken to get as many rows: what balance aims at.
    balanced = [size * experts.shape[1] for size in sizes] if isinstance(experts, FakeTensor) else None
    exchanges = plan_exchanges(counts, group, balanced)
    return Decision(experts, tuple(map(Part, dispatches, exchanges)))


def plan_dispatch(experts: Tensor, num_experts: int) -> Dispatch:
    """Sorts choices by expert, tokens in order within each.

    Args:
      experts: int64 ``[tokens, top_k]``.
    """
    tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    choice_of_row = torch.argsort(flat, stable=True)
    rows = torch.arange(tokens * top_k, device=experts.device)
    row_of_choice = rows.scatter(0, choice_of_row, rows)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    offsets = counts.cumsum(0).to(torch.int32)
    return Dispatch(choice_of_row // top_k, row_of_choice.view(tokens, top_k), choice_of_row, offsets)


class _GatherRows(ReverseModeFunction):
    """``y[row] = x[source[row]]``, where every source stands in exactly ``rows.shape[1]`` rows: ``rows[source]``."""

    @staticmethod
    def forward(x: Tensor, source: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source, rows = ctx.saved_tensors
        return _SumRows.apply(grad, source, rows), None, None


class _SumRows(ReverseModeFunction):
    """``y[source] = sum over k of x[rows[source, k]]``: the transpose of ``_GatherRows``."""

    @staticmethod
    def forward(x: Tensor, source: Tensor, rows: Tensor) -> Tensor:
        return F.embedding_bag(rows, x, mode="sum")  # torch's name for gathering rows and summing them in one pass

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source, rows = ctx.saved_tensors
        return _GatherRows.apply(grad, source, rows), None, None


def to_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Dispatch: ``x`` [tokens, hidden] to ``[tokens * top_k, hidden]``, sorted by expert."""
    return _GatherRows.apply(x, dispatch.token_of_row, dispatch.row_of_choice)  # type: ignore[no-any-return]


def weights_to_rows(weights: Tensor, dispatch: Dispatch) -> Tensor:
    """The weight of each row: ``[tokens, top_k]`` to ``[tokens * top_k, 1]``."""
    rows = dispatch.row_of_choice.reshape(-1, 1)
    return _GatherRows.apply(weights.reshape(-1, 1), dispatch.choice_of_row, rows)  # type: ignore[no-any-return]


def from_rows(y: Tensor, dispatch: Dispatch) -> Tensor:
    """Combine: the sum of each token's rows, ``[tokens * top_k, hidden]`` to ``[tokens, hidden]``."""
    return _SumRows.apply(y, dispatch.token_of_row, dispatch.row_of_choice)  # type: ignore[no-any-return]


def _pack(
    x: Tensor, weights: Tensor, token_of_row: Tensor, row_of_choice: Tensor, choice_of_row: Tensor
) -> tuple[Tensor]:
    """``to_rows(x)`` with ``weights_to_rows(weights)`` as one more column, so that both travel in one message."""
    packed = x.new_empty(len(token_of_row), x.shape[1] + 1)
    torch.index_select(x, 0, token_of_row, out=packed[:, :-1])
    packed[:, -1] = weights.reshape(-1).index_select(0, choice_of_row)
    return (packed,)


def _pack_gradient(
    cotangent: Tensor, x: Tensor, weights: Tensor, token_of_row: Tensor, row_of_choice: Tensor, choice_of_row: Tensor
) -> tuple[Tensor, Tensor]:
    # The column of weights is summed along, because a part of the columns would be copied first.
    grad_x = F.embedding_bag(row_of_choice, cotangent, mode="sum")[:, :-1]
    grad_weights = cotangent[:, -1].index_select(0, row_of_choice.reshape(-1))
    return grad_x, grad_weights.view_as(weights).to(weights.dtype)


packed_rows = first_order_kernel(_pack, _pack_gradient, differentiable=2)
