import functools
import math
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from raslik_jax.models import attention, hf_config, row_attention
from raslik_jax.parallel import meshes

_RNG = np.random.default_rng(0)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape), jnp.float32)


_ANY_ROTATION = attention.rotation_at(np.ones(1, np.float32), jnp.arange(7))


def _naive_attention(query_LHD, key_SGD, value_SGD, mask_LS, *, scale=None, cap=None):
    """One query and one head at a time, in float64."""
    query_LHD, key_SGD, value_SGD = (
        np.asarray(x, np.float64) for x in (query_LHD, key_SGD, value_SGD)
    )
    output_LHD = np.zeros_like(query_LHD)
    group = query_LHD.shape[1] // key_SGD.shape[1]
    for i in range(query_LHD.shape[0]):
        seen = np.flatnonzero(mask_LS[i])
        for h in range(query_LHD.shape[1]):
            scores = key_SGD[seen, h // group] @ query_LHD[i, h]
            scores = scores * (query_LHD.shape[2] ** -0.5 if scale is None else scale)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            output_LHD[i, h] = weights / weights.sum() @ value_SGD[seen, h // group]
    return output_LHD


class AttentionTest(parameterized.TestCase):
    @parameterized.parameters((4, 4, 9, 1), (6, 2, 7, 1), (6, 2, 7, 2), (3, 1, 1, 4))
    def test_rows_in_a_loop_equal_the_batch(self, heads: int, groups: int, length: int, size: int):
        rows = 5
        inputs = [_normal(rows, length, count, 4) for count in (heads, groups, groups)]
        cotangent = _normal(rows, length, heads, 4)

        def pulled(attend: Any) -> Any:
            def of_row(*row: Any) -> Any:
                mixed, pull = jax.vjp(attend, *row[:-1])
                return mixed, *pull(row[-1])

            return jax.vmap(of_row)(*inputs, cotangent)

        with mock.patch.object(row_attention, "_rows_of_a_step", lambda: size):
            ours = pulled(functools.partial(row_attention.attend_by_row, 0.3))
        theirs = pulled(functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=0.3))
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-6)
        lower_LL = np.tril(np.ones((length, length), bool))
        naive = _naive_attention(*(x[-1] for x in inputs), lower_LL, scale=0.3)
        np.testing.assert_allclose(ours[0][-1], naive, atol=1e-5)

    def test_the_gradient_by_row_has_a_gradient(self):
        inputs, rows = [_normal(3, 5, 2, 4) for _ in range(3)], 3
        target = _normal(3, 5, 2, 4)

        def slope(attend: Any, weight: Any, *row: Any) -> Any:
            def loss(query: Any) -> Any:
                return weight * jnp.sum(attend(query, *row[1:3]) * row[3])

            return jnp.sum(jax.grad(loss)(row[0]) ** 2)

        weight_B = jnp.arange(1.0, rows + 1)
        found = [
            jax.vmap(jax.grad(functools.partial(slope, attend), argnums=(0, 1)))(
                weight_B, *inputs, target
            )
            for attend in (
                functools.partial(row_attention.attend_by_row, 0.5),
                functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=0.5),
            )
        ]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *found)

    def test_whole_rows_of_32_bits_run_by_row_on_a_cpu_alone(self):
        heads = tuple(_normal(7, 2, 4) for _ in range(3))

        def text(kind: Any) -> str:
            context = attention.Context(_ANY_ROTATION, kind=kind)
            return str(jax.make_jaxpr(lambda *heads: attention.attend(*heads, context))(*heads))

        self.assertIn("custom_vmap", text(None))
        self.assertNotIn("custom_vmap", text("xla"))
        with meshes.traced_for("gpu"):
            self.assertNotIn("custom_vmap", text(None))

    def test_whole_rows_of_16_bits_by_products_and_by_the_kernel(self):
        heads, groups = 4, 2
        num_tokens = 70  # more than a tile of the kernel, and not a whole number of them
        wide = tuple(_normal(num_tokens, count, 8) for count in (heads, groups, groups))
        narrow = tuple(head.astype(jnp.bfloat16) for head in wide)
        lower_LL = np.tril(np.ones((num_tokens, num_tokens), bool))
        context = attention.Context(_ANY_ROTATION)
        cotangent = _normal(num_tokens, heads, 8)
        by_kernel = functools.partial(attention.attend_by_kernel, scale=8**-0.5, interpret=True)

        def gradients(attend: Any, inputs: Any) -> Any:
            mixed, pullback = jax.vjp(attend, *inputs)
            return mixed, *pullback(cotangent.astype(mixed.dtype))

        rounded = tuple(head.astype(jnp.float32) for head in narrow)
        theirs = gradients(lambda *inputs: attention.attend(*inputs, context), rounded)
        np.testing.assert_allclose(theirs[0], _naive_attention(*rounded, lower_LL), atol=1e-5)
        for attend in (lambda *inputs: attention.attend(*inputs, context), by_kernel):
            ours = gradients(attend, narrow)
            self.assertEqual({part.dtype for part in ours}, {jnp.dtype("bfloat16")})
            for mine, exact in zip(ours, theirs, strict=True):
                error = np.linalg.norm(mine.astype(jnp.float32) - exact)
                self.assertLess(error, 0.01 * np.linalg.norm(exact))  # 8 bits are .002 each

    def test_all_products_of_whole_rows_are_of_16_bits_in_the_backward_pass_too(self):
        heads = tuple(jnp.ones((8, 2, 4), jnp.bfloat16) for _ in range(3))
        context = attention.Context(_ANY_ROTATION)

        def total(*inputs: Any) -> Any:
            return jnp.sum(attention.attend(*inputs, context).astype(jnp.float32))

        text = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(*heads).as_text()
        products = re.findall(r"dot_general .*: \((tensor<.*?>), (tensor<.*?>)\)", text)
        self.assertLen(products, 6)
        self.assertTrue(all("bf16" in one and "bf16" in other for one, other in products))

    @parameterized.parameters(
        *((heads, groups, None, {}) for heads, groups in ((4, 4), (6, 2), (3, 1))),
        *((4, 2, 3, limits) for limits in ({}, {"scale": 0.9}, {"cap": 0.4})),
        (4, 2, 3, {"scale": 0.9, "cap": 0.4}),
    )
    def test_it_equals_the_naive_one_with_padding_and_with_a_cache(
        self, heads, groups, window, limits
    ):
        own = limits | ({} if window is None else {"window": jnp.int32(window)})
        query, key, value = (_normal(7, count, 4) for count in (heads, groups, groups))
        mask_L = jnp.asarray([False, True, True, True, True, True, False])
        ours = attention.attend(query, key, value, attention.Context(_ANY_ROTATION, mask_L, **own))
        near = np.tril(np.ones((7, 7), bool)) & ~np.tril(np.ones((7, 7), bool), -(window or 7))
        seen = (near & np.asarray(mask_L))[1:6]
        theirs = _naive_attention(query[1:6], key, value, seen, **limits)
        np.testing.assert_allclose(ours[1:6], theirs, atol=1e-5)
        self.assertTrue(np.all(np.isfinite(ours)))
        # The last two tokens after three real ones in a cache of five slots: the empty slots
        # between them do not count.
        past = attention.fresh_key_values(key[:5], value[:5])
        past_mask_S = jnp.asarray([True, True, False, True, False])
        context = attention.Context(_ANY_ROTATION, None, past_mask_S, None, past, **own)
        ours = attention.attend(query[5:], key[5:], value[5:], context)
        # Slots 0, 1 and 3 of the cache are three, two tokens and one before the first.
        seen = np.asarray([[1, 1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1, 1]])
        back = np.asarray([[3, 2, 9, 1, 9, 0, 9], [4, 3, 9, 2, 9, 1, 0]])
        seen = seen * (back < (window or 7))
        theirs = _naive_attention(query[5:], key, value, seen, **limits)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


class RopeTest(parameterized.TestCase):
    @parameterized.parameters(1.0, 0.5, 0.25)
    def test_rotation_is_multiplication_by_a_complex_phase(self, fraction: float):
        rope = hf_config.RopeParameters(rope_theta=100.0, partial_rotary_factor=fraction)
        frequency_F = hf_config.rope_frequencies(rope, 16)
        positions_L = np.asarray([0, 3, 50])
        head_LHD = _normal(3, 2, 16)
        ours = np.asarray(
            attention.rotate(head_LHD, attention.rotation_at(frequency_F, jnp.asarray(positions_L)))
        )
        width = int(16 * fraction)
        exact_F = 100.0 ** (-np.arange(0, width, 2) / width)
        phase = np.exp(1j * positions_L[:, None, None] * exact_F)
        plain = np.asarray(head_LHD, np.float64)
        turned = (plain[..., : width // 2] + 1j * plain[..., width // 2 : width]) * phase
        np.testing.assert_allclose(ours[..., : width // 2], turned.real, atol=2e-5)
        np.testing.assert_allclose(ours[..., width // 2 : width], turned.imag, atol=2e-5)
        np.testing.assert_array_equal(ours[..., width:], head_LHD[..., width:])

    def test_scaling_stretches_long_wavelengths(self):
        plain = hf_config.rope_frequencies(hf_config.RopeParameters(rope_theta=500000.0), 128)
        linear = hf_config.rope_frequencies(
            hf_config.RopeParameters(rope_type="linear", rope_theta=500000.0, factor=4.0), 128
        )
        np.testing.assert_array_equal(linear, plain / 4)
        llama3 = hf_config.rope_frequencies(
            hf_config.RopeParameters(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            128,
        )
        wavelength = 2 * np.pi / plain
        short, long = wavelength < 8192 / 4, wavelength > 8192
        np.testing.assert_array_equal(llama3[short], plain[short])
        np.testing.assert_array_equal(llama3[long], plain[long] / np.float32(8))
        middle = ~short & ~long
        self.assertTrue(np.all(llama3[middle] < plain[middle]))
        self.assertTrue(np.all(llama3[middle] > plain[middle] / 8))
        self.assertTrue(np.all(np.diff(llama3) < 0))

    def test_yarn_keeps_what_turns_often_and_stretches_what_turns_seldom(self):
        rope = hf_config.RopeParameters(
            rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
        )
        plain = hf_config.rope_frequencies(hf_config.RopeParameters(rope_theta=1e6), 128)
        table = hf_config.rotary_table(rope, 128, 131072)
        turns = 32768 * plain / (2 * np.pi)
        np.testing.assert_allclose(table.frequency_F[turns > 35], plain[turns > 35], rtol=1e-6)
        np.testing.assert_allclose(
            table.frequency_F[turns < 0.9], plain[turns < 0.9] / 4, rtol=1e-6
        )
        self.assertAlmostEqual(table.scale, 0.1 * math.log(4) + 1)
        self.assertEqual(hf_config.rotary_table(hf_config.RopeParameters(), 4, 9).scale, 1.0)

    def test_longrope_has_frequencies_for_long_rows_alone(self):
        rope = hf_config.RopeParameters(
            rope_type="longrope",
            short_factor=(1.0, 2.0),
            long_factor=(4.0, 8.0),
            original_max_position_embeddings=16,
        )
        plain = np.asarray([1.0, 0.01])
        shape = {"head_width": 4, "num_positions": 64}
        scale = math.sqrt(1 + math.log(4) / math.log(16))
        for last, factors in ((15, (1, 2)), (16, (4, 8))):
            rotation = attention.rotation_of(rope, jnp.asarray([0, last]), **shape)
            angle = last * plain / np.asarray(factors)
            np.testing.assert_allclose(rotation.cos_LF[1], scale * np.cos(angle), atol=1e-5)
            np.testing.assert_allclose(rotation.sin_LF[1], scale * np.sin(angle), atol=1e-5)
        with pytest.raises(ValueError, match="a factor for each of 4 rotated pairs, got 2"):
            hf_config.rope_frequencies(rope, 8)

    def test_a_head_that_cannot_be_paired_is_refused(self):
        with pytest.raises(ValueError, match="even head width"):
            hf_config.rope_frequencies(hf_config.RopeParameters(), 7)
