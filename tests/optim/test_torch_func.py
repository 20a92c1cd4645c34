"""Whole train steps under vmap and grad with `foreach=False`; with list kernels, an error that says so."""

import pytest
import torch
import torch.utils._pytree as pytree

from functional_moe import optim

AXES = optim.MatrixAxes(-1, -2)
torch.manual_seed(0)
PARAMS = {"w": torch.randn(6, 9), "e": torch.randn(2, 4, 8), "b": torch.randn(9)}
LABELS = {"w": "muon", "e": "muon", "b": "adamw"}
X = torch.randn(5, 6)


def loss_fn(params, x):
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return (hidden**2).mean() + (params["e"] ** 2).mean()


def optimizer(foreach):
    return optim.chain(
        optim.clip_by_global_norm(0.01, foreach=foreach),
        optim.partition(
            {
                "muon": optim.muon(0.1, AXES, weight_decay=0.1, foreach=foreach),
                "adamw": optim.adamw(0.1, eps_root=1e-12, foreach=foreach),
            },
            LABELS,
        ),
    )


def train(rate, foreach, steps=2):
    tx = optimizer(foreach)
    params, state = PARAMS, tx.init(PARAMS)
    state = optim.set_learning_rates(state, {"muon": rate, "adamw": rate * 0.1})
    for _ in range(steps):
        grads = torch.func.grad(loss_fn)(params, X)
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates, foreach=foreach)
    return params, optim.learning_rates(state)


def test_vmap_of_a_train_step_over_learning_rates():
    rates = torch.tensor([0.01, 0.1, 0.3])
    params, recorded = torch.func.vmap(lambda rate: train(rate, foreach=False))(rates)
    torch.testing.assert_close(recorded["muon"], rates)
    for index, rate in enumerate(rates):
        for foreach in (True, False):
            alone, _ = train(rate, foreach)
            for name, leaf in alone.items():
                torch.testing.assert_close(params[name][index], leaf, rtol=1e-5, atol=1e-6)


def test_vmap_over_a_whole_state_and_parameters():
    tx = optimizer(False)
    stack = {name: torch.stack([leaf, leaf + 1]) for name, leaf in PARAMS.items()}
    states = [tx.init(pytree.tree_map(lambda x, i=i: x[i], stack)) for i in range(2)]
    state = pytree.tree_map(lambda *xs: torch.stack(xs), *states)
    updates, new_state = torch.func.vmap(tx.update)(stack, state, stack)
    alone, _ = tx.update({n: x[1] for n, x in stack.items()}, states[1], {n: x[1] for n, x in stack.items()})
    for name, leaf in alone.items():
        torch.testing.assert_close(updates[name][1], leaf, rtol=1e-5, atol=1e-6)
    assert pytree.tree_structure(new_state) == pytree.tree_structure(state)


def test_gradient_through_an_update_is_the_finite_difference():
    with torch.random.fork_rng():

        def final_loss(rate):
            params, _ = train(rate, foreach=False)
            return loss_fn(params, X)

        rate = torch.tensor(0.05)
        slope = float(torch.func.grad(final_loss)(rate))
        step = 1e-2
        difference = float(final_loss(rate + step) - final_loss(rate - step)) / (2 * step)
    # float32 and a wide step: what is held is the slope, not its last digits.
    assert slope == pytest.approx(difference, rel=2e-2) and abs(slope) > 1e-3


@pytest.mark.parametrize("make", [optim.lion, optim.sgd, lambda rate, **k: optim.sgd(rate, 0.9, **k), optim.adamw])
def test_every_reference_path_is_batchable(make):
    tx = make(0.1, foreach=False)
    stack = {name: torch.stack([leaf, leaf * 2]) for name, leaf in PARAMS.items()}
    updates = torch.func.vmap(lambda p: tx.update(p, tx.init(p), p)[0])(stack)
    alone = tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]
    for name in PARAMS:
        torch.testing.assert_close(updates[name][0], alone[name])


@pytest.mark.parametrize(
    "function",
    [
        lambda p: optim.global_norm(p),
        lambda p: optim.apply_updates(p, p),
        *[
            lambda p, tx=tx: tx.update(p, tx.init(p), p)[0]
            for tx in (
                optim.adamw(0.1),
                optim.lion(0.1),
                optim.sgd(0.1),
                optim.trace(0.9),
                optim.muon(0.1, AXES),
                optim.add_decayed_weights(0.1),
                optim.clip_by_global_norm(1.0),
                optim.accumulate(optim.sgd(0.1), 2),
            )
        ],
    ],
)
def test_list_kernels_inside_a_transform_name_the_argument(function):
    params = {"w": torch.randn(2, 3, 4)}
    with pytest.raises(NotImplementedError, match="foreach=False"):
        torch.func.vmap(function)(params)


def test_list_kernels_beside_a_transform_are_fine():
    """A tensor that is in no transform may be updated while one is active elsewhere."""
    tx = optim.adamw(0.1)
    state = tx.init(PARAMS)

    def function(x):
        tx.update(PARAMS, state, PARAMS)
        return x * 2

    assert torch.equal(torch.func.vmap(function)(torch.ones(3)), torch.full((3,), 2.0))
