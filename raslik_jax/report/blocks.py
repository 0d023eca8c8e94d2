"""The paper's tables from stored runs: one block per dataset, model and algorithm.

As in the paper, methods that are not Pareto-optimal are gray, and among the others the two best
D_mah and Non-SF stand out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.evaluate import pareto
from raslik_jax.evaluate.metrics import IntervalEntry
from raslik_jax.report.names import (
    algorithm_name,
    dataset_name,
    kernel_notes,
    strategy_name,
    strategy_order,
)
from raslik_jax.report.published import PublishedBlock, match_block
from raslik_jax.report.records import Model, collect_models, make_model
from raslik_jax.report.runs import Experiment
from raslik_jax.report.tables import (
    NOT_KNOWN,
    Cell,
    Column,
    Table,
    format_interval,
    format_number,
)


class Block(NamedTuple):
    """A block of results.

    Attributes:
      name: of the experiment.
      dataset: as people call it.
      model: as people call it.
      algorithm: ga_gdr, ...
      strategies: all of either side, in the paper's order.
      ours: what was measured here at the last epoch, by strategy: the rates (with one seed their
        bootstrap intervals, with several the mean and the range), "mahalanobis/distance" over the
        block's methods where there are enough, "euclidean", "pareto" by the means over seeds,
        "tie", and how many seeds are Pareto-optimal ("num_pareto") or damaged ("num_damaged").
      paper: the published block that this one repeats, if there is one.
      epochs: the last epochs of the methods here.
      seeds: of the runs.
      is_negative: R and F of the methods here are negatively correlated.
      non_sf_by: what Non-SF was measured by here: words or classifier.
      is_chosen: learning rates and epochs were chosen on other queries.
      kernel: of RASLIK here, where it is not the paper's.
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
    kernel: str = ""

    @property
    def title(self) -> str:
        """What the block is of, in words."""
        where = f"{self.dataset}, {self.model}, {algorithm_name(self.algorithm)}"
        return f"{self.name}: {where}" if self.name else where


def describe_model(config: Mapping[str, Any]) -> str:
    """Returns the name of the model a run started from: the last part of its checkpoint."""
    settings = config.get("backbone", {})
    if settings.get("checkpoint"):
        return str(settings["checkpoint"]).rstrip("/").rsplit("/", 1)[-1]
    if not settings:
        return "model not recorded"
    return (
        f"GPT-NeoX from scratch ({settings.get('num_hidden_layers')} layers of "
        f"{settings.get('hidden_size')})"
    )


def make_blocks(experiment: Experiment, paper: Sequence[PublishedBlock]) -> tuple[Block, ...]:
    """Returns one block per algorithm of an experiment, at each method's last epoch.

    Args:
      experiment: runs of one or several seeds.
      paper: the published blocks, to set beside those that repeat one.

    Returns:
      The blocks, in the run's order of algorithms; none of runs without F or R.

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
        if any(num < len(experiment.runs) for num in num_rates):
            continue  # without F and R there is no frontier
        names = [model.strategy for model in models]
        match = match_block(paper, config, algorithm=algorithm, strategies=names)
        printed = tuple(match.rows) if match else ()
        known = (*printed, *names)
        ordered = [name for name in printed or strategy_order() if name in known]
        ours, is_negative = _measure(models)
        blocks.append(
            Block(
                name=experiment.name,
                dataset=dataset_name(config.get("corpus", {}).get("dataset", "")),
                model=describe_model(config),
                algorithm=algorithm,
                strategies=tuple(dict.fromkeys([*ordered, *known])),
                ours=ours,
                paper=match,
                epochs=tuple(sorted({epoch for model in models for epoch in model.epochs})),
                seeds=experiment.seeds,
                is_negative=is_negative,
                non_sf_by=(recorded.get("non_sf") or {}).get("by", "words"),
                is_chosen=bool(recorded.get("chosen")),
                kernel=" ".join(kernel_notes(config, names)),
            )
        )
    return tuple(blocks)


def published_only(paper: Sequence[PublishedBlock]) -> tuple[Block, ...]:
    """Returns the paper's blocks as they are printed, with nothing of ours beside them."""
    return tuple(
        Block(f"Table {b.table}", b.dataset, b.model, b.algorithm, tuple(b.rows), {}, b)
        for b in paper
    )


def _measure(models: Sequence[Model]) -> tuple[dict[str, Model], bool]:
    """Returns the figures of the methods over all seeds, and whether R and F run against it."""
    rates = [
        {
            name: spread(model.intervals(name))
            for name in ("forget", "retain", "non_sf_target")
            if len(model.intervals(name)) == len(model.epochs)
        }
        for model in models
    ]
    retain_M, forget_M = (
        np.array([rate[name]["mean"] for rate in rates]) for name in ("retain", "forget")
    )
    is_eligible_M = np.array([not model.num_damaged() for model in models])
    is_pareto_M, is_tie_M = pareto.frontier_among(retain_M, forget_M, is_eligible_M)
    euclidean_M = pareto.euclidean_to_ideal(retain_M, forget_M)
    has_spread = np.ptp(retain_M) > 0 and np.ptp(forget_M) > 0
    found = None
    if len(models) >= pareto.MIN_METHODS and has_spread:
        found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
    entries = {
        model.strategy: make_model(
            model.strategy,
            model.algorithm,
            {
                **rates[i],
                "mahalanobis": {"distance": float(found.distance_M[i])} if found else None,
                "euclidean": float(euclidean_M[i]),
                "pareto": bool(is_pareto_M[i]),
                "tie": bool(is_tie_M[i]),
                "num_pareto": sum(record.value for record in model.values.get("pareto", ())),
                "num_damaged": model.num_damaged(),
            },
        )
        for i, model in enumerate(models)
    }
    return entries, bool(found and found.is_negative)


def spread(entries: Sequence[IntervalEntry]) -> IntervalEntry:
    """Returns the only interval, or the mean of several seeds with their range."""
    if len(entries) == 1:
        return entries[0]
    means = [entry["mean"] for entry in entries]
    return IntervalEntry(mean=sum(means) / len(means), low=min(means), high=max(means))


# as a table -------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """One column of ours or of the paper's.

    Attributes:
      title: its heading.
      metric: whose values stand in it.
      latex: heading in LaTeX.
      show: gives the text of a model's cell.
      mark: gives the sign of its note.
      direction: 1 where the two highest of the optimal stand out, -1 for the lowest, 0 for none.
    """

    title: str
    metric: str
    latex: str
    show: Callable[[Model], str]
    mark: Callable[[Model], str] = lambda model: ""
    direction: int = 0


def _ours(block: Block) -> list[_Side]:
    if not block.ours:
        return []

    def interval(metric: str) -> Callable[[Model], str]:
        return lambda model: format_interval(next(iter(model.intervals(metric)), None))

    def flag(model: Model) -> str:
        text = _yes(model, "pareto")
        if len(block.seeds) > 1:
            text += f" ({_value(model, 'num_pareto')} of {len(block.seeds)})"
        damaged = " †" if _value(model, "num_damaged") else ""
        return text + (" ~" if _value(model, "tie") else "") + damaged

    distance = ("D_mah", "mahalanobis/distance", _D_MAH, -1)
    if not _any(block.ours, "mahalanobis/distance"):
        distance = ("Distance", "euclidean", r"Distance$\downarrow$", 0)
    title, metric, latex, direction = distance
    sides = [
        _Side("F", "forget", r"F$\downarrow$", interval("forget")),
        _Side("R", "retain", r"R$\uparrow$", interval("retain")),
        _Side(title, metric, latex, _number(metric), direction=direction),
        _Side("Non-SF", "non_sf_target", _NON_SF, interval("non_sf_target"), direction=1),
        _Side("Pareto", "pareto", "", flag),
    ]
    return [side for side in sides if _any(block.ours, side.metric)]


def _theirs(paper: PublishedBlock | None) -> list[_Side]:
    if paper is None:
        return []

    def flag(model: Model) -> str:
        return "‡" if _value(model, "is_wrong") else "~" if _value(model, "tie") else ""

    rate, follows = f".{paper.decimals}f", "" if paper.follows else "†"
    distance = _number("mahalanobis/distance", rate)
    sides = [
        _Side("F", "forget", r"F$\downarrow$", _number("forget", rate)),
        _Side("R", "retain", r"R$\uparrow$", _number("retain", rate)),
        _Side("D_mah", "mahalanobis/distance", _D_MAH, distance, lambda model: follows, -1),
        _Side("Non-SF", "non_sf_target", _NON_SF, _number("non_sf_target"), direction=1),
        _Side("Pareto", "pareto", "", lambda model: _yes(model, "pareto"), flag),
    ]
    return [side for side in sides if _any(paper.rows, side.metric)]


_D_MAH, _NON_SF = r"$D_{\mathrm{mah}}\downarrow$", r"Non-SF$\uparrow$"


def _number(metric: str, spec: str = ".3f") -> Callable[[Model], str]:
    return lambda model: format_number(_value(model, metric), spec)


def _value(model: Model, metric: str) -> Any:
    record = model.get(metric)
    return record and record.value


def _any(models: Mapping[str, Model], metric: str) -> bool:
    return any(model.get(metric) for model in models.values())


def _yes(model: Model, metric: str) -> str:
    return "yes" if _value(model, metric) else "no"


def _best(models: Mapping[str, Model], side: _Side) -> set[float]:
    """Returns the values of the first two places; equal values share a place, and all have it."""
    optimal = [model for model in models.values() if _value(model, "pareto")]
    known = [value for m in optimal if (value := _value(m, side.metric)) is not None]
    return set(sorted(known, reverse=side.direction > 0)[:2]) if side.direction else set()


def _cells(models: Mapping[str, Model], side: _Side, strategies: Sequence[str]) -> list[Cell]:
    best, cells = _best(models, side), []
    for model in map(models.get, strategies):
        if model is None:
            cells.append(Cell(NOT_KNOWN))
            continue
        is_optimal = _value(model, "pareto")
        tone = "best" if is_optimal and _value(model, side.metric) in best else ""
        cells.append(Cell(side.show(model), tone if is_optimal else "gray", side.mark(model)))  # type: ignore[arg-type]
    return cells


def lay_out(block: Block) -> Table:
    """Returns a block as a table, with its marks and notes.

    Columns that no row has a value for are left out. Where there are too few methods for a D_mah,
    the Euclidean distance stands in its place.
    """
    ours, theirs = _ours(block), _theirs(block.paper)
    printed = block.paper.rows if block.paper else {}
    names = []
    for strategy in block.strategies:
        model = block.ours.get(strategy) or printed[strategy]
        names.append(Cell(strategy_name(strategy), "" if _value(model, "pareto") else "gray"))
    columns, cells = [Column("Strategy")], [names]
    for sides, models, group in ((ours, block.ours, "ours"), (theirs, printed, "the paper")):
        for side in sides:
            group = group if ours and theirs else ""
            columns.append(Column(side.title, "right", group=group, latex=side.latex))
            cells.append(_cells(models, side, block.strategies))
    notes = (*_our_notes(block), *_paper_notes(block.paper, is_beside=bool(block.ours)))
    return Table(tuple(columns), tuple(zip(*cells, strict=True)), notes, block.title)


def _our_notes(block: Block) -> list[str]:
    if not block.ours:
        return []
    epochs, seeds = " and ".join(map(str, block.epochs)), ", ".join(map(str, block.seeds))
    spread = (
        f"95 % bootstrap interval over queries, seed {seeds}"
        if len(block.seeds) == 1
        else f"smallest and largest of the seeds {seeds}, around their mean"
    )
    chosen = ", learning rate and epoch chosen on other queries" if block.is_chosen else ""
    notes = [f"Ours: after epoch {epochs}{chosen}; brackets: {spread}."]
    has_distance = _any(block.ours, "mahalanobis/distance")
    if has_distance:
        pool = ", ".join(strategy_name(s) for s in block.strategies if s in block.ours)
        notes.append(f"D_mah is taken over {pool}, and compares only these.")
    else:
        notes.append(
            "Distance: Euclidean, to R = 1 and F = 0; D_mah wants at least "
            f"{pareto.MIN_METHODS} methods whose rates differ."
        )
    notes += [block.kernel] if block.kernel else []
    if _any(block.ours, "non_sf_target"):
        ours = {
            "words": "the share of answers without a word that marks the behavior",
            "classifier": "the probability by a classifier trained here",
        }.get(block.non_sf_by, f"by {block.non_sf_by}")
        beside = "; the paper's is a classifier's probability" if block.paper else ""
        notes.append(f"Non-SF here: {ours}{beside}.")
    if len(block.seeds) > 1:
        notes.append("Pareto: by the means over seeds; in brackets, the seeds in which it is so.")
    if any(_value(model, "tie") for model in block.ours.values()):
        notes.append("~: the Pareto flag hangs on a tie within the printed decimals.")
    if block.is_negative and has_distance:
        notes.append(
            "R and F are negatively correlated over these methods, so a better one may have a "
            "larger D_mah."
        )
    damaged = {name: n for name, m in block.ours.items() if (n := _value(m, "num_damaged"))}
    if damaged:
        of_seeds = " in {} of " + f"{len(block.seeds)} seeds" if len(block.seeds) > 1 else ""
        named = [strategy_name(name) + of_seeds.format(num) for name, num in damaged.items()]
        notes.append(
            f"Judged damaged (†, ours): {', '.join(named)}. A low F is no merit there, and "
            "what is damaged is no candidate for the Pareto set."
        )
    return notes


def _paper_notes(paper: PublishedBlock | None, *, is_beside: bool) -> list[str]:
    if paper is None:
        return []
    difference, explained = (
        f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
        for share in (paper.distance_difference, paper.rounding_error)
    )
    notes = [f"Paper: table {paper.table}."] if is_beside else []
    if paper.follows:
        notes.append(
            f"The paper's D_mah follow from its F and R: they differ by at most {difference}, and "
            f"rounding explains up to {explained}."
        )
    else:
        notes.append(
            f"†: the paper's D_mah cannot follow from its F and R: they differ by up to "
            f"{difference}, where rounding explains {explained}."
        )
    wrong, ties = (
        " and ".join(strategy_name(name) for name, row in paper.rows.items() if _value(row, flag))
        for flag in ("is_wrong", "tie")
    )
    if wrong:
        notes.append(
            f"‡: the paper prints {wrong} as Pareto-optimal, but another of its own methods is "
            "better in both rates."
        )
    if ties:
        notes.append(f"~: the paper's flag of {ties} hangs on digits that it does not print.")
    if paper.is_negative:
        notes.append(
            "The paper's R and F are negatively correlated here, so a better method may have a "
            "larger D_mah."
        )
    return notes


# as data ----------------------------------------------------------------------------------------

_CSV_COLUMNS = (
    *("name", "dataset", "model", "algorithm", "strategy", "source", "epochs", "seeds"),
    *("forget", "forget_low", "forget_high", "retain", "retain_low", "retain_high"),
    *("non_sf", "non_sf_low", "non_sf_high", "spread", "d_mah", "euclidean"),
    *("pareto", "tie", "top_two_d_mah", "top_two_non_sf", "damaged"),
    *("d_mah_follows", "pareto_flag_wrong", "paper_table", "kernel"),
)
_CSV_METRICS = {
    "forget": "forget",
    "retain": "retain",
    "non_sf": "non_sf_target",
    "d_mah": "mahalanobis/distance",
    "euclidean": "euclidean",
}
_CSV_FLAGS = {"pareto": "pareto", "tie": "tie", "damaged": "num_damaged"}


def csv_table(blocks: Sequence[Block]) -> Table:
    """Returns all blocks as one table of data: a row per strategy and source, ours or the paper's.

    Empty where a value is not known. `spread` says what low and high are: interval (95 %, over
    queries) or seeds (smallest and largest).
    """
    rows = []
    for block in blocks:
        paper = block.paper
        shared = dict(zip(_CSV_COLUMNS, block[:4], strict=False))
        ours = shared | {
            "source": "ours",
            "epochs": " ".join(map(str, block.epochs)),
            "seeds": " ".join(map(str, block.seeds)),
            "spread": "interval" if len(block.seeds) == 1 else "seeds",
            "kernel": block.kernel,
        }
        theirs = shared | {"source": "paper"}
        if paper:
            theirs |= {"d_mah_follows": _word(paper.follows), "paper_table": paper.table}
        for strategy in block.strategies:
            for line, models, sides in (
                (ours, block.ours, _ours(block)),
                (theirs, paper.rows if paper else {}, _theirs(paper)),
            ):
                if strategy in models:
                    rows.append({**line, **_csv_values(models, strategy, sides)})
    return Table(
        tuple(map(Column, _CSV_COLUMNS)),
        tuple(tuple(row.get(name, "") for name in _CSV_COLUMNS) for row in rows),
    )


def _csv_values(
    models: Mapping[str, Model], strategy: str, sides: Sequence[_Side]
) -> dict[str, str]:
    model = models[strategy]
    line = {"strategy": strategy}
    for name, metric in _CSV_METRICS.items():
        if record := model.get(metric):
            line[name] = f"{record.value:.6g}"
            if record.low is not None and record.high is not None:
                line |= {f"{name}_low": f"{record.low:.6g}", f"{name}_high": f"{record.high:.6g}"}
    line |= {name: _yes(model, m) for name, m in _CSV_FLAGS.items() if model.get(m)}
    if "is_wrong" in model.values:
        line["pareto_flag_wrong"] = _yes(model, "is_wrong")
    best = {side.metric: _best(models, side) for side in sides}
    for name in ("d_mah", "non_sf"):
        is_best = _value(model, _CSV_METRICS[name]) in best.get(_CSV_METRICS[name], ())
        line[f"top_two_{name}"] = _word(bool(_value(model, "pareto")) and is_best)
    return line


def _word(claim: bool) -> str:
    return "yes" if claim else "no"
