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
