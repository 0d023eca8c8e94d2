"""The noise of the sketch in a mean score, and queries that point apart."""

import numpy as np
import theory
from absl.testing import parameterized
from index_cases import IndexCase, fill, unit

from raslik_jax.index import combine, search
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import noise, selectors
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


# The probability that two coordinates meet, written out for P = 96 and K = 16.
_FAMILIES = {"binned": (96 - 16) / (16 * (96 - 1)), "dense_rademacher": 1 / 16}


class StoredNoiseTest(IndexCase):
    def _case(self, family, center, *, count=200):
        """Returns a store, its queries and the exact sigma of every row in NumPy."""
        generator = np.random.default_rng(count)
        row_NK = unit(generator.normal(size=(count, 16)) + 0.5).astype(np.float32)
        query_QK = generator.normal(size=(3, 16)) + 1.0
        projection = {"family": family, "num_params": 96, "size": 16, "seed": 5}
        store = SketchStore.create(
            f"{self.root}/index",
            identity={"projection": projection},
            ids=[f"row-{n}" for n in range(count)],
            size=16,
        )
        fill(store, row_NK, np.ones(count, np.float32))
        mean_K = row_NK.mean(axis=0, dtype=np.float64) if center else None
        shift_K = mean_K if center else np.zeros(16)
        direction_NK = unit(row_NK.astype(np.float64) - shift_K)
        direction_QK = unit(unit(query_QK) - shift_K)
        gram_QQ, rho_NQ = direction_QK @ direction_QK.T, direction_NK @ direction_QK.T
        p = _FAMILIES[family]
        sigma_N = np.sqrt([theory.mean_score_variance(gram_QQ, rho_Q, p) for rho_Q in rho_NQ])
        return store, search.center_queries(query_QK, mean_K), sigma_N, rho_NQ.mean(axis=1)

    @parameterized.product(family=(*_FAMILIES,), center=(False, True))
    def test_the_sigma_of_a_stored_row_is_that_of_its_direction(self, family, center):
        store, queries, sigma_N, _ = self._case(family, center)
        positions = np.array([3, 0, 199, 64, 100])
        got_M = noise.row_sigma(store, positions, queries)
        np.testing.assert_allclose(got_M, sigma_N[positions], rtol=1e-5)

    @parameterized.product(count=(200, 70), center=(False, True))
    def test_the_sigma_of_the_edge_is_the_root_mean_square_of_64_rows(self, count, center):
        """Barred rows have no part; they leave fewer than 64 of 70 rows."""
        store, queries, sigma_N, score_N = self._case("binned", center, count=count)
        score_N[::7] = -np.inf
        edge = selectors.noise_band(score_N)[1]
        finite = [row for row in range(count) if np.isfinite(score_N[row])]
        nearest = sorted(finite, key=lambda row: abs(score_N[row] - edge))[:64]
        self.assertLen(nearest, min(64, len(finite)))
        expected = np.sqrt(np.mean(sigma_N[nearest] ** 2))
        self.assertNotAlmostEqual(expected, np.sqrt(np.mean(sigma_N**2)), places=4)
        np.testing.assert_allclose(noise.edge_sigma(store, queries, score_N), expected, rtol=1e-5)
