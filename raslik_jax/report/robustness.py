"""Whether the behavior stays forgotten, by the measures of robustness: sentences and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.evaluate.metrics import Column as MetricColumn
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import Compared, Found, returned
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, strategy_name
from raslik_jax.report.results import field_of, make_table
from raslik_jax.report.tables import Table, word
from raslik_jax.report.tidy import make_model

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
    models = [
        make_model(entry["condition"], title, entry)
        for title, part in parts.items()
        for entry in part
    ]
    columns = {**record.columns, _ALSO: _ALSO_COLUMN}
    fields = [field_of(column.title, {key: column}) for key, column in columns.items()]
    return make_table(models, fields, (record.note,), heading=str)


def _with_retrained(name: str, found: Compared) -> Found:
    """Returns the results of a model, and whether its returns also occur after retraining."""
    if not (ROBUSTNESS[name].returns and "retrained" in found):
        return found["now"]
    back = {condition: word(also) for condition, also in returned(found).items()}
    return [{**entry, _ALSO: back.get(entry["condition"])} for entry in found["now"]]
