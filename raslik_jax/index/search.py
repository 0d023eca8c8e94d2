"""Scores of every row of an index for a query, and both ends of their ranking.

The score of row x for query q is the cosine of the two sketches or, centered, of q - mu and x - mu,
mu being the mean sketch of the corpus:

    s(x) = (<q, x> - <q, mu> - <mu, x> + <mu, mu>) / (|q - mu| |x - mu|)

averaged over the queries. s_F = s pulls toward the query's output, s_R = -s against it
(Algorithm 1, line 4), so one pass over the index gives both. The pass is linear in N; what the
paper calls sublinear is K against P.

The mean over queries is linear in the query, so any number of queries costs one column:
mean_q s(x) = <v, x - mu> / |x - mu| with v = mean_q (q - mu) / |q - mu|.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.stats
from jax import lax
from jaxtyping import Float, Float32, Shaped

from raslik_jax.axes import Array
from raslik_jax.index.combine import common_weights
from raslik_jax.index.quantize import INT8_LEVELS, pack_signs, rotate
from raslik_jax.index.store import SketchStore

Aggregate = Literal["mean", "mean_rank", "common"]

# Where |x - mu|^2 is below this share of |x|^2 + |mu|^2 it is rounding: the row is the mean.
_RELATIVE_ZERO = 1e-6


# Terms in which a query is written in the dtype of the rows. A third for int8 would add nothing
# that its rows could show, and six columns run at 2/3 of the speed of four.
_TERMS = {"float32": 1, "bfloat16": 2, "int8": 2}


class Scores(NamedTuple):
    """Scores of N rows for both sets, higher is better; retain_N = -forget_N.

    Minus infinity in both bars a row, as selection understands it: it is deleted, or its gradient
    is zero and so points nowhere.
    """

    forget_N: Float[Array, " N"]
    retain_N: Float[Array, " N"]


class Tails(NamedTuple):
    """Both ends of the ranking, best first; equal scores by id."""

    forget_ids: tuple[str, ...]
    forget_scores: Float32[np.ndarray, " k1"]
    retain_ids: tuple[str, ...]
    retain_scores: Float32[np.ndarray, " k2"]


class Prepared(NamedTuple):
    """Queries brought into the form in which an index's rows are stored.

    Attributes:
        columns: what each row is multiplied with; the last of the M is mu when centered. For
        float32
            rows [M, W]; for bfloat16 and int8 [2 M, W], coarse terms, then fine ones, whose sum
            keeps 16 bits of the query; for signs [Q, W / 32] words.
        column_scale_M: what a product with each row of `columns` is multiplied by.
        offset_G: <v, mu> for each of the G score columns, 0 when not centered.
        mean_square: <mu, mu>, 0 when not centered.
        weight_GS: for signs, how S queries' cosines make G scores.
    """

    columns: Shaped[Array, "M W"]
    column_scale_M: Float32[Array, " M"]
    offset_G: Float32[Array, " G"]
    mean_square: Float32[Array, ""]
    weight_GS: Float32[Array, "G S"]


@jax.jit
def antipodal_scores(
    sketch_NK: Float[Array, "N K"],
    query_QK: Float[Array, "Q K"],
    mean_K: Float[Array, " K"] | None = None,
) -> Scores:
    """Returns the mean over queries of the (centered) cosine with every row.

    The formula of this module; Algorithm 1, lines 3 and 4. Rows and queries need not be exact unit
    vectors, lengths are taken from what is given; with a mean both should be near unit length,
    since that is what the mean is of.

    Args:
        sketch_NK: rows, float32 or bfloat16. A zero row scores 0.
        query_QK: queries; a zero query adds 0.
        mean_K: mean of the unit rows, or None for the plain cosine.
    """
    unit_QK = _unit(jnp.asarray(query_QK, jnp.float32))
    if mean_K is not None:
        mean_K = jnp.asarray(mean_K, jnp.float32)
        is_query_Q1 = jnp.any(unit_QK != 0, axis=1, keepdims=True)
        unit_QK = _unit(jnp.where(is_query_Q1, unit_QK - mean_K[None], 0.0))
    direction_K = jnp.mean(unit_QK, axis=0)
    square_N = jnp.sum(jnp.square(jnp.asarray(sketch_NK, jnp.float32)), axis=1)
    # Two columns at least: XLA's CPU backend has no fast bf16 matrix-vector product.
    other_K = jnp.zeros_like(direction_K) if mean_K is None else mean_K
    products_N2 = _products(jnp.asarray(sketch_NK), jnp.stack([direction_K, other_K]))
    if mean_K is None:
        forget_N = _cosine(products_N2[:, :1], square_N, square_N)[:, 0]
    else:
        mean_square = jnp.sum(jnp.square(mean_K))
        centered_N = square_N - 2 * products_N2[:, 1] + mean_square
        shifted_N1 = products_N2[:, :1] - jnp.sum(direction_K * mean_K)
        forget_N = _cosine(shifted_N1, centered_N, square_N + mean_square)[:, 0]
        forget_N = jnp.where(square_N > 0, forget_N, 0.0)
    return Scores(forget_N, -forget_N)


def _unit(vector_QK: jax.Array) -> jax.Array:
    length_Q1 = jnp.sqrt(jnp.sum(jnp.square(vector_QK), axis=1, keepdims=True))
    return vector_QK / jnp.where(length_Q1 > 0, length_Q1, 1.0)


def _products(sketch_NK: jax.Array, column_MK: jax.Array) -> jax.Array:
    """Inner products in float32 of float32 or bfloat16 rows with float32 columns."""
    if sketch_NK.dtype == jnp.float32:
        return _dot(sketch_NK, column_MK)
    # reduce_precision, because XLA may drop a cast down and up again, and the fine term with it.
    coarse_MK = lax.reduce_precision(column_MK, exponent_bits=8, mantissa_bits=7)
    both = jnp.concatenate([coarse_MK, column_MK - coarse_MK]).astype(sketch_NK.dtype)
    products = _dot(sketch_NK, both)
    return products[:, : len(column_MK)] + products[:, len(column_MK) :]


def _dot(rows_CW: jax.Array, columns_MW: jax.Array) -> jax.Array:
    """[C, M] products. The rows stand left and keep their dtype: casting them costs 10 times."""
    return lax.dot_general(
        rows_CW,
        columns_MW,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.int32 if rows_CW.dtype == jnp.int8 else jnp.float32,
    )


def _cosine(product_CG: jax.Array, square_C: jax.Array, scale_C: jax.Array) -> jax.Array:
    """product / sqrt(square), 0 where the square is zero but for rounding."""
    is_some_C = square_C > _RELATIVE_ZERO * scale_C
    root_C = jnp.sqrt(jnp.where(is_some_C, square_C, 1.0))
    return jnp.where(is_some_C[:, None], product_CG / root_C[:, None], 0.0)


def block_scores(
    stored_CW: Shaped[Array, "C W"],
    scale_C: Float32[Array, " C"],
    length_C: Float32[Array, " C"],
    prepared: Prepared,
) -> Float32[jax.Array, "C G"]:
    """Returns the scores of a block of stored rows; pure, for one device.

    Args:
        stored_CW: rows as stored; signs as words of 32 bits.
        scale_C: scales of int8 rows; of others, ones.
        length_C: lengths of the rows as stored; zero rows score 0.
        prepared: of `prepare_queries` for the same index.
    """
    stored_CW = jnp.asarray(stored_CW)
    if stored_CW.dtype == jnp.uint32:
        # One query after the other: the fused product over all is 30 times slower on CPU.
        def distance(word_W: jax.Array) -> jax.Array:
            differing = lax.population_count(stored_CW ^ word_W[None])
            return jnp.sum(differing, axis=1, dtype=jnp.uint32)

        hamming_SC = lax.map(distance, jnp.asarray(prepared.columns)).astype(jnp.float32)
        width = 32 * stored_CW.shape[1]
        cosine_SC = jnp.cos(jnp.pi * hamming_SC / width)
        score_CG = _dot(cosine_SC.T, jnp.asarray(prepared.weight_GS))
        return jnp.where(length_C[:, None] > 0, score_CG, 0.0)
    products_CM = _dot(stored_CW, jnp.asarray(prepared.columns)).astype(jnp.float32)
    products_CM = products_CM * jnp.asarray(prepared.column_scale_M)[None]
    terms = _TERMS[stored_CW.dtype.name]
    products_CM = products_CM.reshape(len(stored_CW), terms, -1).sum(axis=1)
    products_CM = products_CM * jnp.asarray(scale_C)[:, None]
    groups = prepared.offset_G.shape[0]
    square_C = jnp.square(length_C)
    shifted_CG = products_CM[:, :groups] - jnp.asarray(prepared.offset_G)[None]
    mean_C = products_CM[:, groups]  # zeros when not centered
    centered_C = square_C - 2 * mean_C + prepared.mean_square
    score_CG = _cosine(shifted_CG, centered_C, square_C + prepared.mean_square)
    return jnp.where(length_C[:, None] > 0, score_CG, 0.0)


_jitted_block_scores = jax.jit(block_scores)


def prepare_queries(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    *,
    center: bool,
    aggregate: Aggregate = "mean",
) -> Prepared:
    """Returns the queries ready to be multiplied with the rows of `store`.

    Args:
        store: the index.
        query_QK: sketches of the queries, of any length but zero.
        center: subtract the mean sketch from rows and queries.
        aggregate: `mean` and `common` prepare one score per row, `mean_rank` one for every query.

    Raises:
        ValueError: a query is zero, not finite or of another size, or the index holds signs of
            rows that are centered where plain ones are wanted, or the other way round.
    """
    query_QK = np.asarray(query_QK, np.float64)
    lengths_Q = np.linalg.norm(query_QK, axis=1)
    if query_QK.shape[1] != store.size or not len(query_QK):
        raise ValueError(
            f"Queries for {store.path} have size {store.size}, and got shape {query_QK.shape}."
        )
    if not np.all(np.isfinite(lengths_Q) & (lengths_Q > 0)):
        bad = np.flatnonzero(~(np.isfinite(lengths_Q) & (lengths_Q > 0)))
        raise ValueError(
            f"Queries {bad[:5].tolist()} are zero or not finite ({len(bad)} of {len(query_QK)}); "
            "look at the answers they were sketched from."
        )
    mean_K = np.zeros(store.size)
    if store.dtype == "sign":
        center_K = store.center_K
        if center != (center_K is not None):
            raise ValueError(
                f"The 1-bit index {store.path} holds signs of "
                f"{'plain' if center_K is None else 'centered'} rows, and {center=} was asked for; "
                "make it again from the finer index, centering comes before the sign."
            )
        mean_K = mean_K if center_K is None else center_K
    elif center:
        mean_K = store.mean_K
    direction_QK = query_QK / lengths_Q[:, None] - mean_K
    remaining_Q1 = np.linalg.norm(direction_QK, axis=1, keepdims=True)
    direction_QK = direction_QK / np.where(remaining_Q1 > 0, remaining_Q1, 1.0)
    count = len(direction_QK)
    weight_GQ = np.eye(count)
    if aggregate == "mean":
        weight_GQ = np.full((1, count), 1 / count)
    elif aggregate == "common":
        weight_GQ = common_weights(direction_QK @ direction_QK.T)[None]
    empty = Prepared(
        columns=np.zeros((0, 0), np.float32),
        column_scale_M=np.zeros(0, np.float32),
        offset_G=np.zeros(len(weight_GQ), np.float32),
        mean_square=np.zeros((), np.float32),
        weight_GS=np.zeros((len(weight_GQ), 0), np.float32),
    )
    if store.dtype == "sign":
        rotated = rotate(direction_QK.astype(np.float32), seed=store.rotation_seed)
        words = pack_signs(rotated, seed=store.rotation_seed).view(np.uint32)
        return empty._replace(columns=words, weight_GS=weight_GQ.astype(np.float32))
    direction_GK = weight_GQ @ direction_QK
    # The last column is mu, or the zeros that make a single query two (XLA's CPU backend has no
    # fast bf16 or int8 matrix-vector product: 15 to 30 times slower).
    column_MK = np.concatenate([direction_GK, mean_K[None]])
    columns, scale_M = _store_columns(store, column_MK)
    return empty._replace(
        columns=columns,
        column_scale_M=scale_M,
        offset_G=(direction_GK @ mean_K).astype(np.float32),
        mean_square=np.asarray(mean_K @ mean_K, np.float32),
    )


def _store_columns(store: SketchStore, column_MK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns in the dtype of the rows, and the scale of each."""
    if store.dtype == "float32":
        return column_MK.astype(np.float32), np.ones(len(column_MK), np.float32)
    if store.dtype == "bfloat16":
        coarse = column_MK.astype(np.float32).astype(ml_dtypes.bfloat16)
        fine = (column_MK - coarse.astype(np.float64)).astype(np.float32)
        both = np.concatenate([coarse, fine.astype(ml_dtypes.bfloat16)])
        return both, np.ones(len(both), np.float32)
    rotated_MW = rotate(column_MK, seed=store.rotation_seed)
    values, scales = [], []
    for _ in range(_TERMS["int8"]):
        scale_M = np.abs(rotated_MW).max(axis=1) / INT8_LEVELS
        scale_M = np.where(scale_M > 0, scale_M, 1.0).astype(np.float32).astype(np.float64)
        value_MW = np.clip(np.rint(rotated_MW / scale_M[:, None]), -INT8_LEVELS, INT8_LEVELS)
        rotated_MW = rotated_MW - value_MW * scale_M[:, None]
        values.append(value_MW.astype(np.int8))
        scales.append(scale_M.astype(np.float32))
    return np.concatenate(values), np.concatenate(scales)


def _score_blocks(store: SketchStore, prepared: Prepared) -> np.ndarray:
    """Scores of all rows, deleted ones included, one block after the other; [N, G]."""
    prepared = Prepared(*(jax.device_put(leaf) for leaf in prepared))
    lengths_N = store.lengths
    scales_N = store.scales if store.dtype == "int8" else None
    scores_NG = np.empty((store.num_rows, prepared.offset_G.shape[0]), np.float32)

    def score(chunk: int) -> None:
        span = store.chunk_positions(chunk)
        stored = store.stored_chunk(chunk)
        stored = stored.view(np.uint32) if store.dtype == "sign" else stored
        length_C = np.zeros(store.chunk_rows, np.float32)
        length_C[: span.stop - span.start] = lengths_N[span]
        scale_C = np.ones(store.chunk_rows, np.float32)
        if scales_N is not None:
            scale_C[: span.stop - span.start] = scales_N[span]
        # On CPU the memory map itself, not a copy of it.
        block = _jitted_block_scores(jax.device_put(stored), scale_C, length_C, prepared)
        scores_NG[span] = np.asarray(block)[: span.stop - span.start]

    # XLA runs so narrow a product on one core, so blocks go to several; on an accelerator two
    # overlap copying with computing.
    workers = os.cpu_count() or 1 if jax.default_backend() == "cpu" else 2
    store.require_complete()
    with ThreadPoolExecutor(min(workers, 16)) as pool:
        for _ in pool.map(score, range(store.num_chunks)):
            pass
    return scores_NG


def score_store(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    *,
    center: bool,
    aggregate: Aggregate = "mean",
) -> Scores:
    """Returns the scores of every row of an index, read from its memory map in one pass.

    The index may be larger than memory. float32 and bfloat16 rows are multiplied with the query as
    they are, int8 rows as integers times their scale; signs give cos(pi h / W) with h the Hamming
    distance (see `int8_error` and `sign_error`).

    Args:
        store: the index, complete.
        query_QK: sketches of the queries, of any length but zero.
        center: the centered cosine; the mean is the index's own.
        aggregate: `mean` of the cosines, or `mean_rank`: each query ranks the rows (ties share
            their mean rank), the ranks are averaged and scaled so that first is 1 and last -1; or
            `common`, the mean weighted by `combine.common_weights`.

    Returns:
        Scores in the order of `store.ids`, float32 on the host, minus infinity for rows that are
        deleted or zero.

    Raises:
        ValueError: see `prepare_queries`; or a chunk is missing.
    """
    prepared = prepare_queries(store, query_QK, center=center, aggregate=aggregate)
    scores_NG = _score_blocks(store, prepared)
    is_eligible_N = store.is_eligible_N
    if aggregate != "mean_rank":
        forget_N = scores_NG[:, 0]
    else:
        ranks_LG = scipy.stats.rankdata(scores_NG[is_eligible_N], axis=0)  # 1 is the lowest score
        last = max(len(ranks_LG) - 1, 1)
        forget_N = np.zeros(store.num_rows, np.float32)
        forget_N[is_eligible_N] = 2 * (ranks_LG.mean(axis=1) - 1) / last - 1
    return Scores(
        forget_N=np.where(is_eligible_N, forget_N, -np.inf).astype(np.float32),
        retain_N=np.where(is_eligible_N, -forget_N, -np.inf).astype(np.float32),
    )


def int8_error(scale_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns the standard error of each row's plain score that 8 bits add: scale / sqrt(12).

    A coordinate's rounding error is uniform within half a step, and the query a unit vector (a
    mean of several is shorter, and errs less): about 4e-5 at W = 65,536. The query's own two 8-bit
    terms add 1 / 254 of that.

    For comparison, bfloat16 rows err at most 2^-8 (Cauchy-Schwarz), and by about 1.6e-3 / sqrt(K)
    where coordinates are of like size and their roundings cancel.

    Args:
        scale_N: `SketchStore.scales`.
    """
    return scale_N / np.sqrt(12)


def sign_error(score_N: Float[np.ndarray, " N"], *, width: int) -> Float[np.ndarray, " N"]:
    """Returns the standard error of a cosine that was estimated from `width` sign bits.

    pi sin(theta) sqrt(p (1 - p) / W), p = theta / pi: for Gaussian coordinates two bits differ
    with probability p (Goemans and Williamson 1995, Lemma 3.2; Charikar 2002), so the estimate is
    cos(pi h / W). 0.0061 at right angles and W = 65,536.

    That is the error against the cosine of the gradients, with a sketch of K = W; the sketch's own
    error, 1 / sqrt(K), is a part of it. Against the cosine of the sketches it is less: at right
    angles sqrt(1 - 4 / pi^2) = 0.77 of it, since signs agree more where products are positive.
    For a mean over queries both are upper bounds: as far as queries agree, they err alike.

    Args:
        score_N: the estimates, of one query.
        width: W of `quantize.rotated_size`.
    """
    angle_N = np.arccos(np.clip(np.asarray(score_N, np.float64), -1, 1))
    share_N = angle_N / np.pi
    return np.pi * np.sin(angle_N) * np.sqrt(share_N * (1 - share_N) / width)


def best_positions(
    score_N: Float[np.ndarray, " N"], ids: tuple[str, ...], count: int
) -> Shaped[np.ndarray, " k"]:
    """Returns the positions of the `count` highest scores, best first, equal ones by id.

    Raises:
        ValueError: fewer rows than that have a score above minus infinity.
    """
    eligible = int(np.sum(score_N > -np.inf))
    if not 0 <= count <= eligible:
        raise ValueError(
            f"{count} rows were asked for, and the index has {eligible}; ask for less."
        )
    if count == 0:
        return np.zeros(0, np.int64)
    threshold = np.partition(score_N, len(score_N) - count)[len(score_N) - count]
    within = np.flatnonzero(score_N >= threshold)  # all ties of the last one among them
    order = np.lexsort((np.array([ids[i] for i in within]), -score_N[within]))
    return within[order[:count]]


def search_store(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    *,
    center: bool,
    k_forget: int,
    k_retain: int,
    aggregate: Aggregate = "mean",
    finer: SketchStore | None = None,
    candidates: int = 4,
    scores: Scores | None = None,
) -> Tails:
    """Returns both ends of the ranking from one pass over the index.

    Args:
        store: the index.
        query_QK: sketches of the queries.
        center: the centered cosine.
        k_forget: rows wanted with the highest scores.
        k_retain: rows wanted with the lowest.
        aggregate: see `score_store`.
        finer: an index of the same rows in a finer dtype; the candidates are scored again from it.
        candidates: candidates per wanted row, when there is a finer index.
        scores: of `score_store` for the same arguments, where the caller has them already.

    Raises:
        ValueError: more rows are wanted than there are; the finer index is of something else; see
            `score_store`.
    """
    if scores is None:
        scores = score_store(store, query_QK, center=center, aggregate=aggregate)
    forget_N, retain_N = np.asarray(scores.forget_N), np.asarray(scores.retain_N)
    if finer is None:
        forget = best_positions(forget_N, store.ids, k_forget)
        retain = best_positions(retain_N, store.ids, k_retain)
        return Tails(
            tuple(store.ids[i] for i in forget),
            forget_N[forget],
            tuple(store.ids[i] for i in retain),
            retain_N[retain],
        )
    if aggregate != "mean":
        raise ValueError("A finer index gives mean scores again; use aggregate='mean'.")
    live = int(np.sum(forget_N > -np.inf))
    found = [
        _rescored(store, finer, best_positions(side, store.ids, min(live, candidates * count)),
                  query_QK, center=center, count=count, sign=sign)
        for side, count, sign in ((forget_N, k_forget, 1), (retain_N, k_retain, -1))
    ]  # fmt: skip
    return Tails(*found[0], *found[1])


def _rescored(
    store: SketchStore,
    finer: SketchStore,
    positions: np.ndarray,
    query_QK: np.ndarray,
    *,
    center: bool,
    count: int,
    sign: int,
) -> tuple[tuple[str, ...], np.ndarray]:
    """The best `count` of the candidates by their scores in the finer index."""
    if store.identity != finer.identity or store.size != finer.size:
        raise ValueError(
            f"{finer.path} was not made from what {store.path} was made from; name its finer index."
        )
    ids = tuple(store.ids[i] for i in positions)
    place = {example_id: row for row, example_id in enumerate(finer.ids)}
    unknown = [example_id for example_id in ids if example_id not in place]
    if unknown:
        raise ValueError(
            f"{len(unknown)} candidates of {store.path} are not in {finer.path} "
            f"({unknown[:5]}); make the coarser index again from the finer one."
        )
    rows_MK = finer.rows([place[example_id] for example_id in ids])
    score_M = sign * exact_scores(rows_MK, query_QK, finer.mean_K if center else None)
    best = best_positions(score_M.astype(np.float32), ids, count)
    return tuple(ids[i] for i in best), score_M[best].astype(np.float32)


def exact_scores(
    rows_MK: Float[np.ndarray, "M K"],
    query_QK: Float[np.ndarray, "Q K"],
    mean_K: Float[np.ndarray, " K"] | None,
) -> Float[np.ndarray, " M"]:
    """Returns the formula of this module in float64 NumPy: slow, for a few rows and for tests."""
    query_QK = np.asarray(query_QK, np.float64)
    mean_K = np.zeros(query_QK.shape[1]) if mean_K is None else np.asarray(mean_K, np.float64)
    centered_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True) - mean_K
    remaining_Q1 = np.linalg.norm(centered_QK, axis=1, keepdims=True)
    direction_K = np.mean(centered_QK / np.where(remaining_Q1 > 0, remaining_Q1, 1), axis=0)
    scores_M = np.zeros(len(rows_MK))
    for row, stored_K in enumerate(rows_MK):
        row_K = stored_K.astype(np.float64)
        centered_K = row_K - mean_K
        square = centered_K @ centered_K
        if row_K.any() and square > _RELATIVE_ZERO * (row_K @ row_K + mean_K @ mean_K):
            scores_M[row] = (direction_K @ centered_K) / np.sqrt(square)
    return scores_M
