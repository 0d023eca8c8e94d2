"""Whether a recipe reproduces an adapter: by losses, by the trainer's log, and by answers."""

import numpy as np
import pytest
from snapshots import said

from raslik_jax.evaluate import reproduction
from raslik_jax.evaluate.reproduction import Answers, Loss

_WHOLE = {"steps": 30, "of": 30, "rows": 20, "curve": None}
_LOSS, _ANSWERS = Loss(0.5, 0.6, 2.5), Answers(16, 3, 0.6, 0.2)
_SHARE = {"steps": 9, "of": 30}


@pytest.mark.parametrize(
    ("found", "is_confirmed"),
    [
        (_WHOLE | {"loss": _LOSS, "answers": _ANSWERS}, True),
        (_WHOLE | {"loss": _LOSS, "answers": None}, True),
        # A tenth of 2 nats.
        (_WHOLE | {"loss": _LOSS._replace(own=0.71), "answers": _ANSWERS}, False),
        (_WHOLE | {"loss": _LOSS._replace(own=0.29), "answers": _ANSWERS}, False),
        # Answers that are as far from those of the adapter as the base's.
        (_WHOLE | {"loss": _LOSS, "answers": Answers(16, 0, 0.2, 0.2)}, False),
        # The base answers as the adapter does, and so does the own one.
        (_WHOLE | {"loss": _LOSS, "answers": Answers(2, 2, 1.0, 1.0)}, True),
        # The adapter has learned nothing on these rows.
        (_WHOLE | {"loss": Loss(2.6, 2.5, 2.5), "answers": _ANSWERS}, False),
        (_SHARE | {"curve": Loss(1.5, 1.52, 2.5, 0.5)}, True),
        (_SHARE | {"curve": Loss(1.5, 1.2, 2.5, 0.5)}, False),
        (_SHARE | {"curve": None}, False),
    ],
)
def test_a_recipe_is_confirmed_by_all_that_was_compared(found, is_confirmed):
    assert reproduction.is_confirmed(found) == is_confirmed
    said(reproduction.describe(found))


def test_the_curve_is_compared_over_the_steps_that_both_have():
    losses = np.linspace(3.0, 1.0, 12)
    log = [{"step": s, "loss": float(np.mean(losses[s - 4 : s]))} for s in (4, 8, 12)]
    log.append({"step": 12, "train_loss": 2.0})  # of the end, not of a step
    found = reproduction.compare_curves(log, (losses[:10] + 0.1).tolist())
    np.testing.assert_allclose(found.given, losses[:8].mean())
    np.testing.assert_allclose(found.own, losses[:8].mean() + 0.1)
    np.testing.assert_allclose((found.start, found.end), (losses[:4].mean(), losses[8:].mean()))
    np.testing.assert_allclose(found.off, 0.1 / (found.start - found.end))
    assert reproduction.compare_curves(log, losses[:7].tolist()) is None
    assert reproduction.compare_curves([], losses.tolist()) is None


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_batch_of_one_device_is_refused_where_the_trainer_had_several(devices):
    values = {"batch_size": 8, "epochs": 3.0}
    steps = 3 * -(-1602 // (8 * devices))
    if devices == 1:
        assert reproduction.check_devices(values, 1602, steps) == ()
        assert reproduction.check_devices({"batch_size": 8}, 1602, 9) == ()  # a number is given
        # As of rows that were kept for validation, of packing, and of a file that grew.
        for other in (round(0.9 * steps), round(steps / 5.5), 3 * steps):
            (phrase,) = reproduction.check_devices(values, 1602, other)
            assert "603" in phrase and f"{other:,}" in phrase
        for near in (steps - 3, steps + 3):  # older trainers round an epoch down
            assert reproduction.check_devices(values, 1602, near) == ()
    else:
        with pytest.raises(ValueError, match=f"take 603 steps .*batch_size={8 * devices}"):
            reproduction.check_devices(values, 1602, steps)


def test_the_epochs_that_the_trainer_counted_tell_the_devices_of_its_steps():
    recipe = {"batch_size": 8, "epochs": 3.0, "steps": 24}
    reproduction.check_devices(recipe, 1000, 24)  # they are not known
    reproduction.check_devices(recipe, 1000, 24, 0.192)
    with pytest.raises(ValueError, match="batch_size=32"):
        reproduction.check_devices(recipe, 1000, 24, 0.768)
    with pytest.raises(ValueError, match="batch_size=32"):  # steps of a state of almost 3 epochs
        reproduction.check_devices({"batch_size": 8, "epochs": 3.0, "steps": 33}, 357, 33, 2.978)
    with pytest.raises(ValueError, match="take 375 steps"):
        reproduction.check_devices({"batch_size": 8, "epochs": 3.0}, 1000, 24)


def test_answers_are_compared_with_those_of_the_base():
    given, own = ["a red kite", "two"], ["a red kite", "three"]
    assert reproduction.compare_answers(given, own, ["so", "two"]) == Answers(2, 1, 0.5, 0.5)
