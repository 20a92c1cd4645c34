"""Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Callable

from . import _tree
from ._base import GradientTransformation, stateless
from ._elementwise import add, check_no_transform
from ._masking import masked
from ._tree import Tree


def add_decayed_weights(
    weight_decay: float, mask: Tree | Callable[[Tree], Tree] | None = None, *, foreach: bool = True
) -> GradientTransformation:
    """Add ``weight_decay * params`` to the updates.

    Before :func:`scale_by_learning_rate` this is decay times the rate of the step, whatever the schedule.

    Args:
        weight_decay: at least 0.
        mask: tree of bools (or a prefix, or a function from parameters to one), true where decay applies;
            ``None`` for everywhere.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a negative decay; in ``update``, no parameters.
    """
    if not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a finite number of at least 0, got {weight_decay}")

    def decay(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError("add_decayed_weights: update needs the parameters as its third argument, got None")
        leaves, spec = _tree.flatten(params)
        xs = _tree.check_congruent(params, updates, "add_decayed_weights: the updates", dtype=False)
        if foreach:
            check_no_transform([*xs, *leaves], "add_decayed_weights")
        if weight_decay == 0.0:
            return _tree.unflatten(xs, spec)
        ys = [y if x.dtype == y.dtype else y.to(x.dtype) for x, y in zip(xs, leaves, strict=True)]
        return _tree.unflatten(add(xs, ys, alpha=weight_decay, foreach=foreach), spec)

    transform = stateless(decay)
    return transform if mask is None else masked(transform, mask)
