"""The optimizer of a recipe, step by step in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from raslik_jax.run.stages import finetune
from raslik_jax.train.objectives import RetrainSettings

_STEPS = 10
# All differ from the defaults; the first gradient is longer than `clip` and the last is shorter.
_SHARED = {"learning_rate": 0.05, "weight_decay": 0.3, "clip": 2.0}
_MOMENTS = {"beta1": 0.7, "beta2": 0.9, "epsilon": 0.05}
_START = {"a": np.array([0.5, -1.0, 2.0]), "b": np.array([[1.5, -0.25]])}
_GRADIENTS = [
    {"a": scale * np.array([1.0, -2.0, 0.5]), "b": scale * np.array([[0.25, 3.0]])}
    for scale in (2.0, -1.0, 0.75, 0.1)
]


def _rate(number, schedule):
    """Returns the rate of a step, the first of which is 0: two steps of warm-up, then decay."""
    if number < 2:
        return 0.05 * number / 2
    share = (number - 2) / (_STEPS - 2)
    shapes = {"linear": 1 - share, "cosine": (1 + np.cos(np.pi * share)) / 2, "constant": 1.0}
    return 0.05 * shapes[schedule]


def _clipped(gradient):
    length = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
    return {name: leaf * min(1.0, 2.0 / length) for name, leaf in gradient.items()}


def _adamw(schedule):
    """Returns the parameters after the gradients; the decay takes no part in the moments."""
    found, first, second = dict(_START), dict.fromkeys(_START, 0.0), dict.fromkeys(_START, 0.0)
    for number, gradient in enumerate(_GRADIENTS):
        rate = _rate(number, schedule)
        for name, leaf in _clipped(gradient).items():
            first[name] = 0.7 * first[name] + 0.3 * leaf
            second[name] = 0.9 * second[name] + 0.1 * leaf**2
            mean = first[name] / (1 - 0.7 ** (number + 1))
            root = np.sqrt(second[name] / (1 - 0.9 ** (number + 1)))
            found[name] = found[name] - rate * (mean / (root + 0.05) + 0.3 * found[name])
    return found


def _sgd(schedule):
    found = dict(_START)
    for number, gradient in enumerate(_GRADIENTS):
        for name, leaf in _clipped(gradient).items():
            found[name] = found[name] - _rate(number, schedule) * (leaf + 0.3 * found[name])
    return found


@pytest.mark.parametrize("warmup", [{"warmup": 0.2}, {"warmup_steps": 2, "warmup": 0.9}])
@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear"])
@pytest.mark.parametrize(("name", "by_hand"), [("adamw", _adamw), ("sgd", _sgd)])
def test_steps_equal_those_by_hand(name, by_hand, schedule, warmup):
    settings = RetrainSettings(optimizer=name, schedule=schedule, **_SHARED, **_MOMENTS, **warmup)
    tx = finetune.optimizer(settings, _STEPS)
    params = jax.tree.map(jnp.float32, _START)
    state = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for gradient in _GRADIENTS:
            updates, state = tx.update(jax.tree.map(jnp.float32, gradient), state, params)
            params = optax.apply_updates(params, updates)
    for leaf, expected in by_hand(schedule).items():
        np.testing.assert_allclose(params[leaf], expected, rtol=1e-5, atol=1e-6)
