"""Queries of one behavior: their directions, their agreement and their combined score.

It also has the other pole and the best scores of a ranking. NumPy on the host.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.base.messages import chosen

Aggregate = Literal["mean", "common"]

# In units of a query's squared length: large against the noise of a sketch, small against what
# several queries share. .1 to .5 measured alike (docs/studies/retrieval_quality.md).
COMMON_RIDGE = 0.5


def directions(
    vector_MK: Float[np.ndarray, "M K"], mean_K: Float[np.ndarray, " K"] | None = None
) -> Float[np.ndarray, "M K"]:
    """Returns unit vectors less the mean if given, at length 1 again; zeros stay zero."""
    unit_MK = np.asarray(vector_MK, np.float64)
    for shift_K in (0.0, 0.0 if mean_K is None else np.asarray(mean_K, np.float64)):
        unit_MK = unit_MK - shift_K
        length_M1 = np.linalg.norm(unit_MK, axis=1, keepdims=True)
        unit_MK = unit_MK / np.where(length_M1 > 0, length_M1, 1.0)
    return unit_MK


def check_agreement(query_gram_QQ: Float[np.ndarray, "Q Q"], ids: Sequence[str]) -> None:
    """Raises a ValueError if queries point apart; it names those that differ most.

    The mean direction of unrelated queries has the squared length 1 / Q. Less than half of that is
    refused. If the scores are centered, so are the cosines between the queries.
    """
    count, square = len(query_gram_QQ), query_gram_QQ.mean()
    if square < 0.5 / count:
        worst = np.argsort(query_gram_QQ.sum(axis=1), kind="stable")[:3]
        raise ValueError(
            f"queries must be of one behavior, the {count} sketches differ too much (squared "
            f"length of the mean direction {square:.3g}, {1 / count:.3g} for unrelated ones, "
            f"farthest {[ids[i] for i in worst]}): trace them one by one"
        )


def common_weights(query_gram_QQ: Float[np.ndarray, "Q Q"]) -> Float[np.ndarray, " Q"]:
    """Returns weights w of the queries: sum_q w_q u_q is their common direction.

    w = (C + ridge I)^-1 1, scaled to a sum of 1, with C the cosines between the (centered) queries.
    Ridge regression finds this direction for "the inner product with every query is 1". A query
    that repeats others counts less than in a mean. Weights may be negative.
    """
    count = len(query_gram_QQ)
    gram_QQ = np.asarray(query_gram_QQ, np.float64) + COMMON_RIDGE * np.eye(count)
    weight_Q = np.linalg.solve(gram_QQ, np.ones(count))
    return weight_Q / weight_Q.sum()


def query_weights(
    query_gram_QQ: Float[np.ndarray, "Q Q"], aggregate: Aggregate
) -> Float[np.ndarray, " Q"]:
    """Returns the weights of the queries in the score of a row."""
    if chosen("aggregate", aggregate, {"common": True, "mean": False}):
        return common_weights(query_gram_QQ)
    return np.full(len(query_gram_QQ), 1 / len(query_gram_QQ))


def opposite(score_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns s_R = -s_F (Algorithm 1, line 4); minus infinity stays and bars a row."""
    return np.where(np.isneginf(score_N), -np.inf, -score_N)


def best_positions(
    score_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    count: int,
    name: str = "the number of rows",
) -> Int[np.ndarray, " k"]:
    """Returns the positions of the `count` highest scores, best first, equal ones by id.

    It raises a ValueError if fewer are above minus infinity. `name` describes `count` in that
    error.
    """
    score_N = np.asarray(score_N)
    eligible = int(np.sum(score_N > -np.inf))
    if not 0 <= count <= eligible:
        raise ValueError(
            f"{name} must be 0 to the {eligible} that can be chosen, got {count}: ask for fewer"
        )
    if count == 0:
        return np.zeros(0, np.int64)
    threshold = np.partition(score_N, len(score_N) - count)[len(score_N) - count]
    within = np.flatnonzero(score_N >= threshold)  # all ties of the last one among them
    order = np.lexsort((np.array([ids[i] for i in within.tolist()]), -score_N[within]))
    return within[order[:count]]
