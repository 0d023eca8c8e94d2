"""An index held in the memory of many devices: local ends of the ranking, one merge.

Each device scores its own rows and sorts out its own best and worst; only those few travel. For an
index that is asked again and again, or is too large for one host; `search.search_store` reads the
memory map instead and needs no device memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Float32, Int32, Shaped

from raslik_jax.axes import Array
from raslik_jax.distributed import replicate, shard_leading
from raslik_jax.index.search import (
    Columns,
    Tails,
    block_scores,
    check_count,
    columns_of_store,
    queries_of_store,
)
from raslik_jax.index.store import SketchStore


class ShardedRows(NamedTuple):
    """The rows of an index over devices, padded to a multiple of their number.

    Attributes:
        stored_NW: rows as stored; signs as words of 32 bits.
        scale_N: scales of int8 rows; of others, ones.
        length_N: lengths of the rows as stored.
        id_rank_N: place of each row's id among all ids in order, the tie-breaker; -1 for deleted
            rows and padding.
    """

    stored_NW: Shaped[Array, "N W"]
    scale_N: Float32[Array, " N"]
    length_N: Float32[Array, " N"]
    id_rank_N: Int32[Array, " N"]


class _Ends(NamedTuple):
    forget_position: Array
    forget_score: Array
    retain_position: Array
    retain_score: Array


def shard_store(store: SketchStore, mesh: Mesh) -> ShardedRows:
    """Returns the rows of a complete index over the devices of `mesh`.

    Each process reads the chunks of its own rows only.

    Args:
        store: the index, opened by every process.
        mesh: of `distributed.data_mesh`.
    """
    store.require_complete()
    devices = mesh.size
    total = -(-store.num_rows // devices) * devices
    width, dtype = _stored_layout(store)
    rank_N = np.full(total, -1, np.int32)
    rank_N[np.argsort(np.array(store.ids))] = np.arange(store.num_rows, dtype=np.int32)
    rank_N[: store.num_rows][~store.is_eligible_N] = -1

    def padded(values_N: np.ndarray) -> np.ndarray:
        return np.concatenate([values_N, np.zeros(total - len(values_N), values_N.dtype)])

    ones_N = np.ones(store.num_rows, np.float32)
    scale_N = padded(store.scales if store.dtype == "int8" else ones_N)
    length_N = padded(store.lengths)

    def stored(span: slice) -> np.ndarray:
        rows = np.zeros((span.stop - span.start, width), dtype)
        for chunk in range(store.num_chunks):
            held = store.chunk_positions(chunk)
            start, stop = max(span.start, held.start), min(span.stop, held.stop)
            if start < stop:
                block = store.stored_chunk(chunk)[start - held.start : stop - held.start]
                rows[start - span.start : stop - span.start] = block.view(dtype)
        return rows

    return ShardedRows(
        shard_leading(mesh, (total, width), dtype, stored),
        shard_leading(mesh, (total,), np.float32, scale_N.__getitem__),
        shard_leading(mesh, (total,), np.float32, length_N.__getitem__),
        shard_leading(mesh, (total,), np.int32, rank_N.__getitem__),
    )


def _stored_layout(store: SketchStore) -> tuple[int, np.dtype]:
    block = store.stored_chunk(0)
    if store.dtype == "sign":
        return block.shape[1] // 4, np.dtype(np.uint32)
    return block.shape[1], block.dtype


def _best(
    score_N: jax.Array, rank_N: jax.Array, position_N: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` highest scores, best first, equal ones by rank; rank -1 comes last."""
    barred_N = rank_N < 0
    falling_N = jnp.where(barred_N, jnp.inf, -score_N)
    falling_N, rank_N, position_N = lax.sort((falling_N, rank_N, position_N), num_keys=2)
    return -falling_N[:count], rank_N[:count], position_N[:count]


@functools.partial(jax.jit, static_argnames=("mesh", "k_forget", "k_retain"))
def _sharded_ends(
    rows: ShardedRows, columns: Columns, *, mesh: Mesh, k_forget: int, k_retain: int
) -> _Ends:
    def local(rows: ShardedRows, columns: Columns) -> _Ends:
        score_N = block_scores(*rows[:3], columns)[:, 0]
        held = score_N.shape[0]
        position_N = lax.axis_index("data") * held + lax.iota(jnp.int32, held)
        ends = []
        for sign, count in ((1.0, k_forget), (-1.0, k_retain)):
            best = _best(sign * score_N, jnp.asarray(rows.id_rank_N), position_N, min(count, held))
            gathered = [lax.all_gather(part, "data", tiled=True) for part in best]
            score, _, position = _best(gathered[0], gathered[1], gathered[2], count)
            ends += [position, score]
        return _Ends(*ends)

    spread = PartitionSpec("data")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spread, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # gathered, so the same everywhere, which the checker cannot see
    )(rows, columns)


def search_sharded(
    store: SketchStore,
    rows: ShardedRows,
    query_QK: Float[np.ndarray, "Q K"],
    *,
    mesh: Mesh,
    center: bool,
    k_forget: int,
    k_retain: int,
) -> Tails:
    """Returns both ends of the ranking by mean cosine, the same in every process.

    Args:
        store: the index that `rows` are of; ids and mean come from it.
        rows: of `shard_store`.
        query_QK: sketches of the queries, the same in every process.
        mesh: the devices that hold the rows.
        center: the centered cosine.
        k_forget: rows asked for with the highest scores.
        k_retain: rows asked for with the lowest.

    Raises:
        ValueError: more rows are asked for than there are; see `search.queries_of_store`.
    """
    for count in (k_forget, k_retain):
        check_count(count, int(store.is_eligible_N.sum()))
    queries = queries_of_store(store, query_QK, center=center)
    columns = replicate(mesh, columns_of_store(store, queries, aggregate="mean"))
    ends = _sharded_ends(rows, columns, mesh=mesh, k_forget=k_forget, k_retain=k_retain)
    forget, forget_scores, retain, retain_scores = (np.asarray(end) for end in ends)
    return Tails(
        tuple(store.ids[i] for i in forget),
        forget_scores,
        tuple(store.ids[i] for i in retain),
        retain_scores,
    )
