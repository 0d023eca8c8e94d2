"""What single rows would do to queries and to normal rows, for the strategies that choose by it."""

import functools
import pathlib

import jax
import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base import files
from raslik_jax.base.messages import some_of
from raslik_jax.data import batches
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens import encoding
from raslik_jax.index import search
from raslik_jax.index.combine import opposite
from raslik_jax.parallel import meshes
from raslik_jax.retrieve.acting import lower_half
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.run import memory
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.stages import unlearn
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop, steps

# Rows of the lower half of the scores that stand for the normal ones.
NORMAL_ROWS = 128
# The objective of a trial: bounded, so that no step of it is too far.
TRIAL = "base_klr"
# What acts: the gradient that a step of unlearning takes.
_ACTING = {
    "sketch.loss": "next_token",
    "sketch.targets": "response",
    "sketch.gradient_at": "finetuned",
    "sketch.parameters": "lora",
    "sketch.normalize": "vector",
}
# 2: of every answer of a row that is a conversation.
FORMATS = {"formats": {"effects": 2}}


def read_scores(workspace: Workspace, need: str) -> Float[np.ndarray, "N ..."]:
    """Returns what a unit of `retrieve.SCORES` left: a number for each row, or several."""
    path, count = workspace.root / "retrieve" / need / "influence.npy", len(workspace.corpus.train)
    scores = files.read_array(path)
    return files.read_array(path, (count, *[None] * (scores.ndim - 1)))


def is_scored(score: Float[np.ndarray, "N ..."]) -> Bool[np.ndarray, " N"]:
    """Returns which rows have a score above minus infinity."""
    return np.asarray(~np.isneginf(score.reshape(len(score), -1)).any(axis=1))


def write_scores(
    workspace: Workspace, folder: pathlib.Path, score: Float[np.ndarray, "N ..."]
) -> None:
    """Writes the scores of every training example; says which have none."""
    np.save(folder / "influence.npy", score, allow_pickle=False)
    barred = [workspace.corpus.train[row].example_id for row in np.flatnonzero(~is_scored(score))]
    if barred:
        print(
            f"    {len(barred):,} examples have no gradient (such as no token of an answer) and "
            f"enter no set: {some_of(barred)}"
        )


def make_each_query(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the score of every row with each query, [N, Q]."""
    store, row_N = sketch_lib.open_index(workspace)
    query_QK = sketch_lib.read_queries(workspace, store)
    center = workspace.config.retrieve.center
    queries = search.queries_of_store(store, query_QK, center=center)
    score_NQ = np.where(store.is_eligible_N[:, None], search.score_each(store, queries), -np.inf)
    write_scores(workspace, folder, score_NQ[row_N])


@memory.explained("gradients of the trained loss", "--sketch.batch_tokens")
def make_step_effects(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes <g_x, mean g> with the queries and with normal rows, [N, 2], in nats.

    g is the gradient of the loss that unlearning trains, at the fine-tuned adapter, not normalized:
    a step eta g_x raises the loss of the others by eta times this, to first order. Row x is cut at
    --unlearn.max_len, as in a step; the others are whole. By sketches of the run's size, whose
    inner products are unbiased.
    """
    acting, sketch = _acting(workspace)
    mean_MK = np.stack([_mean_gradient(acting, sketch, part) for part in _others(acting)])
    _write_effects(acting, sketch, mean_MK, folder)


@memory.explained("gradients of the trained loss", "--sketch.batch_tokens")
def make_row_effects(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes <g_x, g> with each query, then with each of some normal rows, [N, M], in nats.

    The gradients are those of `make_step_effects`.
    """
    acting, sketch = _acting(workspace)
    encoded = encoding.join(_others(acting))
    plans = sketch_lib.plan_batches(acting, encoded)
    found = batches.map_rows(sketch, encoded, plans)
    _write_effects(acting, sketch, found.norm_B[:, None] * found.unit_BK, folder)


def _acting(workspace: Workspace) -> tuple[Workspace, sketch_lib.Sketch]:
    """Returns the run with the gradient that a step of unlearning takes, and its sketches."""
    acting = workspace.with_settings(_ACTING)
    adapters = sketch_lib.sketched_adapters(acting)
    projection = sketch_lib.make_projection(acting, adapters)
    return acting, sketch_lib.sketch_function(acting, projection, adapters)


def _write_effects(
    acting: Workspace,
    sketch: sketch_lib.Sketch,
    other_MK: Float[np.ndarray, "M K"],
    folder: pathlib.Path,
) -> None:
    """Writes the inner products of every training example's gradient with others, [N, M]."""
    placed_MK = meshes.place(other_MK)
    max_len = acting.config.unlearn.max_len
    encoded = acting.cut(acting.train_rows, "training examples", max_len=max_len)

    def act(batch: batches.Batch) -> tuple[jax.Array, jax.Array]:
        found = sketch(batch)
        return (found.unit_BK @ placed_MK.T) * found.norm_B[:, None], found.norm_B

    plans = sketch_lib.plan_batches(acting, encoded)
    act_NM, norm_N = batches.map_rows(act, encoded, plans, bar="effects of steps")
    write_scores(acting, folder, np.where(norm_N[:, None] > 0, act_NM, -np.inf))


def _others(workspace: Workspace) -> tuple[encoding.Encoded, encoding.Encoded]:
    """Returns the queries, and some rows of the lower half of the scores, drawn by the seed.

    Of a query the answer that is traced counts, of a row every answer.
    """
    queries = workspace.encode(workspace.retrieval_queries(), "queries")
    normal = np.flatnonzero(lower_half(read_scores(workspace, "influence")))
    drawn = shuffled(normal.tolist(), seed=workspace.config.seed, label="normal rows")
    rows = workspace.train_rows.take(np.array(drawn[:NORMAL_ROWS], np.int64))
    return queries, workspace.cut(rows, "normal rows")


def _mean_gradient(
    workspace: Workspace, sketch: sketch_lib.Sketch, encoded: encoding.Encoded
) -> Float[np.ndarray, " K"]:
    plans = sketch_lib.plan_batches(workspace, encoded)
    parts = batches.each_batch(sketch, encoded, plans)
    total_K = sum((found.norm_B[:, None] * found.unit_BK).sum(axis=0) for _, found in parts)
    return np.asarray(total_K / len(encoded.ids), np.float32)


@memory.explained("the trial run", "--unlearn.micro_batch_size or --sketch.batch_tokens")
def make_damage(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes how many nats a token every row's answer loses in a trial run, [N].

    The trial unlearns --retrieve.trial.rows of both ends of RASLIK's scores; nothing else is kept.
    """
    settings, rows = workspace.config.retrieve["trial"], workspace.corpus.train
    score_N = read_scores(workspace, "influence")
    count = min(settings.rows, int((score_N > -np.inf).sum()) // 2)
    ids = [row.example_id for row in rows]
    chosen = select_by_count(score_N, opposite(score_N), ids, num_forget=count, num_retain=count)
    sets = [unlearn.cut_rows(workspace, [ids[row] for row in part], "trial") for part in chosen]
    unlearn.require_rows(workspace, TRIAL, sets)
    model = workspace.model
    trying = workspace.with_settings({"unlearn.parameters": "lora"})
    fitted = loop.fit(
        trying.unlearning(TRIAL, settings.learning_rate),
        workspace.finetuned,
        steps.Frozen(base=model.base, reference=workspace.finetuned),
        functools.partial(unlearn.draw_pairs, workspace, TRIAL, sets),
        num_steps=settings.steps,
        what="the trial run",
        rate_flag="--retrieve.trial.learning_rate",
        bar="trial",
    )
    encoded = workspace.cut(workspace.train_rows, "training examples")
    before, after = (
        workspace.likelihood_of(workspace.with_adapter(adapter), encoded)
        for adapter in (workspace.finetuned, fitted.state.params)
    )
    damage_N = after.nll_N - before.nll_N
    write_scores(workspace, folder, np.where(before.tokens_N > 0, damage_N, -np.inf))
