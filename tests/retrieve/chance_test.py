"""The chance of a score: p-values, their correction, and what is told of them."""

import numpy as np
from absl.testing import absltest, parameterized

from raslik_jax.retrieve import chance


def _unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


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

    @parameterized.parameters(1.0, 6.0)
    def test_they_are_uniform_where_prompt_and_rows_have_nothing_in_common(self, shared):
        """Also where all share some directions; related prompts are looked for and left out."""
        generator = np.random.default_rng(1)
        scale = np.where(np.arange(64) < 4, shared, 1.0)
        p, q = [], []
        for _ in range(40):
            rows, queries = (_unit(generator.normal(size=(n, 64)) * scale) for n in (400, 1))
            drawn = np.arange(0, 400, 2)
            null_NM, score_N = rows @ rows[drawn].T, rows @ queries[0]
            null_NM[drawn, np.arange(200)] = np.nan
            is_related_M = chance.related_prompts(score_N, drawn)
            found = chance.compare(score_N, null_NM[:, ~is_related_M])
            p.append(found.p_N)
            q.append(found.q_N)
        # Rows of one prompt share it, so a prompt counts as one draw: shares of 40 vary so much.
        for level in (0.02, 0.1, 0.5):
            each = (np.array(p) <= level).mean(axis=1)
            error = each.std(ddof=1) / np.sqrt(len(each))
            self.assertAlmostEqual(each.mean(), level, delta=5 * error + 1 / 201)
        # A false find in more than a twentieth of prompts: 5 standard errors above it.
        wrong = (np.array(q) <= 0.05).any(axis=1).mean()
        self.assertLessEqual(wrong, 0.05 + 5 * np.sqrt(0.05 * 0.95 / 40))

    def test_they_are_uniform_in_a_small_corpus_whose_mean_the_prompts_have_a_part_in(self):
        generator = np.random.default_rng(4)
        p, q = [], []
        for _ in range(100):
            rows, queries = (_unit(0.05 + generator.normal(size=(n, 500))) for n in (30, 1))
            mean = rows.mean(axis=0)
            row_NK, query_K = _unit(rows - mean), _unit(queries - mean)[0]
            null_NM = chance.without_own_share(row_NK @ row_NK.T, 30)
            np.fill_diagonal(null_NM, np.nan)
            found = chance.compare(row_NK @ query_K, null_NM)
            p.append(found.p_N)
            q.append(found.q_N)
        for level in (0.1, 0.5):
            each = (np.array(p) <= level).mean(axis=1)
            error = each.std(ddof=1) / np.sqrt(len(each))
            self.assertAlmostEqual(each.mean(), level, delta=5 * error + 1 / 30)
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
        rows = _unit(generator.normal(size=(600, 256)))
        behavior = _unit(generator.normal(size=256))
        rows[:60] = _unit(rows[:60] + behavior)
        drawn = np.arange(0, 600, 3)
        query = _unit(_unit(generator.normal(size=256)) + behavior)  # one like them
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


class TellingTest(parameterized.TestCase):
    def _chance(self, q_N):
        q_N = np.array(q_N)
        return chance.Chance(0 * q_N, 0 * q_N + 231, 0 * q_N + 0.01, q_N)

    @parameterized.parameters(
        ([0.01, 0.04, 0.2], "2 rows have q <= 0.05, about 0.08 of them by chance"),
        ([0.01, 0.5], "1 row has q <= 0.05, about 0.01 of them by chance"),
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


if __name__ == "__main__":
    absltest.main()
