"""The unsketched kernel from Gram matrices: every cosine, centered or not, without a gradient.

Once the inner products of all gradients are known, scores of any queries under any centering are
sums over a matrix of N + Q rows. NumPy in float64, on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

# A centered row shorter than this share of a unit is the mean itself, or nothing but rounding.
_RELATIVE_ZERO = 1e-6


class Grams(NamedTuple):
    """Inner products of M unit vectors, training rows first.

    Attributes:
      norm_M: lengths before they were made unit vectors.
      vector_MM: of whole unit gradients; the paper's cosine.
      per_tensor_MM: of gradients whose tensors are unit vectors each, the whole then too.
    """

    norm_M: Float[np.ndarray, " M"]
    vector_MM: Float[np.ndarray, "M M"]
    per_tensor_MM: Float[np.ndarray, "M M"]


class Products(NamedTuple):
    """What scores need of M unit vectors where their Gram matrix would be too large.

    Attributes:
      norm_N: lengths of the training rows before they were made unit vectors.
      query_RN: cosines of R queries with the training rows.
      query_mean_R: products of the queries with the mean training row.
      row_mean_N: products of the training rows with it.
      mean_square: its product with itself.
      query_RR: cosines between the queries.
    """

    norm_N: Float[np.ndarray, " N"]
    query_RN: Float[np.ndarray, "R N"]
    query_mean_R: Float[np.ndarray, " R"]
    row_mean_N: Float[np.ndarray, " N"]
    mean_square: Float[np.ndarray, ""]
    query_RR: Float[np.ndarray, "R R"]


def cosines_of_products(
    products: Products, *, center: bool
) -> tuple[Float[np.ndarray, "R N"], Float[np.ndarray, "R R"]]:
    """Returns the cosines of each query with each training row and between the queries."""
    if not center:
        return products.query_RN.astype(np.float64), products.query_RR.astype(np.float64)
    shifted_RN = (
        products.query_RN
        - products.query_mean_R[:, None]
        - products.row_mean_N[None]
        + products.mean_square
    )
    is_some_N = products.norm_N > 0
    row_N = is_some_N - 2 * products.row_mean_N + products.mean_square
    query_R = 1 - 2 * products.query_mean_R + products.mean_square
    scale_RN = np.sqrt(np.maximum(query_R[:, None] * row_N[None], _RELATIVE_ZERO**2))
    mean_R = products.query_mean_R
    moved_RR = products.query_RR - mean_R[:, None] - mean_R[None] + products.mean_square
    length_R = np.sqrt(np.maximum(query_R, _RELATIVE_ZERO))
    return (
        np.where(is_some_N[None], shifted_RN / scale_RN, 0.0),
        moved_RR / length_R[:, None] / length_R[None],
    )


def gram_matrices(vectors_MP: Float[np.ndarray, "M P"], tensors: Sequence[slice]) -> Grams:
    """Returns the Gram matrices of flat gradients, read one tensor at a time.

    Products of one tensor are summed in float32 by BLAS, tensors in float64. The rows may be a
    memory map larger than memory: M times the largest tensor is held, and four [M, M] matrices.

    Args:
      vectors_MP: one flat gradient a row, any float dtype.
      tensors: the columns of each tensor of each layer; together all columns, once.

    Raises:
      ValueError: the tensors do not cover the columns, or a product is not finite.
    """
    num_rows, num_columns = vectors_MP.shape
    edges = [(part.start, part.stop) for part in sorted(tensors, key=lambda part: part.start)]
    if [start for start, _ in edges] + [num_columns] != [0] + [stop for _, stop in edges]:
        raise ValueError(f"tensors must cover each of {num_columns} columns once, got {edges[:5]}")
    total_MM = np.zeros((num_rows, num_rows))
    per_tensor_MM = np.zeros((num_rows, num_rows))
    for start, stop in edges:
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
    """Returns the products of the unit vectors less their mean over the training rows.

    <u - mu, v - mu> = <u, v> - <u, mu> - <mu, v> + <mu, mu>. Zero vectors stay zero.

    Args:
      gram_MM: of unit vectors, training rows first.
      num_train: N.
    """
    mean_M = gram_MM[:, :num_train].mean(axis=1)
    square = mean_M[:num_train].mean()
    is_some_M = np.diag(gram_MM) > 0
    moved_MM = gram_MM - mean_M[:, None] - mean_M[None, :] + square
    return np.where(is_some_M[:, None] & is_some_M[None, :], moved_MM, 0.0)


def deflate(
    gram_MM: Float[np.ndarray, "M M"], num_train: int, ranks: Sequence[int]
) -> dict[int, Float[np.ndarray, "M M"]]:
    """Returns the products after the training rows' largest principal directions are gone.

    Directions v_k = X^T u_k / sqrt(lambda_k) of the training rows X with X X^T = U Lambda U^T;
    each row loses its projections on them.

    Args:
      gram_MM: training rows first; center it before, or the first direction is about the mean.
      num_train: N.
      ranks: numbers of directions taken away, each from 1 to N.

    Returns:
      The products for each of the ranks.
    """
    most = max(ranks)
    values_R, vectors_NR = scipy.linalg.eigh(
        gram_MM[:num_train, :num_train], subset_by_index=[num_train - most, num_train - 1]
    )
    length_R = np.sqrt(np.maximum(values_R, 1e-30))
    along_MR = (gram_MM[:, :num_train] @ (vectors_NR / length_R))[:, ::-1]
    return {rank: gram_MM - along_MR[:, :rank] @ along_MR[:, :rank].T for rank in ranks}


def cosines(
    gram_MM: Float[np.ndarray, "M M"], num_train: int, queries: Int[np.ndarray, " Q"]
) -> Float[np.ndarray, "Q N"]:
    """Returns the cosine of each query with each training row; 0 where one has no length.

    Args:
      gram_MM: training rows first; centered or not.
      num_train: N.
      queries: positions of the queries among the M rows.
    """
    square_M = np.diag(gram_MM)
    is_some_M = square_M > _RELATIVE_ZERO
    scale_M = np.where(is_some_M, np.sqrt(np.where(is_some_M, square_M, 1.0)), np.inf)
    return gram_MM[queries, :num_train] / scale_M[queries, None] / scale_M[None, :num_train]


def query_cosines(
    gram_MM: Float[np.ndarray, "M M"], queries: Int[np.ndarray, " Q"]
) -> Float[np.ndarray, "Q Q"]:
    """Returns the cosines between the queries, for `combine.common_weights`."""
    gram_QQ = gram_MM[np.ix_(queries, queries)]
    length_Q = np.sqrt(np.maximum(np.diag(gram_QQ), _RELATIVE_ZERO))
    return gram_QQ / length_Q[:, None] / length_Q[None, :]


def z_sum(scores: Sequence[Float[np.ndarray, " N"]]) -> Float[np.ndarray, " N"]:
    """Returns the sum of several scores, each brought to mean 0 and standard deviation 1."""
    return np.sum([(score_N - score_N.mean()) / max(score_N.std(), 1e-12) for score_N in scores], 0)
