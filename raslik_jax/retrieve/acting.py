"""Choosing rows by what a step on them does: pure functions of scores. NumPy, on the host.

To first order a step on a forget set F and a retain set R changes the loss of any row y by
<g_y, mean_F g> - <g_y, mean_R g>, with g the gradients of the loss that is trained
(docs/studies/geometry.md says how far that holds).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.index.combine import best_positions


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
    are taken: a query that many of them serve counts for less (a monotone submodular function, so
    that the greedy value is at least 1 - 1/e of the best; Nemhauser, Wolsey and Fisher 1978).
    Facility location, which takes the maximum over x in place of the sum, has nothing left to gain
    after one row a query. Ties go to the first row.
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
