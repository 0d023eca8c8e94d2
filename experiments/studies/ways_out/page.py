"""Makes the tables of docs/studies/ways_out.md from the stored results."""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.studies.reports import markdown_table

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
# The models of a cell in the order of the tables: title, names in the answers and in the distances.
_MODELS = (
    ("before", "before", ""),
    ("unlearned", "unlearn", "cap_klr"),
    ("retrained", "retrain", "retrain_again"),  # the distance between two trainings
)
_PARTS = ("trace", "unlearn", "retrain")


def _cells() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def _by_case() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, one in _cells().items():
        found.setdefault(name.split("/")[0], []).append(one)
    return found


def _answers(cells: Sequence[Any], way: str) -> list[str]:
    """Returns what models say to held-out prompts: counts summed over cells, else means."""
    ones = [cell[way] for cell in cells]
    total = {name: sum(one[name] for one in ones) for name in ones[0]}
    return [
        f"{total['shown']} of {total['prompts']}",
        f"{total['normal_same']} of {total['normal_prompts']}",
        f"{total['normal_rouge'] / len(ones):.2f}",
        f"{total['normal_words'] / len(ones):.1f}",
    ]


def _distances(cells: Sequence[Any], model: str) -> list[str]:
    """Returns the mean KL to the retrained model in nats a token, and in noise floors."""
    found = [
        [cell["distance"][name][kind]["kl"]["mean"] for cell in cells]
        for name, kind in ((model, "target"), (model, "normal"), ("retrain_again", "normal"))
    ]
    floors = [normal / floor for normal, floor in zip(*found[1:], strict=True)]
    low, high = min(floors), max(floors)
    spread = f"{low:.1f}" if len(floors) == 1 else f"{low:.1f} to {high:.1f}"
    return [*(f"{statistics.mean(one):.3f}" for one in found[:2]), spread]


def _rows(named: Iterable[tuple[str, Sequence[Any]]]) -> Iterator[list[str]]:
    for name, cells in named:
        measured = [cell for cell in cells if "finding" not in cell]
        if not measured:
            yield [name, cells[0]["finding"], *[""] * 7]
            continue
        for title, way, model in _MODELS:
            yield [name, title, *_answers(measured, way), *_distances(measured, model)]


_HEAD = ["case", "model", "shows the behavior", "other answers equal", "ROUGE-L", "words"]
_HEAD += ["KL, target", "KL, normal", "floors"]


def cases_table() -> str:
    """Returns what each model says and how far it is from the retrained one, over the seeds."""
    found = _by_case().items()
    return markdown_table(_HEAD, [*_rows((f"{n} ({len(ones)})", ones) for n, ones in found)])


def cells_table() -> str:
    """Returns the same for each case and seed."""
    return markdown_table(_HEAD, [*_rows((name, [one]) for name, one in _cells().items())])


def costs_table() -> str:
    """Returns the median processor seconds and the highest peak memory of each command."""
    rows = []
    for name, cells in _by_case().items():
        took = [cell["commands"] for cell in cells if "finding" not in cell]
        if not took:
            continue
        parts = [[one[part] for one in took if part in one] for part in _PARTS]
        rows.append(
            [
                name,
                *(
                    f"{statistics.median(one['cpu_seconds'] for one in part):.0f} s, "
                    f"{max(one['gigabytes'] for one in part):.1f} GB"
                    for part in parts
                ),
            ]
        )
    return markdown_table(["case", "trace", "unlearn", "retrain twice"], rows)


# In the order of the table: titles, and names in the curves.
_TRAINED = {"unlearned": "cap_klr", "retrained": "retrain", "base": "backbone"}


def relearn_table() -> str:
    """Returns nats a token of target answers along steps on forgotten rows, by case and model."""
    rows = []
    for name, cell in _cells().items():
        if "relearn" in cell:
            curves = [cell["relearn"][model] for model in _TRAINED.values()]
            rows.append([name, *(", ".join(f"{n:.2f}" for n in one.values()) for one in curves)])
    return markdown_table(["case/seed", *_TRAINED], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "cases": cases_table,
        "costs": costs_table,
        "relearning": relearn_table,
        "cells": cells_table,
    }
