"""A step that updates layer by layer: bit-equal with the plain one, from any tier, over the old state or beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import memory, optim
from functional_moe.chain import make_chain
from functional_moe.config import MoEConfig
from functional_moe.memory import HBM, HOST
from functional_moe.optimizers import OptimizerSettings, make_optimizer
from functional_moe.parameters import init
from functional_moe.train_step import StepMetrics, TrainState, init_state, make_train_step
from functional_moe.updates import at_home
from tests.functional_moe.test_train_step import ODD, make_batch

# Sizes whose matrices begin where vectors do: products of them do not depend on what lies before.
EVEN = dataclasses.replace(ODD, hidden_size=16, head_dim=16, moe_intermediate_size=16, intermediate_size=32)
TIED = dataclasses.replace(EVEN, tie_word_embeddings=True)
OPTIMIZERS: dict[str, Callable[[MoEConfig], optim.GradientTransformation]] = {
    "muon": lambda config: make_optimizer(config, OptimizerSettings(), steps=10),
    "adamw": lambda config: make_optimizer(config, OptimizerSettings(name="adamw", clip_norm=0.1), steps=10),
    "sgd": lambda config: optim.sgd(0.1),
    "momentum": lambda config: optim.sgd(0.1, momentum=0.9),
}


def start(config: MoEConfig, optimizer: optim.GradientTransformation) -> TrainState:
    return init_state(init(config, 0), optimizer, config)


def copied(state: TrainState) -> TrainState:
    clone: TrainState = pytree.tree_map(torch.clone, state)
    return clone


def assert_same(found: Any, expected: Any) -> None:
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(ours, theirs)


def steps(step: Any, state: TrainState, count: int, accumulate: int = 1) -> tuple[TrainState, list[StepMetrics]]:
    metrics = []
    for number in range(count):
        state, one = step(state, make_batch(number))
        metrics.append(one)
    return state, metrics


@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_a_step_layer_by_layer_is_the_plain_one_bit_for_bit(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    config = data.draw(st.sampled_from([EVEN, TIED] if name == "muon" else [ODD, EVEN, TIED]))
    optimizer = OPTIMIZERS[name](config)
    accumulate, donate = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    chain = make_chain(config)
    homes = {layer: data.draw(st.sampled_from([HBM, HOST, "nvme"])) for layer in chain.layers}
    updates = memory.Updates(homes, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
    schedule = memory.make_schedule(chain, microbatches=accumulate, updates=updates)
    plain = make_train_step(config, optimizer, accumulate=accumulate)
    copies = memory.AdversarialCopies(data.draw(st.integers(0, 99)))
    layered = make_train_step(config, optimizer, schedule=schedule, accumulate=accumulate, copies=copies, donate=donate)
    state = start(config, optimizer)
    first = copied(state)
    if data.draw(st.booleans()):
        first = first._replace(opt_state=at_home(first.params, first.opt_state, optimizer, config, schedule))
    kept = copied(first)
    expected, expected_metrics = steps(plain, state, 3)
    found, metrics = steps(layered, first, 3)
    assert_same(found, expected)
    assert_same(metrics, expected_metrics)
    if not donate:
        assert_same(first, kept)


@pytest.mark.parametrize("home", [HBM, HOST])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(home: str, donate: bool, name: str) -> None:
    optimizer = OPTIMIZERS[name](EVEN)
    chain = make_chain(EVEN)
    schedule = memory.make_schedule(chain, updates=memory.Updates(dict.fromkeys(chain.layers, home)))
    copies = memory.AdversarialCopies(0)
    step = make_train_step(EVEN, optimizer, schedule=schedule, donate=donate, copies=copies)
    state, _ = step(start(EVEN, optimizer), make_batch(0))
    bad = copied(state)
    bad.params["final_norm"][0] = torch.inf
    kept = copied(bad)
    after, metrics = step(bad, make_batch(1))
    assert not metrics.finite
    assert int(after.step) == int(kept.step) + 1
    assert_same(after._replace(step=kept.step), kept)
    # And the next one goes on from there.
    after.params["final_norm"][0] = 1.0
    kept.params["final_norm"][0] = 1.0
    found, _ = step(after, make_batch(2))
    expected, _ = make_train_step(EVEN, optimizer)(kept._replace(step=kept.step + 1), make_batch(2))
    assert_same(found, expected)


def test_odd_matrices_differ_by_rounding_alone() -> None:
    optimizer = OPTIMIZERS["muon"](ODD)
    state = start(ODD, optimizer)
    expected, _ = steps(make_train_step(ODD, optimizer), state, 2)
    found, _ = steps(make_train_step(ODD, optimizer, donate=True), copied(state), 2)
    chex.assert_trees_all_close(pytree.tree_leaves(found), pytree.tree_leaves(expected), rtol=1e-4, atol=1e-6)


USES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda leaf: leaf + 1,
    "its shape": lambda leaf: leaf.shape,
    "printing": repr,
    "a copy": torch.clone,
    "reading": lambda leaf: leaf.tolist(),
    "numpy": lambda leaf: leaf.numpy(),
    "beside others": lambda leaf: torch.add(torch.zeros(1), leaf),
    "writing": lambda leaf: leaf.zero_(),
    "an index": lambda leaf: leaf[..., 0],
}


@pytest.mark.parametrize("use", sorted(USES))
def test_a_donated_state_is_not_used_again(use: str) -> None:
    optimizer = OPTIMIZERS["muon"](ODD)
    state = start(ODD, optimizer)
    step = make_train_step(ODD, optimizer, donate=True)
    new, _ = step(state, make_batch(0))
    for leaf in pytree.tree_leaves(state):
        with pytest.raises(RuntimeError, match=r"was donated to a train step \(donate=True\): use the state that the"):
            USES[use](leaf)
    with pytest.raises(RuntimeError, match="was donated to a train step"):
        step(state, make_batch(1))
    step(new, make_batch(1))


def test_what_fails_before_the_first_update_leaves_the_state_as_it_was() -> None:
    optimizer = OPTIMIZERS["muon"](ODD)
    state = start(ODD, optimizer)
    kept = copied(state)
    step = make_train_step(ODD, optimizer, donate=True)
    with pytest.raises(ValueError, match="batch"):
        step(state, {"tokens": torch.zeros(4, 9)})
    assert_same(state, kept)


def test_a_step_that_fails_while_it_updates_has_taken_the_state() -> None:
    calls = []

    def update(updates: Any, state: Any, params: Any = None, /) -> Any:
        calls.append(updates)
        if len(calls) == 2:
            raise ZeroDivisionError
        return updates, state

    optimizer = optim.GradientTransformation(lambda params: (), update)
    state = start(ODD, optimizer)
    with pytest.raises(ZeroDivisionError):
        make_train_step(ODD, optimizer, donate=True)(state, make_batch(0))
    with pytest.raises(RuntimeError, match="was donated to a train step"):
        state.params["embedding"].sum()


def test_donation_without_updates_is_refused() -> None:
    optimizer = OPTIMIZERS["sgd"](ODD)
    schedule = memory.make_schedule(make_chain(ODD))
    with pytest.raises(ValueError, match=r"donate = True: the schedule has no updates; make it with updates="):
        make_train_step(ODD, optimizer, schedule=schedule, donate=True)
    with pytest.raises(ValueError, match="no gather_dtype and no donation"):
        make_train_step(ODD, optimizer, kernels="reference", donate=True)


def test_an_optimizer_that_does_not_work_layer_by_layer_is_refused() -> None:
    clip_last = optim.chain(optim.sgd(0.1), optim.clip_by_global_norm(1.0))
    step = make_train_step(ODD, clip_last, donate=True)
    with pytest.raises(ValueError, match="can only clip the whole gradient, before anything changes it"):
        step(start(ODD, clip_last), make_batch(0))
    some = optim.GradientTransformation(
        lambda params: {"sum": torch.zeros(())} if "experts" in str(params) else {}, optim.sgd(0.1).update
    )
    with pytest.raises(ValueError, match="the state's leaf 'sum' is of the buckets"):
        make_train_step(ODD, some, donate=True)


def test_set_learning_rates_reaches_every_layer() -> None:
    optimizer = optim.sgd(0.1)
    state = start(ODD, optimizer)
    state = state._replace(opt_state=optim.set_learning_rates(state.opt_state, {"learning_rate": 0.25}))
    expected, _ = make_train_step(ODD, optimizer)(state, make_batch(0))
    # A copy, because a constant rate is the same tensor in both states.
    found, metrics = make_train_step(ODD, optimizer, donate=True)(copied(state), make_batch(0))
    assert_same(found, expected)
    assert metrics.learning_rates == {"learning_rate": torch.tensor(0.25)}


def wide() -> MoEConfig:
    return dataclasses.replace(ODD, hidden_size=64, moe_intermediate_size=64, intermediate_size=64, num_hidden_layers=6)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_donated_a_step_needs_no_second_state(name: str) -> None:
    """Beside the old ones, new parameters and states take more than the gradients that go with them."""
    config = wide()
    optimizer = OPTIMIZERS[name](config)
    updated = memory.make_schedule(make_chain(config), updates=memory.Updates())
    peaks = {}
    for donate in (True, False):
        step = make_train_step(config, optimizer, schedule=updated, donate=donate)
        with memory.LiveBytes() as counted:
            state = start(config, optimizer)
            held = counted.peak = counted.live
            step(state, make_batch(0, rows=1, seq=2))
            peaks[donate] = counted.peak
    params = sum(leaf.nbytes for leaf in pytree.tree_leaves(state.params) if not donate)
    # But for those of one layer of six.
    assert peaks[False] - peaks[True] > 0.65 * (held - params)


def test_states_come_to_lie_in_one_piece_of_their_tier_and_stay_there() -> None:
    optimizer = OPTIMIZERS["adamw"](ODD)
    chain = make_chain(ODD)
    schedule = memory.make_schedule(chain, updates=memory.Updates({"layers.0": HOST, "head": HOST}))
    state = start(ODD, optimizer)
    placed = at_home(state.params, state.opt_state, optimizer, ODD, schedule)
    assert_same(placed, state.opt_state)
    step = make_train_step(ODD, optimizer, schedule=schedule, donate=True)

    def slabs(opt_state: Any) -> set[int]:
        leaves = pytree.tree_leaves(opt_state)
        found = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.dim()]
        return {pointer for pointer in found if found.count(pointer) > 1}

    assert len(slabs(placed)) == 1
    before = slabs(placed)
    after, _ = step(state._replace(opt_state=placed), make_batch(0))
    assert slabs(after.opt_state) == before
    # Without donation new memory is taken, in one piece too.
    keep = make_train_step(ODD, optimizer, schedule=schedule)
    again, _ = keep(after, make_batch(1))
    assert len(slabs(again.opt_state)) == 1
    assert slabs(again.opt_state) != before
    everything_here = memory.make_schedule(chain, updates=memory.Updates())
    assert at_home(state.params, after.opt_state, optimizer, ODD, everything_here) is after.opt_state
