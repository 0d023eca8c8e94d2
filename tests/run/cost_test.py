"""The counter of operations against known formulas, and the rates of the device."""

import functools

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from experiments.bench import counting, harness
from experiments.bench.harness import LORA_PRESETS
from raslik_jax.data.batches import Batch
from raslik_jax.models import decoder as decoders
from raslik_jax.models import quantize
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.run import cost
from raslik_jax.train import losses


def _array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _product(x):
    return x @ x


def _count(function, *args, trips=1):
    return counting.count(jax.jit(function).trace(*args).jaxpr.jaxpr, trips=trips)


class CountTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("once", _product, 1),
        ("jitted", jax.jit(_product), 1),
        ("mapped", lambda x: jax.vmap(_product)(jnp.stack([x] * 5)).sum(0), 5),
        ("scan", lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, length=7)[0], 7),
        ("known_loop", lambda x: jax.lax.fori_loop(0, 7, lambda _, c: c @ x, x), 7),
        (
            "unknown_loop",
            lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ x, x),
            11,
        ),
        (
            "unknown_loop_in_a_scan",  # 11 trips in three steps are 4 each
            lambda x: jax.lax.scan(
                lambda x, _: (jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ x, x), None),
                x,
                length=3,
            )[0],
            12,
        ),
        (
            "dearer_branch",
            lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ x, lambda: x @ x @ x),
            2,
        ),
        ("recomputed", jax.grad(lambda x: jax.checkpoint(_product)(x).sum()), 3),
    )
    def test_a_product_counts_as_often_as_it_runs(self, function, times):
        found = _count(function, _array(16, 16), trips=11)
        self.assertEqual(found, times * 2 * 16**3)

    @parameterized.parameters("pythia-14m", "smollm2-135m", "olmo2-7b")
    def test_gradients_of_a_decoder_take_four_operations_per_weight_and_token(self, name):
        """Beside attention, of 8 L^2 E a layer at least; the adapter is below a share of it."""
        config, batch, length, targets = MODEL_PRESETS[name], 2, 64, 32
        family = "pythia" if name.startswith("pythia") else "olmo2"
        graphdef, lora, base = decoders.abstract(config, LORA_PRESETS[family], jnp.float32)
        decoder = decoders.bind(graphdef)

        def nll(lora, base, batch):
            outputs = losses.Outputs(losses.BoundModel(decoder, lora, base), batch)
            return losses.weighted_mean(losses.nll_by_example(outputs), batch)

        size = batch, length
        rows = Batch(_array(*size, dtype=jnp.int32), _array(*size, dtype=jnp.bool_), targets)
        found = _count(jax.value_and_grad(nll), lora, base, rows)
        formula = harness.gradient_operations(
            harness.linear_shapes(base),
            tokens=float(batch * length),
            targets=float(batch * targets),
        )
        adapters = 6 * batch * length * decoders.count_parameters(lora)
        # Two products, four on the way back, and there the shares once more.
        attention = 14 * batch * length**2 * config.hidden_size * config.num_hidden_layers
        self.assertAlmostEqual(found / (formula + adapters + attention), 1, delta=0.01)

    @parameterized.parameters(
        # Weights in the linear layers by hand: 6 x (128 x 384 + 128 x 128 + 2 x 128 x 512).
        ("pythia-14m", 6, 1_179_648, (128, 50304)),
        # 32 x (4 x 4096^2 + 3 x 4096 x 11008).
        ("olmo2-7b", 32, 6_476_005_376, (4096, 100352)),
        # A tied head: 30 x (2 x 576^2 + 2 x 576 x 192 + 3 x 576 x 1536).
        ("smollm2-135m", 30, 106_168_320, (576, 49152)),
    )
    def test_the_formula_counts_every_weight_four_times(self, name, num_layers, weights, head):
        _, _, base = decoders.abstract(MODEL_PRESETS[name], None, jnp.float32)
        shapes = harness.linear_shapes(base)
        self.assertEqual((shapes.num_layers, shapes.head), (num_layers, head))
        self.assertEqual(harness.gradient_operations(shapes, tokens=1.0, targets=0.0), 4 * weights)
        self.assertEqual(
            harness.gradient_operations(shapes, tokens=0.0, targets=1.0), 4 * head[0] * head[1]
        )
        pack = functools.partial(quantize.quantize_base, format="nf4", double_quant=True)
        self.assertEqual(harness.linear_shapes(jax.eval_shape(pack, base)), shapes)


def test_rates_are_those_of_the_device():
    device = cost.measure(64, 256, "float32")
    # Not those of an accelerator that is not there, nor of nothing.
    assert 0 < device.flops_per_second < 1e14
    assert 0 < device.bytes_per_second < 1e13
