"""D_mah and rounding ties, by their rules spelled out."""

import itertools

import numpy as np
from absl.testing import parameterized

from experiments.studies.published import distances
from raslik_jax.evaluate import pareto


class RoundingTiesTest(parameterized.TestCase):
    @parameterized.parameters(
        # Equal R, lower F: digits below the last decide whether the first is dominated.
        ([0.300, 0.300], [0.20, 0.19], [True, False]),
        ([0.300, 0.301], [0.20, 0.19], [False, False]),
        # A tie hangs on nothing where a third method dominates for certain.
        ([0.300, 0.300, 0.4], [0.20, 0.19, 0.1], [False, False, False]),
        ([0.5, 0.5], [0.2, 0.2], [True, True]),
        ([0.5], [0.2], [False]),
    )
    def test_written_out_cases(self, retain, forget, expected):
        found = distances.rounding_ties(np.array(retain), np.array(forget), decimals=3)
        self.assertEqual(found.tolist(), expected)

    def test_an_unmarked_flag_holds_wherever_in_its_cell_a_rate_lies(self):
        generator = np.random.default_rng(0)
        num_marked = 0
        for _ in range(60):
            retain_M = generator.integers(0, 8, size=6) / 10
            forget_M = generator.integers(0, 8, size=6) / 10
            tie_M = distances.rounding_ties(retain_M, forget_M, decimals=1)
            num_marked += tie_M.sum()
            flags = []
            for _ in range(40):
                moved = [
                    rate_M + generator.uniform(-0.05, 0.05, 6) for rate_M in (retain_M, forget_M)
                ]
                flags.append(pareto.pareto_mask(*moved))
            changes_M = np.any(flags, axis=0) & ~np.all(flags, axis=0)
            self.assertFalse((changes_M & ~tie_M).any())
        self.assertBetween(num_marked, 20, 300)


class MahalanobisTest(parameterized.TestCase):
    @parameterized.parameters(5, 9)
    def test_equals_the_formula_spelled_out(self, num):
        generator = np.random.default_rng(num)
        retain_M = generator.uniform(0.2, 0.9, num)
        forget_M = 0.5 * retain_M + generator.uniform(0, 0.3, num)
        covariance = [[0.0, 0.0], [0.0, 0.0]]
        columns = [retain_M, forget_M]
        for a, b in itertools.product(range(2), repeat=2):
            covariance[a][b] = (
                sum(
                    (x - columns[a].mean()) * (y - columns[b].mean())
                    for x, y in zip(columns[a], columns[b], strict=True)
                )
                / (num - 1)
                * (1.0 if a == b else 0.9)
            )
        inverse = np.linalg.inv(np.array(covariance))
        expected = [
            np.sqrt(np.array([r - 1, f]) @ inverse @ np.array([r - 1, f]))
            for r, f in zip(retain_M, forget_M, strict=True)
        ]
        found = distances.mahalanobis_to_ideal(retain_M, forget_M)
        np.testing.assert_allclose(found.distance_M, expected, rtol=1e-9)
        self.assertFalse(found.is_negative)

    @parameterized.named_parameters(
        ("four_methods", np.linspace(0, 1, 4), np.linspace(0, 1, 4) ** 2),
        ("no_spread", np.full(6, 0.1), np.linspace(0, 1, 6)),
    )
    def test_refuses(self, retain_M, forget_M):
        with self.assertRaisesRegex(ValueError, "5 or more methods whose rates differ"):
            distances.mahalanobis_to_ideal(retain_M, forget_M)
