"""The exact kernel from Gram matrices, beside the vectors themselves."""

import numpy as np
from absl.testing import absltest, parameterized

from raslik_jax.retrieve import exact

_TENSORS = (slice(0, 10), slice(10, 17), slice(17, 40))


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


class ExactTest(parameterized.TestCase):
    def test_grams_are_those_of_unit_vectors_and_of_unit_tensors(self):
        vector_MP = _vectors().astype(np.float64)
        found = exact.gram_matrices(_vectors(), _TENSORS)
        unit_MP = _unit(vector_MP)
        by_tensor_MP = _unit(np.concatenate([_unit(vector_MP[:, t]) for t in _TENSORS], axis=1))
        np.testing.assert_allclose(found.norm_M, np.linalg.norm(vector_MP, axis=1), rtol=1e-6)
        np.testing.assert_allclose(found.vector_MM, unit_MP @ unit_MP.T, atol=1e-6)
        np.testing.assert_allclose(found.per_tensor_MM, by_tensor_MP @ by_tensor_MP.T, atol=1e-6)

    def test_tensors_have_to_cover_every_column_once(self):
        for tensors in (_TENSORS[:2], (slice(0, 12), *_TENSORS[1:])):
            with self.assertRaisesRegex(ValueError, "cover each of 40 columns"):
                exact.gram_matrices(_vectors(), tensors)
        vector_MP = _vectors()
        vector_MP[3, 5] = np.inf
        with (
            np.errstate(invalid="ignore"),
            self.assertRaisesRegex(ValueError, "gradients must be finite"),
        ):
            exact.gram_matrices(vector_MP, _TENSORS)

    @parameterized.parameters("plain", "centered", "deflated")
    def test_cosines_are_those_of_the_vectors(self, kind):
        unit_MP = _unit(_vectors().astype(np.float64))
        gram_MM = unit_MP @ unit_MP.T
        moved_MP = unit_MP
        if kind != "plain":
            gram_MM = exact.center(gram_MM, 12)
            moved_MP = unit_MP - unit_MP[:12].mean(axis=0)
            moved_MP[4] = 0  # the row without a gradient
        if kind == "deflated":
            gram_MM = exact.deflate(gram_MM, 12, (1, 3))[3]
            _, _, direction_PP = np.linalg.svd(moved_MP[:12])
            moved_MP = moved_MP - moved_MP @ direction_PP[:3].T @ direction_PP[:3]
        wanted_QN = _unit(moved_MP)[12:] @ _unit(moved_MP)[:12].T
        found_QN = exact.cosines(gram_MM, 12, np.arange(12, 15))
        np.testing.assert_allclose(found_QN, wanted_QN, atol=1e-9)

    def test_products_give_the_same_scores_as_the_gram_matrix(self):
        unit_MP = _unit(_vectors().astype(np.float64))
        mean_P = unit_MP[:12].mean(axis=0)
        products = exact.Products(
            norm_N=np.linalg.norm(_vectors()[:12], axis=1),
            query_RN=unit_MP[12:] @ unit_MP[:12].T,
            query_mean_R=unit_MP[12:] @ mean_P,
            row_mean_N=unit_MP[:12] @ mean_P,
            mean_square=np.asarray(mean_P @ mean_P),
            query_RR=unit_MP[12:] @ unit_MP[12:].T,
        )
        for center in (False, True):
            moved_MP = unit_MP - mean_P if center else unit_MP
            wanted_QN = _unit(moved_MP)[12:] @ _unit(moved_MP)[:12].T
            wanted_QN[:, 4] = 0  # the row without a gradient
            found_QN, found_QQ = exact.cosines_of_products(products, center=center)
            np.testing.assert_allclose(found_QN, wanted_QN, atol=1e-9)
            wanted_QQ = _unit(moved_MP)[12:] @ _unit(moved_MP)[12:].T
            np.testing.assert_allclose(found_QQ, wanted_QQ, atol=1e-9)
            gram_MM = unit_MP @ unit_MP.T
            gram_MM = exact.center(gram_MM, 12) if center else gram_MM
            query_QQ = exact.query_cosines(gram_MM, np.arange(12, 15))
            np.testing.assert_allclose(query_QQ, wanted_QQ, atol=1e-9)

    def test_a_row_without_length_scores_zero(self):
        unit_MP = _unit(_vectors().astype(np.float64))
        gram_MM = unit_MP @ unit_MP.T
        for matrix_MM in (gram_MM, exact.center(gram_MM, 12)):
            score_QN = exact.cosines(matrix_MM, 12, np.arange(12, 15))
            np.testing.assert_array_equal(score_QN[:, 4], 0)

    def test_z_sum_gives_each_score_the_same_weight(self):
        first_N, second_N = np.array([0.0, 1, 2]), np.array([100.0, 0, 50])
        found_N = exact.z_sum([first_N, second_N])
        np.testing.assert_allclose(found_N, [0, -np.sqrt(1.5), np.sqrt(1.5)], atol=1e-12)


if __name__ == "__main__":
    absltest.main()
