"""Per-example LoRA gradients, sketched inside the jit that makes them."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.sketch.projections import Projection, flatten_gradients, project

# loss(lora, base, tokens_L, target_mask_L) of one example.
ExampleLoss = Callable[[Tree, Tree, Array, Array], Array]
Normalize = Literal["vector", "per_tensor"]


class Sketches(NamedTuple):
    """Sketched gradients of a batch.

    Attributes:
      unit_BK: rows of unit length; a row of zeros where the gradient is zero.
      norm_B: Euclidean norms of the rows before they were normalized.
    """

    unit_BK: Float[Array, "B K"]
    norm_B: Float[Array, " B"]


def unit_tensors(grads: Tree) -> Tree:
    """Returns the gradients with every layer's every tensor scaled to unit length.

    Leaves are stacked over layers, so the norm is taken over all axes but the first. This is
    RapidIn's normalization, kept for comparison.
    """

    def unit(leaf: Array) -> Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)), keepdims=True))
        return leaf / jnp.where(norm > 0, norm, 1.0)

    return jax.tree.map(unit, grads)


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
    """

    def at(lora: Tree) -> Array:
        grads = jax.grad(loss)(lora, base, tokens_L, target_mask_L)
        return flatten_gradients(unit_tensors(grads) if normalize == "per_tensor" else grads)

    if len(adapters) == 1:
        return at(adapters[0])
    flats = [at(lora) for lora in adapters]
    norms = [jnp.linalg.norm(flat) for flat in flats]
    return jnp.concatenate(
        [flat / jnp.where(norm > 0, norm, 1.0) for flat, norm in zip(flats, norms, strict=True)]
    )


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
    dtype: DTypeLike = jnp.float32,
) -> Sketches:
    """Returns the unit sketches h(g_x) of a batch of examples (Algorithm 1, line 2).

    Call it inside jit: gradients are taken per example by vmap over the LoRA leaves alone, with
    the base unbatched, so XLA sees the matmuls of ordinary training, makes no weight gradient of
    the base, and never hands out the [B, P] array.

    Args:
      loss: loss of one example, a function of (lora, base, tokens_L, target_mask_L).
      projection: from `init_projection`, for as many parameters as all adapters hold together.
      adapters: LoRA trees at which gradients are taken; more than one is a trajectory.
      base: frozen weights.
      tokens_BL: token ids, padded on the right.
      target_mask_BL: True where a token's loss counts; a dummy row has none.
      normalize: `vector`, the paper's cosine of whole gradients, or `per_tensor` first.
      micro_tokens: tokens whose activations and gradients are held at a time: the batch is cut
        into equal micro-batches of micro_tokens // L examples, at least one, which run one after
        the other. None holds the whole batch.
      dtype: of the unit rows; norms stay float32, and rounding is the last step.

    Raises:
      ValueError: micro_tokens below 1, or a projection of another number of parameters.
    """

    def sketch(tokens_L: Array, target_mask_L: Array) -> Array:
        flat_P = flat_gradient(loss, adapters, base, tokens_L, target_mask_L, normalize=normalize)
        return project(projection, flat_P)

    sketch_BK = in_micro_batches(
        jax.vmap(sketch), tokens_BL, target_mask_BL, micro_tokens=micro_tokens
    )
    norm_B = jnp.linalg.norm(sketch_BK, axis=-1)
    unit_BK = sketch_BK / jnp.where(norm_B > 0, norm_B, 1.0)[:, None]
    return Sketches(unit_BK=unit_BK.astype(dtype), norm_B=norm_B)


def in_micro_batches(
    map_rows: Callable[[Array, Array], Array],
    tokens_BL: Int[Array, "B L"],
    target_mask_BL: Bool[Array, "B L"],
    *,
    micro_tokens: int | None,
) -> Float[Array, "B M"]:
    """Returns map_rows of a batch, a few rows at a time; the last few are filled with dummies.

    Args:
      map_rows: from rows of tokens and masks to one vector for each.
      tokens_BL: token ids.
      target_mask_BL: True where a token's loss counts.
      micro_tokens: tokens of a micro-batch at most, but one example at least; None for all.

    Raises:
      ValueError: micro_tokens below 1.
    """
    batch, length = tokens_BL.shape
    if micro_tokens is None:
        return map_rows(tokens_BL, target_mask_BL)
    if micro_tokens < 1:
        raise ValueError(f"a micro-batch needs at least one token, got {micro_tokens=}")
    steps = -(-batch // max(micro_tokens // length, 1))
    rows = -(-batch // steps)

    def cut(array_BL: Array) -> Array:
        padded_BL = jnp.pad(array_BL, ((0, steps * rows - batch), (0, 0)))
        return padded_BL.reshape(steps, rows, length)

    mapped_SRM = jax.lax.map(lambda part: map_rows(*part), (cut(tokens_BL), cut(target_mask_BL)))
    return mapped_SRM.reshape(steps * rows, -1)[:batch]
