"""From an index to scores: both models' likelihood of the traced answers, and strategies' needs."""

import math
import pathlib

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import Config
from raslik_jax.index import search
from raslik_jax.index.combine import check_agreement
from raslik_jax.retrieve import behaviors
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import generate
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.workspace import Workspace

# The scores that the gap is found in, and that the sets of all strategies are measured by.
EVIDENCE = "influence"
# Scores of rows with single queries that a run keeps: of the first queries, where that is too many.
_MOST_PAIRS = 2**26
# 2: rows without a gradient have no part in the mean that centers.
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


def count_scores(run: AbstractRun, queries: int, columns: int) -> Work:
    """Cosines of the index's rows with queries; a number of columns is kept."""
    rows, products = run.sizes.train, 2.0 * run.sketch_size * queries
    return Work(4.0 * rows * columns, [], rows * products, run.index_bytes)


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
    "{traced} references.base retrieve.select retrieve.num_forget",
    writes=generate.TRACED_FORMAT,
    is_asked=lambda config: config.evaluate.traced,
    work=lambda run: generate.count_traced(run, 2),
)


def scores_of(config: Config) -> tuple[Recipe, ...]:
    """Returns the recipes of the scores that the chosen strategies read."""
    needed = needs_of(config)
    return (_TRACED, *(recipe for need, own in SCORES.items() if need in needed for recipe in own))
