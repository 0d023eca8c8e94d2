"""The paper's published tables: read from the file, matched with runs, and held to account."""

import csv
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.data.corpora import DATASETS
from raslik_jax.evaluate import pareto

# A checkout carries the file; an installed package alone does not.
TABLES = pathlib.Path(__file__).parents[2] / "third_party" / "raslik_paper" / "tables.csv"

_METHODS = {
    "randomselection": "random",
    "embeddingsim": "embedding",
    "bm25": "bm25",
    "oraclesampling": "oracle",
    "raslikf": "raslik_f",
    "raslik": "raslik",
}


class PublishedRow(NamedTuple):
    """What the paper prints of one method in one block, and what follows from it.

    Attributes:
      strategy: the method, under its name here.
      forget: F.
      retain: R.
      distance: D_mah.
      non_sf: Non-SF; None where the paper has none.
      is_pareto: not printed in gray.
      is_wrong_flag: the printed rates contradict the printed flag, wherever in their rounding
        cells they lie.
      is_tie: the flag hangs on digits that are not printed.
    """

    strategy: str
    forget: float
    retain: float
    distance: float
    non_sf: float | None
    is_pareto: bool
    is_wrong_flag: bool
    is_tie: bool


class PublishedBlock(NamedTuple):
    """One block of the paper's tables: a dataset, a model and an algorithm.

    Attributes:
      table: the number of the table.
      dataset: as printed.
      model: as printed.
      algorithm: under its name here: ga_gdr.
      rows: the methods in the paper's order.
      decimals: digits after the point of its rates.
      distance_difference: largest relative difference between a printed D_mah and the one that
        follows from the printed rates.
      rounding_error: how much of that the rounding of the rates explains.
      is_negative: R and F are negatively correlated, so a better method may have a larger D_mah.
    """

    table: str
    dataset: str
    model: str
    algorithm: str
    rows: tuple[PublishedRow, ...]
    decimals: int
    distance_difference: float
    rounding_error: float
    is_negative: bool

    @property
    def follows(self) -> bool:
        """Whether the printed distances can follow from the printed rates."""
        return self.distance_difference <= self.rounding_error


def read_blocks(path: pathlib.Path = TABLES) -> tuple[PublishedBlock, ...]:
    """Returns the blocks of the paper's tables in their order, each checked against itself.

    Args:
      path: the file of the figures.

    Returns:
      The blocks; none where the file is missing, as in an installed package.
    """
    if not path.is_file():
        return ()
    blocks: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            blocks[row["table"], row["dataset"], row["model"], row["algorithm"]].append(row)
    return tuple(_make_block(names, rows) for names, rows in blocks.items())


def _make_block(names: tuple[str, ...], rows: Sequence[Mapping[str, str]]) -> PublishedBlock:
    table, dataset, model, algorithm = names
    decimals = len(rows[0]["forget"].split(".")[1])
    retain_M, forget_M, distance_M = (
        np.array([float(row[name]) for row in rows]) for name in ("retain", "forget", "d_mah")
    )
    is_printed_M = np.array([row["pareto_flag_published"] == "yes" for row in rows])
    is_optimal_M = pareto.pareto_mask(retain_M, forget_M)
    is_tie_M = pareto.rounding_ties(retain_M, forget_M, decimals=decimals)
    found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
    return PublishedBlock(
        table=table,
        dataset=dataset,
        model=model,
        algorithm=algorithm.lower(),
        rows=tuple(
            PublishedRow(
                strategy=strategy_of(row["method"]),
                forget=float(forget_M[i]),
                retain=float(retain_M[i]),
                distance=float(distance_M[i]),
                non_sf=float(row["non_sf"]) if row["non_sf"] else None,
                is_pareto=bool(is_printed_M[i]),
                is_wrong_flag=bool(is_printed_M[i] != is_optimal_M[i] and not is_tie_M[i]),
                is_tie=bool(is_tie_M[i]),
            )
            for i, row in enumerate(rows)
        ),
        decimals=decimals,
        distance_difference=float(np.abs(found.distance_M / distance_M - 1).max()),
        rounding_error=pareto.distance_rounding_error(retain_M, forget_M, decimals=decimals),
        is_negative=found.is_negative,
    )


def strategy_of(method: str) -> str:
    """Returns the name here of a method as the paper prints it: cr_25 for CR-25."""
    letters = "".join(c for c in method.lower() if c.isalnum())
    return _METHODS.get(letters) or method.lower().replace("-", "_")


def match_block(
    blocks: Sequence[PublishedBlock],
    config: Mapping[str, Any],
    *,
    algorithm: str,
    strategies: Sequence[str],
) -> PublishedBlock | None:
    """Returns the published block that a run repeats, if there is one.

    Its dataset is that of --corpus.dataset, and its model the last part of --backbone.checkpoint,
    a folder or a hub's name, whatever the case of its letters. Where the paper has two tables of
    the same block (the main one and the ablation of Contaminated Random), the one that shares more
    strategies.

    Args:
      blocks: the published blocks.
      config: the content of a run's config.json.
      algorithm: the unlearning algorithm.
      strategies: those of the run.

    Returns:
      The block, or None: a run from scratch, of a smaller model or on other data repeats none.
    """
    record = DATASETS.get(config.get("corpus", {}).get("dataset", ""))
    dataset = record.title if record and record.is_published else None
    checkpoint = config.get("backbone", {}).get("checkpoint", "")
    model = checkpoint.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [
        block
        for block in blocks
        if block.dataset.split("(")[0] == dataset
        and block.model.lower() == model
        and block.algorithm == algorithm
    ]

    def num_shared(block: PublishedBlock) -> int:
        return len({row.strategy for row in block.rows} & set(strategies))

    return max(found, key=num_shared, default=None)
