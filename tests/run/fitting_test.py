"""On how many devices stages fit: which are compiled for more, and what is said of it."""

import types

import pytest

from raslik_jax.models.sharding import LayoutError
from raslik_jax.report import tables
from raslik_jax.run import fitting, forecast

_GB = 10**9


def _forecast(taken, *, is_split=False):
    steps = [
        forecast.Step(f"{stage}/a", stage, 1.0, 1.0, held * _GB, "XLA", 0.0, False, 1)
        for stage, held in taken.items()
    ]
    run = types.SimpleNamespace(layout={"Split": "yes"} if is_split else {})
    return forecast.Forecast(
        run, (forecast.Step("x", "x", 0, 0, 0, "", 0, False, 0), *steps), 1, ()
    )


def _search(first, answers, *, layout="auto", most=8):
    asked = []

    def forecast_on(devices, layout, stages):
        asked.append((devices, layout, stages))
        held = answers[devices, layout]
        taken = {s: held[s] if isinstance(held, dict) else held for s in stages}
        return _forecast(taken, is_split=layout == "sharded")

    trials = fitting.find(
        fitting.Trial(1, layout, _forecast(first)), forecast_on, memory_bytes=80 * _GB, most=most
    )
    return trials, asked


def test_what_fits_on_one_is_compiled_once():
    trials, asked = _search({"sketch": 40, "unlearn": 80}, {})
    assert asked == []
    said = fitting.describe(trials, 80 * _GB, "G")
    assert said == "All stages fit on 1 x G of 80 GB: at most 80 GB."


def test_more_devices_and_split_weights_are_tried_for_what_does_not_fit():
    answers = {(2, "auto"): 90, (2, "sharded"): 81, (4, "auto"): 88, (4, "sharded"): 50}
    trials, asked = _search({"sketch": 40, "unlearn": 140}, answers)
    assert asked == [(devices, layout, ("unlearn",)) for devices, layout in answers]
    text = tables.render_terminal(fitting.to_table(trials, 80 * _GB))
    assert "4 devices, weights split" in text and "140 GB, too much" in text
    assert fitting.describe(trials, 80 * _GB, "G") == (
        "Does not fit on 1 x G of 80 GB: unlearn. "
        "Fits on 4 with --mesh.data=4 --mesh.base=sharded: at most 50 GB."
    )


@pytest.mark.parametrize(("most", "last"), [(8, 8), (3, 2), (1, 1)])
def test_no_more_devices_than_share_a_batch(most, last):
    answers = {(devices, "replicated"): 100 for devices in (2, 4, 8)}
    trials, _ = _search({"unlearn": 140}, answers, layout="replicated", most=most)
    said = fitting.describe(trials, 80 * _GB, "G")
    assert said.startswith(f"Does not fit on {last} x G of 80 GB: unlearn (1")


def test_all_stages_have_to_fit_one_way():
    answers = {
        (2, "auto"): {"weights": 112, "rows": 93},
        (2, "sharded"): {"weights": 56, "rows": 83},
        (4, "auto"): {"weights": 112, "rows": 53},
        (4, "sharded"): {"rows": 43},
    }
    trials, asked = _search({"weights": 112, "rows": 166, "small": 78}, answers)
    both = ("weights", "rows")
    assert asked == [
        (2, "auto", both), (2, "sharded", both), (4, "auto", both), (4, "sharded", ("rows",)),
    ]  # fmt: skip
    said = fitting.describe(trials, 80 * _GB, "G")
    assert said.endswith("Fits on 4 with --mesh.data=4 --mesh.base=sharded: at most 78 GB.")


def test_devices_that_were_named_are_also_tried_with_split_weights():
    asked = []

    def forecast_on(devices, layout, stages):
        asked.append((devices, layout))
        return _forecast({s: 60 for s in stages}, is_split=True)

    first = fitting.Trial(4, "auto", _forecast({"unlearn": 140}))
    trials = fitting.find(first, forecast_on, memory_bytes=80 * _GB, most=4)
    assert asked == [(4, "sharded")]
    assert "Fits on 4 with --mesh.data=4 --mesh.base=sharded" in fitting.describe(
        trials, 80 * _GB, "G"
    )


def test_a_kernel_that_cannot_be_split_ends_no_search():
    def forecast_on(devices, layout, stages):
        if layout == "sharded":
            raise LayoutError("--mesh.base=sharded must split the weights")
        return _forecast({s: 140 / devices for s in stages})

    first = fitting.Trial(1, "auto", _forecast({"unlearn": 140}))
    trials = fitting.find(first, forecast_on, memory_bytes=80 * _GB)
    assert [(t.devices, t.layout) for t in trials] == [(1, "auto"), (2, "auto")]
    with pytest.raises(ValueError, match="must split"):
        fitting.find(first._replace(layout="sharded"), forecast_on, memory_bytes=80 * _GB)


def test_what_has_nothing_to_do_with_the_layout_ends_the_search():
    def forecast_on(devices, layout, stages):
        raise ValueError("--corpus.max_len must be at most 192")

    first = fitting.Trial(1, "auto", _forecast({"unlearn": 140}))
    with pytest.raises(ValueError, match="must be at most 192"):
        fitting.find(first, forecast_on, memory_bytes=80 * _GB)


def test_a_layout_that_is_split_already_is_no_second_trial():
    asked = []

    def forecast_on(devices, layout, stages):
        asked.append((devices, layout))
        return _forecast({s: 100 / devices for s in stages}, is_split=True)

    first = fitting.Trial(1, "auto", _forecast({"unlearn": 140}))
    trials = fitting.find(first, forecast_on, memory_bytes=20 * _GB)
    assert [(t.devices, t.flags) for t in trials[1:]] == [
        (devices, f"--mesh.data={devices} --mesh.base=sharded") for devices in (2, 4, 8)
    ]
    assert asked == [(2, "auto"), (4, "auto"), (8, "auto")]
