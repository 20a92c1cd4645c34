"""Schedules of the model's own layers against ``torch.utils.checkpoint``, each other, and a loop written by hand.

Run: ``python benchmarks/memory.py [--rounds 11] [--hidden-size 256] [--layers 6]``. Everything runs the same segments
on the same parameters and batch, in interleaved rounds; medians and their ratios are printed, with the peak of live
tensor bytes.

1. Full recomputation: each half of a layer replayed from its input, against ``torch.utils.checkpoint(use_reentrant=
   False)`` around each layer, which keeps half as many inputs and has more at its peak; and what is planned within the
   peak of that.
2. At a sequence of 4096: the attention core kept, against everything recomputed.
3. A budget halfway between "recompute all" and "keep all": the planned schedule against the best uniform policy that
   fits.
4. The executor without recomputation or offload, against a hand-written loop over the segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _report import Ratio, interleaved, make_parser, write
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from functional_moe import memory
from functional_moe.chain import Microbatch, by_layer, make_chain
from functional_moe.config import MoEConfig
from functional_moe.memory import HBM, Recipe, ResidentStore, execute, make_schedule, verify
from functional_moe.model import count_totals, init_balance
from functional_moe.parameters import init

Run = Callable[[], Any]
CHECKPOINT_BAR, RESIDUALS_BAR, PLANNED_BAR, EXECUTOR_BAR = 1.15, 1.1, 1.0, 1.03


class Problem:
    """A model, a batch, and what is run on them."""

    def __init__(self, hidden: int, layers: int, rows: int, seq: int) -> None:
        self.config = MoEConfig(
            vocab_size=512,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=hidden,
            use_qk_norm=True,
            max_position_embeddings=seq,
        )
        self.chain = make_chain(self.config)
        self.layers = by_layer(init(self.config, seed=0))
        tokens = torch.randint(512, (rows, seq), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
        self.batch = Microbatch(batch, init_balance(self.config), count_totals(batch))

    def recipes(self, attention: Recipe, feed_forward: Recipe) -> dict[str, Recipe]:
        """Of every layer alike; the ends keep their graphs."""
        halves = {"attention": attention, "experts": feed_forward}
        return {one.name: halves[one.kind] for one in self.chain.segments if one.kind in halves}

    def scheduled(self, schedule: memory.Schedule) -> Run:
        """One step by a schedule, offloading within the host's memory."""
        sizes = memory.profile_here(self.chain, self.layers, self.batch)
        reports = verify(schedule, self.chain, sizes)
        slabs = {tier: report.slab for tier, report in reports.items() if tier != HBM}
        return lambda: execute(schedule, self.chain, ResidentStore(self.layers), [self.batch], slabs=slabs)

    def by_hand(self, checkpointed: bool) -> Run:
        """One step by plain autograd: segment after segment, or each layer under ``torch.utils.checkpoint``."""
        segments = self.chain.segments

        def layer(attention: Any, feed_forward: Any, tree: Any, x: Tensor, context: Any) -> tuple[Tensor, Tensor]:
            x = attention.function({attention.layers[0]: tree}, x, context, {}).output
            result = feed_forward.function({feed_forward.layers[0]: tree}, x, context, {})
            return result.output, result.loss

        def run() -> Any:
            leaves, spec = pytree.tree_flatten(self.layers)
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            trees = pytree.tree_unflatten(leaves, spec)
            context = self.chain.prepare(self.batch)
            x = segments[0].function({"embed": trees["embed"]}, None, context, {}).output
            losses = []
            for index in range(1, len(segments) - 1, 2):
                pair = (segments[index], segments[index + 1], trees[segments[index].layers[0]])
                if checkpointed:
                    x, loss = checkpoint(layer, *pair, x, context, use_reentrant=False)
                else:
                    x, loss = layer(*pair, x, context)
                losses.append(loss)
            loss = segments[-1].function({"head": trees["head"]}, x, context, {}).loss
            for part in losses:
                loss = loss if part is None else loss + part
            return torch.autograd.grad(loss, leaves, allow_unused=True)

        return run

    def loop(self) -> Run:
        """What the executor does, written out: a graph per segment, kept until its backward."""
        segments = self.chain.segments

        def run() -> Any:
            context = self.chain.prepare(self.batch)
            x, tape, gradients = None, [], {}
            for segment in segments:
                leaves, spec = pytree.tree_flatten({name: self.layers[name] for name in segment.layers})
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                x = None if x is None else x.detach().requires_grad_()
                result = segment.function(pytree.tree_unflatten(leaves, spec), x, context, {})
                tape.append((segment.name, result, x, leaves))
                x = result.output
            cotangent = None
            while tape:
                name, result, x, leaves = tape.pop()
                outputs = [one for one in (result.output, result.loss) if one is not None]
                cotangents = [cotangent] if result.output is not None else []
                cotangents += [torch.ones_like(result.loss)] if result.loss is not None else []
                inputs = leaves if x is None else [x, *leaves]
                del result
                found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
                del outputs
                cotangent = None if x is None else found[0]
                gradients[name] = found
            return gradients

        return run


def peak(run: Run) -> float:
    """MiB of live tensors at most, beyond what stands before."""
    with memory.LiveBytes() as counted:
        run()
    return counted.peak / 2**20


def show(title: str, runs: dict[str, Run], rounds: int) -> dict[str, float]:
    seconds = interleaved(runs, rounds)
    print(title)
    for name, run in runs.items():
        print(f"  {name:<44}{seconds[name] * 1e3:>9.1f} ms{peak(run):>9.1f} MiB")
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    arguments = parser.parse_args()
    replay = Recipe(record=False)
    full = lambda problem: make_schedule(problem.chain, problem.recipes(replay, replay))  # noqa: E731

    problem = Problem(arguments.hidden_size, arguments.layers, arguments.rows, arguments.seq_len)
    sizes = memory.profile_here(problem.chain, problem.layers, problem.batch)
    costs = memory.Costs(memory.measure_seconds(problem.chain, problem.layers, problem.batch))
    checkpointed = problem.by_hand(True)
    planned = memory.plan(problem.chain, sizes, costs, {HBM: int(0.97 * peak(checkpointed) * 2**20)})
    runs = {
        "all recomputed": problem.scheduled(full(problem)),
        "planned within the peer's peak": problem.scheduled(planned.schedule),
        "torch.utils.checkpoint": checkpointed,
    }
    seconds = show("full recomputation against torch.utils.checkpoint", runs, arguments.rounds)
    ratios = []
    for name in list(runs)[:2]:
        ratio = seconds["torch.utils.checkpoint"] / seconds[name]
        print(f"  {name}: {ratio:.3f}x its speed")
        ratios.append(Ratio(f"speed, {name}", "torch.utils.checkpoint", ratio, CHECKPOINT_BAR))
    ratio = peak(runs["all recomputed"]) / peak(checkpointed)
    ratios.append(Ratio("memory, all recomputed", "torch.utils.checkpoint", ratio, 1.0, False))

    long = Problem(arguments.hidden_size, 2, 1, 4096)
    kept = make_schedule(long.chain, long.recipes(replay._replace(residuals={"core": "keep"}), replay))
    runs = {"attention core kept": long.scheduled(kept), "all recomputed": long.scheduled(full(long))}
    seconds = show("attention residuals at a sequence of 4096", runs, max(3, arguments.rounds // 2))
    ratio = seconds["all recomputed"] / seconds["attention core kept"]
    print(f"  {ratio:.3f}x")
    ratios.append(Ratio("speed, attention core kept at 4096 tokens", "all recomputed", ratio, RESIDUALS_BAR))

    uniform = {"keep all": memory.keep_all(problem.chain), "recompute all": memory.recompute_all(problem.chain)}
    schedules = {name: make_schedule(problem.chain, recipes) for name, recipes in uniform.items()}
    peaks = {name: verify(one, problem.chain, sizes)[HBM].peak for name, one in schedules.items()}
    budget = sum(peaks.values()) // 2
    planned = memory.plan(problem.chain, sizes, costs, {HBM: budget})
    fitting = [name for name, bytes_ in peaks.items() if bytes_ <= budget]
    runs = {"planned": problem.scheduled(planned.schedule)}
    runs |= {name: problem.scheduled(schedules[name]) for name in schedules}
    seconds = show(f"a budget of {budget / 2**20:.1f} MiB, in which fit: {', '.join(fitting)}", runs, arguments.rounds)
    ratio = min(seconds[name] for name in fitting) / seconds["planned"]
    print(f"  {ratio:.3f}x the best uniform policy that fits")
    ratios.append(Ratio("speed, planned for half the room", "best uniform policy that fits", ratio, PLANNED_BAR))

    runs = {"executor": problem.scheduled(make_schedule(problem.chain)), "loop by hand": problem.loop()}
    seconds = show("the executor without recomputation", runs, 2 * arguments.rounds)
    ratio = seconds["executor"] / seconds["loop by hand"]
    print(f"  {ratio - 1:+.1%} over a loop")
    ratios.append(Ratio("time of the executor", "a loop by hand", ratio, EXECUTOR_BAR, False))
    write(arguments.json, ratios)


if __name__ == "__main__":
    main()
