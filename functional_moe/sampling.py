"""Text from a model, one token at a time, with the keys and values of the past kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import Projected, attend, project, project_back, rotary_tables
from .config import MoEConfig
from .model import embed, feed_forward_half, head_norm, head_weight
from .norm import rms_norm
from .parameters import Params


class Cache(NamedTuple):
    """Keys and values of the tokens so far, in buffers as long as the text may get."""

    keys: list[Tensor]  # per layer [batch, kv_heads, capacity, head_dim]
    values: list[Tensor]  # like keys


def make_cache(config: MoEConfig, batch: int, capacity: int, device: torch.device | str = "cpu") -> Cache:
    """An empty cache for ``capacity`` tokens, in the compute dtype."""
    shape = (batch, config.num_key_value_heads, capacity, config.attention_head_dim)

    def buffers() -> list[Tensor]:
        return [torch.zeros(shape, dtype=config.dtype, device=device) for _ in range(config.num_hidden_layers)]

    return Cache(buffers(), buffers())


def next_logits(params: Params, balance: Tensor, tokens: Tensor, cache: Cache, past: int, config: MoEConfig) -> Tensor:
    """Logits behind the last of some new tokens; their keys and values are written into ``cache``.

    Args:
      params: the parameter tree.
      balance: fp32 [moe_layers, experts].
      tokens: int64 [batch, new].
      cache: holds ``past`` tokens; changed in place, which is what it is for.
      past: tokens already in the cache.
      config: the model.

    Returns:
      [batch, vocab], fp32 or better.
    """
    end = past + tokens.shape[1]
    x = embed(params, tokens, config)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    places = torch.arange(past, end, device=tokens.device)
    cos, sin = rotary_tables(places[None], config, torch.promote_types(x.dtype, torch.float32))
    for index, layer in enumerate(params["layers"]):
        normed = rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
        q, k, v = project(layer["attention"], normed, cos, sin, config)
        cache.keys[index][:, :, past:end] = k
        cache.values[index][:, :, past:end] = v
        seen = Projected(q, cache.keys[index][:, :, :end], cache.values[index][:, :, :end])
        x = x + project_back(layer["attention"], attend(seen, None).out, config)
        bias = balance[index - config.first_k_dense_replace] if config.is_moe_layer(index) else None
        x = feed_forward_half(layer, bias, x, valid, config).x
    last = head_norm(params, x[:, -1:], config)[:, 0]
    return (last @ head_weight(params, config)).to(torch.promote_types(last.dtype, torch.float32))


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token from each row of ``logits`` [batch, vocab].

    Args:
      logits: fp32.
      temperature: divides the logits; 0 takes the most likely token.
      top_p: the tokens considered are the fewest whose probabilities reach this sum (arXiv 1904.09751).
      generator: of the random numbers.

    Returns:
      int64 [batch].
    """
    if temperature == 0:
        return logits.argmax(-1)
    # The maximum goes first: a tiny temperature would make both inf, and their difference nothing.
    cooled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities, order = torch.softmax(cooled, dim=-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    # The first token has nothing before it, so at least one stays.
    probabilities = torch.where(before < top_p, probabilities, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1)


def generate(
    params: Params,
    balance: Tensor,
    config: MoEConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: int | None = None,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """Continues ``prompt``.

    Args:
      params: the parameter tree.
      balance: fp32 [moe_layers, experts].
      config: the model.
      prompt: at least one token.
      max_new_tokens: the text ends after so many, at ``stop``, or when the prompt and they reach
        ``max_position_embeddings``.
      temperature: see ``choose``; at least 0.
      top_p: see ``choose``; in (0, 1].
      seed: of the random numbers; the same seed gives the same text.
      stop: the token that ends the text; not returned.
      on_token: called with each new token.

    Returns:
      The new tokens.

    Raises:
      ValueError: an empty prompt, one that fills ``max_position_embeddings``, a token outside the vocabulary, or an
        argument out of range.
    """
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    if len(prompt) >= config.max_position_embeddings:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the model takes fewer than {config.max_position_embeddings}"
        )
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"the prompt holds token {token}, outside the vocabulary of {config.vocab_size}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature}: must be a finite number of at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: must lie in (0, 1]")
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens} new tokens: must be at least 1")
    device = balance.device
    generator = torch.Generator(device=device).manual_seed(seed)
    capacity = min(len(prompt) + max_new_tokens, config.max_position_embeddings)
    cache = make_cache(config, 1, capacity, device)
    new: list[int] = []
    tokens, past = torch.tensor([list(prompt)], device=device), 0
    with torch.no_grad():
        while past + tokens.shape[1] < capacity:
            logits = next_logits(params, balance, tokens, cache, past, config)
            past += tokens.shape[1]
            token = int(choose(logits, temperature, top_p, generator))
            if token == stop:
                break
            new.append(token)
            if on_token is not None:
                on_token(token)
            tokens = torch.tensor([[token]], device=device)
    return new
