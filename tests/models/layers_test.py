import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from absl.testing import parameterized
from flax import nnx

from raslik_jax.models import layers
from raslik_jax.models.lora import LoRAConfig, LoRAParam

_RNG = np.random.default_rng(0)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape), jnp.float32)


class SmallLayersTest(parameterized.TestCase):
    def test_norms_equal_numpys(self):
        x_LE = _normal(5, 8) * 3 + 1
        scale, bias = np.asarray(_normal(8)), np.asarray(_normal(8))
        wide = np.asarray(x_LE, np.float64)
        norm = layers.LayerNorm(8, epsilon=1e-3, dtype=jnp.float32)
        norm.scale, norm.bias = nnx.Param(jnp.asarray(scale)), nnx.Param(jnp.asarray(bias))
        expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(norm(x_LE), expected * scale + bias, atol=1e-5)
        rms = layers.RMSNorm(8, epsilon=1e-3, dtype=jnp.float32)
        rms.scale = nnx.Param(jnp.asarray(scale))
        expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(rms(x_LE), expected * scale, atol=1e-5)
        self.assertEqual(rms(x_LE.astype(jnp.bfloat16)).dtype, jnp.bfloat16)
        offset = layers.OffsetRMSNorm(8, epsilon=1e-3, dtype=jnp.float32)
        offset.offset = nnx.Param(jnp.asarray(scale))
        np.testing.assert_allclose(offset(x_LE), expected * (1 + scale), atol=1e-5)

    def test_a_norm_of_the_width_of_a_head_takes_each_head_alone(self):
        x_LI = _normal(5, 12)
        for kind in (layers.RMSNorm, layers.OffsetRMSNorm):
            norm = kind(4, epsilon=1e-3, dtype=jnp.float32)
            heads = np.asarray(x_LI, np.float64).reshape(5, 3, 4)
            expected = heads / np.sqrt((heads**2).mean(2, keepdims=True) + 1e-3)
            np.testing.assert_allclose(norm(x_LI), expected.reshape(5, 12), atol=1e-5)

    def test_an_embedding_is_scaled_by_what_its_dtype_makes_of_the_factor(self):
        table = layers.Embedding(2, 3, scale=55.4256, dtype=jnp.bfloat16)
        table.embedding = nnx.Param(jnp.ones((2, 3), jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(table(jnp.asarray([0])), np.float32), 55.5)

    def test_gelu_is_exact_where_it_is_called_gelu(self):
        x = jnp.linspace(-4.0, 4.0, 41)
        exact = np.asarray(x) * scipy.special.ndtr(np.asarray(x, np.float64))
        np.testing.assert_allclose(layers.ACTIVATIONS["gelu"](x), exact, atol=1e-6)
        # In 16 bits small shares keep their digits: a rounded argument moves them by x^2 2^-9.
        short = x.astype(jnp.bfloat16)
        rounded = np.asarray(short, np.float64) * scipy.special.ndtr(np.asarray(short, np.float64))
        got = np.asarray(layers.ACTIVATIONS["gelu"](short), np.float64)
        np.testing.assert_allclose(got, rounded, rtol=16 * 2**-9 + 2**-7)
        self.assertGreater(float(np.abs(layers.ACTIVATIONS["gelu_new"](x) - exact).max()), 1e-4)
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
            np.testing.assert_allclose(layers.ACTIVATIONS[name](x), 0.5 * x * (1 + tanh), atol=1e-6)

    def test_layers_that_share_an_input_drop_different_entries(self):
        lora = LoRAConfig(rank=1, alpha=1.0, dropout=0.5, targets=("q_proj", "k_proj"))

        def share(name: str) -> np.ndarray:
            linear = layers.Linear(name, 1, 1, bias=False, lora=lora, dtype=jnp.float32)
            linear.a.set_value(jnp.ones((1, 1)))
            linear.b.set_value(jnp.ones((1, 1)))
            return np.asarray(linear(jnp.ones((64, 1)), jax.random.key(0)))

        self.assertFalse(np.array_equal(share("q_proj"), share("k_proj")))
        np.testing.assert_array_equal(share("q_proj"), share("q_proj"))

    def test_a_share_has_11_bits_and_its_gradient_all(self):
        share_LO = _normal(5, 6)
        rounded_LO, pullback = jax.vjp(jax.jit(layers._rounded), share_LO)
        np.testing.assert_array_equal(rounded_LO, np.float32(np.float16(share_LO)))
        np.testing.assert_array_equal(pullback(share_LO)[0], share_LO)

    def test_adapters_of_one_input_are_multiplied_together_in_16_bits(self):
        settings = LoRAConfig(rank=2, alpha=4.0, targets=("q_proj", "k_proj"))
        linears = [
            layers.Linear(name, 8, 6, bias=False, lora=settings, dtype=jnp.bfloat16)
            for name in ("q_proj", "k_proj")
        ]
        for linear in linears:
            linear.a, linear.b = (LoRAParam(_normal(*size)) for size in ((8, 2), (2, 6)))
        x_LI = _normal(5, 8).astype(jnp.bfloat16)
        shared = layers.inner_products(linears, x_LI, None)
        for linear, low_LR in zip(linears, shared, strict=True):
            np.testing.assert_array_equal(linear(x_LI, None, low_LR), linear(x_LI))
        plain = layers.Linear("v_proj", 8, 6, bias=False, lora=settings, dtype=jnp.bfloat16)
        for given in (
            (linears, x_LI, jax.random.key(0)),
            (linears, x_LI.astype(jnp.float32), None),
            ([*linears, plain], x_LI, None),
        ):
            self.assertEqual(set(layers.inner_products(*given)), {None})
