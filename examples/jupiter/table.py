"""The published 952-billion run against what the dry run, the planner and the simulator predict of it.

    python examples/jupiter/table.py             # the table, in two minutes on two cores
    python examples/jupiter/table.py --json      # the same for programs
    python examples/jupiter/table.py --plot timeline.png

One constant is calibrated: the rate of products on Grace (2.5 TFLOP/s), from the published 41.7 s. Everything else is
a specification or somebody's measurement, in functional_moe/hardware/jupiter.toml with its source; the model's shape
is inferred where it is not published (functional_moe/config.py says where).
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from functional_moe.config import preset
from functional_moe.dry_run import DryRun, dry_run
from functional_moe.machine import Machine, read_machine
from functional_moe.memory import HBM, HOST, Recipe, draw
from functional_moe.predict import Choice, Prediction, optimizer_seconds, predict

GIB = 2**30
NODES, EP, PARTS = 96, 4, 8


class Row(NamedTuple):
    """One published figure and ours."""

    what: str
    published: float | None
    predicted: float
    unit: str
    why: str  # they differ, or what the figure means

    def __str__(self) -> str:
        published = "-" if self.published is None else f"{self.published:g}"
        off = "" if not self.published else f" ({100 * (self.predicted / self.published - 1):+.1f}%)"
        return f"| {self.what} | {published} | {self.predicted:.4g}{off} | {self.unit} | {self.why} |"


def recompute(core: str, entry: str = "offload") -> dict[str, list[Recipe]]:
    """One recipe for all layers: inputs of layers leave HBM, all else is computed again but for attention's core."""
    return {
        "embed": [Recipe()],
        "head": [Recipe()],
        "attention": [Recipe(False, entry, {"core": core})],  # type: ignore[dict-item]
        "experts": [Recipe(False, "recompute", {"decision": "offload"})],
    }


ONE_AFTER_THE_OTHER = Choice(prefetch=0, settle=0, optimizer_dtype="float32")
"""Nothing travels while something is computed; Newton-Schulz in fp32 on CUDA cores."""
BESIDE = Choice(prefetch=1, settle=4, optimizer_dtype="float32")
"""Layers are gathered one ahead, and a gradient's reduction has a layer's backward to end."""
FASTEST = Choice(gather_dtype="float8", router_dtype="tfloat32")
"""Found by ``functional-moe plan --search``."""


class Runs(NamedTuple):
    """What everything is computed from."""

    machine: Machine
    full: DryRun  # 65,536 tokens
    half: DryRun  # 32,768
    parts: DryRun  # 65,536, of which experts take an eighth at a time


def make_runs() -> Runs:
    """Three dry runs."""
    config = preset("jupiter-952b")
    full, half = (dry_run(config, NODES, EP, tokens) for tokens in (65_536, 32_768))
    return Runs(read_machine("jupiter"), full, half, dry_run(config, NODES, EP, 65_536, expert_parts=PARTS))


def sizes(runs: Runs) -> list[Row]:
    """What needs no clock."""
    config, full = runs.full.config, runs.full
    profiles = full.profiles
    boundaries = sum(profiles[f"layers.{layer}.feed_forward"].output for layer in range(config.num_hidden_layers))
    return [
        Row("parameters", 951.9, config.num_params / 1e9, "billion", "the shape is inferred to give it"),
        Row("active parameters", 32.8, config.num_active_params / 1e9, "billion", "likewise"),
        Row("layer boundaries at 65,536 tokens", 55.5, boundaries / GIB, "GiB", ""),
        Row(
            "two buffers of gathered layers",
            14.0,
            2 * max(full.gathers["bfloat16"].buffers.values()) / GIB,
            "GiB",
            "published: what a side stream held longer, a little over two buffers",
        ),
    ]


def optimizer(runs: Runs) -> list[Row]:
    """The update: on Grace, as published on the GPU, and what a good implementation needs."""
    full, machine = runs.full, runs.machine
    host = optimizer_seconds(full, machine, Choice(optimizer_on="host"))
    fp32 = optimizer_seconds(full, machine, Choice(optimizer_dtype="float32"))
    good = optimizer_seconds(full, machine, Choice())
    grace = optimizer_seconds(full, machine, Choice(state_in=HOST))
    work = full.optimizer

    def parts(one: object) -> str:
        return ", ".join(f"{name} {seconds:.3f}" for name, seconds in one._asdict().items())  # type: ignore[attr-defined]

    flops = work.local_flops + work.owned_flops
    return [
        Row("Newton-Schulz on Grace", 41.7, host.products, "s", f"{flops / 1e12:.1f} TFLOP; the calibrated constant"),
        Row(
            "optimizer on the GPU",
            2.2,
            fp32.total,
            "s",
            f"a reading, not a fact: fp32 on CUDA cores explains it ({parts(fp32)})",
        ),
        Row("the same, products in bf16, state in HBM", None, good.total, "s", parts(good)),
        Row("the same, state in Grace", None, grace.total, "s", parts(grace)),
        Row(
            "lower bound: products at the bf16 peak, one pass over state",
            None,
            flops / machine.rate("bfloat16").peak + 12 * work.parameters / machine.tiers[HBM].bandwidth,
            "s",
            "one rank owns a 6144 x 6144 matrix of 7 TFLOP, which cannot be divided",
        ),
    ]


def ablations(runs: Runs) -> list[Row]:
    """The published steps, each a schedule of this code."""
    machine = runs.machine
    serial = predict(runs.full, machine, ONE_AFTER_THE_OTHER, recipes=recompute("recompute"))
    on_host = predict(
        runs.full, machine, ONE_AFTER_THE_OTHER._replace(optimizer_on="host"), recipes=recompute("recompute")
    )
    half = predict(runs.half, machine, ONE_AFTER_THE_OTHER, recipes=recompute("recompute", "keep"))
    unlimited = dict.fromkeys(machine.tiers, 10**13)
    kept = predict(runs.half, machine, BESIDE, unlimited, recipes=recompute("recompute", "keep"))
    beside = predict(runs.half, machine, BESIDE, recipes=recompute("offload"))
    return [
        Row(
            "65,536: optimizer on Grace",
            441,
            on_host.tokens_per_second,
            "tokens/s",
            "all computed again, nothing beside computing; 5 to 6 s are tokens on NVLink, which they may have hidden",
        ),
        Row("65,536: optimizer on the GPU", 597, serial.tokens_per_second, "tokens/s", "the same schedule"),
        Row(
            "the gain",
            597 / 441,
            serial.tokens_per_second / on_host.tokens_per_second,
            "times",
            "39.5 s of 148.6 s published",
        ),
        Row(
            "32,768: full recomputation, offload begins",
            370,
            half.tokens_per_second,
            "tokens/s",
            f"computing and the network one after the other: {half.peaks[HBM] / 1e9:.1f} GB of HBM",
        ),
        Row(
            "  HBM to have the network beside it, boundaries kept",
            None,
            kept.peaks[HBM] / 1e9,
            "GB",
            "of 96, before fragmentation and the buffers of NCCL",
        ),
        Row(
            "32,768: checkpoints in Grace",
            508,
            beside.tokens_per_second,
            "tokens/s",
            f"the network alone, computing beside it, in {beside.peaks[HBM] / 1e9:.1f} GB: that is what offload bought",
        ),
    ]


def final(runs: Runs, effort: int = 40_000) -> list[Row]:
    """What 1300 tokens/s need."""
    full, found = runs.full, changes(runs, effort)
    network = next(iter(found.values())).network
    rows = [
        Row(
            "1300: ceiling of two bf16 gathers and a bf16 reduction per 65,536 tokens",
            1300,
            full.tokens / network,
            "tokens/s",
            f"{network:.1f} s on the link even if computing took no time: cannot reach it",
        )
    ]
    for what, one in found.items():
        rows.append(Row(what, 1300, one.tokens_per_second, "tokens/s", f"step {one.seconds:.1f} s, {_limits(one)}"))
    return rows


def changes(runs: Runs, effort: int = 40_000) -> dict[str, Prediction]:
    """What could be changed, one after the other."""
    machine = runs.machine

    def of(
        choice: Choice,
        budgets: dict[str, int] | None = None,
        recipes: dict[str, list[Recipe]] | None = None,
        run: DryRun = runs.full,
    ) -> Prediction:
        return predict(run, machine, choice, budgets, recipes=recipes, effort=effort)

    plain = Choice()
    more = {tier: one.bytes for tier, one in machine.tiers.items()} | {HOST: 250 * 10**9}
    two = plain._replace(microbatches=2, order="layer_major")
    return {
        "bf16 messages, planned": of(plain),
        "two sequences per gather (layer-major), experts in 8 parts": of(two, run=runs.parts),
        "  the same, were Grace 250 GB": of(two, more, recompute("offload"), runs.parts),
        "fp8 gathers, one sequence": of(plain._replace(gather_dtype="float8")),
        "+ experts in 8 parts": of(plain._replace(gather_dtype="float8"), run=runs.parts),
        "+ and the router's products in TF32: the schedule found": of(FASTEST, run=runs.parts),
    }


def _limits(one: Prediction) -> str:
    part = one.plan.timeline.bound[0]
    busy = one.plan.timeline.busy
    return f"network {one.network:.1f} s, computing {busy['compute']:.1f} s; longest part {part.what}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help="draw the fastest schedule")
    arguments = parser.parse_args()
    runs = make_runs()
    rows = [*sizes(runs), *optimizer(runs), *ablations(runs), *final(runs)]
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        print("| what | published | predicted | unit | why they differ |\n|---|---|---|---|---|")
        print("\n".join(map(str, rows)))
    if arguments.plot:
        one = predict(runs.parts, runs.machine, FASTEST)
        budgets = {tier: memory.bytes for tier, memory in runs.machine.tiers.items()}
        draw(arguments.plot, one.plan.schedule, one.plan.timeline, runs.parts.chain, budgets)


if __name__ == "__main__":
    main()
