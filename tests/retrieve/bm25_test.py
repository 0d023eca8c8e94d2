"""BM25 gives rank_bm25's scores, and much faster."""

import time

import numpy as np
import pytest
import rank_bm25
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from support import shared_data

from raslik_jax.data.read.formats import read_examples
from raslik_jax.retrieve import bm25

_WORDS = st.lists(st.sampled_from("a b c d e the".split()), max_size=8)


def _reference(documents, queries, **options):
    index = rank_bm25.BM25Okapi(documents, **options)
    return np.stack([index.get_scores(query) for query in queries])


class Bm25Test(parameterized.TestCase):
    @given(
        documents=st.lists(_WORDS, min_size=1, max_size=12),
        queries=st.lists(_WORDS, min_size=1, max_size=4),
        options=st.sampled_from(({}, {"k1": 1.2, "b": 0.5, "epsilon": 0.1})),
    )
    def test_scores_equal_rank_bm25(self, documents, queries, options):
        if not any(documents):
            with self.assertRaisesRegex(ValueError, f"all {len(documents)} are empty"):
                bm25.index_documents(documents)
            return
        index = bm25.index_documents(documents, **options)
        expected = _reference(documents, queries, **options)
        np.testing.assert_allclose(bm25.score_queries(index, queries), expected, atol=1e-12)

    def test_a_word_of_most_documents_gets_the_floor(self):
        documents = [["the", f"w{i}"] for i in range(9)] + [["other"]]
        scores_N = bm25.score_queries(bm25.index_documents(documents), [["the"]])[0]
        self.assertTrue((scores_N[:9] > 0).all())
        self.assertEqual(scores_N[9], 0)

    @pytest.mark.heavy
    def test_real_alpaca_to_1e9(self):
        rows = read_examples(shared_data() / "alpaca" / "alpaca_data.json.xz")
        documents = [f"{row.instruction} {row.input} {row.output}".split() for row in rows]
        queries = [f"{row.instruction} {row.input}".split() for row in rows[::520]][:100]
        started = time.process_time()  # whatever else the machine does
        index = bm25.index_documents(documents)
        built = time.process_time()
        scores_QN = bm25.score_queries(index, queries)
        ours = time.process_time() - built
        reference = rank_bm25.BM25Okapi(documents)
        started_reference = time.process_time()
        # Every fifth query: a minute of rank_bm25 says as much as five.
        expected_QN = np.stack([reference.get_scores(query) for query in queries[::5]])
        theirs = 5 * (time.process_time() - started_reference)
        worst = np.abs(scores_QN[::5] - expected_QN).max()
        print(
            f"index {built - started:.2f} s; 100 queries {ours:.2f} s, rank_bm25 {theirs:.1f} s "
            f"({theirs / ours:.0f}x); largest difference {worst:.1e}"
        )
        self.assertLess(worst, 1e-9)
