"""The pages under docs/ run as printed, say what comes out today, name what exists, and leave no public name out."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.DOTALL | re.MULTILINE)
"""A block of Python, and what it prints where a block of text follows it directly."""
PACKAGES = ("functional_moe", *(f"functional_moe.{name}" for name in ("data", "hf", "memory", "optim", "parallel")))
END = "--- end of a block ---"


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(DOCS)) for page in pages]


@pytest.mark.parametrize("page", names([page for page in PAGES if "```python" in page.read_text()]))
def test_a_page_runs_and_prints_as_printed(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    # A script of its own: pages make process groups, and start processes that import it.
    (tmp_path / "page.py").write_text("".join(f"{code}\nprint({END!r})\n" for code, _ in blocks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{END}\n")
    for (_, expected), found in zip(blocks, printed, strict=False):
        assert not expected or found == expected


def exists(path: str) -> bool:
    """Whether ``path`` is a module, or an attribute of one, or a declared field of a class."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        owner: object = found
        for part in parts[length:]:
            if not hasattr(owner, part):
                return part in getattr(owner, "__annotations__", {})
            owner = getattr(owner, part)
        return True
    return False


def test_every_name_that_a_page_links_to_exists() -> None:
    found = {name for page in PAGES for name in re.findall(r"\]\[(functional_moe[\w.]*)\]", page.read_text())}
    found |= {name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), flags=re.MULTILINE)}
    assert len(found) > 300
    assert [name for name in sorted(found) if not exists(name)] == []
    assert not exists("functional_moe.memory.no_such_name")
    assert not exists("functional_moe.no_such_module.name")


def test_the_reference_has_every_public_name_once() -> None:
    listed = [
        name for page in PAGES for name in re.findall(r"^::: (functional_moe\S*)", page.read_text(), flags=re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    for package in PACKAGES:
        source = Path(str(importlib.import_module(package).__file__)).read_text()
        for node in ast.walk(ast.parse(source)):
            for alias in node.names if isinstance(node, ast.ImportFrom) and node.level else ():
                name = f"{package}.{alias.asname or alias.name}"
                if name not in PACKAGES:
                    assert name in listed, f"{name} is on no page under docs/api"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a page](nowhere.md)", "nowhere.md"),
        ("[a place](index.md#nowhere)", "#nowhere"),
        ("![a picture](nowhere.png)", "nowhere.png"),
        ("[`x`][functional_moe.memory.nowhere]", "functional_moe.memory.nowhere"),
        ("::: functional_moe.memory.nowhere", "functional_moe.memory.nowhere"),
        ("[`in_bytes`][functional_moe.memory.in_bytes]\n\n::: functional_moe.memory.in_bytes", ""),
    ],
)
def test_the_build_refuses_what_leads_nowhere(tmp_path: Path, text: str, complaint: str) -> None:
    pytest.importorskip("mkdocs")
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Page\n\n{text}\n")
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nsite_name: test\nnav: [index.md]\n")
    (pages / "docstrings.py").symlink_to(DOCS / "docstrings.py")
    (tmp_path / "functional_moe").symlink_to(ROOT / "functional_moe")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == bool(complaint), said
    assert complaint in said


@pytest.mark.nightly
def test_the_page_of_the_large_run_has_todays_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "jupiter"))
    table = importlib.import_module("table")
    found = [one.tokens_per_second for one in table.changes(table.make_runs()).values()]
    rows = re.findall(r"^\| .* \| [\d.]+(?: for two)? \| .* \| (?:\*\*)?(\d+)(?:\*\*)? \|$", text_of("jupiter"), re.M)
    assert len(rows) == len(found)
    for printed, computed in zip(sorted(map(int, rows)), sorted(found), strict=True):
        assert abs(printed - computed) < 1


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()
