"""QK-Clip on the model: exact maxima, and logits that shrink by exactly what was asked."""

import dataclasses

import chex
import pytest
import torch
from torch.utils import _pytree as pytree

from functional_moe import init, init_balance
from functional_moe.attention import make_positions, project
from functional_moe.config import MoEConfig
from functional_moe.norm import rms_norm
from functional_moe.qk_clip import attention_maxima, clip_attention

CONFIG = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    attention_bias=True,
    initializer_range=0.5,
)
BALANCE = init_balance(CONFIG)


def make_params():
    # biases start at zero: fill them, so that they matter
    return pytree.tree_map(lambda leaf: leaf + 0.1 * (leaf == 0), init(CONFIG, seed=2))


def make_batch():
    tokens = torch.randint(23, (3, 11), generator=torch.Generator().manual_seed(0))
    segment_ids = torch.ones_like(tokens)
    segment_ids[:, 4:] = 2
    segment_ids[1, 8:] = 1  # a third document under the number of the first
    return {"tokens": tokens, "targets": tokens, "segment_ids": segment_ids}


def first_layer_scores(params, batch):
    """[batch, heads, seq, seq], -inf where no query looks: the definition."""
    layer = params["layers"][0]
    x = params["embedding"][batch["tokens"]]
    positions = make_positions(11, batch["segment_ids"], CONFIG, x)
    normed = rms_norm(x, layer["attention_norm"], CONFIG.rms_norm_eps)
    q, k, _ = project(layer["attention"], normed, positions.cos, positions.sin, CONFIG)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * CONFIG.attention_head_dim**-0.5
    same = positions.starts[:, :, None] == positions.starts[:, None, :]
    return torch.where((same & torch.ones(11, 11, dtype=torch.bool).tril())[:, None], scores, -torch.inf)


@pytest.mark.parametrize("block", [1, 4, 512])
def test_maxima_are_those_of_the_scores(block):
    params, batch = make_params(), make_batch()
    maxima = attention_maxima(params, BALANCE, batch, CONFIG, block=block)
    assert maxima.shape == (2, 4)
    expected = first_layer_scores(params, batch).amax(dim=(0, 2, 3))
    torch.testing.assert_close(maxima[0], expected, rtol=1e-5, atol=1e-6)  # fp32, other shapes


def test_clipping_bounds_every_head_and_changes_no_other():
    params, batch = make_params(), make_batch()
    maxima = attention_maxima(params, BALANCE, batch, CONFIG)
    tau = float(maxima[0].sort().values[1:3].mean())  # two heads of the first layer above, two below
    clipped = clip_attention(params, maxima, tau, CONFIG)
    before, after = first_layer_scores(params, batch), first_layer_scores(clipped, batch)
    factors = torch.where(maxima[0] > tau, tau / maxima[0], 1.0)
    torch.testing.assert_close(after, before * factors[:, None, None], rtol=1e-4, atol=1e-5)
    assert attention_maxima(clipped, BALANCE, batch, CONFIG)[0].max() <= tau * 1.0001


def test_a_high_bound_changes_nothing_and_the_argument_is_left_alone():
    params, batch = make_params(), make_batch()
    copies = pytree.tree_map(torch.clone, params)
    maxima = attention_maxima(params, BALANCE, batch, CONFIG)
    chex.assert_trees_all_equal(clip_attention(params, maxima, 1e6, CONFIG), params)
    clip_attention(params, maxima, 1e-3, CONFIG)
    chex.assert_trees_all_equal(params, copies)


def test_what_cannot_be_clipped_is_refused():
    params, maxima = make_params(), torch.ones(2, 4)
    with pytest.raises(ValueError, match="use_qk_norm"):
        clip_attention(params, maxima, 1.0, dataclasses.replace(CONFIG, use_qk_norm=True))
    with pytest.raises(ValueError, match=r"clip_qkv = 8\.0"):
        clip_attention(params, maxima, 1.0, dataclasses.replace(CONFIG, clip_qkv=8.0))
    with pytest.raises(ValueError, match=r"\[layers, heads\] is \(2, 4\)"):
        clip_attention(params, maxima[:1], 1.0, CONFIG)
    with pytest.raises(ValueError, match="tau"):
        clip_attention(params, maxima, 0.0, CONFIG)
