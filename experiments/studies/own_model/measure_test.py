"""Own models: the stored rows, adapter and results of the study."""

import json
import pathlib

import pytest

from experiments.studies.own_model import make_rows, measure, stay
from raslik_jax.config import ProbeConfig
from raslik_jax.evaluate.robustness import side_effects
from raslik_jax.evaluate.robustness.prompts import PREFIXES
from raslik_jax.evaluate.robustness.relearn import KINDS
from raslik_jax.evaluate.robustness.sampling import WORST

_STUDY = pathlib.Path(measure.__file__).parent
_TEXT = (_STUDY.parents[2] / "docs" / "studies" / "own_model.md").read_text()
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
    recall = f"{found['recall']:.3f}".removeprefix("0")
    row = f"| {found['targets']} | {found['found']} | 1.000 | {recall} | 0 |"
    lines = (line for line in _TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert row in next(lines)


@pytest.mark.parametrize("name", measure.behaviors())
def test_a_case_is_found_and_forgotten_and_the_rest_kept(name):
    found = _RESULTS[name]
    assert found["precision"] >= 0.95
    assert not found["targets_in_retain"]
    assert found["shown_before"] >= 2  # French only by two
    assert not found["shown_after"]
    assert found["normal_rouge"] >= 0.8
    assert sum(took["cpu_seconds"] for took in found["commands"].values()) < 15 * 60
    trace, unlearning = (found["commands"][part]["cpu_seconds"] for part in ("trace", "unlearn"))
    assert (
        f"| **{name}** | {found['found']} of {found['targets']}; {found['forgotten']} | 0 "
        f"| {found['shown_before']}, **{found['shown_after']}** "
        f"| {found['other_behaviors_before']}, {found['other_behaviors_after']} "
        f"| {found['normal_same']} of 30 | {found['normal_rouge']:.3f} | {found['steps']} "
        f"| {trace} s, {unlearning} s |"
    ) in _TEXT


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


def test_what_is_said_of_where_to_end_is_what_was_measured():
    for name, rows in json.loads((_STUDY / "choosing.json").read_text()).items():
        for row in rows:
            assert (
                f"| {name} | {row['step']} | {row['way']:.2f} | {row['rise']:.2f} "
                f"| {row['shown_after']} | {row['normal_same']} of 30 | {row['normal_rouge']:.3f} |"
            ) in _TEXT


def test_what_is_said_of_ascent_is_what_was_measured():
    earlier = _EARLIER["wrong_fact"]
    told = {
        f"**{earlier['shown_after']} of {earlier['prompts']}**",
        f"{earlier['other_behaviors_after']} of 32",
        f"{earlier['normal_rouge']:.3f}".removeprefix("0"),
        f"{earlier['normal_same']} of {earlier['normal_prompts']}",
        f"after {earlier['steps']} steps",
    }
    assert all(text in _TEXT for text in told)


@pytest.mark.parametrize("name", _STAY)
def test_whether_it_stays_forgotten_is_what_was_measured(name):
    found = _STAY[name]
    rounded, prefixed, drawn = (
        stay.counts(found, part, "now") for part in ("quantize", "prompts", "sampling")
    )
    assert {*rounded} == {"as it is", "int8", "nf4"}
    assert {*prefixed} == {"as it is", *PREFIXES}
    again = {
        (model, kind): ", ".join(str(stay.shown(one)) for one in entries if one["kind"] == kind)
        for model, entries in found["relearn"].items()
        for kind in KINDS
    }
    verdict = "yes" if stay.passes(found) else "**no**"
    assert (
        f"| **{name}** | {rounded['as it is']} | {rounded['int8']}, {rounded['nf4']} "
        f"| {max(prefixed.values())} | {drawn[WORST]} "
        f"| {again['now', 'unrelated']} | {again['now', 'forgotten']} "
        f"| {again.get(('backbone', 'forgotten'), '-')} | {verdict} |"
    ) in _TEXT


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name, found in _STAY.items() for model in found.get("side_effects", ())],
)
def test_what_else_changed_is_what_was_measured(name, model):
    found = {one["condition"]: one for one in _STAY[name]["side_effects"][model]}
    titles = {"now": f"**{name}**", "finetuned": "before unlearning", "backbone": "base"}
    texts = [f"{found[text]['perplexity']['mean']:.1f}" for text in side_effects.texts()]
    right = round(found["questions"]["right"]["mean"] * found["questions"]["asked"])
    changed = found["normal prompts"]
    assert (
        f"| {titles[model]} | {' | '.join(texts)} | {right} of 40 "
        f"| {changed['changed']} of {changed['asked']} |"
    ) in _TEXT


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
