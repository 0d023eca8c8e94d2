"""The tables of a run and of several seeds: declared columns over the models of metrics.json."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from raslik_jax.evaluate import metrics as metrics_lib
from raslik_jax.evaluate import stopping
from raslik_jax.evaluate.metrics import METRICS
from raslik_jax.evaluate.summary import BASELINE, Metrics
from raslik_jax.evaluate.verdict import SETS, Progress
from raslik_jax.report.names import algorithm_name, strategy_name
from raslik_jax.report.notes import write_notes
from raslik_jax.report.tables import NOT_KNOWN, Column, Table, format_interval, format_number, word
from raslik_jax.report.tidy import Model, collect_models, is_probed, make_model
from raslik_jax.train.objectives import OBJECTIVES


class Field(NamedTuple):
    """A declared column; a table has it if some model has one of its metrics.

    Attributes:
      title: its heading.
      metrics: the metrics that it shows.
      show: function from a model that has one of them to the cell.
      align: the alignment of its cells.
    """

    title: str
    metrics: tuple[str, ...]
    show: Callable[[Model], str]
    align: Literal["left", "right"] = "left"

    def is_known(self, model: Model) -> bool:
        """Returns whether a model has a value to show."""
        return any(model.values.get(metric) for metric in self.metrics)


def fields_of(table: str, *, is_spread: bool = False) -> list[Field]:
    """Returns the columns that metrics have in a table (a name in `Metric.columns`).

    Metrics of one title share their column. If it `is_spread`, a cell has the mean over seeds with
    the smallest and the largest value in place of the interval over queries.
    """
    titles: dict[str, dict[str, metrics_lib.Column]] = {}
    for name, metric in METRICS.items():
        if table in metric.columns:
            titles.setdefault(metric.columns[table].title, {})[name] = metric.columns[table]
    return [field_of(title, columns, is_spread=is_spread) for title, columns in titles.items()]


def field_of(
    title: str, columns: Mapping[str, metrics_lib.Column], *, is_spread: bool = False
) -> Field:
    """Returns the column that shows some metrics; see `fields_of`."""
    align: Literal["left", "right"] = "left" if any(c.ends for c in columns.values()) else "right"
    return Field(title, tuple(columns), partial(_show, columns, is_spread), align)


def _show(columns: Mapping[str, metrics_lib.Column], is_spread: bool, model: Model) -> str:
    """Returns the values that a model has, each with its interval or its spread over seeds."""
    texts = []
    for name, column in columns.items():
        if values := model.values.get(name):
            entry = model.spread(name) if is_spread else model.intervals(name)[0]
            mean: Any = entry["mean"]
            text = mean if isinstance(mean, str) else format_number(mean, column.spec)
            if column.ends:
                text = format_interval(entry, column.spec, column.ends)
            is_partial = is_spread and len(values) < len(model.epochs)
            texts.append(text + (f" ({len(values)} runs)" if is_partial else ""))
    return " / ".join(texts)


def _count(metric: str, holds: Callable[[Any], bool], model: Model) -> str:
    """Returns the number of seeds in which something holds."""
    return f"{sum(map(holds, model.values[metric]))} of {len(model.values[metric])}"


_BELOW, _CLOSER = "forget_minus_random", "is_closer"
_EPOCH = Field("Epoch", ("epoch",), lambda model: str(model.epochs[0]), "right")
_ALGORITHM = Field("Algorithm", ("algorithm",), lambda model: algorithm_name(model.algorithm))
_PARETO = Field("Pareto", ("pareto",), lambda model: word(model.value("pareto")))
_VERDICT = "judgment/verdict", "judgment/reasons"
_JUDGMENT = Field("Judgment", _VERDICT, lambda model: ": ".join(map(model.value, _VERDICT)))
_STILL = Field(
    "Prompts that\nstill show it",
    ("prompts/still",),
    lambda m: f"{m.value('prompts/still')} of {m.value('prompts/of')}",
    "right",
)
_DISTANCE = fields_of("distance")


def _lies_below(interval: Mapping[str, float]) -> bool:
    """Returns whether an interval lies below zero; over one query it has no width."""
    return interval["low"] < interval["high"] < 0


_SEEDS = (
    Field("Pareto", ("pareto",), partial(_count, "pareto", bool), "right"),
    Field("Below\nRandom", (_BELOW,), partial(_count, _BELOW, _lies_below), "right"),
    Field("Closer", (_CLOSER,), partial(_count, _CLOSER, bool), "right"),
)
_JUDGED = Field("Judged", ("judgment/verdict",), lambda model: model.judged())


def make_table(
    models: Sequence[Model],
    fields: Sequence[Field],
    notes: tuple[str, ...],
    *,
    name: str = "Model",
    heading: Callable[[str], str] | None = algorithm_name,
    is_marked: bool = True,
    is_full: bool = False,
) -> Table:
    """Returns the table of some models headed by algorithm; the damaged ones are marked.

    Columns without any value are left out unless it `is_full`.
    """
    shown = [field for field in fields if is_full or any(map(field.is_known, models))]
    rows: list[tuple[str, ...] | str] = []
    order = [model.algorithm if heading else "" for model in models]
    pairs = sorted(zip(order, models, strict=True), key=lambda pair: order.index(pair[0]))
    for algorithm, members in itertools.groupby(pairs, key=lambda pair: pair[0]):
        rows += [heading(algorithm)] if heading and algorithm else []
        for _, model in members:
            mark = " †" if is_marked and model.num_damaged else ""
            cells = (f.show(model) if f.is_known(model) else NOT_KNOWN for f in shown)
            rows.append((strategy_name(model.strategy) + mark, *cells))
    columns = (Column(name), *(Column(field.title, field.align) for field in shown))
    return Table(columns, tuple(rows), notes)


def _epoch_of(metrics: Metrics) -> tuple[Field, ...]:
    """Returns the column of epochs; no column if probes chose the kept step."""
    return () if is_probed(metrics["settings"]) else (_EPOCH,)


def _methods(models: Sequence[Model]) -> list[Model]:
    return [model for model in models if model.algorithm]


def results_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table:
    """Returns the result table of a run: fine-tuned, backbone, and every method by its algorithm.

    Without F and R the judgment takes their place.
    """
    models = collect_models([metrics], is_last=epochs == "last")
    methods, is_chosen = _methods(models), bool(metrics.get("chosen"))
    epoch = _epoch_of(metrics) if epochs == "all" or is_chosen else ()
    fields = [*epoch, *fields_of("results"), _PARETO]
    if metrics["finetuned"]["euclidean"] is None:
        fields.append(_JUDGMENT)

    def heading(algorithm: str) -> str:
        if algorithm in OBJECTIVES and OBJECTIVES[algorithm].retrains:
            return algorithm_name(algorithm)
        if is_probed(metrics["settings"], algorithm):
            return f"{algorithm_name(algorithm)}, at the step that its probes chose"
        if epochs == "all" or is_probed(metrics["settings"]):
            return algorithm_name(algorithm)
        if is_chosen:
            return f"{algorithm_name(algorithm)}, at the chosen learning rates"
        after = sorted({m.epochs[0] for m in methods if m.algorithm == algorithm})
        return f"{algorithm_name(algorithm)}, after epoch {' and '.join(map(str, after))}"

    notes = write_notes("results", metrics=metrics, methods=methods)
    return make_table(models, fields, notes, heading=heading)


def checks_table(metrics: Metrics) -> Table:
    """Returns the table that separates forgetting from damage: the judgment and its basis."""
    judged = [e["judgment"]["inputs"] for e in metrics["methods"] if "judgment" in e]
    inputs = list(dict.fromkeys(itertools.chain.from_iterable(judged)))
    fields = (_ALGORITHM, *_epoch_of(metrics), *fields_of("checks"), _JUDGMENT)
    has_left = any(one.get("left") for one in metrics["methods"])
    notes = write_notes("checks", inputs=inputs, has_left=has_left)
    return make_table(collect_models([metrics]), fields, notes, heading=None)


def measured_table(metrics: Metrics, group: str, notes: Any = write_notes) -> Table | None:
    """Returns the metrics of one group for every model after its last epoch; None without any."""
    if not (found := metrics["finetuned"].get(group)):
        return None
    fields = (*_epoch_of(metrics), *fields_of(group))
    return make_table(collect_models([metrics]), fields, notes(group, found=found))


def retrained_table(metrics: Metrics) -> Table | None:
    """Returns the table of the models' distances to the retrained one; None without one."""
    models = [m for m in collect_models([metrics]) if any(f.is_known(m) for f in _DISTANCE)]
    fields = (_ALGORITHM, _STILL, *_DISTANCE)
    has_floor = any(m.algorithm in OBJECTIVES and OBJECTIVES[m.algorithm].repeats for m in models)
    notes = write_notes("retrained", has_floor=has_floor)
    return make_table(models, fields, notes, heading=None) if models else None


def retrieval_table(metrics: Metrics) -> Table:
    """Returns the table of each strategy's rows and their match with labels, if any."""
    found = metrics["retrieval"]
    models = [make_model(name, "", {"retrieval": entry}) for name, entry in found.items()]
    base_rates = [entry.get("base_rate") for entry in found.values()]
    notes = write_notes("retrieval", metrics=metrics, strategies=models, base_rates=base_rates)
    return make_table(models, fields_of("retrieval"), notes, name="Strategy", is_full=True)


def probes_table(metrics: Metrics) -> Table | None:
    """Returns the table of the probes of every unlearning, in nats a token; None without any.

    The last columns say how many rows of the sets to forget are gone.
    """
    unlearned = metrics.get("probes", ())
    sets = [name for name in stopping.SETS if any(name in one["rows"] for one in unlearned)]
    counted = [name for name in stopping.FORGOTTEN if name in sets]
    rows: list[tuple[str, ...] | str] = []

    def add(name: str, levels: Mapping[str, float], gone: Mapping[str, Progress]) -> None:
        cells = [f"{levels[kind]:.2f}" if kind in levels else NOT_KNOWN for kind in sets]
        found = (gone.get(kind) for kind in counted)
        cells += (f"{one['gone']} of {one['of']}" if one else NOT_KNOWN for one in found)
        rows.append((name, *cells))

    for one in unlearned:
        end = f", {stopping.SAID[one['end']]}" if one.get("end") else ""
        kept = f": step {one['kept']} is kept{end}" if "kept" in one else ""
        rows.append(f"{strategy_name(one['strategy'])} {algorithm_name(one['algorithm'])}{kept}")
        if "backbone" in metrics:  # otherwise it is the model before unlearning
            add("base model", one["backbone"], {})
        for probe in one["probes"]:
            add(f"step {probe['step']}", probe["levels"], probe["gone"])
    titles = [*(SETS[name] for name in sets), *(f"{SETS[name]},\ngone" for name in counted)]
    columns = (Column("Model"), *(Column(name, "right") for name in titles))
    return Table(columns, tuple(rows), write_notes("probes")) if unlearned else None


def validation_table(found: Mapping[str, Any]) -> Table:
    """Returns QLD and LDS of every ranking: how well scores predict retraining without rows."""
    qld, lds, rows = found.get("qld", {}), found.get("lds", {}), []
    for name, title in found["titles"].items():
        cells = [
            format_interval(part.get(name), spec, ends)
            for part, spec, ends in (
                (qld.get("rise", {}), "+.3f", "+.3f"),
                (qld.get("over_nothing", {}), "+.3f", "+.3f"),
                (lds.get("score", {}), ".3f", ".2f"),
            )
        ]
        rows.append((title, *cells))
    heads = ("Ranking", "QLD", "Rise over\nnothing removed", "LDS")
    notes = write_notes("validation", found=found, qld=qld, lds=lds)
    kept = [0, *(n for n in (1, 2, 3) if any(row[n] != NOT_KNOWN for row in rows))]
    columns = tuple(Column(heads[n]) for n in kept)
    return Table(columns, tuple(tuple(row[n] for n in kept) for row in rows), notes)


# The tables behind the results of a run by title.
DETAILS: dict[str, Callable[[Metrics], Table | None]] = {
    "Forgetting or damage": checks_table,
    "Probes while unlearning": probes_table,
    "Perplexity": partial(measured_table, group="perplexity"),
}


def details(metrics: Metrics) -> dict[str, Table]:
    """Returns the tables of `DETAILS` that a run has."""
    return {title: table for title, make in DETAILS.items() if (table := make(metrics))}


def seeds_table(runs: Sequence[Metrics]) -> Table:
    """Returns the last epoch of several seeds of one experiment as mean [smallest, largest].

    "Below Random" counts the seeds whose whole interval of F minus F of Random is below zero.
    "closer" counts those with a smaller Euclidean distance than Random, if all seeds have both.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    models = collect_models(runs)
    random = {m.algorithm: m.values.get("euclidean", ()) for m in models if m.strategy == BASELINE}
    for model in models:
        if model.strategy != BASELINE and model.algorithm in random:
            own, others = model.values.get("euclidean", ()), random[model.algorithm]
            # A seed without a distance has no place in these lists: what is left makes no pairs.
            if len(own) == len(others) == len(runs):
                model.values[_CLOSER] = [a < b for a, b in zip(own, others, strict=True)]
    fields = (*fields_of("seeds", is_spread=True), *_SEEDS)
    notes = write_notes("seeds", runs=runs, methods=_methods(models))
    return make_table(models, fields, notes, is_marked=False)


def seeds_checks_table(runs: Sequence[Metrics]) -> Table:
    """Returns the basis of the rates over several seeds in the same form.

    If some seeds did not measure a value, the cell has the number of seeds.
    """
    fields = (*fields_of("seeds_checks", is_spread=True), _JUDGED)
    notes = write_notes("seeds_checks", runs=runs)
    return make_table(collect_models(runs), fields, notes, is_marked=False)


def tables_of(runs: Sequence[Metrics]) -> list[Table]:
    """Returns the tables of one run with intervals over queries, of several with those of seeds."""
    if len(runs) > 1:
        return [seeds_table(runs), seeds_checks_table(runs)]
    return [retrieval_table(runs[0]), results_table(runs[0]), *details(runs[0]).values()]
