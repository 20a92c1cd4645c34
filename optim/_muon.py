"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; arXiv
2502.16982).

The work is split so that it can be spread over ranks. Momentum, decay and rate are elementwise and run on
whatever piece of a leaf is here. Orthogonalisation needs whole matrices: it is one function over the tree, an
argument of :func:`muon`, and receives the single-process computation to apply to whole leaves.

Where every leaf is whole, all of it is done for a cacheful of matrices at a time: what momentum, decay and rate
read and write is then still in cache, and only the new momenta and the updates go to memory.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
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
    rule = _rule(beta, momentum, nesterov, scale, steps, coefficients, dtype, method, foreach)
    if not momentum_dtype.is_floating_point:
        raise ValueError(f"momentum_dtype must be a floating-point dtype, got {momentum_dtype}")
    whole = functools.partial(orthogonalize_whole, scale=scale, function=rule.function)

    def init(params: Tree) -> ScaleByMuonState:
        leaves, _ = _tree.flatten(params)
        for leaf, leaf_axes, path in zip(leaves, _leaf_axes(axes, params), _tree.leaf_paths(params), strict=True):
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
        count = state.count + 1
        mu, mean = rule.momenta(cast(grads, torch.float32), cast(old, torch.float32), count)
        tree = _tree.unflatten(mean, spec)
        out = orthogonalize(tree, _tree.unflatten(_leaf_axes(axes, tree), spec), whole)
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
        rule = _rule(beta, momentum, nesterov, scale, steps, coefficients, dtype, method, foreach)
        one = _one_pass(rule, axes, momentum_dtype, learning_rate, weight_decay)

        def update(updates: Tree, state: Tree, params: Tree | None = None, /) -> tuple[Tree, Tree]:
            # Autograd does not let anybody write to several views of a leaf in turn.
            recorded = torch.is_grad_enabled() and any(
                leaf.requires_grad for leaf in _tree.leaves_of((updates, state, params))
            )
            return (chained.update if recorded else one)(updates, state, params)

        return checked(GradientTransformation(chained.init, update), "muon")
    return checked(chained, "muon")


class _Rule(NamedTuple):
    """What Muon computes, on as much as is given to it at a time."""

    #: ``momenta(grads, old, count)``: float32 tensors of any shapes; returns the new momenta, and what is to be
    #: orthogonalised.
    momenta: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], tuple[list[Tensor], list[Tensor]]]
    #: Orthogonalises a stack [batch, rows, cols].
    function: Callable[[Tensor], Tensor]
    scale: ScaleRule


def _rule(
    beta: float,
    momentum: Momentum,
    nesterov: bool,
    scale: ScaleRule,
    steps: int,
    coefficients: Coefficients,
    dtype: torch.dtype | None,
    method: Method,
    foreach: bool,
) -> _Rule:
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if momentum not in ("average", "sum"):
        raise ValueError(f"momentum must be 'average' or 'sum', got {momentum!r}")
    matrix_scale(scale, 1, 1)  # raises for an unknown rule
    triples = check_coefficients(coefficients, steps)
    check_form(dtype, method)
    return _Rule(
        functools.partial(_average if momentum == "average" else _sum, beta=beta, nesterov=nesterov, foreach=foreach),
        functools.partial(newton_schulz, steps=steps, coefficients=triples, dtype=dtype, method=method),
        scale,
    )


def _one_pass(
    rule: _Rule, axes: Tree, momentum_dtype: torch.dtype, learning_rate: ScalarOrSchedule, weight_decay: float
) -> UpdateFn:
    """Return the update of the chain that :func:`muon` is, on its state, a cacheful of matrices at a time."""

    def update(
        updates: Tree, state: tuple[ScaleByMuonState, EmptyState, RateState], params: Tree | None = None, /
    ) -> tuple[Tree, tuple[ScaleByMuonState, EmptyState, RateState]]:
        muon_state, empty, rate_state = state
        old, spec = _tree.flatten(muon_state.mu)
        grads = _tree.check_congruent(muon_state.mu, updates, "muon: the gradients", "the momenta", dtype=False)
        leaves = _tree.flatten_like(muon_state.mu, params, "muon: the parameters", "the momenta")
        count = muon_state.count + 1
        rate, rate_state = next_rate(learning_rate, rate_state)
        check_no_transform([count, rate, *old, *grads, *leaves], "muon")
        factor = -number(rate)
        _keep_freed_memory()
        mu = [torch.empty(x.shape, dtype=momentum_dtype, device=x.device) for x in old]
        out = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in old]
        leaf_axes, paths = _leaf_axes(axes, spec), _tree.leaf_paths(spec)
        stacks = [_stacks(xs, leaf_axes, paths) for xs in (grads, old, leaves, mu, out)]
        for part in _cachefuls(stacks[0]):
            some, some_old, some_leaves, some_mu, some_out = (_pieces(xs, part) for xs in stacks)
            new, mean = rule.momenta(cast(some, torch.float32), cast(some_old, torch.float32), count)
            new_out = torch._foreach_mul(_orthogonal(mean, rule.function, rule.scale), factor)
            if weight_decay:
                torch._foreach_add_(new_out, cast(some_leaves, torch.float32), alpha=factor * weight_decay)
            for target, value in zip([*some_mu, *some_out], [*new, *new_out], strict=True):
                target.copy_(value)
        new_state = ScaleByMuonState(count, _tree.unflatten(mu, spec))
        return _tree.unflatten(out, spec), (new_state, empty, rate_state)

    return update


def _keep_freed_memory() -> None:
    """Let glibc keep the temporaries of one matrix for the next.

    It gives freed memory back to the system beyond twice the largest block that was ever freed, up to 64 MiB
    (mallopt(3), M_MMAP_THRESHOLD), and memory that comes from the system has to be cleared first: 7% of an update of
    512 x 1536 matrices. Freeing a block of nearly 32 MiB, never touched and so at no cost, gets it to 64 MiB. It is a
    storage, because whoever counts the bytes of tensors would take it for memory in use.
    """
    torch.UntypedStorage((1 << 25) - (1 << 13))


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
    leaf_axes, paths = _leaf_axes(axes, updates), _tree.leaf_paths(updates)
    splits = [split_matrices(leaf, one, path) for leaf, one, path in zip(leaves, leaf_axes, paths, strict=True)]
    stacks = [stack for split in splits for stack in split]
    # Made from the stacks, so they are inside whatever torch.func transform those are in, and can be written to there.
    results = [stack.new_empty(stack.shape) for stack in stacks]
    for part in _cachefuls(stacks):
        some = _orthogonal(_pieces(stacks, part), function, scale)
        for target, result in zip(_pieces(results, part), some, strict=True):
            target.copy_(result)
    rest = iter(results)
    out = []
    for split, leaf, one, path in zip(splits, leaves, leaf_axes, paths, strict=True):
        own = [next(rest) for _ in split]
        out.append(join_matrices(own, one, leaf.shape, path) if leaf.numel() else leaf.clone())
    return _tree.unflatten(out, spec)


def _leaf_axes(axes: Tree, tree: Tree) -> list[MatrixAxes]:
    return _tree.broadcast_prefix(axes, tree, lambda node: isinstance(node, MatrixAxes), "MatrixAxes")


def _stacks(leaves: Sequence[Tensor], axes: Sequence[MatrixAxes], paths: Sequence[str]) -> list[Tensor]:
    return [
        stack for leaf, one, path in zip(leaves, axes, paths, strict=True) for stack in split_matrices(leaf, one, path)
    ]


def _cachefuls(stacks: Sequence[Tensor]) -> Iterator[list[tuple[int, int, int]]]:
    """Deal all matrices out, a cacheful at a time, as (index of the stack, first matrix, number of matrices).

    Those of one shape, lying or standing, go together from whatever leaf they are: one product of several
    small matrices keeps all cores busy where single ones do not.
    """
    groups: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, stack in enumerate(stacks):
        rows, cols = stack.shape[-2:]
        groups.setdefault((min(rows, cols), max(rows, cols), stack.dtype, stack.device), []).append(index)
    for (rows, cols, _, device), members in groups.items():
        room = size = stack_size(rows, cols, device)
        part: list[tuple[int, int, int]] = []
        for index in members:
            start, end = 0, stacks[index].shape[0]
            while start < end:
                length = min(end - start, room)
                part.append((index, start, length))
                room -= length
                start += length
                if room == 0:
                    yield part
                    room, part = size, []
        if part:
            yield part


def _pieces(stacks: Sequence[Tensor], part: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    return [stacks[index].narrow(0, start, length) for index, start, length in part]


def _orthogonal(stacks: Sequence[Tensor], function: Callable[[Tensor], Tensor], rule: ScaleRule) -> list[Tensor]:
    """Apply ``function`` and the scale to stacks [batch, rows, cols] of one shape; those that stand are laid down."""
    lying = [stack if stack.shape[-2] <= stack.shape[-1] else stack.mT for stack in stacks]
    results = function(lying[0] if len(lying) == 1 else torch.cat(lying)).split([stack.shape[0] for stack in stacks])
    out = []
    for stack, result in zip(stacks, results, strict=True):
        factor = matrix_scale(rule, *stack.shape[-2:])
        turned = result if stack.shape[-2] <= stack.shape[-1] else result.mT
        out.append(turned if factor == 1.0 else turned * factor)
    return out


def _average(
    grads: Sequence[Tensor], old: Sequence[Tensor], count: Tensor, *, beta: float, nesterov: bool, foreach: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the new average, and its bias-corrected form up to a factor, looking ahead with Nesterov."""
    mu = lerp(old, grads, 1.0 - beta, foreach=foreach)
    if not nesterov:
        return mu, mu
    # Corrected, the look-ahead is m beta / c(count + 1) + g (1 - beta) / c(count). Orthogonalisation does not see
    # the sum of the two factors, so it is left at 1.
    m, g = beta / bias_correction(beta, count + 1), (1.0 - beta) / bias_correction(beta, count)
    return mu, lerp(mu, grads, g / (m + g), foreach=foreach)


def _sum(
    grads: Sequence[Tensor], old: Sequence[Tensor], count: Tensor, *, beta: float, nesterov: bool, foreach: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the new sum, and the same looking ahead with Nesterov."""
    mu = add(grads, old, alpha=beta, foreach=foreach)
    return mu, add(grads, mu, alpha=beta, foreach=foreach) if nesterov else mu
