"""Layers brought together and reduced: equal to ``gather`` and its gradient, in the bytes that are promised."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import optim, parallel
from functional_moe.config import MoEConfig
from functional_moe.memory import LiveBytes
from functional_moe.parallel import _fp8, _packing
from functional_moe.parallel._mesh import mesh_of
from functional_moe.parameters import init
from functional_moe.sharding import make_sharding, model_layout
from functional_moe.train_step import init_state, make_train_step

EXAMPLES = settings(max_examples=25, deadline=None)
MESHES = st.sampled_from([(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 2), (1, 3, 1)])


class Messages(TorchDispatchMode):
    """The collectives of this rank: name, and bytes of the largest operand."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.found.append((name, max(leaf.numel() * leaf.element_size() for leaf in tensors)))
        return func(*args, **(kwargs or {}))


@st.composite
def layers(draw: Any) -> Any:
    """Leaves of any shape and placements, one that may go alone, and experts that stay split over ep."""
    sizes = draw(MESHES)
    tree, placed, kept = {}, {}, {}
    for name in "abc":
        shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        tree[name] = torch.randn(shape, dtype=torch.float64)
        dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in range(2)]
        placed[name] = (Replicate(), *(Replicate() if dim is None else Shard(dim) for dim in dims))
        kept[name] = frozenset()
    tree["experts"] = torch.randn(2 * sizes[1] * sizes[2], 3, 5, dtype=torch.float64)
    placed["experts"] = (Replicate(), draw(st.sampled_from([Shard(0), Shard(1), Replicate()])), Shard(0))
    kept["experts"] = frozenset({"ep"})
    return sizes, tree, placed, kept, draw(st.booleans())


def by_store(sizes: Any, tree: Any, placed: Any, kept: Any, alone: bool) -> Any:
    """What the store gathers and reduces, and what ``gather`` and its gradient do."""
    mesh = mesh_of(dict(zip(("replicate", "fsdp", "ep"), sizes, strict=True)))
    layout = parallel.make_layout(mesh, placed, tree)
    shards = parallel.local(parallel.shard(tree, layout))
    before = _packing.ALONE
    _packing.ALONE = 1 if alone else before
    wide = dict.fromkeys(tree, torch.float64)
    layered = parallel.ShardedLayers(
        {"layer": layout}, kept={"layer": kept}, gather_dtypes={"layer": wide}, reduce_dtype=torch.float64
    )
    _packing.ALONE = before
    rank = dist.get_rank()

    def loss(full: Any) -> torch.Tensor:
        return sum((rank + 1) * (leaf**2).sum() for leaf in full.values())

    store = layered.store({"layer": shards})
    for microbatch in range(2):
        store.gather("layer", 0)
        full = pytree.tree_map(torch.clone, store.parameters("layer"))
        gradient = {f"['{name}']": 2 * (rank + 1) * (microbatch + 1) * leaf for name, leaf in full.items()}
        store.add_gradient("layer", gradient)
        store.release("layer")
        store.reduce("layer")
        store.drop_gradient("layer")

    wanted = parallel.gather(shards, layout, kept)
    wanted_gradient = torch.func.grad(lambda parts: loss(parallel.gather(parts, layout, kept)))(shards)
    found = store.gradients()["layer"]
    thrice = {name: 3 * leaf for name, leaf in wanted_gradient.items()}
    return full, wanted, found, thrice


@EXAMPLES
@given(case=layers())
def test_a_store_gathers_and_reduces_as_gather_and_its_gradient_do(case: Any) -> None:
    sizes = case[0]
    for full, wanted, found, gradient in parallel.shared_pool().run(by_store, math.prod(sizes), *case):
        torch.testing.assert_close(full, wanted, rtol=0, atol=0)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@st.composite
def fp8_layers(draw: Any) -> Any:
    """The same with fp8 along any dimension of some leaves, what is split too, and what they are computed with."""
    sizes, tree, placed, kept, alone = draw(layers())
    tree = {name: leaf.float() for name, leaf in tree.items()}
    dims = {name: draw(st.none() | st.integers(0, leaf.ndim - 1)) for name, leaf in tree.items()}
    return sizes, tree, placed, kept, dims, alone, draw(st.sampled_from([torch.bfloat16, torch.float32]))


def in_fp8(sizes: Any, tree: Any, placed: Any, kept: Any, dims: Any, alone: bool, dtype: torch.dtype) -> Any:
    """What a store gathers in fp8, what parts rounded by themselves are together, and the whole rounded before."""
    mesh = mesh_of(dict(zip(("replicate", "fsdp", "ep"), sizes, strict=True)))
    layout = parallel.make_layout(mesh, placed, tree)
    shards = parallel.local(parallel.shard(tree, layout))

    def rounded(leaves: Any) -> Any:
        return {
            name: leaf.to(dtype) if dims[name] is None else parallel.round_to_fp8(leaf, dims[name], dtype)
            for name, leaf in leaves.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packing, "ALONE", 1 if alone else _packing.ALONE)
        patch.setattr(_fp8, "BLOCK", 2)
        layered = parallel.ShardedLayers(
            {"layer": layout},
            kept={"layer": kept},
            gather_dtypes={"layer": dict.fromkeys(tree, dtype)},
            fp8_dims={"layer": dims},
        )
        store = layered.store({"layer": shards})
        layered.buffer(0, layered.sizes["layer"]).fill_(255)
        store.gather("layer", 0)
        found = pytree.tree_map(torch.clone, store.parameters("layer"))
        store.add_gradient("layer", {f"['{name}']": torch.full_like(leaf, 2) for name, leaf in found.items()})
        store.release("layer")
        store.reduce("layer")
        store.drop_gradient("layer")
        with Messages() as messages:
            store.gather("layer", 0)
            store.release("layer")
        sent = sum(size for name, size in messages.found if "allgather" in name)
        promised = sum(layered.messages("layer").values())
        parts = parallel.gather(rounded(shards), layout, kept)
        whole = parallel.gather(parallel.local(parallel.shard(rounded(tree), layout)), layout, kept)
    ones = pytree.tree_map(torch.ones_like, tree)
    straight = torch.func.grad(
        lambda leaves: sum((2 * leaf).sum() for leaf in parallel.gather(leaves, layout, kept).values())
    )(parallel.local(parallel.shard(ones, layout)))
    return found, parts, whole, store.gradients()["layer"], straight, sent, promised


@EXAMPLES
@given(case=fp8_layers())
def test_fp8_brings_what_its_owner_rounds_whatever_the_mesh(case: Any) -> None:
    sizes, tree, placed, _, dims, _, _ = case

    def cuts(name: str, axis: int) -> int:
        return math.prod(size for size, one in zip(sizes, placed[name], strict=True) if one == Shard(axis))

    even = all(size % cuts(name, axis) == 0 for name, leaf in tree.items() for axis, size in enumerate(leaf.shape))
    ranks = parallel.shared_pool().run(in_fp8, math.prod(sizes), *case)
    for found, parts, whole, gradient, straight, sent, promised in ranks:
        torch.testing.assert_close(found, parts, rtol=0, atol=0)
        torch.testing.assert_close(gradient, straight, rtol=0, atol=0)
        for name, dim in dims.items():
            if dim is None or cuts(name, dim) == 1:
                torch.testing.assert_close(found[name], whole[name], rtol=0, atol=0)
        # Padded to the largest part, where parts are uneven.
        assert sent == promised if even else sent >= promised


CONFIG = MoEConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=192,
)


def one_step(sizes: tuple[int, int], gather_dtype: torch.dtype | None = None) -> Any:
    """Messages of a step, live bytes at its peak, bytes of a layer, of all shards, and of an AdamW state."""
    layout = model_layout(CONFIG, parallel.make_mesh(*sizes))
    optimizer = optim.sgd(0.1)
    step = make_train_step(CONFIG, optimizer, layout=layout, gather_dtype=gather_dtype)
    state = init_state(init(CONFIG, seed=0, layout=layout), optimizer, CONFIG)
    tokens = torch.randint(CONFIG.vocab_size, (1, 4))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    state, _ = step(state, batch)
    with Messages() as messages:
        step(state, batch)
    with LiveBytes() as memory:
        step(state, batch)
    gathered = make_sharding(CONFIG, layout, None, torch.float32).layers.sizes
    shards = sum(leaf.numel() * 4 for leaf in pytree.tree_leaves(parallel.local_parts(state.params)))
    return messages.found, memory.peak, gathered, shards


@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_a_step_sends_what_the_formula_says(sizes: tuple[int, int]) -> None:
    """Two gathers of every layer (one of the embedding, whose backward needs no values; one of the head, whose
    backward follows its forward) and one reduction, each of every element that is split, padded to the largest part."""
    fsdp, ep = sizes
    for messages, *_ in parallel.shared_pool().run(one_step, fsdp * ep, sizes):
        gathers = sum(size for name, size in messages if "allgather" in name)
        hidden, width, heads = 64, 192, 64
        experts = CONFIG.num_experts // ep * hidden * width * 3
        dense = hidden * (heads + 2 * 32) + heads * hidden + 2 * hidden + hidden * CONFIG.num_experts
        ends = 2 * CONFIG.vocab_size * hidden + hidden
        layer = dense + (experts if fsdp > 1 else 0)
        assert gathers == 4 * (2 * CONFIG.num_hidden_layers * layer + ends)
        exchanged = sum(size for name, size in messages if "alltoall" in name)
        reduced = 4 * (CONFIG.num_hidden_layers * layer + ends)
        assert exchanged == reduced if ep == 1 else exchanged > reduced


@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_matrices_send_a_byte_for_each_element_and_block_in_fp8(sizes: tuple[int, int]) -> None:
    fsdp, ep = sizes
    for messages, *_ in parallel.shared_pool().run(one_step, fsdp * ep, sizes, torch.float8_e4m3fn):
        gathers = sum(size for name, size in messages if "allgather" in name)
        hidden, width, heads = 64, 192, 64
        # Blocks of 128 along what is not hidden: of 128 and 64 in attention; of 384 and, two to a column, 192.
        attention = hidden * (heads + 2 * 32) + heads * hidden + 2 * hidden
        experts = CONFIG.num_experts // ep * (hidden * width * 3 + (3 + 2) * hidden)
        wide = 4 * (2 * hidden + hidden * CONFIG.num_experts)
        layer = attention + wide + (experts if fsdp > 1 else 0)
        assert gathers == 2 * CONFIG.num_hidden_layers * layer + 4 * (2 * CONFIG.vocab_size * hidden + hidden)


def test_a_step_needs_two_layers_beside_its_shards() -> None:
    """Two gather buffers, which stand from step to step, and a layer's gradient with its message: not six layers."""
    for _, peak, gathered, shards in parallel.shared_pool().run(one_step, 4, (4, 1)):
        layer = gathered["layers.0"]
        assert layer * 6 > 0.9 * (sum(gathered.values()) - gathered["embed"] - gathered["head"])
        # New parameters and this rank's part of the gradient are as large as the shards.
        assert peak < 2 * shards + 2.2 * layer


def buffers_of_two_steps() -> bool:
    layout = model_layout(CONFIG, parallel.make_mesh(2, 1))
    layered = make_sharding(CONFIG, layout, None, torch.float32).layers
    return layered.buffer(0, 100).data_ptr() == layered.buffer(0, 50).data_ptr()


def test_buffers_are_the_same_memory_in_every_step() -> None:
    assert all(parallel.shared_pool().run(buffers_of_two_steps, 2))


def no_layers() -> str:
    try:
        parallel.ShardedLayers({})
    except ValueError as error:
        return str(error)
    return ""


def test_no_layers_are_refused() -> None:
    assert no_layers() == "no layers to shard"
