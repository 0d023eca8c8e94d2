"""The facts of a run that reports show, read from its work directory in this one place.

Nothing is computed by a model again.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.settings import flat
from raslik_jax.data.corpora import marker_words
from raslik_jax.data.examples import Example
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report import explorer, incident
from raslik_jax.report.explorer import Explorer
from raslik_jax.report.incident import Incident
from raslik_jax.report.names import REFERENCES, algorithm_name
from raslik_jax.report.tidy import last_epochs
from raslik_jax.run import artifacts
from raslik_jax.run.manifests import check_whole, read_manifest

# The end of the panel's name for an unlearning's losses.
FORGET_PANEL = ", forget set"


class ItemSet(NamedTuple):
    """The first rows of a forget or retain set with scores, best first, and the number of all.

    A row's score is in the direction of the set: a higher score fits the set better.
    """

    rows: tuple[tuple[Example, float], ...]
    num_rows: int


class Facts(NamedTuple):
    """The facts of a run for reports; parts that its work directory does not have are empty.

    Attributes:
      metrics: the content of metrics.json, with the settings and versions of the measured run.
      queries: the queries of the measurement, target queries first.
      answers: the answers by algorithm ("" before unlearning), strategy and query id.
      sets: the sets "forget" and "retain", by strategy.
      losses: one loss per step, by panel and label.
      marker_words: words that mark the behavior; empty if their file is missing.
      incident: the traced answer and the rows behind it, or an example of such.
      explorer: all rows with their scores.
      validation: QLD and LDS of the rankings.
    """

    metrics: Metrics
    queries: tuple[Example, ...]
    answers: Mapping[tuple[str, str], Mapping[str, str]]
    sets: Mapping[str, Mapping[str, ItemSet]]
    losses: Mapping[str, Mapping[str, Sequence[float]]]
    marker_words: frozenset[str]
    incident: Incident | None = None
    explorer: Explorer | None = None
    validation: Mapping[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings that the metrics were measured with."""
        return self.metrics["settings"]


def read_facts(root: pathlib.Path, *, num_rows: int = 8) -> Facts:
    """Returns the facts of a run for a report, with at most this number of rows per set.

    Only the metrics are required. Results of a stage that did not run are empty.

    Raises:
      ValueError: as `artifacts.read_metrics`; a file is damaged.
    """
    metrics = artifacts.read_metrics(root)
    if read_manifest(root / artifacts.INFLUENCE.unit) is not None:
        check_whole(root, artifacts.INFLUENCE.unit)
    split = metrics.get("corpus", {}).get("query_split", "test")
    answers = _read_answers(root, metrics)
    # Copies of a held-out prompt are asked once, so the others have no answer.
    is_asked = frozenset().union(*answers.values()).__contains__ if answers else bool
    queries = tuple(
        row._replace(is_target=kind == "target")
        for kind in ("target", "normal")
        for row in artifacts.measured_rows(split, kind).find(root) or ()
        if is_asked(row.example_id)
    )
    sets = {name: _read_sets(root, name, num_rows) for name in metrics["retrieval"]}
    traced = incident.read_incident(root, metrics)
    return Facts(
        metrics=metrics,
        queries=queries,
        answers=answers,
        sets=sets,
        incident=traced or incident.example_incident(metrics, queries, answers, sets),
        explorer=explorer.read_explorer(root, metrics),
        validation=artifacts.VALIDATION.current(root),
        losses=_read_losses(root, metrics),
        marker_words=_read_marker_words(metrics["settings"]),
    )


def _read_answers(root: pathlib.Path, metrics: Metrics) -> dict[tuple[str, str], Mapping[str, str]]:
    """Returns the answers of every model at its last epoch, by algorithm; "" for those before."""
    files = {("", name): artifacts.answers(name) for name in REFERENCES}
    methods = last_epochs(metrics["methods"])
    order = [entry["algorithm"] for entry in methods]
    for entry in sorted(methods, key=lambda entry: order.index(entry["algorithm"])):
        algorithm, strategy = entry["algorithm"], entry["strategy"]
        variant = artifacts.Variant(strategy, algorithm)
        files[algorithm, strategy] = artifacts.answers(entry["epoch"], variant)
    return {model: found for model, file in files.items() if (found := file.find(root))}


def _read_sets(root: pathlib.Path, strategy: str, num_rows: int) -> dict[str, ItemSet]:
    sets = {}
    for kind in ("forget", "retain"):
        if rows := artifacts.set_rows(strategy, kind).find(root):
            scores = artifacts.set_scores(strategy, kind).read(root)
            first = zip(rows[:num_rows], scores, strict=False)
            sets[kind] = ItemSet(tuple(first), len(rows))
    return sets


def _read_losses(root: pathlib.Path, metrics: Metrics) -> dict[str, dict[str, list[float]]]:
    """Returns the loss curves of every training, by panel and label."""
    panels = {}
    for title, stage in (("Backbone", "backbone"), ("Fine-tuning", "finetune")):
        if losses := artifacts.losses(stage).find(root):
            panels[title] = {"loss": losses}
    for entry in last_epochs(metrics["methods"]):
        algorithm, strategy = entry["algorithm"], entry["strategy"]
        steps = artifacts.steps(artifacts.Variant(strategy, algorithm)).find(root) or ()
        if losses := [step["forget_nll"] for step in steps if "forget_nll" in step]:
            panels.setdefault(f"{algorithm_name(algorithm)}{FORGET_PANEL}", {})[strategy] = losses
    return panels


def _read_marker_words(config: Mapping[str, Any]) -> frozenset[str]:
    own = config.get("evaluate", {}).get("marker_words", "")
    try:
        return marker_words(config.get("corpus", {}).get("dataset", ""), own)
    except ValueError:
        return frozenset()


class Experiment(NamedTuple):
    """Runs that differ only in their seed, in the order of the seeds.

    `variation` has the settings that differ from other runs of the same name, if there are any.
    """

    runs: tuple[Facts, ...]
    variation: str = ""

    @property
    def name(self) -> str:
        """The name by --name with its variation."""
        name = self.runs[0].metrics["name"]
        return f"{name} ({self.variation})" if self.variation else name

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(run.metrics["seed"] for run in self.runs)

    @property
    def metrics(self) -> tuple[Metrics, ...]:
        """The metrics of each seed."""
        return tuple(run.metrics for run in self.runs)

    @property
    def strategies(self) -> list[str]:
        """The strategies of the unlearned models."""
        return list(dict.fromkeys(one["strategy"] for one in self.metrics[0]["methods"]))

    def of_seed(self, place: int = 0) -> str:
        """Returns the seed of a part, " (seed 3)", if there are several."""
        return f" (seed {self.seeds[place]})" if len(self.seeds) > 1 else ""


def group_runs(runs: Sequence[Facts]) -> tuple[Experiment, ...]:
    """Returns the runs by experiment, in the order of the first run of each.

    Runs belong together if all their settings except the seed are equal.

    Raises:
      ValueError: two runs of one experiment have the same seed.
    """
    groups: dict[str, list[Facts]] = {}
    for run in runs:
        settings = json.dumps({**run.config, "seed": 0}, sort_keys=True)
        groups.setdefault(settings, []).append(run)
    firsts = [group[0] for group in groups.values()]
    experiments = []
    for group in groups.values():
        ordered = tuple(sorted(group, key=lambda run: run.metrics["seed"]))
        experiments.append(Experiment(ordered, _variation(group[0], firsts)))
        seeds = experiments[-1].seeds
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"the runs of {group[0].metrics['name']!r} must have different seeds, got {seeds}: "
                "name each run once"
            )
    return tuple(experiments)


def _variation(run: Facts, firsts: Sequence[Facts]) -> str:
    """Returns the settings of a run that others of its name have at other values.

    Settings that only some runs have, such as those of a chosen strategy, count only if no other
    setting separates two runs.
    """
    same = [r for r in firsts if r is not run and r.metrics["name"] == run.metrics["name"]]
    own, *others = (flat(one.config) for one in (run, *same))
    # Models of a choice were not trained at the rates of the settings.
    rates = {n for n in own if n.startswith("unlearn.") and n.endswith(".learning_rate")}
    unused = rates if own.get("unlearn.choice") else set()
    telling = [
        name
        for name, value in own.items()
        if name not in ("seed", *unused) and any(o.get(name, value) != value for o in others)
    ]
    told = telling[:4]
    for other in others:
        names = [name for name in {**own, **other} if name != "seed"]
        different = [n for n in names if n not in own or n not in other or own[n] != other[n]]
        if not {*told} & {*different}:
            told.append(different[0])
    words = [f"{name}={own[name]}" if name in own else f"no {name}" for name in told]
    return ", ".join([*words, *(["..."] if len(telling) > 4 else [])])
