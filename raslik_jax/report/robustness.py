"""Whether the behavior stays forgotten, by the measures of robustness: sentences and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.evaluate.metrics import Column as MetricColumn
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import Compared, Found, returned
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, strategy_name
from raslik_jax.report.tables import NOT_KNOWN, Column, Table, format_interval, format_number

# The models before, in the order of a table.
_BEFORE = ("finetuned", "backbone")
# Of what returns in a model, where the run has one that was trained without the rows.
_ALSO, _ALSO_COLUMN = "also", MetricColumn("Returns also\nafter retraining", "")


def told(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the title of each measure with its result in words, from metrics.json."""
    return [
        (ROBUSTNESS[one["measure"]].title, ROBUSTNESS[one["measure"]].tell(one["found"]))
        for one in found
    ]


def points_of(metrics: Metrics) -> list[tuple[str, str]]:
    """Returns the results of every method in the same form, with the name if there are several."""
    found = metrics.get("robustness", ())
    is_one = len({(one["strategy"], one["algorithm"]) for one in found}) == 1
    leads = ("" if is_one else f"{_method(one)}, " for one in found)
    return [
        (lead + (title if is_one else title.lower()), text)
        for lead, (title, text) in zip(leads, told(found), strict=True)
    ]


def _method(one: Mapping[str, Any]) -> str:
    return f"{strategy_name(one['strategy'])} {algorithm_name(one['algorithm'])}"


def tables_of(metrics: Metrics) -> dict[str, Table]:
    """Returns the table of each measure by title: every model under every condition."""
    by_measure: dict[str, list[Mapping[str, Any]]] = {}
    for one in metrics.get("robustness", ()):
        by_measure.setdefault(one["measure"], []).append(one)
    return {ROBUSTNESS[name].title: _table(name, found) for name, found in by_measure.items()}


def _table(name: str, found: Sequence[Mapping[str, Any]]) -> Table:
    record = ROBUSTNESS[name]
    strategies = {one["strategy"]: one["found"] for one in found}
    parts = {_method(one): _with_retrained(name, one["found"]) for one in found}
    for strategy, models in strategies.items():
        rows_of = f", by the rows of {strategy_name(strategy)}" if len(strategies) > 1 else ""
        parts |= {strategy_name(m) + rows_of: models[m] for m in _BEFORE if m in models}
    entries = [entry for part in parts.values() for entry in part]
    columns = {
        key: column
        for key, column in {**record.columns, _ALSO: _ALSO_COLUMN}.items()
        if any(entry.get(key) is not None for entry in entries)
    }
    rows: list[tuple[str, ...] | str] = []
    for title, part in parts.items():
        rows.append(title)
        rows += [
            (entry["condition"], *(_cell(entry.get(key), columns[key]) for key in columns))
            for entry in part
        ]
    heads = (Column(c.title, "left" if c.ends else "right") for c in columns.values())
    return Table((Column("Model"), *heads), tuple(rows), (record.note,))


def _with_retrained(name: str, found: Compared) -> Found:
    """Returns the results of a model, and whether its returns also occur after retraining."""
    if not (ROBUSTNESS[name].returns and "retrained" in found):
        return found["now"]
    words = {True: "yes", False: "no"}
    back = {condition: words[also] for condition, also in returned(found).items()}
    return [{**entry, _ALSO: back.get(entry["condition"])} for entry in found["now"]]


def _cell(value: Any, column: MetricColumn) -> str:
    if value is None:
        return NOT_KNOWN
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return format_interval(value, column.spec, column.ends)  # type: ignore[arg-type]
    return format_number(value, column.spec)
