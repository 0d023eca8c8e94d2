"""The Pallas kernels, interpreted, against their XLA twins; and that they lower for a GPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from raslik_jax.sketch import families, hashing, kernels

KEYS = {
    "keys": tuple(
        hashing.stream_keys(1, stream) for stream in (hashing.ROW_STREAM, hashing.COLUMN_STREAM)
    )
}


def random_gradients(batch: int, num_params: int) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((batch, num_params)), jnp.float32)


def integer_gradients(batch: int, num_params: int) -> jax.Array:
    """Returns small integers, whose sums are exact in any order and in bfloat16."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(-8, 9, (batch, num_params)), jnp.float32)


def table_of(num_params: int, size: int) -> jax.Array:
    spec = families.ProjectionSpec(family="binned", num_params=num_params, size=size, seed=1)
    return jnp.asarray(families.binned_table(spec))


def without_a_gpu():
    """Returns a context in which code lowers for an H200 that is not there."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lower_for_cuda(function, *arguments) -> str:
    with without_a_gpu():
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


class DenseTest(parameterized.TestCase):
    @parameterized.product(
        operand=("float32", "bfloat16"),
        shape=((1, 100, 7), (5, 5000, 300), (20, 2048, 128)),
        blocks=(
            None,
            kernels.DenseBlocks(columns=32, examples=16, splits=1, warps=4),
            kernels.DenseBlocks(columns=128, examples=32, splits=2, warps=4),
        ),
    )
    def test_kernel_equals_its_twin_exactly_on_integers(self, operand, shape, blocks):
        batch, num_params, size = shape
        gradients_BP = integer_gradients(batch, num_params)
        settings = {"size": size, "operand": operand, **KEYS}
        np.testing.assert_array_equal(
            kernels.dense_sums_pallas(gradients_BP, blocks=blocks, interpret=True, **settings),
            kernels.dense_sums_xla(gradients_BP, **settings),
        )

    @parameterized.parameters("float32", "bfloat16")
    def test_kernel_equals_its_twin_on_floats(self, operand):
        gradients_BP = random_gradients(5, 5000)
        settings = {"size": 300, "operand": operand, **KEYS}
        twin_BK = kernels.dense_sums_xla(gradients_BP, **settings)
        # Sums of 5,000 in another order: a few units in the last place of the sum of magnitudes.
        np.testing.assert_allclose(
            kernels.dense_sums_pallas(gradients_BP, interpret=True, **settings),
            twin_BK,
            rtol=0,
            atol=5e-6 * float(jnp.abs(twin_BK).max()),
        )

    def test_float32_operand_keeps_all_bits_through_bfloat16_products(self):
        # 1 + 2 ** -23 has the longest mantissa there is.
        gradients_BP = jnp.full((1, 1), 1 + 2**-23, jnp.float32)
        for sums in (
            kernels.dense_sums_xla,
            functools.partial(kernels.dense_sums_pallas, interpret=True),
        ):
            sketch_BK = sums(gradients_BP, size=1, operand="float32", **KEYS)
            self.assertEqual(abs(float(sketch_BK[0, 0])), 1 + 2**-23)
            rounded_BK = sums(gradients_BP, size=1, operand="bfloat16", **KEYS)
            self.assertEqual(abs(float(rounded_BK[0, 0])), 1.0)

    def test_bfloat16_operand_rounds_the_gradient_and_nothing_else(self):
        gradients_BP = random_gradients(2, 3000)
        rounded_BP = jax.lax.reduce_precision(gradients_BP, exponent_bits=8, mantissa_bits=7)
        got_BK = kernels.dense_sums_xla(gradients_BP, size=64, operand="bfloat16", **KEYS)
        wanted_BK = kernels.dense_sums_xla(rounded_BP, size=64, operand="float32", **KEYS)
        np.testing.assert_allclose(got_BK, wanted_BK, rtol=0, atol=1e-4)

    def test_signs_do_not_depend_on_the_tile(self):
        """One column block of the twin is 1,024 wide: cross its edge, and a block of rows."""
        gradients_BP = integer_gradients(1, 2 * kernels.ROWS_PER_BLOCK + 5)
        wide_BK = kernels.dense_sums_xla(gradients_BP, size=1100, operand="float32", **KEYS)
        narrow_BK = kernels.dense_sums_xla(gradients_BP, size=1030, operand="float32", **KEYS)
        np.testing.assert_array_equal(wide_BK[:, :1030], narrow_BK)

    @parameterized.parameters(
        # (batch, P, K) -> (columns, examples, splits): all programs of an H200 have work.
        (1, 8_388_608, 65_536, 128, 16, 1),
        (128, 8_388_608, 65_536, 128, 128, 1),
        (1000, 8_388_608, 65_536, 128, 256, 1),
        (64, 20_971_520, 4_096, 128, 64, 16),
        (8, 1_000, 512, 128, 16, 1),
    )
    def test_blocks_follow_the_shape(self, batch, num_params, size, columns, examples, splits):
        blocks = kernels.dense_blocks(batch, num_params, size)
        self.assertEqual(
            (blocks.columns, blocks.examples, blocks.splits), (columns, examples, splits)
        )

    @parameterized.parameters("float32", "bfloat16")
    def test_lowers_for_a_gpu_by_triton_and_for_a_cpu_by_xla(self, operand):
        sums = functools.partial(kernels.dense_sums, size=300, operand=operand, **KEYS)
        gradients_BP = jnp.zeros((5, 5000))
        self.assertIn("triton", lower_for_cuda(sums, gradients_BP))
        self.assertNotIn("triton", jax.jit(sums).lower(gradients_BP).as_text())

    def test_full_shape_lowers_for_a_gpu(self):
        """OLMo-2-7B: 128 gradients of 8.4 million floats, 32-bit offsets not enough."""
        gradients_BP = jax.ShapeDtypeStruct((128, 8_388_608), jnp.float32)
        sums = functools.partial(kernels.dense_sums, size=65_536, operand="bfloat16", **KEYS)
        self.assertIn("triton", lower_for_cuda(sums, gradients_BP))


class BinnedTest(parameterized.TestCase):
    @parameterized.parameters((1, 100, 7), (5, 5000, 300), (70, 700, 64), (3, 64, 64))
    def test_both_layouts_agree(self, batch, num_params, size):
        gradients_BP = random_gradients(batch, num_params)
        table_MK = table_of(num_params, size)
        by_row_BK = kernels.binned_sums_by_row(table_MK, gradients_BP)
        np.testing.assert_allclose(
            kernels.binned_sums_by_column(table_MK, gradients_BP), by_row_BK, rtol=0, atol=2e-5
        )
        np.testing.assert_array_equal(kernels.binned_sums(table_MK, gradients_BP), by_row_BK)

    @parameterized.parameters((1, 100, 7), (70, 700, 64), (3, 64, 64), (64, 1000, 90))
    def test_kernel_equals_the_layout_of_a_cpu_exactly(self, batch, num_params, size):
        """Both add the slots of a bin in order; no shape is of whole tiles."""
        gradients_BP = random_gradients(batch, num_params)
        table_MK = table_of(num_params, size)
        np.testing.assert_array_equal(
            kernels.binned_sums_pallas(table_MK, gradients_BP, interpret=True),
            kernels.binned_sums_by_row(table_MK, gradients_BP),
        )

    def test_all_bins_in_one_slot(self):
        gradients_BP = integer_gradients(2, 10)
        sketch_BK = kernels.binned_sums(table_of(10, 10), gradients_BP)
        np.testing.assert_array_equal(
            np.sort(np.abs(sketch_BK), axis=1), np.sort(np.abs(gradients_BP), axis=1)
        )

    def test_lowers_for_a_gpu(self):
        table_MK = table_of(5000, 300)
        gradients_BP = jnp.zeros((5, 5000))
        self.assertIn("triton", lower_for_cuda(kernels.binned_sums, table_MK, gradients_BP))
