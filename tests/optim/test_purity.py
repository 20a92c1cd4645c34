"""Nothing changes its inputs; state and updates are congruent with the parameters, also abstract ones."""

from typing import NamedTuple

import chex
import pytest
import torch
import torch.utils._pytree as pytree

from functional_moe import optim


class Pair(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


AXES = optim.MatrixAxes(-1, -2)


def params_of(device="cpu"):
    torch.manual_seed(0)
    return {
        "layers": [Pair(torch.randn(4, 6).to(device), torch.randn(6).to(device)) for _ in range(2)],
        "head": (torch.randn(3, 4, 5).to(device),),
    }


LABELS = {"layers": [Pair("muon", "adamw"), Pair("muon", "adamw")], "head": "muon"}


def assert_leaves_alike(a, b):
    """Shapes and dtypes; chex would take a MaskedNode for a leaf."""
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def optimizers():
    for foreach in (True, False):
        yield from {
            "adamw": optim.adamw(0.1, foreach=foreach),
            "nadamw": optim.adamw(0.1, nesterov=True, foreach=foreach),
            "lion": optim.lion(0.1, foreach=foreach),
            "sgd": optim.sgd(0.1, 0.9, nesterov=True, foreach=foreach),
            "accumulate": optim.accumulate(optim.adamw(0.1, foreach=foreach), 2, foreach=foreach),
            "muon": optim.chain(
                optim.clip_by_global_norm(0.1, foreach=foreach),
                optim.partition(
                    {
                        "muon": optim.muon(0.1, AXES, weight_decay=0.1, foreach=foreach),
                        "adamw": optim.adamw(optim.constant_schedule(0.1), foreach=foreach),
                    },
                    LABELS,
                ),
            ),
            "masked": optim.masked(optim.sgd(0.1, 0.9, foreach=foreach), lambda params: True),
        }.items()


@pytest.mark.parametrize(("name", "tx"), list(optimizers()))
def test_inputs_come_back_bit_equal_and_unversioned(name, tx):
    params = params_of()
    grads, state = params_of(), tx.init(params)
    for _ in range(3):
        inputs = (params, grads, state)
        leaves = pytree.tree_leaves(inputs)
        copies, versions = [leaf.clone() for leaf in leaves], [leaf._version for leaf in leaves]
        updates, new_state = tx.update(grads, state, params)
        new_params = optim.apply_updates(params, updates)
        assert all(a is b for a, b in zip(pytree.tree_leaves(inputs), leaves, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(leaves, copies, strict=True))
        assert [leaf._version for leaf in leaves] == versions
        chex.assert_trees_all_equal_structs(updates, params, new_params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params, new_params)
        assert pytree.tree_structure(new_state) == pytree.tree_structure(state)
        assert_leaves_alike(new_state, state)
        # What later steps write into must not be what an earlier step handed out.
        again, _ = tx.update(grads, state, params)
        chex.assert_trees_all_equal(again, updates)
        params, state = new_params, new_state


@pytest.mark.parametrize(("name", "tx"), list(optimizers()))
def test_init_works_on_meta_leaves(name, tx):
    abstract = tx.init(params_of("meta"))
    concrete = tx.init(params_of())
    assert pytree.tree_structure(abstract) == pytree.tree_structure(concrete)
    assert all(leaf.is_meta for leaf in pytree.tree_leaves(abstract))
    assert_leaves_alike(abstract, concrete)


@pytest.mark.parametrize("make", [optim.adamw, optim.lion, optim.sgd])
def test_list_kernels_equal_the_reference(make):
    params, grads = params_of(), params_of()
    fast, slow = make(0.1), make(0.1, foreach=False)
    fast_state, slow_state = fast.init(params), slow.init(params)
    for _ in range(3):
        a, fast_state = fast.update(grads, fast_state, params)
        b, slow_state = slow.update(grads, slow_state, params)
        chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-7)


def test_moments_are_float32_and_parameters_keep_their_dtype():
    params = {"w": torch.randn(4, 6, dtype=torch.bfloat16)}
    for tx in (optim.adamw(0.1), optim.lion(0.1), optim.muon(0.1, AXES), optim.sgd(0.1, 0.9)):
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        moments = [leaf for leaf in pytree.tree_leaves(state) if leaf.dim() == 2]
        assert moments and all(leaf.dtype == torch.float32 for leaf in moments)
        assert updates["w"].dtype == torch.float32
        assert optim.apply_updates(params, updates)["w"].dtype == torch.bfloat16


def test_transposed_gradients_and_parameters():
    """The fused kernel reads raw memory: a transposed tensor must not be read as its transpose."""
    w, g = torch.randn(5, 7), torch.randn(5, 7)
    tx = optim.adamw(0.1, weight_decay=0.1)

    def train(*layouts):
        state = tx.init({"w": w})
        for layout in layouts:
            updates, state = tx.update({"w": layout(g)}, state, {"w": layout(w)})
        return updates["w"]

    def turned(x):
        return x.mT.contiguous().mT

    plain = train(torch.clone, torch.clone)
    assert torch.equal(train(turned, torch.clone), plain)
    assert torch.equal(train(torch.clone, turned), plain)


def test_adamw_agrees_with_torch():
    torch.manual_seed(0)
    params = {"w": torch.randn(5, 7)}
    peer_param = torch.nn.Parameter(params["w"].clone())
    peer = torch.optim.AdamW([peer_param], lr=0.01, weight_decay=0.1)
    tx = optim.adamw(0.01, weight_decay=0.1)
    state = tx.init(params)
    for _ in range(5):
        g = torch.randn(5, 7)
        peer_param.grad = g.clone()
        peer.step()
        updates, state = tx.update({"w": g}, state, params)
        params = optim.apply_updates(params, updates)
    torch.testing.assert_close(params["w"], peer_param.detach(), rtol=1e-6, atol=1e-7)
