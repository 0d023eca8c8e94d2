"""Products with narrow weights: their rounding, their transposes, whole models, what is refused."""

import decoder_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import support
from absl.testing import parameterized
from snapshots import refused

from raslik_jax.data import batches
from raslik_jax.evaluate import likelihood
from raslik_jax.models import decode, decoder, lora, products, quantize
from raslik_jax.train import loop, objectives, steps

_NARROW = ("float32", "bfloat16")


def _random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rounded(array) -> np.ndarray:
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float64)


class ProductTest(parameterized.TestCase):
    @parameterized.product(axis=(0, 1), jitted=(False, True))
    def test_factors_are_rounded_and_sums_are_not(self, axis: int, jitted: bool):
        left_LI, kernel, of_LO = _random(0, 5, 96), _random(1, 96, 7), _random(2, 5, 7)
        narrow = jnp.asarray(kernel.T if axis else kernel, jnp.bfloat16)

        def both(left_LI, of_LO):
            out_LO, back = jax.vjp(lambda left: products.product(left, narrow, axis), left_LI)
            return out_LO, back(of_LO)[0]

        out_LO, of_LI = (jax.jit(both) if jitted else both)(left_LI, of_LO)
        self.assertEqual((out_LO.dtype, of_LI.dtype), (jnp.float32, jnp.float32))
        wide = _rounded(kernel)
        np.testing.assert_allclose(out_LO, _rounded(left_LI) @ wide, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(of_LI, _rounded(of_LO) @ wide.T, rtol=1e-4, atol=1e-5)

    def test_rows_under_vmap_are_rows_alone(self):
        left_BLI, narrow = _random(0, 3, 5, 16), jnp.asarray(_random(1, 16, 7), jnp.bfloat16)
        gradient = jax.grad(lambda left: jnp.sum(products.product(left, narrow) ** 2))
        alone = [gradient(left) for left in left_BLI]
        np.testing.assert_allclose(jax.vmap(gradient)(left_BLI), alone, rtol=1e-5, atol=1e-5)

    def test_weights_of_one_dtype_are_multiplied_as_ever(self):
        left, kernel = jnp.asarray(_random(0, 5, 16)), jnp.asarray(_random(1, 16, 7))
        np.testing.assert_array_equal(products.product(left, kernel), left @ kernel)
        # jax 0.12 adds in another order where the kernel is transposed: 1.3e-6 was measured.
        np.testing.assert_allclose(products.product(left, kernel.T, 1), left @ kernel, rtol=1e-5)

    def test_bits_are_the_weights_again(self):
        for array in (np, jnp):
            weights = array.asarray(_random(0, 4, 6))
            bits = products.stored(weights, products.Dtypes.of(_NARROW).kernels)
            self.assertEqual(bits.dtype, np.uint16)
            np.testing.assert_array_equal(products.read(jnp.asarray(bits)), _rounded(weights))

    def test_a_narrow_kernel_has_no_gradient(self):
        narrow = jnp.ones((4, 3), jnp.bfloat16)
        with refused():
            jax.grad(lambda kernel: products.product(jnp.ones((2, 4)), kernel).sum())(narrow)
        with refused():
            products.Dtypes.of(("bfloat16", "float32"))


def _model(family: str):
    case = next(iter(decoder_cases.CASES[family].values()))
    config = decoder.ARCHITECTURES[family].config.from_hf(case.config)
    adapter = lora.LoRAConfig(rank=2, alpha=4.0, targets=case.targets)
    graphdef, factors, base = support.random_weights(config, adapter, spread=0.1)
    return graphdef, factors, base, support.narrow_base(config, base)


class ModelTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("_of_pythia", "gpt_neox", False),
        *((f"_of_{family}", family, True) for family in decoder_cases.CASES if family[:3] != "gpt"),
    )
    @pytest.mark.heavy
    def test_gradients_turn_by_what_rounding_explains(self, family: str, remat: bool):
        graphdef, factors, base, narrow = _model(family)
        bound = decoder.bind(graphdef, remat=remat)
        tokens_BL = jnp.asarray(np.random.default_rng(1).integers(0, 29, (3, 12)), jnp.int32)

        def flat_gradient(base, tokens_L):
            def loss(factors):
                logits_LV = support.all_logits(bound, factors, base, tokens_L)
                return -jax.nn.log_softmax(logits_LV)[jnp.arange(11), tokens_L[1:]].mean()

            return jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(factors))])

        gradients = jax.jit(jax.vmap(flat_gradient, (None, 0)))
        exact, rounded = gradients(base, tokens_BL), gradients(narrow, tokens_BL)
        self.assertEqual(rounded.dtype, jnp.float32)
        norms = jnp.linalg.norm(exact, axis=1) * jnp.linalg.norm(rounded, axis=1)
        cosine_B = jnp.sum(exact * rounded, axis=1) / norms
        # Of 16 channels; those of SmolLM2 have .9995 and more.
        self.assertGreater(float(cosine_B.min()), 0.998)
        self.assertGreater(float(jnp.abs(exact - rounded).max()), 0.0)

    def test_kernels_and_embedding_take_half_and_the_rest_is_whole(self):
        _, _, base, narrow = _model("llama")
        for path, leaf in jax.tree_util.tree_leaves_with_path(narrow):
            is_narrow = path[-1].key in ("kernel", "embedding")
            self.assertEqual(leaf.dtype, np.uint16 if is_narrow else np.float32, path)
        whole = quantize.num_bytes(base)
        self.assertBetween(quantize.num_bytes(narrow) / whole, 0.5, 0.52)

    @parameterized.parameters("int8", "nf4")
    def test_a_quantized_kernel_is_rebuilt_as_narrow_as_the_embedding(self, form: str):
        graphdef, factors, base, narrow = _model("gpt_neox")
        packed = quantize.quantize_base(base, form, double_quant=False)
        narrow = {**narrow, "layers": {**packed["layers"]}}
        bound, tokens_L = decoder.bind(graphdef), jnp.arange(9)
        hidden = [jax.jit(bound.hidden)(factors, tree, tokens_L) for tree in (narrow, packed)]
        text = str(jax.make_jaxpr(bound.hidden)(factors, narrow, tokens_L))
        self.assertIn("bf16[16,16]", text)
        self.assertEqual(hidden[0].dtype, jnp.float32)
        error = jnp.abs(hidden[0] - hidden[1]).max()
        self.assertBetween(float(error), 1e-6, 0.05)

    def test_entry_points_are_compiled_once_for_a_shape(self):
        graphdef, factors, _, narrow = _model("llama")
        bound, settings = decoder.bind(graphdef), objectives.CappedSettings()
        rows = np.ones((2, 16), np.int32), np.ones((2, 16), bool)
        batch = batches.Batch(*rows, 16, np.arange(2, dtype=np.int32))
        tx, options = loop.adamw(1e-2), steps.Options()
        algorithm = steps.unlearning(objectives.OBJECTIVES["cap_klr"], bound, tx, options, settings)
        step, measure = jax.jit(algorithm.step), likelihood.token_step(bound)
        state, frozen = algorithm.init(factors), steps.Frozen(narrow, factors)
        decode.generate_batch.clear_cache()
        how = {"max_new_tokens": 3, "eos_id": None, "pad_id": 0, "batch_size": 2}
        for _ in range(2):
            with jax.numpy_dtype_promotion("standard"):  # Optax promotes its counts
                state, _ = step(state, frozen, (batch, batch))
            measure(state.params, narrow, batch)
            decode.generate(bound, state.params, narrow, [[3, 1, 4], [1, 5]], **how)
        counts = [entry._cache_size() for entry in (step, measure, decode.generate_batch)]
        self.assertEqual(counts, [1, 1, 1])
