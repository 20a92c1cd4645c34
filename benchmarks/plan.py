"""Seconds to plan a deep chain, and how much the plan gains on the best single policy that fits.

The chain is of layers of two segments with figures of the size of a very large model; nothing is run. There is no peer
that plans the same; the ratio is that of the planned step to the best uniform policy within the same budgets.

    python benchmarks/plan.py --layers 74
"""

import time

from _report import Ratio, make_parser, write

from functional_moe import memory

GIB = 2**30
SECONDS_BAR, UNIFORM_BAR = 2.0, 1.0
BOUNDARY, CORE, SCORES = 768 * 2**20, 768 * 2**20, 2 * 2**20


def profile(output, residuals, graph, working, flops, saved):
    """One segment: replay given all residuals saves ``saved`` of its arithmetic."""
    ways = [(), *[(name,) for name in residuals]]
    return memory.SegmentProfile(
        output,
        residuals,
        {way: graph - sum(residuals[name] for name in way) for way in ways},
        {},
        {memory.Variant(record, way): output + working + record * graph for record in (False, True) for way in ways},
        dict.fromkeys(ways, output + working),
        {way: int(flops * (1 - saved * bool(way))) for way in ways},
        dict.fromkeys(ways, 2 * int(flops)),
    )


def problem(layers):
    """Two segments a layer, of which the first has a residual worth keeping and the second a decision."""
    segments, profiles, previous, before = [], {}, {}, None
    attention = profile(BOUNDARY, {"core": CORE}, 6 * GIB, 2 * GIB, 70e12, 0.75)
    experts = profile(BOUNDARY, {"scores": SCORES}, 20 * GIB, 6 * GIB, 35e12, 0.0)
    for number in range(layers):
        for kind, figures, decisions in (("attention", attention, ()), ("experts", experts, ("scores",))):
            name = f"{number}.{kind}"
            residuals = tuple(figures.residuals)
            segments.append(memory.Segment(name, (str(number),), run, kind, residuals, decisions))
            profiles[name], previous[name], before = figures, before, name
    segments.append(memory.Segment("head", ("head",), run, "head"))
    profiles["head"], previous["head"] = profile(0, {}, GIB, GIB, 200e12, 0.0), before
    layers_of = {segment.layers[0]: 0 for segment in segments}
    sizes = memory.Sizes(profiles, previous, layers_of, layers_of, layers_of)
    return memory.Chain(tuple(segments), run), sizes


def run(*_):
    raise AssertionError("never run")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=74)
    parser.add_argument("--hbm-gib", type=int, nargs="+", default=[50, 70, 100, 200, 400])
    arguments = parser.parse_args()
    host = memory.Tier(100 * GIB, memory.Link(160e9), memory.Link(415e9))
    machine = memory.Hardware(600e12, {"hbm": memory.Tier(96 * 10**9), "host": host})
    layers, ratios = arguments.layers, []
    chain, sizes = problem(layers)
    costs = memory.make_costs(machine, sizes)
    for gib in arguments.hbm_gib:
        begin, clock = time.perf_counter(), time.process_time()
        try:
            plan = memory.plan(chain, sizes, costs, {"hbm": gib * GIB, "host": 100 * GIB})
        except memory.PlanError as error:
            print(f"{gib} GiB: {time.perf_counter() - begin:.2f} s; {str(error)[:160]}")
            continue
        taken, cpu = time.perf_counter() - begin, time.process_time() - clock
        best = min((one.seconds for one in plan.uniform.values() if one.fits), default=float("nan"))
        print(
            f"{gib} GiB: {layers} layers in {taken:.2f} s ({cpu:.2f} s of CPU), {plan.tried} schedules; "
            f"the best uniform policy takes {best / plan.timeline.seconds:.3f} times as long"
        )
        print(memory.explain(plan))
        ratios.append(Ratio(f"seconds to plan {layers} layers, {gib} GiB", "a limit", taken, SECONDS_BAR, False))
        if best == best:  # some uniform policy fits
            gain = best / plan.timeline.seconds
            ratios.append(Ratio(f"planned step, {gib} GiB", "best uniform policy that fits", gain, UNIFORM_BAR))
    write(arguments.json, ratios)


if __name__ == "__main__":
    main()
