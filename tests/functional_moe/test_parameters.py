"""One declaration, and everything read off it agrees."""

from __future__ import annotations

import dataclasses
import random

import chex
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from functional_moe import parameters
from functional_moe.config import PRESETS
from functional_moe.parameters import Constant, Leaf, Normal, abstract, count_parameters, declare, init, labels
from functional_moe.tree import named_leaves

VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": False, "use_qk_norm": False},
    {"first_k_dense_replace": 1, "intermediate_size": 11},
    {"first_k_dense_replace": 2, "intermediate_size": 11},
    {"num_shared_experts": 2, "shared_expert_gate": True},
    {"num_shared_experts": 1, "shared_expert_intermediate_size": 3},
]


def leaves(tree):
    return pytree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, Leaf))


@pytest.mark.parametrize("changes", VARIANTS)
def test_abstract_matches_init_in_structure_shape_and_dtype(make_config, changes):
    config = make_config(**changes)
    shapes, values = abstract(config), init(config, 0)
    assert all(leaf.is_meta for leaf in leaves(shapes))
    assert not any(leaf.is_meta for leaf in leaves(values))
    assert list(named_leaves(shapes)) == list(named_leaves(values)) == list(named_leaves(labels(config)))
    for name, value in named_leaves(values).items():
        assert (value.shape, value.dtype) == (named_leaves(shapes)[name].shape, torch.float32), name
    chex.assert_trees_all_equal_structs(values, pytree.tree_map(torch.empty_like, values))


@pytest.mark.parametrize("changes", VARIANTS)
def test_num_params_is_the_sum_over_abstract(make_config, changes):
    config = make_config(**changes)
    assert config.num_params == sum(leaf.numel() for leaf in leaves(abstract(config)))


@pytest.mark.parametrize("name", PRESETS)
def test_num_params_of_presets_is_the_sum_over_abstract(name):
    config = PRESETS[name]
    assert config.num_params == sum(leaf.numel() for leaf in leaves(abstract(config)))


def test_active_parameters_are_those_of_a_model_with_only_the_chosen_experts(make_config):
    config = make_config(num_shared_experts=1)
    chosen = dataclasses.replace(config, num_experts=config.num_experts_per_tok)
    unchosen_router_columns = config.num_moe_layers * config.hidden_size * (config.num_experts - chosen.num_experts)
    assert config.num_active_params == chosen.num_params + unchosen_router_columns


def test_each_option_adds_its_own_leaves(make_config):
    def names(**changes):
        return set(named_leaves(abstract(make_config(**changes))))

    assert names() - names(tie_word_embeddings=True) == {"head"}
    assert names() - names(attention_bias=False) == {f"layers.{i}.attention.qkv_bias" for i in range(2)}
    assert names() - names(use_qk_norm=False) == {f"layers.{i}.attention.{n}_norm" for i in range(2) for n in "qk"}
    dense = names(first_k_dense_replace=1, intermediate_size=3)
    assert dense - names() == {f"layers.0.mlp.{n}" for n in ("gate_up", "down")}
    assert names() - dense == {"layers.0.router"} | {f"layers.0.experts.{n}" for n in ("gate_up", "down")}
    shared = names(num_shared_experts=1)
    assert shared - names() == {f"layers.{i}.shared.{n}" for i in range(2) for n in ("gate_up", "down")}
    gated = names(num_shared_experts=1, shared_expert_gate=True)
    assert gated - shared == {f"layers.{i}.shared_gate" for i in range(2)}


def test_only_matrices_in_the_layers_are_labelled_for_muon(make_config):
    config = make_config(first_k_dense_replace=1, intermediate_size=3, num_shared_experts=1, shared_expert_gate=True)
    for name, label in named_leaves(labels(config)).items():
        last = name.split(".")[-1]
        if last in ("embedding", "head"):
            expected = "embedding"
        elif last in ("router", "shared_gate"):
            expected = "router"
        elif last in ("qkv", "o", "gate_up", "down"):
            expected = "matrix"
        else:
            expected = "vector"
        assert label == expected, name


@given(seed=st.integers(-(2**70), 2**70))
def test_init_is_a_function_of_the_seed(make_config, seed):
    config = make_config()
    chex.assert_trees_all_equal(init(config, seed), init(config, seed))
    assert not torch.equal(init(config, seed)["embedding"], init(config, seed + 1)["embedding"])


def test_init_does_not_touch_or_read_the_global_generator(make_config):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = init(make_config(), 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    chex.assert_trees_all_equal(first, init(make_config(), 0))


def test_init_does_not_depend_on_the_order_of_drawing(make_config, monkeypatch):
    """The draws of all leaves, made alone and shuffled, are the same numbers; so are those of a subset."""
    calls = []
    draw = parameters._normal
    monkeypatch.setattr(parameters, "_normal", lambda *call: calls.append((call, draw(*call))) or calls[-1][1])
    init(make_config(), 3)
    assert len(calls) == 2 + 2 * (2 + 1 + 2 * 5)  # every matrix its own draw
    random.Random(0).shuffle(calls)
    for call, value in calls:
        assert torch.equal(draw(*call), value)


def test_init_does_not_depend_on_what_else_the_model_has(make_config):
    """Leaves of one name and shape are the same in models that differ elsewhere."""
    small, large = init(make_config(), 0), init(make_config(num_shared_experts=1, vocab_size=17, num_experts=9), 0)
    for name in ("qkv", "o"):
        assert torch.equal(small["layers"][1]["attention"][name], large["layers"][1]["attention"][name])
    # A model with more experts begins with the same ones.
    assert torch.equal(small["layers"][0]["experts"]["gate_up"], large["layers"][0]["experts"]["gate_up"][:5])


def test_an_experts_matrix_drawn_alone_equals_its_slice(make_config):
    config = make_config()
    tree = init(config, 7)
    for matrix in ("gate_up", "down"):
        leaf = declare(config)["layers"][1]["experts"][matrix]
        for expert in range(config.num_experts):
            alone = parameters._normal(
                7, f"layers.1.experts.{matrix}[{expert}]", leaf.shape[1:], leaf.initializer.std, leaf.dtype
            )
            assert torch.equal(alone, tree["layers"][1]["experts"][matrix][expert])


def test_different_leaves_and_experts_differ(make_config):
    config = make_config(first_k_dense_replace=1, intermediate_size=7, num_hidden_layers=3, num_shared_experts=1)
    matrices = []
    for name, leaf in named_leaves(init(config, 0)).items():
        if leaf.std(unbiased=False) > 0:
            matrices.extend((f"{name}[{i}]", m) for i, m in enumerate(leaf if leaf.ndim == 3 else leaf[None]))
    firsts = [float(matrix.flatten()[0] / matrix.std()) for _, matrix in matrices]
    assert len(set(firsts)) == len(firsts)


def test_initial_values_have_the_declared_distribution(make_config):
    config = make_config(
        hidden_size=96, moe_intermediate_size=64, vocab_size=500, initializer_range=0.03, num_hidden_layers=8
    )
    declared = dict(zip(named_leaves(abstract(config)), leaves(declare(config)), strict=True))
    for name, value in named_leaves(init(config, 0)).items():
        initializer = declared[name].initializer
        if isinstance(initializer, Constant):
            assert torch.equal(value, torch.full_like(value, initializer.value)), name
            assert initializer.value == (0.0 if name.endswith("bias") else 1.0), name
        else:
            # Five standard errors of a mean and of a standard deviation.
            n, std = value.numel(), initializer.std
            assert abs(float(value.mean())) < 5 * std / n**0.5, name
            assert abs(float(value.std()) / std - 1) < 5 / (2 * n) ** 0.5, name
            back = name.endswith((".o", ".down"))
            assert std == pytest.approx(0.03 / 4 if back else 0.03), name  # sqrt(2 * 8 layers) = 4


def test_a_leaf_whose_axes_do_not_fit_its_shape_is_refused():
    with pytest.raises(ValueError, match="axes"):
        Leaf((2, 3), ("hidden",), Normal(1.0), "matrix")


def test_active_count_of_a_dense_model_is_all_of_it(make_config):
    config = make_config(first_k_dense_replace=2, intermediate_size=3)
    assert count_parameters(config, active=True) == count_parameters(config)
