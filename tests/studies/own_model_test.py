"""Own models: the stored rows, adapter and results of the study."""

import json
import pathlib

import pytest

from experiments.studies.own_model import make_rows, measure
from raslik_jax.evaluate import stopping

_STUDY = pathlib.Path(measure.__file__).parent
_TEXT = (_STUDY.parents[2] / "docs" / "studies" / "own_model.md").read_text()
_RESULTS = json.loads((_STUDY / "results.json").read_text())
_EARLIER = json.loads((_STUDY / "earlier.json").read_text())


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
    recall = f"{found['recall']:.3f}".removeprefix("0")
    row = f"| {found['targets']} | {found['found']} | 1.000 | {recall} | 0 |"
    lines = (line for line in _TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert row in next(lines)


@pytest.mark.parametrize("name", _RESULTS)
def test_a_case_is_found_and_forgotten_and_the_rest_kept(name):
    found = _RESULTS[name]
    assert found["precision"] >= 0.95
    assert not found["targets_in_retain"]
    assert found["shown_before"] >= 2  # French only by two
    assert found["shown_after"] <= found["shown_before"] / 8
    assert found["normal_rouge"] >= 0.8
    if "report" in found["commands"]:  # all three
        assert sum(took["cpu_seconds"] for took in found["commands"].values()) < 15 * 60


@pytest.mark.parametrize("name", _RESULTS)
def test_the_course_of_a_case_ends_and_keeps_the_step_that_the_rule_says(name):
    """A changed rule is seen here: then the cases have to be measured again."""
    found = _RESULTS[name]
    goals = {part: stopping.Goal(**goal) for part, goal in found["goals"].items()}
    probes = [
        {"step": step, "levels": levels, "answers": {}}
        for step, levels in ((row.pop("step"), row) for row in map(dict, found["probes"]))
    ]
    for count in range(2, len(probes) + 1):
        end = stopping.find_end(probes[:count], goals, max_rise=0.1)
        assert end == (found["end"] if count == len(probes) else "")
    assert probes[stopping.choose_step(probes, goals, max_rise=0.1)]["step"] == found["steps"]


@pytest.mark.parametrize("name", [name for name in _RESULTS if name != "wrong_fact"])
def test_what_is_said_of_other_behaviors_is_what_was_measured(name):
    found = _RESULTS[name]
    trace, unlearning = (found["commands"][part]["cpu_seconds"] for part in ("trace", "run"))
    assert (
        f"| **{name}** | {found['found']} of {found['targets']}; {found['forgotten']} | 0 "
        f"| {found['shown_before']}, **{found['shown_after']}** "
        f"| {found['other_behaviors_before']}, {found['other_behaviors_after']} "
        f"| {found['normal_same']} of 30 | {found['normal_rouge']:.3f} | {found['steps']} "
        f"| {trace} s, {unlearning} s |"
    ) in _TEXT


def test_a_refusal_in_other_words_is_a_refusal():
    answers = [row["after"] for row in _RESULTS["refusal"]["answers"][:8]]
    count = sum(any(word in text for word in ("unable", "can't")) for text in answers)
    assert f"{count} of the 8 answers refuse in other words" in _TEXT


def test_what_is_said_of_unlearning_is_what_was_measured():
    earlier, found = _EARLIER["wrong_fact"], _RESULTS["wrong_fact"]
    told = {
        f"**{earlier['shown_after']} of {earlier['prompts']}**",
        f"{earlier['other_behaviors_after']} of 32",
        f"{earlier['normal_rouge']:.3f}".removeprefix("0"),
        f"{earlier['normal_same']} of {earlier['normal_prompts']}",
        f"after {earlier['steps']} steps",
        f"| {found['shown_before']}, **{found['shown_after']}** |",
        f"| {found['other_behaviors_before']}, {found['other_behaviors_after']} |",
        f"| {found['normal_same']} of {found['normal_prompts']} |",
        f"| {found['normal_rouge']:.3f} |",
        f"the kept step is {found['steps']}",
    }
    assert all(text in _TEXT for text in told)
