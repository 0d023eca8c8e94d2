"""Sentence vectors of texts by a BERT-like encoder, for EmbeddingSim."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch, map_rows, plan_by_length, real_tokens
from raslik_jax.data.tokens.encoding import encode_rows
from raslik_jax.models.encoder import Encoder
from raslik_jax.parallel import meshes


def embed_texts(
    encoder: Encoder,
    weights: Tree,
    tokens: Sequence[Sequence[int]],
    *,
    batch_size: int = 64,
    bar: str = "",
) -> Float[np.ndarray, "N E"]:
    """Returns the sentence vector of length 1 of every text.

    Tokens include the encoder's special ones. `bar` is the text before the progress bar; empty for
    silence.
    """
    config = encoder.config
    if not tokens:
        return np.zeros((0, config.hidden_size), np.float32)
    encoded = encode_rows(tokens, pad_id=config.pad_token_id, limit=config.max_length)
    step = functools.partial(embedding_step(encoder), meshes.place(weights))
    plans = plan_by_length(encoded, batch_size=min(batch_size, len(tokens)))
    return map_rows(step, encoded, plans, bar=bar)


def embedding_step(encoder: Encoder) -> Callable[[Tree, Batch], Array]:
    """Returns the jitted function from (weights, batch) to the sentence vectors [B, E]."""

    def of_rows(weights: Tree, batch: Batch) -> Array:
        return jax.vmap(encoder.embed, in_axes=(None, 0, 0))(
            weights, batch.tokens_BL, real_tokens(batch)
        )

    @jax.jit
    def embed(weights: Tree, batch: Batch) -> Array:
        return meshes.by_rows(of_rows, weights, rows=batch)

    return embed
