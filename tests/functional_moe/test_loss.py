"""loss_fn is one number with one gradient: by plain autograd, in parts, by either kernels, and without side effects."""

from __future__ import annotations

import copy
import math

import chex
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe.chain import logits, loss_fn
from functional_moe.gradient import value_and_grad
from functional_moe.model import IGNORE_INDEX, Totals, count_totals, init_balance, valid_tokens
from functional_moe.parameters import init

# fp64: the same sums in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# fp32: two layers forward and backward, of sums of up to 30 terms with an epsilon of 6e-8.
SINGLE = {"rtol": 1e-4, "atol": 1e-5}

VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "dense first": {"first_k_dense_replace": 1, "intermediate_size": 5},
    "all dense": {"first_k_dense_replace": 2, "intermediate_size": 5},
    "shared": {"num_shared_experts": 2, "shared_expert_gate": True},
    "sigmoid, groups": {"scoring_func": "sigmoid", "num_experts": 6, "n_group": 3, "topk_group": 2},
    "top-1": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": 5},
    "scaled, partial rotary": {"routed_scaling_factor": 2.5, "head_dim": 8, "partial_rotary_factor": 0.5},
    "grouped_mm sizes": {"hidden_size": 16, "moe_intermediate_size": 8},
}


@pytest.fixture(scope="module")
def make_problem(make_config, make_params, make_balance, make_batch):
    def make(*, batch_options=None, **changes):
        config = make_config(**changes)
        return config, make_params(config), make_balance(config), make_batch(config, **(batch_options or {}))

    return make


def run(problem, kernels="fused", totals=None):
    """Loss, metrics and gradient."""
    config, params, balance, batch = problem
    gradient, (loss, metrics) = torch.func.grad_and_value(
        lambda p: loss_fn(p, balance, batch, config, totals=totals, kernels=kernels), has_aux=True
    )(params)
    return loss, metrics, gradient


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_func_grad_equals_plain_autograd(make_problem, variant, kernels):
    config, params, balance, batch = make_problem(**VARIANTS[variant], compute_dtype="float64")
    loss, _, gradient = run((config, params, balance, batch), kernels)
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    plain, _ = loss_fn(pytree.tree_unflatten(leaves, spec), balance, batch, config, kernels=kernels)
    plain.backward()
    assert torch.equal(plain.detach(), loss)
    for ours, leaf in zip(pytree.tree_leaves(gradient), leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, **EXACT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_torchs_cross_entropy_of_the_logits_plus_the_weighted_router_losses(make_problem, variant):
    config, params, balance, batch = make_problem(**VARIANTS[variant], compute_dtype="float64")
    loss, metrics = loss_fn(params, balance, batch, config)
    dense = F.cross_entropy(logits(params, balance, batch, config).flatten(0, 1), batch["targets"].flatten())
    torch.testing.assert_close(metrics.loss, dense, **EXACT)
    layers = config.num_moe_layers
    router = layers * (0.1 * metrics.aux_loss + 0.01 * metrics.z_loss)
    torch.testing.assert_close(loss, dense + router, **EXACT)
    assert (float(metrics.aux_loss) > 0) == (layers > 0)


@pytest.mark.parametrize("compute_dtype", ["float32", "float64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_reference_in_value_and_gradient(make_problem, variant, compute_dtype):
    problem = make_problem(**VARIANTS[variant], compute_dtype=compute_dtype)
    tolerance = EXACT if compute_dtype == "float64" else SINGLE
    chex.assert_trees_all_close(run(problem), run(problem, "reference"), **tolerance)


@pytest.mark.parametrize(
    ("rows", "seq", "packed"), [(1, 1, False), (1, 7, False), (3, 1, False), (1, 5, True), (4, 3, False)]
)
def test_fused_equals_reference_for_small_and_single_rows(make_problem, rows, seq, packed):
    problem = make_problem(compute_dtype="float64", batch_options={"rows": rows, "seq": seq + 1, "packed": packed})
    problem[3].update({key: value[:, :seq] for key, value in problem[3].items()})
    chex.assert_trees_all_close(run(problem), run(problem, "reference"), **EXACT)


def test_one_token_is_a_batch(make_problem):
    config, params, balance, _ = make_problem(compute_dtype="float64")
    batch = {"tokens": torch.tensor([[3]]), "targets": torch.tensor([[5]])}
    loss, metrics, gradient = run((config, params, balance, batch))
    assert metrics.counts.sum(-1).tolist() == [2, 2]
    chex.assert_trees_all_close((loss, metrics, gradient), run((config, params, balance, batch), "reference"), **EXACT)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_experts_without_tokens_have_a_gradient_of_exactly_zero(make_problem, kernels):
    """pytorch 154557. The balance sends every token to experts 1 and 3."""
    for changes in ({}, {"hidden_size": 16, "moe_intermediate_size": 8}, {"compute_dtype": "float64"}):
        config, params, _, batch = make_problem(**changes)
        balance = torch.tensor([[0.0, 9.0, 0.0, 9.0, 0.0]] * 2)
        _, metrics, gradient = run((config, params, balance, batch), kernels)
        assert metrics.counts.tolist() == [[0, 15, 0, 15, 0]] * 2
        for layer in gradient["layers"]:
            for stack in layer["experts"].values():
                assert torch.equal(stack[[0, 2, 4]], torch.zeros_like(stack[[0, 2, 4]]))
                assert bool((stack[[1, 3]].flatten(1).abs().amax(1) > 0).all())
        reference = run((config, params, balance, batch), "reference")
        chex.assert_trees_all_close(gradient, reference[2], **SINGLE)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_nothing_to_predict_is_a_loss_of_zero_with_zero_gradients(make_problem, kernels):
    config, params, balance, batch = make_problem(router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    batch = {**batch, "targets": torch.full_like(batch["targets"], IGNORE_INDEX)}
    loss, metrics, gradient = run((config, params, balance, batch), kernels)
    assert (float(loss), float(metrics.loss)) == (0.0, 0.0)
    chex.assert_trees_all_equal(gradient, pytree.tree_map(torch.zeros_like, params))


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_a_batch_of_padding_alone_is_a_finite_zero(make_problem, kernels):
    config, params, balance, batch = make_problem()
    batch = {**batch, "segment_ids": torch.zeros_like(batch["tokens"])}
    loss, metrics, gradient = run((config, params, balance, batch), kernels)
    assert float(loss) == float(metrics.loss) == float(metrics.aux_loss) == float(metrics.z_loss) == 0.0
    assert int(metrics.counts.sum()) == 0
    chex.assert_trees_all_equal(gradient, pytree.tree_map(torch.zeros_like, params))


@given(target=st.integers(0, 12), seed=st.integers(0, 20))
@settings(max_examples=10)
def test_a_target_at_padding_is_not_predicted(make_problem, target, seed):
    """Whatever a loader leaves there: the segment number alone says what is padding."""
    problem = make_problem(compute_dtype="float64", batch_options={"seed": seed})
    batch = problem[3]
    stray = {**batch, "targets": batch["targets"].masked_fill(batch["segment_ids"] == 0, target)}
    assert not torch.equal(stray["targets"], batch["targets"])
    assert count_totals(stray) == count_totals(batch)
    for kernels in ("fused", "reference"):
        chex.assert_trees_all_equal(run((*problem[:3], stray), kernels), run(problem, kernels))


def test_gradcheck_of_a_two_layer_model(make_problem):
    config, params, balance, batch = make_problem(
        compute_dtype="float64", batch_options={"seq": 5}, num_shared_experts=1, scoring_func="sigmoid"
    )
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    for kernels in ("fused", "reference"):

        def loss(*leaves, kernels=kernels):
            return loss_fn(pytree.tree_unflatten(leaves, spec), balance, batch, config, kernels=kernels)[0]

        # fast_mode compares one random projection of each Jacobian
        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
        if kernels == "reference":
            assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


def split(batch, sizes):
    parts = {key: value.split(sizes) for key, value in batch.items()}
    return [{key: parts[key][index] for key in parts} for index in range(len(sizes))]


@given(data=st.data(), scoring=st.sampled_from(["softmax", "sigmoid"]))
@settings(max_examples=15)
@example(data=None, scoring="softmax")
def test_parts_with_the_totals_of_the_whole_add_up_to_it(make_problem, data, scoring):
    """No mean of means, and no balance loss that depends on how a batch is cut (Megatron PR 3769)."""
    problem = make_problem(compute_dtype="float64", scoring_func=scoring, batch_options={"rows": 4})
    config, params, balance, batch = problem
    cuts = sorted(data.draw(st.sets(st.integers(1, 3)))) if data else [1, 2, 3]
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, 4], strict=True)]
    # rows with very different numbers of targets
    batch["targets"][1, 1:] = IGNORE_INDEX
    batch["targets"][2] = IGNORE_INDEX
    totals = count_totals(batch)
    parts = [run((config, params, balance, part), totals=totals) for part in split(batch, sizes)]
    added = pytree.tree_map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
    chex.assert_trees_all_close(added, run(problem), **EXACT)


def test_mean_of_means_is_not_taken_by_the_model(make_problem):
    """torchtitan PR 4167: one row predicts 1 token, the other 9, of very different losses."""
    config, params, balance, _ = make_problem(compute_dtype="float64", max_position_embeddings=16)
    batch = {"tokens": torch.arange(18).view(2, 9) % 13, "targets": torch.arange(5, 23).view(2, 9) % 13}
    batch["targets"][0, 1:] = IGNORE_INDEX
    first, second = (loss_fn(params, balance, part, config)[1].loss for part in split(batch, [1, 1]))
    whole = loss_fn(params, balance, batch, config)[1].loss
    torch.testing.assert_close(whole, (first * 1 + second * 9) / 10, **EXACT)
    assert abs(float(whole - (first + second) / 2)) > 0.01


def test_the_same_batch_twice_has_the_same_loss_and_gradient(make_problem):
    """Megatron PR 3769."""
    config, params, balance, batch = make_problem(compute_dtype="float64")
    twice = {key: torch.cat([value, value]) for key, value in batch.items()}
    once, both = run((config, params, balance, batch)), run((config, params, balance, twice))
    chex.assert_trees_all_close(once[2], both[2], **EXACT)
    chex.assert_trees_all_close(once[0], both[0], **EXACT)
    assert torch.equal(2 * once[1].counts, both[1].counts)


def test_the_order_of_rows_does_not_matter(make_problem):
    config, params, balance, batch = make_problem(compute_dtype="float64", batch_options={"rows": 3})
    backwards = {key: value.flip(0) for key, value in batch.items()}
    chex.assert_trees_all_close(
        run((config, params, balance, batch)), run((config, params, balance, backwards)), **EXACT
    )


def test_totals_are_what_divides(make_problem):
    problem = make_problem(compute_dtype="float64")
    totals = count_totals(problem[3])
    assert (int(totals.targets), int(totals.tokens)) == (14, 15)  # 16, one ignored, one padding
    doubled = Totals(2 * totals.targets, 2 * totals.tokens)
    loss, _, gradient = run(problem)
    half, _, half_gradient = run(problem, totals=doubled)
    chex.assert_trees_all_close((loss, gradient), (2 * half, pytree.tree_map(lambda g: 2 * g, half_gradient)), **EXACT)
    del problem[3]["segment_ids"]
    assert bool(valid_tokens(problem[3]).all())


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_bf16_keeps_fp32_logits_loss_metrics_and_gradients(make_problem, kernels):
    half = make_problem(compute_dtype="bfloat16", hidden_size=16, moe_intermediate_size=8)
    full = make_problem(hidden_size=16, moe_intermediate_size=8)
    assert logits(half[1], half[2], half[3], half[0], kernels).dtype == torch.float32
    loss, metrics, gradient = run(half, kernels)
    assert {loss.dtype, metrics.loss.dtype, metrics.aux_loss.dtype, metrics.z_loss.dtype} == {torch.float32}
    assert {leaf.dtype for leaf in pytree.tree_leaves(gradient)} == {torch.float32}
    exact = run(full, kernels)
    assert abs(float(loss / exact[0]) - 1) < 0.03  # 8 bits, and a token or two may choose another expert
    for ours, reference in zip(pytree.tree_leaves(gradient), pytree.tree_leaves(exact[2]), strict=True):
        assert float(F.cosine_similarity(ours.flatten(), reference.flatten(), dim=0)) > 0.9


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_tokens_times_vocabulary_never_exists_in_a_training_step(make_problem):
    problem = make_problem(vocab_size=300, loss_chunk_size=8, batch_options={"rows": 8})
    config, params, balance, batch = problem
    with Largest() as fused:
        value_and_grad(lambda p: loss_fn(p, balance, batch, config), params)
    with Largest() as reference:
        value_and_grad(lambda p: loss_fn(p, balance, batch, config, kernels="reference"), params)
    assert reference.elements == 64 * 300
    assert fused.elements <= max(8 * 300, 300 * config.hidden_size, 64 * 5 * config.hidden_size)


def snapshot(tree):
    return [(leaf._version, leaf.clone()) for leaf in pytree.tree_leaves(tree)]


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_inputs_are_never_changed_and_repeats_are_bit_equal(make_problem, kernels, compute_dtype):
    problem = make_problem(compute_dtype=compute_dtype, num_shared_experts=1, hidden_size=16, moe_intermediate_size=8)
    config, *inputs = problem
    before = snapshot(inputs)

    def everything():
        params, balance, batch = inputs
        return (
            loss_fn(params, balance, batch, config, kernels=kernels),
            value_and_grad(lambda p: loss_fn(p, balance, batch, config, kernels=kernels), params),
            run(problem, kernels),
        )

    first, second = everything(), everything()
    for (version, values), leaf in zip(before, pytree.tree_leaves(inputs), strict=True):
        assert leaf._version == version
        assert torch.equal(leaf, values)
    for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        assert torch.equal(a, b)
    storages = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(inputs)}
    results = pytree.tree_leaves(first)
    assert not storages & {leaf.untyped_storage().data_ptr() for leaf in results if leaf.numel()}


def test_bit_equal_inputs_give_bit_equal_outputs_wherever_they_lie(make_problem):
    """Copies lie at other addresses."""
    problem = make_problem()
    copied = copy.deepcopy(problem)
    for a, b in zip(pytree.tree_leaves(run(problem)), pytree.tree_leaves(run(copied)), strict=True):
        assert torch.equal(a, b)


def test_a_fresh_model_predicts_uniformly(make_config, make_batch):
    config = make_config(initializer_range=1e-3)
    batch = make_batch(config)
    _, metrics = loss_fn(init(config, 0), init_balance(config), batch, config)
    assert float(metrics.loss) == pytest.approx(math.log(13), rel=1e-3)


BAD_BATCHES = {
    "unknown keys": (lambda b: {**b, "labels": b["targets"]}, r"unknown keys \['labels'\]"),
    "missing keys": (lambda b: {"tokens": b["tokens"]}, r"missing keys \['targets'\]"),
    "one axis": (lambda b: {k: v[0] for k, v in b.items()}, r"shape \(8,\)"),
    "other shape": (lambda b: {**b, "targets": b["targets"][:, 1:]}, r"'targets'.*\(2, 7\).*\(2, 8\)"),
    "float": (lambda b: {**b, "segment_ids": b["segment_ids"].float()}, r"'segment_ids'.*float32"),
    "bool": (lambda b: {**b, "segment_ids": b["segment_ids"] > 0}, r"'segment_ids'.*bool"),
    "int16": (lambda b: {**b, "targets": b["targets"].short()}, r"'targets'.*int16"),
    "uint8": (lambda b: {**b, "tokens": b["tokens"].byte()}, r"'tokens'.*uint8"),
    "too long": (lambda b: {k: v.repeat(1, 9) for k, v in b.items()}, r"72 .*max_position_embeddings = 64"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_raises_and_names_what_is_wrong(make_problem, name):
    config, params, balance, batch = make_problem()
    change, message = BAD_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        loss_fn(params, balance, change(batch), config)


def test_int32_batches_are_batches(make_problem):
    config, params, balance, batch = make_problem()
    narrow = {key: value.int() for key, value in batch.items()}
    for kernels in ("fused", "reference"):
        chex.assert_trees_all_equal(
            loss_fn(params, balance, batch, config, kernels=kernels),
            loss_fn(params, balance, narrow, config, kernels=kernels),
        )


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (2, 4), (2,), (5,)])
def test_a_balance_of_another_shape_raises(make_problem, shape):
    """Too many rows would go unread, and one number per layer would be added to every expert."""
    config, params, _, batch = make_problem()
    with pytest.raises(ValueError, match=rf"balance.*\({shape[0]},.*\(2, 5\)"):
        loss_fn(params, torch.zeros(shape), batch, config)


def test_an_empty_batch_is_a_zero_loss(make_problem):
    """A rank may be left without a row."""
    config, params, balance, batch = make_problem()
    empty = {key: value[:0] for key, value in batch.items()}
    for kernels in ("fused", "reference"):
        loss, metrics, gradient = run((config, params, balance, empty), kernels)
        assert float(loss) == 0.0
        assert int(metrics.counts.sum()) == 0
        chex.assert_trees_all_equal(gradient, pytree.tree_map(torch.zeros_like, params))
