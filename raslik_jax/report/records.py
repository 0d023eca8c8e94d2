"""The numbers of stored runs: one record per model, with its values by metric."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.evaluate.metrics import METRICS
from raslik_jax.evaluate.rates import Interval
from raslik_jax.evaluate.summary import MethodEntry, Metrics
from raslik_jax.evaluate.verdict import DEFINITIONS
from raslik_jax.report.names import REFERENCES


class Model(NamedTuple):
    """One model of a run, or the same model of several seeds.

    Attributes:
      strategy: whose sets it unlearned; a key of REFERENCES for a model before unlearning, which
        has no algorithm.
      epochs: after which, one for each run.
      values: by metric, a value for each run that has it: a number, an interval, a flag or a word.
        Metrics are paths in an entry of metrics.json: "forget", "perplexity/held-out".
    """

    strategy: str
    algorithm: str
    epochs: tuple[int, ...]
    values: dict[str, list[Any]]

    def value(self, metric: str) -> Any:
        """Returns the value of the first run that has it, of an interval the mean, or None."""
        found = next(iter(self.values.get(metric, ())), None)
        return found["mean"] if isinstance(found, dict) else found

    def intervals(self, metric: str) -> list[Interval]:
        """Returns the value of each run with its interval; of a bare number it has no width."""
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
        """Returns the only interval, or the spread of several seeds."""
        found = self.intervals(metric)
        return found[0] if len(found) == 1 else self.spread(metric)

    @property
    def num_damaged(self) -> int:
        """In how many runs it was judged damaged."""
        return list(self.values.get("judgment/verdict", ())).count("damaged")


def is_probed(settings: Mapping[str, Any]) -> bool:
    """Returns whether the last epoch of these settings is the step that probes chose."""
    return settings.get("unlearn", {}).get("probe", {}).get("stop", "never") != "never"


def make_model(strategy: str, algorithm: str, *entries: Mapping[str, Any]) -> Model:
    """Returns a model from its entries of values by metric, one of each run."""
    values: dict[str, list[Any]] = {}
    for entry in entries:
        for metric, value in _flatten(entry):
            values.setdefault(metric, []).append(value)
    return Model(strategy, algorithm, tuple(values.get("epoch", ())), values)


def _flatten(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and value of everything in an entry that was measured."""
    for key, value in entry.items():
        if isinstance(value, Mapping) and not value.keys() >= {"mean", "low", "high"}:
            yield from _flatten(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}", "; ".join(value) if isinstance(value, list) else value


def last_epochs(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Returns the entries of the last epoch of each strategy and algorithm, in their order."""
    last: dict[tuple[str, str], int] = {}
    for entry in methods:
        name = entry["algorithm"], entry["strategy"]
        last[name] = max(entry["epoch"], last.get(name, 0))
    return [e for e in methods if e["epoch"] == last[e["algorithm"], e["strategy"]]]


def has_steps(metrics: Metrics) -> bool:
    """Returns whether some method was measured after several epochs: chosen steps stand alone."""
    return len(last_epochs(metrics["methods"])) < len(metrics["methods"])


def collect_models(runs: Sequence[Metrics], *, is_last: bool = True) -> list[Model]:
    """Returns the models of one run, or of several seeds joined, in the order of the first run.

    Those before unlearning that all runs have come first. Methods have what their strategy
    retrieved as "retrieval/...".

    Args:
      runs: the metrics of each seed, all with the same methods.
      is_last: only the last epoch of each method; otherwise each epoch is a model of its own.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    if not runs:
        raise ValueError("a table must have metrics of at least one run, got none: name runs")
    found: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        for name in REFERENCES:
            if name in run:
                found.setdefault((name, "", 0), []).append(run[name])  # type: ignore[literal-required]
        for entry in last_epochs(run["methods"]) if is_last else run["methods"]:
            strategy = entry["strategy"]
            key = strategy, entry["algorithm"], 0 if is_last else entry["epoch"]
            retrieved = run["retrieval"].get(strategy)
            found.setdefault(key, []).append({**entry, "retrieval": retrieved})
        names = [{(e["algorithm"], e["strategy"]) for e in r["methods"]} for r in (runs[0], run)]
        if names[0] != names[1]:
            raise ValueError(
                f"the runs of a table must have the same methods, got others in {run['name']!r} "
                f"with seed {run['seed']} than in {runs[0]['name']!r} with seed "
                f"{runs[0]['seed']}: join like with like"
            )
    return [
        make_model(strategy, algorithm, *entries)
        for (strategy, algorithm, _), entries in found.items()
        if len(entries) == len(runs)
    ]
