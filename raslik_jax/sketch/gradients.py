"""Per-example LoRA gradients, sketched inside the jit that makes them."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax import meshes, processes
from raslik_jax.axes import Tree
from raslik_jax.sketch.projections import Projection, flatten_gradients, project

# loss(lora, base, tokens_L, target_mask_L) of one example.
ExampleLoss = Callable[[Tree, Tree, Array, Array], Array]
Normalize = Literal["vector", "per_tensor"]


class Sketches(NamedTuple):
    """Sketched gradients of a batch, of unit length (zeros where one is zero), and their norms."""

    unit_BK: Float[Array, "B K"]
    norm_B: Float[Array, " B"]


def flat_gradient(
    loss: ExampleLoss,
    adapters: tuple[Tree, ...],
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    normalize: Normalize,
) -> Float[Array, " P"]:
    """Returns the loss gradient of one example as one flat float32 vector.

    With several adapters (a trajectory) the vector is their unit gradients end to end, so that
    the inner product of two such vectors is the sum of the cosines at each adapter, as in
    TracInCP (Pruthi et al., 2020) with normalized gradients.

    Tokens are padded on the right; the mask is True where a token's loss counts. `vector` gives the
    paper's cosine of whole gradients; `per_tensor` scales every layer's every tensor to unit length
    first, as RapidIn does.
    """

    def at(lora: Tree) -> Array:
        grads = jax.grad(loss)(lora, base, tokens_L, target_mask_L)
        if normalize == "per_tensor":  # leaves are stacked over layers
            grads = jax.tree.map(lambda leaf: _unit(leaf, tuple(range(1, leaf.ndim))), grads)
        return flatten_gradients(grads)

    flats = [at(lora) for lora in adapters]
    return flats[0] if len(flats) == 1 else jnp.concatenate([_unit(flat, 0) for flat in flats])


def _unit(array: Array, axis: int | tuple[int, ...]) -> Array:
    norm = jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=True))
    return array / jnp.where(norm > 0, norm, 1.0)


def sketch_gradients(
    loss: ExampleLoss,
    projection: Projection,
    adapters: tuple[Tree, ...],
    base: Tree,
    tokens_BL: Int[Array, "B L"],
    target_mask_BL: Bool[Array, "B L"],
    *,
    normalize: Normalize = "vector",
    micro_tokens: int | None = None,
) -> Sketches:
    """Returns the unit sketches h(g_x) of a batch of examples (Algorithm 1, line 2).

    Call it inside jit: gradients are taken per example by vmap over the LoRA leaves alone, with
    the base unbatched, so XLA sees the matmuls of ordinary training, makes no weight gradient of
    the base, and never hands out the [B, P] array. The projection is for as many parameters as all
    adapters hold together.
    """

    def sketch(tokens_L: Array, target_mask_L: Array) -> Array:
        flat_P = flat_gradient(loss, adapters, base, tokens_L, target_mask_L, normalize=normalize)
        return project(projection, flat_P)

    sketch_BK = in_micro_batches(
        jax.vmap(sketch), tokens_BL, target_mask_BL, micro_tokens=micro_tokens
    )
    norm_B = jnp.linalg.norm(sketch_BK, axis=-1)
    return Sketches(sketch_BK / jnp.where(norm_B > 0, norm_B, 1.0)[:, None], norm_B)


def in_micro_batches(
    map_rows: Callable[[Array, Array], Array],
    tokens_BL: Int[Array, "B L"],
    target_mask_BL: Bool[Array, "B L"],
    *,
    micro_tokens: int | None,
) -> Float[Array, "B M"]:
    """Returns map_rows of a batch in parts of micro_tokens at most, or of one row; None for all."""
    batch, length = tokens_BL.shape
    rows = micro_rows(batch, length, micro_tokens)
    if rows == batch:
        return map_rows(tokens_BL, target_mask_BL)
    steps = -(-batch // rows)

    def cut(array_BL: Array) -> Array:
        padded_BL = jnp.pad(array_BL, ((0, steps * rows - batch), (0, 0)))
        return padded_BL.reshape(steps, rows, length)

    mapped_SRM = jax.lax.map(lambda part: map_rows(*part), (cut(tokens_BL), cut(target_mask_BL)))
    return mapped_SRM.reshape(steps * rows, -1)[:batch]


def micro_rows(batch: int, length: int, micro_tokens: int | None) -> int:
    """Returns the rows of a part of a batch: equal parts, the last one filled up."""
    if micro_tokens is None:
        return batch
    if micro_tokens < 1:
        raise ValueError(f"a micro-batch needs at least one token, got {micro_tokens=}")
    return -(-batch // -(-batch // max(micro_tokens // length, 1)))


def micro_tokens_of(hidden_size: int) -> int | None:
    """Returns the tokens of a model of this width to take gradients of at a time; None for all.

    What a layer of a narrow model makes of a whole batch does not fit a CPU's caches, and every
    pass over it waits for memory. A wider one reads more weights for each part. The figures are
    measured (docs/notes/sketch.md, "Speed").
    """
    if meshes.platform() != "cpu" or meshes.num_shards() > 1:
        return None
    return max(1600, 6 * hidden_size) * processes.usable_cpus()
