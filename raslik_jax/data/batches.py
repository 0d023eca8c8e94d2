"""From token rows of unequal length to rectangular batches, and from their results back to rows.

Only the corpus and the settings decide which rows share a batch, never the remaining work. Each
shape is compiled once, so shapes are few. `plan_batches` finds the cheapest ones for a corpus that
is run once. All other plans take the next length of a fixed list (`next_rung`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from raslik_jax.base.progress import progress
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.data.words import refused
from raslik_jax.parallel import meshes

DUMMY_ROW = -1
_MOST_BUCKETS = 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A rectangle of token ids, a tree whose `num_targets` is static.

    `target_mask_BL` is True if the prediction of a token counts in the loss. `num_targets` is T, at
    least the target tokens of any row. `row_B` is the position of each row in the corpus, or
    DUMMY_ROW. A dummy row has no targets. `known` has arrays [B, T, E] by the names of
    frozen models: their final hidden states at the targets.
    """

    tokens_BL: Any
    target_mask_BL: Any
    num_targets: int = dataclasses.field(metadata={"static": True})
    row_B: Any = None
    known: Any = None


class BatchPlan(NamedTuple):
    """The rows of a batch as corpus positions or DUMMY_ROW and its static shape: L and T."""

    rows: np.ndarray
    length: int
    num_targets: int


def plan_batches(
    lengths_N: Int[np.ndarray, " N"],
    targets_N: Int[np.ndarray, " N"],
    *,
    ids: Sequence[str],
    num_buckets: int = 0,
    batch_tokens: int = 8192,
    program_tokens: int = 0,
    multiple: int = 8,
) -> tuple[BatchPlan, ...]:
    """Returns the batches of a corpus in sketching order: by bucket and id.

    The buckets of lengths give the fewest tokens in all rectangles, dummy rows included. A bucket
    of n rows and length L needs ceil(n / (batch_tokens // L)) batches and spreads its rows evenly
    over them. The order of the rows changes nothing.

    Args:
      lengths_N: tokens of each row.
      targets_N: target tokens of each row.
      ids: ids of the rows, all different.
      num_buckets: largest number of shapes; 0 for at most 12 shapes that each save
        `program_tokens`.
      batch_tokens: the largest B * L; a longer row is refused.
      program_tokens: tokens that could be computed while a program compiles; 0 for a batch.
      multiple: divides every L and T.
    """
    padded_N = np.maximum(-(-lengths_N // multiple), 1) * multiple
    if padded_N.max() > batch_tokens:
        raise refused("batch_tokens", most=batch_tokens, got=padded_N.max())
    program = 0 if num_buckets else program_tokens or batch_tokens
    edges = _bucket_edges(padded_N, num_buckets or _MOST_BUCKETS, batch_tokens, program)
    bucket_N = np.searchsorted(edges, padded_N)
    plans: list[BatchPlan] = []
    for bucket, edge in enumerate(edges.tolist()):
        # Sorted as Python text, by code point: NumPy would copy every id into a fixed width.
        members = sorted(np.flatnonzero(bucket_N == bucket).tolist(), key=lambda row: ids[row])
        num_batches = -(-len(members) // (batch_tokens // edge))
        lines = in_lines(np.array(members, np.int64), -(-len(members) // num_batches))
        num_targets = max(-(-int(targets_N[members].max()) // multiple), 1) * multiple
        plans += [BatchPlan(rows, edge, num_targets) for rows in lines]
    return tuple(plans)


def _bucket_edges(
    padded_N: Int[np.ndarray, " N"], num_buckets: int, batch_tokens: int, program: int
) -> Int[np.ndarray, " M"]:
    """Returns the upper edges of the cheapest buckets, each the length of some row.

    best[k][j] = min over i < j of best[k - 1][i] + cost[i + 1, j]: k buckets for the distinct
    lengths up to the j-th. cost counts the tokens in the rectangles of one bucket and adds
    `program`. At equal cost there are fewer buckets.
    """
    length_M, count_M = np.unique(padded_N, return_counts=True)
    below_M = np.concatenate([[0], np.cumsum(count_M)])
    # cost[i, j]: one bucket for the i-th to the j-th distinct length, both included.
    rows = below_M[None, 1:] - below_M[:-1, None]
    num_batches = -(-rows // (batch_tokens // length_M))
    batch_size = -(-rows // np.maximum(num_batches, 1))
    impossible = np.iinfo(np.int64).max // 4
    cost = np.where(rows > 0, num_batches * batch_size * length_M + program, impossible)
    best, came_from = cost[0], []
    best_by_count = [best[-1]]
    for _ in range(1, min(num_buckets, len(length_M))):
        totals = best[:-1, None] + cost[1:, :]
        came_from.append(np.argmin(totals, axis=0))
        best = totals.min(axis=0)
        best_by_count.append(best[-1])
    edges = [len(length_M) - 1]
    for step in reversed(range(int(np.argmin(best_by_count)))):
        edges.append(int(came_from[step][edges[-1]]))
    return length_M[edges[::-1]]


def sketching_order(plans: Sequence[BatchPlan]) -> Int[np.ndarray, " N"]:
    """Returns the corpus positions in the order of the plans, without dummy rows."""
    rows = np.concatenate([plan.rows for plan in plans])
    return rows[rows != DUMMY_ROW]


def next_rung(count: int) -> int:
    """Returns the least of 16, 24, 32, 48, 64, 96, ... that is not below a count."""
    power = 1 << max(count - 1, 15).bit_length()
    return power if count > power // 4 * 3 else max(power // 4 * 3, 16)


def next_count(count: int) -> int:
    """Returns the least power of two that is not below a count; `next_rung` from 17 on."""
    return next_rung(count) if count > 16 else 1 << (count - 1).bit_length()


def plan_rows(encoded: Encoded, rows: Int[np.ndarray, " B"]) -> BatchPlan:
    """Returns a batch of these rows, at least one of them real, in the next shape of the ladder.

    T is L or half of it. It is L if every token counts.
    """
    # Not encoded.lengths_N, which counts the whole corpus at every call.
    real = rows[rows != DUMMY_ROW]
    length_B = np.array([len(encoded.tokens[row]) for row in real.tolist()], np.int64)
    length = min(next_rung(int(length_B.max())), encoded.limit)
    start_B = encoded.start_N[real]
    is_half = start_B.min() > 0 and (length_B - start_B).max() <= length // 2
    return BatchPlan(rows, length, length // 2 if is_half else length)


def plan_one_shape(encoded: Encoded, *, batch_tokens: int) -> tuple[BatchPlan, ...]:
    """Returns batches in corpus order in the shape that the longest row needs."""
    rows = np.arange(len(encoded.ids))
    whole = plan_rows(encoded, rows)
    num_batches = -(-len(rows) // max(1, batch_tokens // whole.length))
    lines = in_lines(rows, -(-len(rows) // num_batches))
    return tuple(whole._replace(rows=line) for line in lines)


def plan_by_length(encoded: Encoded, *, batch_size: int) -> tuple[BatchPlan, ...]:
    """Returns batches of rows of similar length; each has the next shape of the ladder."""
    order = np.argsort(encoded.lengths_N, kind="stable")
    return tuple(plan_rows(encoded, rows) for rows in in_lines(order, batch_size))


def plan_coarsely(
    encoded: Encoded, *, batch_size: int, max_len: int, least: int = 64
) -> tuple[BatchPlan, ...]:
    """Returns batches of rows of similar length, padded to 64, 128, 256, ... tokens and targets.

    With so few shapes a single question rarely waits for a program to compile. No batch is longer
    than max_len.
    """
    plans, length_N = [], encoded.lengths_N
    for rows in in_lines(np.argsort(length_N, kind="stable"), batch_size):
        longest = int(length_N[rows[rows != DUMMY_ROW]].max())
        length = min(max(1 << (longest - 1).bit_length(), least), max_len)
        plans.append(BatchPlan(rows, length, length))
    return tuple(plans)


def in_lines(rows: Int[np.ndarray, " N"], size: int) -> Int[np.ndarray, "M B"]:
    """Returns rows in lines of one size; the last line ends with DUMMY_ROW."""
    slots = np.full(-(-len(rows) // size) * size, DUMMY_ROW, np.int64)
    slots[: len(rows)] = rows
    return slots.reshape(-1, size)


def make_batch(encoded: Encoded, plan: BatchPlan, *, left: bool = False) -> Batch:
    """Returns the rectangle of a plan; with `left` pads are on the left, as for decoding.

    Dummy rows fill it, so that the devices of the mesh get equal shares.
    """
    row_B = np.full(meshes.round_up(len(plan.rows)), DUMMY_ROW, np.int32)
    row_B[: len(plan.rows)] = plan.rows
    tokens_BL = np.full((len(row_B), plan.length), encoded.pad_id, np.int32)
    target_mask_BL = np.zeros(tokens_BL.shape, np.bool_)
    for slot, row in enumerate(plan.rows.tolist()):
        if row == DUMMY_ROW:
            continue
        tokens = encoded.tokens[row]
        if len(tokens) > plan.length:
            raise refused("plan", row=encoded.ids[row], length=plan.length, got=len(tokens))
        first = plan.length - len(tokens) if left else 0
        tokens_BL[slot, first : first + len(tokens)] = tokens
        start = encoded.start_N[row]
        is_target = True if encoded.masks is None else encoded.masks[row][start:]
        target_mask_BL[slot, first + start : first + len(tokens)] = is_target
    return Batch(tokens_BL, target_mask_BL, plan.num_targets, row_B)


def each_batch(
    function: Callable[[Batch], Any],
    encoded: Encoded,
    plans: Iterable[BatchPlan],
    *,
    left: bool = False,
) -> Iterator[tuple[Int[np.ndarray, " M"], Any]]:
    """Yields corpus positions and results of the real rows of each batch as NumPy arrays.

    `function` turns a batch into a tree of arrays with one entry per row.
    """
    placed = ((p.rows, meshes.place_rows(make_batch(encoded, p, left=left))) for p in plans)
    started = ((rows, function(batch)) for rows, batch in placed)
    # Pairwise: the next batch is under way before one is waited for.
    for (rows, found), _ in itertools.pairwise(itertools.chain(started, [(np.zeros(0), None)])):
        slots = np.flatnonzero(rows != DUMMY_ROW)
        yield rows[slots], jax.tree.map(lambda leaf, at=slots: meshes.fetch(leaf)[at], found)


def map_rows(
    function: Callable[[Batch], Any],
    encoded: Encoded,
    plans: Sequence[BatchPlan],
    *,
    left: bool = False,
    bar: str = "",
) -> Any:
    """Returns a function's result for every row, [N, ...], in the order of the corpus.

    `function` is as in `each_batch`, and the plans hold every row once. `bar` names a progress bar.
    """
    result: Any = None
    with progress(None, bar, total=len(encoded.ids), unit="row") as counter:
        for rows, found in each_batch(function, encoded, plans, left=left):
            if result is None:
                result = jax.tree.map(
                    lambda part: np.zeros((len(encoded.ids), *part.shape[1:]), part.dtype), found
                )
            for whole, part in zip(jax.tree.leaves(result), jax.tree.leaves(found), strict=True):
                whole[rows] = part
            counter.update(len(rows))
    return result


def num_steps_of(num_examples: int, *, batch_size: int, num_epochs: int = 1) -> int:
    """Returns the optimizer steps of so many epochs; the last batch of each may be short."""
    return num_epochs * -(-num_examples // batch_size)


def epoch_batches(
    encoded: Encoded,
    start: int = 0,
    *,
    batch_size: int,
    seed: int,
    is_fixed: bool = False,
    kept: Int[np.ndarray, " M"] | None = None,
) -> Iterator[Batch]:
    """Yields every example once an epoch, in an order by seed and epoch, without end.

    Args:
      encoded: all examples.
      start: number of batches that are done and left out.
      batch_size: size of all batches; dummy rows fill up the last one of an epoch.
      seed: seed of the orders.
      is_fixed: whether all batches have the shape of the longest example; otherwise each has its
        own.
      kept: examples that are in the order; None for all. The others only count for the shape.
    """
    order = range(len(encoded.ids))
    whole = plan_rows(encoded, np.array(order))
    num_rows = len(order if kept is None else kept)
    first, skipped = divmod(start, num_steps_of(num_rows, batch_size=batch_size))
    for epoch in itertools.count(first):
        drawn = np.array(shuffled(order, seed=seed, label=f"training epoch {epoch}"), np.int64)
        drawn = drawn if kept is None else drawn[np.isin(drawn, kept)]
        for rows in in_lines(drawn, batch_size)[skipped if epoch == first else 0 :]:
            plan = whole._replace(rows=rows) if is_fixed else plan_rows(encoded, rows)
            yield make_batch(encoded, plan)
