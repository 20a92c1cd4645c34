"""What one GPU shows: each section in a process of its own, with a time limit, into one JSON file.

    sh benchmarks/gpu.sh                     # everything, under eight minutes
    sh benchmarks/gpu.sh --only offload      # one section
    sh benchmarks/gpu.sh --dry               # on the CPU, toy sizes, stand-ins for streams: does it run?

A section that fails is written down with its error in one line, and the others go on; the exit status is then 1. The
file is written after every section, so that nothing is lost when the machine is taken away.

Memory is that of torch's allocator (``max_memory_allocated``); utilisation is against the rate of a large matrix
product measured in the same run, with the multiplications of the model alone, nothing recomputed
(``train_flops_per_token``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import muon
import torch
from _report import interleaved
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import memory, optim
from functional_moe.chain import Microbatch, by_layer, make_chain
from functional_moe.config import MoEConfig
from functional_moe.flops import measure_matmul_rate, train_flops_per_token
from functional_moe.model import count_totals, init_balance
from functional_moe.parameters import abstract, labels, matrix_axes
from functional_moe.train_step import init_state, make_train_step

LIMITS = {"machine": 40, "tests": 90, "bits": 80, "offload": 70, "peak": 60, "muon": 50, "waits": 30, "step": 60}
"""Seconds of each section, in its order: 480 in all."""


class Here(NamedTuple):
    """Where a section runs."""

    device: str
    dry: bool

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """The median, after one run that does not count."""
        taken = []
        for _ in range(repeats + 1):
            self.sync()
            start = time.perf_counter()
            run()
            self.sync()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def peak(self, run: Callable[[], Any]) -> int:
        """Bytes at the peak of a run over those before it."""
        if self.device != "cuda":
            with memory.LiveBytes() as live:
                out = run()
                del out
            return int(live.peak)
        run()  # what libraries keep for themselves is there from now on
        self.sync()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.sync()
        return torch.cuda.max_memory_allocated() - before


# What a model's parts are called with.


def draw_parameters(config: MoEConfig, device: str) -> Any:
    """Random parameters, made on the device: to draw billions on the host takes longer than all the rest."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(leaf: Tensor) -> Tensor:
        if leaf.ndim == 1:
            return torch.ones(leaf.shape, device=device)
        return torch.empty(leaf.shape, device=device).normal_(0, 0.02, generator=generator)

    return pytree.tree_map(draw, abstract(config))


def draw_batch(config: MoEConfig, rows: int, seq: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (rows, seq + 1), generator=generator).to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def make_config(here: Here, **sizes: int) -> MoEConfig:
    tiny = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    # On the CPU in float32: what is tried there is the script.
    return MoEConfig(
        **(tiny if here.dry else sizes),
        use_qk_norm=True,
        router_aux_loss_coef=0.01,
        compute_dtype="float32" if here.dry else "bfloat16",
        loss_chunk_size=4096,
    )


class Problem:
    """A chain with its parameters and a batch, to run schedules of."""

    def __init__(self, here: Here, config: MoEConfig, rows: int, seq: int) -> None:
        self.chain = make_chain(config)
        self.layers = by_layer(draw_parameters(config, here.device))
        batch = draw_batch(config, rows, seq, here.device)
        self.part = Microbatch(batch, init_balance(config, here.device), count_totals(batch))

    def schedule(self, policy: memory.Policy | None) -> memory.Schedule:
        """Every layer replayed, its boundaries, attention and decisions kept or offloaded; ``None``: graphs kept."""
        recipes = {}
        for one in self.chain.segments:
            if policy is not None and one.kind in ("attention", "experts"):
                residuals: dict[str, memory.Policy] = dict.fromkeys(one.residuals, policy)
                recipes[one.name] = memory.Recipe(record=False, input=policy, residuals=residuals)
        return memory.make_schedule(self.chain, recipes, lead=2)

    def sizes(self) -> memory.Sizes:
        return memory.profile_here(self.chain, self.layers, self.part)

    def run(
        self, schedule: memory.Schedule, slabs: dict[str, int], copies: memory.Copies | None = None
    ) -> memory.Execution:
        store = memory.ResidentStore(self.layers)
        return memory.execute(schedule, self.chain, store, [self.part], slabs=slabs, copies=copies)


def slabs_of(problem: Problem, schedule: memory.Schedule, sizes: memory.Sizes) -> dict[str, int]:
    reports = memory.verify(schedule, problem.chain, sizes)
    return {tier: report.peak for tier, report in reports.items() if tier != memory.HBM}


class DelayedCopies(memory.CudaCopies):
    """Copies whose streams sleep before each, so that whoever does not wait reads too early."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def start(self, source: Tensor, destination: Tensor) -> memory.Copy:
        if self._random.random() < 0.5:
            with torch.cuda.stream(self.stream(source)):
                torch.cuda._sleep(self._random.randrange(1 << 22))  # up to some milliseconds
        return super().start(source, destination)


class TimedCopies(memory.CudaCopies):
    """Copies between two events each."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, source: Tensor, destination: Tensor) -> memory.Copy:
        stream = self.stream(source)
        stream.wait_stream(torch.cuda.current_stream())
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        copy = super().start(source, destination)
        last.record(stream)
        self.spans.append((source.is_cuda, source.numel() * source.element_size(), first, last))
        return copy

    def rates(self) -> dict[str, float]:
        """GB/s of each direction while it copied."""
        found = {}
        for name, out in (("to_host", True), ("to_device", False)):
            some = [(size, first.elapsed_time(last)) for is_out, size, first, last in self.spans if is_out == out]
            found[name] = sum(size for size, _ in some) / max(1e-9, sum(taken for _, taken in some)) / 1e6
        return found


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, and NaN in memory that nobody has written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# The sections: each returns what goes into the file.


def machine(here: Here) -> dict[str, Any]:
    """The limits that the rest is to be seen against."""
    size = 1 << (20 if here.dry else 30)
    source = torch.zeros(size, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "product_tflops": {
            name: measure_matmul_rate(getattr(torch, name), here.device, 64 if here.dry else None, 0.05) / 1e12
            for name in ("float32", "bfloat16")
        },
        "copy_gb_per_s": 2 * size / here.seconds(lambda: target.copy_(source), 5) / 1e9,
    }
    host = torch.empty(size, dtype=torch.uint8, pin_memory=here.device == "cuda")
    found["to_host_gb_per_s"] = size / here.seconds(lambda: host.copy_(source, non_blocking=True), 5) / 1e9
    found["to_device_gb_per_s"] = size / here.seconds(lambda: source.copy_(host, non_blocking=True), 5) / 1e9
    if here.device == "cuda":
        copies = memory.CudaCopies()
        other = torch.empty_like(host, pin_memory=True)

        def both() -> None:
            started = [copies.start(target, other), copies.start(host, source)]
            for copy in started:
                copy.wait()

        found["both_ways_gb_per_s"] = 2 * size / here.seconds(both, 5) / 1e9
        properties = torch.cuda.get_device_properties(0)
        found["device"] = {
            "name": properties.name,
            "bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def tests(here: Here) -> dict[str, Any]:
    """The tests that are marked ``cuda``; dry: that they are found."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider"]
    command += ["tests/functional_moe/test_cuda.py", "tests/functional_moe/test_attention.py"]
    done = subprocess.run([*command, *(["--collect-only"] if here.dry else [])], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join(failed) or (lines or done.stderr.strip().splitlines() or ["no output"])[-1])
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|failed)", lines[-1])}
    return {"says": lines[-1], **counts}


def bits(here: Here) -> dict[str, Any]:
    """Gradients with everything offloaded, over copies that come late, against those with every graph kept."""
    config = make_config(
        here,
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    problem = Problem(here, config, 2, 16 if here.dry else 2048)
    plain, moved = problem.schedule(None), problem.schedule("offload")
    slabs = slabs_of(problem, moved, problem.sizes())
    with deterministic():
        expected = pytree.tree_leaves(problem.run(plain, {})[:2])
        again = pytree.tree_leaves(problem.run(plain, {})[:2])
        if not all(map(torch.equal, expected, again)):
            raise RuntimeError("the plain step gives other bits each time: nothing to compare with")
        if not all(bool(leaf.isfinite().all()) for leaf in expected):
            raise RuntimeError("the plain step's gradient is not finite")
        differing, runs = [], 20
        for seed in range(runs):
            copies = memory.AdversarialCopies(seed) if here.dry else DelayedCopies(seed)
            found = pytree.tree_leaves(problem.run(moved, slabs, copies)[:2])
            if not all(map(torch.equal, expected, found)):
                differing.append(seed)
    if differing:
        raise RuntimeError(f"with offload {len(differing)} of {runs} runs give other bits: seeds {differing}")
    return {"runs": runs, "equal": True, "copies_per_run": sum(isinstance(one, memory.Offload) for one in moved)}


def offload_problem(here: Here) -> Problem:
    config = make_config(
        here,
        vocab_size=8192,
        hidden_size=4096,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=4096,
    )
    return Problem(here, config, 2, 16 if here.dry else 8192)


def offload(here: Here) -> dict[str, Any]:
    """The same replays with values kept and with values offloaded: what of the copies' time is hidden."""
    problem = offload_problem(here)
    sizes = problem.sizes()
    kept, moved = problem.schedule("keep"), problem.schedule("offload")
    slabs = slabs_of(problem, moved, sizes)
    copies = memory.HostCopies() if here.dry else memory.CudaCopies()
    repeats = 2 if here.dry else 7
    without = here.seconds(lambda: problem.run(kept, {}), repeats)
    with_copies = here.seconds(lambda: problem.run(moved, slabs, copies), repeats)

    seconds = memory.measure_seconds(problem.chain, problem.layers, problem.part)
    size = 1 << (20 if here.dry else 28)
    near, far = torch.zeros(size, dtype=torch.uint8, device=here.device), copies.slab(size)
    links = [
        memory.Link(size / here.seconds(lambda a=a, b=b: copies.start(a, b).wait(), 5))
        for a, b in ((near, far), (far, near))
    ]
    costs = memory.Costs(seconds, write={memory.HOST: links[0]}, read={memory.HOST: links[1]})
    timeline = memory.simulate(moved, problem.chain, sizes, costs)
    copying = {"to_host": timeline.busy["to_host"], "to_device": timeline.busy["from_host"]}
    found: dict[str, Any] = {
        "seconds_kept": without,
        "seconds_offloaded": with_copies,
        "seconds_predicted": timeline.seconds,
        "copy_seconds_alone": copying,
        "slab_bytes": slabs[memory.HOST],
        "link_gb_per_s": {name: link.bandwidth / 1e9 for name, link in zip(copying, links, strict=True)},
        "hidden_share": 1 - max(0.0, with_copies - without) / max(1e-9, sum(copying.values())),
    }
    if not here.dry:
        timed = TimedCopies()
        problem.run(moved, slabs, timed)
        here.sync()
        found["gb_per_s_in_the_step"] = timed.rates()
    return found


def peak(here: Here) -> dict[str, Any]:
    """Measured memory of three schedules against the verifier's figure, parameters and batch left out on both sides."""
    problem = offload_problem(here)
    sizes = problem.sizes()
    copies = memory.HostCopies() if here.dry else memory.CudaCopies()
    found: dict[str, Any] = {}
    for name, policy in (("graphs kept", None), ("replayed", "keep"), ("offloaded", "offload")):
        schedule = problem.schedule(policy)
        slabs = slabs_of(problem, schedule, sizes)
        predicted = memory.verify(schedule, problem.chain, sizes)[memory.HBM].peak
        measured = here.peak(lambda schedule=schedule, slabs=slabs: problem.run(schedule, slabs, copies))
        if here.dry:
            measured -= sum(slabs.values())  # there the slab is memory like the other
        found[name] = {"verified": predicted, "measured": measured, "ratio": measured / predicted}
    return found


def newton_schulz(here: Here) -> dict[str, Any]:
    """Muon's step against torch.optim.Muon, and bf16 Newton-Schulz against the rate of a product of its size."""
    torch.manual_seed(0)
    device = torch.device(here.device)
    groups = {"tiny": [(2, 32, 48)]} if here.dry else muon.groups(64)
    found: dict[str, Any] = {}
    for name, shapes in groups.items():
        steps = {"ours": muon.ours(shapes, torch.bfloat16, device), "torch": muon.torch_muon(shapes, device)}
        times = interleaved(steps, 3 if here.dry else 7, wait=here.sync)
        iteration, product = muon.rates(shapes, torch.bfloat16, device, 3 if here.dry else 7, time.perf_counter)
        found[name] = {
            "ms_ours": times["ours"] * 1e3,
            "ms_torch_optim_muon": times["torch"] * 1e3,
            "times_as_fast": times["torch"] / times["ours"],
            "newton_schulz_tflops": iteration / 1e12,
            "product_tflops": product / 1e12,
            "share_of_product": iteration / product,
        }
    return found


def make_optimizer(config: MoEConfig) -> optim.GradientTransformation:
    by_label = dict.fromkeys(("embedding", "router", "vector"), optim.adamw(1e-3, b2=0.95))
    by_label["matrix"] = optim.muon(0.01, matrix_axes(config), dtype=torch.bfloat16)
    return optim.chain(optim.clip_by_global_norm(1.0), optim.partition(by_label, labels(config)))


def waits(here: Here) -> dict[str, Any]:
    """A whole step in which torch raises wherever the host would wait for the device."""
    config = make_config(
        here,
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
    )
    optimizer = make_optimizer(config)
    step = make_train_step(config, optimizer, accumulate=2)
    state = init_state(draw_parameters(config, here.device), optimizer, config)
    batch = draw_batch(config, 4, 16 if here.dry else 1024, here.device)
    state, _ = step(state, batch)
    here.sync()
    if here.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        state, metrics = step(state, batch)
    finally:
        if here.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"waited": False, "loss": float(metrics.loss)}


def step(here: Here) -> dict[str, Any]:
    """Training steps of a model of 2.7 billion parameters, 0.5 active, whose fp32 state fits in 80 GB."""
    config = make_config(
        here,
        vocab_size=32768,
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1024,
    )
    rows, seq, accumulate = (4, 16, 2) if here.dry else (8, 4096, 4)
    optimizer = make_optimizer(config)
    train = make_train_step(config, optimizer, accumulate=accumulate)
    state = init_state(draw_parameters(config, here.device), optimizer, config)
    batch = draw_batch(config, rows, seq, here.device)
    losses = []

    def run() -> None:
        nonlocal state
        state, metrics = train(state, batch)
        losses.append(metrics.loss)

    run()
    if here.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = here.seconds(run, 1 if here.dry else 6)
    gradient = make_train_step(config, optim.identity(), accumulate=accumulate)
    idle = init_state(state.params, optim.identity(), config)
    top = torch.cuda.max_memory_allocated() if here.device == "cuda" else None
    del state
    taken_by_gradient = here.seconds(lambda: gradient(idle, batch), 1 if here.dry else 4)
    rate = measure_matmul_rate(config.dtype, here.device, 64 if here.dry else None)
    flops = train_flops_per_token(config, seq)
    values = [float(loss) for loss in losses]
    if not values[-1] < values[0]:
        raise RuntimeError(f"the loss did not fall on one batch: {values}")
    return {
        "config": dataclasses.asdict(config),
        "parameters": config.num_params,
        "active_parameters": config.num_active_params,
        "tokens": rows * seq,
        "microbatches": accumulate,
        "seconds": taken,
        "seconds_without_optimizer": taken_by_gradient,
        "tokens_per_second": rows * seq / taken,
        "tflops": rows * seq * flops / taken / 1e12,
        "utilisation": rows * seq * flops / taken / rate,
        "utilisation_without_optimizer": rows * seq * flops / taken_by_gradient / rate,
        "product_tflops": rate / 1e12,
        "peak_bytes": top,
        "losses": values,
    }


SECTIONS: dict[str, Callable[[Here], dict[str, Any]]] = {
    "machine": machine,
    "tests": tests,
    "bits": bits,
    "offload": offload,
    "peak": peak,
    "muon": newton_schulz,
    "waits": waits,
    "step": step,
}


def run_alone(name: str, here: Here, limit: float) -> dict[str, Any]:
    """A section in a process of its own: an error of CUDA, or a hang, is then its own too."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--section", name, "--out", str(path)]
        try:
            done = subprocess.run(
                command + ["--dry"] * here.dry,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than its {limit:g} s", "seconds": time.perf_counter() - start}
        found: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 1)}
        if done.returncode == 0:
            return {**found, "result": json.loads(path.read_text())}
        lines = done.stdout.strip().splitlines() or [f"ended with status {done.returncode}"]
        # The exception's own line is the last that is neither indented nor part of a traceback.
        return {**found, "error": next((line for line in reversed(lines) if line and not line[0].isspace()), lines[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument("--only", choices=list(SECTIONS), nargs="+", default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU here; --dry runs the script on the CPU", file=sys.stderr)
        return 2
    here = Here("cpu" if arguments.dry else "cuda", arguments.dry)
    if arguments.section:
        arguments.out.write_text(json.dumps(SECTIONS[arguments.section](here)))
        return 0
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "dry": arguments.dry,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "sections": {},
    }
    for name in arguments.only:
        found = run_alone(name, here, LIMITS[name])
        report["sections"][name] = found
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        shown = json.dumps({key: value for key, value in found.get("result", {}).items() if key != "config"})
        print(f"{name}: {found['seconds']} s: {found.get('error') or shown}", flush=True)
    failed = [name for name, found in report["sections"].items() if "error" in found]
    print(f"{arguments.out}: {'all sections ran' if not failed else 'failed: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
