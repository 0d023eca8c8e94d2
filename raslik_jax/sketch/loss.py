"""The loss of one example, with the vocabulary head run at target positions only."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.head import target_nll

SketchLoss = Literal["next_token", "unshifted"]


class TargetLogits(NamedTuple):
    """Logits at the positions that predict counted tokens.

    Attributes:
      logits_TV: float32 logits; rows beyond the counted ones belong to no target.
      labels_T: the token each row is scored against.
      is_counted_T: True for the rows that belong to a target.
    """

    logits_TV: Float[Array, "T V"]
    labels_T: Int[Array, " T"]
    is_counted_T: Bool[Array, " T"]


class TargetPositions(NamedTuple):
    """Where the targets of one example are.

    Attributes:
      position_T: the target tokens' own positions.
      source_T: the positions whose hidden states predict them.
      is_counted_T: True for the rows that belong to a target.
    """

    position_T: Int[Array, " T"]
    source_T: Int[Array, " T"]
    is_counted_T: Bool[Array, " T"]


def target_positions(
    target_mask_L: Bool[Array, " L"], *, num_targets: int, loss: SketchLoss
) -> TargetPositions:
    """Returns the positions of the targets, in order, and rows that belong to none after them."""
    (position_T,) = jnp.nonzero(target_mask_L, size=num_targets, fill_value=1)
    return TargetPositions(
        position_T=position_T,
        source_T=position_T - 1 if loss == "next_token" else position_T,
        is_counted_T=jnp.arange(num_targets) < jnp.sum(target_mask_L),
    )


def target_logits(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
    loss: SketchLoss = "next_token",
    dropout_key: jax.Array | None = None,
) -> TargetLogits:
    """Returns the logits at the positions whose loss counts, and nowhere else.

    The head is the largest matrix of a small model; at L positions it would cost more than the
    layers. Tokens are padded on the right, so causality alone keeps pads out of every target.

    Args:
      decoder: the model's pure functions.
      lora: LoRA parameters, `{}` for none.
      base: base weights.
      tokens_L: token ids, padded on the right.
      target_mask_L: True where a token is a target; position 0 can be none for `next_token`.
      num_targets: rows of the result, at least the number of targets; static.
      loss: `next_token` scores token t with the logits of position t - 1; `unshifted` with those
        of position t itself.
      dropout_key: key of the LoRA dropout; None turns it off.
    """
    hidden_LE = decoder.hidden(lora, base, tokens_L, dropout_key=dropout_key)
    where = target_positions(target_mask_L, num_targets=num_targets, loss=loss)
    return TargetLogits(
        logits_TV=decoder.logits(lora, base, hidden_LE[where.source_T]),
        labels_T=tokens_L[where.position_T],
        is_counted_T=where.is_counted_T,
    )


def mean_over_targets(
    value_T: Float[Array, " T"], is_counted_T: Bool[Array, " T"]
) -> Float[Array, ""]:
    """Returns the mean over counted targets, 0 where there is none."""
    total = jnp.sum(jnp.where(is_counted_T, value_T, 0.0))
    return total / jnp.maximum(jnp.sum(is_counted_T), 1).astype(value_T.dtype)


def token_nll(target: TargetLogits) -> Float[Array, " T"]:
    """Returns the negative log likelihood of each label, in nats; float32."""
    label_T = jnp.take_along_axis(target.logits_TV, target.labels_T[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(target.logits_TV, axis=-1) - label_T


def head_table(base: Tree) -> tuple[Array, int]:
    """Returns the weights of the vocabulary head and which of their axes is V.

    A tied head is the table of embeddings, [V, E]; an own one is a kernel, [E, V].
    """
    return (base["head"]["kernel"], 1) if "head" in base else (base["embed"]["embedding"], 0)


def example_loss(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
    loss: SketchLoss = "next_token",
    dropout_key: jax.Array | None = None,
) -> Float[Array, ""]:
    """Returns the mean negative log likelihood of one example's targets, in nats.

    `next_token` is l(x; theta) of the paper: response tokens and EOS, each predicted from what
    stands before it. `unshifted` is the cross-entropy of the logits at position t against token t
    itself, for the same tokens. No model is trained on that loss, so its gradient at a fine-tuned
    adapter does not fade with the fit; at such an adapter it is the better influence kernel
    (docs/notes/sketch.md), which is its only use.

    The head is frozen and its logits are never stored (`head.target_nll`); to train it, take
    `mean_over_targets(token_nll(target_logits(...)))`, which is the same number.

    Args: as `target_logits`.

    Returns:
      A float32 scalar; 0, with zero gradient, where no token is a target.

    Raises:
      ValueError: when differentiated with respect to the head.
    """
    hidden_LE = decoder.hidden(lora, base, tokens_L, dropout_key=dropout_key)
    where = target_positions(target_mask_L, num_targets=num_targets, loss=loss)
    table, vocab_axis = head_table(base)
    nll_T = target_nll(
        table, hidden_LE[where.source_T], tokens_L[where.position_T], where.is_counted_T, vocab_axis
    )
    return mean_over_targets(nll_T, where.is_counted_T)
