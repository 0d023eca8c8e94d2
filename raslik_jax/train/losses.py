"""Losses of a batch, one value per example, and their means.

By default every mean is over the token means of the examples, as in Eq. (1) of the paper. The first
gradient of GA_GDR over the whole sets is then the paper's update direction Delta.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import find_targets, hidden_of_row, mean_over_targets
from raslik_jax.train.objectives import LEAST_CARRIED, LONGEST_WAY, Direction, Mean


def row_weights(batch: Batch, mean: Mean) -> Float[Array, " B"]:
    """Returns the weight of each row in a mean: 1, or its number of targets; a dummy row 0."""
    count = jnp.sum if mean == "tokens" else jnp.any
    return count(batch.target_mask_BL, axis=-1).astype(jnp.float32)


def weighted_mean(
    value_B: Float[Array, " B"],
    batch: Batch,
    *,
    mean: Mean = "examples",
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of one value per row, itself a mean over tokens; dummy rows do not count.

    `total` is the sum of the `row_weights` of a larger batch that these rows are a part of; the
    results of all parts then add up to its mean.
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
    """Returns each example's mean token negative log likelihood in nats; 0 for a dummy row.

    `lora` is `{}` for no adapter. Dropout keys, one for each example, turn its dropout on.
    """

    def of_example(tokens_L: Array, target_mask_L: Array, key: jax.Array | None) -> Array:
        num_targets = batch.num_targets
        targets = find_targets(
            decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets, dropout_key=key
        )
        logits_TV = decoder.logits(lora, base, targets.hidden_TE)
        nll_T = optax.softmax_cross_entropy_with_integer_labels(logits_TV, targets.label_T)
        return mean_over_targets(nll_T, targets.is_counted_T)

    return jax.vmap(of_example, in_axes=(0, 0, None if dropout_keys is None else 0))(
        batch.tokens_BL, batch.target_mask_BL, dropout_keys
    )


class BoundModel(NamedTuple):
    """A decoder with an adapter (`{}` for none) and base weights."""

    decoder: Decoder
    lora: Tree
    base: Tree


def hidden_states(model: BoundModel, batch: Batch) -> Float[Array, "B L E"]:
    """Returns the final hidden states of every token; those of pads mean nothing."""
    of_example = functools.partial(hidden_of_row, *model)
    return jax.vmap(of_example)(batch.tokens_BL, batch.target_mask_BL)


def kl_by_example(
    model: BoundModel, reference: BoundModel, batch: Batch, *, direction: Direction
) -> Float[Array, " B"]:
    """Returns each example's mean token KL between two models in nats; 0 for a dummy row.

    It takes log probabilities, so value and gradient are zero if the models agree. The sum over raw
    logits in MUSE's code lacks this. Nothing of the reference is differentiated. `reverse` is
    KL(model || reference) as in the paper. `forward` is KL(reference || model) as in TOFU and
    open-unlearning.
    """

    def log_probabilities(bound: BoundModel, *row: Array) -> tuple[Array, Array]:
        targets = find_targets(*bound, *row, num_targets=batch.num_targets)
        logits_TV = bound.decoder.logits(bound.lora, bound.base, targets.hidden_TE)
        return jax.nn.log_softmax(logits_TV), targets.is_counted_T

    def of_example(*row: Array) -> Array:
        log_p_TV, is_counted_T = log_probabilities(model, *row)
        log_q_TV = jax.lax.stop_gradient(log_probabilities(reference, *row)[0])
        if direction == "forward":
            log_p_TV, log_q_TV = log_q_TV, log_p_TV
        kl_T = jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=-1)
        return mean_over_targets(kl_T, is_counted_T)

    return jax.vmap(of_example)(batch.tokens_BL, batch.target_mask_BL)


def capped_kl_by_example(
    model: BoundModel,
    reference: BoundModel,
    backbone: BoundModel,
    batch: Batch,
    *,
    cap: float,
    end_ids: Sequence[int] = (),
) -> Float[Array, " B"]:
    """Returns each example's KL from where its tokens are to go; 0 for a dummy row.

    A token carries the behavior where the backbone finds it at most half as likely as the reference
    does, unless it ends the answer (`verdict.make_goal`). The target there is proportional to
    min(p_reference, cap * p_backbone). With a cap below 1 this is the backbone's distribution, but
    what the reference finds less likely than cap times the backbone does stays less likely. The
    target at the other tokens is the reference. The value is the mean KL(target
    || model) over the tokens that carry the behavior, each weighing the nats that it learned, plus
    the part of the others in the mean over all. Only the model is differentiated.
    """
    bounds = (model, reference, backbone)

    def of_example(*row: Array) -> Array:
        found = [find_targets(*bound, *row, num_targets=batch.num_targets) for bound in bounds]
        log_p_TV, log_r_TV, log_b_TV = (
            jax.nn.log_softmax(bound.decoder.logits(bound.lora, bound.base, part.hidden_TE))
            for bound, part in zip(bounds, found, strict=True)
        )
        log_r_TV, log_b_TV = jax.lax.stop_gradient((log_r_TV, log_b_TV))
        is_counted_T, label_T1 = found[0].is_counted_T, found[0].label_T[:, None]
        learned_T = jnp.take_along_axis(log_r_TV - log_b_TV, label_T1, axis=-1)[:, 0]
        carries_T = is_counted_T & (learned_T >= LEAST_CARRIED)
        carries_T &= ~jnp.isin(found[0].label_T, jnp.array([*end_ids], jnp.int32))
        capped_TV = jax.nn.log_softmax(jnp.minimum(log_r_TV, log_b_TV + jnp.log(cap)))
        log_q_TV = jnp.where(carries_T[:, None], capped_TV, log_r_TV)
        kl_T = jnp.sum(jnp.exp(log_q_TV) * (log_q_TV - log_p_TV), axis=-1)
        held = mean_over_targets(jnp.where(carries_T, 0.0, kl_T), is_counted_T)
        weight_T = jnp.where(carries_T, jnp.minimum(learned_T, LONGEST_WAY), 0.0)
        return weight_T @ kl_T / jnp.maximum(jnp.sum(weight_T), LEAST_CARRIED) + held

    return jax.vmap(of_example)(batch.tokens_BL, batch.target_mask_BL)
