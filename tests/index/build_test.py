"""An index is filled by whole batches, committed often, and its progress moves with each batch."""

import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from raslik_jax.data.batches import DUMMY_ROW, BatchPlan
from raslik_jax.index import build
from raslik_jax.index.store import SketchStore
from raslik_jax.sketch.gradients import Sketches


def _plans(num_rows, batch_rows):
    rows = np.full(-(-num_rows // batch_rows) * batch_rows, DUMMY_ROW, np.int64)
    rows[:num_rows] = np.arange(num_rows)
    return tuple(BatchPlan(part, 8, 8) for part in rows.reshape(-1, batch_rows))


def _sketch(plan):
    unit_BK = np.zeros((len(plan.rows), 4), np.float32)
    unit_BK[np.arange(len(plan.rows)), plan.rows % 4] = 1
    return Sketches(unit_BK, np.where(plan.rows == DUMMY_ROW, 0, 1).astype(np.float32))


class BuildTest(parameterized.TestCase):
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
        store = SketchStore.create(
            self.enter_context(tempfile.TemporaryDirectory()) + "/index",
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
            build.fill_store(store, plans, _sketch, count=die)
        self.assertEqual(counted, [4] * 6)
        self.assertEqual(store.missing_chunks(), (2, 3))
        self.assertEqual(build.fill_store(store, plans, _sketch, count=counted.append), 14)
        self.assertEqual(sum(counted[6:]), 14)
        store.finish()
        np.testing.assert_array_equal(
            store.rows(np.arange(30)), np.eye(4, dtype=np.float32)[np.arange(30) % 4]
        )


if __name__ == "__main__":
    absltest.main()
