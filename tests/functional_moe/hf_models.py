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
