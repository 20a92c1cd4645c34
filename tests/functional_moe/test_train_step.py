"""The training step: what it adds up, what it leaves alone, and how it composes."""

import dataclasses

import chex
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from functional_moe import memory, optim
from functional_moe.chain import loss_fn, make_chain
from functional_moe.config import MoEConfig
from functional_moe.model import Batch
from functional_moe.optimizers import OptimizerSettings, make_optimizer, make_schedule
from functional_moe.parameters import init, labels, matrix_axes
from functional_moe.train_step import TrainState, init_state, make_train_step

# Sizes that divide nothing, dense and routed layers, every optional part.
ODD = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    intermediate_size=9,
    first_k_dense_replace=1,
    num_shared_experts=1,
    shared_expert_gate=True,
    scoring_func="sigmoid",
    use_qk_norm=True,
    router_aux_loss_coef=0.05,
    router_z_loss_coef=0.01,
    balance_update_rate=0.3,
    initializer_range=0.3,
)


def make_batch(seed: int, rows: int = 4, seq: int = 9, vocab: int = 23) -> Batch:
    """Rows of different lengths, packed documents, ignored targets and padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, seq), generator=generator)
    targets = torch.randint(vocab, (rows, seq), generator=generator)
    segment_ids = torch.ones(rows, seq, dtype=torch.int64)
    for row in range(rows):
        segment_ids[row, 3 + row % 3 :] = 2
        padding = 1 + (row * 2) % 5
        segment_ids[row, seq - padding :] = 0
        targets[row, seq - padding :] = -100
    targets[0] = -100
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids}


def make_state(config: MoEConfig = ODD, optimizer: optim.GradientTransformation | None = None) -> TrainState:
    return init_state(init(config, seed=1), optimizer or sgd(), config)


def sgd() -> optim.GradientTransformation:
    return optim.sgd(0.1)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_accumulation_changes_nothing_but_rounding(accumulate: int, seed: int) -> None:
    batch = make_batch(seed)
    whole, whole_metrics = make_train_step(ODD, sgd())(make_state(), batch)
    parts, parts_metrics = make_train_step(ODD, sgd(), accumulate=accumulate)(make_state(), batch)
    # fp32 sums in another order
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.balance, whole.balance, rtol=0, atol=0)
    torch.testing.assert_close(parts_metrics.loss, whole_metrics.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts_metrics.aux_loss, whole_metrics.aux_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts_metrics.load_max_over_mean, whole_metrics.load_max_over_mean, rtol=0, atol=0)
    assert parts_metrics.tokens == (batch["segment_ids"] != 0).sum()


def test_the_step_is_the_mean_over_predicted_tokens_not_a_mean_of_means() -> None:
    batch = make_batch(3)
    _, metrics = make_train_step(ODD, sgd(), accumulate=4)(make_state(), batch)
    whole, _ = loss_fn(make_state().params, make_state().balance, batch, ODD)
    rows = [
        loss_fn(make_state().params, make_state().balance, {k: v[i : i + 1] for k, v in batch.items()}, ODD)[1].loss
        for i in range(4)
    ]
    predicted = (batch["targets"] != -100).sum(1)
    expected = (torch.stack(rows) * predicted).sum() / predicted.sum()
    torch.testing.assert_close(metrics.loss, expected, rtol=1e-5, atol=0)
    assert not torch.isclose(metrics.loss, torch.stack(rows).mean(), rtol=1e-3)
    assert torch.isfinite(whole)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_balance_moves_once_per_step(accumulate: int) -> None:
    # torchtitan 1304, 1593: per microbatch it would move up to four times as far
    state, _ = make_train_step(ODD, sgd(), accumulate=accumulate)(make_state(), make_batch(0))
    assert set(state.balance.abs().flatten().tolist()) <= {0.0, torch.tensor(0.3).item()}
    assert state.balance.abs().sum() > 0


RECIPES = {
    "recompute": (memory.Recipe(record=False), memory.Recipe(record=False, input="recompute")),
    "offload": (
        memory.Recipe(record=False, input="offload", residuals={"core": "offload"}),
        memory.Recipe(record=False, input="offload", residuals={"decision": "offload"}),
    ),
    "both": (
        memory.Recipe(record=False, input="offload", residuals={"core": "recompute"}),
        memory.Recipe(record=False, input="recompute", residuals={"decision": "offload"}),
    ),
}
"""Of the two halves of a layer."""


class Watched(memory.AdversarialCopies):
    """Whose memory is copied, and how much."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sources: set[int] = set()

    def start(self, source: torch.Tensor, destination: torch.Tensor) -> memory.Copy:
        self.sources.add(source.untyped_storage().data_ptr())
        return super().start(source, destination)


@pytest.mark.parametrize("zero_router", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recomputed_or_offloaded_gives_the_same_bits(recipe: str, zero_router: bool) -> None:
    """pytorch 122729 ff.; torchtune 1867, Megatron 7398, torchtitan PR 2581; torchtitan 1117, 3336 where scores tie.

    In fp32, for accumulation 4 too, and for experts in parts, with copies that come as late as they may into memory
    that is used again.
    """
    chain = make_chain(ODD)
    halves = dict(zip(("attention", "experts"), RECIPES[recipe], strict=True))
    halves["dense"] = halves["experts"]._replace(residuals={})
    recipes = {segment.name: halves[segment.kind] for segment in chain.segments[1:-1]}
    state, batch = make_state(), make_batch(0)
    if zero_router:
        for layer in state.params["layers"][1:]:
            layer["router"].zero_()
    held = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(state)}
    for accumulate, expert_parts in ((1, 1), (4, 1), (1, 3)):
        schedule = memory.make_schedule(chain, recipes, microbatches=accumulate)
        parts = {"accumulate": accumulate, "expert_parts": expert_parts}
        for seed in range(3):
            copies = Watched(seed)
            step = make_train_step(ODD, sgd(), schedule=schedule, slabs={memory.HOST: 1 << 16}, copies=copies, **parts)
            plain = make_train_step(ODD, sgd(), **parts)(state, batch)
            for leaf, expected in zip(pytree.tree_leaves(step(state, batch)), pytree.tree_leaves(plain), strict=True):
                assert torch.equal(leaf, expected)
            # Parameters are where they are: only boundaries and residuals go.
            assert not copies.sources & held
            assert bool(copies.sources) == (recipe != "recompute")


def test_evaluation_changes_nothing() -> None:
    """torchtitan 1304: the counts of an evaluation were added to those of the next step."""
    optimizer = make_optimizer(ODD, OptimizerSettings(), steps=10)
    step = make_train_step(ODD, optimizer, accumulate=2)
    state, _ = step(make_state(optimizer=optimizer), make_batch(0))
    undisturbed = step(state, make_batch(1))
    copies = pytree.tree_map(torch.clone, state)
    first = loss_fn(state.params, state.balance, make_batch(2), ODD)
    chex.assert_trees_all_equal(first, loss_fn(state.params, state.balance, make_batch(2), ODD))
    assert int(first[1].counts.sum()) > 0
    chex.assert_trees_all_equal(state, copies)
    chex.assert_trees_all_equal(step(state, make_batch(1)), undisturbed)


def test_a_step_leaves_its_inputs_alone_and_repeats_bit_for_bit() -> None:
    optimizer = make_optimizer(ODD, OptimizerSettings(), steps=10)
    state, batch = make_state(optimizer=optimizer), make_batch(0)
    step = make_train_step(ODD, optimizer, accumulate=2)
    state, _ = step(state, batch)
    copies = pytree.tree_map(torch.clone, (state, batch))
    versions = [leaf._version for leaf in pytree.tree_leaves((state, batch))]
    first, second = step(state, batch), step(state, batch)
    chex.assert_trees_all_equal((state, batch), copies)
    assert [leaf._version for leaf in pytree.tree_leaves((state, batch))] == versions
    chex.assert_trees_all_equal(first, second)
    assert not torch.equal(first[0].params["embedding"], state.params["embedding"])


def test_the_new_state_is_congruent_with_the_old_one() -> None:
    optimizer = make_optimizer(ODD, OptimizerSettings(), steps=10)
    state = make_state(optimizer=optimizer)
    new, _ = make_train_step(ODD, optimizer)(state, make_batch(0))
    assert pytree.tree_structure(new) == pytree.tree_structure(state)
    # lists of leaves: to jax, and so to chex, the optimizer's masked nodes are leaves
    chex.assert_trees_all_equal_shapes_and_dtypes(pytree.tree_leaves(new), pytree.tree_leaves(state))


@pytest.mark.parametrize("where", ["final_norm", "embedding"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_refused(where: str, value: float) -> None:
    optimizer = make_optimizer(ODD, OptimizerSettings(), steps=10)
    state = make_state(optimizer=optimizer)
    spoiled = {**state.params, where: torch.full_like(state.params[where], value)}
    state = state._replace(params=spoiled)
    new, metrics = make_train_step(ODD, optimizer)(state, make_batch(0))
    assert not metrics.finite
    assert new.step == 1  # the batch is consumed, so the next one is another
    chex.assert_trees_all_equal(new.opt_state, state.opt_state)
    chex.assert_trees_all_equal(new.balance, state.balance)
    for leaf, old in zip(pytree.tree_leaves(new.params), pytree.tree_leaves(state.params), strict=True):
        torch.testing.assert_close(leaf, old, rtol=0, atol=0, equal_nan=True)


def test_training_learns_a_repeated_batch() -> None:
    optimizer = make_optimizer(ODD, OptimizerSettings(), steps=40)
    state, batch = make_state(optimizer=optimizer), make_batch(0)
    step = make_train_step(ODD, optimizer)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] / 3


def test_learning_rates_are_reported_by_label() -> None:
    optimizer = make_optimizer(ODD, OptimizerSettings(muon_learning_rate=0.5, adamw_learning_rate=0.25), steps=100)
    state = make_state(optimizer=optimizer)
    step = make_train_step(ODD, optimizer)
    for _ in range(8):
        state, metrics = step(state, make_batch(0))
    rates = {name: float(rate) for name, rate in metrics.learning_rates.items()}
    assert rates == {"embedding": 0.25, "matrix": 0.5, "router": 0.25, "vector": 0.25}


def _swept(
    rate: torch.Tensor,
    start: TrainState,
    batch: Batch,
    optimizer: optim.GradientTransformation,
    config: MoEConfig = ODD,
) -> TrainState:
    state = start._replace(opt_state=optim.set_learning_rates(start.opt_state, {"learning_rate": rate}))
    step = make_train_step(config, optimizer, kernels="reference", accumulate=2)
    for _ in range(2):
        state, _ = step(state, batch)
    return state


def test_a_sweep_over_learning_rates_is_vmap_of_the_whole_step() -> None:
    batch, optimizer = make_batch(0), optim.adamw(0.1, weight_decay=0.1, foreach=False)
    start, rates = make_state(optimizer=optimizer), torch.tensor([0.0, 0.03, 0.3])
    swept = torch.func.vmap(lambda rate: _swept(rate, start, batch, optimizer))(rates)
    for index, rate in enumerate(rates):
        alone = _swept(rate, start, batch, optimizer)
        # batched products sum in another order; Adam divides by small numbers
        chex.assert_trees_all_close(
            pytree.tree_map(lambda leaf, index=index: leaf[index], swept.params), alone.params, rtol=1e-4, atol=1e-5
        )


def test_the_step_can_be_differentiated_by_its_learning_rate() -> None:
    # fp64, so that the difference can be taken over a step too short to change a routing decision
    config = dataclasses.replace(ODD, compute_dtype="float64")
    batch, optimizer = make_batch(0), optim.sgd(0.1, foreach=False)
    params = pytree.tree_map(torch.Tensor.double, init(config, seed=1))
    start = init_state(params, optimizer, config)

    def after(rate: torch.Tensor) -> torch.Tensor:
        state = _swept(rate, start, batch, optimizer, config)
        return loss_fn(state.params, state.balance, batch, config, kernels="reference")[0]

    rate, step = torch.tensor(0.02), 2.0**-20  # rates are fp32 and both neighbours have to be exact
    difference = (after(rate + step) - after(rate - step)) / (2 * step)
    torch.testing.assert_close(torch.func.grad(after)(rate).double(), difference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rate_given_to_an_optimizer_can_be_differentiated_by(name: str) -> None:
    batch = make_batch(0)
    config = dataclasses.replace(ODD, compute_dtype="float64")
    params = pytree.tree_map(torch.Tensor.double, init(config, seed=1))

    def after(rate: torch.Tensor) -> torch.Tensor:
        adamw = optim.adamw(rate if name == "adamw" else 1e-3, foreach=False)
        muon = optim.muon(rate if name == "muon" else 1e-3, matrix_axes(config), foreach=False)
        by_label = {"matrix": muon, "embedding": adamw, "router": adamw, "vector": adamw}
        optimizer = optim.chain(
            optim.clip_by_global_norm(1.0, foreach=False), optim.partition(by_label, labels(config))
        )
        step = make_train_step(config, optimizer, kernels="reference")
        state, _ = step(init_state(params, optimizer, config), batch)
        return loss_fn(state.params, state.balance, batch, config, kernels="reference")[0]

    rate, step = torch.tensor(0.01), 2.0**-16
    difference = (after(rate + step) - after(rate - step)) / (2 * step)
    assert abs(float(difference)) > 0.1
    # updates are fp32, so the difference is known to a few thousandths
    torch.testing.assert_close(torch.func.grad(after)(rate).double(), difference, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_of_the_default_optimizer_has_a_finite_gradient(name: str) -> None:
    """Rows of the embedding that no token looks up never had a gradient: AdamW's root is taken at 0 there."""
    batch, optimizer = make_batch(0), make_optimizer(ODD, OptimizerSettings(name=name), steps=10, foreach=False)
    start = make_state(optimizer=optimizer)
    step = make_train_step(ODD, optimizer, kernels="reference")

    def after(params: object) -> torch.Tensor:
        state, _ = step(start._replace(params=params), batch)  # type: ignore[arg-type]
        return loss_fn(state.params, state.balance, batch, ODD, kernels="reference")[0]

    gradient = torch.func.grad(after)(start.params)
    assert all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(gradient))
    assert any(bool(leaf.any()) for leaf in pytree.tree_leaves(gradient))


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_every_step_moves_and_the_rates_peak_once_risen(warmup: float, schedule: str) -> None:
    settings = OptimizerSettings(schedule=schedule, warmup_fraction=warmup, muon_learning_rate=0.5)
    rates = [float(make_schedule(settings, 0.5, 20)(torch.tensor(count))) for count in range(21)]
    assert min(rates[:20]) > 0
    assert max(rates) == rates[round(20 * warmup)] == 0.5
    assert rates[20] == pytest.approx(0, abs=1e-7)


def test_the_default_optimizer_can_be_swept_too() -> None:
    batch, optimizer = make_batch(0), make_optimizer(ODD, OptimizerSettings(), steps=10, foreach=False)
    start = make_state(optimizer=optimizer)
    step = make_train_step(ODD, optimizer, kernels="reference")
    scales = torch.tensor([1.0, 1.1])

    def scaled(scale: torch.Tensor) -> TrainState:
        state = start._replace(params=pytree.tree_map(lambda leaf: leaf * scale, start.params))
        return step(state, batch)[0]

    swept = torch.func.vmap(scaled)(scales)
    for index, scale in enumerate(scales):
        chex.assert_trees_all_close(
            pytree.tree_map(lambda leaf, index=index: leaf[index], swept.params),
            scaled(scale).params,
            rtol=1e-3,  # Newton-Schulz in fp32, batched in another way
            atol=1e-4,
        )


def test_the_fused_step_refuses_to_be_transformed() -> None:
    batch, optimizer = make_batch(0), optim.sgd(0.1, foreach=False)
    step = make_train_step(ODD, optimizer)
    state = make_state(optimizer=optimizer)
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        torch.func.grad(lambda params: step(state._replace(params=params), batch)[0].params["final_norm"].sum())(
            state.params
        )
    with pytest.raises(NotImplementedError, match="kernels='reference'"):
        torch.func.vmap(lambda t: step(state, {**batch, "tokens": t}))(batch["tokens"].expand(2, -1, -1))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="accumulate = 0"):
        make_train_step(ODD, sgd(), accumulate=0)
    with pytest.raises(ValueError, match="kernels = 'fast'"):
        make_train_step(ODD, sgd(), kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accumulate = 3 does not divide the 4 rows"):
        make_train_step(ODD, sgd(), accumulate=3)(make_state(), make_batch(0))
    with pytest.raises(ValueError, match="unknown keys"):
        make_train_step(ODD, sgd())(make_state(), {**make_batch(0), "labels": torch.zeros(4, 9, dtype=torch.int64)})
    with pytest.raises(ValueError, match="missing keys"):
        make_train_step(ODD, sgd())(make_state(), {"tokens": make_batch(0)["tokens"]})
    with pytest.raises(ValueError, match=r"batch\['targets'\] has shape"):
        make_train_step(ODD, sgd())(make_state(), {**make_batch(0), "targets": torch.zeros(4, 8, dtype=torch.int64)})
