"""The plan of sharded Muon, for every rank in one process: both ends agree, loads and buckets are bounded."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from functional_moe import parallel
from functional_moe.optim import MatrixAxes
from functional_moe.parallel._muon_plan import PlacedLeaf, make_plan, newton_schulz_flops

IN_OUT = MatrixAxes(out=-1, in_=-2)


def plans_of(leaves, sizes, bucket_bytes=1 << 20, flops_per_byte=0.0):
    options = {"itemsize": 4, "bucket_bytes": bucket_bytes, "flops_per_byte": flops_per_byte}
    return [make_plan(leaves, sizes, rank, **options) for rank in range(math.prod(sizes.values()))]


@st.composite
def cases(draw):
    sizes = dict(zip(("replicate", "fsdp", "ep"), draw(st.tuples(*[st.integers(1, 3)] * 3)), strict=True))
    leaves = []
    for name in range(draw(st.integers(1, 4))):
        blocks = draw(st.sampled_from([1, 3]))
        rows, cols = draw(st.integers(1, 9)), 3 * draw(st.integers(1, 5))
        stack = draw(st.sampled_from([(), (3,), (4,), (2, 2)]))
        place = st.sampled_from([Replicate(), *map(Shard, range(len(stack) + 2))])
        axes = MatrixAxes(out=-1, in_=-2, out_blocks=blocks)
        leaves.append(PlacedLeaf(str(name), (*stack, rows, cols), draw(st.tuples(place, place, place)), axes))
    return leaves, sizes, draw(st.sampled_from([4, 100, 300, 1 << 20])), draw(st.sampled_from([0.0, 10.0, 1e9]))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_both_ends_of_every_message_agree_and_buckets_are_bounded(case):
    leaves, _, bucket_bytes, _ = case
    plans = plans_of(*case)
    matrices = [math.prod(leaf.shape[-2:]) // (1 if leaf.axes.out_blocks == 1 else 3) for leaf in leaves]
    limit = max(bucket_bytes // 4, *matrices)
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        for exchanges in ([bucket.collect for bucket in buckets], [bucket.give_back for bucket in buckets]):
            for a, b in itertools.permutations(range(len(plans)), 2):
                sent = [[part.stop - part.start for part in end.where] for end in exchanges[a].send if end.peer == b]
                come = [[part.stop - part.start for part in end.where] for end in exchanges[b].receive if end.peer == a]
                assert sent == come
        for bucket in buckets:
            assert sum(math.prod(owned.shape) for owned in bucket.owned) <= limit
            for ends in (bucket.collect.send, bucket.collect.receive, bucket.give_back.send, bucket.give_back.receive):
                if ends is not bucket.give_back.send:  # one result may go to several copies
                    assert sum(end.numel for end in ends) <= limit


def owned_by(plan):
    return [item.leaf for bucket in plan.buckets for item in bucket.owned]


def test_owners_are_chosen_on_top_of_the_load_of_whole_matrices():
    rows = (Shard(0),)
    leaves = [PlacedLeaf("stack", (3, 8, 8), rows, IN_OUT)]  # two on rank 0, one on rank 1
    leaves += [PlacedLeaf(str(i), (8, 8), rows, IN_OUT) for i in range(3)]
    assert [owned_by(plan) for plan in plans_of(leaves, {"fsdp": 2})] == [[2], [1, 3]]
    assert [owned_by(plan) for plan in plans_of(leaves[1:], {"fsdp": 2})] == [[0, 2], [1]]


def test_at_equal_loads_an_owner_is_one_of_the_holders():
    sizes = {"fsdp": 2, "ep": 2}
    leaves = [PlacedLeaf("experts", (4, 8, 6), (Shard(1), Shard(0)), IN_OUT)]
    for rank, plan in enumerate(plans_of(leaves, sizes)):
        (bucket,) = plan.buckets
        assert len(bucket.owned) == 1
        peers = {end.peer for end in (*bucket.collect.send, *bucket.collect.receive)}
        assert peers == {(rank + 2) % 4}


def test_owners_are_balanced_where_a_stack_is_split_unevenly():
    # Experts 0 to 2 lie on ranks 0 and 2, experts 3 and 4 on 1 and 3.
    leaves = [PlacedLeaf("experts", (5, 8, 6), (Shard(1), Shard(0)), IN_OUT)]
    plans = plans_of(leaves, {"fsdp": 2, "ep": 2})
    assert sorted(len(owned_by(plan)) for plan in plans) == [1, 1, 1, 2]


def test_parts_come_from_the_copy_of_the_owner_and_results_go_to_all():
    sizes = {"replicate": 2, "fsdp": 2}
    leaves = [PlacedLeaf(str(i), (8, 6), (Replicate(), Shard(0)), IN_OUT) for i in range(4)]
    for rank, plan in enumerate(plans_of(leaves, sizes)):
        (bucket,) = plan.buckets
        assert len(bucket.owned) == 1
        assert {end.peer for end in bucket.collect.send} == {rank ^ 1}
        assert {end.peer for end in bucket.give_back.send} == {0, 1, 2, 3} - {rank}


def test_a_head_that_no_placement_cuts_stays_and_one_that_is_cut_goes_to_a_rank_that_holds_it():
    heads = MatrixAxes(out=-2, in_=-1, out_blocks=3)
    # 12 rows on two ranks: heads 0 and 2 are whole, head 1 is cut.
    plans = plans_of([PlacedLeaf("o", (12, 5), (Shard(0),), heads)], {"fsdp": 2})
    assert [[where for _, where, _ in plan.matrices_here] for plan in plans] == [
        [(slice(0, 4), slice(0, 5))],
        [(slice(2, 6), slice(0, 5))],
    ]
    assert [owned_by(plan) for plan in plans] == [[0], []]
    # On eight ranks with something to do on two of them alone, an idle rank would do as well, but holds nothing of it.
    (first, second, *rest) = plans_of([PlacedLeaf("o", (4, 5), (Shard(0), Replicate()), IN_OUT)], {"fsdp": 8, "ep": 1})
    assert owned_by(first) == [0] and not any(map(owned_by, (second, *rest)))


@pytest.mark.parametrize(
    ("placements", "axes", "message"),
    [
        ((Shard(0), Shard(0)), IN_OUT, "leaf 'w' has the placements .*; the mesh has 1 axes"),
        ((Shard(2),), IN_OUT, "leaf 'w' of shape .3, 4. cannot have the placement"),
        ((Shard(0),), MatrixAxes(out=-3, in_=0), "leaf 'w' of shape .3, 4. has no axis out=-3"),
    ],
)
def test_what_does_not_fit_is_refused(placements, axes, message):
    with pytest.raises(ValueError, match=message):
        plans_of([PlacedLeaf("w", (3, 4), placements, axes)], {"fsdp": 2})


def test_flops_do_not_depend_on_the_side_a_matrix_lies_on():
    assert newton_schulz_flops(12, 8) == newton_schulz_flops(8, 12) == 5 * (4 * 8 * 8 * 12 + 2 * 8**3)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=6), count=st.integers(1, 3), data=st.data())
def test_owners_are_balanced(costs, count, data):
    everyone = [tuple(data.draw(st.permutations(range(count)))) for _ in costs]
    owners = parallel.assign_owners(costs, everyone, [0] * count)
    assert owners == parallel.assign_owners(costs, everyone, [0] * count)

    def largest(chosen):
        return max(
            sum(cost for cost, owner in zip(costs, chosen, strict=True) if owner == rank) for rank in range(count)
        )

    best = min(largest(chosen) for chosen in itertools.product(range(count), repeat=len(costs)))
    assert 3 * count * largest(owners) <= (4 * count - 1) * best


def test_owners_by_hand():
    everyone = [(0, 1, 2)] * 5
    assert parallel.assign_owners([5, 9, 7, 4, 3], everyone, [0, 0, 0]) == [2, 0, 1, 2, 1]
    assert parallel.assign_owners([5, 9, 7, 4, 3], everyone, [100, 0, 0]) == [2, 1, 2, 1, 2]
    assert parallel.assign_owners([5, 5], [(2, 0), (2, 0)], [0, 0, 0]) == [2, 0]
    assert parallel.assign_owners([], [], [1]) == []
    for costs, ranks, load, message in (
        ([1], [(0,), (0,)], [0], "1 costs and ranks for 2 items"),
        ([-1], [(0,)], [0], "a cost of -1"),
        ([1], [(0,)], [-2], "an initial load of -2"),
        ([1], [()], [0], "no rank may own item 0"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel.assign_owners(costs, ranks, load)
