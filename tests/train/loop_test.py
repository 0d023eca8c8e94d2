"""The training loop: what diverges is never a result, and what was killed goes on."""

import contextlib
import itertools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.parallel import processes
from raslik_jax.train import loop


def _fit(num_steps, tx, **options):
    """Trains weights whose loss is their sum: its gradient is one everywhere."""
    algorithm = loop.make_algorithm(
        lambda frozen, batch, step: (lambda params, frozen, part: (params["w"].sum(), None), batch),
        tx,
    )
    told, rows = {"what": "fine-tuning", "rate_flag": "--rate"}, itertools.repeat(jnp.ones(2))
    start = {"w": jnp.ones(3)}
    return loop.fit(algorithm, start, {}, lambda _: rows, num_steps=num_steps, **told, **options)


class MicroBatchTest(parameterized.TestCase):
    @parameterized.parameters((0, 4, 4), (3, 4, 2), (4, 4, 4), (9, 4, 4), (5, 7, 1), (4, 6, 3))
    def test_parts_are_even_and_sum_to_the_batch(self, micro_batch, rows, held):
        seen = []

        def objective(params, frozen, batch):
            seen.append(len(batch))
            return jnp.sum((batch @ params["w"]) ** 2), jnp.sum(batch)

        batch_NE = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
        w_E = np.float32([1.0, -2.0, 0.5])
        (loss, total), gradient = loop.value_and_grad(
            objective, {"w": w_E}, {}, jnp.asarray(batch_NE), micro_batch=micro_batch
        )
        self.assertEqual(set(seen), {held})
        product_N = batch_NE @ w_E
        self.assertAlmostEqual(float(loss), float(product_N @ product_N), places=3)
        self.assertAlmostEqual(float(total), float(batch_NE.sum()), places=4)
        np.testing.assert_allclose(gradient["w"], 2 * product_N @ batch_NE, rtol=1e-5)


class LoopTest(FolderTest):
    def test_weights_that_the_last_step_makes_infinite_are_no_result(self):
        tx = optax.sgd(lambda step: jnp.where(step == 2, jnp.inf, 1e-3))
        with self.assertRaisesRegex(
            ValueError, "fine-tuning diverged: weights .* after step 3; lower --rate"
        ):
            _fit(3, tx)

    def test_a_divergence_that_is_told_leaves_the_last_finite_state(self):
        tx, told = optax.sgd(lambda step: jnp.where(step == 2, jnp.inf, 1e-3)), []
        after = {number: lambda params: None for number in (2, 3)}
        found = _fit(3, tx, on_divergence=told.append, after=after)
        self.assertIn("weights are not finite after step 3", told[0])
        self.assertLen(found.losses, 2)
        self.assertTrue(np.isfinite(found.state.params["w"]).all())

    def test_the_first_step_without_a_finite_loss_is_named_and_nothing_after_it_is_kept(self):
        kept = []
        after = {number: lambda params, n=number: kept.append(n) for number in (2, 6)}
        tx = optax.sgd(lambda step: jnp.where(step == 3, jnp.nan, 1e-3))
        with self.assertRaisesRegex(ValueError, "the loss at step 5 is nan; lower --rate"):
            _fit(12, tx, folder=self.folder, save_every=3, after=after)
        self.assertEqual(kept, [2])
        self.assertEqual([path.name for path in (self.folder / "resume").iterdir()], ["3"])

    def test_a_killed_training_goes_on_behind_its_last_checkpoint(self):
        def die(params):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            _fit(70, optax.sgd(1e-3), folder=self.folder, save_every=8, after={20: die})
        called = []
        options = {
            "save_every": 8,
            "after": {n: lambda params, n=n: called.append(n) for n in (7, 20)},
        }
        fitted = _fit(70, optax.sgd(1e-3), folder=self.folder, **options)
        self.assertEqual(called, [20])
        np.testing.assert_allclose(fitted.losses, 3 - 3e-3 * np.arange(70), rtol=1e-5)
        self.assertEqual(int(fitted.state.step), 70)
        self.assertEqual(fitted.losses, _fit(70, optax.sgd(1e-3)).losses)

    def test_checkpoints_of_a_longer_training_are_refused_and_kept(self):
        _fit(12, optax.sgd(1e-3), folder=self.folder, save_every=8)
        for steps in (0, 8):
            with self.assertRaisesRegex(ValueError, f"it has 8 steps, this training {steps}.*new"):
                _fit(steps, optax.sgd(1e-3), folder=self.folder)
        self.assertEqual([path.name for path in (self.folder / "resume").iterdir()], ["8"])

    def test_batches_that_end_too_early_are_no_training(self):
        algorithm = loop.make_algorithm(
            lambda frozen, batch, step: (lambda params, *_: (params["w"].sum(), ()), batch),
            optax.sgd(1e-3),
        )

        def fit(num_steps):
            given = algorithm, {"w": jnp.ones(3)}, {}, lambda done: iter([jnp.zeros((2, 1))] * 3)
            return loop.fit(*given, num_steps=num_steps, what="fine-tuning")

        self.assertLen(fit(3).losses, 3)
        with self.assertRaisesRegex(ValueError, "fine-tuning must have 4 batches, got fewer"):
            fit(4)

    def test_a_training_ends_where_it_is_told_to(self):
        called = []

        def stop(params):
            called.append(float(params["w"][0]))
            return len(called) == 2

        fitted = _fit(70, optax.sgd(1e-1), after=dict.fromkeys((3, 5, 7), stop))
        np.testing.assert_allclose(called, [0.7, 0.5], rtol=1e-5)
        self.assertLen(fitted.losses, 5)
        self.assertEqual(int(fitted.state.step), 5)

    def test_the_numbers_of_every_step_are_handed_on_in_order_while_it_runs(self):
        seen, lag = [], []

        class Watch(contextlib.nullcontext):
            def write(self, step, numbers):
                seen.append((step, numbers["loss"]))

        def batches(start):
            for number in itertools.count(start + 1):
                lag.append(number - len(seen))
                yield jnp.ones(2)

        self.enter_context(mock.patch.object(loop, "_LOOK_SECONDS", 0.0))
        for count in (1, 2):
            seen.clear(), lag.clear()
            self.enter_context(mock.patch.object(processes, "count", lambda count=count: count))
            algorithm = loop.make_algorithm(
                lambda *_: (lambda params, frozen, part: (params["w"].sum(), None), jnp.ones(2)),
                optax.sgd(1e-3),
            )
            fitted = loop.fit(
                algorithm, {"w": jnp.ones(3)}, {}, batches, num_steps=40, watch=Watch()
            )
            self.assertEqual(seen, [*enumerate(fitted.losses, start=1)])
            if count == 1:
                self.assertLessEqual(max(lag), 4)
            else:  # processes of a job look by the number of steps, not each by its own clock
                self.assertEqual(max(lag), 32)  # a CPU has no step in flight

    @parameterized.parameters(
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 0.5, [0.0, 0.5, 1.0, 0.5]),
        ("cosine", 0.0, [1.0, 0.853553, 0.5, 0.146447]),
        ("constant", 0.25, [0.0, 1.0, 1.0, 1.0]),
    )
    def test_schedules_warm_up_and_decay(self, kind, warmup, expected):
        schedule = loop.make_schedule(1.0, 4, kind=kind, warmup=warmup)
        np.testing.assert_allclose([schedule(n) for n in range(4)], expected, rtol=1e-5)
