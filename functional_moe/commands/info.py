"""``functional-moe info``: what a model consists of."""

from __future__ import annotations

import dataclasses
import math

from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

from ..config import INFERRED_FIELDS, PRESETS, preset
from ..optim import path_name
from ..parameters import Leaf, declare
from .settings import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """Prints a model's shapes and how many parameters it has."""

    preset: str = "tiny"
    """Named model."""


def info(settings: InfoSettings) -> int:
    """Prints the table of leaves, alike layers as one row, and the totals."""
    try:
        config = preset(settings.preset)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    table = Table(box=box.SIMPLE)
    for column in ("leaf", "shape", "optimizer", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left", overflow="fold")
    leaves, _ = pytree.tree_flatten_with_path(declare(config), is_leaf=lambda node: isinstance(node, Leaf))
    alike: dict[tuple[str, Leaf], int] = {}
    for path, leaf in leaves:
        name = path_name(path)
        if name.startswith("layers."):
            name = "layers.*." + name.split(".", 2)[2]
        alike[name, leaf] = alike.get((name, leaf), 0) + 1
    for (name, leaf), times in alike.items():
        count = f"{math.prod(leaf.shape):,}" + (f" x {times}" if name.startswith("layers.") else "")
        shape = " x ".join(f"{size} {axis}" for size, axis in zip(leaf.shape, leaf.axes, strict=True))
        table.add_row(name, shape, leaf.label, count)
    console.print(f"{settings.preset} (there are: {', '.join(sorted(PRESETS))})")
    console.print(table)
    console.print(f"total  {_billions(config.num_params)}")
    console.print(f"active {_billions(config.num_active_params)} per token")
    if inferred := INFERRED_FIELDS.get(settings.preset):
        console.print(f"inferred, not published: {', '.join(inferred)}")
    return 0


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion ({count:,})" if count >= 1e9 else f"{count / 1e6:.2f} million ({count:,})"
