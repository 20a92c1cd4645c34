import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe import optim
from functional_moe.optim._matrix_product import matrix_product, symmetric_product

SCHEMES = {"keller_jordan": (optim.KELLER_JORDAN, 5), "polar_express": (optim.POLAR_EXPRESS, 5)}
LONG = {**SCHEMES, "polar_express_8": (optim.POLAR_EXPRESS, 8)}


def ill_conditioned(rows, cols, decades, seed=0):
    """A matrix whose singular values fall from 1 to 10 ** -decades."""
    generator = torch.Generator().manual_seed(seed)
    n = min(rows, cols)
    u = torch.linalg.qr(torch.randn(rows, n, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(cols, n, dtype=torch.float64, generator=generator))[0]
    return (u * torch.logspace(0, -decades, n, dtype=torch.float64) @ v.T).float()


@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_follow_the_polynomials(scheme, method):
    """The iteration in matrices equals the iteration on the singular values, in float64."""
    coefficients, steps = LONG[scheme]
    x = torch.randn(9, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, value, vh = torch.linalg.svd(x / torch.linalg.matrix_norm(x), full_matrices=False)
    triples = [coefficients] * steps if isinstance(coefficients[0], float) else coefficients[:steps]
    for a, b, c in triples:
        value = a * value + b * value**3 + c * value**5
    torch.testing.assert_close(optim.newton_schulz(x, steps, coefficients, method=method), u * value @ vh)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    scheme=st.sampled_from(sorted(LONG)),
    n=st.integers(1, 260),
    aspect=st.floats(2.0, 4.0),
    tall=st.booleans(),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    method=st.sampled_from(["standard", "gram", "auto"]),
    seed=st.integers(0, 999),
)
def test_gaussian_matrices_come_into_the_band(scheme, n, aspect, tall, batch, method, seed):
    coefficients, steps = LONG[scheme]
    shape = (n, math.ceil(n * aspect))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, *(shape[::-1] if tall else shape), generator=generator)
    values = torch.linalg.svdvals(x.double())
    smallest = float((values[..., -1] / values.norm(dim=-1)).min())
    low, high = optim.singular_value_band(steps, coefficients, smallest)
    result = torch.linalg.svdvals(optim.newton_schulz(x, steps, coefficients, method=method).double())
    # 1e-4: float32 rounding of the iteration.
    assert low - 1e-4 <= float(result.min()) and float(result.max()) <= high + 1e-4


def test_bands_are_those_the_coefficients_are_known_for():
    # Keller Jordan's post: values from about 0.7 to 1.2. Polar Express: 0.85 to 1.13 from 1e-3 on after 5
    # steps, and 1 to rounding after 8.
    low, high = optim.singular_value_band(5, optim.KELLER_JORDAN, 0.01)
    assert 0.67 < low < 0.75 and 1.1 < high < 1.25
    low, high = optim.singular_value_band(5, optim.POLAR_EXPRESS, 1e-3)
    assert low > 0.84 and high < 1.13
    low, high = optim.singular_value_band(8, optim.POLAR_EXPRESS, 1e-3)
    assert low > 1 - 1e-9 and high < 1 + 1e-9


@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("shape", [(64, 64), (256, 256), (64, 1000), (384, 160), (2, 40, 90)])
@pytest.mark.parametrize("decades", [None, 3, 6])
def test_gram_agrees_with_standard(scheme, shape, decades):
    coefficients, steps = LONG[scheme]
    if decades is None:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    else:
        x = ill_conditioned(*shape[-2:], decades).expand(shape)
    gram = optim.newton_schulz(x, steps, coefficients, method="gram")
    standard = optim.newton_schulz(x, steps, coefficients, method="standard")
    assert float((gram - standard).norm() / standard.norm()) < 1e-4
    assert float((gram - standard).abs().max()) < 1e-4


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("exponent", [-126, -100, -30, 30, 100, 120])
def test_result_does_not_depend_on_the_scale(method, exponent):
    # Powers of two are exact, so equality is bit for bit. 2 ** -126 is the smallest normal float32.
    x = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) + 1.0
    assert torch.equal(optim.newton_schulz(x * 2.0**exponent, method=method), optim.newton_schulz(x, method=method))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_zero_stays_zero_beside_others(method, dtype):
    x = torch.randn(3, 6, 4)
    x[1] = 0
    result = optim.newton_schulz(x, method=method, dtype=dtype)
    assert torch.equal(result[1], torch.zeros(6, 4))
    assert torch.isfinite(result).all() and result[0].norm() > 1


def test_each_matrix_of_a_stack_is_its_own():
    """dion 119, torchtitan PR 1584: [4, 32, 16], one expert times 1000, one zero."""
    x = torch.randn(4, 32, 16)
    x[1] *= 1000
    x[2] = 0
    stacked = optim.newton_schulz(x)
    for index in range(4):
        torch.testing.assert_close(stacked[index], optim.newton_schulz(x[index]), rtol=1e-5, atol=1e-6)
    assert torch.equal(stacked[2], torch.zeros(32, 16))


def test_stacks_larger_than_the_cache_are_cut_without_a_trace(monkeypatch):
    x = torch.randn(7, 3, 8)
    whole = optim.newton_schulz(x)
    monkeypatch.setattr("functional_moe.optim._newton_schulz.stack_size", lambda rows, cols, device: 2)
    torch.testing.assert_close(optim.newton_schulz(x), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_transpose_commutes(method):
    x = torch.randn(40, 17)
    torch.testing.assert_close(optim.newton_schulz(x.mT, method=method), optim.newton_schulz(x, method=method).mT)


@pytest.mark.parametrize(("given", "dtype"), [(torch.bfloat16, None), (torch.float16, None)])
def test_half_precision_input_is_iterated_in_float32(given, dtype):
    x = torch.randn(8, 20).to(given)
    assert torch.equal(optim.newton_schulz(x, dtype=dtype), optim.newton_schulz(x.float()).to(given))


def test_half_precision_is_used_where_asked():
    x = torch.randn(8, 20)
    half = optim.newton_schulz(x, dtype=torch.bfloat16, method="standard")
    assert half.dtype == torch.float32
    difference = float((half - optim.newton_schulz(x, method="standard")).abs().max())
    assert 1e-4 < difference < 0.1


def test_empty_and_input_unchanged():
    assert optim.newton_schulz(torch.zeros(0, 3, 4)).shape == (0, 3, 4)
    x = torch.randn(3, 8, 5)
    before, version = x.clone(), x._version
    optim.newton_schulz(x)
    assert torch.equal(x, before) and x._version == version


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize(("n", "small"), [(64, True), (128, True), (136, False), (192, False)])
def test_small_matrices_are_multiplied_in_stacks_and_large_ones_by_onednn(n, small, method, monkeypatch):
    calls = []
    real = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(a) or real(*a))
    x = torch.randn(5, n, n, generator=torch.Generator().manual_seed(n))
    # float32 against float64; five steps amplify rounding in small singular values about a thousandfold.
    exact = optim.newton_schulz(x.double(), method=method).float()
    assert not calls
    torch.testing.assert_close(optim.newton_schulz(x, method=method), exact, rtol=0, atol=1e-4)
    assert (not calls) == small


@pytest.mark.parametrize("shapes", [((0, 200, 300), (0, 300, 200)), ((2, 200, 0), (2, 0, 200)), ((0, 300), (300, 200))])
def test_products_of_nothing(shapes):
    x, y = (torch.ones(shape) for shape in shapes)
    assert torch.equal(matrix_product(x, y), x @ y)


@pytest.mark.parametrize("n", [1, 127, 256, 300, 517, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_product_is_the_product(n, dtype):
    x = torch.randn(2, n, 16).to(dtype) / 4  # float32 goes to another kernel than float64
    gram = x @ x.mT
    torch.testing.assert_close(symmetric_product(x, x.mT), gram)
    torch.testing.assert_close(
        symmetric_product(gram, gram, base=gram, beta=0.3, alpha=-2.0),
        0.3 * gram - 2.0 * gram @ gram,
        rtol=1e-5,
        atol=1e-3 if dtype == torch.float32 else 1e-9,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 9, "coefficients": optim.POLAR_EXPRESS}, "9 steps need 9 triples of coefficients, got 8"),
        ({"coefficients": (1.0, 2.0)}, r"must be a triple \(a, b, c\) or triples, got \(1.0, 2.0\)"),
        ({"coefficients": ((1.0, 2.0, 3.0), (1.0, 2.0))}, "must be a triple"),
        ({"coefficients": ()}, "need 5 triples of coefficients, got 0"),
        ({"method": "fast"}, "method must be 'standard', 'gram' or 'auto', got 'fast'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.newton_schulz(torch.ones(3, 4), **arguments)


def test_bad_tensors():
    with pytest.raises(ValueError, match=r"needs \[..., rows, cols\], got shape \(3,\)"):
        optim.newton_schulz(torch.ones(3))
    with pytest.raises(ValueError, match=r"torch\.int64"):
        optim.newton_schulz(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"smallest must be in \(0, 1\], got 0"):
        optim.singular_value_band(smallest=0)
