"""The training loop: settings out of range are refused, and what diverges is never a result."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from raslik_jax.train import finetune, steps
from raslik_jax.train.objectives import TokenBatch

_BATCH = finetune.DeviceBatch(
    TokenBatch(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool)), num_targets=2
)


def _losses(params, frozen, batch, *, num_targets, dropout_keys):
    """Returns the sum of the weights, whose gradient is one everywhere."""
    del frozen, num_targets, dropout_keys
    return jnp.full(len(batch.tokens_BL), params["w"].sum())


def _fit(num_steps, tx, **options):
    start = finetune.start_fit({"w": jnp.ones(3)}, tx)
    batches = itertools.repeat(_BATCH, num_steps)
    return finetune.fit(_losses, start, {}, batches, tx=tx, name="fine-tuning", **options)


class RangesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("clip", {"clip": -1.0}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": math.nan}),
        ("weight_decay", {"weight_decay": -0.1}),
        ("weight_decay", {"weight_decay": math.inf}),
        ("learning rate", {"rate": -1e-3}),
        ("learning rate", {"rate": math.nan}),
    )
    def test_an_optimizer_out_of_range_is_refused(self, name, changed):
        settings = {"rate": 1e-3, "weight_decay": 0.0, "clip": 1.0} | changed
        with self.assertRaisesRegex(ValueError, f"{name} must be .*, got {changed.popitem()[1]}"):
            finetune.adamw(settings.pop("rate"), **settings)

    @parameterized.parameters(
        ("warmup", {"warmup": 5.0}),
        ("warmup", {"warmup": -0.1}),
        ("warmup", {"warmup": math.nan}),
        ("learning rate", {"peak": -1.0}),
        ("learning rate", {"peak": math.inf}),
        ("num_steps", {"num_steps": 0}),
    )
    def test_a_schedule_out_of_range_is_refused(self, name, changed):
        settings = {"peak": 1e-3, "num_steps": 10, "schedule": "linear", "warmup": 0.1} | changed
        with self.assertRaisesRegex(ValueError, f"{name} must be"):
            finetune.learning_rate(settings.pop("peak"), settings.pop("num_steps"), **settings)

    @parameterized.parameters({"batch_size": 0}, {"num_epochs": 0}, {"batch_size": -4})
    def test_no_batches_or_epochs_are_refused(self, **changed):
        with self.assertRaisesRegex(ValueError, f"{next(iter(changed))} must be 1 or more"):
            finetune.num_steps_of(7, **({"batch_size": 2, "num_epochs": 1} | changed))

    @parameterized.parameters(
        {"forget_weight": -1.0},
        {"retain_weight": math.nan},
        {"micro_batch": -2},
        {"npo_beta": 0.0},
        {"simnpo_beta": -1.0},
        {"simnpo_delta": math.inf},
    )
    def test_options_out_of_range_are_refused(self, **changed):
        ((name, value),) = changed.items()
        with self.assertRaisesRegex(ValueError, f"{name} must be a finite number.*, got {value}"):
            steps.Options(**changed)


class DivergenceTest(parameterized.TestCase):
    def test_weights_that_the_last_step_makes_infinite_are_no_result(self):
        tx = optax.sgd(lambda step: jnp.where(step == 2, jnp.inf, 1e-3))
        with self.assertRaisesRegex(
            ValueError, "fine-tuning diverged: weights .* after step 3; lower --rate"
        ):
            _fit(3, tx, rate_flag="--rate")

    def test_the_first_step_without_a_finite_loss_is_named(self):
        saved = []
        tx = optax.sgd(lambda step: jnp.where(step == 3, jnp.nan, 1e-3))
        with self.assertRaisesRegex(ValueError, "the loss at step 5 is nan; lower --rate"):
            _fit(12, tx, rate_flag="--rate", save_every=3, save=saved.append)
        self.assertEqual([len(at.losses) for at in saved], [3])
        self.assertTrue(np.isfinite(saved[0].state.params["w"]).all())

    def test_a_loss_that_is_infinite_between_finite_ones_is_noticed(self):
        losses = np.array([1.0, np.inf, 2.0, np.nan])
        with self.assertRaisesRegex(ValueError, "the loss at step 12 is inf"):
            finetune.check_finite(losses, what="fine-tuning", step=11)

    def test_losses_of_every_step_are_kept_in_order(self):
        fitted = _fit(70, optax.sgd(1e-3))
        np.testing.assert_allclose(fitted.losses, 3 - 3e-3 * np.arange(70), rtol=1e-5)
        self.assertEqual(int(jax.device_get(fitted.state.step)), 70)


if __name__ == "__main__":
    absltest.main()
