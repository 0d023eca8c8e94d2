"""What a batch of per-example gradients costs: operations and memory, by formula.

Both are stated so that they can be held against what a machine does: the operations give a share
of the matmul rate, and the memory is an upper bound that XLA's own analysis has to stay under.
"""

import math
from typing import NamedTuple

import jax

from raslik_jax.axes import Tree
from raslik_jax.models import quantize
from raslik_jax.sketch import head

_FLOAT32 = 4


class LinearShapes(NamedTuple):
    """The matrix products of a decoder.

    Attributes:
      num_layers: NL.
      layer: (inputs, outputs) of each linear kernel of one layer.
      head: (E, V) of the vocabulary head, tied or not.
    """

    num_layers: int
    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]


def linear_shapes(base: Tree) -> LinearShapes:
    """Returns the kernels of base weights, quantized or not, or of their shapes."""
    kernels = [
        quantize.kernel_shape(kernel) if quantize.is_quantized(kernel) else kernel.shape
        for kernel in (
            leaves["kernel"] for _, leaves in sorted(base["layers"].items()) if "kernel" in leaves
        )
    ]
    vocab_size, width = base["embed"]["embedding"].shape
    return LinearShapes(
        num_layers=kernels[0][0],
        layer=tuple((inputs, outputs) for _, inputs, outputs in kernels),
        head=(width, vocab_size),
    )


def gradient_operations(shapes: LinearShapes, *, tokens: float, targets: float) -> float:
    """Returns the operations of per-example gradients: 4 per weight and token.

    Two forward and two for the gradient of the inputs; the frozen weights have none. The head
    counts where it runs, at the targets. Attention, norms and the adapters are left out: below 3 %
    of it in models of 135M parameters and up, more in smaller ones.
    """
    layer = sum(inputs * outputs for inputs, outputs in shapes.layer)
    return 4.0 * (shapes.num_layers * layer * tokens + math.prod(shapes.head) * targets)


class MemoryBound(NamedTuple):
    """Bytes that sketching one micro-batch takes at most, by what they are for.

    Attributes:
      weights: base, adapters and the projection's table.
      activations: what the backward pass of a micro-batch keeps, and its work space.
      gradients: of a micro-batch: LoRA leaves, flat vectors and their layout for the sketch.
      head: hidden states of the targets, their slopes, and a tile of logits.
      sketches: rows of the whole batch.
    """

    weights: int
    activations: int
    gradients: int
    head: int
    sketches: int

    @property
    def total(self) -> int:
        """The bound on the peak."""
        return sum(self)


def memory_bound(
    base: Tree,
    adapters: tuple[Tree, ...],
    table: Tree,
    *,
    num_heads: int,
    batch: int,
    micro_batch: int,
    length: int,
    num_targets: int,
    size: int,
    remat: bool,
) -> MemoryBound:
    """Returns an upper bound on the memory of `sketch_gradients`, in bytes.

    With b examples of L tokens in a micro-batch and W = sum over the kernels of a layer of
    (inputs + outputs):

      weights      base + adapters + table, as stored
      activations  4 b L [NL a + w], a = 3 W / 2 + 3 H L, w = 2 a; with remat NL a is NL E + a;
                   and one layer of a quantized base rebuilt, twice
      gradients    4 b P (3 n) for n adapters
      head         4 [6 b T E + 3 (rows x columns of a tile) + 2 E x columns]
      sketches     4 K (2 B + 2 b)

    The factors count float32 copies, whatever the dtype of the base: LoRA inputs, softmax and
    norms are float32 in any case.

    Args:
      base: base weights, or their shapes.
      adapters: LoRA trees, or their shapes.
      table: the projection's.
      num_heads: H.
      batch: B, rows of the batch.
      micro_batch: b, rows that are held at a time.
      length: L.
      num_targets: T, static rows of targets per example.
      size: K.
      remat: gradient checkpointing of the layers.
    """
    shapes = linear_shapes(base)
    width, vocab_size = shapes.head
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(adapters))
    per_token = 3 * sum(map(sum, shapes.layer)) // 2 + 3 * num_heads * length
    kept = shapes.num_layers * (width if remat else per_token) + (per_token if remat else 0)
    activations = _FLOAT32 * micro_batch * length * (kept + 2 * per_token)
    kernels = [leaves["kernel"] for leaves in base["layers"].values() if "kernel" in leaves]
    if any(map(quantize.is_quantized, kernels)):
        activations += 2 * _FLOAT32 * sum(math.prod(pair) for pair in shapes.layer)
    rows, columns = head.tile_shape()
    slots = micro_batch * num_targets
    rows, columns = min(rows, slots), min(columns, vocab_size)
    return MemoryBound(
        weights=quantize.num_bytes((base, adapters, table)),
        activations=activations,
        gradients=3 * _FLOAT32 * micro_batch * num_params,
        head=_FLOAT32 * (6 * slots * width + 3 * rows * columns + 2 * width * columns),
        sketches=_FLOAT32 * size * (2 * batch + 2 * micro_batch),
    )


def analyzed_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the peak that XLA's own analysis gives for a compiled function, in bytes.

    Arguments, results and work space, less what they share.

    Raises:
      ValueError: a backend without such an analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(f"XLA has no memory analysis for the {jax.default_backend()} backend")
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
