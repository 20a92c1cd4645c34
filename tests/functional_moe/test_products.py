"""Products by the faster kernel: the same numbers, and a derivative of any order."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from functional_moe import products
from functional_moe.optim import _matrix_product
from functional_moe.products import matmul, product, product_over_rows

sizes = st.integers(0, 9)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(sizes, sizes, sizes, st.booleans(), st.booleans())
@example(97, 83, 89, False, False)  # large enough for oneDNN
@example(97, 83, 89, True, False)
@example(97, 83, 89, False, True)
@example(97, 83, 89, True, True)
def test_a_product_is_a_product_whatever_the_strides(n: int, k: int, m: int, turn_x: bool, turn_y: bool) -> None:
    x = random(k, n).t() if turn_x else random(n, k)
    y = random(m, k, seed=1).t() if turn_y else random(k, m, seed=1)
    # fp32 sums of up to 83 products of size 1, in another order
    torch.testing.assert_close(product(x, y), (x.double() @ y.double()).float(), rtol=1e-4, atol=1e-5)


def test_the_faster_kernel_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could have tested torch's product against itself."""
    calls = []
    real = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(a) or real(*a))
    product(random(97, 83), random(83, 89))
    assert len(calls) == 1
    product(random(97, 83, dtype=torch.float64), random(83, 89, dtype=torch.float64))
    assert len(calls) == 1


@given(sizes, sizes, sizes, st.booleans(), st.booleans())
@example(200, 83, 89, False, False)  # three runs of 64 rows for oneDNN, and eight rows for torch
@example(200, 83, 89, True, False)
@example(200, 83, 89, False, True)
@example(192, 83, 89, False, False)
def test_a_product_over_rows_is_the_transposes_product(n: int, k: int, m: int, turn_x: bool, turn_y: bool) -> None:
    x = random(k, n).t() if turn_x else random(n, k)
    y = random(m, n, seed=1).t() if turn_y else random(n, m, seed=1)
    found = product_over_rows(x, y)
    # fp32 sums of up to 200 products of size 1, in another order
    torch.testing.assert_close(found, (x.double().t() @ y.double()).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, product_over_rows(x, y))


def test_a_product_over_rows_reaches_its_kernel_in_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.ops.aten.mkldnn_linear_backward_weights
    monkeypatch.setattr(torch.ops.aten, "mkldnn_linear_backward_weights", lambda *a: calls.append(a) or real(*a))
    for rows in (192, 200, 255):
        product_over_rows(random(rows, 83), random(rows, 89))
    assert [len(x) for x, *_ in calls] == [192, 192, 192]
    product_over_rows(random(200, 83, dtype=torch.float64), random(200, 89, dtype=torch.float64))
    product_over_rows(random(63, 200), random(63, 200))
    assert len(calls) == 3


def test_a_product_over_rows_keeps_the_derivative_and_the_batch() -> None:
    x, y = random(200, 83).requires_grad_(), random(200, 89, seed=1)
    (gradient,) = torch.autograd.grad(product_over_rows(x, y).sum(), x)
    torch.testing.assert_close(gradient, y.sum(1, keepdim=True).expand(200, 83))
    batch = torch.func.vmap(product_over_rows, (0, None))(x.detach().expand(2, 200, 83), y)
    torch.testing.assert_close(batch[1], x.detach().t() @ y, rtol=1e-4, atol=1e-4)


def test_oneDNN_sees_no_strides_that_it_is_slow_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a transposed matrix, and an expanded one, are copied first."""
    seen = []
    real = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: seen.extend(a[:2]) or real(*a))
    x, y = random(100, 200)[:, 50:147].t(), random(89)[:, None].expand(89, 100).t()
    torch.testing.assert_close(product(x, y), (x.double() @ y.double()).float(), rtol=1e-4, atol=1e-5)
    assert len(seen) == 2 and all(operand.is_contiguous() for operand in seen)


def test_a_product_without_the_rule_keeps_the_derivative_and_the_batch() -> None:
    """oneDNN has neither, so a caller of the bare product gets torch's."""
    x, y = random(97, 83).requires_grad_(), random(83, 89, seed=1)
    (gradient,) = torch.autograd.grad(product(x, y).sum(), x)
    torch.testing.assert_close(gradient, y.sum(1).expand(97, 83))
    torch.testing.assert_close(
        torch.func.vmap(product, (None, 0))(y.t(), x.detach().expand(2, 97, 83).mT)[1], (x @ y).t()
    )


def test_matmul_differentiates_to_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(2, 3, 4, dtype=torch.float64), random(4, 5, seed=1, dtype=torch.float64)
    for argument in (x, weight):
        argument.requires_grad_()
    assert torch.autograd.gradcheck(matmul, (x, weight))
    assert torch.autograd.gradgradcheck(matmul, (x, weight))


def test_gradients_through_the_faster_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_matrix_product, "SMALL_PRODUCT", 0)
    x, weight, cotangent = random(3, 7, 6), random(6, 5, seed=1), random(3, 7, 5, seed=2)
    ours = torch.func.vjp(matmul, x, weight)[1](cotangent)
    reference = torch.func.vjp(lambda a, b: matmul(a, b, "reference"), x, weight)[1](cotangent)
    for gradient, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_rounded_only_where_shapes_are_prepared() -> None:
    assert products.rows_per_shape(random(3, 4)) > 1
    assert products.rows_per_shape(random(3, 4, dtype=torch.float64)) == 1
