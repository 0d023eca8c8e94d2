"""The rules of selection: sizes, disjointness, ties, errors; and what is said of the sets."""

from unittest import mock

import numpy as np
from absl.testing import parameterized
from hypothesis import assume, given
from hypothesis import strategies as st
from snapshots import refused

from raslik_jax.retrieve import selectors
from raslik_jax.retrieve.selectors import select_by_count, select_by_threshold


def _ids(count):
    return [f"id{i:03d}" for i in range(count)]


_RULES = {
    "count": lambda f, r: {"num_forget": f, "num_retain": r},
    "threshold": lambda f, r: {"forget_threshold": 0.1 * f, "retain_threshold": 0.1 * r},
}


def _apply(name, score_N, retain_N, ids, options):
    select = select_by_count if name == "count" else select_by_threshold
    return select(score_N, retain_N, ids, **options)


class RulesTest(parameterized.TestCase):
    """Every rule goes through the same battery."""

    def _choose(self, name, score_N, ids, amounts, retain_N=None):
        """Returns the selection, or None where these scores leave a set empty or overlapping."""
        retain_N = -score_N if retain_N is None else retain_N
        try:
            return _apply(name, score_N, retain_N, ids, _RULES[name](*amounts))
        except ValueError as error:
            self.assertRegex(str(error), " must ")
            return None

    @parameterized.parameters(*_RULES)
    def test_disjoint_best_first_and_the_same_for_every_order_of_rows(self, name):
        @given(
            # Few distinct values, so that ties are common.
            scores=st.lists(st.integers(-9, 9).map(lambda x: x / 10), min_size=2, max_size=25),
            amounts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
            seed=st.integers(0, 99),
        )
        def check(scores, amounts, seed):
            score_N, ids = np.asarray(scores), np.asarray(_ids(len(scores)))
            chosen = self._choose(name, score_N, list(ids), amounts)
            order = np.random.default_rng(seed).permutation(len(scores))
            again = self._choose(name, score_N[order], list(ids[order]), amounts)
            self.assertEqual(chosen is None, again is None)
            if chosen is None:
                return
            self.assertEmpty(set(chosen.forget) & set(chosen.retain))
            if name == "count":
                self.assertEqual((len(chosen.forget), len(chosen.retain)), amounts)
            for one, two, sign in zip(chosen, again, (1, -1), strict=True):
                np.testing.assert_array_equal(ids[one], ids[order][two])
                self.assertNotEmpty(one)
                keys = [(-sign * score_N[i], ids[i]) for i in one]
                self.assertEqual(keys, sorted(keys))
                worst = min(sign * score_N[one])
                left = set(range(len(scores))) - set(chosen.forget) - set(chosen.retain)
                self.assertTrue(all(sign * score_N[i] <= worst for i in left))

        check()

    @parameterized.parameters(*_RULES)
    def test_a_query_of_the_other_sign_swaps_the_sets(self, name):
        @given(
            scores=st.lists(
                st.integers(-500, 500).map(lambda x: x / 500), min_size=2, max_size=25, unique=True
            ),
            amounts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
        )
        def check(scores, amounts):
            score_N, ids = np.asarray(scores), _ids(len(scores))
            options = _RULES[name](*amounts)
            swapped = {
                key: options.get(key.replace("forget", "retain"))
                if "forget" in key
                else options.get(key.replace("retain", "forget"))
                for key in options
            }
            try:
                one = _apply(name, score_N, -score_N, ids, options)
            except ValueError:
                assume(False)
            other = _apply(name, -score_N, score_N, ids, swapped)
            np.testing.assert_array_equal(one.forget, other.retain)
            np.testing.assert_array_equal(one.retain, other.forget)

        check()

    def test_a_set_may_be_empty_and_ties_go_by_id(self):
        ids, sizes = ["d", "b", "c", "a"], {"num_forget": 2, "num_retain": 0}
        chosen = select_by_count(np.zeros(4), np.zeros(4), ids, **sizes)
        self.assertEqual([part.tolist() for part in chosen], [[3, 1], []])

    def test_barred_examples_count_for_nothing(self):
        score_N = np.array([-np.inf, 0.0])
        with refused():
            select_by_count(score_N, score_N, _ids(2), num_forget=2, num_retain=0)

    @parameterized.parameters(
        ("threshold", (0.2, -0.1)),
        ("threshold", (1.5, 0.1)),
        ("threshold", (0.1, 1.5)),
        ("count", (8, 4)),
        ("count", (-1, 4)),
    )
    def test_what_cannot_be_is_refused(self, name, values):
        keys = _RULES[name](1, 1)
        score_N = np.linspace(1, -1, 11)
        score_N[2:4] = 0.2, 0.1
        score_N[3] = 0.2
        score_N[4:7] = 0.09
        retain_N = np.where(score_N == 0.2, 0.0, -score_N)
        with refused():
            _apply(name, score_N, retain_N, _ids(11), dict(zip(keys, values, strict=True)))

    @parameterized.parameters(*_RULES)
    def test_nan_and_infinite_scores_are_refused_by_id(self, name):
        for value in (np.nan, np.inf):
            score_N = np.linspace(1, -1, 11)
            score_N[4] = value
            with refused():
                _apply(name, score_N, -score_N, _ids(11), _RULES[name](1, 1))

    @parameterized.parameters(*_RULES)
    def test_scores_of_other_rows_than_the_ids_are_refused(self, name):
        score_N = np.linspace(1, -1, 11)
        for number in (10, 12):
            with self.assertRaisesRegex(ValueError, f"one for each of {number} ids, got the shape"):
                _apply(name, score_N, -score_N, _ids(number), _RULES[name](1, 1))


class GapTest(parameterized.TestCase):
    """The number of examples that stand out, on distributions made for it."""

    @parameterized.parameters(np.nan, np.inf)
    def test_scores_that_are_not_finite_are_refused(self, value):
        score_N = np.linspace(1, -1, 50)
        score_N[7] = value
        with self.assertRaisesRegex(ValueError, "scores must be finite, that of example 7 is "):
            selectors.find_cut(score_N)

    def _scores(self, *, stand_out, seed=0, num=1000, at=0.4, near=0):
        """Noise around -.03, examples that stand out around `at`, near copies of a query at .9."""
        generator = np.random.default_rng(seed)
        parts = [generator.normal(-0.03, 0.05, num - stand_out - near)]
        parts += [generator.normal(at, 0.05, stand_out), generator.normal(0.9, 0.01, near)]
        return np.concatenate(parts)

    @parameterized.product(stand_out=(1, 2, 7, 100, 300), seed=(0, 1))
    def test_a_clear_gap_is_found(self, stand_out, seed):
        cut = selectors.find_cut(self._scores(stand_out=stand_out, seed=seed))
        self.assertEqual(cut.num_forget, stand_out)
        self.assertBetween(cut.edge, 0.1, 0.3)
        self.assertGreater(cut.gap, 0.03)

    def test_a_few_near_copies_of_the_query_are_not_all_that_stands_out(self):
        score_N = self._scores(stand_out=100, near=5)
        ranked_N = np.sort(score_N)
        self.assertEqual(np.argmax(np.diff(ranked_N)), 1000 - 5 - 1)  # the widest gap of all
        self.assertEqual(selectors.find_cut(score_N).num_forget, 105)

    def test_of_noise_alone_nothing_stands_out(self):
        """.05 rows above the edge are expected; 5 standard errors of 400 draws."""
        for num in (60, 1000):
            draws = [np.random.default_rng(seed).normal(0, 0.1, num) for seed in range(400)]
            found = sum(selectors.find_cut(score_N).num_forget > 0 for score_N in draws)
            self.assertLess(found, 400 * (0.08 + 5 * np.sqrt(0.08 / 400)))

    @parameterized.parameters("uniform", "triangular")
    def test_without_a_gap_or_a_tail_nothing_stands_out(self, kind):
        draws = {"uniform": (-1, 1), "triangular": (-1, 0, 1)}[kind]
        score_N = getattr(np.random.default_rng(0), kind)(*draws, 500)
        cut = selectors.find_cut(score_N)
        self.assertEqual((cut.num_forget, cut.num_out, cut.gap), (0, 0, 0.0))
        self.assertGreater(cut.edge, score_N.max())

    def test_the_noise_of_the_sketch_is_the_least_spread(self):
        score_N = np.append(np.linspace(-0.011, 0.001, 199), 0.2)
        self.assertEqual(selectors.find_cut(score_N).num_forget, 1)
        self.assertEqual(selectors.find_cut(score_N, sigma=0.1).num_forget, 0)

    @parameterized.product(num=(200, 600), share=(0.02, 0.08, 0.3, 0.45, 0.6), seed=(0, 1, 2))
    def test_a_behavior_is_found_however_common(self, num, share, seed):
        """Its rows are spread one and a half times as far as the others."""
        generator, count = np.random.default_rng(seed), round(share * num)
        parts = generator.normal(0.3, 0.06, count), generator.normal(-0.02, 0.04, num - count)
        score_N = np.concatenate(parts)
        cut = selectors.find_cut(score_N)
        top = np.argsort(-score_N)[: cut.num_forget]
        self.assertGreaterEqual((top < count).mean(), 0.97)
        self.assertGreaterEqual((top < count).sum() / count, 0.75)
        self.assertEqual(selectors.is_common(cut, num), share > 0.2)

    def test_scores_of_one_group_have_no_valley(self):
        """Less than 1 % of draws has one, with 5 standard errors of 200 draws."""
        for num in (200, 600):
            for kind, how in (
                ("normal", ()),
                ("gamma", (2,)),
                ("standard_t", (3,)),
                ("uniform", ()),
            ):
                draws = (
                    getattr(np.random.default_rng(n), kind)(*how, size=num) for n in range(200)
                )
                found = sum(selectors.count_upper(score_N) > 0 for score_N in draws)
                self.assertLessEqual(found, 200 * (0.01 + 5 * np.sqrt(0.01 / 200)))
        self.assertEqual(selectors.count_upper(np.repeat([0.0, 1.0], 19)), 0)
        self.assertEqual(selectors.count_upper(np.zeros(500)), 0)

    @parameterized.product(num=(200, 400, 1000), seed=(0, 1, 2, 3, 4))
    def test_a_group_below_the_edge_of_wide_scores_is_found_by_its_gap(self, num, seed):
        """The unrelated scores reach farther down than up, as centered ones may."""
        draws = np.random.default_rng(seed)
        score_N = draws.normal(0, 0.1, num)
        score_N = np.where(score_N < 0, 3 * score_N, score_N)
        score_N[:20] = draws.normal(0.6, 0.03, 20)
        _, edge = selectors.noise_band(score_N)
        self.assertLess((score_N > edge).sum(), 20)
        self.assertEqual(selectors.find_cut(score_N).num_forget, 20)
        self.assertEqual(selectors.count_apart(score_N), 20)
        # The gap may be one of the sketch's noise.
        self.assertEqual(selectors.count_apart(score_N, sigma=0.1), 0)

    @parameterized.parameters(0, 1, 2, 3)
    def test_copies_of_rows_are_no_group(self, seed):
        draws = np.random.default_rng(seed)
        twice = np.repeat(draws.normal(0, 0.1, 200), 2)
        for score_N in (twice, np.r_[np.full(800, -0.01), draws.normal(0, 0.1, 200)]):
            for dtype in (np.float64, np.float32):
                self.assertEqual(selectors.count_apart(score_N.astype(dtype)), 0)
        twice[:20] = np.repeat(draws.normal(0.8, 0.03, 10), 2)
        self.assertEqual(selectors.find_cut(twice).num_forget, 20)

    @parameterized.parameters(0, 1, 2)
    def test_near_copies_far_above_hide_no_common_behavior(self, seed):
        draws = np.random.default_rng(seed)
        parts = (
            draws.normal(0, 0.05, 600),
            draws.normal(0.2, 0.05, 350),
            draws.normal(0.9, 0.02, 50),
        )
        self.assertAlmostEqual(selectors.find_cut(np.concatenate(parts)).num_forget, 400, delta=25)

    def test_a_gap_of_a_tail_adds_no_rows(self):
        """Less than 1 % of draws has one, with 5 standard errors of 100 draws."""
        for num in (40, 200, 1000):
            for kind, how in (
                *(("normal", ()), ("gamma", (2,)), ("standard_t", (3,)), ("uniform", ())),
                *(("laplace", ()), ("lognormal", (0, 0.5))),
            ):
                added = 0
                for seed in range(100):
                    score_N = getattr(np.random.default_rng(seed), kind)(*how, size=num)
                    found = selectors.find_cut(score_N).num_forget
                    with mock.patch.object(selectors, "count_apart", return_value=0):
                        added += found > selectors.find_cut(score_N).num_forget
                self.assertLessEqual(added, 100 * (0.01 + 5 * np.sqrt(0.01 / 100)))
        self.assertEqual(selectors.count_apart(np.zeros(500)), 0)
        self.assertEqual(selectors.count_apart(np.r_[np.full(30, -np.inf), np.arange(39.0)]), 0)

    @parameterized.product(size=((12, 3), (20, 1), (20, 10), (30, 8)), seed=(0, 1, 2, 3))
    def test_a_group_far_above_the_rows_of_a_small_file_is_found(self, size, seed):
        draws, (num, few) = np.random.default_rng(seed), size
        score_N = draws.normal(0, 0.05, num)
        score_N[:few] = draws.normal(0.8, 0.04, few)
        self.assertEqual(selectors.find_cut(score_N).num_forget, few)
        self.assertEqual(selectors.count_apart(score_N, sigma=0.2), 0)
        for empty in ([], [0.5], [-np.inf] * 20):
            self.assertEqual(selectors.count_apart(np.array(empty)), 0)
        score_N[few:] = 0.0  # of equal rows the range says nothing
        self.assertEqual(selectors.count_apart(score_N), 0)

    @parameterized.product(num=(15, 20, 39), kind=("normal", "uniform", "laplace"))
    def test_a_gap_of_a_small_file_adds_no_rows(self, num, kind):
        """At most 3 % of draws have one, with 5 standard errors of 100 draws."""
        added = sum(
            selectors.count_apart(getattr(np.random.default_rng(seed), kind)(size=num)) > 0
            for seed in range(100)
        )
        self.assertLessEqual(added, 100 * (0.03 + 5 * np.sqrt(0.03 / 100)))

    @parameterized.product(num=(200, 1000), share=(0.5, 0.6, 0.8), spread=(0.0, 0.006))
    def test_rows_that_are_alike_make_no_second_group(self, num, share, spread):
        """The others scatter around them; in up to 3 % of draws they fall into two groups."""
        found, count = 0, round(share * num)
        for seed in range(20):
            draws = np.random.default_rng(seed)
            parts = draws.normal(-0.02, spread, count), draws.normal(0, 0.05, num - count)
            found += selectors.count_upper(np.concatenate(parts)) > 0
        self.assertLessEqual(found, 2)

    @parameterized.parameters(0, 1, 2)
    def test_the_slope_to_a_smaller_group_is_no_valley(self, seed):
        draws = np.random.default_rng(seed)
        score_N = np.r_[draws.normal(0, 0.06, 860), draws.normal(0.6, 0.03, 140)]
        self.assertEqual(selectors.count_upper(score_N.astype(np.float32)), 0)
        cut = selectors.find_cut(score_N.astype(np.float32), sigma=0.0)
        chosen = np.argsort(-score_N)[: cut.num_forget]
        self.assertGreater((chosen >= 860).mean(), 0.99)

    def test_barred_examples_count_for_nothing(self):
        score_N = self._scores(stand_out=20)
        barred_N = np.concatenate([score_N, np.full(500, -np.inf)])
        self.assertEqual(selectors.find_cut(barred_N), selectors.find_cut(score_N))
        with refused():
            selectors.find_cut(np.concatenate([np.zeros(9), np.full(50, -np.inf)]))


def test_the_summary_says_what_was_chosen():
    score_N = np.array([0.9, 0.8, 0.795, 0.1, -0.1, -0.2, -0.4, 0.5])
    labels = [True, False, True, False, None, False, True, False]
    chosen = select_by_count(score_N, -score_N, _ids(8), num_forget=2, num_retain=3)
    found = selectors.summarize_selection(chosen, score_N, -score_N, labels=labels)
    assert (found["num_forget"], found["num_retain"]) == (2, 3)
    forget, retain = found["forget"], found["retain"]
    assert (forget["lowest"], forget["highest"]) == (0.8, 0.9)
    assert (retain["lowest"], retain["highest"]) == (0.1, 0.4)
    assert forget["near_threshold"] == 2
    np.testing.assert_allclose(forget["density"], 2 / (0.02 * 8))
    assert (forget["targets"], forget["non_targets"]) == (1, 1)
    assert (retain["targets"], retain["unlabeled"]) == (1, 1)
    none = selectors.Selection(*[np.zeros(0, int)] * 2)
    found = selectors.summarize_selection(none, score_N, -score_N, labels=labels)
    assert found["forget"]["lowest"] is None
