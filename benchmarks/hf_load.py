"""Time of importing a model from Hugging Face's files against safetensors' own reading of them.

Prints the ratio of our median time to that of ``safetensors.torch.load_file(backend="pread")``, which reads the same
bytes into memory as they are; ours besides turns every matrix, puts blocks side by side, and widens bf16 to fp32
(against a reading followed by ``.float()`` there, as its result is twice as large). The file is in the page cache, so
the disk is left out: the hardest case for us. The contenders are run in turn.

Most of the time is that of getting fresh memory from the system, which varies where memory is scarce or virtual.

    python benchmarks/hf_load.py
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from _report import Ratio, make_parser, write
from safetensors.torch import load_file

from functional_moe import hf, init
from functional_moe.config import MoEConfig

BAR = 1.2  # times the peer's time, at most

# Layers of Qwen3-30B-A3B, with a quarter of their experts.
CONFIG = MoEConfig(
    vocab_size=4096,
    hidden_size=2048,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=32,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    use_qk_norm=True,
)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    params = init(CONFIG, seed=0)
    balance = torch.zeros(CONFIG.num_moe_layers, CONFIG.num_experts)
    print(f"{CONFIG.num_params:,} parameters, {args.clock} clock, {torch.get_num_threads()} threads")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            model_dir = Path(folder) / str(dtype)
            hf.save(model_dir, CONFIG, params, balance, dtype=dtype)
            path = model_dir / "model.safetensors"

            def plain(path=path):
                return load_file(path, backend="pread")

            def widened(path=path):
                return {name: value.float() for name, value in load_file(path, backend="pread").items()}

            contenders = {"ours": lambda folder=model_dir: hf.load(folder), "load_file": plain}
            if dtype != torch.float32:
                contenders["load_file and float"] = widened
            times = {name: [] for name in contenders}
            for repeat in range(args.repeats + 1):
                for name, contender in contenders.items():
                    start = clock()
                    result = contender()
                    if repeat:
                        times[name].append(clock() - start)
                    del result
            median = {name: statistics.median(values) for name, values in times.items()}
            rate = path.stat().st_size / median["ours"] / 1e9
            listing = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in median.items())
            ratios = ", ".join(f"{median['ours'] / median[name]:.2f}x {name}" for name in list(median)[1:])
            print(f"{dtype}: {listing}: {ratios} ({rate:.2f} GB/s of file)", flush=True)
            peer = list(median)[-1]
            found.append(Ratio(f"time of importing {dtype}", peer, median["ours"] / median[peer], BAR, False))
    write(args.json, found)


if __name__ == "__main__":
    main()
