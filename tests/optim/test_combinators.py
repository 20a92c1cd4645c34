"""chain, partition, masked, accumulate, apply_updates, and the rates in the state."""

import chex
import pytest
import torch
import torch.utils._pytree as pytree

from functional_moe import optim
from functional_moe.optim import _tree

torch.manual_seed(0)
PARAMS = {"a": {"w": torch.randn(3, 4), "v": torch.randn(2, 2)}, "b": (torch.randn(3), torch.randn(1))}
AXES = optim.MatrixAxes(-1, -2)


def two(labels, first=None, second=None):
    return optim.partition({"x": first or optim.sgd(1.0), "y": second or optim.sgd(0.5)}, labels)


def test_partition_gives_each_leaf_to_its_label():
    for labels in (
        {"a": "x", "b": ("y", "x")},
        {"a": {"w": "x", "v": "x"}, "b": ("y", "x")},
        lambda params: {"a": "x", "b": ("y", "x")},
    ):
        tx = two(labels)
        updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        factors = {"a": {"w": -1.0, "v": -1.0}, "b": (-0.5, -1.0)}
        chex.assert_trees_all_close(updates, pytree.tree_map(lambda x, f: x * f, PARAMS, factors))


def test_partition_keeps_state_only_for_its_own_leaves():
    tx = two({"a": "x", "b": "y"}, optim.adamw(0.1), optim.sgd(0.1))
    state = tx.init(PARAMS)
    mu = state.inner_states["x"][0].mu
    assert mu["b"] == (optim.MaskedNode(), optim.MaskedNode()) and mu["a"]["w"].shape == (3, 4)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"a": "x"}, "leaf 'b' has no label"),
        ({"a": "x", "b": ("y", None)}, "leaf 'b.1' has no label: got None"),
        ({"a": {"w": "x"}, "b": "y"}, "leaf 'a.v' has no label"),
        ({"a": "x", "b": "y", "c": "x"}, "a label at 'c' is for no leaf"),
        ({"a": {"w": "x", "v": "y", "u": "x"}, "b": "y"}, "a label at 'a.u' is for no leaf"),
        ({"a": {"w": {"deep": "x"}, "v": "y"}, "b": "y"}, "leaf 'a.w' has no label"),
        ({"a": "x", "b": "z"}, "leaf 'b.0' has the label 'z'"),
        ("x", "no leaf has the label 'y'"),
    ],
)
def test_labels_that_match_nothing_raise(labels, message):
    tx = two(labels)
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)
    good = two({"a": "x", "b": "y"})
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, good.init(PARAMS), PARAMS)


def test_partition_of_nothing_and_foreign_state():
    with pytest.raises(ValueError, match="at least one"):
        optim.partition({}, "x")
    with pytest.raises(ValueError, match="got the state of"):
        two({"a": "x", "b": "y"}).update(PARAMS, optim.PartitionState({}), PARAMS)
    with pytest.raises(ValueError, match="state of 0 entries"):
        optim.chain(optim.identity()).update(PARAMS, (), PARAMS)


def test_masked_passes_others_through():
    tx = optim.masked(optim.sgd(2.0), {"a": {"w": True, "v": False}, "b": False})
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert torch.equal(updates["a"]["w"], PARAMS["a"]["w"] * -2)
    assert updates["a"]["v"] is PARAMS["a"]["v"] and updates["b"][1] is PARAMS["b"][1]
    with pytest.raises(ValueError, match="leaf 'b' has no mask"):
        optim.masked(optim.sgd(2.0), {"a": True}).init(PARAMS)


def test_masked_node_is_an_empty_node_of_the_tree():
    assert pytree.tree_leaves({"a": optim.MaskedNode(), "b": 1}) == [1]
    tree = {"a": optim.MaskedNode(), "b": (torch.ones(1),)}
    assert pytree.tree_map(lambda x: x, tree)["a"] == optim.MaskedNode() and repr(tree["a"]) == "MaskedNode()"
    assert len({optim.MaskedNode(), optim.MaskedNode()}) == 1
    assert _tree.leaf_paths(tree) == ["b.0"]


def test_key_order_of_gradients_does_not_matter():
    backwards = {"b": PARAMS["b"], "a": {"v": PARAMS["a"]["v"], "w": PARAMS["a"]["w"]}}
    for tx in (optim.adamw(0.1), two({"b": "y", "a": "x"}), optim.accumulate(optim.adamw(0.1), 1)):
        state = tx.init(PARAMS)
        chex.assert_trees_all_equal(tx.update(backwards, state, PARAMS)[0], tx.update(PARAMS, state, PARAMS)[0])


def test_accumulate_does_not_run_the_inner_update_between():
    calls = []

    def update(updates, state, params=None):
        calls.append(updates["w"].clone())
        return updates, state + 1

    inner = optim.GradientTransformation(lambda params: torch.zeros(()), update)
    tx = optim.accumulate(inner, 3)
    params = {"w": torch.zeros(2)}
    state = tx.init(params)
    for step in range(6):
        updates, state = tx.update({"w": torch.full((2,), float(step))}, state, params)
        assert torch.equal(updates["w"], torch.zeros(2)) == (step % 3 != 2)
    assert [float(call[0]) for call in calls] == [1.0, 4.0] and float(state.inner_state) == 2


def test_accumulate_sums_in_float32():
    # 256 + 1 is 256 in bfloat16: summed in half precision the mean of 256, 1, 1, 1 would be 64.
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    tx = optim.accumulate(optim.sgd(1.0), 4)
    state = tx.init(params)
    for value in (256.0, 1.0, 1.0, 1.0):
        updates, state = tx.update({"w": torch.full((1,), value, dtype=torch.bfloat16)}, state, params)
    # A mean in bfloat16 would be 65.
    assert float(updates["w"]) == -64.75 and updates["w"].dtype == torch.float32
    assert float(state.total["w"]) == 0.0


def test_updates_of_accumulate_have_one_dtype():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        params = {"w": torch.ones(2, dtype=dtype)}
        tx = optim.accumulate(optim.sgd(1.0), 2)
        between, state = tx.update(params, tx.init(params), params)
        assert between["w"].dtype == tx.update(params, state, params)[0]["w"].dtype == expected


def test_rates_are_read_from_the_state_and_can_be_set():
    tx = two({"a": "x", "b": "y"}, optim.muon(0.1, AXES), optim.adamw(0.2))
    state = tx.init(PARAMS)
    assert {name: float(rate) for name, rate in optim.learning_rates(state).items()} == pytest.approx(
        {"x": 0.1, "y": 0.2}
    )
    other = optim.set_learning_rates(state, {"x": 0.3})
    assert float(optim.learning_rates(other)["x"]) == pytest.approx(0.3)
    assert float(optim.learning_rates(state)["x"]) == pytest.approx(0.1)
    a, b = tx.update(PARAMS, state, PARAMS)[0], tx.update(PARAMS, other, PARAMS)[0]
    torch.testing.assert_close(b["a"]["w"], 3 * a["a"]["w"])
    assert torch.equal(a["b"][0], b["b"][0])


def test_rates_by_name_outside_and_inside_of_partitions():
    nested = optim.partition(
        {"outer": two({"a": {"w": "x", "v": "y"}, "b": "y"})},
        "outer",
    )
    assert list(optim.learning_rates(nested.init(PARAMS))) == ["outer.x", "outer.y"]
    assert list(optim.learning_rates(optim.adamw(0.1).init(PARAMS))) == ["learning_rate"]
    twice = optim.chain(optim.sgd(0.1), optim.sgd(0.2))
    assert list(optim.learning_rates(twice.init(PARAMS))) == ["learning_rate.0", "learning_rate.1"]
    accumulated = optim.accumulate(optim.sgd(0.1), 2)
    assert list(optim.learning_rates(accumulated.init(PARAMS))) == ["learning_rate"]


def test_scheduled_rates_are_recorded():
    tx = optim.sgd(optim.linear_schedule(0.0, 1.0, 4))
    state = tx.init(PARAMS)
    for expected in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0):
        updates, state = tx.update(PARAMS, state, PARAMS)
        assert float(optim.learning_rates(state)["learning_rate"]) == expected
        chex.assert_trees_all_close(updates, pytree.tree_map(lambda x, e=expected: -e * x, PARAMS))


@pytest.mark.parametrize("make", [optim.adamw, lambda rate, **k: optim.muon(rate, AXES, **k)])
def test_decoupled_decay_is_decay_times_the_rate_of_the_step(make):
    params = {"w": torch.full((2, 3), 2.0)}
    zero = {"w": torch.zeros(2, 3)}
    tx = make(optim.linear_schedule(1.0, 0.0, 4), weight_decay=0.1)
    state = tx.init(params)
    for rate in (1.0, 0.75, 0.5, 0.25, 0.0):
        updates, state = tx.update(zero, state, params)
        torch.testing.assert_close(updates["w"], torch.full((2, 3), -0.1 * rate * 2.0))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"z": 0.1}, "no learning rate is called 'z'; the state has"),
        ({"y": 0.1}, "'y' is driven by a schedule"),
        ({"x": -0.1}, "'x' must be a finite number of at least 0, got -0.1"),
        ({"x": float("nan")}, "got nan"),
    ],
)
def test_bad_rates(rates, message):
    tx = two({"a": "x", "b": "y"}, optim.sgd(0.1), optim.sgd(optim.constant_schedule(0.1)))
    with pytest.raises(ValueError, match=message):
        optim.set_learning_rates(tx.init(PARAMS), rates)


def test_global_norm_is_an_argument():
    """DeepSpeed 8475: what a sharded norm reports is what clips."""
    clip = optim.clip_by_global_norm(1.0, lambda tree: torch.tensor(10.0))
    updates, _ = clip.update(PARAMS, clip.init(PARAMS), None)
    chex.assert_trees_all_close(updates, pytree.tree_map(lambda x: x / 10, PARAMS))
    assert float(optim.global_norm({"a": torch.full((4,), 3.0), "b": torch.full((4,), 4.0)})) == 10.0
    assert float(optim.global_norm({})) == 0.0


def test_apply_updates_rounds_once():
    params = {"w": torch.full((1,), 256.0, dtype=torch.bfloat16)}
    assert float(optim.apply_updates(params, {"w": torch.full((1,), 1.5)})["w"]) == 258.0


@pytest.mark.parametrize(
    ("tail", "middle"), [("linear", 0.55), ("cosine", 0.55), ("inverse_sqrt", (0.5 * (1 + 100)) ** -0.5)]
)
def test_warmup_stable_decay_tails(tail, middle):
    schedule = optim.warmup_stable_decay_schedule(1.0, 4, 6, 10, tail=tail, end_value=0.1)
    assert [float(schedule(count)) for count in (0, 2, 4, 7, 10)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert float(schedule(15)) == pytest.approx(middle)
    assert float(schedule(20)) == pytest.approx(0.1) and float(schedule(10**9)) == pytest.approx(0.1)
    values = schedule(torch.arange(10, 21))
    assert values.shape == (11,) and bool((values[1:] < values[:-1]).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.constant_schedule(-1.0), "value must be a finite number of at least 0, got -1.0"),
        (lambda: optim.linear_schedule(0.0, -1.0, 5), "end_value must be .* got -1.0"),
        (lambda: optim.linear_schedule(0.0, 1.0, 0), "transition_steps must be at least 1, got 0"),
        (lambda: optim.cosine_decay_schedule(1.0, 0), "decay_steps must be at least 1, got 0"),
        (lambda: optim.cosine_decay_schedule(1.0, 2, exponent=0.0), "exponent must be above 0, got 0.0"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5), "5 must be above warmup_steps=5"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 0.0, 5, 9), "peak_value must be above 0"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), "1 schedules need 0 boundaries"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)] * 3, [3, 2]), "must ascend"),
        (lambda: optim.warmup_stable_decay_schedule(1.0, 1, 1, 1, tail="x"), "tail must be .* got 'x'"),
        (lambda: optim.warmup_stable_decay_schedule(1.0, 1, 1, 1, tail="inverse_sqrt"), "end_value .* got 0"),
        (
            lambda: optim.warmup_stable_decay_schedule(1.0, 1, -1, 1),
            "stable_steps must be at least 0, got -1",
        ),
    ],
)
def test_bad_schedules(make, message):
    with pytest.raises(ValueError, match=message):
        make()
