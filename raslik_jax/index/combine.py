"""Directions of queries, and how the scores of several queries become one.

NumPy, on the host.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

Aggregate = Literal["mean", "mean_rank", "common"]

# In units of a query's squared length: large against the noise of a sketch, small against what
# several queries share. .1 to .5 measured alike (docs/studies/retrieval_quality.md).
COMMON_RIDGE = 0.5


def directions(
    vector_MK: Float[np.ndarray, "M K"], mean_K: Float[np.ndarray, " K"] | None = None
) -> Float[np.ndarray, "M K"]:
    """Returns unit vectors, less the mean and at length 1 again; what has no length stays zero.

    Args:
      vector_MK: of any length.
      mean_K: mean of unit vectors, subtracted where cosines are centered.
    """
    unit_MK = np.asarray(vector_MK, np.float64)
    for shift_K in (0.0, 0.0 if mean_K is None else np.asarray(mean_K, np.float64)):
        unit_MK = unit_MK - shift_K
        length_M1 = np.linalg.norm(unit_MK, axis=1, keepdims=True)
        unit_MK = unit_MK / np.where(length_M1 > 0, length_M1, 1.0)
    return unit_MK


def query_weights(
    direction_QK: Float[np.ndarray, "Q K"], how: Aggregate
) -> Float[np.ndarray, "G Q"]:
    """Returns how the cosines of Q queries make G scores: one, or for `mean_rank` one each."""
    count = len(direction_QK)
    if how == "mean_rank":
        return np.eye(count)
    if how == "common":
        return common_weights(direction_QK @ direction_QK.T)[None]
    return np.full((1, count), 1 / count)


def common_weights(query_gram_QQ: Float[np.ndarray, "Q Q"]) -> Float[np.ndarray, " Q"]:
    """Returns weights w of the queries for which sum_q w_q u_q is what they have in common.

    w = (C + ridge I)^-1 1, scaled to a sum of 1, with C the cosines between the queries. Of all
    directions this is the one that ridge regression finds for "the inner product with every query
    is 1". A mean is pulled to wherever many queries happen to lie; here a query that says what
    others have said counts less, so that what is left is shared by all. With a large ridge it is
    the mean, with one query that query. Weights may be negative.

    Linear in the queries, as the mean is, so it costs no more at search; C comes from sketches.

    Args:
      query_gram_QQ: cosines between the (centered) queries.
    """
    count = len(query_gram_QQ)
    gram_QQ = np.asarray(query_gram_QQ, np.float64) + COMMON_RIDGE * np.eye(count)
    weight_Q = np.linalg.solve(gram_QQ, np.ones(count))
    return weight_Q / weight_Q.sum()


def aggregate_scores(
    score_QN: Float[np.ndarray, "Q N"],
    how: Aggregate,
    query_gram_QQ: Float[np.ndarray, "Q Q"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Returns one score per example from those of several queries.

    `mean` of the scores, or `mean_rank`: each query ranks the examples (ties share their mean
    rank), the ranks are averaged and scaled so that first everywhere is 1 and last is -1; or
    `common`, the mean weighted by `common_weights` of the cosines between the queries, and the
    plain mean where there are none.
    """
    if how == "common" and query_gram_QQ is not None:
        return common_weights(query_gram_QQ) @ score_QN
    if how != "mean_rank":
        return score_QN.mean(axis=0)
    import scipy.stats  # takes a second to load, which settings that name strategies need not wait

    rank_QN = scipy.stats.rankdata(score_QN, axis=1)  # 1 is the lowest score
    return 2 * (rank_QN.mean(axis=0) - 1) / max(score_QN.shape[1] - 1, 1) - 1
