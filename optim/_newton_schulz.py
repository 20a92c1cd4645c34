"""Orthogonalisation of matrices by Newton-Schulz iterations.

``X = U S V^T`` becomes nearly ``U V^T`` by odd polynomials applied to the singular values: one step is
``X <- a X + b (X X^T) X + c (X X^T)^2 X``. Two forms of the same computation:

- **standard** iterates on ``X``, n x m with n <= m: ``A = X X^T; X <- a X + (b A + c A^2) X``. A step costs
  ``4 n^2 m + 2 n^3`` operations.
- **gram** iterates on ``R = X X^T``, n x n, and multiplies the polynomials of all steps into one n x n matrix
  ``Q``: ``P = a I + b R + c R^2; Q <- P Q; R <- P R P``, and ``X <- Q X`` at the end. It meets ``X`` twice
  instead of ten times (Dao, Amsel, Chen and Zhang, "Gram Newton-Schulz", 2026,
  https://dao-lab.ai/blog/2026/gram-newton-schulz). Rounding in ``R`` hides singular values below the root of
  the precision, and the polynomials amplify what is hidden; a *restart* (``X <- Q X``, then ``R`` and ``Q``
  anew) recovers them after they have grown.

All n x n products are symmetric, so only their upper block triangle is computed and then mirrored.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._matrix_product import SMALL_PRODUCT_IN_STACK, add_product, matrix_product, symmetric_product

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = Triple | Sequence[Triple]
Method: TypeAlias = Literal["standard", "gram", "auto"]

#: Keller Jordan's quintic (https://kellerjordan.github.io/posts/muon), one triple for every step.
KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

_POLAR_EXPRESS_EXACT = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

#: Polar Express (Amsel, Persson, Musco and Gower, arXiv 2505.16932): the minimax polynomial of each step for
#: singular values from 1e-3. All but the last are stretched by 1.01 against rounding, as the paper advises.
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS_EXACT[:-1]),
    _POLAR_EXPRESS_EXACT[-1],
)

#: Matrices with at least this many columns per row go to the gram method under ``"auto"``.
GRAM_ASPECT = 2.0

#: Elements that are iterated together: on a CPU what its second-level cache holds with the temporaries
#: (measured for 256 x 256: stacks of 4 are 7% faster than stacks of 64), on an accelerator enough to fill it.
STACK_ELEMENTS_CPU = 1 << 18
STACK_ELEMENTS_ACCELERATOR = 1 << 27


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    dtype: torch.dtype | None = None,
    method: Method = "auto",
) -> Tensor:
    """Replace the singular values of each matrix by values near 1.

    The result does not depend on the scale of a matrix, down to entries at the smallest normal number; a
    matrix of zeros stays zero. Works under every ``torch.func`` transform.

    Args:
        x: [..., rows, cols], a matrix or a stack of them; each is normalised and iterated on its own.
        steps: iterations.
        coefficients: one triple (a, b, c) for all steps, or at least ``steps`` of them, of which the first
            are taken.
        dtype: precision of the products. ``None`` is float32, and float64 for a float64 ``x``: half precision
            happens only where it is asked for. Normalisation is always done in at least float32.
        method: ``"standard"``, ``"gram"``, or ``"auto"``: gram from ``GRAM_ASPECT`` columns per row (or rows
            per column), where it is faster on the machines measured (``benchmarks/muon.py --crossover``).
            In float32 the two agree to 1e-4. In bfloat16 they part, as rounding in the Gram matrix hides
            small singular values. Measured at 128 x 512 against float32: standard is off by 1% (Gaussian), 3%
            (condition number 1e2) and 7% (1e3); gram by 2%, 9% and 14%, with singular values up to 1.43 where
            standard has 1.20.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: fewer than two axes, no steps, fewer coefficients than steps, an unknown method, a dtype
            that is not floating-point.
    """
    triples = check_coefficients(coefficients, steps)
    if x.dim() < 2:
        raise ValueError(f"newton_schulz needs [..., rows, cols], got shape {tuple(x.shape)}")
    check_form(dtype, method)
    if not x.dtype.is_floating_point:
        raise ValueError(f"newton_schulz needs a floating-point tensor, got {x.dtype}")
    exact = torch.promote_types(x.dtype, torch.float32)
    compute = exact if dtype is None else dtype
    rows, cols = x.shape[-2:]
    if x.numel() == 0:
        return x.clone()
    gram = method == "gram" or (method == "auto" and max(rows, cols) >= GRAM_ASPECT * min(rows, cols))
    stack = x.reshape(-1, rows, cols)
    size = stack_size(rows, cols, x.device)
    if stack.shape[0] <= size:
        return _orthogonalise(stack, triples, exact, compute, gram).to(x.dtype).reshape(x.shape)
    # Made from `x`, so it is inside whatever torch.func transform `x` is in, and can be written to there.
    out = stack.new_empty(stack.shape)
    for start in range(0, stack.shape[0], size):
        piece = stack[start : start + size]
        out[start : start + size] = _orthogonalise(piece, triples, exact, compute, gram)
    return out.reshape(x.shape)


def singular_value_band(
    steps: int = 5, coefficients: Coefficients = KELLER_JORDAN, smallest: float = 0.01
) -> tuple[float, float]:
    """Return the least and the largest value that singular values in [``smallest``, 1] are taken to.

    The input of the iteration has a Frobenius norm of 1, so its singular values are at most 1. The band is
    evaluated on a grid that is fine against the polynomials' wiggles (relative error below 1e-4).

    Raises:
        ValueError: as :func:`newton_schulz`; ``smallest`` not in (0, 1].
    """
    if not 0.0 < smallest <= 1.0:
        raise ValueError(f"smallest must be in (0, 1], got {smallest}")
    value = torch.logspace(math.log10(smallest), 0.0, 200_001, dtype=torch.float64)
    for a, b, c in check_coefficients(coefficients, steps):
        square = value * value
        value = value * (a + square * (b + c * square))
    return float(value.min()), float(value.max())


def check_coefficients(coefficients: Coefficients, steps: int) -> list[Triple]:
    """Return the triple of each step.

    Raises:
        ValueError: no steps, not triples, or fewer triples than steps.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    items: list[Any] = list(coefficients)
    if items and all(isinstance(item, (int, float)) for item in items):
        items = [items] * steps
    if any(isinstance(item, (int, float)) or len(item) != 3 for item in items):
        raise ValueError(f"coefficients must be a triple (a, b, c) or triples, got {coefficients!r}")
    if len(items) < steps:
        raise ValueError(f"{steps} steps need {steps} triples of coefficients, got {len(items)}")
    return [(float(a), float(b), float(c)) for a, b, c in items[:steps]]


def check_form(dtype: torch.dtype | None, method: str) -> None:
    """Raise ``ValueError`` for a dtype to compute in that is not floating-point, or an unknown method."""
    if method not in ("standard", "gram", "auto"):
        raise ValueError(f"method must be 'standard', 'gram' or 'auto', got {method!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype or None, got {dtype}")


def stack_size(rows: int, cols: int, device: torch.device) -> int:
    """Return how many matrices of a shape are iterated together: as many as the caches of the device like."""
    if device.type != "cpu":
        return max(1, STACK_ELEMENTS_ACCELERATOR // (rows * cols))
    if min(rows, cols) ** 3 > SMALL_PRODUCT_IN_STACK:
        # Large enough for a product to keep all threads busy by itself.
        return 1
    # One matrix per thread at least: a product of several is spread over threads without cutting any.
    return max(torch.get_num_threads(), STACK_ELEMENTS_CPU // (rows * cols))


def _orthogonalise(
    x: Tensor, triples: Sequence[Triple], exact: torch.dtype, compute: torch.dtype, gram: bool
) -> Tensor:
    """Normalise and iterate one stack [batch, rows, cols]."""
    tall = x.shape[-2] > x.shape[-1]
    # Contiguous first: a norm is summed in the order of memory, and how a matrix comes must not change its bits.
    y = _normalise((x.mT if tall else x).contiguous().to(exact)).to(compute)
    y = _gram(y, triples) if gram else _standard(y, triples)
    return y.mT if tall else y


def _normalise(x: Tensor) -> Tensor:
    """Divide by the Frobenius norm, by the largest entry first so that nothing under- or overflows."""
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


def _standard(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """Iterate on ``x``: [batch, n, m], n <= m."""
    for a, b, c in triples:
        gram = symmetric_product(x, x.mT)
        x = add_product(x, symmetric_product(gram, gram, base=gram, beta=b, alpha=c), a)
    return x


def _gram(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """Iterate on ``x x^T``; ``x``: [batch, n, m], n <= m."""
    # A restart comes after the second step, when small values have grown twelvefold or more, and again after
    # every second one, before rounding in `gram` shows. Five steps of a wide matrix do without another;
    # nearly square ones are ill-conditioned even when random. In float32 this keeps gram within 1e-4 of
    # standard.
    once = len(triples) <= 5 and x.shape[-1] >= GRAM_ASPECT * x.shape[-2]
    gram = symmetric_product(x, x.mT)
    product: Tensor | None = None
    for step, (a, b, c) in enumerate(triples, start=1):
        factor = symmetric_product(gram, gram, base=gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else symmetric_product(product, factor)
        if step == len(triples):
            break
        if step == 2 or (step % 2 == 0 and not once):
            x = matrix_product(product, x)
            gram, product = symmetric_product(x, x.mT), None
        else:
            gram = symmetric_product(symmetric_product(gram, factor), factor)
    return x if product is None else matrix_product(product, x)
