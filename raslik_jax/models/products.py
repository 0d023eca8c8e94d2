"""Products with the frozen weights, in the dtypes of both factors.

If the weights are narrower than their inputs, both factors of a product have the narrow dtype.
The sums are float32. A CPU with bfloat16 instructions computes such products at twice the rate of
float32 products. With bfloat16 sums XLA adds a pass for the rounding.

Narrow weights are stored as the integers of their bits. Integers have no gradient. On a CPU XLA
widens a whole bfloat16 array before it takes the kernel of one layer.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float

from raslik_jax.base.axes import Tree

_BITS = np.dtype(np.uint16)


class Dtypes(NamedTuple):
    """The dtypes of a base.

    Attributes:
      stream: dtype of hidden states, norms and biases.
      kernels: stored dtype of kernels and of the embedding.
    """

    stream: np.dtype
    kernels: np.dtype

    @classmethod
    def of(cls, dtype: Any) -> "Dtypes":
        """Returns the dtypes for one dtype or for a pair of stream and factors."""
        stream, operands = map(jnp.dtype, dtype if isinstance(dtype, tuple) else (dtype, dtype))
        if (stream, operands) == (jnp.float32, jnp.bfloat16):
            return cls(stream, _BITS)
        if stream != operands:
            must = "must be one dtype, or float32 and bfloat16"
            raise ValueError(f"the dtypes of a base {must}, got {stream} and {operands}")
        return cls(stream, operands)


def is_narrow(weights: Any) -> bool:
    """Returns whether weights are stored as bits; they may be split over a mesh."""
    return bool(jax.tree.leaves(weights)[0].dtype == _BITS)


def stored(values: Any, dtype: Any) -> Any:
    """Returns weights in the stored form of a dtype."""
    if dtype != _BITS:
        return values.astype(dtype, copy=False)
    return values.astype(ml_dtypes.bfloat16).view(_BITS)


def read(tree: Tree) -> Tree:
    """Returns a tree with weights in place of their bits."""
    bitcast = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.bfloat16)
    return jax.tree.map(lambda leaf: bitcast(leaf) if is_narrow(leaf) else leaf, tree)


def product(
    left_LI: Float[Array, "L I"], kernel: Float[Array, "rows columns"], axis: int = 0
) -> Float[Array, "L O"]:
    """Returns left @ kernel in the dtype of `left`; left @ kernel.T for axis 1.

    A narrower kernel has no gradient. The product rounds `left` to the dtype of the kernel. The
    backward pass rounds the cotangent.
    """
    narrow = left_LI.dtype != kernel.dtype
    return _narrow_product(left_LI, kernel, axis) if narrow else contract(left_LI, kernel, axis)


def contract(left: Any, kernel: Any, axis: int, **options: Any) -> Array:
    """Returns the product of two factors; the sum runs over this axis of the second."""
    return jax.lax.dot_general(left, kernel, (((1,), (axis,)), ((), ())), **options)


summed = functools.partial(contract, preferred_element_type=jnp.float32)


# The transpose of a product with float32 sums has a float32 cotangent. XLA would widen the kernel.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(left_LI: Any, kernel: Any, axis: int) -> Array:
    return summed(left_LI.astype(kernel.dtype), kernel, axis)


def _forward(left_LI: Any, kernel: Any, axis: int) -> tuple[Array, Any]:
    if kernel.perturbed:
        must = "a kernel of a narrower dtype than its input cannot be trained"
        raise ValueError(f"{must}: give it the dtype of the input")
    return _narrow_product(left_LI.value, kernel.value, axis), kernel.value


def _backward(axis: int, kernel: Any, of_output_LO: Any) -> tuple[Any, None]:
    if isinstance(of_output_LO, SymbolicZero):
        return None, None
    return summed(of_output_LO.astype(kernel.dtype), kernel, 1 - axis), None


_narrow_product.defvjp(_forward, _backward, symbolic_zeros=True)


def measure(*, inputs: int, outputs: int, dtype: Any) -> float:
    """Returns the operations a second of a product of rows with a kernel on the default device.

    The dtype is as of `Dtypes`.
    """
    most = 2e9 if jax.default_backend() == "cpu" else 2e12
    rows = int(min(8192, max(16, most // (2 * inputs * outputs))))
    stream, kernels = Dtypes.of(dtype)
    kernel = stored(jnp.ones((inputs, outputs)), kernels)

    def multiply(left_LI: Array, kernel: Array) -> Array:
        return product(left_LI, read(kernel))

    seconds = shortest(jax.jit(multiply), jnp.ones((rows, inputs), stream), kernel)
    return 2.0 * rows * inputs * outputs / seconds


def shortest(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of the fastest of five calls after compilation."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
