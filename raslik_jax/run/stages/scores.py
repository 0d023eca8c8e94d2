"""From an index to scores, to those of unrelated prompts, and to the chances of a run's scores."""

import math
import pathlib

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import Config
from raslik_jax.data.examples import content_id, learned_part
from raslik_jax.data.ordering import shuffled
from raslik_jax.index import search
from raslik_jax.index.combine import check_agreement
from raslik_jax.index.format import MANIFEST
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import behaviors, chance, noise
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import artifacts, memory
from raslik_jax.run.manifests import read_manifest
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import generate
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.workspace import Workspace

# The scores that the gap is found in, and that the sets of all strategies are measured by.
EVIDENCE = "influence"
# Scores of rows with single queries that a run keeps: of the first queries, where that is too many.
_MOST_PAIRS = 2**26
# The number of highest scores whose noise of the sketch is reported.
_NOISE_ROWS = 256
SCORES_FORMAT = {"scores": 2}


def needs_of(config: Config) -> frozenset[str]:
    """Returns the scores that a run computes, each by the unit of its name in `retrieve/`."""
    strategies = [STRATEGIES[name] for name in config.retrieve.strategies]
    needs = {need for strategy in strategies for need in strategy.needs}
    has_rule = not all(strategy.brings_sets for strategy in strategies)
    if config.retrieve.held_out or (has_rule and config.retrieve.select == "gap"):
        needs.add(EVIDENCE)
    return frozenset(needs)


def finds_number(config: Config) -> bool:
    """Returns whether the run finds how many rows to forget. It may then find none."""
    is_given = all(STRATEGIES[name].brings_sets for name in config.retrieve.strategies)
    return config.retrieve.select == "gap" and not config.retrieve.num_forget and not is_given


@memory.decoding
def make_traced(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes both earlier models' likelihood of the traced answers and their own answers.

    If the run finds the number of rows to forget, it ends if the answers are less likely than
    random tokens, because their gradients do not lead to the rows that taught them.
    """
    generate.write_traced(workspace, None, folder)
    if not finds_number(workspace.config):
        return
    at_random = math.log(workspace.model.decoder.config.vocab_size)
    rows = artifacts.traced("finetuned").read_in(folder)
    if all(row.nll >= at_random for row in rows):
        artifacts.TRACED_FINDING.write(
            folder,
            f"nothing in the training file taught the answer {shown(rows[0].traced, 40)}. This "
            f"answer has {rows[0].nll:.1f} nats a token, random tokens have {at_random:.1f}: check "
            "prompt, template and adapter",
        )


def read_scores(workspace: Workspace, need: str) -> Float[np.ndarray, "N ..."]:
    """Returns the result of a unit of `SCORES`: a number for each row, or several."""
    found, count = artifacts.row_scores(need), len(workspace.corpus.train)
    return found.read(workspace.root, (count, *[None] * (found.read(workspace.root).ndim - 1)))


def is_scored(score: Float[np.ndarray, "N ..."]) -> Bool[np.ndarray, " N"]:
    """Returns which rows have a score above minus infinity."""
    return np.asarray(~np.isneginf(score.reshape(len(score), -1)).any(axis=1))


def write_scores(
    workspace: Workspace, need: str, folder: pathlib.Path, score: Float[np.ndarray, "N ..."]
) -> None:
    """Writes the scores of every training example; says which have none."""
    artifacts.row_scores(need).write(folder, score)
    barred = [workspace.corpus.train[row].example_id for row in np.flatnonzero(~is_scored(score))]
    if barred:
        print(
            f"    {len(barred):,} examples have no gradient, for example because they have no "
            f"token of an answer, and enter no set: {some_of(barred)}"
        )


def make_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the score of every training example with the queries, and with each of several."""
    settings = workspace.config.retrieve
    store, row_N, queries = sketch_lib.ask_index(workspace)
    ids = [row.example_id for row in workspace.retrieval_queries()]
    check_agreement(queries.gram_QQ, ids)
    score_N = search.score_queries(store, queries, settings.aggregate)
    write_scores(workspace, EVIDENCE, folder, score_N[row_N])
    if len(ids) > 1:
        found = behaviors.split_queries(queries.gram_QQ, ids)
        artifacts.BEHAVIORS.write(folder, found, ids=ids)
        if told := behaviors.sentence(found):
            print(f"    {told}")
        count = max(1, _MOST_PAIRS // max(1, len(row_N)))
        some = queries._replace(direction_QK=queries.direction_QK[:count])
        artifacts.EACH_INFLUENCE.write(folder, search.score_each(store, some)[row_N])


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
    # No prompt is unrelated to its own row and to copies of it.
    _, text_N = np.unique([content_id(*learned_part(row)) for row in rows], return_inverse=True)
    score_NM[text_N[:, None] == text_N[position_M]] = np.nan
    artifacts.NULL_SCORES.write(folder, score_NM)


def _compare(
    workspace: Workspace,
    score_N: Float[np.ndarray, " N"],
    gram_QQ: Float[np.ndarray, "Q Q"],
) -> tuple[chance.Chance, dict[str, float]]:
    """Returns the chances of scores against unrelated prompts and the kind of comparison."""
    aggregate = workspace.config.retrieve.aggregate
    position_M = artifacts.NULL_POSITIONS.read(workspace.root)
    null_NM = artifacts.NULL_SCORES.read(workspace.root, (len(score_N), len(position_M)))
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
) -> chance.Chance | None:
    """Returns the chances of the scores of an index's rows, read from the files of its run.

    It is None if the run compared with no prompts, or has other rows or another index.
    """
    rows = workspace.corpus.train
    stored = artifacts.NULL_SCORES.current(workspace.root)
    own = workspace.root / "sketch" / "index" / MANIFEST
    is_own = own.is_file() and own.read_bytes() == store.manifest.seal()
    made = (read_manifest(workspace.root / "retrieve" / "null") or {}).get("settings", {})
    is_own &= made.get("retrieve.center") == workspace.config.retrieve.center
    if stored is None or not is_own or {row.example_id for row in rows} != {*store.ids}:
        return None
    place_N = store.positions_of(row.example_id for row in rows)
    found, _ = _compare(workspace, score_N[place_N], queries.gram_QQ)
    return chance.Chance(*(part[np.argsort(place_N)] for part in found))


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
    score_N = artifacts.INFLUENCE.read(workspace.root, (len(workspace.corpus.train),))
    store, _, queries = sketch_lib.ask_index(workspace)
    found, facts = _compare(workspace, score_N, queries.gram_QQ)
    artifacts.CHANCE.write(folder, found)
    artifacts.SIGMA.write(folder, _noise_of_best(workspace, store, score_N, queries))
    artifacts.CHANCE_SUMMARY.write(folder, {**facts, **chance.count_finds(found)._asdict()})
    unrelated = facts["prompts"] - facts["related"]
    is_all = facts["prompts"] >= workspace.config.retrieve.null_prompts  # else of all rows
    told = chance.sentence(found) or (
        f"the chance is unknown, because {unrelated:.0f} unrelated prompts are too few for "
        f"{len(queries.gram_QQ)} queries{': raise --retrieve.null_prompts' * is_all}"
    )
    print(f"    {told}")


def count_scores(run: AbstractRun, queries: int, columns: int = 0) -> Work:
    """Cosines of the index's rows with queries; a number of columns, or all, is kept."""
    rows, products = run.sizes.train, 2.0 * run.sketch_size * queries
    return Work(4.0 * rows * (columns or queries), [], rows * products, run.index_bytes)


# The possible needs of a strategy: the units that are made then. The last one writes the scores
# into the folder of the need.
SCORES: dict[str, tuple[Recipe, ...]] = {
    EVIDENCE: (
        *sketch_lib.GRADIENTS,
        Recipe(
            f"retrieve/{EVIDENCE}",
            make_scores,
            "{train} {queries} sketch/index retrieve/queries",
            "{kernel}",
            writes=SCORES_FORMAT,
            work=lambda run: count_scores(run, run.queries["retrieval"], 1),
        ),
    ),
}


_TRACED = Recipe(
    "retrieve/traced",
    make_traced,
    "{queries} {finetuned}",
    # The last ones decide whether it may end the run.
    "{traced} references.base retrieve.select retrieve.num_forget retrieve.strategies",
    writes=generate.TRACED_FORMAT,
    is_asked=lambda config: config.evaluate.traced,
    work=lambda run: generate.count_traced(run, 2),
)

_CHANCE = (
    Recipe(
        "retrieve/null",
        make_null,
        "{train} sketch/index",
        "seed retrieve.center retrieve.null_prompts",
        writes={"null": 4},
        work=lambda run: count_scores(run, min(run.config.retrieve.null_prompts, run.sizes.train)),
    ),
    Recipe(
        "retrieve/chance",
        make_chance,
        "{train} sketch/index {queries} retrieve/queries retrieve/influence retrieve/null",
        "seed {kernel} retrieve.null_prompts",
        writes={"chance": 5},
    ),
)


def scores_of(config: Config) -> tuple[Recipe, ...]:
    """Returns the recipes of the scores that the chosen strategies read, and of their chances."""
    needed = needs_of(config)
    made = [recipe for need, own in SCORES.items() if need in needed for recipe in own]
    has_chance = config.retrieve.null_prompts and EVIDENCE in needed
    return (_TRACED, *made, *(_CHANCE if has_chance else ()))
