"""Rotation, 8-bit and 1-bit rows: orthogonal, odd, and as exact as stated."""

import numpy as np
import scipy.linalg
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raslik_jax.index import quantize

small_rows = hnp.arrays(
    np.float32, (3, 70), elements=st.sampled_from([-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0])
)


def gaussian(count: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


class RotationTest(parameterized.TestCase):
    @parameterized.parameters((1, 64), (64, 64), (65, 128), (4096, 4096), (65_537, 131_072))
    def test_width_is_a_power_of_two(self, size, width):
        self.assertEqual(quantize.rotated_size(size), width)

    @parameterized.product(size=[5, 100, 256], dtype=[np.float32, np.float64])
    def test_equals_the_matrix_product(self, size, dtype):
        rows = gaussian(37, size).astype(dtype)
        width = quantize.rotated_size(size)
        padded = np.zeros((37, width))
        padded[:, :size] = rows
        signs = quantize.key_signs(width, seed=9)
        expected = (padded * signs) @ scipy.linalg.hadamard(width) / np.sqrt(width)
        rotated = quantize.rotate(rows, seed=9)
        self.assertEqual(rotated.dtype, dtype)
        np.testing.assert_allclose(rotated, expected, atol=1e-5 if dtype == np.float32 else 1e-12)
        np.testing.assert_allclose(quantize.unrotate(rotated, size=size, seed=9), rows, atol=1e-5)

    def test_rows_do_not_depend_on_their_neighbors(self):
        rows = gaussian(40, 300)
        whole = quantize.rotate(rows, seed=1)
        alone = np.concatenate([quantize.rotate(row[None], seed=1) for row in rows])
        np.testing.assert_array_equal(whole, alone)

    def test_signs_are_fair_and_differ_between_keys(self):
        count = 1 << 16
        streams = [
            quantize.key_signs(count, seed=seed, stream=stream) for seed, stream in
            ((0, 0), (0, 1), (1, 0), (2**63, 0))
        ]  # fmt: skip
        correlations = np.corrcoef(np.array(streams, np.float64)) - np.eye(4)
        means = np.array(streams, np.float64).mean(axis=1)
        bound = 5 / np.sqrt(count)
        self.assertLess(np.abs(correlations).max(), bound)
        self.assertLess(np.abs(means).max(), bound)
        # These very signs are in every int8 and 1-bit index: they may never change.
        self.assertEqual(streams[0][:16].astype(int).tolist(), EXPECTED_SIGNS)

    def test_spreads_a_spike_over_all_coordinates(self):
        spike = np.zeros((1, 256), np.float32)
        spike[0, 17] = 1
        rotated = quantize.rotate(spike, seed=0)
        np.testing.assert_allclose(np.abs(rotated), 1 / 16, rtol=1e-6)


class QuantizeTest(parameterized.TestCase):
    @settings(max_examples=30)
    @given(small_rows)
    def test_every_step_is_odd(self, rows):
        rows[0] = 0
        plus, minus = quantize.rotate(rows, seed=4), quantize.rotate(-rows, seed=4)
        np.testing.assert_array_equal(plus, -minus)
        int8_plus, int8_minus = quantize.quantize_int8(plus), quantize.quantize_int8(minus)
        np.testing.assert_array_equal(int8_plus[0], -int8_minus[0])
        np.testing.assert_array_equal(int8_plus[1], int8_minus[1])
        signs_plus = quantize.unpack_signs(quantize.pack_signs(plus, seed=4))
        signs_minus = quantize.unpack_signs(quantize.pack_signs(minus, seed=4))
        has_direction = rows.any(axis=1)
        np.testing.assert_array_equal(signs_plus[has_direction], -signs_minus[has_direction])

    def test_zero_coordinates_take_signs_of_the_key(self):
        row = np.zeros((1, 4096), np.float32)
        row[0, 7] = 1.0
        bits = [quantize.unpack_signs(quantize.pack_signs(row, seed=s))[0] > 0 for s in (0, 1)]
        self.assertTrue(bits[0][7] and bits[1][7])
        self.assertLess(abs(bits[0].mean() - 0.5), 5 * 0.5 / 64)
        self.assertFalse(np.array_equal(*bits))

    def test_int8_keeps_each_coordinate_within_half_a_step(self):
        rows = gaussian(20, 512)
        values, scale = quantize.quantize_int8(rows)
        errors = np.abs(values * scale[:, None] - rows)
        self.assertLessEqual((errors / scale[:, None]).max(), 0.5 + 1e-5)
        self.assertEqual(np.abs(values).max(axis=1).tolist(), [127] * 20)
        zero = quantize.quantize_int8(np.zeros((1, 64), np.float32))
        self.assertFalse(zero[0].any() or zero[1].any())

    def test_bits_are_packed_little_endian(self):
        row = -np.ones((1, 64), np.float32)
        row[0, [0, 9, 63]] = 1
        expected = [[1, 2, 0, 0, 0, 0, 0, 128]]
        self.assertEqual(quantize.pack_signs(row, seed=0).tolist(), expected)
        np.testing.assert_array_equal(
            quantize.unpack_signs(quantize.pack_signs(row, seed=0)), row / 8
        )


EXPECTED_SIGNS = [-1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, -1, -1]
