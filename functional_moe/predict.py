"""From a dry run and a machine to seconds: the step's schedule, the optimizer, tokens per second, what bounds it.

The clock is a description, not a measurement. Products take their arithmetic at the sustained rate; other operators
the bytes they move, unless that rate was measured over whole training steps and has them in it. A message over ranks
takes what each device receives over its own link to other nodes, or what it receives from the devices of its node,
whichever takes longer; gathers and reductions take turns, because they use the same link both ways. Exchanges of
tokens run where the code runs them: in the middle of computing, or beside it where tokens go in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .dry_run import DryRun, Message
from .flops import train_flops_per_token
from .machine import Machine, MachineError
from .memory import (
    HBM,
    HOST,
    Backward,
    Costs,
    Forward,
    Gather,
    Gathers,
    Link,
    Operator,
    Order,
    Plan,
    Recipe,
    SegmentSeconds,
    Sizes,
    plan,
)
from .sharding import GatherDtype

ReduceDtype: TypeAlias = Literal["float32", "bfloat16", "float8"]
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float8": 1}


class Choice(NamedTuple):
    """What a run may choose besides recipes."""

    microbatches: int = 1
    order: Order = "depth_first"
    gather_dtype: GatherDtype = "bfloat16"  # of matrices
    reduce_dtype: ReduceDtype = "bfloat16"
    prefetch: int = 1
    settle: int = 4
    optimizer_on: Literal["device", "host"] = "device"
    optimizer_dtype: Literal["bfloat16", "tfloat32", "float32"] = "bfloat16"
    state_in: str = HBM
    router_dtype: Literal["float32", "tfloat32"] = "float32"  # of float32 products on the device


class OptimizerSeconds(NamedTuple):
    """Where the time of an update goes; the parts come one after the other."""

    products: float
    elementwise: float
    matrices: float  # between ranks
    state: float  # to and from a further tier

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Prediction(NamedTuple):
    """A step on a machine."""

    choice: Choice
    plan: Plan
    optimizer: OptimizerSeconds
    seconds: float  # of the step, the optimizer included
    tokens: int  # of the step, per rank
    tokens_per_second: float  # per device
    model_utilisation: float  # of the peak: nothing recomputed, attention over half of all pairs
    hardware_utilisation: float  # of the peak: what was computed
    exposed_exchange: float  # seconds of computing that are exchanges of tokens
    network: float  # seconds in which the link to other nodes has gathers and reductions
    unpacking: float  # seconds of the step in which messages of fp8 become numbers; nothing else is done meanwhile

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes, by tier."""
        return {tier: report.peak for tier, report in self.plan.timeline.reports.items()}


def message_seconds(size: int, axes: tuple[str, ...], mesh: Mapping[str, int], machine: Machine) -> float:
    """Seconds in which a message over ranks is gathered, or reduced and scattered.

    Args:
      size: bytes of all ranks' parts together.
      axes: along which the ranks stand.
      mesh: sizes of the axes, outermost first.
      machine: where.
    """
    ranks = math.prod(mesh[axis] for axis in axes)
    near = ranks_of_node(axes, mesh, machine)
    # What comes from other nodes comes once to the node, a part to each device, and goes round within it.
    over_network = size * (1 - near / ranks) / near / machine.network.sustained
    within = size * (1 - 1 / near) / (max(1, near - 1) * machine.node.sustained)
    return max(over_network + machine.network.latency * (ranks > near), within + machine.node.latency * (near > 1))


def ranks_of_node(axes: tuple[str, ...], mesh: Mapping[str, int], machine: Machine) -> int:
    """How many of the ranks along ``axes`` stand in one node; ranks are numbered with the last axis fastest."""
    stride, count = 1, 1
    for axis in reversed(list(mesh)):
        if axis in axes:
            count *= min(mesh[axis], max(1, machine.devices_per_node // stride))
        stride *= mesh[axis]
    return count


def exchange_seconds(sent: int, mesh: Mapping[str, int], machine: Machine) -> float:
    """Seconds of an all-to-all over ``ep``, evenly loaded: every peer gets its part over a link of its own."""
    ranks = mesh["ep"]
    near = ranks_of_node(("ep",), mesh, machine)
    within = sent / ranks / machine.node.sustained + machine.node.latency if near > 1 else 0.0
    across = (
        sent * (ranks - near) / ranks / machine.network.sustained + machine.network.latency if ranks > near else 0.0
    )
    return max(within, across)


def operator_seconds(operator: Operator, dry: DryRun, machine: Machine, choice: Choice) -> float:
    """Seconds of one operator."""
    if operator.name.startswith("c10d."):
        return exchange_seconds(operator.sent, dry.mesh, machine)
    moving = operator.moved / machine.tiers[HBM].bandwidth
    step_rate = machine.rate(str(dry.config.dtype).removeprefix("torch."))
    if not operator.flops:
        return 0.0 if step_rate.whole_steps else moving
    dtype = str(operator.dtype).removeprefix("torch.")
    rate = machine.rate(choice.router_dtype if dtype == "float32" else dtype)
    arithmetic = operator.flops / rate.sustained
    return arithmetic if step_rate.whole_steps else max(arithmetic, moving)


def unpacking_seconds(layer: str, dry: DryRun, machine: Machine, choice: Choice) -> float:
    """Seconds in which a layer's message in fp8 becomes numbers: it is read, and they are written.

    A piece of 8 MB is scaled where it lies, while it is in the device's cache. Counted by itself, because no rate that
    was measured over whole steps has it in it.
    """
    if choice.gather_dtype != "float8":
        return 0.0
    message = sum(one.gathered["float8"] for one in dry.messages[layer])
    return (message + dry.gathers["float8"].buffers[layer]) / machine.tiers[HBM].bandwidth


class RunSeconds(NamedTuple):
    """One run of a segment."""

    computing: float
    exchange: float  # what is not hidden of it

    @property
    def total(self) -> float:
        """Both."""
        return self.computing + self.exchange


def run_seconds(operators: Sequence[Operator], dry: DryRun, machine: Machine, choice: Choice) -> RunSeconds:
    """Seconds of a run.

    Tokens that go through their experts in parts travel while another part is computed: the first part's way there and
    the last one's way home show, and of the others what takes longer than a part's computing. An exchange that leaves
    the node is never hidden: the link it needs is the gathers'.
    """
    seconds = [operator_seconds(one, dry, machine, choice) for one in operators]
    messages = [index for index, one in enumerate(operators) if one.name.startswith("c10d.")]
    exchange = sum(seconds[index] for index in messages)
    computing = sum(seconds) - exchange
    parts = dry.expert_parts
    if parts > 1 and messages and ranks_of_node(("ep",), dry.mesh, machine) == dry.mesh["ep"]:
        beside = sum(
            seconds[index]
            for index in range(messages[0], messages[-1])
            if not operators[index].name.startswith("c10d.")
        )
        exchange = exchange / parts + (parts - 1) / parts * max(0.0, exchange - beside)
    return RunSeconds(computing, exchange)


def step_costs(dry: DryRun, machine: Machine, choice: Choice) -> Costs:
    """Seconds of every instruction."""
    kinds: dict[str, SegmentSeconds] = {}
    segments = {}
    for segment in dry.chain.segments:
        if segment.kind not in kinds:
            found = dry.operators[segment.name]

            def seconds(some: tuple[Operator, ...]) -> float:
                return run_seconds(some, dry, machine, choice).total

            kinds[segment.kind] = SegmentSeconds(
                {given: seconds(some) for given, some in found.forward.items()},
                {given: seconds(some) for given, some in found.backward.items()},
                {given: seconds(some) for given, some in found.without_output.items()},
            )
        segments[segment.name] = kinds[segment.kind]

    def travel(layer: str, size: Callable[[Message], int]) -> float:
        return sum(message_seconds(size(one), one.axes, dry.mesh, machine) for one in dry.messages[layer])

    crossing = machine.network.sustained if dry.ranks > machine.devices_per_node else 0.0
    tiers = {name: tier for name, tier in machine.tiers.items() if name != HBM}
    taken = {name: crossing if machine.network.crosses == name else 0.0 for name in tiers}
    return Costs(
        segments,
        {layer: travel(layer, lambda one: one.gathered[choice.gather_dtype]) for layer in dry.messages},
        {layer: travel(layer, lambda one: one.elements * ITEMSIZE[choice.reduce_dtype]) for layer in dry.messages},
        {name: Link(tier.write - taken[name]) for name, tier in tiers.items()},
        {name: Link(tier.read - taken[name]) for name, tier in tiers.items()},
        one_link=True,
    )


def step_sizes(dry: DryRun, choice: Choice) -> Sizes:
    """Bytes of every value, and of what is there all the time."""
    work = dry.optimizer
    # What a layer sends, and messages that are taken apart, are there beside the buffer for a moment.
    staged = dry.gathers[choice.gather_dtype].staging
    staging = max((size for layer, size in staged.items() if layer.startswith("layers.")), default=0)
    resident = {HBM: {"shards of parameters": 4 * work.parameters, "messages": staging}}
    resident.setdefault(choice.state_in, {})["optimizer state"] = work.state
    return dry.sizes(choice.gather_dtype, ITEMSIZE[choice.reduce_dtype], resident)


def optimizer_seconds(dry: DryRun, machine: Machine, choice: Choice) -> OptimizerSeconds:
    """Of one rank's update.

    Newton-Schulz at the rate of products; momentum, decay and the update itself by the bytes they move; matrices that
    placements cut between ranks; state that lies in a further tier there and back.
    """
    work = dry.optimizer
    flops = work.local_flops + work.owned_flops
    near = ranks_of_node(tuple(dry.mesh), dry.mesh, machine)
    wire = machine.network if dry.ranks > near else machine.node
    matrices = work.sent / wire.sustained if dry.ranks > 1 else 0.0
    # The gradient is read; the momentum and the parameter are read and written; the direction is written and read.
    moved = 4 * 7 * work.parameters
    host = machine.tiers.get(HOST)
    if choice.optimizer_on == "host":
        if host is None or "float32" not in machine.host_products:
            raise MachineError(f"{machine.name}: an optimizer on the host needs tiers.host and host_products.float32")
        products = flops / machine.host_products["float32"].sustained
        copies = 4 * work.parameters * (1 / host.write + 1 / host.read)  # gradients there, parameters back
        return OptimizerSeconds(products, moved / host.bandwidth, matrices, copies)
    products = flops / machine.rate(choice.optimizer_dtype).sustained
    state = 0.0
    if choice.state_in != HBM:
        tier = machine.tiers[choice.state_in]
        state = work.state * (1 / tier.write + 1 / tier.read)
    return OptimizerSeconds(products, moved / machine.tiers[HBM].bandwidth, matrices, state)


def predict(
    dry: DryRun,
    machine: Machine,
    choice: Choice,
    budgets: Mapping[str, int] | None = None,
    *,
    recipes: Mapping[str, Sequence[Recipe]] | None = None,
    effort: int = 40_000,
) -> Prediction:
    """Plans, verifies and simulates the step.

    Args:
      dry: one rank's step.
      machine: where.
      choice: all but the recipes, which are planned.
      budgets: bytes of each tier; by default all that the machine has.
      recipes: what segments may take, by kind; by default :func:`candidates`.
      effort: see ``memory.plan``.

    Raises:
      PlanError: when no schedule fits.
      MachineError: for a dtype that the machine has no rate for.
    """
    limits = {name: tier.bytes for name, tier in machine.tiers.items()} if budgets is None else dict(budgets)
    costs, sizes = step_costs(dry, machine, choice), step_sizes(dry, choice)
    found = plan(
        dry.chain,
        sizes,
        costs,
        limits,
        microbatches=choice.microbatches,
        order=choice.order,
        gathers=gathers_of(dry, choice),
        recipes=candidates(dry) if recipes is None else recipes,
        effort=effort,
    )
    return summarise(dry, machine, choice, found, costs)


def gathers_of(dry: DryRun, choice: Choice) -> Gathers | None:
    """How layers travel; ``None`` on one rank. Smaller layers use the buffers of the largest."""
    if dry.ranks == 1:
        return None
    buffers = dry.gathers[choice.gather_dtype].buffers
    return Gathers(dict.fromkeys(buffers, max(buffers.values())), choice.prefetch, settle=choice.settle)


def candidates(dry: DryRun) -> dict[str, list[Recipe]]:
    """What segments may take, by kind: the graph of a layer is never kept where there are many layers.

    Where every graph of 16 segments or fewer might be, all that ``memory.plan`` knows may be taken.
    """
    found: dict[str, list[Recipe]] = {}
    if len(dry.chain.segments) <= 16:
        return found
    for segment in dry.chain.segments:
        if segment.kind in ("embed", "head"):
            found[segment.kind] = [Recipe()]
        elif segment.kind == "attention":
            found[segment.kind] = [
                Recipe(False, entry, {"core": core})
                for entry in ("keep", "offload")
                for core in ("keep", "offload", "recompute")
            ]
        else:
            found[segment.kind] = [
                Recipe(False, entry, dict.fromkeys(segment.residuals, policy))
                for entry in ("keep", "offload", "recompute")
                for policy in ("keep", "offload")
            ]
    return found


def summarise(dry: DryRun, machine: Machine, choice: Choice, found: Plan, costs: Costs) -> Prediction:
    """What a plan means in tokens per second."""
    optimizer = optimizer_seconds(dry, machine, choice)
    unpacking = sum(
        unpacking_seconds(one.layer, dry, machine, choice) for one in found.schedule if isinstance(one, Gather)
    )
    seconds = found.timeline.seconds + unpacking + optimizer.total
    tokens = dry.tokens * choice.microbatches
    computed = exchanged = 0.0
    last = dry.chain.segments[-1].name
    given: dict[tuple[str, int], tuple[str, ...]] = {}
    for one in found.schedule:
        if isinstance(one, Forward):
            known = dry.operators[one.segment]
            needed = one.output or one.segment == last
            some = (known.forward if needed else known.without_output)[one.given]
            if one.record:
                given[one.segment, one.microbatch] = one.given
        elif isinstance(one, Backward):
            some = dry.operators[one.segment].backward[given[one.segment, one.microbatch]]
        else:
            continue
        computed += sum(operator.flops for operator in some)
        exchanged += run_seconds(some, dry, machine, choice).exchange
    peak = machine.rate(str(dry.config.dtype).removeprefix("torch.")).peak
    model = train_flops_per_token(dry.config, dry.seq_len) * tokens
    busy = found.timeline.busy
    return Prediction(
        choice,
        found,
        optimizer,
        seconds,
        tokens,
        tokens / seconds,
        model / seconds / peak,
        computed / seconds / peak,
        exchanged,
        busy["gather"] + busy["reduce"],
        unpacking,
    )
