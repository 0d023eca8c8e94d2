"""The paper's second distance D_mah, and the Pareto flags that printed rates cannot decide."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate.pareto import Flags

# Two rates give a covariance of three free numbers; from fewer points it would describe noise.
MIN_METHODS = 5
# How far the correlation of the rates is shrunk in D_mah.
_SHRINKAGE = 0.1

Rates = Float[np.ndarray, " M"]


class Mahalanobis(NamedTuple):
    """D_mah of each method, and whether R and F are negatively correlated over the methods.

    If they are, a lower F or a higher R may raise the distance. Then it should not rank methods.
    """

    distance_M: Rates
    is_negative: bool


def have_covariance(retain_M: Rates, forget_M: Rates) -> bool:
    """Returns whether there are enough methods for a covariance and both rates differ."""
    return len(retain_M) >= MIN_METHODS and bool(np.ptp(retain_M) and np.ptp(forget_M))


def mahalanobis_to_ideal(retain_M: Rates, forget_M: Rates) -> Mahalanobis:
    """Returns each method's Mahalanobis distance to R = 1 and F = 0, D_mah.

    D_mah(v) = sqrt((v - mu)^T Sigma^-1 (v - mu)), v = (R, F), mu = (1, 0). The paper calls Sigma
    the "(regularized) covariance of all methods" and says no more. Here Sigma = 0.9 C + 0.1 diag(C)
    with C the ddof = 1 covariance of the methods' points. It is the only one of 57 rules that
    reproduces 11 of 15 published blocks within rounding. No rule gives the other four.
    """
    if not have_covariance(retain_M, forget_M):
        raise ValueError(
            f"D_mah must have {MIN_METHODS} or more methods whose rates differ, "
            f"got {len(retain_M)}: compare more"
        )
    covariance = np.cov(retain_M, forget_M)
    covariance[[0, 1], [1, 0]] *= 1 - _SHRINKAGE
    offset_2M = np.stack([retain_M - 1.0, forget_M])
    distance_M = np.sqrt((offset_2M * np.linalg.solve(covariance, offset_2M)).sum(axis=0))
    return Mahalanobis(distance_M, bool(covariance[0, 1] < 0))


def rounding_ties(retain_M: Rates, forget_M: Rates, *, decimals: int = 3) -> Flags:
    """Returns which Pareto flags a table of rates with this number of decimals cannot decide.

    A flag is certain if some method is better in both rounded rates, or if every other method is
    worse in one of them.
    """
    # Whole units compare exactly; 0.57 * 100 does not equal 57.
    retain_M, forget_M = (np.rint(rate_M * 10.0**decimals) for rate_M in (retain_M, forget_M))
    retain_gain_MM, forget_drop_MM = retain_M - retain_M[:, None], forget_M[:, None] - forget_M
    better_MM = (retain_gain_MM > 0) & (forget_drop_MM > 0)
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    np.fill_diagonal(not_worse_MM, False)
    return np.asarray(np.any(not_worse_MM, axis=1) & ~np.any(better_MM, axis=1))
