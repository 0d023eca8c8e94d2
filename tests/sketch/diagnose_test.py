"""The diagnosis of a sketch on real back-propagated gradients, and of a broken one."""

import functools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from support import tiny_model_config

from raslik_jax.models import decoder as decoders
from raslik_jax.models.lora import NEOX_TARGETS, LoRAConfig
from raslik_jax.sketch import diagnose, loss, projections, theory
from raslik_jax.sketch.gradients import flat_gradient

NUM_EXAMPLES, LENGTH, NUM_TARGETS = 14, 24, 16


@functools.cache
def real_gradients() -> tuple[np.ndarray, tuple[projections.Segment, ...]]:
    """Returns LoRA gradients of a small GPT-NeoX with both factors away from zero."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tiny_model_config(199, intermediate_size=256, initializer_range=0.02, **sizes)
    graphdef, lora, base = decoders.create(
        config, LoRAConfig(rank=8, alpha=16.0, targets=NEOX_TARGETS), key=jax.random.key(0)
    )
    lora = jax.tree.map(
        lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), lora
    )
    decoder = decoders.bind(graphdef)
    tokens_NL = jax.random.randint(jax.random.key(1), (NUM_EXAMPLES, LENGTH), 1, 199)
    mask_NL = jnp.broadcast_to(jnp.arange(LENGTH) >= LENGTH - NUM_TARGETS, tokens_NL.shape)

    def example_loss(lora, base, tokens_L, target_mask_L):
        return loss.example_loss(
            decoder, lora, base, tokens_L, target_mask_L, num_targets=NUM_TARGETS
        )

    @jax.jit
    def gradients(lora, base):
        one = functools.partial(flat_gradient, example_loss, (lora,), base, normalize="vector")
        return jax.vmap(one)(tokens_NL, mask_NL)

    return np.asarray(gradients(lora, base)), projections.gradient_manifest(lora)


class RealGradientsTest(parameterized.TestCase):
    @parameterized.parameters(("binned", 1024), ("binned", 10_000), ("binned_hashed", 1024))
    def test_pooled_effective_size_is_the_sketch_size(self, family, size):
        gradients_NP, manifest = real_gradients()
        projection = projections.init_projection(0, family, gradients_NP.shape[1], size)
        diagnosis = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertGreaterEqual(diagnosis.num_pairs, 50)
        self.assertGreaterEqual(diagnosis.num_keys, 4)
        self.assertGreaterEqual(diagnosis.effective_size, 0.97 * size)
        self.assertEqual(diagnosis.warning, "")
        self.assertEqual(diagnosis.live_share, 1.0)
        # 64 pairs of 14 gradients under one key: the mean error is within a third of theory.
        self.assertBetween(diagnosis.measured_error / diagnosis.expected_error, 0.67, 1.5)

    def test_dense_has_no_bins_and_the_error_of_theory(self):
        gradients_NP, manifest = real_gradients()
        projection = projections.init_projection(0, "dense_rademacher", gradients_NP.shape[1], 512)
        diagnosis = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertTrue(math.isnan(diagnosis.effective_size))
        self.assertBetween(diagnosis.measured_error / diagnosis.expected_error, 0.67, 1.5)
        self.assertNotIn("effective", " ".join(name for name, _ in diagnose.table_rows(diagnosis)))

    def test_energy_names_every_tensor_and_adds_up(self):
        gradients_NP, manifest = real_gradients()
        unit_NP = gradients_NP / np.linalg.norm(gradients_NP, axis=1, keepdims=True)
        energy = diagnose.energy_by_tensor(unit_NP, manifest)
        self.assertLen(energy, 2 * len(NEOX_TARGETS))
        self.assertAlmostEqual(sum(share for _, share in energy), 1.0, places=5)
        self.assertEqual(
            [share for _, share in energy], sorted((share for _, share in energy), reverse=True)
        )

    def test_gradients_at_the_initial_adapter_leave_half_the_coordinates_dead(self):
        """With B = 0 the gradient of A is zero; K = P shows each coordinate by itself."""
        gradients_NP, manifest = real_gradients()
        gradients_NP = gradients_NP.copy()
        for segment in manifest:
            if segment.path.endswith("/a"):
                gradients_NP[:, segment.offset : segment.end] = 0.0
        num_params = gradients_NP.shape[1]
        alive = sum(math.prod(segment.shape) for segment in manifest if segment.path.endswith("/b"))
        projection = projections.init_projection(0, "binned", num_params, num_params)
        diagnosis = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertAlmostEqual(diagnosis.live_share, alive / num_params, places=3)


class SyntheticTest(parameterized.TestCase):
    def test_a_broken_shuffle_is_warned_of(self):
        """Bins of neighbors, on gradients whose energy lies in one stretch."""
        rng = np.random.default_rng(0)
        gradients_NP = rng.standard_normal((14, 4096)).astype(np.float32)
        gradients_NP[:, 1024:] *= 0.01
        projection = projections.init_projection(0, "binned", 4096, 256)
        manifest = (projections.Segment("a", (4096,), 0),)
        sound = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertEqual(sound.warning, "")
        with mock.patch.object(
            theory, "bin_of_coordinate", lambda spec: np.arange(4096) // (4096 // spec.size)
        ):
            broken = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertLess(broken.effective_size, 0.9 * 256)
        self.assertRegex(broken.warning, "256 coordinates behaves like one of [0-9]+")
        self.assertEqual(diagnose.table_rows(broken)[-1], ("warning", broken.warning))

    def test_participation_of_equal_coordinates_is_their_number(self):
        rng = np.random.default_rng(0)
        gradients_NP = np.zeros((3, 1000), np.float32)
        gradients_NP[:, :50] = rng.choice([-1.0, 1.0], (3, 50))
        projection = projections.init_projection(0, "binned", 1000, 100)
        manifest = (
            projections.Segment("one", (10, 5), 0),
            projections.Segment("two", (950,), 50),
        )
        diagnosis = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertAlmostEqual(diagnosis.participation, 50.0, places=3)
        self.assertEqual([path for path, _ in diagnosis.energy], ["one", "two"])
        self.assertAlmostEqual(diagnosis.energy[0][1], 1.0, places=6)

    def test_zero_gradients_are_left_out_and_all_zero_refused(self):
        rng = np.random.default_rng(0)
        gradients_NP = rng.standard_normal((3, 100)).astype(np.float32)
        gradients_NP[1] = 0.0
        projection = projections.init_projection(0, "binned", 100, 10)
        manifest = (projections.Segment("a", (100,), 0),)
        self.assertEqual(diagnose.diagnose(projection, gradients_NP, manifest).num_gradients, 2)
        with self.assertRaisesRegex(ValueError, "neither zero nor parallel"):
            diagnose.diagnose(projection, 0 * gradients_NP, manifest)
        with self.assertRaisesRegex(ValueError, "must have 100 coordinates"):
            diagnose.diagnose(projection, gradients_NP[:, :99], manifest)

    def test_as_many_coordinates_as_parameters_never_meet(self):
        rng = np.random.default_rng(0)
        gradients_NP = rng.standard_normal((3, 100)).astype(np.float32)
        manifest = (projections.Segment("a", (100,), 0),)
        projection = projections.init_projection(0, "binned", 100, 100)
        diagnosis = diagnose.diagnose(projection, gradients_NP, manifest)
        self.assertIn("no two coordinates meet", str(diagnose.table_rows(diagnosis)))
        self.assertIsNone(diagnose.to_json(diagnosis)["effective_size"])
        self.assertLess(diagnosis.measured_error, 1e-6)
        json.dumps(diagnose.to_json(diagnosis), allow_nan=False)

    def test_table_has_one_row_for_the_tensors_beyond_the_first(self):
        rng = np.random.default_rng(0)
        gradients_NP = rng.standard_normal((3, 100)).astype(np.float32)
        manifest = tuple(projections.Segment(f"t{i}", (10,), 10 * i) for i in range(10))
        projection = projections.init_projection(0, "binned", 100, 10)
        rows = diagnose.table_rows(
            diagnose.diagnose(projection, gradients_NP, manifest), max_tensors=3
        )
        self.assertEqual(sum(name.startswith("energy of t") for name, _ in rows), 3)
        self.assertIn("energy of 7 others", [name for name, _ in rows])
        self.assertIn(("P, LoRA parameters", "100"), rows)
