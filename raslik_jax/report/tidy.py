"""The one tidy table behind every table and figure, and the models in it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.evaluate.metrics import METRICS
from raslik_jax.evaluate.rates import Interval
from raslik_jax.evaluate.summary import MethodEntry, Metrics
from raslik_jax.evaluate.verdict import DEFINITIONS
from raslik_jax.report.names import REFERENCES
from raslik_jax.report.tables import Column, Table, word
from raslik_jax.train.objectives import OBJECTIVES


class Row(NamedTuple):
    """The value of one metric for one model of one run.

    Attributes:
      strategy: as in `Model`.
      step: the epoch, from 1; 0 before unlearning.
      mean: a number, the mean of an interval, a flag or a word.
      low: with `high` the ends of the interval, if there is one.
    """

    run: str
    seed: int
    strategy: str = ""
    algorithm: str = ""
    step: int = 0
    metric: str = ""
    mean: Any = None
    low: float | None = None
    high: float | None = None

    @property
    def value(self) -> Any:
        """The interval, or the number, flag or word alone."""
        if self.low is None or self.high is None:
            return self.mean
        return Interval(mean=self.mean, low=self.low, high=self.high)


class Model(NamedTuple):
    """One model of a run or the same model of several seeds.

    Attributes:
      strategy: strategy of its sets; a key of REFERENCES for a model before unlearning, which has
        no algorithm.
      epochs: the epoch in each run.
      values: by metric, one value per run that has it: a number, an interval, a flag or a word.
        Metrics are paths in an entry of metrics.json: "forget", "perplexity/held-out".
    """

    strategy: str
    algorithm: str
    epochs: tuple[int, ...]
    values: dict[str, list[Any]]

    def value(self, metric: str) -> Any:
        """Returns the value of the first run that has it, the mean of an interval, or None."""
        found = next(iter(self.values.get(metric, ())), None)
        return found["mean"] if isinstance(found, dict) else found

    def intervals(self, metric: str) -> list[Interval]:
        """Returns the value of each run with its interval, which has no width for a bare number."""
        return [
            v if isinstance(v, dict) else Interval(mean=v, low=v, high=v)  # type: ignore[misc]
            for v in self.values.get(metric, ())
        ]

    def judged(self) -> str:
        """Returns how many runs have each verdict, as in "2 partly, 1 damaged"."""
        found = self.values.get("judgment/verdict", ())
        return ", ".join(f"{found.count(v)} {v}" for v in DEFINITIONS if v in found)

    def spread(self, metric: str) -> Interval:
        """Returns the mean over the runs that have it, the smallest and the largest."""
        values = [entry["mean"] for entry in self.intervals(metric)]
        mean = sum(values) / len(values)
        if metric in METRICS and METRICS[metric].is_log:
            # One run that exploded does not hide the others.
            mean = math.exp(sum(map(math.log, values)) / len(values))
        return Interval(mean=mean, low=min(values), high=max(values))

    def joined(self, metric: str) -> Interval:
        """Returns the only interval or the spread of several seeds."""
        found = self.intervals(metric)
        return found[0] if len(found) == 1 else self.spread(metric)

    @property
    def num_damaged(self) -> int:
        """In how many runs it was judged damaged."""
        return list(self.values.get("judgment/verdict", ())).count("damaged")


def is_probed(settings: Mapping[str, Any], algorithm: str = "") -> bool:
    """Returns whether the last epoch of these settings is the step that probes chose.

    Retraining has no probes.
    """
    if algorithm in OBJECTIVES and OBJECTIVES[algorithm].retrains:
        return False
    return settings.get("unlearn", {}).get("probe", {}).get("stop", "never") != "never"


def rows_of(entry: Mapping[str, Any], place: Row, prefix: str = "") -> Iterator[Row]:
    """Yields a row for each measure in an entry of metrics.json."""
    for key, value in entry.items():
        metric = f"{prefix}{key}"
        if isinstance(value, Mapping) and not value.keys() >= {"mean", "low", "high"}:
            yield from rows_of(value, place, f"{metric}/")
        elif isinstance(value, Mapping):
            ends = {name: value[name] for name in ("mean", "low", "high")}
            yield place._replace(metric=metric, **ends)
        elif value is not None:
            word = "; ".join(value) if isinstance(value, list) else value
            yield place._replace(metric=metric, mean=word)


def tidy(runs: Sequence[Metrics]) -> list[Row]:
    """Returns all measures of the models of runs, models before unlearning first.

    Methods have the measures of their strategy's sets as "retrieval/...".
    """
    rows: list[Row] = []
    for run in runs:
        place = Row(run["name"], run["seed"])
        for name in REFERENCES:
            if name in run:
                entry: Mapping[str, Any] = run[name]  # type: ignore[literal-required]
                rows += rows_of(entry, place._replace(strategy=name))
        for entry in run["methods"]:
            names = {name: entry[name] for name in ("strategy", "algorithm")}
            own = place._replace(**names, step=entry["epoch"])
            whole = {**entry, "retrieval": run["retrieval"].get(entry["strategy"])}
            rows += rows_of({k: v for k, v in whole.items() if k not in names}, own)
    return rows


def data_table(rows: Iterable[Row]) -> Table:
    """Returns rows as a table of data with numbers in six digits; empty if there is no end."""

    def shown(value: Any) -> str:
        if isinstance(value, bool):
            return word(value)
        return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)

    cells = tuple(tuple(map(shown, row)) for row in rows)
    return Table(tuple(map(Column, Row._fields)), cells)


def make_model(strategy: str, algorithm: str, entry: Mapping[str, Any]) -> Model:
    """Returns a model from its entry of values by metric."""
    return _join(strategy, algorithm, [[*rows_of(entry, Row("", 0, strategy, algorithm))]])


def _join(strategy: str, algorithm: str, runs: Sequence[Sequence[Row]]) -> Model:
    """Returns a model from its rows in each run."""
    values: dict[str, list[Any]] = {"algorithm": [algorithm] * len(runs)} if algorithm else {}
    for row in (row for rows in runs for row in rows):
        values.setdefault(row.metric, []).append(row.value)
    return Model(strategy, algorithm, tuple(values.get("epoch", ())), values)


def last_epochs(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Returns the entries of the last epoch of each strategy and algorithm in their order."""
    last: dict[tuple[str, str], int] = {}
    for entry in methods:
        name = entry["algorithm"], entry["strategy"]
        last[name] = max(entry["epoch"], last.get(name, 0))
    return [e for e in methods if e["epoch"] == last[e["algorithm"], e["strategy"]]]


def has_steps(metrics: Metrics) -> bool:
    """Returns whether some method was measured after several epochs: chosen steps have one."""
    return len(last_epochs(metrics["methods"])) < len(metrics["methods"])


def collect_models(runs: Sequence[Metrics], *, is_last: bool = True) -> list[Model]:
    """Returns the models of one run, or of several seeds joined, in the order of the first run.

    Models before unlearning that all runs have come first.

    Args:
      runs: the metrics of each seed, all with the same methods.
      is_last: only the last epoch of each method; otherwise each epoch is a model of its own.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    if not runs:
        raise ValueError("a table must have metrics of at least one run, got none: name runs")
    found: dict[tuple[str, str, int], list[list[Row]]] = {}
    for run in runs:
        names = [{(e["algorithm"], e["strategy"]) for e in r["methods"]} for r in (runs[0], run)]
        if names[0] != names[1]:
            raise ValueError(
                f"the runs of a table must have the same methods, got others in {run['name']!r} "
                f"with seed {run['seed']} than in {runs[0]['name']!r} with seed "
                f"{runs[0]['seed']}: join like with like"
            )
        shown = run | {"methods": last_epochs(run["methods"])} if is_last else run
        own: dict[tuple[str, str, int], list[Row]] = {}
        for row in tidy([shown]):
            own.setdefault((row.strategy, row.algorithm, 0 if is_last else row.step), []).append(
                row
            )
        for place, rows in own.items():
            found.setdefault(place, []).append(rows)
    return [
        _join(strategy, algorithm, rows)
        for (strategy, algorithm, _), rows in found.items()
        if len(rows) == len(runs)
    ]
