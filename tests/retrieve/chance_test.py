"""The chance of a score: p-values, their correction, and what is told of them."""

import numpy as np
from absl.testing import parameterized
from index_cases import unit

from raslik_jax.index.combine import directions, query_weights
from raslik_jax.retrieve import chance


def _null(row_NK, drawn, center):
    """Returns the scores of rows with the rows that stand for prompts, as a run stores them."""
    null_NM = row_NK @ row_NK[drawn].T
    null_NM = chance.without_own_share(null_NM, len(row_NK)) if center else null_NM
    null_NM[drawn, np.arange(len(drawn))] = np.nan
    return null_NM


def _shares(p, level):
    """Returns the share of rows with a p of at most a level, and its standard error."""
    each = (np.array(p) <= level).mean(axis=1)
    return each.mean(), each.std(ddof=1) / np.sqrt(len(each))


class PValuesTest(parameterized.TestCase):
    def test_they_count_the_prompts_that_score_a_row_as_high(self):
        generator = np.random.default_rng(0)
        score_N, null_NM = generator.normal(size=30), generator.normal(size=(30, 40))
        null_NM[3, 5] = score_N[3]  # a tie is as high
        null_NM[7, 7] = np.nan  # the prompt is the row's own
        score_N[9] = -np.inf
        found = chance.compare(score_N, null_NM)
        for row in range(30):
            if row == 9:
                self.assertTrue(all(np.isnan(part[row]) for part in found))
                continue
            others = [value for value in null_NM[row].tolist() if value == value]
            higher = sum(value >= score_N[row] for value in others)
            told = [part[row] for part in found[:3]]
            self.assertEqual(told, [higher, len(others), (1 + higher) / (1 + len(others))])

    def test_they_are_uniform_in_a_small_corpus_whose_mean_the_prompts_have_a_part_in(self):
        generator = np.random.default_rng(4)
        p, q = [], []
        for _ in range(100):
            rows, queries = (unit(0.05 + generator.normal(size=(n, 500))) for n in (30, 1))
            mean = rows.mean(axis=0)
            row_NK, query_K = unit(rows - mean), unit(queries - mean)[0]
            null_NM = chance.without_own_share(row_NK @ row_NK.T, 30)
            np.fill_diagonal(null_NM, np.nan)
            found = chance.compare(row_NK @ query_K, null_NM)
            p.append(found.p_N)
            q.append(found.q_N)
        for level in (0.1, 0.5):
            share, error = _shares(p, level)
            self.assertAlmostEqual(share, level, delta=5 * error + 1 / 30)
        self.assertLessEqual((np.array(q) <= 0.05).any(axis=1).mean(), 0.05)

    def test_q_is_the_smallest_level_at_which_the_step_up_procedure_finds_a_row(self):
        p_N = np.array([0.001, 0.04, 0.012, 0.5, 0.03, 0.012])
        q_N = chance.adjust(p_N)
        for row, q in enumerate(q_N):
            for level, is_found in ((q + 1e-9, True), (q - 1e-9, False)):
                below = [k for k in range(1, 7) if np.sort(p_N)[k - 1] <= level * k / 6]
                self.assertEqual(bool(below) and row in np.argsort(p_N)[: max(below)], is_found)

    def test_planted_rows_are_found_and_no_others(self):
        generator = np.random.default_rng(2)
        rows = unit(generator.normal(size=(600, 256)))
        behavior = unit(generator.normal(size=256))
        rows[:60] = unit(rows[:60] + behavior)
        drawn = np.arange(0, 600, 3)
        query = unit(unit(generator.normal(size=256)) + behavior)  # one like them
        null_NM, score_N = rows @ rows[drawn].T, rows @ query
        null_NM[drawn, np.arange(200)] = np.nan
        is_related_M = chance.related_prompts(score_N, drawn)
        self.assertEqual(np.flatnonzero(is_related_M).tolist(), [*range(20)])
        found = chance.compare(score_N, null_NM[:, ~is_related_M])
        finds = chance.count_finds(found)
        hit = np.flatnonzero(found.q_N <= 0.05)
        self.assertLen(hit, finds.found)
        self.assertLessEqual(finds.expected, 0.05 * finds.found)
        self.assertGreaterEqual(np.isin(hit, np.arange(60)).mean(), 0.9)
        self.assertGreaterEqual(len(hit), 55)
        # Without leaving them out, the behavior's own prompts hide it.
        blind = chance.compare(score_N, null_NM)
        self.assertLess(found.p_N[:60].mean(), 0.01)
        self.assertGreater(blind.p_N[:60].mean(), 0.02)

    def test_a_block_of_rows_changes_nothing(self):
        generator = np.random.default_rng(3)
        score_N, null_NM = generator.normal(size=50), generator.normal(size=(50, 20))
        whole = chance.compare(score_N, null_NM)
        rows, chance._BLOCK_ROWS = chance._BLOCK_ROWS, 7
        self.addCleanup(setattr, chance, "_BLOCK_ROWS", rows)
        for one, other in zip(whole, chance.compare(score_N, null_NM), strict=True):
            np.testing.assert_array_equal(one, other)


class GroupsTest(parameterized.TestCase):
    """Several queries compare with groups of as many prompts."""

    def _p(self, seed, size, num, center, aggregate, *, length):
        """Returns p and q of rows that share a mean, with queries of one length."""
        generator, (number, width) = np.random.default_rng(seed), size
        mean_K, long_K = unit(generator.normal(size=(2, width))) * ((0.8,), (length,))
        lengths = np.append(generator.normal(size=number), np.ones(num))
        noise = generator.normal(size=(number + num, width)) / np.sqrt(width)
        every = unit(noise + mean_K + lengths[:, None] * long_K)
        center_K = every[:number].mean(axis=0) if center else None
        row_NK, query_QK = (directions(part, center_K) for part in (every[:number], every[number:]))
        gram_QQ, drawn = query_QK @ query_QK.T, np.arange(0, number, 2)
        score_N = row_NK @ (query_weights(gram_QQ, aggregate) @ query_QK)
        null_NG = chance.group_prompts(
            _null(row_NK, drawn, center), drawn, gram_QQ, aggregate, seed=seed
        )
        found = chance.compare(score_N / chance.direction_length(gram_QQ, aggregate), null_NG)
        return found.p_N, found.q_N

    @parameterized.product(
        size=((240, 128), (400, 256)),
        asked=((1, "mean"), (4, "mean"), (8, "common"), (24, "mean")),
        center=(True, False),
    )
    def test_p_is_uniform_and_q_is_safe_with_a_direction_that_all_share(self, size, asked, center):
        num, aggregate = asked
        found = [self._p(n, size, num, center, aggregate, length=0.0) for n in range(10)]
        p, q = zip(*found, strict=True)
        for level in (0.05, 0.2, 0.5):
            share, error = _shares(p, level)
            # Some of the rows are off together: at most so many in a half.
            self.assertAlmostEqual(share, level, delta=5 * error + 2 / (size[0] / 2 + 1))
        wrong = (np.array(q) <= 0.05).any(axis=1).mean()
        self.assertLessEqual(wrong, 0.05 + 5 * np.sqrt(0.05 * 0.95 / len(q)))

    @parameterized.product(size=((240, 128), (400, 256)), num=(4, 24), center=(True, False))
    def test_queries_of_one_length_compare_with_prompts_of_one_length(self, size, num, center):
        found = [self._p(n, size, num, center, "mean", length=0.25) for n in range(10)]
        p, q = zip(*found, strict=True)
        for level in (0.01, 0.05):
            share, error = _shares(p, level)
            self.assertLessEqual(share, level + 5 * error + 2 / (size[0] / 2 + 1))
        self.assertGreater(share, level / 4)
        wrong = (np.array(q) <= 0.05).any(axis=1).mean()
        self.assertLessEqual(wrong, 0.05 + 5 * np.sqrt(0.05 * 0.95 / len(q)))

    def test_a_group_is_the_direction_of_its_prompts_without_the_row_itself(self):
        generator = np.random.default_rng(5)
        row_NK, drawn = unit(generator.normal(size=(30, 16)) + 1), np.arange(0, 30, 2)
        gram_QQ = np.ones((3, 3))  # no group is as alike: each has the nearest two
        score_NG = chance.group_prompts(_null(row_NK, drawn, False), drawn, gram_QQ, "mean", seed=0)
        spread = np.sqrt((15 + 3) * 14 / (16 * 12))
        expected_NG = np.empty((30, 15))
        for group, first in enumerate(drawn):
            near = drawn[np.argsort(-row_NK[drawn] @ row_NK[first])[:3]]
            for row in range(30):
                expected_NG[row, group] = row_NK[row] @ unit(row_NK[near[near != row]].sum(axis=0))
        mean_N1 = expected_NG.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(score_NG, mean_N1 + spread * (expected_NG - mean_N1), atol=1e-12)

    def test_a_copy_of_a_prompt_is_left_out_like_its_row(self):
        row_NK, drawn = (
            unit(np.random.default_rng(5).normal(size=(30, 16)) + 1),
            np.arange(0, 30, 2),
        )
        both_NK = np.concatenate([row_NK, row_NK[:1]])
        null_NM = _null(both_NK, drawn, False)
        null_NM[30, 0] = np.nan
        score_NG = chance.group_prompts(null_NM, drawn, np.ones((3, 3)), "mean", seed=0)
        np.testing.assert_allclose(score_NG[30], score_NG[0], atol=1e-12)

    def test_one_query_compares_with_the_prompts_and_too_many_with_nothing(self):
        drawn, row_NK = np.arange(40), unit(np.random.default_rng(6).normal(size=(40, 8)))
        null_NM = _null(row_NK, drawn, False)
        how = {"aggregate": "mean", "seed": 0}
        np.testing.assert_array_equal(
            chance.group_prompts(null_NM, drawn, np.ones((1, 1)), **how), null_NM
        )
        self.assertEqual(chance.group_prompts(null_NM, drawn, np.eye(10), **how).shape, (40, 40))
        none = chance.group_prompts(null_NM, drawn, np.eye(11), **how)
        self.assertEqual(none.shape, (40, 0))
        self.assertTrue(np.isnan(chance.compare(np.zeros(40), none).q_N).all())


class TellingTest(parameterized.TestCase):
    def _chance(self, q_N):
        q_N = np.array(q_N)
        return chance.Chance(0 * q_N, 0 * q_N + 231, 0 * q_N + 0.01, q_N)

    @parameterized.parameters(
        ([0.01, 0.04, 0.2], "2 rows have q <= 0.05. By chance about 0.08 rows would have such a q"),
        ([0.01, 0.5], "1 row has q <= 0.05. By chance about 0.01 rows would have such a q"),
        ([0.3, 0.5], "no row has q <= 0.05 (the lowest is 0.3)"),
    )
    def test_the_sentence_says_how_many_and_how_many_by_chance(self, q_N, expected):
        begins = "compared with 231 unrelated prompts of the training file, "
        self.assertEqual(chance.sentence(self._chance(q_N)), begins + expected)

    def test_nothing_is_said_where_prompts_are_too_few(self):
        few = chance.compare(np.arange(30.0), np.zeros((30, 9)))
        self.assertTrue(np.isnan(np.stack(few)).all())
        self.assertEqual(chance.sentence(few), "")
        self.assertEqual(chance.count_finds(few), (0, 0.0))
