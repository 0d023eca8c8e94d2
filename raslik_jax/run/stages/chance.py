"""From an index to the scores of unrelated prompts and the chances of a run's scores."""

import pathlib

import numpy as np
from jaxtyping import Float

from raslik_jax.config import Config
from raslik_jax.data.ordering import shuffled
from raslik_jax.index import search
from raslik_jax.index.combine import Aggregate
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import chance, noise
from raslik_jax.run import artifacts
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.stages.scores import EVIDENCE, count_scores, needs_of
from raslik_jax.run.workspace import Workspace

# The number of highest scores whose noise of the sketch is reported.
_NOISE_ROWS = 256


def make_null(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the score of every training example with each row drawn as an unrelated prompt.

    The prompts are drawn once per index. Their sketches are in the index, so no gradient is taken.
    """
    config, rows = workspace.config, workspace.corpus.train
    store, place_N = sketch_lib.open_index(workspace)
    able = np.flatnonzero(store.is_eligible_N[place_N]).tolist()
    drawn = shuffled(able, seed=config.seed, label="null prompts")[: config.retrieve.null_prompts]
    position_M = np.array(sorted(drawn), np.int64)
    artifacts.NULL_POSITIONS.write(folder, position_M)
    score_NM = np.zeros((len(rows), 0), np.float32)
    if len(position_M):
        center = config.retrieve.center
        queries = search.queries_of_rows(store, place_N[position_M], center=center)
        score_NM = search.score_each(store, queries)[place_N]
        if center:
            score_NM = chance.without_own_share(score_NM, int(store.is_eligible_N.sum()))
    score_NM[position_M, np.arange(len(position_M))] = np.nan  # no prompt is unrelated to itself
    artifacts.NULL_SCORES.write(folder, score_NM)


def _compare(
    workspace: Workspace,
    score_N: Float[np.ndarray, " N"],
    gram_QQ: Float[np.ndarray, "Q Q"],
    aggregate: Aggregate,
) -> tuple[chance.Chance, dict[str, float]]:
    """Returns the chances of scores against unrelated prompts and the kind of comparison."""
    position_M = artifacts.NULL_POSITIONS.read(workspace.root)
    shape = len(score_N), len(position_M)
    null_NM = artifacts.NULL_SCORES.read(workspace.root, shape)
    is_unrelated_M = ~chance.related_prompts(score_N, position_M)
    null_NG = chance.group_prompts(
        null_NM[:, is_unrelated_M],
        position_M[is_unrelated_M],
        gram_QQ,
        aggregate,
        seed=workspace.config.seed,
    )
    length = chance.direction_length(gram_QQ, aggregate)
    facts = {"prompts": len(position_M), "related": int((~is_unrelated_M).sum()), "length": length}
    return chance.compare(score_N / length, null_NG), facts


def of_trace(
    workspace: Workspace,
    store: SketchStore,
    score_N: Float[np.ndarray, " N"],
    queries: search.Queries,
    *,
    center: bool,
    aggregate: Aggregate,
) -> chance.Chance | None:
    """Returns the chances of the scores of an index's rows, read from the files of its run.

    It is None if the run compared with no prompts, has other rows or another centering. It is also
    None if the scores are ranks, which are no cosines.
    """
    rows = workspace.corpus.train
    stored = artifacts.NULL_SCORES.current(workspace.root)
    is_other = aggregate == "mean_rank" or center != workspace.config.retrieve.center
    if stored is None or is_other:
        return None
    if {row.example_id for row in rows} != {*store.ids}:
        return None
    place_N = store.positions_of(row.example_id for row in rows)
    found, _ = _compare(workspace, score_N[place_N], queries.gram_QQ, aggregate)
    order_N = np.argsort(place_N)
    return chance.Chance(*(part[order_N] for part in found))


def _noise_of_best(
    workspace: Workspace,
    store: SketchStore,
    score_N: Float[np.ndarray, " N"],
    queries: search.Queries,
) -> Float[np.ndarray, " N"]:
    """Returns the noise of the sketch in the highest scores; NaN for others."""
    sigma_N = np.full(len(score_N), np.nan)
    best = np.argsort(-score_N, kind="stable")[:_NOISE_ROWS]
    best = best[score_N[best] > -np.inf]
    if len(best) and workspace.config.retrieve.aggregate == "mean":
        rows = store.positions_of(workspace.corpus.train[i].example_id for i in best)
        sigma_N[best] = noise.row_sigma(store, rows, queries)
    return sigma_N


def make_chance(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the place of every training example's score among those of unrelated prompts."""
    settings, number = workspace.config.retrieve, len(workspace.corpus.train)
    score_N = artifacts.INFLUENCE.read(workspace.root, (number,))
    store, _, queries = sketch_lib.ask_index(workspace)
    found, facts = _compare(workspace, score_N, queries.gram_QQ, settings.aggregate)
    artifacts.CHANCE.write(folder, found)
    sigma_N = _noise_of_best(workspace, store, score_N, queries)
    artifacts.SIGMA.write(folder, sigma_N)
    artifacts.CHANCE_SUMMARY.write(folder, {**facts, **chance.count_finds(found)._asdict()})
    unrelated = facts["prompts"] - facts["related"]
    told = chance.sentence(found) or (
        f"the chance is unknown, because {unrelated:.0f} unrelated prompts are too few for "
        f"{len(queries.gram_QQ)} queries: raise --retrieve.null_prompts"
    )
    print(f"    {told}")


def _is_asked(config: Config) -> bool:
    return bool(config.retrieve.null_prompts) and EVIDENCE in needs_of(config)


def count_null(run: AbstractRun) -> Work:
    """Scores with rows that serve as unrelated prompts."""
    count = min(run.config.retrieve.null_prompts, run.sizes.train)
    return count_scores(run, count, count)


UNITS = (
    Recipe(
        "retrieve/null",
        make_null,
        "{train} sketch/index",
        "seed retrieve.center retrieve.null_prompts",
        # 3: rows without a gradient have no part in the mean that centers.
        writes={"null": 3},
        is_asked=_is_asked,
        work=count_null,
    ),
    Recipe(
        "retrieve/chance",
        make_chance,
        "{train} sketch/index {queries} retrieve/queries retrieve/influence retrieve/null",
        "seed {kernel}",
        # 2: several queries compare with groups of as many prompts.
        writes={"chance": 2},
        is_asked=_is_asked,
    ),
)
