"""A chunk's rows between the sketches they are and the arrays they are stored as. NumPy."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from raslik_jax.index.format import DTYPES, Manifest

# Chunk sums are integers in units of 2^-40: integer addition is associative, so the mean of a store
# is the same bits whatever the chunks and their order.
_SUM_SCALE = float(2**40)
_LOW_BITS = 20
_UNIT_TOLERANCE = 1e-3


def check_rows(
    rows_CK: Float32[np.ndarray, "C K"], norms_C: Float[np.ndarray, " C"], ids: tuple[str, ...]
) -> None:
    """Raises a ValueError unless rows are unit vectors, or zero if the norm is."""
    lengths_C = row_lengths(rows_CK)
    expected_C = np.where(norms_C > 0, 1.0, 0.0)
    is_wrong_C = ~(np.abs(lengths_C - expected_C) <= _UNIT_TOLERANCE) | ~np.isfinite(norms_C)
    if is_wrong_C.any():
        first = int(np.argmax(is_wrong_C))
        raise ValueError(
            "rows must be unit vectors with a positive norm, or zero with norm 0, "
            f"{int(is_wrong_C.sum())} are not. The first is {ids[first]!r} of length "
            f"{lengths_C[first]} and norm {norms_C[first]}: look for gradients that are not "
            "finite"
        )


def encode_chunk(
    manifest: Manifest, rows_CK: Float32[np.ndarray, "C K"], norms_C: Float[np.ndarray, " C"]
) -> dict[str, np.ndarray]:
    """Returns the arrays of one chunk, padded to whole chunks."""
    stored_CK = rows_CK.astype(DTYPES[manifest.dtype])
    arrays = {
        "rows": stored_CK,
        "norms": np.asarray(norms_C, np.float32),
        "lengths": row_lengths(stored_CK).astype(np.float32),
        "sums": fixed_point_sum(stored_CK)[None],
    }
    padded = {}
    for name, (shape, dtype) in manifest.arrays.items():
        padded[name] = np.zeros(shape, dtype)
        padded[name][: len(arrays[name])] = arrays[name]
    return padded


def row_lengths(rows_CK: Float[np.ndarray, "C K"]) -> Float64[np.ndarray, " C"]:
    """Returns the length of each row, summed in float64."""
    lengths_C = np.empty(len(rows_CK), np.float64)
    for start in range(0, len(rows_CK), 16):  # a few rows at a time stay in the cache
        part = rows_CK[start : start + 16].astype(np.float64)
        lengths_C[start : start + 16] = np.sqrt(np.einsum("ck,ck->c", part, part))
    return lengths_C


def fixed_point_sum(rows_CK: Float[np.ndarray, "C K"]) -> Int64[np.ndarray, " K"]:
    """Returns the sum of rows in units of 2^-40, an exact integer."""
    total_K = np.zeros(rows_CK.shape[1], np.int64)
    for start in range(0, len(rows_CK), 16):
        part = rows_CK[start : start + 16].astype(np.float64)
        total_K += np.rint(part * _SUM_SCALE).astype(np.int64).sum(axis=0)
    return total_K


def mean_of_sums(sums: Iterable[Int64[np.ndarray, " K"]], count: int) -> Float64[np.ndarray, " K"]:
    """Returns the mean of `count` rows from the sums of one or more chunks, rounded once."""
    # Two words: one would overflow at 8 million rows that share a coordinate.
    mask = (1 << _LOW_BITS) - 1
    high_K = low_K = np.zeros((), np.int64)
    for sum_K in sums:
        high_K, low_K = high_K + (sum_K >> _LOW_BITS), low_K + (sum_K & mask)
    high_K = high_K + (low_K >> _LOW_BITS)
    total_K = high_K.astype(np.float64) * 2.0**_LOW_BITS + (low_K & mask).astype(np.float64)
    return total_K / _SUM_SCALE / count
