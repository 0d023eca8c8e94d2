"""An index held in the memory of many devices, for one that is asked again and again.

Each device scores its own rows and sorts out its own best and worst; only those few travel.
`search.search_store` reads the memory map instead and needs no device memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Float32, Int32, Shaped

from raslik_jax.base.axes import Array
from raslik_jax.index.combine import check_count
from raslik_jax.index.search import Columns, Tails, block_scores, columns_of_store
from raslik_jax.index.store import SketchStore
from raslik_jax.parallel.distributed import replicate, shard_leading


class ShardedRows(NamedTuple):
    """The rows of an index over devices, padded to a multiple of their number.

    The first three are those of `search.block_scores`; `id_rank_N` is the place of each row's id
    among all ids in order, the tie-breaker, and -1 for deleted rows and padding.
    """

    stored_NW: Shaped[Array, "N W"]
    scale_N: Float32[Array, " N"]
    length_N: Float32[Array, " N"]
    id_rank_N: Int32[Array, " N"]


def shard_store(store: SketchStore, mesh: Mesh) -> ShardedRows:
    """Returns the rows of a complete index over the devices of `meshes.make_mesh`.

    Every process opens the index, and reads the chunks of its own rows only.
    """
    store.require_complete()
    total = -(-store.num_rows // mesh.size) * mesh.size
    first = store.stored_words(0)
    rank_N = np.full(store.num_rows, -1, np.int32)
    rank_N[np.argsort(np.array(store.ids))] = np.arange(store.num_rows, dtype=np.int32)
    rank_N[~store.is_eligible_N] = -1

    def stored(span: slice) -> np.ndarray:
        rows = np.zeros((span.stop - span.start, first.shape[1]), first.dtype)
        for chunk in range(store.num_chunks):
            held = store.chunk_positions(chunk)
            start, stop = max(span.start, held.start), min(span.stop, held.stop)
            if start < stop:
                block = store.stored_words(chunk)[start - held.start : stop - held.start]
                rows[start - span.start : stop - span.start] = block
        return rows

    def column(values_N: np.ndarray, padding: int) -> jax.Array:
        whole_N = np.pad(values_N, (0, total - len(values_N)), constant_values=padding)
        return shard_leading(mesh, (total,), values_N.dtype, whole_N.__getitem__)

    return ShardedRows(
        shard_leading(mesh, (total, first.shape[1]), first.dtype, stored),
        column(store.column("scales"), 0),
        column(store.column("lengths"), 0),
        column(rank_N, -1),
    )


def _best(
    score_N: jax.Array, rank_N: jax.Array, position_N: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` highest scores, best first, equal ones by rank; rank -1 comes last."""
    falling_N = jnp.where(rank_N < 0, jnp.inf, -score_N)
    falling_N, rank_N, position_N = lax.sort((falling_N, rank_N, position_N), num_keys=2)
    return -falling_N[:count], rank_N[:count], position_N[:count]


@functools.partial(jax.jit, static_argnames=("mesh", "k_forget", "k_retain"))
def _sharded_ends(
    rows: ShardedRows, columns: Columns, *, mesh: Mesh, k_forget: int, k_retain: int
) -> list[jax.Array]:
    """Returns positions and scores of the highest, then of the lowest."""

    def local(rows: ShardedRows, columns: Columns) -> list[jax.Array]:
        score_N = block_scores(*rows[:3], columns)[:, 0]
        held = score_N.shape[0]
        position_N = lax.axis_index("data") * held + lax.iota(jnp.int32, held)
        ends = []
        for sign, count in ((1.0, k_forget), (-1.0, k_retain)):
            best = _best(sign * score_N, jnp.asarray(rows.id_rank_N), position_N, min(count, held))
            scores, ranks, positions = (lax.all_gather(part, "data", tiled=True) for part in best)
            score, _, position = _best(scores, ranks, positions, count)
            ends += [position, score]
        return ends

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
    """Returns both ends of the ranking by mean cosine, as `search.search_store` does.

    `rows` are of `shard_store` for this index and mesh; the queries are the same in every process.
    """
    for count in (k_forget, k_retain):
        check_count(count, int(store.is_eligible_N.sum()))
    columns = replicate(mesh, columns_of_store(store, query_QK, center=center, aggregate="mean"))
    ends = _sharded_ends(rows, columns, mesh=mesh, k_forget=k_forget, k_retain=k_retain)
    forget, forget_scores, retain, retain_scores = (np.asarray(end) for end in ends)
    ids = (tuple(store.ids[i] for i in positions) for positions in (forget, retain))
    return Tails(next(ids), forget_scores, next(ids), retain_scores)
