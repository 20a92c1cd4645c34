"""Time and bytes of a sharded Muon step: each matrix on one owner, against gathering all of them on every rank.

Four processes (gloo, one thread each). Contenders take turns within each repetition, from barrier to barrier, so that
what else the machine does falls on all of them; times are medians on the slowest rank. Bytes are what a rank sends, on
average, by the operators that torch dispatches: an all-gather sends a shard to each other rank, an all-to-all what its
sizes say, an all-reduce two shares of a ring.

- gather: one all-gather per leaf, every rank orthogonalises every matrix and keeps its shards.
- torch: ``torch.optim.Muon`` on DTensors, which gathers inside the iteration. It takes 2-D leaves as one matrix each
  and iterates in bfloat16; ours does so too in that row.

    python benchmarks/sharded_muon.py
    python benchmarks/sharded_muon.py --layers 2 --repeats 5

On a machine that others use too, ``chrt -f 50`` before it (the processes inherit it) gives near-quiet figures.
"""

import functools
import statistics
import time

import torch
import torch.distributed as dist
from _report import Ratio, make_parser, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import optim, parallel

RANKS = 4
TIME_BAR, BYTES_BAR = 1.0, 1.0  # what gathering takes, over ours
ROWS, COLUMNS = (Shard(0), Shard(0)), (Shard(1), Shard(1))
IN_OUT = optim.MatrixAxes(out=-1, in_=-2)
FUSED = optim.MatrixAxes(out=-1, in_=-2, out_blocks=2)


def leaves_of(layers, hidden, experts, blocks):
    """Shape, axes and placements of each leaf: hidden is split over all ranks, experts are whole."""
    out = {}
    for layer in range(layers):
        out[f"qkv_{layer}"] = ((hidden, 2 * hidden), FUSED if blocks else IN_OUT, ROWS)
        out[f"o_{layer}"] = ((hidden, hidden), IN_OUT, COLUMNS)
        out[f"gate_up_{layer}"] = ((hidden, 3 * hidden), FUSED if blocks else IN_OUT, ROWS)
        out[f"down_{layer}"] = ((3 * hidden // 2, hidden), IN_OUT, COLUMNS)
        if experts:
            out[f"experts_gate_up_{layer}"] = ((experts, hidden, hidden), FUSED, ROWS)
            out[f"experts_down_{layer}"] = ((experts, hidden // 2, hidden), IN_OUT, ROWS)
    return out


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it dispatches to will come here
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.bytes += bytes_of(name, args)
        return func(*args, **(kwargs or {}))


def bytes_of(name, args):
    """What a rank sends in a collective."""
    if name == "alltoall_base_":
        return args[1].nbytes  # nothing is for the rank itself
    if name == "_allgather_base_":
        return (RANKS - 1) * args[1].nbytes
    if name == "all_gather_into_tensor":
        return (RANKS - 1) * args[0].nbytes
    if name == "reduce_scatter_tensor":
        return (RANKS - 1) * args[0].nbytes // RANKS
    if name == "all_reduce":
        return 2 * (RANKS - 1) * args[0].nbytes // RANKS
    raise ValueError(f"no formula for the bytes that {name} sends")


def gathered(layout, updates, axes, whole):
    """Every matrix on every rank."""
    return parallel.local(parallel.shard(whole(parallel.gather(updates, layout), axes), layout))


def step_of(orthogonalize, axes, shards, grads, dtype):
    tx = optim.muon(0.02, axes, momentum="sum", orthogonalize=orthogonalize, dtype=dtype)
    carry = {"params": shards, "state": tx.init(shards)}

    def step():
        updates, carry["state"] = tx.update(grads, carry["state"], carry["params"])
        carry["params"] = optim.apply_updates(carry["params"], updates)

    return step


def torch_step(params, grads):
    """A step of torch.optim.Muon on DTensors, on a mesh of one axis."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def same(leaf):
        return DTensor.from_local(leaf.to_local(), mesh, leaf.placements[:1], run_check=False)

    parameters = [torch.nn.Parameter(same(leaf)) for leaf in params.values()]
    for parameter, grad in zip(parameters, grads.values(), strict=True):
        parameter.grad = same(grad)
    return torch.optim.Muon(parameters, lr=0.02, momentum=0.95, weight_decay=0.0).step


def measure(leaves, dtype, with_torch, repeats):
    """Median seconds and bytes of each contender on this rank, and how far ours and the gathered one are apart."""
    shapes = {name: torch.empty(shape, device="meta") for name, (shape, _, _) in leaves.items()}
    axes = {name: leaf_axes for name, (_, leaf_axes, _) in leaves.items()}
    mesh = parallel.make_mesh(RANKS, 1)
    layout = parallel.make_layout(mesh, {name: placed for name, (_, _, placed) in leaves.items()}, shapes)
    generator = torch.Generator().manual_seed(0)
    params, grads = (
        parallel.shard({name: torch.randn(leaf.shape, generator=generator) for name, leaf in shapes.items()}, layout)
        for _ in range(2)
    )
    orthogonalizers = {
        "ours": parallel.owner_orthogonalize(layout, bucket_bytes=1 << 22),
        "gather": functools.partial(gathered, layout),
    }
    whole = functools.partial(optim.orthogonalize_whole, scale="shape")
    ours, other = (one(parallel.local(grads), axes, whole) for one in orthogonalizers.values())
    apart = max(((ours[name] - other[name]).norm() / other[name].norm()).item() for name in leaves)

    steps = {
        name: step_of(one, axes, parallel.local(params), parallel.local(grads), dtype)
        for name, one in orthogonalizers.items()
    }
    if with_torch:
        steps["torch"] = torch_step(params, grads)
    sent, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        with Sent() as counter:
            step()
        sent[name] = counter.bytes
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times[name]), sent[name]) for name in steps}, apart


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    problems = {
        "model": (leaves_of(args.layers, args.hidden, args.experts, True), torch.float32, False),
        "without experts": (leaves_of(args.layers, args.hidden, 0, True), torch.float32, False),
        "without experts or blocks, bfloat16": (leaves_of(args.layers, args.hidden, 0, False), torch.bfloat16, True),
    }
    print(f"{'':36} {'':7} {'ms':>8} {'MB sent':>8} {'time':>7} {'bytes':>7}  (against ours)")
    ratios = []
    for problem, (leaves, dtype, with_torch) in problems.items():
        results = parallel.spawn(measure, RANKS, leaves, dtype, with_torch, args.repeats, timeout=600.0)
        found = {
            name: (
                max(figures[name][0] for figures, _ in results),
                statistics.mean(figures[name][1] for figures, _ in results),
            )
            for name in results[0][0]
        }
        seconds, sent = found["ours"]
        for what, bar, index in (("time", TIME_BAR, 0), ("bytes", BYTES_BAR, 1)):
            ratio = found["gather"][index] / found["ours"][index]
            ratios.append(Ratio(f"{what} of a sharded Muon step, {problem}", "gathering every matrix", ratio, bar))
        for name, (other_seconds, other_sent) in found.items():
            print(
                f"{problem:36} {name:7} {other_seconds * 1e3:8.1f} {other_sent / 1e6:8.2f} "
                f"{other_seconds / seconds:6.2f}x {other_sent / sent:6.2f}x"
            )
        print(f"{'':36} ours and gather differ by {max(apart for _, apart in results):.1e}")
    write(args.json, ratios)


if __name__ == "__main__":
    main()
