"""The jitted step from a batch of rows to their sketches, and the size of its batches."""

import functools
from collections.abc import Callable

import jax

from raslik_jax.base.axes import Tree
from raslik_jax.data import batches
from raslik_jax.models import decoder as decoders
from raslik_jax.parallel import meshes
from raslik_jax.sketch import gradients, projections
from raslik_jax.sketch.loss import SketchLoss, example_loss

# Operations that are done while a program is compiled: on a CPU 4.5 s at 1e11 a second, as measured
# (docs/notes/data.md); on a GPU 20 s at 2e14, by estimate.
_PROGRAM_OPERATIONS = {"cpu": 4.5e11}
_PROGRAM_OPERATIONS_ELSEWHERE = 4e15


def sketching(
    decoder: decoders.Decoder, *, loss: SketchLoss, normalize: gradients.Normalize
) -> Callable[..., gradients.Sketches]:
    """Returns the jitted function of (projection, lora, base, batch)."""

    def of_rows(
        projection: projections.Projection,
        lora: Tree,
        base: Tree,
        batch: batches.Batch,
    ) -> gradients.Sketches:
        return gradients.sketch_gradients(
            functools.partial(example_loss, decoder, num_targets=batch.num_targets, loss=loss),
            projection,
            lora,
            base,
            batch.tokens_BL,
            batch.target_mask_BL,
            normalize=normalize,
            micro_tokens=gradients.micro_tokens_of(decoder.config.hidden_size),
        )

    @jax.jit
    def sketch(
        projection: projections.Projection,
        lora: Tree,
        base: Tree,
        batch: batches.Batch,
    ) -> gradients.Sketches:
        return meshes.by_rows(of_rows, projection, lora, base, rows=batch)

    return sketch


def program_tokens(config: decoders.ModelConfig) -> int:
    """Returns the tokens whose gradients take about as long as compiling a program.

    It depends on platform and model alone, so that all jobs on an index plan the same batches.
    """
    _, _, base = decoders.abstract(config, None)
    # A gradient takes two operations for each weight forward, and two back.
    operations = _PROGRAM_OPERATIONS.get(meshes.platform(), _PROGRAM_OPERATIONS_ELSEWHERE)
    return max(int(operations / (4 * decoders.count_parameters(base))), 1)
