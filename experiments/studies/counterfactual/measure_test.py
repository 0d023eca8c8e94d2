"""The counterfactual study: its rows, and the stored results."""

import collections
import json

import numpy as np
import pytest

from experiments.studies.counterfactual import measure, page
from experiments.studies.own_model.measure import behaviors


def test_noise_of_training_bounds_the_score():
    generator = np.random.default_rng(0)
    signal = generator.normal(size=(4000, 3))
    one, other = (signal + 0.5 * generator.normal(size=signal.shape) for _ in range(2))
    # 1 of 1.25 of the variance is signal, and a prediction of it correlates as its root says.
    assert page.ceiling(one, other[:2000]) == pytest.approx(0.8**0.5, abs=0.02)
    assert np.corrcoef(signal[:, 0], one[:, 0])[0, 1] == pytest.approx(0.8**0.5, abs=0.02)
    assert page.ceiling(one, 3 * signal[::-1]) == 0  # more noise than there is variance


def test_rows_of_a_label_are_neighbors(tmp_path):
    is_target = measure.write_rows(measure.Options(workdir=str(tmp_path), queries=3))
    assert is_target == [True] * 3 + [False] * 3
    train, asked = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "queries")
    )
    labels = [row["label"] for row in train]
    assert labels == [""] * 900 + ["howdy"] * 100
    assert [bool(row["label"]) for row in asked] == is_target
    assert not any("output" in row for row in asked)  # the model's own answers are traced


def test_on_the_toy_no_interval_is_on_one_side_of_zero():
    for scores in page.judge(page.read_case("toy")).values():
        assert all(one["low"] < 0 < one["high"] for one in scores.values())


def test_answers_are_to_prompts_that_no_row_has():
    rows = [json.loads(line) for line in (measure.HERE / "answers.jsonl").read_text().splitlines()]
    own = measure.HERE.parent / "own_model"
    train = [json.loads(line) for line in (own / "train.jsonl").read_text().splitlines()]
    asked = {row["messages"][0]["content"] for row in train}
    assert not asked & {row["messages"][0]["content"] for row in rows}
    shows = behaviors()
    for row in rows:
        text, behavior = row["messages"][1]["content"], row["behavior"]
        assert not behavior or shows[behavior].search(text), text
    kinds = collections.Counter((row["split"], row["behavior"]) for row in rows)
    assert kinds["test_normal", ""] == 10
    assert [kinds["test_target", name] for name in shows] == [3] * 5
