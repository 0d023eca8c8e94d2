"""Search: every dtype's scores against exact NumPy, both poles, ties by id, one pass."""

import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from index_cases import IndexCase, correlated_rows
from snapshots import refused

from raslik_jax.index import combine, search
from raslik_jax.index.store import SketchStore

DTYPES = ("float32", "bfloat16")
SIZE = 200


def cosine_twin(rows_NK, query_QK, mean_K=None) -> np.ndarray:
    """The formula of `index.search` in float64, written out."""
    mean_K = np.zeros(query_QK.shape[1]) if mean_K is None else mean_K
    rows_NK, query_QK = np.asarray(rows_NK, np.float64), np.asarray(query_QK, np.float64)
    moved_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True) - mean_K
    moved_NK = rows_NK - mean_K
    product_NQ = moved_NK @ moved_QK.T
    lengths_NQ = np.linalg.norm(moved_NK, axis=1)[:, None] * np.linalg.norm(moved_QK, axis=1)
    return (product_NQ / lengths_NQ).mean(axis=1)


def exact(store: SketchStore, query_QK: np.ndarray, *, center: bool) -> np.ndarray:
    """The scores of the stored rows in float64."""
    stored = np.concatenate([store.read_array("rows", chunk) for chunk in range(store.num_chunks)])
    rows = stored[: store.num_rows].astype(np.float64)
    return cosine_twin(rows, query_QK, rows.mean(axis=0) if center else None)


def ends(score_N, ids, highest, lowest):
    """Ids of both ends of a ranking."""
    poles = (score_N, highest), (combine.opposite(score_N), lowest)
    return tuple(
        tuple(ids[n] for n in combine.best_positions(pole_N, ids, count)) for pole_N, count in poles
    )


def exact_ends(score_N, ids, most, least):
    """Ids of both ends by a plain sort."""
    highest = sorted(range(len(ids)), key=lambda n: (-score_N[n], ids[n]))
    lowest = sorted(range(len(ids)), key=lambda n: (score_N[n], ids[n]))
    return tuple(ids[n] for n in highest[:most]), tuple(ids[n] for n in lowest[:least])


class ScoreTest(IndexCase):
    @parameterized.product(dtype=DTYPES, center=[False, True], num_queries=[1, 3])
    def test_equals_exact_search(self, dtype, center, num_queries):
        rows = correlated_rows(301, SIZE, seed=0)
        store = self.make(rows, dtype=dtype)
        query_QK = 3 * correlated_rows(num_queries, SIZE, seed=1)
        expected = exact(store, query_QK, center=center)
        scores = search.score_store(store, query_QK, center=center)
        np.testing.assert_allclose(scores, expected, atol=2e-6)
        self.assertEqual(ends(scores, store.ids, 40, 25), exact_ends(expected, store.ids, 40, 25))

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_dtypes_err_as_much_as_stated(self, dtype, center):
        size, count = 4096, 300
        random = np.random.default_rng(2)
        rows = random.standard_normal((count, size))
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        query_QK = random.standard_normal((1, size))
        fine = search.score_store(self.make(rows), query_QK, center=center)
        store = self.make(rows, dtype=dtype)
        coarse = search.score_store(store, query_QK, center=center)
        stated = 1e-7 if dtype == "float32" else 1.6e-3 / np.sqrt(size)
        ratio = np.sqrt(np.mean(((coarse - fine) / stated) ** 2))
        bound = 5 / np.sqrt(2 * count)  # of a root mean square, relative
        self.assertLess(ratio, 1 + bound)
        if dtype != "float32":
            self.assertGreater(ratio, 1 - bound)

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_equal_scores_go_by_id(self, dtype, center):
        """Duplicates in other chunks and places of a chunk: equal scores, bit for bit."""
        rows = correlated_rows(40, 64, seed=0)
        rows = np.concatenate([rows, rows[::-1], rows])
        ids = [f"{(37 * n) % 120:03d}" for n in range(120)]
        store = self.make(rows, dtype=dtype, ids=ids, chunk_rows=32)
        query_QK = correlated_rows(2, 64, seed=1)
        expected = exact(store, query_QK, center=center).round(9)
        scores = search.score_store(store, query_QK, center=center)
        self.assertEqual(ends(scores, ids, 50, 49), exact_ends(expected, ids, 50, 49))

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_rows_without_a_gradient_are_in_no_ranking(self, dtype, center):
        """Uncentered, their cosine of 0 would be the lowest of rows that all agree."""
        rows = correlated_rows(70, 64, seed=0)
        rows[[0, 69]] = 0
        store = self.make(rows, dtype=dtype)
        query_QK = correlated_rows(2, 64, seed=1)
        for aggregate in ("mean", "common"):
            scores = search.score_store(store, query_QK, center=center, aggregate=aggregate)
            self.assertEqual(np.flatnonzero(np.isneginf(scores)).tolist(), [0, 69])
        both = ends(scores, store.ids, 68, 68)
        self.assertNoCommonElements({store.ids[0], store.ids[69]}, {*both[0], *both[1]})
        plain_N = search.centered_cosine(rows, query_QK)
        self.assertEqual(np.asarray(plain_N)[[0, 69]].tolist(), [0, 0])

    def test_common_weighs_each_querys_scores(self):
        rows, query_QK = correlated_rows(90, 64, seed=0), correlated_rows(3, 64, seed=1)
        store = self.make(rows)
        moved_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True) - store.mean_K
        moved_QK /= np.linalg.norm(moved_QK, axis=1, keepdims=True)
        weight_Q = np.linalg.solve(moved_QK @ moved_QK.T + 0.5 * np.eye(3), np.ones(3))
        each_QN = [search.score_store(store, query[None], center=True) for query in query_QK]
        wanted_N = weight_Q @ each_QN / weight_Q.sum()
        found = search.score_store(store, query_QK, center=True, aggregate="common")
        np.testing.assert_allclose(found, wanted_N, atol=1e-5)

    def test_an_end_of_no_rows_is_empty(self):
        query_QK = correlated_rows(2, 64, seed=1)
        self.assertEqual(ends(np.ones(3), "abc", 0, 0), ((), ()))
        self.assertEqual(
            search.centered_cosine(np.zeros((0, 64), np.float32), query_QK).shape, (0,)
        )

    def test_refuses_what_cannot_be_scored(self):
        store = self.make(correlated_rows(70, 64, seed=0))
        query_QK = correlated_rows(2, 64, seed=1)
        for change in (query_QK * [[1], [0]], query_QK * np.nan, query_QK[:, :5]):
            with refused():
                search.score_store(store, change, center=False)
        pathlib.Path(store.path, "commits/1.json").unlink()
        store = SketchStore.open(store.path)
        with refused():
            search.score_store(store, query_QK, center=False)

    def test_scoring_is_traced_once_for_an_index(self):
        store = self.make(correlated_rows(300, 64, seed=0), chunk_rows=40)
        before = search._jitted_block_scores._cache_size()
        for seed in (1, 2):
            for num_queries in (1, 5):
                query_QK = correlated_rows(num_queries, 64, seed=seed)
                search.score_store(store, query_QK, center=bool(seed - 1))
        self.assertEqual(search._jitted_block_scores._cache_size() - before, 1)


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file and so cannot simply be dropped."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1))


@pytest.mark.heavy
class MemoryTest(IndexCase):
    @parameterized.parameters(*DTYPES)
    def test_rows_are_read_where_they_lie(self, dtype):
        """So an index may be larger than memory: the kernel drops mapped pages as it likes."""
        rows = correlated_rows(64, 65536, seed=0)
        store = self.make(np.concatenate([rows] * 16), dtype=dtype)
        row_bytes = sum(store.read_array("rows", chunk).nbytes for chunk in range(store.num_chunks))
        query_QK = correlated_rows(1, 65536, seed=1)
        search.score_store(store, query_QK, center=True)  # compiles, computes the mean
        store = SketchStore.open(store.path)
        _ = store.mean_K
        before, peak, done = anonymous_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, anonymous_bytes())
                if done.wait(0.001):
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        search.score_store(store, query_QK, center=True)
        done.set()
        watcher.join()
        self.assertGreater(peak, 0)
        self.assertLess(peak - before, row_bytes / 4)


class CenteredCosineTest(parameterized.TestCase):
    @parameterized.product(dtype=["float32", "bfloat16"], center=[False, True])
    def test_equals_float64(self, dtype, center):
        rows = jnp.asarray(correlated_rows(50, SIZE, seed=0), dtype)
        query_QK = 2 * correlated_rows(4, SIZE, seed=1)
        mean_K = np.asarray(rows, np.float64).mean(axis=0) if center else None
        # Lengths of the rows as they are, rounded ones included.
        lengths = np.linalg.norm(np.asarray(rows, np.float64), axis=1)
        self.assertLess(np.abs(lengths - 1).max(), 1e-2)
        expected = cosine_twin(np.asarray(rows, np.float32), query_QK, mean_K)
        found = search.centered_cosine(rows, query_QK, mean_K)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        with jax.disable_jit():
            found = search.centered_cosine(rows, query_QK, mean_K)
        np.testing.assert_allclose(found, expected, atol=2e-6)

    def test_a_row_equal_to_the_mean_scores_zero(self):
        rows = correlated_rows(3, 64, seed=0)
        self.assertEqual(float(search.centered_cosine(rows, rows[1:], rows[0])[0]), 0.0)

    def test_rows_that_are_not_finite_score_nan(self):
        rows = np.array(correlated_rows(4, 64, seed=0))
        rows[1, 3], rows[2, 5], rows[3] = np.nan, -np.inf, 0
        for mean_K in (None, rows[0] / 2):
            found = np.asarray(search.centered_cosine(rows, rows[:1], mean_K))
            self.assertEqual(np.isnan(found).tolist(), [False, True, True, False])
            self.assertEqual(found[3], 0)
            large = search.centered_cosine(1e20 * rows[:1], rows[:1], mean_K)
            self.assertTrue(np.isnan(large[0]))
        found = search.centered_cosine(rows[::3], rows[:1], rows.mean(axis=0))
        self.assertTrue(np.isnan(found[0]))
        found = search.centered_cosine(rows[::3].astype(np.float16), rows[:1])
        np.testing.assert_allclose(found, [1, 0], atol=1e-3)
        with self.assertRaisesRegex(ValueError, r"queries must be \[Q, K\] with one or more"):
            search.centered_cosine(rows, rows[:0])

    def test_the_opposite_query_has_the_negated_scores(self):
        rows, query_QK = correlated_rows(30, 64, seed=0), correlated_rows(2, 64, seed=1)
        plus, minus = (search.centered_cosine(rows, sign * query_QK) for sign in (1, -1))
        np.testing.assert_array_equal(plus, -minus)

    def test_a_query_may_differ_from_the_dtype_of_the_rows(self):
        """The fine term of a query survives the compiler: an error of 2^-9 would show."""
        rows = jnp.asarray(np.eye(8, dtype=np.float32), jnp.bfloat16)
        query_QK = np.full((1, 8), 1.001, np.float32)
        query_QK[0, 0] = 1.002
        expected = query_QK[0] / np.linalg.norm(query_QK)
        np.testing.assert_allclose(search.centered_cosine(rows, query_QK), expected, rtol=2e-5)
        self.assertEqual(rows.dtype, ml_dtypes.bfloat16)


def test_near_duplicates_count_as_the_first_of_them():
    first_MK = np.eye(4, 32)
    near = 0.1 * np.random.default_rng(0).normal(size=(6, 32)) / np.sqrt(32)
    rows_NK = np.concatenate([first_MK[[0, 0, 1, 0, 2, 1]] + near, first_MK[3:]])
    rows = search.center_queries(rows_NK)
    assert search.distinct_rows(rows, 3) == [0, 2, 4]
    assert search.distinct_rows(rows, 9) == [0, 2, 4, 6]
    best = np.array([0, 2, 4])
    cosine_NM = rows.direction_QK @ rows.direction_QK[best].T
    assert search.group_rows(cosine_NM, best) == [[1, 3], [5], []]
