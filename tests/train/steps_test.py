"""Unlearning steps: every algorithm against NumPy, Eq. (1), and what holds for all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import linear_decoder
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from support import padded, tiny_model, token_rows

from raslik_jax.train import losses, steps
from raslik_jax.train.objectives import OBJECTIVES, KLSettings, Objective, ObjectiveSettings

_MODEL = tiny_model()
_FORGET = token_rows(0, [(4, 5), (6, 3), (5, 4)]).batch(8)
_RETAIN = token_rows(1, [(3, 6), (5, 4), (4, 4)]).batch(8)
_FROZEN = steps.Frozen(base=_MODEL.base, reference=_MODEL.lora)
_FORWARD = KLSettings(kl_direction="forward")


@jax.jit
def _nll(lora, batch):
    model = losses.BoundModel(_MODEL.decoder, lora, _MODEL.base)
    return losses.weighted_mean(losses.nll_by_example(losses.Outputs(model, batch)), batch)


def _algorithm(name, tx, options=steps.Options(), settings=None):  # noqa: B008
    return steps.unlearning(OBJECTIVES[name], _MODEL.decoder, tx, options, settings)


def _run(algorithm, num_steps, frozen=_FROZEN):
    step, state, infos = jax.jit(algorithm.step), algorithm.init(_MODEL.lora), []
    # Optax's AdamW raises float32 to an integer power, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(num_steps):
            state, info = step(state, frozen, (_FORGET, _RETAIN))
            infos.append(info)
    return state, infos


class StepsTest(parameterized.TestCase):
    def test_the_first_step_of_ga_gdr_descends_delta_of_eq_1(self):
        state, _ = _run(_algorithm("ga_gdr", optax.sgd(1.0)), 1)
        of_example = jax.jit(jax.grad(_nll))

        def mean_gradient(batch):
            rows = [
                of_example(_MODEL.lora, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch))
                for i in range(batch.tokens_BL.shape[0])
            ]
            return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *rows)

        delta = jax.tree.map(jnp.subtract, mean_gradient(_RETAIN), mean_gradient(_FORGET))
        moved = jax.tree.map(jnp.subtract, _MODEL.lora, state.params)
        for got, expected in zip(jax.tree.leaves(moved), jax.tree.leaves(delta), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5)

    @parameterized.parameters(("ga_gdr", None), ("ga_klr", None), ("ga_klr", _FORWARD))
    def test_forgets_the_one_set_and_not_the_other(self, name, settings):
        options = steps.Options(retain_weight=4.0)
        state, infos = _run(_algorithm(name, optax.adamw(1e-2), options, settings), 20)
        self.assertEqual(int(state.step), 20)
        forgotten = _nll(state.params, _FORGET) - _nll(_MODEL.lora, _FORGET)
        kept = _nll(state.params, _RETAIN) - _nll(_MODEL.lora, _RETAIN)
        self.assertGreater(float(forgotten), 0.5)
        self.assertLess(float(kept), 0.5 * float(forgotten))
        np.testing.assert_allclose(
            infos[0].loss, 4.0 * infos[0].retain_term - infos[0].forget_nll, rtol=1e-5
        )
        np.testing.assert_allclose(infos[0].forget_nll, _nll(_MODEL.lora, _FORGET), rtol=1e-5)

    def test_rows_to_retain_must_be_there_where_the_objective_reads_them(self):
        algorithm = _algorithm("ga_gdr", optax.sgd(1.0))
        with self.assertRaisesRegex(ValueError, "must have rows to retain, got None"):
            algorithm.step(algorithm.init(_MODEL.lora), _FROZEN, (_FORGET, None))

    def test_the_frozen_weights_are_arguments(self):
        """Another base through the same jitted step gives another loss."""
        algorithm = _algorithm("ga_klr", optax.sgd(1.0))
        step, state = jax.jit(algorithm.step), algorithm.init(_MODEL.lora)
        found = [
            step(state, steps.Frozen(base, _MODEL.lora), (_FORGET, _RETAIN))[1].forget_nll
            for base in (_MODEL.base, tiny_model(seed=5).base)
        ]
        self.assertGreater(abs(float(found[0] - found[1])), 1e-3)
        self.assertEqual(step._cache_size(), 1)

    def test_an_objective_may_read_hidden_states(self):
        """Representations are steered: the forget set's away from where they are, others stay."""

        def squares(rows, other_BLE):
            square_BL = jnp.sum((rows.model.hidden_BLE - other_BLE) ** 2, axis=-1)
            mask_BL = rows.batch.target_mask_BL
            return jnp.sum(square_BL * mask_BL, axis=-1) / jnp.sum(mask_BL, axis=-1)

        toward_E = jnp.linspace(-2.0, 2.0, 16)
        rmu = Objective(
            "RMU",
            lambda rows, settings: squares(rows, toward_E[None, None]),
            lambda rows, settings: squares(rows, rows.reference.hidden_BLE),
            reads_reference=("retain",),
            settings=ObjectiveSettings(learning_rate=1e-3),
        )
        algorithm = steps.unlearning(rmu, _MODEL.decoder, optax.adamw(1e-2), steps.Options())
        _, infos = _run(algorithm, 6)
        self.assertLess(float(infos[0].retain_term), 1e-9)
        self.assertLess(float(infos[-1].loss), float(infos[0].loss))


_LORA, _BASE = linear_decoder.random_weights()
_MOVED = {"w": _LORA["w"] + 0.3 * linear_decoder.random_weights(1)[0]["w"]}
# Rows of unlike length and a dummy row, so that every kind of mean differs. The labels 2, 3 and 6
# carry the behavior in the first row to forget, and 3 alone in the second one.
_UNEVEN = tuple(
    token_rows(seed, shapes, vocab_size=linear_decoder.V).batch(9)
    for seed, shapes in (
        (316, [(3, 6), (5, 2), (1, 1), (4, 0)]),
        (3, [(2, 3), (1, 7), (5, 4), (3, 1)]),
    )
)
_OPTIONS = steps.Options(forget_weight=0.7, retain_weight=1.3)
_CHANGED = {"cap": 0.6, "hold": 3.0}


def _settings(name, **changes):
    """Returns an objective's settings with those of the tests, as far as it has them."""
    own = OBJECTIVES[name].settings
    known = {field.name for field in dataclasses.fields(own)}
    given = {key: value for key, value in (_CHANGED | changes).items() if key in known}
    return dataclasses.replace(own, **given)


def _linear_algorithm(name, options, *, tx=None, decoder=None, **changes):
    return steps.unlearning(
        OBJECTIVES[name],
        decoder or linear_decoder.ADAPTED,
        tx or optax.sgd(1.0),
        options,
        _settings(name, **changes),
    )


def _parts(name, batches):
    forget, retain = batches
    return forget, retain if OBJECTIVES[name].retain else None


def _linear_step(name, options=_OPTIONS, *, batches=_UNEVEN, base=_BASE, at=0, **changes):
    """Returns the parameters and Info after one step of size 1 from _MOVED, the step after `at`."""
    algorithm = _linear_algorithm(name, options, **changes)
    state, info = jax.jit(algorithm.step)(
        algorithm.init(_MOVED)._replace(step=jnp.int32(at)),
        steps.Frozen(base=base, reference=_LORA),
        _parts(name, batches),
    )
    return state.params, info


def _numpy_step(name, options, direction="reverse", hold=_CHANGED["hold"]):
    """Returns w after the same step, by hand in float64."""
    forget, retain = _UNEVEN
    nll = linear_decoder.nll_values(_MOVED["w"], _BASE, forget)

    def mean(slope_B, grad_BEE, batch, over):
        count_B = np.asarray(batch.target_mask_BL).sum(1)
        weight_B = count_B if over == "tokens" else (count_B > 0).astype(float)
        return np.einsum("b,bij->ij", weight_B / weight_B.sum() * slope_B, grad_BEE)

    if name == "cap_klr":
        given = {"cap": _CHANGED["cap"], "end_ids": options.end_ids}
        learned = linear_decoder.capped_values(_MOVED["w"], _LORA["w"], _BASE, forget, **given)
        grad = mean(np.ones(4), learned.grad_BEE, forget, options.mean)
    else:
        grad = mean(-np.ones(4), nll.grad_BEE, forget, options.mean)
    grad *= options.forget_weight
    if name.endswith("gdr"):
        kept = linear_decoder.nll_values(_MOVED["w"], _BASE, retain)
        grad += options.retain_weight * mean(np.ones(4), kept.grad_BEE, retain, options.mean)
    if name.endswith("klr"):
        kept = linear_decoder.kl_values(_MOVED["w"], _LORA["w"], _BASE, retain, direction=direction)
        factor = hold if name == "cap_klr" else 1.0
        grad += options.retain_weight * mean(
            np.full(4, factor), kept.grad_BEE, retain, options.mean
        )
    return np.asarray(_MOVED["w"], np.float64) - grad


_CASES = [
    (name, name, "reverse", "examples") for name, one in OBJECTIVES.items() if not one.retrains
] + [
    ("ga_klr_forward", "ga_klr", "forward", "tokens"),
    ("ga_gdr_tokens", "ga_gdr", "reverse", "tokens"),
]


class AgainstNumpyTest(parameterized.TestCase):
    @parameterized.named_parameters(*_CASES)
    def test_a_step_equals_the_one_by_hand(self, name, direction, mean):
        options = dataclasses.replace(_OPTIONS, mean=mean)
        params, info = _linear_step(name, options, kl_direction=direction)
        expected = _numpy_step(name, options, direction)
        np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)
        step_norm = np.linalg.norm(np.asarray(_MOVED["w"]) - expected)
        np.testing.assert_allclose(info.grad_norm, step_norm, rtol=1e-4)

    @parameterized.parameters((3,), (6,), (2, 3, 6))
    def test_a_token_that_ends_an_answer_carries_no_behavior(self, *end_ids):
        options = dataclasses.replace(_OPTIONS, end_ids=end_ids)
        params, _ = _linear_step("cap_klr", options)
        expected = _numpy_step("cap_klr", options)
        np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)
        self.assertGreater(np.abs(expected - _numpy_step("cap_klr", _OPTIONS)).max(), 0.01)

    @parameterized.parameters((10, 0.5), (20, 0.25), (5, 0.5**0.5))
    def test_the_rows_to_retain_are_held_half_as_much_after_ten_steps(self, at, share):
        params, _ = _linear_step("cap_klr", at=at)
        expected = _numpy_step("cap_klr", _OPTIONS, hold=share * _CHANGED["hold"])
        np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)

    @parameterized.product(name=("ga_klr", "ga_gdr", "cap_klr"), mean=("examples", "tokens"))
    def test_micro_batches_make_the_same_step(self, name, mean):
        options = dataclasses.replace(_OPTIONS, mean=mean)
        whole, whole_info = _linear_step(name, options)
        parts, info = _linear_step(name, dataclasses.replace(options, micro_batch=2))
        np.testing.assert_allclose(parts["w"], whole["w"], rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(info, whole_info, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("ga_klr", "cap_klr")
    def test_known_states_take_the_place_of_forward_passes(self, name):
        calls = []

        def hidden(*args, **kwargs):
            calls.append(1)
            return linear_decoder.ADAPTED.hidden(*args, **kwargs)

        states = functools.partial(steps.find_states(linear_decoder.ADAPTED), base=_BASE)
        none = jax.tree.map(jnp.zeros_like, _LORA)
        adapters = {"reference": _LORA, "backbone": none}
        known = tuple(
            dataclasses.replace(
                batch, known={one: states(lora, batch=batch) for one, lora in adapters.items()}
            )
            for batch in _UNEVEN
        )
        decoder = linear_decoder.ADAPTED._replace(hidden=hidden)
        got, got_info = _linear_step(name, batches=known, decoder=decoder)
        expected, info = _linear_step(name)
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_info, info, rtol=1e-5, atol=1e-6)
        self.assertLen(calls, 2)  # of the trained model, on either set

    @parameterized.parameters("ga_klr", "ga_gdr", "cap_klr")
    def test_neither_pads_nor_a_constant_on_all_logits_change_a_step(self, name):
        expected, _ = _linear_step(name)
        wide = tuple(padded(batch, rows=1, columns=5) for batch in _UNEVEN)
        got, _ = _linear_step(name, batches=wide, base=_BASE | {"constant": jnp.full((), 10.0)})
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-4, atol=2e-5)

    @parameterized.parameters("ga", "ga_gdr", "cap_klr")
    def test_compiles_once_for_each_shape(self, name):
        traces = []

        def hidden(*args, **kwargs):
            traces.append(1)
            return linear_decoder.ADAPTED.hidden(*args, **kwargs)

        decoder = linear_decoder.ADAPTED._replace(hidden=hidden)
        # Clipping, a schedule and AdamW: whatever state they carry keeps its types.
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-2)))
        options = dataclasses.replace(_OPTIONS, micro_batch=2)
        algorithm = _linear_algorithm(name, options, tx=tx, decoder=decoder)
        step, state = jax.jit(algorithm.step), algorithm.init(_MOVED)
        counts = []
        for width in (0, 0, 0, 4, 0, 4):
            wide = tuple(padded(batch, columns=width) for batch in _UNEVEN)
            with jax.numpy_dtype_promotion("standard"):
                state, _ = step(state, steps.Frozen(_BASE, _LORA), _parts(name, wide))
            counts.append((step._cache_size(), len(traces)))
        self.assertEqual([size for size, _ in counts], [1, 1, 1, 2, 2, 2])
        self.assertEqual(counts[0], counts[2])
        self.assertEqual(counts[3], counts[5])


def _supervised_losses(**options):
    """Returns the losses of three steps of size 0 of a model with dropout on the same four rows."""
    model = tiny_model(dropout=0.5)
    algorithm = steps.supervised(model.decoder, optax.sgd(0.0), **options)
    batch = token_rows(4, [(3, 6), (5, 2), (1, 4), (4, 1)]).batch(8)
    step, state, found = jax.jit(algorithm.step), algorithm.init(model.lora), []
    for _ in range(3):
        state, info = step(state, model.base, batch)
        found.append(float(info.loss))
    return found


def test_each_step_of_a_training_drops_other_entries():
    dropped, whole = _supervised_losses(dropout_key=jax.random.key(7)), _supervised_losses()
    assert len({*whole}) == 1
    values = sorted([*dropped, whole[0]])
    assert np.diff(values).min() > 1e-3


@pytest.mark.parametrize("mean", ["examples", "tokens"])
def test_micro_batches_drop_the_same_entries(mean):
    options = {"dropout_key": jax.random.key(7), "mean": mean}
    parts = _supervised_losses(micro_batch=2, **options)
    np.testing.assert_allclose(parts, _supervised_losses(**options), rtol=1e-5)


def test_a_retraining_is_no_step_of_unlearning():
    for name in (name for name, one in OBJECTIVES.items() if one.retrains):
        algorithm = _algorithm(name, optax.sgd(1.0))
        with pytest.raises(ValueError, match="trains without rows: use steps.supervised"):
            _run(algorithm, 1)
