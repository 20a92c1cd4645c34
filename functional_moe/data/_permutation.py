"""A shuffled order of any number of documents in O(1) memory.

A shuffle that is stored needs memory in proportion to what it shuffles. A keyed bijection does not: slot
``i`` of the order is computed when it is asked for. The bijection is a Feistel network over an even number of
bits; results that fall outside the domain are encrypted again until they fall inside ("cycle walking"), which
keeps it a bijection.

References:
    Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002 (cycle walking).
    Luby and Rackoff, *How to Construct Pseudorandom Permutations from Pseudorandom Functions*, SIAM J.
    Comput. 1988. Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014 (the
    mixing function).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

# Four rounds make a Feistel network a strong pseudorandom permutation over large halves; two more are for
# small ones.
_ROUNDS = 6
# With halves of two bits some orders of five items come up far more often than others, with three none does.
# Larger ones cost time: a value is encrypted 2**(2 * half_bits) / num_items times on average.
_MIN_HALF_BITS = 3


def permute(slots: NDArray[np.int64], num_items: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """The items that stand at ``slots`` of the order that ``key`` names.

    Args:
        slots: int64 of any shape, each in ``[0, num_items)``.
        num_items: Number of items in the order, at most 2**62.
        key: Integers that name the order, such as (seed, epoch).

    Returns:
        int64 of the shape of ``slots``, each in ``[0, num_items)``. Over all slots every item occurs exactly
        once.
    """
    half_bits = max(_MIN_HALF_BITS, ((num_items - 1).bit_length() + 1) // 2)
    # The digest gives round keys that do not depend on numpy's generators, whose streams may change between
    # versions.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8")
    items = _feistel(slots.astype(np.uint64), half_bits, round_keys)
    while (outside := items >= num_items).any():
        items[outside] = _feistel(items[outside], half_bits, round_keys)
    return items.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
