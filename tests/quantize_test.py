"""The quantised kernels: codebook, round trips, layout, gradients and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from absl.testing import parameterized

from raslik_jax.models import quantize

_KINDS = (("int8", "int8", False), ("nf4", "nf4", False), ("nf4_double", "nf4", True))


def _gaussian(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _relative_error(approximate, exact) -> float:
    return float(jnp.linalg.norm(approximate - exact) / jnp.linalg.norm(exact))


def _slow_nf4(kernel_IO: np.ndarray, block: int) -> np.ndarray:
    """Block by block, the nearest of the 16 levels by distance."""
    result = np.empty_like(kernel_IO)
    for output in range(kernel_IO.shape[1]):
        for start in range(0, kernel_IO.shape[0], block):
            values = kernel_IO[start : start + block, output]
            scale = np.abs(values).max()
            nearest = np.abs(values[:, None] / scale - quantize.NF4_CODEBOOK[None]).argmin(1)
            result[start : start + block, output] = quantize.NF4_CODEBOOK[nearest] * scale
    return result


class RoundTripTest(parameterized.TestCase):
    def test_codebook_is_the_published_one(self):
        # QLoRA, Appendix E, as bitsandbytes' create_normal_map writes it: 8 quantiles above zero,
        # 7 below, and zero itself, with the tail probability averaged over both sides.
        tail = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
        positive = scipy.stats.norm.ppf(np.linspace(tail, 0.5, 9)[:-1])
        negative = -scipy.stats.norm.ppf(np.linspace(tail, 0.5, 8)[:-1])
        levels = np.sort(np.concatenate([positive, [0.0], negative]))
        np.testing.assert_allclose(quantize.NF4_CODEBOOK, levels / levels.max(), atol=2e-7)

    def test_nf4_error_on_gaussian_weights_is_the_published_one(self):
        kernel = _gaussian(4096, 256)
        for double_quant in (False, True):
            quantised = quantize.quantise_nf4(kernel, double_quant=double_quant)
            error = _relative_error(quantize.dequantise(quantised, jnp.float32), kernel)
            self.assertAlmostEqual(error, 0.0920, delta=0.0005)

    def test_int8_error_on_gaussian_weights_is_the_published_one(self):
        # The error is that of rounding to steps of max/127, so it grows with the channel's length;
        # 0.0083 was measured at 2,048 inputs.
        kernel = _gaussian(2048, 256)
        error = _relative_error(
            quantize.dequantise(quantize.quantise_int8(kernel), jnp.float32), kernel
        )
        self.assertAlmostEqual(error, 0.0083, delta=0.0002)

    @parameterized.parameters((128, 64), (172, 4), (96, 32))
    def test_nf4_takes_the_nearest_level_of_each_block(self, inputs, block):
        kernel = np.asarray(_gaussian(inputs, 5))
        self.assertEqual(quantize.block_size(inputs), block)
        quantised = quantize.quantise_nf4(kernel, double_quant=False)
        np.testing.assert_allclose(
            quantize.dequantise(quantised, jnp.float32), _slow_nf4(kernel, block), rtol=1e-6
        )

    def test_int8_error_is_at_most_half_a_step(self):
        kernel = _gaussian(96, 7)
        quantised = quantize.quantise_int8(kernel)
        error = np.abs(np.asarray(quantize.dequantise(quantised, jnp.float32) - kernel))
        self.assertTrue((error <= np.asarray(quantised.scale) * (0.5 + 1e-5)).all())

    @parameterized.named_parameters(*_KINDS)
    def test_values_that_are_levels_survive_and_zero_channels_stay_zero(self, format, double):
        if format == "int8":
            column = np.arange(-127, 1, 1, dtype=np.float32)
        else:
            column = np.tile(quantize.NF4_CODEBOOK, 8)
        kernel = np.stack([column, 2 * column, np.zeros(128, np.float32)], axis=1)
        quantised = quantize.quantise_kernel(kernel, format, double_quant=double)
        restored = quantize.dequantise(quantised, jnp.float32)
        np.testing.assert_allclose(restored, kernel, atol=2e-2 if double else 1e-6)

    def test_negating_a_kernel_negates_its_int8_form(self):
        kernel = _gaussian(64, 8)
        plus, minus = quantize.quantise_int8(kernel), quantize.quantise_int8(-kernel)
        np.testing.assert_array_equal(plus.codes, -minus.codes)

    @parameterized.named_parameters(*_KINDS)
    def test_stacked_layers_are_quantised_one_by_one(self, format, double):
        kernel = _gaussian(3, 128, 70) * jnp.array([1.0, 3.0, 0.1])[:, None, None]
        stacked = quantize.quantise_kernel(kernel, format, double_quant=double)
        self.assertEqual(quantize.kernel_shape(stacked), kernel.shape)
        for layer in range(3):
            alone = quantize.quantise_kernel(kernel[layer], format, double_quant=double)
            sliced = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)
            jax.tree.map(np.testing.assert_array_equal, alone, sliced)
            np.testing.assert_array_equal(
                quantize.dequantise(stacked, jnp.float32)[layer],
                quantize.dequantise(alone, jnp.float32),
            )

    @parameterized.named_parameters(*_KINDS)
    def test_bfloat16_is_the_rounded_float32(self, format, double):
        quantised = quantize.quantise_kernel(_gaussian(64, 33), format, double_quant=double)
        np.testing.assert_array_equal(
            quantize.dequantise(quantised, jnp.bfloat16),
            quantize.dequantise(quantised, jnp.float32).astype(jnp.bfloat16),
        )

    @parameterized.parameters(("int8", False, 1.0), ("nf4", False, 0.5625), ("nf4", True, 0.5159))
    def test_bytes_per_weight(self, format, double, expected):
        shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        quantised = jax.eval_shape(
            functools.partial(quantize.quantise_kernel, format=format, double_quant=double), shape
        )
        per_weight = quantize.num_bytes(quantised) / 4096**2
        self.assertAlmostEqual(per_weight, expected, delta=0.0015 if format == "int8" else 1e-4)
        self.assertLess(max(leaf.dtype.itemsize for leaf in quantised[:1]), 2)

    def test_bad_requests_are_refused_in_one_sentence(self):
        kernel = _gaussian(3, 4)
        with self.assertRaisesRegex(ValueError, "num_inputs=3"):
            quantize.quantise_nf4(kernel, double_quant=False)
        with self.assertRaisesRegex(ValueError, "format='fp4'"):
            quantize.quantise_kernel(kernel, "fp4", double_quant=False)
        with self.assertRaisesRegex(ValueError, "belongs to nf4"):
            quantize.quantise_kernel(kernel, "int8", double_quant=True)
        base = {"layers": {"up": {"kernel": kernel}}}
        once = quantize.quantise_base(base, "int8", double_quant=False)
        with self.assertRaisesRegex(ValueError, r"\['layers'\]\['up'\]\['kernel'\].*already"):
            quantize.quantise_base(once, "int8", double_quant=False)


class MatmulTest(parameterized.TestCase):
    @parameterized.named_parameters(*_KINDS)
    def test_per_example_gradients_equal_those_of_the_dequantised_kernels(self, format, double):
        kernels = quantize.quantise_kernel(_gaussian(3, 64, 64) / 8, format, double_quant=double)
        dense = quantize.dequantise(kernels, jnp.float32)
        low_rank = {"a": _gaussian(3, 64, 2, seed=1) / 8, "b": _gaussian(3, 2, 64, seed=2)}
        inputs = _gaussian(5, 7, 64, seed=3)

        def loss(low_rank, kernels, inputs):
            def layer(x, weights):
                kernel, low = weights
                return jnp.tanh(quantize.matmul(x, kernel) + x @ low["a"] @ low["b"]), None

            return jax.lax.scan(layer, inputs, (kernels, low_rank))[0].sum()

        gradient = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, None, 0)))
        ours, reference = gradient(low_rank, kernels, inputs), gradient(low_rank, dense, inputs)
        for name in low_rank:
            self.assertLess(_relative_error(ours[name], reference[name]), 1e-6)

    def test_forward_mode_runs_through_it(self):
        kernel = quantize.quantise_nf4(_gaussian(64, 8), double_quant=True)
        x, tangent = _gaussian(2, 64), _gaussian(2, 64, seed=1)
        _, product = jax.jvp(lambda x: quantize.matmul(x, kernel), (x,), (tangent,))
        np.testing.assert_allclose(product, quantize.matmul(tangent, kernel), rtol=1e-6)

    @parameterized.named_parameters(*_KINDS)
    def test_a_gradient_does_not_keep_the_rebuilt_kernels(self, format, double):
        layers, width = 16, 256
        kernels = quantize.quantise_kernel(
            _gaussian(layers, width, width), format, double_quant=double
        )

        def loss(x, kernels):
            def layer(x, kernel):
                return jnp.tanh(quantize.matmul(x, kernel)), None

            return jax.lax.scan(layer, x, kernels)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(_gaussian(1, width), kernels).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        # Eight kernels' worth is room for the working copies of one layer; keeping all sixteen
        # would be twice that.
        self.assertLess(temporary, 8 * width * width * 4)

    def test_a_plain_kernel_is_multiplied_as_it_is(self):
        x, kernel = _gaussian(2, 8), _gaussian(8, 3)
        np.testing.assert_array_equal(quantize.matmul(x, kernel), x @ kernel)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
