"""The study of behaviors without keywords: its text says what is stored, which is made again."""

import itertools
import json

import numpy as np
import pytest
from support import shared_data

from experiments.studies.behaviors import measure
from experiments.studies.behaviors.corpus import BEHAVIORS

_TEXT = (measure.HERE.parents[2] / "docs" / "studies" / "behaviors.md").read_text()
_STORED = json.loads((measure.HERE / "results.json").read_text())["measured"]


def _cells(behavior, rate):
    found = [m for m in _STORED if (m["behavior"], m["rate"]) == (behavior, rate)]
    assert [m["seed"] for m in found] == list(measure.SEEDS)
    return found


def test_what_is_said_is_what_was_measured():
    largest = 0.0
    for behavior, rate in itertools.product(BEHAVIORS, measure.RATES):
        line = f"| {behavior} | {rate:.0%} |"
        for text in ("prompt", "prompt_and_output"):
            areas = [m["auprc"][text] for m in _cells(behavior, rate)]
            line += f" {np.mean(areas):.2f} ({min(areas):.2f} to {max(areas):.2f}) |"
            largest = max(largest, *areas)
        assert line in _TEXT
    assert largest < 0.9 and f"the largest area of one seed is {largest:.2f}" in _TEXT
    for behavior in BEHAVIORS:
        judged = [m["judged"] for m in _cells(behavior, 0.08)]
        shares = [f"{np.mean([j[kind] for j in judged]):.3f}" for kind in judged[0]]
        assert f"| {behavior} | {' | '.join(shares)} |" in _TEXT
        assert shares[0] == "1.000"


@pytest.mark.usefixtures("members")
def test_a_cell_is_made_again():
    corpus = measure.make_corpus("leak", 0.02, 0, str(shared_data()))
    found, (stored, *_) = measure.measure(corpus, "leak"), _cells("leak", 0.02)
    assert found["judged"] == stored["judged"]
    assert found["auprc"] == pytest.approx(stored["auprc"])
