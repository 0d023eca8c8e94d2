"""Fills an index: gradients batch by batch, committed chunk by chunk."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from raslik_jax.data.batches import DUMMY_ROW, BatchPlan
from raslik_jax.index.store import SketchStore
from raslik_jax.sketch.gradients import Sketches

# Sketches of a planned batch, its dummy rows included; arrays on the host.
SketchBatch = Callable[[BatchPlan], Sketches]

_COMMITS = 64
_MAX_CHUNK_ROWS = 1024


def choose_chunk_rows(plans: Sequence[BatchPlan]) -> int:
    """Returns the rows of a chunk for these batches: what a kill may cost follows the work.

    A corpus is committed in 64 parts, or in as many as it has batches where those are fewer: whole
    batches are computed, so finer parts save nothing. A multiple of 8, at most 1,024.
    """
    num_rows = sum(int((plan.rows != DUMMY_ROW).sum()) for plan in plans)
    rows = -(-num_rows // min(_COMMITS, len(plans)))
    return min(-(-rows // 8) * 8, _MAX_CHUNK_ROWS)


def sketch_chunk(
    plans: Sequence[BatchPlan],
    span: slice,
    sketch_batch: SketchBatch,
    *,
    count: Callable[[int], None] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and norms at these positions of the sketching order.

    Whole batches are computed even where a chunk needs a part of one, so that what a batch holds,
    and with it every bit of a row, never depends on what is left to do.

    Args:
      plans: batches of the whole corpus.
      span: positions in the sketching order.
      sketch_batch: makes the sketches of one batch.
      count: is given the number of rows after every batch.
    """
    units, norms, start = [], [], 0
    for plan in plans:
        is_real_B = plan.rows != DUMMY_ROW
        stop = start + int(is_real_B.sum())
        if start < span.stop and stop > span.start:
            sketches = sketch_batch(plan)
            part = slice(max(span.start - start, 0), span.stop - start)
            units.append(np.asarray(sketches.unit_BK)[is_real_B][part])
            norms.append(np.asarray(sketches.norm_B)[is_real_B][part])
            count(len(norms[-1]))
        start = stop
    return np.concatenate(units), np.concatenate(norms)


def latest_kept(sketch_batch: SketchBatch) -> SketchBatch:
    """Returns the function with its last result kept: neighboring chunks share a batch."""
    kept: list[tuple[BatchPlan, Sketches]] = []

    def sketch(plan: BatchPlan) -> Sketches:
        if not kept or kept[0][0] is not plan:
            kept[:] = [(plan, sketch_batch(plan))]
        return kept[0][1]

    return sketch


def fill_store(
    store: SketchStore,
    plans: Sequence[BatchPlan],
    sketch_batch: SketchBatch,
    *,
    chunks: Iterable[int] | None = None,
    count: Callable[[int], None] = lambda rows: None,
) -> int:
    """Makes and commits rows, chunk by chunk, until nothing is missing; how many were made.

    Args:
      store: index whose ids are in the plans' sketching order.
      plans: batches of the whole corpus, the same on every run.
      sketch_batch: makes the sketches of one batch.
      chunks: chunks to make; None for those that are missing.
      count: is given the number of rows after every batch, committed or not yet.
    """
    sketch, made = latest_kept(sketch_batch), 0
    for chunk in store.missing_chunks() if chunks is None else chunks:
        span = store.chunk_positions(chunk)
        store.write_chunk(chunk, *sketch_chunk(plans, span, sketch, count=count))
        made += span.stop - span.start
    return made
