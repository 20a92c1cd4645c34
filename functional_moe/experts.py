"""The experts of a layer: each a small SwiGLU network over the rows of the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from .dispatch import Decision, Part, from_rows, packed_rows, to_rows, weights_to_rows
from .kernels import Kernels, first_order_kernel
from .parallel import (
    Exchange,
    ExpertParallel,
    Handle,
    exchange,
    exchange_back,
    exchange_back_start,
    exchange_start,
)
from .parameters import Params
from .products import matmul, product, rows_per_shape


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
    """The weighted outputs [rows, hidden], unfilled unless needed, and ``rows @ gate_up`` [rows, 2 * width].

    One expert at a time, all that is between its products has contiguous columns. A weight's gradient wants so what
    stands on its left, and is a quarter faster than by ``product_over_rows``, whose operator first copies and turns.
    """
    if not _one_by_one(rows):
        inner = _matmul(rows, gate_up, offsets)
        if not needed:
            return rows.new_empty(len(rows), down.shape[-1]), inner
        return _matmul(_weighted_swiglu(inner, weights)[0], down, offsets), inner
    inner, out = rows.new_empty(gate_up.shape[-1], len(rows)).t(), rows.new_empty(len(rows), down.shape[-1])
    for block in _blocks(rows, offsets):
        part = _product_by_columns(rows[block.around], gate_up[block.expert])
        inner[block.rows] = part[block.own]
        if not needed:
            continue
        hidden = _weighted_swiglu(part, weights[block.around])[0]
        out[block.rows] = _product_by_columns(hidden, down[block.expert])[block.own]
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
    sums: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Makes the activations again from ``inner``; the products are not repeated.

    ``sums`` are gradients of ``gate_up`` and ``down`` by other rows, which are added to in place.
    """
    cotangent = cotangent.contiguous()
    if not _one_by_one(rows):
        grad_hidden = _matmul(cotangent, down.transpose(-1, -2), offsets)
        grad_inner, hidden, grad_weights = _weighted_swiglu_gradient(grad_hidden, inner, weights)
        grad_rows = _matmul(grad_inner, gate_up.transpose(-1, -2), offsets)
        if sums is None:
            return grad_rows, _outer(rows, grad_inner, offsets), _outer(hidden, cotangent, offsets), grad_weights
        sums[0].add_(_outer(rows, grad_inner, offsets))
        sums[1].add_(_outer(hidden, cotangent, offsets))
        return grad_rows, *sums, grad_weights
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    grad_gate_up, grad_down = sums or (torch.empty_like(gate_up), torch.empty_like(down))
    for block in _blocks(rows, offsets):
        # Sums over rows want the expert's own and no others, not even times 0: those may be anything.
        some_rows, some_cotangent = (_alone(x[block.around].clone(), block.own) for x in (rows, cotangent))
        grad_hidden = _product_by_columns(some_cotangent, down[block.expert].t())
        grad_inner, hidden, grad_weight = _weighted_swiglu_gradient(
            grad_hidden, inner[block.around], weights[block.around]
        )
        grad_weights[block.rows] = grad_weight[block.own]
        grad_rows[block.rows] = _product_by_columns(grad_inner, gate_up[block.expert].t())[block.own]
        _put(product(_alone(hidden, block.own).t(), some_cotangent), grad_down[block.expert], sums is not None)
        _put(product(_alone(grad_inner, block.own).t(), some_rows).t(), grad_gate_up[block.expert], sums is not None)
    return grad_rows, grad_gate_up, grad_down, grad_weights


def _product_by_columns(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` with contiguous columns."""
    return product(y.t(), x.t()).t()


def _alone(x: Tensor, own: slice) -> Tensor:
    """``x``, changed in place, with zeros in all rows but its ``own``."""
    x[: own.start].zero_()
    x[own.stop :].zero_()
    return x


def _put(x: Tensor, out: Tensor, add: bool) -> None:
    """``x`` into ``out``, or added to it."""
    if add:
        out.add_(x)
    else:
        out.copy_(x)


_fused_experts = first_order_kernel(_experts, _experts_gradient, differentiable=4)


class _Columns(NamedTuple):
    """What travels with each of a run of tokens' choices, side by side in one message."""

    of_tokens: tuple[Tensor, ...]  # each [tokens, width]
    of_choices: Tensor  # [tokens, top_k]; the last column


def _rows_start(some: _Columns, part: Part, group: ProcessGroup | None) -> Handle[tuple[Tensor, ...]]:
    """One row for each choice, sorted by expert, where the experts are."""
    source, choice = part.dispatch.token_of_row, part.dispatch.choice_of_row
    if group is None or not isinstance(part.exchange, Exchange):

        def rows() -> tuple[Tensor, ...]:
            last = some.of_choices.reshape(-1).index_select(0, choice)[:, None].to(some.of_tokens[0].dtype)
            return (*(x.index_select(0, source) for x in some.of_tokens), last)

        return Handle(rows)
    widths = [x.shape[1] for x in some.of_tokens] + [1]
    packed = some.of_tokens[0].new_empty(len(source), sum(widths))
    for x, columns in zip(some.of_tokens, packed.split(widths, 1), strict=False):
        torch.index_select(x, 0, source, out=columns)
    packed[:, -1] = some.of_choices.reshape(-1).index_select(0, choice)
    return exchange_start(packed, part.exchange, group, widths)


def _home_start(rows: tuple[Tensor, ...], part: Part, group: ProcessGroup | None) -> Handle[Tensor]:
    """The columns of ``rows``, joined, where the tokens are, sorted as the part's choices."""
    if group is None or not isinstance(part.exchange, Exchange):
        return Handle(lambda: torch.cat(rows, 1) if len(rows) > 1 else rows[0])
    return exchange_back_start(rows, part.exchange, group)


def _one_after_the_other(
    columns: Sequence[_Columns],
    parts: Sequence[Part],
    group: ProcessGroup | None,
    compute: Callable[[Part, tuple[Tensor, ...]], tuple[Tensor, ...]],
    finish: Callable[[int, Tensor], None],
) -> None:
    """Rows of one part travel while those of another are computed: two parts are in memory, whatever their number."""
    leaving: Handle[Tensor] | None = None
    arriving = _rows_start(columns[0], parts[0], group)
    for index, part in enumerate(parts):
        rows = arriving.wait()
        if index + 1 < len(parts):
            arriving = _rows_start(columns[index + 1], parts[index + 1], group)
        computed = _home_start(compute(part, rows), part, group)
        if leaving is not None:
            finish(index - 1, leaving.wait())
        leaving = computed
    if leaving is not None:
        finish(len(parts) - 1, leaving.wait())


def _parts(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: ProcessGroup | None,
    needed: bool,
    structure: pytree.TreeSpec,
    *leaves: Tensor,
) -> tuple[Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not needed:
        return (out,)
    parts: tuple[Part, ...] = pytree.tree_unflatten(list(leaves), structure)
    tokens = [len(part.dispatch.row_of_choice) for part in parts]
    columns = [_Columns((one,), weight) for one, weight in zip(x.split(tokens), weights.split(tokens), strict=True)]
    results = out.split(tokens)

    def compute(part: Part, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_experts(rows[0], gate_up, down, rows[1], part.offsets, True)[0],)

    def finish(index: int, rows: Tensor) -> None:
        results[index].copy_(F.embedding_bag(parts[index].dispatch.row_of_choice, rows, mode="sum"))

    _one_after_the_other(columns, parts, group, compute, finish)
    return (out,)


def _parts_gradient(
    cotangent: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: ProcessGroup | None,
    needed: bool,
    structure: pytree.TreeSpec,
    *leaves: Tensor,
) -> tuple[Tensor, ...]:
    """Takes the rows of each part, and their cotangents, to the experts again, where ``rows @ gate_up`` is repeated."""
    parts: tuple[Part, ...] = pytree.tree_unflatten(list(leaves), structure)
    tokens = [len(part.dispatch.row_of_choice) for part in parts]
    columns = [
        _Columns((one, grad), weight)
        for one, grad, weight in zip(x.split(tokens), cotangent.split(tokens), weights.split(tokens), strict=True)
    ]
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    results = list(zip(grad_x.split(tokens), grad_weights.split(tokens), strict=True))
    sums: tuple[Tensor, Tensor] | None = None

    def compute(part: Part, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal sums
        of_x, of_cotangent, of_weights = rows
        inner = _experts(of_x, gate_up, down, of_weights, part.offsets, False)[1]
        grad_rows, *summed, grad_of_weights = _experts_gradient(
            of_cotangent, of_x, gate_up, down, of_weights, part.offsets, True, inner, sums
        )
        if sums is None:
            # Parts are added in fp32 or better, whatever a product rounds to.
            wide = torch.promote_types(gate_up.dtype, torch.float32)
            sums = summed[0].to(wide), summed[1].to(wide)
        return grad_rows, grad_of_weights

    def finish(index: int, rows: Tensor) -> None:
        of_x, of_weights = results[index]
        choices = parts[index].dispatch.row_of_choice
        of_x.copy_(F.embedding_bag(choices, rows, mode="sum")[:, :-1])
        of_weights.copy_(rows[:, -1].index_select(0, choices.reshape(-1)).view_as(of_weights))

    _one_after_the_other(columns, parts, group, compute, finish)
    if sums is None:
        raise ValueError("no parts")
    return grad_x, grad_weights, sums[0].to(gate_up.dtype), sums[1].to(down.dtype)


_experts_in_parts = first_order_kernel(_parts, _parts_gradient, differentiable=4)


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

    Where the decision is in parts, they go one after the other, and the memory that rows take is that of two parts.
    Nothing of them is kept for the backward, which sends a part's rows again with their cotangents (``2 hidden + 1``
    numbers there, ``hidden + 1`` home) and repeats the first product. A replay for the derivative alone does nothing.

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
    if kernels == "reference":
        dense = torch.zeros(x.shape[0], gate_up.shape[0], dtype=weights.dtype, device=x.device)
        dense = dense.scatter(1, decision.experts, weights).to(x.dtype)
        hidden = swiglu(einsum(x, gate_up, "n i, e i w -> e n w"), kernels) * dense.t()[..., None]
        out: Tensor = einsum(hidden, down, "e n w, e w o -> n o")
        return out
    # down is linear, so the weight may come before it: then the backward needs no expert output, which is the
    # wider tensor, and the weight's gradient is taken over the narrower one.
    if len(decision.parts) > 1:
        leaves, structure = pytree.tree_flatten(decision.parts)
        group = None if expert_parallel is None else expert_parallel.group
        return _experts_in_parts(x, weights, gate_up, down, group, needed, structure, *leaves)
    ((dispatch, plan),) = decision.parts
    if expert_parallel is None or not isinstance(plan, Exchange):
        row_weights = weights_to_rows(weights, dispatch).to(x.dtype)
        rows = to_rows(x, dispatch)
        return from_rows(_fused_experts(rows, gate_up, down, row_weights, dispatch.offsets, needed), dispatch)
    sent = packed_rows(x, weights, dispatch.token_of_row, dispatch.row_of_choice, dispatch.choice_of_row)
    rows, row_weights = exchange(sent, plan, expert_parallel.group, (x.shape[1], 1))
    outputs = _fused_experts(rows, gate_up, down, row_weights, plan.offsets, needed)
    return from_rows(exchange_back((outputs,), plan, expert_parallel.group, needed), dispatch)


def _check_decision(
    decision: Decision, x: Tensor, gate_up: Tensor, kernels: Kernels, expert_parallel: ExpertParallel | None
) -> None:
    part = decision.parts[0]
    if isinstance(part.exchange, Exchange) != (expert_parallel is not None):
        made, used = ("with", "without") if expert_parallel is None else ("without", "with")
        raise ValueError(f"the decision was made {made} expert parallelism and is used {used} it")
    if expert_parallel is not None and kernels == "reference":
        raise NotImplementedError("expert parallelism needs the fused kernels; kernels='reference' is for one process")
    if decision.experts.shape[0] != x.shape[0]:
        raise ValueError(f"the decision is of {decision.experts.shape[0]} tokens; x has {x.shape[0]}")
    if part.offsets.shape[0] != gate_up.shape[0]:
        raise ValueError(
            f"the decision is of {part.offsets.shape[0]} experts on this rank; params hold {gate_up.shape[0]}"
        )
