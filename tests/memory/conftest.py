"""A small chain with everything a schedule can meet: residuals, a decision, tied layers, losses on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_moe.memory import Chain, Result, Segment

WIDTH, ROWS = 8, 6


class Counter:
    """How often the expensive part of a segment ran."""

    def __init__(self) -> None:
        self.decisions = 0
        self.mixed = 0


def make_chain(depth: int, counter: Counter | None = None) -> Chain:
    """``depth`` layers of two segments between an embedding and a head that is tied to it."""
    counter = counter or Counter()

    def embed(parameters: Any, x: None, context: Any, residuals: Any) -> Result:
        return Result(parameters["table"]["weight"][context["tokens"]])

    def mix(name: str) -> Any:
        def run(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
            # Its second product is what the residual saves.
            weight = parameters[name]["mix"]
            inner = torch.tanh(x @ weight)
            mixed = residuals.get("mixed")
            if mixed is None:
                counter.mixed += 1
                mixed = (inner @ weight.T).detach()
            out = _Given.apply(inner, weight, mixed)
            return Result(x + out, residuals={"mixed": mixed})

        return run

    def choose(name: str) -> Any:
        def run(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
            scores = x @ parameters[name]["router"]
            choice = residuals.get("choice")
            if choice is None:
                counter.decisions += 1
                choice = {"index": scores.detach().argmax(-1), "ranks": (1, 2)}
            weight = torch.softmax(scores, -1).gather(-1, choice["index"][..., None])
            out = x + weight * torch.sin(x @ parameters[name]["experts"])
            loss = 0.01 * torch.logsumexp(scores, -1).square().sum() / context["total"]
            return Result(
                out, loss, {"choice": choice}, {"count": torch.bincount(choice["index"].flatten(), minlength=3)}
            )

        return run

    def head(parameters: Any, x: Tensor, context: Any, residuals: Any) -> Result:
        logits = (x * parameters["head"]["scale"]) @ parameters["table"]["weight"].T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), context["targets"].flatten(), reduction="sum")
        return Result(None, loss / context["total"], metrics={"loss": loss.detach()})

    segments = [Segment("embed", ("table",), embed, "embed")]
    for index in range(depth):
        layer = f"layer{index}"
        segments.append(Segment(f"{layer}.mix", (layer,), mix(layer), "mix", ("mixed",)))
        segments.append(Segment(f"{layer}.choose", (layer,), choose(layer), "choose", ("choice",), ("choice",)))
    segments.append(Segment("head", ("head", "table"), head, "head"))
    return Chain(tuple(segments), lambda batch: batch)


class _Given(torch.autograd.Function):
    """``inner @ weight.T``, already computed."""

    @staticmethod
    def forward(inner: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        inner, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ inner.flatten(0, -2), None


def make_parameters(depth: int, seed: int = 0) -> dict[str, Any]:
    """fp32 leaves."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / WIDTH**0.5

    layers = {
        f"layer{index}": {
            "mix": normal(WIDTH, WIDTH),
            "router": normal(WIDTH, 3),
            "experts": normal(WIDTH, WIDTH),
        }
        for index in range(depth)
    }
    return {"table": {"weight": normal(11, WIDTH)}, **layers, "head": {"scale": normal(WIDTH)}}


def make_batch(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens, targets, and the divisor of the loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (rows, 5), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1), "total": torch.tensor(50.0)}


@pytest.fixture
def counter() -> Counter:
    """Fresh."""
    return Counter()
