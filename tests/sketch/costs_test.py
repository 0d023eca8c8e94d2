"""The memory bound against XLA's own analysis, and the counts of operations."""

import functools

import compiling
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from raslik_jax.models import decoder as decoders
from raslik_jax.models import quantize
from raslik_jax.models.gpt_neox import GPTNeoXConfig
from raslik_jax.models.lora import LORA_PRESETS
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.sketch import costs, gradients, loss, projections

SMALL = GPTNeoXConfig(
    vocab_size=5000,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
)


def bound_and_analysis(
    config,
    lora_config,
    *,
    batch,
    micro_batch,
    length,
    num_targets,
    size,
    family,
    remat,
    dtype,
    kind,
):
    """Returns the bound and what XLA says, in bytes, without allocating a weight."""
    graphdef, lora, base = decoders.abstract(config, lora_config, dtype)
    if kind:
        pack = functools.partial(quantize.quantize_base, format=kind, double_quant=False)
        base = jax.eval_shape(pack, base)
    spec = projections.ProjectionSpec(
        family=family, num_params=projections.count_params(lora), size=size, seed=0
    )
    slots = -(-spec.num_params // size)
    table = jax.ShapeDtypeStruct((slots, size), jnp.int32) if family == "binned" else ()
    decoder = decoders.bind(graphdef, remat=remat)
    sketch = functools.partial(
        gradients.sketch_gradients,
        functools.partial(loss.example_loss, decoder, num_targets=num_targets),
        micro_tokens=micro_batch * length,
    )
    compiled = (
        jax.jit(sketch)
        .lower(
            projections.Projection(spec, table),
            (lora,),
            base,
            jax.ShapeDtypeStruct((batch, length), jnp.int32),
            jax.ShapeDtypeStruct((batch, length), jnp.bool_),
        )
        .compile(compiler_options=compiling.OPTIMIZED)
    )
    bound = costs.memory_bound(
        base,
        (lora,),
        table,
        num_heads=config.num_attention_heads,
        batch=batch,
        micro_batch=micro_batch,
        length=length,
        num_targets=num_targets,
        size=size,
        remat=remat,
    )
    return bound, costs.analyzed_bytes(compiled)


class MemoryTest(parameterized.TestCase):
    @parameterized.parameters({}, {"remat": True, "micro_batch": 4})
    def test_peak_stays_under_the_bound(self, **change):
        self.check_bound(**change)

    @parameterized.parameters(
        {"length": 128, "num_targets": 96, "batch": 4, "micro_batch": 4},
        {"family": "dense_rademacher"},
        {"family": "binned_hashed"},
        {"dtype": jnp.bfloat16, "kind": "int8"},
        {"dtype": jnp.bfloat16, "kind": "nf4", "remat": True},
    )
    @pytest.mark.heavy
    def test_peak_of_other_settings_stays_under_the_bound(self, **change):
        self.check_bound(**change)

    def check_bound(self, **change):
        settings = {
            "batch": 16,
            "micro_batch": 16,
            "length": 48,
            "num_targets": 24,
            "size": 4096,
            "family": "binned",
            "remat": False,
            "dtype": jnp.float32,
            "kind": "",
        }
        bound, analyzed = bound_and_analysis(SMALL, LORA_PRESETS["pythia"], **settings | change)
        self.assertLess(analyzed, bound.total)
        # A bound that nothing comes near would bind nothing.
        self.assertGreater(analyzed, bound.total / 4)

    @pytest.mark.heavy
    def test_a_published_shape_stays_under_the_bound(self):
        """Pythia-14m at the size of batch that the benchmark takes: 1.1 GB."""
        bound, analyzed = bound_and_analysis(
            MODEL_PRESETS["pythia-14m"],
            LORA_PRESETS["pythia"],
            batch=73,
            micro_batch=73,
            length=112,
            num_targets=80,
            size=65_536,
            family="binned",
            remat=False,
            dtype=jnp.float32,
            kind="",
        )
        self.assertBetween(analyzed / bound.total, 0.5, 1.0)

    def test_terms_are_named_and_add_up(self):
        bound = costs.MemoryBound(weights=1, activations=2, gradients=3, head=4, sketches=5)
        self.assertEqual(bound.total, 15)


class OperationsTest(parameterized.TestCase):
    @parameterized.parameters(
        # Weights in the linear layers by hand: 6 x (128 x 384 + 128 x 128 + 2 x 128 x 512).
        ("pythia-14m", 6, 1_179_648, (128, 50304)),
        # 32 x (4 x 4096^2 + 3 x 4096 x 11008).
        ("olmo2-7b", 32, 6_476_005_376, (4096, 100352)),
        # A tied head: 30 x (2 x 576^2 + 2 x 576 x 192 + 3 x 576 x 1536).
        ("smollm2-135m", 30, 106_168_320, (576, 49152)),
    )
    def test_counts_every_weight_four_times(self, name, num_layers, weights, head):
        _, _, base = decoders.abstract(MODEL_PRESETS[name], None, jnp.float32)
        shapes = costs.linear_shapes(base)
        self.assertEqual((shapes.num_layers, shapes.head), (num_layers, head))
        self.assertEqual(costs.gradient_operations(shapes, tokens=1.0, targets=0.0), 4 * weights)
        self.assertEqual(
            costs.gradient_operations(shapes, tokens=0.0, targets=1.0), 4 * head[0] * head[1]
        )

    def test_quantized_kernels_have_the_same_shapes(self):
        _, _, base = decoders.abstract(SMALL, None, jnp.float32)
        pack = functools.partial(quantize.quantize_base, format="nf4", double_quant=True)
        self.assertEqual(costs.linear_shapes(jax.eval_shape(pack, base)), costs.linear_shapes(base))
