"""Figures of studies: what is drawn where."""

import numpy as np
import pytest

from experiments.studies import curves


def _entry(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


@pytest.mark.parametrize(("low", "high"), [(0.6, 3.0), (0.3, 430.0)])
def test_a_logarithmic_axis_is_labeled_with_plain_numbers(low, high):
    points = [(1.0, _entry(low)), (8.0, _entry(high))]
    labels = {"xlabel": "K", "ylabel": "ratio"}
    figure = curves.draw_curves({"one": {"a": points}}, **labels, log_x=True, log_y=True)
    figure.canvas.draw()
    (axes,) = figure.axes
    shown = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert "1" in shown
    assert all(float(text) > 0 for text in filter(None, shown))


def test_boundary_counts_what_lies_near_each_threshold():
    scores_N = np.random.default_rng(0).normal(0, 0.3, 200)
    figure = curves.draw_boundary(
        scores_N, forget_threshold=0.4, retain_threshold=-0.1, gamma=0.02, xlabel="score"
    )
    for axes, threshold in zip(figure.axes[1:], (0.4, -0.1), strict=True):
        near = sum(abs(score - threshold) <= 0.02 for score in scores_N)
        assert axes.get_title(loc="left").startswith(f"{near} near")


def test_curves_hold_their_points_in_their_panel():
    panels = {"one": {"a": [(1.0, _entry(0.2)), (8.0, _entry(0.4))]}, "two": {"b": []}}
    one, two = curves.draw_curves(panels, xlabel="K", ylabel="share", log_x=True).axes
    (line,) = one.lines
    np.testing.assert_allclose(line.get_xydata(), [[1, 0.2], [8, 0.4]])
    assert len(two.lines[0].get_xdata()) == 0
