"""Which of unlearning and retraining is recommended, by their costs and the recipe."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
from snapshots import said

from raslik_jax.incident import advising
from raslik_jax.incident.advising import Cost
from raslik_jax.incident.configuring import RecipeOptions, UnlearnOptions

_UNKNOWN = "no file next to it has one"


@pytest.mark.parametrize(
    ("unlearn", "retrain", "more", "command"),
    [
        # Few rows and a recipe.
        (Cost(480.0), Cost(285.0), {}, "retrain"),
        (Cost(480.0), Cost(900.0), {}, "retrain"),
        # Longer by ten minutes at most.
        (Cost(60.0), Cost(600.0), {}, "retrain"),
        # A large file.
        (Cost(480.0), Cost(40_000.0), {}, "unlearn"),
        # No recipe, however few the rows.
        (Cost(480.0), Cost(285.0), {"unknown": _UNKNOWN}, "unlearn"),
        # Only one of them fits.
        (Cost(480.0, 2e9), Cost(285.0, 9e9), {"memory_bytes": 8e9}, "unlearn"),
        (Cost(480.0, 9e9), Cost(9e5, 2e9), {"memory_bytes": 8e9}, "retrain"),
        (Cost(480.0, 9e9), Cost(9e5, 9e9), {"memory_bytes": 8e9}, "unlearn"),
    ],
)
def test_the_exact_answer_is_recommended_where_it_is_possible_and_cheap(
    unlearn, retrain, more, command
):
    advised, reason = advising.choose(unlearn, retrain, **more)
    assert advised == command
    said(reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(RecipeOptions, UnlearnOptions):
    """Those of `raslik retrain`."""


@pytest.mark.parametrize(
    ("given", "shown"), [(("a.yml", "b.json"), "a.yml,b.json"), (("a.yml",), "a.yml"), ((), "FILE")]
)
def test_the_next_command_has_all_files_of_the_recipe(given, shown):
    """A list flag that is given twice has its last value."""
    device = SimpleNamespace(title="a CPU", memory_bytes=8e9)
    found = {"unlearn": Cost(480.0), "retrain": Cost(285.0)}, "" if given else "no file", device
    with mock.patch.object(advising, "_compare", return_value=found):
        lines = [*advising.lines(_Options(run="runs/x", recipe=given), is_short=True)]
    (line,) = (one for one in lines if "raslik retrain" in one)
    assert line.split("raslik retrain ")[1] == f"--run=runs/x --recipe={shown} --out=DIR"


@pytest.mark.parametrize(
    ("unknown", "has_adapter", "shown"),
    [
        ("it has packing: pass --approximate to leave this out", True, "--approximate"),
        ("no file says it", True, "--recipe=FILE"),
        (
            "of several: give --unlearn.retrain.batch_size=16",
            True,
            "--unlearn.retrain.batch_size=16",
        ),
        ("--run must be a trace of an adapter", False, ""),
    ],
)
def test_the_other_command_is_one_that_can_work(unknown, has_adapter, shown):
    device = SimpleNamespace(title="a CPU", memory_bytes=8e9)
    costs = {"unlearn": Cost(480.0)} | ({"retrain": Cost(285.0)} if has_adapter else {})
    with mock.patch.object(advising, "_compare", return_value=(costs, unknown, device)):
        lines = [*advising.lines(_Options(run="runs/x", recipe=()), is_short=True)]
    others = [line.split("raslik retrain ")[1] for line in lines if "raslik retrain" in line]
    assert others == [f"--run=runs/x {shown} --out=DIR"] * has_adapter
