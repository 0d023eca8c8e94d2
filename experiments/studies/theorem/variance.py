"""The variance of the update direction under a fluctuating query, measured: pure, on the host.

Delta(F, R) = mean over R of g - mean over F of g (Eq. 1) is linear in weights on the training
rows: 1 / |R| on the retain set, -1 / |F| on the forget set. So every variance and error of Delta
is a quadratic form of weights in the Gram matrix of the gradients, and no draw needs a gradient.

A draw has two indices: the sketch (projection seed) s and the fluctuation f of the query. Variances
are sums over coordinates of Delta.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float


def weights_of_sets(
    is_forget_DN: Bool[np.ndarray, "D N"], is_retain_DN: Bool[np.ndarray, "D N"]
) -> Float[np.ndarray, "D N"]:
    """Returns w of each draw, with Delta = sum_x w_x g_x; an empty set adds nothing."""
    num_forget_D1 = np.maximum(is_forget_DN.sum(axis=1, keepdims=True), 1)
    num_retain_D1 = np.maximum(is_retain_DN.sum(axis=1, keepdims=True), 1)
    return is_retain_DN / num_retain_D1 - is_forget_DN / num_forget_D1


def sets_by_count(
    score_DN: Float[np.ndarray, "D N"], num_forget: int, num_retain: int
) -> tuple[Bool[np.ndarray, "D N"], Bool[np.ndarray, "D N"]]:
    """Returns who is among the highest and who among the lowest scores of each draw."""
    order_DN = np.argsort(score_DN, axis=1, kind="stable")
    is_forget_DN = np.zeros(score_DN.shape, bool)
    is_retain_DN = np.zeros(score_DN.shape, bool)
    np.put_along_axis(is_forget_DN, order_DN[:, score_DN.shape[1] - num_forget :], True, axis=1)
    np.put_along_axis(is_retain_DN, order_DN[:, :num_retain], True, axis=1)
    return is_forget_DN, is_retain_DN


def random_sets(
    generator: np.random.Generator, is_open_DN: Bool[np.ndarray, "D N"], count: int
) -> Bool[np.ndarray, "D N"]:
    """Returns a fresh draw of `count` of the open items for each draw."""
    key_DN = np.where(is_open_DN, generator.random(is_open_DN.shape), -1.0)
    return sets_by_count(key_DN, count, 0)[0]


class Spread(NamedTuple):
    """Variances of Delta and its mean squared error to a target.

    All in the same unit; None where one draw of an index is all there is.

    Attributes:
      over_fluctuations: mean over sketches of the variance over fluctuations, the sketch fixed:
        what a user sees whose index is there.
      over_sketches: mean over fluctuations of the variance over sketches, the query fixed.
      total: variance when both are drawn; what the theorem speaks of.
      error: mean of |Delta - target|^2.
    """

    over_fluctuations: float | None
    over_sketches: float | None
    total: float
    error: float


def measure_spread(
    weight_SFN: Float[np.ndarray, "S F N"],
    gram_NN: Float[np.ndarray, "N N"],
    target_N: Float[np.ndarray, " N"],
) -> Spread:
    """Returns the three variances of Delta over S sketches and F fluctuations, each unbiased.

    With D_sf the draws, E <D_sf, D_s'f'> over pairs that differ in f, in s, or in both is what the
    variance over fluctuations, over sketches, and over both takes away from E |D_sf|^2.

    Args:
      weight_SFN: weights of each draw's sets, of `weights_of_sets`; S = 1 for the exact kernel.
      gram_NN: inner products of the training gradients, not normalized.
      target_N: weights of the target.

    Raises:
      ValueError: a single draw.
    """
    num_sketches, num_fluctuations, num_rows = weight_SFN.shape
    draws = num_sketches * num_fluctuations
    if draws < 2:
        raise ValueError("a variance must be of two draws or more, got one: draw more")
    # float32 for the one large product; its rounding is far below the spread of any draw.
    flat_DN = weight_SFN.reshape(draws, num_rows)
    image_DN = (flat_DN.astype(np.float32) @ gram_NN.astype(np.float32)).astype(np.float64)
    product_DD = image_DN @ flat_DN.T
    square = float(np.trace(product_DD)) / draws
    product_SFSF = product_DD.reshape(num_sketches, num_fluctuations, num_sketches, -1)
    same_sketch = float(np.einsum("sfsg->", product_SFSF))
    same_fluctuation = float(np.einsum("sfrf->", product_SFSF))
    diagonal, everything = square * draws, float(product_DD.sum())

    def mean_of_pairs(total: float, count: int) -> float | None:
        return total / count if count else None

    across_f = mean_of_pairs(
        same_sketch - diagonal, num_sketches * num_fluctuations * (num_fluctuations - 1)
    )
    across_s = mean_of_pairs(
        same_fluctuation - diagonal, num_fluctuations * num_sketches * (num_sketches - 1)
    )
    across_both = mean_of_pairs(
        everything - same_sketch - same_fluctuation + diagonal,
        draws * (num_sketches - 1) * (num_fluctuations - 1),
    )
    if across_both is None:
        across_both = across_s if across_f is None else across_f
    assert across_both is not None
    error_DN = flat_DN - target_N[None]
    error = np.einsum("dn,dn->d", error_DN @ gram_NN, error_DN).mean()
    return Spread(
        over_fluctuations=None if across_f is None else square - across_f,
        over_sketches=None if across_s is None else square - across_s,
        total=square - across_both,
        error=float(error),
    )


def perturbed_cosines(
    query_N: Float[np.ndarray, " N"],
    move_FN: Float[np.ndarray, "F N"],
    query_square: float,
    cross_F: Float[np.ndarray, " F"],
    move_square_F: Float[np.ndarray, " F"],
    *,
    size: float,
) -> Float[np.ndarray, "F N"]:
    """Returns cos(q + size * xi_f, x) for rows x of unit length, from inner products alone.

    These are <q, x>, <xi_f, x>, <q, q>, <q, xi_f> and <xi_f, xi_f>.
    """
    square_F = query_square + 2 * size * cross_F + size**2 * move_square_F
    length_F = np.sqrt(np.maximum(square_F, 1e-30))
    return (query_N[None] + size * move_FN) / length_F[:, None]


class Thresholds(NamedTuple):
    """tau_F and -tau_R as cosines: an item is forgotten at or above the first, retained at or
    below the second."""

    forget: float
    retain: float


def place_thresholds(
    score_N: Float[np.ndarray, " N"], num_forget: int, num_retain: int
) -> Thresholds:
    """Returns thresholds half-way between the last item that is in a set and the next one.

    Raises:
      ValueError: sets that leave no item between them.
    """
    if num_forget + num_retain >= len(score_N) or min(num_forget, num_retain) < 1:
        raise ValueError(
            f"sets must have items, and items between them, got {num_forget} and {num_retain} "
            f"of {len(score_N)}: take smaller ones"
        )
    order_N = np.sort(score_N)
    return Thresholds(
        forget=float(order_N[-num_forget - 1 : len(order_N) - num_forget + 1].mean()),
        retain=float(order_N[num_retain - 1 : num_retain + 1].mean()),
    )


class Boundary(NamedTuple):
    """How many items lie near the thresholds: the paper's boundary statistics.

    The paper's margin (least distance of an item outside the neighborhoods, above gamma) says
    nothing, since that is how the neighborhoods are defined; the densities do.

    Attributes:
      near_forget: items within gamma of tau_F.
      near_retain: items within gamma of -tau_R.
      forget_density: items per unit of score at tau_F, as a share of all.
      retain_density: the same at -tau_R.
      margin: least distance to a threshold of an item outside both neighborhoods; 0 where there
        is none.
    """

    near_forget: int
    near_retain: int
    forget_density: float
    retain_density: float
    margin: float


def measure_boundary(
    score_N: Float[np.ndarray, " N"], thresholds: Thresholds, *, gamma: float
) -> Boundary:
    """Returns the boundary statistics of scores on the scale of the thresholds and of gamma."""
    from_forget_N = np.abs(score_N - thresholds.forget)
    from_retain_N = np.abs(score_N - thresholds.retain)
    outside_N = np.minimum(from_forget_N, from_retain_N)
    outside_N = outside_N[outside_N > gamma]
    near_forget = int((from_forget_N <= gamma).sum())
    near_retain = int((from_retain_N <= gamma).sum())
    whole = 2 * gamma * len(score_N)
    return Boundary(
        near_forget=near_forget,
        near_retain=near_retain,
        forget_density=near_forget / whole,
        retain_density=near_retain / whole,
        margin=float(outside_N.min()) if len(outside_N) else 0.0,
    )


def scale_scores(score_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns the scores divided by the largest magnitude, the paper's scale of [-1, 1].

    The paper does not say how it scales; this keeps 0 at 0 and the order.
    """
    return score_N / max(float(np.abs(score_N).max()), 1e-30)


def membership_slope(
    exact_N: Float[np.ndarray, " N"],
    sketched_SN: Float[np.ndarray, "S N"],
    threshold: float,
    *,
    window: float,
) -> float | None:
    """Returns L_k: how steeply the chance of passing a threshold rises with the exact score.

    The least-squares slope of the indicator [sketched >= threshold] over exact scores within
    `window` of the threshold, over all sketches. The proof of the theorem has it fall like
    1 / sqrt(k); a step smoothed by noise of standard deviation sigma_k has its steepest slope at
    1 / (sigma_k sqrt(2 pi)), which grows like sqrt(k).

    Returns:
      The slope per unit of cosine; None where fewer than 4 different scores are in the window.
    """
    is_near_N = np.abs(exact_N - threshold) <= window
    near_M = exact_N[is_near_N] - threshold
    if len(np.unique(near_M)) < 4:
        return None
    share_M = (sketched_SN[:, is_near_N] >= threshold).mean(axis=0)
    centered_M = near_M - near_M.mean()
    return float(centered_M @ (share_M - share_M.mean()) / (centered_M @ centered_M))


class Planted(NamedTuple):
    """A synthetic corpus: gradients, queries, and which rows are targets."""

    gradient_NP: Float[np.ndarray, "N P"]
    query_QP: Float[np.ndarray, "Q P"]
    is_target_N: Bool[np.ndarray, " N"]


def plant_gradients(
    seed: int,
    *,
    num_rows: int,
    num_targets: int,
    num_queries: int,
    num_params: int,
    strength: float = 0.5,
    common: float = 0.5,
) -> Planted:
    """Returns heavy-tailed gradients, some of which share a direction with the queries.

    Each row is noise of unit length, plus `common` times one direction, plus, for targets and
    queries, `strength` times u times another, u uniform in [0, 1.5] so that some are on the
    boundary; rows have log-normal lengths. Coordinates have t_2.5 scales, as those of real
    gradients differ by orders of magnitude.
    The targets come first.
    """
    generator = np.random.default_rng(seed)
    total = num_rows + num_queries
    scale_P = np.abs(generator.standard_t(2.5, num_params)).astype(np.float32)
    scale_P /= np.linalg.norm(scale_P)
    noise_MP = generator.standard_normal((total, num_params), np.float32) * scale_P
    directions_2P = generator.standard_normal((2, num_params), np.float32) * scale_P
    directions_2P /= np.linalg.norm(directions_2P, axis=1, keepdims=True)
    share_M = np.zeros(total, np.float32)
    is_planted_M = np.r_[np.arange(num_rows) < num_targets, np.ones(num_queries, bool)]
    share_M[is_planted_M] = generator.uniform(0, 1.5, int(is_planted_M.sum()))
    vector_MP = noise_MP + np.float32(common) * directions_2P[0]
    vector_MP += np.float32(strength) * share_M[:, None] * directions_2P[1]
    vector_MP *= np.exp(0.5 * generator.standard_normal((total, 1), np.float32))
    return Planted(vector_MP[:num_rows], vector_MP[num_rows:], np.arange(num_rows) < num_targets)
