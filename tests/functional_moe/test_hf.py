"""Models from Hugging Face's directories: the same logits and gradients as its own classes, and back again."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from functional_moe import hf, optim
from functional_moe.chain import logits, loss_fn
from functional_moe.config import PRESETS, MoEConfig
from functional_moe.hf import _weights
from functional_moe.optim import path_name
from functional_moe.parameters import Leaf, Params, declare
from functional_moe.sampling import generate
from functional_moe.train_step import init_state
from functional_moe.tree import named_leaves

from .hf_models import CASES, FAMILIES, RELEASED, make_config, write_model

# fp32 models of two layers, whose sums run in another order.
LOGIT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str = "") -> None:
    scale = float(theirs.abs().max())
    assert scale > 0, what
    assert float((ours - theirs).abs().max()) <= tolerance * scale, what


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def tokens_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(37, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_gradients_equal(
    params: Params, balance: torch.Tensor, batch: dict[str, torch.Tensor], config: MoEConfig, model: Any, folder: Path
) -> None:
    """Their gradients are read like weights, under the names of their parameters in memory: the files' stacked form."""
    stacked = folder / "gradients"
    stacked.mkdir()
    model.config.save_pretrained(stacked)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    save_file({**gradients, **biases}, stacked / "model.safetensors")
    theirs = named_leaves(hf.load(stacked).params)
    ours = named_leaves(torch.func.grad(lambda p: loss_fn(p, balance, batch, config)[0])(params))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert_close(ours[name], value, GRADIENT_TOLERANCE, name)


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

    assert_gradients_equal(params, balance, batch, config, model, tmp_path)

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
def test_position_8191_equals_the_class(family: str, tmp_path: Path) -> None:
    """transformers 39687 and PR 29285: interleaved rotation, and tables made in bf16, agree at small positions only."""
    model = write_model(tmp_path, family, num_hidden_layers=1)
    config, params, balance, _ = hf.load(tmp_path)
    tokens = tokens_of(1, 8192)
    targets = torch.full_like(tokens, -100)
    targets[:, -64:] = tokens[:, :64]
    batch = {"tokens": tokens, "targets": targets}
    theirs = model(input_ids=tokens, use_cache=False).logits
    with torch.no_grad():
        ours = logits(params, balance, batch, config)
    assert_close(ours[:, -64:], theirs[:, -64:].detach(), LOGIT_TOLERANCE)
    F.cross_entropy(theirs[0], targets[0]).backward()
    assert_gradients_equal(params, balance, batch, config, model, tmp_path)


def test_every_option_of_every_family_is_met() -> None:
    met = {(family, key) for family, changes in CASES.values() for key in changes}
    sizes = {"num_experts", "num_local_experts", "n_routed_experts", "intermediate_size"}
    options = {(name, key) for name, family in hf.FAMILIES.items() for key in family.fields if key not in sizes}
    assert options - met == set()


@pytest.mark.parametrize("config", [*PRESETS.values(), hf.config_from_hf(make_config("qwen2_moe"))])
def test_every_leaf_has_names(config: MoEConfig) -> None:
    leaves, _ = pytree.tree_flatten_with_path(declare(config), is_leaf=lambda node: isinstance(node, Leaf))
    for path, leaf in leaves:
        assert leaf.names, path_name(path)
        assert bool(leaf.stack_name) == ("experts" in leaf.axes), path_name(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    for family in ("mixtral", "dots1"):
        model = write_model(tmp_path / family, family).to(dtype)
        model.save_pretrained(tmp_path / family)
        config, params, balance, _ = hf.load(tmp_path / family)
        assert all(leaf.dtype == torch.float32 for leaf in named_leaves(params).values())
        hf.save(tmp_path / f"{family}-ours", config, params, balance, model_type=family, dtype=dtype)
        theirs, ours = files_of(tmp_path / family), files_of(tmp_path / f"{family}-ours")
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            # transformers keeps these in fp32 when it loads them, whatever it was told to save.
            kept = family == "dots1" and ".mlp.gate." in name
            assert ours[name].dtype == (torch.float32 if kept else dtype), name
            assert torch.equal(value.to(torch.float32), ours[name].to(torch.float32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_bf16_when_asked_and_computes_the_same(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "theirs", family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    wide = hf.load(tmp_path / "theirs")
    config, params, balance, _ = hf.load(tmp_path / "theirs", dtype=torch.bfloat16)
    for name, leaf in named_leaves(params).items():
        kept = hf.FAMILIES[family].selection_bias and name.endswith("router")
        assert leaf.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(leaf.to(torch.float32), named_leaves(wide.params)[name]), name
    assert balance.dtype == torch.float32
    config = dataclasses.replace(config, compute_dtype="bfloat16")
    tokens = tokens_of(2, 11)
    batch = {"tokens": tokens, "targets": tokens}
    ours = logits(params, balance, batch, config)
    assert torch.equal(ours, logits(wide.params, balance, batch, config))
    assert generate(params, balance, config, [1, 2], 9) == generate(wide.params, balance, config, [1, 2], 9)

    hf.save(tmp_path / "ours", config, params, balance, model_type=family, dtype=torch.bfloat16)
    theirs, again = files_of(tmp_path / "theirs"), files_of(tmp_path / "ours")
    assert theirs.keys() == again.keys()
    for name, value in theirs.items():
        assert torch.equal(value.to(torch.float32), again[name].to(torch.float32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_the_class_s_own(family: str, tmp_path: Path) -> None:
    """Both round activations to bf16 in other places, so a fixed tolerance would say little: theirs is the measure."""
    model = write_model(tmp_path, family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(8, 32)
    batch = {"tokens": tokens, "targets": tokens}
    loaded = hf.load(tmp_path)
    exact = logits(loaded.params, loaded.balance, batch, loaded.config)
    config, params, balance, _ = hf.load(tmp_path, dtype=torch.bfloat16)
    ours = logits(params, balance, batch, dataclasses.replace(config, compute_dtype="bfloat16"))
    theirs = model(input_ids=tokens, use_cache=False).logits.to(torch.float32).detach()

    # The median over tokens: where rounding changes which expert is chosen, a token is far off in either.
    def distance(values: torch.Tensor) -> float:
        return float((values - exact).norm(dim=-1).median())

    assert distance(ours) <= 1.5 * distance(theirs)
    assert distance(theirs) <= 0.05 * float(exact.norm(dim=-1).median())


def test_what_is_trained_is_fp32(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    config, params, _, _ = hf.load(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"leaf 'embedding' is torch\.bfloat16; what is trained is fp32"):
        init_state(params, optim.adamw(1e-3), config)
    with pytest.raises(hf.HFError, match=r"dtype = torch\.float64"):
        hf.load(tmp_path, dtype=torch.float64)


@pytest.mark.parametrize("processors", [1, 2, 3])
@pytest.mark.parametrize("run", [1, 50, 1 << 22])
def test_threads_and_the_length_of_their_runs_change_nothing(
    processors: int, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("qwen3_moe", "mixtral"):
        model = write_model(tmp_path / family, family)
        if family == "mixtral":  # in the stacked form
            model.config.save_pretrained(tmp_path / family)
            save_file(dict(model.state_dict()), tmp_path / family / "model.safetensors")
        expected = hf.load(tmp_path / family)
        with monkeypatch.context() as patch:
            patch.setattr(_weights.os, "sched_getaffinity", lambda _: range(processors), raising=False)
            patch.setattr(_weights, "_RUN_NUMBERS", run)
            patch.setattr(torch, "empty", lambda *shape, **k: torch.zeros(*shape, **k).fill_(torch.nan))
            ours = hf.load(tmp_path / family)
        for name, leaf in named_leaves(expected.params).items():
            assert torch.equal(named_leaves(ours.params)[name], leaf), name


def test_reading_leaves_torch_s_threads_as_they_were_and_stops_at_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "qwen3_moe")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hf.load(tmp_path)
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [2]
        filled = []

        def fails(*arguments: Any) -> None:
            filled.append(arguments)
            raise hf.HFError("no more")

        monkeypatch.setattr(_weights, "_fill", fails)
        monkeypatch.setattr(_weights, "_RUN_NUMBERS", 1)
        monkeypatch.setattr(_weights.os, "sched_getaffinity", lambda _: range(3), raising=False)
        with pytest.raises(hf.HFError, match="no more"):
            hf.load(tmp_path)
        assert len(filled) <= 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_shards_have_an_index_and_hold_what_it_says(tmp_path: Path) -> None:
    model = write_model(tmp_path / "theirs", "qwen3_moe")
    loaded = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", *loaded[:3], max_shard_size=5000)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("ours/*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 5000 + 4096 for path in files)  # weights, and a header
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in files_of(tmp_path / "ours").values())
    assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
    again = hf.load(tmp_path / "ours")
    assert all(
        torch.equal(leaf, named_leaves(again.params)[name]) for name, leaf in named_leaves(loaded.params).items()
    )
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager").eval()
    tokens = tokens_of(1, 9)
    assert torch.equal(back(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_an_older_config_is_the_same_model(tmp_path: Path) -> None:
    """As the files of released models have it: rope_theta at the top, a null rope_scaling, torch_dtype."""
    for family in FAMILIES:
        new = make_config(family)
        old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype", "layer_types")}
        rope = new["rope_parameters"]
        old |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": "bfloat16"}
        old |= {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
        assert hf.config_from_hf(old) == hf.config_from_hf(new), family


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("OLMoE-1B-7B-0924", 6.9, 1.3),
        ("Qwen1.5-MoE-A2.7B", 14.3, 2.7),
        ("GLM-4.5-Air", 106, 13),
        ("dots.llm1", 142, 14),
    ],
)
def test_released_models_have_the_size_they_are_known_for(name: str, total: float, active: float) -> None:
    config = hf.config_from_hf(RELEASED[name])
    assert config.num_params / 1e9 == pytest.approx(total, rel=0.01)
    assert config.num_active_params / 1e9 == pytest.approx(active, rel=0.04)
    assert hf.config_from_hf(hf.config_to_hf(config, RELEASED[name]["model_type"])) == config


def test_a_model_without_an_architecture_is_told_why() -> None:
    with pytest.raises(hf.HFError, match=r"no architecture.*mixtral differs in use_qk_norm"):
        hf.config_to_hf(dataclasses.replace(PRESETS["tiny"], num_shared_experts=3))
    assert hf.config_to_hf(PRESETS["tiny"])["model_type"] == "qwen3_moe"
    assert hf.config_to_hf(PRESETS["jupiter-952b"])["model_type"] == "dots1"


def test_a_selection_bias_that_has_no_place_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "qwen3_moe")
    config, params, balance, _ = hf.load(tmp_path / "theirs")
    with pytest.raises(hf.HFError, match="selection bias is up to 1, and Qwen3MoeForCausalLM has none"):
        hf.save(tmp_path / "ours", config, params, balance + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_a_head_that_is_tied_is_stored_once_and_one_that_differs_refused(tmp_path: Path) -> None:
    """torchtitan PR 3764."""
    write_model(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    tensors = files_of(tmp_path)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    expected = named_leaves(hf.load(tmp_path).params)
    assert "head" not in expected
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert named_leaves(hf.load(tmp_path).params).keys() == expected.keys()
    other = embedding.clone()
    other[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": other}, tmp_path / "model.safetensors")
    with pytest.raises(hf.HFError, match=r"'lm_head\.weight' differs from the embedding"):
        hf.load(tmp_path)


def test_heads_of_later_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe")
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(16, 32), "model.layers.2.mlp.gate.weight": torch.zeros(6, 16)}
    save_file({**files_of(tmp_path), **extra}, tmp_path / "model.safetensors")
    with pytest.raises(hf.HFError, match=r"no place for the tensor 'model\.layers\.2\.eh_proj\.weight'"):
        hf.load(tmp_path)
    change(tmp_path, num_nextn_predict_layers=1)
    assert hf.load(tmp_path).left_out == tuple(sorted(extra))


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
