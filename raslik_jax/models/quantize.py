"""Frozen kernels in fewer bits: int8 per output channel, and packed 4-bit NormalFloat (nf4).

A quantized kernel takes the place of the plain kernel in the same nested dict. It is a NamedTuple
of arrays that all have the leading layer axes, so `jax.lax.scan` over stacked layers slices it like
any other leaf. All facts about a kernel follow from the shapes of its arrays, so no static value is
stored with them.

The linear layer multiplies through `matmul`. It rebuilds the kernel in the compute dtype inside the
layer, forward and again backward. The rebuilt kernel is never kept.

Memory in bytes per weight, n inputs: int8 1 + 4/n; nf4 0.5 + 4/64 = 0.5625; nf4 with double
quantization 0.5 + 1/64 + 4/(64 * 256) = 0.5159.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from raslik_jax.base.axes import Array, Tree
from raslik_jax.data.words import refused
from raslik_jax.models import products

FORMATS = ("int8", "nf4")

# QLoRA (Dettmers et al. 2023, arXiv:2305.14314), Appendix E: quantiles of a standard normal, made
# asymmetric so that zero is exact, scaled to [-1, 1]. bitsandbytes prints the same float32 values.
NF4_CODEBOOK = np.array(
    """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0""".split(),
    np.float32,
)
_NF4_BLOCK = 64
_SCALE_GROUP = 256


class Int8Kernel(NamedTuple):
    """A kernel as signed bytes with one scale per output channel.

    codes: [*layers, inputs, outputs] int8 in [-127, 127], so that -w has the negated codes of w.
    scale: [*layers, outputs] float32, largest absolute weight of the channel / 127.
    """

    codes: Any
    scale: Any


class GroupedScales(NamedTuple):
    """Scales of an nf4 kernel, themselves in eight bits (QLoRA's double quantization).

    codes: [*layers, groups, 256] int8: the scales minus `offset`, flat, zero-padded at the end.
    scale: [*layers, groups] float32, largest absolute value of the group / 127.
    offset: [*layers] float32, the layer's mean scale; without it the sign bit would be wasted.
    """

    codes: Any
    scale: Any
    offset: Any


class Nf4Kernel(NamedTuple):
    """A kernel as 4-bit codes, two to a byte, with one scale per block of inputs and output.

    packed: [*layers, inputs / 2, outputs] uint8. A block of 64 inputs is 32 rows: the high half of
      a byte is the code of input i of the block, the low half that of input i + 32, so that
      unpacking is a concatenation and not an interleaving.
    scale: [*layers, blocks, outputs] float32, the block's largest absolute weight, or
      GroupedScales of these.
    """

    packed: Any
    scale: Any


def is_quantized(kernel: object) -> bool:
    """Returns whether this is a quantized kernel. A tree walk stops at it as at a leaf."""
    return isinstance(kernel, Int8Kernel | Nf4Kernel)


def block_size(num_inputs: int) -> int:
    """Returns the number of inputs that share one nf4 scale: 64 as in QLoRA, if that divides.

    A toy width takes its largest power-of-two divisor, so that a block never runs over the edge.
    """
    block = min(_NF4_BLOCK, num_inputs & -num_inputs)
    if block < 2:
        raise refused("nf4_even", got=num_inputs)
    return block


def _round_to_int8(
    values: Float[Array, "*batch size"], axis: int
) -> tuple[jax.Array, Float[jax.Array, "*rest"]]:
    """Returns codes in [-127, 127] and the step over an axis: the largest value / 127."""
    step = jnp.max(jnp.abs(values), axis=axis) / 127
    codes = jnp.round(values / jnp.expand_dims(jnp.where(step == 0, 1, step), axis))
    # The division can land one rounding above 127 when the step is a denormal.
    return jnp.clip(codes, -127, 127).astype(jnp.int8), step


def quantize_int8(kernel: Float[Array, "*layers inputs outputs"]) -> Int8Kernel:
    """Returns the kernel as int8 with one scale per output channel; 0 for an all-zero one.

    scale_o = max_i |w_io| / 127; code_io = round(w_io / scale_o), ties to even. This is the weight
    side of LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339). Its outlier decomposition of the
    activations is left out: these stay in the compute dtype.
    """
    return Int8Kernel(*_round_to_int8(jnp.asarray(kernel, jnp.float32), -2))


def quantize_nf4(
    kernel: Float[Array, "*layers inputs outputs"], *, double_quant: bool
) -> Nf4Kernel:
    """Returns the kernel as packed 4-bit NormalFloat.

    scale_bo = max over block b of |w_io|. The code is that of the codebook level nearest to w_io /
    scale_bo. Blocks run along the inputs of one output channel. If 64 divides the inputs these are
    bitsandbytes' blocks, which run over the flat [outputs, inputs] weight. The order of the packed
    nibbles is our own. So is the format of eight-bit scales with `double_quant` (linear here, a
    dynamic exponent there). Source: arXiv:2305.14314, Sec. 3.
    """
    *layers, inputs, outputs = kernel.shape
    block = block_size(inputs)
    blocks = jnp.asarray(kernel, jnp.float32).reshape(*layers, inputs // block, block, outputs)
    scale = jnp.max(jnp.abs(blocks), axis=-2)
    unit = blocks / jnp.expand_dims(jnp.where(scale == 0, 1, scale), -2)
    # Counting the midpoints below a value is the index of its nearest level, without a 16-fold
    # array of distances; a value on a midpoint goes down, as in bitsandbytes.
    midpoints = (NF4_CODEBOOK[1:] + NF4_CODEBOOK[:-1]) / 2
    codes = functools.reduce(
        jnp.add, [(unit > midpoint).astype(jnp.uint8) for midpoint in midpoints]
    )
    high, low = jnp.split(codes, 2, axis=-2)
    packed = (high << 4 | low).reshape(*layers, inputs // 2, outputs)
    return Nf4Kernel(packed=packed, scale=_group_scales(scale) if double_quant else scale)


def _group_scales(scale: Float[Array, "*layers blocks outputs"]) -> GroupedScales:
    *layers, blocks, outputs = scale.shape
    flat = scale.reshape(*layers, blocks * outputs)
    offset = flat.mean(axis=-1)
    padding = -flat.shape[-1] % _SCALE_GROUP
    centered = jnp.pad(
        flat - jnp.expand_dims(offset, -1), [(0, 0)] * len(layers) + [(0, padding)]
    ).reshape(*layers, -1, _SCALE_GROUP)
    return GroupedScales(*_round_to_int8(centered, -1), offset)


def _ungroup_scales(
    grouped: GroupedScales, *, blocks: int, outputs: int
) -> Float[jax.Array, "*layers {blocks} {outputs}"]:
    *layers, _, _ = grouped.codes.shape
    centered = grouped.codes.astype(jnp.float32) * jnp.expand_dims(grouped.scale, -1)
    flat = centered.reshape(*layers, -1)[..., : blocks * outputs]
    return (flat + jnp.expand_dims(grouped.offset, -1)).reshape(*layers, blocks, outputs)


def dequantize(
    kernel: Array | Int8Kernel | Nf4Kernel, dtype: Any
) -> Float[jax.Array, "*layers inputs outputs"]:
    """Returns the kernel as an array: code * scale in float32, rounded once to `dtype`."""
    if isinstance(kernel, Int8Kernel):
        wide = kernel.codes.astype(jnp.float32) * jnp.expand_dims(kernel.scale, -2)
        return wide.astype(dtype)
    if not isinstance(kernel, Nf4Kernel):
        return products.read(jnp.asarray(kernel)).astype(dtype)
    *layers, inputs, outputs = kernel_shape(kernel)
    block = block_size(inputs)
    blocks = inputs // block
    scale = kernel.scale
    if isinstance(scale, GroupedScales):
        scale = _ungroup_scales(scale, blocks=blocks, outputs=outputs)
    bytes_ = kernel.packed.reshape(*layers, blocks, block // 2, outputs)
    codes = jnp.concatenate([bytes_ >> 4, bytes_ & 15], axis=-2)
    # Codes are below 16 by construction: the gather need not check its bounds.
    unit = jnp.asarray(NF4_CODEBOOK).at[codes].get(mode="promise_in_bounds")
    wide = unit * jnp.expand_dims(scale, -2)
    return wide.reshape(*layers, inputs, outputs).astype(dtype)


def kernel_shape(kernel: Array | Int8Kernel | Nf4Kernel) -> tuple[int, ...]:
    """Returns the shape [*layers, inputs, outputs] of the kernel that `dequantize` would give."""
    if isinstance(kernel, Nf4Kernel):
        *layers, half, outputs = kernel.packed.shape
        return (*layers, 2 * half, outputs)
    return tuple((kernel.codes if isinstance(kernel, Int8Kernel) else kernel).shape)


def matmul(
    inputs: Float[jax.Array, "L inputs"], kernel: Array | Int8Kernel | Nf4Kernel, dtype: Any = None
) -> Float[jax.Array, "L outputs"]:
    """Returns `inputs @ kernel` by `products`.

    A quantized kernel takes `dtype`, by default the dtype of the inputs.

    Its product is a checkpoint. The backward pass rebuilds the kernel from its codes. Otherwise a
    scan over layers would keep every rebuilt kernel.
    """
    if not is_quantized(kernel):
        return products.product(inputs, jnp.asarray(kernel))
    return _checkpointed_matmul(inputs, kernel, dtype or inputs.dtype)


@functools.partial(jax.checkpoint, static_argnums=2)
def _checkpointed_matmul(inputs: Any, kernel: Any, dtype: Any) -> Any:
    return products.product(inputs, dequantize(kernel, dtype))


def quantize_kernel(
    kernel: Float[Array, "*layers inputs outputs"], format: str, *, double_quant: bool
) -> Int8Kernel | Nf4Kernel:
    """Returns the kernel in one of FORMATS; double quantization is of nf4 only."""
    if format not in FORMATS:
        raise ValueError(f"a quantized base must be one of {FORMATS}, got {format=}")
    if format == "nf4":
        return quantize_nf4(kernel, double_quant=double_quant)
    if double_quant:
        raise ValueError(f"double quantization needs format=nf4, got {format!r}: leave it out")
    return quantize_int8(kernel)


def quantize_base(base: Tree, format: str, *, double_quant: bool) -> Tree:
    """Returns the base weights with every linear kernel of the layers quantized.

    Embeddings, norms, biases and the head are not quantized, as in QLoRA: they are read row by row
    or are small. The result can replace the base everywhere. Under `jax.eval_shape` it gives the
    memory of a model without making one (`num_bytes`).
    """

    def quantize(path: tuple[Any, ...], leaf: Any) -> Any:
        if is_quantized(leaf):
            raise refused("quantized_twice", name=jax.tree_util.keystr(path))
        if (path[0].key, path[-1].key) != ("layers", "kernel"):
            return leaf
        return quantize_kernel(leaf, format, double_quant=double_quant)

    return jax.tree_util.tree_map_with_path(quantize, base, is_leaf=is_quantized)


def shapes_of(base: Tree, format: str, *, double_quant: bool) -> Tree:
    """Returns the shapes of a base in one of FORMATS; "plain" leaves it unchanged."""
    if format == "plain":
        return base
    pack = functools.partial(
        quantize_base, format=format, double_quant=double_quant and format == "nf4"
    )
    return jax.eval_shape(pack, base)


def num_bytes(tree: Tree) -> int:
    """Returns the bytes that the arrays (or abstract arrays) of a tree take."""
    return sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )
