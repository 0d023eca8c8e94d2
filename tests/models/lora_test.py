import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from raslik_jax.models import lora


class ConfigTest(parameterized.TestCase):
    def test_targets_are_sorted_so_that_equal_settings_are_equal(self):
        one = lora.LoRAConfig(rank=1, alpha=1.0, targets=("b", "a"))
        self.assertEqual(one, lora.LoRAConfig(rank=1, alpha=1.0, targets=("a", "b")))
        self.assertEqual(one.scale, 1.0)
        stable = lora.LoRAConfig(rank=4, alpha=6.0, targets=("a",), use_rslora=True)
        self.assertEqual(stable.scale, 3.0)

    @parameterized.parameters(
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": math.nan}, "alpha must be positive"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"targets": ()}, "one or more different"),
        ({"targets": ("a", "a")}, "different"),
        ({"layers": (("a", ((2, 2.0), (1, -1.0))),)}, "alpha must be positive"),
    )
    def test_settings_out_of_range_are_refused(self, change: dict, message: str):
        settings = {"rank": 2, "alpha": 2.0, "dropout": 0.0, "targets": ("a",), **change}
        with pytest.raises(ValueError, match=message):
            lora.LoRAConfig(**settings)


class InnerProductTest(parameterized.TestCase):
    @parameterized.parameters(2000, 8000)
    def test_dropout_zeroes_inputs_and_keeps_their_mean(self, num_tokens: int):
        ones_LI, factor = jnp.ones((num_tokens, 1)), jnp.full((1, 1), 3.0)
        low_LR = np.asarray(
            lora.inner_product(ones_LI, factor, dropout=0.25, key=jax.random.key(0))
        )
        self.assertEqual(set(np.round(np.unique(low_LR), 4)), {0.0, 4.0})
        # Each entry is 4 with probability 0.75: the mean is 3, its standard error as below.
        error = 4.0 * math.sqrt(0.75 * 0.25 / num_tokens)
        self.assertLess(abs(low_LR.mean() - 3.0), 5 * error)

    def test_it_is_the_product_in_float32(self):
        rng = np.random.default_rng(0)
        x, a = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (4, 2)))
        low_LR = lora.inner_product(jnp.asarray(x, jnp.bfloat16), jnp.asarray(a), dropout=0.5)
        self.assertEqual(low_LR.dtype, jnp.float32)
        narrow = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
        np.testing.assert_allclose(low_LR, narrow @ a, rtol=1e-5, atol=1e-5)
