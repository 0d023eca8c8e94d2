"""Pareto flags, by their rule spelled out."""

import numpy as np
import pytest
from absl.testing import parameterized

from raslik_jax.evaluate import pareto


class ParetoMaskTest(parameterized.TestCase):
    @parameterized.product(num=(1, 2, 7, 20), levels=(2, 5, 1000))
    def test_equals_the_rule_spelled_out(self, num, levels):
        generator = np.random.default_rng(num * levels)
        retain_M = generator.integers(levels, size=num) / levels
        forget_M = generator.integers(levels, size=num) / levels
        expected = [
            not any(
                retain_M[j] >= retain_M[i]
                and forget_M[j] <= forget_M[i]
                and (retain_M[j] > retain_M[i] or forget_M[j] < forget_M[i])
                for j in range(num)
            )
            for i in range(num)
        ]
        self.assertEqual(pareto.pareto_mask(retain_M, forget_M).tolist(), expected)

    def test_others_than_the_eligible_neither_are_optimal_nor_dominate(self):
        generator = np.random.default_rng(3)
        retain_M, forget_M = generator.integers(4, size=(2, 12)) / 4
        is_eligible_M = generator.integers(2, size=12).astype(bool)
        found_M = pareto.pareto_mask(retain_M, forget_M, is_eligible_M)
        alone = pareto.pareto_mask(retain_M[is_eligible_M], forget_M[is_eligible_M])
        self.assertEqual(found_M[is_eligible_M].tolist(), alone.tolist())
        self.assertFalse(found_M[~is_eligible_M].any())

    @parameterized.parameters(([0.1, np.nan], [0.1, 0.2]), ([], []), ([0.1], [0.1, 0.2]))
    def test_refuses(self, retain, forget):
        with pytest.raises((ValueError, TypeError)):
            pareto.pareto_mask(np.array(retain, np.float64), np.array(forget, np.float64))
