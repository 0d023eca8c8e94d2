"""AUROC, AUPRC and precision at k against slow versions, with many ties."""

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

    @parameterized.parameters(1, 2, 3, 4, 5, 6)
    def test_precision_equals_the_mean_over_all_orders_of_ties(self, count):
        scores_N = np.array([2.0, 1.0, 1.0, 1.0, 0.0, 0.0])
        is_target_N = np.array([False, True, True, False, True, False])
        shares = []
        for order in itertools.permutations(range(6)):
            if all(scores_N[a] >= scores_N[b] for a, b in itertools.pairwise(order)):
                shares.append(is_target_N[list(order[:count])].mean())
        found = ranking.precision_at(scores_N, is_target_N, count=count)
        self.assertAlmostEqual(found, np.mean(shares), places=12)

    def test_values_at_the_edges(self):
        is_target_N = np.array([True, False, False, False])
        perfect_N, tied_N = np.array([3.0, 2.0, 1.0, -np.inf]), np.zeros(4)
        for scores_N, expected in (
            (perfect_N, (1, 1, 1)),
            (-perfect_N, (0, 0.25, 0)),
            (tied_N, (0.5, 0.25, 0.25)),
        ):
            self.assertEqual(
                (
                    ranking.auroc(scores_N, is_target_N),
                    ranking.auprc(scores_N, is_target_N),
                    ranking.precision_at(scores_N, is_target_N, count=1),
                ),
                expected,
            )
        self.assertEqual(ranking.auprc(tied_N, np.ones(4, np.bool_)), 1.0)

    def test_float32_scores_will_do(self):
        scores_N, is_target_N = _case(60, 1000)
        self.assertEqual(
            ranking.auroc(scores_N.astype(np.float32), is_target_N),
            ranking.auroc(scores_N, is_target_N),
        )

    def test_refuses(self):
        labels_N = np.array([True, False])
        for measure in (
            ranking.auroc,
            ranking.auprc,
            lambda s, t: ranking.precision_at(s, t, count=1),
        ):
            with self.assertRaisesRegex(ValueError, "1 of them NaN"):
                measure(np.array([0.0, np.nan]), labels_N)
            with self.assertRaisesRegex(ValueError, "0 of them targets"):
                measure(np.zeros(2), np.zeros(2, np.bool_))
            with pytest.raises((ValueError, TypeError)):
                measure(np.zeros(3), labels_N)
        with self.assertRaisesRegex(ValueError, "of both kinds"):
            ranking.auroc(np.zeros(2), np.ones(2, np.bool_))
        for count in (0, 3):
            with self.assertRaisesRegex(ValueError, f"got {count}"):
                ranking.precision_at(np.zeros(2), labels_N, count=count)


class SetsTest(parameterized.TestCase):
    def test_quality_of_both_ends_by_hand(self):
        scores_N = np.array([0.9, 0.8, 0.3, 0.2, 0.1, -0.4])
        is_target_N = np.array([True, False, True, False, False, False])
        quality, chosen = ranking.measure_ranking(scores_N, is_target_N, list("abcdef"))
        np.testing.assert_array_equal(chosen.forget, [0, 1])
        np.testing.assert_array_equal(chosen.retain, [5, 4])
        wanted = {
            "precision": 0.5,
            "recall_twice": 1.0,
            "auroc": 7 / 8,
            "auprc": (1 + 2 / 3) / 2,
            "targets_in_retain": 0.0,
            "retain_positive": 0.5,
            "below_zero": 1 / 6,
        }
        self.assertEqual(quality.keys(), wanted.keys())
        for name, value in wanted.items():
            self.assertAlmostEqual(quality[name], value, msg=name)
        turned, _ = ranking.measure_ranking(-scores_N, is_target_N, list("abcdef"))
        self.assertEqual(turned["targets_in_retain"], 0.5)

    def test_jaccard_of_sets(self):
        self.assertEqual(ranking.jaccard([1, 2, 3], np.array([3, 4])), 0.25)
        self.assertEqual(ranking.jaccard([], []), 1.0)
        self.assertAlmostEqual(ranking.mean_jaccard([[1, 2], [2, 3], [1, 2]]), (1 / 3 * 2 + 1) / 3)
        with self.assertRaisesRegex(ValueError, "two or more"):
            ranking.mean_jaccard([[1]])

    def test_rank_correlation_sees_the_order_alone(self):
        first_N = np.array([0.1, 0.2, 0.7, 0.9])
        self.assertAlmostEqual(ranking.rank_correlation(first_N, np.exp(9 * first_N)), 1)
        self.assertAlmostEqual(ranking.rank_correlation(first_N, np.array([1.0, 2, 4, 3])), 0.8)

    def test_records_are_joined_by_fields(self):
        records = [
            {"seed": 0, "kind": "a", "value": 1.0},
            {"seed": 1, "kind": "b", "value": None},
            {"seed": 1, "kind": "a", "value": 4.0},
            {"seed": 2, "kind": "a", "value": float("nan")},
            {"seed": 3, "value": 9.0},
        ]
        joined = ranking.join_records(records, by=["kind"], values=["value"])
        self.assertEqual(
            joined,
            [
                {"kind": "a", "count": 3, "value": {"mean": 2.5, "low": 1.0, "high": 4.0}},
                {"kind": "b", "count": 1, "value": None},
            ],
        )
