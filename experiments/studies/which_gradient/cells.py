"""Writes the areas of every candidate in every cell, from what measure.py stored.

  python experiments/studies/which_gradient/cells.py --out=runs/which_gradient

It writes results.json to this folder.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
from jaxtyping import Bool, Float

from experiments.studies import kernels
from experiments.studies.which_gradient.measure import HERE, LOSSES, RIDGE, STATES, fields_of
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.retrieve.selectors import find_cut

_UNSHIFTED, _TRAINED, _SMOOTHED = "unshifted/all", "next_token/all", "smoothed/all"
_HIDDEN = "last/all"
# Sums: their parts by name, each a loss or a hidden state.
SUMS: dict[str, tuple[str, ...]] = {
    "unshifted + trained": (_UNSHIFTED, _TRAINED),
    "unshifted + hidden": (_UNSHIFTED, _HIDDEN),
    "trained + hidden": (_TRAINED, _HIDDEN),
    "smoothed + hidden": (_SMOOTHED, _HIDDEN),
    "unshifted + trained + hidden": (_UNSHIFTED, _TRAINED, _HIDDEN),
}
CANDIDATES = (
    *LOSSES,
    *SUMS,
    *(f"{name}, end to end" for name in SUMS),
    *(f"hidden {name}" for name in STATES),
    *(f"probe {name}" for name in STATES),
    "BM25, answers",
)


class Run(NamedTuple):
    """What measure.py stored of a run: arrays, and labels, queries and BM25's scores."""

    name: str
    arrays: Mapping[str, np.ndarray]
    stored: Mapping[str, Any]

    @property
    def losses(self) -> list[str]:
        """The losses whose gradients were taken."""
        return [name for name in LOSSES if f"gram {name}" in self.arrays]

    @property
    def labels(self) -> np.ndarray:
        """The behavior of every row; empty for none."""
        return np.array(self.stored["labels"])

    def behaviors(self) -> list[str]:
        """Returns the behaviors with a query whose answer shows it."""
        shown = (one["behavior"] for one in self.stored["queries"] if one["shown"])
        return list(dict.fromkeys(shown))

    def asked(self, behavior: str) -> np.ndarray:
        """Returns the numbers of the queries whose answer shows a behavior."""
        queries = self.stored["queries"]
        return np.flatnonzero([q["shown"] and q["behavior"] == behavior for q in queries])

    def scores(self) -> Iterator[tuple[str, Float[np.ndarray, "Q N"]]]:
        """Yields the centered cosine of each query with each row, for every candidate."""
        num_train = len(self.labels)
        queries = np.arange(num_train, num_train + len(self.stored["queries"]))

        def cosines(gram_MM: np.ndarray) -> np.ndarray:
            centered_MM = kernels.center(gram_MM.astype(np.float64), num_train)
            return kernels.kernel_scores(centered_MM, num_train, queries).score_QN

        units = {name: _unit(self.arrays[f"state {name}"].astype(np.float64)) for name in STATES}
        grams = {name: self.arrays[f"gram {name}"] for name in self.losses}
        grams |= {name: unit_ME @ unit_ME.T for name, unit_ME in units.items()}
        scores = {name: cosines(gram_MM) for name, gram_MM in grams.items()}
        for name in self.losses:
            yield name, scores[name]
        sums = {name: parts for name, parts in SUMS.items() if {*parts} <= scores.keys()}
        for name, parts in sums.items():
            yield name, np.mean([scores[part] for part in parts], axis=0)
        for name, parts in sums.items():
            yield f"{name}, end to end", cosines(np.mean([grams[part] for part in parts], axis=0))
        for name in STATES:
            yield f"hidden {name}", scores[name]
        for name, unit_ME in units.items():
            yield f"probe {name}", probe_scores(unit_ME, num_train)
        yield "BM25, answers", np.array(self.stored["bm25"])


def _unit(vectors_ME: np.ndarray) -> np.ndarray:
    return vectors_ME / np.linalg.norm(vectors_ME, axis=1, keepdims=True)


def probe_scores(unit_ME: Float[np.ndarray, "M E"], num_train: int) -> Float[np.ndarray, "Q N"]:
    """Returns <(C + a I)^-1 (q - mean), x - mean> for each query and row.

    C is the covariance of the rows, and a is a tenth of its mean eigenvalue.
    """
    moved_ME = unit_ME - unit_ME[:num_train].mean(axis=0)
    rows_NE, queries_QE = moved_ME[:num_train], moved_ME[num_train:]
    covariance_EE = rows_NE.T @ rows_NE / num_train
    ridge = RIDGE * np.trace(covariance_EE) / len(covariance_EE)
    direction_EQ = np.linalg.solve(covariance_EE + ridge * np.eye(len(covariance_EE)), queries_QE.T)
    return (rows_NE @ direction_EQ).T


def found_f1(score_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the F1 of the rows that the gap rule finds; 0 if it finds none."""
    hits, number = count_found(score_N, is_target_N)
    return 2 * hits / (number + int(is_target_N.sum()))


def count_found(
    score_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]
) -> tuple[int, int]:
    """Returns how many targets the gap rule finds, and how many rows."""
    number = find_cut(score_N).num_forget
    return int(is_target_N[np.argsort(-score_N, kind="stable")[:number]].sum()), int(number)


def read_runs(folder: pathlib.Path) -> Iterator[Run]:
    """Yields the runs that measure.py has stored in a folder.

    Rows that are cut before their answer are left out, as in a trace.
    """
    for path in sorted(folder.glob("*.json")):
        stored = read_json(path)
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            found = dict(arrays)
        is_kept_M = found["state last/all"].any(axis=1)
        is_kept_N = is_kept_M[: len(stored["labels"])]
        for name, array in found.items():
            found[name] = array[is_kept_M]
            if name.startswith("gram"):
                found[name] = found[name][:, is_kept_M]
        for name in ("labels", "sources"):
            stored[name] = np.array(stored[name])[is_kept_N]
        stored["bm25"] = np.array(stored["bm25"])[:, is_kept_N]
        yield Run(path.stem, found, stored)


def measure_cells(run: Run) -> Iterator[dict[str, Any]]:
    """Yields an entry for each behavior of a run and candidate."""
    scores = dict(run.scores())
    for behavior in run.behaviors():
        is_target_N, asked = run.labels == behavior, run.asked(behavior)
        for name, score_QN in scores.items():
            own_QN = score_QN[asked]
            yield {
                "run": run.name,
                "behavior": behavior,
                "candidate": name,
                "targets": int(is_target_N.sum()),
                "single": [round(auprc(one_N, is_target_N), 4) for one_N in own_QN],
                "set": round(auprc(own_QN.mean(axis=0), is_target_N), 4),
                "f1": [round(found_f1(one_N, is_target_N), 4) for one_N in own_QN],
            }


def count_best(run: Run) -> dict[str, Any]:
    """Returns the shares of planted rows and of each source in the best rows of single queries.

    As many rows are the best as are planted.
    """
    (behavior,) = run.behaviors()
    is_target_N = run.labels == behavior
    kinds = np.where(is_target_N, "planted", run.stored["sources"])
    found = {}
    for name, score_QN in run.scores():
        best_QM = np.argsort(-score_QN[run.asked(behavior)], axis=1)[:, : is_target_N.sum()]
        share = {kind: float((kinds[best_QM] == kind).mean()) for kind in np.unique(kinds)}
        found[name] = {kind: round(value, 4) for kind, value in share.items()}
    return {"run": run.name, "behavior": behavior, "best": found}


def describe_cell(run: Run, behavior: str) -> dict[str, Any]:
    """Returns medians over the planted rows and over all others of the fields of measure.py."""
    labels = run.labels
    fields_NF = run.arrays["fields"][: len(labels)]
    parts = {"planted": labels == behavior, "others": labels != behavior}
    return {"run": run.name, "behavior": behavior} | {
        part: {
            name: float(np.round(np.median(column_N), 4))
            for name, column_N in zip(fields_of(run.losses), fields_NF[is_part_N].T, strict=True)
        }
        for part, is_part_N in parts.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The folder of measure.py."""

    out: str = setting("runs/which_gradient", "Where measure.py put products and answers.")


def main(options: Options) -> None:
    """Writes results.json."""
    path, cells, rows, best = HERE / "results.json", [], [], []
    for run in read_runs(pathlib.Path(options.out)):
        cells += measure_cells(run)
        rows += [describe_cell(run, behavior) for behavior in run.behaviors()]
        best += [count_best(run)] if len(np.unique(run.stored["sources"])) > 2 else []
    kept = read_json(path).get("costs", {}) if path.is_file() else {}
    write_json(path, {"cells": cells, "rows": rows, "best": best, "costs": kept})


if __name__ == "__main__":
    command.start(main, Options())
