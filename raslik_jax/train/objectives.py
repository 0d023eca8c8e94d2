"""Losses of unlearning on a forget batch and a retain batch, one value per example.

By default every mean is over examples of each example's token mean, as Eq. (1) of the paper has it,
so that the first gradient of GA_GDR over the whole sets is the paper's update direction Delta.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import mean_over_targets, target_logits, token_nll

Mean = Literal["examples", "tokens"]
Direction = Literal["reverse", "forward"]


class TokenBatch(NamedTuple):
    """A batch of encoded examples on the device.

    Attributes:
      tokens_BL: token ids, padded on the right.
      target_mask_BL: True where a token's loss counts; a row without any is a dummy.
    """

    tokens_BL: Int[Array, "B L"]
    target_mask_BL: Bool[Array, "B L"]


def row_weights(batch: TokenBatch, mean: Mean) -> Float[Array, " B"]:
    """Returns what each row counts in a mean: 1, or its number of targets; a dummy row 0."""
    if mean == "tokens":
        return jnp.sum(batch.target_mask_BL, axis=-1).astype(jnp.float32)
    return jnp.any(batch.target_mask_BL, axis=-1).astype(jnp.float32)


def weighted_mean(
    value_B: Float[Array, " B"],
    batch: TokenBatch,
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
    batch: TokenBatch,
    *,
    num_targets: int,
    dropout_keys: jax.Array | None = None,
) -> Float[Array, " B"]:
    """Returns each example's mean token negative log likelihood, in nats; 0 for a dummy row.

    Args:
      decoder: the model's pure functions.
      lora: adapter, `{}` for none.
      base: base weights.
      batch: the examples.
      num_targets: rows of the head, at least the most targets of any row; static.
      dropout_keys: one key per example; None turns the adapter's dropout off.
    """

    def of_example(tokens_L: Array, target_mask_L: Array, key: jax.Array | None) -> Array:
        target = target_logits(
            decoder,
            lora,
            base,
            tokens_L,
            target_mask_L,
            num_targets=num_targets,
            dropout_key=key,
        )
        return mean_over_targets(token_nll(target), target.is_counted_T)

    return jax.vmap(of_example, in_axes=(0, 0, None if dropout_keys is None else 0))(
        batch.tokens_BL, batch.target_mask_BL, dropout_keys
    )


def nll(
    decoder: Decoder, lora: Tree, base: Tree, batch: TokenBatch, *, num_targets: int
) -> Float[Array, ""]:
    """Returns the mean over examples of the mean token negative log likelihood, in nats."""
    return weighted_mean(nll_by_example(decoder, lora, base, batch, num_targets=num_targets), batch)


def npo_by_example(
    nll_B: Float[Array, " B"],
    reference_nll_B: Float[Array, " B"],
    batch: TokenBatch,
    *,
    beta: float,
) -> Float[Array, " B"]:
    """Returns the loss of negative preference optimization of each example.

    -(2 / beta) log sigmoid(beta (s - s_ref)) with s the *summed* token negative log likelihood, so
    that (pi / pi_ref)^beta of the paper is exp(-beta (s - s_ref)). At the reference it is
    (2 / beta) log 2 and its gradient is that of -s; as beta goes to 0 it becomes gradient ascent.

    Source: Zhang et al. 2024 (arXiv:2404.05868).

    Args:
      nll_B: each example's mean token negative log likelihood, as `nll_by_example` gives it.
      reference_nll_B: the same of the model before unlearning.
      batch: the examples, for their numbers of targets.
      beta: inverse temperature, above 0.
    """
    excess_B = row_weights(batch, "tokens") * (nll_B - reference_nll_B)
    return 2.0 / beta * jax.nn.softplus(-beta * excess_B)


def simnpo_by_example(
    nll_B: Float[Array, " B"], *, beta: float, delta: float
) -> Float[Array, " B"]:
    """Returns the loss of SimNPO of each example, which needs no reference.

    -(2 / beta) log sigmoid(beta (s / n - delta)) with s / n the *mean* token negative log
    likelihood: an example that is forgotten already, whatever its length, moves nothing.

    Source: Fan et al. 2024 (arXiv:2410.07163), with the margin inside the bracket as
    open-unlearning has it; the two agree at the published margin of 0.

    Args:
      nll_B: each example's mean token negative log likelihood.
      beta: inverse temperature, above 0.
      delta: margin, nats a token.
    """
    return 2.0 / beta * jax.nn.softplus(-beta * (nll_B - delta))


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


def kl_by_example(
    model: BoundModel,
    reference: BoundModel,
    batch: TokenBatch,
    *,
    num_targets: int,
    direction: Direction,
) -> Float[Array, " B"]:
    """Returns each example's mean token KL between the model and its reference; 0 for a dummy.

    The reference runs forward only: nothing of it is differentiated.

    Args:
      model: what is being unlearned.
      reference: the model before; where both share a base it is one and the same array.
      batch: retain examples; only their target positions count, pads never do.
      num_targets: rows of the head, at least the most targets of any row; static.
      direction: `reverse` is KL(unlearned || reference), as the paper writes it; `forward` is
        KL(reference || unlearned), as TOFU and open-unlearning have it.
    """

    def of_example(tokens_L: Array, target_mask_L: Array) -> Array:
        now, then = (
            target_logits(*bound, tokens_L, target_mask_L, num_targets=num_targets)
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
