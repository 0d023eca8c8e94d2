"""Precision at k against a slow version, the sets of both ends, and joined records."""

import itertools

import numpy as np
from absl.testing import parameterized

from experiments.studies import rankings


class RankingsTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 3, 4, 5, 6)
    def test_precision_equals_the_mean_over_all_orders_of_ties(self, count):
        scores_N = np.array([2.0, 1.0, 1.0, 1.0, 0.0, 0.0])
        is_target_N = np.array([False, True, True, False, True, False])
        shares = []
        for order in itertools.permutations(range(6)):
            if all(scores_N[a] >= scores_N[b] for a, b in itertools.pairwise(order)):
                shares.append(is_target_N[list(order[:count])].mean())
        found = rankings.precision_at(scores_N, is_target_N, count=count)
        self.assertAlmostEqual(found, np.mean(shares), places=12)

    def test_refuses_a_count_out_of_range(self):
        for count in (0, 3):
            with self.assertRaisesRegex(ValueError, f"got {count}"):
                rankings.precision_at(np.zeros(2), np.array([True, False]), count=count)

    def test_quality_of_both_ends_by_hand(self):
        scores_N = np.array([0.9, 0.8, 0.3, 0.2, 0.1, -0.4])
        is_target_N = np.array([True, False, True, False, False, False])
        quality, chosen = rankings.measure_ranking(scores_N, is_target_N, list("abcdef"))
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
        turned, _ = rankings.measure_ranking(-scores_N, is_target_N, list("abcdef"))
        self.assertEqual(turned["targets_in_retain"], 0.5)

    def test_jaccard_of_sets(self):
        self.assertEqual(rankings.jaccard([1, 2, 3], np.array([3, 4])), 0.25)
        self.assertEqual(rankings.jaccard([], []), 1.0)
        self.assertAlmostEqual(rankings.mean_jaccard([[1, 2], [2, 3], [1, 2]]), (1 / 3 * 2 + 1) / 3)
        with self.assertRaisesRegex(ValueError, "two or more"):
            rankings.mean_jaccard([[1]])

    def test_rank_correlation_sees_the_order_alone(self):
        first_N = np.array([0.1, 0.2, 0.7, 0.9])
        self.assertAlmostEqual(rankings.rank_correlation(first_N, np.exp(9 * first_N)), 1)
        self.assertAlmostEqual(rankings.rank_correlation(first_N, np.array([1.0, 2, 4, 3])), 0.8)

    def test_records_are_joined_by_fields(self):
        records = [
            {"seed": 0, "kind": "a", "value": 1.0},
            {"seed": 1, "kind": "b", "value": None},
            {"seed": 1, "kind": "a", "value": 4.0},
            {"seed": 2, "kind": "a", "value": float("nan")},
            {"seed": 3, "value": 9.0},
        ]
        joined = rankings.join_records(records, by=["kind"], values=["value"])
        self.assertEqual(
            joined,
            [
                {"kind": "a", "count": 3, "value": {"mean": 2.5, "low": 1.0, "high": 4.0}},
                {"kind": "b", "count": 1, "value": None},
            ],
        )
