"""The strategy `embedding`: the mean cosine of sentence vectors of prompts (Section 4.2)."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.studies.encoders import checkpoint
from experiments.studies.encoders.encoder import Encoder, bind_encoder, real_tokens
from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_array
from raslik_jax.base.settings import setting
from raslik_jax.data.batches import Batch, map_rows, plan_by_length
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens.encoding import encode_rows
from raslik_jax.index import search
from raslik_jax.models import decoder
from raslik_jax.models.storage import resolve_folder
from raslik_jax.parallel import meshes
from raslik_jax.retrieve.strategies import Bm25Settings, by_score, query_text
from raslik_jax.run.artifacts import Artifact
from raslik_jax.run.programs import AbstractRun, Forward, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages.scores import write_scores
from raslik_jax.run.workspace import Workspace

VECTORS = Artifact("retrieve/embeddings", "examples.npy", read_array, np.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(Bm25Settings):
    """Settings of EmbeddingSim."""

    checkpoint: str = setting(
        "BAAI/bge-base-en-v1.5",
        "Sentence encoder of BERT or RoBERTa, a directory or hub name.",
        is_path=True,
        is_hub=True,
        auto="AutoModel",
    )
    pooling: Literal["", "cls", "mean"] = setting(
        "", "Pooling of the encoder, if its checkpoint does not set it."
    )

    def problems(self) -> list[str]:
        return (
            []
            if self.checkpoint
            else [("--checkpoint must be given, got none: give a sentence encoder")]
        )


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


def make_embeddings(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples' sentence vectors and their cosines with those of queries."""
    example_NE, query_QE = sentence_vectors(workspace, workspace.retrieval_queries())
    VECTORS.write(folder, example_NE)
    aggregate = workspace.config.retrieve.aggregate
    columns = search.to_columns(search.center_queries(query_QE), aggregate=aggregate)
    score_NG = np.asarray(search.row_cosines(example_NE, columns))
    write_scores(workspace, "embeddings", folder, score_NG[:, 0])


def sentence_vectors(
    workspace: Workspace, queries: Sequence[Example]
) -> tuple[Float[np.ndarray, "N E"], Float[np.ndarray, "Q E"]]:
    """Returns the sentence vectors of all training examples and of these queries."""
    settings = workspace.config.retrieve["embedding"]
    path = resolve_folder(settings.checkpoint, auto="AutoModel")
    model = checkpoint.load_encoder(path, dtype=jnp.float32, pooling=settings.pooling or None)
    bound = bind_encoder(model.config)
    encode = checkpoint.load_sentence_tokenizer(path, max_len=model.config.max_length)
    texts = {
        "examples": [query_text(row) for row in workspace.corpus.train],
        "queries": [query_text(row, settings.query_text) for row in queries],
    }
    example_NE, query_QE = (
        embed_texts(bound, model.weights, encode(part), bar=f"vectors of {name}")
        for name, part in texts.items()
    )
    return example_NE, query_QE


def count_embeddings(run: AbstractRun) -> Work:
    """Sentence vectors of the training examples' prompts."""
    rows, name = run.sizes.train, run.config.retrieve["embedding"].checkpoint
    bound, weights = checkpoint.bind_shapes(checkpoint.encoder_config(name))
    program = run.program(
        "embedding",
        embedding_step(bound),
        weights,
        shapes=run.prompts(rows, min(rows, 64)),
        model=Forward(2.0 * decoder.count_parameters(weights["layers"])),
    )
    return Work(4.0 * 768 * rows, [program])


STRATEGY = by_score(
    "Embedding", "embeddings", settings=EmbeddingSettings(), color="#CC79A7", marker="P"
)
# What the strategy needs, see `scores.SCORES`.
SCORES = (
    Recipe(
        "retrieve/embeddings",
        make_embeddings,
        "{train} {queries}",
        "retrieve.embedding retrieve.aggregate sketch.query_output",
        work=count_embeddings,
    ),
)
