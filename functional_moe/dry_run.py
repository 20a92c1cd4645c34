"""One rank's training step without a device and without memory: what it costs, counted on fake tensors.

The chain that trains is run once per kind of segment, for one rank of a world that exists in name only (torch's fake
process group), on tensors that have shapes and no numbers. Routing is taken to be balanced. What comes out is data:
sizes for the planner, operators for the clock, messages for the links, the optimizer's arithmetic.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from . import flops as flops  # registers formulas
from .chain import Microbatch, by_layer, make_chain
from .config import MoEConfig
from .memory import Chain, SegmentOperators, Sizes, list_operators, profile_chain
from .model import Totals
from .optimizers import OptimizerSettings, make_optimizer
from .parallel import Layout, ShardedLayers, make_mesh
from .parallel._layout import local_slices
from .parallel._mesh import axis_sizes
from .parallel._muon_plan import PlacedLeaf, make_plan, newton_schulz_flops
from .parameters import Leaf, declare, matrix_axes
from .sharding import GATHER_DTYPES, GatherDtype, make_sharding, model_layout


class Message(NamedTuple):
    """Leaves of one layer that are brought together along the same axes."""

    elements: int
    gathered: Mapping[GatherDtype, int]  # bytes, by the dtype of matrices; scales are among them
    axes: tuple[str, ...]


class Gathered(NamedTuple):
    """What layers take where they are brought together, by layer, in bytes."""

    buffers: Mapping[str, int]  # the parameters as they are computed with
    staging: Mapping[str, int]  # beside them, while they travel: see ``ShardedLayers.layer_bytes``


class OptimizerWork(NamedTuple):
    """One rank's part of the update."""

    local_flops: int  # Newton-Schulz on matrices that are whole here
    owned_flops: int  # and on those that this rank owns
    sent: int  # bytes of matrices that go to owners, and of their updates coming back, to other ranks
    parameters: int  # elements of this rank's shards
    state: int  # bytes


class DryRun(NamedTuple):
    """What one rank's step consists of."""

    config: MoEConfig
    mesh: Mapping[str, int]  # outermost axis first
    tokens: int  # of a microbatch, per rank
    seq_len: int
    expert_parts: int  # in which the tokens go through their experts
    chain: Chain
    profiles: Mapping[str, Any]  # memory.SegmentProfile, by segment
    operators: Mapping[str, SegmentOperators]  # by segment
    messages: Mapping[str, tuple[Message, ...]]  # by layer
    gathers: Mapping[GatherDtype, Gathered]  # by the dtype in which matrices travel
    packed: Mapping[str, int]  # bytes of the messages in which each layer's small leaves travel together
    shards: Mapping[str, int]  # elements of this rank's part of each layer
    optimizer: OptimizerWork

    @property
    def ranks(self) -> int:
        """Of the whole world."""
        return math.prod(self.mesh.values())

    def sizes(
        self, gather_dtype: GatherDtype, reduce_itemsize: int, resident: Mapping[str, Mapping[str, int]]
    ) -> Sizes:
        """Bytes of everything that a schedule moves.

        Args:
          gather_dtype: in which matrices travel.
          reduce_itemsize: of the dtype in which gradients are summed.
          resident: what is there all the time, by tier and name.
        """
        names = [segment.name for segment in self.chain.segments]
        widths = {layer: sum(m.elements for m in some) for layer, some in self.messages.items()}
        # A gradient in another dtype than the message's is copied to it.
        copies = {
            layer: width * reduce_itemsize if reduce_itemsize != self.config.dtype.itemsize else self.packed[layer]
            for layer, width in widths.items()
        }
        return Sizes(
            dict(self.profiles),
            dict(zip(names, [None, *names[:-1]], strict=True)),
            dict(self.gathers[gather_dtype].buffers),
            {layer: size * reduce_itemsize for layer, size in self.shards.items()},
            copies,
            resident,
        )


def dry_run(config: MoEConfig, fsdp: int, ep: int, seq_len: int, rows: int = 1, expert_parts: int = 1) -> DryRun:
    """Runs the step of rank 0 of ``fsdp * ep`` on fake tensors.

    Args:
      config: the model. Its compute dtype is that of products and of the parameters they are given.
      fsdp, ep: ranks along the axes of the mesh.
      seq_len: tokens of a sequence.
      rows: sequences of a microbatch.
      expert_parts: in how many parts the tokens go through their experts.

    Raises:
      ValueError: for a layout that does not divide the model, or sequences longer than the model takes.
      RuntimeError: inside a process group.
    """
    if rows < 1 or seq_len < 1:
        raise ValueError(f"seq_len = {seq_len} and rows = {rows}: both must be at least 1")
    if seq_len > config.max_position_embeddings:
        raise ValueError(
            f"seq_len = {seq_len} exceeds max_position_embeddings = {config.max_position_embeddings} of the model"
        )
    with _world(fsdp * ep):
        mesh = make_mesh(fsdp, ep)
        layout = model_layout(config, mesh)
        sharding = make_sharding(config, layout, None, torch.float32)
        chain = make_chain(config, "fused", sharding.expert_parallel, expert_parts)
        with FakeTensorMode(allow_non_fake_inputs=True):
            parameters = _gathered(sharding.layers, layout)
            tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
            count = torch.tensor(rows * seq_len)
            balance = torch.zeros(config.num_moe_layers, config.num_experts)
            batch = Microbatch({"tokens": tokens, "targets": tokens}, balance, Totals(count, count))
            profiles = profile_chain(chain, parameters, batch)
            operators = list_operators(chain, parameters, batch)

        # How layers would travel in each dtype; what they are computed with here is the compute dtype.
        ways = {
            name: make_sharding(config, layout, dtype, torch.float32).layers for name, dtype in GATHER_DTYPES.items()
        }
        work = _optimizer_work(config, layout, _state_bytes(config, layout))
        planned = sharding.layers.plans
        return DryRun(
            config,
            axis_sizes(mesh),
            rows * seq_len,
            seq_len,
            expert_parts,
            chain,
            profiles,
            operators,
            {name: _messages(name, ways) for name in planned},
            {name: _gathered_bytes(way) for name, way in ways.items()},
            {name: _packed_bytes(plan) for name, plan in planned.items()},
            {name: sum(math.prod(leaf.part.shape) for leaf in plan.leaves) for name, plan in planned.items()},
            work,
        )


@contextlib.contextmanager
def _world(ranks: int) -> Iterator[None]:
    """A process group of ``ranks``, of which this process is the first and only one; nothing is ever sent."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own; there is one already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _gathered(layers: ShardedLayers, layout: Layout) -> dict[str, Any]:
    """The parameters as the chain gets them, fake."""
    shapes = by_layer(layout.shapes)
    found = {}
    for name, plan in layers.plans.items():
        spec = pytree.tree_structure(shapes[name], is_leaf=lambda node: isinstance(node, torch.Size))
        leaves = [
            torch.empty(leaf.shape, dtype=dtype) for leaf, dtype in zip(plan.leaves, layers.dtypes(name), strict=True)
        ]
        found[name] = pytree.tree_unflatten(leaves, spec)
    return found


def _messages(layer: str, ways: Mapping[GatherDtype, ShardedLayers]) -> tuple[Message, ...]:
    elements: dict[tuple[str, ...], int] = {}
    for leaf in ways["float32"].plans[layer].leaves:
        if leaf.gathered:
            elements[leaf.gathered] = elements.get(leaf.gathered, 0) + math.prod(leaf.shape)
    sent = {dtype: way.messages(layer) for dtype, way in ways.items()}
    return tuple(
        Message(count, {dtype: of_axes[axes] for dtype, of_axes in sent.items()}, axes)
        for axes, count in elements.items()
    )


def _gathered_bytes(layers: ShardedLayers) -> Gathered:
    buffers = layers.sizes
    return Gathered(buffers, {name: layers.layer_bytes(name).gathered - size for name, size in buffers.items()})


def _packed_bytes(plan: Any) -> int:
    """Of the messages that a layer's small leaves share, once they are here and not yet taken apart."""
    return sum(
        packed.size * len(plan.leaves[packed.leaves[0]].parts) * dtype.itemsize
        for (_, dtype), packed in plan.packed.items()
    )


def _state_bytes(config: MoEConfig, layout: Layout) -> int:
    """Of the optimizer's state on one rank: Muon's momentum of matrices, AdamW's two moments of the rest."""
    sizes = axis_sizes(layout.mesh)
    zeros = [0] * len(sizes)
    shards = pytree.tree_map(
        lambda shape, placed: torch.empty(
            [part.stop - part.start for part in local_slices(shape, placed, sizes, zeros)], device="meta"
        ),
        layout.shapes,
        layout.placements,
        is_leaf=lambda node: isinstance(node, torch.Size),
    )
    state = make_optimizer(config, OptimizerSettings(), steps=100).init(shards)
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))


def _optimizer_work(config: MoEConfig, layout: Layout, state: int) -> OptimizerWork:
    sizes = axis_sizes(layout.mesh)
    declared = pytree.tree_leaves(declare(config), is_leaf=_is_leaf)
    placed = pytree.tree_leaves(layout.placements, is_leaf=_is_placements)
    axes = pytree.tree_leaves(matrix_axes(config), is_leaf=lambda node: hasattr(node, "out_blocks"))
    leaves = [
        PlacedLeaf(str(index), leaf.shape, placements, one)
        for index, (leaf, placements, one) in enumerate(zip(declared, placed, axes, strict=True))
        if leaf.label == "matrix"
    ]
    plan = make_plan(leaves, sizes, 0, itemsize=4, bucket_bytes=1 << 26, flops_per_byte=1e4)

    local = 0
    for index in plan.leaves_here:
        leaf, shape = leaves[index], plan.shard_shapes[index]
        blocks = leaf.axes.out_blocks
        widths = [shape[leaf.axes.out]] if isinstance(blocks, int) else list(blocks)
        count = math.prod(shape) // (shape[leaf.axes.out] * shape[leaf.axes.in_])
        local += count * sum(newton_schulz_flops(width, shape[leaf.axes.in_]) for width in widths)
    for _, where, one in plan.matrices_here:
        shape = tuple(part.stop - part.start for part in where)
        local += newton_schulz_flops(shape[one.out], shape[one.in_])
    owned = sum(
        newton_schulz_flops(matrix.shape[matrix.axes.out], matrix.shape[matrix.axes.in_])
        for bucket in plan.buckets
        for matrix in bucket.owned
    )
    sent = 4 * sum(
        route.numel for bucket in plan.buckets for route in itertools.chain(bucket.collect.send, bucket.give_back.send)
    )
    zeros = [0] * len(sizes)
    elements = sum(
        math.prod(part.stop - part.start for part in local_slices(leaf.shape, one, sizes, zeros))
        for leaf, one in zip(declared, placed, strict=True)
    )
    return OptimizerWork(local, owned, sent, elements, state)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _is_placements(node: Any) -> bool:
    return isinstance(node, tuple) and bool(node) and hasattr(node[0], "is_shard")
