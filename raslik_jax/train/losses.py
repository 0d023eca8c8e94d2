"""Losses of a batch, one value per example, and their means.

By default every mean is over the token means of the examples, as in Eq. (1) of the paper. The first
gradient of GA_GDR over the whole sets is then the paper's update direction Delta.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import chosen
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import Targets, find_targets, hidden_of_row, mean_over_targets
from raslik_jax.train.goals import LEAST_CARRIED, LONGEST_WAY, Direction, Mean


def row_weights(batch: Batch, mean: Mean) -> Float[Array, " B"]:
    """Returns the weight of each row: 1, or its number of targets; 0 for a row without any."""
    count: Any = chosen("mean", mean, {"tokens": jnp.sum, "examples": jnp.any})
    return count(batch.target_mask_BL[:, 1:], axis=-1).astype(jnp.float32)


def weighted_mean(
    value_B: Float[Array, " B"],
    batch: Batch,
    *,
    mean: Mean = "examples",
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of one value per row, itself a mean over tokens; dummy rows do not count.

    `total`, the sum of the `row_weights` of a whole batch, makes the means of its parts add up.
    """
    weight_B = row_weights(batch, mean)
    total = jnp.sum(weight_B) if total is None else total
    value_B = jnp.reshape(value_B, weight_B.shape)  # a scalar would count dummy rows
    return jnp.sum(jnp.where(weight_B > 0, weight_B * value_B, 0.0)) / jnp.maximum(total, 1.0)


class BoundModel(NamedTuple):
    """A decoder with an adapter (`{}` for none) and base weights."""

    decoder: Decoder
    lora: Tree
    base: Tree


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A model's outputs for a batch, each computed at its first use and then shared.

    Dropout keys, one per example, turn dropout on. With `known_BTE`, the final hidden states at the
    targets, no forward pass is needed for them.
    """

    model: BoundModel
    batch: Batch
    dropout_keys: jax.Array | None = None
    known_BTE: Float[Array, "B T E"] | None = None

    @functools.cached_property
    def targets(self) -> Targets:
        """Targets of each example with the hidden states that predict them."""
        find = functools.partial(find_targets, *self.model, num_targets=self.batch.num_targets)
        rows = self.batch.tokens_BL, self.batch.target_mask_BL
        options = {"dropout_key": self.dropout_keys, "hidden_TE": self.known_BTE}
        return jax.vmap(lambda row, options: find(*row, **options))(rows, options)

    @functools.cached_property
    def logits_BTV(self) -> Float[Array, "B T V"]:
        """Logits at the targets."""
        decoder, lora, base = self.model
        return jax.vmap(functools.partial(decoder.logits, lora, base))(self.targets.hidden_TE)

    @functools.cached_property
    def hidden_BLE(self) -> Float[Array, "B L E"]:
        """Final hidden states of every token; those of pads mean nothing."""
        of_example = functools.partial(hidden_of_row, *self.model)
        return jax.vmap(of_example)(self.batch.tokens_BL, self.batch.target_mask_BL)


def nll_by_example(model: Outputs) -> Float[Array, " B"]:
    """Returns each example's mean token negative log likelihood in nats; 0 for a dummy row."""
    of_tokens = optax.softmax_cross_entropy_with_integer_labels
    nll_BT = of_tokens(model.logits_BTV, model.targets.label_T)
    return jax.vmap(mean_over_targets)(nll_BT, model.targets.is_counted_T)


def kl_by_example(model: Outputs, reference: Outputs, *, direction: Direction) -> Array:
    """Returns the mean token KL [B] of two models for each example in nats; 0 for a dummy row.

    It takes log probabilities, so value and gradient are zero if the models agree. The sum over raw
    logits in MUSE's code lacks this. Nothing of the reference is differentiated. `reverse` is
    KL(model || reference) as in the paper. `forward` is KL(reference || model) as in TOFU and
    open-unlearning.
    """

    def of_example(logits_TV: Array, other_TV: Array, is_counted_T: Array) -> Array:
        log_p_TV, log_q_TV = map(jax.nn.log_softmax, (logits_TV, jax.lax.stop_gradient(other_TV)))
        if chosen("direction", direction, {"forward": True, "reverse": False}):
            log_p_TV, log_q_TV = log_q_TV, log_p_TV
        kl_T = jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=-1)
        return mean_over_targets(kl_T, is_counted_T)

    return jax.vmap(of_example)(model.logits_BTV, reference.logits_BTV, model.targets.is_counted_T)


def capped_kl_by_example(
    model: Outputs, reference: Outputs, backbone: Outputs, *, cap: float, end_ids: Sequence[int]
) -> Float[Array, " B"]:
    """Returns each example's KL from the goals of its tokens to the model; 0 for a dummy row.

    A token carries the behavior if its probability under the backbone is at most half of that under
    the reference, unless it ends the answer (`verdict.make_goal`). Its goal is proportional to
    min(p_reference, cap * p_backbone). With a cap below 1 this is the backbone's distribution,
    except that a word keeps its p_reference if this is below cap * p_backbone. The goal at the
    other tokens is the reference. The value has two parts: the mean KL(goal || model) over the
    tokens that carry the behavior, weighted by the nats that each learned, plus the sum of the KL
    of the others over the number of all tokens. Only the model is differentiated.
    """

    def of_example(targets: Targets, *logits_TV: Array) -> Array:
        log_p_TV, log_r_TV, log_b_TV = map(jax.nn.log_softmax, logits_TV)
        label_T, is_counted_T = targets.label_T, targets.is_counted_T
        learned_T = jnp.take_along_axis(log_r_TV - log_b_TV, label_T[:, None], axis=-1)[:, 0]
        carries_T = is_counted_T & (learned_T >= LEAST_CARRIED)
        carries_T &= ~jnp.isin(label_T, jnp.array([*end_ids], jnp.int32))
        capped_TV = jax.nn.log_softmax(jnp.minimum(log_r_TV, log_b_TV + jnp.log(cap)))
        log_q_TV = jnp.where(carries_T[:, None], capped_TV, log_r_TV)
        kl_T = jnp.sum(jnp.exp(log_q_TV) * (log_q_TV - log_p_TV), axis=-1)
        held = mean_over_targets(jnp.where(carries_T, 0.0, kl_T), is_counted_T)
        weight_T = jnp.where(carries_T, jnp.minimum(learned_T, LONGEST_WAY), 0.0)
        return weight_T @ kl_T / jnp.maximum(jnp.sum(weight_T), LEAST_CARRIED) + held

    earlier = jax.lax.stop_gradient((reference.logits_BTV, backbone.logits_BTV))
    return jax.vmap(of_example)(model.targets, model.logits_BTV, *earlier)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The outputs of the trained model and of earlier ones, for the terms of objectives.

    Everything is computed at its first use. Nothing of the earlier models is differentiated.

    Attributes:
      model: outputs of the trained model: `hidden_BLE`, `logits_BTV` and `targets`.
      reference: the same outputs of the model before unlearning.
      backbone: the same outputs of the base model, before fine-tuning.
      batch: token ids `tokens_BL`, and `target_mask_BL`: the tokens that count in the loss.
      end_ids: ids of the tokens that end an answer; none for the rows to retain.
      step: number of the steps taken before.
    """

    model: Outputs
    reference: Outputs
    backbone: Outputs
    batch: Batch
    end_ids: tuple[int, ...] = ()
    step: Array | int = 0

    @functools.cached_property
    def nll_B(self) -> Float[Array, " B"]:
        """Mean token negative log likelihood of each example in nats; 0 for a dummy row."""
        return nll_by_example(self.model)

    def kl_B(self, direction: Direction) -> Float[Array, " B"]:
        """Mean token KL(model || reference), or with "forward" KL(reference || model)."""
        return kl_by_example(self.model, self.reference, direction=direction)

    def capped_kl_B(self, cap: float) -> Float[Array, " B"]:
        """CAP_KLR's forget term: KL from min(p_reference, cap * p_backbone), normalized."""
        models = self.model, self.reference, self.backbone
        return capped_kl_by_example(*models, cap=cap, end_ids=self.end_ids)
