"""A stream of draws that stays the same on every machine and under every library version."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

from raslik_jax.data.ordering import digest

_Item = TypeVar("_Item")


class Draws:
    """A stream of choices; number i is the first 8 bytes of sha256(seed, label, i)."""

    def __init__(self, *, seed: int, label: str):
        self._digests = (digest(seed, label, number) for number in itertools.count())

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
