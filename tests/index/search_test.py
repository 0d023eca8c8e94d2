"""Search: every dtype's scores against exact NumPy, both poles, ties by id, one pass."""

import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.stats
from absl.testing import parameterized
from index_cases import IndexCase, correlated_rows
from snapshots import refused

from raslik_jax.index import quantize, search
from raslik_jax.index.store import SketchStore
from raslik_jax.index.upkeep import discard, requantize, verify

DTYPES = ("float32", "bfloat16", "int8", "sign")
SIZE = 200  # no power of two, so that rotated rows are padded


def two_terms(vector: np.ndarray) -> np.ndarray:
    """A vector as the sum of two vectors of 8-bit integers times a scale each."""
    left, terms = vector, []
    for _ in range(2):
        scale = float(np.float32(max(np.abs(left).max(), 1e-30) / 127))
        terms.append(np.rint(left / scale).clip(-127, 127) * scale)
        left = left - terms[-1]
    return sum(terms)


def exact(store: SketchStore, query_QK: np.ndarray, *, center: bool) -> np.ndarray:
    """The scores of each dtype's own definition in float64, one query and row at a time."""
    query_QK = query_QK.astype(np.float64)
    query_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True)
    stored = np.concatenate([store.read_array("rows", chunk) for chunk in range(store.num_chunks)])
    stored = stored[: store.num_rows]
    scores = np.zeros((len(stored), len(query_QK)))
    if store.dtype == "sign":
        center = store.center_K if center else 0.0
        query_bits = quantize.rotate((query_QK - center).astype(np.float32), seed=0) > 0
        row_bits = np.unpackbits(stored, axis=1, bitorder="little").astype(bool)
        for n, q in np.ndindex(scores.shape):
            hamming = np.sum(row_bits[n] != query_bits[q])
            scores[n, q] = np.cos(np.pi * hamming / row_bits.shape[1])
        return scores.mean(axis=1)
    rows = stored.astype(np.float64)
    if store.dtype == "int8":
        rows = (rows.astype(np.float32) * store.column("scales")[:, None]).astype(np.float64)
        query_QK = quantize.rotate(query_QK, seed=0)
    mean = rows.mean(axis=0) if center else np.zeros(rows.shape[1])
    if store.dtype == "int8":
        # The definition has the query, and the mean, in two 8-bit terms.
        mean = quantize.rotate(store.mean_K[None], seed=0)[0] if center else mean
        centered = query_QK - mean
        centered /= np.linalg.norm(centered, axis=1, keepdims=True)
        direction = two_terms(centered.mean(axis=0))
        products = rows @ direction - centered.mean(axis=0) @ mean
        squares = np.sum(rows**2, axis=1) - 2 * rows @ two_terms(mean) + mean @ mean
        return products / np.sqrt(squares)
    for n, q in np.ndindex(scores.shape):
        row, query = rows[n] - mean, query_QK[q] - mean
        scores[n, q] = (row @ query) / (np.linalg.norm(row) * np.linalg.norm(query))
    return scores.mean(axis=1)


def exact_tails(score_N, ids, k_forget, k_retain):
    """Ids of both ends by a plain sort."""
    highest = sorted(range(len(ids)), key=lambda n: (-score_N[n], ids[n]))
    lowest = sorted(range(len(ids)), key=lambda n: (score_N[n], ids[n]))
    return tuple(ids[n] for n in highest[:k_forget]), tuple(ids[n] for n in lowest[:k_retain])


class ScoreTest(IndexCase):
    @parameterized.product(dtype=DTYPES, center=[False, True], num_queries=[1, 3])
    def test_equals_exact_search(self, dtype, center, num_queries):
        rows = correlated_rows(301, SIZE, seed=0)
        store = self.make(rows, dtype=dtype, center=center)
        query_QK = 3 * correlated_rows(num_queries, SIZE, seed=1)
        expected = exact(store, query_QK, center=center)
        scores = search.score_store(store, query_QK, center=center)
        np.testing.assert_allclose(scores, expected, atol=2e-6)
        tails = search.search_store(store, query_QK, center=center, k_forget=40, k_retain=25)
        self.assertEqual(
            (tails.forget_ids, tails.retain_ids), exact_tails(expected, store.ids, 40, 25)
        )
        np.testing.assert_allclose(tails.forget_scores, np.sort(expected)[::-1][:40], atol=2e-6)
        np.testing.assert_allclose(tails.retain_scores, -np.sort(expected)[:25], atol=2e-6)

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_dtypes_err_as_much_as_stated(self, dtype, center):
        size, count = 4096, 300
        random = np.random.default_rng(2)
        rows = random.standard_normal((count, size))
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        query_QK = random.standard_normal((1, size))
        fine = search.score_store(self.make(rows), query_QK, center=center)
        store = self.make(rows, dtype=dtype, center=center)
        coarse = search.score_store(store, query_QK, center=center)
        stated = {
            "float32": np.full(count, 1e-7),
            "bfloat16": np.full(count, 1.6e-3 / np.sqrt(size)),
            "int8": quantize.int8_error(store.column("scales")) if dtype == "int8" else 0,
            "sign": np.sqrt(1 - 4 / np.pi**2) * quantize.sign_error(fine, size=size),
        }[dtype]
        ratio = np.sqrt(np.mean(((coarse - fine) / stated) ** 2))
        bound = 5 / np.sqrt(2 * count)  # of a root mean square, relative
        self.assertLess(ratio, 1 + bound)
        if dtype != "float32":
            self.assertGreater(ratio, 1 - bound)

    def test_signs_without_a_rotation_would_be_biased(self):
        """The case the rotation is for: a few coordinates carry the mass."""
        random = np.random.default_rng(5)
        heavy = np.exp(2.5 * random.standard_normal(1024))
        rows = random.standard_normal((400, 1024)) * heavy
        mixing = random.uniform(0, 1, (400, 1))
        rows = mixing * rows[:1] + (1 - mixing) * rows
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        cosine = rows[1:] @ rows[0]
        raw_share = np.mean((rows[1:] > 0) != (rows[0] > 0), axis=1)
        store = self.make(rows, dtype="sign")
        estimate = search.score_store(store, rows[:1], center=False)[1:]
        angle = np.arccos(cosine)
        slope = np.polyfit(angle, np.arccos(estimate), 1)[0]
        raw_slope = np.polyfit(angle, np.pi * raw_share, 1)[0]
        self.assertLess(abs(slope - 1), 0.03)
        self.assertGreater(abs(raw_slope - 1), 0.1)

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_equal_scores_go_by_id(self, dtype, center):
        """Duplicates in other chunks and places of a chunk: equal scores, bit for bit."""
        rows = correlated_rows(40, 64, seed=0)
        rows = np.concatenate([rows, rows[::-1], rows])
        ids = [f"{(37 * n) % 120:03d}" for n in range(120)]
        store = self.make(rows, dtype=dtype, ids=ids, center=center, chunk_rows=32)
        query_QK = correlated_rows(2, 64, seed=1)
        expected = exact(store, query_QK, center=center).round(9)
        tails = search.search_store(store, query_QK, center=center, k_forget=50, k_retain=49)
        self.assertEqual((tails.forget_ids, tails.retain_ids), exact_tails(expected, ids, 50, 49))

    @parameterized.product(dtype=DTYPES, center=[False, True])
    def test_rows_without_a_gradient_are_in_no_ranking(self, dtype, center):
        """Uncentered, their cosine of 0 would be the lowest of rows that all agree."""
        rows = correlated_rows(70, 64, seed=0)
        rows[[0, 69]] = 0
        store = self.make(rows, dtype=dtype, center=center)
        query_QK = correlated_rows(2, 64, seed=1)
        for aggregate in ("mean", "mean_rank"):
            scores = search.score_store(store, query_QK, center=center, aggregate=aggregate)
            self.assertEqual(np.flatnonzero(np.isneginf(scores)).tolist(), [0, 69])
        tails = search.search_store(store, query_QK, center=center, k_forget=68, k_retain=68)
        self.assertNoCommonElements({store.ids[0], store.ids[69]}, {*tails[0], *tails[2]})
        plain_N = search.centered_cosine(rows, query_QK)
        self.assertEqual(np.asarray(plain_N)[[0, 69]].tolist(), [0, 0])

    def test_mean_rank_averages_each_querys_ranks(self):
        rows = correlated_rows(90, 64, seed=0)
        rows[5] = rows[6]
        store = self.make(rows)
        query_QK = correlated_rows(3, 64, seed=1)
        each = [search.score_store(store, query[None], center=True) for query in query_QK]
        mean_rank = np.mean([scipy.stats.rankdata(-score) for score in each], axis=0)
        scores = search.score_store(store, query_QK, center=True, aggregate="mean_rank")
        np.testing.assert_allclose(scores, 1 - 2 * (mean_rank - 1) / 89, atol=1e-6)
        self.assertEqual(scores[5], scores[6])

    @parameterized.parameters("float32", "sign")
    def test_common_weighs_each_querys_scores(self, dtype):
        rows, query_QK = correlated_rows(90, 64, seed=0), correlated_rows(3, 64, seed=1)
        store = self.make(rows)
        moved_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True) - store.mean_K
        moved_QK /= np.linalg.norm(moved_QK, axis=1, keepdims=True)
        weight_Q = np.linalg.solve(moved_QK @ moved_QK.T + 0.5 * np.eye(3), np.ones(3))
        if dtype == "sign":
            store = requantize(store, f"{self.root}/sign", dtype=dtype, is_centered=True)
        each_QN = [search.score_store(store, query[None], center=True) for query in query_QK]
        wanted_N = weight_Q @ each_QN / weight_Q.sum()
        found = search.score_store(store, query_QK, center=True, aggregate="common")
        np.testing.assert_allclose(found, wanted_N, atol=1e-5)

    @parameterized.parameters(("int8", 100, 2), ("sign", 50, 4))
    def test_a_finer_index_sets_the_candidates_right(self, dtype, wanted, candidates):
        random = np.random.default_rng(0)
        query_QK = random.standard_normal((2, 1024))
        # Rows that lie along the queries to every degree, either way.
        rows = (
            random.standard_normal((600, 1024)) + random.uniform(-0.5, 0.5, (600, 1)) * query_QK[0]
        )
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        fine = self.make(rows)
        coarse = requantize(fine, f"{self.root}/coarse", dtype=dtype, is_centered=dtype == "sign")
        options = {"center": True, "k_forget": wanted, "k_retain": wanted}
        exact_ids = search.search_store(fine, query_QK, **options)
        alone = search.search_store(coarse, query_QK, **options)
        again = search.search_store(coarse, query_QK, finer=fine, candidates=candidates, **options)
        self.assertNotEqual(alone.forget_ids, exact_ids.forget_ids)
        self.assertEqual(again.forget_ids, exact_ids.forget_ids)
        self.assertEqual(again.retain_ids, exact_ids.retain_ids)
        np.testing.assert_allclose(again.forget_scores, exact_ids.forget_scores, atol=1e-6)
        np.testing.assert_allclose(again.retain_scores, exact_ids.retain_scores, atol=1e-6)
        other = self.make(correlated_rows(70, 64, seed=0))
        with self.assertRaisesRegex(ValueError, "must be the source of"):
            search.search_store(coarse, query_QK, finer=other, **options)

    def test_a_finer_index_has_the_same_rows_in_a_finer_dtype(self):
        rows, query_QK = correlated_rows(20, 64, seed=0), correlated_rows(1, 64, seed=1)
        fine = self.make(rows)
        coarse = requantize(fine, f"{self.root}/coarse", dtype="int8")
        signs = requantize(fine, f"{self.root}/signs", dtype="sign")

        def found(store, finer):
            how = {"center": False, "k_forget": 19, "k_retain": 0}
            tails = search.search_store(store, query_QK, finer=finer, **how)
            return {*tails.forget_ids}

        for store, finer in ((coarse, signs), (coarse, coarse), (fine, coarse)):
            with refused():
                found(store, finer)
        less = self.make(rows[:19], ids=fine.ids[:19])
        with refused():
            found(coarse, less)

    def test_an_end_of_no_rows_is_empty(self):
        fine = self.make(correlated_rows(70, 64, seed=0))
        coarse = requantize(fine, f"{self.root}/coarse", dtype="int8")
        query_QK = correlated_rows(2, 64, seed=1)
        both = search.search_store(
            coarse, query_QK, center=True, k_forget=3, k_retain=2, finer=fine
        )
        for counts, expected in (((3, 0), both[:2]), ((0, 2), both[2:])):
            sizes = dict(zip(("k_forget", "k_retain"), counts, strict=True))
            tails = search.search_store(coarse, query_QK, center=True, finer=fine, **sizes)
            full, empty = (tails[:2], tails[2:]) if counts[0] else (tails[2:], tails[:2])
            self.assertEqual(full[0], expected[0])
            np.testing.assert_array_equal(full[1], expected[1])
            self.assertEqual((empty[0], empty[1].shape), ((), (0,)))
        self.assertEqual(
            search.centered_cosine(np.zeros((0, 64), np.float32), query_QK).shape, (0,)
        )

    @parameterized.parameters("int8", "sign", "bfloat16")
    def test_requantizing_equals_writing_at_once(self, dtype):
        rows = correlated_rows(100, 64, seed=0)
        fine = self.make(rows)
        coarse = requantize(fine, f"{self.root}/coarse", dtype=dtype, chunk_rows=32)
        at_once = self.make(rows, dtype=dtype)
        self.assertEqual(coarse.ids, at_once.ids)
        np.testing.assert_allclose(coarse.rows(range(100)), at_once.rows(range(100)), atol=1e-3)
        np.testing.assert_array_equal(coarse.column("norms"), at_once.column("norms"))
        self.assertEqual(verify(coarse), ())

    @parameterized.parameters(
        *(("sign", "sign"), ("sign", "float32"), ("int8", "bfloat16"), ("int8", "int8")),
        ("float32", "float32"),
    )
    def test_a_copy_that_is_not_coarser_is_refused(self, dtype, wanted):
        """It would claim a precision, or of centered signs a meaning, that its rows lack."""
        source = self.make(correlated_rows(10, 64, seed=0), dtype=dtype, center=True)
        with refused():
            requantize(source, f"{self.root}/copy", dtype=wanted)
        self.assertFalse(pathlib.Path(self.root, "copy").exists())

    def test_refuses_what_cannot_be_scored(self):
        store = self.make(correlated_rows(70, 64, seed=0))
        query_QK = correlated_rows(2, 64, seed=1)
        for change in (query_QK * [[1], [0]], query_QK * np.nan, query_QK[:, :5]):
            with refused():
                search.score_store(store, change, center=False)
        signs = requantize(store, f"{self.root}/signs", dtype="sign")
        with refused():
            search.score_store(signs, query_QK, center=True)
        with refused():
            _ = signs.mean_K
        discard(store, [1])
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
    @parameterized.parameters("float32", "bfloat16", "int8")
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


def cosine_twin(rows_NK, query_QK, mean_K=None) -> np.ndarray:
    """The formula of `index.search` in float64, written out."""
    mean_K = np.zeros(query_QK.shape[1]) if mean_K is None else mean_K
    rows_NK, query_QK = np.asarray(rows_NK, np.float64), np.asarray(query_QK, np.float64)
    moved_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True) - mean_K
    moved_NK = rows_NK - mean_K
    product_NQ = moved_NK @ moved_QK.T
    lengths_NQ = np.linalg.norm(moved_NK, axis=1)[:, None] * np.linalg.norm(moved_QK, axis=1)
    return (product_NQ / lengths_NQ).mean(axis=1)


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
