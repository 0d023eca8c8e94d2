"""The paper's tables: one block per dataset, model and algorithm, as printed and from stored runs.

As in the paper, the two best D_mah and Non-SF among the Pareto-optimal methods are marked (*).
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.published import distances
from experiments.studies.published.published import PublishedBlock, match_block
from raslik_jax.evaluate import pareto
from raslik_jax.report import names, notes, tables
from raslik_jax.report.facts import Experiment
from raslik_jax.report.names import (
    algorithm_name,
    dataset_name,
    describe_model,
    kernel_note,
    strategy_name,
)
from raslik_jax.report.tables import NOT_KNOWN, Column, Table, format_interval, format_number
from raslik_jax.report.tidy import Model, collect_models, is_probed, make_model
from raslik_jax.retrieve.strategies import STRATEGIES


class Block(NamedTuple):
    """A block of results.

    Attributes:
      strategies: all of either side, in the paper's order.
      ours: our figures at the last epoch by strategy: the rates (with one seed their bootstrap
        intervals, with several the mean and the range), "mahalanobis/distance" over the block's
        methods if there are enough, "euclidean", "pareto" by the means over seeds, "tie", and how
        many seeds are Pareto-optimal ("num_pareto") or damaged ("num_damaged").
      paper: the published block that this one repeats, if there is one.
      epochs: the last epochs of the methods here.
      is_negative: R and F of the methods here are negatively correlated.
      non_sf_by: the measure of Non-SF here: words, judge or classifier.
      is_chosen: learning rates and epochs were chosen on other queries.
      is_probed: the last epochs are the steps that probes chose.
      kernel: of RASLIK here, if it is not the paper's.
    """

    name: str
    dataset: str
    model: str
    algorithm: str
    strategies: tuple[str, ...]
    ours: Mapping[str, Model]
    paper: PublishedBlock | None
    epochs: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    is_negative: bool = False
    non_sf_by: str = "words"
    is_chosen: bool = False
    is_probed: bool = False
    kernel: str = ""

    @property
    def title(self) -> str:
        """The name of the block in words."""
        where = f"{self.dataset}, {self.model}, {algorithm_name(self.algorithm)}"
        return f"{self.name}: {where}" if self.name else where

    @property
    def theirs(self) -> Mapping[str, Model]:
        """The paper's printed figures by strategy."""
        return self.paper.rows if self.paper else {}


def make_blocks(experiment: Experiment, paper: Sequence[PublishedBlock]) -> tuple[Block, ...]:
    """Returns one block per algorithm of an experiment, at each method's last epoch.

    Runs without F or R have none.

    Raises:
      ValueError: the seeds have different methods.
    """
    config, recorded = experiment.runs[0].config, experiment.metrics[0]
    by_algorithm: dict[str, list[Model]] = {}
    for model in collect_models(experiment.metrics):
        if model.algorithm:
            by_algorithm.setdefault(model.algorithm, []).append(model)
    blocks = []
    for algorithm, models in by_algorithm.items():
        num_rates = (len(model.values.get("euclidean", ())) for model in models)
        if min(num_rates) < len(experiment.runs):
            continue  # without F and R there is no frontier
        names = [model.strategy for model in models]
        match = match_block(paper, config, algorithm=algorithm, strategies=names)
        printed = tuple(match.rows) if match else ()
        ordered = printed or [name for name in STRATEGIES if name in names]
        ours, is_negative = _measure(models)
        blocks.append(
            Block(
                name=experiment.name,
                dataset=dataset_name(config),
                model=describe_model(config),
                algorithm=algorithm,
                strategies=tuple(dict.fromkeys([*ordered, *names])),
                ours=ours,
                paper=match,
                epochs=tuple(sorted({epoch for model in models for epoch in model.epochs})),
                seeds=experiment.seeds,
                is_negative=is_negative,
                non_sf_by=(recorded.get("non_sf") or {}).get("by", "words"),
                is_chosen=bool(recorded.get("chosen")),
                is_probed=is_probed(config),
                kernel=kernel_note(config, names),
            )
        )
    return tuple(blocks)


def published_only(paper: Sequence[PublishedBlock]) -> tuple[Block, ...]:
    """Returns the paper's blocks as printed, without our figures."""
    return tuple(
        Block(f"Table {b.table}", b.dataset, b.model, b.algorithm, tuple(b.rows), {}, b)
        for b in paper
    )


def _measure(models: Sequence[Model]) -> tuple[dict[str, Model], bool]:
    """Returns the figures of the methods over all seeds and whether R and F are opposed."""
    rates = [
        {
            name: model.joined(name)
            for name in ("forget", "retain", "non_sf_target")
            if len(model.values.get(name, ())) == len(model.epochs)
        }
        for model in models
    ]
    retain_M, forget_M = (
        np.array([rate[name]["mean"] for rate in rates]) for name in ("retain", "forget")
    )
    is_eligible_M = np.array([not model.num_damaged for model in models])
    is_pareto_M = pareto.pareto_mask(retain_M, forget_M, is_eligible_M)
    is_tie_M = np.zeros(len(models), bool)
    is_tie_M[is_eligible_M] = distances.rounding_ties(
        retain_M[is_eligible_M], forget_M[is_eligible_M]
    )
    euclidean_M = np.hypot(1 - retain_M, forget_M)
    found = None
    if distances.have_covariance(retain_M, forget_M):
        found = distances.mahalanobis_to_ideal(retain_M, forget_M)
    ours = {
        model.strategy: make_model(
            model.strategy,
            model.algorithm,
            {
                **rates[i],
                "mahalanobis": {"distance": float(found.distance_M[i])} if found else {},
                "euclidean": float(euclidean_M[i]),
                "pareto": bool(is_pareto_M[i]),
                "tie": bool(is_tie_M[i]),
                "num_pareto": sum(model.values.get("pareto", ())),
                "num_damaged": model.num_damaged,
            },
        )
        for i, model in enumerate(models)
    }
    return ours, bool(found and found.is_negative)


# as a table -------------------------------------------------------------------------------------

_DISTANCE = "mahalanobis/distance"
# Metrics that have a column where a model has them, with its heading.
_HEADINGS = {
    "forget": "F",
    "retain": "R",
    _DISTANCE: "D_mah",
    "euclidean": "Distance",
    "non_sf_target": "Non-SF",
    "pareto": "Pareto",
}
# The two best of these among the optimal are marked; true if the highest are best.
_CONTESTS = {_DISTANCE: False, "non_sf_target": True}


def _best(models: Mapping[str, Model], metric: str) -> set[float]:
    """Returns the values of the first two places; equal values share a place and all have it."""
    values = (model.value(metric) for model in models.values() if model.value("pareto"))
    known = [value for value in values if value is not None]
    return set(sorted(known, reverse=_CONTESTS[metric])[:2]) if metric in _CONTESTS else set()


def lay_out(block: Block) -> Table:
    """Returns a block as a table with its marks and notes.

    Columns without any value are left out. With too few methods for a D_mah the Euclidean distance
    takes its place.
    """
    columns = [Column("Strategy")]
    cells = [[strategy_name(name) for name in block.strategies]]
    for models, source in ((block.ours, "ours"), (block.theirs, "paper")):
        known = {metric for model in models.values() for metric in model.values}
        known -= {"euclidean"} if _DISTANCE in known else set()
        for metric in (metric for metric in _HEADINGS if metric in known):
            side = f",\n{source}" if block.ours and block.paper else ""
            columns.append(Column(_HEADINGS[metric] + side, "right"))
            best = _best(models, metric)
            cells.append([_cell(block, models, name, metric, best) for name in block.strategies])
    found: tuple[str, ...] = ("*: the two best among the Pareto-optimal methods.",)
    if block.ours:
        methods = [block.ours[name] for name in block.strategies if name in block.ours]
        found += _write_notes("ours", block=block, methods=methods)
    if block.paper:
        found += _write_notes("theirs", paper=block.paper, is_beside=bool(block.ours))
    return Table(tuple(columns), tuple(zip(*cells, strict=True)), found, block.title)


def _cell(
    block: Block, models: Mapping[str, Model], strategy: str, metric: str, best: set[float]
) -> str:
    model, paper = models.get(strategy), block.paper if models is block.theirs else None
    if model is None:
        return NOT_KNOWN
    value, mark = next(iter(model.values.get(metric, ())), None), ""
    if isinstance(value, dict):
        text = format_interval(value)  # type: ignore[arg-type]
    elif metric != "pareto":
        text = format_number(value, f".{paper.decimals}f" if paper else ".3f")
        mark = " †" if paper and not paper.follows and metric == _DISTANCE else ""
    elif paper:
        text = tables.word(value)
        mark = " ‡" if model.value("is_wrong") else " ~" if model.value("tie") else ""
    else:
        num = len(block.seeds)
        text = tables.word(value) + (f" ({model.value('num_pareto')} of {num})" if num > 1 else "")
        text += " ~" if model.value("tie") else ""
        text += " †" if model.value("num_damaged") else ""
    is_best = model.value("pareto") and model.value(metric) in best
    return f"{text}{'*' * bool(is_best)}{mark}"


def _write_notes(table: str, **values: Any) -> tuple[str, ...]:
    """Returns the notes of a block: the lines of its macro in notes.jinja."""
    lines = getattr(_macros(), table)(**values).split("\n")
    return tuple(line for line in lines if line.strip())


@functools.cache
def _macros() -> Any:
    environment = names.make_environment()
    environment.globals.update(
        having=notes.having,
        min_methods=distances.MIN_METHODS,
        percent=lambda share: f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %",
    )
    text = pathlib.Path(__file__).with_name("notes.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).module
