"""The loss of one example, against all its logits in NumPy."""

import functools

import decoder_cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from support import all_logits, tiny_model, token_rows

from raslik_jax.models import decoder, gemma2, phi3
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.sketch.loss import example_loss

_MODEL = tiny_model()


_example_loss = jax.jit(example_loss, static_argnums=0, static_argnames=("num_targets", "loss"))


def _slow_loss(tokens_L, target_mask_L, *, shift):
    """Returns the mean NLL from the logits at every position, in float64."""
    logits_LV = np.float64(all_logits(*_MODEL[:3], jnp.asarray(tokens_L)))
    values = []
    for position in np.flatnonzero(target_mask_L):
        row = logits_LV[position - shift]
        values.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens_L[position]])
    return np.mean(values) if values else 0.0


def _run(bound, lora, base, tokens_L, target_mask_L, **how):
    return _example_loss(bound, lora, base, *map(jnp.asarray, (tokens_L, target_mask_L)), **how)


_loss = functools.partial(_run, *_MODEL[:3])


class LossTest(parameterized.TestCase):
    @parameterized.product(loss=("next_token", "unshifted"), num_targets=(5, 9))
    def test_equals_the_loss_from_all_logits(self, loss, num_targets):
        rows = token_rows(0, [(4, 5)])
        expected = _slow_loss(
            rows.tokens_BL[0], rows.target_mask_BL[0], shift=int(loss == "next_token")
        )
        got = _loss(rows.tokens_BL[0], rows.target_mask_BL[0], num_targets=num_targets, loss=loss)
        np.testing.assert_allclose(got, expected, rtol=2e-6)

    def test_a_cap_of_the_logits_is_in_the_loss_and_in_its_gradient(self):
        case = decoder_cases.CASES["gemma2"]["caps_alternating_windows"].config
        changes = {"vocab_size": 61, "initializer_range": 1.0, "final_logit_softcapping": 2.0}
        config = gemma2.Gemma2Config.from_hf({**case, **changes})
        lora_config = LoRAConfig(rank=1, alpha=4.0, targets=("o_proj",))
        graphdef, lora, base = decoder.create(config, lora_config, key=jax.random.key(0))
        bound = decoder.bind(graphdef)
        rows = token_rows(0, [(4, 5)])
        tokens_L, mask_L = jnp.asarray(rows.tokens_BL[0]), jnp.asarray(rows.target_mask_BL[0])

        def plain(lora):
            logits_LV = bound.logits(lora, base, bound.hidden(lora, base, tokens_L))
            log_p_LV = jax.nn.log_softmax(logits_LV[:-1])
            picked_L = jnp.take_along_axis(log_p_LV, tokens_L[1:, None], axis=1)[:, 0]
            return -jnp.mean(picked_L, where=mask_L[1:]), logits_LV

        def fused(lora):
            return example_loss(bound, lora, base, tokens_L, mask_L, num_targets=5)

        (value, logits_LV), gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(lora)
        self.assertGreater(float(jnp.abs(logits_LV).max()), 1.9)  # else the cap does nothing
        self.assertTrue(np.isfinite(value))
        got, got_gradient = jax.jit(jax.value_and_grad(fused))(lora)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        for ours, theirs in zip(*map(jax.tree.leaves, (got_gradient, gradient)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_a_short_row_among_long_ones_is_rotated_as_if_alone(self):
        case = decoder_cases.CASES["phi3"]["window"].config
        rope = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [3.0, 7.0]}
        changes = {"original_max_position_embeddings": 9, "rope_scaling": rope}
        changes |= {"vocab_size": 61, "initializer_range": 1.0, "sliding_window": None}
        config = phi3.Phi3Config.from_hf({**case, **changes})
        graphdef, lora, base = decoder.create(config, None, key=jax.random.key(0))
        bound = decoder.bind(graphdef)
        short, padded = token_rows(2, [(4, 5)]), token_rows(2, [(4, 5)], length=16)
        values = [
            float(_run(bound, lora, base, *(part[0] for part in rows), num_targets=5))
            for rows in (short, padded)
        ]
        self.assertEqual(short.tokens_BL.shape[1], 9)
        self.assertAlmostEqual(values[0], values[1], places=5)
        # The same tokens with a target behind the border are rotated otherwise.
        run = jax.jit(bound.hidden)
        hidden = [
            run(lora, base, jnp.asarray(padded.tokens_BL[0]), mask_L=jnp.arange(16) < n)
            for n in (9, 16)
        ]
        self.assertGreater(float(jnp.abs(hidden[0][8] - hidden[1][8]).max()), 1e-3)

    def test_a_target_before_a_gap_counts(self):
        rows = token_rows(1, [(3, 4)])
        mask_L = rows.target_mask_BL[0].copy()
        mask_L[1], mask_L[5] = True, False
        expected = _slow_loss(rows.tokens_BL[0], mask_L, shift=1)
        np.testing.assert_allclose(
            _loss(rows.tokens_BL[0], mask_L, num_targets=4), expected, rtol=2e-6
        )

    def test_the_first_token_is_no_target_because_nothing_comes_before_it(self):
        rows = token_rows(1, [(3, 4)])
        mask_L = rows.target_mask_BL[0].copy()
        expected = _loss(rows.tokens_BL[0], mask_L, num_targets=8)
        mask_L[0] = True
        np.testing.assert_array_equal(_loss(rows.tokens_BL[0], mask_L, num_targets=8), expected)

    def test_no_target_gives_zero_and_a_zero_gradient(self):
        rows = token_rows(3, [(6, 0)])

        def loss(lora):
            given = (jnp.asarray(part[0]) for part in rows)
            return example_loss(_MODEL.decoder, lora, _MODEL.base, *given, num_targets=2)

        value, grads = jax.jit(jax.value_and_grad(loss))(_MODEL.lora)
        self.assertEqual(float(value), 0.0)
        for leaf in jax.tree.leaves(grads):
            np.testing.assert_array_equal(leaf, 0.0)

    def test_the_unshifted_loss_does_not_look_at_the_token_it_scores_from_before(self):
        """Changing the last token moves the logits at its own position, unlike `next_token`."""
        rows = token_rows(4, [(4, 1)])
        tokens_L = jnp.asarray(rows.tokens_BL[0])

        def logits_at(position, last):
            return all_logits(*_MODEL[:3], tokens_L.at[-1].set(last))[position]

        np.testing.assert_array_equal(logits_at(-2, 7), logits_at(-2, 9))
        self.assertGreater(float(jnp.abs(logits_at(-1, 7) - logits_at(-1, 9)).max()), 1e-3)
