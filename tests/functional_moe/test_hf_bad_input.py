"""A model directory from elsewhere is believed in nothing: every mistake is one line that names the file."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from functional_moe import hf
from functional_moe.hf import _files

from .hf_models import FAMILIES, make_config, write_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_model(folder, "qwen3_moe", num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A model directory to spoil."""
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def assert_refused(folder: Path, *expected: str) -> str:
    """The one line that loading ``folder`` ends in."""
    with pytest.raises(hf.HFError) as raised:
        hf.load(folder)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 600
    for part in expected:
        assert part in message, message
    return message


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def split_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("cut", [1, 1000, -1])
def test_a_file_cut_short_or_too_long_is_named(folder: Path, cut: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-cut] if cut > 0 else content + b"\0")
    assert_refused(folder, WEIGHTS, "cut short or too long")


@pytest.mark.parametrize("content", [b"", b"\x08", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_longer_than_the_file_is_named(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert_refused(folder, WEIGHTS, "cut short or no safetensors file")


def test_a_header_of_a_hundred_million_bytes_is_not_read(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # sparse: takes no room
    assert_refused(folder, WEIGHTS, "a header of 200000000 bytes")


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}', "'a' twice"),
        (b'{"a": 3}', "'a' is described as 3"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "'a' is described as"),
        (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "'a' has the dtype"),
    ],
)
def test_a_header_that_is_none_is_named(folder: Path, header: bytes, why: str) -> None:
    write_raw(folder / WEIGHTS, header, b"\0" * 4)
    assert_refused(folder, WEIGHTS, why)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("description", "why"),
    [
        ({"shape": [2**40, 2**40]}, "is given 64 bytes"),
        ({"shape": [-16]}, "has shape [-16]"),
        ({"shape": [True]}, "has shape [True]"),
        ({"shape": 16}, "has shape 16"),
        ({"shape": [16.0]}, "has shape [16.0]"),
        ({"shape": [10**400]}, "is given 64 bytes"),
        ({"data_offsets": [8, 4]}, "offsets [8, 4]"),
        ({"data_offsets": [-4, 60]}, "offsets [-4, 60]"),
        ({"data_offsets": [0]}, "offsets [0]"),
        ({"dtype": "F64"}, "dtype 'F64'"),
        ({"dtype": "F8_E4M3"}, "dtype 'F8_E4M3'"),
        ({"dtype": "I32"}, "dtype 'I32'"),
        ({"shape": [4, 4]}, "has shape [4, 4], config.json makes it [16]"),
    ],
)
def test_a_hostile_description_is_named(folder: Path, description: dict[str, Any], why: str) -> None:
    header, data = split_header(folder / WEIGHTS)
    header[NORM] |= description
    write_raw(folder / WEIGHTS, header, data)
    assert_refused(folder, WEIGHTS, NORM, why)


@pytest.mark.parametrize("shift", [-4, 4])
def test_tensors_that_overlap_or_leave_holes_are_named(folder: Path, shift: int) -> None:
    header, data = split_header(folder / WEIGHTS)
    last = max((value["data_offsets"][0], name) for name, value in header.items() if name != "__metadata__")[1]
    header[last]["data_offsets"] = [offset + shift for offset in header[last]["data_offsets"]]
    write_raw(folder / WEIGHTS, header, data)
    assert_refused(folder, WEIGHTS, last, "overlaps" if shift < 0 else "leaves a hole")


def test_a_file_that_shrinks_while_it_is_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error and not as a signal, which a mapped file would give."""
    real = _files.os.preadv
    monkeypatch.setattr(_files.os, "preadv", lambda file, views, offset: real(file, views, offset + 10**6))
    assert_refused(folder, WEIGHTS, "within a tensor")


@pytest.mark.parametrize("name", [NORM, "model.layers.0.mlp.experts.3.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS)
    assert_refused(folder, repr(name), "is missing (1 in all)")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.6.up_proj.weight", "model.layers.1.x", "rotary"])
def test_an_extra_tensor_is_named(folder: Path, name: str) -> None:
    save_file({**load_file(folder / WEIGHTS), name: torch.zeros(2)}, folder / WEIGHTS)
    assert_refused(folder, WEIGHTS, repr(name), "no place for")


def test_stacked_and_single_experts_at_once_are_named(folder: Path) -> None:
    stack = {"model.layers.0.mlp.experts.down_proj": torch.zeros(6, 16, 12)}
    save_file({**load_file(folder / WEIGHTS), **stack}, folder / WEIGHTS)
    assert_refused(
        folder, WEIGHTS, "no place for the tensor 'model.layers.0.mlp.experts.0.down_proj.weight' (6 in all)"
    )


def test_transposed_weights_are_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].t().contiguous()}, folder / WEIGHTS)
    assert_refused(folder, name, "has shape [16, 12], config.json makes it [12, 16]")


def with_index(folder: Path) -> dict[str, Any]:
    """Splits the model in two files; returns the index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_is_read(folder: Path, original: Path) -> None:
    with_index(folder)
    ours, theirs = hf.load(folder), hf.load(original)
    assert torch.equal(ours.params["layers"][0]["experts"]["down"], theirs.params["layers"][0]["experts"]["down"])


def test_a_missing_file_of_the_index_is_named(folder: Path) -> None:
    with_index(folder)
    (folder / "b.safetensors").unlink()
    assert_refused(folder, "b.safetensors is missing", "has the tensor")


@pytest.mark.parametrize(
    "file", ["../model/a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", "", 3, None]
)
def test_an_index_that_points_outside_is_refused(folder: Path, file: object) -> None:
    index = with_index(folder)
    index["weight_map"][NORM] = file
    write_index(folder, index)
    assert_refused(folder, "index.json", NORM, repr(file))


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_that_is_none_is_named(folder: Path, index: object) -> None:
    with_index(folder)
    write_index(folder, index)
    assert_refused(folder, "index.json")


def test_an_index_that_disagrees_with_the_files_is_named(folder: Path) -> None:
    index = with_index(folder)
    there = index["weight_map"].pop(NORM)
    write_index(folder, index)
    assert_refused(folder, there, NORM, "does not say")
    index["weight_map"] |= {NORM: there, "more": "a.safetensors"}
    write_index(folder, index)
    assert_refused(folder, "a.safetensors lacks the tensor 'more'")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_never_read(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    # What a pickle can do: if anything unpickled it, this file would appear.
    ran = folder / "ran"
    (folder / name).write_bytes(b"cposix\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    assert_refused(folder, name, "a pickle may run any code")
    assert not ran.exists()


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert_refused(folder, "has neither model.safetensors nor")
    assert_refused(folder / "nothing", "cannot read", "config.json", "No such file")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}'])
def test_a_config_that_is_none_is_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, "config.json")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", None, 3, ["qwen3_moe"]])
def test_an_unknown_architecture_is_named(folder: Path, model_type: object) -> None:
    change(folder, model_type=model_type)
    assert_refused(folder, repr(model_type), "qwen3_moe")


ONE_LAYER_TYPES = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen3_moe", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen3_moe", {"rope_parameters": 3}),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}),
        ("qwen3_moe", {"attention_dropout": 0.1}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}),
        ("qwen3_moe", {"architectures": ["Qwen3MoeForSequenceClassification"]}),
        ("qwen3_moe", {"num_experts_per_tok": 7}),
        ("qwen3_moe", {"num_local_experts": 7, "num_experts": 6}),
        ("qwen3_moe", {"rms_norm_eps": "small"}),
        ("qwen3_moe", {"some_new_thing": 0}),
        ("mixtral", {"sliding_window": 4096}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"attention_bias": True}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("olmoe", {"head_dim": 6}),
        ("olmoe", {"clip_qkv": -1.0}),
        ("olmoe", {"sliding_window": 64}),
        ("qwen2_moe", ONE_LAYER_TYPES),
        ("qwen2_moe", {"attention_bias": True}),
        ("dots1", {"layer_types": None, "sliding_window": 64, "max_window_layers": 1}),
        ("dots1", {"n_shared_experts": 0}),
        ("dots1", {"scoring_func": "softmax"}),
        ("dots1", {"moe_layer_freq": 2}),
        ("dots1", {"n_group": 4}),
        ("glm4_moe", {"topk_method": "greedy"}),
        ("glm4_moe", {"sliding_window": 64}),
        ("glm4_moe", {"first_k_dense_replace": 9}),
        ("glm4_moe", {"n_shared_experts": None}),
    ],
)
def test_a_flag_that_changes_the_computation_is_named(family: str, values: dict[str, Any]) -> None:
    good = make_config(family)
    assert hf.config_from_hf(good).hidden_size == 16
    with pytest.raises(hf.HFError) as raised:
        hf.config_from_hf({**good, **values})
    message = str(raised.value)
    assert "\n" not in message
    names = {"num_experts_per_tok", "num_local_experts", "rope_scaling", "rope_parameters", "layer_types"} | set(values)
    assert any(name in message for name in names | {"rope_type", "num_experts"}), message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_looked_at(family: str) -> None:
    """Taking any key away, or making nonsense of it, either changes the model, is refused, or says nothing to it."""
    good = make_config(family)
    for key in sorted(good.keys() - hf._config._INERT):  # type: ignore[attr-defined]
        for value in ("nonsense", [], -7):
            try:
                config = hf.config_from_hf({**good, key: value})
            except hf.HFError:
                continue
            same = config == hf.config_from_hf(good)
            assert not same or key in ("mlp_only_layers", "sliding_window", "layer_types"), (key, value)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**15},
        {"num_hidden_layers": 900_000},
        {"num_experts": 10**12, "num_local_experts": 10**12},
        {"vocab_size": 10**12},
        {"hidden_size": 2**40},
        {"moe_intermediate_size": 10**12},
    ],
)
def test_sizes_that_no_machine_holds_end_before_anything_is_allocated(folder: Path, values: dict[str, Any]) -> None:
    change(folder, **values)
    assert_refused(folder)


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    model = hf.load(folder)
    calls = 0

    def full(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if broken != "fsync" or calls == 2:
            raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(Path, "write_text", full)
        else:
            patch.setattr(_files.os, broken, full)
        with pytest.raises(hf.HFError, match=r"cannot write .*out: No space left on device"):
            hf.save(out, *model[:3], max_shard_size=5000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    hf.save(out, *model[:3], max_shard_size=5000)
    assert not any(".partial" in path.name for path in tmp_path.iterdir())


def test_nothing_is_overwritten(folder: Path) -> None:
    model = hf.load(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(hf.HFError, match="exists"):
        hf.save(folder, *model[:3])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


Spoil = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda params: params.pop("head"), "leaf 'head' is missing"),
        (lambda params: params.update(more=torch.zeros(1)), "leaf 'more' is not of the configuration"),
        (lambda params: params.update(head=torch.zeros(2, 2)), "leaf 'head' has shape [2, 2]"),
    ],
)
def test_a_tree_of_another_model_is_not_written(folder: Path, tmp_path: Path, spoil: Spoil, why: str) -> None:
    config, params, balance, _ = hf.load(folder)
    spoil(params)
    with pytest.raises(hf.HFError) as raised:
        hf.save(tmp_path / "out", config, params, balance)
    assert why in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_bad_arguments_of_save_are_named(folder: Path, tmp_path: Path) -> None:
    config, params, balance, _ = hf.load(folder)
    for arguments, why in (
        ({"dtype": torch.int8}, "torch.int8"),
        ({"max_shard_size": 0}, "max_shard_size = 0"),
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": "mixtral"}, "mixtral differs in use_qk_norm"),
    ):
        with pytest.raises(hf.HFError, match=why):
            hf.save(tmp_path / "out", config, params, balance, **arguments)
    with pytest.raises(hf.HFError, match="balance has shape"):
        hf.save(tmp_path / "out", config, params, balance[:, 1:])
