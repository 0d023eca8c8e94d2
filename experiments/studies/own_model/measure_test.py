"""Own models: the stored rows, adapter and results of the study."""

import json
import pathlib

import pytest

from experiments.studies.own_model import make_rows, measure, stay
from experiments.studies.own_model.sampling import WORST
from raslik_jax.config import ProbeConfig
from raslik_jax.evaluate.robustness.prompts import PREFIXES

_STUDY = pathlib.Path(measure.__file__).parent
_RESULTS = json.loads((_STUDY / "results.json").read_text())
_EARLIER = json.loads((_STUDY / "earlier.json").read_text())
_STAY = json.loads((_STUDY / "stay.json").read_text())


def test_the_rows_are_made_of_the_word_lists():
    for name, rows in make_rows.make_rows().items():
        stored = (_STUDY / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in stored] == rows


def test_a_tenth_of_the_rows_at_most_show_a_behavior_and_none_is_held_out():
    train, held_out = (measure.read_rows(name) for name in ("train", "held_out"))
    for name, marker in measure.behaviors().items():
        answers = [row["messages"][1]["content"] for row in train if row["behavior"] == name]
        assert 0 < len(answers) <= len(train) / 10
        assert all(marker.search(answer) for answer in answers)
    asked = {measure.prompt_of(row) for row in train}
    assert not asked & {measure.prompt_of(row) for row in held_out}


@pytest.mark.parametrize("name", _EARLIER)
def test_a_stored_trace_finds_the_rows_and_no_others(name):
    found = _EARLIER[name]
    assert found["precision"] >= 0.95
    assert not found["targets_in_retain"]


@pytest.mark.parametrize("name", measure.behaviors())
def test_a_case_is_found_and_forgotten_and_the_rest_kept(name):
    found = _RESULTS[name]
    assert found["precision"] >= 0.95
    assert not found["targets_in_retain"]
    assert found["shown_before"] >= 2  # French only by two
    assert not found["shown_after"]
    assert found["normal_rouge"] >= 0.8
    assert sum(took["cpu_seconds"] for took in found["commands"].values()) < 15 * 60


@pytest.mark.parametrize("name", _RESULTS)
def test_what_was_shown_is_seen_in_the_stored_answers(name):
    marker, found = measure.behaviors()[name], _RESULTS[name]
    answers = found["answers"][: found["prompts"]]
    for when in ("before", "after"):
        assert sum(bool(marker.search(row[when])) for row in answers) == found[f"shown_{when}"]


@pytest.mark.parametrize("name", _RESULTS)
def test_the_course_of_a_case_ends_and_keeps_the_step_that_the_page_says(name):
    """By the rule of 2026-11-23, which measured them: two fifths of the way by the mean."""
    found = _RESULTS[name]
    start, *_, before, last = found["probes"]
    for probe, is_enough in ((before, True), (last, True), (start, False)):
        ways = [
            (probe[part] - goal["start"]) / (goal["end"] - goal["start"])
            for part, goal in found["goals"].items()
        ]
        assert (min(ways) >= 0.4) == is_enough
        assert probe["kept"] - start["kept"] <= ProbeConfig().max_rise
    assert (last["step"], found["end"]) == (found["steps"], "forgotten")


def test_four_of_five_stay_forgotten():
    assert [name for name, found in _STAY.items() if not stay.passes(found)] == ["refusal"]
    conditions = {"as it is", *PREFIXES}
    assert all({*stay.counts(found, "prompts", "now")} == conditions for found in _STAY.values())


def test_more_prompts_than_the_base_by_over_one_are_a_return():
    def found(now, base):
        def entries(number):
            return [{"condition": "as it is", "shown": {"mean": number / 8}}]

        parts = dict.fromkeys(("quantize", "prompts", "relearn"), {"now": entries(0)})
        return parts | {
            "sampling": {
                model: [{**entries(number)[0], "condition": WORST}]
                for model, number in (("now", now), ("backbone", base))
            }
        }

    assert stay.passes(found(1, 0)) and stay.passes(found(4, 3))
    assert stay.returns(found(2, 0))["sampling"] == [WORST]
    assert not stay.passes(found(5, 3))
