"""Losses against NumPy, and what must hold at the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from absl.testing import parameterized
from support import all_logits, tiny_model, token_rows

from raslik_jax.train import losses

_MODEL = tiny_model()
_OTHER = jax.tree.map(lambda leaf: leaf * 1.3, _MODEL.lora)
_SHAPES = [(4, 5), (6, 3), (2, 7)]


def _batch(shapes, *, seed=0, length=0):
    return token_rows(seed, shapes, length=length).batch(8)


@jax.jit
def _all_logits(lora, tokens_L):
    return all_logits(_MODEL.decoder, lora, _MODEL.base, tokens_L)


def _log_probabilities(lora, tokens_L):
    """Returns float64 log probabilities at every position."""
    return scipy.special.log_softmax(np.float64(_all_logits(lora, tokens_L)), axis=-1)


def _outputs(lora, batch, model=_MODEL, keys=None):
    return losses.Outputs(losses.BoundModel(model.decoder, lora, model.base), batch, keys)


@jax.jit
def _nll(lora, batch):
    return losses.weighted_mean(losses.nll_by_example(_outputs(lora, batch)), batch)


@functools.partial(jax.jit, static_argnames="direction")
def _kl(lora, reference, batch, direction="reverse"):
    models = _outputs(lora, batch), _outputs(reference, batch)
    kl_B = losses.kl_by_example(*models, direction=direction)
    return losses.weighted_mean(kl_B, batch)


class LossesTest(parameterized.TestCase):
    def test_nll_is_the_mean_over_examples_of_token_means(self):
        batch = _batch(_SHAPES)
        means = []
        for tokens_L, mask_L in zip(*map(np.asarray, jax.tree.leaves(batch)), strict=True):
            log_p_LV = _log_probabilities(_MODEL.lora, jnp.asarray(tokens_L))
            means.append(np.mean([-log_p_LV[t - 1, tokens_L[t]] for t in np.flatnonzero(mask_L)]))
        np.testing.assert_allclose(_nll(_MODEL.lora, batch), np.mean(means), rtol=2e-6)

    def test_dropout_needs_a_key_and_differs_by_key(self):
        model = tiny_model(dropout=0.5)
        batch = _batch(_SHAPES)

        @jax.jit
        def value(key):
            keys = None if key is None else jax.random.split(key, len(_SHAPES))
            outputs = _outputs(model.lora, batch, model, keys)
            return losses.weighted_mean(losses.nll_by_example(outputs), batch)

        keys = (None, jax.random.key(1), jax.random.key(2), jax.random.key(1))
        none, first, second, again = (float(value(key)) for key in keys)
        self.assertEqual(first, again)
        self.assertLen({none, first, second}, 3)

    def test_means_over_examples_and_over_tokens(self):
        """Written out: rows of 5, 3 and 0 counted tokens."""
        batch = _batch([(4, 5), (6, 3), (4, 0)])
        value_B = jnp.asarray([1.0, 4.0, 100.0])
        means = [losses.weighted_mean(value_B, batch, mean=m) for m in ("examples", "tokens")]
        np.testing.assert_allclose(means, [2.5, (5 * 1 + 3 * 4) / 8], rtol=1e-6)
        empty = _batch([(4, 0)], length=9)
        self.assertEqual(float(losses.weighted_mean(value_B[:1], empty)), 0.0)

    @parameterized.parameters("reverse", "forward")
    def test_kl_equals_numpy(self, direction):
        batch = _batch(_SHAPES)
        means = []
        for tokens_L, mask_L in zip(*map(np.asarray, jax.tree.leaves(batch)), strict=True):
            now, then = (
                _log_probabilities(lora, jnp.asarray(tokens_L)) for lora in (_OTHER, _MODEL.lora)
            )
            p, q = (now, then) if direction == "reverse" else (then, now)
            kl_L = (np.exp(p) * (p - q)).sum(-1)
            means.append(np.mean([kl_L[t - 1] for t in np.flatnonzero(mask_L)]))
        got = _kl(_OTHER, _MODEL.lora, batch, direction)
        np.testing.assert_allclose(got, np.mean(means), rtol=1e-4)
        self.assertGreater(float(got), 1e-3)
