"""Seeded orders are permutations, the same ones for ever."""

from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from raslik_jax.data.ordering import shuffled, take_first


class OrderingTest(parameterized.TestCase):
    @given(st.lists(st.integers(0, 5)), st.integers(), st.text())
    def test_every_item_stays(self, items, seed, label):
        self.assertCountEqual(shuffled(items, seed=seed, label=label), items)

    def test_order_is_the_one_written_down(self):
        # Corpora, batches and with them every index hang on it.
        self.assertEqual(shuffled(range(8), seed=0, label="a"), [6, 7, 2, 1, 5, 3, 0, 4])

    def test_seed_and_label_give_other_orders(self):
        orders = [shuffled(range(50), seed=s, label=n) for s, n in ((0, "a"), (1, "a"), (0, "b"))]
        self.assertLen({tuple(order) for order in orders}, 3)

    def test_each_item_comes_first_equally_often(self):
        firsts = [shuffled(range(4), seed=s, label="a")[0] for s in range(1000)]
        # 5 standard errors of a share of 1/4.
        bound = 5 * (0.25 * 0.75 / 1000) ** 0.5
        for item in range(4):
            self.assertAlmostEqual(firsts.count(item) / 1000, 0.25, delta=bound)

    def test_taking_more_than_there_is_is_refused(self):
        self.assertEqual(take_first([1, 2], 2, kind="odd"), [1, 2])
        with self.assertRaisesRegex(ValueError, "odd rows must be between 0 and 2, got 3"):
            take_first([1, 2], 3, kind="odd")
