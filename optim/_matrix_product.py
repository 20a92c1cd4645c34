"""Products of matrices and of stacks of them, by the fastest kernel there is; and symmetric ones, of which only
half is computed.

On CPUs torch multiplies float32 matrices by MKL, which on AMD processors uses half the vector width (measured
on Zen 5: 105 against 242 Gflop/s per core for oneDNN). Plain float32 CPU tensors therefore go to oneDNN, by
the operator that torch.compile uses. It has neither a derivative nor a batching rule: tensors that need one
go to ``torch.matmul``, as do all other devices and dtypes. The two differ by rounding only.
"""

import itertools

import torch
from torch import Tensor

#: Multiply-adds up to which oneDNN's call costs more than its kernel saves: 19 us against 13 us for 64 x 64 x 128 on
#: two cores, 25 us against 30 us for 128 x 128 x 128.
SMALL_PRODUCT = 1 << 19

#: The same per matrix of a stack, which torch multiplies in one call and oneDNN one matrix at a time: 16 products of
#: 128 x 128 take 330 us against 400 us, 16 of 64 x 64 45 us against 240 us, 4 of 192 x 192 270 us against 190 us.
SMALL_PRODUCT_IN_STACK = 1 << 21


#: The multiple to which the rows of a product are best rounded where their number never repeats: preparing oneDNN's
#: code for a shape takes longer (0.3 to 0.5 ms) than it saves.
ROWS_PER_SHAPE = 64


def uses_onednn(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether products of ``x`` (converted to ``dtype``) are made by oneDNN, where they are large enough."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and (x.dtype if dtype is None else dtype) == torch.float32
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and torch._C._has_mkldnn
    )


def matrix_product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y`` of two matrices, [n, k] and [k, m], or of two stacks, [batch, n, k] and [batch, k, m].

    Strides may be any. By oneDNN it has no derivative; where one may be wanted it is ``torch.matmul``.
    """
    if not (uses_onednn(x) and uses_onednn(y) and _large(x, y)):
        return x @ y
    return _onednn_product(x, y.mT) if x.dim() == 2 else _product_of_rows(x, y.mT)


def product_over_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x^T @ y`` for [n, k] and [n, m], as the gradient of a weight is. Derivatives as ``matrix_product``.

    oneDNN's operator for that reads both by rows, where its product would first turn one of them. Rows beyond a
    multiple of 64 go to torch: it prepares code for every shape it meets, and the rows of an expert never repeat.
    Measured on two cores: 8192 rows of 128 and 384 take 2.4 ms against 4.1 ms by torch, of 128 and 16 0.20 against
    0.27 (the turned product: 0.74), 1024 of 128 and 256 0.21 against 0.36.
    """
    rows = len(x) - len(x) % ROWS_PER_SHAPE
    if not (uses_onednn(x) and uses_onednn(y) and _large(x[:rows].mT, y)):
        return x.mT @ y
    out: Tensor
    out, _ = torch.ops.aten.mkldnn_linear_backward_weights(
        x[:rows].to_mkldnn(), y[:rows].to_mkldnn(), x.new_empty(x.shape[1], y.shape[1]), False
    )
    return out.add_(x[rows:].mT @ y[rows:]) if rows < len(x) else out  # counters of FLOPs know no addmm_


def add_product(x: Tensor, factor: Tensor, a: float) -> Tensor:
    """Return ``a x + factor @ x`` for [batch, n, m] and [batch, n, n]; may write into ``factor``."""
    if not (uses_onednn(x) and _large(factor, x)):
        return torch.baddbmm(x, factor, x, beta=a)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return matrix_product(factor, x)


def symmetric_product(
    x: Tensor, y: Tensor, *, base: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return ``alpha x @ y + beta base`` where that is symmetric, computing its upper block triangle only.

    Args:
        x: [batch, n, k].
        y: [batch, k, n], with ``x @ y`` symmetric: ``x.mT``, or a matrix from here that commutes with ``x``.
        base: [batch, n, n], symmetric; ``None`` for none.
        beta: factor of ``base``.
        alpha: factor of the product, where there is a base.

    Returns:
        [batch, n, n], a new tensor; exactly symmetric where it was computed in blocks.
    """
    n = x.shape[-2]
    onednn = uses_onednn(x) and uses_onednn(y) and _large(x, y)
    count = _blocks(n, x.shape[-1], x.dtype)
    if count == 1 and not onednn:
        if base is not None:
            return torch.baddbmm(base, x, y, beta=beta, alpha=alpha)
        # For a transposed y in bfloat16 a stack of one takes 1.23 ms where the matrix takes 0.86 (512 x 1536). In
        # float32 a result does not depend on how many matrices there are: layer by layer gives the bits of all at once.
        alone = x.shape[0] == 1 and x.dtype.itemsize < 4
        return (x[0] @ y[0])[None] if alone else x @ y
    if count == 1 and base is None:
        return _product_of_rows(x, y.mT)
    if count == 1 and base is y:
        # alpha x y + beta y = (alpha x + beta 1) y, when x is square: a pass less over the result.
        shifted = x * alpha
        shifted.diagonal(dim1=-2, dim2=-1).add_(beta)
        return _product_of_rows(shifted, y.mT)
    edges = [n * i // count for i in range(count + 1)]
    out = x.new_empty(x.shape[0], n, n)
    # oneDNN wants the rows of y^T. A y in blocks is exactly symmetric, and its own rows are contiguous. One
    # that is not in blocks must be turned: used as its transpose, its rounding would be amplified from step
    # to step.
    rows = y if count > 1 and y.shape[-2] == n and y.stride(-1) == 1 else y.mT
    # Row panel i holds the blocks (i, i), (i, i + 1), ...; below the diagonal stands its transpose.
    for a, b in itertools.pairwise(edges):
        block, left = out[:, a:b, a:], x[:, a:b]
        if onednn and base is not None:
            torch.mul(_product_of_rows(left, rows[:, a:]), alpha, out=block)
            block.add_(base[:, a:b, a:], alpha=beta)
        elif onednn:
            block.copy_(_product_of_rows(left, rows[:, a:]))
        elif base is not None:
            block.copy_(torch.baddbmm(base[:, a:b, a:], left, y[..., a:], beta=beta, alpha=alpha))
        else:
            block.copy_(left @ y[..., a:])
        if count > 1:
            corner = block[..., : b - a]
            corner.copy_((corner + corner.mT) * 0.5)
            out[:, b:, a:b] = block[..., b - a :].mT
    return out


def _large(x: Tensor, y: Tensor) -> bool:
    """Return whether oneDNN is faster for two matrices, or for those of two stacks. Without elements it is not."""
    limit = SMALL_PRODUCT if x.dim() == 2 else SMALL_PRODUCT_IN_STACK
    return x.numel() > 0 and x.shape[-2] * x.shape[-1] * y.shape[-1] > limit


def _product_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y^T`` for [batch, n, k] and [batch, m, k] by oneDNN, one matrix at a time."""
    products = [_onednn_product(a, b) for a, b in zip(x, y, strict=True)]
    return products[0][None] if len(products) == 1 else torch.stack(products)


def _onednn_product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y^T`` for [n, k] and [m, k]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(y), None, "none", [], "")
    return out


def _dense(x: Tensor) -> Tensor:
    """Copy a slice of columns of a transposed matrix, or an expanded one: oneDNN is up to a hundred times slower on
    those.
    """
    n, k = x.shape
    row, col = x.stride()
    return x if (col == 1 and row >= k) or (row == 1 and col == n) else x.contiguous()


def _blocks(n: int, k: int, dtype: torch.dtype) -> int:
    """Return into how many blocks the edge ``n`` of a symmetric product over ``k`` is cut.

    In float32, blocks of 256 rows pay where the product is long enough against the copies between them (measured
    on two cores: 512 x 512 over 512 takes 0.59 ms whole and 0.64 ms in two blocks, over 1536 1.75 and 1.50 ms;
    1024 x 1024 over 1024 4.5 and 3.9 ms). In half precision, whose products are several times faster than the
    copies, they do not pay up to 2048 x 2048 at least (measured on a CPU with bfloat16 units).
    """
    return max(1, min(n // 256, 8)) if k >= 768 and dtype.itemsize >= 4 else 1
