"""Operations of per-example gradients by formula, to state rates of a benchmark in.

What a run takes is counted from its own steps instead (`run.cost`).
"""

import math
from typing import NamedTuple

from raslik_jax.axes import Tree
from raslik_jax.models import quantize


class LinearShapes(NamedTuple):
    """The matrix products of a decoder: (inputs, outputs) of each kernel of one layer and the head.

    The head is [E, V], tied or not.
    """

    num_layers: int
    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]


def linear_shapes(base: Tree) -> LinearShapes:
    """Returns the kernels of base weights, quantized or not, or of their shapes."""
    kernels = [
        quantize.kernel_shape(leaves["kernel"])
        if quantize.is_quantized(leaves["kernel"])
        else leaves["kernel"].shape
        for _, leaves in sorted(base["layers"].items())
        if "kernel" in leaves
    ]
    vocab_size, width = base["embed"]["embedding"].shape
    layer = tuple((inputs, outputs) for _, inputs, outputs in kernels)
    return LinearShapes(kernels[0][0], layer, (width, vocab_size))


def gradient_operations(shapes: LinearShapes, *, tokens: float, targets: float) -> float:
    """Returns the operations of per-example gradients: 4 per weight and token.

    Two forward and two for the gradient of the inputs; the frozen weights have none. The head
    counts at the targets only. Attention, norms and adapters are left out: below 3 % of it in
    models of 135M parameters and up.
    """
    layer = sum(inputs * outputs for inputs, outputs in shapes.layer)
    return 4.0 * (shapes.num_layers * layer * tokens + math.prod(shapes.head) * targets)
