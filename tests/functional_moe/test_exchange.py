"""The commands import and export, and training and sampling from an imported run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from functional_moe import __main__ as command_line
from functional_moe import hf
from functional_moe.commands import exchange
from functional_moe.parallel import CheckpointError
from functional_moe.sampling import generate
from functional_moe.tree import named_leaves

from .hf_models import FAMILIES, write_model

WORDS = [f"word{number}" for number in range(30)]


def write_tokenizer(folder: Path, separator: str = "<|endoftext|>") -> None:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="word0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([separator])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=separator).save_pretrained(folder)


def run(*arguments: object) -> int:
    return command_line.run([str(argument) for argument in arguments])


def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """Runs a command that must exit with status 2 and one line; returns the line."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["functional-moe", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        command_line.main()
    error = capsys.readouterr().err
    assert raised.value.code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("functional-moe: ")
    return error


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    write_model(folder, "qwen3_moe")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        words = [WORDS[(number + step * step) % len(WORDS)] for step in range(60)]
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder


def test_import_then_export_gives_the_same_folder(model_dir: Path, tmp_path: Path) -> None:
    imported, exported = tmp_path / "run", tmp_path / "ours"
    assert run("import", model_dir, "--out", imported) == 0
    assert run("export", imported, "--out", exported) == 0
    theirs, ours = load_file(model_dir / "model.safetensors"), load_file(exported / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model_dir / name).read_bytes() == (exported / name).read_bytes()
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert config["eos_token_id"] == 2
    assert transformers.AutoTokenizer.from_pretrained(exported).encode("word3 word4") == [3, 4]
    back = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert back.generation_config.eos_token_id == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_name(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", family)
    assert run("import", tmp_path / "theirs", "--out", tmp_path / "run") == 0
    assert run("export", tmp_path / "run", "--out", tmp_path / "ours", "--dtype", "bfloat16") == 0
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == (family, "bfloat16")
    theirs = hf.load(tmp_path / "theirs")
    ours = hf.load(tmp_path / "ours")
    assert ours.config == theirs.config
    for name, leaf in named_leaves(theirs.params).items():
        kept = hf.FAMILIES[family].selection_bias and name.endswith("router")
        expected = leaf if kept else leaf.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(named_leaves(ours.params)[name], expected), name
    assert torch.equal(ours.balance, theirs.balance)


def test_an_imported_run_writes_text(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import", model_dir, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert run("sample", "--run", tmp_path / "run", "--prompt", "word1 word2 ", "--tokens", 5, "--temperature", 0) == 0
    config, params, balance, _ = hf.load(model_dir)
    new = generate(params, balance, config, [30, 1, 2], 5, temperature=0, stop=30)
    assert capsys.readouterr().out == "word1 word2 " + " ".join(f"word{token}" for token in new) + "\n"


def test_training_starts_from_the_imported_weights_and_its_tokenizer(
    model_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported, tuned = tmp_path / "run", tmp_path / "tuned"
    assert run("import", model_dir, "--out", imported) == 0
    common = ["--data", text, "--seq-len", 16, "--batch-size", 2, "--eval-windows", 4, "--eval-every", 1]
    arguments = ["train", "--init-from", imported, *common, "--steps", 2, "--sample-tokens", 3, "--out", tuned]
    assert run(*arguments, "--stop-after", 1) == 0
    first = json.loads((tuned / "metrics.jsonl").read_text().splitlines()[0])
    # The loss of the first step is that of the imported model.
    settings = json.loads((tuned / "settings.json").read_text())
    assert settings["preset"] == "qwen3_moe"
    assert settings["init_from"] == str(imported)
    assert settings["data"]["tokenizer"] == str(imported / "tokenizer.json")
    from functional_moe.chain import loss_fn
    from functional_moe.data import batch_at, load, load_tokenizer

    tokenizer = load_tokenizer(imported / "tokenizer.json")
    data = load([text], tmp_path / "cache", tokenizer=tokenizer)
    batch = batch_at(data.train, 0, batch_size=2, seq_len=16, seed=0)
    config, params, balance, _ = hf.load(model_dir)
    assert first["loss"] == pytest.approx(float(loss_fn(params, balance, batch, config)[1].loss), rel=1e-5)
    assert run("train", "--out", tuned, "--resume") == 0
    assert run("export", tuned, "--out", tmp_path / "ours") == 0
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not torch.equal(back.lm_head.weight, params["head"].t())


def test_training_may_change_what_is_no_shape(model_dir: Path, text: Path, tmp_path: Path) -> None:
    imported = tmp_path / "run"
    assert run("import", model_dir, "--out", imported) == 0
    common = ["train", "--init-from", imported, "--data", text, "--seq-len", 16, "--batch-size", 2, "--steps", 1]
    common += ["--eval-windows", 2, "--sample-tokens", 0]
    changes = ["--model.compute-dtype", "bfloat16", "--model.router-aux-loss-coef", 0.01]
    assert run(*common, *changes, "--out", tmp_path / "a") == 0
    with pytest.raises(CheckpointError, match="has shape"):
        run(*common, "--model.moe-intermediate-size", 24, "--out", tmp_path / "b")


def test_a_run_of_our_own_is_exported(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = """--model.hidden-size 16 --model.num-hidden-layers 2 --model.num-attention-heads 2
    --model.num-key-value-heads 1 --model.head-dim 8 --model.num-experts 4 --model.moe-intermediate-size 12
    --model.balance-update-rate 0 --seq-len 32 --batch-size 2 --eval-windows 2 --sample-tokens 0 --steps 1""".split()
    assert run("train", *small, "--data", text, "--out", tmp_path / "run") == 0
    assert run("export", tmp_path / "run", "--out", tmp_path / "ours", "--max-shard-size", 20000) == 0
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    assert not (tmp_path / "ours" / "tokenizer.json").exists()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert back.config.eos_token_id == 256


def test_mistakes_are_one_line(
    model_dir: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = tmp_path / "run"

    def error(*arguments: object) -> str:
        return fails(capsys, monkeypatch, *arguments)

    assert "config.json" in error("import", tmp_path / "nothing", "--out", imported)
    assert "no special token '<x>'" in error("import", model_dir, "--out", imported, "--separator-token", "<x>")
    assert not imported.exists()
    assert run("import", model_dir, "--out", imported) == 0
    assert "exists" in error("import", model_dir, "--out", imported)
    assert "exists" in error("export", imported, "--out", model_dir)
    assert "llama" in error("export", imported, "--out", tmp_path / "x", "--model-type", "llama")
    assert "dots1 differs in" in error("export", imported, "--out", tmp_path / "x", "--model-type", "dots1")
    assert "holds no run" in error("export", text, "--out", tmp_path / "x")
    assert "holds no run" in error("train", "--init-from", model_dir, "--data", text)
    assert "--preset tiny" in error("train", "--init-from", imported, "--preset", "tiny", "--data", text)
    assert "no steps to resume" in error("train", "--out", imported, "--resume")
    assert "restore the tokenizer" in error("train", "--init-from", imported, "--tokenizer", other_tokenizer(tmp_path))
    (imported / "tokenizer.json").write_text((tmp_path / "other" / "tokenizer.json").read_text())
    assert "restore the tokenizer" in error("sample", "--run", imported)
    assert "restore the tokenizer" in error("export", imported, "--out", tmp_path / "x")


def other_tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "other", "</s>")
    return tmp_path / "other" / "tokenizer.json"


def test_a_tokenizer_that_cannot_be_used_is_named(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / "tokenizer.model")
    error = fails(capsys, monkeypatch, "import", model_dir, "--out", tmp_path / "run")
    assert "has tokenizer.model but no tokenizer.json" in error
    (model_dir / "tokenizer.model").unlink()
    assert run("import", model_dir, "--out", tmp_path / "run") == 0
    assert "without a tokenizer" in capsys.readouterr().out


def test_a_full_disk_leaves_no_run(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Path, *_: object) -> None:
        (run / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "write_state", full)
        assert "No space left" in fails(capsys, patch, "import", model_dir, "--out", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
