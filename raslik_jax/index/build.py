"""Fills an index: gradients batch by batch, committed chunk by chunk."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from raslik_jax.data.batches import DUMMY_ROW, BatchPlan
from raslik_jax.index.store import SketchStore
from raslik_jax.influence.gradients import Sketches

# Sketches of a planned batch, its dummy rows included; arrays on the host.
SketchBatch = Callable[[BatchPlan], Sketches]


def sketch_chunk(
    plans: Sequence[BatchPlan], span: slice, sketch_batch: SketchBatch
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and norms at these positions of the sketching order.

    Whole batches are computed even where a chunk needs a part of one, so that what a batch holds,
    and with it every bit of a row, never depends on what is left to do.
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
        start = stop
    return np.concatenate(units), np.concatenate(norms)


def latest_kept(sketch_batch: SketchBatch) -> SketchBatch:
    """Returns the function with its last result kept: neighbouring chunks share a batch."""
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
) -> Iterator[int]:
    """Yields the number of rows committed, chunk by chunk, until nothing is missing.

    Args:
      store: index whose ids are in the plans' sketching order.
      plans: batches of the whole corpus, the same on every run.
      sketch_batch: makes the sketches of one batch.
      chunks: chunks to make; None for those that are missing.
    """
    sketch = latest_kept(sketch_batch)
    for chunk in store.missing_chunks() if chunks is None else chunks:
        span = store.chunk_positions(chunk)
        store.write_chunk(chunk, *sketch_chunk(plans, span, sketch))
        yield span.stop - span.start
