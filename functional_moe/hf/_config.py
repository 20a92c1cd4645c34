"""Configurations: Hugging Face's JSON to ``MoEConfig`` and back.

A family says which of its keys are which fields, which fields it always has at one value, and for which values of the
other keys it computes what the model here computes. A key that is in none of these lists is refused: what nobody has
looked at may change the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..config import MoEConfig
from ._errors import HFError


class Family(NamedTuple):
    """What is particular to one architecture."""

    architecture: str
    """The class in ``config.json``."""
    fields: Mapping[str, tuple[str, ...]]
    """Its keys, and the fields of ``MoEConfig`` that have their value."""
    fixed: Mapping[str, Any]
    """Fields of ``MoEConfig`` that it has no key for."""
    defaults: Mapping[str, Any] = {}
    """Values of keys that a file may leave out."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Keys that may have these values alone."""
    renames: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names in ``parameters``, and what they are in its files."""
    dense_layers: str = ""
    """How it says which layers are dense: ``"first"``, by ``first_k_dense_replace``; ``"listed"``, by Qwen's keys."""
    selection_bias: bool = False
    """Whether its routers have one. It and the routers are then kept in fp32 whatever the rest is stored in."""


_SIZES = {
    name: (name,)
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts_per_tok",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
        "head_dim",
    )
}
_COMMON_DEFAULTS = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
    "attention_bias": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
}
# What says nothing of how logits follow from tokens: names of tokens and of tools, and what only Hugging Face's own
# training loss reads (it is another balance loss than the one here).
_INERT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "ep_size",
        "id2label",
        "label2id",
        "max_window_layers",
        "model_type",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_ONLY = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "router_jitter_noise": (0,),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "moe_layer_freq": (1,),
}
_SOFTMAX = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_DENSE = {"moe_intermediate_size": ("moe_intermediate_size",), "intermediate_size": ("intermediate_size",)}
_ALL_ROUTED = {"intermediate_size": ("moe_intermediate_size",)}
_NO_SHARED = {"num_shared_experts": 0}
_DEEPSEEK: Mapping[str, tuple[str, ...]] = {
    **_DENSE,
    "n_routed_experts": ("num_experts",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("norm_topk_prob",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "n_group": ("n_group",),
    "topk_group": ("topk_group",),
}
_DEEPSEEK_ONLY = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
_DEEPSEEK_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_BOTH_BIASES = ("attention_bias", "attention_output_bias")

FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_DENSE,
            "num_experts": ("num_experts",),
            "norm_topk_prob": ("norm_topk_prob",),
            "attention_bias": _BOTH_BIASES,
        },
        {**_SOFTMAX, **_NO_SHARED, "use_qk_norm": True},
        {"rms_norm_eps": 1e-6, "norm_topk_prob": False},
        dense_layers="listed",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_ALL_ROUTED, "num_local_experts": ("num_experts",)},
        {**_SOFTMAX, **_NO_SHARED, "norm_topk_prob": True},
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        renames=(
            (".mlp.gate.", ".block_sparse_moe.gate."),
            (".mlp.experts.", ".block_sparse_moe.experts."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **_ALL_ROUTED,
            "num_experts": ("num_experts",),
            "norm_topk_prob": ("norm_topk_prob",),
            "attention_bias": _BOTH_BIASES,
            "clip_qkv": ("clip_qkv",),
        },
        {**_SOFTMAX, **_NO_SHARED, "use_qk_norm": True, "qk_norm_over_heads": True},
        {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **_DENSE,
            "num_experts": ("num_experts",),
            "norm_topk_prob": ("norm_topk_prob",),
            "qkv_bias": ("attention_bias",),
            "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
        },
        {**_SOFTMAX, "num_shared_experts": 1, "shared_expert_gate": True},
        {"rms_norm_eps": 1e-6, "norm_topk_prob": False, "qkv_bias": True},
        renames=((".mlp.shared_experts.", ".mlp.shared_expert."),),
        dense_layers="listed",
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        {**_DEEPSEEK, "attention_bias": _BOTH_BIASES},
        {"scoring_func": "sigmoid", "use_qk_norm": True},
        {**_DEEPSEEK_DEFAULTS, "rms_norm_eps": 1e-6, "norm_topk_prob": False, "first_k_dense_replace": 0},
        _DEEPSEEK_ONLY,
        dense_layers="first",
        selection_bias=True,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {**_DEEPSEEK, "attention_bias": ("attention_bias",), "use_qk_norm": ("use_qk_norm",)},
        {"scoring_func": "sigmoid"},
        {
            **_DEEPSEEK_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
        },
        _DEEPSEEK_ONLY,
        dense_layers="first",
        selection_bias=True,
    ),
}
"""The architectures that are read and written, by ``model_type``."""

# Fields that training alone reads, or that say how and not what is computed.
_OF_TRAINING = frozenset(
    {
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "balance_update_rate",
        "balance_centred",
        "initializer_range",
        "compute_dtype",
        "loss_chunk_size",
    }
)
_ALIASES = ("num_experts", "num_local_experts", "n_routed_experts")


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
      HFError: it is none of ``FAMILIES``.
    """
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise HFError(f"config.json: model_type = {model_type!r:.100} is not one of {', '.join(sorted(FAMILIES))}")
    architectures = hf_config.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise HFError(f"config.json: architectures = {architectures!r:.100}, expected {[family.architecture]}")
    return family


def config_from_hf(hf_config: Mapping[str, Any]) -> MoEConfig:
    """The model that a ``config.json`` describes.

    It computes in fp32 whatever the weights are stored in, and without balance losses: both are settings of whoever
    trains, to be changed with ``dataclasses.replace``.

    Args:
      hf_config: the JSON object, as transformers 4 or 5 writes it.

    Raises:
      HFError: an unknown architecture, a missing key, or a key whose value would change the computation into one that
        the model does not have; the key and the value are named.
    """
    family = family_of(hf_config)
    rest = {**_COMMON_DEFAULTS, **family.defaults, **hf_config}
    _rename_aliases(rest, hf_config, family)
    _check_windows(rest, hf_config["model_type"])
    values: dict[str, Any] = {**family.fixed, **_rotary(rest, family), **_dense(rest, family)}
    for key, names in {**_SIZES, **family.fields}.items():
        if key not in rest:
            raise HFError(f"config.json lacks {key}")
        value = rest.pop(key)
        values |= dict.fromkeys(names, value)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if family.selection_bias and not values["num_shared_experts"]:
        raise HFError(
            f"config.json: n_shared_experts = {values['num_shared_experts']!r:.100}, this architecture has at least 1"
        )
    for key, allowed in {**_ONLY, **family.only}.items():
        if rest.get(key, allowed[0]) not in allowed:
            raise HFError(f"config.json: {key} = {rest[key]!r:.100} is not supported, only {allowed[0]!r}")
        rest.pop(key, None)
    if "attention_bias" in rest and rest.pop("attention_bias") is not False:
        raise HFError("config.json: attention_bias = True is not supported for this architecture")
    for key in sorted(rest.keys() - _INERT):
        raise HFError(f"config.json: {key} = {rest[key]!r:.100} is unknown: it may change what is computed")
    try:
        config = MoEConfig(**values)
    except (ValueError, TypeError) as error:
        raise HFError(f"config.json makes no model: {str(error).splitlines()[0]}") from error
    if config.qk_norm_over_heads and config.num_attention_heads * config.attention_head_dim != config.hidden_size:
        raise HFError(f"config.json: head_dim = {config.head_dim}, this architecture's heads divide hidden_size")
    return config


def _rename_aliases(rest: dict[str, Any], hf_config: Mapping[str, Any], family: Family) -> None:
    """Puts the number of experts under the family's own key: transformers writes it under several."""
    own = next(name for name in _ALIASES if name in family.fields)
    given = {name: hf_config[name] for name in _ALIASES if name in hf_config}
    if len({repr(value) for value in given.values()}) > 1:
        raise HFError(f"config.json: {given!r:.100} contradict each other")
    for name, value in given.items():
        rest.pop(name, None)
        rest[own] = value


def _check_windows(rest: dict[str, Any], model_type: str) -> None:
    """Takes the keys of sliding windows, and refuses those that keep a token from seeing another."""
    layer_types, window = rest.pop("layer_types", None), rest.pop("sliding_window", None)
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise HFError(f"config.json: layer_types = {layer_types!r:.100} is not supported, only full_attention")
    if model_type == "glm4_moe" and window is not None:
        raise HFError(f"config.json: sliding_window = {window!r:.100} is unknown: it may change what is computed")
    used = rest.pop("use_sliding_window", None)
    if used not in (None, False):
        raise HFError(f"config.json: use_sliding_window = {used!r:.100} is not supported, only False")
    if model_type in ("qwen3_moe", "qwen2_moe"):
        return  # there it counts with use_sliding_window alone
    if model_type == "dots1" and (
        layer_types or _at_least(rest.get("max_window_layers", 62), rest, "num_hidden_layers")
    ):
        return
    if window is None or _at_least(window, rest, "max_position_embeddings"):
        return
    raise HFError(f"config.json: sliding_window = {window!r:.100} is not supported, only None")


def _at_least(value: Any, rest: Mapping[str, Any], key: str) -> bool:
    bound = rest.get(key)
    return isinstance(value, int) and isinstance(bound, int) and value >= bound


def _rotary(rest: dict[str, Any], family: Family) -> dict[str, Any]:
    """Takes the keys of the rotary positions, in the old place or the new."""
    parameters: dict[str, Any] = {name: rest.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        value = rest.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise HFError(f"config.json: {key} = {value!r:.100} is not supported, only None or an object")
        parameters |= value or {}
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind != "default":
        raise HFError(f"config.json: rope_type = {kind!r:.100} is not supported, only 'default'")
    theta, share = parameters.pop("rope_theta"), parameters.pop("partial_rotary_factor")
    for key in sorted(parameters):
        raise HFError(f"config.json: rope_parameters.{key} = {parameters[key]!r:.100} is not supported")
    if share != 1 and "partial_rotary_factor" not in family.defaults:
        raise HFError(f"config.json: partial_rotary_factor = {share!r:.100} is not supported, only 1.0")
    return {"rope_theta": theta, "partial_rotary_factor": share}


def _dense(rest: dict[str, Any], family: Family) -> dict[str, Any]:
    """Takes the keys that say which layers are dense; they must be the first ones."""
    if family.dense_layers == "first":
        return {"first_k_dense_replace": rest.pop("first_k_dense_replace")}
    if family.dense_layers == "":
        return {"first_k_dense_replace": 0}
    listed, step = rest.pop("mlp_only_layers", None) or [], rest.pop("decoder_sparse_step", 1)
    layers = rest.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers < 1_000_000:
        raise HFError(f"config.json: num_hidden_layers = {layers!r:.100}")
    if type(step) is not int or step < 1:
        raise HFError(f"config.json: decoder_sparse_step = {step!r:.100}")
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise HFError(f"config.json: mlp_only_layers = {listed!r:.100}")
    dense = [layer for layer in range(layers) if layer in listed or (layer + 1) % step]
    if dense != list(range(len(dense))):
        raise HFError(
            f"config.json: mlp_only_layers = {listed!r:.100} and decoder_sparse_step = {step} make the layers "
            f"{dense!r:.100} dense; only the first ones may be"
        )
    return {"first_k_dense_replace": len(dense)}


def config_to_hf(config: MoEConfig, model_type: str | None = None) -> dict[str, Any]:
    """The ``config.json`` of a model, without what names tokens and files.

    Args:
      config: the model.
      model_type: one of ``FAMILIES``; ``None`` takes the first that computes the same.

    Returns:
      a JSON object, from which ``config_from_hf`` makes the same model.

    Raises:
      HFError: the architecture, or all of them, cannot express the model; the fields that differ are named.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise HFError(f"model_type = {model_type!r} is not one of {', '.join(sorted(FAMILIES))}")
    ours = _computation(config)
    differing: dict[str, str] = {}
    for name in FAMILIES if model_type is None else (model_type,):
        written = _written(config, name)
        try:
            theirs = _computation(config_from_hf(written))
        except HFError as error:
            differing[name] = str(error)
            continue
        if ours == theirs:
            return written
        differing[name] = ", ".join(field for field in ours if ours[field] != theirs[field])
    told = "; ".join(f"{name} differs in {why}" for name, why in differing.items())
    raise HFError(f"no architecture of Hugging Face's is this model: {told}")


def _written(config: MoEConfig, model_type: str) -> dict[str, Any]:
    family = FAMILIES[model_type]
    found: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    for key, names in {**_SIZES, **family.fields}.items():
        found[key] = getattr(config, names[0])
    if config.head_dim is None:
        del found["head_dim"]  # some classes take a null for a number
    if "intermediate_size" in found and not found["intermediate_size"]:
        found["intermediate_size"] = config.moe_intermediate_size  # no layer has it, but the class wants one
    if "n_shared_experts" in found:
        found["n_shared_experts"] = config.shared_intermediate_size // config.moe_intermediate_size
    if "shared_expert_intermediate_size" in found:
        found["shared_expert_intermediate_size"] = config.shared_intermediate_size
    if family.dense_layers == "first":
        found["first_k_dense_replace"] = config.first_k_dense_replace
    if family.dense_layers == "listed":
        found |= {"mlp_only_layers": list(range(config.first_k_dense_replace)), "decoder_sparse_step": 1}
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    if "partial_rotary_factor" in family.defaults:
        found["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
        found["num_nextn_predict_layers"] = 0
    if model_type != "glm4_moe":  # it has none
        found["sliding_window"] = None
    return {**found, "hidden_act": "silu", "attention_dropout": 0.0}


def _computation(config: MoEConfig) -> dict[str, Any]:
    """What decides how logits follow from tokens, in one spelling."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _OF_TRAINING}
    for name in ("num_shared_experts", "shared_expert_intermediate_size"):
        del values[name]
    return {
        **values,
        "head_dim": config.attention_head_dim,
        "partial_rotary_factor": config.rotary_dim / config.attention_head_dim,
        "shared_intermediate_size": config.shared_intermediate_size,
        "intermediate_size": config.intermediate_size if config.first_k_dense_replace else 0,
    }
