"""Models from Hugging Face's directories: the same logits and gradients as its own classes, and back again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from functional_moe import hf
from functional_moe.config import PRESETS, MoEConfig
from functional_moe.model import logits, loss_fn
from functional_moe.parameters import Leaf, declare
from functional_moe.tree import named_leaves

from .hf_models import CASES, FAMILIES, write_model

# fp32 models of two layers, whose sums run in another order.
LOGIT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
# At position 8191 transformers' angles, made in fp32, are off by up to 8191 * 2^-24 = 5e-4; ours are made in fp64.
LONG_TOLERANCE = 2e-3


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str = "") -> None:
    scale = float(theirs.abs().max())
    assert scale > 0, what
    assert float((ours - theirs).abs().max()) <= tolerance * scale, what


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def tokens_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(37, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_class_and_both_ways_are_exact(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = write_model(tmp_path / "theirs", family, **changes)
    config, params, balance, left_out = hf.load(tmp_path / "theirs")
    assert not left_out
    tokens = tokens_of(2, 11)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    theirs = model(input_ids=batch["tokens"], use_cache=False).logits
    assert_close(logits(params, balance, batch, config), theirs.detach(), LOGIT_TOLERANCE)
    F.cross_entropy(theirs.flatten(0, 1), batch["targets"].flatten()).backward()

    # Their gradients under the names of their parameters in memory: the stacked form of the files.
    stacked = tmp_path / "gradients"
    stacked.mkdir()
    shutil.copy(tmp_path / "theirs" / "config.json", stacked)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    save_file({**gradients, **biases}, stacked / "model.safetensors")
    expected = named_leaves(hf.load(stacked).params)
    ours = named_leaves(torch.func.grad(lambda p: loss_fn(p, balance, batch, config)[0])(params))
    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        if float(value.abs().max()) > 0 or float(ours[name].abs().max()) > 0:
            assert_close(ours[name], value, GRADIENT_TOLERANCE, name)

    hf.save(tmp_path / "ours", config, params, balance, model_type=family)
    loaded, again = files_of(tmp_path / "theirs"), files_of(tmp_path / "ours")
    assert loaded.keys() == again.keys()
    for name, value in loaded.items():
        assert value.dtype == again[name].dtype and torch.equal(value, again[name]), name
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="sdpa", experts_implementation="eager"
    ).eval()
    assert torch.equal(back(input_ids=batch["tokens"], use_cache=False).logits, theirs)
    once_more = hf.load(tmp_path / "ours")
    assert once_more.config == config
    assert all(torch.equal(a, named_leaves(once_more.params)[name]) for name, a in named_leaves(params).items())
    assert torch.equal(once_more.balance, balance)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_position_8191_equal_the_class(family: str, tmp_path: Path) -> None:
    """transformers 39687 and PR 29285: interleaved rotation, and tables made in bf16, agree at small positions only."""
    model = write_model(tmp_path, family, num_hidden_layers=1)
    config, params, balance, _ = hf.load(tmp_path)
    tokens = tokens_of(1, 8192)
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
        ours = logits(params, balance, {"tokens": tokens, "targets": tokens}, config)
    assert_close(ours[:, -64:], theirs[:, -64:], LONG_TOLERANCE)


def test_every_case_visits_what_it_is_there_for() -> None:
    covered = {key for family, changes in CASES.values() for key in changes}
    routing = {key for family in hf.FAMILIES.values() for key in family.fields} - {"num_experts", "num_local_experts"}
    assert routing - {"n_routed_experts"} <= covered | {"intermediate_size"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_leaf_has_names(name: str) -> None:
    leaves = named_leaves_of(PRESETS[name])
    assert all(leaf.names for leaf in leaves.values())
    assert all(bool(leaf.stack_name) == ("experts" in leaf.axes) for leaf in leaves.values())


def named_leaves_of(config: MoEConfig) -> dict[str, Leaf]:
    from torch.utils import _pytree as pytree

    from functional_moe.optim import path_name

    leaves, _ = pytree.tree_flatten_with_path(declare(config), is_leaf=lambda node: isinstance(node, Leaf))
    return {path_name(path): leaf for path, leaf in leaves}


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
