"""The loss of one example, against all its logits in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from support import tiny_model, token_rows

from raslik_jax.sketch.loss import example_loss

_MODEL = tiny_model()


def _slow_loss(tokens_L, target_mask_L, *, shift):
    """Returns the mean NLL from the logits at every position, in float64."""
    hidden_LE = _MODEL.decoder.hidden(_MODEL.lora, _MODEL.base, jnp.asarray(tokens_L))
    logits_LV = np.asarray(_MODEL.decoder.logits(_MODEL.lora, _MODEL.base, hidden_LE), np.float64)
    values = []
    for position in np.flatnonzero(target_mask_L):
        row = logits_LV[position - shift]
        values.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens_L[position]])
    return np.mean(values) if values else 0.0


def _loss(tokens_L, target_mask_L, *, num_targets, loss="next_token"):
    return example_loss(
        _MODEL.decoder,
        _MODEL.lora,
        _MODEL.base,
        jnp.asarray(tokens_L),
        jnp.asarray(target_mask_L),
        num_targets=num_targets,
        loss=loss,
    )


class LossTest(parameterized.TestCase):
    @parameterized.product(loss=("next_token", "unshifted"), num_targets=(5, 9))
    def test_equals_the_loss_from_all_logits(self, loss, num_targets):
        rows = token_rows(0, [(4, 5)])
        expected = _slow_loss(
            rows.tokens_BL[0], rows.target_mask_BL[0], shift=int(loss == "next_token")
        )
        got = _loss(rows.tokens_BL[0], rows.target_mask_BL[0], num_targets=num_targets, loss=loss)
        np.testing.assert_allclose(got, expected, rtol=2e-6)

    def test_a_target_before_a_gap_counts(self):
        rows = token_rows(1, [(3, 4)])
        mask_L = rows.target_mask_BL[0].copy()
        mask_L[1], mask_L[5] = True, False
        expected = _slow_loss(rows.tokens_BL[0], mask_L, shift=1)
        np.testing.assert_allclose(
            _loss(rows.tokens_BL[0], mask_L, num_targets=4), expected, rtol=2e-6
        )

    def test_padding_changes_nothing(self):
        short, padded = token_rows(2, [(4, 3)]), token_rows(2, [(4, 3)], length=16)
        values = [
            _loss(r.tokens_BL[0], r.target_mask_BL[0], num_targets=3) for r in (short, padded)
        ]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-6)

    def test_no_target_gives_zero_and_a_zero_gradient(self):
        rows = token_rows(3, [(6, 0)])

        def loss(lora):
            return example_loss(
                _MODEL.decoder,
                lora,
                _MODEL.base,
                jnp.asarray(rows.tokens_BL[0]),
                jnp.asarray(rows.target_mask_BL[0]),
                num_targets=2,
            )

        value, grads = jax.value_and_grad(loss)(_MODEL.lora)
        self.assertEqual(float(value), 0.0)
        for leaf in jax.tree.leaves(grads):
            np.testing.assert_array_equal(leaf, 0.0)

    def test_the_unshifted_loss_does_not_look_at_the_token_it_scores_from_before(self):
        """Changing the last token moves the logits at its own position, unlike `next_token`."""
        rows = token_rows(4, [(4, 1)])
        tokens_L = jnp.asarray(rows.tokens_BL[0])

        def logits_at(position, last):
            hidden_LE = _MODEL.decoder.hidden(_MODEL.lora, _MODEL.base, tokens_L.at[-1].set(last))
            return _MODEL.decoder.logits(_MODEL.lora, _MODEL.base, hidden_LE)[position]

        np.testing.assert_array_equal(logits_at(-2, 7), logits_at(-2, 9))
        self.assertGreater(float(jnp.abs(logits_at(-1, 7) - logits_at(-1, 9)).max()), 1e-3)


if __name__ == "__main__":
    absltest.main()
