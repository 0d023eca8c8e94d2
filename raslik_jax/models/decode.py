"""Text generation with a key-value cache, greedy or drawn, in batches of few static shapes.

Prompts are padded on the left. Every row then writes its next token into the same slot of the
cache: one vectorized update at an index that is not batched. The cache has room for the prompt and
all new tokens from the start. The loop ends when every row has reached its end token.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch, BatchPlan, map_rows, next_count, plan_by_length
from raslik_jax.data.tokens.encoding import encode_rows
from raslik_jax.models import products
from raslik_jax.models.decoder import Decoder
from raslik_jax.models.layers import KeyValues
from raslik_jax.parallel import meshes

# From prompts to their batches of at most batch_size rows.
Plan = Callable[..., tuple[BatchPlan, ...]]


class Drawing(NamedTuple):
    """The draw of tokens from softmax(logits / temperature) in place of the most likely ones.

    The key of a prompt depends on its place among the prompts and not on its batch.
    """

    key: jax.Array
    temperature: float | jax.Array = 1.0


class _Loop(NamedTuple):
    """The values that a decoding step passes to the next; each row has `step` tokens.

    `is_done` covers the rows of all devices, which take their steps together.
    """

    step: Int[jax.Array, ""]
    tokens_BT: Int[jax.Array, "B T"]
    done_B: Bool[jax.Array, " B"]
    is_done: Bool[jax.Array, ""]
    cache: KeyValues


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def generate_batch(
    lora: Tree,
    base: Tree,
    prompts: Batch,
    end_ids: Int[jax.Array, " ends"],
    pad_id: Int[jax.Array, ""],
    drawing: Drawing | None = None,
    *,
    decoder: Decoder,
    max_new_tokens: int,
) -> Int[jax.Array, "B T"]:
    """Returns the new tokens of every row; `pad_id` follows a row's end token."""
    decode = functools.partial(_decode, decoder=decoder, max_new_tokens=max_new_tokens)
    return meshes.by_rows(decode, lora, base, end_ids, pad_id, drawing, rows=prompts)


def _decode(
    lora: Tree,
    base: Tree,
    end_ids: jax.Array,
    pad_id: jax.Array,
    drawing: Drawing | None,
    prompts: Batch,
    *,
    decoder: Decoder,
    max_new_tokens: int,
) -> Int[jax.Array, "B T"]:
    """Returns the new tokens of the rows of one device."""
    tokens_BL, mask_BL = jnp.asarray(prompts.tokens_BL), jnp.asarray(prompts.target_mask_BL)
    num_rows, length = tokens_BL.shape

    def pick(hidden_BE: jax.Array, step: int | jax.Array) -> jax.Array:
        logits_BV = decoder.logits(lora, base, hidden_BE)
        if drawing is not None:
            # In float32, as every softmax here.
            logits_BV = logits_BV.astype(jnp.float32) / drawing.temperature
            logits_BV += _gumbel(drawing.key, prompts.row_B, step, logits_BV.shape[-1])
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    # The last new token is never read back, so it needs no slot.
    room = ((0, 0), (0, max_new_tokens - 1))
    slot_S = jnp.arange(length + max_new_tokens - 1)
    prompt_mask_BS = jnp.pad(mask_BL, room)
    prompt_length_B = jnp.sum(mask_BL, axis=1, dtype=jnp.int32)

    def prefill(tokens_L: jax.Array, mask_L: jax.Array) -> tuple[jax.Array, KeyValues]:
        hidden_LE, fresh = decoder.prefill(lora, base, tokens_L, mask_L=mask_L)
        return hidden_LE[-1], fresh

    # The batch axis of the cache is second, behind the layers. A scan over layers needs it there,
    # so no step transposes the cache.
    last_BE, fresh = jax.vmap(prefill, out_axes=(0, 1))(tokens_BL, mask_BL)
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), *room, (0, 0))), fresh)
    first_B = pick(last_BE, 0)
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

    def advance(loop: _Loop) -> _Loop:
        update = jax.lax.dynamic_update_slice_in_dim
        token_B = jax.lax.dynamic_index_in_dim(loop.tokens_BT, loop.step - 1, 1, keepdims=False)
        slot = length + loop.step - 1
        past_mask_BS = prompt_mask_BS | ((slot_S >= length) & (slot_S < slot))[None, :]
        hidden_BE, fresh = jax.vmap(extend, in_axes=(0, 1, 0, 0), out_axes=(0, 1))(
            token_B, loop.cache, past_mask_BS, prompt_length_B + loop.step - 1
        )
        cache = jax.tree.map(lambda old, new: update(old, new, slot, axis=3), loop.cache, fresh)
        next_B = jnp.where(loop.done_B, pad_id, pick(hidden_BE, loop.step))
        tokens_BT = update(loop.tokens_BT, next_B[:, None], loop.step, axis=1)
        done_B = loop.done_B | jnp.isin(next_B, end_ids)
        return _Loop(loop.step + 1, tokens_BT, done_B, meshes.are_all(jnp.all(done_B)), cache)

    return jax.lax.while_loop(
        lambda loop: (loop.step < max_new_tokens) & ~loop.is_done,
        advance,
        _Loop(jnp.int32(1), tokens_BT, done_B, meshes.are_all(jnp.all(done_B)), cache),
    ).tokens_BT


def _gumbel(
    key: jax.Array, row_B: Int[jax.Array, " B"], step: int | jax.Array, size: int
) -> Float[jax.Array, "B V"]:
    """Returns noise of a step: the largest of logits with it is a draw from their softmax.

    Gumbel (1954); Maddison et al. (2014, arXiv:1411.0030), section 2.
    """

    def of_row(row: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, row), step), (size,))

    return jax.vmap(of_row)(row_B)


def room(config: Any, size: int) -> int:
    """Returns how many tokens a model can add to a prompt of this size.

    The limit is the model's last position, or the position at which the rotation changes, because
    cached keys would then have the wrong one. The last new token is never read.
    """
    left, border = config.max_position_embeddings - size, config.rotation_border
    return left if border is None or size > border else min(left, border - size + 1)


def _check(prompts: Sequence[Sequence[int]], config: Any) -> None:
    rows, most = config.vocab_size, config.max_position_embeddings
    for index, prompt in enumerate(prompts):
        size = len(prompt)
        if not 0 < size < most:
            must = f"must have 1 to {most - 1} tokens, got {size}"
            raise ValueError(f"prompt {index} {must}: the model has {most} positions")
        if min(prompt) < 0 or max(prompt) >= rows:
            got = f"{min(prompt)} to {max(prompt)} in prompt {index}"
            raise ValueError(f"tokens must be in [0, {rows}), got {got}: use the model's tokenizer")


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
    bar: str = "",
    plan: Plan = plan_by_length,
    drawing: Drawing | None = None,
) -> list[list[int]]:
    """Returns a continuation of every prompt in the given order, greedy unless it is drawn.

    Each token is the most likely one, with the smallest id among equals. A continuation does not
    depend on the other prompts of its batch: padding contributes exactly 0. It has the new tokens
    only. An end token is cut off, so it may be empty. `room` says where it ends.

    Args:
      decoder: The model's functions.
      lora: The adapter, {} for none.
      base: The frozen weights.
      prompts: Token ids, at least one each, fewer than the model's positions.
      max_new_tokens: The most tokens to generate for a prompt.
      eos_id: The token, or tokens, that end a continuation; None to generate all tokens always.
      pad_id: Fills the padding; any id of the vocabulary, its embedding is never seen.
      batch_size: Rows decoded together. The program is compiled once for each (rows, padded length
        of the longest prompt, max_new_tokens); with fewer prompts than this, the rows are those of
        `next_count`.
      bar: Text before the progress bar; empty for silence.
      plan: The batches of the prompts, plan(encoded, batch_size=rows).
      drawing: Draws the tokens, at a temperature above 0.
    """
    if max_new_tokens < 1 or batch_size < 1:
        got = f"{max_new_tokens} and {batch_size}"
        raise ValueError(f"max_new_tokens and batch_size must be at least 1, got {got}: raise them")
    _check(prompts, decoder.config)
    if not prompts:
        return []
    ends = [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else list(eos_id)
    # No token is -1: it fills the list to a length that most models share, so that other ends, or
    # none, are no other program.
    end_ids = jnp.asarray(np.asarray(ends + [-1] * (8 - len(ends) % 8), np.int32))
    # XLA multiplies a single row by narrow weights ten times slower than two.
    least = 2 if products.is_narrow(base["embed"]["embedding"]) else 1
    num_rows = max(least, min(batch_size, next_count(len(prompts))))
    encoded = encode_rows(prompts, pad_id=pad_id)
    options = {"decoder": decoder, "max_new_tokens": max_new_tokens}

    def new_tokens(batch: Batch) -> jax.Array:
        return generate_batch(lora, base, batch, end_ids, jnp.int32(pad_id), drawing, **options)

    plans = plan(encoded, batch_size=num_rows)
    rows = map_rows(new_tokens, encoded, plans, left=True, bar=bar).tolist()
    rows = [
        new[: room(decoder.config, len(prompt))] for new, prompt in zip(rows, prompts, strict=True)
    ]
    return [new[: next((i for i, t in enumerate(new) if t in ends), len(new))] for new in rows]
