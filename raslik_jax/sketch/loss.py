"""The loss of one example with the vocabulary head at target positions only."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import chosen
from raslik_jax.models.decoder import Decoder
from raslik_jax.parallel import meshes
from raslik_jax.sketch.head import counted_first, target_nll

SketchLoss = Literal["next_token", "unshifted"]


class Targets(NamedTuple):
    """The targets of one example in order, then padding rows that are not counted.

    The hidden states are final ones at the positions that predict the labels.
    """

    hidden_TE: Float[Array, "T E"]
    label_T: Int[Array, " T"]
    is_counted_T: Bool[Array, " T"]


def find_targets(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
    loss: SketchLoss = "next_token",
    dropout_key: jax.Array | None = None,
    hidden_TE: Float[Array, "T E"] | None = None,
) -> Targets:
    """Returns the positions whose loss counts, so that the head runs there and nowhere else.

    The head is the largest matrix of a small model. At all L positions it would take longer than
    the layers. Tokens are padded on the right, so causal attention keeps pads out of every target.

    Args:
      lora: adapter; `{}` for none.
      target_mask_L: True if a token is a target; for `next_token` position 0 does not count.
      num_targets: rows of the result, at least the number of targets; static.
      loss: `next_token` predicts token t from position t - 1, `unshifted` from position t.
      hidden_TE: the hidden states of the result; None to compute them.
    """
    before = chosen("loss", loss, {"next_token": 1, "unshifted": 0})
    if before:  # nothing tells the first token
        target_mask_L = jnp.asarray(target_mask_L).at[0].set(False)
    is_counted_T = jnp.arange(num_targets) < jnp.sum(target_mask_L)
    order_L = counted_first(target_mask_L)
    order_T = jnp.pad(order_L, (0, max(num_targets - len(order_L), 0)))[:num_targets]
    position_T = jnp.where(is_counted_T, order_T, 1)
    if hidden_TE is None:
        row = tokens_L, target_mask_L
        hidden_LE = hidden_of_row(decoder, lora, base, *row, dropout_key=dropout_key)
        hidden_TE = hidden_LE[position_T - before]
    return Targets(hidden_TE, label_T=tokens_L[position_T], is_counted_T=is_counted_T)


def hidden_of_row(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "L E"]:
    """Returns the final hidden states of a right-padded row, exact up to its last target.

    It needs no mask, so the fastest attention can be used. If rotary positions depend on the length
    of the row (longrope), a row beyond the border gets a mask that ends at its last target.
    """
    border, options = decoder.config.rotation_border, {}
    if border is not None and len(tokens_L) > border:
        place_L = jnp.arange(len(tokens_L))
        options["mask_L"] = place_L <= jnp.max(jnp.where(target_mask_L, place_L, 0))
    return decoder.hidden(lora, base, tokens_L, dropout_key=dropout_key, **options)


def mean_over_targets(
    value_T: Float[Array, " T"], is_counted_T: Bool[Array, " T"]
) -> Float[Array, ""]:
    """Returns the mean over counted targets; 0 if there is none."""
    total = jnp.sum(jnp.where(is_counted_T, value_T, 0.0))
    return total / jnp.maximum(jnp.sum(is_counted_T), 1).astype(value_T.dtype)


def head_table(base: Tree) -> tuple[Array, int]:
    """Returns the weights of the vocabulary head and the number of their axis V.

    A tied head is the table of embeddings [V, E]. Another head is a kernel [E, V].
    """
    own = (base["head"]["kernel"], 1) if "head" in base else (base["embed"]["embedding"], 0)
    return meshes.gather(own[0]), own[1]


def example_loss(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
    loss: SketchLoss = "next_token",
) -> Float[Array, ""]:
    """Returns the mean negative log likelihood of one example's targets, in nats.

    `next_token` is l(x; theta) of the paper: response tokens and EOS, each predicted from the
    tokens before it. `unshifted` is the cross-entropy of the logits at position t against token t
    itself. No model is trained on that loss. So its gradient at a fine-tuned adapter stays large
    and is the better influence kernel (docs/guides/gradient.md).

    The value is float32; 0 with zero gradient if no token is a target. The head is frozen and its
    logits are never stored (`head.target_nll`).
    """
    targets = find_targets(
        decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets, loss=loss
    )
    table, vocab_axis = head_table(base)
    nll_T = target_nll(table, *targets, vocab_axis, decoder.config.logit_cap)
    return mean_over_targets(nll_T, targets.is_counted_T)
