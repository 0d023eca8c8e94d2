"""Effects of rows by going back through a training, next to trainings with other factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.replay import effects
from raslik_jax.data.batches import DUMMY_ROW, Batch
from raslik_jax.train import loop

_ROWS, _SIZE, _STEPS = 7, 3, 11
_RNG = np.random.default_rng(0)
_X, _Y = _RNG.normal(size=(_ROWS, _SIZE)), _RNG.normal(size=_ROWS)
_QUERIES, _START = _RNG.normal(size=(2, _SIZE)), _RNG.normal(size=_SIZE)
_ORDER = [_RNG.permutation(_ROWS)[:4] for _ in range(_STEPS)]


def _rate(step):
    return 0.1 * (1 - step / _STEPS)


def _trained(factor_N, optimizer):
    """Returns the queries' values of a training in NumPy whose rows have factors."""
    theta, m, v = _START.copy(), np.zeros(_SIZE), np.zeros(_SIZE)
    for step, rows in enumerate(_ORDER):
        error = np.tanh(_X[rows] @ theta) - _Y[rows]
        slope = (factor_N[rows] * 2 * error * (1 - np.tanh(_X[rows] @ theta) ** 2)) @ _X[rows]
        gradient = slope / len(rows)
        if optimizer == "sgd":
            theta = theta - _rate(step) * gradient
            continue
        gradient = gradient / max(1.0, np.linalg.norm(gradient) / 0.3)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        down = m / (1 - 0.9 ** (step + 1))
        down = down / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        theta = theta - _rate(step) * (down + 0.01 * theta)
    return np.sin(_QUERIES @ theta)


def _algorithm(optimizer):
    def prepare(frozen, batch, step):
        batch, factor_B = batch

        def objective(params, frozen, part):
            row_B, factor_B = part
            is_real_B = row_B != DUMMY_ROW
            error_B = jnp.tanh(frozen["x"][row_B] @ params["theta"]) - frozen["y"][row_B]
            return jnp.sum(
                jnp.where(is_real_B, factor_B.astype(error_B.dtype) * error_B**2, 0.0)
            ) / 4, None

        return objective, (batch.row_B, factor_B)

    kinds = {
        "sgd": lambda: loop.sgd(_rate, clip=0.0),
        "adamw": lambda: loop.adamw(_rate, weight_decay=0.01, clip=0.3),
    }
    return loop.make_algorithm(prepare, kinds[optimizer]())


def _batches(start):
    for rows in _ORDER[start:]:
        row_B = np.array([*rows, DUMMY_ROW], np.int32)
        yield Batch(np.zeros((5, 1), np.int32), np.ones((5, 1), bool), 1, row_B)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_effects_are_the_slopes_of_trainings_with_other_factors(optimizer):
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        found_NQ, last = effects.effects(
            _algorithm(optimizer),
            {"theta": jnp.array(_START)},
            {"x": jnp.array(_X), "y": jnp.array(_Y)},
            _batches,
            lambda params, frozen: jnp.sin(jnp.array(_QUERIES) @ params["theta"]),
            num_steps=_STEPS,
            num_rows=_ROWS,
        )
        values = np.sin(_QUERIES @ np.asarray(last.params["theta"]))
    np.testing.assert_allclose(values, _trained(np.ones(_ROWS), optimizer), rtol=1e-6)
    near = 1e-6 * np.eye(_ROWS)
    slope_NQ = np.stack(
        [(_trained(1 + one, optimizer) - _trained(1 - one, optimizer)) / 2e-6 for one in near]
    )
    np.testing.assert_allclose(found_NQ, slope_NQ, rtol=1e-5, atol=1e-8)
