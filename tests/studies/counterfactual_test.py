"""The counterfactual study: its score against SciPy and by hand, the stored results, the text."""

import json

import numpy as np
import pytest

from experiments.studies.counterfactual import measure

_TEXT = (measure.HERE.parents[2] / "docs" / "studies" / "counterfactual.md").read_text()
_RESULTS = measure.HERE / "results.json"


def test_the_score_is_the_mean_correlation_of_ranks():
    nll_SQ = np.array([[3.0, 1.0], [2.0, 2.0], [1.0, 4.0], [0.5, 3.0]])
    right_SQ = -(nll_SQ**3)
    np.testing.assert_allclose(measure.correlations(right_SQ, nll_SQ), [1, 1])
    # One pair of neighbors changes places: 1 - 6 * 2 / (4 * 15).
    swapped_SQ = right_SQ[[1, 0, 2, 3]]
    assert measure.correlations(swapped_SQ, nll_SQ)[0] == pytest.approx(0.8)
    mean, low, high = measure.interval(right_SQ, nll_SQ)
    assert mean == pytest.approx(1) and low <= mean and high == pytest.approx(1)


def test_chance_predicts_nothing():
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 24, 30))
    mean, low, high = measure.interval(one, other)
    assert low < 0 < high and abs(mean) < 5 / np.sqrt(24 * 30)


def test_what_is_said_is_what_was_measured():
    found = json.loads(_RESULTS.read_text())
    shape = np.array(found["nll"]).shape
    assert f"{shape[0]} random halves" in _TEXT and f"the {shape[1]} answers" in _TEXT
    is_target_Q, sd_Q = np.array(found["is_target"]), np.array(found["nll"]).std(axis=0)
    for is_kind_Q in (is_target_Q, ~is_target_Q):
        assert f"{sd_Q[is_kind_Q].mean():.3f}" in _TEXT
    for method, kinds in measure.judge(found).items():
        cells = (f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in kinds.values())
        # No interval is on one side of 0, which the text says of all.
        assert all(low < 0 < high for _, low, high in kinds.values())
        assert f"| {method} | {' | '.join(cells)} |" in _TEXT, method
