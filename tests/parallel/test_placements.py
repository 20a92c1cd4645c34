"""Rules from logical axes to placements: the defaults, overrides, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from functional_moe import parallel
from functional_moe.config import MoEConfig
from functional_moe.parallel._tree import named_leaves
from functional_moe.parameters import Constant, Leaf, declare


def config(num_experts: int = 6) -> MoEConfig:
    return MoEConfig(
        vocab_size=23,
        hidden_size=10,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=7,
        intermediate_size=9,
        first_k_dense_replace=1,
        num_shared_experts=1,
        shared_expert_gate=True,
        use_qk_norm=True,
        attention_bias=True,
    )


def leaf(*axes: str, size: int = 4) -> Leaf:
    return Leaf((size,) * len(axes), axes, Constant(0.0), "matrix")


PLAN = {"fsdp": 2, "ep": 2}


def test_whole_experts_lie_on_both_axes_when_they_divide():
    placed = named_leaves(parallel.placements(declare(config(8)), PLAN))
    assert placed["layers.1.experts.gate_up"] == placed["layers.1.experts.down"] == (Shard(0), Shard(0))
    assert placed["embedding"] == (Shard(1), Shard(1))
    assert placed["layers.0.attention.qkv"] == placed["layers.0.attention_norm"] == (Shard(0), Shard(0))
    assert placed["layers.0.attention.q_norm"] == (Shard(0), Shard(0))
    assert placed["layers.0.attention.qkv_bias"] == (Replicate(), Replicate())


def test_otherwise_ep_splits_the_experts_and_fsdp_their_inner_axis():
    placed = named_leaves(parallel.placements(declare(config(6)), PLAN))
    assert placed["layers.1.experts.gate_up"] == (Shard(1), Shard(0))
    assert placed["layers.1.experts.down"] == (Shard(2), Shard(0))


def test_nothing_is_split_over_the_replicate_axis():
    placed = named_leaves(parallel.placements(declare(config(8)), {"replicate": 2, **PLAN}))
    assert all(len(p) == 3 and p[0] == Replicate() for p in placed.values())


@settings(deadline=None, max_examples=50)
@given(fsdp=st.integers(1, 40), ep=st.integers(1, 40), num_experts=st.integers(2, 400))
def test_the_default_has_a_place_for_every_leaf_or_refuses_the_experts(fsdp, ep, num_experts):
    declared = declare(config(num_experts))
    mesh = {"fsdp": fsdp, "ep": ep}
    if num_experts % ep:
        words = rf"'layers\.1\.experts\.gate_up': num_experts = {num_experts} is not a multiple of ep {ep}"
        with pytest.raises(ValueError, match=words):
            parallel.placements(declared, mesh)
        return
    placed = named_leaves(parallel.placements(declared, mesh))
    assert placed.keys() == named_leaves(declared).keys()
    for path, placement in placed.items():
        parallel.local_slices(named_leaves(declared)[path].shape, placement, mesh, (0, 0))


def test_rules_can_be_changed():
    declared = declare(config(8))
    rules = parallel.default_rules(declared, PLAN)
    rules = rules._replace(dense={**rules.dense, "hidden": (), "vocab": ("fsdp",)})
    placed = named_leaves(parallel.placements(declared, PLAN, rules))
    assert placed["embedding"] == (Shard(0), Replicate())
    assert placed["head"] == (Shard(1), Replicate())
    assert placed["layers.0.attention.qkv"] == (Replicate(), Replicate())


@pytest.mark.parametrize(
    ("declared", "dense", "experts", "words"),
    [
        ({"a": {"b": leaf("x", "y")}}, {"x": ()}, {}, r"'a\.b': no rule in Rules\.dense for the logical axis 'y'"),
        ({"a": leaf("x")}, {"x": (), "z": ()}, {}, r"Rules\.dense: the rule 'z' -> \(\) is for no leaf"),
        ({"a": leaf("x")}, {"x": ("tp",)}, {}, r"'x' -> \('tp',\), but the mesh has the axes \('fsdp', 'ep'\)"),
        (
            {"a": leaf("x", "y")},
            {"x": ("ep",), "y": ("fsdp", "ep")},
            {},
            "'a': 'x' and 'y' would both be split by the mesh axis 'ep'",
        ),
        ({"a": leaf("x", "x")}, {"x": ("ep",)}, {}, "'x' and 'x' would both be split by the mesh axis 'ep'"),
        (
            {"a": leaf("experts", "x", size=6)},
            {},
            {"experts": ("fsdp", "ep"), "x": ()},
            "'a': num_experts = 6 is not a multiple of fsdp 2 x ep 2",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(declared, dense, experts, words):
    with pytest.raises(ValueError, match=words):
        parallel.placements(declared, PLAN, parallel.Rules(dense, experts))


def test_an_unknown_logical_axis_has_no_default():
    with pytest.raises(ValueError, match="'a': the logical axis 'colour' has no default"):
        parallel.placements({"a": leaf("colour")}, PLAN)
    with pytest.raises(ValueError, match=r"axes fsdp and ep, got \{'dp': 4\}"):
        parallel.placements({"a": leaf("hidden")}, {"dp": 4})


def test_experts_of_the_952b_run_are_whole():
    placed = named_leaves(parallel.placements(declare(config(384)), {"fsdp": 32, "ep": 12}))
    slices = parallel.local_slices((384, 10, 7), placed["layers.1.experts.gate_up"], {"fsdp": 32, "ep": 12}, (31, 11))
    assert slices == (slice(383, 384), slice(0, 10), slice(0, 7))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_slices_of_all_ranks_tile_the_tensor(shape, sizes, data):
    mesh = {f"axis{index}": size for index, size in enumerate(sizes)}
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in sizes]
    placed = [Replicate() if dim is None else Shard(dim) for dim in dims]
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in torch.cartesian_prod(*[torch.arange(size) for size in sizes]).view(-1, len(sizes)).tolist():
        count[parallel.local_slices(shape, placed, mesh, coordinate)] += 1
    copies = torch.tensor([size for size, dim in zip(sizes, dims, strict=True) if dim is None]).prod()
    assert bool((count == copies).all())


def test_trees_of_placements_are_trees_of_the_declaration():
    declared = {"layers": ({"a": leaf("hidden")}, {}), "none": ()}
    placed = parallel.placements(declared, PLAN)
    assert placed == {"layers": ({"a": (Shard(0), Shard(0))}, {}), "none": ()}
    assert len(pytree.tree_leaves(placed)) == 2
