"""Every impossible combination raises at construction, and names the field and its value."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_moe.config import INFERRED_FIELDS, PRESETS, MoEConfig, preset

AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
    "n_group",
    "topk_group",
    "loss_chunk_size",
    "head_dim",
    "shared_expert_intermediate_size",
)
NOT_NEGATIVE = (
    "num_shared_experts",
    "intermediate_size",
    "first_k_dense_replace",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "balance_update_rate",
)
POSITIVE = ("rope_theta", "rms_norm_eps", "routed_scaling_factor", "initializer_range", "partial_rotary_factor")

IMPOSSIBLE = [
    # the field that the message names, its value, what else makes it impossible
    *((name, value, {}) for name in AT_LEAST_ONE for value in (0, -1)),
    *((name, -1, {}) for name in NOT_NEGATIVE),
    *((name, value, {}) for name in POSITIVE for value in (0.0, -0.5, math.inf, math.nan)),
    *((name, value, {}) for name in ("hidden_size", "num_experts", "loss_chunk_size") for value in (8.0, "8", True)),
    *((name, value, {}) for name in ("head_dim", "shared_expert_intermediate_size") for value in (8.0, "8", True)),
    *((name, value, {}) for name in ("rope_theta", "router_aux_loss_coef") for value in ("1", None)),
    *((name, value, {}) for name in ("use_qk_norm", "norm_topk_prob", "tie_word_embeddings") for value in (1, "yes")),
    ("num_attention_heads", 3, {"head_dim": None, "num_key_value_heads": 1}),
    ("num_key_value_heads", 3, {}),
    ("num_key_value_heads", 8, {}),
    ("partial_rotary_factor", 1.5, {}),
    ("partial_rotary_factor", 0.5, {}),  # 3 of 6
    ("partial_rotary_factor", 0.1, {}),  # 0 of 6
    ("partial_rotary_factor", 1.0, {"head_dim": 5}),
    ("qk_norm_over_heads", True, {"use_qk_norm": False}),
    *(("clip_qkv", value, {}) for value in (0.0, -1.0, math.nan, math.inf, "8")),
    ("num_experts_per_tok", 6, {}),
    ("norm_topk_prob", True, {"num_experts_per_tok": 1}),
    ("n_group", 2, {}),  # of 5 experts
    ("topk_group", 2, {}),
    ("topk_group", 3, {"n_group": 2, "num_experts": 6}),
    ("num_experts_per_tok", 3, {"n_group": 3, "num_experts": 6}),
    ("num_experts_per_tok", 5, {"n_group": 3, "topk_group": 2, "num_experts": 6}),
    ("first_k_dense_replace", 3, {"intermediate_size": 8}),
    ("intermediate_size", 0, {"first_k_dense_replace": 1}),
    ("shared_expert_gate", True, {"num_shared_experts": 0}),
    ("scoring_func", "tanh", {}),
    ("compute_dtype", "float16", {}),
    ("compute_dtype", "torch.float32", {}),
]


@pytest.mark.parametrize(("field", "value", "others"), IMPOSSIBLE)
def test_impossible_combination_names_the_field_and_its_value(make_config, field, value, others):
    with pytest.raises(ValueError) as error:
        make_config(**{field: value}, **others)
    assert f"MoEConfig.{field} = {value!r}:" in str(error.value)


BORDERS = [
    {"num_experts_per_tok": 5},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"first_k_dense_replace": 2, "intermediate_size": 3},
    {"n_group": 5, "topk_group": 2},
    {"num_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4},
    {"head_dim": None, "hidden_size": 8},
    {"partial_rotary_factor": 1 / 3},  # 2 of 6
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
]


@pytest.mark.parametrize("fields", BORDERS, ids=str)
def test_the_borders_of_the_possible_are_possible(make_config, fields):
    config = make_config(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_widths_not_given_follow_the_others(make_config):
    config = make_config(hidden_size=24, head_dim=None, num_shared_experts=3)
    assert (config.attention_head_dim, config.rotary_dim, config.shared_intermediate_size) == (6, 6, 21)
    # and go on following them: nothing that construction filled in is left over from before
    wider = dataclasses.replace(config, hidden_size=48, moe_intermediate_size=10)
    assert (wider.attention_head_dim, wider.shared_intermediate_size) == (12, 30)
    assert dataclasses.replace(config) == config


def test_config_is_a_value(make_config):
    config = make_config()
    assert hash(config) == hash(make_config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    assert MoEConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert make_config(compute_dtype="bfloat16").dtype == torch.bfloat16


def test_dense_layers_come_first(make_config):
    config = make_config(num_hidden_layers=5, first_k_dense_replace=2, intermediate_size=3)
    assert [config.is_moe_layer(layer) for layer in range(5)] == [False, False, True, True, True]
    assert config.num_moe_layers == 3


@given(data=st.data())
def test_a_config_is_either_refused_by_value_error_or_countable(make_config, data):
    """Nothing but ValueError comes out of construction, and what is accepted describes a model."""
    small = st.integers(-1, 6)
    names = [*AT_LEAST_ONE, "num_shared_experts", "intermediate_size", "first_k_dense_replace"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), small, max_size=5))
    changes["norm_topk_prob"] = data.draw(st.booleans())
    try:
        config = make_config(**changes)
    except ValueError as error:
        assert str(error).startswith("MoEConfig.")
        return
    assert config.num_active_params <= config.num_params


@pytest.mark.parametrize("name", PRESETS)
def test_presets_construct_and_are_their_own_dict(name):
    assert MoEConfig(**dataclasses.asdict(preset(name))) == preset(name)


def test_jupiter_has_the_published_counts():
    config = preset("jupiter-952b")
    assert round(config.num_params / 1e9, 2) == 951.87
    assert round(config.num_active_params / 1e9, 2) == 32.84


def test_inferred_fields_exist():
    names = {field.name for field in dataclasses.fields(MoEConfig)}
    for name, fields in INFERRED_FIELDS.items():
        assert name in PRESETS
        assert set(fields) <= names


def test_unknown_preset_suggests():
    with pytest.raises(ValueError, match="'jupiter-952'; did you mean 'jupiter-952b'"):
        preset("jupiter-952")
    with pytest.raises(ValueError, match="'???'".replace("?", r"\?")):
        preset("???")
