"""The noise that the sketch adds to the mean score of several queries. NumPy, on the host."""

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.index import search
from raslik_jax.index.combine import directions
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve.selectors import noise_band
from raslik_jax.sketch.families import PROJECTIONS, ProjectionSpec

# The rows nearest to the edge of unrelated scores, whose noise represents all.
_PILOT_ROWS = 64


def score_sigma(
    query_gram_QQ: Float[np.ndarray, "Q Q"], rho_NQ: Float[np.ndarray, "N Q"], p: float
) -> Float[np.ndarray, " N"]:
    """Returns sigma_k, the standard deviation of each row's mean cosine over Q queries.

    The root of (p / Q^2) sum_ij [ g_ij (1 - rho_i^2 - rho_j^2) - rho_i rho_j + (rho_i rho_j / 2) (1
    + g_ij^2 + rho_i^2 + rho_j^2) ]. All queries share one sketch, so it is neither 1 / sqrt(K) nor
    1 / sqrt(Q K). It is first order in p and without the diagonal terms. These lower the noise of
    heavy-tailed gradients by an amount that sketches do not show. It is the noise of gradients with
    spread weight and an upper bound for all others.

    g_ij are cosines between the queries and rho those of the rows with them, centered if the scores
    are. p is about 1 / K: the probability that two coordinates meet.

    Source: expansion of Li and Li, KDD 2023, arXiv 2302.03505.
    """
    gram_QQ, rho_NQ = np.asarray(query_gram_QQ, np.float64), np.asarray(rho_NQ, np.float64)
    sum_N, square_NQ = rho_NQ.sum(axis=1), rho_NQ**2
    terms_N = gram_QQ.sum() - 2 * square_NQ @ gram_QQ.sum(axis=1) - 0.5 * sum_N**2
    terms_N += 0.5 * np.sum((rho_NQ @ gram_QQ**2) * rho_NQ, axis=1)
    terms_N += (square_NQ * rho_NQ).sum(axis=1) * sum_N
    # Exactly parallel vectors have no variance; rounding may leave -1e-17.
    return np.sqrt(np.maximum(p * terms_N, 0)) / rho_NQ.shape[1]


def row_sigma(
    store: SketchStore,
    positions: Int[np.ndarray, " M"],
    queries: search.Queries,
) -> Float[np.ndarray, " M"]:
    """Returns the standard deviation of rows' mean scores over random sketches."""
    spec = ProjectionSpec(**store.identity["projection"])
    p = PROJECTIONS[spec.family].collision(spec.num_params, spec.size)
    rho_MQ = directions(store.rows(positions), queries.mean_K) @ queries.direction_QK.T
    return score_sigma(queries.gram_QQ, rho_MQ, p)


def edge_sigma(
    store: SketchStore, queries: search.Queries, score_N: Float[np.ndarray, " N"]
) -> float:
    """Returns the one sigma_k of `selectors.find_cut`: of the rows near the edge of the noise."""
    distance_N = np.abs(score_N - noise_band(score_N)[1])
    nearest = np.sort(np.argsort(distance_N, kind="stable")[:_PILOT_ROWS])
    nearest = nearest[np.isfinite(distance_N[nearest])]
    sigma_M = row_sigma(store, nearest, queries)
    return float(np.sqrt(np.mean(sigma_M**2)))
