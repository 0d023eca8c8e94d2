"""Who is on the forget-retain frontier, and how far from the ideal: pure functions, on the host.

A method is a point (R, F): retain rate up, forget rate down. The ideal is R = 1, F = 0.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

# Two rates give a covariance of three free numbers; from fewer points it would describe noise.
MIN_METHODS = 5


class Mahalanobis(NamedTuple):
    """Mahalanobis distances to the ideal, with what is needed to judge them.

    Attributes:
      distance_M: D_mah of each method; only the order within one pool of methods means anything.
      covariance: the shrunken covariance of (R, F), [2, 2].
      condition_number: ratio of its eigenvalues; rounding errors of the rates grow with it.
      is_negative: the covariance of R and F is below zero. Then the distance is not monotone: a
        lower F or a higher R may raise it, so it should not be ranked by.
    """

    distance_M: Float[np.ndarray, " M"]
    covariance: Float[np.ndarray, "2 2"]
    condition_number: float
    is_negative: bool


def pareto_mask(
    retain_M: Float[np.ndarray, " M"], forget_M: Float[np.ndarray, " M"]
) -> Bool[np.ndarray, " M"]:
    """Returns which methods no other method dominates.

    The textbook rule: one method dominates another if its R is not lower, its F is not higher, and
    one of the two is better. The paper's sentence asks for both to be better; on its own tables
    the two rules differ only where rates tie after rounding (see `rounding_ties`).

    Args:
      retain_M: retain rate R of each method.
      forget_M: forget rate F of each method.

    Returns:
      True on the frontier. Methods with equal points are kept or dominated together.

    Raises:
      ValueError: unequal lengths, no method, or a rate that is not finite.
    """
    _check_rates(retain_M, forget_M)
    retain_gain_MM, forget_drop_MM = _gains(retain_M, forget_M)
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    better_MM = (retain_gain_MM > 0) | (forget_drop_MM > 0)
    return np.asarray(~np.any(not_worse_MM & better_MM, axis=1))


def rounding_ties(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    *,
    decimals: int = 3,
) -> Bool[np.ndarray, " M"]:
    """Returns which methods' Pareto flags a table of rounded rates cannot decide.

    A rounded rate stands for a cell of width 10^-decimals. A flag is certain if some method is
    better in both rounded rates, or if every other one is worse in at least one; else some other
    method ties in one rate and is not worse in the other, and digits below the last decide.

    Args:
      retain_M: retain rate R of each method; rounded here, so ours or printed ones will do.
      forget_M: forget rate F of each method, likewise.
      decimals: digits after the point that the table shows.

    Raises:
      ValueError: as `pareto_mask`.
    """
    _check_rates(retain_M, forget_M)
    # Whole units compare exactly; 0.57 * 100 does not equal 57.
    retain_M, forget_M = (np.rint(rate_M * 10.0**decimals) for rate_M in (retain_M, forget_M))
    retain_gain_MM, forget_drop_MM = _gains(retain_M, forget_M)
    better_MM = (retain_gain_MM > 0) & (forget_drop_MM > 0)
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    np.fill_diagonal(not_worse_MM, False)
    return np.asarray(np.any(not_worse_MM, axis=1) & ~np.any(better_MM, axis=1))


def frontier_among(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    is_eligible_M: Bool[np.ndarray, " M"],
) -> tuple[Bool[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
    """Returns the Pareto flags, and which hang on a tie, with the others left out of the question.

    Args:
      retain_M: R of each method.
      forget_M: F of each method.
      is_eligible_M: False for a method that can neither be optimal nor dominate: a damaged one.
    """
    optimal_M, tie_M = np.zeros(len(retain_M), np.bool_), np.zeros(len(retain_M), np.bool_)
    if is_eligible_M.any():
        points = retain_M[is_eligible_M], forget_M[is_eligible_M]
        optimal_M[is_eligible_M] = pareto_mask(*points)
        tie_M[is_eligible_M] = rounding_ties(*points)
    return optimal_M, tie_M


def _gains(
    retain_M: Float[np.ndarray, " M"], forget_M: Float[np.ndarray, " M"]
) -> tuple[Float[np.ndarray, "M M"], Float[np.ndarray, "M M"]]:
    """Returns how much better the method of the column is than that of the row, in R and in F."""
    return retain_M[None] - retain_M[:, None], forget_M[:, None] - forget_M[None]


def euclidean_to_ideal(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    *,
    rescale: bool = False,
) -> Float[np.ndarray, " M"]:
    """Returns each method's Euclidean distance to the ideal R = 1, F = 0.

    sqrt((1 - R)^2 + F^2), raw or after each rate was stretched to [0, 1] over the methods (the
    paper's "min-max normalized space"; then a distance depends on which methods are compared).

    Args:
      retain_M: retain rate R of each method.
      forget_M: forget rate F of each method.
      rescale: stretch them; a rate that all methods share then adds nothing.

    Raises:
      ValueError: as `pareto_mask`.
    """
    _check_rates(retain_M, forget_M)
    shortfall_M = 1 - retain_M
    if rescale:
        shortfall_M, forget_M = _stretch(shortfall_M), _stretch(forget_M)
    return np.hypot(shortfall_M, forget_M)


def _stretch(rate_M: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    spread = np.ptp(rate_M)
    return (rate_M - rate_M.min()) / spread if spread else np.zeros_like(rate_M)


def have_covariance(
    retain_M: Float[np.ndarray, " methods"], forget_M: Float[np.ndarray, " others"]
) -> bool:
    """Returns whether there are methods enough for a covariance, and both rates differ."""
    _check_rates(retain_M, forget_M)
    return len(retain_M) >= MIN_METHODS and bool(np.ptp(retain_M) and np.ptp(forget_M))


def mahalanobis_to_ideal(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    *,
    shrinkage: float = 0.1,
) -> Mahalanobis:
    """Returns each method's Mahalanobis distance to the ideal, D_mah.

    D_mah(v) = sqrt((v - mu)^T Sigma^-1 (v - mu)), v = (R, F), mu = (1, 0). The paper calls Sigma
    the "(regularized) covariance of all methods" and says no more. Here Sigma = 0.9 C + 0.1 diag(C)
    with C the ddof = 1 covariance of the methods' points, the one rule of 57 tried that gives back
    its published tables: 11 of 15 blocks within rounding, and no rule gives the other four.

    Args:
      retain_M: retain rate R of each method of the pool.
      forget_M: forget rate F of each method of the pool.
      shrinkage: how far the off-diagonal is shrunk, above 0 and up to 1.

    Returns:
      The distances; adding a method changes every one.

    Raises:
      ValueError: as `pareto_mask`; methods that do not `have_covariance`.
    """
    if not have_covariance(retain_M, forget_M):
        raise ValueError(
            f"methods must be {MIN_METHODS} or more, with rates that differ, got {len(retain_M)}: "
            "report the Euclidean distance"
        )
    points_M2 = np.stack([retain_M, forget_M], axis=1)
    (distance_M,), (covariance,) = _distances(points_M2[None], shrinkage)
    return Mahalanobis(
        distance_M=distance_M,
        covariance=covariance,
        condition_number=float(np.linalg.cond(covariance)),
        is_negative=bool(covariance[0, 1] < 0),
    )


def _distances(
    points_DM2: Float[np.ndarray, "D M 2"], shrinkage: float
) -> tuple[Float[np.ndarray, "D M"], Float[np.ndarray, "D 2 2"]]:
    """Returns the distances within each of D pools of methods, and each pool's covariance."""
    centered_DM2 = points_DM2 - points_DM2.mean(1, keepdims=True)
    covariance_D22 = np.einsum("dmi,dmj->dij", centered_DM2, centered_DM2)
    covariance_D22 /= points_DM2.shape[1] - 1
    covariance_D22[:, [0, 1], [1, 0]] *= 1 - shrinkage
    offset_DM2 = points_DM2 - np.array([1.0, 0.0])
    solved_D2M = np.linalg.solve(covariance_D22, offset_DM2.transpose(0, 2, 1))
    return np.sqrt(np.einsum("dmi,dim->dm", offset_DM2, solved_D2M)), covariance_D22


def distance_rounding_error(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    *,
    decimals: int,
    shrinkage: float = 0.1,
    draws: int = 1000,
    seed: int = 0,
) -> float:
    """Returns how far rounding of the rates may move a D_mah, as a share of it.

    Every rate is drawn anew within its rounding cell, and the largest relative change of any
    method's distance is kept: what a table of so many decimals cannot be held to. It is large
    where the covariance has a small eigenvalue.

    Args:
      retain_M: retain rate R of each method, rounded.
      forget_M: forget rate F of each method, rounded.
      decimals: digits after the point that the rates have.
      shrinkage: as in `mahalanobis_to_ideal`.
      draws: pools drawn.
      seed: of the draws.

    Raises:
      ValueError: as `mahalanobis_to_ideal`.
    """
    distance_M = mahalanobis_to_ideal(retain_M, forget_M, shrinkage=shrinkage).distance_M
    points_M2 = np.stack([retain_M, forget_M], axis=1)
    cell = 0.5 * 10.0**-decimals
    moves_DM2 = np.random.default_rng(seed).uniform(-cell, cell, (draws, *points_M2.shape))
    moved_DM, _ = _distances(points_M2 + moves_DM2, shrinkage)
    return float(np.abs(moved_DM / distance_M - 1).max())


def _check_rates(
    retain_M: Float[np.ndarray, " methods"], forget_M: Float[np.ndarray, " others"]
) -> None:
    if len(retain_M) != len(forget_M) or not len(retain_M):
        raise ValueError(
            f"each method must have a retain and a forget rate, got {len(retain_M)} and "
            f"{len(forget_M)}: pass both for the same methods"
        )
    bad = int((~np.isfinite(retain_M)).sum() + (~np.isfinite(forget_M)).sum())
    if bad:
        raise ValueError(f"rates must be finite, got {bad} that are not: leave out the method")
