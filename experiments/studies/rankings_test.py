"""The sets of both ends of a ranking, and joined records."""

import numpy as np
from absl.testing import absltest

from experiments.studies import rankings, reports


class RankingsTest(absltest.TestCase):
    def test_quality_of_both_ends_by_hand(self):
        scores_N = np.array([0.9, 0.8, 0.3, 0.2, 0.1, -0.4])
        is_target_N = np.array([True, False, True, False, False, False])
        labels = rankings.Labels(list("abcdef"), is_target_N)
        quality, chosen = labels.judge(scores_N)
        np.testing.assert_array_equal(chosen.forget, [0, 1])
        np.testing.assert_array_equal(chosen.retain, [5, 4])
        wanted = {
            "precision": 0.5,
            "auroc": 7 / 8,
            "auprc": (1 + 2 / 3) / 2,
            "targets_in_retain": 0.0,
            "retain_positive": 0.5,
            "below_zero": 1 / 6,
        }
        self.assertEqual(quality.keys(), wanted.keys())
        for name, value in wanted.items():
            self.assertAlmostEqual(quality[name], value, msg=name)
        self.assertEqual(labels.quality(-scores_N)["targets_in_retain"], 0.5)

    def test_jaccard_of_sets(self):
        self.assertEqual(rankings.jaccard([1, 2, 3], np.array([3, 4])), 0.25)
        self.assertEqual(rankings.jaccard([], []), 1.0)
        self.assertAlmostEqual(rankings.mean_jaccard([[1, 2], [2, 3], [1, 2]]), (1 / 3 * 2 + 1) / 3)

    def test_records_are_joined_by_fields(self):
        records = [
            {"seed": 0, "kind": "a", "value": 1.0},
            {"seed": 1, "kind": "b", "value": None},
            {"seed": 1, "kind": "a", "value": 4.0},
            {"seed": 2, "kind": "a", "value": float("nan")},
        ]
        joined = reports.join_records(records, by=["kind"], values=["value"])
        self.assertEqual(
            joined,
            [
                {"kind": "a", "count": 3, "value": {"mean": 2.5, "low": 1.0, "high": 4.0}},
                {"kind": "b", "count": 1, "value": None},
            ],
        )
