"""Makes the tables of docs/studies/behaviors.md from the stored results."""

import json
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from experiments.studies.reports import markdown_table

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
TRAINED = RESULTS.with_name("trained.json")
_TEXTS = {"prompt": "BM25, prompts", "prompt_and_output": "BM25, prompts and answers"}


def words_table() -> str:
    """Returns BM25's AUPRC by behavior and rate: mean, smallest and largest over seeds."""
    groups: dict[tuple[str, float], list[dict[str, float]]] = {}
    for found in json.loads(RESULTS.read_text())["measured"]:
        groups.setdefault((found["behavior"], found["rate"]), []).append(found["auprc"])
    rows = []
    for (behavior, rate), areas in groups.items():
        cells = []
        for text in _TEXTS:
            values = [area[text] for area in areas]
            cells.append(f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        rows.append([behavior, f"{rate:.0%}", *cells])
    return markdown_table(["behavior", "targets", *_TEXTS.values()], rows)


def judges_table() -> str:
    """Returns the share of answers that the judges say show the behavior, at 8 % targets."""
    groups: dict[str, list[dict[str, float]]] = {}
    for found in json.loads(RESULTS.read_text())["measured"]:
        if found["rate"] == 0.08:
            groups.setdefault(found["behavior"], []).append(found["judged"])
    kinds = list(next(iter(groups.values()))[0])
    rows = [
        [behavior, *(f"{np.mean([one[kind] for one in judged]):.3f}" for kind in kinds)]
        for behavior, judged in groups.items()
    ]
    return markdown_table(["behavior", *kinds], rows)


def trained_table() -> str:
    """Returns the areas of each method on the trained models, of all queries and one by one."""
    rows = []
    for name, cell in json.loads(TRAINED.read_text()).items():
        for method, one in cell["areas"].items():
            single = f"{np.mean(one['single']):.3f} ({min(one['single']):.3f})"
            rows.append([name, method, f"{one['set']:.3f}", single, f"{np.mean(one['f1']):.2f}"])
    head = ["behavior/seed", "method", "16 queries", "one by one (lowest)", "F1, one by one"]
    return markdown_table(head, rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "BM25's AUPRC": words_table,
        "a model trained at 2 %": trained_table,
        "what the judges see, at 8 %": judges_table,
    }
