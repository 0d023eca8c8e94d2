"""The noise of the sketch in a mean score, and queries that point apart."""

import numpy as np
import theory
from absl.testing import parameterized
from index_cases import IndexCase, unit

from raslik_jax.index import combine
from raslik_jax.retrieve import noise
from raslik_jax.sketch.families import PROJECTIONS


class SketchNoiseTest(IndexCase):
    def test_sigma_of_a_mean_over_queries_is_the_row_by_row_formula(self):
        generator = np.random.default_rng(3)
        queries, rows = generator.normal(size=(4, 9)), generator.normal(size=(6, 9))
        queries = unit(queries + 1.0)
        rho_NQ = unit(rows) @ queries.T
        gram_QQ = queries @ queries.T
        expected = [theory.mean_score_variance(gram_QQ, rho_Q, 0.01) for rho_Q in rho_NQ]
        np.testing.assert_allclose(
            noise.score_sigma(gram_QQ, rho_NQ, 0.01), np.sqrt(expected), rtol=1e-12
        )

    def test_a_row_parallel_to_the_only_query_has_no_noise(self):
        sigma_N = noise.score_sigma(np.ones((1, 1)), np.array([[1.0], [0.0]]), 0.25)
        np.testing.assert_allclose(sigma_N, [0.0, 0.5], atol=1e-12)

    @parameterized.parameters(False, True)
    def test_the_formula_meets_the_spread_over_sketches(self, center):
        generator = np.random.default_rng(7)
        num_params, size, num_seeds = 4096, 256, 100
        queries = unit(generator.normal(size=(3, num_params)) + 0.8)
        rows = unit(generator.normal(size=(4, num_params)) + np.array([[0.0], [0.5], [1.0], [-1]]))
        mean = rows.mean(axis=0) if center else np.zeros(num_params)
        directions = [unit(vectors - mean) for vectors in (rows, queries)]
        rho_NQ = directions[0] @ directions[1].T
        gram_QQ = directions[1] @ directions[1].T
        scores = []
        vectors = np.concatenate([rows, queries, mean[None]])
        for _ in range(num_seeds):
            signed = vectors * generator.choice([-1.0, 1.0], num_params)
            table = generator.permutation(num_params).reshape(size, -1)
            sketch = signed[:, table].sum(axis=-1)
            turned = [unit(part - sketch[7]) for part in (sketch[:4], sketch[4:7])]
            scores.append((turned[0] @ turned[1].T).mean(axis=1))
        variance_N = np.var(scores, axis=0, ddof=1)
        # The relative standard error of a variance over n draws is sqrt(2 / (n - 1)).
        bound = 5 * np.sqrt(2 / (num_seeds - 1))
        p = PROJECTIONS["binned"].collision(num_params, size)
        formula_N = noise.score_sigma(gram_QQ, rho_NQ, p) ** 2
        np.testing.assert_array_less(np.abs(variance_N / formula_N - 1), bound)

    @parameterized.parameters(128, 512)
    def test_the_formula_is_an_upper_bound_for_heavy_tails(self, size):
        """What it leaves out is the diagonal term, which only lowers the spread over sketches."""
        generator = np.random.default_rng(size)
        num_params, num_seeds, num_rows = 2048, 200, 12
        scale_P = np.abs(generator.standard_t(1.5, num_params))
        vectors = generator.normal(size=(num_rows + 1, num_params)) * scale_P
        vectors[:num_rows] += 0.5 * vectors[num_rows]
        row_NP = unit(vectors)
        rho_N = row_NP[:num_rows] @ row_NP[num_rows]
        p = PROJECTIONS["binned"].collision(num_params, size)
        formula_N = noise.score_sigma(np.ones((1, 1)), rho_N[:, None], p) ** 2
        exact_N = [theory.cosine_variance(row, row_NP[num_rows], p) for row in row_NP[:num_rows]]
        scores = []
        for _ in range(num_seeds):
            signed = vectors * generator.choice([-1.0, 1.0], num_params)
            sketch = unit(signed[:, generator.permutation(num_params).reshape(size, -1)].sum(-1))
            scores.append(sketch[:num_rows] @ sketch[num_rows])
        deviation_SN = np.asarray(scores) - np.mean(scores, axis=0)
        variance_N = np.mean(deviation_SN**2, axis=0)
        # The standard error of a variance follows from the fourth moment.
        error_N = np.std(deviation_SN**2, axis=0) / np.sqrt(num_seeds)
        np.testing.assert_array_less(variance_N, formula_N + 5 * error_N)
        np.testing.assert_array_less(np.abs(variance_N - exact_N), 5 * error_N + 0.1 * formula_N)
        self.assertLess(np.mean(exact_N / formula_N), 0.97)  # the tails matter here

    def test_queries_that_point_apart_are_refused_and_named(self):
        query_QK = unit(np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0], [-1.0, 0.2]]))
        ids = [f"id{i}" for i in range(4)]
        with self.assertRaisesRegex(ValueError, "4 sketches differ too much .* farthest"):
            combine.check_agreement(query_QK @ query_QK.T, ids)
        combine.check_agreement(query_QK[:2] @ query_QK[:2].T, ids[:2])
        combine.check_agreement(np.eye(3), ids[:3])  # unrelated is not apart
