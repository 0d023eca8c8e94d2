"""The forget-retain frontier and distances to the ideal: pure functions on the host.

A method is a point (R, F): retain rate up, forget rate down. The ideal is R = 1, F = 0. All
functions take the two rates of each method and refuse rates that are not finite or not paired.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.data.words import refused

# Two rates give a covariance of three free numbers; from fewer points it would describe noise.
MIN_METHODS = 5
# How far the correlation of the rates is shrunk in D_mah.
_SHRINKAGE = 0.1

Rates = Float[np.ndarray, " M"]
Flags = Bool[np.ndarray, " M"]


class Mahalanobis(NamedTuple):
    """D_mah of each method, the shrunken covariance of (R, F) and its quality.

    Rounding errors of the rates grow with the condition number. If R and F are negatively
    correlated a lower F or a higher R may raise the distance. Then it should not rank methods.
    """

    distance_M: Rates
    covariance: Float[np.ndarray, "2 2"]
    condition_number: float
    is_negative: bool


def pareto_mask(retain_M: Rates, forget_M: Rates) -> Flags:
    """Returns which methods no other method dominates.

    The textbook rule: one method dominates another if its R is not lower, its F is not higher, and
    one of the two is better. The paper's sentence asks for both to be better. On its own tables the
    two rules differ only for ties of rates after rounding (see `rounding_ties`).
    """
    retain_gain_MM, forget_drop_MM = _gains(retain_M, forget_M)
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    better_MM = (retain_gain_MM > 0) | (forget_drop_MM > 0)
    return np.asarray(~np.any(not_worse_MM & better_MM, axis=1))


def rounding_ties(retain_M: Rates, forget_M: Rates, *, decimals: int = 3) -> Flags:
    """Returns which Pareto flags a table of rates with this number of decimals cannot decide.

    A flag is certain if some method is better in both rounded rates, or if every other method is
    worse in one of them.
    """
    # Whole units compare exactly; 0.57 * 100 does not equal 57.
    rounded = (np.rint(rate_M * 10.0**decimals) for rate_M in (retain_M, forget_M))
    retain_gain_MM, forget_drop_MM = _gains(*rounded)
    better_MM = (retain_gain_MM > 0) & (forget_drop_MM > 0)
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    np.fill_diagonal(not_worse_MM, False)
    return np.asarray(np.any(not_worse_MM, axis=1) & ~np.any(better_MM, axis=1))


def _gains(
    retain_M: Rates, forget_M: Rates
) -> tuple[Float[np.ndarray, "M M"], Float[np.ndarray, "M M"]]:
    """Returns how much better the method of the column is than that of the row in R and in F."""
    _check_rates(retain_M, forget_M)
    return retain_M[None] - retain_M[:, None], forget_M[:, None] - forget_M[None]


def frontier_among(retain_M: Rates, forget_M: Rates, is_eligible_M: Flags) -> tuple[Flags, Flags]:
    """Returns `pareto_mask` and `rounding_ties` among the eligible methods; others are neither."""
    flags_2M = np.zeros((2, len(retain_M)), np.bool_)
    if is_eligible_M.any():
        points = retain_M[is_eligible_M], forget_M[is_eligible_M]
        flags_2M[:, is_eligible_M] = pareto_mask(*points), rounding_ties(*points)
    return flags_2M[0], flags_2M[1]


def euclidean_to_ideal(retain_M: Rates, forget_M: Rates, *, rescale: bool = False) -> Rates:
    """Returns each method's Euclidean distance to the ideal, sqrt((1 - R)^2 + F^2).

    With `rescale` each rate is first stretched to [0, 1] over the methods (the paper's "min-max
    normalized space"). A rate that all share then adds nothing.
    """
    _check_rates(retain_M, forget_M)
    rates = [1 - retain_M, forget_M]
    if rescale:
        # If all agree the numerator is 0 for any divisor.
        rates = [(rate_M - rate_M.min()) / (np.ptp(rate_M) or 1.0) for rate_M in rates]
    return np.hypot(*rates)


def have_covariance(retain_M: Rates, forget_M: Rates) -> bool:
    """Returns whether there are enough methods for a covariance and both rates differ."""
    _check_rates(retain_M, forget_M)
    return len(retain_M) >= MIN_METHODS and bool(np.ptp(retain_M) and np.ptp(forget_M))


def mahalanobis_to_ideal(retain_M: Rates, forget_M: Rates) -> Mahalanobis:
    """Returns each method's Mahalanobis distance to the ideal, D_mah.

    D_mah(v) = sqrt((v - mu)^T Sigma^-1 (v - mu)), v = (R, F), mu = (1, 0). The paper calls Sigma
    the "(regularized) covariance of all methods" and says no more. Here Sigma = 0.9 C + 0.1 diag(C)
    with C the ddof = 1 covariance of the methods' points. It is the only one of 57 rules that
    reproduces 11 of 15 published blocks within rounding. No rule gives the other four.
    """
    if not have_covariance(retain_M, forget_M):
        raise refused("d_mah", least=MIN_METHODS, got=len(retain_M))
    covariance = np.cov(retain_M, forget_M)
    covariance[[0, 1], [1, 0]] *= 1 - _SHRINKAGE
    offset_2M = np.stack([retain_M - 1.0, forget_M])
    distance_M = np.sqrt((offset_2M * np.linalg.solve(covariance, offset_2M)).sum(axis=0))
    condition_number = float(np.linalg.cond(covariance))
    return Mahalanobis(distance_M, covariance, condition_number, bool(covariance[0, 1] < 0))


def _check_rates(
    retain_M: Float[np.ndarray, " methods"], forget_M: Float[np.ndarray, " others"]
) -> None:
    bad = int((~np.isfinite(retain_M)).sum() + (~np.isfinite(forget_M)).sum())
    if len(retain_M) != len(forget_M) or not len(retain_M) or bad:
        raise refused("rates_paired", retain=len(retain_M), forget=len(forget_M), bad=bad)
