"""Muon's definitions, and the failures other projects had (CASES, section Muon)."""

import math

import chex
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe import optim

PLAIN = optim.MatrixAxes(out=-1, in_=-2)  # [in, out]

# Matrices are compared to 1e-5 of a unit spectral norm: float32 rounding of the iteration, and the order of
# sums in products of different stacks.


def first_update(tx, params, grads):
    return tx.update(grads, tx.init(params), params)[0]


def orthogonal(x, rule="shape"):
    """One [in, out] matrix, orthogonalised and scaled by hand."""
    rows, cols = x.shape[1], x.shape[0]
    factor = {"shape": math.sqrt(max(1, rows / cols)), "match_rms": 0.2 * math.sqrt(max(rows, cols))}
    return optim.newton_schulz(x) * factor.get(rule, math.sqrt(rows / cols))


@pytest.mark.parametrize("rule", ["shape", "match_rms", "spectral"])
@pytest.mark.parametrize("shape", [(6, 24), (24, 6), (8, 8)])
def test_scale_rules_on_in_out_weights(rule, shape):
    g = torch.randn(shape)
    update = first_update(optim.muon(1.0, PLAIN, scale=rule), {"w": g}, {"w": g})["w"]
    torch.testing.assert_close(-update, orthogonal(g, rule), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("momentum", "expected"), [("average", 0.19), ("sum", 1.9)])
def test_momentum_conventions(momentum, expected):
    """optax PR 1170, KellerJordan/Muon 52: g = 1, beta .9, two steps."""
    tx = optim.muon(1.0, PLAIN, beta=0.9, momentum=momentum)
    params = {"w": torch.ones(1, 1)}
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert float(state[0].mu["w"]) == pytest.approx(expected)


def test_one_scale_rule_is_applied_once():
    g = torch.linalg.qr(torch.randn(16, 4))[0]
    update = first_update(optim.muon(1.0, PLAIN, scale="match_rms"), {"w": g}, {"w": g})["w"]
    low, high = optim.singular_value_band(smallest=0.4)
    rms = float(update.pow(2).mean().sqrt())
    # Four singular values near 1 times 0.2 sqrt(16): root mean square near 0.2.
    assert 0.2 * low <= rms / math.sqrt(4 * 16 / (16 * 4)) <= 0.2 * high


@pytest.mark.parametrize("leaf", [(4, 32, 16), (2, 2, 32, 16)])
def test_experts_are_orthogonalised_each_alone(leaf):
    """dion 119, torchtitan PR 1584: expert 1 times 1000, expert 2 zero."""
    g = torch.randn(leaf)
    flat = g.reshape(4, 32, 16)
    flat[1] *= 1000
    flat[2] = 0
    update = first_update(optim.muon(1.0, PLAIN), {"e": g}, {"e": g})["e"].reshape(4, 32, 16)
    for index in range(4):
        torch.testing.assert_close(-update[index], orthogonal(flat[index]), rtol=1e-5, atol=1e-5)
    assert torch.equal(update[2], torch.zeros(32, 16))


def test_fused_blocks_have_their_own_matrices_and_scales():
    """xtuner PR 2030, Megatron PR 6326: concat(Q, 1e-3 K, V) along the outputs."""
    q, k, v = torch.randn(16, 40), torch.randn(16, 8) * 1e-3, torch.randn(16, 8)
    g = torch.cat([q, k, v], dim=1)
    axes = optim.MatrixAxes(out=-1, in_=-2, out_blocks=(40, 8, 8))
    update = first_update(optim.muon(1.0, axes), {"qkv": g}, {"qkv": g})["qkv"]
    for block, part in zip((q, k, v), update.split([40, 8, 8], dim=1), strict=True):
        torch.testing.assert_close(-part, orthogonal(block), rtol=1e-5, atol=1e-5)


def test_gate_and_up_of_each_expert():
    gate, up = torch.randn(3, 8, 20), torch.randn(3, 8, 20) * 1e-3
    g = torch.cat([gate, up], dim=-1)
    axes = optim.MatrixAxes(out=-1, in_=-2, out_blocks=2)
    update = first_update(optim.muon(1.0, axes), {"gu": g}, {"gu": g})["gu"]
    for expert in range(3):
        torch.testing.assert_close(-update[expert, :, :20], orthogonal(gate[expert]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(-update[expert, :, 20:], orthogonal(up[expert]), rtol=1e-5, atol=1e-5)


def test_heads_of_query_and_output_projections():
    q, o = torch.randn(12, 3 * 4), torch.randn(3 * 4, 12)
    q[:, 4:8] *= 1000
    axes = {
        "q": optim.MatrixAxes(out=-1, in_=-2, out_blocks=3),
        "o": optim.MatrixAxes(out=-1, in_=-2, in_blocks=3),
    }
    update = first_update(optim.muon(1.0, axes), {"q": q, "o": o}, {"q": q, "o": o})
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        torch.testing.assert_close(-update["q"][:, part], orthogonal(q[:, part]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(-update["o"][part], orthogonal(o[part]), rtol=1e-5, atol=1e-5)


def test_first_step_does_not_see_the_gradients_scale():
    """DeepSpeed 7713: a gradient x10 gives the same first update."""
    g = torch.randn(9, 14)
    tx = optim.muon(0.1, PLAIN)
    chex.assert_trees_all_close(
        first_update(tx, {"w": g}, {"w": g}), first_update(tx, {"w": g}, {"w": g * 10}), rtol=1e-5, atol=1e-5
    )


def test_ratio_of_two_groups_rates_survives_the_schedule():
    """DeepSpeed 7713: a scheduler overwrote one group's rate."""

    def decay(peak):
        return optim.warmup_cosine_decay_schedule(0.0, peak, 2, 9)

    params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    tx = optim.partition(
        {"muon": optim.muon(decay(0.2), PLAIN), "adamw": optim.adamw(decay(0.01))},
        {"w": "muon", "b": "adamw"},
    )
    state = tx.init(params)
    for _ in range(8):
        _, state = tx.update(params, state, params)
        rates = optim.learning_rates(state)
        assert float(rates["muon"]) == pytest.approx(20 * float(rates["adamw"]), rel=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_split_and_join_are_inverse_and_stacks_are_views(data):
    ndim = data.draw(st.integers(2, 4))
    out, in_ = data.draw(st.permutations(range(ndim)))[:2]

    def blocks():
        if data.draw(st.booleans()):
            return tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        return data.draw(st.integers(1, 3))

    out_blocks, in_blocks = blocks(), blocks()
    shape = [data.draw(st.integers(1, 3)) for _ in range(ndim)]
    for axis, cut in ((out, out_blocks), (in_, in_blocks)):
        shape[axis] = sum(cut) if isinstance(cut, tuple) else cut * data.draw(st.integers(1, 4))
    axes = optim.MatrixAxes(out - data.draw(st.sampled_from([0, ndim])), in_, out_blocks, in_blocks)
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    stacks = optim.split_matrices(x, axes, "x")
    assert sum(stack.numel() for stack in stacks) == x.numel()
    assert torch.equal(optim.join_matrices(stacks, axes, x.shape, "x"), x)
    copy = torch.full(shape, -1.0)
    for view, stack in zip(optim.split_matrices(copy, axes, "copy"), stacks, strict=True):
        view.copy_(stack)
    assert torch.equal(copy, x)


def test_same_shapes_of_different_leaves_are_stacked():
    """One call for one shape, wide and tall together; values as if each were alone."""
    tree = {"a": torch.randn(6, 9), "b": torch.randn(9, 6), "c": torch.randn(2, 6, 9), "d": torch.randn(4, 4)}
    calls = []

    def function(x):
        calls.append(tuple(x.shape))
        return optim.newton_schulz(x)

    out = optim.orthogonalize_whole(tree, PLAIN, scale="shape", function=function)
    assert sorted(calls) == [(1, 4, 4), (4, 6, 9)]
    torch.testing.assert_close(out["b"], orthogonal(tree["b"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["c"][1], orthogonal(tree["c"][1]), rtol=1e-5, atol=1e-5)


def test_orthogonalize_is_an_argument_that_gets_whole_leaves():
    """What parallel does: bring leaves together, apply `whole` to a list of them, send them back."""
    params = {"a": torch.randn(6, 9), "b": torch.randn(3), "c": (torch.randn(2, 4, 4),)}
    axes = {"a": optim.MatrixAxes(-1, -2, out_blocks=3), "b": None, "c": PLAIN}
    labels = {"a": "muon", "b": "adamw", "c": "muon"}

    def somewhere(updates, axes, whole):
        assert isinstance(updates["b"], optim.MaskedNode)
        a, c = whole([updates["a"], updates["c"][0]], [axes["a"], axes["c"][0]])
        return {"a": a, "b": updates["b"], "c": (c,)}

    def step(**arguments):
        tx = optim.partition({"muon": optim.muon(0.1, axes, **arguments), "adamw": optim.adamw(0.1)}, labels)
        return first_update(tx, params, params)

    chex.assert_trees_all_equal(step(orthogonalize=somewhere), step())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": "sum"},
        {"nesterov": False, "beta": 0.0},
        {"momentum": "sum", "nesterov": False, "momentum_dtype": torch.bfloat16},
    ],
)
def test_a_cacheful_at_a_time_equals_whole_leaves(options, size, monkeypatch):
    """However matrices are dealt out, every one gets its own momentum, decay, scale and place."""
    monkeypatch.setattr("functional_moe.optim._muon.stack_size", lambda rows, cols, device: size)
    shapes = {"wide": (6, 9), "tall": (9, 6), "experts": (3, 6, 9), "layers": (2, 3, 9, 6), "heads": (8, 12)}
    axes = dict.fromkeys(shapes, PLAIN) | {"heads": optim.MatrixAxes(out=-1, in_=-2, out_blocks=(6, 3, 3))}
    axes["layers"] = optim.MatrixAxes(out=1, in_=2)
    params, *grads = ({name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(4))
    grads = [{name: g.movedim(0, -1).contiguous().movedim(-1, 0) for name, g in tree.items()} for tree in grads]

    def train(**arguments):
        tx = optim.muon(0.1, axes, weight_decay=0.1, **options, **arguments)
        state, out = tx.init(params), []
        for tree in grads:
            updates, state = tx.update(tree, state, params)
            out.append((updates, state))
        return out

    fast = train()
    whole = train(orthogonalize=lambda updates, axes, whole: whole(updates, axes))
    for other in (whole, train(foreach=False)):
        for a, b in zip(pytree.tree_leaves(fast), pytree.tree_leaves(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(leaf.is_contiguous() for leaf in fast[0][0].values())


def test_autograd_goes_through_an_update(monkeypatch):
    """Tensors that require gradients are common outside of torch.func; their history is kept, not cut."""
    axes = optim.MatrixAxes(-1, -2, out_blocks=2)
    leaves = {"w": torch.randn(4, 6), "e": torch.randn(2, 4, 6)}
    weights = {name: torch.randn(leaf.shape) for name, leaf in leaves.items()}

    monkeypatch.setattr("functional_moe.optim._muon.stack_size", lambda rows, cols, device: 1)

    def slopes(foreach):
        tx = optim.muon(0.1, axes, weight_decay=0.1, foreach=foreach)
        params, grads = ({name: leaf.clone().requires_grad_() for name, leaf in leaves.items()} for _ in range(2))
        updates, _ = tx.update(grads, tx.init(params), params)
        sum((updates[name] * weights[name]).sum() for name in leaves).backward()
        assert all(tree["w"].grad is not None for tree in (params, grads))
        return [leaf.grad for tree in (params, grads) for leaf in tree.values()]

    for fast, plain in zip(slopes(True), slopes(False), strict=True):
        torch.testing.assert_close(fast, plain)


def test_momentum_dtype_and_decay_with_schedule():
    schedule = optim.linear_schedule(0.5, 0.25, 1)
    tx = optim.muon(schedule, PLAIN, weight_decay=0.1, momentum_dtype=torch.bfloat16)
    params = {"w": torch.ones(2, 3)}
    zero = {"w": torch.zeros(2, 3)}
    state = tx.init(params)
    assert state[0].mu["w"].dtype == torch.bfloat16
    for rate in (0.5, 0.25):
        updates, state = tx.update(zero, state, params)
        # No gradient: what is left is the decay times this step's rate.
        torch.testing.assert_close(updates["w"], torch.full((2, 3), -0.1 * rate))
    assert state[0].mu["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("exact", [True, False])
def test_torch_muon_agrees_where_the_definitions_do(exact, monkeypatch):
    """Nesterov on, plain sum. torch iterates in bfloat16, whose rounding is 3e-2 of an update; with its
    iteration replaced by one in float32, momentum, scales and decay agree to 1e-5.
    """
    torch.manual_seed(0)
    if exact:
        monkeypatch.setattr(
            "torch.optim._muon._zeropower_via_newtonschulz",
            lambda x, coefficients, steps, eps: optim.newton_schulz(x),
        )
    shapes = {"wide": (16, 48), "tall": (48, 16), "square": (24, 24)}
    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    for adjust, rule in (("original", "shape"), ("match_rms_adamw", "match_rms")):
        theirs = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
        peer = torch.optim.Muon(theirs.values(), lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
        tx = optim.muon(
            0.1,
            optim.MatrixAxes(0, 1),
            0.9,
            0.1,
            momentum="sum",
            scale=rule,
            dtype=None if exact else torch.bfloat16,
            method="auto" if exact else "standard",
        )
        ours, state = params, tx.init(params)
        for _ in range(5):
            grads = {name: torch.randn(shape) for name, shape in shapes.items()}
            for name, p in theirs.items():
                p.grad = grads[name].clone()
            before = {name: p.detach().clone() for name, p in theirs.items()}
            peer.step()
            updates, state = tx.update(grads, state, ours)
            ours = optim.apply_updates(ours, updates)
            for name, p in theirs.items():
                step = p.detach() - before[name]
                assert float((updates[name] - step).norm() / step.norm()) < (1e-5 if exact else 3e-2)


def test_a_stack_of_no_matrices_has_no_update():
    params = {"experts": torch.ones(0, 4, 8), "w": torch.ones(4, 8)}
    tx = optim.muon(0.1, optim.MatrixAxes(-1, -2))
    for optimizer in (tx, optim.muon(0.1, optim.MatrixAxes(-1, -2), foreach=False)):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates["experts"].shape == (0, 4, 8)
