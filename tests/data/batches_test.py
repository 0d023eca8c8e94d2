"""Batches hold every row once, in an order and shape that follow from the corpus alone."""

import itertools
import pathlib

import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from support import shared_data

from experiments.make_alpaca_lengths import count_lengths
from raslik_jax.data import alpaca_lengths
from raslik_jax.data import batches as bt
from raslik_jax.data.tokens.encoding import Encoded, encode_rows

_LENGTHS_OF_ROWS = (9, 4, 14)


def _encode():
    """Returns rows of numbers from 1 up, of which the first 3 are prompt."""
    rows = encode_rows([range(1, 1 + n) for n in _LENGTHS_OF_ROWS], pad_id=0)
    return rows._replace(start_N=np.full(3, 3))


class MakeBatchTest(parameterized.TestCase):
    def test_rectangle_is_the_rows_and_pads_count_nothing(self):
        encoded = _encode()
        batch = bt.make_batch(encoded, bt.plan_rows(encoded, np.array([2, -1, 0])))
        self.assertEqual(batch.tokens_BL.shape[1] % 8, 0)
        for slot, row in ((0, 2), (2, 0)):
            length, start = len(encoded.tokens[row]), encoded.start_N[row]
            np.testing.assert_array_equal(batch.tokens_BL[slot, :length], encoded.tokens[row])
            self.assertTrue((batch.tokens_BL[slot, length:] == encoded.pad_id).all())
            np.testing.assert_array_equal(
                np.flatnonzero(batch.target_mask_BL[slot]), np.arange(start, length)
            )
        self.assertEqual(batch.row_B.tolist(), [2, -1, 0])
        self.assertFalse(batch.target_mask_BL[1].any())
        self.assertTrue((batch.tokens_BL[1] == encoded.pad_id).all())
        self.assertEqual((batch.tokens_BL.dtype, batch.row_B.dtype), (np.int32, np.int32))

    def test_pads_may_stand_on_the_left(self):
        encoded = _encode()
        batch = bt.make_batch(encoded, bt.plan_rows(encoded, np.array([1, -1])), left=True)
        self.assertEqual(batch.tokens_BL[0].tolist(), [0] * 12 + [1, 2, 3, 4])
        self.assertEqual(np.flatnonzero(batch.target_mask_BL[0]).tolist(), [15])

    @parameterized.parameters(1, 2, 5)
    def test_results_of_batches_come_back_in_the_order_of_the_rows(self, batch_size):
        encoded = _encode()
        plans = {
            "by length": bt.plan_by_length(encoded, batch_size=batch_size),
            "one shape": bt.plan_one_shape(encoded, batch_tokens=16 * batch_size),
        }

        def function(batch):
            return batch.tokens_BL.sum(1), {"row": batch.row_B[:, None]}

        for part in plans.values():
            sums_N, found = bt.map_rows(function, encoded, part)
            self.assertEqual(sums_N.tolist(), [n * (n + 1) // 2 for n in _LENGTHS_OF_ROWS])
            self.assertEqual(found["row"].tolist(), [[0], [1], [2]])
        self.assertLen({plan[1:] for plan in plans["one shape"]}, 1)

    def test_a_shape_never_exceeds_what_the_model_takes(self):
        encoded = encode_rows([[1] * 17], pad_id=0, limit=20)
        self.assertEqual(bt.plan_rows(encoded, np.array([0])).length, 20)
        with self.assertRaisesRegex(ValueError, "must have 1 to 20 tokens, got 21 to 21"):
            encode_rows([[1] * 21], pad_id=0, limit=20)

    def test_a_training_shape_holds_its_rows_and_stands_on_the_ladder(self):
        shapes = set()
        for length in range(2, 300):
            for start in {1, length // 2, length - 1}:
                encoded = Encoded(
                    ids=("a",),
                    tokens=(np.zeros(length, np.int32),),
                    start_N=np.array([start]),
                    pad_id=0,
                )
                plan = bt.plan_rows(encoded, np.array([0, -1]))
                self.assertBetween(plan.length, length, max(16, 1.5 * length))
                self.assertBetween(plan.num_targets, length - start, plan.length)
                shapes.add((plan.length, plan.num_targets))
        self.assertEqual(
            {length for length, _ in shapes}, {16, 24, 32, 48, 64, 96, 128, 192, 256, 384}
        )
        self.assertLen(shapes, 2 * 10)

    def test_a_plan_of_another_corpus_is_refused(self):
        plan = bt.BatchPlan(np.array([2]), 8, 8)
        with self.assertRaisesRegex(ValueError, "must fit its plan of 8 tokens, got 14"):
            bt.make_batch(_encode(), plan)


_LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def _plan(lengths, **options):
    lengths_N = np.array(lengths, np.int64)
    ids = [f"r{position:03d}" for position in range(len(lengths))]
    options = {"num_buckets": 3, "batch_tokens": 128, "ids": ids} | options
    return bt.plan_batches(lengths_N, np.maximum(lengths_N - 2, 0), **options)


def _cheapest(lengths, num_buckets, batch_tokens, program=0):
    """Tries every choice of edges; each costs a program."""
    padded = [-(-length // 8) * 8 for length in lengths]
    known = sorted(set(padded))
    costs = []
    for size in range(min(num_buckets, len(known))):
        for inner in itertools.combinations(known[:-1], size):
            low, cost = 0, program * (size + 1)
            for edge in (*inner, known[-1]):
                rows = sum(low < length <= edge for length in padded)
                num_batches = -(-rows // (batch_tokens // edge))
                cost += num_batches * -(-rows // num_batches) * edge
                low = edge
            costs.append(cost)
    return min(costs)


class PlanTest(parameterized.TestCase):
    @given(_LENGTHS, st.integers(1, 5))
    def test_every_row_is_there_once_and_fits(self, lengths, num_buckets):
        plans = _plan(lengths, num_buckets=num_buckets)
        order = bt.sketching_order(plans).tolist()
        self.assertCountEqual(order, range(len(lengths)))
        for plan in plans:
            rows = plan.rows[plan.rows >= 0]
            self.assertNotEmpty(rows)
            self.assertLessEqual(max(lengths[row] for row in rows), plan.length)
            self.assertLessEqual(max(lengths[row] - 2 for row in rows), plan.num_targets)
            self.assertEqual((plan.length % 8, plan.num_targets % 8), (0, 0))
            self.assertLessEqual(len(plan.rows) * plan.length, 128)

    @given(_LENGTHS, st.integers(1, 5))
    def test_buckets_have_one_shape_sorted_ids_and_dummies_at_their_end(self, lengths, num_buckets):
        plans = _plan(lengths, num_buckets=num_buckets)
        buckets = [list(group) for _, group in itertools.groupby(plans, lambda p: p.length)]
        self.assertLessEqual(len(buckets), num_buckets)
        edges = [bucket[0].length for bucket in buckets]
        self.assertEqual(edges, sorted(set(edges)))
        for bucket in buckets:
            self.assertLen({(len(plan.rows), plan.num_targets) for plan in bucket}, 1)
            rows = np.concatenate([plan.rows for plan in bucket])
            real = rows[rows >= 0].tolist()
            self.assertEqual(rows[: len(real)].tolist(), sorted(real))  # ids sort as positions
            self.assertLess(len(rows) - len(real), len(bucket))

    @given(_LENGTHS, st.integers(1, 5))
    def test_edges_are_the_cheapest_of_all(self, lengths, num_buckets):
        plans = _plan(lengths, num_buckets=num_buckets)
        computed = sum(plan.rows.size * plan.length for plan in plans)
        self.assertEqual(computed, _cheapest(lengths, num_buckets, 128))

    @given(_LENGTHS, st.sampled_from([0, 1, 30, 128, 1000]))
    def test_programs_that_nobody_limits_cost_what_is_said_or_a_batch(self, lengths, program):
        plans = _plan(lengths, num_buckets=0, program_tokens=program)
        computed = sum(plan.rows.size * plan.length for plan in plans)
        num_programs, cost = len({plan.length for plan in plans}), program or 128
        self.assertEqual(computed + cost * num_programs, _cheapest(lengths, 12, 128, program=cost))

    @given(_LENGTHS, st.randoms(use_true_random=False))
    def test_order_of_the_corpus_plays_no_part(self, lengths, random):
        ids = [f"r{position:03d}" for position in range(len(lengths))]
        mixed = list(range(len(lengths)))
        random.shuffle(mixed)
        plans = _plan(lengths)
        again = _plan([lengths[i] for i in mixed], ids=[ids[i] for i in mixed])
        self.assertEqual([p[1:] for p in plans], [p[1:] for p in again])
        for plan, other in zip(plans, again, strict=True):
            named = [mixed[row] if row >= 0 else -1 for row in other.rows]
            self.assertEqual(plan.rows.tolist(), named)

    def test_a_row_that_fits_no_batch_is_refused(self):
        with self.assertRaisesRegex(ValueError, "batch_tokens=128 tokens, got one of 200"):
            _plan([200])

    def test_real_lengths_waste_little(self):
        lengths_N, targets_N = alpaca_lengths.load_alpaca_lengths(max_len=512)
        self.assertLen(lengths_N, 52_002)
        ids = [f"{position:05d}" for position in range(len(lengths_N))]
        plans = bt.plan_batches(lengths_N, targets_N, ids=ids)
        computed = sum(plan.rows.size * plan.length for plan in plans)
        self.assertLess(1 - lengths_N.sum() / computed, 0.12)
        self.assertLessEqual(len({plan.length for plan in plans}), 12)

    @pytest.mark.heavy
    def test_lengths_in_the_package_are_those_of_the_real_rows(self):
        data = shared_data()
        alpaca, pythia = data / "alpaca" / "alpaca_data.json.xz", data / "tokenizers" / "pythia"
        shipped = pathlib.Path(alpaca_lengths.__file__).with_suffix(".json").read_text()
        self.assertEqual(count_lengths(str(alpaca), str(pythia)), shipped)


class EpochBatchesTest(parameterized.TestCase):
    @given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 3))
    def test_every_epoch_uses_every_row_once(self, num_examples, batch_size, epoch):
        per_epoch = bt.num_steps_of(num_examples, batch_size=batch_size)
        rows_MB = self._rows(num_examples, batch_size, start=epoch * per_epoch)
        flat = [row for rows in rows_MB for row in rows]
        self.assertCountEqual(flat[:num_examples], range(num_examples))
        self.assertEqual(set(flat[num_examples:]) - {-1}, set())
        self.assertEqual({len(rows) for rows in rows_MB}, {batch_size})

    def _rows(self, num_examples, batch_size, *, seed=0, start=0):
        """Returns the rows of the batches of one epoch."""
        encoded = encode_rows([[1, 2]] * num_examples, pad_id=0)
        stream = bt.epoch_batches(encoded, batch_size=batch_size, seed=seed, start=start)
        per_epoch = bt.num_steps_of(num_examples, batch_size=batch_size)
        return [batch.row_B.tolist() for batch in itertools.islice(stream, per_epoch)]

    def test_seed_and_epoch_decide_the_order(self):
        first = self._rows(8, 4)
        self.assertEqual(first, [[6, 5, 2, 7], [4, 3, 0, 1]])
        self.assertNotEqual(first, self._rows(8, 4, start=2))
        self.assertNotEqual(first, self._rows(8, 4, seed=1))

    def test_rows_that_are_not_kept_leave_order_and_shape_of_the_others(self):
        encoded, whole, kept = _encode(), [], []
        for rows, found in ((None, whole), (np.array([0, 2]), kept)):
            stream = bt.epoch_batches(encoded, batch_size=1, seed=4, is_fixed=True, kept=rows)
            found += itertools.islice(stream, 9 if rows is None else 6)
        left = [batch for batch in whole if batch.row_B[0] != 1]
        for got, expected in zip(kept, left, strict=True):
            np.testing.assert_array_equal(got.tokens_BL, expected.tokens_BL)
        on = bt.epoch_batches(encoded, 3, batch_size=1, seed=4, kept=np.array([0, 2]))
        self.assertEqual(next(on).row_B, kept[3].row_B)

    @parameterized.parameters(False, True)
    def test_batches_go_on_where_they_stopped(self, is_fixed):
        encoded = _encode()

        def first(count, start=0):
            stream = bt.epoch_batches(encoded, batch_size=2, seed=0, start=start, is_fixed=is_fixed)
            return [next(stream) for _ in range(count)]

        whole = first(7)
        for start in (1, 2, 5):
            for got, expected in zip(first(7 - start, start), whole[start:], strict=True):
                np.testing.assert_array_equal(got.tokens_BL, expected.tokens_BL)
                np.testing.assert_array_equal(got.row_B, expected.row_B)
        for epoch in range(3):
            rows = np.concatenate([batch.row_B for batch in whole[2 * epoch : 2 * epoch + 2]])
            self.assertCountEqual(rows.tolist(), [0, 1, 2, -1])
        if is_fixed:
            self.assertLen({batch.tokens_BL.shape for batch in whole}, 1)
