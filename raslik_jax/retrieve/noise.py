"""Whether queries agree, and the noise that the sketch adds to their mean score.

NumPy, on the host.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def check_agreement(query_gram_QQ: Float[np.ndarray, "Q Q"], ids: Sequence[str]) -> None:
    """Raises a ValueError where queries point apart, naming those that do most.

    Scores are means over queries. Where queries point against each other, that mean is of nothing:
    what is aligned with one is anti-aligned with another. Unrelated queries have mean directions
    of squared length 1 / Q; refused is what falls below half of that.

    Args:
      query_gram_QQ: cosines g_ij between the queries, of the centered sketches where scores are.
      ids: of the queries.
    """
    count, square = len(query_gram_QQ), query_gram_QQ.mean()
    if square < 0.5 / count:
        worst = np.argsort(query_gram_QQ.sum(axis=1), kind="stable")[:3]
        raise ValueError(
            f"queries must be of one behavior, the {count} sketches point apart (mean direction of "
            f"squared length {square:.3g}, {1 / count:.3g} is unrelated); most of all "
            f"{[ids[i] for i in worst]}: trace them one by one"
        )


def score_sigma(
    query_gram_QQ: Float[np.ndarray, "Q Q"], rho_NQ: Float[np.ndarray, "N Q"], p: float
) -> Float[np.ndarray, " N"]:
    """Returns sigma_k, the standard deviation of each row's mean cosine over Q queries.

    The root of (p / Q^2) sum_ij [ g_ij (1 - rho_i^2 - rho_j^2) - rho_i rho_j
    + (rho_i rho_j / 2) (1 + g_ij^2 + rho_i^2 + rho_j^2) ]: all queries share one sketch, so it is
    neither 1 / sqrt(K) nor 1 / sqrt(Q K). First order in p, without the diagonal terms: they lower
    the noise of heavy-tailed gradients, by an amount that sketches do not tell (two sketches show
    the same products whether a bin holds one large coordinate or many small ones). So this is the
    noise of gradients whose weight is spread out, and an upper bound for all others.

    Args:
      query_gram_QQ: cosines between the queries, as in `check_agreement`.
      rho_NQ: cosines of the rows with the queries, likewise.
      p: probability that two coordinates meet, about 1 / K.

    Source: expansion of Li and Li, KDD 2023, arXiv 2302.03505; `sketch.theory` has it row by
    row.
    """
    gram_QQ, rho_NQ = np.asarray(query_gram_QQ, np.float64), np.asarray(rho_NQ, np.float64)
    sum_N, square_NQ = rho_NQ.sum(axis=1), rho_NQ**2
    terms_N = gram_QQ.sum() - 2 * square_NQ @ gram_QQ.sum(axis=1) - 0.5 * sum_N**2
    terms_N += 0.5 * np.sum((rho_NQ @ gram_QQ**2) * rho_NQ, axis=1)
    terms_N += (square_NQ * rho_NQ).sum(axis=1) * sum_N
    # Exactly parallel vectors have no variance; rounding may leave -1e-17.
    return np.sqrt(np.maximum(p * terms_N, 0)) / rho_NQ.shape[1]
