"""From a declaration of parameters to placements: rules from logical axes to mesh axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from ._mesh import axis_sizes
from ._tree import Tree, map_leaves, named_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

MeshAxes: TypeAlias = tuple[str, ...]
Placements: TypeAlias = "tuple[Placement, ...]"


class Declared(Protocol):
    """What is known of a parameter before it exists, such as ``functional_moe.parameters.Leaf``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]: ...


class Rules(NamedTuple):
    """Which mesh axes split each logical axis; ``()`` is none. Change one with ``rules._replace``.

    Two tables, because the same name is split differently where whole experts are already spread.
    """

    dense: Mapping[str, MeshAxes]  # for leaves without an ``experts`` axis
    experts: Mapping[str, MeshAxes]  # for expert stacks


_WHOLE = ("vocab", "heads", "qkv", "router", "intermediate", "intermediate_gate_up", "one")


def default_rules(declared: Tree, mesh: DeviceMesh | Mapping[str, int]) -> Rules:
    """FSDP x EP.

    Dense leaves are split along ``hidden`` over ``fsdp`` and ``ep``. Expert stacks ``[experts, in, out]`` are split
    into whole experts over both where ``fsdp * ep`` divides their number (then Muon on them needs no communication);
    otherwise ``ep`` splits the experts and ``fsdp`` their ``hidden`` axis. Nothing is split over ``replicate``.

    Args:
      declared: a tree of :class:`Declared`.
      mesh: the mesh, or the sizes of its axes.

    Returns:
      a rule for each logical axis that ``declared`` has.

    Raises:
      ValueError: for an axis that has no default, a mesh without ``fsdp`` or ``ep``, or ``num_experts`` that ``ep``
        does not divide.
    """
    sizes = axis_sizes(mesh)
    for axis in ("fsdp", "ep"):
        if axis not in sizes:
            raise ValueError(f"the default rules need a mesh with the axes fsdp and ep, got {sizes}")
    both: MeshAxes = ("fsdp", "ep")
    known = {"dense": {"hidden": both, "head_dim": both, **dict.fromkeys(_WHOLE, ())}}
    found: dict[str, dict[str, MeshAxes]] = {"dense": {}, "experts": {}}
    for path, leaf in named_leaves(declared).items():
        kind = _kind(leaf)
        if kind == "experts":
            num_experts = leaf.shape[leaf.axes.index("experts")]
            _check_experts(path, num_experts, ("ep",), sizes)
            whole = num_experts % (sizes["fsdp"] * sizes["ep"]) == 0
            inner: dict[str, MeshAxes] = {
                "hidden": () if whole else ("fsdp",),
                "expert_intermediate": (),
                "expert_intermediate_gate_up": (),
            }
            known["experts"] = {"experts": both if whole else ("ep",), **inner}
        for axis in leaf.axes:
            if axis not in known[kind]:
                raise ValueError(f"leaf {path!r}: the logical axis {axis!r} has no default; give rules that name it")
            found[kind][axis] = known[kind][axis]
    return Rules(**found)


def placements(declared: Tree, mesh: DeviceMesh | Mapping[str, int], rules: Rules | None = None) -> Tree:
    """Where each leaf lives: a tree of placements, one per mesh axis.

    Args:
      declared: a tree of :class:`Declared`.
      mesh: the mesh, or the sizes of its axes (``{"fsdp": 32, "ep": 12}``: no processes are needed to plan).
      rules: :func:`default_rules` when not given.

    Returns:
      a tree like ``declared`` with ``(Shard(d) | Replicate(), ...)`` in place of each leaf. A dimension that several
      mesh axes split is split by the outermost first, as DTensor has it.

    Raises:
      ValueError: when a logical axis has no rule, a rule is for no leaf or names an axis that the mesh lacks, two axes
        of a leaf (or one, twice) are split by the same mesh axis, or experts are not split into equal parts. The leaf,
        the axis and the values are named.
    """
    from torch.distributed.tensor import Replicate, Shard

    sizes = axis_sizes(mesh)
    rules = default_rules(declared, mesh) if rules is None else rules
    tables = rules._asdict()
    leaves = named_leaves(declared)
    for kind, table in tables.items():
        used = {axis for leaf in leaves.values() if _kind(leaf) == kind for axis in leaf.axes}
        for axis, mesh_axes in table.items():
            if axis not in used:
                raise ValueError(f"Rules.{kind}: the rule {axis!r} -> {mesh_axes} is for no leaf")
            for mesh_axis in mesh_axes:
                if mesh_axis not in sizes:
                    raise ValueError(f"Rules.{kind}: {axis!r} -> {mesh_axes}, but the mesh has the axes {tuple(sizes)}")

    def place(path: str, leaf: Declared) -> Placements:
        kind = _kind(leaf)
        split: dict[str, int] = {}
        for dim, axis in enumerate(leaf.axes):
            if axis not in tables[kind]:
                raise ValueError(
                    f"leaf {path!r}: no rule in Rules.{kind} for the logical axis {axis!r}; () keeps it whole"
                )
            for mesh_axis in tables[kind][axis]:
                if mesh_axis in split:
                    raise ValueError(
                        f"leaf {path!r}: {leaf.axes[split[mesh_axis]]!r} and {axis!r} would both be split by the mesh "
                        f"axis {mesh_axis!r}"
                    )
                split[mesh_axis] = dim
            if axis == "experts":
                _check_experts(path, leaf.shape[dim], tables[kind][axis], sizes)
        return tuple(Shard(split[axis]) if axis in split else Replicate() for axis in sizes)

    return map_leaves(place, declared, "the declaration")


def _check_experts(path: str, num_experts: int, mesh_axes: MeshAxes, sizes: Mapping[str, int]) -> None:
    parts = math.prod(sizes[axis] for axis in mesh_axes)
    if num_experts % parts:
        axes = " x ".join(f"{axis} {sizes[axis]}" for axis in mesh_axes)
        raise ValueError(f"leaf {path!r}: num_experts = {num_experts} is not a multiple of {axes}")


def _kind(leaf: Declared) -> str:
    return "experts" if "experts" in leaf.axes else "dense"
