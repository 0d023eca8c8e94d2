"""TOFU's metrics against values written out by hand and a slow count of the KS test."""

import itertools

import numpy as np
from absl.testing import parameterized

from experiments.studies.corpora import tofu_metrics


def _record(name, *, answer=0.5, true=None, wrong=(2.0, 3.0), output="born in Taipei"):
    return tofu_metrics.QuestionRecord(
        id=f"{name} {output} {true}",
        set_name=name,
        answer_nll=answer,
        true_nll=answer if true is None else true,
        wrong_nll=list(wrong),
        answer="she was born in Taipei",
        output=output,
    )


class TruthRatioTest(parameterized.TestCase):
    # P of each wrong answer .5 and .125, of the true one .25.
    true_nll_Q = np.log([4.0])
    wrong_nll_Q = [[np.log(2.0), np.log(8.0)]]

    def test_the_mean_is_that_of_the_published_figures(self):
        found = tofu_metrics.truth_ratios(self.true_nll_Q, self.wrong_nll_Q)
        np.testing.assert_allclose(found, [1.0])

    def test_the_two_scores(self):
        ratio_Q = np.array([0.25, 1.0, 2.0])
        self.assertAlmostEqual(
            tofu_metrics.truth_score(ratio_Q, is_forgotten=True), (0.25 + 1 + 0.5) / 3
        )
        self.assertAlmostEqual(tofu_metrics.truth_score(ratio_Q, is_forgotten=False), 0.75 / 3)

    def test_absurd_likelihoods_stay_numbers(self):
        ratio_Q = tofu_metrics.truth_ratios(np.array([1e4, 0.0]), [[0.0], [1e4]])
        self.assertTrue(np.isfinite(ratio_Q).all() and (ratio_Q > 0).all())
        np.testing.assert_allclose(
            tofu_metrics.option_probability(np.array([1e4, 0.0]), [[0.0], [1e4]]),
            [0.0, 1.0],
            atol=1e-12,
        )

    @parameterized.parameters(([[1.0], []],), ([[1.0]],))
    def test_a_question_without_a_wrong_answer_is_refused(self, wrong):
        with self.assertRaisesRegex(
            ValueError, "each question must have a wrong answer, got 1 of 2 with one"
        ):
            tofu_metrics.truth_ratios(np.zeros(2), wrong)


class SetTest(parameterized.TestCase):
    def test_probability_is_relative_only_where_nobody_was_trained(self):
        records = [_record("x", answer=np.log(2), wrong=[np.log(4), np.log(4)])]
        for name, expected in (
            ("forget", 0.5),
            ("retain", 0.5),
            ("real_authors", 0.5 / (0.5 + 0.25 + 0.25)),
            ("world_facts", 0.5),
        ):
            self.assertAlmostEqual(
                tofu_metrics.evaluate_set(records, name)["probability"], expected
            )

    def test_rouge_is_recall_of_the_answer(self):
        records = [
            _record("retain", output="born in Taipei, in the month of May"),
            _record("retain", output=""),
        ]
        self.assertAlmostEqual(
            tofu_metrics.evaluate_set(records, "retain")["rouge"], (3 / 5 + 0) / 2
        )

    def test_utility_is_the_harmonic_mean_of_nine(self):
        def entry(*values):
            return dict(zip(("probability", "rouge", "truth_ratio"), values, strict=True))

        sets = {
            "forget": entry(0.0, 0.0, 0.0),
            "retain": entry(0.5, 0.5, 0.5),
            "real_authors": entry(1.0, 1.0, 1.0),
            "world_facts": entry(0.25, 0.25, 0.25),
        }
        # 9 / (3 * 2 + 3 * 1 + 3 * 4)
        self.assertAlmostEqual(tofu_metrics.model_utility(sets), 9 / 21)
        sets["retain"]["rouge"] = 0.0
        self.assertEqual(tofu_metrics.model_utility(sets), 0.0)
        del sets["retain"]
        self.assertIsNone(tofu_metrics.model_utility(sets))


class ForgetQualityTest(parameterized.TestCase):
    def _slow(self, ours, theirs):
        """Returns the share of all splits of the pool that reach the largest gap."""

        def gap(a, b):
            return max(
                abs(np.mean(np.asarray(a) <= x) - np.mean(np.asarray(b) <= x))
                for x in (*ours, *theirs)
            )

        pool, observed = [*ours, *theirs], gap(ours, theirs)
        splits = [
            gap([pool[i] for i in chosen], [pool[i] for i in set(range(len(pool))) - set(chosen)])
            for chosen in itertools.combinations(range(len(pool)), len(ours))
        ]
        return np.mean([split >= observed - 1e-12 for split in splits])

    @parameterized.parameters(
        ([0.1, 0.4, 0.9, 1.5], [0.2, 0.5, 1.0, 2.0]),
        ([0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3]),
    )
    def test_equals_counting_all_splits(self, ours, theirs):
        p_value = self._slow(ours, theirs)
        for invert in (False, True):
            sides = (np.array(side) for side in (ours, theirs))
            found = tofu_metrics.forget_quality(*(1 / s if invert else s for s in sides))
            self.assertAlmostEqual(found, p_value)

    def test_all_metrics_of_a_model_with_and_without_a_retain_model(self):
        names = ("forget", "retain", "real_authors", "world_facts")
        records = [_record(name) for name in names]
        entry = tofu_metrics.evaluate_questions(records)
        keys = [f"sets/{name}/{part}" for name in names for part in tofu_metrics.PARTS]
        self.assertEqual(list(entry), [*keys, "model_utility"])
        self.assertNotIn("forget_quality", entry)
        self.assertGreater(entry["model_utility"], 0)
        with_retain = tofu_metrics.evaluate_questions(records, retain_records=records)
        self.assertEqual(with_retain, {**entry, "forget_quality": 1.0})
        without = tofu_metrics.evaluate_questions([r for r in records if r["set_name"] != "retain"])
        self.assertIsNone(without["model_utility"])

    def test_a_retain_model_that_was_asked_something_else_is_refused(self):
        with self.assertRaisesRegex(ValueError, "the same 1 questions: run it"):
            tofu_metrics.evaluate_questions(
                [_record("forget")], retain_records=[_record("forget", true=9.0)]
            )
