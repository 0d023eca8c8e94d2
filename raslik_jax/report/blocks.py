"""The paper's tables from stored runs: one block per dataset, model and algorithm.

A block is built once and printed in four forms: plain text, Markdown, CSV and LaTeX. As in the
paper, methods that are not Pareto-optimal are gray (in Markdown: italic), and among the others the
two best D_mah and Non-SF stand out (bold; `\\bestbg` in LaTeX).
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.data.corpora import DATASETS
from raslik_jax.evaluate import judgment, pareto, summary
from raslik_jax.evaluate.summary import IntervalEntry, MethodEntry
from raslik_jax.report import published, tables
from raslik_jax.report.markup import (
    escape_csv,
    escape_latex,
    escape_markdown,
    escape_markdown_line,
    visible,
)
from raslik_jax.report.runs import Experiment

# The paper's order of rows; what it does not have comes after, in the run's order.
_ORDER = (
    "random",
    "embedding",
    "bm25",
    "oracle",
    *("cr", "cr_25", "cr_35", "cr_45", "cr_50", "cr_62", "cr_75"),
    "raslik_f",
    "raslik",
)


class Measured(NamedTuple):
    """What one method came to at the last epoch.

    Attributes:
      forget: F; with one seed its bootstrap interval, with several the mean and the range.
      retain: R, likewise.
      non_sf: Non-SF on target queries, likewise; None where it means nothing.
      distance: D_mah over the block's methods; None for fewer than 5 of them, or without spread.
      euclidean: distance to R = 1, F = 0.
      is_pareto: no other method of the block dominates it; of several seeds, by their means.
      is_tie: the flag hangs on a tie within three decimals.
      num_pareto: seeds in which it is Pareto-optimal.
      damaged: seeds in which it was judged damaged; then it is no candidate for the Pareto set.
    """

    forget: IntervalEntry
    retain: IntervalEntry
    non_sf: IntervalEntry | None
    distance: float | None
    euclidean: float
    is_pareto: bool
    is_tie: bool
    num_pareto: int
    damaged: int


class BlockRow(NamedTuple):
    """One strategy: what was measured here and what the paper prints, either of them optional."""

    strategy: str
    ours: Measured | None
    paper: published.PublishedRow | None


class Block(NamedTuple):
    """A block of results.

    Attributes:
      name: of the experiment.
      dataset: as people call it.
      model: as people call it.
      algorithm: ga_gdr, ...
      epochs: the last epoch of each method; empty where nothing was measured here.
      seeds: of the runs.
      rows: the strategies in the paper's order.
      paper: the published block that this one repeats, if there is one.
      is_negative: R and F of the methods here are negatively correlated.
      non_sf_by: what Non-SF was measured by here: words or classifier.
      is_chosen: learning rates and epochs were chosen on other queries.
      kernel: of RASLIK here, where it is not the paper's.
    """

    name: str
    dataset: str
    model: str
    algorithm: str
    epochs: tuple[int, ...]
    seeds: tuple[int, ...]
    rows: tuple[BlockRow, ...]
    paper: published.PublishedBlock | None
    is_negative: bool
    non_sf_by: str = "words"
    is_chosen: bool = False
    kernel: str = ""

    @property
    def title(self) -> str:
        """What the block is of, in words."""
        where = f"{self.dataset}, {self.model}, {tables.algorithm_name(self.algorithm)}"
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


def describe_dataset(config: Mapping[str, Any]) -> str:
    """Returns the name of the data a run was trained on."""
    dataset = config.get("corpus", {}).get("dataset", "")
    return DATASETS[dataset].title if dataset in DATASETS else dataset or "data not recorded"


def make_blocks(
    experiment: Experiment, paper: Sequence[published.PublishedBlock]
) -> tuple[Block, ...]:
    """Returns one block per algorithm of an experiment, at each method's last epoch.

    Args:
      experiment: runs of one or several seeds.
      paper: the published blocks, to set beside those that repeat one.

    Returns:
      The blocks, in the run's order of algorithms; none of runs without F or R.

    Raises:
      ValueError: the seeds have different methods.
    """
    found = [
        {(e["algorithm"], e["strategy"]): e for e in tables.last_epochs(metrics["methods"])}
        for metrics in experiment.metrics
    ]
    if any(entries.keys() != found[0].keys() for entries in found):
        raise ValueError(
            f"runs of the same methods wanted, but those of {experiment.name!r} with seeds "
            f"{experiment.seeds} have different ones: join like with like"
        )
    config = experiment.runs[0].config
    recorded: Mapping[str, Any] = experiment.metrics[0]
    blocks = []
    for algorithm in dict.fromkeys(name for name, _ in found[0]):
        entries = {
            strategy: [seed[algorithm, strategy] for seed in found]
            for name, strategy in found[0]
            if name == algorithm
        }
        if any(e["euclidean"] is None for seeds in entries.values() for e in seeds):
            continue  # without F and R there is no frontier
        match = published.match_block(paper, config, algorithm=algorithm, strategies=tuple(entries))
        measured, is_negative = _measure(entries)
        printed = {row.strategy: row for row in match.rows} if match else {}
        order = list(printed) if match else list(_ORDER)
        every = dict.fromkeys([*printed, *entries])
        names = [name for name in order if name in every]
        names += [name for name in every if name not in order]
        blocks.append(
            Block(
                name=experiment.name,
                dataset=describe_dataset(config),
                model=describe_model(config),
                algorithm=algorithm,
                epochs=tuple(sorted({e["epoch"] for seeds in entries.values() for e in seeds})),
                seeds=experiment.seeds,
                rows=tuple(BlockRow(n, measured.get(n), printed.get(n)) for n in names),
                paper=match,
                is_negative=is_negative,
                non_sf_by=(recorded.get("non_sf") or {}).get("by", "words"),
                is_chosen=bool(recorded.get("chosen")),
                kernel=" ".join(tables.kernel_notes(config, measured)),
            )
        )
    return tuple(blocks)


def published_only(paper: Sequence[published.PublishedBlock]) -> tuple[Block, ...]:
    """Returns the paper's blocks as they are printed, with nothing of ours beside them."""
    return tuple(
        Block(
            name=f"Table {block.table}",
            dataset=block.dataset,
            model=block.model,
            algorithm=block.algorithm,
            epochs=(),
            seeds=(),
            rows=tuple(BlockRow(row.strategy, None, row) for row in block.rows),
            paper=block,
            is_negative=block.is_negative,
        )
        for block in paper
    )


def _measure(
    entries: Mapping[str, Sequence[MethodEntry]],
) -> tuple[dict[str, Measured], bool]:
    forgets, retains, marked = (
        {name: [rate for e in seeds if (rate := e[key])] for name, seeds in entries.items()}
        for key in ("forget", "retain", "non_sf_target")
    )
    forget, retain = (
        {name: spread(found) for name, found in rates.items()} for rates in (forgets, retains)
    )
    retain_M, forget_M = (
        np.array([rate["mean"] for rate in rates.values()]) for rates in (retain, forget)
    )
    damaged = {name: sum(map(judgment.is_damaged, seeds)) for name, seeds in entries.items()}
    is_eligible_M = np.array([not count for count in damaged.values()])
    is_pareto_M, is_tie_M = summary.frontier_among(retain_M, forget_M, is_eligible_M)
    euclidean_M = pareto.euclidean_to_ideal(retain_M, forget_M)
    distances, is_negative = None, False
    if len(entries) >= pareto.MIN_METHODS and np.ptp(retain_M) > 0 and np.ptp(forget_M) > 0:
        found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
        distances, is_negative = found.distance_M, found.is_negative
    measured = {
        name: Measured(
            forget=forget[name],
            retain=retain[name],
            non_sf=spread(marked[name]) if len(marked[name]) == len(seeds) else None,
            distance=None if distances is None else float(distances[i]),
            euclidean=float(euclidean_M[i]),
            is_pareto=bool(is_pareto_M[i]),
            is_tie=bool(is_tie_M[i]),
            num_pareto=sum(bool(e["pareto"]) for e in seeds),
            damaged=damaged[name],
        )
        for i, (name, seeds) in enumerate(entries.items())
    }
    return measured, is_negative


def spread(entries: Sequence[IntervalEntry]) -> IntervalEntry:
    """Returns the only interval, or the mean of several seeds with their range."""
    if len(entries) == 1:
        return IntervalEntry(
            mean=entries[0]["mean"], low=entries[0]["low"], high=entries[0]["high"]
        )
    means = [entry["mean"] for entry in entries]
    return IntervalEntry(mean=sum(means) / len(means), low=min(means), high=max(means))


class Cell(NamedTuple):
    """A cell of a printed block.

    Attributes:
      text: what it says.
      is_gray: its method is not Pareto-optimal.
      is_best: among the two best of the Pareto-optimal ones.
      mark: "", or which footnote it has: "distance", "flag", "tie".
    """

    text: str
    is_gray: bool = False
    is_best: bool = False
    mark: str = ""


class BlockGrid(NamedTuple):
    """A block as cells.

    Attributes:
      columns: headings.
      num_ours: how many of the columns after the first are ours; the rest are the paper's.
      rows: the cells.
      notes: sentences below.
    """

    columns: tuple[str, ...]
    num_ours: int
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


def lay_out(block: Block) -> BlockGrid:
    """Returns the cells of a block with their marks, and its notes.

    Args:
      block: the block.

    Returns:
      Columns that no row has a value for are left out. Where there are too few methods for a
      D_mah, the Euclidean distance stands in its place.
    """
    ours, theirs = (
        [row.ours for row in block.rows if row.ours],
        [row.paper for row in block.rows if row.paper],
    )
    has_distance = any(m.distance is not None for m in ours)
    columns: list[str] = ["Strategy"]
    parts: list[Callable[[BlockRow], Cell]] = [_name_cell]
    if ours:
        best_distance = _best([m.distance for m in ours if m.is_pareto and has_distance], low=True)
        best_non_sf = _best([m.non_sf["mean"] for m in ours if m.is_pareto and m.non_sf], low=False)
        columns += ["F", "R", "D_mah" if has_distance else "Distance"]
        parts += [
            _ours(lambda m: Cell(tables.format_interval(m.forget))),
            _ours(lambda m: Cell(tables.format_interval(m.retain))),
            _ours(
                lambda m: (
                    Cell(f"{m.distance:.3f}", is_best=m.is_pareto and m.distance in best_distance)
                    if m.distance is not None
                    else Cell(f"{m.euclidean:.3f}")
                )
            ),
        ]
        if any(m.non_sf for m in ours):
            columns.append("Non-SF")
            parts.append(
                _ours(
                    lambda m: Cell(
                        tables.format_interval(m.non_sf),
                        is_best=bool(m.is_pareto and m.non_sf and m.non_sf["mean"] in best_non_sf),
                    )
                )
            )
        columns.append("Pareto")
        parts.append(_ours(lambda m: Cell(_flag(m, len(block.seeds)))))
    num_ours = len(columns) - 1
    if theirs and block.paper:
        decimals = block.paper.decimals
        best_printed = _best([p.distance for p in theirs if p.is_pareto], low=True)
        best_printed_sf = _best(
            [p.non_sf for p in theirs if p.is_pareto and p.non_sf is not None], low=False
        )
        mark = "" if block.paper.follows else "distance"
        columns += ["F", "R", "D_mah"]
        parts += [
            _paper(lambda p: Cell(f"{p.forget:.{decimals}f}")),
            _paper(lambda p: Cell(f"{p.retain:.{decimals}f}")),
            _paper(
                lambda p: Cell(
                    f"{p.distance:.{decimals}f}",
                    is_best=p.is_pareto and p.distance in best_printed,
                    mark=mark,
                )
            ),
        ]
        if any(p.non_sf is not None for p in theirs):
            columns.append("Non-SF")
            parts.append(
                _paper(
                    lambda p: Cell(
                        tables.format_number(p.non_sf),
                        is_best=p.is_pareto and p.non_sf in best_printed_sf,
                    )
                )
            )
        columns.append("Pareto")
        parts.append(
            _paper(
                lambda p: Cell(
                    "yes" if p.is_pareto else "no",
                    mark="flag" if p.is_wrong_flag else "tie" if p.is_tie else "",
                )
            )
        )
    rows = tuple(tuple(part(row) for part in parts) for row in block.rows)
    return BlockGrid(tuple(columns), num_ours, rows, _notes(block, has_distance))


def _name_cell(row: BlockRow) -> Cell:
    flags = row.ours or row.paper
    return Cell(tables.strategy_name(row.strategy), is_gray=bool(flags and not flags.is_pareto))


def _ours(make: Callable[[Measured], Cell]) -> Callable[[BlockRow], Cell]:
    def cell(row: BlockRow) -> Cell:
        if row.ours is None:
            return Cell("-")
        return make(row.ours)._replace(is_gray=not row.ours.is_pareto)

    return cell


def _paper(make: Callable[[published.PublishedRow], Cell]) -> Callable[[BlockRow], Cell]:
    def cell(row: BlockRow) -> Cell:
        if row.paper is None:
            return Cell("-")
        return make(row.paper)._replace(is_gray=not row.paper.is_pareto)

    return cell


def _best(values: Sequence[float | None], *, low: bool) -> set[float]:
    """Returns the values of the first two places; equal values share a place, and all have it."""
    known = sorted((value for value in values if value is not None), reverse=not low)
    return set(known[:2])


def _flag(measured: Measured, num_seeds: int) -> str:
    text = "yes" if measured.is_pareto else "no"
    if num_seeds > 1:
        text += f" ({measured.num_pareto} of {num_seeds})"
    return text + (" ~" if measured.is_tie else "") + (" †" if measured.damaged else "")


def _notes(block: Block, has_distance: bool) -> tuple[str, ...]:
    notes = []
    measured = {row.strategy: row.ours for row in block.rows if row.ours}
    if measured:
        epochs = " and ".join(map(str, block.epochs))
        seeds = ", ".join(map(str, block.seeds))
        spread = (
            f"95 % bootstrap interval over queries, seed {seeds}"
            if len(block.seeds) == 1
            else f"smallest and largest of the seeds {seeds}, around their mean"
        )
        chosen = ", learning rate and epoch chosen on other queries" if block.is_chosen else ""
        notes.append(f"Ours: after epoch {epochs}{chosen}; brackets: {spread}.")
        pool = ", ".join(tables.strategy_name(name) for name in measured)
        if has_distance:
            notes.append(f"D_mah is taken over {pool}, and compares only these.")
        else:
            notes.append(
                "Distance: Euclidean, to R = 1 and F = 0; D_mah wants at least "
                f"{pareto.MIN_METHODS} methods whose rates differ."
            )
        if block.kernel:
            notes.append(block.kernel)
        if any(m.non_sf for m in measured.values()):
            ours = {
                "words": "the share of answers without a word that marks the behavior",
                "classifier": "the probability by a classifier trained here",
            }.get(block.non_sf_by, f"by {block.non_sf_by}")
            beside = "; the paper's is a classifier's probability" if block.paper else ""
            notes.append(f"Non-SF here: {ours}{beside}.")
        if len(block.seeds) > 1:
            notes.append(
                "Pareto: by the means over seeds; in brackets, the seeds in which it is so."
            )
        if any(m.is_tie for m in measured.values()):
            notes.append("~: the Pareto flag hangs on a tie within the printed decimals.")
        if block.is_negative and has_distance:
            notes.append(
                "R and F are negatively correlated over these methods, so a better one may have a "
                "larger D_mah."
            )
        damaged = [
            tables.strategy_name(name)
            + (f" in {m.damaged} of {len(block.seeds)} seeds" if len(block.seeds) > 1 else "")
            for name, m in measured.items()
            if m.damaged
        ]
        if damaged:
            notes.append(
                f"Judged damaged (†, ours): {', '.join(damaged)}. A low F is no merit there, and "
                "what is damaged is no candidate for the Pareto set."
            )
    if block.paper:
        notes += _paper_notes(block.paper, is_beside=bool(measured))
    return tuple(notes)


def _paper_notes(paper: published.PublishedBlock, *, is_beside: bool) -> list[str]:
    difference, explained = (
        f"{100 * share:.2g} %" for share in (paper.distance_difference, paper.rounding_error)
    )
    if paper.distance_difference >= 1:
        difference = f"{100 * paper.distance_difference:.0f} %"
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
    wrong = [tables.strategy_name(row.strategy) for row in paper.rows if row.is_wrong_flag]
    if wrong:
        notes.append(
            f"‡: the paper prints {' and '.join(wrong)} as Pareto-optimal, but another of its own "
            "methods is better in both rates."
        )
    ties = [tables.strategy_name(row.strategy) for row in paper.rows if row.is_tie]
    if ties:
        notes.append(
            f"~: the paper's flag of {' and '.join(ties)} hangs on digits that it does not print."
        )
    if paper.is_negative:
        notes.append(
            "The paper's R and F are negatively correlated here, so a better method may have a "
            "larger D_mah."
        )
    return notes


MARKS = {"": "", "distance": " †", "flag": " ‡", "tie": " ~"}


def _headings(grid: BlockGrid) -> list[str]:
    """Returns the columns' titles in one line each, ours and the paper's told apart."""
    both = 0 < grid.num_ours < len(grid.columns) - 1
    return [
        name if i == 0 or not both else f"{name}, {'ours' if i <= grid.num_ours else 'paper'}"
        for i, name in enumerate(grid.columns)
    ]


def render_terminal(block: Block) -> str:
    """Returns a block as plain text; an asterisk marks the two best."""
    grid = lay_out(block)
    headings = [name.replace(", ", ",\n") for name in _headings(grid)]
    columns = tuple(
        tables.Column(name, "left" if i == 0 else "right") for i, name in enumerate(headings)
    )
    rows = tuple(
        tuple(cell.text + ("*" if cell.is_best else "") + MARKS[cell.mark] for cell in row)
        for row in grid.rows
    )
    notes = [*grid.notes]
    if any(cell.is_best for row in grid.rows for cell in row):
        notes.append("*: the two best among the Pareto-optimal methods.")
    title = visible(" ".join(block.title.split()))
    return f"{title}\n\n{tables.render_terminal(tables.Table(columns, rows, tuple(notes)))}"


def render_markdown(block: Block) -> str:
    """Returns a block in Markdown: methods off the frontier in italics, the two best in bold."""
    grid = lay_out(block)
    names = _headings(grid)
    lines = [f"### {escape_markdown(block.title)}", ""]
    lines.append("| " + " | ".join(escape_markdown(name) for name in names) + " |")
    lines.append("| " + " | ".join(["---", *["--:"] * (len(names) - 1)]) + " |")
    for row in grid.rows:
        cells = []
        for cell in row:
            text = escape_markdown(cell.text)
            if cell.is_best:
                text = f"**{text}**"
            elif cell.is_gray:
                text = f"*{text}*"
            cells.append(text + escape_markdown(MARKS[cell.mark]).rstrip())
        lines.append("| " + " | ".join(cells) + " |")
    for note in grid.notes:
        lines += ["", escape_markdown_line(note)]
    return "\n".join(lines)


# As the paper defines them, so that a table may be pasted beside its own.
LATEX_PREAMBLE = r"""% Wants \usepackage{booktabs} and \usepackage[table]{xcolor}.
\providecommand{\gray}[1]{\textcolor{gray}{#1}}
\definecolor{paretoBlue}{RGB}{220,236,252}
\providecommand{\bestbg}[1]{\cellcolor{paretoBlue}{#1}}
"""
_LATEX_MARKS = {"": "", "distance": r"$^\dagger$", "flag": r"$^\ddagger$", "tie": r"$^\sim$"}
_LATEX_COLUMNS = {
    "F": r"F$\downarrow$",
    "R": r"R$\uparrow$",
    "D_mah": r"$D_{\mathrm{mah}}\downarrow$",
    "Distance": r"Distance$\downarrow$",
    "Non-SF": r"Non-SF$\uparrow$",
}


def render_latex(block: Block) -> str:
    """Returns a block as a LaTeX table in the paper's manner (see `LATEX_PREAMBLE`)."""
    grid = lay_out(block)
    num_paper = len(grid.columns) - 1 - grid.num_ours
    lines = [
        r"\begin{table}[h]",
        r"\centering",
        rf"\caption{{{escape_latex(block.title)}. {escape_latex(' '.join(grid.notes))}}}",
        rf"\begin{{tabular}}{{l{'r' * grid.num_ours}{'r' * num_paper}}}",
        r"\toprule",
    ]
    if grid.num_ours and num_paper:
        last = grid.num_ours + 1
        lines += [
            rf"& \multicolumn{{{grid.num_ours}}}{{c}}{{ours}} "
            rf"& \multicolumn{{{num_paper}}}{{c}}{{the paper}} \\",
            rf"\cmidrule(lr){{2-{last}}} \cmidrule(lr){{{last + 1}-{last + num_paper}}}",
        ]
    names = [_LATEX_COLUMNS.get(name, escape_latex(name)) for name in grid.columns]
    lines += [" & ".join(names) + r" \\", r"\midrule"]
    for row in grid.rows:
        cells = []
        for cell in row:
            text = escape_latex(cell.text)
            if cell.is_best:
                text = rf"\bestbg{{{text}}}"
            elif cell.is_gray:
                text = rf"\gray{{{text}}}"
            cells.append(text + _LATEX_MARKS[cell.mark])
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines)


_CSV_COLUMNS = (
    *("name", "dataset", "model", "algorithm", "strategy", "source", "epochs", "seeds"),
    *("forget", "forget_low", "forget_high", "retain", "retain_low", "retain_high"),
    *("non_sf", "non_sf_low", "non_sf_high", "spread", "d_mah", "euclidean"),
    *("pareto", "tie", "top_two_d_mah", "top_two_non_sf", "damaged"),
    *("d_mah_follows", "pareto_flag_wrong", "paper_table", "kernel"),
)


def render_csv(blocks: Sequence[Block]) -> str:
    """Returns all blocks as one CSV: a row per strategy and source, ours or the paper's.

    Args:
      blocks: the blocks.

    Returns:
      Lines with a header; empty where a value is not known. `spread` says what low and high are:
      interval (95 %, over queries) or seeds (smallest and largest).
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for block in blocks:
        grid = lay_out(block)
        names = {"name": block.name, "dataset": block.dataset, "model": block.model}
        names["algorithm"] = block.algorithm
        shared = {key: escape_csv(text) for key, text in names.items()}
        for row, cells in zip(block.rows, grid.rows, strict=True):
            ours, theirs = cells[1 : grid.num_ours + 1], cells[grid.num_ours + 1 :]
            titles = grid.columns[1 : grid.num_ours + 1], grid.columns[grid.num_ours + 1 :]
            line = shared | {"strategy": escape_csv(row.strategy)}
            if row.ours:
                best = {n for n, cell in zip(titles[0], ours, strict=True) if cell.is_best}
                writer.writerow(line | _csv_ours(block, row.ours, best))
            if row.paper and block.paper:
                best = {n for n, cell in zip(titles[1], theirs, strict=True) if cell.is_best}
                writer.writerow(line | _csv_paper(block.paper, row.paper, best))
    return text.getvalue()


def _csv_ours(block: Block, measured: Measured, best: set[str]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "source": "ours",
        "epochs": " ".join(map(str, block.epochs)),
        "seeds": " ".join(map(str, block.seeds)),
        "spread": "interval" if len(block.seeds) == 1 else "seeds",
        "d_mah": "" if measured.distance is None else f"{measured.distance:.6g}",
        "euclidean": f"{measured.euclidean:.6g}",
        "pareto": _yes(measured.is_pareto),
        "tie": _yes(measured.is_tie),
        "top_two_d_mah": _yes("D_mah" in best),
        "top_two_non_sf": _yes("Non-SF" in best),
        "damaged": _yes(bool(measured.damaged)),
        "kernel": escape_csv(block.kernel),
    }
    for name in ("forget", "retain", "non_sf"):
        rate = getattr(measured, name)
        if rate:
            line[name] = f"{rate['mean']:.6g}"
            line |= {f"{name}_{end}": f"{rate[end]:.6g}" for end in ("low", "high")}
    return line


def _csv_paper(
    paper: published.PublishedBlock, row: published.PublishedRow, best: set[str]
) -> dict[str, Any]:
    return {
        "source": "paper",
        "forget": f"{row.forget:.{paper.decimals}f}",
        "retain": f"{row.retain:.{paper.decimals}f}",
        "non_sf": "" if row.non_sf is None else f"{row.non_sf:.3f}",
        "d_mah": f"{row.distance:.{paper.decimals}f}",
        "pareto": _yes(row.is_pareto),
        "tie": _yes(row.is_tie),
        "top_two_d_mah": _yes("D_mah" in best),
        "top_two_non_sf": _yes("Non-SF" in best),
        "d_mah_follows": _yes(paper.follows),
        "pareto_flag_wrong": _yes(row.is_wrong_flag),
        "paper_table": paper.table,
    }


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"
