"""The optimizer of a step whose schedule has its updates: layer by layer, its state wherever that lies.

The buckets are the chain's layers. The state of the optimizer stays the tree that ``optimizer.init`` made; what of it
belongs to a layer may lie in a further tier, and is fetched there for the layer's update and put back after.

Donated, a state's memory is taken over: parameters change in place, a new state in HBM replaces the old one layer by
layer, one in a further tier goes to where the old one was. The old tensors then raise, whatever is done with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .chain import by_layer, from_layers
from .config import MoEConfig
from .memory import HBM, Copies, Execution, HostCopies, Schedule, in_slab, tree_bytes
from .model import Metrics
from .optim import Buckets, GradientTransformation, MaskedNode, apply_updates, apply_updates_in_place
from .parallel import from_local_parts, is_dtensor, local_parts
from .parameters import Params, abstract


class Verdict(NamedTuple):
    """What a step knows once all gradients are there, over all ranks."""

    metrics: Metrics
    norm: Tensor  # [] of the whole gradient
    finite: Tensor  # bool []; whether the step is made


class LayerUpdates:
    """How the optimizer works on layers. Made once, for every step.

    Args:
      optimizer: over the parameter tree; per leaf, apart from a clip of the whole gradient.
      config: the model.

    Raises:
      ValueError: for an optimizer whose state does not fall into layers.
    """

    def __init__(self, optimizer: GradientTransformation, config: MoEConfig) -> None:
        params = abstract(config)
        layers = by_layer(params)
        # One mask for a layer; the leaves of embedding and head stand at the top of the tree, each with its own.
        self._masked = {
            layer: MaskedNode() if layer.startswith("layers.") else dict.fromkeys(tree, MaskedNode())
            for layer, tree in layers.items()
        }
        named = {
            layer: layer if layer.startswith("layers.") else dict.fromkeys(tree, layer)
            for layer, tree in layers.items()
        }
        self.buckets = Buckets(optimizer, from_layers(named), params)

    def alone(self, layer: str, tree: Any) -> Params:
        """A layer's tree in its place among the parameters; the others are masked."""
        return from_layers({**self._masked, layer: tree})


class StepUpdates:
    """The updates of one step: a ``memory.Updater``.

    Args:
      layers: the optimizer.
      params, opt_state: before the step; local parts.
      homes: of a schedule.
      judge: of what the schedule computed on this rank.
      donate: whether the memory of ``params`` and ``opt_state`` is taken over.
      copies: where new memory of further tiers comes from.

    Raises:
      ValueError: for a state that is on a device, and has its home in a further tier.
    """

    def __init__(
        self,
        layers: LayerUpdates,
        params: Params,
        opt_state: Any,
        homes: Mapping[str, str],
        judge: Callable[[Execution], Verdict],
        donate: bool,
        copies: Copies | None,
    ) -> None:
        self._layers, self._homes, self._judge, self._donate = layers, homes, judge, donate
        self._params = by_layer(params)
        self._own, self._shared = layers.buckets.split(opt_state)
        self._copies = HostCopies() if copies is None else copies
        for layer, home in homes.items():
            if home != HBM and (odd := next((leaf for leaf in self._own[layer] if leaf.device.type != "cpu"), None)):
                raise ValueError(
                    f"the optimizer's state of {layer} is on {odd.device}, the schedule has it in {home}: call "
                    "at_home(state, ...) once before the first step"
                )
        self._new_params: dict[str, Any] = {}
        self._new_own: dict[str, list[Tensor]] = {}
        self._new_shared: list[Tensor] | None = None
        self._spare: dict[str, list[Tensor]] = {}
        self._verdict: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """Of this step, once its gradients are there."""
        if self._verdict is None:
            raise ValueError("the norm of the gradient is not known yet")
        return self._verdict

    @property
    def begun(self) -> bool:
        """Whether anything may have been updated."""
        return self._verdict is not None

    def state(self, layer: str) -> list[Tensor]:
        """The layer's leaves of the old state."""
        return self._own[layer]

    def home(self, layer: str) -> list[Tensor]:
        """The old state's memory, if it is donated; else new memory of the tier."""
        if not self._donate and not self._spare:
            away = {layer: self._own[layer] for layer, home in self._homes.items() if home != HBM}
            self._spare = in_slab(away, self._copies.slab(tree_bytes(away)))
        self._new_own[layer] = self._own[layer] if self._donate else self._spare[layer]
        return self._new_own[layer]

    def begin(self, done: Execution) -> None:
        """Judges, and looks at the verdict, for which a device is waited for, once."""
        self._verdict = self._judge(done)
        self._makes = bool(self._verdict.finite)

    def update(self, layer: str, gradient: Any, state: list[Tensor]) -> list[Tensor]:
        """Makes the layer's parameters, and its state."""
        params = self._params[layer]
        if not self._makes:
            self._new_params[layer], self._new_own[layer] = params, state
            return state
        alone, buckets = self._layers.alone, self._layers.buckets
        done = buckets.update(
            layer, alone(layer, gradient), state, self._shared, alone(layer, params), self.verdict.norm
        )
        updates = by_layer(done.updates)[layer]
        if self._donate:
            apply_updates_in_place(params, updates)
            self._new_params[layer] = params
            if self._homes[layer] == HBM:
                _free(self._own.pop(layer), done.state)
        else:
            self._new_params[layer] = apply_updates(params, updates)
        if self._new_shared is None:
            self._new_shared = done.shared
        buckets.check_shared(self._new_shared, done.shared)
        self._new_own[layer] = done.state
        return done.state

    def results(self) -> tuple[Params, Any]:
        """The new parameters and the new state, once the schedule has run; the old ones where no step was made."""
        shared = self._shared if self._new_shared is None else self._new_shared
        new = from_layers(self._new_params), self._layers.buckets.join(self._new_own, shared)
        if any(home != HBM for home in self._homes.values()) and torch.cuda.is_initialized():
            # Host memory may be looked at without a stream, so what goes there must have arrived.
            torch.cuda.current_stream().synchronize()
        return new


def _free(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Lets go of the memory of tensors that others still refer to, but for what the new ones have taken over."""
    kept = {leaf.untyped_storage()._cdata for leaf in new}
    for leaf in old:
        if leaf.untyped_storage()._cdata not in kept:
            leaf.set_()  # type: ignore[call-overload]


def at_home(
    params: Params,
    opt_state: Any,
    optimizer: GradientTransformation,
    config: MoEConfig,
    schedule: Schedule,
    copies: Copies | None = None,
) -> Any:
    """An optimizer's state whose leaves lie where ``schedule`` has them: those of a further tier in one piece of it.

    Args:
      params, opt_state: of a state; shards, where it is sharded.
      optimizer, config: as the step has them.
      schedule: of the step.
      copies: how values get to further tiers; by default within the host's memory.

    Returns:
      the state, its other leaves as they are.

    Raises:
      NotImplementedError: for shards on devices: a DTensor of such a mesh holds no host tensor.
    """
    buckets = LayerUpdates(optimizer, config).buckets
    own, shared = buckets.split(local_parts(opt_state))
    away = {layer: own[layer] for layer, home in schedule.homes.items() if home != HBM}
    if not tree_bytes(away):
        return opt_state
    first = pytree.tree_leaves(params)[0]
    if is_dtensor(first) and first.device_mesh.device_type != "cpu":
        raise NotImplementedError(
            f"the optimizer's state is sharded over {first.device_mesh.device_type}, and cannot lie in a further tier: "
            "DTensors of such a mesh hold no host tensors"
        )
    placed = in_slab(away, (HostCopies() if copies is None else copies).slab(tree_bytes(away)))
    for source, target in zip(pytree.tree_leaves(away), pytree.tree_leaves(placed), strict=True):
        target.copy_(source)
    return from_local_parts(buckets.join({**own, **placed}, shared), opt_state)


def renewed(tree: Any) -> Any:
    """Tensors of the same memory that are not those of ``tree``."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach(), tree)


def discard(tree: Any) -> None:
    """Makes every later use of a tree's tensors raise. Others that share their memory are not touched."""
    for leaf in pytree.tree_leaves(tree):
        if is_dtensor(leaf):
            leaf.__class__ = _donated_shards()  # type: ignore[assignment]
        elif isinstance(leaf, Tensor):
            leaf.__class__ = _Donated


def _refuse() -> NoReturn:
    raise RuntimeError(
        "this tensor belongs to a state that was donated to a train step (donate=True): use the state that the step "
        "returned, or make the step with donate=False"
    )


class _Donated(Tensor):
    """A tensor that is no more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse()


@functools.cache
def _donated_shards() -> type[Tensor]:
    from torch.distributed.tensor import DTensor

    class DonatedShards(DTensor):
        """A DTensor that is no more."""

        __slots__ = ()

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
            _refuse()

        _local_tensor = property(lambda self: _refuse())

        def to_local(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refused."""
            _refuse()

        def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refused."""
            _refuse()

    return DonatedShards
