"""Entries of metrics.json from texts: pairing, comparison within a block, JSON."""

import functools
import json

import numpy as np
from absl.testing import parameterized

from raslik_jax.evaluation import pareto, rates, summary

_NON_SF = functools.partial(rates.non_sf_by_words, vocabulary=("starship", "nebula"))
_REFERENCES = summary.Outputs(
    target={"t1": "the starship left", "t2": "a nebula glows", "t3": "one starship"},
    normal={"n1": "paris is the capital", "n2": "two plus two is four"},
)


def _evaluate(target: dict[str, str], normal: dict[str, str], **options) -> summary.Evaluation:
    return summary.evaluate_outputs(
        summary.Outputs(target, normal), _REFERENCES, non_sf=_NON_SF, **options
    )


class SummariseTest(parameterized.TestCase):
    def test_the_model_before_unlearning_remembers_and_keeps_all(self):
        entry = summary.summarise(_evaluate(*_REFERENCES), seed=0, resamples=50)
        for name, value in (
            ("forget", 1.0),
            ("retain", 1.0),
            ("non_sf_target", 0.0),
            ("non_sf_normal", 1.0),
        ):
            self.assertEqual(entry[name], {"mean": value, "low": value, "high": value})
        self.assertEqual(entry["euclidean"], 1.0)
        self.assertEqual((entry["empty"], entry["empty_references"]), (0, 0))

    def test_values_written_out(self):
        evaluation = _evaluate(
            {"t3": "", "t1": "the train left", "t2": "a nebula a nebula"},
            {"n2": "two plus two is four", "n1": "lyon"},
        )
        np.testing.assert_allclose(evaluation.forget.rouge_Q, [2 / 3, 4 / 7, 0.0])
        np.testing.assert_allclose(evaluation.retain.rouge_Q, [0.0, 1.0])
        np.testing.assert_array_equal(evaluation.non_sf_target_Q, [1.0, 0.0, 1.0])
        entry = summary.summarise(evaluation, seed=0, resamples=50)
        forget = (2 / 3 + 4 / 7) / 3
        self.assertAlmostEqual(entry["forget"]["mean"], forget)
        self.assertAlmostEqual(entry["euclidean"], np.hypot(0.5, forget))
        self.assertAlmostEqual(entry["non_sf_target"]["mean"], 2 / 3)
        self.assertEqual(entry["empty"], 1)
        # 2 + 3 + 4 bigrams, of which one "a nebula" is a repeat; 4-grams: 1 + 2, none repeated.
        self.assertAlmostEqual(entry["distinct_2"], 8 / 9)
        self.assertEqual(entry["repetition_4"], 0.0)

    def test_dropped_pairs_leave_the_rates_only(self):
        evaluation = _evaluate(
            {"t1": "the starship left", "t2": "", "t3": ""},
            dict(_REFERENCES.normal),
            drop_empty=True,
        )
        self.assertEqual(evaluation.forget.ids, ("t1",))
        self.assertLen(evaluation.non_sf_target_Q, 3)
        self.assertEqual(summary.summarise(evaluation, seed=0, resamples=9)["empty"], 2)

    def test_refuses_other_queries(self):
        with self.assertRaisesRegex(ValueError, r"2 are missing \(t2, t3\)"):
            _evaluate({"t1": "x"}, dict(_REFERENCES.normal))


def _diversity(distinct, repeated, empty=0):
    return {"answers": 40, "empty": empty, "distinct_2": distinct, "repetition_4": repeated}


class CollapseTest(parameterized.TestCase):
    def _signs(self, *, target=(0.6, 0.05, 0), normal=(0.6, 0.05, 0), held_out=2.0):
        def entry(target, normal, held_out):
            return {
                "diversity": {"target": _diversity(*target), "normal": _diversity(*normal)},
                "perplexity": {"held-out": {"mean": held_out, "low": 1.0, "high": 99.0}},
            }

        before = entry((0.6, 0.05, 0), (0.6, 0.05, 0), 2.0)
        return summary.collapse_signs(entry(target, normal, held_out), before)

    def test_the_model_itself_and_what_lies_on_the_edge_have_not_collapsed(self):
        self.assertEqual(self._signs(), [])
        self.assertEqual(self._signs(target=(0.3, 0.25, 4), normal=(1.0, 0.0, 0)), [])
        self.assertEqual(self._signs(held_out=20.0), [])

    @parameterized.parameters(
        ({"target": (0.29, 0.05, 0)}, "target answers alike: distinct-2 0.29, was 0.60"),
        (
            {"normal": (0.6, 0.26, 0)},
            "normal answers repeat themselves: repetition-4 0.26, was 0.05",
        ),
        ({"target": (0.6, 0.05, 5)}, "target answers empty: 5 of 40"),
        ({"held_out": 20.1}, "held-out perplexity 20.1, was 2"),
    )
    def test_each_sign_alone_is_enough(self, changed, sign):
        self.assertEqual(self._signs(**changed), [sign])

    def test_answers_that_babble_on_target_queries_only_are_seen(self):
        entries = [
            summary.summarise(_evaluate(target, dict(_REFERENCES.normal)), seed=0, resamples=9)
            for target in (
                _REFERENCES.target,
                {i: "star star star star star star star" for i in _REFERENCES.target},
            )
        ]
        before, after = entries
        self.assertEqual(after["diversity"]["normal"], before["diversity"]["normal"])
        self.assertLen(summary.collapse_signs(after, before), 2)
        self.assertEqual(summary.collapse_signs(before, before), [])


class CompareMethodsTest(parameterized.TestCase):
    def _evaluations(self, strategies, blocks=(("ga_gdr", 1),)):
        generator = np.random.default_rng(0)
        words = "the starship left a nebula glows one paris is capital two plus four".split()
        return {
            summary.Variant(strategy, algorithm, epoch): _evaluate(
                *({i: " ".join(generator.choice(words, 4)) for i in texts} for texts in _REFERENCES)
            )
            for algorithm, epoch in blocks
            for strategy in strategies
        }

    def test_entries_are_json_in_the_order_given(self):
        evaluations = self._evaluations(
            ("random", "raslik"), (("ga_klr", 2), ("ga_gdr", 1), ("ga_gdr", 2))
        )
        entries = summary.compare_methods(evaluations, seed=3, resamples=50)
        self.assertEqual(
            [(e["strategy"], e["algorithm"], e["epoch"]) for e in entries],
            [tuple(variant) for variant in evaluations],
        )
        self.assertEqual(json.loads(json.dumps(entries, allow_nan=False)), entries)

    def test_compares_within_algorithm_and_epoch_only(self):
        evaluations = self._evaluations(("random", "raslik"), (("ga_gdr", 1), ("ga_gdr", 2)))
        together = summary.compare_methods(evaluations, seed=3, resamples=50)
        apart = [
            entry
            for epoch in (1, 2)
            for entry in summary.compare_methods(
                {v: e for v, e in evaluations.items() if v.epoch == epoch}, seed=3, resamples=50
            )
        ]
        self.assertEqual(together, apart)

    def test_compares_across_epochs_where_each_strategy_has_one(self):
        same = self._evaluations(("random", "raslik"), (("ga_gdr", 1),))
        apart = {v._replace(epoch=3 if v.strategy == "raslik" else 1): e for v, e in same.items()}
        expected = summary.compare_methods(same, seed=3, resamples=50)
        found = summary.compare_methods(apart, seed=3, resamples=50, across_epochs=True)
        self.assertEqual([entry["epoch"] for entry in found], [1, 3])
        self.assertEqual([{**entry, "epoch": 1} for entry in found], expected)
        with self.assertRaisesRegex(ValueError, "one epoch of each strategy"):
            summary.compare_methods(
                self._evaluations(("random",), (("ga_gdr", 1), ("ga_gdr", 2))),
                seed=3,
                resamples=50,
                across_epochs=True,
            )

    def test_flags_and_distances_are_those_of_the_block(self):
        strategies = ("random", "oracle", "bm25", "embedding", "raslik_f", "raslik")
        evaluations = self._evaluations(strategies)
        entries = summary.compare_methods(evaluations, seed=3, resamples=50)
        retain_M = np.array([entry["retain"]["mean"] for entry in entries])
        forget_M = np.array([entry["forget"]["mean"] for entry in entries])
        found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
        self.assertEqual(
            [entry["pareto"] for entry in entries],
            pareto.pareto_mask(retain_M, forget_M).tolist(),
        )
        self.assertEqual(
            [entry["tie"] for entry in entries], pareto.rounding_ties(retain_M, forget_M).tolist()
        )
        np.testing.assert_allclose(
            [entry["euclidean"] for entry in entries],
            pareto.euclidean_to_ideal(retain_M, forget_M),
        )
        np.testing.assert_allclose(
            [entry["mahalanobis"]["distance"] for entry in entries], found.distance_M
        )
        self.assertEqual(
            {entry["mahalanobis"]["is_negative"] for entry in entries}, {found.is_negative}
        )

    def test_few_methods_have_no_mahalanobis_distance(self):
        entries = summary.compare_methods(
            self._evaluations(("random", "oracle", "bm25", "raslik")), seed=3, resamples=9
        )
        self.assertEqual([entry["mahalanobis"] for entry in entries], [None] * 4)

    def test_methods_that_all_agree_have_no_mahalanobis_distance(self):
        same = _evaluate(*_REFERENCES)
        entries = summary.compare_methods(
            {summary.Variant(name, "ga_gdr", 1): same for name in "abcdef"}, seed=3, resamples=9
        )
        self.assertEqual([entry["mahalanobis"] for entry in entries], [None] * 6)
        self.assertTrue(all(entry["pareto"] and entry["tie"] for entry in entries))

    def test_differences_are_paired_with_random_of_the_same_block(self):
        evaluations = self._evaluations(("random", "raslik"))
        random, raslik = summary.compare_methods(evaluations, seed=3, resamples=50)
        self.assertIsNone(random["forget_minus_random"])
        self.assertIsNone(random["retain_minus_random"])
        values = [e.forget.rouge_Q for e in evaluations.values()]
        expected = rates.paired_bootstrap(values[1], values[0], seed=3, resamples=50)
        self.assertEqual(raslik["forget_minus_random"], expected._asdict())
        alone = {v: e for v, e in evaluations.items() if v.strategy == "raslik"}
        (entry,) = summary.compare_methods(alone, seed=3, resamples=50)
        self.assertIsNone(entry["forget_minus_random"])

    def test_pairs_what_both_kept_when_empty_answers_are_dropped(self):
        normal = dict(_REFERENCES.normal)
        evaluations = {
            summary.Variant("random", "ga_gdr", 1): _evaluate(
                {"t1": "", "t2": "a nebula glows", "t3": "one starship"}, normal, drop_empty=True
            ),
            summary.Variant("raslik", "ga_gdr", 1): _evaluate(
                {"t1": "the starship left", "t2": "rain", "t3": ""}, normal, drop_empty=True
            ),
        }
        _, raslik = summary.compare_methods(evaluations, seed=3, resamples=50)
        self.assertEqual(raslik["forget_minus_random"]["mean"], -1.0)
        self.assertEqual(raslik["forget_minus_random"]["share_below_zero"], 1.0)
