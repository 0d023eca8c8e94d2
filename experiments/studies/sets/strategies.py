"""Strategies that choose sets by the effect of a step on their rows, and their scores.

To first order a step on a forget set F and a retain set R changes the loss of any row y by
<g_y, mean_F g> - <g_y, mean_R g>. The gradients g are those of the trained loss.
docs/studies/geometry.md says how far this holds. No strategy is better than RASLIK
(docs/studies/sets.md). So they are not in the package, and `register` adds
them.
"""

import copy
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.studies.randomized import variant
from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.data import batches
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens import encoding
from raslik_jax.index import search
from raslik_jax.index.combine import best_positions, opposite
from raslik_jax.parallel import meshes
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import (
    STRATEGIES,
    Request,
    Scores,
    Strategy,
    draw_retain,
    ids_of,
    take_poles,
)
from raslik_jax.run import memory
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import scores, unlearn
from raslik_jax.run.stages import sketch as sketch_lib
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
    "sketch.normalize": "vector",
}


# strategies --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStageSettings(Settings):
    """Settings of finding by one gradient and choosing by another."""

    candidates: float = setting(
        4.0, "Rows found for each one that is chosen; 0: all are chosen from.", zero_or=1.0
    )
    collateral: float = setting(
        1.0, "Nats of a normal row that weigh as much as one of a query; 0: none.", low=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoverageSettings(Settings):
    """Settings of covering all queries."""

    candidates: float = setting(4.0, "Rows found for each one that is chosen.", low=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSettings(Settings):
    """Settings of a retain set of two roles."""

    protect_share: float = setting(
        0.5,
        "Share of the retain set that is there to protect normal rows; the rest pulls against the "
        "queries, as the whole set does in the paper.",
        low=0,
        high=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSettings(MixedSettings):
    """Settings of a trial run."""

    rows: int = setting(64, "Rows of each set, those of both ends of the scores.", low=1)
    steps: int = setting(32, "Steps of the trial.", low=1)
    learning_rate: float = setting(5e-4, "Learning rate of its BASE_KLR.", above=0)


def two_stage(request: Request) -> Scores:
    """Returns the rows that RASLIK finds, ranked by the effect of a step on the trained loss.

    The score is <g_x, g_q> - collateral <g_x, g_n>. The gradients g are those of the trained loss
    without normalization. q is the mean over queries and n the mean over normal rows. The retain
    set has the negative score. Each set is chosen from `candidates` times its size. These are the
    rows nearest to its pole. With `retain_within`, rows to retain are drawn.
    """
    found = _found(request)
    action_NM = _columns(request, "step_effects")
    act_N = action_NM[:, 0] - request.settings.collateral * action_NM[:, -1]
    times, parts = request.settings.candidates, []
    sizes = request.num_forget, request.num_retain
    for pole_N, sign, size in zip(found, (1, -1), sizes, strict=True):
        count = math.ceil(times * size) if times else len(pole_N)
        parts.append(narrow(pole_N, sign * act_N, ids_of(request), count=count))
    return Scores(*parts)


def coverage(request: Request) -> Scores:
    """Returns a forget set that all queries have a share in, with RASLIK's retain set."""
    found = take_poles(request, request.scores["influence"])
    each_NQ = _columns(request, "each_query")
    count = math.ceil(request.settings.candidates * request.num_forget)
    count = min(count, int((found.forget_N > -np.inf).sum()))
    candidates = best_positions(found.forget_N, ids_of(request), count)
    chosen = candidates[cover_queries(each_NQ[candidates], request.num_forget)]
    forget_N = np.full(len(each_NQ), -np.inf)
    forget_N[chosen] = np.linspace(1, 0, len(chosen))
    return Scores(forget_N, found.retain_N)


def mixed(request: Request) -> Scores:
    """Returns RASLIK's forget set. Half of the retain set are normal rows that it damages.

    A step on the queries' gradient changes a normal row y most if <g_y, g_q> is largest. The other
    half of the retain set are rows that oppose the queries.
    """
    return _protecting(request, _columns(request, "step_effects")[:, 0])


def trial(request: Request) -> Scores:
    """Returns the same where the damage was measured: in a trial run, over the whole corpus."""
    return _protecting(request, _columns(request, "damage")[:, 0])


def _found(request: Request) -> Scores:
    return draw_retain(request, take_poles(request, request.scores["influence"]))


def _columns(request: Request, need: str) -> Float[np.ndarray, "N M"]:
    return np.asarray(request.scores[need]).reshape(len(request.examples), -1)


def _protecting(request: Request, damage_N: Float[np.ndarray, " N"]) -> Scores:
    """Returns both poles, a share of the retain set being the normal rows of the most damage.

    The others are the best of their pole, or drawn from it with `retain_within`.
    """
    found = _found(request)
    normal_N = np.where(lower_half(found.forget_N), damage_N, -np.inf)
    count = round(request.settings.protect_share * request.num_retain)
    return found._replace(
        retain_N=put_first(found.retain_N, normal_N, ids_of(request), count=count)
    )


def lower_half(score_N: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Returns which rows are taken for normal ones without labels: up to the median score.

    Rows of minus infinity are none. Where the behavior is in half of the rows or more, some of
    these show it.
    """
    known_N = score_N > -np.inf
    return known_N & (score_N <= np.median(score_N[known_N])) if known_N.any() else known_N


def narrow(
    first_N: Float[np.ndarray, " N"],
    second_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    count: int,
) -> Float[np.ndarray, " N"]:
    """Returns the second scores of the `count` best rows by the first; others are barred.

    Of fewer rows above minus infinity all; ties go by id.
    """
    most = min(count, int((first_N > -np.inf).sum()))
    best = best_positions(first_N, ids, most)
    narrowed_N = np.full(len(first_N), -np.inf)
    narrowed_N[best] = second_N[best]
    return narrowed_N


def put_first(
    score_N: Float[np.ndarray, " N"],
    preferred_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    count: int,
) -> Float[np.ndarray, " N"]:
    """Returns scores in which the `count` best rows by others go before all, in their order.

    A ValueError where the others leave fewer rows above minus infinity.
    """
    best = best_positions(preferred_N, ids, count, "the rows that protect normal ones")
    mixed_N = score_N.astype(np.float64)
    top = mixed_N.max(initial=0.0)
    mixed_N[best] = top + 1 + np.arange(count, 0, -1)
    return mixed_N


def cover_queries(score_CQ: Float[np.ndarray, "C Q"], count: int) -> Int[np.ndarray, " k"]:
    """Returns rows that all queries have a share in, in the order of a greedy choice.

    Each step takes the row that raises sum_q sqrt(sum_x max(s_xq, 0)) most, over the rows x that
    are taken. So a query with many rows counts for less. The function is monotone and submodular,
    so the greedy value is at least 1 - 1/e of the best (Nemhauser, Wolsey and Fisher 1978).
    Facility location takes the maximum over x in place of the sum. It gains nothing after one row a
    query. Ties go to the first row.
    """
    gain_CQ = np.maximum(np.asarray(score_CQ, np.float64), 0.0)
    total_Q, is_left_C = np.zeros(score_CQ.shape[1]), np.ones(len(score_CQ), bool)
    chosen = np.zeros(min(count, len(score_CQ)), np.int64)
    for place in range(len(chosen)):
        value_C = np.sqrt(total_Q + gain_CQ).sum(axis=1)
        chosen[place] = np.argmax(np.where(is_left_C, value_C, -np.inf))
        is_left_C[chosen[place]] = False
        total_Q += gain_CQ[chosen[place]]
    return chosen


_TWO_STAGE = Strategy(
    "Two-stage", two_stage, needs=("influence", "step_effects"), settings=TwoStageSettings()
)
_MIXED = Strategy("Mixed", mixed, needs=("influence", "step_effects"), settings=MixedSettings())
MEMBERS: dict[str, Strategy] = {
    "two_stage": _TWO_STAGE,
    "action": variant(_TWO_STAGE, "Action", candidates=0.0, collateral=0.0),
    "coverage": Strategy(
        "Coverage",
        coverage,
        needs=("influence", "each_query"),
        retains_opposite=True,
        settings=CoverageSettings(),
    ),
    "mixed": _MIXED,
    "protect": variant(_MIXED, "Protect", protect_share=1.0),
    "trial": Strategy("Trial", trial, needs=("influence", "damage"), settings=TrialSettings()),
}


# scores ------------------------------------------------------------------------------------------


def make_each_query(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the score of every row with each query, [N, Q]."""
    store, row_N, queries = sketch_lib.ask_index(workspace)
    score_NQ = np.where(store.is_eligible_N[:, None], search.score_each(store, queries), -np.inf)
    scores.write_scores(workspace, "each_query", folder, score_NQ[row_N])


@memory.explained("gradients of the trained loss", "--sketch.batch_tokens")
def make_step_effects(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes <g_x, mean g> with the queries and with normal rows, [N, 2], in nats.

    g is the gradient of the loss that unlearning trains, at the fine-tuned adapter, without
    normalization. To first order a step eta g_x raises the loss of the others by eta times this.
    Row x is cut at --unlearn.max_len, as in a step. The other rows are whole. Sketches of the run's
    size give unbiased inner products.
    """
    acting, sketch = sketch_steps(workspace)
    mean_MK = np.stack([_mean_gradient(acting, sketch, part) for part in _others(acting)])
    placed_MK = meshes.place(mean_MK)
    max_len = acting.config.unlearn.max_len
    encoded = acting.cut(acting.train_rows, "training examples", max_len=max_len)

    def act(batch: batches.Batch) -> tuple[jax.Array, jax.Array]:
        found = sketch(batch)
        return (found.unit_BK @ placed_MK.T) * found.norm_B[:, None], found.norm_B

    plans = sketch_lib.plan_batches(acting, encoded)
    act_NM, norm_N = batches.map_rows(act, encoded, plans, bar="effects of steps")
    scores.write_scores(acting, "step_effects", folder, np.where(norm_N[:, None] > 0, act_NM, -np.inf))


def _with_settings(workspace: Workspace, changes: Mapping[str, Any]) -> Workspace:
    """Returns the run under other settings that decide no weights; it shares those loaded."""
    run = copy.copy(workspace)
    run.config = replaced(workspace.config, changes)
    return run


def sketch_steps(workspace: Workspace) -> tuple[Workspace, sketch_lib.Sketch]:
    """Returns the run with the gradient that a step of unlearning takes, and its sketches."""
    acting = _with_settings(workspace, _ACTING)
    return acting, sketch_lib.sketch_of_run(acting)


def _others(workspace: Workspace) -> tuple[encoding.Encoded, encoding.Encoded]:
    """Returns the queries, and rows from the lower half of the scores that the seed draws.

    For a query the traced answer counts. For a row every answer counts.
    """
    queries = workspace.encode(workspace.retrieval_queries(), "queries")
    normal = np.flatnonzero(lower_half(scores.read_scores(workspace, "influence")))
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
    It goes back to the base without the adapter, so there has to be an adapter.
    """
    settings, rows = workspace.config.retrieve["trial"], workspace.corpus.train
    score_N = scores.read_scores(workspace, "influence")
    count = min(settings.rows, int((score_N > -np.inf).sum()) // 2)
    ids = [row.example_id for row in rows]
    chosen = select_by_count(score_N, opposite(score_N), ids, num_forget=count, num_retain=count)
    sets = [unlearn.cut_rows(workspace, [ids[row] for row in part], "trial") for part in chosen]
    unlearn.require_rows(workspace, TRIAL, sets)
    model = workspace.model
    fitted = loop.fit(
        workspace.unlearning(TRIAL, settings.learning_rate),
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
    damage_N = np.where(before.tokens_N > 0, damage_N, -np.inf)
    scores.write_scores(workspace, "damage", folder, damage_N)


# What the strategies need: the units that leave it, see `scores.SCORES`.
SCORES = {
    "each_query": (
        Recipe(
            "retrieve/each_query",
            make_each_query,
            "{train} {queries} sketch/index retrieve/queries",
            "{kernel}",
        ),
    ),
    "step_effects": (
        Recipe(
            "retrieve/step_effects",
            make_step_effects,
            "{rows} {queries} {finetuned} retrieve/influence",
            "{likelihood} sketch.base_format sketch.num_buckets sketch.projection sketch.size "
            "sketch.query_output unlearn.max_len",
        ),
    ),
    "damage": (
        Recipe(
            "retrieve/damage",
            make_damage,
            "{rows} {finetuned} retrieve/influence",
            "{likelihood} unlearn unlearn.base_klr.kl_direction retrieve.trial",
        ),
    ),
}


def register() -> None:
    """Adds the strategies of this study and their scores to the package's families."""
    STRATEGIES.update(MEMBERS)
    scores.SCORES.update(SCORES)
