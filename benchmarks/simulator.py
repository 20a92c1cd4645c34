"""The simulator against this machine: predicted step time and memory of small real configurations, and measured ones.

Run: ``python benchmarks/simulator.py [--rounds 7]``. For every configuration each rank measures its segments, alone and
all ranks at once, and what a gather and a reduction of each layer take; then a schedule is built, verified, simulated
and run. The step is what schedules are about: gradients from a batch, before the optimizer. Prints predicted and
measured seconds (the median over rounds), and predicted and measured peak bytes of HBM, which on a CPU is memory. Times
on a machine that does something else mean nothing.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _report import Ratio, make_parser, write
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import parallel
from functional_moe.chain import Microbatch, by_layer, make_chain
from functional_moe.config import MoEConfig
from functional_moe.memory import (
    HBM,
    Costs,
    Gathers,
    Link,
    LiveBytes,
    ResidentStore,
    Sizes,
    execute,
    keep_all,
    least,
    make_schedule,
    measure_seconds,
    offload_all,
    profile_chain,
    profile_context,
    recompute_all,
    simulate,
    verify,
)
from functional_moe.model import Totals, init_balance
from functional_moe.parallel import local_parts
from functional_moe.parameters import init
from functional_moe.sharding import make_sharding, model_layout

COUNTS = 6
"""How often memory is counted where ranks exchange tokens, for the least."""
RECIPES = {"keep": keep_all, "recompute": recompute_all, "offload": offload_all}


# How far predictions may be off.
TIME_BAR, MEMORY_BAR = 0.20, 0.05


class Case(NamedTuple):
    """One configuration."""

    fsdp: int
    ep: int
    recipe: str
    hidden: int
    layers: int
    seq: int
    microbatches: int = 1


class Outcome(NamedTuple):
    """Of one rank."""

    predicted: float  # seconds
    measured: float
    predicted_bytes: int
    measured_bytes: int


CASES = (
    Case(1, 1, "keep", 128, 4, 512),
    Case(1, 1, "recompute", 128, 4, 512),
    Case(1, 1, "offload", 256, 4, 512),
    Case(1, 1, "recompute", 256, 4, 256, 2),
    Case(2, 1, "keep", 256, 3, 512),
    Case(2, 1, "recompute", 256, 3, 512),
    Case(1, 2, "recompute", 256, 3, 512),
    Case(2, 2, "keep", 256, 3, 256),
    Case(2, 2, "recompute", 256, 3, 256),
)


def config_of(case: Case) -> MoEConfig:
    return MoEConfig(
        vocab_size=512,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 64,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=case.hidden,
        max_position_embeddings=case.seq,
    )


def run_case(case: Case, rounds: int) -> Outcome:
    """On every rank of a world, or in one process without."""
    config, sharded = config_of(case), case.fsdp * case.ep > 1
    generator = torch.Generator().manual_seed(dist.get_rank() if sharded else 0)
    batches = [_batch(config, case.seq, generator) for _ in range(case.microbatches)]
    if sharded:
        layout = model_layout(config, parallel.make_mesh(case.fsdp, case.ep))
        sharding = make_sharding(config, layout, None, torch.float32)
        shards = by_layer(local_parts(init(config, 0, layout=layout)))
        chain = make_chain(config, "fused", sharding.expert_parallel)
        store = sharding.layers.store(shards)
        for number, layer in enumerate(chain.layers):
            store.gather(layer, number)
        whole = {layer: pytree.tree_map(torch.clone, store.parameters(layer)) for layer in chain.layers}
        # The processor that computes also carries messages: nothing is had for nothing beside it.
        gathers = Gathers(sharding.layers.sizes, prefetch=0, settle=0)
        buffers, gather, reduce = sharding.layers.sizes, *_travel(sharding, shards, chain.layers)
    else:
        whole = by_layer(init(config, 0))
        chain, gathers, buffers, gather, reduce = make_chain(config), None, {}, {}, {}
        shards = whole
    # gloo's threads hold what an exchange of tokens sent for a moment after it is done.
    # How many rows come to this rank is another number in every layer: each is counted by itself.
    each = chain._replace(segments=tuple(segment._replace(kind=segment.name) for segment in chain.segments))
    alike = each if case.ep > 1 else chain
    counts = [profile_chain(alike, whole, batches[0]) for _ in range(COUNTS if case.ep > 1 else 1)]
    profiles = {name: least([one[name] for one in counts]) for name in counts[0]}
    names = [segment.name for segment in chain.segments]
    part = {layer: _bytes(tree) for layer, tree in shards.items()}
    sizes = Sizes(
        profiles,
        dict(zip(names, [None, *names[:-1]], strict=True)),
        buffers,
        part if sharded else {},
        {layer: _reducing(sharding.layers.plans[layer]) for layer in buffers},
        context=profile_context(chain, batches[0]),
    )
    # Ranks that share processors wait for each other's turns: what a run takes is then no least, but a mean.
    typical = statistics.mean if sharded else statistics.median
    seconds = measure_seconds(chain, whole, batches[0], repeats=rounds, typical=typical)
    copy = Link(_copy_rate())
    costs = Costs(seconds, gather, reduce, {"host": copy}, {"host": copy}, one_link=True)
    schedule = make_schedule(chain, RECIPES[case.recipe](chain), microbatches=case.microbatches, gathers=gathers)
    reports = verify(schedule, chain, sizes)
    slabs = {tier: report.slab for tier, report in reports.items() if tier != HBM}
    predicted = simulate(schedule, chain, sizes, costs).seconds

    def step() -> None:
        own = sharding.layers.store(shards) if sharded else ResidentStore(whole)
        execute(schedule, chain, own, batches, slabs=slabs)

    step()
    measured = statistics.median(_timed(step, sharded) for _ in range(rounds))
    gc.collect()
    if sharded:
        sharding.layers._buffers.clear()
    peaks = []
    for _ in range(COUNTS if sharded else 1):
        with LiveBytes() as memory:
            step()
        peaks.append(memory.peak)
        if sharded:
            sharding.layers._buffers.clear()
    return Outcome(predicted, measured, reports[HBM].peak, min(peaks) - sum(slabs.values()))


def _batch(config: MoEConfig, seq: int, generator: torch.Generator) -> Microbatch:
    tokens = torch.randint(config.vocab_size, (2, seq), generator=generator)
    count = torch.tensor(tokens.numel())
    return Microbatch({"tokens": tokens, "targets": tokens}, init_balance(config), Totals(count, count))


def _travel(sharding: Any, shards: Any, layers: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each layer's gather and reduction, all ranks at once and nothing beside."""
    gather, reduce = {}, {}
    for layer in layers:
        some, others = [], []
        for _ in range(8):
            store = sharding.layers.store(shards)

            def bring(store: Any = store, layer: str = layer) -> None:
                store.gather(layer, 0)
                store.parameters(layer)

            some.append(_timed(bring, True))

            def give(store: Any = store, layer: str = layer) -> None:
                store.reduce(layer)
                store.drop_gradient(layer)

            others.append(_timed(give, True))
            store.release(layer)
        gather[layer], reduce[layer] = statistics.mean(some[1:]), statistics.mean(others[1:])
    return gather, reduce


def _reducing(plan: Any) -> int:
    """Bytes besides a gradient: gloo receives as much as it is given, and what is packed is a copy first."""
    alone = sum(math.prod(plan.leaves[index].shape) for index in plan.alone)
    packed = sum(one.size * len(plan.leaves[one.leaves[0]].parts) for one in plan.packed.values())
    return 4 * (alone + 2 * packed)


def _timed(run: Callable[[], None], together: bool) -> float:
    if together:
        dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _copy_rate() -> float:
    source = torch.ones(1 << 20)
    target = torch.empty_like(source)
    return 4 * (1 << 20) / min(_timed(lambda: target.copy_(source), False) for _ in range(7))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = "ranks recipe hidden layers tokens step measured off peak measured off".split()
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    ratios = []
    for case in CASES:
        ranks = case.fsdp * case.ep
        if ranks == 1:
            outcomes = [run_case(case, arguments.rounds)]
        else:
            outcomes = parallel.spawn(run_case, ranks, case, arguments.rounds, timeout=120.0)
        predicted, measured = (max(one[field] for one in outcomes) for field in (0, 1))
        first = outcomes[0]
        print(
            f"| {case.fsdp} x {case.ep} | {case.recipe} | {case.hidden} | {case.layers} | "
            f"{case.microbatches} x {2 * case.seq} | {1e3 * predicted:.1f} ms | {1e3 * measured:.1f} ms | "
            f"{100 * (predicted / measured - 1):+.0f}% | {first.predicted_bytes / 1e6:.1f} MB | "
            f"{first.measured_bytes / 1e6:.1f} MB | {100 * (first.predicted_bytes / first.measured_bytes - 1):+.1f}% |",
            flush=True,
        )
        what = f"{case.fsdp} x {case.ep} ranks, {case.recipe}, hidden {case.hidden}, {case.microbatches} microbatches"
        off = abs(predicted / measured - 1), abs(first.predicted_bytes / first.measured_bytes - 1)
        ratios.append(Ratio(f"{what}: time off by", "measured", off[0], TIME_BAR, False))
        ratios.append(Ratio(f"{what}: memory off by", "measured", off[1], MEMORY_BAR, False))
    write(arguments.json, ratios)


if __name__ == "__main__":
    main()
