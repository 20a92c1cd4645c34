"""Time of importing a model from Hugging Face's files against reading the same files with safetensors.

Every run is a process of its own, as importing is done once in one: memory that a process has used before costs it
nothing, and fresh memory is most of the time here. The contenders take turns, each with all processors for torch's
threads, and with the file in the page cache, so that no disk hides what they do. All of them but the first end with
every weight in memory of the process's own, in the same dtype:

- readinto: the file's bytes in one piece, as they are;
- pread: ``load_file(backend="pread")``, then ``.to(dtype)``;
- mmap: ``load_file()``, which maps the file and reads nothing, then a copy in ``dtype``: one pass over the pages that
  the system has of the file, in all of torch's threads;
- ours: besides turns every matrix, and puts blocks side by side.

    python benchmarks/hf_load.py
    taskset -c 0 python benchmarks/hf_load.py     # one processor
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_whole(path):
    memory = torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(memory):
            done += file.readinto(memory[done : done + (1 << 20)])
    return memory


CONTENDERS = {
    "ours": lambda folder, dtype: hf.load(folder, dtype=dtype),
    "readinto": lambda folder, dtype: read_whole(folder / hf.WEIGHTS_FILE),
    "pread": lambda folder, dtype: {
        name: value.to(dtype) for name, value in load_file(folder / hf.WEIGHTS_FILE, backend="pread").items()
    },
    "mmap": lambda folder, dtype: {
        name: value.to(dtype, copy=True) for name, value in load_file(folder / hf.WEIGHTS_FILE).items()
    },
}


def run_one(name, folder, dtype):
    """Prints seconds of the wall, of the user and of the system, and page faults, of one contender's one run."""
    torch.ones(1 << 20).to(torch.bfloat16).to(torch.float32)  # torch's threads are there
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = CONTENDERS[name](folder, dtype)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    del result
    print(wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--run", nargs=3, metavar=("CONTENDER", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        name, folder, dtype = args.run
        run_one(name, Path(folder), DTYPES[dtype])
        return
    found = []
    processors = len(os.sched_getaffinity(0))
    print(f"{CONFIG.num_params:,} parameters, {processors} processors, medians of {args.repeats} processes each")
    with tempfile.TemporaryDirectory() as temporary:
        params = init(CONFIG, seed=0)
        balance = torch.zeros(CONFIG.num_moe_layers, CONFIG.num_experts)
        for stored in DTYPES:
            hf.save(Path(temporary) / stored, CONFIG, params, balance, dtype=DTYPES[stored])
        del params
        for stored, wanted in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
            folder = Path(temporary) / stored
            runs = {name: [] for name in CONTENDERS}
            for repeat in range(args.repeats + 1):
                for name in CONTENDERS:
                    command = [sys.executable, __file__, "--run", name, str(folder), wanted]
                    environment = os.environ | {"OMP_NUM_THREADS": str(processors)}
                    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                    if repeat:  # the first brings the file into memory
                        runs[name].append(tuple(map(float, done.stdout.split())))
            print(f"{stored} file of {(folder / hf.WEIGHTS_FILE).stat().st_size / 1e9:.2f} GB into {wanted}:")
            ours = statistics.median(run[0] for run in runs["ours"])
            # Reading the file is the peer where it gives the result; else what gives it from the file read.
            peer = "readinto" if stored == wanted else "pread"
            ratio = ours / statistics.median(run[0] for run in runs[peer])
            found.append(Ratio(f"time of importing {stored} as {wanted}", peer, ratio, BAR, at_least=False))
            for name, taken in runs.items():
                wall, user, system, faults = map(statistics.median, zip(*taken, strict=True))
                print(
                    f"  {name:8} {wall * 1e3:5.0f} ms ({min(taken)[0] * 1e3:.0f} to {max(taken)[0] * 1e3:.0f}), user "
                    f"{user * 1e3:.0f}, system {system * 1e3:.0f}, {faults:,.0f} faults"
                    + ("" if name == "ours" else f": ours is {ours / wall:.2f}x"),
                    flush=True,
                )
    write(args.json, found)


if __name__ == "__main__":
    main()
