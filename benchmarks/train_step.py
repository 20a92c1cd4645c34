"""The training step against transformers' Qwen3-MoE: same shapes, same batch, AdamW on both, fp32.

Run: ``python benchmarks/train_step.py [--preset tiny] [--rounds 15]``. Prints tokens/s of each and the ratio of their
medians over interleaved rounds, then where our time goes. The peer runs with the fastest of its own settings: its
grouped experts, scaled-dot-product attention, and the faster of torch's foreach and fused AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from _report import Ratio, make_parser, write
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from functional_moe import optim
from functional_moe.config import MoEConfig, preset
from functional_moe.flops import measure_matmul_rate, train_flops_per_token
from functional_moe.parameters import init
from functional_moe.train_step import init_state, make_train_step

BAR = 1.5
EXPERTS = ("grouped_mm", "eager")  # batched_mm copies every expert for every token: minutes a step


def our_step(config: MoEConfig, tokens: torch.Tensor) -> Callable[[], float]:
    optimizer = optim.adamw(3e-4, b2=0.95, weight_decay=0.01)
    step = make_train_step(config, optimizer)
    state = init_state(init(config, seed=0), optimizer, config)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics.loss)

    return run


def their_step(config: MoEConfig, tokens: torch.Tensor, experts: str, fused: bool) -> Callable[[], float]:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.attention_head_dim,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            max_position_embeddings=config.max_position_embeddings,
            router_aux_loss_coef=config.router_aux_loss_coef,
            output_router_logits=True,
            use_cache=False,
            attn_implementation="sdpa",
            experts_implementation=experts,
        )
    )
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01, foreach=not fused, fused=fused
    )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run() -> float:
        # shift_labels: the targets as they are, so that both predict the same tokens
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # their gradient norm: we report ours too
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def seconds(function: Callable[[], float]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def fastest_peer(config: MoEConfig, tokens: torch.Tensor) -> tuple[str, Callable[[], float]]:
    candidates = {}
    for experts in EXPERTS:
        for fused in (False, True):
            run = their_step(config, tokens, experts, fused)
            run()
            candidates[statistics.median(seconds(run) for _ in range(3))] = (experts, fused)
    experts, fused = candidates[min(candidates)]
    name = f"{experts} experts, {'fused' if fused else 'foreach'} AdamW"
    return name, their_step(config, tokens, experts, fused)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    logging.set_verbosity_error()

    config = preset(arguments.preset)
    shape = (arguments.batch_size, arguments.seq_len + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    name, theirs = fastest_peer(config, tokens)
    ours = our_step(config, tokens)
    for _ in range(2):
        ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(arguments.rounds)]
    mine, peer = (statistics.median(column) for column in zip(*times, strict=True))
    count = arguments.batch_size * arguments.seq_len
    rate = measure_matmul_rate(torch.float32)
    flops = train_flops_per_token(config, arguments.seq_len)
    print(f"{torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in a matrix product, torch {torch.__version__}")
    print(f"functional_moe  {count / mine:9,.0f} tokens/s  MFU {count * flops / mine / rate:.0%}")
    print(f"transformers    {count / peer:9,.0f} tokens/s  MFU {count * flops / peer / rate:.0%}  ({name})")
    print(f"ratio {peer / mine:.2f} (median of {arguments.rounds} interleaved rounds)")
    write(arguments.json, [Ratio(f"training step, {arguments.preset}", f"transformers, {name}", peer / mine, BAR)])
    print(f"      {statistics.median(theirs / ours for ours, theirs in times):.2f} (median of the rounds' own ratios)")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        ours()
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=50))


if __name__ == "__main__":
    main()
