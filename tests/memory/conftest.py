"""A small chain with everything a schedule can meet: residuals, a decision, tied layers, losses on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe.memory import (
    HBM,
    Chain,
    Execution,
    ResidentStore,
    Result,
    Schedule,
    Segment,
    Sizes,
    UpdateBytes,
    add_leaves,
    leaf_paths,
    profile_chain,
    profile_context,
    run_chain,
)
from functional_moe.memory import in_slab as place
from functional_moe.memory._pool import tree_bytes

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
                out, loss, {"choice": choice}, {"count": (choice["index"].flatten()[:, None] == torch.arange(3)).sum(0)}
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
    return Chain(tuple(segments), prepare)


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


def make_parameters(depth: int, seed: int = 0, width: int = WIDTH) -> dict[str, Any]:
    """fp32 leaves."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / width**0.5

    layers = {
        f"layer{index}": {
            "mix": normal(width, width),
            "router": normal(width, 3),
            "experts": normal(width, width),
        }
        for index in range(depth)
    }
    return {"table": {"weight": normal(11, width)}, **layers, "head": {"scale": normal(width)}}


def make_batch(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens, and the divisor of the loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (rows, 5), generator=generator)
    return {"tokens": tokens, "total": torch.tensor(50.0)}


def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A context with a tensor of its own."""
    return {**batch, "targets": batch["tokens"].roll(-1, 1)}


def make_sizes(
    chain: Chain, parameters: dict[str, Any], batch: Any, gathered: Mapping[str, int] | None = None
) -> Sizes:
    """Of the real segments; every layer's gradient stays here in full."""
    names = [segment.name for segment in chain.segments]
    gathered = gathered or {}
    return Sizes(
        profile_chain(chain, parameters, batch),
        dict(zip(names, [None, *names[:-1]], strict=True)),
        gathered,
        {layer: tree_bytes(parameters[layer]) for layer in gathered},
        {},
        context=profile_context(chain, batch),
    )


def layer_bytes(parameters: dict[str, Any]) -> dict[str, int]:
    """Of each layer, as it lies in a buffer."""
    return {layer: tree_bytes(tree) for layer, tree in parameters.items()}


class Reference(NamedTuple):
    """What a step computes, by ``torch.func``."""

    loss: Tensor
    gradients: dict[str, Any]
    metrics: tuple[Any, ...]


def reference(chain: Chain, parameters: dict[str, Any], batches: Sequence[Any]) -> Reference:
    """The sum over microbatches, in their order."""
    total: Any = None
    metrics = []
    for batch in batches:
        part = torch.func.grad_and_value(lambda p, b=batch: run_chain(chain, p, b).loss)(parameters)
        total = part if total is None else pytree.tree_map(torch.add, total, part)
        metrics.append(run_chain(chain, parameters, batch).metrics)
    return Reference(total[1], total[0], tuple(metrics))


def check_equal(found: Any, expected: Reference, exact: bool = True) -> None:
    """Bit for bit, but for the tied leaf of several microbatches, whose summands are added in another order."""
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for layer, tree in expected.gradients.items():
        for key, leaf in tree.items():
            ours = found.gradients[layer][key]
            if exact and (layer != "table" or len(expected.metrics) == 1):
                assert torch.equal(ours, leaf), (layer, key)
            else:
                torch.testing.assert_close(ours, leaf, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(pytree.tree_leaves(found.metrics), pytree.tree_leaves(expected.metrics), strict=True):
        assert ours is theirs or torch.equal(ours, theirs)


class RingStore:
    """A store of numbered buffers: a gather arrives when somebody asks, what was released is NaN.

    On one process, where reducing is adding up.
    """

    def __init__(self, parameters: dict[str, Any], gathered: Collection[str], buffers: Mapping[int, int]) -> None:
        self.parameters_of, self.gathered = parameters, gathered
        self.resident = ResidentStore({layer: tree for layer, tree in parameters.items() if layer not in gathered})
        self.buffers = {number: torch.empty(size, dtype=torch.uint8) for number, size in buffers.items()}
        self.held: dict[str, int] = {}
        self.on_the_way: set[str] = set()
        self.full: dict[str, dict[str, Tensor]] = {}
        self.reducing: set[str] = set()
        self.reduced: dict[str, dict[str, Tensor]] = {layer: {} for layer in gathered}
        self.gathers = 0

    def gather(self, layer: str, buffer: int) -> None:
        assert buffer not in self.held.values()
        assert layer not in self.held
        self.gathers += 1
        self.held[layer] = buffer
        self.on_the_way.add(layer)

    def views(self, layer: str) -> Any:
        return place(self.parameters_of[layer], self.buffers[self.held[layer]])

    def parameters(self, layer: str) -> Any:
        if layer not in self.gathered:
            return self.resident.parameters(layer)
        views = self.views(layer)
        if layer in self.on_the_way:
            self.on_the_way.discard(layer)
            for view, leaf in zip(
                pytree.tree_leaves(views), pytree.tree_leaves(self.parameters_of[layer]), strict=True
            ):
                view.data.copy_(leaf)  # a graph may refer to the buffer: its version stays
        return views

    def release(self, layer: str) -> None:
        self.buffers[self.held.pop(layer)].data.fill_(0xFF)
        self.on_the_way.discard(layer)

    def add_gradient(self, layer: str, gradient: Mapping[str, Tensor]) -> None:
        if layer not in self.gathered:
            self.resident.add_gradient(layer, gradient)
        else:
            assert layer not in self.reducing
            add_leaves(self.full.setdefault(layer, {}), gradient)

    def reduce(self, layer: str) -> None:
        self.reducing.add(layer)

    def drop_gradient(self, layer: str) -> None:
        self.reducing.remove(layer)
        full = self.full.pop(layer)
        add_leaves(self.reduced[layer], {path: leaf.clone() for path, leaf in full.items()})
        for leaf in full.values():
            leaf.fill_(torch.nan)

    def gradients(self) -> dict[str, Any]:
        assert not self.full
        assert not self.reducing
        found = dict(self.resident.gradients())
        for layer, sums in self.reduced.items():
            tree = self.parameters_of[layer]
            leaves = [sums[path] for path in leaf_paths(tree)]
            found[layer] = pytree.tree_unflatten(leaves, pytree.tree_structure(tree))
        return found


class Momentum:
    """An optimizer of layers, with momentum: an ``Updater``. Parameters and states are its own, and new each time.

    A step whose norm exceeds ``limit`` is not made.
    """

    def __init__(self, parameters: dict[str, Any], states: dict[str, Any], limit: float = float("inf")) -> None:
        self.parameters, self.states, self.limit = parameters, states, limit
        self.homes = {layer: pytree.tree_map(torch.empty_like, state) for layer, state in states.items()}
        self.new: dict[str, Any] = {}
        self.made = dict(states)
        self.gradients: dict[str, Any] = {}
        self.loss: Tensor | None = None
        self.metrics: Any = None

    def state(self, layer: str) -> Any:
        return self.states[layer]

    def home(self, layer: str) -> Any:
        return self.homes[layer]

    def begin(self, done: Execution) -> None:
        assert self.loss is None
        self.loss, self.metrics = done.loss, done.metrics
        self.gradients = pytree.tree_map(torch.clone, dict(done.gradients))
        norm = sum(leaf.square().sum() for leaf in pytree.tree_leaves(done.gradients))
        self.factor = torch.rsqrt(torch.as_tensor(norm))
        self.makes = bool(norm <= self.limit)

    def update(self, layer: str, gradient: Any, state: Any) -> Any:
        assert layer not in self.new
        if not self.makes:
            self.new[layer] = self.parameters[layer]
            return state
        new = pytree.tree_map(lambda m, g: 0.9 * m + self.factor * g, state, gradient)
        self.new[layer] = pytree.tree_map(lambda p, m: p - 0.1 * m, self.parameters[layer], new)
        self.made[layer] = new
        return new

    def results(self, schedule: Schedule) -> tuple[dict[str, Any], dict[str, Any]]:
        """New parameters, and the states where they are at home."""
        homes = schedule.homes
        return self.new, {
            layer: self.made[layer] if home == HBM else self.homes[layer] for layer, home in homes.items()
        }


def make_states(parameters: dict[str, Any]) -> dict[str, Any]:
    """Momenta of a few steps, as it were."""
    generator = torch.Generator().manual_seed(5)
    return pytree.tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator), parameters)


def update_bytes(parameters: dict[str, Any]) -> dict[str, UpdateBytes]:
    """What :class:`Momentum` takes of each layer: new parameters stay beside the old."""
    sizes = layer_bytes(parameters)
    return {layer: UpdateBytes(size, 3 * size, size) for layer, size in sizes.items()}


def check_updated(
    updater: Momentum, schedule: Schedule, parameters: dict[str, Any], states: dict[str, Any], expected: Reference
) -> None:
    """Bit for bit what the optimizer makes of the gradient that it was given, which is the expected one."""
    assert updater.loss is not None
    found = Execution(updater.loss, updater.gradients, updater.metrics)
    check_equal(found, expected, exact=False)
    plain = Momentum(parameters, states, updater.limit)
    plain.begin(found)
    new = {layer: plain.update(layer, updater.gradients[layer], states[layer]) for layer in parameters}
    found_parameters, found_states = updater.results(schedule)
    for ours, theirs in ((found_parameters, plain.new), (found_states, new)):
        assert ours.keys() == theirs.keys()
        for layer in theirs:
            pairs = zip(pytree.tree_leaves(ours[layer]), pytree.tree_leaves(theirs[layer]), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), layer


@pytest.fixture
def counter() -> Counter:
    """Fresh."""
    return Counter()
