"""A step within budgets: the same values bit for bit, in the memory that was predicted, or an error that says why."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import memory, optim
from functional_moe.budget import StepPlan, plan_step
from functional_moe.config import MoEConfig, preset
from functional_moe.memory import HBM, HOST
from functional_moe.optimizers import OptimizerSettings, make_optimizer
from functional_moe.parameters import init
from functional_moe.train_step import StepMetrics, TrainState, init_state, make_train_step
from functional_moe.updates import at_home

OptimizerName: TypeAlias = Literal["muon", "adamw"]

DEEP = dataclasses.replace(
    preset("tiny"),
    num_hidden_layers=12,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    loss_chunk_size=64,
    max_position_embeddings=512,
)
MIDDLE = dataclasses.replace(DEEP, num_hidden_layers=4)
SHALLOW = dataclasses.replace(DEEP, num_hidden_layers=2)


class Problem(NamedTuple):
    config: MoEConfig
    optimizer: optim.GradientTransformation
    state: TrainState
    batch: dict[str, Tensor]
    accumulate: int

    @property
    def stands(self) -> int:
        """Bytes that are there before a step."""
        leaves = pytree.tree_leaves((self.state.params, self.state.opt_state, self.batch, self.state.balance))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def planned(self, donate: bool = False, copies: memory.Copies | None = None, /, **budgets: int) -> StepPlan:
        return plan_step(
            self.config,
            self.optimizer,
            self.state,
            self.batch,
            budgets,
            accumulate=self.accumulate,
            donate=donate,
            copies=copies,
        )

    def smallest(self, donate: bool = False, /, **others: int) -> int:
        with pytest.raises(memory.PlanError) as refused:
            self.planned(donate, hbm=1, **others)
        smallest: int = 1 + refused.value.missing
        assert f"{smallest:,}" in str(refused.value)
        assert "parameters: " in str(refused.value)
        return smallest


class Stepped(NamedTuple):
    state: TrainState
    metrics: StepMetrics
    peak: int  # bytes, of all tiers


def make_problem(
    config: MoEConfig, rows: int, seq: int, accumulate: int = 1, optimizer: OptimizerName = "muon"
) -> Problem:
    made = make_optimizer(config, OptimizerSettings(name=optimizer), steps=10)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (rows, seq), generator=generator)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "segment_ids": torch.ones_like(tokens)}
    return Problem(config, made, init_state(init(config, 0), made, config), batch, accumulate)


def with_sgd(problem: Problem) -> Problem:
    optimizer = optim.sgd(0.1)
    return problem._replace(optimizer=optimizer, state=init_state(problem.state.params, optimizer, problem.config))


def stepped(problem: Problem, planned: StepPlan | None, donate: bool = False) -> Stepped:
    step = make_train_step(
        problem.config,
        problem.optimizer,
        schedule=None if planned is None else planned.plan.schedule,
        slabs=None if planned is None else planned.slabs,
        accumulate=problem.accumulate,
        donate=donate,
    )
    with memory.LiveBytes() as counted:
        # Made here, so that what is donated counts as long as it lives.
        state = pytree.tree_map(torch.clone, problem.state)
        if planned is not None:
            placed = at_home(state.params, state.opt_state, problem.optimizer, problem.config, planned.plan.schedule)
            state = state._replace(opt_state=placed)
            del placed
        held = counted.peak = counted.live
        state, metrics = step(state, problem.batch)
        peak: int = counted.peak
    return Stepped(state, metrics, problem.stands + peak - held)


def assert_same(found: Stepped, expected: Stepped) -> None:
    pairs = zip(pytree.tree_leaves(found[:2]), pytree.tree_leaves(expected[:2]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_tightest_budget_gives_the_same_step_in_a_third_of_the_memory() -> None:
    problem = make_problem(DEEP, rows=4, seq=512)
    plain, planned = stepped(problem, None), problem.planned(hbm=problem.smallest())
    found = stepped(problem, planned)
    assert_same(found, plain)
    assert found.peak == pytest.approx(planned.peak, rel=0.05)
    assert plain.peak > 3 * planned.peak
    assert plain.peak - problem.stands > 3 * (found.peak - problem.stands)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_peak_of_differentiation_is_as_predicted(accumulate: int) -> None:
    """With little to update, so that the schedule's peak is the step's."""
    problem = with_sgd(make_problem(MIDDLE, rows=4, seq=256, accumulate=accumulate))
    plain, smallest = stepped(problem, None), problem.smallest()
    for budget in (smallest, (smallest + plain.peak) // 2, 2 * plain.peak):
        planned = problem.planned(hbm=budget)
        found = stepped(problem, planned)
        assert_same(found, plain)
        assert planned.peak == planned.plan.timeline.reports[HBM].peak <= budget
        assert found.peak == pytest.approx(planned.peak, rel=0.05)


def test_a_host_tier_takes_what_does_not_fit_and_no_more_than_it_has() -> None:
    problem = with_sgd(make_problem(MIDDLE, rows=2, seq=512))
    alone, host = problem.smallest(), 4 << 20
    less = problem.smallest(host=host)
    assert less < alone
    planned = problem.planned(hbm=less, host=host)
    assert 0 < planned.slabs[HOST] <= host
    assert planned.states == {}
    found = stepped(problem, planned)
    assert_same(found, stepped(problem, None))
    # Nothing of the update is larger, so the peak has the slab in it.
    assert found.peak == pytest.approx(planned.peak + planned.slabs[HOST], rel=0.05)
    with pytest.raises(MemoryError, match="do not fit"):
        stepped(problem, planned._replace(slabs={HOST: planned.slabs[HOST] // 2}))


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("host", [None, 8 << 20])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_peak_of_a_step_that_is_mostly_its_update_is_as_predicted(
    name: OptimizerName, host: int | None, donate: bool
) -> None:
    problem = make_problem(MIDDLE, rows=1, seq=64, optimizer=name)
    tiers = {} if host is None else {HOST: host}
    budget = problem.smallest(donate, **tiers)
    planned = problem.planned(donate, hbm=budget, **tiers)
    found = stepped(problem, planned, donate)
    assert_same(found, stepped(problem, None))
    away = planned.states.get(HOST, 0)
    assert bool(away) == (host is not None)
    # The old state in the host is among what stood before; the slab, and a new state there, are made by the step.
    beside = planned.slabs.get(HOST, 0) + away * (1 if donate else 2)
    assert found.peak == pytest.approx(planned.peak + beside, rel=0.05)


def test_donated_and_streamed_a_state_leaves_room() -> None:
    problem = make_problem(MIDDLE, rows=1, seq=64, optimizer="adamw")
    beside, donated, streamed = problem.smallest(), problem.smallest(True), problem.smallest(True, host=8 << 20)
    params = sum(leaf.nbytes for leaf in pytree.tree_leaves(problem.state.params))
    # Old and new parameters and moments; old ones alone; and moments of a layer at a time.
    assert beside > 5 * params
    assert donated < beside - 1.5 * params
    assert streamed < donated - params


def test_a_host_tier_that_is_small_takes_the_states_of_some_layers() -> None:
    problem = make_problem(MIDDLE, rows=1, seq=64, optimizer="adamw")
    whole = problem.planned(True, hbm=problem.smallest(True, host=1 << 30), host=1 << 30).states[HOST]
    host = whole // 2
    planned = problem.planned(True, hbm=problem.smallest(True, host=host), host=host)
    homes = list(planned.plan.schedule.homes.values())
    assert 0 < homes.count(HOST) < len(homes)
    assert 0 < planned.states[HOST] <= planned.plan.timeline.reports[HOST].peak <= host


class Rounding(memory.HostCopies):
    """Memory that comes in powers of two, as pinned memory does."""

    def reserved(self, size: int) -> int:
        return 1 << (size - 1).bit_length() if size else 0


@pytest.mark.parametrize("donate", [True, False])
def test_what_memory_is_rounded_up_to_counts(donate: bool) -> None:
    problem, copies = make_problem(MIDDLE, rows=1, seq=64, optimizer="adamw"), Rounding()
    for host in (3 << 20, 9 << 20):
        with pytest.raises(memory.PlanError) as refused:
            problem.planned(donate, copies, hbm=1, host=host)
        planned = problem.planned(donate, copies, hbm=1 + refused.value.missing, host=host)
        states = copies.reserved(planned.states.get(HOST, 0)) * (1 if donate else 2)
        assert 0 < states + copies.reserved(planned.slabs.get(HOST, 0)) <= host


def test_an_optimizer_that_does_not_work_layer_by_layer_is_refused() -> None:
    problem = make_problem(SHALLOW, rows=1, seq=16)
    some = optim.GradientTransformation(
        lambda params: {"sum": torch.zeros(())} if "experts" in str(params) else {}, optim.sgd(0.1).update
    )
    state = init_state(problem.state.params, some, problem.config)
    with pytest.raises(ValueError, match="the state's leaf 'sum' is of the buckets"):
        problem._replace(optimizer=some, state=state).planned(hbm=1 << 30)


def test_a_budget_below_the_optimizer_s_need_says_so() -> None:
    problem = make_problem(SHALLOW, rows=1, seq=16)
    smallest = problem.smallest()
    with pytest.raises(
        memory.PlanError,
        match=r"reached at update layers\.1 by working memory of update layers\.1: .*, optimizer state: .*gradient",
    ):
        problem.planned(hbm=smallest - 1)
    planned = problem.planned(hbm=smallest)
    assert planned.peak == smallest
    assert stepped(problem, planned).peak == pytest.approx(smallest, rel=0.05)


def test_a_budget_below_the_schedule_s_need_says_what_fills_it() -> None:
    problem = with_sgd(make_problem(SHALLOW, rows=4, seq=256))
    smallest = problem.smallest()
    with pytest.raises(memory.PlanError, match=r"reached at (forward|backward) .*working memory of"):
        problem.planned(hbm=smallest - 1)
    assert problem.planned(hbm=smallest).peak == smallest
