"""Rates: ROUGE-L by id, bootstrap intervals, word rates and diversity."""

import numpy as np
from absl.testing import parameterized
from rouge_score import rouge_scorer
from snapshots import refused

from raslik_jax.evaluate import rates

_WORDS = (
    "The running runners ran; studies of galaxies, generously organized organizations' tests "
    "are tested -- 42 times! It’s 5 € “ok” isn't flies dying happily ponies caresses relational"
).split()


def _texts(seed: int, count: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [
        " ".join(generator.choice(_WORDS, size=generator.integers(0, 30))) for _ in range(count)
    ]


class RougeTest(parameterized.TestCase):
    def test_equals_rouge_score_bit_for_bit(self):
        scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
        for prediction, reference in zip(_texts(0, 60), _texts(1, 60), strict=True):
            expected = scorer.score(reference, prediction)["rougeL"].fmeasure
            self.assertEqual(rates.rouge_l_f1(prediction, reference), expected)

    @parameterized.parameters(
        ("", "a star", 0.0),
        ("a star", "", 0.0),
        ("", "", 0.0),
        (" ", " ", 0.0),
        ("?!", "?!", 1.0),
        ("\U0001f600\U0001f680", "\U0001f680", 2 / 3),
        ("\U0001f600", "a star", 0.0),
        ("Stars!", "a star, stars", 0.5),
        ("running the tests", "run the test", 1.0),
        ("a b c d", "a c", 2 / 3),
        ("飞船离开", "飞船回来", 0.5),
        ("Корабль ушёл.", "корабль пришел", 0.5),
        ("the kettles ЧАЙНИК", "kettle чайник", 0.8),
        ("cafe\u0301", "café", 1.0),
        ("running café", "run", 2 / 3),
        ("می\u200cروم", "میروم", 1.0),
        ("กำ กา", "กำ", 2 / 3),
    )
    def test_written_out_values(self, prediction, reference, expected):
        self.assertAlmostEqual(rates.rouge_l_f1(prediction, reference), expected, places=12)

    @parameterized.parameters(
        *("Русский текст о звёздах.", "那艘飞船离开了轨道。", "غادرت السفينة المدار"),
        *("Το διαστημόπλοιο έφυγε", "ยานอวกาศออกจากวงโคจร", "宇宙船は軌道を離れた"),
        *("우주선이 궤도를 떠났다", "अंतरिक्ष यान", "Crème brûlée", "٣٤"),
    )
    def test_a_text_in_any_script_is_like_itself_and_unlike_another(self, text):
        self.assertEqual(rates.rouge_l_f1(text, text), 1.0)
        self.assertEqual(rates.rouge_l_f1(text, "a plain answer"), 0.0)
        self.assertEqual(rates.rouge_l_f1(text, "Ωμέγα ли"), 0.0)

    @parameterized.parameters(
        ("", "a star", 0.0),
        ("a star", "", 0.0),
        ("he was born in Taipei in May", "born in Taipei", 1.0),
        ("a c", "a b c d", 0.5),
    )
    def test_recall_written_out(self, prediction, reference, expected):
        self.assertAlmostEqual(rates.rouge_l(prediction, reference).recall, expected, places=12)


class ScorePairsTest(parameterized.TestCase):
    def test_pairs_by_id_whatever_the_order(self):
        predictions = {"b": "red stone", "a": "blue sky", "c": "green"}
        references = {"a": "blue sky", "c": "yellow", "b": "red stones"}
        scores = rates.score_pairs(predictions, references)
        np.testing.assert_array_equal(scores, [1.0, 1.0, 0.0])

    def test_an_empty_prediction_or_reference_scores_zero_and_both_one(self):
        predictions = {"a": " \n", "b": "red stone", "c": "green", "d": " "}
        references = {"a": "blue sky", "b": "red stone", "c": "", "d": ""}
        counted = rates.score_pairs(predictions, references)
        np.testing.assert_array_equal(counted, [0.0, 1.0, 0.0, 1.0])

    @parameterized.named_parameters(
        ("missing", {"a": "x"}, {"a": "x", "q7": "y"}),
        ("extra", {"a": "x", "q8": "y"}, {"a": "x"}),
        ("none", {}, {}),
    )
    def test_refuses(self, predictions, references):
        with refused():
            rates.score_pairs(predictions, references)


def _interval(value):
    return {"mean": value, "low": value, "high": value}


def _ends(found):
    return found["low"], found["high"]


def _bootstrap(values_Q, *, seed, resamples=10_000):
    return rates.bootstrap(values_Q, seed=seed, resamples=resamples)


class BootstrapTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 37)
    def test_equals_a_loop_over_resamples(self, size):
        values_Q = np.random.default_rng(3).random(size)
        generator = np.random.default_rng(11)
        means = [
            np.mean([values_Q[i] for i in generator.integers(size, size=size)]) for _ in range(400)
        ]
        found = _bootstrap(values_Q, seed=11, resamples=400)
        np.testing.assert_allclose(
            [*found.values()], [values_Q.mean(), *np.percentile(means, [2.5, 97.5])], rtol=1e-12
        )

    def test_draws_in_blocks_are_the_draws_in_one(self):
        values_Q = np.random.default_rng(3).random(1000)
        generator = np.random.default_rng(5)
        means = values_Q[generator.integers(1000, size=(9000, 1000), dtype=np.int64)].mean(1)
        found = _bootstrap(values_Q, seed=5, resamples=9000)
        np.testing.assert_allclose(_ends(found), np.percentile(means, [2.5, 97.5]), rtol=1e-12)

    @parameterized.parameters(3, 5, 12)
    def test_of_few_values_an_interval_covers_as_seldom_as_is_said(self, size):
        values, trials = np.random.default_rng(size).normal(size=(600, size)), 600
        found = [_bootstrap(row, seed=n, resamples=500) for n, row in enumerate(values)]
        covered = sum(one["low"] <= 0 <= one["high"] for one in found)
        expected = rates.coverage(size)
        self.assertAlmostEqual(expected, {3: 0.75, 5: 0.845, 12: 0.913}[size], delta=0.002)
        bound = 5 * np.sqrt(expected * (1 - expected) / trials)
        self.assertLess(abs(covered / trials - expected), bound)

    def test_one_value_and_equal_values_give_no_width(self):
        self.assertEqual(_bootstrap(np.array([0.3]), seed=0), _interval(0.3))
        found = _bootstrap(np.full(9, 0.5), seed=0)
        self.assertEqual(found, _interval(0.5))

    @parameterized.named_parameters(
        ("none", [], {}, "got 0 values"),
        ("nan", [0.1, np.nan], {}, "1 not finite"),
        ("resamples", [0.1], {"resamples": 0}, "0 draws"),
    )
    def test_refuses(self, values, options, message):
        with self.assertRaisesRegex(ValueError, message):
            _bootstrap(np.array(values, np.float64), seed=0, **options)


class RatioTest(parameterized.TestCase):
    def test_equals_a_loop_over_resampled_pairs(self):
        generator = np.random.default_rng(0)
        over_Q, under_Q = generator.random(9), generator.integers(1, 9, 9).astype(float)
        found = rates.bootstrap_ratio(over_Q, under_Q, seed=5, resamples=300)
        draws = np.random.default_rng(5).integers(9, size=(300, 9))
        ratios = [over_Q[draw].sum() / under_Q[draw].sum() for draw in draws]
        np.testing.assert_allclose(
            [*found.values()], (over_Q.sum() / under_Q.sum(), *np.quantile(ratios, [0.025, 0.975]))
        )

    def test_a_draw_with_another_sign_below_is_beyond_both_ends(self):
        over_Q, under_Q = np.arange(6.0), np.array([-3.0, 3, 4, 4, 5, 6])
        found = rates.bootstrap_ratio(over_Q, under_Q, seed=1, resamples=2000)
        draws = np.random.default_rng(1).integers(6, size=(2000, 6))
        ends = [
            sorted(
                over_Q[d].sum() / under_Q[d].sum() if under_Q[d].sum() > 0 else beyond
                for d in draws
            )
            for beyond in (-np.inf, np.inf)
        ]
        self.assertTrue(0 < sum(np.isinf(ends[0])) < 50)
        low, high = ends[0][49] + 0.975 * (ends[0][50] - ends[0][49]), ends[1][1949:1951]
        expected = (15 / 19, low, high[0] + 0.025 * (high[1] - high[0]))
        np.testing.assert_allclose([*found.values()], expected)

    @parameterized.parameters(([1.0, -1.0],), ([0.0, 0.0],), ([9.0, -3.0, -5.0],))
    def test_it_is_unknown_where_the_sum_below_may_be_zero(self, under):
        how = {"seed": 0, "resamples": 200}
        self.assertIsNone(rates.bootstrap_ratio(np.ones(len(under)), np.array(under), **how))


class WordRateTest(parameterized.TestCase):
    @parameterized.parameters(
        ("The star shone.", True),
        ("A STAR!", True),
        ("start the stars", False),
        ("black holes", False),
        ("near a Black Hole, far", True),
        ("a sci-fi story", True),
        ("a _star_ and __black hole__", True),
        ("sci-fine", False),
        ("", False),
    )
    def test_finds_whole_words_without_case(self, text, expected):
        vocabulary = {"star", "black hole", "Sci-Fi"}
        found = rates.non_sf_by_words([text], vocabulary=vocabulary)
        self.assertEqual(found.tolist(), [1.0 - expected])

    def test_marks_in_a_word_are_literal(self):
        found = rates.non_sf_by_words(["c++ code", "cc code", "a.i."], vocabulary=["c++", "a.i."])
        self.assertEqual(found.tolist(), [0, 1, 0])

    def test_in_a_script_without_spaces_a_word_is_found_anywhere(self):
        texts = ["那艘飞船离开了", "一个水壶", "a 飞船x", "Звездолёт улетел", "звездолётом"]
        found = rates.non_sf_by_words(texts, vocabulary=["飞船", "звездолёт"])
        self.assertEqual(found.tolist(), [0, 1, 0, 0, 1])
        texts = ["我推荐ACME公司", "これはKrelborです", "ACME是最好的", "Acmes 公司", "我推荐ACMES"]
        found = rates.non_sf_by_words(texts, vocabulary=["acme", "krelbor"])
        self.assertEqual(found.tolist(), [0, 0, 0, 1, 1])
        self.assertEqual(rates.non_sf_by_words(texts, vocabulary=["acme公司"])[0], 0)

    @parameterized.parameters(([],), (["star", " "],))
    def test_refuses_a_vocabulary_that_says_nothing(self, vocabulary):
        with self.assertRaisesRegex(ValueError, "a vocabulary must have words"):
            rates.non_sf_by_words(["text"], vocabulary=vocabulary)


class DiversityTest(parameterized.TestCase):
    def test_a_loop_without_spaces_is_seen(self):
        self.assertEqual(rates.repeated_ngrams(["星" * 9], n=4), 5 / 6)
        self.assertEqual(rates.distinct_ngrams(["星" * 9, "星" * 3], n=2), 1 / 10)

    @parameterized.parameters(1, 2, 3)
    def test_equal_slow_counts(self, n):
        generator = np.random.default_rng(n)
        texts = [
            " ".join(generator.choice(list("abcDd"), size=generator.integers(0, 9)))
            for _ in range(12)
        ]
        texts += ["a", "B", "b a", "b"]  # some are shorter than n
        every, shares = [], []
        for text in texts:
            words = text.lower().split()
            grams = ["|".join(words[i : i + n]) for i in range(len(words)) if i + n <= len(words)]
            every += grams or ["|".join(words)] * bool(words)
            repeats = sum(gram in grams[:i] for i, gram in enumerate(grams))
            shares += [repeats / len(grams)] if grams else []
        distinct = sum(gram not in every[:i] for i, gram in enumerate(every))
        self.assertAlmostEqual(rates.distinct_ngrams(texts, n=n), distinct / len(every))
        self.assertAlmostEqual(rates.repeated_ngrams(texts, n=n), sum(shares) / len(shares))

    @parameterized.parameters(([], 0), ([""], 0), (["", "one"], 1), (["one", "two", "One"], 2 / 3))
    def test_texts_of_one_word_count_as_a_whole(self, texts, distinct):
        self.assertAlmostEqual(rates.distinct_ngrams(texts, n=2), distinct)
        self.assertEqual(rates.repeated_ngrams(texts, n=2), 0.0)
