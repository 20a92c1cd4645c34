"""Full recomputation of a stack of layers: a schedule, and ``remat``, against ``torch.utils.checkpoint``.

Prints for each the median step time over interleaved rounds, the ratio to the peer (``use_reentrant=False``, plain
autograd, one checkpoint per layer, as it is used), and the peak of live tensor bytes. Then what keeping the attention
core's output saves over recomputing it, and what the executor costs over a loop written by hand.

    python benchmarks/remat.py [--layers 8] [--hidden 256] [--batch 4] [--sequence 256] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from functional_moe.memory import (
    Chain,
    LiveBytes,
    Recipe,
    ResidentStore,
    Result,
    Schedule,
    Segment,
    execute,
    make_schedule,
    name,
    output_is_needed,
    remat,
    verify,
)

HEADS = 4


class Attention(torch.autograd.Function):
    """Flash attention on the CPU, which may be handed its own output and log-sum-exp."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Of shapes [batch, heads, sequence, dim] and [batch, heads, sequence]."""
        if kept is not None:
            return kept[0].detach(), kept[1].detach()
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves all five."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Any, ...]:
        """Needs no forward."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*backward(cotangent, *ctx.saved_tensors, 0.0, True), None)


class AddProduct(torch.autograd.Function):
    """``x + a @ weight``, not computed where only its gradient is wanted."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        """Of shapes [..., columns], [..., rows] and [rows, columns]."""
        return x + a @ weight if output_is_needed() else x.new_empty(()).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves the factors."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        """Two products."""
        a, weight = ctx.saved_tensors
        return cotangent, cotangent @ weight.T, a.flatten(0, -2).T @ cotangent.flatten(0, -2)


def layer(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """A dense layer: attention and a gated product."""
    normed = F.rms_norm(x, x.shape[-1:])
    q, k, v = (normed @ parameters["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    out, _ = name(lambda kept: Attention.apply(q, k, v, kept), "attention")
    x = x + out.transpose(1, 2).flatten(-2) @ parameters["out"]
    gate, up = (F.rms_norm(x, x.shape[-1:]) @ parameters["up"]).chunk(2, -1)
    result: Tensor = AddProduct.apply(x, F.silu(gate) * up, parameters["down"])
    return result


def make_parameters(layers: int, hidden: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / rows**0.5

    return [
        {
            "qkv": normal(hidden, 3 * hidden),
            "out": normal(hidden, hidden),
            "up": normal(hidden, 4 * hidden),
            "down": normal(2 * hidden, hidden),
        }
        for _ in range(layers)
    ]


def make_chain(layers: int) -> Chain:
    """Each layer a segment; the input is the context, the last segment makes the loss."""

    def first(parameters: Any, x: None, context: Tensor, residuals: Any) -> Result:
        return Result(context.clone())

    def middle(key: str) -> Any:
        return lambda parameters, x, context, residuals: Result(layer(parameters[key], x))

    def last(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        return Result(None, x.square().mean())

    keys = [str(index) for index in range(layers)]
    middles = [Segment(key, (key,), middle(key), "layer") for key in keys]
    return Chain((Segment("first", (), first, "first"), *middles, Segment("last", (), last, "last")), lambda x: x)


class Contender(NamedTuple):
    """What is timed."""

    label: str
    step: Callable[[], Any]


def gradients(
    run: Callable[[dict[str, Tensor], Tensor], Tensor], parameters: list[dict[str, Tensor]], x: Tensor
) -> Any:
    """By plain autograd."""
    leaves = [{key: leaf.detach().requires_grad_() for key, leaf in tree.items()} for tree in parameters]
    y = x
    for tree in leaves:
        y = run(tree, y)
    return torch.autograd.grad(y.square().mean(), [leaf for tree in leaves for leaf in tree.values()])


def by_func(run: Callable[[dict[str, Tensor], Tensor], Tensor], parameters: list[dict[str, Tensor]], x: Tensor) -> Any:
    """By ``torch.func.grad``."""

    def loss(parameters: list[dict[str, Tensor]]) -> Tensor:
        y = x
        for tree in parameters:
            y = run(tree, y)
        return y.square().mean()

    return torch.func.grad(loss)(parameters)


def by_hand(parameters: list[dict[str, Tensor]], x: Tensor) -> Any:
    """The loop that recomputes every layer, with nothing around it."""
    boundaries = [x.clone()]
    with torch.no_grad():
        for tree in parameters:
            boundaries.append(layer(tree, boundaries[-1]))
    last = boundaries.pop().detach().requires_grad_()
    (cotangent,) = torch.autograd.grad(last.square().mean(), last)
    del last
    found = []
    for tree in reversed(parameters):
        y = boundaries.pop().detach().requires_grad_()
        leaves = {key: leaf.detach().requires_grad_() for key, leaf in tree.items()}
        cotangent, *rest = torch.autograd.grad(layer(leaves, y), [y, *leaves.values()], cotangent)
        found.append(rest)
        del y
    return found


def executed(schedule: Schedule, chain: Chain, parameters: list[dict[str, Tensor]], x: Tensor) -> Any:
    store = ResidentStore({str(index): tree for index, tree in enumerate(parameters)})
    return execute(schedule, chain, store, [x]).gradients


def peak(step: Callable[[], Any]) -> int:
    with LiveBytes() as memory:
        step()
    return memory.peak


def compare(contenders: list[Contender], rounds: int) -> None:
    """In turn within each round, so that what else the machine does falls on all; ratios to the first."""
    times: dict[str, list[float]] = {one.label: [] for one in contenders}
    for number in range(rounds + 1):
        for one in contenders:
            start = time.perf_counter()
            one.step()
            if number:
                times[one.label].append(time.perf_counter() - start)
    peer = statistics.median(times[contenders[0].label])
    for one in contenders:
        median = statistics.median(times[one.label])
        print(
            f"  {one.label:<42} {1e3 * median:8.1f} ms  {peer / median:5.2f}x  peak {peak(one.step) / 2**20:7.1f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, default in {"layers": 8, "hidden": 256, "batch": 4, "sequence": 256, "rounds": 15}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args()
    parameters = make_parameters(args.layers, args.hidden)
    x = torch.randn(args.batch, args.sequence, args.hidden, generator=torch.Generator().manual_seed(1))
    chain = make_chain(args.layers)
    schedule = make_schedule(chain, {str(index): Recipe(False) for index in range(args.layers)})
    # The last layer's graph is wanted at once: to keep it costs nothing at the peak.
    last_kept = make_schedule(chain, {str(index): Recipe(False) for index in range(args.layers - 1)})
    verify(schedule, chain)
    verify(last_kept, chain)
    recomputed, kept = remat(layer), remat(layer, save=("attention",))
    contenders = [
        Contender("torch.utils.checkpoint", lambda: gradients(checkpointed, parameters, x)),
        Contender("schedule, everything recomputed", lambda: executed(schedule, chain, parameters, x)),
        Contender("schedule, but the last layer", lambda: executed(last_kept, chain, parameters, x)),
        Contender("the same loop by hand", lambda: by_hand(parameters, x)),
        Contender("remat, plain autograd", lambda: gradients(recomputed, parameters, x)),
        Contender("remat, torch.func.grad", lambda: by_func(recomputed, parameters, x)),
        Contender("remat with attention kept, torch.func.grad", lambda: by_func(kept, parameters, x)),
        Contender("nothing recomputed, plain autograd", lambda: gradients(layer, parameters, x)),
        Contender("nothing recomputed, torch.func.grad", lambda: by_func(layer, parameters, x)),
    ]
    print(f"{args.layers} layers of width {args.hidden}, {args.batch} x {args.sequence} tokens, fp32")
    compare(contenders, args.rounds)


def checkpointed(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, parameters, x, use_reentrant=False)
    return out


if __name__ == "__main__":
    main()
