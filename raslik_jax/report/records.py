"""The numbers of stored runs as one tidy list of records, and as models with values by metric."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.evaluate.judgment import VERDICTS
from raslik_jax.evaluate.metrics import IntervalEntry
from raslik_jax.evaluate.summary import MethodEntry, Metrics

# Models before unlearning stand as strategies of no algorithm.
REFERENCES = {"finetuned": "Fine-tuned", "backbone": "Backbone"}


class Record(NamedTuple):
    """One measured value.

    Attributes:
      run: name of the run.
      seed: its seed.
      strategy: whose sets the model unlearned, or a key of REFERENCES.
      algorithm: that unlearned; empty for a model before it and for what was retrieved.
      epoch: after which; 0 where there is none.
      metric: path of the value in an entry of metrics.json: "forget", "perplexity/held-out".
      value: the value: a number (of an interval its mean), a flag or a word.
      low: lower end of its interval; None where it has none.
      high: upper end, likewise.
    """

    run: str
    seed: int
    strategy: str
    algorithm: str
    epoch: int
    metric: str
    value: Any
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> IntervalEntry:
        """The value with its ends; where it has none, the value is all three."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return IntervalEntry(mean=self.value, low=low, high=high)


class Model(NamedTuple):
    """One model of a run, or the same model of several seeds.

    Attributes:
      strategy: as in its records.
      algorithm: likewise.
      epochs: after which, one for each run.
      values: its records by metric, one for each run that has it.
    """

    strategy: str
    algorithm: str
    epochs: tuple[int, ...]
    values: Mapping[str, Sequence[Record]]

    def get(self, metric: str) -> Record | None:
        """Returns the record of the first run that has this metric."""
        return next(iter(self.values.get(metric, ())), None)

    def intervals(self, metric: str) -> list[IntervalEntry]:
        """Returns the value of each run that has this metric, with its interval."""
        return [record.interval for record in self.values.get(metric, ())]

    def verdicts(self) -> dict[str, int]:
        """Returns how many runs have each verdict, those that occur, in their order."""
        found = [record.value for record in self.values.get("judgment/verdict", ())]
        return {verdict: found.count(verdict) for verdict in VERDICTS if verdict in found}

    def num_damaged(self) -> int:
        """Returns in how many runs it was judged damaged."""
        return self.verdicts().get("damaged", 0)


def make_model(strategy: str, algorithm: str, entry: Mapping[str, Any]) -> Model:
    """Returns a model from one entry of values by metric, as metrics.json has them."""
    epoch = entry.get("epoch", 0)
    records = [Record("", 0, strategy, algorithm, epoch, *found) for found in _flatten(entry)]
    return Model(strategy, algorithm, (epoch,), {record.metric: [record] for record in records})


def read_records(metrics: Metrics) -> list[Record]:
    """Returns all values of metrics.json that belong to a model or a strategy.

    What a strategy retrieved has metrics that begin with "retrieval/".
    """
    run, seed = metrics["name"], metrics["seed"]
    entries: list[tuple[str, str, int, str, Mapping[str, Any]]] = [
        (name, "", 0, "", metrics[name])  # type: ignore[literal-required]
        for name in REFERENCES
        if name in metrics
    ]
    entries += [
        (entry["strategy"], entry["algorithm"], entry["epoch"], "", entry)
        for entry in metrics["methods"]
    ]
    entries += [(name, "", 0, "retrieval/", entry) for name, entry in metrics["retrieval"].items()]
    return [
        Record(run, seed, strategy, algorithm, epoch, prefix + metric, *values)
        for strategy, algorithm, epoch, prefix, entry in entries
        for metric, *values in _flatten(entry)
    ]


def _flatten(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields path, value and ends of everything in an entry that was measured."""
    for key, value in entry.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value.keys() >= {"mean", "low", "high"}:
            yield path, value["mean"], value["low"], value["high"]
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{path}/")
        elif value is not None:
            yield path, "; ".join(value) if isinstance(value, list) else value, None, None


def last_epochs(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Returns the entries of the last epoch of each strategy and algorithm, in their order."""
    last: dict[tuple[str, str], int] = {}
    for entry in methods:
        name = entry["algorithm"], entry["strategy"]
        last[name] = max(entry["epoch"], last.get(name, 0))
    return [e for e in methods if e["epoch"] == last[e["algorithm"], e["strategy"]]]


def collect_models(runs: Sequence[Metrics], *, is_last: bool = True) -> list[Model]:
    """Returns the models of one run, or of several seeds joined, in the order of the first run.

    Args:
      runs: the metrics of each seed, all with the same methods.
      is_last: only the last epoch of each method; otherwise each epoch is a model of its own.

    Returns:
      Those before unlearning that all runs have, then the methods, with what their strategy
      retrieved.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    if not runs:
        raise ValueError("a table must have metrics of at least one run, got none: name runs")
    found: dict[tuple[str, str, int], list[dict[str, Record]]] = {}
    for run in runs:
        if is_last:
            run = {**run, "methods": last_epochs(run["methods"])}
        values: dict[tuple[str, str, int], dict[str, Record]] = {}
        retrieved: dict[str, dict[str, Record]] = {}
        for record in read_records(run):
            if record.metric.startswith("retrieval/"):
                retrieved.setdefault(record.strategy, {})[record.metric] = record
            else:
                epoch = 0 if is_last else record.epoch
                key = record.algorithm, record.strategy, epoch
                values.setdefault(key, {})[record.metric] = record
        for key, own in values.items():
            found.setdefault(key, []).append(own | (retrieved.get(key[1], {}) if key[0] else {}))
        _check_methods(runs[0], run)
    return [
        _join(strategy, algorithm, seeds)
        for (algorithm, strategy, _), seeds in found.items()
        if len(seeds) == len(runs)
    ]


def _join(strategy: str, algorithm: str, seeds: Sequence[Mapping[str, Record]]) -> Model:
    metrics = dict.fromkeys(metric for own in seeds for metric in own)
    values = {metric: [own[metric] for own in seeds if metric in own] for metric in metrics}
    return Model(strategy, algorithm, tuple(r.value for r in values.get("epoch", ())), values)


def _check_methods(first: Metrics, run: Metrics) -> None:
    names = [
        {(e["algorithm"], e["strategy"]) for e in metrics["methods"]} for metrics in (first, run)
    ]
    if names[0] != names[1]:
        raise ValueError(
            f"the runs of a table must have the same methods, got others in {run['name']!r} with "
            f"seed {run['seed']} than in {first['name']!r} with seed {first['seed']}: join like "
            "with like"
        )
