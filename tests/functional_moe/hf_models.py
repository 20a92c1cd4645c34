"""Small random models of Hugging Face's own classes, as folders on disk.

Every value is distinct and far from where it starts, so that a matrix that is transposed, or two that are swapped,
cannot go unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20, "head_dim": 6},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "intermediate_size": 12, "head_dim": 6}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 6, "intermediate_size": 12}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {
            "num_experts": 6,
            "moe_intermediate_size": 12,
            "intermediate_size": 20,
            "shared_expert_intermediate_size": 14,
        },
    ),
    "dots1": (
        transformers.Dots1Config,
        {"n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 12, "intermediate_size": 20},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 12,
            "intermediate_size": 20,
            "head_dim": 8,
            "first_k_dense_replace": 0,
            "num_mtp_layers": 0,
        },
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe normalised, with biases, tied": (
        "qwen3_moe",
        {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe first dense, theta": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3_moe every second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe hidden = width": ("qwen3_moe", {"moe_intermediate_size": 16}),
    "qwen3_moe hidden = 2 width": ("qwen3_moe", {"moe_intermediate_size": 8}),
    "qwen3_moe all square": ("qwen3_moe", {"moe_intermediate_size": 16, "head_dim": 4, "num_key_value_heads": 4}),
    "qwen3_moe top-1": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral hidden = width, tied": ("mixtral", {"intermediate_size": 16, "tie_word_embeddings": True}),
    "mixtral hidden = 2 width, no head_dim": ("mixtral", {"intermediate_size": 8, "head_dim": None}),
    "olmoe": ("olmoe", {}),
    "olmoe normalised, clipped, with biases, tied": (
        "olmoe",
        {"norm_topk_prob": True, "clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmoe hidden = width": ("olmoe", {"intermediate_size": 16, "num_key_value_heads": 4}),
    "olmoe hidden = 2 width": ("olmoe", {"intermediate_size": 8}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe normalised, no bias, tied": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe hidden = width": (
        "qwen2_moe",
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
    "qwen2_moe hidden = 2 width": ("qwen2_moe", {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 32}),
    "dots1": ("dots1", {}),
    "dots1 groups, scaled, normalised, dense, two shared, biases": (
        "dots1",
        {
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    "dots1 hidden = width, tied": ("dots1", {"moe_intermediate_size": 16, "tie_word_embeddings": True}),
    "dots1 hidden = 2 width": ("dots1", {"moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe groups, scaled, dense, two shared, biases, norms": (
        "glm4_moe",
        {
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe hidden = width, tied, whole rotation": (
        "glm4_moe",
        {
            "moe_intermediate_size": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4_moe hidden = 2 width": ("glm4_moe", {"moe_intermediate_size": 8}),
}


RELEASED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "dots.llm1": {
        "architectures": ["Dots1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 151643,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "model_type": "dots1",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "scoring_func": "noaux_tc",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.3",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
}
"""What ``config.json`` says in released models."""


def make_config(family: str) -> dict[str, Any]:
    """The JSON object of a family's small configuration, as transformers writes it."""
    config_class, own = FAMILIES[family]
    return json.loads(config_class(**{**SMALL, **own}).to_json_string())  # type: ignore[no-any-return]


def make_model(family: str, changes: dict[str, Any]) -> Any:
    """The class with random weights; its attention is torch's fused one, so that long rows fit."""
    config_class, own = FAMILIES[family]
    config = config_class(**{**SMALL, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * values)
            elif parameter.ndim > 1 and "embed" not in name:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.5 * values)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def write_model(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Any:
    """Makes a model and saves it as transformers does; returns the model."""
    model = make_model(family, changes)
    model.save_pretrained(folder)
    return model
