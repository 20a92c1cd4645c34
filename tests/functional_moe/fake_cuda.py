"""A CUDA device in name only: fake tensors that say they lie there, what goes to and from it, and a backward.

FakeTensorMode runs every operator's rule for shapes, devices and dtypes, so an operator without one for CUDA, a tensor
on the wrong device, or a value that the host would have to wait for, is an error on any machine. Torch's own autograd
engine wants threads of the device, and ends the process where torch was built without; so graphs run backwards here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe.config import MoEConfig
from functional_moe.optim import GradientTransformation
from functional_moe.parameters import abstract
from functional_moe.train_step import TrainState, init_state

# Of c10::DeviceType.
_CUDA, _META = 1, 14


def _pretend_runtime() -> None:
    """Where torch was built without CUDA, makes autograd and indexing believe in a device whose calls do nothing: they
    ask for its streams, and have no use for them here. The process then keeps the guard of ``meta`` for CUDA.
    """
    libraries = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(libraries / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA] is None:
        guards[_CUDA] = guards[_META]


def gradients_by_hand(
    outputs: Sequence[Tensor | GradientEdge],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, by walking the graph."""
    roots = [x if isinstance(x, GradientEdge) else get_gradient_edge(x) for x in outputs]
    leaves = [get_gradient_edge(x).node for x in inputs]
    order: list[Any] = []  # every node after those that it hands its gradients to
    seen: set[Any] = set()

    def visit(node: Any) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                visit(following)
            order.append(node)

    incoming: dict[Any, dict[int, Tensor]] = {}

    def add(node: Any, slot: int, value: Tensor | None) -> None:
        if node is not None and value is not None:
            wanted = node._input_metadata[slot]
            value = value.sum_to_size(wanted.shape).to(wanted.dtype)  # what was broadcast, or converted
            slots = incoming.setdefault(node, {})
            slots[slot] = slots[slot] + value if slot in slots else value

    for root, cotangent in zip(roots, cotangents, strict=True):
        visit(root.node)
        add(root.node, root.output_nr, cotangent)
    found: dict[Any, Tensor] = {}
    with torch.no_grad():
        for node in reversed(order):
            slots = incoming.pop(node, None)
            if slots is None:
                continue
            if node in leaves:
                found[node] = slots[0]
                continue
            given = [slots.get(index) for index in range(len(node._input_metadata))]
            # A Function's own backward returns something for inputs that are no tensors too.
            out = node.apply(*given) if hasattr(node, "apply") else node(*given)
            handed = out if isinstance(out, tuple) else (out,)
            which = getattr(node, "is_tensor", (True,) * len(node.next_functions))
            handed = [value for value, is_tensor in zip(handed, which, strict=False) if is_tensor]
            for (following, slot), value in zip(node.next_functions, handed, strict=True):
                add(following, slot, value)
    return tuple(found.get(node) for node in leaves)


class HostReads(TorchDispatchMode):
    """Notes what makes the host wait for the device: copies between the two, and results that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {leaf.device.type for leaf in tensors}
        depends = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:  # by a mask its size depends on values, by numbers it does not
            depends = any(leaf.dtype == torch.bool for leaf in tensors[1:])
        if depends and "cuda" in given:
            self.found.append(str(func))
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._opname in ("_to_copy", "copy_") and len(given | {out.device.type}) > 1:
            self.found.append(str(func))
        return out


@contextmanager
def pretended() -> Iterator[None]:
    """A FakeTensorMode in which tensors on ``cuda`` can be differentiated."""
    _pretend_runtime()
    engine = torch.autograd.grad
    torch.autograd.grad = gradients_by_hand  # type: ignore[assignment]
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.autograd.grad = engine


def draw_state(config: MoEConfig, optimizer: GradientTransformation) -> TrainState:
    """A state on the pretended device, counts and rates on the host with their values. Call it inside."""

    def place(leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")

    params = pytree.tree_map(place, abstract(config))
    state = init_state(params, optimizer, config)

    def number(leaf: Tensor) -> Tensor:
        # Made by torch.tensor its value is known in spite of the mode; the numbers do not matter.
        return torch.tensor(1 if leaf.dtype == torch.int64 else 0.01) if leaf.device.type == "cpu" else leaf

    return state._replace(opt_state=pytree.tree_map_only(Tensor, number, state.opt_state))
