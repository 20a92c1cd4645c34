"""Collectives: values, and derivatives of first and second order, equal those of one process."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vjp, vmap

from functional_moe import parallel

# torch's own forward-mode rules are compiled with what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

# One example costs the latency of its messages, tens of milliseconds on shared cores.
EXAMPLES = settings(max_examples=12, deadline=None)
WORLDS = st.sampled_from([1, 2, 3, 4])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apply(name: str, x: Tensor, sizes: Sequence[int], dim: int, owner: int, table: Sequence[Sequence[int]]) -> Tensor:
    """The collective ``name`` on the default group."""
    group = dist.group.WORLD
    rank = parallel.axis_index(group)
    if name == "all_gather":
        return parallel.all_gather(x, group, dim, sizes)
    if name == "reduce_scatter":
        return parallel.reduce_scatter(x, group, dim, sizes)
    if name == "all_to_all":
        return parallel.all_to_all(x, group, table[rank], [row[rank] for row in table])
    if name in ("broadcast_from", "reduce_to"):
        return getattr(parallel, name)(x, owner, group)
    return getattr(parallel, name)(x, group)


def expected(name: str, xs: Sequence[Tensor], sizes, dim, owner, table) -> list[Tensor]:
    """What ``apply`` means, of all ranks' operands in one process."""
    total = sum(xs[1:], xs[0]) if name not in ("all_gather", "all_to_all") else xs[0]
    if name == "all_gather":
        return [torch.cat(list(xs), dim)] * len(xs)
    if name == "reduce_scatter":
        return list(total.split(list(sizes), dim))
    if name == "all_to_all":
        parts = [x.split(list(row)) for x, row in zip(xs, table, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]
    if name == "broadcast_from":
        return [xs[owner]] * len(xs)
    if name == "reduce_to":
        return [total if rank == owner else torch.zeros_like(total) for rank in range(len(xs))]
    return [total] * len(xs)


NAMES = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast_from", "reduce_to"]


@st.composite
def cases(draw):
    """A collective with its sizes: uneven, zeros among them, along any dimension."""
    world = draw(WORLDS)
    name = draw(st.sampled_from(NAMES))
    sizes = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    dim = draw(st.integers(-2, 1))
    owner = draw(st.integers(0, world - 1))
    table = draw(st.lists(st.lists(st.integers(0, 2), min_size=world, max_size=world), min_size=world, max_size=world))
    xs = []
    for rank in range(world):
        rows = {"all_gather": sizes[rank], "reduce_scatter": sum(sizes), "all_to_all": sum(table[rank])}.get(name, 3)
        shape = [rows, 2] if name == "all_to_all" or dim % 2 == 0 else [2, rows]
        xs.append(normal(rank, *shape))
    return name, xs, (sizes, dim, owner, table)


def nonlinear(y: Tensor, rank: int) -> Tensor:
    """A loss that differs between ranks and has all derivatives."""
    weights = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=y.dtype)[: y.numel()].view(y.shape)
    return (rank + 1) * (torch.sin(y * weights) * y).sum()


def derivatives(name: str, xs: Sequence[Tensor], arguments) -> dict[str, Tensor]:
    """Value, first and second derivatives on this rank: of the sum over ranks of their losses."""
    rank = dist.get_rank()
    x, v = xs[rank], torch.cos(xs[rank])

    def loss(x: Tensor) -> Tensor:
        return nonlinear(apply(name, torch.sin(x), *arguments), rank)

    def out(x: Tensor) -> Tensor:
        return apply(name, x, *arguments)

    tangent = jvp(out, (x,), (v,))[1]
    return {
        "value": out(x),
        "jvp": tangent,
        "gradient": grad(loss)(x),
        "reverse over reverse": grad(lambda x: (grad(loss)(x) * v).sum())(x),
        "forward over reverse": jvp(grad(loss), (x,), (v,))[1],
        "forward over forward": jvp(lambda x: jvp(loss, (x,), (v,))[1], (x,), (v,))[1],
        "autograd": torch.autograd.grad(loss(z := x.clone().requires_grad_()), z)[0],
    }


@EXAMPLES
@given(case=cases())
def test_derivatives_of_both_orders_equal_one_process(case):
    name, xs, arguments = case

    def losses(xs: Sequence[Tensor]) -> list[Tensor]:
        outs = expected(name, [torch.sin(x) for x in xs], *arguments)
        return [nonlinear(y, rank) for rank, y in enumerate(outs)]

    def total(*xs: Tensor) -> Tensor:
        return sum(losses(xs))

    argnums = tuple(range(len(xs)))
    vs = [torch.cos(x) for x in xs]
    values = expected(name, xs, *arguments)
    gradients = grad(total, argnums)(*xs)

    def along(*xs: Tensor) -> Tensor:
        return sum((g * v).sum() for g, v in zip(grad(total, argnums)(*xs), vs, strict=True))

    tangents = expected(name, vs, *arguments)
    seconds = grad(along, argnums)(*xs)

    def forward(*xs: Tensor) -> tuple[Tensor, ...]:
        return jvp(lambda *xs: tuple(losses(xs)), tuple(xs), tuple(vs))[1]

    forwards = jvp(forward, tuple(xs), tuple(vs))[1]
    for rank, found in enumerate(parallel.spawn(derivatives, len(xs), name, xs, arguments)):
        wanted = {
            "value": values[rank],
            "jvp": tangents[rank],
            "gradient": gradients[rank],
            "autograd": gradients[rank],
            "reverse over reverse": seconds[rank],
            "forward over reverse": seconds[rank],
            "forward over forward": forwards[rank],
        }
        # fp64: what remains is the order of the sums.
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def mapped(name: str, xs: Sequence[Tensor], arguments, in_dim: int) -> tuple[Tensor, Tensor]:
    x = torch.stack([xs[dist.get_rank()], 2 * xs[dist.get_rank()]], in_dim)

    def loss(x: Tensor) -> Tensor:
        return nonlinear(apply(name, x, *arguments), dist.get_rank())

    return vmap(lambda x: apply(name, x, *arguments), in_dim)(x), vmap(grad(loss), in_dim)(x)


@EXAMPLES
@given(case=cases(), in_dim=st.integers(0, 2))
def test_vmap_equals_one_call_each(case, in_dim):
    name, xs, arguments = case
    once, twice = expected(name, xs, *arguments), expected(name, [2 * x for x in xs], *arguments)

    def total(*xs: Tensor) -> Tensor:
        return sum(nonlinear(y, rank) for rank, y in enumerate(expected(name, xs, *arguments)))

    argnums = tuple(range(len(xs)))
    slopes = [grad(total, argnums)(*[factor * x for x in xs]) for factor in (1, 2)]
    for rank, (values, gradients) in enumerate(parallel.spawn(mapped, len(xs), name, xs, arguments, in_dim)):
        torch.testing.assert_close(values, torch.stack([once[rank], twice[rank]]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, torch.stack([slopes[0][rank], slopes[1][rank]]), rtol=1e-12, atol=1e-12)


def replicated(w: Tensor, v: Tensor) -> dict[str, Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD

    def mine(w: Tensor) -> Tensor:
        return nonlinear(parallel.replicate(w, group), rank)

    def shared(w: Tensor) -> Tensor:
        return parallel.reduce_replicated(mine(w), group)

    return {
        "gradient of my summand": grad(mine)(w),
        "gradient of the sum": grad(shared)(w),
        "hessian vector": grad(lambda w: (grad(mine)(w) * v).sum())(w),
        "hessian vector, forward": jvp(grad(shared), (w,), (v,))[1],
        "hessian": jacfwd(grad(mine))(w),
    }


@EXAMPLES
@given(world=WORLDS)
def test_a_replicated_value_has_one_gradient(world):
    w, v = normal(0, 3), normal(1, 3)

    def total(w: Tensor) -> Tensor:
        return sum(nonlinear(w, rank) for rank in range(world))

    slope = grad(total)(w)
    hessian = jacfwd(grad(total))(w)
    for found in parallel.spawn(replicated, world, w, v):
        wanted = {
            "gradient of my summand": slope,
            "gradient of the sum": slope,
            "hessian vector": hessian @ v,
            "hessian vector, forward": hessian @ v,
            "hessian": hessian,
        }
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def weighted() -> Tensor:
    loss = lambda w: parallel.replicate(w, dist.group.WORLD) * (dist.get_rank() + 1)  # noqa: E731
    return grad(loss)(torch.tensor(1.0))


def test_replicated_weight_with_another_loss_on_each_rank():
    # torchtitan PR 2532: w (r + 1) over two ranks has the gradient 3 on both.
    assert [g.item() for g in parallel.spawn(weighted, 2)] == [3.0, 3.0]


def odd_cotangents(dtype: torch.dtype) -> list[Tensor]:
    group, x = dist.group.WORLD, torch.arange(6, dtype=dtype).view(3, 2) + dist.get_rank()
    results = []
    for out in (parallel.all_gather, parallel.all_reduce):
        y, pull_back = vjp(lambda x, out=out: out(x, group), x)
        results += pull_back(torch.ones((), dtype=dtype).expand_as(y))
        results += pull_back(torch.arange(y.numel(), dtype=dtype).view(y.shape[::-1]).t())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cotangents_may_have_any_strides(dtype):
    for rank, (a, b, c, d) in enumerate(parallel.spawn(odd_cotangents, 2, dtype)):
        gathered = torch.arange(12, dtype=dtype).view(2, 6).t()
        assert torch.equal(a, torch.full((3, 2), 2, dtype=dtype))
        assert torch.equal(b, 2 * gathered[3 * rank : 3 * rank + 3])
        assert torch.equal(c, torch.full((3, 2), 2, dtype=dtype))
        assert torch.equal(d, 2 * torch.arange(6, dtype=dtype).view(2, 3).t())


def overlapped(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        first = parallel.all_gather_start(x, group, 0, sizes)
        second = parallel.all_gather_start(x * x, group, 0, sizes)
        product = second.wait() * first.wait()
        scattered = parallel.reduce_scatter_start(product, group, 0, sizes)
        assert torch.equal(first.wait(), first.wait())
        return (rank + 1) * scattered.wait().sum(), scattered.wait()

    return grad(loss, has_aux=True)(x.split(list(sizes))[rank])


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0), (0, 1, 2)])
def test_started_collectives_give_the_same(sizes):
    x = normal(0, sum(sizes), 2)
    world = len(sizes)
    for rank, (slope, value) in enumerate(parallel.spawn(overlapped, world, x, sizes)):
        mine = x.split(sizes)[rank]
        torch.testing.assert_close(value, world * mine**3)
        torch.testing.assert_close(slope, world * (rank + 1) * 3 * mine**2)


def refusals() -> list[str]:
    group, x = dist.group.WORLD, torch.ones(3, 2)
    messages = []
    for call in (
        lambda: parallel.all_gather(x, group, 2),
        lambda: parallel.all_gather(x, group, 0, [3]),
        lambda: parallel.all_gather(x, group, 0, [2, 2]),
        lambda: parallel.reduce_scatter(x, group),
        lambda: parallel.reduce_scatter(x, group, 0, [3, 1]),
        lambda: parallel.all_to_all(x, group),
        lambda: parallel.all_to_all(x, group, [2, 1]),
        lambda: parallel.all_to_all(x, group, [2, 2], [1, 1]),
        lambda: parallel.all_to_all(x, group, [4, -1], [1, 1]),
        lambda: parallel.broadcast_from(x, 2, group),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent():
    wanted = [
        "all_gather: dim = 2 for a tensor of shape (3, 2)",
        "all_gather: sizes = (3,) for a group of 2 ranks",
        "all_gather: x has 3 rows along dim 0 on rank {rank} of the group; sizes = (2, 2) mean 2",
        "reduce_scatter: 3 rows are no equal parts for 2 ranks; give the sizes",
        "reduce_scatter: x has 3 rows along dim 0 on rank {rank} of the group; sizes = (3, 1) mean 4",
        "all_to_all: 3 rows are no equal parts for 2 ranks; give the sizes",
        "all_to_all: give both send_sizes and receive_sizes",
        "all_to_all: send_sizes = (2, 2) add up to 4, x has 3 rows",
        "all_to_all: send_sizes = (4, -1) for a group of 2 ranks",
        "broadcast_from: owner = 2 for a group of 2 ranks",
    ]
    for rank, messages in enumerate(parallel.spawn(refusals, 2)):
        for message, start in zip(messages, wanted, strict=True):
            assert message.startswith(start.format(rank=rank)), message


@given(size=st.integers(0, 50), parts=st.integers(1, 9))
def test_chunks_are_those_of_torch(size, parts):
    sizes = parallel.chunk_sizes(size, parts)
    assert len(sizes) == parts
    assert sum(sizes) == size
    if size:
        chunks = [len(chunk) for chunk in torch.empty(size).chunk(parts)]
        assert list(sizes) == chunks + [0] * (parts - len(chunks))
    assert max(sizes) == math.ceil(size / parts)


def one_rank(x: Tensor) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    group = dist.group.WORLD
    with CommDebugMode() as mode:
        parallel.all_gather(x, group)
        parallel.reduce_scatter(x, group)
        parallel.all_reduce(x, group)
        parallel.all_to_all(x, group)
        parallel.broadcast_from(x, 0, group)
        parallel.reduce_to(x, 0, group)
        parallel.reduce_replicated(x, group)
    return mode.get_total_counts()


def test_a_group_of_one_rank_sends_nothing():
    assert parallel.spawn(one_rank, 1, torch.ones(2)) == [0]
    assert parallel.spawn(one_rank, 2, torch.ones(2)) == [7, 7]
