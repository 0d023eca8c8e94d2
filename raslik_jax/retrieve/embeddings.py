"""Sentence vectors of texts by a BERT-like encoder, for EmbeddingSim."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from raslik_jax.axes import Tree
from raslik_jax.models.encoder import Encoder
from raslik_jax.progress import progress as progress_bar

# Padded lengths: few, because each is compiled once; a text is padded by a third at worst.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def embed_texts(
    encoder: Encoder,
    weights: Tree,
    tokens: Sequence[Sequence[int]],
    *,
    batch_tokens: int = 8192,
    progress: str = "",
) -> Float[np.ndarray, "N E"]:
    """Returns the sentence vector, of length 1, of every text.

    Texts run in order of length, so that little is padded; a vector does not depend on what it is
    batched with beyond rounding.

    Args:
      encoder: bound, with a pooling.
      weights: its weights.
      tokens: ids of each text, with the encoder's special tokens, none empty.
      batch_tokens: tokens of a batch, padding included.
      progress: text before the progress bar; empty for silence.

    Raises:
      ValueError: a text is empty or longer than the encoder takes.
    """
    lengths_N = np.array([len(ids) for ids in tokens], np.int64)
    limit = encoder.config.max_length
    if len(tokens) and not 1 <= lengths_N.min() <= lengths_N.max() <= limit:
        raise ValueError(
            f"texts of 1 to {limit} tokens wanted, came {lengths_N.min()} to {lengths_N.max()}: "
            "cut them when tokenizing"
        )
    embed = jax.jit(jax.vmap(encoder.embed, in_axes=(None, 0, 0)))
    vector_NE = np.zeros((len(tokens), encoder.config.hidden_size), np.float32)
    edges = [*(edge for edge in _LENGTHS if edge < limit), limit]
    bucket_N = np.searchsorted(edges, lengths_N)
    bar = progress_bar(None, progress, total=len(tokens), unit="text")
    for bucket in np.unique(bucket_N):
        width = edges[bucket]
        rows = np.flatnonzero(bucket_N == bucket)
        size = min(max(batch_tokens // width, 1), len(rows))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            tokens_BL = np.full((size, width), encoder.config.pad_token_id, np.int32)
            mask_BL = np.zeros((size, width), bool)
            mask_BL[:, 0] = True  # a dummy row has a token too, or its softmax is of nothing
            for place, row in enumerate(part):
                tokens_BL[place, : lengths_N[row]] = tokens[row]
                mask_BL[place, : lengths_N[row]] = True
            vectors_BE = embed(weights, jnp.asarray(tokens_BL), jnp.asarray(mask_BL))
            vector_NE[part] = np.asarray(vectors_BE)[: len(part)]
            bar.update(len(part))
    bar.close()
    return vector_NE
