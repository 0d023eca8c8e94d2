"""Entries of metrics.json from texts: pairing, comparison within a block, JSON."""

import functools
import json

import numpy as np
import sample_metrics
from absl.testing import parameterized

from raslik_jax.evaluate import metrics, pareto, perplexity, rates, summary
from raslik_jax.evaluate.metrics import measure, nest

_NON_SF = functools.partial(rates.non_sf_by_words, vocabulary=("starship", "nebula"))
_REFERENCES = {
    "target": {"t1": "the starship left", "t2": "a nebula glows", "t3": "one starship"},
    "normal": {"n1": "paris is the capital", "n2": "two plus two is four"},
}
_NORMAL = _REFERENCES["normal"]


def _evidence(target: dict[str, str], normal: dict[str, str], **options):
    answers = {"target": target, "normal": normal}
    return summary.collect_evidence(answers, _REFERENCES, non_sf=_NON_SF, **options)


def _measure(evidence, *, resamples=50):
    return nest(measure(evidence, resamples=resamples))


class MeasureTest(parameterized.TestCase):
    def test_the_model_before_unlearning_remembers_and_keeps_all(self):
        entry = _measure(_evidence(**_REFERENCES))
        expected = {"forget": 1.0, "retain": 1.0, "non_sf_target": 0.0, "non_sf_normal": 1.0}
        for name, value in expected.items():
            self.assertEqual(entry[name], {"mean": value, "low": value, "high": value})
        self.assertEqual(entry["euclidean"], 1.0)
        self.assertEqual((entry["empty"], entry["empty_references"]), (0, 0))

    def test_values_written_out(self):
        evidence = _evidence(
            {"t3": "", "t1": "the train left", "t2": "a nebula a nebula"},
            {"n2": "two plus two is four", "n1": "lyon"},
        )
        np.testing.assert_allclose(evidence["target_scores"], [2 / 3, 4 / 7, 0.0])
        np.testing.assert_allclose(evidence["normal_scores"], [0.0, 1.0])
        entry = _measure(evidence)
        forget = (2 / 3 + 4 / 7) / 3
        self.assertAlmostEqual(entry["forget"]["mean"], forget)
        self.assertAlmostEqual(entry["euclidean"], np.hypot(0.5, forget))
        self.assertAlmostEqual(entry["non_sf_target"]["mean"], 2 / 3)
        self.assertEqual(entry["empty"], 1)
        self.assertEqual((entry["diversity"]["target"]["empty"], entry["empty_references"]), (1, 0))
        # 2 + 3 + 4 bigrams and a text of one word, of which one "a nebula" is a repeat; 4-grams:
        # 1 + 2, none repeated.
        self.assertAlmostEqual(entry["distinct_2"], 9 / 10)
        self.assertEqual(entry["repetition_4"], 0.0)

    def test_refuses_other_queries(self):
        with self.assertRaisesRegex(ValueError, r"2 missing \('t2', 't3'\)"):
            _evidence({"t1": "x"}, _NORMAL)


def _compare(evidence, *, resamples=50, **options):
    entries = summary.measure_methods(evidence, seed=3, resamples=resamples, **options)
    return summary.mark_frontier(entries, **options)


class WithoutQueriesTest(parameterized.TestCase):
    """What there are no queries, labels or marker words for is absent; the rest is measured."""

    @parameterized.parameters(("target", "forget"), ("normal", "retain"))
    def test_without_queries_of_a_kind_its_rate_is_absent(self, kind, rate):
        texts = {**_REFERENCES, kind: {}}
        found = summary.collect_evidence(texts, texts, non_sf=_NON_SF)
        entry = _measure(found)
        self.assertIsNone(entry[rate])
        self.assertIsNone(entry[f"non_sf_{kind}"])
        self.assertIsNone(entry["euclidean"])
        self.assertNotIn(kind, entry["diversity"])
        other = {"forget": "retain", "retain": "forget"}[rate]
        self.assertEqual(entry[other]["mean"], 1.0)
        (method,) = _compare({summary.Variant("raslik", "ga_gdr", 1): found})
        self.assertIsNone(method["pareto"])
        json.dumps(method, allow_nan=False)


class CompareMethodsTest(parameterized.TestCase):
    def _evaluations(self, strategies, blocks=(("ga_gdr", 1),)):
        generator = np.random.default_rng(0)
        words = "the starship left a nebula glows one paris is capital two plus four".split()
        return {
            summary.Variant(strategy, algorithm, epoch): _evidence(
                *(
                    {i: " ".join(generator.choice(words, 4)) for i in texts}
                    for texts in _REFERENCES.values()
                )
            )
            for algorithm, epoch in blocks
            for strategy in strategies
        }

    def test_compares_within_algorithm_and_epoch_only(self):
        evaluations = self._evaluations(("random", "raslik"), (("ga_gdr", 1), ("ga_gdr", 2)))
        together = _compare(evaluations)
        apart = [
            entry
            for epoch in (1, 2)
            for entry in _compare({v: e for v, e in evaluations.items() if v.epoch == epoch})
        ]
        self.assertEqual(together, apart)

    def test_compares_across_epochs_where_each_strategy_has_one(self):
        same = self._evaluations(("random", "raslik"), (("ga_gdr", 1),))
        apart = {v._replace(epoch=3 if v.strategy == "raslik" else 1): e for v, e in same.items()}
        expected = _compare(same)
        found = _compare(apart, across_epochs=True)
        self.assertEqual([entry["epoch"] for entry in found], [1, 3])
        self.assertEqual([{**entry, "epoch": 1} for entry in found], expected)
        with self.assertRaisesRegex(ValueError, "each strategy must have one epoch"):
            _compare(
                self._evaluations(("random",), (("ga_gdr", 1), ("ga_gdr", 2))),
                across_epochs=True,
            )

    def test_flags_are_those_of_the_block(self):
        strategies = ("random", "oracle", "bm25", "embedding", "raslik_f", "raslik")
        evaluations = self._evaluations(strategies)
        entries = _compare(evaluations)
        retain_M = np.array([entry["retain"]["mean"] for entry in entries])
        forget_M = np.array([entry["forget"]["mean"] for entry in entries])
        expected = pareto.pareto_mask(retain_M, forget_M).tolist()
        self.assertEqual([entry["pareto"] for entry in entries], expected)

    def test_a_damaged_model_is_no_candidate_for_the_frontier(self):
        entries = _compare(self._evaluations(("random", "oracle", "bm25", "raslik")))
        points = (0.9, 0.8), (0.8, 0.3), (0.7, 0.4), (0.7, 0.1)
        for entry, (retain, forget) in zip(entries, points, strict=True):
            entry["retain"]["mean"], entry["forget"]["mean"] = retain, forget
        marked = [entry["pareto"] for entry in summary.mark_frontier(entries)]
        self.assertEqual(marked, [True, True, False, True])
        entries[1]["judgment"] = {"verdict": "damaged", "reasons": ["babble"], "inputs": []}
        marked = [entry["pareto"] for entry in summary.mark_frontier(entries)]
        self.assertEqual(marked, [True, False, False, True])
        entries[3]["judgment"] = entries[1]["judgment"]
        found = summary.mark_frontier(entries)
        self.assertEqual([entry["pareto"] for entry in found], [True, False, True, False])
        for entry in entries:
            entry["judgment"] = entries[1]["judgment"]
        self.assertFalse(any(entry["pareto"] for entry in summary.mark_frontier(entries)))

    def test_differences_are_paired_with_random_of_the_same_block(self):
        evaluations = self._evaluations(("random", "raslik"))
        random, raslik = _compare(evaluations)
        self.assertIsNone(random["forget_minus_random"])
        self.assertIsNone(random["retain_minus_random"])
        values = [e["target_scores"] for e in evaluations.values()]
        expected = rates.bootstrap(values[1] - values[0], seed=3, resamples=50)
        self.assertEqual(raslik["forget_minus_random"], expected)
        alone = {v: e for v, e in evaluations.items() if v.strategy == "raslik"}
        (entry,) = _compare(alone)
        self.assertIsNone(entry["forget_minus_random"])


class MetricsTest(parameterized.TestCase):
    def test_every_part_that_a_metric_reads_is_one_that_is_collected(self):
        kinds, sets = ("target", "normal"), perplexity.SETS
        parts = {"bootstrap", "non_sf", "texts", "references", "tofu", *kinds}
        parts |= {"normal_before", "prompts", "outputs", "distance"}
        parts |= {f"{name}_records" for name in ("normal", "finetuned", "base")}
        parts |= {f"{kind}_{name}" for kind in kinds for name in ("scores", "said")}
        parts |= {f"random_{kind}_scores" for kind in kinds}
        parts |= {f"{name}_likelihoods" for name in sets}
        parts |= {"influence_N", "forget_set", "retain_set", "labels_N", "ranking_N"}
        for name, metric in metrics.METRICS.items():
            self.assertLessEqual(set(metric.reads), parts, name)

    def test_sets_are_measured_by_what_the_labels_say(self):
        evidence = {
            "influence_N": np.array([0.9, 0.2, -0.4, 0.0]),
            "forget_set": np.array([0, 1]),
            "retain_set": np.array([2, 3]),
        }
        found = nest(measure(evidence))["retrieval"]
        self.assertEqual(found, {"num_forget": 2, "num_retain": 2, "retain_scored_positive": 1})
        evidence["labels_N"] = np.array([True, False, False, True])
        evidence["ranking_N"] = evidence["influence_N"]
        found = nest(measure(evidence))["retrieval"]
        self.assertEqual(
            [found[name] for name in ("precision", "base_rate", "targets_in_retain", "auroc")],
            [0.5, 0.5, 1, 0.75],
        )


class JudgeMetricsTest(parameterized.TestCase):
    def test_a_model_without_a_backbone_is_compared_with_nothing(self):
        found = sample_metrics.sample_metrics(num_epochs=1)
        found = {name: value for name, value in found.items() if name != "backbone"}
        found |= {"non_sf": {"by": "words"}, "chosen": False}
        summary.judge_metrics(found)
        self.assertIsNone(found["behavior"])
        verdicts = {entry["judgment"]["verdict"] for entry in found["methods"]}
        self.assertLessEqual(verdicts, {"unknown", "damaged"})
        self.assertIn("unknown", verdicts)
        for entry in found["methods"]:
            self.assertNotIn("backbone", " ".join(entry["judgment"]["inputs"]))


class CompareTest(parameterized.TestCase):
    """Each prompt is compared with itself under the fine-tuned model and the backbone."""

    def evidence(self, target, normal, rouge, nats):
        likelihoods = [{"id": str(n), "nll": one, "tokens": 3} for n, one in enumerate(nats)]
        return {
            "target": target,
            "normal": normal,
            "target_scores": np.array(rouge, float),
            "behavior_likelihoods": likelihoods,
        }

    def models(self):
        before = self.evidence(["ray 1", "ray 2", "ray 3", "plain"], ["x y", "z"], [1] * 4, [0.5])
        base = self.evidence(["a", "ray b", "c", "plain"], ["x", "z z"], [0.3, 0.3, 0.3, 1], [4.0])
        now = self.evidence(["ray 1", "ray b", "c", "plain"], ["x y", "w"], [1, 0.3, 0.3, 1], [3.9])
        return now, before, base

    def test_words_count_those_that_showed_it_and_the_base_does_not(self):
        models = self.models()
        for one in models:
            one["non_sf"] = lambda texts: np.array([float("ray" not in text) for text in texts])
        found = summary.compare(*models)
        self.assertEqual(found["prompts"], (1, 2, 0))
        self.assertEqual(found["outputs"], (0, 1, 0))
        entry = nest(measure({**models[0], **found}))
        self.assertEqual(entry["prompts"], {"still": 1, "of": 2, "unknown": 0})
        self.assertEqual(entry["others"], {"changed": 1, "words": 1.5})

    def test_without_words_f_tells_and_what_the_base_says_too_does_not_count(self):
        self.assertEqual(summary.compare(*self.models())["prompts"], (1, 3, 0))

    def test_without_a_backbone_answers_to_others_alone_are_compared(self):
        now, before, _ = self.models()
        self.assertEqual(summary.compare(now, before, None), {"normal_before": ["x y", "z"]})
