"""``functional-moe plan``: how long a step would take on a machine, in which memory, and what bounds it."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

from ..config import INFERRED_FIELDS, MoEConfig, preset
from ..dry_run import DryRun, dry_run
from ..machine import Machine, MachineError, read_machine
from ..memory import HBM, HOST, PlanError, draw, in_bytes, write_trace
from ..predict import Choice, Prediction, predict
from ..search import Searched, Shape, assumptions_of, search
from ..sharding import GatherDtype
from .output import check_writable
from .settings import SettingsError

EXPERT_PARTS = (1, 2, 4, 8)
"""That a search goes through."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Plans one rank's step on a described machine, without running it."""

    preset: str = "jupiter-952b"
    """Named model."""
    config: Path | None = None
    """JSON file with the fields of a model; instead of the preset."""
    hardware: str = "jupiter"
    """Named machine, or a TOML file such as ``functional-moe calibrate`` writes."""
    nodes: int = 96
    """How many."""
    ep: int | None = None
    """Ranks that share the experts; by default the devices of a node."""
    seq_len: int | None = None
    """Tokens of a sequence; by default the most that the model takes."""
    rows: int = 1
    """Sequences of a microbatch."""
    microbatches: int = 1
    """Of a step, per rank."""
    order: Literal["depth_first", "layer_major"] = "depth_first"
    """Each microbatch through all layers, or all through a layer before the next."""
    gather_dtype: GatherDtype = "bfloat16"
    """In which matrices travel."""
    reduce_dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    """In which gradients travel."""
    prefetch: int = 1
    """Layers that are gathered ahead."""
    settle: int = 4
    """Runs of segments after which a gradient's reduction is waited for; a layer's backward has four."""
    optimizer_on: Literal["device", "host"] = "device"
    """Where the update is computed."""
    optimizer_dtype: Literal["bfloat16", "tfloat32", "float32"] = "bfloat16"
    """Of Newton-Schulz on the device."""
    state_in: str = HBM
    """Tier of the optimizer's state."""
    expert_parts: int = 1
    """In which a layer's tokens go through its experts: their memory is that of two parts, and one part travels while
    another is computed."""
    router_dtype: Literal["float32", "tfloat32"] = "float32"
    """Of the router's products on the device."""
    hbm_gb: float | None = None
    """Budget in units of 10^9 bytes; by default all of the device."""
    host_gb: float | None = None
    """Budget of the host, per device."""
    search: bool = False
    """Look for the fastest choices instead of the given one."""
    top: int = 10
    """How many of them to print."""
    json: bool = False
    """Print one JSON object."""
    plot: Path | None = None
    """Draw the timeline there."""
    trace: Path | None = None
    """Write a trace for ui.perfetto.dev there."""


def plan(settings: PlanSettings) -> int:
    """Dry run, plan, verification, simulation; prints what comes out."""
    try:
        return _plan(settings)
    except PlanError as error:
        raise SettingsError(_missing(settings, error)) from error
    except MachineError as error:
        raise SettingsError(str(error)) from error


def _missing(settings: PlanSettings, error: PlanError) -> str:
    name = settings.preset if settings.config is None else str(settings.config)
    return (
        f"{name} fits in no schedule on {settings.hardware}: {error.missing / 2**30:.1f} GiB are missing in "
        f"{error.tier}: {error}"
    )


def _plan(settings: PlanSettings) -> int:
    _check_outputs(settings)
    config, machine = _config(settings), read_machine(settings.hardware)
    choice = _choice(settings, machine)
    budgets = _budgets(settings, machine)
    fsdp, ep = _mesh(settings, machine, config)
    seq_len = config.max_position_embeddings if settings.seq_len is None else settings.seq_len
    try:
        dry = dry_run(config, fsdp, ep, seq_len, settings.rows, settings.expert_parts)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if settings.search:
        return _search(settings, machine, config, dry, choice, budgets, seq_len)
    prediction = predict(dry, machine, choice, budgets)
    if settings.json:
        print(json.dumps(as_json(dry, machine, prediction, budgets)))
    else:
        print(
            report(
                settings.preset if settings.config is None else str(settings.config), dry, machine, prediction, budgets
            )
        )
    _write(settings, dry, prediction, budgets)
    return 0


def _check_outputs(settings: PlanSettings) -> None:
    if settings.plot is not None:
        check_writable("--plot", settings.plot)
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise SettingsError(
                f"--plot {settings.plot}: matplotlib is not installed (the extra 'plot' brings it)"
            ) from error
        known = sorted(FigureCanvasBase.get_supported_filetypes())
        if settings.plot.suffix.removeprefix(".").lower() not in known:
            raise SettingsError(f"--plot {settings.plot}: a picture ends in one of {', '.join(known)}")
    if settings.trace is not None:
        check_writable("--trace", settings.trace)


def _config(settings: PlanSettings) -> MoEConfig:
    try:
        if settings.config is None:
            return preset(settings.preset)
        fields = json.loads(settings.config.read_text())
        if not isinstance(fields, dict):
            raise ValueError("must hold one object")
        known = {field.name for field in dataclasses.fields(MoEConfig)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown fields {unknown}")
        return MoEConfig(**fields)
    except OSError as error:
        raise SettingsError(f"{settings.config}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        where = "" if settings.config is None else f"{settings.config}: "
        raise SettingsError(f"{where}{error}") from error


def _choice(settings: PlanSettings, machine: Machine) -> Choice:
    for name, least in (
        ("microbatches", 1),
        ("prefetch", 0),
        ("settle", 0),
        ("rows", 1),
        ("nodes", 1),
        ("top", 1),
        ("expert_parts", 1),
    ):
        if getattr(settings, name) < least:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(settings, name)}: must be at least {least}")
    if settings.state_in not in machine.tiers:
        raise SettingsError(f"--state-in {settings.state_in}: the machine has {', '.join(machine.tiers)}")
    return Choice(**{name: getattr(settings, name) for name in Choice._fields})


def _budgets(settings: PlanSettings, machine: Machine) -> dict[str, int]:
    budgets = {name: tier.bytes for name, tier in machine.tiers.items()}
    for tier, given in ((HBM, settings.hbm_gb), (HOST, settings.host_gb)):
        if given is not None:
            if not 0 < given < 1e6 or tier not in budgets:
                raise SettingsError(f"--{tier}-gb {given}: must be above 0 and below 10^6, of a tier that there is")
            budgets[tier] = int(given * 1e9)
    return budgets


def _mesh(settings: PlanSettings, machine: Machine, config: MoEConfig) -> tuple[int, int]:
    devices = settings.nodes * machine.devices_per_node
    ep = math.gcd(machine.devices_per_node, config.num_experts) if settings.ep is None else settings.ep
    if ep < 1 or devices % ep:
        raise SettingsError(f"--ep {ep}: must divide the {devices} devices of {settings.nodes} nodes")
    fsdp = devices // ep
    if config.num_experts % ep:
        raise SettingsError(f"--ep {ep}: must divide the {config.num_experts} experts")
    if config.num_experts % devices and config.hidden_size % fsdp:
        raise SettingsError(
            f"--nodes {settings.nodes}: {devices} devices do not divide the {config.num_experts} experts, nor do the "
            f"{fsdp} ranks of fsdp divide hidden_size = {config.hidden_size}"
        )
    return fsdp, ep


def _search(
    settings: PlanSettings,
    machine: Machine,
    config: MoEConfig,
    dry: DryRun,
    choice: Choice,
    budgets: dict[str, int],
    seq_len: int,
) -> int:
    devices, first = dry.ranks, Shape(dry.mesh["ep"], dry.expert_parts)
    widths = [first.ep]
    for other in (first.ep // 2, first.ep * 2):
        if settings.ep is None and other >= 1 and devices % other == 0 and config.num_experts % other == 0:
            widths.append(other)
    shapes = [first, *(Shape(ep, parts) for ep in widths for parts in EXPERT_PARTS if (ep, parts) != first)]
    runs = {first: dry}

    def run(shape: Shape) -> DryRun:
        if shape not in runs:
            runs[shape] = dry_run(config, devices // shape.ep, shape.ep, seq_len, settings.rows, shape.expert_parts)
        return runs[shape]

    quiet = settings.json or not sys.stderr.isatty()
    found = search(
        run,
        shapes,
        machine,
        choice,
        budgets,
        tell=lambda text: None if quiet else print(text, end="\r", file=sys.stderr),
    )
    if settings.json:
        print(json.dumps(_search_as_json(found)))
    else:
        print(search_report(found, settings.top))
    best = found.found[0]
    _write(settings, runs[best.shape], best.prediction, budgets)
    return 0


def _write(settings: PlanSettings, dry: DryRun, prediction: Prediction, budgets: dict[str, int]) -> None:
    found = prediction.plan
    if settings.plot is not None:
        draw(settings.plot, found.schedule, found.timeline, dry.chain, budgets)
    if settings.trace is not None:
        write_trace(settings.trace, found.schedule, found.timeline)


def report(name: str, dry: DryRun, machine: Machine, prediction: Prediction, budgets: dict[str, int]) -> str:
    """What a prediction says, in lines."""
    timeline, work, busy = prediction.plan.timeline, dry.optimizer, prediction.plan.timeline.busy
    mesh = " x ".join(f"{axis} {size}" for axis, size in dry.mesh.items())
    buffers = dry.gathers[prediction.choice.gather_dtype].buffers
    lines = [
        f"{name}: {_count(dry.config.num_params)} parameters, {_count(dry.config.num_active_params)} active",
        f"{machine.name}: {dry.ranks} devices, {mesh}; {prediction.tokens:,} tokens per device and step",
        "",
        f"parameters     {_count(work.parameters)} per rank; gathered, a layer takes {in_bytes(max(buffers.values()))}",
    ]
    for tier, one in timeline.reports.items():
        lines.append(f"memory {tier:<7} {in_bytes(one.peak)} of {in_bytes(budgets[tier])}, filled by")
        lines += [f"    {in_bytes(size):>10}  {what}" for what, size in _grouped(one.contents)[:7]]
    lines += [f"{stream:<14} {seconds:.3g} s" for stream, seconds in busy.items()]
    if prediction.exposed_exchange:
        lines.append(f"  of compute   {prediction.exposed_exchange:.3g} s are tokens on their way to experts and back")
    if prediction.unpacking:
        lines.append(f"unpacking      {prediction.unpacking:.3g} s, in which messages of fp8 become numbers")
    bound = ", ".join(f"{part.what} {100 * part.seconds / timeline.seconds:.0f}%" for part in timeline.bound[:5])
    parts = ", ".join(f"{part} {seconds:.3g}" for part, seconds in prediction.optimizer._asdict().items())
    lines += [
        f"bound by       {bound}",
        f"optimizer      {prediction.optimizer.total:.3g} s ({parts})",
        f"step           {prediction.seconds:.3g} s",
        f"tokens/s       {prediction.tokens_per_second:.0f} per device",
        f"utilisation    {100 * prediction.model_utilisation:.1f}% of the peak for the model, "
        f"{100 * prediction.hardware_utilisation:.1f}% with what is computed again",
    ]
    if assumed := assumptions_of(prediction.choice):
        lines.append(f"assumed        {'; '.join(assumed)}")
    if inferred := INFERRED_FIELDS.get(name):
        lines.append(f"inferred, not published: {', '.join(inferred)}")
    return "\n".join(lines)


def _count(number: int) -> str:
    """952 billion."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)


def _grouped(contents: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """What fills a tier, alike values of many layers as one."""
    found: dict[str, list[int]] = {}
    for what, size in contents:
        words = what.split(" of layers.")
        key = words[0] if len(words) == 2 and not what.startswith("working") else what
        if len(words) == 2 and not what.startswith("working") and "." in words[1]:
            key += f" of {words[1].split('.', 1)[1].split(' ')[0]}"
        if size:
            found.setdefault(key, []).append(size)
    out = [(f"{key} x {len(some)}" if len(some) > 1 else key, sum(some)) for key, some in found.items()]
    return sorted(out, key=lambda item: -item[1])


def search_report(found: Searched, top: int) -> str:
    """The fastest schedules, a line each, and what they assume."""
    lines = [f"{len(found.found)} schedules fit, of {found.tried} choices; the fastest:"]
    for one in found.found[:top]:
        prediction = one.prediction
        peaks = ", ".join(f"{tier} {in_bytes(peak)}" for tier, peak in prediction.peaks.items())
        lines.append(
            f"{prediction.tokens_per_second:6.0f} tokens/s, step {prediction.seconds:.3g} s, optimizer "
            f"{prediction.optimizer.total:.3g} s; {peaks}; {_words(one.shape, prediction.choice)}"
        )
        lines.append(
            f"       assumes {'; '.join(one.assumptions) if one.assumptions else 'nothing beyond the figures'}"
        )
    return "\n".join(lines)


def _words(shape: Shape, choice: Choice) -> str:
    return (
        f"ep {shape.ep}, experts in {shape.expert_parts}, {choice.microbatches} x {choice.order}, "
        f"gather {choice.gather_dtype}, reduce {choice.reduce_dtype}, prefetch {choice.prefetch}, "
        f"settle {choice.settle}, state in {choice.state_in}"
    )


def as_json(dry: DryRun, machine: Machine, prediction: Prediction, budgets: dict[str, int]) -> dict[str, Any]:
    """A prediction as a tree for ``json.dumps``: bytes, seconds, and shares from 0 to 1."""
    timeline = prediction.plan.timeline
    return {
        "machine": machine.name,
        "mesh": dict(dry.mesh),
        "num_params": dry.config.num_params,
        "num_active_params": dry.config.num_active_params,
        "parameters_per_rank": dry.optimizer.parameters,
        "choice": prediction.choice._asdict(),
        "assumptions": list(assumptions_of(prediction.choice)),
        "memory": {
            tier: {"peak": one.peak, "budget": budgets[tier], "contents": dict(_grouped(one.contents)[:12])}
            for tier, one in timeline.reports.items()
        },
        "streams": dict(timeline.busy),
        "bound": [part._asdict() for part in timeline.bound],
        "exposed_exchange": prediction.exposed_exchange,
        "unpacking": prediction.unpacking,
        "optimizer": {**prediction.optimizer._asdict(), "total": prediction.optimizer.total},
        "step_seconds": prediction.seconds,
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second,
        "model_utilisation": prediction.model_utilisation,
        "hardware_utilisation": prediction.hardware_utilisation,
    }


def _search_as_json(found: Searched) -> dict[str, Any]:
    return {
        "tried": found.tried,
        "found": [
            {
                **one.shape._asdict(),
                "choice": one.prediction.choice._asdict(),
                "assumptions": list(one.assumptions),
                "tokens_per_second": one.prediction.tokens_per_second,
                "step_seconds": one.prediction.seconds,
                "optimizer_seconds": one.prediction.optimizer.total,
                "peaks": one.prediction.peaks,
            }
            for one in found.found
        ],
    }
