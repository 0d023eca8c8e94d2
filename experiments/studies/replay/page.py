"""Makes the tables of docs/studies/replay.md from the stored results."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.studies.reports import markdown_table
from raslik_jax.evaluate import counterfactual
from raslik_jax.report.tables import format_interval

_SIZES, _LESS = (10, 1), ("0.01", "0.1", "0.5", "1.0")
RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
_MODELS = {"toy": "toy", "smollm2": "SmolLM2", "smollm2 bfloat16": "SmolLM2, bfloat16"}
_MODELS |= {"smollm2 seed 1": "SmolLM2, seed 1"}
_METHODS = {"replay": "replay", "raslik": "RASLIK's scores", "bm25": "BM25 with answers"}
_METHODS |= {"ekfac": "EK-FAC (bergson)", "unlearned": "unlearned answer"}


def read_results() -> Mapping[str, Any]:
    """Returns the stored results by case."""
    found: Mapping[str, Any] = json.loads(RESULTS.read_text())
    return found


def correlation(case: str, size: int, method: str) -> str:
    """Returns the rank correlation of a method's predicted and the measured rise of the loss."""
    return interval_of(read_results()[case][f"sets of {size}"], method)


def interval_of(part: Mapping[str, Any], method: str) -> str:
    """Returns the mean correlation over the answers of sets of one size, with its interval."""
    return format_interval(counterfactual.lds(-np.array(part[method]), np.array(part["change"])))


def sets_table() -> str:
    """Returns how the predicted and the measured rise of the loss correlate over sets of rows."""
    rows = []
    for case, found in read_results().items():
        for size in (size for size in _SIZES if f"sets of {size}" in found):
            for name, title in _METHODS.items():
                if name in found[f"sets of {size}"]:
                    rows.append([_MODELS[case], str(size), title, correlation(case, size, name)])
    return markdown_table(["model", "rows removed", "prediction", "rank correlation"], rows)


def top_table() -> str:
    """Returns the rise of each answer's loss without the best rows of each method (QLD)."""
    rows = []
    for case, found in read_results().items():
        for name, title in _METHODS.items():
            if f"top {name}" not in found:
                continue
            rise_Q, replay_Q = (np.array(found[f"top {one}"]) for one in (name, "replay"))
            more = counterfactual.rise(replay_Q[:, None], rise_Q[:, None])  # over answers
            each = ", ".join(f"{one:.3f}" for one in rise_Q)
            less = "-" if name == "replay" else format_interval(more)
            model = f"{_MODELS[case]}, {found['number']} rows"
            rows.append([model, title, f"{np.mean(rise_Q):.3f}", each, less])
    head = ["model", "rows removed", "rise of the loss", "by answer", "replay's less this"]
    return markdown_table(head, rows)


def effects_table() -> str:
    """Returns the rise of the mean loss of the queries that effects predict and trainings have."""
    rows = []
    for case, found in read_results().items():
        for group in ("behavior", "random"):
            if group not in found:
                continue
            slope = np.mean(found[group]["slope"])
            cells = [f"{np.mean(found[group]['change'][h]) / float(h):+.4f}" for h in _LESS]
            rows.append([_MODELS[case], group, f"{slope:+.4f}", *cells])
    head = ["model", "rows", "predicted", *(f"h = {float(h):g}" for h in _LESS)]
    return markdown_table(head, rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    found = {"sets": sets_table, "top": top_table, "effects": effects_table}
    has_top = any("top replay" in one for one in read_results().values())
    return {name: table for name, table in found.items() if name != "top" or has_top}
