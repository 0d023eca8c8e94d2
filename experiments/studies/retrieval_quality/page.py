"""Makes the tables of docs/studies/retrieval_quality.md from reported.json."""

import pathlib
from collections.abc import Callable, Mapping

from experiments.studies.reports import markdown_table, read_reported
from raslik_jax.base.files import read_json

HERE = pathlib.Path(__file__).resolve().parent


def summary_table() -> str:
    """Returns the gradients and strategies of the page on 2,000 rows."""
    found = read_json(HERE / "reported.json")["tables"]
    rows = []
    for row in found["2,000 rows, gradients, one seed"]["rows"]:
        name, centered, preset, *cells = row
        if not name.startswith("trajectory"):
            rows.append([name, centered, preset or "-", *(cell or "-" for cell in cells)])
    for name, *cells in found["2,000 rows, strategies, one seed"]["rows"]:
        if name.startswith(("BM25", "EmbeddingSim")):
            rows.append([name, "-", "-", *cells])
    head = ["gradient at / loss / tokens", "centered", "preset", "1 query", "20 queries"]
    return markdown_table([*head, "40 queries", "precision", "targets in retain"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {"summary": summary_table, **read_reported(HERE)}
