"""The rule that chooses learning rate and epoch: written-out cases, and what it refuses."""

import json
import math
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from experiments.studies.suite import choice
from experiments.studies.suite.choose import check_alike, check_output
from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, FinetuneConfig, UnlearnConfig, to_json
from raslik_jax.evaluate.choice import from_json


def _candidates(table, *, algorithm="ga_gdr", backbone=0.3):
    """Returns candidates of {(strategy, rate, epoch, seed): (F, R)}."""
    return [
        choice.Candidate(strategy, algorithm, rate, epoch, seed, forget, retain, backbone)
        for (strategy, rate, epoch, seed), (forget, retain) in table.items()
    ]


# Two strategies, two rates, two epochs, one seed. By hand, as (F - .3, 1 - R):
# random: (.5, 0) (.2, .1) (.1, .1) (0, .4); raslik: (.4, 0) (.1, 0) (0, .2) (0, .6)
_TABLE = {
    ("random", 1e-5, 1, 0): (0.8, 1.0),
    ("random", 1e-5, 2, 0): (0.5, 0.9),
    ("random", 1e-4, 1, 0): (0.4, 0.9),
    ("random", 1e-4, 2, 0): (0.2, 0.6),
    ("raslik", 1e-5, 1, 0): (0.7, 1.0),
    ("raslik", 1e-5, 2, 0): (0.4, 1.0),
    ("raslik", 1e-4, 1, 0): (0.1, 0.8),
    ("raslik", 1e-4, 2, 0): (0.0, 0.4),
}


class ChoiceTest(parameterized.TestCase):
    def test_distance_stops_at_the_floor(self):
        (at,) = _candidates({("random", 1.0, 1, 0): (0.6, 0.6)})
        self.assertAlmostEqual(choice.distance(at), 0.5)
        self.assertAlmostEqual(choice.distance(at._replace(forget=0.1)), 0.4)
        self.assertAlmostEqual(choice.distance(at, floor="zero"), math.sqrt(0.16 + 0.36))

    def test_takes_the_smallest_distance(self):
        found = choice.choose(_candidates(_TABLE))
        chosen = {c.strategy: (c.learning_rate, c.epoch) for c in found}
        self.assertEqual(chosen, {"random": (1e-4, 1), "raslik": (1e-5, 2)})

    def test_ties_go_to_the_smaller_change_whatever_the_order(self):
        table = {
            ("raslik", rate, epoch, 0): (0.2, 0.9) for rate in (1e-4, 1e-5) for epoch in (2, 1)
        }
        for candidates in (_candidates(table), _candidates(table)[::-1]):
            (found,) = choice.choose(candidates)
            self.assertEqual((found.learning_rate, found.epoch), (1e-5, 1))

    def test_names_the_edges_of_the_grid(self):
        (found,) = choice.choose(
            _candidates({("raslik", r, e, 0): (1 - r * e, 1.0) for r in (0.1, 0.2) for e in (1, 2)})
        )
        self.assertEqual(found.at_edge, ("largest learning rate", "last epoch"))
        (found,) = choice.choose(_candidates({("raslik", 0.1, 1, 0): (0.5, 1.0)}))
        self.assertEqual(found.at_edge, ())

    def test_refuses_a_strategy_that_was_tried_at_fewer_points(self):
        table = dict(_TABLE)
        del table["raslik", 1e-4, 2, 0]
        with self.assertRaisesRegex(ValueError, r"raslik .* learning rate 0.0001, epoch 2, seed 0"):
            choice.choose(_candidates(table))
        with self.assertRaisesRegex(ValueError, "got none"):
            choice.choose([])
        with self.assertRaisesRegex(ValueError, "twice"):
            choice.choose(_candidates(_TABLE) * 2)

    def test_damaged_models_are_not_chosen(self):
        candidates = _candidates(_TABLE)

        def damage(model):
            return [c._replace(is_damaged=c[:4] == model) for c in candidates]

        best = ("raslik", "ga_gdr", 1e-5, 2)
        _, raslik = choice.choose(damage(best))
        self.assertEqual((raslik.learning_rate, raslik.epoch, raslik.skipped), (1e-4, 1, 1))
        self.assertIn("damaged points skipped: 1", choice.describe([raslik]))
        # Damage of one seed is damage.
        other = [c._replace(seed=1) for c in candidates]
        _, raslik = choice.choose([*damage(best), *other])
        self.assertEqual((raslik.learning_rate, raslik.epoch), (1e-4, 1))
        everywhere = [c._replace(is_damaged=c.strategy == "raslik") for c in candidates]
        with self.assertRaisesRegex(ValueError, "raslik with ga_gdr .* at all 4 points"):
            choice.choose(everywhere)

    def test_reads_validation_runs_only(self):
        entry = {"forget": {"mean": 0.4}, "retain": {"mean": 0.9}}
        metrics = {
            "name": "tiny",
            "seed": 3,
            "settings": {
                "unlearn": {"ga_klr": {"learning_rate": 3e-5}},
                "evaluate": {"perplexity_examples": 4},
                "retrieve": {"held_out": 0.0},
            },
            "corpus": {"query_split": "validation", "target_queries": 9, "normal_queries": 8},
            "backbone": {"forget": {"mean": 0.3}},
            "methods": [{**entry, "strategy": "raslik", "algorithm": "ga_klr", "epoch": 2}],
        }
        self.assertEqual(
            choice.candidates_of(metrics),
            [choice.Candidate("raslik", "ga_klr", 3e-5, 2, 3, 0.4, 0.9, 0.3)],
        )
        metrics["methods"][0]["judgment"] = {"verdict": "damaged"}
        self.assertTrue(choice.candidates_of(metrics)[0].is_damaged)
        with self.assertRaisesRegex(ValueError, "without --unlearn.choice"):
            choice.candidates_of(metrics | {"chosen": True})
        corpus = metrics["corpus"]
        with self.assertRaisesRegex(ValueError, "measured on test queries"):
            choice.candidates_of(metrics | {"corpus": corpus | {"query_split": "test"}})
        for kind in ("target", "normal"):
            lacking = metrics | {"corpus": corpus | {f"{kind}_queries": 0}}
            with self.assertRaisesRegex(ValueError, f"'tiny' with seed 3 has no {kind} queries"):
                choice.candidates_of(lacking)

    @parameterized.parameters(
        ({"held_out": 0.2}, "a is measured on training rows by --retrieve.held_out=0.2: leave it"),
        ({"perplexity_examples": 0}, "damage is not seen, a has .*perplexity_examples=0: leave"),
    )
    def test_runs_without_what_the_rule_reads_are_refused(self, change, message):
        settings = to_json(Config())
        choice.check_settings(settings, run="a")
        settings["retrieve" if "held_out" in change else "evaluate"] |= change
        with self.assertRaisesRegex(ValueError, message):
            choice.check_settings(settings, run="a")
        metrics = {"name": "tiny", "seed": 3, "corpus": {"query_split": "validation"}}
        with self.assertRaisesRegex(ValueError, "runs to choose from must be"):
            choice.candidates_of(metrics | {"settings": settings})

    def test_the_file_comes_back_as_it_went(self):
        found = choice.choose(_candidates(_TABLE))
        value = json.loads(json.dumps(choice.to_json(found, floor="backbone")))
        back = from_json(value, origin="choice.json")
        self.assertEqual(back, {c[:2]: (c.learning_rate, c.epoch) for c in found})

    def test_joins_runs_that_differ_in_rate_and_seed_alone(self):
        first = to_json(Config())
        for changed in (
            Config(name="other", seed=3),
            replaced(Config(), {"unlearn.ga_klr.learning_rate": 1e-4}),
        ):
            check_alike(first, to_json(changed), run="b")
        for changed, field in (
            (
                Config(finetune=FinetuneConfig(learning_rate=1e-4)),
                "learning_rate",
            ),
            (Config(unlearn=UnlearnConfig(epochs=2)), "unlearn.epochs: 5 -> 2"),
        ):
            with self.assertRaisesRegex(ValueError, f"{field}.* in 'runs/b'"):
                check_alike(first, to_json(changed), run="runs/b")


class OutputTest(absltest.TestCase):
    def test_only_an_earlier_choice_is_replaced(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        file = pathlib.Path(folder) / "choice.json"
        check_output(file)
        choices = choice.choose(_candidates(_TABLE))
        file.write_text(json.dumps(choice.to_json(choices, floor="backbone")))
        check_output(file)
        file.write_text("a thesis")
        with self.assertRaisesRegex(ValueError, "must be new or an earlier choice"):
            check_output(file)


if __name__ == "__main__":
    absltest.main()
