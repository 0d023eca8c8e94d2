"""The antipodal selector and the strategies: sizes, disjointness, ties, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import sketch_formulas
from absl.testing import absltest, parameterized
from hypothesis import assume, given
from hypothesis import strategies as st

from raslik_jax.config import RetrieveConfig
from raslik_jax.data.examples import Example
from raslik_jax.retrieve import selection
from raslik_jax.retrieve.selection import SELECTORS, select_by_count
from raslik_jax.retrieve.strategies import (
    STRATEGIES,
    Request,
    Vectors,
    aggregate_scores,
)
from raslik_jax.sketch import theory
from raslik_jax.sketch.families import PROJECTIONS

# Few distinct values, so that ties are common.
_SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


def _ids(count):
    return [f"id{i:03d}" for i in range(count)]


def _select(score_N, ids, num_forget, num_retain):
    return select_by_count(score_N, -score_N, ids, num_forget=num_forget, num_retain=num_retain)


class SelectionTest(parameterized.TestCase):
    @given(scores=_SCORES, data=st.data())
    def test_disjoint_sized_and_optimal(self, scores, data):
        score_N = np.asarray(scores)
        num_forget = data.draw(st.integers(0, len(scores)))
        num_retain = data.draw(st.integers(0, len(scores) - num_forget))
        chosen = _select(score_N, _ids(len(scores)), num_forget, num_retain)
        self.assertLen(set(chosen.forget) | set(chosen.retain), num_forget + num_retain)
        self.assertEqual((len(chosen.forget), len(chosen.retain)), (num_forget, num_retain))
        np.testing.assert_array_equal(
            np.sort(score_N[chosen.forget]), np.sort(score_N)[len(scores) - num_forget :]
        )
        np.testing.assert_array_equal(
            np.sort(score_N[chosen.retain]), np.sort(score_N)[:num_retain]
        )

    @given(scores=_SCORES, seed=st.integers(0, 99))
    def test_the_order_of_the_rows_does_not_matter(self, scores, seed):
        score_N, ids = np.asarray(scores), np.asarray(_ids(len(scores)))
        order = np.random.default_rng(seed).permutation(len(scores))
        half = len(scores) // 2
        first = _select(score_N, list(ids), half, len(scores) - half)
        second = _select(score_N[order], list(ids[order]), half, len(scores) - half)
        for one, two in zip(first, second, strict=True):
            np.testing.assert_array_equal(ids[one], ids[order][two])

    @given(scores=st.lists(st.floats(-1, 1), min_size=2, max_size=30, unique=True))
    def test_a_query_of_the_other_sign_swaps_the_sets(self, scores):
        score_N, ids, half = np.asarray(scores), _ids(len(scores)), len(scores) // 2
        one, other = _select(score_N, ids, half, half), _select(-score_N, ids, half, half)
        np.testing.assert_array_equal(one.forget, other.retain)
        np.testing.assert_array_equal(one.retain, other.forget)

    def test_ties_go_by_id(self):
        chosen = _select(np.zeros(4), ["d", "b", "c", "a"], 2, 2)
        np.testing.assert_array_equal(chosen.forget, [3, 1])
        np.testing.assert_array_equal(chosen.retain, [2, 0])

    @parameterized.parameters(
        (np.array([0.0, np.nan]), 1, 0, "score of example id001 is NaN"),
        (np.zeros(2), 3, 0, "num_forget=3 examples wanted, 2 are eligible"),
        (np.zeros(2), 1, 2, "num_retain=2 examples wanted beside 1 to forget, 1 are eligible"),
        (np.array([-np.inf, 0.0]), 2, 0, "num_forget=2 examples wanted, 1 are eligible"),
    )
    def test_errors_say_what_was_wanted(self, score_N, num_forget, num_retain, message):
        with self.assertRaisesRegex(ValueError, message):
            select_by_count(score_N, score_N, _ids(2), num_forget=num_forget, num_retain=num_retain)


_RULES = {
    "count": lambda f, r: {"num_forget": f, "num_retain": r},
    "threshold": lambda f, r: {"forget_threshold": 0.1 * f, "retain_threshold": 0.1 * r},
    "margin": lambda f, r: {
        "forget_threshold": 0.0,
        "retain_threshold": -0.05,
        "sigma": 0.05 * max(f, r),
        "z": 2.0,
    },
    "quantile": lambda f, r: {"forget_share": 0.08 * f, "retain_share": 0.08 * r},
}


class RulesTest(parameterized.TestCase):
    """Every rule of SELECTORS goes through the same battery."""

    def test_every_rule_is_tested(self):
        self.assertEqual(set(_RULES), set(SELECTORS))

    def _choose(self, name, score_N, ids, amounts, retain_N=None):
        """Returns the selection, or None where these scores leave a set empty or overlapping."""
        retain_N = -score_N if retain_N is None else retain_N
        try:
            return SELECTORS[name](score_N, retain_N, ids, **_RULES[name](*amounts))
        except ValueError as error:
            self.assertRegex(str(error), "wanted|must be")
            return None

    @parameterized.parameters(*_RULES)
    def test_disjoint_best_first_and_the_same_for_every_order_of_rows(self, name):
        @given(
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
            rule = _RULES[name]
            options = rule(*amounts)
            if name == "margin":
                options["retain_threshold"] = options["forget_threshold"]
            swapped = {
                key: options.get(key.replace("forget", "retain"))
                if "forget" in key
                else options.get(key.replace("retain", "forget"))
                for key in options
            }
            try:
                one = SELECTORS[name](score_N, -score_N, ids, **options)
            except ValueError:
                assume(False)
            other = SELECTORS[name](-score_N, score_N, ids, **swapped)
            np.testing.assert_array_equal(one.forget, other.retain)
            np.testing.assert_array_equal(one.retain, other.forget)

        check()

    @given(
        scores=st.lists(st.floats(-1, 1), min_size=3, max_size=30, unique=True),
        low=st.floats(0.0, 1.0),
        more=st.floats(0.0, 1.0),
        sigma=st.floats(0.0, 0.3),
    )
    def test_a_higher_threshold_or_margin_takes_a_subset(self, scores, low, more, sigma):
        score_N, ids = np.asarray(scores), _ids(len(scores))
        options = {"retain_threshold": 0.05, "sigma": sigma}
        try:
            kept = [
                selection.select_by_margin(
                    score_N, -score_N, ids, forget_threshold=threshold, z=z, **options
                )
                for threshold, z in ((low, 0.0), (low + more, 0.0), (low, 1.0))
            ]
        except ValueError:
            assume(False)
        wide, higher, further = (set(chosen.forget) for chosen in kept)
        self.assertLessEqual(higher, wide)
        self.assertLessEqual(further, wide)
        self.assertLessEqual(set(kept[2].retain), set(kept[0].retain))

    def test_the_rules_agree_where_they_mean_the_same(self):
        score_N, ids = np.linspace(1, -1, 21), _ids(21)
        wanted = select_by_count(score_N, -score_N, ids, num_forget=3, num_retain=4)
        for name, options in (
            ("threshold", {"forget_threshold": 0.8, "retain_threshold": 0.7}),
            ("margin", dict(forget_threshold=0.7, retain_threshold=0.6, sigma=0.05, z=1.9)),
            ("quantile", {"forget_share": 3 / 21, "retain_share": 4 / 21}),
        ):
            found = SELECTORS[name](score_N, -score_N, ids, **options)
            for one, two in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(one, two)

    def test_the_core_runs_under_jit_with_the_same_result(self):
        score_N = np.round(np.random.default_rng(0).normal(size=40), 1).astype(np.float32)
        rank_N = np.random.default_rng(1).permutation(40)
        core = functools.partial(selection.positions_by_count, num_forget=7, num_retain=9)
        jitted = jax.jit(core)(jnp.asarray(score_N), -jnp.asarray(score_N), jnp.asarray(rank_N))
        for one, two in zip(core(score_N, -score_N, rank_N), jitted, strict=True):
            np.testing.assert_array_equal(one, two)
        masks = jax.jit(selection.pass_thresholds)(score_N, -score_N, 0.5, 0.25)
        for one, two in zip(
            selection.pass_thresholds(score_N, -score_N, 0.5, 0.25), masks, strict=True
        ):
            np.testing.assert_array_equal(one, two)

    @parameterized.parameters(
        ("threshold", (0.2, -0.1), r"2 examples pass both .* such as id002: raise one"),
        ("threshold", (1.5, 0.1), "examples to forget wanted, none clears .* highest score is 1"),
        ("threshold", (0.1, 1.5), "examples to retain wanted, none clears"),
        ("threshold", (np.nan, 0.1), "a finite forget_threshold wanted"),
        ("quantile", (0.6, 0.5), "sum to more than 1: lower one"),
        ("quantile", (0.0, 0.5), "shares above 0"),
        (
            "quantile",
            (0.01, 0.5),
            "--retrieve.forget_share must be one example or more, got 0.01 of 11",
        ),
        ("count", (8, 4), "num_retain=4 examples wanted beside 8 to forget, 3 are eligible"),
        ("count", (-1, 4), "counts of at least 0"),
    )
    def test_what_cannot_be_is_refused(self, name, values, message):
        keys = [key for key in _RULES[name](1, 1) if key.startswith(("forget", "retain", "num"))]
        score_N = np.linspace(1, -1, 11)
        score_N[2:4] = 0.2, 0.1
        score_N[3] = 0.2
        score_N[4:7] = 0.09
        with self.assertRaisesRegex(ValueError, message):
            retain_N = np.where(score_N == 0.2, 0.0, -score_N)
            SELECTORS[name](score_N, retain_N, _ids(11), **dict(zip(keys, values, strict=True)))

    @parameterized.parameters(*_RULES)
    def test_nan_and_infinite_scores_are_refused_by_id(self, name):
        for value, word in ((np.nan, "NaN"), (np.inf, "infinite")):
            score_N = np.linspace(1, -1, 11)
            score_N[4] = value
            with self.assertRaisesRegex(ValueError, f"score of example id004 is {word}"):
                SELECTORS[name](score_N, -score_N, _ids(11), **_RULES[name](1, 1))

    def test_negative_sigma_is_refused(self):
        options = _RULES["margin"](1, 1) | {"sigma": -0.1}
        with self.assertRaisesRegex(ValueError, "at least 0 wanted"):
            selection.select_by_margin(np.ones(2), -np.ones(2), _ids(2), **options)


def _unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, (3, 3)),
        ({"num_forget": 2}, (2, 2)),
        ({"num_forget": 2, "num_retain": 4}, (2, 4)),
        ({"select": "quantile", "forget_share": 0.2, "retain_share": 0.5}, (2, 5)),
        ({"select": "threshold", "forget_threshold": 0.5, "retain_threshold": 0.3}, (3, 4)),
        (
            {"select": "margin", "forget_threshold": 0.5, "retain_threshold": 0.3, "margin_z": 2.0},
            (2, 3),
        ),
    )
    def test_the_settings_of_a_run_choose_its_sets(self, changes, sizes):
        score_N = np.linspace(1, -1, 10)
        chosen = selection.select_sets(
            score_N,
            -score_N,
            _ids(10),
            RetrieveConfig(**changes),
            num_targets=3,
            sigma=0.1,
        )
        self.assertEqual((len(chosen.forget), len(chosen.retain)), sizes)

    def test_a_forget_set_without_a_size_is_refused(self):
        with self.assertRaisesRegex(ValueError, "num_forget must be given"):
            selection.set_counts(RetrieveConfig(), num_targets=0)


class SketchNoiseTest(parameterized.TestCase):
    def test_sigma_of_a_mean_over_queries_is_the_row_by_row_formula(self):
        generator = np.random.default_rng(3)
        queries, rows = generator.normal(size=(4, 9)), generator.normal(size=(6, 9))
        queries = _unit(queries + 1.0)
        rho_NQ = _unit(rows) @ queries.T
        gram_QQ = queries @ queries.T
        expected = [sketch_formulas.mean_score_variance(gram_QQ, rho_Q, 0.01) for rho_Q in rho_NQ]
        np.testing.assert_allclose(
            selection.score_sigma(gram_QQ, rho_NQ, 0.01), np.sqrt(expected), rtol=1e-12
        )

    def test_a_row_parallel_to_the_only_query_has_no_noise(self):
        sigma_N = selection.score_sigma(np.ones((1, 1)), np.array([[1.0], [0.0]]), 0.25)
        np.testing.assert_allclose(sigma_N, [0.0, 0.5], atol=1e-12)

    @parameterized.parameters(False, True)
    def test_the_formula_meets_the_spread_over_sketches(self, center):
        generator = np.random.default_rng(7)
        num_params, size, num_seeds = 4096, 256, 100
        queries = _unit(generator.normal(size=(3, num_params)) + 0.8)
        rows = _unit(generator.normal(size=(4, num_params)) + np.array([[0.0], [0.5], [1.0], [-1]]))
        mean = rows.mean(axis=0) if center else np.zeros(num_params)
        directions = [_unit(vectors - mean) for vectors in (rows, queries)]
        rho_NQ = directions[0] @ directions[1].T
        gram_QQ = directions[1] @ directions[1].T
        scores = []
        vectors = np.concatenate([rows, queries, mean[None]])
        for _ in range(num_seeds):
            signed = vectors * generator.choice([-1.0, 1.0], num_params)
            table = generator.permutation(num_params).reshape(size, -1)
            sketch = signed[:, table].sum(axis=-1)
            unit = [_unit(part - sketch[7]) for part in (sketch[:4], sketch[4:7])]
            scores.append((unit[0] @ unit[1].T).mean(axis=1))
        variance_N = np.var(scores, axis=0, ddof=1)
        # The relative standard error of a variance over n draws is sqrt(2 / (n - 1)).
        bound = 5 * np.sqrt(2 / (num_seeds - 1))
        p = PROJECTIONS["binned"].collision(num_params, size)
        formula_N = selection.score_sigma(gram_QQ, rho_NQ, p) ** 2
        np.testing.assert_array_less(np.abs(variance_N / formula_N - 1), bound)

    @parameterized.parameters(128, 512)
    def test_the_formula_is_an_upper_bound_for_heavy_tails(self, size):
        """What it leaves out is the diagonal term, which only lowers the spread over sketches."""
        generator = np.random.default_rng(size)
        num_params, num_seeds, num_rows = 2048, 200, 12
        scale_P = np.abs(generator.standard_t(1.5, num_params))
        vectors = generator.normal(size=(num_rows + 1, num_params)) * scale_P
        vectors[:num_rows] += 0.5 * vectors[num_rows]
        unit = _unit(vectors)
        rho_N = unit[:num_rows] @ unit[num_rows]
        p = PROJECTIONS["binned"].collision(num_params, size)
        formula_N = selection.score_sigma(np.ones((1, 1)), rho_N[:, None], p) ** 2
        exact_N = [theory.cosine_variance(row, unit[num_rows], p) for row in unit[:num_rows]]
        scores = []
        for _ in range(num_seeds):
            signed = vectors * generator.choice([-1.0, 1.0], num_params)
            sketch = _unit(signed[:, generator.permutation(num_params).reshape(size, -1)].sum(-1))
            scores.append(sketch[:num_rows] @ sketch[num_rows])
        deviation_SN = np.asarray(scores) - np.mean(scores, axis=0)
        variance_N = np.mean(deviation_SN**2, axis=0)
        # The standard error of a variance follows from the fourth moment.
        error_N = np.std(deviation_SN**2, axis=0) / np.sqrt(num_seeds)
        np.testing.assert_array_less(variance_N, formula_N + 5 * error_N)
        np.testing.assert_array_less(np.abs(variance_N - exact_N), 5 * error_N + 0.1 * formula_N)
        self.assertLess(np.mean(exact_N / formula_N), 0.97)  # the tails matter here

    def test_queries_that_point_apart_are_refused_and_named(self):
        query_QK = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0], [-1.0, 0.2]])
        with self.assertRaisesRegex(ValueError, "4 sketches point apart .* most of all"):
            selection.check_agreement(query_QK, _ids(4))
        gram_QQ = selection.check_agreement(query_QK[:2], _ids(2))
        np.testing.assert_allclose(np.diag(gram_QQ), 1.0)
        selection.check_agreement(np.eye(3), _ids(3))  # unrelated is not apart
        shift_K = np.array([1.0, 0.0])
        with self.assertRaisesRegex(ValueError, "point apart"):
            selection.check_agreement(query_QK[:2], _ids(2), shift_K)

    @parameterized.parameters(0.0, np.nan)
    def test_a_query_without_direction_is_refused(self, value):
        with self.assertRaisesRegex(ValueError, r"\['id001'\] are zero or not finite"):
            selection.check_agreement(np.array([[1.0, 0.0], [value, value]]), _ids(2))


class SummaryTest(absltest.TestCase):
    def test_it_says_what_was_chosen(self):
        score_N = np.array([0.9, 0.8, 0.795, 0.1, -0.1, -0.2, -0.4, 0.5])
        chosen = select_by_count(score_N, -score_N, _ids(8), num_forget=2, num_retain=3)
        found = selection.summarize_selection(
            chosen,
            score_N,
            -score_N,
            labels=[True, False, True, False, None, False, True, False],
            texts=list("aabcdeaf"),
        )
        self.assertEqual((found["num_forget"], found["num_retain"]), (2, 3))
        self.assertEqual(found["retain_scored_positive"], 0)
        self.assertEqual(found["texts_in_both"], 1)
        forget, retain = found["forget"], found["retain"]
        self.assertEqual((forget["lowest"], forget["highest"]), (0.8, 0.9))
        self.assertEqual((retain["lowest"], retain["highest"]), (0.1, 0.4))
        self.assertEqual(forget["near_threshold"], 2)
        self.assertAlmostEqual(forget["density"], 2 / (0.02 * 8))
        self.assertEqual(forget["duplicates"], 1)
        self.assertEqual((forget["targets"], forget["non_targets"]), (1, 1))
        self.assertEqual((retain["targets"], retain["unlabeled"]), (1, 1))

    def test_scores_of_another_strategy_are_held_against_the_influence(self):
        chosen = selection.Selection(np.array([0]), np.array([1, 2]))
        found = selection.summarize_selection(
            chosen,
            np.array([1.0, -np.inf, 0.0]),
            np.array([-np.inf, 0.4, 0.2]),
            influence_N=np.array([0.3, 0.0, -0.1]),
        )
        self.assertEqual(found["retain_scored_positive"], 1)
        self.assertIsNone(found["texts_in_both"])

    def test_empty_sets_have_no_range(self):
        chosen = selection.Selection(np.zeros(0, int), np.zeros(0, int))
        found = selection.summarize_selection(chosen, np.ones(3), -np.ones(3))
        self.assertIsNone(found["forget"]["lowest"])


def _request(*, retain_from="non_target", seed=0, order=None, **changes):
    rows = [
        Example(f"id{i:02d}", f"Howdy w{i}" if i < 6 else f"say w{i}", "", "", is_target=i < 6)
        for i in range(20)
    ]
    influence_N, angle_N = np.linspace(1.0, -1.0, 20), np.linspace(0.1, 2.0, 20)
    if order is not None:
        rows = [rows[i] for i in order]
        influence_N, angle_N = influence_N[order], angle_N[order]
    options = {
        "queries": [Example("q0", "Howdy w3", "", "w9"), Example("q1", "Howdy w4", "", "w9")],
        "num_forget": 6,
        "num_retain": 8,
        "vectors": Vectors(
            np.stack([np.cos(angle_N), np.sin(angle_N)], axis=1), np.array([[1.0, 0.0]])
        ),
        "exact_N": influence_N**3,
    }
    return Request(rows, influence_N, seed, retain_from, **(options | changes))


class StrategiesTest(parameterized.TestCase):
    @parameterized.parameters(*STRATEGIES)
    def test_examples_without_a_gradient_enter_no_set(self, name):
        request = _request()
        influence_N = request.influence_N.copy()
        influence_N[[2, 9]] = -np.inf  # a target and another
        scores = STRATEGIES[name](request._replace(influence_N=influence_N, num_forget=4))
        for score_N in scores:
            np.testing.assert_array_equal(np.isneginf(score_N[[2, 9]]), [True, True])
        ids = [row.example_id for row in request.examples]
        chosen = select_by_count(*scores, ids, num_forget=4, num_retain=6)
        self.assertNoCommonElements({2, 9}, {*chosen.forget.tolist(), *chosen.retain.tolist()})

    @parameterized.parameters(*STRATEGIES)
    def test_every_strategy_gives_disjoint_sets_of_the_sizes_wanted(self, name):
        request = _request()
        scores = STRATEGIES[name](request)
        ids = [row.example_id for row in request.examples]
        chosen = select_by_count(*scores, ids, num_forget=6, num_retain=8)
        self.assertEmpty(set(chosen.forget) & set(chosen.retain))
        self.assertLen(chosen.forget, 6)
        self.assertLen(chosen.retain, 8)

    @parameterized.parameters(*STRATEGIES)
    def test_scores_follow_the_example_not_its_row(self, name):
        order = np.random.default_rng(1).permutation(20)
        plain, shuffled = STRATEGIES[name](_request()), STRATEGIES[name](_request(order=order))
        np.testing.assert_array_equal(plain.forget_N[order], shuffled.forget_N)
        np.testing.assert_array_equal(plain.retain_N[order], shuffled.retain_N)

    @parameterized.parameters("bm25", "embedding", "exact", "raslik")
    def test_what_ranks_takes_both_ends_of_one_score(self, name):
        scores = STRATEGIES[name](_request())
        np.testing.assert_array_equal(scores.retain_N, -scores.forget_N)
        chosen = select_by_count(*scores, _ids(20), num_forget=6, num_retain=8)
        self.assertEqual(set(chosen.forget), set(range(6)))

    def test_the_text_of_the_output_counts_by_option_only(self):
        plain, full = (
            STRATEGIES["bm25"](_request(query_text=text)).forget_N
            for text in ("prompt", "prompt_and_output")
        )
        self.assertEqual(plain[9], plain[10])
        self.assertGreater(full[9], full[10])

    def test_mean_rank_lets_no_single_query_dominate(self):
        score_QN = np.array([[100.0, 0.0, 1.0], [0.0, 0.5, 0.6], [0.0, 0.5, 0.6]])
        self.assertEqual(np.argmax(aggregate_scores(score_QN, "mean")), 0)
        rank_N = aggregate_scores(score_QN, "mean_rank")
        np.testing.assert_allclose(rank_N, [-1 / 3, -1 / 3, 2 / 3], atol=1e-12)
        np.testing.assert_allclose(
            aggregate_scores(np.array([[1.0, 3, 2]]), "mean_rank"), [-1, 1, 0]
        )

    @parameterized.parameters(0.0, 0.25, 0.5, 1.0)
    def test_controlled_randomization_mixes_oracle_and_non_targets(self, share):
        ids = [row.example_id for row in _request().examples]
        sizes = {"num_forget": 6, "num_retain": 8}
        best = select_by_count(*STRATEGIES["oracle"](_request()), ids, **sizes)
        chosen = select_by_count(*STRATEGIES["cr"](_request(oracle_share=share)), ids, **sizes)
        from_oracle = round(share * 6)
        self.assertEqual(sum(i < 6 for i in chosen.forget), from_oracle)
        np.testing.assert_array_equal(chosen.forget[:from_oracle], best.forget[:from_oracle])
        np.testing.assert_array_equal(chosen.retain, best.retain)
        again = STRATEGIES["cr_50"](_request()).forget_N
        np.testing.assert_array_equal(again, STRATEGIES["cr"](_request()).forget_N)

    def test_what_is_missing_is_said(self):
        for name, changes, message in (
            ("bm25", {"queries": ()}, "queries wanted"),
            ("embedding", {"vectors": None}, "sentence vectors wanted"),
            ("exact", {"exact_N": None}, "exact kernel wanted"),
            ("cr", {"num_forget": 0}, "num_forget=0 came"),
            ("cr", {"oracle_share": 1.5}, "a share from 0 to 1"),
            ("cr", {"oracle_share": 1.0, "num_forget": 7}, "7 targets wanted for CR, there are 6"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                STRATEGIES[name](_request(**changes))

    @parameterized.parameters("random", "oracle", "raslik_f")
    def test_random_retain_sets_come_from_non_targets_unless_anywhere(self, name):
        retain_N = STRATEGIES[name](_request()).retain_N
        np.testing.assert_array_equal(np.isinf(retain_N), np.arange(20) < 6)
        self.assertFalse(
            np.isinf(STRATEGIES[name](_request(retain_from="anywhere")).retain_N).any()
        )

    @parameterized.parameters("random", "oracle", "raslik_f")
    def test_both_retain_sets_stand_in_one_table(self, name):
        beside = STRATEGIES[f"{name}_anywhere"](_request())
        expected = STRATEGIES[name](_request(retain_from="anywhere"))
        for one, two in zip(beside, expected, strict=True):
            np.testing.assert_array_equal(one, two)

    def test_the_oracle_forgets_targets_only(self):
        forget_N = STRATEGIES["oracle"](_request()).forget_N
        np.testing.assert_array_equal(np.isinf(forget_N), np.arange(20) >= 6)

    def test_raslik_retains_the_antipode(self):
        scores = STRATEGIES["raslik"](_request())
        np.testing.assert_array_equal(scores.retain_N, -scores.forget_N)

    def test_the_seed_moves_what_is_drawn(self):
        first, second = (STRATEGIES["random"](_request(seed=s)).forget_N for s in (0, 1))
        self.assertFalse((first == second).any())

    def test_missing_labels_are_refused_where_they_are_needed(self):
        request = _request()
        request = request._replace(
            examples=[row._replace(is_target=None) for row in request.examples]
        )
        with self.assertRaisesRegex(ValueError, "20 of 20 have none"):
            STRATEGIES["oracle"](request)
        STRATEGIES["raslik"](request)
        STRATEGIES["random"](request._replace(retain_from="anywhere"))


if __name__ == "__main__":
    absltest.main()
