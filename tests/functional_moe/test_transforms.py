"""loss_fn composes as a JAX user expects with kernels="reference", and says so with kernels="fused"."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

from functional_moe.attention import Projected, attend
from functional_moe.chain import loss_fn
from functional_moe.cross_entropy import IGNORE_INDEX, summed_cross_entropy
from functional_moe.dispatch import decide
from functional_moe.experts import routed_experts
from functional_moe.model import Totals

# fp64: the same sums in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-12}

# torch's own forward mode compiles its decompositions with torch.jit.script, which torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def random(*shape, seed=0):
    """From numpy, because torch's random numbers may not be drawn under vmap."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.fixture(scope="module")
def problem(make_config, make_params, make_balance, make_batch):
    config = make_config(
        compute_dtype="float64", first_k_dense_replace=1, intermediate_size=5, num_hidden_layers=3, num_shared_experts=1
    )
    return config, make_params(config), make_balance(config), make_batch(config, rows=3)


def tangent_of(tree, seed=5):
    return pytree.tree_map(lambda leaf: random(*leaf.shape, seed=seed + leaf.numel()), tree)


def inner_product(a, b):
    return sum((x * y).sum() for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))


def rows_of(batch):
    return [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(batch["tokens"]))]


def test_per_example_gradients_equal_a_loop(problem):
    config, params, balance, batch = problem

    def one(params, row):
        return loss_fn(params, balance, {k: v[None] for k, v in row.items()}, config, kernels="reference")[0]

    together = vmap(grad(one), in_dims=(None, 0))(params, batch)
    for index, row in enumerate(rows_of(batch)):
        alone = grad(lambda p, row=row: loss_fn(p, balance, row, config, kernels="fused")[0])(params)
        chex.assert_trees_all_close(pytree.tree_map(lambda g, i=index: g[i], together), alone, **EXACT)


def test_values_under_vmap_over_parameters_and_balance_equal_a_loop(problem):
    config, params, balance, batch = problem
    other = pytree.tree_map(lambda leaf: leaf + 0.1 * random(*leaf.shape, seed=9), params)
    both = pytree.tree_map(lambda *leaves: torch.stack(leaves), params, other)
    balances = torch.stack([balance, -balance])
    loss, metrics = vmap(lambda p, b: loss_fn(p, b, batch, config, kernels="reference"))(both, balances)
    for index, (p, b) in enumerate(((params, balance), (other, -balance))):
        alone, alone_metrics = loss_fn(p, b, batch, config)
        chex.assert_trees_all_close(loss[index], alone, **EXACT)
        chex.assert_trees_all_close(pytree.tree_map(lambda m, i=index: m[i], metrics), alone_metrics, **EXACT)


def reference_loss(problem):
    config, _, balance, batch = problem
    return lambda params: loss_fn(params, balance, batch, config, kernels="reference")[0]


def test_jvp_equals_finite_difference_and_the_gradient(problem):
    params, loss = problem[1], reference_loss(problem)
    tangent = tangent_of(params)
    value, directional = jvp(loss, (params,), (tangent,))
    chex.assert_trees_all_close(value, loss(params), **EXACT)
    chex.assert_trees_all_close(directional, inner_product(grad(loss)(params), tangent), **EXACT)
    # Central difference: the error is step^2 = 1e-12 times a third derivative (of size 1e4 here: the tangent is
    # long), and 1e-16 / step of rounding.
    step = 1e-6
    ahead, behind = (loss(pytree.tree_map(lambda p, t, s=sign: p + s * step * t, params, tangent)) for sign in (1, -1))
    torch.testing.assert_close(directional, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


def test_hessian_vector_products_agree_in_every_composition(problem):
    params, loss = problem[1], reference_loss(problem)
    tangent = tangent_of(params)
    _, forward_over_reverse = jvp(grad(loss), (params,), (tangent,))
    (reverse_over_reverse,) = vjp(grad(loss), params)[1](tangent)
    reverse_over_forward = grad(lambda p: jvp(loss, (p,), (tangent,))[1])(params)
    chex.assert_trees_all_close(forward_over_reverse, reverse_over_reverse, **EXACT)
    chex.assert_trees_all_close(forward_over_reverse, reverse_over_forward, **EXACT)
    # And all of them the derivative of the fused gradient, by central difference as above.
    config, _, balance, batch = problem
    step = 1e-6
    ahead, behind = (
        grad(lambda p: loss_fn(p, balance, batch, config)[0])(
            pytree.tree_map(lambda p, t, s=sign: p + s * step * t, params, tangent)
        )
        for sign in (1, -1)
    )
    difference = pytree.tree_map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    chex.assert_trees_all_close(forward_over_reverse, difference, rtol=1e-6, atol=1e-6)


def test_per_example_hessian_vector_products_equal_a_loop(problem):
    config, params, balance, batch = problem
    tangent = tangent_of(params)

    def product(row):
        def loss(p):
            return loss_fn(p, balance, {k: v[None] for k, v in row.items()}, config, kernels="reference")[0]

        return jvp(grad(loss), (params,), (tangent,))[1]

    together = vmap(product)(batch)
    for index in range(3):
        alone = product({key: value[index] for key, value in batch.items()})
        chex.assert_trees_all_close(pytree.tree_map(lambda g, i=index: g[i], together), alone, **EXACT)


def test_hessian_of_one_leaf_is_symmetric_and_equals_the_products(problem):
    config, params, balance, batch = problem
    scale = params["final_norm"]

    def loss(final_norm):
        return loss_fn({**params, "final_norm": final_norm}, balance, batch, config, kernels="reference")[0]

    full = hessian(loss)(scale)
    torch.testing.assert_close(full, full.t(), **EXACT)
    torch.testing.assert_close(full, jacrev(jacrev(loss))(scale), **EXACT)
    torch.testing.assert_close(full, jacfwd(jacrev(loss))(scale), **EXACT)


TARGETS = torch.tensor([3, IGNORE_INDEX, 0, 2])
DECISION = decide(torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]]), 3)
STARTS = torch.tensor([[0, 0, 2, 2]])


def _expert_tree(**changes):
    tree = {"gate_up": random(3, 6, 10), "down": random(3, 5, 6, seed=2)}
    return {**tree, **changes}


def _heads(seed=0, heads=1):
    return random(1, heads, 4, 2, seed=seed)


# name: (function of one tensor and kernels that gives a scalar, the tensor)
PIECES = {
    "summed_cross_entropy of x": (
        lambda x, k: summed_cross_entropy(x, random(5, 7), TARGETS, chunk=3, kernels=k),
        random(4, 5, seed=1),
    ),
    "summed_cross_entropy of head": (
        lambda head, k: summed_cross_entropy(random(4, 5), head, TARGETS, chunk=3, kernels=k),
        random(5, 7, seed=1),
    ),
    "attend of q": (
        lambda q, k: attend(Projected(q, _heads(1), _heads(2)), STARTS, k).out.square().sum(),
        _heads(heads=2),
    ),
    "attend of k": (
        lambda key, k: attend(Projected(_heads(1, heads=2), key, _heads(2)), None, k).out.square().sum(),
        _heads(),
    ),
    "attend of v": (
        lambda v, k: attend(Projected(_heads(1, heads=2), _heads(2), v), STARTS, k).out.square().sum(),
        _heads(),
    ),
    "routed_experts of x": (
        lambda x, k: routed_experts(_expert_tree(), x, DECISION, random(4, 2), k).square().sum(),
        random(4, 6, seed=1),
    ),
    "routed_experts of weights": (
        lambda weights, k: routed_experts(_expert_tree(), random(4, 6), DECISION, weights, k).square().sum(),
        random(4, 2, seed=1),
    ),
    "routed_experts of gate_up": (
        lambda gate_up, k: (
            routed_experts(_expert_tree(gate_up=gate_up), random(4, 6), DECISION, random(4, 2), k).square().sum()
        ),
        random(3, 6, 10),
    ),
    "routed_experts of down": (
        lambda down, k: routed_experts(_expert_tree(down=down), random(4, 6), DECISION, random(4, 2), k).square().sum(),
        random(3, 5, 6),
    ),
}


def stacked(tree):
    return pytree.tree_map(lambda leaf: torch.stack([leaf, leaf + 0.1]), tree)


def total(tree):
    return sum(leaf.sum() for leaf in pytree.tree_leaves(tree))


# Each maps (scalar function, argument) to a tree.
TRANSFORMS = {
    "grad of grad": lambda f, a: grad(lambda b: total(pytree.tree_map(torch.square, grad(f)(b))))(a),
    "vjp of grad": lambda f, a: vjp(grad(f), a)[1](tangent_of(a)),
    "jvp": lambda f, a: jvp(f, (a,), (tangent_of(a),)),
    "jvp of grad": lambda f, a: jvp(grad(f), (a,), (tangent_of(a),))[1],
    "grad of jvp": lambda f, a: grad(lambda b: jvp(f, (b,), (tangent_of(a),))[1])(a),
    "vmap": lambda f, a: vmap(f)(stacked(a)),
    "vmap of grad": lambda f, a: vmap(grad(f))(stacked(a)),
    "grad of vmap": lambda f, a: grad(lambda b: vmap(f)(b).sum())(stacked(a)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("piece", PIECES)
def test_a_fused_piece_refuses_every_other_transform(piece, transform):
    function, argument = PIECES[piece]
    apply = TRANSFORMS[transform]
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        apply(lambda a: function(a, "fused"), argument)


@pytest.mark.parametrize("piece", PIECES)
def test_a_reference_piece_knows_every_transform(piece):
    function, argument = PIECES[piece]

    def reference(a):
        return function(a, "reference")

    assert torch.autograd.gradcheck(reference, (argument.clone().requires_grad_(),), check_forward_ad=True)
    hvp = jvp(grad(reference), (argument,), (tangent_of(argument),))[1]
    torch.testing.assert_close(hvp, vjp(grad(reference), argument)[1](tangent_of(argument))[0], **EXACT)
    torch.testing.assert_close(
        vmap(grad(reference))(stacked(argument)), torch.stack([grad(reference)(a) for a in stacked(argument)]), **EXACT
    )
    # and its first derivative is the fused one
    torch.testing.assert_close(grad(lambda a: function(a, "fused"))(argument), grad(reference)(argument), **EXACT)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_fused_loss_refuses_every_other_transform(problem, transform):
    config, params, balance, batch = problem
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        TRANSFORMS[transform](lambda p: loss_fn(p, balance, batch, config)[0], params)


def _one_leaf(config, params, balance, batch):
    """Scalar functions of one leaf, for every leaf: a transform of few leaves must be refused as one of all is."""
    leaves, spec = pytree.tree_flatten(params)
    for index, leaf in enumerate(leaves):

        def function(a, kernels, index=index):
            tree = pytree.tree_unflatten([*leaves[:index], a, *leaves[index + 1 :]], spec)
            return loss_fn(tree, balance, batch, config, kernels=kernels)[0]

        yield function, leaf


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_fused_loss_of_any_one_leaf_refuses_or_is_right(problem, transform):
    apply = TRANSFORMS[transform]
    for function, leaf in _one_leaf(*problem):
        try:
            got = apply(lambda a, f=function: f(a, "fused"), leaf)
        except NotImplementedError as error:
            assert "kernels='reference'" in str(error)
            continue
        expected = apply(lambda a, f=function: f(a, "reference"), leaf)
        chex.assert_trees_all_close(got, expected, **EXACT)


def test_the_fused_loss_refuses_vmap_over_everything_else_it_depends_on(problem):
    config, params, balance, batch = problem
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        vmap(lambda b: loss_fn(params, b, batch, config)[0])(torch.stack([balance, -balance]))
    for key in batch:

        def one(value, key=key):
            return loss_fn(params, balance, {**batch, key: value}, config)[0]

        with pytest.raises(NotImplementedError, match="kernels='reference'"):
            vmap(one)(torch.stack([batch[key], batch[key]]))


def test_vmap_over_the_divisors_alone_is_right_with_either_kernels(problem):
    """Nothing inside the kernels is batched then."""
    config, params, balance, batch = problem
    divisors = Totals(torch.tensor([5, 10]), torch.tensor([6, 12]))
    for kernels in ("fused", "reference"):
        loss = vmap(lambda t, k=kernels: loss_fn(params, balance, batch, config, totals=t, kernels=k)[0])(divisors)
        torch.testing.assert_close(loss[0], 2 * loss[1], **EXACT)


def test_unknown_kernels_are_refused(problem):
    config, params, balance, batch = problem
    with pytest.raises(ValueError, match="kernels = 'fast'"):
        loss_fn(params, balance, batch, config, kernels="fast")
