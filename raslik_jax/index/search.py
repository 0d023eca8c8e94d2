"""Scores of every row of an index for queries.

The score of row x for query q is the cosine of the two sketches. A centered score is the cosine of
q - mu and x - mu with mu the mean sketch of the corpus:

    s(x) = (<q, x> - <q, mu> - <mu, x> + <mu, mu>) / (|q - mu| |x - mu|)

averaged over the queries. A step on a row of high s_F = s makes the query's output likelier. s_R =
-s is the other pole (Algorithm 1, line 4). One pass over the index gives both. The pass is linear
in N. The paper's "sublinear" is K against P.

The mean over queries is linear in the query. Any number of queries takes one column: mean_q s(x) =
<v, x - mu> / |x - mu| with v = mean_q (q - mu) / |q - mu|.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Float, Float32, Float64, Int, Shaped

from raslik_jax.base import machine
from raslik_jax.base.axes import Array
from raslik_jax.index.combine import Aggregate, directions, query_weights
from raslik_jax.index.store import SketchStore
from raslik_jax.parallel import meshes, processes

# |x - mu|^2 below this share of |x|^2 + |mu|^2 is rounding: the row is the mean.
_RELATIVE_ZERO = 1e-6
# Terms in which a query is written in the dtype of the rows.
_TERMS = {"float32": 1, "bfloat16": 2}
# The cosine of near-duplicates, which are shown as one (docs/notes/retrieve.md).
ALIKE = 0.9


class Queries(NamedTuple):
    """Unit vectors of the queries less the mean and that mean (zeros for plain cosines)."""

    direction_QK: Float64[np.ndarray, "Q K"]
    mean_K: Float64[np.ndarray, " K"]

    @property
    def gram_QQ(self) -> Float64[np.ndarray, "Q Q"]:
        """Cosines between the queries."""
        return self.direction_QK @ self.direction_QK.T


class Columns(NamedTuple):
    """Queries in the form in which rows are stored.

    Each row is multiplied with `columns`. The last column is mu. They are [M, K] for float32
    rows. For bfloat16 they are [2 M, K]: coarse terms and then fine ones, whose sum keeps 16 bits
    of the query. `offset_G` is <v, mu> for each of the G score columns and `mean_square` is <mu,
    mu>. Both are 0 if not centered.
    """

    columns: Shaped[Array, "M K"]
    offset_G: Float32[Array, " G"]
    mean_square: Float32[Array, ""]


def center_queries(
    query_QK: Float[np.ndarray, "Q K"], mean_K: Float[np.ndarray, " K"] | None = None
) -> Queries:
    """Returns queries of any finite nonzero length less the mean if there is one."""
    if np.ndim(query_QK) != 2 or not len(query_QK):
        raise ValueError(f"queries must be [Q, K] with one or more, got shape {np.shape(query_QK)}")
    lengths_Q = np.linalg.norm(np.asarray(query_QK, np.float64), axis=1)
    bad = np.flatnonzero(~(np.isfinite(lengths_Q) & (lengths_Q > 0)))
    if len(bad):
        raise ValueError(
            f"queries must have nonzero, finite sketches, those of queries {bad[:5].tolist()} "
            f"are not ({len(bad)} of {len(query_QK)}): check their answers"
        )
    shift_K = np.zeros(query_QK.shape[1]) if mean_K is None else np.asarray(mean_K, np.float64)
    return Queries(directions(query_QK, mean_K), shift_K)


def queries_of_store(
    store: SketchStore, query_QK: Float[np.ndarray, "Q K"], *, center: bool
) -> Queries:
    """Returns queries, centered on the mean of an index if its cosines are centered.

    It raises a ValueError if they do not fit.
    """
    if query_QK.ndim != 2 or query_QK.shape[1] != store.size or not len(query_QK):
        raise ValueError(
            f"queries for {store.path} must have size {store.size}, got shape {query_QK.shape}"
        )
    return center_queries(query_QK, store.mean_K if center else None)


def to_columns(queries: Queries, *, aggregate: Aggregate | None, dtype: str = "float32") -> Columns:
    """Returns queries, centered like the scores, ready to be multiplied with rows of a dtype.

    They make one score per row; with None each query makes its own.
    """
    mean_K, direction_GK = queries.mean_K, queries.direction_QK
    if aggregate:
        direction_GK = query_weights(queries.gram_QQ, aggregate)[None] @ direction_GK
    # The last column is mu, or the zeros that make a single query two (XLA's CPU backend has no
    # fast bf16 matrix-vector product: 15 to 30 times slower).
    column_MK = np.concatenate([direction_GK, mean_K[None]])
    columns = column_MK.astype(np.float32)
    if dtype == "bfloat16":
        coarse = columns.astype(ml_dtypes.bfloat16)
        fine = (column_MK - coarse.astype(np.float64)).astype(np.float32)
        columns = np.concatenate([coarse, fine.astype(ml_dtypes.bfloat16)])
    numbers = direction_GK @ mean_K, mean_K @ mean_K
    return Columns(columns, *(np.asarray(value, np.float32) for value in numbers))


def block_scores(
    stored_CK: Shaped[Array, "C K"], length_C: Float32[Array, " C"], columns: Columns
) -> Float32[jax.Array, "C G"]:
    """Returns the (centered) cosines of a block of rows with the queries; pure, for one device.

    Rows are those of `SketchStore.read_array` and `SketchStore.column`; those of length 0 score 0.
    Rows that are not finite, or whose squares are not, score NaN.
    """
    stored_CK = jnp.asarray(stored_CK)
    # The rows stay the left operand in their dtype: a cast is 10 times slower.
    products_CM = lax.dot_general(
        stored_CK,
        jnp.asarray(columns.columns),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    terms = _TERMS[stored_CK.dtype.name]
    of_term = products_CM.shape[1] // terms  # in place of -1, which no rows leave undecided
    products_CM = products_CM.reshape(len(stored_CK), terms, of_term).sum(axis=1)
    groups = columns.offset_G.shape[0]
    square_C = jnp.square(length_C)
    shifted_CG = products_CM[:, :groups] - jnp.asarray(columns.offset_G)[None]
    mean_C = products_CM[:, groups]  # zeros when not centered
    centered_C = square_C - 2 * mean_C + columns.mean_square
    is_mean_C = centered_C <= _RELATIVE_ZERO * (square_C + columns.mean_square)
    root_C = jnp.sqrt(jnp.where(is_mean_C, 1.0, centered_C))
    score_CG = jnp.where(is_mean_C[:, None], 0.0, shifted_CG / root_C[:, None])
    score_CG = jnp.where(jnp.isfinite(square_C + root_C)[:, None], score_CG, jnp.nan)
    return jnp.where(length_C[:, None] == 0, 0.0, score_CG)


_jitted_block_scores = jax.jit(block_scores)


@jax.jit
def row_cosines(sketch_NK: Float[Array, "N K"], columns: Columns) -> Float32[jax.Array, "N G"]:
    """Returns the (centered) cosines of float32 or bfloat16 rows of any length with queries."""
    square_N = jnp.sum(jnp.square(jnp.asarray(sketch_NK, jnp.float32)), axis=1)
    return block_scores(sketch_NK, jnp.sqrt(square_N), columns)


def centered_cosine(
    sketch_NK: Float[Array, "N K"],
    query_QK: Float[np.ndarray, "Q K"],
    mean_K: Float[np.ndarray, " K"] | None = None,
) -> Float32[jax.Array, " N"]:
    """Returns the mean over queries of the (centered) cosine with every row.

    The formula is that of this module (Algorithm 1, lines 3 and 4). A zero row scores 0, and one
    that is not finite NaN. Rows are bfloat16, or they become float32. `mean_K` is the mean of the
    unit rows, so rows should have a length near 1.
    """
    rows_NK = jnp.asarray(sketch_NK)
    rows_NK = rows_NK if rows_NK.dtype.name in _TERMS else rows_NK.astype(jnp.float32)
    queries = center_queries(np.asarray(query_QK), mean_K)
    columns = to_columns(queries, aggregate="mean", dtype=rows_NK.dtype.name)
    return row_cosines(rows_NK, columns)[:, 0]


def score_store(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    *,
    center: bool,
    aggregate: Aggregate = "mean",
) -> Float32[np.ndarray, " N"]:
    """Returns the score s_F of every row of an index, read from its memory map in one pass.

    The index may be larger than memory. The mean is the index's own; zero rows score minus
    infinity.
    """
    return score_queries(store, queries_of_store(store, query_QK, center=center), aggregate)


def score_queries(
    store: SketchStore, queries: Queries, aggregate: Aggregate
) -> Float32[np.ndarray, " N"]:
    """Returns the scores of `score_store` for queries that are centered already."""
    store.require_complete()
    score_N = _score_columns(store, queries, aggregate)[:, 0]
    return np.where(store.is_eligible_N, score_N, np.float32(-np.inf))


def score_each(store: SketchStore, queries: Queries) -> Float32[np.ndarray, "N Q"]:
    """Returns every row's score with each query, as `score_store` does; also of barred rows."""
    store.require_complete()
    return _score_columns(store, queries, None)


def _score_columns(
    store: SketchStore, queries: Queries, aggregate: Aggregate | None
) -> Float32[np.ndarray, "N G"]:
    columns = to_columns(queries, aggregate=aggregate, dtype=store.dtype)
    # Each process scores some of the chunks, each of its devices some of those.
    devices, first, step = meshes.own_devices(), processes.number(), processes.count()
    columns_of = [jax.device_put(columns, device) for device in devices]
    lengths_N = store.column("lengths")
    scores_NG = np.zeros((store.num_rows, columns.offset_G.shape[0]), np.float32)

    def score(chunk: int) -> None:
        span = store.chunk_positions(chunk)
        padding = (0, store.chunk_rows - (span.stop - span.start))
        place = chunk // step % len(devices)
        # On CPU the memory map itself, not a copy of it.
        block = _jitted_block_scores(
            jax.device_put(store.read_array("rows", chunk), devices[place]),
            np.pad(lengths_N[span], padding),
            columns_of[place],
        )
        scores_NG[span] = np.asarray(block)[: span.stop - span.start]

    # XLA runs so narrow a product on one core, so blocks go to several; on an accelerator two
    # overlap copying with computing.
    workers = machine.usable_cpus() if jax.default_backend() == "cpu" else 2 * len(devices)
    with ThreadPoolExecutor(min(workers, 16)) as pool:
        list(pool.map(score, range(first if step > 1 else 0, store.num_chunks, step)))
    return processes.sum_processes(scores_NG)


def queries_of_rows(
    store: SketchStore, positions: Int[np.ndarray, " M"], *, center: bool
) -> Queries:
    """Returns rows of an index as queries of it, centered as in `queries_of_store`."""
    return queries_of_store(store, store.rows(positions), center=center)


def distinct_rows(rows: Queries, number: int) -> list[int]:
    """Returns at most `number` first rows that are not `ALIKE` an earlier one."""
    chosen = list[int]()
    for place, direction_K in enumerate(rows.direction_QK):
        if len(chosen) == number:
            break
        if not len(chosen) or (rows.direction_QK[chosen] @ direction_K).max() < ALIKE:
            chosen.append(place)
    return chosen


def group_rows(cosine_NM: Float[np.ndarray, "N M"], best: Int[np.ndarray, " M"]) -> list[list[int]]:
    """Returns the rows that are `ALIKE` each of the best; a row belongs to the first such one."""
    first_N = np.where((cosine_NM >= ALIKE).any(axis=1), (cosine_NM >= ALIKE).argmax(axis=1), -1)
    first_N[best] = -1
    return [np.flatnonzero(first_N == number).tolist() for number in range(len(best))]
