"""How likely a model finds given answers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch, BatchPlan, map_rows, plan_batches, plan_one_shape
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.models.decoder import Decoder
from raslik_jax.parallel import meshes
from raslik_jax.sketch.head import target_nll
from raslik_jax.sketch.loss import example_loss, find_targets, head_table, mean_over_targets

# The most shapes, and how many times the fewest tokens one shape may have in place of them: a
# forward pass takes less time than the compilation of one more.
_SHAPES, _WORTH = 2, 1.25
# (lora, base, batch) -> what is measured of each row
Step = Callable[[Tree, Tree, Batch], Any]


class NotFinite(ValueError):
    """A model has likelihoods that are not finite."""


class Likelihood(NamedTuple):
    """The mean nats a token of each answer (EOS included) and the number of its tokens.

    The number is 0 if the prompt alone fills max_len.
    """

    nll_N: Float[np.ndarray, " N"]
    tokens_N: Int[np.ndarray, " N"]


class Expected(NamedTuple):
    """The expected nats a token of a model's own draws, at the tokens of an answer.

    At each token the nats of a draw have a mean (the entropy of the next token) and a variance.
    `mean_N` is the mean of the entropies. `spread_N` is the root of the summed variances over the
    number of tokens: the standard deviation of a drawn answer's nats a token around it.
    """

    mean_N: Float[np.ndarray, " N"]
    spread_N: Float[np.ndarray, " N"]


class Divergence(NamedTuple):
    """The mean KL per token between a model and a reference over each answer, in nats.

    `from_reference_N` is KL(reference || model), `to_reference_N` is KL(model || reference).
    """

    from_reference_N: Float[np.ndarray, " N"]
    to_reference_N: Float[np.ndarray, " N"]


def likelihood_step(decoder: Decoder) -> Step:
    """Returns the jitted function from `(lora, base, batch)` to the loss of each answer."""
    return _step(functools.partial(example_loss, decoder))


def token_step(decoder: Decoder) -> Step:
    """Returns the jitted function from `(lora, base, batch)` to the loss of each target, [B, T]."""

    def of_row(lora: Tree, base: Tree, *row: Array, num_targets: int) -> Array:
        table, vocab_axis = head_table(base)
        targets = find_targets(decoder, lora, base, *row, num_targets=num_targets)
        nll_T = target_nll(table, *targets, vocab_axis, decoder.config.logit_cap)
        return jnp.where(targets.is_counted_T, nll_T, 0.0)

    return _step(of_row)


def expected_step(decoder: Decoder) -> Step:
    """Returns the jitted function from `(lora, base, batch)` to the two of `Expected`, [B] each."""

    def of_row(*inputs: Any, num_targets: int) -> tuple[Array, Array]:
        log_p_TV, is_counted_T = _log_probabilities(decoder, *inputs, num_targets=num_targets)
        p_TV = jnp.exp(log_p_TV)
        entropy_T = -jnp.sum(p_TV * log_p_TV, axis=-1)
        variance_T = jnp.sum(p_TV * (log_p_TV + entropy_T[:, None]) ** 2, axis=-1)
        count = jnp.maximum(jnp.sum(is_counted_T), 1).astype(jnp.float32)
        mean, variance = (
            jnp.sum(jnp.where(is_counted_T, part_T, 0.0)) for part_T in (entropy_T, variance_T)
        )
        return mean / count, jnp.sqrt(variance) / count

    # A row at a time: the logits of a batch may be larger than the model.
    return _step(of_row, one_by_one=True)


def divergence_step(decoder: Decoder) -> Step:
    """Returns the jitted function to the two of `Divergence`, [B] each.

    The adapters of the model and of the reference come as a pair in place of the one adapter.
    """

    def of_row(loras: Tree, base: Tree, *row: Array, num_targets: int) -> tuple[Array, Array]:
        (own_TV, is_counted_T), (other_TV, _) = (
            _log_probabilities(decoder, lora, base, *row, num_targets=num_targets) for lora in loras
        )
        gap_TV = own_TV - other_TV
        from_T = -jnp.sum(jnp.exp(other_TV) * gap_TV, axis=-1)
        to_T = jnp.sum(jnp.exp(own_TV) * gap_TV, axis=-1)
        return mean_over_targets(from_T, is_counted_T), mean_over_targets(to_T, is_counted_T)

    # A row at a time: the logits of a batch may be larger than the model.
    return _step(of_row, one_by_one=True)


def _log_probabilities(
    decoder: Decoder, lora: Tree, base: Tree, *row: Array, num_targets: int
) -> tuple[Float[Array, "T V"], Bool[Array, " T"]]:
    """Returns the logarithms of next tokens' probabilities at a row's targets; which ones count."""
    targets = find_targets(decoder, lora, base, *row, num_targets=num_targets)
    logits_TV = decoder.logits(lora, base, targets.hidden_TE).astype(jnp.float32)
    return jax.nn.log_softmax(logits_TV), targets.is_counted_T


def _step(of_row: Callable[..., Any], *, one_by_one: bool = False) -> Step:
    """Returns the jitted function from `(lora, base, batch)` to `of_row`'s result for each row."""

    def of_rows(lora: Tree, base: Tree, batch: Batch) -> Any:
        own = functools.partial(of_row, lora, base, num_targets=batch.num_targets)
        rows = batch.tokens_BL, batch.target_mask_BL
        return jax.lax.map(lambda row: own(*row), rows) if one_by_one else jax.vmap(own)(*rows)

    @jax.jit
    def of_batch(lora: Tree, base: Tree, batch: Batch) -> Any:
        return meshes.by_rows(of_rows, lora, base, rows=batch)

    return of_batch


def answer_likelihood(decoder: Decoder, *, batch_tokens: int) -> Callable[..., Likelihood]:
    """Returns the function from `(lora, base, encoded, on_ladder=False)` to answers' likelihood.

    It is the training loss of each example: `next_token` over the response. A batch has at most
    batch_tokens, padding included, or one longer row. A set of answers has two shapes. With
    `on_ladder` it has one shape of a short list, which other sets share.
    """
    of_batch = likelihood_step(decoder)

    def measure(lora: Tree, base: Tree, encoded: Encoded, *, on_ladder: bool = False) -> Likelihood:
        plans = _plans(encoded, batch_tokens, on_ladder)
        nll_N = _of_rows(functools.partial(of_batch, lora, base), encoded, plans)
        return Likelihood(nll_N, encoded.num_targets_N)

    return measure


def token_likelihood(decoder: Decoder, *, batch_tokens: int) -> Callable[..., np.ndarray]:
    """Returns the function from `(lora, base, encoded, on_ladder=False)` to answers' nats a token.

    The result is [N, T] with T at least the most tokens of an answer. Zeros follow the last token
    of an answer. The mean over its tokens equals the result of `answer_likelihood`, in batches of
    the same shapes.
    """
    of_batch = token_step(decoder)

    def measure(
        lora: Tree, base: Tree, encoded: Encoded, *, on_ladder: bool = False
    ) -> Float[np.ndarray, "N T"]:
        plans = _plans(encoded, batch_tokens, on_ladder)
        most = max(plan.num_targets for plan in plans)

        def of_shape(batch: Batch) -> Array:
            nll_BT = of_batch(lora, base, batch)
            return jnp.pad(nll_BT, ((0, 0), (0, most - nll_BT.shape[1])))

        nll_NT: np.ndarray = _of_rows(of_shape, encoded, plans)
        return nll_NT

    return measure


def expected_likelihood(decoder: Decoder, *, batch_tokens: int) -> Callable[..., Expected]:
    """Returns the function from `(lora, base, encoded)` to drawn answers' nats at its tokens.

    For tokens drawn from the model sum_t (nll_t - H_t) is a martingale of mean 0. Its variance is
    that of sum_t V_t with H = -sum_v p_v log p_v and V = sum_v p_v (log p_v + H)^2. An answer whose
    nats are many spreads above the mean is an unlikely draw.
    """
    of_batch = expected_step(decoder)

    def measure(lora: Tree, base: Tree, encoded: Encoded) -> Expected:
        plans = _plans(encoded, batch_tokens, on_ladder=True)
        return Expected(*_of_rows(functools.partial(of_batch, lora, base), encoded, plans))

    return measure


def answer_divergence(decoder: Decoder, *, batch_tokens: int) -> Callable[..., Divergence]:
    """Returns the function from two adapters, base and encoded answers to their `Divergence`."""
    of_batch = divergence_step(decoder)

    def measure(lora: Tree, reference: Tree, base: Tree, encoded: Encoded) -> Divergence:
        plans = _plans(encoded, batch_tokens)
        measured = functools.partial(of_batch, (lora, reference), base)
        return Divergence(*_of_rows(measured, encoded, plans))

    return measure


def _plans(encoded: Encoded, batch_tokens: int, on_ladder: bool = False) -> tuple[BatchPlan, ...]:
    if on_ladder:
        return plan_one_shape(encoded, batch_tokens=batch_tokens)
    # A forward pass also has room for a row that is too long for a batch of gradients.
    batch_tokens = max(batch_tokens, -(-int(encoded.lengths_N.max(initial=0)) // 8) * 8)
    one, few = (
        plan_batches(
            *(encoded.lengths_N, encoded.num_targets_N),
            ids=[str(row) for row in range(len(encoded.ids))],
            num_buckets=number,
            batch_tokens=batch_tokens,
        )
        for number in (1, _SHAPES)
    )
    tokens = [sum(plan.rows.size * plan.length for plan in plans) for plans in (one, few)]
    return one if tokens[0] <= _WORTH * tokens[1] else few


def _of_rows(of_batch: Callable[[Batch], Any], encoded: Encoded, plans: Sequence[BatchPlan]) -> Any:
    """Returns a function's result for every row in float64; refuses NaN and infinity."""
    found = map_rows(of_batch, encoded, plans)
    for part in jax.tree.leaves(found):
        bad = np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(axis=1))
        if len(bad):
            raise NotFinite(
                f"likelihoods must be finite, got {len(bad)} of {len(part)} that are not, such as "
                f"that of {encoded.ids[bad[0]]}, because weights overflow: lower the learning "
                "rate, or check the checkpoint"
            )
    return jax.tree.map(lambda part: part.astype(np.float64), found)
