"""Ragged token rows into rectangular batches, and what is computed of them back into rows.

Two rules hold everywhere: the composition of a batch follows from the corpus and the settings
alone, never from what is left to do; and shapes are few, because each is compiled once. There are
two ways to shapes: `plan_batches` finds the cheapest buckets of a corpus that is run once,
`plan_rows` and those built on it take the next rung of a ladder.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from raslik_jax.data.encoding import Encoded
from raslik_jax.data.ordering import shuffled
from raslik_jax.progress import progress

DUMMY_ROW = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens_BL", "target_mask_BL", "row_B"),
    meta_fields=("num_targets",),
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """A rectangle of tokens, on the host or the device; a tree whose `num_targets` is static.

    Attributes:
      tokens_BL: int32 ids; pads hold the tokenizer's pad id.
      target_mask_BL: True where the token's own prediction counts in the loss: the response and
        EOS. Prompt and pads never count. A dummy row has none.
      num_targets: T, at least the target tokens of any row.
      row_B: position of each row in the corpus, DUMMY_ROW for none, where anyone needs it.
    """

    tokens_BL: Any
    target_mask_BL: Any
    num_targets: int
    row_B: Any = None


def real_tokens(batch: Batch) -> Bool[Array, "B L"]:
    """Returns which tokens an encoder reads, of a batch of `encode_rows` inside a jit.

    A dummy row has one too, or its softmax is of nothing.
    """
    return batch.target_mask_BL.at[:, 0].set(True)


class BatchPlan(NamedTuple):
    """Which rows make a batch, and its static shape.

    Attributes:
      rows: [B] corpus positions; DUMMY_ROW where there is none.
      length: L, a multiple of the planner's `multiple`.
      num_targets: T, at least the target tokens of any row in the bucket, likewise a multiple.
    """

    rows: np.ndarray
    length: int
    num_targets: int


def plan_batches(
    lengths_N: Int[np.ndarray, " N"],
    targets_N: Int[np.ndarray, " N"],
    *,
    ids: Sequence[str],
    num_buckets: int = 12,
    batch_tokens: int = 8192,
    multiple: int = 8,
) -> tuple[BatchPlan, ...]:
    """Returns the batches of a corpus in sketching order: by bucket, then by id.

    The edges of the buckets are those that leave the fewest tokens in all rectangles, dummy rows
    included (dynamic programme over all lengths that occur; at equal cost fewer buckets). A bucket
    of n rows and length L needs ceil(n / (batch_tokens // L)) batches and spreads its rows evenly
    over them, so that less than one row per batch is a dummy, all of them at the bucket's end. The
    result follows from the arguments alone, and not from the order of the rows.

    Args:
      lengths_N: tokens of each row.
      targets_N: tokens of each row that count in the loss.
      ids: the row ids, all different.
      num_buckets: shapes at most; each costs a compilation.
      batch_tokens: B * L at most.
      multiple: divides every L and T.

    Raises:
      ValueError: no rows, arguments of unequal length, ids that repeat, a setting below 1, or a row
        longer than batch_tokens.
    """
    num_rows = len(lengths_N)
    if num_rows == 0:
        raise ValueError("batches must have at least one row, got none")
    if not len(targets_N) == len(ids) == num_rows:
        raise ValueError(
            f"each row must have a length, a target count and an id, got {num_rows}, "
            f"{len(targets_N)} and {len(ids)}"
        )
    if len(set(ids)) != num_rows:
        raise ValueError(f"ids have to differ, {num_rows - len(set(ids))} of {num_rows} repeat")
    if min(num_buckets, batch_tokens, multiple) < 1:
        raise ValueError(f"{num_buckets=} {batch_tokens=} {multiple=}: each has to be at least 1")
    padded_N = round_up(lengths_N, multiple)
    longest = int(padded_N.max())
    if longest > batch_tokens:
        raise ValueError(
            f"a row of {longest} tokens exceeds {batch_tokens=}: raise it or lower max_len"
        )
    edges = _bucket_edges(padded_N, num_buckets, batch_tokens)
    bucket_N = np.searchsorted(edges, padded_N)
    # Sorted as Python text, by code point: NumPy would copy every id into a fixed width.
    order = sorted(range(num_rows), key=lambda position: (bucket_N[position], ids[position]))
    sizes = np.bincount(bucket_N, minlength=len(edges))
    plans: list[BatchPlan] = []
    start = 0
    for edge, size in zip(edges.tolist(), sizes.tolist(), strict=True):
        members = np.array(order[start : start + size], np.int64)
        start += size
        num_batches = -(-size // (batch_tokens // edge))
        batch_size = -(-size // num_batches)
        num_targets = int(round_up(targets_N[members], multiple).max())
        plans.extend(BatchPlan(rows, edge, num_targets) for rows in _chunks(members, batch_size))
    return tuple(plans)


def sketching_order(plans: Sequence[BatchPlan]) -> Int[np.ndarray, " N"]:
    """Returns the corpus positions in the order of the plans, without dummy rows."""
    rows = np.concatenate([plan.rows for plan in plans])
    return rows[rows != DUMMY_ROW]


def padding_waste(plans: Sequence[BatchPlan], lengths_N: Int[np.ndarray, " N"]) -> float:
    """Returns the share of all tokens in the rectangles that are pads, dummy rows included."""
    computed = sum(plan.rows.size * plan.length for plan in plans)
    return 1.0 - float(lengths_N[sketching_order(plans)].sum()) / computed


def next_rung(count: int) -> int:
    """Returns the least of 2^k and 3 * 2^(k - 1) that holds so many, from 16 up."""
    power = 1 << max(count - 1, 15).bit_length()
    return power if count > power // 4 * 3 else max(power // 4 * 3, 16)


def plan_rows(encoded: Encoded, rows: Int[np.ndarray, " B"]) -> BatchPlan:
    """Returns a batch of these rows in the next shape of a short ladder.

    L is the next of 16, 24, 32, 48, 64, 96, ..., at most a half more than needed, and T is L or
    half of it; L where every token counts, so that encoders and decoding see one shape for each L.

    Args:
      encoded: the corpus.
      rows: corpus positions, at least one of them real; DUMMY_ROW for none.
    """
    # Not encoded.lengths_N, which counts the whole corpus at every call.
    real = rows[rows != DUMMY_ROW]
    length_B = np.array([len(encoded.tokens[row]) for row in real.tolist()], np.int64)
    length = min(next_rung(int(length_B.max())), encoded.limit)
    start_B = encoded.start_N[real]
    is_half = start_B.min() > 0 and (length_B - start_B).max() <= length // 2
    return BatchPlan(rows, length, length // 2 if is_half else length)


def plan_one_shape(encoded: Encoded, *, batch_tokens: int) -> tuple[BatchPlan, ...]:
    """Returns batches in corpus order, all of the shape that the longest row needs.

    Sets of other answers to the same queries mostly share that shape.
    """
    num_rows = len(encoded.ids)
    whole = plan_rows(encoded, np.arange(num_rows))
    num_batches = -(-num_rows // max(1, batch_tokens // whole.length))
    lines = _chunks(np.arange(num_rows), -(-num_rows // num_batches))
    return tuple(whole._replace(rows=rows) for rows in lines)


def plan_by_length(encoded: Encoded, *, batch_size: int) -> tuple[BatchPlan, ...]:
    """Returns batches of neighbors in length, each in the next shape of the ladder."""
    order = np.argsort(encoded.lengths_N, kind="stable")
    return tuple(plan_rows(encoded, rows) for rows in _chunks(order, batch_size))


def _chunks(rows: Int[np.ndarray, " N"], size: int) -> Int[np.ndarray, "M B"]:
    """Returns rows in lines of one size; the last line ends with DUMMY_ROW."""
    slots = np.full(-(-len(rows) // size) * size, DUMMY_ROW, np.int64)
    slots[: len(rows)] = rows
    return slots.reshape(-1, size)


def make_batch(encoded: Encoded, plan: BatchPlan, *, left: bool = False) -> Batch:
    """Returns the rectangle of a plan.

    Args:
      encoded: the corpus.
      plan: the rows and their shape.
      left: pads stand on the left, as decoding has it.

    Raises:
      ValueError: a row that is longer than the plan, which was then made for another corpus.
    """
    shape = len(plan.rows), plan.length
    tokens_BL = np.full(shape, encoded.pad_id, np.int32)
    target_mask_BL = np.zeros(shape, np.bool_)
    for slot, row in enumerate(plan.rows.tolist()):
        if row == DUMMY_ROW:
            continue
        tokens = encoded.tokens[row]
        if len(tokens) > plan.length:
            raise ValueError(
                f"{encoded.ids[row]} must have at most the {plan.length} tokens of its plan, got "
                f"{len(tokens)}: plan the batches of this corpus"
            )
        first = plan.length - len(tokens) if left else 0
        tokens_BL[slot, first : first + len(tokens)] = tokens
        target_mask_BL[slot, first + encoded.start_N[row] : first + len(tokens)] = True
    return Batch(tokens_BL, target_mask_BL, plan.num_targets, plan.rows.astype(np.int32))


def each_batch(
    function: Callable[[Batch], Any],
    encoded: Encoded,
    plans: Iterable[BatchPlan],
    *,
    left: bool = False,
) -> Iterator[tuple[Int[np.ndarray, " M"], Any]]:
    """Yields corpus positions and results of the real rows of each batch, as NumPy arrays.

    The next batch is under way before one is waited for.

    Args:
      function: from a batch to an array, or a tree of arrays, with one entry for each of its rows.
      encoded: the corpus.
      plans: the batches.
      left: as in `make_batch`.
    """

    def real(rows: np.ndarray, found: Any) -> tuple[np.ndarray, Any]:
        slots = np.flatnonzero(rows != DUMMY_ROW)
        return rows[slots], jax.tree.map(lambda leaf: np.asarray(leaf)[slots], found)

    running: tuple[np.ndarray, Any] | None = None
    for plan in plans:
        started = plan.rows, function(make_batch(encoded, plan, left=left))
        if running is not None:
            yield real(*running)
        running = started
    if running is not None:
        yield real(*running)


def map_rows(
    function: Callable[[Batch], Any],
    encoded: Encoded,
    plans: Sequence[BatchPlan],
    *,
    left: bool = False,
    bar: str = "",
) -> Any:
    """Returns what a function makes of every row, [N, ...], in the order of the corpus.

    Args:
      function: as in `each_batch`.
      encoded: the corpus.
      plans: batches that hold every row once.
      left: as in `make_batch`.
      bar: text before a progress bar; empty for silence.
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
    encoded: Encoded, *, batch_size: int, seed: int, start: int = 0, is_fixed: bool = False
) -> Iterator[Batch]:
    """Yields every example once an epoch, in an order that seed and epoch decide, without end.

    Args:
      encoded: the corpus.
      batch_size: examples of a batch; the last one of an epoch is filled up with dummy rows.
      seed: of the run.
      start: batches to leave out at the beginning: those that were done before.
      is_fixed: all batches have the shape that the longest example needs, not each its own.
    """
    whole = plan_rows(encoded, np.arange(len(encoded.ids)))
    per_epoch = num_steps_of(len(encoded.ids), batch_size=batch_size)
    for epoch in itertools.count(start // per_epoch):
        lines = training_batches(len(encoded.ids), batch_size, seed=seed, epoch=epoch)
        for rows in lines[start % per_epoch if epoch == start // per_epoch else 0 :]:
            plan = whole._replace(rows=rows) if is_fixed else plan_rows(encoded, rows)
            yield make_batch(encoded, plan)


def training_batches(
    num_examples: int, batch_size: int, *, seed: int, epoch: int
) -> Int[np.ndarray, "M B"]:
    """Returns one epoch of row positions, one batch per line, each position exactly once.

    Where batch_size does not divide num_examples the last line ends with DUMMY_ROW: a dummy row
    has no targets and must have no weight in the mean over the batch.

    Args:
      num_examples: rows of the corpus.
      batch_size: rows per batch.
      seed: of the run.
      epoch: from 0; every epoch has an order of its own.

    Raises:
      ValueError: a count below 1.
    """
    if min(num_examples, batch_size) < 1:
        raise ValueError(f"{num_examples=} and {batch_size=} have to be at least 1")
    order = shuffled(range(num_examples), seed=seed, label=f"training epoch {epoch}")
    return _chunks(np.array(order, np.int64), batch_size)


def round_up(counts_N: Int[np.ndarray, " N"], multiple: int) -> Int[np.ndarray, " N"]:
    """Returns the next multiples, at least one of it each."""
    return np.maximum(-(-counts_N // multiple), 1) * multiple


def _bucket_edges(
    padded_N: Int[np.ndarray, " N"], num_buckets: int, batch_tokens: int
) -> Int[np.ndarray, " M"]:
    """Returns the upper edges, each the length of some row, of the cheapest buckets.

    best[k][j] = min over i < j of best[k - 1][i] + cost[i + 1, j]: k buckets for the distinct
    lengths up to the j-th, where cost counts the tokens in the rectangles of one bucket.
    """
    length_M, count_M = np.unique(padded_N, return_counts=True)
    below_M = np.concatenate([[0], np.cumsum(count_M)])
    # cost[i, j]: one bucket for the i-th to the j-th distinct length, both included.
    rows = below_M[None, 1:] - below_M[:-1, None]
    num_batches = -(-rows // (batch_tokens // length_M))
    batch_size = -(-rows // np.maximum(num_batches, 1))
    impossible = np.iinfo(np.int64).max // 4
    cost = np.where(rows > 0, num_batches * batch_size * length_M, impossible)

    best = cost[0]
    came_from = []
    best_by_count = [best[-1]]
    for _ in range(1, min(num_buckets, len(length_M))):
        totals = best[:-1, None] + cost[1:, :]
        came_from.append(np.argmin(totals, axis=0))
        best = totals.min(axis=0)
        best_by_count.append(best[-1])
    end = len(length_M) - 1
    edges = [end]
    for step in reversed(range(int(np.argmin(best_by_count)))):
        end = int(came_from[step][end])
        edges.append(end)
    return length_M[edges[::-1]]
