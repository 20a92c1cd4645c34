"""Who imports whom, and one top-level name."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import functional_moe

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "optim": {"optim"},
    "memory": {"memory"},
    "parallel": {"parallel", "optim", "memory"},
}


def imported(path: Path, folder: str) -> set[str]:
    """The folders of the project that a module imports; ``functional_moe`` for its own modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            depth = len(path.relative_to(ROOT / folder).parts)
            if node.level > depth:
                modules = [f"functional_moe.{node.module or ''}"]
            elif node.level:
                continue
            else:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] == "functional_moe":
                names.add(parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "functional_moe")
            assert parts[0] not in ALLOWED, f"{path}: {module} is imported by a name that only a checkout has"
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_nothing_is_imported_from_above(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert imported(path, folder) <= ALLOWED[folder], path


@pytest.mark.parametrize(
    ("folder", "others"), [("optim", {"einops", "opt_einsum"}), ("memory", {"numpy", "scipy", "matplotlib"})]
)
def test_the_lifted_folders_need_little_but_torch(folder: str, others: set[str]) -> None:
    own = {"torch", "__future__", "functional_moe"} | others | set(sys.stdlib_module_names)
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= own, path
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] in own, path


def test_a_wheel_installs_one_top_level_name(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"functional_moe"}
    for module in ("optim/_muon.py", "parallel/testing.py", "memory/__init__.py", "data/_windows.py", "py.typed"):
        assert f"functional_moe/{module}" in names


# The first three cost 0.5, 0.5 and 0.3 s beside torch on a Zen 5 core, and nothing on one process needs them.
HEAVY = {"torch.distributed.tensor", "torch.distributed.checkpoint", "scipy", "torch._dynamo", "torch._inductor"}
HEAVY |= {"matplotlib", "tokenizers", "jinja2", "transformers", "hypothesis", "jax"}


def modules_after(code: str) -> set[str]:
    """All that is imported by a new interpreter that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, sep='\\n')"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return set(done.stdout.splitlines())


ONE_STEP = """
import torch
from functional_moe import *
config = preset("tiny")
optimizer = optim.adamw(1e-3)
state = init_state(init(config, seed=0), optimizer, config)
tokens = torch.zeros(1, 8, dtype=torch.int64)
make_train_step(config, optimizer)(state, {"tokens": tokens, "targets": tokens})
"""


@pytest.mark.parametrize(
    "code",
    ["import functional_moe", "from functional_moe import *", "import functional_moe.__main__", ONE_STEP],
    ids=["package", "all names", "command", "one step"],
)
def test_nothing_slow_is_imported_before_it_is_needed(code: str) -> None:
    assert not HEAVY & modules_after(code)


def test_a_folder_by_itself_imports_nothing_else() -> None:
    parts = {
        name.removeprefix("functional_moe.").split(".")[0]
        for name in modules_after("import functional_moe.optim")
        if name.startswith("functional_moe.")
    }
    assert parts == {"optim"}


def test_every_name_of_the_package_is_where_the_type_checker_sees_it() -> None:
    tree = ast.parse((ROOT / "functional_moe" / "__init__.py").read_text())
    declared = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert set(declared) == set(functional_moe.__all__) and len(declared) > 20
    for name, module in declared.items():
        home = importlib.import_module("." + (module or name), "functional_moe")
        assert getattr(functional_moe, name) is (getattr(home, name) if module else home)
        assert name in dir(functional_moe)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = functional_moe.nonsense
