"""The mesh: what it refuses, how batches are filled up for it, and what one of one device is."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh
from tiny import tiny_config

from raslik_jax import meshes
from raslik_jax.data import batches, encoding
from raslik_jax.run import checking
from raslik_jax.train import loop


def _mesh(devices):
    """A context of so many devices, which need not be there."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((devices,), (meshes.DATA,)))


class MeshesTest(parameterized.TestCase):
    def test_a_mesh_that_does_not_divide_the_devices_is_refused(self):
        have = len(jax.devices())
        with self.assertRaisesRegex(
            ValueError, rf"--mesh.data must divide .* {have} \(CPU\), got {have + 1}: leave it out"
        ):
            meshes.make_mesh(have + 1)

    @parameterized.parameters(
        ("--backbone.batch_size=7", "--backbone.batch_size must be at least .* 8, got 7"),
        ("--finetune.batch_size=4", "--finetune.batch_size must be .* set --mesh.data=4 or less"),
        ("--unlearn.batch_size=2", "--unlearn.batch_size must be at least .* 8, got 2: raise it"),
    )
    def test_a_batch_below_the_mesh_is_refused_where_it_is_trained_on(self, flag, message):
        config, stages = tiny_config(flag), ("backbone", "finetune", "unlearn")
        with self.assertRaisesRegex(ValueError, message):
            checking.check_mesh(config, 8, stages=stages)
        checking.check_mesh(config, 2, stages=stages)
        checking.check_mesh(config, 8, stages=("corpus", "report"))

    @parameterized.parameters((1, 5), (4, 8), (8, 8))
    def test_batches_are_filled_up_by_dummy_rows(self, devices, expected):
        encoded = encoding.encode_rows([[1, 2, 3]] * 5, pad_id=0)
        with _mesh(devices):
            batch = batches.make_batch(encoded, batches.plan_rows(encoded, np.arange(5)))
        self.assertEqual(batch.tokens_BL.shape[0], expected)
        self.assertEqual(batch.row_B.tolist(), [0, 1, 2, 3, 4] + [-1] * (expected - 5))
        self.assertFalse(batch.target_mask_BL[5:].any())

    @parameterized.parameters(
        (0, 8, 1, 0),
        (8, 8, 1, 0),
        (2, 8, 1, 2),
        (4, 6, 4, 1),  # 24 rows over four devices
        (8, 3, 4, 1),  # two at a time would leave one
        (8, 4, 4, 2),
        (2, 2, 8, 1),  # below the devices: one each
    )
    def test_all_devices_together_hold_a_micro_batch(self, micro_batch, rows, devices, expected):
        with _mesh(devices):
            self.assertEqual(loop._rows_held(micro_batch, {rows}), expected)

    def test_on_one_device_rows_are_mapped_and_summed_as_they_are(self):
        rows_BL, one = jnp.arange(6.0).reshape(3, 2), jnp.float32(1)
        self.assertEqual(meshes.num_shards(), 1)
        mapped_B = meshes.by_rows(lambda add, x: x.sum(1) + add, one, rows=rows_BL)
        np.testing.assert_array_equal(mapped_B, [2, 6, 10])
        total = meshes.sum_rows(lambda add, x: (x.sum(), add), one, rows=rows_BL)
        np.testing.assert_array_equal(total, (15, 1))
        # Uncommitted, as any array: it is used beside arrays that no mesh has seen.
        self.assertFalse(mapped_B.committed)
        self.assertIs(meshes.replicate(rows_BL), rows_BL)


if __name__ == "__main__":
    absltest.main()
