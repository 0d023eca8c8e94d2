"""Sketched per-example gradients, against a loop of plain gradients."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from support import tiny_model, token_rows

from raslik_jax.base import machine
from raslik_jax.models import quantize
from raslik_jax.parallel import meshes
from raslik_jax.sketch import gradients, projections
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.loss import example_loss

_MODEL = tiny_model()
_NUM_PARAMS = projections.count_params(_MODEL.lora)
_SHAPES = [(4, 5), (6, 3), (2, 7), (5, 1)]


def _loss(num_targets=8, loss="unshifted"):
    return functools.partial(example_loss, _MODEL.decoder, num_targets=num_targets, loss=loss)


_GRADIENT = jax.jit(jax.grad(_loss()))


def _projection(size=64, family="binned"):
    return projections.init_projection(7, family, _NUM_PARAMS, size)


@functools.cache
def _step(num_targets=8, **options):
    """What all tests share, and what is compiled once for the same shapes."""
    return jax.jit(functools.partial(gradients.sketch_gradients, _loss(num_targets), **options))


def _sketch(rows, projection, lora, *, base=_MODEL.base, **options):
    arrays = map(jnp.asarray, (rows.tokens_BL, rows.target_mask_BL))
    return _step(**options)(projection, lora, base, *arrays)


def _slow_gradient(lora, tokens_L, target_mask_L, *, normalize):
    """Returns one example's flat gradient: leaves sorted by path, in float64."""
    grads = _GRADIENT(lora, _MODEL.base, jnp.asarray(tokens_L), jnp.asarray(target_mask_L))
    parts = []
    for segment in projections.gradient_manifest(grads):
        leaf = np.asarray(functools.reduce(lambda t, k: t[k], segment.path.split("/"), grads))
        for layer in leaf.astype(np.float64):
            norm = np.linalg.norm(layer) if normalize == "per_tensor" else 1.0
            parts.append(layer.ravel() / (norm or 1.0))
    return np.concatenate(parts)


class GradientsTest(parameterized.TestCase):
    @parameterized.parameters(1e-6, 1e4)
    def test_tensors_of_half_precision_have_unit_gradients(self, scale):
        grads = {"a": jnp.full((3, 4), scale, jnp.float16), "b": jnp.ones(5, jnp.float16)}
        flat = gradients.flat_gradient(
            lambda params, frozen: sum(
                jnp.sum(params[name] * jax.lax.stop_gradient(grads[name])) for name in grads
            ),
            jax.tree.map(jnp.zeros_like, grads),
            {},
            normalize="per_tensor",
        )
        np.testing.assert_allclose(flat[:12], 12**-0.5, rtol=1e-3)
        np.testing.assert_allclose(flat[12:], 5**-0.5, rtol=1e-3)

    # Gradients are normalized before they are projected, by any family.
    @parameterized.parameters(*(("vector", name) for name in PROJECTIONS), ("per_tensor", "binned"))
    def test_equals_a_loop_over_examples(self, normalize, family):
        rows, projection = token_rows(0, _SHAPES), _projection(family=family)
        got = _sketch(rows, projection, _MODEL.lora, normalize=normalize)
        for row in range(len(_SHAPES)):
            flat_P = _slow_gradient(
                _MODEL.lora, rows.tokens_BL[row], rows.target_mask_BL[row], normalize=normalize
            )
            sketch_K = np.asarray(
                projections.project(projection, jnp.asarray(flat_P, jnp.float32)), np.float64
            )
            norm = np.linalg.norm(sketch_K)
            np.testing.assert_allclose(got.norm_B[row], norm, rtol=1e-4)
            np.testing.assert_allclose(got.unit_BK[row], sketch_K / norm, atol=2e-5)

    def test_a_tensor_of_a_users_tree_is_a_leaf_and_examples_are_trees_of_any_shape(self):
        rng = np.random.default_rng(0)
        weights = {"layers": [{"w": rng.normal(size=(3, 2))}], "bias": rng.normal(size=2)}
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights)
        batch = {"image": rng.normal(size=(5, 2, 2, 3)), "label": rng.normal(size=5)}
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), batch)

        def loss(weights, scale, row):
            said = jnp.tanh(row["image"] @ weights["layers"][0]["w"] + weights["bias"][None, None])
            return scale * jnp.square(said - row["label"]).sum()

        projection = projections.init_projection(0, "binned", 8, 8)  # signs and an order
        given = loss, projection, weights, jnp.float32(2)
        for micro_tokens in (None, 2):
            how = {"normalize": "per_tensor", "micro_tokens": micro_tokens}
            found = gradients.sketch_gradients(*given, batch, **how)
            # Each of two tensors has length 1, so that the whole has the square root of 2.
            np.testing.assert_allclose(found.norm_B, np.full(5, 2**0.5), rtol=1e-5)
            for row in range(5):
                example = jax.tree.map(lambda leaf, row=row: leaf[row], batch)
                own = jax.tree.leaves(jax.grad(loss)(weights, jnp.float32(2), example))
                unit_P = np.concatenate([(leaf / jnp.linalg.norm(leaf)).ravel() for leaf in own])
                expected_K = projections.project(projection, jnp.asarray(unit_P)) / 2**0.5
                np.testing.assert_allclose(found.unit_BK[row], expected_K, atol=1e-5)
        with self.assertRaisesRegex(ValueError, r"got \(5, 2, 2, 3\), \(4,\)"):
            gradients.sketch_gradients(*given, {**batch, "label": batch["label"][:4]})

    def test_neither_bucket_nor_neighbors_matter(self):
        projection = _projection()
        alone = _sketch(token_rows(0, _SHAPES[:1]), projection, _MODEL.lora)
        longer = token_rows(0, _SHAPES[:1], length=24)
        padded = _sketch(longer, projection, _MODEL.lora, num_targets=24)
        together = _sketch(token_rows(0, _SHAPES), projection, _MODEL.lora)
        np.testing.assert_allclose(padded.unit_BK, alone.unit_BK, atol=1e-5)
        np.testing.assert_allclose(together.unit_BK[:1], alone.unit_BK, atol=1e-5)

    @parameterized.parameters(1, 18)
    def test_micro_batches_change_nothing(self, micro_tokens):
        """A batch of 5 rows of 9 tokens, in 5 and in 3 steps; a dummy fills the last."""
        rows, projection = token_rows(0, [*_SHAPES, (3, 4)]), _projection()
        whole = _sketch(rows, projection, _MODEL.lora)
        cut = _sketch(rows, projection, _MODEL.lora, micro_tokens=micro_tokens)
        np.testing.assert_allclose(cut.unit_BK, whole.unit_BK, atol=2e-6)
        np.testing.assert_allclose(cut.norm_B, whole.norm_B, rtol=2e-6)

    @parameterized.parameters((1600, 10), (136, 1), (1, 1), (10_000, 50), (None, 50))
    def test_parts_of_a_batch_are_equal(self, micro_tokens, rows):
        """11 rows of 136 tokens would fit 1,600; five parts of 10 need no dummy."""
        self.assertEqual(gradients.micro_rows(50, 136, micro_tokens), rows)

    def test_only_cpus_take_gradients_in_parts(self):
        with mock.patch.object(machine, "usable_cpus", lambda: 2):
            self.assertEqual(gradients.micro_tokens_of(128), 3200)
            self.assertEqual(gradients.micro_tokens_of(576), 1600)
        with meshes.traced_for("cuda"):
            self.assertIsNone(gradients.micro_tokens_of(128))

    def test_refuses_an_empty_micro_batch(self):
        rows = token_rows(0, _SHAPES[:1])
        with self.assertRaisesRegex(ValueError, "micro_tokens=0"):
            given = _loss(), _projection(), _MODEL.lora, _MODEL.base
            gradients.sketch_gradients(*given, *map(jnp.asarray, rows[:2]), micro_tokens=0)

    def test_a_dummy_row_is_zero(self):
        got = _sketch(token_rows(0, [(4, 5), (9, 0)]), _projection(), _MODEL.lora)
        self.assertEqual(float(got.norm_B[1]), 0.0)
        np.testing.assert_array_equal(got.unit_BK[1], 0.0)

    def test_the_initial_adapter_has_no_gradient_in_a_but_a_sketch(self):
        initial = {
            "layers": {
                name: {"a": leaves["a"], "b": jnp.zeros_like(leaves["b"])}
                for name, leaves in _MODEL.lora["layers"].items()
            }
        }
        rows = token_rows(0, _SHAPES[:1])
        grads = _GRADIENT(initial, _MODEL.base, *(jnp.asarray(part[0]) for part in rows))
        for leaves in grads["layers"].values():
            np.testing.assert_array_equal(leaves["a"], 0.0)
            self.assertGreater(float(jnp.abs(leaves["b"]).max()), 0.0)
        got = _sketch(rows, _projection(), initial)
        np.testing.assert_allclose(np.linalg.norm(got.unit_BK), 1.0, rtol=1e-5)

    @parameterized.parameters(
        # Mean cosines measured: .9999, .9996 and .84. A weight is rounded to 8 bits of mantissa, to
        # 255 levels a channel, to 16 levels a block: by about .2, .6 and 10 percent, in a model
        # of 16 random channels whose errors do not average out as those of thousands do.
        ("bfloat16", 0.999),
        ("int8", 0.999),
        ("nf4", 0.75),
    )
    def test_a_rounded_base_turns_the_sketch_by_what_rounding_explains(self, kind, least_cosine):
        rows = token_rows(0, _SHAPES)
        if kind == "bfloat16":
            base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _MODEL.base)
        else:
            base = quantize.quantize_base(_MODEL.base, kind, double_quant=False)
        exact = _sketch(rows, _projection(), _MODEL.lora)
        rounded = _sketch(rows, _projection(), _MODEL.lora, base=base)
        cosine_B = jnp.sum(exact.unit_BK * rounded.unit_BK, axis=1)
        self.assertGreater(float(cosine_B.mean()), least_cosine)
        self.assertLess(float(cosine_B.mean()), 1.0)
