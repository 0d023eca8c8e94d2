"""Unlearning steps: the direction of Eq. (1), and one battery for all algorithms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from support import tiny_model, token_rows

from raslik_jax.unlearning import objectives, steps

_MODEL = tiny_model()
_NUM_TARGETS = 8
_ALGORITHMS = {
    "ga_gdr": steps.ga_gdr,
    "ga_klr": steps.ga_klr,
    "ga_klr_forward": functools.partial(steps.ga_klr, direction="forward"),
}


def _batch(seed, shapes):
    rows = token_rows(seed, shapes)
    return objectives.TokenBatch(jnp.asarray(rows.tokens_BL), jnp.asarray(rows.target_mask_BL))


_FORGET, _RETAIN = _batch(0, [(4, 5), (6, 3)]), _batch(1, [(3, 6), (5, 4), (4, 4)])
_FROZEN = steps.Frozen(base=_MODEL.base, reference=_MODEL.lora)


@jax.jit
def _nll(lora, batch):
    return objectives.nll(_MODEL.decoder, lora, _MODEL.base, batch, num_targets=_NUM_TARGETS)


def _run(algorithm, num_steps, frozen=_FROZEN):
    step = jax.jit(
        functools.partial(algorithm.step, forget_targets=_NUM_TARGETS, retain_targets=_NUM_TARGETS)
    )
    state, infos = algorithm.init(_MODEL.lora), []
    # Optax's AdamW raises float32 to an integer power, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(num_steps):
            state, info = step(state, frozen, _FORGET, _RETAIN)
            infos.append(info)
    return state, infos


class StepsTest(parameterized.TestCase):
    def test_the_first_step_of_ga_gdr_descends_delta_of_eq_1(self):
        state, _ = _run(steps.ga_gdr(_MODEL.decoder, optax.sgd(1.0)), 1)
        of_example = jax.jit(jax.grad(_nll))

        def mean_gradient(batch):
            rows = [
                of_example(_MODEL.lora, objectives.TokenBatch(*(leaf[i : i + 1] for leaf in batch)))
                for i in range(batch.tokens_BL.shape[0])
            ]
            return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *rows)

        delta = jax.tree.map(jnp.subtract, mean_gradient(_RETAIN), mean_gradient(_FORGET))
        moved = jax.tree.map(jnp.subtract, _MODEL.lora, state.lora)
        for got, expected in zip(jax.tree.leaves(moved), jax.tree.leaves(delta), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5)

    @parameterized.named_parameters((name, name) for name in _ALGORITHMS)
    def test_forgets_the_one_set_and_not_the_other(self, name):
        algorithm = _ALGORITHMS[name](_MODEL.decoder, optax.adamw(1e-2), retain_weight=4.0)
        state, infos = _run(algorithm, 20)
        self.assertEqual(int(state.step), 20)
        forgotten = _nll(state.lora, _FORGET) - _nll(_MODEL.lora, _FORGET)
        kept = _nll(state.lora, _RETAIN) - _nll(_MODEL.lora, _RETAIN)
        self.assertGreater(float(forgotten), 0.5)
        self.assertLess(float(kept), 0.5 * float(forgotten))
        np.testing.assert_allclose(
            infos[0].loss, 4.0 * infos[0].retain_term - infos[0].forget_nll, rtol=1e-5
        )
        np.testing.assert_allclose(infos[0].forget_nll, _nll(_MODEL.lora, _FORGET), rtol=1e-5)

    def test_the_first_step_of_ga_klr_is_pure_ascent(self):
        """The KL's gradient is zero at the reference, so only the forget set moves anything."""
        state, infos = _run(steps.ga_klr(_MODEL.decoder, optax.sgd(1.0)), 1)
        grads = jax.jit(jax.grad(_nll))(_MODEL.lora, _FORGET)
        expected = jax.tree.map(jnp.add, _MODEL.lora, grads)
        for got, want in zip(jax.tree.leaves(state.lora), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)
        self.assertLess(abs(float(infos[0].retain_term)), 1e-6)

    @parameterized.named_parameters((name, name) for name in _ALGORITHMS)
    def test_the_frozen_weights_are_arguments(self, name):
        """Another base through the same jitted step gives another loss."""
        algorithm = _ALGORITHMS[name](_MODEL.decoder, optax.sgd(1e-3))
        step = jax.jit(
            functools.partial(
                algorithm.step, forget_targets=_NUM_TARGETS, retain_targets=_NUM_TARGETS
            )
        )
        state = algorithm.init(_MODEL.lora)
        losses = [
            float(step(state, steps.Frozen(base, _MODEL.lora), _FORGET, _RETAIN)[1].forget_nll)
            for base in (_MODEL.base, tiny_model(seed=5).base)
        ]
        self.assertGreater(abs(losses[0] - losses[1]), 1e-3)
        self.assertEqual(step._cache_size(), 1)


if __name__ == "__main__":
    absltest.main()
