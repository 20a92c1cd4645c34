"""Routing decisions, their weights, the losses and counts made of them, and the balance that moves by them."""

from __future__ import annotations

import chex
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from functional_moe.model import IGNORE_INDEX, count_totals, feed_forward_half, init_balance, loss_fn
from functional_moe.routing import Routing, route, router_stats, select, update_balance

# fp64: the same few dozen terms in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def route_scores(scores, bias, config):
    """Routes one-hot tokens whose sigmoid or softmax scores are these."""
    scores = torch.tensor(scores, dtype=torch.float64)
    logits = torch.logit(scores) if config.scoring_func == "sigmoid" else scores.log()
    return route(torch.ones(1, 1, dtype=torch.float64), logits[None], torch.tensor(bias), config)


def test_selection_bias_chooses_but_does_not_weigh(make_config):
    """transformers PR 41647: scores (.6, .5, .4, .3), bias (0, 0, 0, 1): experts {3, 0}, weights 1/3 and 2/3."""
    config = make_config(num_experts=4, num_experts_per_tok=2, scoring_func="sigmoid")
    routing = route_scores([0.6, 0.5, 0.4, 0.3], [0.0, 0.0, 0.0, 1.0], config)
    assert routing.experts.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.weights, torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64))


def test_no_gradient_reaches_the_selection_bias(make_config):
    config = make_config(num_experts=4, num_experts_per_tok=2, scoring_func="sigmoid")
    x, router, bias = random(3, 5), random(5, 4).requires_grad_(), torch.zeros(4, requires_grad=True)
    weights = route(x, router, bias, config).weights
    router_grad, bias_grad = torch.autograd.grad(weights[:, 0].sum(), (router, bias), allow_unused=True)
    assert bias_grad is None
    assert float(router_grad.abs().max()) > 0


def test_bias_leaks_into_no_gradient_of_the_loss(make_config, make_params, make_batch, make_balance):
    config = make_config()
    loss = torch.func.grad(lambda b: loss_fn(make_params(config), b, make_batch(config), config)[0])
    assert torch.equal(loss(make_balance(config)), torch.zeros(2, 5))


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_weights_are_the_chosen_scores(make_config, scoring_func, normalised, factor):
    config = make_config(scoring_func=scoring_func, norm_topk_prob=normalised, routed_scaling_factor=factor)
    x, router = random(6, 10), random(10, 5, seed=1)
    routing = route(x, router, torch.zeros(5), config)
    scores = (x @ router).softmax(-1) if scoring_func == "softmax" else (x @ router).sigmoid()
    values, indices = scores.topk(2)
    assert torch.equal(routing.experts, indices)
    expected = values / values.sum(-1, keepdim=True) if normalised else values
    torch.testing.assert_close(routing.weights, factor * expected, **EXACT)
    torch.testing.assert_close(routing.scores, scores, **EXACT)
    torch.testing.assert_close(routing.logits, x @ router, **EXACT)


def test_routing_is_fp32_under_bf16(make_config):
    config = make_config(compute_dtype="bfloat16")
    x, router = random(64, 10, dtype=torch.bfloat16), random(10, 5, seed=1, dtype=torch.float32)
    routing = route(x, router, torch.zeros(5), config)
    exact = route(x.double(), router.double(), torch.zeros(5), config)
    assert {routing.weights.dtype, routing.logits.dtype, routing.scores.dtype} == {torch.float32}
    # fp32 products of 10 terms: a bf16 product would be off by 4e-3.
    torch.testing.assert_close(routing.logits.double(), exact.logits, rtol=1e-5, atol=1e-5)


def test_underflowing_sigmoids_give_no_nan(make_config):
    config = make_config(scoring_func="sigmoid", num_experts=2, num_experts_per_tok=2)
    router = torch.full((1, 2), -200.0, requires_grad=True)
    weights = route(torch.ones(1, 1), router, torch.zeros(2), config).weights
    (gradient,) = torch.autograd.grad(weights.sum(), router)
    assert weights.isfinite().all()
    assert gradient.isfinite().all()


def brute_force(scores, bias, config):
    """The set of experts of one token: python, by the words of arXiv 2412.19437."""
    biased = [float(s) + float(b) for s, b in zip(scores, bias, strict=True)]
    size = config.num_experts // config.n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_group)]

    def rank(group):
        return sum(sorted((biased[e] for e in group), reverse=True)[:2])

    allowed = [e for group in sorted(groups, key=rank, reverse=True)[: config.topk_group] for e in group]
    return set(sorted(allowed, key=lambda e: biased[e], reverse=True)[: config.num_experts_per_tok])


@given(data=st.data())
def test_group_limited_selection_is_its_definition(make_config, data):
    n_group = data.draw(st.integers(1, 4), label="n_group")
    size = data.draw(st.integers(1, 3), label="experts per group")
    topk_group = data.draw(st.integers(1, n_group), label="topk_group")
    top_k = data.draw(st.integers(1, topk_group * size), label="top_k")
    experts = n_group * size
    config = make_config(
        num_experts=experts, num_experts_per_tok=top_k, n_group=n_group, topk_group=topk_group, norm_topk_prob=False
    )
    # Values whose sums never tie, so that the sets are determined; biases of either sign and larger than any score.
    permutation = st.permutations(range(experts)).map(torch.tensor)
    primes = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37], dtype=torch.float64)
    scores = primes.sqrt()[data.draw(permutation, label="order of scores")] / 7
    bias = primes.log()[data.draw(permutation, label="order of biases")] - data.draw(st.integers(0, 5), label="shift")
    chosen = select(scores[None], bias, config)[0].tolist()
    assert len(set(chosen)) == top_k
    assert set(chosen) == brute_force(scores, bias, config)


def test_masked_groups_lose_against_negative_biases(make_config):
    """transformers 45440: with zeros in place of -inf the masked group's experts would win."""
    config = make_config(num_experts=6, n_group=3, topk_group=1, num_experts_per_tok=2, scoring_func="sigmoid")
    routing = route_scores([0.9, 0.8, 0.3, 0.2, 0.1, 0.1], [-5.0, -5.0, -7.0, -7.0, -7.0, -7.0], config)
    assert set(routing.experts[0].tolist()) == {0, 1}


def test_ties_are_broken_the_same_way_every_time(make_config):
    """torchtitan 1117, 3336: with a zero router every score ties; the forward and its replay choose alike."""
    config = make_config(num_experts=64, num_experts_per_tok=6)
    x, router = random(50, 10, dtype=torch.float32), torch.zeros(10, 64)
    first = route(x, router, torch.zeros(64), config)
    for _ in range(3):
        assert torch.equal(route(x, router, torch.zeros(64), config).experts, first.experts)
    under_grad = torch.func.vjp(lambda r: route(x, r, torch.zeros(64), config).weights, router)
    assert torch.equal(under_grad[0], first.weights)


@pytest.mark.parametrize("zero_router", [False, True])
def test_a_replay_takes_the_decision_back(zero_router, make_config, make_params):
    """Bit for bit in value and gradient, though the selection bias would now choose other experts."""
    config = make_config()
    layer = make_params(config)["layers"][0]
    if zero_router:
        layer["router"] = torch.zeros_like(layer["router"])
    x, valid = random(2, 8, config.hidden_size, dtype=torch.float32), torch.ones(2, 8, dtype=torch.bool)
    bias = torch.zeros(config.num_experts)

    def run(bias, decision=None):
        def half(layer, x):
            out = feed_forward_half(layer, bias, x, valid, config, decision=decision)
            return (out.x, out.stats.aux_loss, out.stats.z_loss), (out.stats.counts, out.decision)

        value, pull_back, (counts, made) = torch.func.vjp(half, layer, x, has_aux=True)
        return (value, counts, pull_back((torch.cos(x), torch.tensor(0.3), torch.tensor(0.2)))), made

    first, decision = run(bias)
    moved = bias + 100 * torch.arange(config.num_experts)
    again, same = run(moved, decision)
    chex.assert_trees_all_equal(again, first)
    assert torch.equal(same.experts, decision.experts)
    assert not torch.equal(run(moved)[1].experts, decision.experts)


def test_a_choice_of_other_tokens_is_refused(make_config):
    with pytest.raises(ValueError, match=r"experts of shape \(2, 2\) for \[tokens, top_k\] = \(3, 2\)"):
        route(torch.ones(3, 1), torch.ones(1, 5), torch.zeros(5), make_config(), experts=torch.tensor([[0, 1]] * 2))


def test_collapsed_probability_is_a_single_softmax(make_config):
    """transformers 45120: logits (6, 0 x 7) have mean probability .983 of expert 0; softmax twice has .28."""
    config = make_config(num_experts=8, num_experts_per_tok=1, norm_topk_prob=False)
    router = torch.tensor([[6.0] + [0.0] * 7])
    routing = route(torch.ones(4, 1), router, torch.zeros(8), config)
    assert round(float(routing.scores[:, 0].mean()), 3) == 0.983
    stats = router_stats(routing, torch.ones(1, 4, dtype=torch.bool), config)
    # f_0 = 8 and P_0 = .983, per token: the loss of the row times its 4 tokens.
    assert float(stats.aux_loss) == pytest.approx(4 * 8 * 0.98295, rel=1e-4)


def decided(choices, config, probabilities=None):
    """A Routing whose tokens choose these experts, with (nearly) all probability on the first."""
    experts = torch.tensor(choices)
    if probabilities is None:
        probabilities = torch.nn.functional.one_hot(experts[:, 0], config.num_experts).double()
    return Routing(experts, torch.ones_like(experts, dtype=torch.float64), probabilities.log(), probabilities)


def test_balance_loss_of_collapsed_layers_is_per_layer(make_config):
    """transformers 28255: four layers, each collapsed onto another of four experts: 4.0 each, not 1.0 of them all."""
    config = make_config(num_experts=4, num_experts_per_tok=1, norm_topk_prob=False)
    valid = torch.ones(1, 6, dtype=torch.bool)
    for expert in range(4):
        stats = router_stats(decided([[expert]] * 6, config), valid, config)
        assert float(stats.aux_loss) / 6 == 4.0


def test_balance_loss_of_a_model_is_reported_as_a_mean_and_added_as_a_sum_over_layers(
    make_config, make_params, make_batch
):
    """Four layers, each with all its tokens on another expert but uniform probabilities: 1.0 each."""
    config = make_config(
        num_experts=4, num_experts_per_tok=1, norm_topk_prob=False, num_hidden_layers=4, router_z_loss_coef=0.0
    )
    params, batch = make_params(config), make_batch(config)
    for layer in params["layers"]:
        layer["router"].zero_()
    balance = 10 * torch.eye(4)  # the bias alone chooses
    loss, metrics = loss_fn(params, balance, batch, config)
    assert metrics.counts.tolist() == (15 * torch.eye(4, dtype=torch.int64)).tolist()
    assert float(metrics.aux_loss) == pytest.approx(1.0)  # f_e P_e = 4 * 1/4
    assert float(loss - metrics.loss) == pytest.approx(4 * 0.1 * 1.0, rel=1e-5)


@given(
    rows=st.integers(1, 3),
    seq=st.integers(1, 6),
    top_k=st.integers(1, 3),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    seed=st.integers(0, 99),
)
def test_stats_are_their_definition_and_padding_counts_in_none(make_config, rows, seq, top_k, scoring, seed):
    config = make_config(num_experts_per_tok=top_k, scoring_func=scoring, norm_topk_prob=False)
    x, router = random(rows * seq, 10, seed=seed), random(10, 5, seed=seed + 1)
    valid = random(rows, seq, seed=seed + 2) > -0.5
    routing = route(x, router, torch.zeros(5), config)
    stats = router_stats(routing, valid, config)

    counts, aux, z = torch.zeros(5, dtype=torch.int64), 0.0, 0.0
    for row in range(rows):
        tokens = [row * seq + i for i in range(seq) if valid[row, i]]
        n = len(tokens)
        if not n:
            continue
        f, p = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        for token in tokens:
            for e in routing.experts[token].tolist():
                counts[e] += 1
                f[e] += 5 / (top_k * n)
            score = (x[token] @ router).softmax(-1) if scoring == "softmax" else (x[token] @ router).sigmoid()
            p += score / score.sum() / n
            z += float(torch.logsumexp(x[token] @ router, 0)) ** 2
        aux += n * float((f * p).sum())
    assert torch.equal(stats.counts, counts)
    assert int(stats.counts.sum()) == int(valid.sum()) * top_k
    assert float(stats.aux_loss) == pytest.approx(aux, rel=1e-10, abs=1e-12)
    assert float(stats.z_loss) == pytest.approx(z, rel=1e-10, abs=1e-12)


def test_uniform_routing_has_balance_loss_one(make_config):
    config = make_config(num_experts=6, num_experts_per_tok=2, n_group=1)
    uniform = torch.full((3, 6), 1 / 6, dtype=torch.float64)
    stats = router_stats(decided([[0, 1], [2, 3], [4, 5]], config, uniform), torch.ones(1, 3, dtype=torch.bool), config)
    assert float(stats.aux_loss) / 3 == pytest.approx(1.0)


def test_padding_has_no_gradient_even_when_its_logits_are_huge(make_config):
    config = make_config()
    x = random(4, 10)
    x[3] = 1e200
    valid = torch.tensor([[True, True, True, False]])
    router = random(10, 5).requires_grad_()
    routing = route(x, router, torch.zeros(5), config)
    stats = router_stats(routing, valid, config)
    assert stats.z_loss.isfinite()
    assert stats.aux_loss.isfinite()
    (with_padding,) = torch.autograd.grad(stats.aux_loss, router)
    stats = router_stats(route(x[:3], router, torch.zeros(5), config), valid[:, :3], config)
    torch.testing.assert_close(with_padding, torch.autograd.grad(stats.aux_loss, router)[0], **EXACT)


class TestUpdateBalance:
    def test_one_step_moves_by_the_rate_against_the_load(self, make_config):
        """torchtitan 1304: counts [3, 1], rate 0.3: [-0.3, +0.3]."""
        config = make_config(num_experts=2, num_experts_per_tok=1, norm_topk_prob=False, balance_update_rate=0.3)
        moved = update_balance(torch.zeros(1, 2), torch.tensor([[3, 1]]), config)
        torch.testing.assert_close(moved, torch.tensor([[-0.3, 0.3]]))

    @pytest.mark.parametrize(("centred", "expected"), [(False, [-1.0, 1.0, 1.0, 1.0]), (True, [-1.5, 0.5, 0.5, 0.5])])
    def test_raw_and_centred(self, make_config, centred, expected):
        """torchtitan 1506."""
        config = make_config(num_experts=4, balance_update_rate=0.01, balance_centred=centred)
        moved = update_balance(torch.ones(1, 4), torch.tensor([[10, 1, 1, 0]]), config)
        torch.testing.assert_close(moved, 1 + 0.01 * torch.tensor([expected]))

    def test_layers_do_not_mix_and_even_load_does_not_move(self, make_config):
        config = make_config(num_experts=2, balance_update_rate=1.0)
        moved = update_balance(torch.zeros(3, 2), torch.tensor([[5, 5], [6, 4], [0, 0]]), config)
        assert moved.tolist() == [[0, 0], [-1, 1], [0, 0]]

    def test_exact_where_fp32_cannot_tell_the_counts_apart(self, make_config):
        config = make_config(num_experts=2, balance_update_rate=1.0)
        counts = torch.tensor([[2**40 + 1, 2**40]])
        assert update_balance(torch.zeros(1, 2), counts, config).tolist() == [[-1, 1]]

    def test_rate_zero_leaves_it_alone(self, make_config):
        balance = random(2, 5, dtype=torch.float32)
        assert torch.equal(update_balance(balance, torch.randint(9, (2, 5)), make_config()), balance)

    @given(counts=st.lists(st.integers(0, 50), min_size=5, max_size=5), centred=st.booleans())
    @example(counts=[0, 0, 0, 0, 0], centred=True)
    def test_moves_against_the_load_and_changes_nothing_else(self, make_config, counts, centred):
        config = make_config(balance_update_rate=0.5, balance_centred=centred)
        balance, counted = random(1, 5, dtype=torch.float32), torch.tensor([counts])
        before = balance.clone()
        move = update_balance(balance, counted, config) - balance
        assert torch.equal(balance, before)
        assert move.dtype == torch.float32
        mean = sum(counts) / 5
        raw = [0.5 * ((c < mean) - (c > mean)) for c in counts]
        expected = torch.tensor([raw])
        if centred:
            expected = expected - expected.mean()
        torch.testing.assert_close(move, expected, rtol=0, atol=1e-6)  # one rounding of the sum in fp32


def test_counts_of_the_model_sum_to_tokens_times_top_k(make_config, make_params, make_batch, make_balance):
    config = make_config(num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=3)
    batch = make_batch(config)
    counts = loss_fn(make_params(config), make_balance(config), batch, config)[1].counts
    assert counts.dtype == torch.int64
    assert counts.shape == (2, 5)
    assert counts.sum(-1).tolist() == [2 * int(count_totals(batch).tokens)] * 2 == [30, 30]


def test_counts_are_those_of_the_forward_alone_under_differentiation(make_config, make_params, make_batch):
    """torchtitan 1304: recomputation or the backward may not count again."""
    config = make_config()
    params, balance, batch = make_params(config), init_balance(config), make_batch(config)
    plain = loss_fn(params, balance, batch, config)[1].counts
    _, (_, metrics) = torch.func.grad_and_value(lambda p: loss_fn(p, balance, batch, config), has_aux=True)(params)
    assert torch.equal(metrics.counts, plain)


def test_router_has_a_gradient_with_every_coefficient_zero(make_config, make_params, make_batch, make_balance):
    """torchtitan PR 2532: also when nothing but the cross-entropy reaches the router."""
    for changes in ({}, {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"scoring_func": "sigmoid"}):
        config = make_config(router_aux_loss_coef=0.0, router_z_loss_coef=0.0, **changes)
        batch = make_batch(config)
        gradient = torch.func.grad(lambda p: loss_fn(p, make_balance(config), batch, config)[0])(make_params(config))  # noqa: B023
        for layer in gradient["layers"]:
            assert float(layer["router"].abs().max()) > 1e-4


def test_doubling_the_coefficient_doubles_its_part(make_config, make_params, make_batch, make_balance):
    def gradient(**changes):
        config = make_config(compute_dtype="float64", router_z_loss_coef=0.0, **changes)
        batch, balance = make_batch(config), make_balance(config)
        grads = torch.func.grad(lambda p: loss_fn(p, balance, batch, config)[0])(make_params(config))
        return grads["layers"][0]["router"]

    none, once, twice = (gradient(router_aux_loss_coef=c) for c in (0.0, 0.1, 0.2))
    assert float((once - none).abs().max()) > 1e-6
    torch.testing.assert_close(twice - none, 2 * (once - none), rtol=1e-9, atol=1e-12)


def test_ignored_targets_still_count_as_tokens(make_config, make_params, make_batch, make_balance):
    """A token that predicts nothing (a prompt) is routed and balanced; only padding is not."""
    config = make_config()
    batch = make_batch(config)
    silent = {**batch, "targets": torch.full_like(batch["targets"], IGNORE_INDEX)}
    metrics = [loss_fn(make_params(config), make_balance(config), b, config)[1] for b in (batch, silent)]
    assert torch.equal(metrics[0].counts, metrics[1].counts)
    assert float(metrics[0].aux_loss) == float(metrics[1].aux_loss)
    assert float(metrics[1].loss) == 0.0
