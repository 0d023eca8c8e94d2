"""From the rows of the highest scores to their tokens, and to the rows of a wished answer."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from raslik_jax.data import batches, examples
from raslik_jax.data.tokens import encoding
from raslik_jax.index import search
from raslik_jax.index.combine import best_positions, query_weights
from raslik_jax.parallel import meshes
from raslik_jax.run import artifacts, memory
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.stages.scores import EVIDENCE, SCORES_FORMAT, needs_of
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import tokens

# The number of rows searched for each that is shown.
_CANDIDATES = 25
# The rows that are stored for a wished answer.
_WISHED = 8


@memory.explained("shares of tokens", "--retrieve.token_rows or --sketch.size")
def make_tokens(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the contribution of each token of the best rows and of the answer to their scores.

    Rows with nearly the same gradient count as one: the best is shown and the others are named.
    With several queries the answer is that of the query with the highest score for the row.
    """
    config, train = workspace.config, workspace.corpus.train
    score_N = artifacts.INFLUENCE.read(workspace.root, (len(train),))
    store, place_N, queries = sketch_lib.ask_index(workspace)
    center, able = config.retrieve.center, int((score_N > -np.inf).sum())
    number = min(config.retrieve.token_rows, able)
    most = min(_CANDIDATES * number, able)
    best = best_positions(score_N, [row.example_id for row in train], most)
    best = best[
        search.distinct_rows(search.queries_of_rows(store, place_N[best], center=center), number)
    ]
    of_best = search.queries_of_rows(store, place_N[best], center=center)
    alike = search.group_rows(search.score_each(store, of_best)[place_N], best)
    asked = workspace.retrieval_queries()
    row_MK = of_best.direction_QK
    cosine_MQ = row_MK @ queries.direction_QK.T
    nearest = cosine_MQ.argmax(axis=1)
    weight_Q = query_weights(queries.gram_QQ, config.retrieve.aggregate)
    targets = config.sketch.targets
    rows = workspace.cut(workspace.train_rows.take(best), "training examples", targets=targets)
    answers = workspace.encode(asked, "queries", targets=targets)
    toward_K = weight_Q @ queries.direction_QK
    pieces_of = functools.partial(_pieces_of, workspace, _share_function(workspace))
    of_rows = pieces_of(rows, range(len(best)), [toward_K] * len(best), queries.mean_K)
    of_answers = pieces_of(answers, nearest.tolist(), [*row_MK], queries.mean_K)
    found = [
        {
            "id": train[position].example_id,
            "score": float(score_N[position]),
            "row": row,
            "query": asked[query].example_id,
            "cosine": float(cosine_MQ[number, query]),
            "answer": answer,
            "alike": [train[other].example_id for other in alike[number]],
        }
        for number, (position, query, row, answer) in enumerate(
            zip(best.tolist(), nearest.tolist(), of_rows, of_answers, strict=True)
        )
    ]
    artifacts.TOKEN_SHARES.write(folder, found)


def _share_function(workspace: Workspace) -> Callable[..., tokens.Shares]:
    """Returns the function of (vectors, batch of one row) to its shares, compiled once a shape."""
    config, adapter = workspace.config, sketch_lib.sketched_adapter(workspace)
    fixed = meshes.place((sketch_lib.make_projection(workspace, adapter), adapter))

    def of_device(*given: Any) -> Any:
        *whole, vectors, batch = given
        told = tokens.token_shares(
            workspace.sketch_model.decoder,
            *whole,
            *(batch.tokens_BL[0], batch.target_mask_BL[0], *vectors),
            num_targets=batch.num_targets,
            loss=config.sketch.loss,
            normalize=config.sketch.normalize,
        )
        return jax.tree.map(lambda leaf: leaf[None], told)

    @jax.jit
    def shares(*given: Any) -> tokens.Shares:
        *whole, batch = given
        return meshes.by_rows(of_device, *whole, rows=batch)

    base = workspace.sketch_model.base
    return lambda vectors, batch: shares(*fixed, base, vectors, meshes.place_rows(batch))


def _pieces_of(
    workspace: Workspace,
    shares: Callable[..., tokens.Shares],
    encoded: encoding.Encoded,
    rows: Sequence[int],
    toward: Sequence[Float[np.ndarray, " K"]],
    mean_K: Float[np.ndarray, " K"],
) -> list[list[tokens.Piece]]:
    """Returns the pieces of rows with their shares of the score with a direction each."""
    # One shape for all: it is compiled once.
    plan = batches.plan_rows(encoded, np.unique(np.array(rows, np.int64)))
    masks, found = encoded.target_masks(), []
    for row, toward_K in zip(rows, toward, strict=True):
        batch = batches.make_batch(encoded, plan._replace(rows=np.array([row])))
        # The first device's row: the others' are dummies.
        told = shares((toward_K.astype(np.float32), mean_K.astype(np.float32)), batch)
        share = iter(meshes.fetch(told.share_T)[0].astype(np.float64).tolist())
        pieces = tokens.token_pieces(workspace.tokenizer, encoded.tokens[row])
        counted = [next(share) if counts else None for counts in masks[row].tolist()]
        found.append(tokens.whole_pieces([*zip(pieces, counted, strict=True)]))
    return found


@memory.explained("the gradient of the wished answer", "--sketch.batch_tokens")
def make_wished(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the rows that favor the wished answer to the first traced prompt over the bad one.

    They have the largest difference of the two scores. The prompt, which both answers share,
    cancels in it.
    """
    train, settings = workspace.corpus.train, workspace.config.retrieve
    asked = examples.answered(workspace.retrieval_queries()[0], settings.wished)
    store, place_N = sketch_lib.open_index(workspace)
    sketch = sketch_lib.sketch_of_run(workspace)
    query_QK = sketch_lib.sketch_queries(workspace, sketch, [asked])
    score_N = search.score_store(store, query_QK, center=settings.center)[place_N]
    each_NQ = artifacts.EACH_INFLUENCE.current(workspace.root)  # if there are several answers
    bad_N = artifacts.INFLUENCE.read(workspace.root) if each_NQ is None else each_NQ[:, 0]
    most = min(_WISHED, int((score_N > -np.inf).sum()))
    favor_N = score_N - np.where(score_N > -np.inf, bad_N, 0)  # else -inf
    best = best_positions(favor_N, [row.example_id for row in train], most)
    found = [
        {"id": train[n].example_id, "score": float(score_N[n]), "bad": float(bad_N[n])}
        for n in best.tolist()
    ]
    artifacts.WISHED.write(folder, found)


UNITS = (
    Recipe(
        "retrieve/wished",
        make_wished,
        "{rows} {queries} {sketched} sketch/index retrieve/queries retrieve/influence",
        "{sketch} retrieve.center sketch.query_output retrieve.wished",
        writes=SCORES_FORMAT,
        is_asked=lambda config: config.retrieve.wished and EVIDENCE in needs_of(config),
        measures=True,
        work=lambda run: sketch_lib.count_sketches(run, 1),
    ),
    Recipe(
        "retrieve/tokens",
        make_tokens,
        "{rows} {queries} {sketched} sketch/index retrieve/queries retrieve/influence",
        "{sketch} {kernel} retrieve.token_rows",
        writes=SCORES_FORMAT,
        is_asked=lambda config: config.retrieve.token_rows and EVIDENCE in needs_of(config),
        # A gradient, and the transpose of one, which takes two: for a row and for the answer.
        work=lambda run: sketch_lib.count_sketches(run, 6 * run.config.retrieve.token_rows),
    ),
)
