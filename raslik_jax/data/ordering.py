"""Seeded orders that stay the same on every machine and under every library version.

They use a hash and no random generator. No library promises the same draws in its next version, and
a corpus, its index and its results depend on them.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def _digest(seed: int, label: str, number: int) -> bytes:
    return hashlib.sha256(f"{seed}/{label}/{number}".encode()).digest()


def shuffled(items: Sequence[_Item], *, seed: int, label: str) -> list[_Item]:
    """Returns the items in the order of sha256(seed, label, position); `label` is the purpose."""
    order = sorted(range(len(items)), key=lambda position: _digest(seed, label, position))
    return [items[position] for position in order]


def take_first(rows: Sequence[_Item], number: int, *, kind: str) -> Sequence[_Item]:
    """Returns the first `number` rows; refuses too few rows of `kind`."""
    if not 0 <= number <= len(rows):
        raise ValueError(
            f"the number of {kind} rows must be between 0 and {len(rows)}, got {number}: change "
            "the sizes of the corpus or of its query sets"
        )
    return rows[:number]


class Draws:
    """A stream of choices; number i is the first 8 bytes of sha256(seed, label, i)."""

    def __init__(self, *, seed: int, label: str):
        self._digests = (_digest(seed, label, number) for number in itertools.count())

    def below(self, bound: int) -> int:
        """Returns the next whole number from 0 to bound - 1."""
        return int.from_bytes(next(self._digests)[:8], "big") % bound

    def choice(self, items: Sequence[_Item]) -> _Item:
        """Returns one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[_Item], number: int) -> list[_Item]:
        """Returns `number` different items in drawn order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(number)]
