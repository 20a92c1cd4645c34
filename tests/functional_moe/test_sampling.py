"""Generation: the cache changes nothing, and sampling keeps to its arguments."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.chain import logits
from functional_moe.config import MoEConfig
from functional_moe.model import init_balance
from functional_moe.parameters import init
from functional_moe.sampling import choose, generate, make_cache, next_logits

CONFIG = MoEConfig(
    vocab_size=31,
    hidden_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    intermediate_size=9,
    first_k_dense_replace=1,
    use_qk_norm=True,
    max_position_embeddings=20,
    initializer_range=0.4,
)
PARAMS, BALANCE = init(CONFIG, seed=3), init_balance(CONFIG)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_cached_logits_equal_those_of_the_whole_text(pieces: list[int]) -> None:
    tokens = torch.randint(CONFIG.vocab_size, (2, sum(pieces)), generator=torch.Generator().manual_seed(len(pieces)))
    cache, past = make_cache(CONFIG, 2, sum(pieces)), 0
    if sum(pieces) > CONFIG.max_position_embeddings:
        return
    expected = logits(PARAMS, BALANCE, {"tokens": tokens, "targets": tokens}, CONFIG)
    for piece in pieces:
        found = next_logits(PARAMS, BALANCE, tokens[:, past : past + piece], cache, past, CONFIG)
        past += piece
        # fp32 products of other shapes
        torch.testing.assert_close(found, expected[:, past - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"qk_norm_over_heads": True}, {"clip_qkv": 0.3}, {"attention_bias": True, "attention_output_bias": True}],
)
def test_the_cache_knows_every_option_of_attention(options: dict[str, object]) -> None:
    config = dataclasses.replace(CONFIG, **options)
    params = init(config, seed=3)
    for layer in params["layers"]:
        for name, leaf in layer["attention"].items():
            leaf.add_(0.5 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(len(name))))
    tokens = torch.randint(CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = logits(params, BALANCE, {"tokens": tokens, "targets": tokens}, config)
    cache = make_cache(config, 2, 9)
    next_logits(params, BALANCE, tokens[:, :5], cache, 0, config)
    found = next_logits(params, BALANCE, tokens[:, 5:], cache, 5, config)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-4, atol=1e-4)


def test_greedy_text_is_the_argmax_of_the_whole_text_at_each_place() -> None:
    prompt = [4, 8, 15]
    new = generate(PARAMS, BALANCE, CONFIG, prompt, 9, temperature=0)
    text = torch.tensor([[*prompt, *new]])
    best = logits(PARAMS, BALANCE, {"tokens": text, "targets": text}, CONFIG).argmax(-1)
    assert new == best[0, len(prompt) - 1 : -1].tolist()


def test_a_seed_names_a_text() -> None:
    texts = [generate(PARAMS, BALANCE, CONFIG, [1], 12, temperature=2.0, top_p=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_the_text_ends_at_the_stop_token_and_where_positions_end() -> None:
    greedy = generate(PARAMS, BALANCE, CONFIG, [1], 100, temperature=0)
    assert len(greedy) == CONFIG.max_position_embeddings - 1
    stop = greedy[5]
    assert generate(PARAMS, BALANCE, CONFIG, [1], 100, temperature=0, stop=stop) == greedy[: greedy.index(stop)]
    seen: list[int] = []
    assert generate(PARAMS, BALANCE, CONFIG, [1], 7, temperature=0, on_token=seen.append) == seen == greedy[:7]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return set(choose(probabilities.log().expand(4000, 4), 1.0, top_p, generator).tolist())

    assert drawn(1e-9) == {1}
    assert drawn(0.49) == {1}
    assert drawn(0.6) == {1, 3}
    assert drawn(0.9) == {1, 2, 3}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_temperature_sharpens() -> None:
    probabilities = torch.tensor([0.3, 0.7])
    generator = torch.Generator().manual_seed(0)
    cold = choose(probabilities.log().expand(20_000, 2), 0.5, 1.0, generator).float().mean()
    # p^2 / sum p^2 = 0.845; twenty thousand draws have a standard deviation of 0.003
    assert abs(float(cold) - 0.49 / 0.58) < 0.015


def test_the_coldest_temperature_is_the_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert choose(logits, 1e-40, 1.0, torch.Generator().manual_seed(0)).item() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 20}, "prompt has 20 tokens"),
        ({"prompt": [31]}, "outside the vocabulary of 31"),
        ({"prompt": [-1]}, "outside the vocabulary of 31"),
        ({"temperature": -0.1}, r"temperature = -0\.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, r"top_p = 0\.0"),
        ({"top_p": 1.5}, r"top_p = 1\.5"),
        ({"max_new_tokens": 0}, "0 new tokens"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(PARAMS, BALANCE, CONFIG, **{"prompt": [1], "max_new_tokens": 3, **arguments})  # type: ignore[arg-type]
