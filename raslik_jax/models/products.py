"""Products with the frozen weights, in the dtypes of both factors.

Where the weights are narrower than what they multiply, both factors enter the product as narrow as
they are, and sums are float32. A CPU that multiplies bfloat16 does so at about twice the rate of
float32, if it is asked for float32 sums: else XLA rounds them in a pass of its own.

Such weights are stored as integers of their bits, which have no gradient. Of a bfloat16 array XLA
takes no part on a CPU, such as the kernel of a layer, before it has widened the whole.
"""

import functools
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
      stream: of hidden states, norms and biases.
      kernels: of kernels and of the embedding, as they are stored.
    """

    stream: np.dtype
    kernels: np.dtype

    @classmethod
    def of(cls, dtype: Any) -> "Dtypes":
        """Returns those of one dtype, or of a pair: of the stream, and of what products take."""
        stream, operands = map(jnp.dtype, dtype if isinstance(dtype, tuple) else (dtype, dtype))
        if (stream, operands) == (jnp.float32, jnp.bfloat16):
            return cls(stream, _BITS)
        if stream != operands:
            must = "must be one dtype, or float32 and bfloat16"
            raise ValueError(f"the dtypes of a base {must}, got {stream} and {operands}")
        return cls(stream, operands)


def is_narrow(weights: Any) -> bool:
    """Says whether weights are stored as bits, also where they are split over a mesh."""
    return bool(jax.tree.leaves(weights)[0].dtype == _BITS)


def stored(values: Any, dtype: Any) -> Any:
    """Returns weights as an array of their tree has them."""
    if dtype != _BITS:
        return values.astype(dtype)
    return values.astype(ml_dtypes.bfloat16).view(_BITS)


def read(tree: Tree) -> Tree:
    """Returns a tree with weights in place of the integers of their bits."""
    bitcast = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.bfloat16)
    return jax.tree.map(lambda leaf: bitcast(leaf) if is_narrow(leaf) else leaf, tree)


def product(
    left_LI: Float[Array, "L I"], kernel: Float[Array, "rows columns"], axis: int = 0
) -> Float[Array, "L O"]:
    """Returns left @ kernel, or left @ kernel.T for axis 1, in the dtype of `left`.

    A narrower kernel, which has no gradient, rounds `left` to its dtype, and on the way back the
    cotangent.
    """
    narrow = left_LI.dtype != kernel.dtype
    return _narrow_product(left_LI, kernel, axis) if narrow else contract(left_LI, kernel, axis)


def contract(left: Any, kernel: Any, axis: int, **options: Any) -> Array:
    """Returns the product of two factors, summed over this axis of the second."""
    return jax.lax.dot_general(left, kernel, (((1,), (axis,)), ((), ())), **options)


summed = functools.partial(contract, preferred_element_type=jnp.float32)


# The transpose of a product with float32 sums would have the cotangent as a float32 factor, for
# which XLA widens the kernel.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(left_LI: Any, kernel: Any, axis: int) -> Array:
    return summed(left_LI.astype(kernel.dtype), kernel, axis)


def _forward(left_LI: Any, kernel: Any, axis: int) -> tuple[Array, Any]:
    if kernel.perturbed:
        raise ValueError("a kernel narrower than what it multiplies is frozen: give it its dtype")
    return _narrow_product(left_LI.value, kernel.value, axis), kernel.value


def _backward(axis: int, kernel: Any, of_output_LO: Any) -> tuple[Any, None]:
    if isinstance(of_output_LO, SymbolicZero):
        return None, None
    return summed(of_output_LO.astype(kernel.dtype), kernel, 1 - axis), None


_narrow_product.defvjp(_forward, _backward, symbolic_zeros=True)
