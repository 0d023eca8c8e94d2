"""A small step away from rows, by hand and by finite differences."""

import jax
import numpy as np
import pytest
from support import all_logits, tiny_model, token_rows

from raslik_jax.train import away

_MODEL = tiny_model()
_FORGET = token_rows(0, [(4, 5), (6, 3)])
_ASKED = token_rows(1, [(3, 4)])


def _losses(lora, rows):
    """Returns each row's mean nats of its target tokens, from all logits in NumPy."""
    found = []
    for tokens_L, mask_L in zip(*rows, strict=True):
        logits_LV = np.asarray(all_logits(_MODEL.decoder, lora, _MODEL.base, tokens_L), np.float64)
        log_p_LV = logits_LV - np.log(np.exp(logits_LV).sum(axis=1, keepdims=True))
        (places,) = np.nonzero(mask_L)
        found.append(-np.mean([log_p_LV[n - 1, tokens_L[n]] for n in places]))
    return np.array(found)


def _gradient(rows):
    return away.loss_gradient(_MODEL.decoder)(_MODEL.lora, _MODEL.base, rows.batch(8))


def test_the_prediction_is_the_slope_of_the_measured_change():
    forget, toward = _gradient(_FORGET), _gradient(_ASKED)
    before = _losses(_MODEL.lora, _ASKED)[0]
    slopes = []
    for share in (2e-3, 1e-3):
        moved, predicted = away.step_along(_MODEL.lora, forget, toward, share=share)
        slopes.append(((_losses(moved, _ASKED)[0] - before), float(predicted)))
    # What is left of the difference is quadratic in the step: a quarter at half of it.
    (far, far_predicted), (near, near_predicted) = slopes
    assert near_predicted == pytest.approx(far_predicted / 2, rel=1e-5)
    assert near == pytest.approx(near_predicted, rel=0.05)
    assert abs(near - near_predicted) < 0.5 * abs(far - far_predicted)


def test_a_step_goes_up_the_loss_of_its_rows_and_has_a_share_of_the_adapters_length():
    forget = _gradient(_FORGET)
    moved, predicted = away.step_along(_MODEL.lora, forget, forget, share=0.01)
    flat = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (_MODEL.lora, moved, forget)
    ]
    length, step = np.linalg.norm(flat[0]), flat[1] - flat[0]
    assert np.linalg.norm(step) == pytest.approx(0.01 * length, rel=1e-3)
    assert float(predicted) == pytest.approx(0.01 * length * np.linalg.norm(flat[2]), rel=1e-5)
    assert _losses(moved, _FORGET).sum() > _losses(_MODEL.lora, _FORGET).sum()
    zeros = jax.tree.map(np.zeros_like, forget)
    still, nothing = away.step_along(_MODEL.lora, zeros, forget, share=0.01)
    assert float(nothing) == 0
    jax.tree.map(np.testing.assert_array_equal, still, _MODEL.lora)
