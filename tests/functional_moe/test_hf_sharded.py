"""A model read by many ranks is the model read by one, and each rank reads what it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from functional_moe import hf, parallel
from functional_moe.config import MoEConfig
from functional_moe.hf import _files
from functional_moe.parameters import declare, init
from functional_moe.tree import named_leaves

# Six experts and a hidden size of 10 on four ranks: no part is like another.
ODD = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    intermediate_size=9,
    first_k_dense_replace=1,
    num_shared_experts=1,
    scoring_func="sigmoid",
    use_qk_norm=True,
    attention_bias=True,
    attention_output_bias=True,
)
# Half a row of it is a page of the disk.
WIDE = MoEConfig(
    vocab_size=64,
    hidden_size=2048,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    use_qk_norm=True,
)


def write(folder: Path, config: MoEConfig) -> None:
    """A model with distinct values everywhere and a selection bias that is not zero where it may be."""
    params = init(config, seed=0)
    for number, leaf in enumerate(named_leaves(params).values()):
        leaf.copy_(torch.randn(leaf.shape, generator=torch.Generator().manual_seed(number)))
    balance = torch.zeros(config.num_moe_layers, config.num_experts)
    if config.scoring_func == "sigmoid":
        balance += torch.arange(balance.numel()).view_as(balance)
    hf.save(folder, config, params, balance, max_shard_size=3000)


def stack_experts(folder: Path, config: MoEConfig) -> None:
    """The same model in one file, the experts of each layer stacked."""
    (folder / "model.safetensors.index.json").unlink()
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    for layer in filter(config.is_moe_layer, range(config.num_hidden_layers)):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{expert}.{matrix}_proj.weight") for expert in range(config.num_experts)])
            for matrix in ("gate", "up", "down")
        )
        tensors |= {f"{at}.gate_up_proj": torch.cat([gate, up], dim=1), f"{at}.down_proj": down}
    save_file(tensors, folder / "model.safetensors")


def load_on_mesh(folder: str, fsdp: int, ep: int) -> tuple[Any, torch.Tensor, int]:
    """What all ranks read together, and the bytes that this one read."""
    count, real = [0], _files.os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        got = real(file, buffers, offset)
        count[0] += got
        return got

    declared = declare(hf.config_from_hf(hf.read_json(Path(folder) / hf.CONFIG_FILE)))
    mesh = parallel.make_mesh(fsdp, ep)
    layout = parallel.make_layout(mesh, parallel.placements(declared, mesh), declared)
    _files.os.preadv = counting  # type: ignore[assignment]
    try:
        loaded = hf.load(folder, layout)
    finally:
        _files.os.preadv = real
    return parallel.unshard(loaded.params), loaded.balance, count[0]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("fsdp", "ep"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_shards_equal_the_whole(tmp_path: Path, fsdp: int, ep: int, stacked: bool) -> None:
    write(tmp_path / "model", ODD)
    whole = hf.load(tmp_path / "model")
    if stacked:
        stack_experts(tmp_path / "model", ODD)
    expected = named_leaves(whole.params)
    for params, balance, _ in parallel.spawn(load_on_mesh, fsdp * ep, str(tmp_path / "model"), fsdp, ep, timeout=120.0):
        ours = named_leaves(params)
        assert ours.keys() == expected.keys()
        for name, leaf in expected.items():
            assert torch.equal(ours[name], leaf), name
        assert torch.equal(balance, whole.balance)


def test_a_rank_reads_its_part_alone(tmp_path: Path) -> None:
    write(tmp_path / "model", WIDE)
    size = sum(path.stat().st_size for path in tmp_path.glob("model/*.safetensors"))
    for fsdp, ep in ((2, 1), (1, 2)):
        for _, _, read in parallel.spawn(load_on_mesh, 2, str(tmp_path / "model"), fsdp, ep, timeout=120.0):
            assert 0.45 * size < read < 0.55 * size, (fsdp, ep)


PEAK = """
import sys, torch
from pathlib import Path
from functional_moe import __main__ as command_line, hf

def bring(folder):
    if sys.argv[3] == "load":
        return hf.load(folder)
    return command_line.run(["import", folder, "--out", folder + "-run"])

def status(key):
    (line,) = (l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

bring(sys.argv[1])  # what the first call costs alone: imports, threads, buffers
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
loaded = bring(sys.argv[2])
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["load", "import"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_the_model_and_a_tensor(tmp_path: Path, dtype: torch.dtype, what: str) -> None:
    """Of what is loaded, and of the command, which also writes it."""
    config = MoEConfig(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        use_qk_norm=True,
    )
    write(tmp_path / "small", ODD)
    params = init(config, seed=0)
    hf.save(
        tmp_path / "model",
        config,
        params,
        torch.zeros(config.num_moe_layers, config.num_experts),
        dtype=dtype,
        max_shard_size=100_000_000,
    )
    arguments = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "model"), what]
    peak = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    model = sum(leaf.nbytes for leaf in named_leaves(params).values())
    largest_in_file = config.vocab_size * config.hidden_size * dtype.itemsize
    assert model > 200_000_000
    assert model <= peak <= model + largest_in_file, (peak - model, largest_in_file)
