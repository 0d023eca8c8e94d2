"""AUROC and AUPRC against slow versions, with many ties."""

import inspect
import itertools

import numpy as np
import pytest
from absl.testing import parameterized

from raslik_jax.evaluate import ranking


def _case(num: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(num + levels)
    is_target_N = generator.random(num) < 0.4
    is_target_N[:2] = True, False
    return generator.integers(levels, size=num).astype(np.float64), is_target_N


class RankingTest(parameterized.TestCase):
    @parameterized.product(num=(2, 7, 60), levels=(1, 3, 1000))
    def test_auroc_equals_counting_pairs(self, num, levels):
        scores_N, is_target_N = _case(num, levels)
        wins = [
            1.0 if target > other else 0.5 if target == other else 0.0
            for target, other in itertools.product(scores_N[is_target_N], scores_N[~is_target_N])
        ]
        self.assertAlmostEqual(ranking.auroc(scores_N, is_target_N), np.mean(wins), places=12)

    @parameterized.product(num=(2, 7, 60), levels=(1, 3, 1000))
    def test_auprc_equals_a_sweep_of_thresholds(self, num, levels):
        scores_N, is_target_N = _case(num, levels)
        area, recall_before = 0.0, 0.0
        for threshold in sorted(set(scores_N), reverse=True):
            found = [
                label for s, label in zip(scores_N, is_target_N, strict=True) if s >= threshold
            ]
            recall = sum(found) / is_target_N.sum()
            area += sum(found) / len(found) * (recall - recall_before)
            recall_before = recall
        self.assertAlmostEqual(ranking.auprc(scores_N, is_target_N), area, places=12)

    def test_values_at_the_edges(self):
        is_target_N = np.array([True, False, False, False])
        perfect_N, tied_N = np.array([3.0, 2.0, 1.0, -np.inf]), np.zeros(4)
        for scores_N, expected in (
            (perfect_N, (1, 1)),
            (-perfect_N, (0, 0.25)),
            (tied_N, (0.5, 0.25)),
        ):
            self.assertEqual(
                (
                    ranking.auroc(scores_N, is_target_N),
                    ranking.auprc(scores_N, is_target_N),
                ),
                expected,
            )
        self.assertEqual(ranking.auprc(tied_N, np.ones(4, np.bool_)), 1.0)

    def test_refuses(self):
        labels_N = np.array([True, False])
        for measure in (ranking.auroc, ranking.auprc):
            with self.assertRaisesRegex(ValueError, "1 of them NaN"):
                measure(np.array([0.0, np.nan]), labels_N)
            with self.assertRaisesRegex(ValueError, "0 of them targets"):
                measure(np.zeros(2), np.zeros(2, np.bool_))
            with pytest.raises((ValueError, TypeError)):
                measure(np.zeros(3), labels_N)
            with self.assertRaisesRegex(ValueError, "labels must be True or False, got int64"):
                inspect.unwrap(ranking.check_ranking)(np.zeros(2), np.array([1, 0]))
        with self.assertRaisesRegex(ValueError, "of both kinds"):
            ranking.auroc(np.zeros(2), np.ones(2, np.bool_))
