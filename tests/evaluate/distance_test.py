"""Distances to a retrained model against their definitions, and the sentence of the verdict."""

import pytest
from absl.testing import absltest
from sample_metrics import sample_metrics

from raslik_jax.evaluate import distance, judgment, summary, verdict


class DistanceTest(absltest.TestCase):
    def test_parts_of_each_kind_are_arrays_over_its_queries(self):
        kl = {"target": {"a": (1.0, 3.0)}, "normal": {"b": (0.0, 0.0), "c": (0.5, 0.1)}}
        own = {"a": "the red kettle", "b": "same words ", "c": ""}
        retrained = {"a": "the blue kettle", "b": "same words", "c": " "}
        found = {
            name: value_Q.tolist() for name, value_Q in distance.compare(kl, own, retrained).items()
        }
        self.assertEqual(found["target/kl_from_retrained"], [1.0])
        self.assertEqual(found["target/kl_to_retrained"], [3.0])
        self.assertEqual(found["target/kl"], [2.0])
        self.assertEqual(found["target/same_answers"], [0.0])
        self.assertAlmostEqual(found["target/rouge"][0], 2 / 3)
        self.assertEqual(found["normal/kl"], [0.0, 0.3])
        self.assertEqual(found["normal/same_answers"], [1.0, 1.0])  # blank answers are equal
        self.assertEqual(found["normal/rouge"], [1.0, 1.0])
        self.assertEqual({*distance.compare({"target": {}}, {}, {})}, set())


@pytest.mark.parametrize(
    ("kl", "floor", "is_near"),
    [(0.2, 0.1, True), (0.2001, 0.1, False), (0.0, 0.0, True), (0.1, 0.0, False)],
)
def test_twice_the_noise_floor_is_no_farther_than_another_training(kl, floor, is_near):
    assert ("no farther" in verdict.describe_distance(kl, floor)) is is_near


def test_the_floor_is_that_of_the_same_rows_and_the_judgment_says_it_once():
    metrics = sample_metrics(num_epochs=1) | {"non_sf": None, "chosen": False}
    ways = {"ga_gdr": 0.3, "retrain": 0.0, "retrain_again": 0.2}
    first = metrics["methods"][0]
    metrics["methods"] = [
        {
            **first,
            "strategy": name,
            "algorithm": way,
            "distance": {"normal": {"kl": {"mean": kl * s}}},
        }
        for name, s in (("oracle", 9), ("raslik", 1))
        for way, kl in ways.items()
        if (name, way) != ("oracle", "retrain_again")
    ]
    summary.judge_metrics(metrics)
    told = {
        (one["strategy"], one["algorithm"]): one["judgment"].get("distance")
        for one in metrics["methods"]
    }
    assert told["raslik", "ga_gdr"] == verdict.describe_distance(0.3, 0.2)
    assert told["oracle", "ga_gdr"] == verdict.describe_distance(2.7, None)
    assert [name for name, text in told.items() if text] == [
        ("oracle", "ga_gdr"),
        ("raslik", "ga_gdr"),
    ]
    entry = next(one for one in metrics["methods"] if one["strategy"] == "raslik")
    said = judgment.describe(entry["judgment"]).lower()
    assert said.count(told["raslik", "ga_gdr"].lower()) == 1
