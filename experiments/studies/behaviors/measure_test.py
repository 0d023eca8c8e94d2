"""The study of behaviors without keywords: what is stored, and a cell that is made again."""

import json

import pytest
from support import shared_data

from experiments.studies.behaviors import measure

_STORED = json.loads((measure.HERE / "results.json").read_text())["measured"]


def _cells(behavior, rate):
    found = [m for m in _STORED if (m["behavior"], m["rate"]) == (behavior, rate)]
    assert [m["seed"] for m in found] == list(measure.SEEDS)
    return found


def test_words_alone_find_no_behavior_and_judges_see_every_target():
    assert max(area for found in _STORED for area in found["auprc"].values()) < 0.9
    assert all(found["judged"]["targets"] == 1 for found in _STORED)


@pytest.mark.usefixtures("members")
def test_a_cell_is_made_again():
    corpus = measure.make_corpus("leak", 0.02, 0, str(shared_data()))
    found, (stored, *_) = measure.measure(corpus, "leak"), _cells("leak", 0.02)
    assert found["judged"] == stored["judged"]
    assert found["auprc"] == pytest.approx(stored["auprc"])
