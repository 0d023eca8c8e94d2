"""Seeded orders that stay the same on every machine and under every library version.

They use a hash and no random generator. No library promises the same draws in its next version, and
a corpus, its index and its results depend on them.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from raslik_jax.data.words import refused

_Item = TypeVar("_Item")


def digest(seed: int, label: str, number: int) -> bytes:
    """Returns the hash that decides the place of an item; `label` is the purpose."""
    return hashlib.sha256(f"{seed}/{label}/{number}".encode()).digest()


def shuffled(items: Sequence[_Item], *, seed: int, label: str) -> list[_Item]:
    """Returns the items in the order of their digests."""
    order = sorted(range(len(items)), key=lambda position: digest(seed, label, position))
    return [items[position] for position in order]


def take_first(rows: Sequence[_Item], number: int, *, kind: str) -> Sequence[_Item]:
    """Returns the first `number` rows; refuses too few rows of `kind`."""
    if not 0 <= number <= len(rows):
        raise refused("number_of_rows", kind=kind, most=len(rows), got=number)
    return rows[:number]
