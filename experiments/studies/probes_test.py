"""Probe losses, beside plain sums over whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from support import tiny_model, token_rows

from experiments.studies import probes

_model = functools.cache(tiny_model)


def _oracle(model, probe, lora, tokens_L, mask_L):
    """Returns a probe's loss from the logits of all positions, by its definition."""
    hidden_LE = model.decoder.hidden(lora, model.base, tokens_L)
    nll_LV = -jax.nn.log_softmax(model.decoder.logits(lora, model.base, hidden_LE), axis=-1)
    if probe != "unshifted":
        nll_LV = jnp.roll(nll_LV, 1, axis=0)
    vocab_size = nll_LV.shape[1]
    label_L = (tokens_L + vocab_size // 2) % vocab_size if probe == "rolled_target" else tokens_L
    nll_L = jnp.take_along_axis(nll_LV, label_L[:, None], axis=1)[:, 0]
    chance_L = jnp.exp(-nll_L)
    weight_L = mask_L.astype(jnp.float32)
    value_L = nll_L
    if probe == "margin":
        value_L = -jnp.log(chance_L / (1 - chance_L))
    elif probe == "low_confidence":
        weight_L = jnp.where(chance_L < 0.5, weight_L, 0.0)
    elif probe == "uniform":
        value_L = nll_LV.mean(axis=1)
    return jnp.sum(value_L * weight_L) / jnp.maximum(jnp.sum(weight_L), 1.0)


class ProbesTest(parameterized.TestCase):
    @pytest.mark.heavy
    def test_gradients_are_those_of_the_definitions(self):
        model = _model()
        head = {"kernel": 4 * model.base["head"]["kernel"]}
        model = model._replace(base=model.base | {"head": head})
        rows = token_rows(0, [(4, 9)])
        tokens_L, mask_L = rows.tokens_BL[0], jnp.asarray(rows.target_mask_BL[0])
        logits = jax.jit(
            lambda tokens_L: model.decoder.logits(
                model.lora,
                model.base,
                model.decoder.hidden(model.lora, model.base, tokens_L),
            )
        )
        # Every other token is what the model would say, so that some are above one half.
        for place in range(5, 13, 2):
            tokens_L[place] = int(np.argmax(logits(jnp.asarray(tokens_L))[place - 1]))
        logits_LV = np.asarray(logits(jnp.asarray(tokens_L)), np.float64)[3:12]
        chance_TV = np.exp(logits_LV) / np.exp(logits_LV).sum(axis=1, keepdims=True)
        chance_T = chance_TV[np.arange(9), tokens_L[4:13]]
        self.assertBetween(int((chance_T < 0.5).sum()), 1, 8)
        self.assertLess(chance_T.max(), 0.999)

        def oracles(lora):
            row = jnp.asarray(tokens_L), mask_L
            return jnp.stack([_oracle(model, probe, lora, *row) for probe in probes.PROBES])

        def gradients(lora):
            row = model.base, jnp.asarray(tokens_L), mask_L
            loss = functools.partial(probes.probe_loss, model.decoder, num_targets=12)
            return {
                probe: jax.grad(functools.partial(loss, probe=probe))(lora, *row)
                for probe in probes.PROBES
            }

        wanted = jax.tree.leaves(jax.jit(jax.jacrev(oracles))(model.lora))
        found = jax.jit(gradients)(model.lora)
        for number, probe in enumerate(probes.PROBES):
            for one, several in zip(jax.tree.leaves(found[probe]), wanted, strict=True):
                other = several[number]
                self.assertGreater(float(jnp.linalg.norm(other)), 1e-4)
                atol = 5e-5 * float(jnp.abs(other).max())
                np.testing.assert_allclose(one, other, atol=atol, err_msg=probe)

    def test_an_unknown_probe_is_refused(self):
        row = jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
        with self.assertRaisesRegex(ValueError, "a probe must be one of"):
            probes.probe_loss(_model().decoder, {}, {}, *row, num_targets=3, probe="none")

    def test_mean_hidden_is_over_the_positions_that_predict(self):
        model = _model()
        rows = token_rows(1, [(3, 4)], length=9)
        tokens_L, mask_L = jnp.asarray(rows.tokens_BL[0]), jnp.asarray(rows.target_mask_BL[0])
        found_E, hidden_LE = jax.jit(
            lambda lora: (
                probes.mean_hidden(
                    model.decoder, lora, model.base, tokens_L, mask_L, num_targets=8
                ),
                model.decoder.hidden(lora, model.base, tokens_L),
            )
        )(model.lora)
        np.testing.assert_allclose(found_E, hidden_LE[2:6].mean(axis=0), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    absltest.main()
