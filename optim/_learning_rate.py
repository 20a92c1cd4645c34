"""Learning rates as values in the optimizer's state: readable, settable at run time, and open to ``vmap``.

A rate is a leaf of the state, not a number baked into a closure. A constant one is *read* from there at each
update, so another value can be put in between two steps, and a sweep is ``torch.func.vmap`` over that leaf. A
scheduled one is computed from the count and *recorded* there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from . import _tree
from ._base import GradientTransformation
from ._elementwise import check_no_transform, number, scale
from ._tree import Tree

Schedule: TypeAlias = Callable[[Tensor], Tensor]
ScalarOrSchedule: TypeAlias = float | Tensor | Schedule


class LearningRateState(NamedTuple):
    """A constant rate. ``set_learning_rates`` may replace it."""

    count: Tensor  # type: ignore[assignment]  # int64 [], updates made so far
    learning_rate: Tensor  # float32 [], the rate of the next update


class ScheduledLearningRateState(NamedTuple):
    """A rate that a schedule gives."""

    count: Tensor  # type: ignore[assignment]  # int64 [], updates made so far
    learning_rate: Tensor  # float32 [], the rate of the last update (of the first one before it is made)


RateState: TypeAlias = LearningRateState | ScheduledLearningRateState


def scale_by_learning_rate(learning_rate: ScalarOrSchedule, *, foreach: bool = True) -> GradientTransformation:
    """Multiply updates by minus the learning rate, which lives in the state.

    Args:
        learning_rate: a float or 0-dimensional tensor, or a schedule ``count -> rate`` (count is int64 [],
            starting at 0 for the first update).
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a negative or not finite constant rate.
    """
    if callable(learning_rate):
        return _scheduled(learning_rate, foreach)
    initial = learning_rate
    check_rate(initial, "learning_rate")

    def init(params: Tree) -> LearningRateState:
        device = _tree.scalar_device(params)
        # A copy, not detached: a rate given as a tensor may be what a transform differentiates by.
        rate = torch.as_tensor(initial, dtype=torch.float32).to(device) + 0
        return LearningRateState(torch.zeros((), dtype=torch.int64, device=device), rate)

    def update(updates: Tree, state: LearningRateState, params: Tree | None = None, /) -> tuple[Tree, RateState]:
        rate, new_state = next_rate(initial, state)
        return _descend(updates, rate, foreach), new_state

    return GradientTransformation(init, update)


def _scheduled(schedule: Schedule, foreach: bool) -> GradientTransformation:
    def init(params: Tree) -> ScheduledLearningRateState:
        device = _tree.scalar_device(params)
        zero = torch.zeros((), dtype=torch.int64)
        rate = torch.as_tensor(schedule(zero), dtype=torch.float32)
        check_rate(rate, "learning_rate schedule at count 0")
        return ScheduledLearningRateState(zero.to(device), rate.to(device))

    def update(
        updates: Tree, state: ScheduledLearningRateState, params: Tree | None = None, /
    ) -> tuple[Tree, RateState]:
        rate, new_state = next_rate(schedule, state)
        return _descend(updates, rate, foreach), new_state

    return GradientTransformation(init, update)


def next_rate(learning_rate: ScalarOrSchedule, state: RateState) -> tuple[Tensor, RateState]:
    """Return the rate of this update, float32 [], and the state after it."""
    if callable(learning_rate):
        rate = torch.as_tensor(learning_rate(state.count), dtype=torch.float32)
        return rate, ScheduledLearningRateState(state.count + 1, rate)
    return state.learning_rate, LearningRateState(state.count + 1, state.learning_rate)


def _descend(updates: Tree, rate: Tensor, foreach: bool) -> Tree:
    leaves, spec = _tree.flatten(updates)
    if foreach:
        check_no_transform([rate, *leaves], "scale_by_learning_rate")
        return _tree.unflatten(scale(leaves, -number(rate), foreach=True), spec)
    return _tree.unflatten(scale(leaves, -rate, foreach=False), spec)


def check_rate(value: float | Tensor, name: str) -> None:
    """Raise ``ValueError`` for a rate that is negative or not finite, where its value can be seen."""
    if isinstance(value, Tensor) and (
        value.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(value) or value.dim() > 0
    ):
        return
    if not 0.0 <= float(value) < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {float(value)}")


def learning_rates(opt_state: Tree) -> dict[str, Tensor]:
    """Collect every learning rate in an optimizer's state.

    Returns:
        Rates (float32 []) by name. The name is the path of the labels of the :func:`partition` around it, as
        in ``"muon"``; ``"learning_rate"`` outside of any. Several under one name get ``.0``, ``.1``, ...
        appended.
    """
    return {name: state.learning_rate for name, state, _ in _named_states(opt_state)}


def set_learning_rates(opt_state: Tree, rates: Mapping[str, float | Tensor]) -> Tree:
    """Return ``opt_state`` with some constant rates replaced.

    Args:
        opt_state: the state; it is not changed.
        rates: new rates by the names that :func:`learning_rates` gives. A tensor may be inside
            ``torch.func.vmap``.

    Raises:
        ValueError: a name that no rate has, a rate that a schedule drives, a negative value.

    Example:
        >>> state = set_learning_rates(state, {"muon": 0.01})
    """
    named = _named_states(opt_state)
    known = {name: state for name, state, _ in named}
    for name, value in rates.items():
        if name not in known:
            raise ValueError(f"no learning rate is called {name!r}; the state has {sorted(known)}")
        if isinstance(known[name], ScheduledLearningRateState):
            raise ValueError(f"learning rate {name!r} is driven by a schedule and cannot be set")
        check_rate(value, f"learning rate {name!r}")
    nodes, spec = pytree.tree_flatten(opt_state, is_leaf=_is_rate)
    for name, state, index in named:
        if name in rates:
            rate = torch.as_tensor(rates[name], dtype=torch.float32, device=state.learning_rate.device)
            # `+ 0` makes a tensor of our own, also inside a transform, where `clone` would do the same.
            nodes[index] = state._replace(learning_rate=rate + 0)
    return pytree.tree_unflatten(nodes, spec)


def _is_rate(node: Any) -> bool:
    return isinstance(node, (LearningRateState, ScheduledLearningRateState))


def _named_states(
    opt_state: Tree,
) -> list[tuple[str, LearningRateState | ScheduledLearningRateState, int]]:
    """Return (name, state, position among the leaves) of each rate."""
    found: list[tuple[str, Any, int]] = []
    for index, (path, node) in enumerate(pytree.tree_flatten_with_path(opt_state, is_leaf=_is_rate)[0]):
        if _is_rate(node):
            # The only dicts above a rate are those of partition: others hold trees congruent with the
            # parameters.
            labels = [str(key.key) for key in path if isinstance(key, pytree.MappingKey)]
            found.append((".".join(labels) or "learning_rate", node, index))
    names = [name for name, _, _ in found]
    seen: dict[str, int] = {}
    out = []
    for name, node, index in found:
        if names.count(name) > 1:
            position = seen.get(name, 0)
            seen[name] = position + 1
            name = f"{name}.{position}"
        out.append((name, node, index))
    return out
