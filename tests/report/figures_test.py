"""Figures: what is drawn where, and bytes that depend on the numbers only."""

import pathlib
import tempfile

import matplotlib
import numpy as np
import sample_metrics
from absl.testing import parameterized

from raslik_jax.report import drawing, figures

_FRAME = drawing.Frame(330)


def _scores() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    scores_N = np.concatenate([generator.normal(0, 0.1, 180), generator.normal(0.5, 0.1, 20)])
    return scores_N, np.arange(200) >= 180


def _entry(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def _draw(name: str):
    if name == "frontier":
        return _frontier("ga_gdr")
    if name == "scores":
        ends = {"forget": (0.4, 0.6), "retain": (-0.3, -0.1)}
        return figures.draw_scores(*_scores(), **ends, frame=_FRAME)
    if name == "cut":
        return figures.draw_cut(_scores()[0], num_forget=20, middle=0.0, edge=0.3)
    if name == "dots":
        how = {"colors": {"x": "#000000", "y": "#0072B2"}, "start": 0.0, "floor": 0.2}
        rows = {"x": _entry(0.1), "y": _entry(0.3)}
        return figures.draw_intervals(rows, xlabel="v", **how, frame=_FRAME)
    return figures.draw_losses({"raslik": [3.0, 2.0, 1.5]}, ["raslik"], frame=_FRAME)


def _frontier(algorithm: str):
    metrics = sample_metrics.sample_metrics()
    start = figures.lowest_retain(metrics)
    return figures.draw_frontier(metrics, algorithm, retain_from=start, frame=_FRAME)


class PlainTest(parameterized.TestCase):
    def test_what_stands_out_is_drawn_above_the_cut_and_the_noise_band(self):
        (axes,) = _draw("cut").axes
        above = axes.lines[1].get_xydata()
        np.testing.assert_array_equal(above[:, 0], np.arange(1, 21))
        self.assertGreater(above[-1, 1], axes.lines[2].get_ydata()[0])
        self.assertIn("20 rows", [text.get_text() for text in axes.texts])

    def test_dots_stand_in_the_row_of_their_name(self):
        (axes,) = _draw("dots").axes
        places = dict(zip(axes.get_yticks(), axes.get_yticklabels(), strict=True))
        for at, value in _points(axes)[:, ::-1]:
            row = places[round(at)].get_text()
            self.assertAlmostEqual(value, {"x": 0.1, "y": 0.3}[row])


def _points(axes, **style) -> np.ndarray:
    """Returns the points of all single-point lines whose properties are as given."""
    lines = [line for line in axes.lines if len(line.get_xdata()) == 1]
    return np.array(
        [
            [line.get_xdata()[0], line.get_ydata()[0]]
            for line in lines
            if all(getattr(line, "get_" + key)() == value for key, value in style.items())
        ]
    )


class SaveTest(parameterized.TestCase):
    @parameterized.parameters("frontier", "scores", "losses")
    def test_same_numbers_give_the_same_bytes(self, name):
        written = []
        for settings in ({}, {"font.size": 20, "svg.hashsalt": None, "axes.grid": False}):
            folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
            with matplotlib.rc_context(settings):
                paths = drawing.save_figure(_draw(name), folder / f"{name}.v1")
            self.assertEqual([path.name for path in paths], [f"{name}.v1.png", f"{name}.v1.svg"])
            self.assertCountEqual(folder.iterdir(), paths)
            written.append([path.read_bytes() for path in paths])
        self.assertEqual(written[0], written[1])
        png, svg = written[0]
        self.assertEqual(png[:8], b"\x89PNG\r\n\x1a\n")
        for word in (b"Matplotlib v", b"dc:date", b"tIME", b"Software"):
            self.assertNotIn(word, png + svg)


class FrontierTest(parameterized.TestCase):
    def test_the_ideal_is_at_the_bottom_right(self):
        (axes,) = _frontier("ga_gdr").axes
        np.testing.assert_array_equal(_points(axes, marker="*"), [[1.0, 0.0]])
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        self.assertTrue(left < 0.51 and 1 < right < 1.1 and bottom < 0 and 1 < top < 1.1)

    def test_paths_run_from_the_fine_tuned_model_over_all_epochs(self):
        metrics = sample_metrics.sample_metrics()
        (axes,) = _frontier("ga_gdr").axes
        path = [
            (e["retain"]["mean"], e["forget"]["mean"])
            for e in metrics["methods"]
            if (e["strategy"], e["algorithm"]) == ("raslik", "ga_gdr")
        ]
        drawn = [line.get_xydata() for line in axes.lines]
        self.assertTrue(any(len(d) == 6 and np.allclose(d, [(1.0, 1.0), *path]) for d in drawn))

    def test_the_last_epoch_is_filled_only_if_pareto_optimal(self):
        metrics = sample_metrics.sample_metrics()
        (axes,) = _frontier("ga_klr").axes
        hollow = _points(axes, markerfacecolor="white")
        expected = [
            [e["retain"]["mean"], e["forget"]["mean"]]
            for e in metrics["methods"]
            if e["algorithm"] == "ga_klr" and e["epoch"] == 5 and not e["pareto"]
        ]
        np.testing.assert_allclose(hollow, expected)

    def test_the_backbone_marks_the_floor(self):
        (axes,) = _frontier("ga_gdr").axes
        self.assertIn([0.55, 0.27], _points(axes, marker="X").tolist())
        floors = [line for line in axes.lines if line.get_linestyle() == ":"]
        self.assertEqual([set(line.get_ydata()) for line in floors], [{0.27}])


class ScoresTest(parameterized.TestCase):
    def test_each_kind_is_drawn_as_a_share_of_its_own(self):
        scores_N, is_target_N = _scores()
        (axes,) = figures.draw_scores(scores_N, is_target_N, num_bins=10, frame=_FRAME).axes
        edges = np.linspace(scores_N.min(), scores_N.max(), 11)
        expected = [
            [
                100 * np.mean((kind >= low) & ((kind < high) | (high == edges[-1])))
                for low, high in zip(edges[:-1], edges[1:], strict=True)
            ]
            for kind in (scores_N[~is_target_N], scores_N[is_target_N])
        ]
        drawn = [patch.get_data().values for patch in axes.patches if hasattr(patch, "get_data")]
        np.testing.assert_allclose(drawn[1], expected[0])
        np.testing.assert_allclose(drawn[3], expected[1])
        for values in drawn:
            self.assertAlmostEqual(sum(values), 100.0)

    def test_thresholds_are_marked(self):
        (axes,) = _draw("scores").axes
        self.assertEqual([line.get_xdata()[0] for line in axes.lines], [0.4, -0.1])
        self.assertEqual([text.get_text() for text in axes.texts], ["forget set", "retain set"])


class LossesTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 7, 200)
    def test_running_mean_equals_a_slow_one(self, num):
        losses = np.random.default_rng(0).random(num)
        reach = num // 40
        expected = [
            np.mean(losses[max(0, i - reach) : min(num, i + reach + 1)]) for i in range(num)
        ]
        np.testing.assert_allclose(figures.running_mean(losses), expected)
