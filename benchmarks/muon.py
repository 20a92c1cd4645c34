"""Time of a Muon step against torch.optim.Muon, optax.contrib.muon under jit, and a loop over matrices.

Prints, per group of matrices and in total, the ratio of the fastest peer's time to ours (above 1: we are
faster), and the rate of the Newton-Schulz iteration against that of a plain matrix product of the same size.
All contenders are run in turn within each repetition, so that what else the machine does falls on all of
them; figures are medians.

    python benchmarks/muon.py                    # float32, all peers; on a GPU: bfloat16
    python benchmarks/muon.py --dtype bfloat16   # against torch.optim.Muon, which always iterates in bfloat16
    python benchmarks/muon.py --crossover        # gram against standard by aspect ratio

On a machine that others use too, ``OMP_WAIT_POLICY=PASSIVE`` and ``--clock process`` compare CPU seconds.
"""

import functools

import torch
from _report import CLOCKS, Ratio, interleaved, make_parser, write

from functional_moe import optim
from functional_moe.optim._matrix_product import matrix_product

AXES = optim.MatrixAxes(out=0, in_=1)  # torch.optim.Muon's reading, so that all contenders scale alike
BETA, RATE = 0.95, 0.02
A, B, C = optim.KELLER_JORDAN
# Of all groups together, of each, and the iteration's share of a plain product's rate.
TOTAL_BAR, GROUP_BAR, PRODUCT_BAR = 1.3, 1.0, 0.85


def groups(experts):
    return {
        f"experts 3 x [{experts}, 512, 1536]": [(experts, 512, 1536)] * 3,
        "attention 4 x [1024, 1024]": [(1024, 1024)] * 4,
        "small 128 x [256, 256]": [(256, 256)] * 128,
    }


def waiting(device):
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def ours(shapes, dtype, device):
    """A step of the pure optimizer: new state, new parameters."""
    axes = {str(i): optim.MatrixAxes(out=-2, in_=-1) for i in range(len(shapes))}
    tx = optim.muon(RATE, axes, beta=BETA, momentum="sum", dtype=dtype)
    carry = {"params": {str(i): torch.randn(s, device=device) for i, s in enumerate(shapes)}}
    grads = {str(i): torch.randn(s, device=device) for i, s in enumerate(shapes)}
    carry["state"] = tx.init(carry["params"])

    def step():
        updates, carry["state"] = tx.update(grads, carry["state"], carry["params"])
        carry["params"] = optim.apply_updates(carry["params"], updates)

    return step


def single(shapes, device):
    return [torch.randn(s[-2:], device=device) for s in shapes for _ in range(s[0] if len(s) == 3 else 1)]


def torch_muon(shapes, device):
    """torch.optim.Muon: bfloat16 iteration, in place, on the single matrices, as it takes no stacks."""
    params = [torch.nn.Parameter(x) for x in single(shapes, device)]
    for p in params:
        p.grad = torch.randn_like(p)
    return torch.optim.Muon(params, lr=RATE, momentum=BETA, weight_decay=0.0).step


def loop(shapes, dtype, device):
    """The same in place, matrix by matrix, with two fused multiply-adds per iteration."""
    matrices = single(shapes, device)
    grads = [torch.randn_like(x) for x in matrices]
    momenta = [torch.zeros_like(x) for x in matrices]

    def step():
        for p, g, m in zip(matrices, grads, momenta, strict=True):
            m.mul_(BETA).add_(g)
            x = torch.add(g, m, alpha=BETA).to(dtype)
            tall = x.shape[0] > x.shape[1]
            x = x.mT if tall else x
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.mT
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
            x = x.mT if tall else x
            p.add_(x, alpha=-RATE * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

    return step


def optax_muon(shapes):
    """optax.contrib.muon in float32 under jit, with parameters and state donated."""
    import jax
    import numpy as np
    import optax

    def numbers(s):
        return optax.contrib.MuonDimensionNumbers(len(s) - 1, len(s) - 2)

    tx = optax.contrib.muon(
        RATE, beta=BETA, muon_weight_dimension_numbers={str(i): numbers(s) for i, s in enumerate(shapes)}
    )
    rng = np.random.default_rng(0)
    params = {str(i): jax.numpy.asarray(rng.standard_normal(s, np.float32)) for i, s in enumerate(shapes)}
    grads = {str(i): jax.numpy.asarray(rng.standard_normal(s, np.float32)) for i, s in enumerate(shapes)}
    carry = {"params": params, "state": tx.init(params)}

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step():
        carry["params"], carry["state"] = update(grads, carry["state"], carry["params"])
        jax.block_until_ready(carry["params"])

    return step


def flops(n, m, steps=5):
    """Operations of the plain iteration: X X^T, its square, and their product with X."""
    n, m = min(n, m), max(n, m)
    return steps * (4 * n * n * m + 2 * n**3)


def rates(shapes, dtype, device, repeats, clock):
    """Return the iteration's rate and the matrix product's at that size, both in operations per second.

    The product is the faster one of torch's and ours. The iteration is credited with the operations of the
    plain form, whatever it saves.
    """
    n, m = sorted(shapes[0][-2:])
    batch = sum(s[0] if len(s) == 3 else 1 for s in shapes)
    batch = min(batch, 16 if n > 256 else 128)
    x = torch.randn(batch, n, m, device=device)
    y = x.to(dtype)
    flat = list(y)
    steps = {
        "iteration": lambda: optim.newton_schulz(x, dtype=dtype),
        "product": lambda: [z @ z.mT for z in flat],
        "product by our kernel": lambda: [matrix_product(z[None], z[None].mT) for z in flat],
    }
    times = interleaved(steps, repeats, clock, waiting(device))
    product = min(times["product"], times["product by our kernel"])
    return batch * flops(n, m) / times["iteration"], batch * 2 * n * n * m / product


def crossover(dtype, device, clock):
    print("time of standard over time of gram, by size n and columns per row (above 1: gram is faster)")
    for n in (128, 256, 512, 1024):
        line = []
        for aspect in (1.0, 1.25, 1.5, 2.0, 3.0):
            x = torch.randn(max(1, 2**21 // n**2), n, int(n * aspect), device=device)
            steps = {
                method: functools.partial(optim.newton_schulz, x, dtype=dtype, method=method)
                for method in ("standard", "gram")
            }
            times = interleaved(steps, 7, clock, waiting(device))
            line.append(f"{aspect}: {times['standard'] / times['gram']:.2f}")
        print(f"  n = {n:5d}  " + "  ".join(line), flush=True)


def main():
    parser = make_parser(__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if cuda else "float32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--experts", type=int, default=64, help="experts per layer; fewer for a quick look")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--crossover", action="store_true")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    clock = CLOCKS[args.clock]
    torch.manual_seed(0)
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{args.dtype} on {device}, {args.clock} clock, {threads}")
    if args.crossover:
        crossover(dtype, device, clock)
        return
    totals, ratios = {}, []
    for name, shapes in groups(args.experts).items():
        steps = {
            "ours": ours(shapes, dtype, device),
            "torch.optim.Muon (bfloat16)": torch_muon(shapes, device),
            "loop": loop(shapes, dtype, device),
        }
        if dtype == torch.float32 and device.type == "cpu":
            steps["optax under jit"] = optax_muon(shapes)
        times = interleaved(steps, args.repeats, clock, waiting(device))
        for peer, value in times.items():
            totals[peer] = totals.get(peer, 0.0) + value
        ratios.append(report(name, times, dtype, GROUP_BAR))
        iteration, product = rates(shapes, dtype, device, max(7, args.repeats), clock)
        print(
            f"  Newton-Schulz {iteration / 1e9:.0f} of {product / 1e9:.0f} Gflop/s of a product: "
            f"{iteration / product:.0%}",
            flush=True,
        )
        ratios.append(Ratio(f"Newton-Schulz, {name}", "a matrix product's rate", iteration / product, PRODUCT_BAR))
        del steps
    ratios.append(report("total", totals, dtype, TOTAL_BAR))
    write(args.json, ratios)


def report(name, times, dtype, bar):
    same = {
        peer: value
        for peer, value in times.items()
        if peer != "ours" and not (dtype == torch.float32 and peer.startswith("torch"))
    }
    best = min(same, key=same.get)
    listing = ", ".join(f"{peer} {value * 1e3:.0f} ms" for peer, value in times.items())
    print(f"{name}: {listing}")
    print(f"  {same[best] / times['ours']:.2f}x the best peer in {str(dtype)[6:]} ({best})", end="")
    others = [peer for peer in times if peer != "ours" and peer not in same]
    print("".join(f"; {times[peer] / times['ours']:.2f}x {peer}" for peer in others), flush=True)
    return Ratio(f"Muon step, {name}", f"{best}, {str(dtype)[6:]}", same[best] / times["ours"], bar)


if __name__ == "__main__":
    main()
