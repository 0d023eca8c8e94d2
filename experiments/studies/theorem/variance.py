"""The variance of the update direction under a fluctuating query, as pure functions on the host.

Delta(F, R) = mean over R of g - mean over F of g (Eq. 1) is linear in weights on the training
rows: 1 / |R| on the retain set, -1 / |F| on the forget set. So every variance and error of Delta
is a quadratic form of weights in the Gram matrix of the gradients. No draw needs a gradient.

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
    is_forget_DN, is_retain_DN = np.zeros((2, *score_DN.shape), bool)
    np.put_along_axis(is_forget_DN, order_DN[:, score_DN.shape[1] - num_forget :], True, axis=1)
    np.put_along_axis(is_retain_DN, order_DN[:, :num_retain], True, axis=1)
    return is_forget_DN, is_retain_DN


class Spread(NamedTuple):
    """Variances of Delta and its error to a target; None where an index has one draw alone."""

    over_fluctuations: float | None  # mean over sketches, as a user sees whose index is there
    over_sketches: float | None  # mean over fluctuations
    total: float  # when both are drawn; what the theorem speaks of
    error: float  # mean of |Delta - target|^2


def measure_spread(
    weight_SFN: Float[np.ndarray, "S F N"],
    gram_NN: Float[np.ndarray, "N N"],
    target_N: Float[np.ndarray, " N"],
) -> Spread:
    """Returns the three variances of Delta over S sketches and F fluctuations, each unbiased.

    Let D_sf be the draws. E <D_sf, D_s'f'> over pairs that differ in f gives the variance over
    fluctuations, as E |D_sf|^2 less this value. Pairs that differ in s give the variance over
    sketches, and pairs that differ in both give the total. Weights are those of
    `weights_of_sets`, with S = 1 for the exact kernel. `gram_NN` has products of whole gradients.
    """
    num_sketches, num_fluctuations, num_rows = weight_SFN.shape
    draws = num_sketches * num_fluctuations
    # float32 for the one large product; its rounding is far below the spread of any draw.
    flat_DN = weight_SFN.reshape(draws, num_rows)
    image_DN = (flat_DN.astype(np.float32) @ gram_NN.astype(np.float32)).astype(np.float64)
    product_DD = image_DN @ flat_DN.T
    square = float(np.trace(product_DD)) / draws
    product_SFSF = product_DD.reshape(num_sketches, num_fluctuations, num_sketches, -1)
    same_sketch = float(np.einsum("sfsg->", product_SFSF))
    same_fluctuation = float(np.einsum("sfrf->", product_SFSF))
    diagonal, everything = square * draws, float(product_DD.sum())

    def variance(total: float, pairs: int) -> float | None:
        return square - total / pairs if pairs else None

    over_f = variance(same_sketch - diagonal, draws * (num_fluctuations - 1))
    over_s = variance(same_fluctuation - diagonal, draws * (num_sketches - 1))
    over_both = variance(
        everything - same_sketch - same_fluctuation + diagonal,
        draws * (num_sketches - 1) * (num_fluctuations - 1),
    )
    error_DN = flat_DN - target_N[None]
    error = np.einsum("dn,dn->d", error_DN @ gram_NN, error_DN).mean()
    total = next(value for value in (over_both, over_f, over_s) if value is not None)
    return Spread(over_f, over_s, total, float(error))


def perturbed_cosines(
    row_EN: Float[np.ndarray, "E N"], gram_EE: Float[np.ndarray, "E E"], *, size: float
) -> Float[np.ndarray, "F N"]:
    """Returns cos(q + size * xi_f, x) for rows x of unit length, from inner products alone.

    The products are those of q and of each xi_f, with the rows and with each other.
    """
    square_F = gram_EE[0, 0] + 2 * size * gram_EE[0, 1:] + size**2 * np.diag(gram_EE)[1:]
    length_F = np.sqrt(np.maximum(square_F, 1e-30))
    return (row_EN[0] + size * row_EN[1:]) / length_F[:, None]


class Thresholds(NamedTuple):
    """tau_F and -tau_R as cosines: an item is forgotten at or above the first, retained at or
    below the second."""

    forget: float
    retain: float


def place_thresholds(score_N: Float[np.ndarray, " N"], count: int) -> Thresholds:
    """Returns thresholds half-way between the last item of a set of `count` and the next one."""
    if not 1 <= count < len(score_N) / 2:
        raise ValueError(
            f"targets must be at least one and less than half of the rows, got {count} of "
            f"{len(score_N)}: take another corpus"
        )
    order_N = np.sort(score_N)
    return Thresholds(
        forget=float(order_N[-count - 1 : len(order_N) - count + 1].mean()),
        retain=float(order_N[count - 1 : count + 1].mean()),
    )


def measure_boundary(
    score_N: Float[np.ndarray, " N"], thresholds: Thresholds, *, gamma: float
) -> dict[str, float]:
    """Returns the paper's boundary statistics, on the scale of the thresholds and of gamma.

    `near_forget` items are within gamma of tau_F, and `near_retain` items within gamma of -tau_R.
    `forget_density` and `retain_density` are their shares of all items per unit of score. `margin`
    is the least distance of an item outside both neighborhoods, 0 without one. It is above gamma by
    the definition of the neighborhoods, so it says nothing.
    """
    distance_2N = np.abs(score_N - np.array(thresholds)[:, None])
    forget, retain = (distance_2N <= gamma).sum(axis=1).tolist()
    outside_N = distance_2N.min(axis=0)
    outside_N = outside_N[outside_N > gamma]
    whole = 2 * gamma * len(score_N)
    return {
        "near_forget": forget,
        "near_retain": retain,
        "forget_density": forget / whole,
        "retain_density": retain / whole,
        "margin": float(outside_N.min()) if len(outside_N) else 0.0,
    }


def membership_slope(
    exact_N: Float[np.ndarray, " N"],
    sketched_SN: Float[np.ndarray, "S N"],
    threshold: float,
    *,
    window: float,
) -> float | None:
    """Returns L_k: how steeply the chance of passing a threshold rises with the exact score.

    The least-squares slope of the indicator [sketched >= threshold] over exact scores within
    `window` of the threshold, over all sketches; None where fewer than 4 different scores are
    there. The proof of the theorem has it fall like 1 / sqrt(k); a step smoothed by noise of
    standard deviation sigma_k has its steepest slope at 1 / (sigma_k sqrt(2 pi)), which grows like
    sqrt(k).
    """
    is_near_N = np.abs(exact_N - threshold) <= window
    near_M = exact_N[is_near_N] - threshold
    if len(np.unique(near_M)) < 4:
        return None
    share_M = (sketched_SN[:, is_near_N] >= threshold).mean(axis=0)
    centered_M = near_M - near_M.mean()
    return float(centered_M @ (share_M - share_M.mean()) / (centered_M @ centered_M))


def plant_gradients(
    seed: int, num_rows: int, num_params: int
) -> tuple[Float[np.ndarray, "M P"], Bool[np.ndarray, " N"]]:
    """Returns heavy-tailed gradients of rows and of 16 queries, and which rows are targets.

    The first tenth of the rows are targets. Each row is noise of unit length plus half of one
    direction. Targets and queries have in addition half of u times another direction. u is uniform
    in [0, 1.5], so some are on the boundary. Rows have log-normal lengths. Coordinates have t_2.5
    scales, because those of real gradients differ by orders of magnitude.
    """
    generator = np.random.default_rng(seed)
    total, num_targets = num_rows + 16, num_rows // 10
    scale_P = np.abs(generator.standard_t(2.5, num_params)).astype(np.float32)
    scale_P /= np.linalg.norm(scale_P)
    noise_MP = generator.standard_normal((total, num_params), np.float32) * scale_P
    directions_2P = generator.standard_normal((2, num_params), np.float32) * scale_P
    directions_2P /= np.linalg.norm(directions_2P, axis=1, keepdims=True)
    share_M = np.zeros(total, np.float32)
    is_planted_M = np.r_[np.arange(num_rows) < num_targets, np.ones(16, bool)]
    share_M[is_planted_M] = generator.uniform(0, 1.5, int(is_planted_M.sum()))
    vector_MP = noise_MP + np.float32(0.5) * directions_2P[0]
    vector_MP += np.float32(0.5) * share_M[:, None] * directions_2P[1]
    vector_MP *= np.exp(0.5 * generator.standard_normal((total, 1), np.float32))
    return vector_MP, is_planted_M[:num_rows]
