"""Tokens to their experts and back, without a dropped token or a scatter-add.

Each token chooses exactly ``top_k`` experts, so sorting the choices by expert is a permutation of
``tokens * top_k`` rows. Dispatch gathers a token's row for each of its choices; its backward gathers each choice's
gradient row and sums over the ``top_k``. Combine is the same pair the other way round. Gathers alone are
deterministic, and several times faster than ``index_put`` with accumulation.

With expert parallelism experts are numbered in the order of the ranks that hold them; then the same sorting puts what
goes to a rank into one run of rows, which travel there (``parallel.exchange``), and their outputs back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .kernels import Kernels, ReverseModeFunction, first_order_kernel
from .parallel import Exchange, ExpertParallel, axis_size, exchange, exchange_back, plan_exchange
from .parameters import Params
from .products import matmul, product, product_over_rows, rows_per_shape


class Dispatch(NamedTuple):
    """The permutation that sorts the choices of tokens by expert. Rows are choices in sorted order."""

    token_of_row: Tensor  # int64 [tokens * top_k]
    row_of_choice: Tensor  # int64 [tokens, top_k]; the inverse
    choice_of_row: Tensor  # int64 [tokens * top_k]; choices are numbered token * top_k + k
    offsets: Tensor  # int32 [experts]; where each expert's rows end


class Decision(NamedTuple):
    """All that a layer decides of its tokens, without gradient: a residual. Handed back, nothing is decided again.

    Its leaves are tensors alone (not even ``None``), so ``torch.func.vjp(..., has_aux=True)`` hands it out.
    """

    experts: Tensor  # int64 [tokens, top_k], as the router numbers them
    dispatch: Dispatch  # with expert parallelism, over experts in the order of ranks
    exchange: Exchange | tuple[()]  # () where every expert is here


def decide(experts: Tensor, num_experts: int, expert_parallel: ExpertParallel | None = None) -> Decision:
    """What follows from the choices of tokens. With expert parallelism, one small message; see ``plan_exchange``.

    Args:
      experts: int64 ``[tokens, top_k]``.
      num_experts: of the layer, on all ranks together.
      expert_parallel: how they are spread; ``None`` where every expert is here.

    Raises:
      ValueError: when ``expert_parallel`` is of another number of experts.
    """
    if expert_parallel is None:
        return Decision(experts, plan_dispatch(experts, num_experts), ())
    group, position = expert_parallel
    if len(position) != num_experts:
        raise ValueError(f"expert_parallel spreads {len(position)} experts; the layer has {num_experts}")
    dispatch = plan_dispatch(position[experts], num_experts)
    ends = dispatch.offsets.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(axis_size(group), -1)
    # Without numbers to look at, every rank is taken to get as many rows: what balance aims at.
    balanced = experts.numel() if isinstance(experts, FakeTensor) else None
    return Decision(experts, dispatch, plan_exchange(counts, group, balanced))


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


def _grouped_mm_takes(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes these: a narrow dtype, and rows or columns at 16-byte boundaries."""
    return all(
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _is_aligned(x)
        and x.storage_offset() * x.element_size() % 16 == 0
        for x in operands
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether every matrix of ``x`` lies row by row or column by column, each starting at a 16-byte boundary."""
    *batch, row, column = x.stride()
    # Of sizes 0 and 1 both strides may be 1, or anything; torch asks for one that reaches over the other axis.
    if row == 1 and column >= max(1, x.shape[-2]):
        leading = column
    elif column == 1 and row >= max(1, x.shape[-1]):
        leading = row
    else:
        return False
    return all(stride * x.element_size() % 16 == 0 for stride in (*batch, leading))


def _padded_blocks(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each expert as one block padded with zeros, and where the rows stand in it.

    Returns:
      blocks: ``[experts, capacity, size]``, with ``capacity`` the fullest expert's rows (one host synchronisation).
      position: int64 ``[rows]``, the row's place in ``blocks`` flattened to ``[experts * capacity, size]``.
    """
    ends = offsets.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    capacity = max(1, int((ends - starts).max()))
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(ends, row, right=True)
    position = expert * capacity + (row - starts[expert])
    blocks = x.new_zeros(len(ends) * capacity, x.shape[1]).index_copy_(0, position, x)
    return blocks.view(len(ends), capacity, x.shape[1]), position


def _even_blocks(x: Tensor, experts: int) -> Tensor | None:
    """As many rows for each expert, ``[experts, capacity, size]``, where there are no numbers to look at and no
    grouped product either: for a fake tensor the operator is declared in bfloat16 alone. ``None`` for all others.
    """
    if not isinstance(x, FakeTensor) or x.dtype == torch.bfloat16:
        return None
    capacity = -(-len(x) // experts)
    return F.pad(x, (0, 0, 0, experts * capacity - len(x))).view(experts, capacity, -1)


def _matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e]`` for each expert e, in one grouped product.

    ``torch.nn.functional.grouped_mm`` where it applies (fp32, bf16, fp16, rows at 16-byte boundaries), else a padded
    batched product, whose memory is that of the fullest expert times their number.

    Args:
      x: ``[rows, in]``, sorted by expert.
      weight: ``[experts, in, out]``.
      offsets: int32 ``[experts]``, where each expert's rows end; the last one is ``rows``.
    """
    even = _even_blocks(x, len(offsets))
    if even is not None:
        return torch.bmm(even, weight).flatten(0, 1)[: len(x)]
    if _grouped_mm_takes(x, weight):
        return F.grouped_mm(x, weight, offs=offsets)
    blocks, position = _padded_blocks(x, offsets)
    return torch.bmm(blocks, weight).flatten(0, 1).index_select(0, position)


def _outer(x: Tensor, z: Tensor, offsets: Tensor) -> Tensor:
    """``x[rows of e].T @ z[rows of e]`` for each expert e; exactly zero for one without rows."""
    even, other = _even_blocks(x, len(offsets)), _even_blocks(z, len(offsets))
    if even is not None and other is not None:
        return torch.bmm(even.transpose(1, 2), other)
    if _grouped_mm_takes(x, z):
        return F.grouped_mm(x.t(), z, offs=offsets)
    x_blocks, _ = _padded_blocks(x, offsets)
    z_blocks, _ = _padded_blocks(z, offsets)
    return torch.bmm(x_blocks.transpose(1, 2), z_blocks)


def _swiglu(gate_up: Tensor) -> tuple[Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate).mul_(up),)


def _weighted_swiglu(gate_up: Tensor, weights: Tensor) -> tuple[Tensor]:
    return (_swiglu(gate_up)[0].mul_(weights),)


def _swiglu_gradient(cotangent: Tensor, gate_up: Tensor) -> tuple[Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    grad = torch.empty_like(gate_up)
    grad_gate, grad_up = grad.chunk(2, dim=-1)
    torch.mul(cotangent, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(cotangent * up, gate, grad_input=grad_gate)
    return (grad,)


def _weighted_swiglu_gradient(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gate_up`` and ``weights``, and between them the weighted activations made again.

    Works in place on ``grad``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    grad_inner = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
    activated = F.silu(gate)
    hidden = activated * up
    grad_weights = torch.linalg.vecdot(grad, hidden)[:, None]
    torch.mul(grad.mul_(weights), activated, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
    return grad_inner, hidden.mul_(weights), grad_weights


_fused_swiglu = first_order_kernel(_swiglu, _swiglu_gradient, differentiable=1)


def swiglu(gate_up: Tensor, kernels: Kernels = "fused") -> Tensor:
    """``silu(gate) * up`` (arXiv 2002.05202).

    Args:
      gate_up: ``[..., 2 * width]``, the gate's half first.
      kernels: ``"fused"`` keeps nothing but its input for the backward.

    Returns:
      ``[..., width]``.
    """
    if kernels == "fused":
        return _fused_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def feed_forward(params: Params, x: Tensor, kernels: Kernels = "fused", needed: bool = True) -> Tensor:
    """The dense layer ``swiglu(x @ gate_up) @ down``, for ``x``: [..., hidden]. ``needed`` as in ``matmul``."""
    return matmul(swiglu(matmul(x, params["gate_up"], kernels), kernels), params["down"], kernels, needed)


def _one_by_one(x: Tensor) -> bool:
    """Whether to go through all steps with one expert at a time, instead of each step with all experts.

    On a CPU a grouped product is a loop over the experts in any case, and an expert's rows stay in cache between its
    steps: a third faster on two cores.
    """
    # A subclass (a fake tensor, say) has no numbers to look at: offsets stay on its side.
    return x.device.type == "cpu" and type(x) is Tensor


class _Block(NamedTuple):
    """One expert's rows, within a slice that may reach into its neighbours' so that few slice lengths occur."""

    expert: int
    around: slice  # of all rows
    rows: slice  # of all rows; the expert's own
    own: slice  # of the slice ``around``; the expert's own


def _blocks(rows: Tensor, offsets: Tensor) -> Iterator[_Block]:
    multiple, total, start = rows_per_shape(rows), len(rows), 0
    for expert, end in enumerate(offsets.tolist()):
        length = min(-(-(end - start) // multiple) * multiple, total)
        first = min(start, total - length)
        yield _Block(expert, slice(first, first + length), slice(start, end), slice(start - first, end - first))
        start = end


def _experts(
    rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, offsets: Tensor, needed: bool
) -> tuple[Tensor, Tensor]:
    """The weighted outputs [rows, hidden], unfilled unless needed, and ``rows @ gate_up`` [rows, 2 * width]."""
    if not _one_by_one(rows):
        inner = _matmul(rows, gate_up, offsets)
        if not needed:
            return rows.new_empty(len(rows), down.shape[-1]), inner
        return _matmul(_weighted_swiglu(inner, weights)[0], down, offsets), inner
    inner, out = rows.new_empty(len(rows), gate_up.shape[-1]), rows.new_empty(len(rows), down.shape[-1])
    for block in _blocks(rows, offsets):
        part = product(rows[block.around], gate_up[block.expert])
        inner[block.rows] = part[block.own]
        if not needed:
            continue
        hidden = _weighted_swiglu(part, weights[block.around])[0]
        out[block.rows] = product(hidden, down[block.expert])[block.own]
    return out, inner


def _experts_gradient(
    cotangent: Tensor,
    rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    offsets: Tensor,
    needed: bool,
    inner: Tensor,
) -> tuple[Tensor, ...]:
    """Makes the activations again from ``inner``; the products are not repeated."""
    cotangent = cotangent.contiguous()
    if not _one_by_one(rows):
        grad_hidden = _matmul(cotangent, down.transpose(-1, -2), offsets)
        grad_inner, hidden, grad_weights = _weighted_swiglu_gradient(grad_hidden, inner, weights)
        grad_rows = _matmul(grad_inner, gate_up.transpose(-1, -2), offsets)
        return grad_rows, _outer(rows, grad_inner, offsets), _outer(hidden, cotangent, offsets), grad_weights
    grads = tuple(torch.empty_like(x) for x in (rows, gate_up, down, weights))
    grad_rows, grad_gate_up, grad_down, grad_weights = grads
    for block in _blocks(rows, offsets):
        grad_hidden = product(cotangent[block.around], down[block.expert].t())
        grad_inner, hidden, grad_weight = _weighted_swiglu_gradient(
            grad_hidden, inner[block.around], weights[block.around]
        )
        grad_weights[block.rows] = grad_weight[block.own]
        grad_rows[block.rows] = product(grad_inner, gate_up[block.expert].t())[block.own]
        # Sums over rows want the expert's own and no others.
        grad_down[block.expert] = product_over_rows(hidden[block.own], cotangent[block.rows])
        grad_gate_up[block.expert] = product_over_rows(rows[block.rows], grad_inner[block.own])
    return grads


_fused_experts = first_order_kernel(_experts, _experts_gradient, differentiable=4)


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


_packed_rows = first_order_kernel(_pack, _pack_gradient, differentiable=2)


def routed_experts(
    params: Params,
    x: Tensor,
    decision: Decision,
    weights: Tensor,
    kernels: Kernels = "fused",
    expert_parallel: ExpertParallel | None = None,
    needed: bool = True,
) -> Tensor:
    """The weighted sum over each token's experts of their SwiGLU output.

    With expert parallelism a rank sends ``hidden + 1`` numbers of ``x``'s dtype for each row that goes to another rank,
    at even load ``(ep - 1) / ep`` of ``tokens top_k``, and ``hidden`` for each output that goes home: two messages, and
    two of the same sizes in the backward.

    Args:
      params: ``gate_up`` [experts, hidden, 2 * width] and ``down`` [experts, width, hidden]; with expert parallelism
        the ``experts / ep`` of this rank. Their gradient then has the tokens of all ``ep`` ranks.
      x: ``[tokens, hidden]``.
      decision: what :func:`decide` returned for these tokens, now or before.
      weights: ``[tokens, top_k]``.
      kernels: ``"reference"`` passes every token through every expert, with weight 0 where it was not chosen.
      expert_parallel: as it was given to ``decide``.
      needed: when False, the fused kernels leave the result unfilled and bring no outputs home: for a replay, which
        wants its derivative alone.

    Returns:
      ``[tokens, hidden]``.

    Raises:
      ValueError: when the decision is of another number of experts or tokens, or was made with other parallelism.
      NotImplementedError: for expert parallelism with the reference kernels.
    """
    gate_up, down = params["gate_up"].to(x.dtype), params["down"].to(x.dtype)
    _check_decision(decision, x, gate_up, kernels, expert_parallel)
    dispatch, plan = decision.dispatch, decision.exchange
    if kernels == "reference":
        dense = torch.zeros(x.shape[0], gate_up.shape[0], dtype=weights.dtype, device=x.device)
        dense = dense.scatter(1, decision.experts, weights).to(x.dtype)
        hidden = swiglu(einsum(x, gate_up, "n i, e i w -> e n w"), kernels) * dense.t()[..., None]
        out: Tensor = einsum(hidden, down, "e n w, e w o -> n o")
        return out
    # down is linear, so the weight may come before it: then the backward needs no expert output, which is the
    # wider tensor, and the weight's gradient is taken over the narrower one.
    if expert_parallel is None or not isinstance(plan, Exchange):
        row_weights = weights_to_rows(weights, dispatch).to(x.dtype)
        rows = to_rows(x, dispatch)
        return from_rows(_fused_experts(rows, gate_up, down, row_weights, dispatch.offsets, needed), dispatch)
    sent = _packed_rows(x, weights, dispatch.token_of_row, dispatch.row_of_choice, dispatch.choice_of_row)
    rows, row_weights = exchange(sent, plan, expert_parallel.group, (x.shape[1], 1))
    outputs = _fused_experts(rows, gate_up, down, row_weights, plan.offsets, needed)
    return from_rows(exchange_back((outputs,), plan, expert_parallel.group, needed), dispatch)


def _check_decision(
    decision: Decision, x: Tensor, gate_up: Tensor, kernels: Kernels, expert_parallel: ExpertParallel | None
) -> None:
    plan = decision.exchange
    if isinstance(plan, Exchange) != (expert_parallel is not None):
        made, used = ("with", "without") if expert_parallel is None else ("without", "with")
        raise ValueError(f"the decision was made {made} expert parallelism and is used {used} it")
    if expert_parallel is not None and kernels == "reference":
        raise NotImplementedError("expert parallelism needs the fused kernels; kernels='reference' is for one process")
    if decision.experts.shape[0] != x.shape[0]:
        raise ValueError(f"the decision is of {decision.experts.shape[0]} tokens; x has {x.shape[0]}")
    offsets = plan.offsets if isinstance(plan, Exchange) else decision.dispatch.offsets
    if offsets.shape[0] != gate_up.shape[0]:
        raise ValueError(f"the decision is of {offsets.shape[0]} experts on this rank; params hold {gate_up.shape[0]}")
