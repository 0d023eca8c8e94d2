"""Losses of a batch, one value per example, and their means.

By default every mean is over examples of each example's token mean, as Eq. (1) of the paper has it,
so that the first gradient of GA_GDR over the whole sets is the paper's update direction Delta.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raslik_jax.axes import Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import mean_over_targets, target_logits, token_nll
from raslik_jax.train.objectives import Direction, Mean


def row_weights(batch: Batch, mean: Mean) -> Float[Array, " B"]:
    """Returns what each row counts in a mean: 1, or its number of targets; a dummy row 0."""
    if mean == "tokens":
        return jnp.sum(batch.target_mask_BL, axis=-1).astype(jnp.float32)
    return jnp.any(batch.target_mask_BL, axis=-1).astype(jnp.float32)


def weighted_mean(
    value_B: Float[Array, " B"],
    batch: Batch,
    *,
    mean: Mean = "examples",
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of one value per row; dummy rows do not count.

    Args:
      value_B: of each row, itself a mean over tokens.
      batch: the rows.
      mean: over examples, or over all tokens of the batch.
      total: sum of the `row_weights` that the mean is taken over, where these rows are a part of a
        larger batch; the sum of the results over all parts is then the larger batch's mean.
    """
    weight_B = row_weights(batch, mean)
    if total is None:
        total = jnp.sum(weight_B)
    return jnp.sum(jnp.where(weight_B > 0, weight_B * value_B, 0.0)) / jnp.maximum(total, 1.0)


def nll_by_example(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    batch: Batch,
    *,
    dropout_keys: jax.Array | None = None,
) -> Float[Array, " B"]:
    """Returns each example's mean token negative log likelihood, in nats; 0 for a dummy row.

    Args:
      decoder: the model's pure functions.
      lora: adapter, `{}` for none.
      base: base weights.
      batch: the examples.
      dropout_keys: one key per example; None turns the adapter's dropout off.
    """

    def of_example(tokens_L: Array, target_mask_L: Array, key: jax.Array | None) -> Array:
        target = target_logits(
            decoder,
            lora,
            base,
            tokens_L,
            target_mask_L,
            num_targets=batch.num_targets,
            dropout_key=key,
        )
        return mean_over_targets(token_nll(target), target.is_counted_T)

    return jax.vmap(of_example, in_axes=(0, 0, None if dropout_keys is None else 0))(
        batch.tokens_BL, batch.target_mask_BL, dropout_keys
    )


def nll(decoder: Decoder, lora: Tree, base: Tree, batch: Batch) -> Float[Array, ""]:
    """Returns the mean over examples of the mean token negative log likelihood, in nats."""
    return weighted_mean(nll_by_example(decoder, lora, base, batch), batch)


def kl_divergence(
    log_p_TV: Float[Array, "T V"], log_q_TV: Float[Array, "T V"]
) -> Float[Array, " T"]:
    """Returns KL(p || q) of each row, in nats, from log probabilities.

    It is zero with zero gradient at p = q, unlike the sum over raw logits that MUSE's code takes.
    """
    return jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=-1)


class BoundModel(NamedTuple):
    """A decoder with what it runs on: an adapter, `{}` for none, and base weights."""

    decoder: Decoder
    lora: Tree
    base: Tree


def hidden_states(model: BoundModel, batch: Batch) -> Float[Array, "B L E"]:
    """Returns the final hidden states of every token; those of pads mean nothing."""
    of_example = functools.partial(model.decoder.hidden, model.lora, model.base)
    return jax.vmap(of_example)(batch.tokens_BL)


def kl_by_example(
    model: BoundModel,
    reference: BoundModel,
    batch: Batch,
    *,
    direction: Direction,
) -> Float[Array, " B"]:
    """Returns each example's mean token KL between the model and its reference; 0 for a dummy.

    The reference runs forward only: nothing of it is differentiated.

    Args:
      model: what is being unlearned.
      reference: the model before; where both share a base it is one and the same array.
      batch: retain examples; only their target positions count, pads never do.
      direction: `reverse` is KL(unlearned || reference), as the paper writes it; `forward` is
        KL(reference || unlearned), as TOFU and open-unlearning have it.
    """

    def of_example(tokens_L: Array, target_mask_L: Array) -> Array:
        now, then = (
            target_logits(*bound, tokens_L, target_mask_L, num_targets=batch.num_targets)
            for bound in (model, reference)
        )
        log_now_TV = jax.nn.log_softmax(now.logits_TV)
        log_then_TV = jax.lax.stop_gradient(jax.nn.log_softmax(then.logits_TV))
        if direction == "reverse":
            value_T = kl_divergence(log_now_TV, log_then_TV)
        else:
            value_T = kl_divergence(log_then_TV, log_now_TV)
        return mean_over_targets(value_T, now.is_counted_T)

    return jax.vmap(of_example)(batch.tokens_BL, batch.target_mask_BL)
