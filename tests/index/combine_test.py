"""The weights of several queries, beside the regression that they come from."""

import numpy as np
from absl.testing import absltest

from raslik_jax.index import combine


def _queries() -> np.ndarray:
    """Returns 7 unit queries with a part in common; five of them share another one."""
    generator = np.random.default_rng(0)
    query_QP = 0.3 * generator.standard_normal((7, 50))
    query_QP[:, 0] += 1
    query_QP[:5, 1] += 2
    return query_QP / np.linalg.norm(query_QP, axis=1, keepdims=True)


class CombineTest(absltest.TestCase):
    def test_direction_is_that_of_ridge_regression_on_ones(self):
        query_QP = _queries()
        weight_Q = combine.common_weights(query_QP @ query_QP.T)
        # min |U v - 1|^2 + ridge |v|^2 as one least-squares problem in all 50 coordinates.
        stacked = np.concatenate([query_QP, np.sqrt(combine.COMMON_RIDGE) * np.eye(50)])
        wanted_P = np.linalg.lstsq(stacked, np.r_[np.ones(7), np.zeros(50)])[0]
        found_P = weight_Q @ query_QP
        found_P, wanted_P = (v / np.linalg.norm(v) for v in (found_P, wanted_P))
        np.testing.assert_allclose(found_P, wanted_P, atol=1e-10)
        self.assertAlmostEqual(weight_Q.sum(), 1)

    def test_what_some_share_counts_less_than_in_the_mean(self):
        query_QP = _queries()
        found_P = combine.common_weights(query_QP @ query_QP.T) @ query_QP
        mean_P = query_QP.mean(axis=0)
        self.assertLess(found_P[1] / found_P[0], 0.8 * mean_P[1] / mean_P[0])

    def test_alike_queries_give_the_mean(self):
        np.testing.assert_allclose(combine.common_weights(np.ones((1, 1))), [1])
        np.testing.assert_allclose(combine.common_weights(0.5 * np.ones((4, 4))), np.full(4, 0.25))
