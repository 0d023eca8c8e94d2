"""The theory of a sketch: its variance, its bias and the effective size of a fixed one.

For unit vectors u and v of R^P: rho = <u, v> and A = sum_i (u_i v_i - (rho / 2) (u_i^2 + v_i^2))^2.
p is the probability that two given coordinates meet in one coordinate of the sketch. Signs are
Rademacher with fourth moment 1. NumPy in float64 on the host.

Source: OPORP (Li and Li, KDD 2023, arXiv 2302.03505) for one sign per coordinate with bins; the
variance under a frozen binning follows from the same expansion.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.projections import ProjectionSpec


def diagonal_term(u_P: Float[np.ndarray, " P"], v_P: Float[np.ndarray, " P"]) -> float:
    """Returns A of two unit vectors; it matters where few coordinates carry the mass."""
    rho = float(u_P @ v_P)
    return float(np.sum((u_P * v_P - 0.5 * rho * (u_P**2 + v_P**2)) ** 2))


def cosine_variance(u_P: Float[np.ndarray, " P"], v_P: Float[np.ndarray, " P"], p: float) -> float:
    """Returns the variance of the cosine of two sketches: p [(1 - rho^2)^2 - 2 A].

    To first order in a family's `collision` p; the next is a factor of about 1 + 11 rho^2 / (2 K).
    """
    rho = float(u_P @ v_P)
    return p * ((1 - rho**2) ** 2 - 2 * diagonal_term(u_P, v_P))


def bin_of_coordinate(spec: ProjectionSpec) -> Int[np.ndarray, " P"]:
    """Returns the bin of every coordinate, for a family that has bins."""
    bins = PROJECTIONS[spec.family].bins
    if bins is None:
        raise ValueError(f"the projection must have bins, {spec.family} has none: use another")
    return bins(spec)


def frozen_cosine_variance(
    u_P: Float[np.ndarray, " P"],
    v_P: Float[np.ndarray, " P"],
    bin_P: Int[np.ndarray, " P"],
    size: int,
) -> float:
    """Returns the variance of the cosine of unit vectors over random signs for a fixed binning.

    It is 2 (sum over bins of |M_bin|^2 - A). With a, b, c the bin's sums of u^2, v^2 and u v:
    |M_bin|^2 = (a b + c^2) / 2 - rho c (a + b) + (rho^2 / 4) (a^2 + b^2 + 2 c^2).
    """
    rho = float(u_P @ v_P)
    a_K, b_K, c_K = (np.bincount(bin_P, w_P, size) for w_P in (u_P**2, v_P**2, u_P * v_P))
    squared_K = 0.5 * (a_K * b_K + c_K**2) - rho * c_K * (a_K + b_K)
    squared_K += 0.25 * rho**2 * (a_K**2 + b_K**2 + 2 * c_K**2)
    return 2 * (float(np.sum(squared_K)) - diagonal_term(u_P, v_P))


def effective_size(
    unit_NP: Float[np.ndarray, "N P"],
    specs: Sequence[ProjectionSpec],
    pairs: Sequence[tuple[int, int]],
) -> float:
    """Returns the size that a binned projection seems to have, pooled over pairs and specs.

    It is the sum of [(1 - rho^2)^2 - 2 A] over the sum of the variances under the frozen binnings.
    A sound sketch has about K or more. It is infinite if no two coordinates share a bin (K = P).
    One pair under one permutation scatters. 50 pairs and 4 seeds give a steady figure. The
    gradients are in float64.
    """
    expected = variance = 0.0
    for spec in specs:
        bin_P = bin_of_coordinate(spec)
        for i, j in pairs:
            u_P, v_P = unit_NP[i], unit_NP[j]
            expected += (1 - float(u_P @ v_P) ** 2) ** 2 - 2 * diagonal_term(u_P, v_P)
            variance += frozen_cosine_variance(u_P, v_P, bin_P, spec.size)
    # Rounding leaves about 1e-17 where no bin holds two live coordinates.
    return expected / variance if variance > 1e-14 * expected else math.inf


def independent_pairs(
    unit_NP: Float[np.ndarray, "N P"], *, max_pairs: int
) -> tuple[tuple[int, int], ...]:
    """Returns pairs of rows with |cosine| < 0.99; at most max_pairs, evenly spread."""
    gram_NN = unit_NP @ unit_NP.T
    live_N = np.diag(gram_NN) > 0.5
    found_M2 = np.argwhere(np.triu(np.abs(gram_NN) < 0.99, k=1) & np.outer(live_N, live_N))
    if not len(found_M2):
        rows = len(unit_NP)
        raise ValueError(f"two of {rows} gradients must be neither zero nor parallel: give others")
    keep = np.unique(np.linspace(0, len(found_M2) - 1, min(max_pairs, len(found_M2))).astype(int))
    return tuple((int(i), int(j)) for i, j in found_M2[keep])
