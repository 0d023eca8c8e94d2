"""Choosing rows by what a step on them does: pure functions of scores. NumPy, on the host.

To first order a step on a forget set F and a retain set R changes the loss of any row y by
<g_y, mean_F g> - <g_y, mean_R g>, with g the gradients of the loss that is trained
(docs/studies/geometry.md says how far that holds).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.index.combine import best_positions

# Steps of Newton's method, which takes about ten.
_MOST_STEPS = 100


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


def weigh_sets(
    forget_CM: Float[np.ndarray, "C M"],
    retain_DM: Float[np.ndarray, "D M"],
    *,
    num_queries: int,
    collateral: float,
    ridge: float,
) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " D"]]:
    """Returns weights of a step that raises every query's loss alike, and no normal row's.

    Those w >= 0 that minimize

        mean_q (D(q) - 1)^2 + collateral mean_n D(n)^2 + ridge c |w|^2
        D(y) = sum_(x of forget) w_x <g_x, g_y> - sum_(x of retain) w_x <g_x, g_y>

    where c is the mean over all x of the first two terms for D(y) = <g_x, g_y>, without the 1. A
    row among both has at most one weight above 0.

    Args:
      forget_CM: <g_x, g_y> of candidates x with the queries y, then with the normal rows; likewise
        `retain_DM`.
      ridge: above 0.
    """
    num_normal = forget_CM.shape[1] - num_queries
    shares = [1 / num_queries] * num_queries
    shares += [collateral / num_normal for _ in range(num_normal)]
    scale_M = np.sqrt(np.array(shares))
    target_M = np.where(np.arange(len(scale_M)) < num_queries, scale_M, 0.0)
    effect_MC = np.concatenate([forget_CM, -retain_DM]).astype(np.float64).T * scale_M[:, None]
    square = float((effect_MC**2).sum(axis=0).mean())
    weight_C = weigh_rows(effect_MC, target_M, ridge=ridge * (square or 1.0))
    return weight_C[: len(forget_CM)], weight_C[len(forget_CM) :]


def weigh_rows(
    effect_MC: Float[np.ndarray, "M C"], target_M: Float[np.ndarray, " M"], *, ridge: float
) -> Float[np.ndarray, " C"]:
    """Returns the w >= 0 that minimizes |E w - t|^2 + ridge |w|^2, with ridge above 0.

    By its dual, which has M unknowns however many rows there are: the residual l = t - E w. At the
    minimum w = max(0, E^T l) / ridge, and l minimizes the strongly convex
    phi(l) = |l|^2 / 2 + |max(0, E^T l)|^2 / (2 ridge) - <t, l>, which is quadratic in pieces.
    Newton's method with a line search takes about ten steps of C M^2 operations. All w are 0 where
    no entry of E^T t is positive. A ValueError where a hundred steps are not enough.
    """
    effect_MC, target_M = effect_MC.astype(np.float64), target_M.astype(np.float64)

    def phi(left_M: np.ndarray) -> float:
        pull_C = np.maximum(effect_MC.T @ left_M, 0)
        return float(left_M @ left_M / 2 + pull_C @ pull_C / (2 * ridge) - target_M @ left_M)

    left_M, rounding = target_M, 1e-12 * float(target_M @ target_M)
    for _ in range(_MOST_STEPS):
        pull_C = np.maximum(effect_MC.T @ left_M, 0)
        slope_M = left_M + effect_MC @ pull_C / ridge - target_M
        if np.linalg.norm(slope_M) <= 1e-10 * np.linalg.norm(target_M):
            return pull_C / ridge
        active_MA = effect_MC[:, pull_C > 0]
        step_M = -np.linalg.solve(np.eye(len(target_M)) + active_MA @ active_MA.T / ridge, slope_M)
        size, before = 1.0, phi(left_M)
        # A decrease that rounding hides is not asked for: there the whole step is right.
        while phi(left_M + size * step_M) > before + size * (slope_M @ step_M) / 4 + rounding:
            size /= 2
        left_M = left_M + size * step_M
    raise ValueError(
        f"weights of rows must be found in {_MOST_STEPS} steps, they were not at a ridge of "
        f"{ridge:.3g}: raise --retrieve.weighted.ridge"
    )
