"""value_and_grad is torch.func.grad_and_value wherever anybody may differentiate it, and wherever nobody may."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

from functional_moe.chain import loss_fn
from functional_moe.gradient import value_and_grad

# fp64: the same operations, or the same sums in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-12}

# torch's own forward mode compiles its decompositions with torch.jit.script, which torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def tree(seed=0):
    return {"a": random(3, seed=seed), "b": (random(3, 3, seed=seed + 1), random(2, seed=seed + 2))}


def toy(params, scale=1.0):
    """A loss with third derivatives, and an auxiliary tree. It does not depend on the last leaf."""
    x = torch.tanh(params["a"] @ params["b"][0]) * scale
    return (x**3).sum() + (params["a"] ** 4).sum(), {"x": x, "pair": (x.sum(), x.mean())}


def reference(function, params):
    gradient, (loss, auxiliary) = grad_and_value(function, has_aux=True)(params)
    return loss, auxiliary, gradient


def test_equals_grad_and_value():
    ours = value_and_grad(toy, tree())
    chex.assert_trees_all_close(ours, reference(toy, tree()), **EXACT)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(ours))
    assert torch.equal(ours[2]["b"][1], torch.zeros(2, dtype=torch.float64))  # a leaf without influence


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_equals_grad_and_value_on_the_model(make_config, make_params, make_balance, make_batch, kernels):
    config = make_config(compute_dtype="float64")
    balance, batch = make_balance(config), make_batch(config)

    def function(params):
        return loss_fn(params, balance, batch, config, kernels=kernels)

    params = make_params(config)
    chex.assert_trees_all_close(value_and_grad(function, params), reference(function, params), **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_differentiates_whatever_the_grad_mode_around_it(mode):
    with mode():
        ours = value_and_grad(toy, tree())
    chex.assert_trees_all_close(pytree.tree_map(torch.clone, ours), reference(toy, tree()), **EXACT)


def one_step(params, rate):
    """A step of gradient descent, and the loss after it: what meta-learning differentiates."""
    gradient = value_and_grad(toy, params)[2]
    return toy(pytree.tree_map(lambda p, g: p - rate * g, params, gradient))[0]


def one_step_reference(params, rate):
    gradient = reference(toy, params)[2]
    return toy(pytree.tree_map(lambda p, g: p - rate * g, params, gradient))[0]


def test_an_outer_grad_differentiates_through_it():
    rate = torch.tensor(0.1, dtype=torch.float64)
    for argnums in (0, 1):
        chex.assert_trees_all_close(
            grad(one_step, argnums=argnums)(tree(), rate),
            grad(one_step_reference, argnums=argnums)(tree(), rate),
            **EXACT,
        )


def test_an_outer_grad_gives_the_second_and_third_order():
    def first(params):
        return sum((g**2).sum() for g in pytree.tree_leaves(value_and_grad(toy, params)[2]))

    def first_reference(params):
        return sum((g**2).sum() for g in pytree.tree_leaves(reference(toy, params)[2]))

    chex.assert_trees_all_close(grad(first)(tree()), grad(first_reference)(tree()), **EXACT)
    chex.assert_trees_all_close(
        jacrev(lambda p: grad(first)(p)["a"])(tree()), jacrev(lambda p: grad(first_reference)(p)["a"])(tree()), **EXACT
    )


def test_an_outer_grad_of_what_the_loss_closes_over():
    """Not the parameters but a hyperparameter is differentiated."""
    scale = torch.tensor(1.3, dtype=torch.float64)

    def total(scale, gradient_of):
        return gradient_of(lambda p: toy(p, scale), tree())[2]["a"].sum()

    torch.testing.assert_close(grad(total)(scale, value_and_grad), grad(total)(scale, reference), **EXACT)


def test_no_grad_inside_an_outer_grad_cuts_it_off():
    def total(rate):
        with torch.no_grad():
            gradient = value_and_grad(lambda p: toy(p, rate), tree())[2]
        return rate + gradient["a"].sum()

    assert float(grad(total)(torch.tensor(1.3, dtype=torch.float64))) == 1.0


def test_vmap_over_it_equals_a_loop():
    several = pytree.tree_map(lambda *leaves: torch.stack(leaves), tree(0), tree(10), tree(20))
    together = vmap(lambda p: value_and_grad(toy, p))(several)
    for index, seed in enumerate((0, 10, 20)):
        alone = reference(toy, tree(seed))
        chex.assert_trees_all_close(pytree.tree_map(lambda leaf, i=index: leaf[i], together), alone, **EXACT)


def test_jvp_through_it_is_a_hessian_vector_product():
    tangent = tree(5)
    ours = jvp(lambda p: value_and_grad(toy, p)[2], (tree(),), (tangent,))
    chex.assert_trees_all_close(ours, jvp(lambda p: reference(toy, p)[2], (tree(),), (tangent,)), **EXACT)


def test_dual_numbers_outside_functorch_pass_through_it():
    primal, tangent = tree(), tree(5)
    expected = jvp(lambda p: reference(toy, p)[2], (primal,), (tangent,))[1]
    with forward_ad.dual_level():
        gradient = value_and_grad(toy, pytree.tree_map(forward_ad.make_dual, primal, tangent))[2]
        for ours, theirs in zip(pytree.tree_leaves(gradient), pytree.tree_leaves(expected), strict=True):
            got = forward_ad.unpack_dual(ours).tangent
            torch.testing.assert_close(torch.zeros_like(theirs) if got is None else got, theirs, **EXACT)


def requiring(params):
    return pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)


def test_backward_through_it_when_parameters_require_grad():
    ours, theirs = requiring(tree()), requiring(tree())
    for params, function in ((ours, value_and_grad), (theirs, reference)):
        loss, auxiliary, gradient = function(toy, params)
        (loss + auxiliary["x"].sum() + (gradient["a"] ** 2).sum()).backward()
    for a, b in zip(pytree.tree_leaves(ours)[:2], pytree.tree_leaves(theirs)[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)


def test_backward_through_it_when_only_what_the_loss_closes_over_requires_grad():
    """A learned temperature, say: the loss and the gradient depend on it, and the gradient may not be cut off."""
    ours, theirs = (torch.tensor(1.3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for scale, function in ((ours, value_and_grad), (theirs, reference)):
        loss, _, gradient = function(lambda p, s=scale: toy(p, s), tree())
        (loss + gradient["a"].sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)


def test_backward_through_the_gradient_alone_of_a_loss_whose_value_is_constant_in_the_closure():
    """The gradient may depend on what the value does not: here the value is 0 at params 0 for every scale."""
    zero = {"a": torch.zeros(3, dtype=torch.float64)}
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    gradient = value_and_grad(lambda p: ((scale * p["a"]).sum(), {}), zero)[2]
    gradient["a"].sum().backward()
    assert float(scale.grad) == 3.0


def test_no_graph_is_built_when_nobody_can_ask():
    """That is its purpose: the backward runs without create_graph, and the results hold no graph."""
    recorded = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            recorded.append(torch.is_grad_enabled())
            return grad

    def function(params):
        return Watch.apply(params["a"]).sum(), {}

    value_and_grad(function, {"a": random(3)})
    reference(function, {"a": random(3)})
    value_and_grad(function, {"a": random(3).requires_grad_()})
    assert recorded == [False, True, True]


@pytest.mark.parametrize("shape", [(1,), (3,)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_loss_that_is_no_scalar_raises(shape, requires_grad):
    """As torch.func.grad does: the sum of a vector's gradients is not what anybody asked for."""
    params = {"a": random(*shape).requires_grad_(requires_grad)}
    with pytest.raises((ValueError, RuntimeError), match="scalar"):
        value_and_grad(lambda p: (p["a"] ** 2, {}), params)


def test_second_order_through_it_on_the_model_with_reference_kernels(
    make_config, make_params, make_balance, make_batch
):
    config = make_config(compute_dtype="float64")
    balance, batch, params = make_balance(config), make_batch(config), make_params(config)

    def after_a_step(rate, gradient_of):
        def loss(p):
            return loss_fn(p, balance, batch, config, kernels="reference")

        gradient = gradient_of(loss, params)[2]
        return loss(pytree.tree_map(lambda p, g: p - rate * g, params, gradient))[0]

    rate = torch.tensor(0.01, dtype=torch.float64)
    torch.testing.assert_close(grad(after_a_step)(rate, value_and_grad), grad(after_a_step)(rate, reference), **EXACT)
    rates = torch.tensor([0.0, 0.01, 0.1], dtype=torch.float64)
    swept = vmap(lambda r: after_a_step(r, value_and_grad))(rates)
    torch.testing.assert_close(swept, torch.stack([after_a_step(r, reference) for r in rates]), **EXACT)


def test_fused_kernels_still_refuse_a_second_order_through_it(make_config, make_params, make_balance, make_batch):
    config = make_config()
    balance, batch, params = make_balance(config), make_batch(config), make_params(config)

    def norm(p):
        gradient = value_and_grad(lambda q: loss_fn(q, balance, batch, config), p)[2]
        return sum((leaf**2).sum() for leaf in pytree.tree_leaves(gradient))

    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        grad(norm)(params)
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        norm(requiring(params)).backward()
