"""The spread of the update direction, beside draws of whole gradients."""

import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from experiments.studies.theorem import measure, page, report, variance


class DirectionTest(absltest.TestCase):
    def test_delta_is_retain_mean_less_forget_mean(self):
        gradient_NP = np.array([[1.0, 0], [3, 0], [0, 2], [9, 9]])
        is_forget_DN = np.array([[True, True, False, False]] * 2)
        is_retain_DN = np.array([[False, False, True, False], [False] * 4])
        weight_DN = variance.weights_of_sets(is_forget_DN, is_retain_DN)
        np.testing.assert_allclose(weight_DN @ gradient_NP, [[-2, 2], [-2, 0]])


class SpreadTest(parameterized.TestCase):
    @parameterized.parameters((4, 5), (1, 6), (6, 1))
    def test_variances_are_those_of_the_draws(self, num_sketches, num_fluctuations):
        generator = np.random.default_rng(0)
        gradient_NP = generator.standard_normal((10, 7)) * 3
        weight_SFN = generator.standard_normal((num_sketches, num_fluctuations, 10))
        weight_SFN += generator.standard_normal((num_sketches, 1, 10))
        target_N = generator.standard_normal(10)
        found = variance.measure_spread(weight_SFN, gradient_NP @ gradient_NP.T, target_N)

        delta_SFP = weight_SFN @ gradient_NP
        error = np.mean(np.sum((delta_SFP - target_N @ gradient_NP) ** 2, axis=-1))
        self.assertAlmostEqual(found.error, error, delta=1e-4 * error)
        # np.var with one degree of freedom less, summed over coordinates.
        if num_fluctuations > 1:
            wanted = np.mean(np.var(delta_SFP, axis=1, ddof=1).sum(axis=-1))
            self.assertAlmostEqual(found.over_fluctuations, wanted, delta=1e-4 * error)
        else:
            self.assertIsNone(found.over_fluctuations)
        if num_sketches > 1:
            wanted = np.mean(np.var(delta_SFP, axis=0, ddof=1).sum(axis=-1))
            self.assertAlmostEqual(found.over_sketches, wanted, delta=1e-4 * error)
        if min(num_sketches, num_fluctuations) > 1:
            pairs = [
                delta_SFP[s, f] @ delta_SFP[r, g]
                for s in range(num_sketches)
                for r in range(num_sketches)
                for f in range(num_fluctuations)
                for g in range(num_fluctuations)
                if s != r and f != g
            ]
            wanted = np.mean(np.sum(delta_SFP**2, axis=-1)) - np.mean(pairs)
            self.assertAlmostEqual(found.total, wanted, delta=1e-4 * error)

    def test_what_sketches_agree_on_varies_by_the_law_of_total_variance(self):
        generator = np.random.default_rng(2)
        weight_SFN = generator.standard_normal((5, 4, 6)) + generator.standard_normal((1, 4, 6))
        found = variance.measure_spread(weight_SFN, np.eye(6), np.zeros(6))
        record = {"run": "a", "fluctuation": "x", "moved": 1, "rule": "count", "retain": "none"}
        exact = record | {"kernel": "exact"} | found._asdict() | {"total": 2.0, "error": 1.0}
        sketched = record | {"kernel": "8"} | found._asdict()
        joined = report.join_spreads([exact, sketched])
        # Products of draws that differ in the sketch: the mean over sketches without its own noise.
        product_SFSF = np.einsum("sfn,rgn->sfrg", weight_SFN, weight_SFN)
        others = [(s, r) for s in range(5) for r in range(5) if s != r]
        same = np.mean([product_SFSF[s, f, r, f] for s, r in others for f in range(4)])
        pairs = [(f, g) for f in range(4) for g in range(4) if f != g]
        differ = np.mean([product_SFSF[s, f, r, g] for s, r in others for f, g in pairs])
        ratio = joined[1]["averaged_ratio"]["mean"]
        self.assertAlmostEqual(ratio, (same - differ) / 2.0, places=6)

    def test_cosines_of_a_moved_query(self):
        generator = np.random.default_rng(1)
        row_NP = generator.standard_normal((6, 9))
        row_NP /= np.linalg.norm(row_NP, axis=1, keepdims=True)
        query_P, move_FP = generator.standard_normal(9), generator.standard_normal((4, 9))
        all_EP = np.concatenate([query_P[None], move_FP])
        found_FN = variance.perturbed_cosines(all_EP @ row_NP.T, all_EP @ all_EP.T, size=0.3)
        moved_FP = query_P + 0.3 * move_FP
        moved_FP /= np.linalg.norm(moved_FP, axis=1, keepdims=True)
        np.testing.assert_allclose(found_FN, moved_FP @ row_NP.T, atol=1e-12)


class BoundaryTest(absltest.TestCase):
    def test_thresholds_lie_between_the_sets_and_the_rest(self):
        score_N = np.array([0.5, -0.4, 0.1, 0.3, -0.2, 0.0])
        found = variance.place_thresholds(score_N, 2)
        self.assertAlmostEqual(found.forget, 0.2)
        self.assertAlmostEqual(found.retain, -0.1)
        for count in (0, 3):
            with self.assertRaisesRegex(ValueError, f"less than half of the rows, got {count} of"):
                variance.place_thresholds(score_N, count)

    def test_counts_densities_and_margin_by_hand(self):
        score_N = np.array([0.52, 0.5, 0.47, 0.2, 0.0, -0.29, -0.31, -0.5])
        found = variance.measure_boundary(
            score_N, variance.Thresholds(forget=0.5, retain=-0.3), gamma=0.025
        )
        self.assertEqual((found["near_forget"], found["near_retain"]), (2, 2))
        self.assertAlmostEqual(found["forget_density"], 2 / (0.05 * 8))
        self.assertAlmostEqual(found["margin"], 0.03)

    def test_slope_of_a_smoothed_step_is_the_density_of_the_noise_at_zero(self):
        sigma, draws = 0.05, 4000
        exact_N = np.linspace(0.29, 0.31, 41)
        noise_SN = np.random.default_rng(0).normal(0, sigma, (draws, 41))
        slope = variance.membership_slope(exact_N, exact_N + noise_SN, 0.3, window=0.01)
        near_N = exact_N - 0.3
        # Each share has a standard error of .5 / sqrt(draws); the slope is linear in them.
        bound = 5 * 0.5 / np.sqrt(draws * np.sum(near_N**2))
        self.assertAlmostEqual(slope, 1 / (sigma * np.sqrt(2 * np.pi)), delta=bound)
        self.assertIsNone(variance.membership_slope(exact_N, exact_N + noise_SN, 0.9, window=0.01))


class PageTest(absltest.TestCase):
    def test_each_figure_is_drawn_from_the_stored_results(self):
        with mock.patch.object(report.drawing, "save_figure") as save:
            page.write_figures(pathlib.Path("x"))
        drawn = {call.args[1].name: call.args[0] for call in save.call_args_list}
        self.assertEqual(tuple(drawn), page.FIGURES)
        _, noise, _ = drawn["variance"].axes
        stored = json.loads((page.RESULTS / "smollm2.json").read_text())["spreads"]
        found = [line.get_ydata() for line in noise.lines]
        for moved in (0.1, 0.3, 1.0):
            ratios = [
                row["total_ratio"]
                for row in stored
                if (row["fluctuation"], row["rule"]) == ("gradient noise", "threshold")
                and row["moved"] == moved
            ]
            self.assertLen(ratios, 5)
            self.assertTrue(any(np.array_equal(ratios, line) for line in found), moved)

    def test_results_are_stored_with_five_digits(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        rows = [{"retain": "antipodal", "total": 0.123456789}, {"retain": "none", "total": 1.0}]
        found = {"spreads": rows, "scores": [0.5, 1 / 3]}
        (folder / "planted-9").mkdir()
        path = folder / "planted-9" / "variance_draws.json"
        path.write_text(json.dumps(found))
        with mock.patch.object(page, "RESULTS", folder):
            page.store(path)
        stored = json.loads((folder / "planted-9.json").read_text())
        self.assertEqual(stored["spreads"], [{"retain": "antipodal", "total": 0.12346}])
        self.assertEqual(stored["scores"], [0.5, 0.33333])


class PlantedTest(absltest.TestCase):
    def test_targets_share_a_direction_with_the_queries(self):
        vector_MP, is_target_N = variance.plant_gradients(0, 200, 2000)
        self.assertEqual(is_target_N.sum(), 20)
        row_NP, query_QP = np.split(vector_MP - vector_MP[:200][~is_target_N].mean(axis=0), [200])
        score_N = row_NP @ query_QP.mean(axis=0) / np.linalg.norm(row_NP, axis=1)
        best = score_N[is_target_N].mean() - score_N[~is_target_N].mean()
        self.assertGreater(best, 2 * score_N[~is_target_N].std())
        np.testing.assert_array_equal(vector_MP, variance.plant_gradients(0, 200, 2000)[0])

    def test_two_runs_of_one_name_are_refused(self):
        with self.assertRaisesRegex(ValueError, "--runs must have different names, got 'x,x'"):
            measure.Options(runs=("a/x", "b/x"))

    def test_sketches_are_measured_beside_the_exact_kernel(self):
        options = measure.Options(
            synthetic_params=512,
            synthetic_rows=60,
            projection_seeds=2,
            fluctuations=3,
            fluctuation_sizes=(0.3,),
        )
        material = measure.planted_material(options, 0)
        _, exact = measure.draw_directions(material, 3, np.random.default_rng(0))
        thresholds = variance.place_thresholds(exact.row_EN[0], 6)
        # A sketch that keeps all products is the exact kernel.
        found = report.join_spreads(
            [
                {"run": "planted"} | record
                for record in measure.spread_records(
                    material, exact, {512: [exact]}, (0.3,), thresholds, np.random.default_rng(0)
                )
            ]
        )
        ratios = [r["total_ratio"] for r in found if r["kernel"] == "512" and r["retain"] == "none"]
        self.assertNotEmpty(ratios)
        self.assertEqual({ratio["mean"] for ratio in ratios if ratio}, {1.0})


if __name__ == "__main__":
    absltest.main()
