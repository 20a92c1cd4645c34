"""Muon against AdamW: same model, data and batch, each at the best of a few learning rates.

AdamW trains for ``--steps``; Muon gets 0.7 times as many, with its own schedule spanning just those. Muon keeps its
promise when its held-out loss is the lower one all the same. Prints every run and draws the two best.

    python examples/muon_vs_adamw.py            # about six minutes on two cores
"""

import dataclasses
from pathlib import Path

from functional_moe import init, init_state, make_train_step, preset
from functional_moe.commands.program import end, read_flags
from functional_moe.data import Data, batch_at, load, windows_for_eval
from functional_moe.evaluate import make_evaluate
from functional_moe.optimizers import OptimizerSettings, make_optimizer

BATCH_SIZE, SEQ_LEN = 16, 256
SHARE = 0.7
RATES = {"adamw": (5e-4, 1e-3, 2e-3), "muon": (0.005, 0.01, 0.02)}
Curve = list[tuple[int, float]]


def held_out_curve(settings: OptimizerSettings, steps: int, data: Data, evaluate_every: int) -> Curve:
    """(step, held-out nats per byte) of a run from the same initial parameters over the same batches."""
    config = preset("tiny")
    optimizer = make_optimizer(config, settings, steps)
    step = make_train_step(config, optimizer)
    evaluate = make_evaluate(config)
    state = init_state(init(config, seed=0), optimizer, config)
    windows = list(windows_for_eval(data.held_out, 128, seq_len=SEQ_LEN, batch_size=BATCH_SIZE))
    curve = []
    for number in range(steps):
        state, _ = step(state, batch_at(data.train, number, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, seed=0))
        if (number + 1) % evaluate_every == 0 or number + 1 == steps:
            curve.append((number + 1, evaluate(state, windows)))
    return curve


def best(name: str, steps: int, data: Data) -> tuple[float, Curve]:
    """The learning rate with the lowest final loss, and its curve."""
    curves = {}
    for rate in RATES[name]:
        settings = dataclasses.replace(OptimizerSettings(name=name), **{f"{name}_learning_rate": rate})
        curves[rate] = held_out_curve(settings, steps, data, evaluate_every=max(1, steps // 7))
        print(f"{name:5s} rate {rate:<6g} {steps} steps: held-out {curves[rate][-1][1]:.4f}", flush=True)
    rate = min(curves, key=lambda rate: curves[rate][-1][1])
    return rate, curves[rate]


def draw(path: Path, runs: dict[str, Curve]) -> None:
    """One line per run; without matplotlib, nothing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, curve in runs.items():
        axes.plot(*zip(*curve, strict=True), "o-", label=label)
    axes.axhline(runs[min(runs)][-1][1], color="0.6", linestyle="--", linewidth=0.8)
    axes.set(xlabel="step", ylabel="held-out nats per byte", title="tiny preset on Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> None:
    flags = read_flags(__doc__, steps=200, out="runs")
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    data = load(None, cache=flags.out)
    fewer = max(1, round(SHARE * flags.steps))
    (adamw_rate, adamw), (muon_rate, muon) = best("adamw", flags.steps, data), best("muon", fewer, data)
    ours, theirs = muon[-1][1], adamw[-1][1]
    verdict = "reaches" if ours <= theirs else "does not reach"
    print(f"Muon {verdict} in {fewer} steps ({ours:.4f}) what AdamW has after {flags.steps} ({theirs:.4f})")
    draw(
        Path(flags.out, "muon_vs_adamw.png"),
        {f"AdamW, rate {adamw_rate:g}": adamw, f"Muon, rate {muon_rate:g}": muon},
    )


if __name__ == "__main__":
    end(main)
