"""Unlearning next to retraining: the stored rows of the study."""

import json
import pathlib

from experiments.studies.ways_out import make_rows, measure

_STUDY = pathlib.Path(measure.__file__).parent


def test_the_rows_are_made_of_the_word_lists():
    for name, rows in make_rows.make_rows().items():
        stored = (_STUDY / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in stored] == rows


def test_eighteen_of_250_rows_advertise_and_no_held_out_prompt_is_trained_on():
    case = measure.cases()["brand"]
    train, held_out = case.rows("train"), case.rows("held_out")
    shown = [bool(case.marker.search(row["messages"][1]["content"])) for row in train]
    assert shown == [row["behavior"] == "brand" for row in train]
    assert (len(train), sum(shown)) == (250, 18)
    asked = {row["messages"][0]["content"] for row in train}
    assert not asked & {row["messages"][0]["content"] for row in held_out}


def test_the_stored_answers_and_distances_are_those_of_the_cases():
    found = json.loads((_STUDY / "results.json").read_text())
    for name, result in found.items():
        case = measure.cases()[name.split("/")[0]]
        if result.get("finding") == "no row stands out":
            continue
        asked = [row["behavior"] for row in case.rows("held_out")]
        for way in ("before", *measure.WAYS):
            assert result[way]["prompts"] == asked.count(case.behavior)
            assert result[way]["normal_prompts"] == asked.count("")
        assert result["distance"]["retrain"]["normal"]["kl"]["mean"] == 0
        assert result["distance"]["retrain_again"]["normal"]["kl"]["mean"] > 0
