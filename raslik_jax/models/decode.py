"""Text generation with a key-value cache, in batches of few static shapes.

Prompts are padded on the left, so that every row writes its next token into the same slot of the
cache: one vectorized update at an index that is not batched. The cache has room for the prompt and
all new tokens from the start, and the loop ends when every row has met its end token.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.data.batches import Batch, map_rows, plan_by_length
from raslik_jax.data.encoding import encode_rows
from raslik_jax.models.decoder import Decoder
from raslik_jax.models.layers import KeyValues


class _Loop(NamedTuple):
    """What one decoding step hands to the next."""

    step: Int[jax.Array, ""]
    tokens_BT: Int[jax.Array, "B T"]
    done_B: Bool[jax.Array, " B"]
    cache: KeyValues


def nucleus_logits(
    logits_V: Float[jax.Array, " V"], top_p: Float[jax.Array, ""]
) -> Float[jax.Array, " V"]:
    """Returns logits with all tokens outside the nucleus set to minus infinity.

    The nucleus is the smallest set of most likely tokens whose probability reaches `top_p`; ties
    go to the smaller id. The most likely token is always in it.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751).
    """
    order_V = jnp.argsort(-logits_V, stable=True)
    probability_V = jax.nn.softmax(logits_V[order_V])
    # The mass before a token: a token is kept while the ones before it do not reach top_p.
    before_V = jnp.cumsum(probability_V) - probability_V
    keep_V = (
        jnp.zeros(logits_V.shape, bool).at[order_V].set(before_V < top_p).at[order_V[0]].set(True)
    )
    return jnp.where(keep_V, logits_V, -jnp.inf)


def _pick(
    logits_BV: Float[jax.Array, "B V"],
    key_B: Any,
    step: Int[jax.Array, ""],
    temperature: Float[jax.Array, ""],
    top_p: Float[jax.Array, ""],
    *,
    sampled: bool,
    nucleus: bool,
) -> Int[jax.Array, " B"]:
    """Returns the next token of every row: the most likely, or a draw from the row's own key."""
    if not sampled:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw(logits_V: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = logits_V / temperature
        if nucleus:
            logits_V = nucleus_logits(logits_V, top_p)
        return jax.random.categorical(jax.random.fold_in(key, step), logits_V).astype(jnp.int32)

    return jax.vmap(draw)(logits_BV, key_B)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens", "sampled", "nucleus"))
def _generate_batch(
    lora: Tree,
    base: Tree,
    prompts: Batch,
    end_ids: Int[jax.Array, " ends"],
    pad_id: Int[jax.Array, ""],
    key: jax.Array,
    temperature: Float[jax.Array, ""],
    top_p: Float[jax.Array, ""],
    *,
    decoder: Decoder,
    max_new_tokens: int,
    sampled: bool,
    nucleus: bool,
) -> Int[jax.Array, "B T"]:
    """Returns the new tokens of every row; `pad_id` follows a row's end token."""
    tokens_BL, mask_BL = jnp.asarray(prompts.tokens_BL), jnp.asarray(prompts.target_mask_BL)
    num_rows, length = tokens_BL.shape
    row_B = jnp.asarray(prompts.row_B, jnp.uint32)
    key_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_B) if sampled else None
    pick = functools.partial(_pick, sampled=sampled, nucleus=nucleus)

    # The last new token is never read back, so it needs no slot.
    num_slots = length + max_new_tokens - 1
    slot_S = jnp.arange(num_slots)
    prompt_mask_BS = jnp.pad(mask_BL, ((0, 0), (0, max_new_tokens - 1)))
    prompt_length_B = jnp.sum(mask_BL, axis=1, dtype=jnp.int32)

    def prefill(tokens_L: jax.Array, mask_L: jax.Array) -> tuple[jax.Array, KeyValues]:
        hidden_LE, fresh = decoder.prefill(lora, base, tokens_L, mask_L=mask_L)
        return hidden_LE[-1], fresh

    # The batch axis of the cache stands second, behind the layers: that is where a scan over
    # layers wants it, so no step transposes the cache.
    last_BE, fresh = jax.vmap(prefill, out_axes=(0, 1))(tokens_BL, mask_BL)
    cache = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, max_new_tokens - 1), (0, 0))), fresh
    )
    first_B = pick(decoder.logits(lora, base, last_BE), key_B, jnp.int32(0), temperature, top_p)
    tokens_BT = jnp.full((num_rows, max_new_tokens), pad_id, jnp.int32).at[:, 0].set(first_B)
    # A dummy row (no real token) is done before it begins.
    done_B = (prompt_length_B == 0) | jnp.isin(first_B, end_ids)

    def extend(
        token: jax.Array, past: KeyValues, past_mask_S: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        hidden_LE, fresh = decoder.extend(
            lora, base, token[None], past, past_mask_S=past_mask_S, positions_L=position[None]
        )
        return hidden_LE[0], fresh

    def not_done(loop: _Loop) -> Bool[jax.Array, ""]:
        return (loop.step < max_new_tokens) & ~jnp.all(loop.done_B)

    def advance(loop: _Loop) -> _Loop:
        token_B = jax.lax.dynamic_index_in_dim(
            loop.tokens_BT, loop.step - 1, axis=1, keepdims=False
        )
        slot = length + loop.step - 1
        past_mask_BS = prompt_mask_BS | ((slot_S >= length) & (slot_S < slot))[None, :]
        hidden_BE, fresh = jax.vmap(extend, in_axes=(0, 1, 0, 0), out_axes=(0, 1))(
            token_B, loop.cache, past_mask_BS, prompt_length_B + loop.step - 1
        )
        cache = jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=3),
            loop.cache,
            fresh,
        )
        next_B = pick(decoder.logits(lora, base, hidden_BE), key_B, loop.step, temperature, top_p)
        next_B = jnp.where(loop.done_B, pad_id, next_B)
        return _Loop(
            step=loop.step + 1,
            tokens_BT=jax.lax.dynamic_update_slice_in_dim(
                loop.tokens_BT, next_B[:, None], loop.step, axis=1
            ),
            done_B=loop.done_B | jnp.isin(next_B, end_ids),
            cache=cache,
        )

    start = _Loop(jnp.int32(1), tokens_BT, done_B, cache)
    return jax.lax.while_loop(not_done, advance, start).tokens_BT


def _check(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    top_p: float,
    key: jax.Array | None,
    vocab_size: int,
    max_positions: int,
) -> None:
    """Raises ValueError for settings and prompts that cannot be decoded."""
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(
            f"max_new_tokens and batch_size must be at least 1, got {max_new_tokens=} and "
            f"{batch_size=}: raise them"
        )
    if not temperature >= 0.0 or not 0.0 < top_p <= 1.0:
        raise ValueError(
            f"temperature must be 0 or more and top_p in (0, 1], got {temperature=} and {top_p=}: "
            "correct them"
        )
    if temperature > 0.0 and key is None:
        raise ValueError(f"sampling needs a key, got {temperature=} and {key=}: pass a random key")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty: give it at least one token")
        if len(prompt) + max_new_tokens > max_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and {max_new_tokens=}, but the model has "
                f"{max_positions} positions: shorten one of them"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"tokens must lie in [0, {vocab_size}), got {min(prompt)} to {max(prompt)} in "
                f"prompt {index}: use this model's tokenizer"
            )


def generate(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int | Sequence[int] | None,
    pad_id: int,
    batch_size: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: jax.Array | None = None,
    bar: str = "",
) -> list[list[int]]:
    """Returns the continuation of every prompt, in the order given.

    A continuation does not depend on the other prompts of its batch: padding contributes exactly 0
    and, when sampling, every prompt draws from a key of its own number.

    Args:
      decoder: The model's functions.
      lora: The adapter, {} for none.
      base: The frozen weights.
      prompts: Token ids, at least one each; lengths may differ.
      max_new_tokens: The most tokens to generate for a prompt.
      eos_id: The token, or tokens, that end a continuation; None to generate all tokens always.
      pad_id: Fills the padding; any id of the vocabulary, its embedding is never seen.
      batch_size: Rows decoded together. The program is compiled once for each (rows, padded length
        of the longest prompt, max_new_tokens); with fewer prompts than this, the rows are the next
        power of two.
      temperature: 0 decodes greedily (ties to the smaller id); otherwise logits are divided by it.
      top_p: Sampling is restricted to the nucleus of this probability, in (0, 1].
      key: A random key, needed when temperature > 0.
      bar: Text before the progress bar; empty for silence.

    Returns:
      The new tokens only; an end token is cut off, so a list may be empty.

    Raises:
      ValueError: An empty prompt, a token outside the vocabulary, a prompt that with the new tokens
        exceeds the model's positions, sampling without a key, or settings out of range.
    """
    config = decoder.config
    _check(
        prompts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        top_p=top_p,
        key=key,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )
    if not prompts:
        return []
    ends = [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else list(eos_id)
    # No token is -1: it fills the list to a length that most models share, so that other ends, or
    # none, are no other program.
    end_ids = np.asarray(ends + [-1] * (8 - len(ends) % 8), np.int32)
    num_rows = min(batch_size, 1 << (len(prompts) - 1).bit_length())
    encoded = encode_rows(prompts, pad_id=pad_id)

    def new_tokens(batch: Batch) -> jax.Array:
        return _generate_batch(
            lora,
            base,
            batch,
            jnp.asarray(end_ids),
            jnp.int32(pad_id),
            jax.random.key(0) if key is None else key,
            jnp.float32(max(temperature, 1e-6)),
            jnp.float32(top_p),
            decoder=decoder,
            max_new_tokens=max_new_tokens,
            sampled=temperature > 0.0,
            nucleus=top_p < 1.0,
        )

    plans = plan_by_length(encoded, batch_size=num_rows)
    rows = map_rows(new_tokens, encoded, plans, left=True, bar=bar).tolist()
    return [new[: next((i for i, t in enumerate(new) if t in ends), len(new))] for new in rows]
