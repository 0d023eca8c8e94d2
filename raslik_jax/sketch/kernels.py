"""The inner loops of the sketch: gradients_BP in, sketch_BK in float32 out, unchecked.

No matrix of signs is stored anywhere. Pallas kernels (Triton route) run on NVIDIA GPUs. They have
no transpose. Their XLA twins compute the same and run everywhere. `dense_sums` and `binned_sums`
choose by the platform that they are compiled for.

`keys` are two pairs of `hashing.stream_keys`, of rows and columns. They are
NumPy scalars, which compile to constants, or traced ones. The dense kernel takes no traced ones.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt

from raslik_jax.parallel import meshes
from raslik_jax.sketch import hashing

KeyPairs = tuple[hashing.Keys, hashing.Keys]

# The dense signs come in blocks of 32 * SIGN_GROUP rows (see `sign_words`). Part of the sketch
# format, like the streams of `hashing`: another value is another projection.
SIGN_GROUP = 64
ROWS_PER_BLOCK = 32 * SIGN_GROUP

_UNROLLED_SLOTS = 8
# A block of signs in the XLA twin is 2048 x 1024 floats: 8 MiB, about a CPU's cache.
_TWIN_COLUMNS = 1024


def binned_sums(
    table_MK: Int[Array, "M K"], gradients_BP: Float[Array, "B P"]
) -> Float[Array, "B K"]:
    """Returns the signed sum of each bin by the layout that suits the platform.

    x_j = sum over slots s of sign * g[index] with (sign, index) packed in e = table_MK[s, j]. An
    entry e >= 0 is +g[e] and e < 0 is -g[~e]. An index of P is a zero of padding. Values are
    gathered and never scattered: no atomic adds a float, so the bits are the same every time.

    On a CPU a row of gradients is gathered by itself, because it fits the cache. On a GPU the
    gradients are transposed first. Each entry of the table then reads B contiguous floats.
    """
    return jax.lax.platform_dependent(
        table_MK, gradients_BP, cpu=binned_sums_by_row, default=binned_sums_by_column
    )


def _gather(gradients_BP: jax.Array, entry: jax.Array, *, axis: int) -> jax.Array:
    """Returns the signed coordinates of packed entries in place of an axis; zeros for padding."""
    index, shape = entry ^ (entry >> 31), (1, -1) if axis else (*entry.shape, 1)
    # "clip" keeps the gather in bounds for the padding, whose value is then masked away.
    value = jnp.take(gradients_BP, index, axis=axis, mode="clip").astype(jnp.float32)
    value = jnp.where(index.reshape(shape) < gradients_BP.shape[axis], value, 0.0)
    return jnp.where(entry.reshape(shape) < 0, -value, value)


def binned_sums_by_row(
    table_MK: Int[Array, "M K"], gradients_BP: Float[Array, "B P"]
) -> Float[Array, "B K"]:
    """Returns `binned_sums` slot by slot: it needs a few [B, K] arrays beyond the gradients."""

    def add_slot(sums_BK: jax.Array, entry_K: jax.Array) -> tuple[jax.Array, None]:
        return sums_BK + _gather(gradients_BP, entry_K, axis=1), None

    sums_BK = jnp.zeros((gradients_BP.shape[0], table_MK.shape[1]), jnp.float32)
    if table_MK.shape[0] <= _UNROLLED_SLOTS:
        for entry_K in table_MK:
            sums_BK, _ = add_slot(sums_BK, entry_K)
        return sums_BK
    return jax.lax.scan(add_slot, sums_BK, table_MK)[0]


def binned_sums_by_column(
    table_MK: Int[Array, "M K"], gradients_BP: Float[Array, "B P"]
) -> Float[Array, "B K"]:
    """Returns `binned_sums` from transposed rows, by Pallas on an NVIDIA GPU, else by XLA."""

    def by_xla(table_MK: jax.Array, gradients_BP: jax.Array) -> jax.Array:
        return jnp.sum(_gather(gradients_BP.T, table_MK, axis=0), axis=0).T

    return meshes.by_kernel(table_MK, gradients_BP, kernel=binned_sums_pallas, twin=by_xla)


# Most examples, coordinates and bins of the tiles of `binned_sums_pallas`, and slots at a time.
_EXAMPLES, _COORDINATES, _BINS, _SLOTS = 64, 128, 16, 4


def binned_sums_pallas(
    table_MK: Int[Array, "M K"], gradients_BP: Float[Array, "B P"], *, interpret: bool = False
) -> Float[Array, "B K"]:
    """Returns `binned_sums` by two Pallas kernels: rows are transposed, then entries are summed.

    XLA fuses both into one kernel, which reads single floats of each row: 18 ms in place of 2 for
    64 gradients of OLMo-2-7B on an H100. A sum adds the slots in order, as `binned_sums_by_row`
    does. `interpret` runs it as plain JAX for tests on a CPU.
    """
    (batch, num_params), (slots, size) = gradients_BP.shape, table_MK.shape
    # Whole tiles: rows of zeros, and entries of padding.
    table_MK = jnp.pad(
        table_MK,
        ((0, -slots % _SLOTS), (0, -size % _BINS)),
        constant_values=num_params,
    )
    # A few rows are padded to a few: a transposed array of P x 64 would be large.
    examples = min(max(pl.next_power_of_2(batch), 16), _EXAMPLES)
    parts, columns = pl.cdiv(batch, examples), pl.cdiv(num_params, _COORDINATES)

    def transpose(gradients_ref, transposed_ref) -> None:  # type: ignore[no-untyped-def]
        row, column = pl.program_id(1) * examples, pl.program_id(0) * _COORDINATES
        is_row = row + jnp.arange(examples) < batch
        is_column = column + jnp.arange(_COORDINATES) < num_params
        transposed_ref[:, :] = plgpu.load(
            gradients_ref.at[pl.ds(row, examples), pl.ds(column, _COORDINATES)],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        ).T

    def add(table_ref, transposed_ref, sums_ref) -> None:  # type: ignore[no-untyped-def]
        rows = pl.ds(pl.program_id(1) * examples, examples)

        def add_slots(step: jax.Array, sums_JB: jax.Array) -> jax.Array:
            for slot in range(_SLOTS):
                entry_J = table_ref[step * _SLOTS + slot, :]
                index_J = entry_J ^ (entry_J >> 31)
                is_entry_J = index_J < num_params
                value_JB = transposed_ref[jnp.where(is_entry_J, index_J, 0), rows]
                value_JB = jnp.where(is_entry_J[:, None], value_JB, 0.0)
                sums_JB += jnp.where(entry_J[:, None] < 0, -value_JB, value_JB)
            return sums_JB

        start_JB = jnp.zeros((_BINS, examples), jnp.float32)
        sums_ref[:, :] = jax.lax.fori_loop(0, len(table_MK) // _SLOTS, add_slots, start_JB)

    transposed_PB = pl.pallas_call(
        transpose,
        grid=(columns, parts),
        out_specs=pl.BlockSpec((_COORDINATES, examples), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((columns * _COORDINATES, parts * examples), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="binned_transpose",
    )(gradients_BP.astype(jnp.float32))
    sums_KB = pl.pallas_call(
        add,
        grid=(table_MK.shape[1] // _BINS, parts),
        in_specs=[
            pl.BlockSpec((len(table_MK), _BINS), lambda i, j: (0, i)),
            pl.BlockSpec(transposed_PB.shape, lambda i, j: (0, 0)),
        ],
        out_specs=pl.BlockSpec((_BINS, examples), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((table_MK.shape[1], parts * examples), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="binned_sums",
    )(table_MK, transposed_PB)
    return sums_KB.T[:batch, :size]


def sign_words(
    row_G: UInt[Array, " G"], column_C: UInt[Array, " C"], *, keys: KeyPairs
) -> UInt[Array, "C G"]:
    """Returns uint32 words with the signs of 32 rows of the dense matrix in one column.

    Row p of the sign matrix is in block b = p // 2048. It is bit t = (p % 2048) // 64 of the words
    of word-row 64 * b + p % 64. One hash makes 32 signs. A kernel that walks down p keeps the words
    in registers.
    """
    row_word_G = hashing.counter_hash(row_G, keys[0])
    column_word_C = hashing.counter_hash(column_C, keys[1])
    return hashing.mix(column_word_C[:, None] ^ row_word_G[None, :])


def signs_of(bit: UInt[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns +1 where the lowest bit is 0, -1 where it is 1."""
    is_positive = (bit & np.uint32(1)) == np.uint32(0)
    return jnp.where(is_positive, np.array(1, dtype), np.array(-1, dtype))


def block_signs(
    block: Int[Array, ""], column_C: UInt[Array, " C"], *, keys: KeyPairs, dtype: DTypeLike
) -> Float[Array, "2048 C"]:
    """Returns the +1 / -1 signs of rows 2048 * block ... of the dense matrix at some columns."""
    row_G = block.astype(jnp.uint32) * np.uint32(SIGN_GROUP) + _arange(SIGN_GROUP)
    bit_TGC = sign_words(row_G, column_C, keys=keys).T[None] >> _arange(32)[:, None, None]
    return signs_of(bit_TGC, dtype).reshape(ROWS_PER_BLOCK, column_C.shape[0])


def dense_sums(
    gradients_BP: Float[Array, "B P"], *, size: int, keys: KeyPairs, operand: str
) -> Float[Array, "B K"]:
    """Returns gradients_BP @ signs_PK in float32: by Pallas on an NVIDIA GPU, else by XLA."""
    by_pallas, by_xla = (
        functools.partial(sums, size=size, keys=keys, operand=operand)
        for sums in (dense_sums_pallas, dense_sums_xla)
    )
    return meshes.by_kernel(gradients_BP, kernel=by_pallas, twin=by_xla)


def dense_sums_xla(
    gradients_BP: Float[Array, "B P"], *, size: int, keys: KeyPairs, operand: str
) -> Float[Array, "B K"]:
    """Returns `dense_sums` with signs that XLA makes block by block."""
    batch = gradients_BP.shape[0]
    padded_BP = _as_operand(gradients_BP, operand)
    num_blocks = padded_BP.shape[1] // ROWS_PER_BLOCK
    blocks_NBR = padded_BP.reshape(batch, num_blocks, ROWS_PER_BLOCK).swapaxes(0, 1)
    columns = min(size, _TWIN_COLUMNS)

    def sum_columns(first_column: jax.Array) -> jax.Array:
        column_C = first_column + _arange(columns)

        def add_block(sums_BC: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple:
            block, gradients_BR = item
            signs_RC = block_signs(block, column_C, keys=keys, dtype=padded_BP.dtype)
            product_BC = jax.lax.dot(
                gradients_BR,
                signs_RC,
                # Without it a GPU would round float32 operands to TF32.
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            return sums_BC + product_BC, None

        start_BC = jnp.zeros((batch, columns), jnp.float32)
        block_N = jnp.arange(num_blocks, dtype=jnp.int32)
        return jax.lax.scan(add_block, start_BC, (block_N, blocks_NBR))[0]

    first_columns = np.arange(0, size, columns, dtype=np.uint32)
    sums_NBC = jax.lax.map(sum_columns, jnp.asarray(first_columns))
    return sums_NBC.swapaxes(0, 1).reshape(batch, -1)[:, :size]


class DenseBlocks(NamedTuple):
    """Tile of the dense Pallas kernel: columns and examples of a program, powers of two from 16.

    `splits` programs share the rows of one tile; their sums are added after.
    """

    columns: int
    examples: int
    splits: int
    warps: int


def dense_blocks(batch: int, num_params: int, size: int) -> DenseBlocks:
    """Returns the tile for a shape.

    The cost of the signs does not depend on the number of examples. A program therefore takes as
    many examples as its registers hold, up to 256. With a small K there are fewer than four
    programs for each of a GPU's 132 multiprocessors. The rows are then split too.
    """
    examples = min(max(pl.next_power_of_2(batch), 16), 256)
    programs = pl.cdiv(size, 128) * pl.cdiv(batch, examples)
    splits = max(1, min(512 // programs, pl.cdiv(num_params, 4 * ROWS_PER_BLOCK)))
    return DenseBlocks(128, examples, splits, warps=4 if examples <= 128 else 8)


def dense_sums_pallas(
    gradients_BP: Float[Array, "B P"],
    *,
    size: int,
    keys: KeyPairs,
    operand: str,
    blocks: DenseBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B K"]:
    """Returns `dense_sums` by a Pallas kernel that keeps signs in registers.

    A program owns a tile of (columns, examples) and walks down P. Every 2,048 rows it hashes one
    word for each column and each of 64 rows. Each product takes another bit of the words. The
    signs are the left operand, which tensor cores of Hopper take from registers. A float32 operand
    is three bfloat16 operands (`_bfloat16_parts`), at a third of the speed. `interpret` runs it as
    plain JAX for tests on a CPU.
    """
    batch = len(gradients_BP)
    # Next to each other and not in one sum: a tensor core drops the lowest bits of what it adds to
    # a large sum, and so the smallest part.
    parts = _bfloat16_parts(_as_operand(gradients_BP, operand))
    examples_BP = jnp.concatenate(parts)
    num_examples = len(examples_BP)
    blocks = blocks or dense_blocks(num_examples, gradients_BP.shape[1], size)
    tiles = pl.cdiv(size, blocks.columns), pl.cdiv(num_examples, blocks.examples)
    padded_BP = jnp.pad(examples_BP, ((0, tiles[1] * blocks.examples - num_examples), (0, 0)))
    padded_batch, padded_params = padded_BP.shape
    num_blocks = padded_params // ROWS_PER_BLOCK
    blocks_per_split = pl.cdiv(num_blocks, blocks.splits)

    def kernel(gradients_ref, sums_ref) -> None:  # type: ignore[no-untyped-def]
        column_0 = (pl.program_id(0) * blocks.columns).astype(jnp.uint32)
        column_C = column_0 + _arange(blocks.columns)
        block_0 = pl.program_id(2) * blocks_per_split

        def add_block(step: jax.Array, sums_CB: jax.Array) -> jax.Array:
            block = block_0 + step
            row_G = block.astype(jnp.uint32) * np.uint32(SIGN_GROUP) + _arange(SIGN_GROUP)
            word_CG = sign_words(row_G, column_C, keys=keys)

            def add_tile(bit: jax.Array, sums_CB: jax.Array) -> jax.Array:
                start = block * ROWS_PER_BLOCK + bit * SIGN_GROUP
                # Triton tests one bit of every word: cheaper than words that are shifted on.
                product_CB: jax.Array = jax.lax.dot_general(
                    signs_of(word_CG >> bit.astype(jnp.uint32), jnp.bfloat16),
                    gradients_ref[:, pl.ds(start, SIGN_GROUP)],
                    (((1,), (1,)), ((), ())),
                    precision=jax.lax.Precision.DEFAULT,
                    preferred_element_type=jnp.float32,
                )
                return sums_CB + product_CB

            return jax.lax.fori_loop(0, 32, add_tile, sums_CB)

        steps = jnp.minimum(blocks_per_split, num_blocks - block_0)
        start_CB = jnp.zeros((blocks.columns, blocks.examples), jnp.float32)
        sums_ref[:, :] = jax.lax.fori_loop(0, steps, add_block, start_CB)

    sums_shape = blocks.splits, tiles[0] * blocks.columns, padded_batch
    sums_SKB = pl.pallas_call(
        kernel,
        grid=(*tiles, blocks.splits),
        in_specs=[pl.BlockSpec((blocks.examples, padded_params), lambda i, j, s: (j, 0))],
        out_specs=pl.BlockSpec((None, blocks.columns, blocks.examples), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct(sums_shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=3),
        interpret=interpret,
        name="dense_rademacher",
    )(padded_BP)
    sums_KB = jnp.sum(sums_SKB, axis=0)[:size, :num_examples]
    return jnp.sum(sums_KB.T.reshape(len(parts), batch, size), axis=0)


def _bfloat16_parts(value: jax.Array) -> tuple[jax.Array, ...]:
    """Returns bfloat16 arrays that add up to a value exactly: one, or three for float32.

    They are cut by masking bits. XLA may drop a rounding to bfloat16 and back but keeps a mask.
    """
    if value.dtype == jnp.bfloat16:
        return (value,)
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & np.uint32(0xFFFF0000)
        top = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(top.astype(jnp.bfloat16))
        value = value - top
    return tuple(parts)


def _as_operand(gradients_BP: jax.Array, operand: str) -> jax.Array:
    """Returns the gradients in the operand's dtype with zeros up to whole blocks."""
    rounded_BP = gradients_BP.astype(jnp.float32)
    if operand == "bfloat16":
        # reduce_precision is kept where XLA would drop a cast down that is followed by one up.
        rounded_BP = jax.lax.reduce_precision(rounded_BP, exponent_bits=8, mantissa_bits=7)
        rounded_BP = rounded_BP.astype(jnp.bfloat16)
    return jnp.pad(rounded_BP, ((0, 0), (0, -rounded_BP.shape[1] % ROWS_PER_BLOCK)))


def _arange(count: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, (count,), 0)
