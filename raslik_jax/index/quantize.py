"""Compact rows: a fixed random rotation of the sketch, then 8 bits or one bit a coordinate.

A few coordinates of a real gradient's sketch carry most of its mass. Eight bits would spend their
range on them. The angle estimate of sign bits would be wrong (slope 0.72). A random sign flip and a
Walsh-Hadamard transform make the coordinates about Gaussian (slope 0.999, int8's error 3.5 times
smaller). The rotation is orthogonal, so inner products and lengths stay.

Every step adds, multiplies or rounds IEEE floats in a fixed order. The same rows give the same
bytes on every machine. Every step is odd: the row -x gives the stored -x.
"""

import numpy as np
from jaxtyping import Float, Float32, Int8, UInt8

INT8_LEVELS = 127
_ROWS_AT_ONCE = 16  # 4 MiB of float32 at K = 65,536: the transform stays in the cache


def rotated_size(size: int) -> int:
    """Returns W, the padded row size: a power of two, at least 64 for whole words of signs."""
    return max(64, 1 << (size - 1).bit_length())


def key_signs(count: int, *, seed: int, stream: int = 0) -> Float32[np.ndarray, " W"]:
    """Returns `count` signs +1 or -1: a counter hash of (seed, stream, index).

    splitmix64 (Steele, Lea, Flood 2014) uses integers only. No version of NumPy or JAX changes it.
    """
    with np.errstate(over="ignore"):
        word = np.arange(count, dtype=np.uint64) + np.uint64(1)
        word *= np.uint64(0x9E3779B97F4A7C15)
        word += np.uint64((seed * 0xD1342543DE82EF95 + stream * 0x2545F4914F6CDD1D) % 2**64)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return np.where(word >> np.uint64(63), -1.0, 1.0).astype(np.float32)


def _hadamard_columns(columns_WC: np.ndarray) -> None:
    """The unnormalized Walsh-Hadamard transform along axis 0, in place."""
    size, count = columns_WC.shape
    half = 1
    scratch = np.empty(columns_WC.size // 2, columns_WC.dtype)
    while half < size:
        pairs = columns_WC.reshape(size // (2 * half), 2, half * count)
        upper, lower = pairs[:, 0], pairs[:, 1]
        kept = scratch.reshape(upper.shape)
        np.subtract(upper, lower, out=kept)
        np.add(upper, lower, out=upper)
        lower[...] = kept
        half *= 2


def rotate(rows_CK: Float[np.ndarray, "C K"], *, seed: int) -> Float[np.ndarray, "C W"]:
    """Returns H D x / sqrt(W) of each row: random sign flip, then Walsh-Hadamard transform.

    Rows are float32 or float64; zero coordinates are appended up to W.
    """
    count, size = rows_CK.shape
    width = rotated_size(size)
    signs_K = key_signs(width, seed=seed)[:size].astype(rows_CK.dtype)
    rotated_CW = np.empty((count, width), rows_CK.dtype)
    for start in range(0, count, _ROWS_AT_ONCE):
        part = rows_CK[start : start + _ROWS_AT_ONCE]
        # As columns, so that every addition of the transform runs over contiguous memory.
        columns = np.zeros((width, len(part)), rows_CK.dtype)
        columns[:size] = (part * signs_K).T
        _hadamard_columns(columns)
        rotated_CW[start : start + len(part)] = columns.T
    rotated_CW *= rows_CK.dtype.type(width**-0.5)
    return rotated_CW


def unrotate(
    rows_CW: Float[np.ndarray, "C W"], *, size: int, seed: int
) -> Float[np.ndarray, "C K"]:
    """Returns the rows whose rotation is `rows_CW`: the transform is its own inverse."""
    width = rows_CW.shape[1]
    back_CW = np.empty_like(rows_CW)
    for start in range(0, len(rows_CW), _ROWS_AT_ONCE):
        columns = np.ascontiguousarray(rows_CW[start : start + _ROWS_AT_ONCE].T)
        _hadamard_columns(columns)
        back_CW[start : start + _ROWS_AT_ONCE] = columns.T
    signs_W = key_signs(width, seed=seed).astype(rows_CW.dtype)
    return (back_CW * (signs_W * rows_CW.dtype.type(width**-0.5)))[:, :size]


def quantize_int8(
    rotated_CW: Float32[np.ndarray, "C W"],
) -> tuple[Int8[np.ndarray, "C W"], Float32[np.ndarray, " C"]]:
    """Returns round(x / scale) and scale = max |x| / 127 of each row; a zero row has scale 0."""
    scale_C = np.abs(rotated_CW).max(axis=1) / np.float32(INT8_LEVELS)
    divisor_C = np.where(scale_C > 0, scale_C, np.float32(1))
    return np.rint(rotated_CW / divisor_C[:, None]).astype(np.int8), scale_C


def pack_signs(
    rotated_CW: Float32[np.ndarray, "C W"], *, seed: int
) -> UInt8[np.ndarray, "C bytes"]:
    """Returns a bit a coordinate, set if it is positive; bit b of byte i is coordinate 8 i + b.

    A zero takes a sign of the key times the sign of the row's first nonzero coordinate. The row -x
    then has every bit flipped. The bits of a zero row (length 0) mean nothing.
    """
    is_positive_CW = rotated_CW > 0
    is_zero_CW = rotated_CW == 0
    if is_zero_CW.any():
        first_C = np.argmax(~is_zero_CW, axis=1)
        lead_C = np.where(np.take_along_axis(rotated_CW, first_C[:, None], axis=1)[:, 0] < 0, -1, 1)
        key_W = key_signs(rotated_CW.shape[1], seed=seed, stream=1)
        is_positive_CW = np.where(is_zero_CW, lead_C[:, None] * key_W > 0, is_positive_CW)
    return np.packbits(is_positive_CW, axis=1, bitorder="little")


def unpack_signs(packed: UInt8[np.ndarray, "C bytes"]) -> Float32[np.ndarray, "C W"]:
    """Returns the rows of packed signs as unit vectors: +1 or -1 over sqrt(W)."""
    bits_CW = np.unpackbits(packed, axis=1, bitorder="little")
    scale = np.float32(bits_CW.shape[1] ** -0.5)
    return np.where(bits_CW, scale, -scale)


def int8_error(scale_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns the standard error of each row's plain score from 8 bits: scale / sqrt(12).

    A coordinate's rounding error is uniform within half a step and the query is a unit vector. The
    error is about 4e-5 at W = 65,536. For comparison bfloat16 rows have about 1.6e-3 / sqrt(K).
    """
    return scale_N / np.sqrt(12)


def sign_error(score_N: Float[np.ndarray, " N"], *, size: int) -> Float[np.ndarray, " N"]:
    """Returns the standard error of a cosine that was estimated from signs of K coordinates.

    It is pi sin(theta) sqrt(p (1 - p) / K) with p = theta / pi. Two bits of Gaussian coordinates
    differ with probability p (Goemans and Williamson 1995, Lemma 3.2; Charikar 2002). The estimate
    is cos(pi h / W). The error is 0.0061 at right angles and K = 65,536.

    It is an upper bound if K is no power of two: W bits of K coordinates depend on each other. At K
    = W / 2 + 1 they are hardly more than K bits twice. Above that the true error is lower.

    This error is against the cosine of the gradients and includes the sketch's own 1 / sqrt(K).
    Against the cosine of the sketches it is sqrt(1 - 4 / pi^2) = 0.77 of it at right angles. For a
    mean over queries both are upper bounds.
    """
    angle_N = np.arccos(np.clip(np.asarray(score_N, np.float64), -1, 1))
    share_N = angle_N / np.pi
    return np.pi * np.sin(angle_N) * np.sqrt(share_N * (1 - share_N) / size)
