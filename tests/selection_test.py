"""The antipodal selector and the strategies: sizes, disjointness, ties, errors."""

import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st

from raslik_jax.data.examples import Example
from raslik_jax.retrieval.selection import select_by_count
from raslik_jax.retrieval.strategies import STRATEGIES, Request

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


def _request(*, retain_from="non_target", seed=0, order=None):
    rows = [Example(f"id{i:02d}", "", "", "", is_target=i < 6) for i in range(20)]
    influence_N = np.linspace(1.0, -1.0, 20)
    if order is not None:
        rows, influence_N = [rows[i] for i in order], influence_N[order]
    return Request(rows, influence_N, seed, retain_from)


class StrategiesTest(parameterized.TestCase):
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

    @parameterized.parameters("random", "oracle", "raslik_f")
    def test_random_retain_sets_come_from_non_targets_unless_anywhere(self, name):
        retain_N = STRATEGIES[name](_request()).retain_N
        np.testing.assert_array_equal(np.isinf(retain_N), np.arange(20) < 6)
        self.assertFalse(
            np.isinf(STRATEGIES[name](_request(retain_from="anywhere")).retain_N).any()
        )

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
