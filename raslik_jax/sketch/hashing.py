"""An integer counter hash: the same random bits on every backend and every version of jax.

The generators of `jax.random` and NumPy may change between versions. A sketch must not change,
because an index may be searched with queries that are sketched years later. Every sign and bin of a
sketch is therefore a hash of (seed, stream, counter). It uses 32-bit integer operations only and
runs inside an accelerator kernel too. The functions take NumPy and JAX arrays alike.
"""

from typing import TypeVar

import jax
import numpy as np

Word = TypeVar("Word", np.ndarray, jax.Array)
# Two uint32 scalars: NumPy's, which compile to constants, or traced ones.
Keys = tuple[np.uint32 | jax.Array, np.uint32 | jax.Array]

# Independent streams of one seed. The numbers are part of the sketch format: never renumber.
SIGN_STREAM = 1
ORDER_STREAM = 3
ROW_STREAM = 4
COLUMN_STREAM = 5


def mix(word: Word) -> Word:
    """Returns each 32-bit word mixed by two multiplications with xor-shifts around them.

    A bijection. With one multiplication the signs of row ^ column would not be independent
    (correlations of 47 standard errors; two multiplications reach the 5.4 expected by chance).
    Source: `lowbias32` by C. Wellons, https://nullprogram.com/blog/2018/07/31/ (public domain).
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def stream_keys(seed: int, stream: int) -> tuple[np.uint32, np.uint32]:
    """Returns the two 32-bit keys of one stream of a seed, 0 <= seed < 2 ** 63."""
    salt = np.uint64(stream * 0x9E3779B97F4A7C15 % 2**64)
    value = int(mix_64(mix_64(np.array([seed], np.uint64)) ^ salt)[0])
    return np.uint32(value % 2**32), np.uint32(value >> 32)


def counter_hash(counter: Word, keys: Keys) -> Word:
    """Returns 32 random bits for every counter: mix(mix(counter ^ key0) + key1).

    A bijection of the uint32 for each pair of keys: different counters never collide.
    """
    return mix(mix(counter ^ keys[0]) + keys[1])


def mix_64(word: np.ndarray) -> np.ndarray:
    """Returns each 64-bit word mixed; a bijection. NumPy only: JAX has no uint64 by default.

    Source: finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), Stafford's variant 13.
    """
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def hashed_order(count: int, seed: int) -> np.ndarray:
    """Returns a permutation of range(count < 2 ** 31): the argsort of a 64-bit counter hash.

    The hash is a bijection. So there are no ties and every sorting algorithm gives the same order.
    """
    key0, key1 = stream_keys(seed, ORDER_STREAM)
    counter = np.arange(count, dtype=np.uint64)
    key = np.uint64((int(key0) << 32) | int(key1))
    return np.argsort(mix_64(mix_64(counter ^ key) + key)).astype(np.int32)
