"""Tables of a run for the terminal and for Markdown: pure functions from metrics to text."""

import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from raslik_jax.evaluation.summary import IntervalEntry, MethodEntry, Metrics, ModelEntry

# Names as the paper prints them; a strategy or algorithm that is not here shows its own.
STRATEGY_NAMES = {
    "random": "Random",
    "embedding": "Embedding",
    "bm25": "BM25",
    "oracle": "Oracle",
    "cr": "CR",
    **{f"cr_{x}": f"CR-{x}" for x in (25, 35, 45, 50, 62, 75)},
    "raslik_f": "RASLIK-F",
    "raslik": "RASLIK",
    "exact": "Exact kernel",
    "random_anywhere": "Random, any retain",
    "oracle_anywhere": "Oracle, any retain",
    "raslik_f_anywhere": "RASLIK-F, any retain",
}
_REFERENCES = {
    "finetuned": "the answers of the fine-tuned model before unlearning",
    "backbone": "the answers of the backbone",
    "gold": "the gold answers",
}
_NOT_KNOWN = "-"


class Column(NamedTuple):
    """One column of a table.

    Attributes:
      title: its heading; a line break in it is kept in the terminal.
      align: where its cells stand.
      width: characters at which the terminal wraps its cells; None never wraps.
    """

    title: str
    align: Literal["left", "right"] = "left"
    width: int | None = None


class Table(NamedTuple):
    """A table of plain text.

    Attributes:
      columns: the columns.
      rows: one tuple of cells per row; a plain string is a heading over the rows that follow.
      notes: sentences that stand below.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...] | str, ...]
    notes: tuple[str, ...] = ()


def strategy_name(strategy: str) -> str:
    """Returns the printed name of a strategy: RASLIK-F for raslik_f."""
    return STRATEGY_NAMES.get(strategy, strategy)


def algorithm_name(algorithm: str) -> str:
    """Returns the printed name of an unlearning algorithm: GA_GDR for ga_gdr."""
    return algorithm.upper()


def format_interval(
    entry: IntervalEntry | None, *, signed: bool = False, end_decimals: int = 2
) -> str:
    """Returns a mean with its interval, as in "0.312 [0.28, 0.35]".

    Args:
      entry: the mean and the ends, or None for what was not measured.
      signed: show the sign of positive numbers too, for differences.
      end_decimals: decimals of the ends; two say enough of an interval over a hundred queries.

    Returns:
      The text; "-" for None.
    """
    if entry is None:
        return _NOT_KNOWN
    sign = "+" if signed else ""
    low, high = (_number(entry[end], f"{sign}.{end_decimals}f") for end in ("low", "high"))
    return f"{_number(entry['mean'], sign + '.3f')} [{low}, {high}]"


def _number(value: float | None, spec: str = ".3f") -> str:
    if value is None:
        return _NOT_KNOWN
    text = format(value, spec)
    # -0.0004 would print as "-0.000", which reads like a direction.
    return format(0.0, spec) if not text.strip("+-0.") else text


def render_terminal(table: Table) -> str:
    """Returns the table as aligned plain text, cells wrapped at their column's width.

    White space inside a cell is collapsed and control characters are made visible, so that no
    generated text can move the cursor.

    Args:
      table: the table.

    Returns:
      Lines without trailing space, joined by line breaks, ending without one.
    """
    titles = [column.title.split("\n") for column in table.columns]
    rows = [
        [_wrap(cell, column.width) for cell, column in zip(row, table.columns, strict=True)]
        if not isinstance(row, str)
        else row
        for row in table.rows
    ]
    widths = [
        max(
            _width(line)
            for cells in [title, *[row[i] for row in rows if not isinstance(row, str)]]
            for line in cells
        )
        for i, title in enumerate(titles)
    ]
    height = max(map(len, titles))
    lines = _lay_out([[""] * (height - len(title)) + title for title in titles], widths, table)
    lines.append("  ".join("-" * width for width in widths))
    # Rows of several lines need a gap between them, unless headings part them already.
    spaced = any(column.width for column in table.columns) and not any(
        isinstance(row, str) for row in rows
    )
    for position, row in enumerate(rows):
        if isinstance(row, str):
            lines += ["", _visible(row)] if position else [_visible(row)]
        else:
            lines += _lay_out(row, widths, table)
            if spaced and position + 1 < len(rows):
                lines.append("")
    if table.notes:
        lines.append("")
        lines += [line for note in table.notes for line in textwrap.wrap(note, 100)]
    return "\n".join(line.rstrip() for line in lines)


def _lay_out(cells: Sequence[Sequence[str]], widths: Sequence[int], table: Table) -> list[str]:
    lines = []
    for position in range(max(len(cell) for cell in cells)):
        parts = []
        for cell, width, column in zip(cells, widths, table.columns, strict=True):
            text = cell[position] if position < len(cell) else ""
            pad = " " * (width - _width(text))
            parts.append(pad + text if column.align == "right" else text + pad)
        lines.append("  ".join(parts))
    return lines


def _wrap(text: str, width: int | None) -> list[str]:
    text = _visible(text)
    return [text] if width is None else textwrap.wrap(text, width) or [""]


def _visible(text: str) -> str:
    collapsed = " ".join(text.split())
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(c) else c for c in collapsed)


def _is_control(character: str) -> bool:
    # Escape sequences move the cursor, and marks of direction reorder what is read.
    return unicodedata.category(character)[0] == "C"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def render_markdown(table: Table) -> str:
    """Returns the table in Markdown, every cell escaped so that it shows as it is.

    Args:
      table: the table.

    Returns:
      The lines, headings as bold rows and notes below, ending without a line break.
    """
    titles = [_escape(column.title.replace("\n", " ")) for column in table.columns]
    marks = ["--:" if column.align == "right" else "---" for column in table.columns]
    lines = [_pipe(titles), _pipe(marks)]
    for row in table.rows:
        if isinstance(row, str):
            lines.append(_pipe([f"**{_escape(row)}**", *[""] * (len(titles) - 1)]))
        else:
            lines.append(_pipe([_escape(cell) for cell in row]))
    for note in table.notes:
        lines += ["", _escape(note)]
    return "\n".join(lines)


def _pipe(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    text = text.strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", text)
    text = "".join(
        "�" if unicodedata.category(c) == "Cc" and c not in "\n\r\t" else c for c in text
    )
    return re.sub(r"\s*[\r\n]\s*", "<br>", text)


def last_epochs(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Returns the entries of the last epoch of each strategy and algorithm, in their order."""
    last: dict[tuple[str, str], int] = {}
    for entry in methods:
        name = entry["algorithm"], entry["strategy"]
        last[name] = max(entry["epoch"], last.get(name, 0))
    return [e for e in methods if e["epoch"] == last[e["algorithm"], e["strategy"]]]


def results_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table:
    """Returns the result table of a run: fine-tuned, every method, backbone.

    Methods stand below the name of their algorithm. Brackets hold 95 % bootstrap intervals over
    queries. A column that no row has a value for (D_mah, differences to Random) is left out.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.

    Returns:
      The table; its notes say what the columns mean, and name empty predictions if there are any.
    """
    methods = last_epochs(metrics["methods"]) if epochs == "last" else metrics["methods"]
    has_difference = any(entry.get("forget_minus_random") for entry in methods)
    has_mahalanobis = any(entry.get("mahalanobis") for entry in methods)
    has_epochs = epochs == "all" or metrics.get("chosen")
    columns = [
        Column("Model"),
        *([Column("Epoch", "right")] if has_epochs else []),
        Column("F, forget rate\n(lower is better)"),
        Column("R, retain rate\n(higher is better)"),
        Column("Non-SF, target\n(higher is better)"),
        Column("Non-SF,\nnormal", "right"),
        Column("Distance\nto ideal", "right"),
        *([Column("D_mah", "right")] if has_mahalanobis else []),
        *([Column("F minus F of Random")] if has_difference else []),
        Column("Pareto"),
    ]

    def cells(name: str, entry: ModelEntry, method: MethodEntry | None) -> tuple[str, ...]:
        distance = method.get("mahalanobis") if method else None
        return (
            name,
            *([str(method["epoch"]) if method else _NOT_KNOWN] if has_epochs else []),
            format_interval(entry["forget"]),
            format_interval(entry["retain"]),
            format_interval(entry["non_sf_target"]),
            _number(entry["non_sf_normal"]["mean"]),
            _number(entry["euclidean"]),
            *([_mahalanobis(distance)] if has_mahalanobis else []),
            *(
                [format_interval(method and method.get("forget_minus_random"), signed=True)]
                if has_difference
                else []
            ),
            _flag(method) if method else _NOT_KNOWN,
        )

    rows: list[tuple[str, ...] | str] = [cells("Fine-tuned", metrics["finetuned"], None)]
    if "backbone" in metrics:
        rows.append(cells("Backbone", metrics["backbone"], None))
    for algorithm in dict.fromkeys(entry["algorithm"] for entry in methods):
        block = [entry for entry in methods if entry["algorithm"] == algorithm]
        heading = algorithm_name(algorithm)
        if epochs == "last":
            shown = sorted({entry["epoch"] for entry in block})
            after = ", after epoch " + " and ".join(map(str, shown))
            heading += ", at the chosen learning rates" if metrics.get("chosen") else after
        rows.append(heading)
        rows += [cells(strategy_name(entry["strategy"]), entry, entry) for entry in block]
    return Table(tuple(columns), tuple(rows), _result_notes(metrics, methods))


def _mahalanobis(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return _NOT_KNOWN
    return f"{entry['distance']:.3f}" + ("!" if entry["is_negative"] else "")


def _flag(entry: MethodEntry) -> str:
    return ("yes" if entry["pareto"] else "no") + (" ~" if entry["tie"] else "")


def _result_notes(metrics: Metrics, methods: Sequence[MethodEntry]) -> tuple[str, ...]:
    reference = metrics.get("reference", "finetuned")
    notes = [
        f"F and R: mean ROUGE-L F1 against {_REFERENCES.get(reference, reference)}, on held-out "
        "target and normal queries. Distance: Euclidean, to R = 1 and F = 0. Brackets: 95 % "
        "bootstrap interval over queries."
    ]
    if "backbone" in metrics and reference == "finetuned":
        notes.append(
            "The backbone never learned the behaviour: an F below its own is damage, not "
            "forgetting."
        )
    if any(entry["tie"] for entry in methods):
        notes.append("~: the Pareto flag hangs on a tie within three decimals.")
    distances = [entry.get("mahalanobis") for entry in methods]
    if any(distances):
        pool = ", ".join(dict.fromkeys(strategy_name(entry["strategy"]) for entry in methods))
        notes.append(
            f"D_mah: over the pool {pool} of one algorithm and epoch; to be compared only there."
        )
    if any(distance and distance["is_negative"] for distance in distances):
        notes.append(
            "!: F and R are negatively correlated in this pool, so a better method may have a "
            "larger D_mah."
        )
    empty = [
        f"{strategy_name(e['strategy'])} {algorithm_name(e['algorithm'])} epoch {e['epoch']}: "
        f"{e['empty']}"
        for e in methods
        if e["empty"]
    ]
    if empty:
        notes.append("Empty answers, each counted as ROUGE 0: " + "; ".join(empty) + ".")
    if metrics["finetuned"]["empty_references"]:
        notes.append(
            f"Empty references: {metrics['finetuned']['empty_references']}; their pairs score 0."
        )
    return tuple(notes)


def checks_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table:
    """Returns the table that tells forgetting from collapse: empty answers, diversity, differences.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.

    Returns:
      The table, with the retain rate's paired difference to Random.
    """
    methods = last_epochs(metrics["methods"]) if epochs == "last" else metrics["methods"]
    columns = (
        Column("Model"),
        Column("Algorithm"),
        Column("Epoch", "right"),
        Column("Empty", "right"),
        Column("Distinct-2", "right"),
        Column("Repetition-4", "right"),
        Column("Non-SF, normal"),
        Column("R minus R of Random"),
    )

    def cells(
        names: tuple[str, str, str], entry: ModelEntry, difference: IntervalEntry | None
    ) -> tuple[str, ...]:
        return (
            *names,
            str(entry["empty"]),
            _number(entry["distinct_2"]),
            _number(entry["repetition_4"]),
            format_interval(entry["non_sf_normal"]),
            format_interval(difference, signed=True),
        )

    rows = [cells(("Fine-tuned", _NOT_KNOWN, _NOT_KNOWN), metrics["finetuned"], None)]
    if "backbone" in metrics:
        rows.append(cells(("Backbone", _NOT_KNOWN, _NOT_KNOWN), metrics["backbone"], None))
    for entry in methods:
        algorithm, epoch = algorithm_name(entry["algorithm"]), str(entry["epoch"])
        names = strategy_name(entry["strategy"]), algorithm, epoch
        rows.append(cells(names, entry, entry.get("retain_minus_random")))
    note = (
        "Distinct-2: share of different word pairs over all answers; far below the fine-tuned "
        "model's it means that answers have become alike. Repetition-4: share of four-word runs "
        "that an answer has said before."
    )
    return Table(columns, tuple(rows), (note,))


def retrieval_table(metrics: Metrics) -> Table:
    """Returns what each strategy retrieved, and how well it matches the labels.

    Args:
      metrics: the content of metrics.json.

    Returns:
      The table, one row per strategy; "-" where there are no labels or nothing was ranked.
    """
    columns = (
        Column("Strategy"),
        Column("Forget\nitems", "right"),
        Column("Precision", "right"),
        Column("Base\nrate", "right"),
        Column("Retain\nitems", "right"),
        Column("Targets\nin retain", "right"),
        Column("Retain,\nscore >= 0", "right"),
        Column("AUROC", "right"),
        Column("AUPRC", "right"),
    )
    rows = tuple(
        (
            strategy_name(strategy),
            str(entry["num_forget"]),
            _number(entry.get("precision")),
            _number(entry.get("base_rate")),
            str(entry["num_retain"]),
            str(entry.get("targets_in_retain", _NOT_KNOWN)),
            str(entry.get("retain_scored_positive", _NOT_KNOWN)),
            _number(entry.get("auroc")),
            _number(entry.get("auprc")),
        )
        for strategy, entry in metrics["retrieval"].items()
    )
    note = (
        "Precision: share of the forget set that is labelled a target. Score >= 0: retain items "
        "that are not anti-aligned with the queries."
    )
    return Table(columns, rows, (note,))


def seeds_table(runs: Sequence[Metrics]) -> Table:
    """Returns the last epoch of several seeds of one experiment, as mean [smallest, largest].

    Args:
      runs: the metrics of each seed, at least one, all with the same methods.

    Returns:
      The table. "Below Random" counts the seeds whose whole interval of F minus F of Random lies
      below zero, and "closer" those with a smaller Euclidean distance than Random.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    if not runs:
        raise ValueError("metrics of at least one run wanted, none came: name run directories")
    tables = [
        {(e["algorithm"], e["strategy"]): e for e in last_epochs(run["methods"])} for run in runs
    ]
    for run, found in zip(runs, tables, strict=True):
        if found.keys() != tables[0].keys():
            raise ValueError(
                f"runs of the same methods wanted, but {run['name']!r} with seed {run['seed']} has "
                f"others than {runs[0]['name']!r} with seed {runs[0]['seed']}: join like with like"
            )
    columns = (
        Column("Model"),
        Column("F, forget rate"),
        Column("R, retain rate"),
        Column("Non-SF, target"),
        Column("Distance"),
        Column("Precision"),
        Column("Below\nRandom", "right"),
        Column("Closer", "right"),
    )

    def cells(
        name: str, models: Sequence[ModelEntry], precision: Sequence[float], counts: Sequence[str]
    ) -> tuple[str, ...]:
        return (
            name,
            _spread([model["forget"]["mean"] for model in models]),
            _spread([model["retain"]["mean"] for model in models]),
            _spread([model["non_sf_target"]["mean"] for model in models]),
            _spread([model["euclidean"] for model in models]),
            _spread(precision),
            *counts,
        )

    none = (_NOT_KNOWN, _NOT_KNOWN)
    rows: list[tuple[str, ...] | str] = [
        cells("Fine-tuned", [run["finetuned"] for run in runs], [], none)
    ]
    if all("backbone" in run for run in runs):
        rows.append(cells("Backbone", [run["backbone"] for run in runs], [], none))
    for algorithm in dict.fromkeys(name for name, _ in tables[0]):
        rows.append(algorithm_name(algorithm))
        for strategy in (s for name, s in tables[0] if name == algorithm):
            entries = [found[algorithm, strategy] for found in tables]
            precision = [
                run["retrieval"][strategy]["precision"]
                for run in runs
                if "precision" in run["retrieval"].get(strategy, {})
            ]
            counts = _versus_random(entries, [found.get((algorithm, "random")) for found in tables])
            rows.append(cells(strategy_name(strategy), entries, precision, counts))
    seeds = ", ".join(str(run["seed"]) for run in runs)
    note = (
        f"Mean over the {len(runs)} seeds {seeds}, in brackets the smallest and the largest. Below "
        "Random: seeds with the whole 95 % interval of F minus F of Random below zero. Closer: "
        "seeds with a smaller distance to R = 1, F = 0 than Random."
    )
    return Table(columns, tuple(rows), (note,))


def _versus_random(
    entries: Sequence[MethodEntry], randoms: Sequence[MethodEntry | None]
) -> tuple[str, str]:
    below = [e["forget_minus_random"] for e in entries]
    closer = [
        entry["euclidean"] < random["euclidean"]
        for entry, random in zip(entries, randoms, strict=True)
        if random is not None and entry is not random
    ]
    known = [difference for difference in below if difference is not None]
    if not known or not closer:
        return _NOT_KNOWN, _NOT_KNOWN
    num_below = sum(difference["high"] < 0 for difference in known)
    return f"{num_below} of {len(known)}", f"{sum(closer)} of {len(closer)}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return _NOT_KNOWN
    mean = sum(values) / len(values)
    entry = IntervalEntry(mean=mean, low=min(values), high=max(values))
    return format_interval(entry, end_decimals=3)


def completions_table(
    prompts: Mapping[str, str],
    answers: Mapping[str, Mapping[str, str]],
    *,
    ids: Sequence[str],
    width: int = 30,
) -> Table:
    """Returns the answers of all models side by side: one row per prompt, one column per model.

    Args:
      prompts: instruction by query id.
      answers: for each model, in the order of the columns, its answer by query id.
      ids: the queries to show, in this order.
      width: characters at which the terminal wraps each column.

    Returns:
      The table; an empty answer shows as "(empty)".

    Raises:
      ValueError: an id without a prompt or without some model's answer.
    """
    _check_answers(prompts, answers, ids)
    columns = (Column("Prompt", width=width), *(Column(name, width=width) for name in answers))
    rows = tuple(
        (prompts[i], *(texts[i].strip() or "(empty)" for texts in answers.values())) for i in ids
    )
    return Table(columns, rows)


def completions_by_prompt(
    prompts: Mapping[str, str],
    answers: Mapping[str, Mapping[str, str]],
    *,
    ids: Sequence[str],
    width: int = 80,
) -> Table:
    """Returns the answers of all models one below the other, under their prompt.

    The form for the terminal, where many columns would be too narrow to read.

    Args:
      prompts: instruction by query id.
      answers: for each model, in the order of the rows, its answer by query id.
      ids: the queries to show, in this order.
      width: characters at which answers wrap.

    Returns:
      The table; an empty answer shows as "(empty)".

    Raises:
      ValueError: an id without a prompt or without some model's answer.
    """
    _check_answers(prompts, answers, ids)
    rows: list[tuple[str, ...] | str] = []
    for i in ids:
        rows.append(f"> {prompts[i]}")
        rows += [(name, texts[i].strip() or "(empty)") for name, texts in answers.items()]
    return Table((Column("Model"), Column("Answer", width=width)), tuple(rows))


def _check_answers(
    prompts: Mapping[str, str], answers: Mapping[str, Mapping[str, str]], ids: Sequence[str]
) -> None:
    problems = [f"{i} has no prompt" for i in ids if i not in prompts]
    problems += [
        f"{i} has no answer of {name}"
        for name, texts in answers.items()
        for i in ids
        if i not in texts
    ]
    if problems:
        raise ValueError(
            f"a prompt and every model's answer wanted for each id, but {'; '.join(problems[:5])} "
            f"({len(problems)} in all): show queries that all models answered"
        )
