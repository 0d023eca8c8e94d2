"""Which gradient: the one pass gives the gradients of the package and of the probes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_model, token_rows

from experiments.studies import probes
from experiments.studies.which_gradient import cells, measure
from raslik_jax.sketch import projections


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _row():
    rows = token_rows(0, [(4, 9)])
    tokens_L, is_answer_L = rows.tokens_BL[0], np.asarray(rows.target_mask_BL[0])
    is_counted_L = (np.arange(len(tokens_L)) < 13) & (np.arange(len(tokens_L)) > 0)
    return jnp.asarray(tokens_L), jnp.asarray(is_answer_L), jnp.asarray(is_counted_L)


@pytest.mark.parametrize("name", measure.LOSSES)
def test_a_slope_gives_the_gradient_of_its_loss(model, name):
    loss, tokens = name.split("/")
    tokens_L, is_answer_L, is_counted_L = _row()
    is_target_L = is_counted_L if tokens == "all" else is_answer_L
    hidden = functools.partial(model.decoder.hidden, base=model.base, tokens_L=tokens_L)

    def smoothed(lora):
        hidden_LE = model.decoder.hidden(lora, model.base, tokens_L)
        logits_LV = model.decoder.logits(lora, model.base, hidden_LE)
        nll_LV = jnp.roll(-jax.nn.log_softmax(logits_LV, axis=-1), 1, axis=0)
        own_L = jnp.take_along_axis(nll_LV, tokens_L[:, None], axis=1)[:, 0]
        nll_L = (1 - measure.SMOOTHING) * own_L + measure.SMOOTHING * nll_LV.mean(axis=1)
        return jnp.mean(nll_L, where=is_target_L)

    def named(lora):
        known = model.decoder, lora, model.base, tokens_L, is_target_L
        return probes.probe_loss(*known, num_targets=16, probe=loss)

    expected = jax.grad(smoothed if loss == "smoothed" else named)(model.lora)
    hidden_LE, pull = jax.vjp(lambda lora: hidden(lora), model.lora)
    slopes, _ = measure.loss_slopes(
        model.decoder, model.base, hidden_LE, tokens_L, is_answer_L, is_counted_L
    )
    flat_P, expected_P = map(
        projections.flatten_gradients, (pull(slopes[name].astype(hidden_LE.dtype))[0], expected)
    )
    np.testing.assert_allclose(flat_P, expected_P, atol=2e-5 * float(jnp.abs(expected_P).max()))


def test_the_nll_of_answer_and_prompt_is_that_of_the_logits(model):
    tokens_L, is_answer_L, is_counted_L = _row()
    hidden_LE = model.decoder.hidden(model.lora, model.base, tokens_L)
    logits_LV = model.decoder.logits(model.lora, model.base, hidden_LE)
    own_L = -jax.nn.log_softmax(logits_LV, axis=-1)[jnp.arange(len(tokens_L) - 1), tokens_L[1:]]
    _, nll = measure.loss_slopes(
        model.decoder, model.base, hidden_LE, tokens_L, is_answer_L, is_counted_L
    )
    for name, is_L in {"answer": is_answer_L, "prompt": is_counted_L & ~is_answer_L}.items():
        np.testing.assert_allclose(nll[f"nll_{name}"], own_L[is_L[1:]].mean(), rtol=1e-4)


def test_a_probe_is_the_solution_of_its_equation():
    unit_ME = np.random.default_rng(0).normal(size=(12, 4))
    found_QN = cells.probe_scores(unit_ME, 10)
    moved_ME = unit_ME - unit_ME[:10].mean(axis=0)
    covariance_EE = np.cov(unit_ME[:10].T, bias=True)
    ridged_EE = covariance_EE + 0.1 * covariance_EE.trace() / 4 * np.eye(4)
    expected_QN = moved_ME[10:] @ np.linalg.inv(ridged_EE) @ moved_ME[:10].T
    np.testing.assert_allclose(found_QN, expected_QN, rtol=1e-9)


@pytest.mark.parametrize(("score_N", "f1"), [([9, 9.1, *range(-9, 9)], 1.0), ([0] * 20, 0.0)])
def test_f1_is_of_the_rows_that_the_gap_rule_finds(score_N, f1):
    spread_N = np.array(score_N, float) / [1, 1, *[20] * 18]
    assert cells.found_f1(spread_N, np.arange(20) < 2) == f1
