"""Time of an AdamW step over 1,000 leaves against torch.optim.AdamW(foreach=True).

Prints per leaf size the ratio of torch's median time to ours (above 1: we are faster). Ours is a pure
function: it returns new parameters and moments; torch's changes them in place. The contenders are run in
turn.

    python benchmarks/adamw.py

For leaves of hundreds of kilobytes the time is that of fresh memory, which glibc gives back to the system
after each step: ``MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296`` keeps it.
"""

import torch
from _report import CLOCKS, Ratio, interleaved, make_parser, write

from functional_moe import optim

BAR = 1.0  # at every size


def ours(leaves, size):
    tx = optim.adamw(1e-3, weight_decay=0.1)
    carry = {"params": {str(i): torch.randn(size) for i in range(leaves)}}
    grads = {str(i): torch.randn(size) for i in range(leaves)}
    carry["state"] = tx.init(carry["params"])

    def step():
        updates, carry["state"] = tx.update(grads, carry["state"], carry["params"])
        carry["params"] = optim.apply_updates(carry["params"], updates)

    return step


def theirs(leaves, size, **options):
    params = [torch.nn.Parameter(torch.randn(size)) for _ in range(leaves)]
    for p in params:
        p.grad = torch.randn(size)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, **options).step


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    args = parser.parse_args()
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{args.leaves} leaves, {args.clock} clock, {threads}")
    ratios = []
    for size in ((64,), (64, 64), (128, 512)):
        steps = {
            "ours": ours(args.leaves, size),
            "foreach": theirs(args.leaves, size, foreach=True),
            "fused": theirs(args.leaves, size, fused=True),
        }
        median = interleaved(steps, args.repeats, CLOCKS[args.clock])
        listing = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in median.items())
        ratio = median["foreach"] / median["ours"]
        print(f"leaf {list(size)}: {listing}: {ratio:.2f}x torch.optim.AdamW(foreach=True)", flush=True)
        ratios.append(
            Ratio(f"step over {args.leaves} leaves {list(size)}", "torch.optim.AdamW(foreach=True)", ratio, BAR)
        )
    write(args.json, ratios)


if __name__ == "__main__":
    main()
