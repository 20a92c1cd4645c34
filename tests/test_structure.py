"""Who imports whom, and one top-level name."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
