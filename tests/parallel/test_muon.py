"""Muon over ranks equals Muon on one process: for any mesh, placements, blocks and scale, with the bytes it says."""

import functools
import itertools
import math
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import optim, parallel
from functional_moe.config import MoEConfig
from functional_moe.optim import MatrixAxes
from functional_moe.parallel._mesh import mesh_of
from functional_moe.parallel._muon_plan import newton_schulz_flops
from functional_moe.parameters import declare, init, labels, matrix_axes

IN_OUT = MatrixAxes(out=-1, in_=-2)

# Each leaf with what is special about it; sizes that no mesh divides.
LEAVES = {
    "matrix": ((7, 10), IN_OUT),
    "few_rows": ((3, 11), MatrixAxes(out=0, in_=1)),
    "fused": ((6, 15), MatrixAxes(out=-1, in_=-2, out_blocks=(9, 3, 3))),
    "heads_out": ((5, 12), MatrixAxes(out=-1, in_=-2, out_blocks=4)),
    "heads_in": ((12, 5), MatrixAxes(out=-1, in_=-2, in_blocks=3)),
    "stack": ((5, 4, 6), IN_OUT),
    "fused_stack": ((3, 4, 10), MatrixAxes(out=-1, in_=-2, out_blocks=2)),
    "stacks_behind": ((4, 3, 2, 2), MatrixAxes(out=0, in_=1)),
}


def leaf_of(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tree_of(names):
    return {name: leaf_of(LEAVES[name][0], seed) for seed, name in enumerate(names)}


def axes_of(names):
    return {name: LEAVES[name][1] for name in names}


@st.composite
def cases(draw):
    """A mesh of up to 8 ranks, with copies or not, and some leaves with any placements."""
    sizes = draw(
        st.sampled_from(
            [
                {"fsdp": 1, "ep": 1},
                *({"fsdp": fsdp, "ep": ep} for fsdp, ep in [(2, 1), (1, 2), (3, 1), (2, 2), (5, 1), (3, 2), (7, 1)]),
                *({"fsdp": fsdp, "ep": ep} for fsdp, ep in [(4, 2), (8, 1)]),
                *({"replicate": 2, "fsdp": fsdp, "ep": ep} for fsdp, ep in [(1, 1), (2, 1), (3, 1), (2, 2)]),
                {"replicate": 3, "fsdp": 1, "ep": 2},
            ]
        )
    )
    names = draw(st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=4, unique=True))
    placed = {}
    for name in names:
        any_dim = st.none() | st.integers(0, len(LEAVES[name][0]) - 1)
        placed[name] = tuple(Replicate() if dim is None else Shard(dim) for dim in (draw(any_dim) for _ in sizes))
    options = {
        "bucket_bytes": draw(st.sampled_from([1, 200, 400, 1 << 20])),
        "flops_per_byte": draw(st.sampled_from([0.0, 50.0, math.inf])),
    }
    return sizes, names, placed, options, draw(st.sampled_from(["shape", "match_rms", "spectral"]))


def trained(tree, axes, scale, orthogonalize=optim.orthogonalize_here, cut=lambda tree: tree, nesterov=True):
    """Parameters after two steps of Muon with decay."""
    tx = optim.muon(0.1, axes, weight_decay=0.1, scale=scale, nesterov=nesterov, orthogonalize=orthogonalize)
    params = cut(tree)
    state = tx.init(params)
    for step in range(2):
        grads = cut({name: leaf_of(leaf.shape, 100 * step + len(name)) for name, leaf in tree.items()})
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params


def trained_on_mesh(sizes, names, placed, options, scale):
    tree = tree_of(names)
    layout = parallel.make_layout(mesh_of(sizes), placed, tree)
    orthogonalize = parallel.owner_orthogonalize(layout, **options)
    params = trained(tree, axes_of(names), scale, orthogonalize, lambda tree: parallel.local(parallel.shard(tree, layout)))
    return parallel.unshard(parallel.from_local(params, layout)), params


def assert_close(found, wanted):
    for name in wanted:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name} is off by {error:.1e}"


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_sharded_equals_unsharded(case):
    # dion 74, 76: counts and rows that ranks do not divide; also ranks without rows, and more ranks than matrices.
    sizes, names, _, _, scale = case
    wanted = trained(tree_of(names), axes_of(names), scale)
    for found, _ in parallel.spawn(trained_on_mesh, math.prod(sizes.values()), *case):
        assert_close(found, wanted)
