"""An index is filled by whole batches, committed often, and its progress moves with each batch."""

import numpy as np
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.data.batches import DUMMY_ROW, BatchPlan
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.index import build
from raslik_jax.index.store import SketchStore
from raslik_jax.sketch.gradients import Sketches


def _plans(num_rows, batch_rows):
    rows = np.full(-(-num_rows // batch_rows) * batch_rows, DUMMY_ROW, np.int64)
    rows[:num_rows] = np.arange(num_rows)
    return tuple(BatchPlan(part, 8, 8) for part in rows.reshape(-1, batch_rows))


def _sketch(batch):
    return Sketches(np.eye(4, dtype=np.float32)[batch.row_B % 4], np.ones(len(batch.row_B), "f4"))


class BuildTest(FolderTest):
    @parameterized.parameters(
        # rows, rows of a batch, rows of a chunk
        (900, 4, 16),
        (900, 64, 64),
        (2000, 16, 32),
        (6, 32, 8),
        (200_000, 32, 1024),
    )
    def test_chunks_follow_the_corpus_and_hold_a_batch_or_more(self, num_rows, batch, expected):
        self.assertEqual(build.choose_chunk_rows(_plans(num_rows, batch)), expected)

    def test_a_kill_in_a_small_corpus_costs_one_chunk_and_progress_moves_by_batches(self):
        plans, counted = _plans(30, 4), []
        tokens = (np.zeros(3, np.int32),) * 30
        encoded = Encoded(tuple("x" * 30), tokens, np.zeros(30, int), pad_id=0)
        store = SketchStore.create(
            f"{self.folder}/index",
            identity={},
            ids=[str(row) for row in range(30)],
            size=4,
            chunk_rows=build.choose_chunk_rows(plans),
        )

        def die(rows):
            counted.append(rows)
            if len(counted) == 6:
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            build.fill_store(
                store, encoded, plans, _sketch, chunks=store.missing_chunks(), count=die
            )
        self.assertEqual(counted, [4] * 6)
        self.assertEqual(store.missing_chunks(), (2, 3))
        made = build.fill_store(
            store, encoded, plans, _sketch, chunks=store.missing_chunks(), count=counted.append
        )
        self.assertEqual(made, 14)
        self.assertEqual(sum(counted[6:]), 14)
        store.finish()
        np.testing.assert_array_equal(
            store.rows(np.arange(30)), np.eye(4, dtype=np.float32)[np.arange(30) % 4]
        )
