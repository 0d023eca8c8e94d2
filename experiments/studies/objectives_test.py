"""Objectives of the studies: a step by hand in NumPy, and where the way back ends."""

import dataclasses

import jax
import linear_decoder
import numpy as np
import optax
import pytest
from support import padded, token_rows

from experiments.studies.objectives import MEMBERS
from raslik_jax.train import steps
from raslik_jax.train.objectives import OBJECTIVES

_LORA, _BASE = linear_decoder.random_weights()
_NONE = np.zeros_like(_LORA["w"])
_MOVED = {"w": _LORA["w"] + 0.3 * linear_decoder.random_weights(1)[0]["w"]}
# Rows of unlike length and a dummy row, so that every kind of mean differs.
_FORGET, _RETAIN = (
    token_rows(seed, shapes, vocab_size=linear_decoder.V).batch(9)
    for seed, shapes in (
        (2, [(3, 6), (5, 2), (1, 1), (4, 0)]),
        (3, [(2, 3), (1, 7), (5, 4), (3, 1)]),
    )
)
_OPTIONS = steps.Options(forget_weight=0.7, retain_weight=1.3)
_CHANGED = {"beta": 0.4, "delta": 0.2, "forget_weight": 1.0}


def _step(name, options=_OPTIONS, wider=0, *, tx=optax.sgd(1.0), times=1):  # noqa: B008
    """Returns the parameters and Info after steps from _MOVED."""
    objective = (OBJECTIVES | MEMBERS)[name]
    known = {field.name for field in dataclasses.fields(objective.settings)}
    own = {key: value for key, value in _CHANGED.items() if key in known}
    settings = dataclasses.replace(objective.settings, **own)
    algorithm = steps.unlearning(objective, linear_decoder.ADAPTED, tx, options, settings)
    step, state = jax.jit(algorithm.step), algorithm.init(_MOVED)
    forget, retain = (padded(batch, columns=wider) for batch in (_FORGET, _RETAIN))
    batch = forget, retain if objective.retain else None
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(times):
            state, info = step(state, steps.Frozen(_BASE, _LORA), batch)
    return state.params, info


def _by_hand(name):
    """Returns w after one step, in float64."""
    w, count_B = _MOVED["w"], np.asarray(_FORGET.target_mask_BL).sum(1)
    nll = linear_decoder.nll_values(w, _BASE, _FORGET)
    slope_B, grad_BEE = np.ones(4), nll.grad_BEE
    if name == "base_klr":
        grad_BEE = linear_decoder.kl_values(w, _NONE, _BASE, _FORGET, direction="forward").grad_BEE
    elif name == "simnpo":
        slope_B = -2 / (1 + np.exp(0.4 * (nll.value_B - 0.2)))
    else:
        reference_B = linear_decoder.nll_values(_LORA["w"], _BASE, _FORGET).value_B
        slope_B = -2 * count_B / (1 + np.exp(0.4 * count_B * (nll.value_B - reference_B)))
    slope_B = slope_B * (count_B > 0) / (count_B > 0).sum()
    grad = 0.7 * np.einsum("b,bij->ij", slope_B, grad_BEE)
    if name.endswith("klr"):
        kept = linear_decoder.kl_values(w, _LORA["w"], _BASE, _RETAIN, direction="reverse")
        grad += 1.3 * kept.grad_BEE.mean(0)
    elif name != "npo":
        grad += 1.3 * linear_decoder.nll_values(w, _BASE, _RETAIN).grad_BEE.mean(0)
    return np.asarray(w, np.float64) - grad


@pytest.mark.parametrize("name", MEMBERS)
def test_a_step_equals_the_one_by_hand(name):
    expected, (params, info) = _by_hand(name), _step(name)
    np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)
    norm = np.linalg.norm(np.asarray(_MOVED["w"]) - expected)
    np.testing.assert_allclose(info.grad_norm, norm, rtol=1e-4)
    parts, part_info = _step(name, dataclasses.replace(_OPTIONS, micro_batch=2), wider=5)
    np.testing.assert_allclose(parts["w"], params["w"], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(part_info, info, rtol=1e-4, atol=1e-5)


def test_the_way_back_ends_at_the_backbone_where_ascent_goes_on():
    """Each answer is what it was before fine-tuning; ascent leaves it for somewhere else."""

    def away(w):
        return linear_decoder.kl_values(w, _NONE, _BASE, _FORGET, direction="forward").value_B.sum()

    alone = dataclasses.replace(_OPTIONS, retain_weight=0.0)
    ends = {
        name: away(_step(name, alone, tx=optax.adam(0.05), times=60)[0]["w"])
        for name in ("base_klr", "ga_klr")
    }
    assert ends["base_klr"] < 0.2 * away(_MOVED["w"])
    assert ends["ga_klr"] > away(_MOVED["w"])
