"""Pareto flags and distances, also on the paper's published tables."""

import csv
import itertools
import pathlib
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from absl.testing import parameterized
from scipy import optimize

from raslik_jax.evaluate import pareto

_TABLES = pathlib.Path(__file__).parents[2] / "third_party" / "raslik_paper" / "tables.csv"

# Largest relative error of D_mah computed from the printed rates, by block, in percent: what
# rounding of the rates to three (TOFU: two) decimals does to the small eigenvalue of Sigma.
_REPRODUCED = {
    "2a Howdy-Alpaca OLMo-2-1124-7B GA_GDR": 0.13,
    "2a Howdy-Alpaca OLMo-2-1124-7B GA_KLR": 1.5,
    "2a Howdy-Alpaca Pythia-2.8B GA_GDR": 0.31,
    "2a Howdy-Alpaca Pythia-2.8B GA_KLR": 5.5,
    "2b Virtual-Alpaca OLMo-2-1124-7B GA_GDR": 0.57,
    "2b Virtual-Alpaca OLMo-2-1124-7B GA_KLR": 1.1,
    "2b Virtual-Alpaca Pythia-2.8B GA_GDR": 2.8,
    "2b Virtual-Alpaca Pythia-2.8B GA_KLR": 0.33,
    "3 Howdy-Alpaca(CR) Pythia-2.8B GA_GDR": 0.46,
    "3 Howdy-Alpaca(CR) Pythia-2.8B GA_KLR": 1.7,
    "9 TOFU Pythia-2.8B GA_GDR": 0.91,
}
# Blocks whose published D_mah does not follow from their own F and R, by no rule tried.
_NOT_REPRODUCED = (
    "7 TOFU OLMo-2-1124-7B GA_GDR",
    "8 TOFU OLMo-2-1124-7B GA_KLR",
    "10 TOFU Pythia-2.8B GA_KLR",
    "11 Howdy-Alpaca OLMo-2-1124-13B-Instruct GA_GDR",
)


class _Block(NamedTuple):
    methods: list[str]
    retain_M: np.ndarray
    forget_M: np.ndarray
    published_M: np.ndarray
    flag_M: np.ndarray
    decimals: int
    distance_decimals: int


def _published_blocks() -> dict[str, _Block]:
    rows = defaultdict(list)
    with _TABLES.open() as file:
        for row in csv.DictReader(file):
            rows[" ".join([row["table"], row["dataset"], row["model"], row["algorithm"]])].append(
                row
            )

    def column(block: list[dict[str, str]], name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in block])

    return {
        name: _Block(
            methods=[row["method"] for row in block],
            retain_M=column(block, "retain"),
            forget_M=column(block, "forget"),
            published_M=column(block, "d_mah"),
            flag_M=np.array([row["pareto_flag_published"] == "yes" for row in block]),
            decimals=len(block[0]["forget"].split(".")[1]),
            distance_decimals=len(block[0]["d_mah"].split(".")[1]),
        )
        for name, block in rows.items()
    }


def _slack(block: _Block) -> float:
    """Returns how closely D_mah can be hit, in half units of its last printed digit.

    Every rate may move within its rounding cell. At most 1: the print is reproduced.
    """
    num = len(block.methods)
    cell = 0.5 * 10.0**-block.decimals

    def miss(move: np.ndarray) -> np.ndarray:
        found = pareto.mahalanobis_to_ideal(
            block.retain_M + cell * move[:num], block.forget_M + cell * move[num:]
        )
        return (found.distance_M - block.published_M) / (0.5 * 10.0**-block.distance_decimals)

    starts = [np.zeros(2 * num), np.random.default_rng(0).uniform(-0.9, 0.9, 2 * num)]
    fits = [optimize.least_squares(miss, x0, bounds=(-1, 1), max_nfev=200) for x0 in starts]
    return min(float(np.abs(fit.fun).max()) for fit in fits)


class PublishedTablesTest(parameterized.TestCase):
    def test_the_file_holds_the_fifteen_blocks(self):
        blocks = _published_blocks()
        self.assertEqual(set(blocks), {*_REPRODUCED, *_NOT_REPRODUCED})
        self.assertEqual(sum(len(block.methods) for block in blocks.values()), 96)

    @parameterized.parameters(*_REPRODUCED)
    def test_mahalanobis_follows_within_rounding(self, name):
        block = _published_blocks()[name]
        found = pareto.mahalanobis_to_ideal(block.retain_M, block.forget_M)
        np.testing.assert_allclose(
            found.distance_M, block.published_M, rtol=_REPRODUCED[name] / 100
        )
        self.assertLessEqual(_slack(block), 1.0)

    @parameterized.parameters(*_NOT_REPRODUCED)
    def test_mahalanobis_of_four_blocks_does_not_follow(self, name):
        block = _published_blocks()[name]
        found = pareto.mahalanobis_to_ideal(block.retain_M, block.forget_M)
        relative_M = np.abs(found.distance_M / block.published_M - 1)
        self.assertGreater(relative_M.max(), 0.6)
        self.assertGreater(_slack(block), 100.0)

    def test_rounding_explains_the_difference_of_eleven_blocks_only(self):
        for name, block in _published_blocks().items():
            found = pareto.mahalanobis_to_ideal(block.retain_M, block.forget_M).distance_M
            difference = np.abs(found / block.published_M - 1).max()
            explained = pareto.distance_rounding_error(
                block.retain_M, block.forget_M, decimals=block.decimals
            )
            self.assertEqual(difference <= explained, name in _REPRODUCED, name)

    def test_the_covariance_is_negative_in_the_three_known_blocks(self):
        negative = {
            name
            for name, block in _published_blocks().items()
            if pareto.mahalanobis_to_ideal(block.retain_M, block.forget_M).is_negative
        }
        self.assertEqual(
            negative,
            {
                "2b Virtual-Alpaca Pythia-2.8B GA_KLR",
                "8 TOFU OLMo-2-1124-7B GA_KLR",
                "10 TOFU Pythia-2.8B GA_KLR",
            },
        )

    def test_flags_differ_in_two_errors_and_three_rounding_ties(self):
        errors, ties = [], []
        for name, block in _published_blocks().items():
            mask_M = pareto.pareto_mask(block.retain_M, block.forget_M)
            tie_M = pareto.rounding_ties(block.retain_M, block.forget_M, decimals=block.decimals)
            for position in np.flatnonzero(mask_M != block.flag_M):
                (ties if tie_M[position] else errors).append(f"{name} {block.methods[position]}")
        self.assertCountEqual(
            errors,
            [
                "2a Howdy-Alpaca OLMo-2-1124-7B GA_GDR Oracle Sampling",
                "2a Howdy-Alpaca OLMo-2-1124-7B GA_KLR Oracle Sampling",
            ],
        )
        self.assertCountEqual(
            ties,
            [
                "2b Virtual-Alpaca OLMo-2-1124-7B GA_GDR Oracle Sampling",
                "2b Virtual-Alpaca OLMo-2-1124-7B GA_KLR BM25",
                "11 Howdy-Alpaca OLMo-2-1124-13B-Instruct GA_GDR RASLIK",
            ],
        )


class ParetoMaskTest(parameterized.TestCase):
    @parameterized.product(num=(1, 2, 7, 20), levels=(2, 5, 1000))
    def test_equals_the_rule_spelled_out(self, num, levels):
        generator = np.random.default_rng(num * levels)
        retain_M = generator.integers(levels, size=num) / levels
        forget_M = generator.integers(levels, size=num) / levels
        expected = [
            not any(
                retain_M[j] >= retain_M[i]
                and forget_M[j] <= forget_M[i]
                and (retain_M[j] > retain_M[i] or forget_M[j] < forget_M[i])
                for j in range(num)
            )
            for i in range(num)
        ]
        self.assertEqual(pareto.pareto_mask(retain_M, forget_M).tolist(), expected)

    def test_equal_points_stand_or_fall_together(self):
        retain_M, forget_M = np.array([0.9, 0.9, 0.5, 0.5]), np.array([0.2, 0.2, 0.3, 0.3])
        self.assertEqual(
            pareto.pareto_mask(retain_M, forget_M).tolist(), [True, True, False, False]
        )

    @parameterized.parameters(([0.1, np.nan], [0.1, 0.2]), ([], []), ([0.1], [0.1, 0.2]))
    def test_refuses(self, retain, forget):
        for function in (
            pareto.pareto_mask,
            pareto.rounding_ties,
            pareto.euclidean_to_ideal,
            pareto.mahalanobis_to_ideal,
        ):
            with pytest.raises((ValueError, TypeError)):
                function(np.array(retain, np.float64), np.array(forget, np.float64))


class RoundingTiesTest(parameterized.TestCase):
    @parameterized.parameters(
        # Equal R, lower F: digits below the last decide whether the first is dominated.
        ([0.300, 0.300], [0.20, 0.19], [True, False]),
        ([0.300, 0.301], [0.20, 0.19], [False, False]),
        # A tie hangs on nothing where a third method dominates for certain.
        ([0.300, 0.300, 0.4], [0.20, 0.19, 0.1], [False, False, False]),
        ([0.5, 0.5], [0.2, 0.2], [True, True]),
        ([0.5], [0.2], [False]),
    )
    def test_written_out_cases(self, retain, forget, expected):
        found = pareto.rounding_ties(np.array(retain), np.array(forget), decimals=3)
        self.assertEqual(found.tolist(), expected)

    def test_an_unmarked_flag_holds_wherever_in_its_cell_a_rate_lies(self):
        generator = np.random.default_rng(0)
        num_marked = 0
        for _ in range(60):
            retain_M = generator.integers(0, 8, size=6) / 10
            forget_M = generator.integers(0, 8, size=6) / 10
            tie_M = pareto.rounding_ties(retain_M, forget_M, decimals=1)
            num_marked += tie_M.sum()
            flags = []
            for _ in range(40):
                moved = [
                    rate_M + generator.uniform(-0.05, 0.05, 6) for rate_M in (retain_M, forget_M)
                ]
                flags.append(pareto.pareto_mask(*moved))
            changes_M = np.any(flags, axis=0) & ~np.all(flags, axis=0)
            self.assertFalse((changes_M & ~tie_M).any())
        self.assertBetween(num_marked, 20, 300)


class EuclideanTest(parameterized.TestCase):
    def test_raw_distance(self):
        found = pareto.euclidean_to_ideal(np.array([1.0, 0.0, 0.4]), np.array([0.0, 1.0, 0.8]))
        np.testing.assert_allclose(found, [0.0, np.sqrt(2), 1.0])

    def test_rescaled_distance(self):
        retain_M, forget_M = np.array([0.2, 0.6, 0.4]), np.array([0.1, 0.9, 0.5])
        found = pareto.euclidean_to_ideal(retain_M, forget_M, rescale=True)
        np.testing.assert_allclose(found, [1.0, 1.0, np.sqrt(0.5)])

    def test_a_rate_without_spread_adds_nothing_when_rescaled(self):
        found = pareto.euclidean_to_ideal(np.array([0.7, 0.7]), np.array([0.1, 0.4]), rescale=True)
        np.testing.assert_allclose(found, [0.0, 1.0])


class MahalanobisTest(parameterized.TestCase):
    @parameterized.parameters(5, 9)
    def test_equals_the_formula_spelled_out(self, num):
        generator = np.random.default_rng(num)
        retain_M = generator.uniform(0.2, 0.9, num)
        forget_M = 0.5 * retain_M + generator.uniform(0, 0.3, num)
        covariance = [[0.0, 0.0], [0.0, 0.0]]
        columns = [retain_M, forget_M]
        for a, b in itertools.product(range(2), repeat=2):
            covariance[a][b] = (
                sum(
                    (x - columns[a].mean()) * (y - columns[b].mean())
                    for x, y in zip(columns[a], columns[b], strict=True)
                )
                / (num - 1)
                * (1.0 if a == b else 0.9)
            )
        inverse = np.linalg.inv(np.array(covariance))
        expected = [
            np.sqrt(np.array([r - 1, f]) @ inverse @ np.array([r - 1, f]))
            for r, f in zip(retain_M, forget_M, strict=True)
        ]
        found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
        np.testing.assert_allclose(found.distance_M, expected, rtol=1e-9)
        np.testing.assert_allclose(found.covariance, covariance, rtol=1e-12, atol=1e-18)
        eigenvalues = np.linalg.eigvalsh(np.array(covariance))
        self.assertAlmostEqual(found.condition_number, eigenvalues[1] / eigenvalues[0], places=6)
        self.assertFalse(found.is_negative)

    @parameterized.parameters(2, 3)
    def test_rounding_error_is_that_of_rates_drawn_in_their_cells(self, decimals):
        generator = np.random.default_rng(5)
        retain_M, forget_M = np.round(generator.uniform(0.1, 0.9, (2, 6)), decimals)
        found = pareto.distance_rounding_error(retain_M, forget_M, decimals=decimals)
        at_rates_M = pareto.mahalanobis_to_ideal(retain_M, forget_M).distance_M
        changes = []
        for _ in range(300):
            moved = [
                rate_M + generator.uniform(-0.5, 0.5, 6) * 10.0**-decimals
                for rate_M in (retain_M, forget_M)
            ]
            changes.append(
                np.abs(pareto.mahalanobis_to_ideal(*moved).distance_M / at_rates_M - 1).max()
            )
        # A maximum over fewer draws: below, but of the same size.
        self.assertBetween(found, 0.8 * max(changes), 2 * max(changes))

    def test_warns_where_the_distance_is_not_monotone(self):
        retain_M = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
        found = pareto.mahalanobis_to_ideal(retain_M, np.array([0.5, 0.42, 0.3, 0.2, 0.12]))
        self.assertTrue(found.is_negative)

    @parameterized.named_parameters(
        ("four_methods", np.linspace(0, 1, 4), np.linspace(0, 1, 4) ** 2),
        ("no_spread", np.full(6, 0.1), np.linspace(0, 1, 6)),
    )
    def test_refuses(self, retain_M, forget_M):
        with self.assertRaisesRegex(ValueError, "5 or more methods whose rates differ"):
            pareto.mahalanobis_to_ideal(retain_M, forget_M)
