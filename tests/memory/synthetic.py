"""Chains that are never run, with sizes and seconds by hand: what planners and simulators need."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from functional_moe.memory import (
    Chain,
    Costs,
    Link,
    Segment,
    SegmentProfile,
    SegmentSeconds,
    Sizes,
    Variant,
)


class Layer(NamedTuple):
    """One layer's figures: bytes and seconds."""

    boundary: int = 1024  # of its input and output
    residual: int = 512
    graph: int = 8192  # without its input and its residual
    working: int = 256  # besides what a run leaves behind
    gradient: int = 1024
    forward: float = 1.0
    replay: float = 0.5  # the forward when the residual is given
    backward: float = 2.0
    last: float = 0.0  # of a forward; what a replay without output leaves out


class Problem(NamedTuple):
    """What ``plan`` takes."""

    chain: Chain
    sizes: Sizes
    costs: Costs


def never_run(*args: Any) -> NoReturn:
    raise AssertionError("only sizes and seconds of this chain are known")


def make_problem(
    layers: list[Layer],
    write: float = 1024.0,
    read: float = 1024.0,
    *,
    residual: bool = True,
    decision: bool = False,
    gather: float = 0.0,
    reduce: float = 0.0,
) -> Problem:
    """One segment per layer, then a head of small cost.

    Args:
      layers: equal ones are of one kind.
      write, read: bytes per second to and from the host.
      residual: whether the layers have one.
      decision: whether it is one that must not be made twice.
      gather, reduce: seconds of a layer's.
    """
    kinds = {layer: f"kind{number}" for number, layer in enumerate(dict.fromkeys(layers))}
    names = [f"layer{number}" for number in range(len(layers))]
    residuals = ("core",) if residual else ()
    segments = [
        Segment(name, (name,), never_run, kinds[layer], residuals, residuals if decision else ())
        for name, layer in zip(names, layers, strict=True)
    ]
    segments.append(Segment("head", ("head",), never_run, "head"))
    variants = [(), residuals] if residual else [()]
    profiles, seconds = {}, {}
    head = Layer(residual=0, graph=1024, working=0, forward=0.125, replay=0.125, backward=0.125)
    for name, layer in [*zip(names, layers, strict=True), ("head", head)]:
        output = 0 if name == "head" else layer.boundary
        made = output + (layer.residual if residual and name != "head" else 0)
        ways = variants if name != "head" else [()]
        graph = {
            given: layer.graph + (layer.residual if not given and residual and name != "head" else 0) for given in ways
        }
        forward = {Variant(False, given): made + layer.working for given in ways}
        forward |= {Variant(True, given): made + graph[given] + layer.working for given in ways}
        profiles[name] = SegmentProfile(
            output,
            {"core": layer.residual} if residual and name != "head" else {},
            graph,
            {name: {"weight": layer.gradient}},
            forward,
            dict.fromkeys(ways, layer.boundary + layer.gradient + layer.working),
            dict.fromkeys(ways, 0),
            dict.fromkeys(ways, 0),
        )
        taken = {given: layer.replay if given else layer.forward for given in ways}
        without = {given: whole - layer.last for given, whole in taken.items()}
        seconds[name] = SegmentSeconds(taken, dict.fromkeys(ways, layer.backward), without)
    everything = [*names, "head"]
    sizes = Sizes(
        profiles,
        dict(zip(everything, [None, *names], strict=True)),
        dict.fromkeys(everything, 2048),
        dict.fromkeys(everything, 256),
        dict.fromkeys(everything, 512),
        {"hbm": {"optimizer": 4096}},
    )
    costs = Costs(
        seconds,
        dict.fromkeys(everything, gather),
        dict.fromkeys(everything, reduce),
        {"host": Link(write)},
        {"host": Link(read)},
    )
    return Problem(Chain(tuple(segments), never_run), sizes, costs)
