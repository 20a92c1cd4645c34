"""Rows travel to the ranks of their experts and home again: no row lost, transposes, the bytes that are promised."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # forward mode imports it, which may take long: here no collective waits
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.func import grad, jvp, vjp
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import parallel
from functional_moe.config import MoEConfig
from functional_moe.dispatch import Decision, decide
from functional_moe.experts import routed_experts
from functional_moe.model import feed_forward_half, init_balance
from functional_moe.parallel.testing import meshes
from functional_moe.parameters import declare, init

# torch's own forward-mode rules are compiled with what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

# One example costs the latency of its messages, tens of milliseconds on shared cores.
EXAMPLES = settings(max_examples=12, deadline=None)

Counts = Sequence[Sequence[Sequence[int]]]
"""Rows by source rank, rank of the expert, and the expert's index there."""


@st.composite
def counts(draw) -> Counts:
    """Zeros among them: ranks, experts and whole groups of experts without rows."""
    world, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 3), min_size=per_rank, max_size=per_rank) | st.just([0] * per_rank)
    return draw(st.lists(st.lists(row, min_size=world, max_size=world), min_size=world, max_size=world))


def rows_of(table: Counts) -> list[Tensor]:
    """Each rank's rows of two numbers and a weight, all different."""
    total = sum(map(math.prod, [[sum(map(sum, source))] for source in table]))
    rows = torch.arange(3.0 * total, dtype=torch.float64).view(total, 3) / max(1, total)
    return list(rows.split([sum(map(sum, source)) for source in table]))


def arrived(rows: Sequence[Tensor], table: Counts) -> list[Tensor]:
    """What each rank should hold: sorted by its experts, then by source."""
    blocks = [
        part.split([count for held in source for count in held]) for part, source in zip(rows, table, strict=True)
    ]
    ranks, experts = range(len(table)), range(len(table[0][0]))
    return [torch.cat([blocks[s][rank * len(experts) + e] for e in experts for s in ranks]) for rank in ranks]


def curved(rows: Tensor, rank: int) -> Tensor:
    return (rank + 1) * (torch.sin(rows) * rows.square() * torch.arange(1.0, 4.0, dtype=rows.dtype)).sum()


def sent_and_returned(rows: Sequence[Tensor], table: Counts) -> dict[str, Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    plan = parallel.plan_exchange(torch.tensor(table[rank]), group)
    x = rows[rank]

    def there(x: Tensor) -> Tensor:
        return torch.cat(parallel.exchange(x, plan, group, (2, 1)), 1)

    def loss(x: Tensor) -> Tensor:
        return curved(there(torch.sin(x)), rank)

    y, v = there(x), torch.cos(x)
    _, pull_back = vjp(there, x)
    parts = y.split((2, 1), 1)
    home, pull_there = vjp(lambda *parts: parallel.exchange_back(parts, plan, group), *parts)
    cotangent = torch.cos(home)
    return {
        "there": y,
        "offsets": plan.offsets,
        "home": home,
        "transpose is back": torch.equal(pull_back(y)[0], x),
        "transpose of back is there": torch.equal(torch.cat(pull_there(cotangent), 1), there(cotangent)),
        "tangent": jvp(there, (x,), (v,))[1],
        "tangent back": jvp(lambda p: parallel.exchange_back((p,), plan, group), (y,), (there(v),))[1],
        "gradient": grad(loss)(x),
        "second": grad(lambda x: (grad(loss)(x) * v).sum())(x),
    }


@EXAMPLES
@given(table=counts())
@example(table=[[[0, 0], [0, 0]], [[0, 0], [0, 0]]])
@example(table=[[[2, 0], [0, 0]], [[1, 3], [0, 0]]])  # rank 1 gets nothing
def test_rows_reach_their_experts_and_come_home(table):
    rows = rows_of(table)

    def total(*rows: Tensor) -> Tensor:
        return sum(curved(y, rank) for rank, y in enumerate(arrived([torch.sin(x) for x in rows], table)))

    argnums = tuple(range(len(rows)))
    vs = [torch.cos(x) for x in rows]
    gradients = grad(total, argnums)(*rows)
    seconds = grad(lambda *xs: sum((g * v).sum() for g, v in zip(grad(total, argnums)(*xs), vs, strict=True)), argnums)(
        *rows
    )
    there, tangents = arrived(rows, table), arrived(vs, table)
    for rank, found in enumerate(parallel.spawn(sent_and_returned, len(table), rows, table)):
        assert torch.equal(found["there"], there[rank])
        ends = torch.tensor([[sum(source[rank][e] for source in table)] for e in range(len(table[0][0]))]).cumsum(0)
        assert torch.equal(found["offsets"], ends.flatten().to(torch.int32))
        assert torch.equal(found["home"], rows[rank])
        assert found["transpose is back"]
        assert found["transpose of back is there"]
        assert torch.equal(found["tangent"], tangents[rank])
        assert torch.equal(found["tangent back"], vs[rank])
        # fp64: what remains is the order of the sums.
        torch.testing.assert_close(found["gradient"], gradients[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["second"], seconds[rank], rtol=1e-12, atol=1e-12)


# Which experts a rank holds.


def test_a_gather_over_fsdp_joins_runs_of_experts():
    both = (Shard(0), Shard(0))
    assert parallel.experts_of_rank(8, both, {"fsdp": 2, "ep": 2}).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    inner = (Shard(1), Shard(0))
    assert parallel.experts_of_rank(6, inner, {"fsdp": 2, "ep": 3}).tolist() == [[0, 1], [2, 3], [4, 5]]
    copies = (Replicate(), Shard(0), Shard(0))
    assert parallel.experts_of_rank(4, copies, {"replicate": 3, "fsdp": 2, "ep": 2}).tolist() == [[0, 2], [1, 3]]
    # The 952B run: 384 experts, fsdp 32 x ep 12, one each.
    table = parallel.experts_of_rank(384, both, {"fsdp": 32, "ep": 12})
    assert torch.equal(table, torch.arange(384).view(32, 12).t())


def gathered(sizes: dict[str, int], placed: Any, num_experts: int) -> tuple[int, Tensor, Tensor, Any]:
    stack = torch.arange(1.0, 1 + num_experts * 6, dtype=torch.float64).view(num_experts, 2, 3)
    mesh = parallel.make_mesh(**sizes)
    layout = parallel.make_layout(mesh, {"w": placed}, {"w": stack})
    shards = parallel.local(parallel.shard({"w": stack}, layout))
    keep = {"w": frozenset({"ep"})}
    held = parallel.gather(shards, layout, keep)["w"]
    rank = dist.get_rank()
    gradient = grad(lambda shards: (rank + 1) * parallel.gather(shards, layout, keep)["w"].square().sum())(shards)
    (index,) = [i for axis, i in zip(sizes, mesh.get_coordinate(), strict=False) if axis == "ep"]
    return index, held, gradient["w"], shards["w"]


@EXAMPLES
@given(mesh=meshes(), multiple=st.integers(1, 2), whole=st.booleans())
def test_the_gathered_stack_holds_the_experts_of_the_table(mesh, multiple, whole):
    num_experts = multiple * mesh["ep"] * (mesh["fsdp"] if whole else 1)
    placed = (Shard(0) if whole else Shard(2), Shard(0))
    stack = torch.arange(1.0, 1 + num_experts * 6, dtype=torch.float64).view(num_experts, 2, 3)
    table = parallel.experts_of_rank(num_experts, placed, mesh)
    world = mesh["fsdp"] * mesh["ep"]
    for index, held, gradient, shard in parallel.spawn(gathered, world, mesh, placed, num_experts):
        assert torch.equal(held, stack[table[index]])
        # Summed over the ranks that hold the same experts, and over no others.
        factor = sum(rank + 1 for rank in range(world) if rank % mesh["ep"] == index)
        assert torch.equal(gradient, 2 * factor * shard)


CONFIG = MoEConfig(
    vocab_size=11,
    hidden_size=10,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    initializer_range=0.5,
)


def refusals() -> list[str]:
    mesh, group = parallel.make_mesh(1, 2), dist.group.WORLD
    declared = declare(CONFIG)
    placed = parallel.placements(declared, mesh)
    layout = parallel.make_layout(mesh, placed, declared)
    other = parallel.placements(declared, mesh)
    other["layers"][0]["experts"]["down"] = (Replicate(), Shard(1))
    spread = parallel.expert_parallel(declared, layout)
    params = parallel.gather(
        parallel.local(parallel.shard(init(CONFIG, 0), layout)), layout, parallel.expert_axes(declared)
    )["layers"][0]["experts"]
    plan = parallel.plan_exchange(torch.tensor([[1], [2]]), group)
    x, weights = torch.ones(3, 10), torch.ones(3, 2)
    choices = torch.tensor([[0, 5]] * 3)
    decision = decide(choices, 6, spread)
    stack = {"w": torch.ones(3, 2)}
    uneven = parallel.make_layout(mesh, {"w": (Replicate(), Shard(0))}, stack)
    messages = []
    for call in (
        lambda: parallel.experts_of_rank(6, (Shard(0),), {"fsdp": 2}),
        lambda: parallel.experts_of_rank(6, (Shard(0), Replicate()), {"fsdp": 2, "ep": 2}),
        lambda: parallel.experts_of_rank(6, (Shard(0), Shard(0)), {"fsdp": 2, "ep": 2}),
        lambda: parallel.expert_parallel(declared, parallel.make_layout(mesh, other, declared)),
        lambda: parallel.gather(stack, uneven, {"w": frozenset({"fsdp2"})}),
        lambda: parallel.gather(stack, uneven, {"w": frozenset({"ep"})}),
        lambda: parallel.plan_exchange(torch.ones(3, 1, dtype=torch.int64), group),
        lambda: parallel.exchange(torch.ones(3, 4), plan, group, (2, 1)),
        lambda: parallel.exchange(torch.ones(4, 4), plan, group, (4,)),
        lambda: decide(choices, 8, spread),
        lambda: routed_experts(params, x, decision, weights),
        lambda: routed_experts(params, x, decide(choices, 6), weights, expert_parallel=spread),
        lambda: routed_experts(init(CONFIG, 0)["layers"][0]["experts"], x, decision, weights, expert_parallel=spread),
        lambda: routed_experts(params, x[:2], decision, weights[:2], expert_parallel=spread),
        lambda: routed_experts(params, x, decision, weights, "reference", spread),
    ):
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_meant_is_refused():
    first, second = parallel.spawn(refusals, 2)
    assert len(second) == len(first)
    assert first == [
        "the mesh has the axes ('fsdp',); expert parallelism over 'ep' needs that one",
        "experts stand on dimension 0, which 'ep' does not split: placements (Shard(dim=0), Replicate())",
        "num_experts = 6 is not a multiple of the 4 ranks that split them",
        "leaf 'layers.0.experts.down': experts stand on dimension 0, which 'ep' does not split: placements "
        "(Replicate(), Shard(dim=1))",
        "leaf 'w' is to stay split over 'fsdp2', which does not split it: {'fsdp': Replicate(), 'ep': Shard(dim=0)}",
        "leaf 'w' of shape (3, 2) cannot stay split over 'ep': its 2 parts are uneven",
        "plan_exchange: counts of shape (3, 1); [ep, experts_per_rank] has ep = 2",
        "exchange: widths = (2, 1) add up to 3, rows have 4 columns",
        "all_to_all: send_sizes = (1, 2) add up to 3, x has 4 rows",
        "expert_parallel spreads 6 experts; the layer has 8",
        "the decision was made with expert parallelism and is used without it",
        "the decision was made without expert parallelism and is used with it",
        "the decision is of 3 experts on this rank; params hold 6",
        "the decision is of 3 tokens; x has 2",
        "expert parallelism needs the fused kernels; kernels='reference' is for one process",
    ]


# What a layer sends, and what its replay does not.


class Sent(TorchDispatchMode):
    """Bytes that leave this rank in each all-to-all, and how often the host reads a tensor's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall_base" in str(function):
            rows, sizes = args[1], args[4]
            leaving = sum(size for rank, size in enumerate(sizes) if rank != dist.get_rank())
            if not sizes:
                leaving = rows.shape[0] // dist.get_world_size() * (dist.get_world_size() - 1)
            self.bytes.append(leaving * rows[:1].numel() * rows.element_size())
        elif "c10d" in str(function):
            raise AssertionError(f"{function} was not expected")
        return function(*args, **(kwargs or {}))


def layer_and_replay(ranks: int, zero_router: bool) -> dict[str, Any]:
    """One layer's forward and backward on this rank's tokens, then again with the decision handed back."""
    mesh = parallel.make_mesh(1, ranks)
    declared = declare(CONFIG)
    layout = parallel.make_layout(mesh, parallel.placements(declared, mesh), declared)
    spread = parallel.expert_parallel(declared, layout)
    shards = parallel.local(parallel.shard(init(CONFIG, seed=0), layout))
    layer = parallel.gather(shards, layout, parallel.expert_axes(declared))["layers"][0]
    if zero_router:
        layer["router"] = torch.zeros_like(layer["router"])
    rank = dist.get_rank()
    x = torch.randn(2, 5 + rank, 10, generator=torch.Generator().manual_seed(rank))
    valid = torch.ones(2, 5 + rank, dtype=torch.bool)
    bias = init_balance(CONFIG)[0]

    def run(decision: Decision | None, bias: Tensor) -> tuple[Any, Any, list[int], int]:
        reads = 0
        tolist = Tensor.tolist

        def counting(self: Tensor) -> Any:
            nonlocal reads
            reads += self.dtype == torch.int64  # those of offsets, int32, belong to the experts' own loop
            return tolist(self)

        def half(layer: Any, x: Tensor) -> tuple[Any, Any]:
            out = feed_forward_half(layer, bias, x, valid, CONFIG, "fused", spread, decision)
            return (out.x, out.stats.aux_loss, out.stats.z_loss), (out.stats.counts, out.decision)

        with Sent() as sent, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "tolist", counting)
            value, pull_back, aux = vjp(half, layer, x, has_aux=True)
            gradient = pull_back((torch.cos(x), torch.tensor(0.3), torch.tensor(0.2)))
        return (value, gradient, aux[0]), aux[1], sent.bytes, reads

    first, decision, sent, reads = run(None, bias)
    # A bias that would move every choice: the replay must not look at it.
    again, same, sent_again, reads_again = run(decision, bias + 10 * torch.arange(6.0))
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (first, again)]
    away = sum(size for index, size in enumerate(decision.parts[0].exchange.splits.send) if index != rank)
    home = sum(size for index, size in enumerate(decision.parts[0].exchange.splits.receive) if index != rank)
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(*leaves, strict=True)),
        "experts": (decision.experts, same.experts),
        "sent": sent,
        "sent again": sent_again,
        "reads": (reads, reads_again),
        "rows": (away, home),
    }


@pytest.mark.parametrize(("ranks", "zero_router"), [(2, False), (3, True), (6, False)])
def test_a_replay_decides_nothing_and_sends_no_counts(ranks, zero_router):
    # torchtitan 1117, 3336: with a zero router every score ties.
    for found in parallel.spawn(layer_and_replay, ranks, ranks, zero_router):
        assert found["equal"]
        assert torch.equal(*found["experts"])
        assert found["reads"] == (1, 0)
        away, home = found["rows"]
        # fp32 rows of 10 numbers and a weight to the experts, their outputs home; backward the same.
        rows = [4 * 11 * away, 4 * 10 * home, 4 * 10 * away, 4 * 11 * home]
        assert found["sent again"] == rows
        assert found["sent"] == [8 * (ranks - 1) * (6 // ranks), *rows]


def in_parts(ranks: int, parts: int) -> dict[str, Any]:
    """The layer's routed experts in parts and whole, on this rank's tokens: results, and what was sent."""
    mesh = parallel.make_mesh(1, ranks)
    declared = declare(CONFIG)
    layout = parallel.make_layout(mesh, parallel.placements(declared, mesh), declared)
    spread = parallel.expert_parallel(declared, layout)
    full = pytree.tree_map(lambda leaf: leaf.to(torch.float64), init(CONFIG, seed=0))
    layer = parallel.gather(parallel.local(parallel.shard(full, layout)), layout, parallel.expert_axes(declared))
    params = layer["layers"][0]["experts"]
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = 3 * rank  # the first rank has none, the second not one for each part
    x = torch.randn(tokens, 10, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, 2, generator=generator, dtype=torch.float64)
    choices = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens + 1)])[:tokens]
    found: dict[str, Any] = {}
    for name, count in (("whole", 1), ("parts", parts)):
        with Sent() as sent:
            decision = decide(choices, 6, spread, count)
            run = functools.partial(routed_experts, decision=decision, expert_parallel=spread)
            value, pull_back = vjp(lambda p, x, w, run=run: run(p, x, weights=w), params, x, weights)
            found[name] = (value, *pull_back(torch.cos(value)))
        found[f"sent {name}"] = sent.bytes
        rows = [part.exchange.splits for part in decision.parts]
        found[f"away {name}"] = [sum(n for peer, n in enumerate(one.send) if peer != rank) for one in rows]
        found[f"home {name}"] = [sum(n for peer, n in enumerate(one.receive) if peer != rank) for one in rows]
    return found


@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (3, 2)])
def test_tokens_in_parts_get_the_same_and_send_the_same(ranks, parts):
    for found in parallel.spawn(in_parts, ranks, ranks, parts):
        leaves = [pytree.tree_leaves(found[name]) for name in ("whole", "parts")]
        for one, whole in zip(leaves[1], leaves[0], strict=True):
            torch.testing.assert_close(one, whole, rtol=1e-12, atol=1e-12)
        away, home = found["away parts"], found["home parts"]
        assert (sum(away), sum(home)) == (sum(found["away whole"]), sum(found["home whole"]))
        counted, *sent = found["sent parts"]
        assert counted == parts * found["sent whole"][0]  # the rows of every part for every expert, in one message
        # fp64 rows of 10 numbers; the weight goes along, and in the backward the cotangent.
        forward, backward = sent[: 2 * parts], sent[2 * parts :]
        assert sorted(forward) == sorted([*(8 * 11 * n for n in away), *(8 * 10 * n for n in home)])
        assert sorted(backward) == sorted([*(8 * 21 * n for n in away), *(8 * 11 * n for n in home)])


def narrow(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The layer's routed experts in ``dtype``, on two ranks, and all of them on this one."""
    mesh = parallel.make_mesh(1, 2)
    declared = declare(CONFIG)
    layout = parallel.make_layout(mesh, parallel.placements(declared, mesh), declared)
    spread = parallel.expert_parallel(declared, layout)
    full = init(CONFIG, seed=0)
    held = parallel.gather(parallel.local(parallel.shard(full, layout)), layout, parallel.expert_axes(declared))
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(7, 10, generator=generator).to(dtype)
    weights = torch.rand(7, 2, generator=generator)
    choices = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(7)])
    params = [tree["layers"][0]["experts"] for tree in (held, full)]
    found = vjp(lambda x, w: routed_experts(params[0], x, decide(choices, 6, spread), w, "fused", spread), x, weights)
    alone = vjp(lambda x, w: routed_experts(params[1], x, decide(choices, 6), w), x, weights)
    results = [torch.cat([value.flatten(), *map(torch.flatten, back(x))]) for value, back in (found, alone)]
    assert found[0].dtype == dtype
    assert found[1](x)[1].dtype == torch.float32
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_from_experts_elsewhere(dtype):
    # Products of another number of rows may be summed in another order; bf16 has 8 bits.
    for found, alone in parallel.spawn(narrow, 2, dtype):
        torch.testing.assert_close(found, alone, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
