"""Makes the tables of docs/studies/quickstart.md from reported.json."""

import pathlib
from collections.abc import Callable, Mapping

from experiments.studies.reports import markdown_table, read_reported
from raslik_jax.base.files import read_json

HERE = pathlib.Path(__file__).resolve().parent
_SHOWN = ("Model", "F, forget rate", "R, retain rate", "Non-SF, target", "Precision")


def summary_table() -> str:
    """Returns the columns of the page."""
    table = read_json(HERE / "reported.json")["tables"]["three seeds"]
    places = [table["head"].index(title) for title in _SHOWN]
    return markdown_table(_SHOWN, [[row[place] for place in places] for row in table["rows"]])


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {"summary": summary_table, **read_reported(HERE)}
