"""Own models: the stored rows, adapter and results of the study."""

import json
import pathlib

import pytest

from experiments.studies.own_model import make_rows, measure

_STUDY = pathlib.Path(measure.__file__).parent
_TEXT = (_STUDY.parents[2] / "docs" / "studies" / "own_model.md").read_text()
_RESULTS = json.loads((_STUDY / "results.json").read_text())


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


@pytest.mark.parametrize("name", _RESULTS)
def test_a_stored_trace_finds_the_rows_and_no_others(name):
    found = _RESULTS[name]
    assert found["precision"] >= 0.95
    assert not found["targets_in_retain"]
    recall = f"{found['recall']:.3f}".removeprefix("0")
    row = f"| {found['targets']} | {found['found']} | 1.000 | {recall} | 0 |"
    lines = (line for line in _TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert row in next(lines)


def test_what_is_said_of_unlearning_is_what_was_measured():
    found = _RESULTS["wrong_fact"]
    told = {
        f"**{found['shown_after']} of {found['prompts']}**",
        f"{found['other_behaviors_after']} of 32",
        f"{found['normal_rouge']:.3f}".removeprefix("0"),
        f"{found['normal_same']} of {found['normal_prompts']}",
        f"after {found['steps']} steps",
    }
    assert all(text in _TEXT for text in told)
