"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; arXiv
2502.16982).

The work is split so that it can be spread over ranks. Momentum, decay and rate are elementwise and run on
whatever piece of a leaf is here. Orthogonalisation needs whole matrices: it is one function over the tree, an
argument of :func:`muon`, and receives the single-process computation to apply to whole leaves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from . import _tree
from ._adam import bias_correction, zero_moments
from ._base import EmptyState, GradientTransformation, UpdateFn, chain, checked
from ._decay import add_decayed_weights
from ._elementwise import add, cast, check_no_transform, lerp, number
from ._learning_rate import RateState, ScalarOrSchedule, next_rate, scale_by_learning_rate
from ._matrix_axes import (
    MatrixAxes,
    ScaleRule,
    check_axes,
    check_blocks,
    join_matrices,
    matrix_scale,
    split_matrices,
)
from ._newton_schulz import (
    KELLER_JORDAN,
    Coefficients,
    Method,
    check_coefficients,
    check_form,
    newton_schulz,
    stack_size,
)
from ._tree import Tree

Momentum: TypeAlias = Literal["average", "sum"]

#: ``whole(updates, axes) -> updates``: orthogonalises and scales every matrix of whole leaves. ``updates`` is
#: any tree of tensors, ``axes`` a congruent tree of :class:`MatrixAxes`.
WholeFn: TypeAlias = Callable[[Tree, Tree], Tree]


class Orthogonalize(Protocol):
    """How a tree of momenta becomes a tree of orthogonalised updates.

    ``orthogonalize(updates, axes, whole)``: ``updates`` is congruent with the parameters that muon sees
    (float32, a :class:`MaskedNode` where it sees none), ``axes`` a congruent tree of :class:`MatrixAxes`; the
    result is congruent with ``updates``. On one process this is ``whole(updates, axes)``. Where leaves are
    shards, bring each matrix together on an owner, call ``whole`` on any tree (a list will do) of the *whole*
    leaves it owns, and send the pieces back: blocks and scales follow from the whole shape, so nothing else
    has to know them.
    """

    def __call__(self, updates: Tree, axes: Tree, whole: WholeFn, /) -> Tree:
        """Return the orthogonalised and scaled updates."""
        ...


def orthogonalize_here(updates: Tree, axes: Tree, whole: WholeFn, /) -> Tree:
    """Orthogonalise on this process, where every leaf is whole."""
    return whole(updates, axes)


class ScaleByMuonState(NamedTuple):
    """Muon's momentum."""

    count: Tensor  # type: ignore[assignment]  # int64 [], updates made so far
    mu: Tree  # momentum_dtype, congruent with the parameters


def scale_by_muon(
    axes: Tree,
    beta: float = 0.95,
    *,
    momentum: Momentum = "average",
    nesterov: bool = True,
    momentum_dtype: torch.dtype = torch.float32,
    scale: ScaleRule = "shape",
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    dtype: torch.dtype | None = None,
    method: Method = "auto",
    orthogonalize: Orthogonalize = orthogonalize_here,
    foreach: bool = True,
) -> GradientTransformation:
    """Replace gradients by their orthogonalised momentum; the arguments are those of :func:`muon`."""
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if momentum not in ("average", "sum"):
        raise ValueError(f"momentum must be 'average' or 'sum', got {momentum!r}")
    if not momentum_dtype.is_floating_point:
        raise ValueError(f"momentum_dtype must be a floating-point dtype, got {momentum_dtype}")
    matrix_scale(scale, 1, 1)  # raises for an unknown rule
    triples = check_coefficients(coefficients, steps)
    check_form(dtype, method)
    whole = functools.partial(
        orthogonalize_whole,
        scale=scale,
        function=functools.partial(newton_schulz, steps=steps, coefficients=triples, dtype=dtype, method=method),
    )

    def axes_tree(params: Tree) -> Tree:
        leaves = _tree.broadcast_prefix(axes, params, lambda node: isinstance(node, MatrixAxes), "MatrixAxes")
        return _tree.unflatten(leaves, params)

    def init(params: Tree) -> ScaleByMuonState:
        leaves, _ = _tree.flatten(params)
        tree = axes_tree(params)
        for leaf, leaf_axes, path in zip(leaves, _tree.leaves_of(tree), _tree.leaf_paths(params), strict=True):
            # Shards need not hold whole blocks: there, only the axes can be checked before the leaf is whole.
            check = check_blocks if orthogonalize is orthogonalize_here else check_axes
            check(leaf_axes, leaf.shape, path)
        count = torch.zeros((), dtype=torch.int64, device=_tree.scalar_device(params))
        return ScaleByMuonState(count, zero_moments(params, momentum_dtype))

    def update(updates: Tree, state: ScaleByMuonState, params: Tree | None = None, /) -> tuple[Tree, ScaleByMuonState]:
        old, spec = _tree.flatten(state.mu)
        grads = _tree.check_congruent(state.mu, updates, "muon: the gradients", "the momenta", dtype=False)
        if foreach:
            check_no_transform([state.count, *old, *grads], "muon")
        grads, old = cast(grads, torch.float32), cast(old, torch.float32)
        count = state.count + 1
        if momentum == "average":
            mu, mean = _average(grads, old, beta, count, nesterov, foreach)
        else:
            mu = add(grads, old, alpha=beta, foreach=foreach)
            mean = add(grads, mu, alpha=beta, foreach=foreach) if nesterov else mu
        tree = _tree.unflatten(mean, spec)
        out = orthogonalize(tree, axes_tree(tree), whole)
        _tree.check_congruent(tree, out, "orthogonalize: the results", "the momenta", dtype=False)
        return out, ScaleByMuonState(count, _tree.unflatten(cast(mu, momentum_dtype), spec))

    return GradientTransformation(init, update)


def muon(
    learning_rate: ScalarOrSchedule,
    axes: Tree,
    beta: float = 0.95,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    *,
    momentum: Momentum = "average",
    nesterov: bool = True,
    momentum_dtype: torch.dtype = torch.float32,
    scale: ScaleRule = "shape",
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    dtype: torch.dtype | None = None,
    method: Method = "auto",
    orthogonalize: Orthogonalize = orthogonalize_here,
    foreach: bool = True,
) -> GradientTransformation:
    """Muon: steepest descent under the spectral norm, on the momentum of each matrix.

    Every leaf it is given must hold matrices; send the others elsewhere with :func:`partition`.

    Against ``torch.optim.Muon`` (2.13): that one keeps the plain sum (times 1 - beta, which orthogonalisation
    does not see), so ``momentum="sum"`` is its momentum and ``"average"`` differs under Nesterov by the bias
    correction; it iterates in bfloat16, here ``dtype=torch.bfloat16``; it takes 2-D leaves as [out, in], here
    ``MatrixAxes(out=0, in_=1)``. Against ``optax.contrib.muon``: the same as ``"average"``; leaves with more
    than two axes go to Adam there unless told otherwise, and its epsilon in the norm is absent here.

    Args:
        learning_rate: a constant or a schedule, see :func:`scale_by_learning_rate`.
        axes: tree of :class:`MatrixAxes` congruent with the parameters or a prefix of them; a single one for
            all. Inside :func:`partition` it may be the tree for all parameters: what is masked is skipped.
        beta: decay of the momentum, in [0, 1).
        weight_decay: times the rate and the parameter.
        mask: where decay applies, see :func:`add_decayed_weights`.
        momentum: ``"average"``: ``m = beta m + (1 - beta) g``, bias-corrected (optax). ``"sum"``:
            ``m = beta m + g`` (Keller Jordan).
        nesterov: orthogonalise the momentum as it will be with the gradient seen once more.
        momentum_dtype: in which the momentum is kept; computed in float32.
        scale: the factor of each matrix by its shape, see :func:`matrix_scale`. One rule, applied once.
        steps: Newton-Schulz iterations.
        coefficients: of the iterations, see :func:`newton_schulz`.
        dtype: precision of the iterations; ``None`` for float32.
        method: form of the iterations, see :func:`newton_schulz`.
        orthogonalize: see :class:`Orthogonalize`.
        foreach: one kernel call for all leaves; ``False`` inside a ``torch.func`` transform.

    Raises:
        ValueError: a hyperparameter out of its range; in ``init``, a leaf without matrices or axes, axes out
            of range, blocks that do not add up; in ``update``, gradients that differ from the parameters in
            tree, shape or dtype.

    Example:
        >>> tx = muon(0.02, axes=MatrixAxes(out=-1, in_=-2), weight_decay=0.1, scale="match_rms")
    """
    direction = scale_by_muon(
        axes,
        beta,
        momentum=momentum,
        nesterov=nesterov,
        momentum_dtype=momentum_dtype,
        scale=scale,
        steps=steps,
        coefficients=coefficients,
        dtype=dtype,
        method=method,
        orthogonalize=orthogonalize,
        foreach=foreach,
    )
    chained = chain(
        direction,
        add_decayed_weights(weight_decay, mask, foreach=foreach),
        scale_by_learning_rate(learning_rate, foreach=foreach),
    )
    if foreach and mask is None and orthogonalize is orthogonalize_here:
        one = _one_pass(direction.update, learning_rate, weight_decay)
        return checked(GradientTransformation(chained.init, one), "muon")
    return checked(chained, "muon")


def _one_pass(direction: UpdateFn, learning_rate: ScalarOrSchedule, weight_decay: float) -> UpdateFn:
    """Return the update of the chain that :func:`muon` is, on its state, without two more copies of every leaf."""

    def update(
        updates: Tree, state: tuple[ScaleByMuonState, EmptyState, RateState], params: Tree | None = None, /
    ) -> tuple[Tree, tuple[ScaleByMuonState, EmptyState, RateState]]:
        muon_state, empty, rate_state = state
        out, muon_state = direction(updates, muon_state, params)
        rate, rate_state = next_rate(learning_rate, rate_state)
        leaves, _ = _tree.flatten(out)
        check_no_transform([rate, *leaves], "muon")
        if leaves:
            # `orthogonalize_here` has made them: nobody else has seen them yet.
            torch._foreach_mul_(leaves, -number(rate))
            if weight_decay:
                decayed = cast(_tree.flatten_like(out, params, "muon: the parameters"), torch.float32)
                torch._foreach_add_(leaves, decayed, alpha=-number(rate) * weight_decay)
        return out, (muon_state, empty, rate_state)

    return update


def orthogonalize_whole(
    updates: Tree, axes: Tree, *, scale: ScaleRule, function: Callable[[Tensor], Tensor] = newton_schulz
) -> Tree:
    """Orthogonalise and scale every matrix of a tree of whole leaves.

    Args:
        updates: tree of tensors.
        axes: congruent tree of :class:`MatrixAxes`.
        scale: rule for the factor of each matrix.
        function: orthogonalises a stack [batch, rows, cols].

    Returns:
        A tree congruent with ``updates``.

    Raises:
        ValueError: a leaf without matrices, axes out of range, blocks that do not add up; names the leaf's
            path.
    """
    leaves, spec = _tree.flatten(updates)
    paths = _tree.leaf_paths(updates)
    leaf_axes = _tree.broadcast_prefix(axes, updates, lambda node: isinstance(node, MatrixAxes), "MatrixAxes")
    pieces = [split_matrices(leaf, one, path) for leaf, one, path in zip(leaves, leaf_axes, paths, strict=True)]
    stacks = iter(_together([stack for piece in pieces for stack in piece], function, scale))
    out = []
    for leaf, one, path, piece in zip(leaves, leaf_axes, paths, pieces, strict=True):
        out.append(join_matrices([next(stacks) for _ in piece], one, leaf.shape, path))
    return _tree.unflatten(out, spec)


def _together(stacks: Sequence[Tensor], function: Callable[[Tensor], Tensor], rule: ScaleRule) -> list[Tensor]:
    """Apply ``function`` and the scale to stacks [batch, rows, cols], a cacheful of matrices at a time.

    Small stacks of one shape from different leaves go together: one product of several matrices keeps all
    cores busy where single ones of a few hundred rows do not. Tall ones are laid on their side so that they
    meet wide ones.
    """
    out: list[Tensor | None] = [None] * len(stacks)
    groups: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, stack in enumerate(stacks):
        rows, cols = stack.shape[-2:]
        size = stack_size(rows, cols, stack.device)
        if stack.shape[0] >= size:
            result = stack.new_empty(stack.shape)
            factor = matrix_scale(rule, rows, cols)
            for start in range(0, stack.shape[0], size):
                result[start : start + size] = function(stack[start : start + size]) * factor
            out[index] = result
        else:
            groups.setdefault((min(rows, cols), max(rows, cols), stack.dtype, stack.device), []).append(index)
    for (rows, cols, _, device), members in groups.items():
        size = stack_size(rows, cols, device)
        batch: list[int] = []
        for index in members:
            batch.append(index)
            if index == members[-1] or sum(stacks[i].shape[0] for i in batch) >= size:
                wide = [stacks[i] if stacks[i].shape[-1] == cols else stacks[i].mT for i in batch]
                results = torch.split(function(torch.cat(wide)), [stack.shape[0] for stack in wide])
                for i, result in zip(batch, results, strict=True):
                    turned = result if stacks[i].shape[-1] == cols else result.mT
                    factor = matrix_scale(rule, *stacks[i].shape[-2:])
                    out[i] = turned if factor == 1.0 else turned * factor
                batch = []
    return [result for result in out if result is not None]


def _average(
    grads: Sequence[Tensor], old: Sequence[Tensor], beta: float, count: Tensor, nesterov: bool, foreach: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the new average and its bias-corrected form, looking ahead with Nesterov."""
    mu = lerp(old, grads, 1.0 - beta, foreach=foreach)
    if nesterov:
        weight = (beta / bias_correction(beta, count + 1)).to(torch.float32)
        grad_weight = ((1.0 - beta) / bias_correction(beta, count)).to(torch.float32)
        return mu, [weight * m + grad_weight * g for m, g in zip(mu, grads, strict=True)]
    correction = (1.0 / bias_correction(beta, count)).to(torch.float32)
    return mu, [correction * m for m in mu]
