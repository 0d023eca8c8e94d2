"""BM25 as the package rank_bm25 computes it, with sparse matrices instead of Python loops.

The score of document x for query y is the sum over the tokens t of y, each as often as it occurs,
of idf(t) f(t, x) (k1 + 1) / (f(t, x) + k1 (1 - b + b |x| / avgdl)). f is the count of t in x and
idf(t) = ln(N - n(t) + .5) - ln(n(t) + .5) with n(t) the documents with t. A token in more than half
of the documents has a negative idf. It is replaced by epsilon times the mean idf over all tokens,
negative ones included. Other BM25 packages differ there and rank differently.

Source: Trotman et al. 2014, as in `rank_bm25.BM25Okapi` 0.2.2, checked against it.
"""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Float


class Bm25Index(NamedTuple):
    """The amount that one occurrence of a word adds to each document's score; a column per word."""

    weight_NW: scipy.sparse.csc_array
    column_of: dict[str, int]


def index_documents(
    documents: Sequence[Sequence[str]], *, k1: float = 1.5, b: float = 0.75, epsilon: float = 0.25
) -> Bm25Index:
    """Returns the index of tokenized documents; about 1 s for the 52,002 rows of Alpaca.

    An empty document scores 0; a ValueError if all are empty.
    """
    column_of: dict[str, int] = {}
    found = [collections.Counter(document) for document in documents]
    columns = [column_of.setdefault(word, len(column_of)) for words in found for word in words]
    if not columns:
        raise ValueError(f"documents must have words, all {len(documents)} are empty: add text")
    counts = np.array([count for words in found for count in words.values()], np.float64)
    row_of = np.repeat(np.arange(len(found)), [len(words) for words in found])
    shape = (len(documents), len(column_of))
    length_N = np.array([len(document) for document in documents], np.float64)
    fade_N = k1 * (1 - b + b * length_N / length_N.mean())
    documents_with_W = np.bincount(columns, minlength=shape[1])
    idf_W = np.log(len(documents) - documents_with_W + 0.5) - np.log(documents_with_W + 0.5)
    # fsum, since the mean of thousands of words must not depend on their order.
    floor = epsilon * math.fsum(idf_W) / len(idf_W)
    idf_W = np.where(idf_W < 0, floor, idf_W)
    weights = counts * ((k1 + 1) / (counts + fade_N[row_of]) * idf_W[columns])
    weight_NW = scipy.sparse.csr_array((weights, (row_of, np.array(columns))), shape=shape)
    return Bm25Index(weight_NW=weight_NW.tocsc(), column_of=column_of)


def score_queries(index: Bm25Index, queries: Sequence[Sequence[str]]) -> Float[np.ndarray, "Q N"]:
    """Returns the score of every document for the tokens of every query.

    A word counts as often as the query has it; a word that no document has adds nothing.
    """
    found = [collections.Counter(w for w in query if w in index.column_of) for query in queries]
    place = {word: i for i, word in enumerate(sorted(set().union(*found)))}
    asked_QS = np.zeros((len(queries), len(place)))
    for row, counter in enumerate(found):
        for word, count in counter.items():
            asked_QS[row, place[word]] = count
    used_NS = index.weight_NW[:, [index.column_of[word] for word in place]]
    # Both sparse: a query has few of the words of all queries together.
    product_NQ = used_NS.tocsr() @ scipy.sparse.csr_array(asked_QS.T)
    return np.ascontiguousarray(product_NQ.toarray().T)
