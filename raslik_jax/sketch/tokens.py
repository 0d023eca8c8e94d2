"""The contribution of each target token of an example to the example's score."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import chosen
from raslik_jax.data.tokens.tokenization import Tokenizer
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.gradients import Normalize, map_tensors
from raslik_jax.sketch.head import target_nll
from raslik_jax.sketch.loss import SketchLoss, find_targets, head_table
from raslik_jax.sketch.projections import Projection, flatten_gradients

# A piece of text and its share of the score; None where the token does not count in the loss.
Piece = tuple[str, float | None]


class Shares(NamedTuple):
    """Shares of a score by target token in order, then zeros; and their sum."""

    share_T: Float[Array, " T"]
    score: Float[Array, ""]


def token_shares(
    decoder: Decoder,
    projection: Projection,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    toward_K: Float[Array, " K"],
    mean_K: Float[Array, " K"],
    *,
    num_targets: int,
    loss: SketchLoss,
    normalize: Normalize,
) -> Shares:
    """Returns the contributions of an example's tokens to its score with a direction.

    The gradient of the loss is the mean of the targets' gradients g_t. The score with a direction v
    is s = <v, x - mu> / |x - mu| with x = h(sum_t g_t / T) / |h(...)|. It is the sum over t of

        (<v, h(g_t)> / |h(...)| - <v, mu>) / (T |x - mu|):

    each token takes its share of the mean. With `per_tensor` gradients are divided by lengths of
    the whole example.

    No gradient of a single token is taken. The gradient of the weighted loss is linear in the
    weights, and its transpose maps h^T v to the products of all tokens at once. The loss is
    differentiated twice. Kernels of attention do not support this, so XLA's own products run.
    """
    decoder = decoder._replace(hidden=functools.partial(decoder.hidden, kind="xla"))

    def weighted(lora: Tree, weight_T: Array) -> Array:
        targets = find_targets(
            decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets, loss=loss
        )
        table, vocab_axis = head_table(base)
        nll_T = target_nll(table, *targets, vocab_axis, decoder.config.logit_cap)
        return jnp.sum(jnp.where(targets.is_counted_T, weight_T * nll_T, 0.0))

    if loss == "next_token":  # as `find_targets` counts
        target_mask_L = target_mask_L.at[0].set(False)
    count = jnp.sum(target_mask_L)
    is_counted_T = (jnp.arange(num_targets) < count).astype(jnp.float32)
    weight_T = is_counted_T / jnp.maximum(count, 1).astype(jnp.float32)
    gradient, back = jax.vjp(functools.partial(jax.grad(weighted), lora), weight_T)

    def sketch(tree: Tree) -> Array:
        flat_P = _flat(tree, normalize)
        # The family's own function: the one that folds batches has no transpose.
        apply = family.by_xla or family.apply
        return apply(projection.spec, projection.table, flat_P[None])[0]

    family = PROJECTIONS[projection.spec.family]
    sketch_K, pull = jax.vjp(sketch, gradient)
    (product_T,) = back(*pull(toward_K.astype(jnp.float32)))
    length = jnp.linalg.norm(sketch_K)
    safe = jnp.where(length > 0, length, 1.0)
    apart = jnp.linalg.norm(sketch_K / safe - mean_K)
    apart = jnp.where(apart > 0, apart, 1.0)
    share_T = weight_T * (product_T / safe - jnp.dot(toward_K, mean_K)) / apart
    return Shares(share_T, jnp.sum(share_T))


def _flat(tree: Tree, normalize: Normalize) -> Array:
    """Returns a gradient as `gradients.flat_gradient` does, with its lengths as constants."""

    def over_length(array: Any, axis: Any) -> Any:
        array = array.astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=True))
        return array / jax.lax.stop_gradient(jnp.where(norm > 0, norm, 1.0))

    per_tensor = chosen("normalize", normalize, {"vector": False, "per_tensor": True})
    return flatten_gradients(map_tensors(over_length, tree) if per_tensor else tree)


def token_pieces(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """Returns the text that each token adds; "" for one that is part of a longer character.

    The pieces together make the text. Special tokens are in it by their names.
    """
    pieces, told, names = list[str](), "", tokenizer.special_names()
    for end in range(1, len(ids) + 1):
        if name := names.get(int(ids[end - 1])):
            pieces.append(name)
            continue
        text = tokenizer.decode(ids[:end].tolist())
        if text.endswith("\ufffd") and end < len(ids):  # the rest of a character is to come
            text = told
        pieces.append(text[len(told) :] if text.startswith(told) else "")
        told = text if text.startswith(told) else told
    return pieces


def whole_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns pieces that all have a text: tokens of one character become one, shares summed."""
    whole, before = list[Piece](), list[float]()
    for text, share in pieces:
        before += [] if share is None else [share]
        if text:
            whole.append((text, sum(before) if before else None))
            before = []
    if before:  # of a character that was cut off
        whole.append(("\ufffd", sum(before)))
    return whole
