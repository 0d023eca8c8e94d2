"""The exact kernel from Gram matrices, beside the vectors themselves."""

import numpy as np
from absl.testing import absltest, parameterized

from experiments.studies import kernels

_EDGES = (0, 10, 17, 40)


def _vectors() -> np.ndarray:
    """Returns 12 training rows and 3 queries of very unequal lengths, one row of zeros."""
    generator = np.random.default_rng(0)
    vector_MP = generator.standard_normal((15, 40)) + 0.7
    vector_MP *= np.exp(generator.standard_normal((15, 1)))
    vector_MP[:, :10] *= 5
    vector_MP[4] = 0
    return vector_MP.astype(np.float32)


def _unit(vector_MP: np.ndarray) -> np.ndarray:
    length_M1 = np.linalg.norm(vector_MP, axis=1, keepdims=True)
    return np.divide(vector_MP, length_M1, out=np.zeros_like(vector_MP), where=length_M1 > 0)


class KernelsTest(parameterized.TestCase):
    def test_grams_are_those_of_unit_vectors_and_of_unit_tensors(self):
        vector_MP = _vectors().astype(np.float64)
        found = kernels.gram_matrices(_vectors(), _EDGES)
        unit_MP = _unit(vector_MP)
        parts = [_unit(part) for part in np.split(vector_MP, _EDGES[1:-1], axis=1)]
        by_tensor_MP = _unit(np.concatenate(parts, axis=1))
        np.testing.assert_allclose(found.norm_M, np.linalg.norm(vector_MP, axis=1), rtol=1e-6)
        np.testing.assert_allclose(found.vector_MM, unit_MP @ unit_MP.T, atol=1e-6)
        np.testing.assert_allclose(found.per_tensor_MM, by_tensor_MP @ by_tensor_MP.T, atol=1e-6)

    def test_gradients_that_are_not_finite_are_refused(self):
        vector_MP = _vectors()
        vector_MP[3, 5] = np.inf
        with (
            np.errstate(invalid="ignore"),
            self.assertRaisesRegex(ValueError, "gradients must be finite"),
        ):
            kernels.gram_matrices(vector_MP, _EDGES)

    @parameterized.parameters("plain", "centered", "deflated")
    def test_cosines_are_those_of_the_vectors(self, kind):
        unit_MP = _unit(_vectors().astype(np.float64))
        gram_MM = unit_MP @ unit_MP.T
        moved_MP = unit_MP
        if kind != "plain":
            gram_MM = kernels.center(gram_MM, 12)
            moved_MP = unit_MP - unit_MP[:12].mean(axis=0)
            moved_MP[4] = 0  # the row without a gradient
        if kind == "deflated":
            gram_MM = kernels.deflate(gram_MM, 12, (1, 3))[3]
            _, _, direction_PP = np.linalg.svd(moved_MP[:12])
            moved_MP = moved_MP - moved_MP @ direction_PP[:3].T @ direction_PP[:3]
        wanted_QN = _unit(moved_MP)[12:] @ _unit(moved_MP)[:12].T
        found = kernels.kernel_scores(gram_MM, 12, np.arange(12, 15))
        np.testing.assert_allclose(found.score_QN, wanted_QN, atol=1e-9)
        query_QP = _unit(moved_MP[12:])
        np.testing.assert_allclose(found.gram_QQ, query_QP @ query_QP.T, atol=1e-9)

    def test_a_row_without_length_scores_zero(self):
        unit_MP = _unit(_vectors().astype(np.float64))
        gram_MM = unit_MP @ unit_MP.T
        for matrix_MM in (gram_MM, kernels.center(gram_MM, 12)):
            found = kernels.kernel_scores(matrix_MM, 12, np.arange(12, 15))
            np.testing.assert_array_equal(found.score_QN[:, 4], 0)

    def test_z_sum_gives_each_score_the_same_weight(self):
        first_N, second_N = np.array([0.0, 1, 2]), np.array([100.0, 0, 50])
        found_N = kernels.z_sum([first_N, second_N])
        np.testing.assert_allclose(found_N, [0, -np.sqrt(1.5), np.sqrt(1.5)], atol=1e-12)


if __name__ == "__main__":
    absltest.main()
