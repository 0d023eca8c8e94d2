"""Fills an index: gradients batch by batch, committed chunk by chunk."""

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from raslik_jax.data.batches import DUMMY_ROW, Batch, BatchPlan, each_batch
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.index.store import SketchStore
from raslik_jax.parallel import processes
from raslik_jax.sketch.gradients import Sketches

_COMMITS = 64
_MAX_CHUNK_ROWS = 1024


def choose_chunk_rows(plans: Sequence[BatchPlan]) -> int:
    """Returns the rows of a chunk for these batches. They bound the work that a kill loses.

    A corpus is committed in 64 parts, or in one part per batch if it has fewer batches. Batches are
    computed whole, so finer parts save nothing. The number of rows is a multiple of 8 and at most
    1,024.
    """
    num_rows = sum(int((plan.rows != DUMMY_ROW).sum()) for plan in plans)
    rows = -(-num_rows // min(_COMMITS, len(plans)))
    return min(-(-rows // 8) * 8, _MAX_CHUNK_ROWS)


def fill_store(
    store: SketchStore,
    encoded: Encoded,
    plans: Sequence[BatchPlan],
    sketch: Callable[[Batch], Sketches],
    *,
    chunks: Iterable[int],
    count: Callable[[int], None] = lambda rows: None,
) -> int:
    """Makes and commits the rows of some chunks of a corpus and returns their number.

    Batches are computed whole even if a chunk needs a part of one. Then neither their content nor
    any bit of a row depends on the remaining work. The store's ids are in the plans' sketching
    order. `count` gets the number of rows after every batch, committed or not yet.
    """
    sizes = [int((plan.rows != DUMMY_ROW).sum()) for plan in plans]
    starts = np.cumsum([0, *sizes]).tolist()

    @functools.lru_cache(maxsize=1)  # neighboring chunks share a batch
    def sketches_of(number: int) -> Sketches:
        ((_, found),) = each_batch(sketch, encoded, [plans[number]])
        return found

    made = 0
    for chunk in chunks:
        span = store.chunk_positions(chunk)
        parts = []
        for number, start in enumerate(starts[:-1]):
            if start < span.stop and starts[number + 1] > span.start:
                part = slice(max(span.start - start, 0), span.stop - start)
                parts.append([values[part] for values in sketches_of(number)])
                count(len(parts[-1][0]))
        if processes.is_first():
            store.write_chunk(chunk, *map(np.concatenate, zip(*parts, strict=True)))
        made += span.stop - span.start
    return made
