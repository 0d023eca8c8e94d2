"""The counterfactual study: its score against SciPy and by hand, and the stored results."""

import collections
import json

import numpy as np
import pytest

from experiments.studies.counterfactual import measure, page
from experiments.studies.own_model.measure import behaviors
from raslik_jax.data.ordering import shuffled


def test_the_score_is_the_mean_correlation_of_ranks():
    nll_SQ = np.array([[3.0, 1.0], [2.0, 2.0], [1.0, 4.0], [0.5, 3.0]])
    right_SQ = -(nll_SQ**3)
    np.testing.assert_allclose(measure.correlations(right_SQ, nll_SQ), [1, 1])
    # One pair of neighbors changes places: 1 - 6 * 2 / (4 * 15).
    swapped_SQ = right_SQ[[1, 0, 2, 3]]
    assert measure.correlations(swapped_SQ, nll_SQ)[0] == pytest.approx(0.8)
    mean, low, high = measure.interval(right_SQ, nll_SQ)
    assert mean == pytest.approx(1) and low <= mean and high == pytest.approx(1)
    assert measure.interval(right_SQ, nll_SQ, right_SQ) == (0, 0, 0)
    assert measure.interval(right_SQ, nll_SQ, swapped_SQ)[0] == pytest.approx(0.2)


def test_chance_predicts_nothing():
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 24, 30))
    mean, low, high = measure.interval(one, other)
    assert low < 0 < high and abs(mean) < 5 / np.sqrt(24 * 30)


def test_noise_of_training_bounds_the_score():
    generator = np.random.default_rng(0)
    signal = generator.normal(size=(4000, 3))
    one, other = (signal + 0.5 * generator.normal(size=signal.shape) for _ in range(2))
    # 1 of 1.25 of the variance is signal, and a prediction of it correlates as its root says.
    assert measure.ceiling(one, other[:2000]) == pytest.approx(0.8**0.5, abs=0.02)
    assert np.corrcoef(signal[:, 0], one[:, 0])[0, 1] == pytest.approx(0.8**0.5, abs=0.02)
    assert measure.ceiling(one, 3 * signal[::-1]) == 0  # more noise than there is variance


def test_halves_have_or_lack_whole_groups_of_neighbors():
    labels, texts = ["b", "a"] * 6, [f"{n % 5}" for n in range(12)]
    order = sorted(range(12), key=lambda row: (labels[row], texts[row], row))
    groups = [set(order[start : start + 3]) for start in range(0, 12, 3)]
    halves = measure.draw_halves(labels, texts, group=3, number=8)
    for half in halves:
        assert [*half] == sorted(half) and len(half) == 6
        assert all(group <= {*half} or not group & {*half} for group in groups)
    assert len({tuple(half) for half in halves}) > 2
    single = measure.draw_halves(labels, texts, group=1, number=1)[0]
    assert [*single] == sorted(shuffled(range(12), seed=0, label="half")[:6])


def test_on_the_toy_no_interval_is_on_one_side_of_zero():
    for scores in measure.judge(page.read_case("toy")).values():
        assert all(low < 0 < high for _, low, high in scores.values())


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
