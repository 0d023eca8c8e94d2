"""The inner loops of the sketch: batches of flat gradients in, batches of sketches out.

Each function takes gradients_BP and returns sketch_BK in float32, with no matrix of signs stored
anywhere. `projections` chooses among them; nothing here validates.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from raslik_jax.influence import hashing

# The dense signs come in blocks of 32 * SIGN_GROUP rows (see `sign_words`). Part of the sketch
# format, like the streams of `hashing`: another value is another projection.
SIGN_GROUP = 64
ROWS_PER_BLOCK = 32 * SIGN_GROUP

_UNROLLED_SLOTS = 8
_DENSE_COLUMNS = 1024


def binned_sums(
    table_MK: Int[Array, "M K"], gradients_BP: Float[Array, "B P"]
) -> Float[Array, "B K"]:
    """Returns the signed sum of each bin, by gathering.

    x_j = sum over slots s of sign * g[index], with (sign, index) packed in table_MK[s, j]: a
    non-negative entry e stands for +g[e], a negative one for -g[~e], and an index of P or more
    for a zero of the padding. One slot of all bins is gathered at a time, so memory beyond the
    gradients is one [B, K] array, and no float is added by an atomic: the same bits every time.
    """
    num_params = gradients_BP.shape[1]

    def add_slot(sums_BK: jax.Array, entry_K: jax.Array) -> jax.Array:
        index_K = entry_K ^ (entry_K >> 31)
        # "clip" keeps the gather in bounds for the padding, whose value is then masked away.
        value_BK = jnp.take(gradients_BP, index_K, axis=1, mode="clip").astype(jnp.float32)
        value_BK = jnp.where(index_K < num_params, value_BK, 0.0)
        return sums_BK + jnp.where(entry_K < 0, -value_BK, value_BK)

    sums_BK = jnp.zeros((gradients_BP.shape[0], table_MK.shape[1]), jnp.float32)
    if table_MK.shape[0] <= _UNROLLED_SLOTS:
        for entry_K in table_MK:
            sums_BK = add_slot(sums_BK, entry_K)
        return sums_BK
    return jax.lax.scan(lambda sums, entry: (add_slot(sums, entry), None), sums_BK, table_MK)[0]


def hashed_sums(gradients_BP: Float[Array, "B P"], *, size: int, seed: int) -> Float[Array, "B K"]:
    """Returns the signed sum of each hashed bin; signs and bins are hashed from the coordinate.

    The scatter runs over rows of the transposed gradients, B contiguous floats for each hashed
    bin. On a GPU it adds by atomics, so the last bits may differ from run to run unless XLA is
    started with --xla_gpu_deterministic_ops.
    """
    counter_P = jnp.arange(gradients_BP.shape[1], dtype=jnp.uint32)
    sign_P = hashing.counter_hash(counter_P, hashing.stream_keys(seed, hashing.SIGN_STREAM))
    bin_P = hashing.counter_hash(counter_P, hashing.stream_keys(seed, hashing.BIN_STREAM))
    bin_P = (bin_P % np.uint32(size)).astype(jnp.int32)
    negative_P1 = (sign_P >> np.uint32(31))[:, None] == np.uint32(1)
    gradients_PB = gradients_BP.astype(jnp.float32).T
    signed_PB = jnp.where(negative_P1, -gradients_PB, gradients_PB)
    return jax.ops.segment_sum(signed_PB, bin_P, num_segments=size).T


def sign_words(row_G: Int[Array, " G"], column_C: Int[Array, " C"], *, seed: int) -> Array:
    """Returns uint32 [G, C]: each word holds the signs of 32 rows in one column.

    Row p of the sign matrix belongs to block b = p // 2048 and, in it, to bit t = (p % 2048) // 64
    of the words of word-row 64 * b + p % 64. So one hash with two multiplications in the inner
    loop makes 32 signs, and a kernel that walks down p keeps the words in registers and shifts.

    Args:
      row_G: uint32 word-rows.
      column_C: uint32 columns, 0 <= column < K.
    """
    row_word_G = hashing.counter_hash(row_G, hashing.stream_keys(seed, hashing.ROW_STREAM))
    column_word_C = hashing.counter_hash(column_C, hashing.stream_keys(seed, hashing.COLUMN_STREAM))
    return hashing.mix(row_word_G[:, None] ^ column_word_C[None, :])


def block_signs(
    block: Int[Array, ""], column_C: Int[Array, " C"], *, seed: int, dtype: jnp.dtype
) -> Float[Array, "2048 C"]:
    """Returns the +1 / -1 signs of rows 2048 * block ... of the dense matrix at some columns."""
    row_G = block.astype(jnp.uint32) * np.uint32(SIGN_GROUP) + jnp.arange(
        SIGN_GROUP, dtype=jnp.uint32
    )
    word_GC = sign_words(row_G, column_C, seed=seed)
    bit_T11 = jnp.arange(32, dtype=jnp.uint32)[:, None, None]
    bit_TGC = (word_GC[None] >> bit_T11) & np.uint32(1)
    sign_TGC = jnp.where(bit_TGC == np.uint32(0), 1.0, -1.0).astype(dtype)
    return sign_TGC.reshape(ROWS_PER_BLOCK, column_C.shape[0])


def dense_sums(
    gradients_BP: Float[Array, "B P"], *, size: int, seed: int, operand: str
) -> Float[Array, "B K"]:
    """Returns gradients_BP @ signs_PK in float32, the signs made block by block by XLA.

    The twin of the Pallas kernel: the same signs, the same products, sums in another order.

    Args:
      operand: "float32", or "bfloat16" to round the gradient to it before the product (the
        signs are exact in both; sums are float32 in both).
    """
    batch, num_params = gradients_BP.shape
    num_blocks = -(-num_params // ROWS_PER_BLOCK)
    dtype = jnp.dtype(operand)
    padding = num_blocks * ROWS_PER_BLOCK - num_params
    padded_BP = jnp.pad(gradients_BP, ((0, 0), (0, padding))).astype(dtype)
    blocks_NBR = padded_BP.reshape(batch, num_blocks, ROWS_PER_BLOCK).swapaxes(0, 1)
    columns = min(size, _DENSE_COLUMNS)
    num_column_blocks = -(-size // columns)

    def sum_columns(first_column: jax.Array) -> jax.Array:
        column_C = first_column + jnp.arange(columns, dtype=jnp.uint32)

        def add_block(sums_BC: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple:
            block, gradients_BR = item
            signs_RC = block_signs(block, column_C, seed=seed, dtype=dtype)
            product_BC = jax.lax.dot(
                gradients_BR,
                signs_RC,
                precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            return sums_BC + product_BC, None

        start_BC = jnp.zeros((batch, columns), jnp.float32)
        return jax.lax.scan(
            add_block, start_BC, (jnp.arange(num_blocks, dtype=jnp.int32), blocks_NBR)
        )[0]

    first_columns = np.arange(num_column_blocks, dtype=np.uint32) * np.uint32(columns)
    sums_CBC = jax.lax.map(sum_columns, jnp.asarray(first_columns))
    return sums_CBC.swapaxes(0, 1).reshape(batch, num_column_blocks * columns)[:, :size]
