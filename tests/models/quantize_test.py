"""The quantized kernels: codebook, round trips, layout, gradients and memory."""

import functools

import compiling
import decoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import support
from absl.testing import parameterized

from raslik_jax.models import decoder, lora, presets, quantize

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
            quantized = quantize.quantize_nf4(kernel, double_quant=double_quant)
            error = _relative_error(quantize.dequantize(quantized, jnp.float32), kernel)
            self.assertAlmostEqual(error, 0.0920, delta=0.0005)

    @parameterized.parameters((128, 64), (172, 4), (96, 32))
    def test_nf4_takes_the_nearest_level_of_each_block(self, inputs, block):
        kernel = np.asarray(_gaussian(inputs, 5))
        self.assertEqual(quantize.block_size(inputs), block)
        quantized = quantize.quantize_nf4(kernel, double_quant=False)
        np.testing.assert_allclose(
            quantize.dequantize(quantized, jnp.float32), _slow_nf4(kernel, block), rtol=1e-6
        )

    def test_int8_error_is_at_most_half_a_step(self):
        kernel = _gaussian(96, 7)
        quantized = quantize.quantize_int8(kernel)
        error = np.abs(np.asarray(quantize.dequantize(quantized, jnp.float32) - kernel))
        self.assertTrue((error <= np.asarray(quantized.scale) * (0.5 + 1e-5)).all())

    @parameterized.named_parameters(*_KINDS)
    def test_values_that_are_levels_survive_and_zero_channels_stay_zero(self, format, double):
        if format == "int8":
            column = np.arange(-127, 1, 1, dtype=np.float32)
        else:
            column = np.tile(quantize.NF4_CODEBOOK, 8)
        kernel = np.stack([column, 2 * column, np.zeros(128, np.float32)], axis=1)
        quantized = quantize.quantize_kernel(kernel, format, double_quant=double)
        restored = quantize.dequantize(quantized, jnp.float32)
        np.testing.assert_allclose(restored, kernel, atol=2e-2 if double else 1e-6)

    def test_negating_a_kernel_negates_its_int8_form(self):
        kernel = _gaussian(64, 8)
        plus, minus = quantize.quantize_int8(kernel), quantize.quantize_int8(-kernel)
        np.testing.assert_array_equal(plus.codes, -minus.codes)

    @parameterized.named_parameters(*_KINDS)
    def test_stacked_layers_are_quantized_one_by_one(self, format, double):
        kernel = _gaussian(3, 128, 70) * jnp.array([1.0, 3.0, 0.1])[:, None, None]
        stacked = quantize.quantize_kernel(kernel, format, double_quant=double)
        self.assertEqual(quantize.kernel_shape(stacked), kernel.shape)
        for layer in range(3):
            alone = quantize.quantize_kernel(kernel[layer], format, double_quant=double)
            sliced = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)
            jax.tree.map(np.testing.assert_array_equal, alone, sliced)
            np.testing.assert_array_equal(
                quantize.dequantize(stacked, jnp.float32)[layer],
                quantize.dequantize(alone, jnp.float32),
            )

    @parameterized.named_parameters(*_KINDS)
    def test_bfloat16_is_the_rounded_float32(self, format, double):
        quantized = quantize.quantize_kernel(_gaussian(64, 33), format, double_quant=double)
        np.testing.assert_array_equal(
            quantize.dequantize(quantized, jnp.bfloat16),
            quantize.dequantize(quantized, jnp.float32).astype(jnp.bfloat16),
        )

    def test_bad_requests_are_refused_in_one_sentence(self):
        kernel = _gaussian(3, 4)
        with self.assertRaisesRegex(ValueError, "for nf4, got 3"):
            quantize.quantize_nf4(kernel, double_quant=False)
        with self.assertRaisesRegex(ValueError, "format='fp4'"):
            quantize.quantize_kernel(kernel, "fp4", double_quant=False)
        with self.assertRaisesRegex(ValueError, "needs format=nf4"):
            quantize.quantize_kernel(kernel, "int8", double_quant=True)
        base = {"layers": {"up": {"kernel": kernel}}}
        once = quantize.quantize_base(base, "int8", double_quant=False)
        with self.assertRaisesRegex(ValueError, r"\['layers'\]\['up'\]\['kernel'\].*already"):
            quantize.quantize_base(once, "int8", double_quant=False)


class MatmulTest(parameterized.TestCase):
    def test_forward_mode_runs_through_it(self):
        kernel = quantize.quantize_nf4(_gaussian(64, 8), double_quant=True)
        x, tangent = _gaussian(2, 64), _gaussian(2, 64, seed=1)
        _, product = jax.jvp(lambda x: quantize.matmul(x, kernel), (x,), (tangent,))
        np.testing.assert_allclose(product, quantize.matmul(tangent, kernel), rtol=1e-6)

    @parameterized.named_parameters(*_KINDS)
    def test_a_gradient_does_not_keep_the_rebuilt_kernels(self, format, double):
        layers, width = 16, 256
        kernels = quantize.quantize_kernel(
            _gaussian(layers, width, width), format, double_quant=double
        )

        def loss(x, kernels):
            def layer(x, kernel):
                return jnp.tanh(quantize.matmul(x, kernel)), None

            return jax.lax.scan(layer, x, kernels)[0].sum()

        compiled = (
            jax.jit(jax.grad(loss))
            .lower(_gaussian(1, width), kernels)
            .compile(compiler_options=compiling.ANALYZED)
        )
        temporary = compiled.memory_analysis().temp_size_in_bytes
        # Eight kernels' worth is room for the working copies of one layer; keeping all sixteen
        # would be twice that.
        self.assertLess(temporary, 8 * width * width * 4)

    def test_a_plain_kernel_is_multiplied_as_it_is(self):
        x, kernel = _gaussian(2, 8), _gaussian(8, 3)
        np.testing.assert_array_equal(quantize.matmul(x, kernel), x @ kernel)


# Widths that nf4 packs in blocks of 64 inputs, and less.
_TINY = {
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    "llama": {"hidden_size": 48, "num_attention_heads": 6, "tie_word_embeddings": True},
    "gemma2": {"hidden_size": 48, "head_dim": 16, "sliding_window": 5},
    "phi3": {"hidden_size": 48, "sliding_window": 5},
}


@functools.cache
def _decoder(family):
    """A decoder with both LoRA factors random: (functions, lora, base)."""
    case = next(iter(decoder_cases.CASES[family].values()))
    architecture = decoder.ARCHITECTURES[family]
    config = architecture.config.from_hf({**case.config, **_TINY[family]})
    targets = decoder_cases.NEOX_TARGETS if family == "gpt_neox" else architecture.lora_targets
    settings = lora.LoRAConfig(rank=2, alpha=4.0, targets=targets)
    graphdef, adapter, base = support.random_weights(config, settings, spread=0.1)
    return decoder.bind(graphdef), adapter, base


def _loss(bound, adapter, base, tokens_L):
    hidden_LE = bound.hidden(adapter, base, tokens_L)
    log_probability_LV = jax.nn.log_softmax(bound.logits(adapter, base, hidden_LE[:-1]))
    return -jnp.take_along_axis(log_probability_LV, tokens_L[1:, None], axis=1).mean()


@functools.cache
def _packer(format, double):
    return jax.jit(
        functools.partial(quantize.quantize_base, format=format, double_quant=double)
    ), jax.jit(support.dequantize_base, static_argnums=1)


# With grouped heads and a tied head, and with windows.
_FAMILIES = [("gpt_neox", (_KINDS[0], _KINDS[2])), ("llama", _KINDS)]
_FAMILIES += [(family, (_KINDS[0], _KINDS[2])) for family in ("gemma2", "phi3")]
_HEAVY = [pytest.param(*case, marks=pytest.mark.heavy) for case in _FAMILIES[1:]]


@pytest.mark.parametrize(("family", "kinds"), [_FAMILIES[0], *_HEAVY])
def test_per_example_gradients_are_those_of_the_dequantized_base(family, kinds):
    bound, adapter, base = _decoder(family)
    tokens_BL = jnp.asarray(np.random.default_rng(1).integers(0, 29, (3, 12)), jnp.int32)
    gradient = jax.jit(jax.vmap(jax.grad(functools.partial(_loss, bound)), in_axes=(None, None, 0)))
    original = gradient(adapter, base, tokens_BL)
    for name, format, double in kinds:
        pack, unpack = _packer(format, double)
        packed = pack(base)
        ours = gradient(adapter, packed, tokens_BL)
        reference = gradient(adapter, unpack(packed, jnp.float32), tokens_BL)
        assert jax.tree.structure(ours) == jax.tree.structure(adapter)
        for one, other, far in zip(*map(jax.tree.leaves, (ours, reference, original)), strict=True):
            assert _relative_error(one, other) < 1e-5, name
            assert _relative_error(one, far) > 1e-4, name  # packing does show


class DecoderTest(parameterized.TestCase):
    def test_bfloat16_equals_the_dequantized_base_in_bfloat16(self):
        bound, adapter, base = _decoder("gpt_neox")
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base)
        tokens_L = jnp.arange(9)
        hidden = jax.jit(bound.hidden)
        pack, unpack = _packer("nf4", True)
        packed = pack(low)
        ours = hidden(adapter, packed, tokens_L)
        reference = hidden(adapter, unpack(packed, jnp.bfloat16), tokens_L)
        self.assertEqual(ours.dtype, jnp.bfloat16)
        # The same operations on the same numbers; XLA may fuse a rounding away on one side.
        difference = np.abs(np.asarray(ours, np.float32) - np.asarray(reference, np.float32))
        self.assertLess(difference.max(), 0.05)
        self.assertLess(difference.mean(), 0.005)

    def test_only_the_linear_kernels_of_the_layers_are_packed(self):
        _, _, base = _decoder("gpt_neox")
        packed = jax.eval_shape(_packer("nf4", False)[0], base)
        kernels = {
            name for name, leaves in packed["layers"].items()
            if quantize.is_quantized(leaves.get("kernel"))
        }  # fmt: skip
        self.assertEqual(kernels, set(decoder_cases.NEOX_TARGETS))
        for path in (("embed", "embedding"), ("head", "kernel"), ("final_norm", "scale")):
            self.assertEqual(packed[path[0]][path[1]].shape, base[path[0]][path[1]].shape)
        self.assertEqual(packed["layers"]["dense"]["bias"].dtype, jnp.float32)

    @parameterized.parameters(
        # Bytes of the base with its unquantized leaves in bfloat16.
        ("pythia-2.8b", (5_550_417_920, 3_036_784_640, 1_932_830_720, 1_815_480_832)),
        ("olmo2-7b", (14_597_234_688, 8_126_668_800, 5_287_976_960, 4_985_996_160)),
    )
    def test_memory_of_full_sizes(self, name, expected):
        config = presets.MODEL_PRESETS[name]
        _, _, base = decoder.abstract(config, None, jnp.bfloat16)
        self.assertEqual(quantize.num_bytes(base), expected[0])
        for (_, format, double), wanted in zip(_KINDS, expected[1:], strict=True):
            packed = jax.eval_shape(
                functools.partial(quantize.quantize_base, format=format, double_quant=double), base
            )
            self.assertEqual(quantize.num_bytes(packed), wanted)
            linear = sum(
                leaves["kernel"].size for leaves in base["layers"].values() if "kernel" in leaves
            )
            saved = quantize.num_bytes(base) - quantize.num_bytes(packed)
            per_weight = {"int8": 1.0, "nf4": 0.5159 if double else 0.5625}[format]
            self.assertAlmostEqual(2 - saved / linear, per_weight, delta=0.002)
