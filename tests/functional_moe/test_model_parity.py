"""Logits and gradients are those of transformers' own classes, for the same weights.

The mapping of names below is a test's: loading real files is another module's business. All values are distinct, so
a matrix that is transposed, or two that are swapped, cannot go unnoticed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from functional_moe.chain import logits, loss_fn
from functional_moe.config import MoEConfig
from functional_moe.model import IGNORE_INDEX
from functional_moe.tree import named_leaves

# fp32 models of two or three layers, whose sums run in another order.
LOGIT_TOLERANCE = 1e-4
# A gradient sums over the batch and passes the model twice.
GRADIENT_TOLERANCE = 1e-3

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 4096,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
}


def _shared_arguments(config: MoEConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_experts_per_tok": config.num_experts_per_tok,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
        },
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def qwen3(config: MoEConfig) -> torch.nn.Module:
    dense = list(range(config.first_k_dense_replace))
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **_shared_arguments(config),
            num_experts=config.num_experts,
            moe_intermediate_size=config.moe_intermediate_size,
            intermediate_size=config.intermediate_size or 1,
            mlp_only_layers=dense,
            norm_topk_prob=config.norm_topk_prob,
            attention_bias=config.attention_bias,
        )
    )


def mixtral(config: MoEConfig) -> torch.nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **_shared_arguments(config),
            num_local_experts=config.num_experts,
            intermediate_size=config.moe_intermediate_size,
        )
    )


def glm4(config: MoEConfig) -> torch.nn.Module:
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            **_shared_arguments(config),
            n_routed_experts=config.num_experts,
            moe_intermediate_size=config.moe_intermediate_size,
            intermediate_size=config.intermediate_size or 1,
            n_shared_experts=config.num_shared_experts,
            first_k_dense_replace=config.first_k_dense_replace,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            use_qk_norm=config.use_qk_norm,
            attention_bias=config.attention_bias,
            num_mtp_layers=0,
        )
    )


def case(family, **changes):
    return family, MoEConfig(**{**SMALL, **changes})


GLM = {"scoring_func": "sigmoid", "num_shared_experts": 1, "partial_rotary_factor": 0.5, "head_dim": 8}
CASES = {
    "qwen3": case(qwen3, use_qk_norm=True),
    "qwen3 weights not normalised": case(qwen3, use_qk_norm=True, norm_topk_prob=False),
    "qwen3 top-1": case(qwen3, use_qk_norm=True, norm_topk_prob=False, num_experts_per_tok=1),
    "qwen3 all experts": case(qwen3, use_qk_norm=True, num_experts_per_tok=6),
    "qwen3 tied": case(qwen3, use_qk_norm=True, tie_word_embeddings=True),
    "qwen3 first dense": case(qwen3, use_qk_norm=True, first_k_dense_replace=1, intermediate_size=20),
    "qwen3 hidden = width": case(qwen3, use_qk_norm=True, moe_intermediate_size=16),
    "qwen3 hidden = 2 width": case(qwen3, use_qk_norm=True, moe_intermediate_size=8),
    "qwen3 width = 2 hidden": case(qwen3, use_qk_norm=True, moe_intermediate_size=32),
    "qwen3 one key-value head": case(qwen3, use_qk_norm=True, num_key_value_heads=1),
    "qwen3 all square": case(qwen3, use_qk_norm=True, head_dim=4, num_key_value_heads=4, moe_intermediate_size=16),
    "mixtral": case(mixtral, num_experts_per_tok=2),
    "mixtral hidden = width, tied": case(mixtral, moe_intermediate_size=16, tie_word_embeddings=True),
    "mixtral hidden = 2 width": case(mixtral, moe_intermediate_size=8),
    "mixtral odd sizes": case(mixtral, hidden_size=10, moe_intermediate_size=7, num_experts=5),
    "glm4": case(glm4, **GLM),
    "glm4 groups": case(glm4, **GLM, n_group=3, topk_group=2),
    "glm4 one group of many": case(glm4, **{**GLM, "num_experts_per_tok": 2}, n_group=3, topk_group=1),
    "glm4 everything": case(
        glm4,
        **GLM,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=2.5,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        intermediate_size=20,
        num_hidden_layers=3,
    ),
    "glm4 weights not normalised, two shared": case(
        glm4, **{**GLM, "num_shared_experts": 2}, norm_topk_prob=False, routed_scaling_factor=0.7
    ),
    "glm4 tied, whole rotation": case(glm4, **{**GLM, "partial_rotary_factor": 1.0}, tie_word_embeddings=True),
    "glm4 all dense": case(glm4, **GLM, first_k_dense_replace=2, intermediate_size=20),
}


def build(family, config) -> torch.nn.Module:
    """The class, with every parameter random: norms and biases away from where they start, routers far from ties."""
    model = family(config).eval()
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


def to_tree(values: dict[str, torch.Tensor], config: MoEConfig) -> Any:
    """Our tree of Hugging Face's names: weights, or anything of their shapes, such as gradients."""
    taken = set()

    def take(name: str) -> torch.Tensor:
        taken.add(name)
        return values[name].detach().clone()

    def linear(name: str) -> torch.Tensor:
        return take(f"{name}.weight").t().contiguous()

    def mlp(name: str) -> dict[str, torch.Tensor]:
        gate_up = torch.cat([linear(f"{name}.{matrix}_proj") for matrix in ("gate", "up")], dim=-1)
        return {"gate_up": gate_up, "down": linear(f"{name}.down_proj")}

    layers = []
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}"
        attention = {
            "qkv": torch.cat([linear(f"{at}.self_attn.{matrix}_proj") for matrix in "qkv"], dim=-1),
            "o": linear(f"{at}.self_attn.o_proj"),
        }
        if config.attention_bias:
            attention["qkv_bias"] = torch.cat([take(f"{at}.self_attn.{matrix}_proj.bias") for matrix in "qkv"])
        if config.use_qk_norm:
            attention |= {f"{matrix}_norm": take(f"{at}.self_attn.{matrix}_norm.weight") for matrix in "qk"}
        layer = {
            "attention_norm": take(f"{at}.input_layernorm.weight"),
            "attention": attention,
            "mlp_norm": take(f"{at}.post_attention_layernorm.weight"),
        }
        if config.is_moe_layer(index):
            layer["router"] = linear(f"{at}.mlp.gate")
            layer["experts"] = {
                matrix: take(f"{at}.mlp.experts.{matrix}_proj").transpose(1, 2).contiguous()
                for matrix in ("gate_up", "down")
            }
            if config.num_shared_experts:
                layer["shared"] = mlp(f"{at}.mlp.shared_experts")
        else:
            layer["mlp"] = mlp(f"{at}.mlp")
        layers.append(layer)
    tree = {
        "embedding": take("model.embed_tokens.weight"),
        "layers": tuple(layers),
        "final_norm": take("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        tree["head"] = linear("lm_head")
    left = set(values) - taken - {"lm_head.weight"}
    if left:
        raise ValueError(f"names the mapping does not know: {sorted(left)}")
    return tree


def balance_of(model: torch.nn.Module, config: MoEConfig) -> torch.Tensor:
    """The correction bias of each MoE layer; zero for the families without one."""
    biases = [buffer for name, buffer in model.named_buffers() if "e_score_correction_bias" in name]
    return torch.stack(biases) if biases else torch.zeros(config.num_moe_layers, config.num_experts)


def their_logits(model, batch):
    """Of whole rows; packed documents one at a time, each alone in the model."""
    tokens = batch["tokens"]
    if "segment_ids" not in batch:
        return model(input_ids=tokens, use_cache=False).logits
    rows = []
    for row, segments in zip(tokens, batch["segment_ids"], strict=True):
        lengths = torch.unique_consecutive(segments, return_counts=True)[1].tolist()
        rows.append(torch.cat([model(input_ids=d[None], use_cache=False).logits[0] for d in row.split(lengths)]))
    return torch.stack(rows)


def batches(config):
    generator = torch.Generator().manual_seed(1)

    def tokens(*shape):
        return torch.randint(config.vocab_size, shape, generator=generator)

    targets = tokens(2, 11)
    targets[0, 2:4] = IGNORE_INDEX
    plain = {"tokens": tokens(2, 11), "targets": targets}
    segments = torch.tensor([[1] * 4 + [2] * 6 + [0], [3] * 2 + [1] * 1 + [3] * 8])
    return {
        "padding-free": plain,
        "packed": {**plain, "segment_ids": segments, "targets": targets.masked_fill(segments == 0, IGNORE_INDEX)},
    }


def assert_close(ours, theirs, tolerance, what=""):
    scale = float(theirs.abs().max())
    assert scale > 0, what
    assert float((ours - theirs).abs().max()) <= tolerance * scale, what


@pytest.mark.parametrize("kind", ["padding-free", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient_equal_hugging_faces(name, kind):
    family, config = CASES[name]
    model = build(family, config)
    params, balance = to_tree(dict(model.named_parameters()), config), balance_of(model, config)
    batch = batches(config)[kind]

    theirs = their_logits(model, batch)
    valid = batch.get("segment_ids", torch.ones(1, dtype=torch.int64)) != 0
    for kernels in ("fused", "reference"):
        ours = logits(params, balance, batch, config, kernels)
        assert_close(ours * valid[..., None], theirs.detach() * valid[..., None], LOGIT_TOLERANCE, kernels)

    loss = F.cross_entropy(theirs.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    expected = named_leaves(to_tree(gradients, config))
    for kernels in ("fused", "reference"):
        gradient, (our_loss, _) = torch.func.grad_and_value(
            lambda p, k=kernels: loss_fn(p, balance, batch, config, kernels=k), has_aux=True
        )(params)
        torch.testing.assert_close(our_loss, loss.detach(), rtol=1e-5, atol=0)  # fp32, a mean of 20 terms
        ours = named_leaves(gradient)
        assert set(ours) == set(expected)
        for leaf, theirs_of_leaf in expected.items():
            assert_close(ours[leaf], theirs_of_leaf, GRADIENT_TOLERANCE, f"{leaf} ({kernels})")


def test_every_expert_is_visited_and_every_option_met():
    """What the test above relies on: a case whose expert stood idle, or whose bias chose nothing, would show less."""
    for name, (family, config) in CASES.items():
        model = build(family, config)
        params, balance = to_tree(dict(model.named_parameters()), config), balance_of(model, config)
        batch = batches(config)["padding-free"]
        counts = loss_fn(params, balance, batch, config)[1].counts
        assert bool((counts.sum(0) > 0).all() or config.num_moe_layers == 0), name
        if family is glm4 and config.num_moe_layers:
            unbiased = loss_fn(params, torch.zeros_like(balance), batch, config)[1].counts
            assert not torch.equal(counts, unbiased), name


@pytest.mark.parametrize("family", [qwen3, glm4])
def test_logits_at_long_positions_equal_hugging_faces(family):
    """transformers 39687: interleaved and half-split rotation agree at position 0 only."""
    changes = {"use_qk_norm": True} if family is qwen3 else GLM
    config = MoEConfig(**{**SMALL, **changes, "num_hidden_layers": 1})
    model = build(family, config)
    params, balance = to_tree(dict(model.named_parameters()), config), balance_of(model, config)
    tokens = torch.randint(config.vocab_size, (1, 2000), generator=torch.Generator().manual_seed(2))
    batch = {"tokens": tokens, "targets": tokens}
    with torch.no_grad():
        theirs, ours = their_logits(model, batch), logits(params, balance, batch, config)
    assert_close(ours[:, -50:], theirs[:, -50:], LOGIT_TOLERANCE)


def test_tied_gradient_is_the_sum_of_both_uses():
    """torchtitan PR 3764: as an embedding and as a head."""
    family, config = CASES["qwen3 tied"]
    model = build(family, config)
    params, balance = to_tree(dict(model.named_parameters()), config), balance_of(model, config)
    batch = batches(config)["packed"]

    def gradient(config, params):
        return torch.func.grad(lambda p: loss_fn(p, balance, batch, config)[0])(params)

    untied = dataclasses.replace(config, tie_word_embeddings=False)
    both = gradient(untied, {**params, "head": params["embedding"].t().contiguous()})
    tied = gradient(config, params)["embedding"]
    torch.testing.assert_close(tied, both["embedding"] + both["head"].t(), rtol=1e-5, atol=1e-6)
    assert float(both["embedding"].abs().max()) > 1e-3
    assert float(both["head"].abs().max()) > 1e-3
