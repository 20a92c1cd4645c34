"""remat: the same values and derivatives as the function itself under every transform, for less memory."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

from functional_moe import parallel
from functional_moe.memory import AdversarialCopies, LiveBytes, name, output_is_needed, remat

# torch's own forward-mode rules are compiled with what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

WIDTH = 4


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def function(weights: dict[str, Tensor], x: Tensor, scale: float = 2.0) -> dict[str, Any]:
    """A decision, a value used twice, an integer output, one that is no tensor."""
    hidden = name(torch.tanh(x @ weights["a"]), "hidden")
    choice = name(hidden.argmax(-1), "choice")
    out = hidden.gather(-1, choice[..., None]) * torch.sin(hidden @ weights["b"]) * scale
    return {"out": out, "choice": choice, "scale": scale, "input": x}


def arguments(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    return {key: normal(seed, WIDTH, WIDTH, dtype=dtype) for seed, key in enumerate("ab")}, normal(
        2, 3, WIDTH, dtype=dtype
    )


def offloaded() -> Callable[..., Any]:
    return remat(function, save=("choice",), offload=("hidden",), copies=AdversarialCopies(0))


def nested() -> Callable[..., Any]:
    def outer(weights: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
        inner = remat(function, save=("choice",), offload=("hidden",))(weights, name(torch.sin(x), "before"))
        return {**inner, "out": inner["out"] + x}

    return remat(outer, save=("before",))


def nested_plain(weights: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    inner = function(weights, torch.sin(x))
    return {**inner, "out": inner["out"] + x}


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "recompute": (remat(function), function),
    "save": (remat(function, save=("hidden", "choice")), function),
    "offload": (offloaded(), function),
    "nested": (nested(), nested_plain),
}


def loss(f: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda weights, x: f(weights, x)["out"].square().sum()


def twice_by_autograd(f: Callable[..., Any]) -> Any:
    weights, x = arguments()
    leaves = [leaf.requires_grad_() for leaf in (*weights.values(), x)]
    first = torch.autograd.grad(loss(f)(weights, x), leaves, create_graph=True)
    return first, torch.autograd.grad(sum(leaf.square().sum() for leaf in first), leaves)


W, X = arguments()
BATCH = normal(3, 5, 3, WIDTH)
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "value": lambda f: {key: value for key, value in f(W, X).items() if key != "scale"},
    "grad_and_value": lambda f: grad_and_value(loss(f), (0, 1))(W, X),
    "vjp, stride 0": lambda f: vjp(lambda w, x: f(w, x)["out"], W, X)[1](X.new_ones(1).expand(3, WIDTH)),
    "vjp, transposed": lambda f: vjp(lambda w, x: f(w, x)["out"], W, X)[1](normal(4, WIDTH, 3).T),
    "jvp": lambda f: jvp(loss(f), (W, X), (W, X)),
    "vmap": lambda f: vmap(lambda x: f(W, x)["out"])(BATCH),
    "vmap, other dimension": lambda f: vmap(lambda x: f(W, x)["out"], 1)(BATCH.movedim(0, 1)),
    "vmap of vmap": lambda f: vmap(vmap(lambda x: f(W, x)["out"]))(BATCH),
    "vmap of grad": lambda f: vmap(grad(loss(f)), (None, 0))(W, BATCH),
    "grad of vmap": lambda f: grad(lambda w: vmap(lambda x: f(w, x)["out"])(BATCH).square().sum())(W),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(loss(f), (W, x), (W, x)))(BATCH),
    "jacrev": lambda f: jacrev(lambda x: f(W, x)["out"])(X),
    "jacfwd": lambda f: jacfwd(lambda x: f(W, x)["out"])(X),
    "hessian": lambda f: hessian(lambda x: loss(f)(W, x))(X),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda x: loss(f)(W, x)))(X),
    "jvp of grad": lambda f: jvp(lambda x: grad(loss(f))(W, x), (X,), (X,)),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(loss(f), (W, x), (W, x))[1], (X,), (X,)),
    "grad of vjp": lambda f: grad(
        lambda w: vjp(lambda x: f(w, x)["out"], X)[1](X.new_ones(3, WIDTH))[0].square().sum()
    )(W),
    "grad of grad": lambda f: grad(lambda w: grad(loss(f), 1)(w, X).square().sum())(W),
    "third order": lambda f: grad(
        lambda x: grad(lambda w: grad(loss(f), 1)(w, x).square().sum())(W)["a"].square().sum()
    )(X),
    "autograd, twice": twice_by_autograd,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_gives_what_it_gives_of_the_function_itself(form: str, transform: str) -> None:
    ours, plain = FORMS[form]
    # fp64; sums over a batch may be formed in another order.
    torch.testing.assert_close(TRANSFORMS[transform](ours), TRANSFORMS[transform](plain), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_fp32_are_equal_bit_for_bit(form: str) -> None:
    # pytorch issues 122729, 146036, 141845: torch.utils.checkpoint raises here.
    ours, plain = FORMS[form]
    given = arguments(torch.float32)
    found, expected = (grad_and_value(loss(f), (0, 1))(*given) for f in (ours, plain))
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)


def test_torch_checkpoint_still_raises_under_torch_func() -> None:
    from torch.utils.checkpoint import checkpoint

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad(lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum())(X)


NAMES = tuple("abcdef")


@settings(max_examples=40, deadline=None)
@given(
    policies=st.lists(st.sampled_from(["save", "offload", "recompute"]), min_size=1, max_size=6),
    depth=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_policies_of_stacked_functions_give_the_same_bits(policies: list[str], depth: int, seed: int) -> None:
    def layer(weight: Tensor, x: Tensor) -> Tensor:
        for label, _ in zip(NAMES, policies, strict=False):
            x = name(torch.tanh(x @ weight), label) + 0.5 * x
        return x

    wanted = {
        policy: tuple(label for label, chosen in zip(NAMES, policies, strict=False) if chosen == policy)
        for policy in ("save", "offload")
    }
    ours = remat(layer, **wanted, copies=AdversarialCopies(seed))

    def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(weights: list[Tensor], x: Tensor) -> Tensor:
            for weight in weights:
                x = f(weight, x)
            return x.square().sum()

        return run

    weights = [normal(seed + index, WIDTH, WIDTH, dtype=torch.float32) for index in range(depth)]
    x = normal(seed, 3, WIDTH, dtype=torch.float32)
    # Twice: the second step takes the slabs of the first.
    for _ in range(2):
        found, expected = (grad(total(f), (0, 1))(weights, x) for f in (ours, layer))
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(a, b)


class Attention(torch.autograd.Function):
    """torch's flash attention, which may be handed its own output and log-sum-exp."""

    runs = 0

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if kept is not None:
            return kept[0].detach(), kept[1].detach()
        Attention.runs += 1
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Any, ...]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*backward(cotangent, *ctx.saved_tensors, 0.0, True), None)


def attention_layer(weight: Tensor, x: Tensor) -> Tensor:
    q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    out, _ = name(lambda kept: Attention.apply(q, k, v, kept), "attention")
    return x + out.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("policy", ["save", "offload"])
def test_a_kernel_that_is_handed_its_output_does_not_run_again(policy: str) -> None:
    weight, x = normal(0, 8, 24, dtype=torch.float32), normal(1, 2, 5, 8, dtype=torch.float32)

    def gradients(f: Callable[..., Tensor]) -> tuple[Any, int]:
        Attention.runs = 0
        return grad(lambda weight, x: f(weight, x).square().sum(), (0, 1))(weight, x), Attention.runs

    expected, once = gradients(attention_layer)
    recomputed, twice = gradients(remat(attention_layer))
    kept, saved = gradients(remat(attention_layer, **{policy: ("attention",)}, copies=AdversarialCopies(1)))
    assert (once, twice, saved) == (1, 2, 1)
    for found in (recomputed, kept):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_decision_that_is_kept_is_not_made_again() -> None:
    made = []

    def route(weight: Tensor, x: Tensor) -> Tensor:
        scores = x @ weight

        def decide(kept: Any) -> Any:
            if kept is None:
                made.append(scores.detach())
                return {"index": scores.argmax(-1), "sizes": [3, 1]}
            return kept

        chosen = name(decide, "routing")
        assert chosen["sizes"] == [3, 1]
        return scores.gather(-1, chosen["index"][:, None])

    found = grad(lambda w: remat(route, save=("routing",))(w, X).sum())(W["a"])
    assert len(made) == 1
    assert torch.equal(found, grad(lambda w: route(w, X).sum())(W["a"]))


def test_random_numbers_replay_from_a_seed_that_is_an_argument() -> None:
    def dropout(weight: Tensor, x: Tensor, seed: int) -> Tensor:
        y = x @ weight
        keep = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype) < 0.5
        return torch.sin(y * keep)

    for seed in (1, 2):
        found, expected = (
            grad(lambda w, f=f, seed=seed: f(w, X, seed).sum())(W["a"]) for f in (remat(dropout), dropout)
        )
        assert torch.equal(found, expected)


def test_random_numbers_of_a_generator_that_goes_on_replay_when_they_are_saved() -> None:
    def dropout(weight: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
        keep = name(torch.rand(x.shape, generator=generator, dtype=x.dtype) < 0.5, "keep")
        return torch.sin((x @ weight) * keep)

    found, expected = (
        grad(lambda w, f=f: f(w, X, torch.Generator().manual_seed(1)).sum())(W["a"])
        for f in (remat(dropout, save=("keep",)), dropout)
    )
    assert torch.equal(found, expected)


def sharded_gradients() -> list[Any]:
    """On a rank: of a layer with collectives, and of the same under remat."""
    group, x = dist.group.WORLD, X[:2] * (1 + dist.get_rank())

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        rows = name(parallel.all_gather(x[:1], group, 0, [1] * dist.get_world_size()), "rows")
        return torch.sin(parallel.all_reduce(torch.tanh(rows @ weight), group)) * x.sum()

    def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda weight, x: f(weight, f(weight, x).T @ x).square().sum() * (1 + dist.get_rank())

    forms = (layer, remat(layer), remat(layer, save=("rows",)), remat(layer, offload=("rows",)))
    return [grad(total(form), (0, 1))(W["a"], x) for form in forms]


def test_collectives_inside_run_again() -> None:
    for expected, *others in parallel.spawn(sharded_gradients, 2):
        for found in others:
            # Three uses of ``x`` are added up in another order.
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class Double(torch.autograd.Function):
    """Does not compute what nobody reads."""

    needed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Double.needed.append(output_is_needed())
        return 2 * x if Double.needed[-1] else x.new_full((), torch.nan).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * cotangent


def test_a_replay_needs_no_output() -> None:
    def f(x: Tensor) -> Tensor:
        return Double.apply(torch.sin(x))

    Double.needed.clear()
    found = grad(lambda x: remat(f)(x).square().sum())(X)
    assert Double.needed == [True, False]
    assert torch.equal(found, grad(lambda x: f(x).square().sum())(X))
    # The inner function's is read by the outer one.
    Double.needed.clear()
    grad(lambda x: remat(lambda x: torch.cos(remat(f)(x)))(x).sum())(X)
    assert Double.needed == [True, True, False]


def test_names_mean_nothing_outside() -> None:
    assert name(X, "x") is X
    assert name(lambda kept: (kept, 3), "x") == (None, 3)


def test_a_function_without_tensors_or_gradients_runs() -> None:
    assert remat(lambda n: n + 1)(2) == 3
    assert torch.equal(remat(lambda n: torch.arange(n))(3), torch.arange(3))
    assert torch.equal(remat(lambda x, n: x[:n])(X, 2), X[:2])
    # Outputs that are inputs, one value twice, and a gradient that does not depend on one of the inputs.
    f = lambda x, y: (x, x, y * 2)  # noqa: E731
    found, expected = (grad(lambda x, y, f=f: sum(o.sum() for o in f(x, y)), (0, 1))(X, X) for f in (remat(f), f))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(grad(lambda x: remat(lambda x, y: y.sin())(x, X).sum() + x.sum())(X), torch.ones_like(X))


@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_go_through(form: str) -> None:
    ours = FORMS[form][0] if form != "offload" else remat(function, save=("choice",), offload=("hidden",))
    mode = FakeTensorMode()
    with mode:
        weights, x = pytree.tree_map(mode.from_tensor, arguments())
        found = grad(loss(ours))(weights, x)
    assert {key: leaf.shape for key, leaf in found.items()} == {key: leaf.shape for key, leaf in W.items()}


def stack(form: str, depth: int, width: int, rows: int) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    def layer(weight: Tensor, x: Tensor) -> Tensor:
        inner = name(torch.tanh(x @ weight), "inner")
        return x + torch.sin(torch.exp(-inner.square())) @ weight.T

    run = {
        "plain": layer,
        "recompute": remat(layer),
        "save": remat(layer, save=("inner",)),
        "offload": remat(layer, offload=("inner",)),
    }[form]

    def total(weights: list[Tensor], x: Tensor) -> Tensor:
        for weight in weights:
            x = run(weight, x)
        return x.square().sum()

    weights = [normal(index, width, width, dtype=torch.float32) / width**0.5 for index in range(depth)]
    return total, weights, normal(9, rows, width, dtype=torch.float32)


def peak(form: str) -> float:
    """In boundaries: tensors of ``rows x width``."""
    depth, width, rows = 8, 32, 2048
    total, weights, x = stack(form, depth, width, rows)
    with LiveBytes() as memory:
        grad(total)(weights, x)
    # The slabs, which are counted too: they lie in the other tier.
    host = depth if form == "offload" else 0
    return memory.peak / (rows * width * 4) - host


def test_peak_memory_is_that_of_what_is_kept() -> None:
    plain, recompute, save, offload = map(peak, ("plain", "recompute", "save", "offload"))
    # Plainly each of 8 layers keeps five tensors; recomputed its input alone, and the cotangent of its output, for
    # torch.func.grad could be differentiated again.
    assert plain > 40
    assert recompute < 8 + 8 + 8
    assert save == pytest.approx(recompute + 8, abs=2)
    assert offload == pytest.approx(recompute, abs=2.5)


def test_slabs_are_used_again() -> None:
    class Counting(AdversarialCopies):
        made = 0

        def slab(self, size: int) -> Tensor:
            Counting.made += 1
            return super().slab(size)

    ours = remat(function, save=("choice",), offload=("hidden",), copies=Counting(0))
    for _ in range(4):
        grad(lambda w: sum(ours(w, X)["out"].sum() for _ in range(3)))(W)
    assert Counting.made == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: remat(function, save=("hiden",))(W, X), r"no value is named \['hiden'\].*\['hidden', 'choice'\]"),
        (lambda: remat(function, offload=("hiden",))(W, X), r"no value is named \['hiden'\]"),
        (lambda: remat(function, save=("a", "b"), offload=("b",)), r"\['b'\] are to be saved and to be offloaded"),
        (lambda: remat(function, save="hidden"), "save = 'hidden': must be a sequence"),
        (lambda: remat(lambda x: name(name(x, "a"), "a"))(X), "'a' is given twice"),
        (lambda: remat(lambda x: F.dropout(x, 0.5))(X), "draws from the global generator"),
        (lambda: grad(lambda w: remat(lambda x: x @ w)(X).sum())(W["a"]), "is not an argument"),
        (lambda: vmap(lambda w: remat(lambda x: x @ w)(X))(BATCH.mT @ BATCH), "is not an argument"),
        (lambda: remat(lambda x: x @ W["a"].clone().requires_grad_())(X), "is not an argument"),
        (lambda: grad(lambda w: remat(drifting(), save=("y",))(w).sum())(W["a"]), r"'y' the shape \(1, 4\)"),
    ],
)
def test_bad_input_raises_and_names_it(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def drifting() -> Callable[[Tensor], Tensor]:
    """Not pure: other shapes in the replay."""
    calls = []

    def run(x: Tensor) -> Tensor:
        calls.append(x)
        return name(x[: 2 if len(calls) == 1 else 1].sin(), "y").sum(0)

    return run


def test_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on"):
        remat(function)(*arguments())


def test_a_failed_run_leaves_no_names_behind() -> None:
    def failing(x: Tensor) -> Tensor:
        raise KeyError(name("a", "a"))

    for _ in range(2):
        with pytest.raises(KeyError):
            remat(failing)(X)
    assert name(X, "a") is X
