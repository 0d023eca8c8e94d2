"""Losses of unlearning on a forget batch and a retain batch.

Every mean is over examples of each example's token mean, as Eq. (1) of the paper has it, so that
the first gradient of GA_GDR over the whole sets is the paper's update direction Delta.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.influence.loss import mean_over_targets, target_logits, token_nll
from raslik_jax.models.decoder import Decoder


class TokenBatch(NamedTuple):
    """A batch of encoded examples on the device.

    Attributes:
      tokens_BL: token ids, padded on the right.
      target_mask_BL: True where a token's loss counts; a row without any is a dummy.
    """

    tokens_BL: Int[Array, "B L"]
    target_mask_BL: Bool[Array, "B L"]


def mean_over_examples(value_B: Float[Array, " B"], batch: TokenBatch) -> Float[Array, ""]:
    """Returns the mean over the rows that are examples; dummy rows do not count."""
    is_example_B = jnp.any(batch.target_mask_BL, axis=-1)
    total = jnp.sum(jnp.where(is_example_B, value_B, 0.0))
    return total / jnp.maximum(jnp.sum(is_example_B), 1).astype(value_B.dtype)


def nll(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    batch: TokenBatch,
    *,
    num_targets: int,
    dropout_key: jax.Array | None = None,
) -> Float[Array, ""]:
    """Returns the mean over examples of the mean token negative log likelihood, in nats."""
    keys = None
    if dropout_key is not None:
        keys = jax.random.split(dropout_key, batch.tokens_BL.shape[0])

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

    value_B = jax.vmap(of_example, in_axes=(0, 0, None if keys is None else 0))(
        batch.tokens_BL, batch.target_mask_BL, keys
    )
    return mean_over_examples(value_B, batch)


def kl_divergence(
    log_p_TV: Float[Array, "T V"], log_q_TV: Float[Array, "T V"]
) -> Float[Array, " T"]:
    """Returns KL(p || q) of each row, in nats, from log probabilities.

    It is zero with zero gradient at p = q, unlike the sum over raw logits that MUSE's code takes.
    """
    return jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=-1)


def kl_from_reference(
    decoder: Decoder,
    lora: Tree,
    reference: Tree,
    base: Tree,
    batch: TokenBatch,
    *,
    num_targets: int,
    direction: Literal["reverse", "forward"],
) -> Float[Array, ""]:
    """Returns the mean token KL between the model and its reference on a batch.

    Args:
      decoder: the model's pure functions.
      lora: adapter being unlearned.
      reference: adapter before unlearning; the base is shared, not copied.
      base: frozen weights of both.
      batch: retain examples; only their target positions count, pads never do.
      num_targets: rows of the head, at least the most targets of any row; static.
      direction: `reverse` is KL(unlearned || reference), as the paper writes it; `forward` is
        KL(reference || unlearned), as TOFU and open-unlearning have it.
    """

    def of_example(tokens_L: Array, target_mask_L: Array) -> Array:
        now = target_logits(decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets)
        then = target_logits(
            decoder, reference, base, tokens_L, target_mask_L, num_targets=num_targets
        )
        log_now_TV = jax.nn.log_softmax(now.logits_TV)
        log_then_TV = jax.lax.stop_gradient(jax.nn.log_softmax(then.logits_TV))
        if direction == "reverse":
            value_T = kl_divergence(log_now_TV, log_then_TV)
        else:
            value_T = kl_divergence(log_then_TV, log_now_TV)
        return mean_over_targets(value_T, now.is_counted_T)

    value_B = jax.vmap(of_example)(batch.tokens_BL, batch.target_mask_BL)
    return mean_over_examples(value_B, batch)
