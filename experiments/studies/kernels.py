"""The unsketched kernel from Gram matrices: every cosine, centered or not, without a gradient.

Scores of any queries under any centering are sums over the matrix of inner products. It has
M = N + Q rows, the training rows first. NumPy computes them on the host.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from raslik_jax.index.combine import Aggregate, query_weights

# The squared length of a centered unit row that is the mean itself, or nothing but rounding.
_ZERO = 1e-6


class Grams(NamedTuple):
    """Inner products of M unit vectors, and their lengths before they were."""

    norm_M: Float[np.ndarray, " M"]
    vector_MM: Float[np.ndarray, "M M"]  # of whole unit gradients; the paper's cosine
    per_tensor_MM: Float[np.ndarray, "M M"]  # of those whose tensors were unit vectors before


class KernelScores(NamedTuple):
    """Cosines of each query with each training row, and between the queries."""

    score_QN: Float[np.ndarray, "Q N"]
    gram_QQ: Float[np.ndarray, "Q Q"]

    def some(self, queries: Int[np.ndarray, " R"]) -> "KernelScores":
        """Returns those of some queries."""
        return KernelScores(self.score_QN[queries], self.gram_QQ[queries][:, queries])

    def combine(self, how: Aggregate) -> Float[np.ndarray, " N"]:
        """Returns one score for each training row."""
        return query_weights(self.gram_QQ, how) @ self.score_QN


def gram_matrices(vectors_MP: Float[np.ndarray, "M P"], edges: Sequence[int]) -> Grams:
    """Returns the Gram matrices of flat gradients. `edges` are 0 and the end of each tensor.

    BLAS sums products of one tensor in float32. Tensors are summed in float64. The rows may be a
    memory map larger than memory: M times the largest tensor and four [M, M] matrices are held.
    """
    total_MM = np.zeros((len(vectors_MP), len(vectors_MP)))
    per_tensor_MM = np.zeros_like(total_MM)
    for start, stop in itertools.pairwise(edges):
        part_MC = np.ascontiguousarray(vectors_MP[:, start:stop], np.float32)
        product_MM = (part_MC @ part_MC.T).astype(np.float64)
        total_MM += product_MM
        per_tensor_MM += _unit_gram(product_MM)
    if not np.isfinite(np.trace(total_MM)):
        raise ValueError("gradients must be finite, some are infinite or NaN: look at the adapter")
    return Grams(np.sqrt(np.diag(total_MM)), _unit_gram(total_MM), _unit_gram(per_tensor_MM))


def _unit_gram(product_MM: np.ndarray) -> np.ndarray:
    """Returns the products of the vectors made unit; rows of zero vectors are zero."""
    norm_M = np.sqrt(np.maximum(np.diag(product_MM), 0))
    scale_M = np.divide(1, norm_M, out=np.zeros_like(norm_M), where=norm_M > 0)
    return product_MM * scale_M[:, None] * scale_M[None, :]


def center(gram_MM: Float[np.ndarray, "M M"], num_train: int) -> Float[np.ndarray, "M M"]:
    """Returns the products of the unit vectors less their mean over the N training rows.

    <u - mu, v - mu> = <u, v> - <u, mu> - <mu, v> + <mu, mu>. Zero vectors stay zero.
    """
    mean_M = gram_MM[:, :num_train].mean(axis=1)
    square = mean_M[:num_train].mean()
    is_some_M = np.diag(gram_MM) > 0
    moved_MM = gram_MM - mean_M[:, None] - mean_M[None, :] + square
    return np.where(is_some_M[:, None] & is_some_M[None, :], moved_MM, 0.0)


def deflate(
    gram_MM: Float[np.ndarray, "M M"], num_train: int, ranks: Sequence[int]
) -> dict[int, Float[np.ndarray, "M M"]]:
    """Returns the products without the largest principal directions, for each number of them.

    Directions v_k = X^T u_k / sqrt(lambda_k) belong to the N centered training rows X, with
    X X^T = U Lambda U^T. Each row loses its projections on them.
    """
    values_R, vectors_NR = scipy.linalg.eigh(
        gram_MM[:num_train, :num_train], subset_by_index=[num_train - max(ranks), num_train - 1]
    )
    length_R = np.sqrt(np.maximum(values_R, 1e-30))
    along_MR = (gram_MM[:, :num_train] @ (vectors_NR / length_R))[:, ::-1]
    return {rank: gram_MM - along_MR[:, :rank] @ along_MR[:, :rank].T for rank in ranks}


def kernel_scores(
    gram_MM: Float[np.ndarray, "M M"], num_train: int, queries: Int[np.ndarray, " Q"]
) -> KernelScores:
    """Returns the cosines of the queries at these rows; 0 where one has no length."""
    square_M = np.diag(gram_MM)
    length_M = np.sqrt(np.where(square_M > _ZERO, square_M, np.inf))
    cosine_QM = gram_MM[queries] / length_M[queries, None] / length_M[None, :]
    return KernelScores(cosine_QM[:, :num_train], cosine_QM[:, queries])


def z_sum(scores: Sequence[Float[np.ndarray, " N"]]) -> Float[np.ndarray, " N"]:
    """Returns the sum of several scores, each brought to mean 0 and standard deviation 1."""
    return np.sum([(score_N - score_N.mean()) / max(score_N.std(), 1e-12) for score_N in scores], 0)
