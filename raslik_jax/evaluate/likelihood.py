"""How likely a model finds answers that somebody else wrote."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.data.batches import (
    DUMMY_ROW,
    BatchPlan,
    Encoded,
    make_batch,
    next_rung,
    plan_batches,
)
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import example_loss

# Shapes at most: a forward pass is cheap beside the compilation of one more.
_SHAPES = 2


class Likelihood(NamedTuple):
    """The negative log likelihood of each answer.

    Attributes:
      nll_N: mean over the answer's tokens, EOS among them, in nats a token.
      tokens_N: how many tokens that mean is over; 0 where the prompt alone fills max_len.
    """

    nll_N: Float[np.ndarray, " N"]
    tokens_N: Int[np.ndarray, " N"]


# measure(lora, base, encoded, on_ladder=False) -> Likelihood
Measure = Callable[..., Likelihood]


def answer_likelihood(decoder: Decoder, *, batch_tokens: int) -> Measure:
    """Returns the function from a model and encoded answers to their likelihood.

    It is the loss that the model is trained on, `next_token` over the response, by example. The
    function compiles once per shape, whatever adapter it is given, and there are two shapes for
    one set of answers. With `on_ladder` the one shape is the next of a short ladder, so that sets
    of other answers to the same queries share it.

    Args:
      decoder: the model's pure functions.
      batch_tokens: tokens of one batch at most, padding included.

    Raises (the function returned):
      ValueError: an answer longer than batch_tokens, or a likelihood that is not a number.
    """

    def of_batch(
        lora: Tree, base: Tree, tokens_BL: Array, target_mask_BL: Array, *, num_targets: int
    ) -> Array:
        def of_example(tokens_L: Array, target_mask_L: Array) -> Array:
            return example_loss(
                decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets
            )

        return jax.vmap(of_example)(tokens_BL, target_mask_BL)

    compiled = jax.jit(of_batch, static_argnames="num_targets")

    def measure(lora: Tree, base: Tree, encoded: Encoded, *, on_ladder: bool = False) -> Likelihood:
        plans = (
            plan_on_ladder(encoded, batch_tokens)
            if on_ladder
            else plan_batches(
                encoded.lengths_N,
                encoded.num_targets_N,
                ids=[str(row) for row in range(len(encoded.ids))],
                num_buckets=_SHAPES,
                batch_tokens=batch_tokens,
            )
        )
        nll_N = np.zeros(len(encoded.ids))
        # All batches are under way before the first is waited for.
        running = []
        for plan in plans:
            batch = make_batch(encoded, plan)
            nll_B = compiled(
                lora,
                base,
                jnp.asarray(batch.tokens_BL),
                jnp.asarray(batch.target_mask_BL),
                num_targets=plan.num_targets,
            )
            running.append((plan.rows, nll_B))
        for rows, nll_B in running:
            is_real = rows != DUMMY_ROW
            nll_N[rows[is_real]] = np.asarray(nll_B)[is_real]
        bad = np.flatnonzero(~np.isfinite(nll_N))
        if len(bad):
            raise ValueError(
                f"finite likelihoods wanted, {len(bad)} of {len(nll_N)} are not, such as that of "
                f"{encoded.ids[bad[0]]}: the model's weights have overflown, unlearn at a lower "
                "learning rate"
            )
        return Likelihood(nll_N, encoded.num_targets_N)

    return measure


def plan_on_ladder(encoded: Encoded, batch_tokens: int) -> tuple[BatchPlan, ...]:
    """Returns batches of one shape, which depends on the longest row by a rung of the ladder."""
    length = next_rung(int(encoded.lengths_N.max()))
    num_targets = min(next_rung(int(encoded.num_targets_N.max())), length)
    num_rows = len(encoded.ids)
    num_batches = -(-num_rows // max(1, batch_tokens // length))
    batch_size = -(-num_rows // num_batches)
    slots = np.full(num_batches * batch_size, DUMMY_ROW, np.int64)
    slots[:num_rows] = np.arange(num_rows)
    return tuple(
        BatchPlan(rows, length, num_targets) for rows in slots.reshape(num_batches, batch_size)
    )
