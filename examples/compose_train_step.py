"""A training step put together by hand, and what can be done with it because it is a function.

    python examples/compose_train_step.py

The step below is loss, gradient, optimizer and routing balance, and nothing else. It is held against the package's own
step; vmapped over learning rates, a whole sweep in one call; and differentiated: the loss after training as a function
of the learning rate, whose slope is held against a finite difference.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import MoEConfig, TrainState, init, init_state, loss_fn, make_train_step, optim
from functional_moe.commands.program import end, read_flags
from functional_moe.data import batch_at, load
from functional_moe.model import Batch, Metrics
from functional_moe.parameters import labels, matrix_axes
from functional_moe.routing import update_balance

SHAPES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIG = MoEConfig(vocab_size=257, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, **SHAPES)


def make_optimizer() -> optim.GradientTransformation:
    """Muon for matrices, AdamW for the rest. ``foreach=False``: no list kernels, which transforms cannot enter."""
    by_label = dict.fromkeys(("embedding", "router", "vector"), optim.adamw(3e-3, foreach=False))
    by_label["matrix"] = optim.muon(0.02, matrix_axes(CONFIG), foreach=False)
    return optim.chain(optim.clip_by_global_norm(1.0, foreach=False), optim.partition(by_label, labels(CONFIG)))


def compose(optimizer: optim.GradientTransformation) -> Callable[[TrainState, Batch], tuple[TrainState, Tensor]]:
    """``step(state, batch) -> (state, loss)``."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Tensor]:
        def loss_of(params: dict) -> tuple[Tensor, Metrics]:
            return loss_fn(params, state.balance, batch, CONFIG, kernels="reference")

        gradient, (loss, metrics) = torch.func.grad_and_value(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates, foreach=False)
        balance = update_balance(state.balance, metrics.counts, CONFIG)
        return TrainState(state.step + 1, params, opt_state, balance), loss

    return step


def main() -> None:
    flags = read_flags(__doc__, steps=6, cache="runs")
    text = load(None, cache=flags.cache).train
    batches = [batch_at(text, number, batch_size=4, seq_len=64, seed=0) for number in range(flags.steps)]
    optimizer = make_optimizer()
    step, built_in = compose(optimizer), make_train_step(CONFIG, optimizer)
    start = ours = theirs = init_state(init(CONFIG, seed=0), optimizer, CONFIG)
    for batch in batches:
        (ours, loss), (theirs, metrics) = step(ours, batch), built_in(theirs, batch)
    pairs = zip(pytree.tree_leaves(ours.params), pytree.tree_leaves(theirs.params), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    print(f"{flags.steps} steps by hand: loss {loss:.4f}, built in: {metrics.loss:.4f}; parameters {apart:.0e} apart")

    def trained(rate: Tensor) -> Tensor:
        state = start._replace(opt_state=optim.set_learning_rates(start.opt_state, {"matrix": rate}))
        for batch in batches:
            state, loss = step(state, batch)
        return loss

    rates = torch.tensor([0.005, 0.01, 0.02, 0.04])
    together, alone = torch.func.vmap(trained)(rates), torch.stack([trained(rate) for rate in rates])
    for rate, *losses in zip(rates, together, alone, strict=True):
        print("rate {:.3f}: loss {:.6f} in one vmap, {:.6f} by itself".format(rate, *losses))
    slope, (behind, ahead) = torch.func.grad(trained)(rates[1]), map(trained, (0.9 * rates[1], 1.1 * rates[1]))
    difference = (ahead - behind) / (0.2 * rates[1])
    print(f"d loss / d rate at 0.01, through {flags.steps} steps: {slope:.2f}, by finite difference {difference:.2f}")


if __name__ == "__main__":
    end(main)
