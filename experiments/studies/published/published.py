"""The paper's published tables: read from the file, matched with runs, and checked."""

import csv
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.corpora import paper
from experiments.studies.published import distances
from raslik_jax.evaluate import pareto
from raslik_jax.report.names import checkpoint_name
from raslik_jax.report.tidy import Model, make_model
from raslik_jax.retrieve.strategies import STRATEGIES

TABLES = pathlib.Path(__file__).parents[3] / "third_party" / "raslik_paper" / "tables.csv"


class PublishedBlock(NamedTuple):
    """One block of the paper's tables: a dataset, a model and an algorithm.

    Attributes:
      algorithm: under its name here: ga_gdr; all else as printed.
      rows: the methods by strategy in the paper's order: "forget", "retain", "mahalanobis/distance"
        and "non_sf_target" as printed; "pareto": not printed in gray; "is_wrong": the printed rates
        contradict that flag anywhere in their rounding cells; "tie": it depends on digits that are
        not printed.
      decimals: digits after the point of its rates.
      distance_difference: largest relative difference between a printed D_mah and the one that
        follows from the printed rates.
      rounding_error: the part of that which the rounding of the rates explains.
      is_negative: R and F are negatively correlated, so a better method may have a larger D_mah.
    """

    table: str
    dataset: str
    model: str
    algorithm: str
    rows: Mapping[str, Model]
    decimals: int
    distance_difference: float
    rounding_error: float
    is_negative: bool

    @property
    def follows(self) -> bool:
        """Whether the printed distances can follow from the printed rates."""
        return self.distance_difference <= self.rounding_error


def read_blocks(path: pathlib.Path = TABLES) -> tuple[PublishedBlock, ...]:
    """Returns the blocks of the paper's tables in their order."""
    blocks: dict[tuple[str, str, str, str], list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = row["table"], row["dataset"], row["model"], row["algorithm"].lower()
            blocks[name].append(row)
    return tuple(_make_block(name, rows) for name, rows in blocks.items())


def _make_block(
    name: tuple[str, str, str, str], rows: Sequence[Mapping[str, str]]
) -> PublishedBlock:
    decimals = len(rows[0]["forget"].split(".")[1])
    retain_M, forget_M, distance_M = (
        np.array([float(row[column]) for row in rows]) for column in ("retain", "forget", "d_mah")
    )
    is_optimal_M = pareto.pareto_mask(retain_M, forget_M)
    is_tie_M = distances.rounding_ties(retain_M, forget_M, decimals=decimals)
    found = distances.mahalanobis_to_ideal(retain_M, forget_M)
    models = {}
    for row, is_optimal, is_tie in zip(rows, is_optimal_M, is_tie_M, strict=True):
        is_printed = row["pareto_flag_published"] == "yes"
        strategy = strategy_printed_as(row["method"])
        values = {
            "forget": float(row["forget"]),
            "retain": float(row["retain"]),
            "mahalanobis/distance": float(row["d_mah"]),
            "non_sf_target": float(row["non_sf"]) if row["non_sf"] else None,
            "pareto": is_printed,
            "is_wrong": bool(is_printed != is_optimal and not is_tie),
            "tie": bool(is_tie),
        }
        models[strategy] = make_model(strategy, name[-1], values)
    return PublishedBlock(
        *name,
        models,
        decimals=decimals,
        distance_difference=float(np.abs(found.distance_M / distance_M - 1).max()),
        rounding_error=distance_rounding_error(retain_M, forget_M, decimals=decimals),
        is_negative=found.is_negative,
    )


def distance_rounding_error(
    retain_M: distances.Rates,
    forget_M: distances.Rates,
    *,
    decimals: int,
    draws: int = 1000,
    seed: int = 0,
) -> float:
    """Returns how far rounding of the rates may move a D_mah, as a share of it.

    The largest relative change of any method where every rate is drawn within its rounding cell.
    """
    distance_M = distances.mahalanobis_to_ideal(retain_M, forget_M).distance_M
    rates_2M, cell = np.stack([retain_M, forget_M]), 0.5 * 10.0**-decimals
    moves_D2M = np.random.default_rng(seed).uniform(-cell, cell, (draws, *rates_2M.shape))
    moved = (distances.mahalanobis_to_ideal(*rates_2M + move_2M) for move_2M in moves_D2M)
    moved_DM = np.stack([found.distance_M for found in moved])
    return float(np.abs(moved_DM / distance_M - 1).max())


def strategy_printed_as(method: str) -> str:
    """Returns the strategy of a method as the paper prints it: the longest title it begins with."""
    letters = {
        name: "".join(filter(str.isalnum, s.title.lower())) for name, s in STRATEGIES.items()
    }
    printed = "".join(filter(str.isalnum, method.lower()))
    known = [name for name in letters if printed.startswith(letters[name])]
    return max(known, key=lambda name: len(letters[name]), default=method)


def match_block(
    blocks: Sequence[PublishedBlock],
    config: Mapping[str, Any],
    *,
    algorithm: str,
    strategies: Sequence[str],
) -> PublishedBlock | None:
    """Returns the published block of a run's dataset, checkpoint and algorithm, if there is one.

    If the paper has two (the main table and the ablation of Contaminated Random) it is the one that
    shares more strategies.
    """
    record = paper.MEMBERS.get(config.get("corpus", {}).get("dataset", ""))
    dataset = record.title if record else None
    model = checkpoint_name(config).lower()
    found = [
        block
        for block in blocks
        if block.dataset.split("(")[0] == dataset
        and block.model.lower() == model
        and block.algorithm == algorithm
    ]
    return max(found, key=lambda block: len(block.rows.keys() & set(strategies)), default=None)
