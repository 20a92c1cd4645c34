import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe.data._permutation import permute

# Without a deadline, because the machine is shared.
QUICK = settings(deadline=None, max_examples=40)


@QUICK
@given(num_items=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 10**6))
def test_every_item_occurs_once(num_items: int, seed: int, epoch: int) -> None:
    items = permute(np.arange(num_items), num_items, (seed, epoch))
    assert sorted(items.tolist()) == list(range(num_items))


@QUICK
@given(num_items=st.integers(1, 2**62), data=st.data())
def test_a_slot_does_not_depend_on_the_slots_asked_with_it(num_items: int, data: st.DataObject) -> None:
    slots = np.array(data.draw(st.lists(st.integers(0, num_items - 1), min_size=1, max_size=5)))
    together = permute(slots, num_items, (0, 1))
    assert ((together >= 0) & (together < num_items)).all()
    assert together.tolist() == [int(permute(slot, num_items, (0, 1))[0]) for slot in slots[:, None]]


@pytest.mark.parametrize("num_items", [2, 3, 4, 5])
def test_all_orders_of_few_items_are_about_equally_frequent(num_items: int) -> None:
    expected = 30
    num_orders = math.factorial(num_items)
    draws = [permute(np.arange(num_items), num_items, (seed, 0)) for seed in range(expected * num_orders)]
    counts = Counter(tuple(items.tolist()) for items in draws)
    assert len(counts) == num_orders
    # The mean of chi-square is its degrees of freedom, its variance twice that: four standard deviations.
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < num_orders - 1 + 4 * math.sqrt(2 * (num_orders - 1))


def test_neighbours_are_torn_apart() -> None:
    items = permute(np.arange(100_000), 100_000, (7, 0))
    # A random order keeps one neighbour on average, and more than ten once in ten million orders.
    assert (np.diff(items) == 1).sum() <= 10
    assert abs(np.corrcoef(np.arange(100_000), items)[0, 1]) < 0.02


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Written down when this was made: a resumed run must find the order that it left.
    assert permute(np.arange(10), 10, (0, 0)).tolist() == [1, 7, 6, 0, 5, 8, 9, 3, 4, 2]
