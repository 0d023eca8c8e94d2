"""What answers that a model draws itself cost at an answer's tokens, against the whole softmax."""

import numpy as np
from support import all_logits, tiny_model, token_rows

from raslik_jax.evaluate import likelihood

_MODEL = tiny_model()


def test_entropy_and_spread_are_those_of_the_next_tokens():
    rows = token_rows(0, [(4, 5), (6, 3), (3, 1)])
    step = likelihood.expected_step(_MODEL.decoder)
    mean_B, spread_B = step(_MODEL.lora, _MODEL.base, rows.batch(8))
    for number, (tokens_L, mask_L) in enumerate(zip(*rows, strict=True)):
        logits = all_logits(_MODEL.decoder, _MODEL.lora, _MODEL.base, tokens_L)
        entropies, variances = [], []
        for place in np.flatnonzero(mask_L):
            z_V = np.asarray(logits[place - 1], np.float64)
            p_V = np.exp(z_V - z_V.max()) / np.exp(z_V - z_V.max()).sum()
            surprise_V = -np.log(p_V)
            entropies.append(p_V @ surprise_V)
            variances.append(p_V @ surprise_V**2 - entropies[-1] ** 2)
        np.testing.assert_allclose(mean_B[number], np.mean(entropies), rtol=1e-4)
        expected = np.sqrt(np.sum(variances)) / len(variances)
        np.testing.assert_allclose(spread_B[number], expected, rtol=1e-3)


def test_a_dummy_row_has_none():
    rows = token_rows(0, [(4, 0)])
    step = likelihood.expected_step(_MODEL.decoder)
    mean_B, spread_B = step(_MODEL.lora, _MODEL.base, rows.batch(8))
    assert (float(mean_B[0]), float(spread_B[0])) == (0, 0)
