"""Tables of a run for the terminal and for Markdown: pure functions from metrics to text."""

import functools
import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raslik_jax.config import kernel_name
from raslik_jax.evaluate import judgment
from raslik_jax.evaluate.summary import IntervalEntry, MethodEntry, Metrics, ModelEntry
from raslik_jax.report.markup import escape_markdown, escape_markdown_line, visible

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
# Those that rank by gradients.
_BY_KERNEL = ("raslik", "raslik_f", "raslik_f_anywhere", "exact")
REFERENCES = {
    "finetuned": "the answers of the fine-tuned model before unlearning",
    "backbone": "the answers of the backbone",
    "gold": "the gold answers",
}
_NOT_KNOWN = "-"
_DAMAGED = "†"


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


def kernel_notes(settings: Mapping[str, Any], strategies: Iterable[str]) -> list[str]:
    """Returns the kernel of the strategies that have one, where it is not the paper's.

    Args:
      settings: that the numbers were measured with.
      strategies: in the table.
    """
    names = [strategy_name(name) for name in dict.fromkeys(strategies) if name in _BY_KERNEL]
    kernel = kernel_name(settings)
    if not names or not kernel:
        return []
    return [f"Kernel of {', '.join(names)}, not the paper's: {kernel}."]


def algorithm_name(algorithm: str) -> str:
    """Returns the printed name of an unlearning algorithm: GA_GDR for ga_gdr."""
    return {"simnpo": "SimNPO"}.get(algorithm, algorithm.upper())


def format_interval(
    entry: IntervalEntry | None, *, signed: bool = False, end_decimals: int | None = None
) -> str:
    """Returns a mean with its interval, as in "0.312 [0.28, 0.35]".

    Args:
      entry: the mean and the ends, or None for what was not measured.
      signed: show the sign of positive numbers too, for differences.
      end_decimals: decimals of the ends; by default two, which say enough of an interval over a
        hundred queries, and three of a difference, whose ends say whether zero lies between them.

    Returns:
      The text; "-" for None.
    """
    if entry is None:
        return _NOT_KNOWN
    sign = "+" if signed else ""
    decimals = (3 if signed else 2) if end_decimals is None else end_decimals
    low, high = (format_number(entry[end], f"{sign}.{decimals}f") for end in ("low", "high"))
    return f"{format_number(entry['mean'], sign + '.3f')} [{low}, {high}]"


def format_number(value: float | None, spec: str = ".3f") -> str:
    """Returns a number as text, never as minus zero; "-" for None."""
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
        lines += [line for note in table.notes for line in textwrap.wrap(_visible(note), 100)]
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
    return visible(" ".join(text.split()))


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def render_markdown(table: Table) -> str:
    """Returns the table in Markdown, every cell escaped so that it shows as it is.

    Args:
      table: the table.

    Returns:
      The lines, headings as bold rows and notes below, ending without a line break.
    """
    titles = [escape_markdown(column.title.replace("\n", " ")) for column in table.columns]
    marks = ["--:" if column.align == "right" else "---" for column in table.columns]
    lines = [_pipe(titles), _pipe(marks)]
    for row in table.rows:
        if isinstance(row, str):
            lines.append(_pipe([f"**{escape_markdown(row)}**", *[""] * (len(titles) - 1)]))
        else:
            lines.append(_pipe([escape_markdown(cell) for cell in row]))
    for note in table.notes:
        lines += ["", escape_markdown_line(note)]
    return "\n".join(lines)


def _pipe(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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
    queries. A column that no row has a value for (F and R, Non-SF, D_mah, differences to Random) is
    left out.

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
    before = metrics["finetuned"]
    parts: list[tuple[bool, Column, Callable[[ModelEntry, MethodEntry | None], str]]] = [
        (
            bool(has_epochs),
            Column("Epoch", "right"),
            lambda entry, method: str(method["epoch"]) if method else _NOT_KNOWN,
        ),
        (
            before["forget"] is not None,
            Column("F, forget rate\n(lower is better)"),
            lambda entry, method: format_interval(entry["forget"]),
        ),
        (
            before["retain"] is not None,
            Column("R, retain rate\n(higher is better)"),
            lambda entry, method: format_interval(entry["retain"]),
        ),
        (
            before["non_sf_target"] is not None,
            Column("Non-SF, target\n(higher is better)"),
            lambda entry, method: format_interval(entry["non_sf_target"]),
        ),
        (
            before["non_sf_normal"] is not None,
            Column("Non-SF,\nnormal", "right"),
            lambda entry, method: format_number(mean_of(entry["non_sf_normal"])),
        ),
        (
            before["euclidean"] is not None,
            Column("Distance\nto ideal", "right"),
            lambda entry, method: format_number(entry["euclidean"]),
        ),
        (
            has_mahalanobis,
            Column("D_mah", "right"),
            lambda entry, method: _mahalanobis(method and method.get("mahalanobis")),
        ),
        (
            has_difference,
            Column("F minus F of Random"),
            lambda entry, method: format_interval(
                method and method.get("forget_minus_random"), signed=True
            ),
        ),
        (
            before["euclidean"] is not None,
            Column("Pareto"),
            lambda entry, method: _flag(method) if method else _NOT_KNOWN,
        ),
    ]
    used = [(column, cell) for is_shown, column, cell in parts if is_shown]
    columns = [Column("Model"), *(column for column, _ in used)]
    if before["euclidean"] is None:
        columns.append(Column("Judgment"))

    def cells(name: str, entry: ModelEntry, method: MethodEntry | None) -> tuple[str, ...]:
        found = [cell(entry, method) for _, cell in used]
        if before["euclidean"] is None:
            found.append(_verdict(entry))
        return (_marked(name, entry), *found)

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


def mean_of(entry: IntervalEntry | None) -> float | None:
    """Returns the mean of an interval, None where there is none."""
    return None if entry is None else entry["mean"]


def _marked(name: str, entry: ModelEntry) -> str:
    """Returns a model's name, with a mark where it was judged damaged."""
    return f"{name} {_DAMAGED}" if judgment.is_damaged(entry) else name


def _verdict(entry: ModelEntry) -> str:
    found = entry.get("judgment")
    return f"{found['verdict']}: {'; '.join(found['reasons'])}" if found else _NOT_KNOWN


def judgment_sentence(metrics: Metrics, methods: Sequence[MethodEntry]) -> str:
    """Returns what became of the models, by verdict, in one sentence; "" where none was judged."""
    named: dict[str, list[str]] = {}
    for entry in methods:
        if "judgment" in entry:
            name = f"{strategy_name(entry['strategy'])} {algorithm_name(entry['algorithm'])}"
            if len({e["epoch"] for e in methods if _is_same(e, entry)}) > 1:
                name += f" epoch {entry['epoch']}"
            named.setdefault(entry["judgment"]["verdict"], []).append(name)
    parts = [
        f"{verdict}: {', '.join(named[verdict])}"
        for verdict in judgment.VERDICTS
        if verdict in named
    ]
    return f"Judgment: {'; '.join(parts)}." if parts else ""


def _is_same(one: MethodEntry, other: MethodEntry) -> bool:
    return (one["strategy"], one["algorithm"]) == (other["strategy"], other["algorithm"])


def behavior_sentence(metrics: Metrics) -> str:
    """Returns how far the behavior was there before unlearning; "" where nothing measured it."""
    found = metrics.get("behavior")
    text = judgment.describe_behavior(found) if found else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _classifier_note(metrics: Metrics) -> list[str]:
    measured = metrics.get("non_sf") or {}
    if measured.get("by") != "classifier":
        return []
    scores = [
        f"{name} answers: {judgment.describe_classifier(found)}"
        for part, name in (("held_out", "held-out"), ("genuine", "genuine"))
        if (found := measured.get(part))
    ]
    return [
        "Non-SF: mean probability, by a classifier trained on the labels, that an answer does not "
        f"show the behavior. The classifier on {'; on '.join(scores)}."
    ]


def _mahalanobis(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return _NOT_KNOWN
    return f"{entry['distance']:.3f}" + ("!" if entry["is_negative"] else "")


def _flag(entry: MethodEntry) -> str:
    if entry["pareto"] is None:
        return _NOT_KNOWN
    return ("yes" if entry["pareto"] else "no") + (" ~" if entry["tie"] else "")


def _result_notes(metrics: Metrics, methods: Sequence[MethodEntry]) -> tuple[str, ...]:
    reference = metrics.get("reference", "finetuned")
    rates = [
        name
        for name, key in (("F", "forget"), ("R", "retain"))
        if metrics["finetuned"][key] is not None  # type: ignore[literal-required]
    ]
    notes = []
    if len(rates) == 2:
        notes.append(
            f"F and R: mean ROUGE-L F1 against {REFERENCES.get(reference, reference)}, on held-out "
            "target and normal queries. Distance: Euclidean, to R = 1 and F = 0. Brackets: 95 % "
            "bootstrap interval over queries."
        )
    else:
        lacking = [name for name in ("F", "R") if name not in rates]
        if rates:
            notes.append(
                f"{rates[0]}: mean ROUGE-L F1 against {REFERENCES.get(reference, reference)}. "
                "Brackets: 95 % bootstrap interval over queries."
            )
        notes.append(
            f"No {' and no '.join(lacking)}: the run has no "
            f"{' and no '.join({'F': 'target', 'R': 'normal'}[name] for name in lacking)} queries "
            "to measure on."
        )
    notes += kernel_notes(metrics["settings"], [entry["strategy"] for entry in methods])
    notes += _classifier_note(metrics)
    if "backbone" in metrics and reference == "finetuned" and "F" in rates:
        notes.append(
            "The backbone never learned the behavior: an F below its own forgets nothing more."
        )
    found = metrics.get("behavior")
    if found and (not found["is_shown"] or found["by"] == "likelihood"):
        notes.append(behavior_sentence(metrics))
    notes += [text for text in [judgment_sentence(metrics, methods)] if text]
    if any(entry["tie"] for entry in methods):
        notes.append("~: the Pareto flag hangs on a tie within three decimals.")
    if any(judgment.is_damaged(entry) for entry in methods):
        notes.append(
            f"{_DAMAGED}: damaged (the table of damage says how): a low F is then no forgetting, "
            "and the model is no candidate for the Pareto set."
        )
    notes += _distance_notes(metrics, methods)
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


def _distance_notes(metrics: Metrics, methods: Sequence[MethodEntry]) -> list[str]:
    """Returns what has to be known of D_mah: pool, epoch, condition number, the warning."""
    notes = []
    warned = False
    chosen = bool(metrics.get("chosen"))
    for block in _blocks(methods, across_epochs=chosen):
        known = [distance for entry in block if (distance := entry.get("mahalanobis"))]
        if known:
            pool = ", ".join(strategy_name(entry["strategy"]) for entry in block)
            number = known[0]["condition_number"]
            after = "chosen epochs" if chosen else f"epoch {block[0]['epoch']}"
            notes.append(
                f"D_mah of {algorithm_name(block[0]['algorithm'])}, {after}: pool {pool}; "
                f"correlations shrunk by a tenth, condition number {number:.3g}."
            )
            warned |= any(distance["is_negative"] for distance in known)
    if notes:
        notes.append("D_mah is to be compared within one pool only.")
    if warned:
        notes.append(
            "!: F and R are negatively correlated in this pool, so a better method may have a "
            "larger D_mah."
        )
    return notes


def _blocks(methods: Sequence[MethodEntry], *, across_epochs: bool) -> list[list[MethodEntry]]:
    """Returns the entries by algorithm and epoch, or algorithm alone: what is compared."""
    blocks: dict[tuple[str, int], list[MethodEntry]] = {}
    for entry in methods:
        epoch = 0 if across_epochs else entry["epoch"]
        blocks.setdefault((entry["algorithm"], epoch), []).append(entry)
    return list(blocks.values())


def distances_table(metrics: Metrics) -> Table:
    """Returns every distance to R = 1, F = 0, and what tells how far to trust it.

    Args:
      metrics: the content of metrics.json.

    Returns:
      The table over the last epoch of each method: Euclidean raw and in min-max normalized space,
      D_mah where there are enough methods.
    """
    methods = last_epochs(metrics["methods"])
    columns = (
        Column("Model"),
        Column("Epoch", "right"),
        Column("Euclidean", "right"),
        Column("Euclidean,\nmin-max", "right"),
        Column("D_mah", "right"),
        Column("Condition\nnumber", "right"),
    )
    rows: list[tuple[str, ...] | str] = []
    for algorithm in dict.fromkeys(entry["algorithm"] for entry in methods):
        rows.append(algorithm_name(algorithm))
        for entry in (e for e in methods if e["algorithm"] == algorithm):
            distance = entry.get("mahalanobis")
            rows.append(
                (
                    _marked(strategy_name(entry["strategy"]), entry),
                    str(entry["epoch"]),
                    format_number(entry["euclidean"]),
                    format_number(entry["euclidean_min_max"]),
                    _mahalanobis(distance),
                    f"{distance['condition_number']:.3g}" if distance else _NOT_KNOWN,
                )
            )
    notes = [
        "Min-max: after F and R were stretched to 0 to 1 over the methods of one algorithm and "
        "epoch, so it depends on which are compared.",
        *_distance_notes(metrics, methods),
    ]
    if not any(entry.get("mahalanobis") for entry in methods):
        notes.append("D_mah takes 5 methods of one algorithm and epoch whose rates differ.")
    return Table(columns, tuple(rows), tuple(notes))


def _rows_by_model(
    metrics: Metrics,
    cells: Callable[[ModelEntry], tuple[str, ...]],
    epochs: Literal["last", "all"],
) -> list[tuple[str, ...] | str]:
    """Returns a row for each model: its name, its epoch and its cells, under its algorithm."""
    methods = last_epochs(metrics["methods"]) if epochs == "last" else metrics["methods"]
    rows: list[tuple[str, ...] | str] = [("Fine-tuned", _NOT_KNOWN, *cells(metrics["finetuned"]))]
    if "backbone" in metrics:
        rows.append(("Backbone", _NOT_KNOWN, *cells(metrics["backbone"])))
    for algorithm in dict.fromkeys(entry["algorithm"] for entry in methods):
        rows.append(algorithm_name(algorithm))
        rows += [
            (_marked(strategy_name(entry["strategy"]), entry), str(entry["epoch"]), *cells(entry))
            for entry in methods
            if entry["algorithm"] == algorithm
        ]
    return rows


def perplexity_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table | None:
    """Returns the perplexity of every model on the three sets; None where it was not taken.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.
    """
    if not metrics["finetuned"].get("perplexity"):
        return None
    has_behavior = "behavior" in metrics["finetuned"]["perplexity"]
    names = ("forget", "retain", "held-out", *(("behavior",) if has_behavior else ()))

    def cells(entry: ModelEntry) -> tuple[str, ...]:
        found = entry.get("perplexity", {})
        return tuple(format_perplexity(found.get(name)) for name in names)

    rows = _rows_by_model(metrics, cells, epochs)
    columns = (
        Column("Model"),
        Column("Epoch", "right"),
        Column("Forget\n(higher is forgotten)"),
        Column("Retain\n(lower is better)"),
        Column("Held-out\n(lower is better)"),
        *([Column("Bad outputs\n(higher is forgotten)")] if has_behavior else []),
    )
    note = (
        "Perplexity of labeled answers, which no model wrote: training examples to forget, other "
        "training examples, held-out normal queries. Higher on the first alone is forgetting, "
        "higher everywhere is damage."
    )
    if has_behavior:
        note += (
            " Bad outputs: the outputs that retrieval traces, and the labeled answers to target "
            "queries."
        )
    return Table(columns, tuple(rows), (note,))


def format_perplexity(entry: IntervalEntry | None) -> str:
    """Returns a perplexity with its interval, in few digits: it may be anything from 1 up."""
    if entry is None:
        return _NOT_KNOWN
    mean, low, high = (f"{entry[end]:#.3g}".rstrip(".") for end in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def tofu_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table | None:
    """Returns TOFU's own metrics of every model; None where they were not taken.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.
    """
    if not metrics["finetuned"].get("tofu"):
        return None
    rows = _rows_by_model(metrics, _tofu_cells, epochs)
    columns = (
        Column("Model"),
        Column("Epoch", "right"),
        Column("Forget\nquality", "right"),
        Column("Model\nutility", "right"),
        *(Column(title) for title in _TOFU_SETS.values()),
    )
    notes = [
        "Of each set: probability of the answer / ROUGE-L recall / truth ratio (closer to 1 is "
        "better, also on the forget set, where 1 means that the model cannot tell). Model utility: "
        "harmonic mean of the nine numbers of the other sets. Forget quality: p-value of a "
        "Kolmogorov-Smirnov test against a model that was never trained on the forget set."
    ]
    if "forget_quality" not in metrics["finetuned"]["tofu"]:
        notes.append(
            "No forget quality: it takes a retain model; name a run with "
            "--corpus.tofu.train=retain by --evaluate.retain_run."
        )
    if metrics["finetuned"]["tofu"]["model_utility"] is None:
        notes.append("No model utility: with all of TOFU to forget there is no retain set.")
    return Table(columns, tuple(rows), tuple(notes))


_TOFU_SETS = {
    "forget": "Forget set",
    "retain": "Retain set",
    "real_authors": "Real authors",
    "world_facts": "World facts",
}


def _tofu_cells(entry: ModelEntry) -> tuple[str, ...]:
    found = entry["tofu"]
    quality = found.get("forget_quality")
    return (
        _NOT_KNOWN if quality is None else f"{quality:.3g}",
        format_number(found["model_utility"]),
        *(
            " / ".join(
                format_number(found["sets"][name][metric])
                for metric in ("probability", "rouge", "truth_ratio")
            )
            if name in found["sets"]
            else _NOT_KNOWN
            for name in _TOFU_SETS
        ),
    )


def checks_table(metrics: Metrics, *, epochs: Literal["last", "all"] = "last") -> Table:
    """Returns the table that tells forgetting from damage: the judgment and what it rests on.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.

    Returns:
      The table, with the retain rate's paired difference to Random.
    """
    methods = last_epochs(metrics["methods"]) if epochs == "last" else metrics["methods"]
    everyone = [metrics["finetuned"], *methods]
    has_normal = metrics["finetuned"]["non_sf_normal"] is not None
    has_difference = any(entry.get("retain_minus_random") for entry in methods)
    has_likelihood = any(entry.get("answer_perplexity") for entry in everyone)
    columns = (
        Column("Model"),
        Column("Algorithm"),
        Column("Epoch", "right"),
        Column("Empty", "right"),
        Column("Distinct-2", "right"),
        Column("Repetition-4", "right"),
        *([Column("Perplexity under\nthe backbone", "right")] if has_likelihood else []),
        *([Column("Non-SF, normal")] if has_normal else []),
        *([Column("R minus R of Random")] if has_difference else []),
        Column("Judgment"),
    )

    def cells(
        names: tuple[str, str, str], entry: ModelEntry, difference: IntervalEntry | None
    ) -> tuple[str, ...]:
        kinds = list(entry.get("diversity", {}).values())
        likely = entry.get("answer_perplexity", {}).values()
        return (
            *names,
            str(entry["empty"]),
            " / ".join(format_number(kind["distinct_2"], ".2f") for kind in kinds)
            or format_number(entry["distinct_2"]),
            " / ".join(format_number(kind["repetition_4"], ".2f") for kind in kinds)
            or format_number(entry["repetition_4"]),
            *([" / ".join(f"{x['mean']:.3g}" for x in likely) or "-"] if has_likelihood else []),
            *([format_interval(entry["non_sf_normal"])] if has_normal else []),
            *([format_interval(difference, signed=True)] if has_difference else []),
            _verdict(entry),
        )

    rows = [cells(("Fine-tuned", _NOT_KNOWN, _NOT_KNOWN), metrics["finetuned"], None)]
    if "backbone" in metrics:
        rows.append(cells(("Backbone", _NOT_KNOWN, _NOT_KNOWN), metrics["backbone"], None))
    for entry in methods:
        algorithm, epoch = algorithm_name(entry["algorithm"]), str(entry["epoch"])
        names = _marked(strategy_name(entry["strategy"]), entry), algorithm, epoch
        rows.append(cells(names, entry, entry.get("retain_minus_random")))
    notes = [
        "Distinct-2: share of different word pairs over all answers to target / normal queries. "
        "Repetition-4: share of four-word runs that an answer has said before, likewise.",
        judgment.RULE_TEXT,
    ]
    inputs = list(
        dict.fromkeys(
            name for entry in methods for name in entry.get("judgment", {}).get("inputs", [])
        )
    )
    if inputs:
        notes.append(f"Judged by what was measured: {', '.join(inputs)}.")
    return Table(columns, tuple(rows), tuple(notes))


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
            format_number(entry.get("precision")),
            format_number(entry.get("base_rate")),
            str(entry["num_retain"]),
            str(entry.get("targets_in_retain", _NOT_KNOWN)),
            str(entry.get("retain_scored_positive", _NOT_KNOWN)),
            format_number(entry.get("auroc")),
            format_number(entry.get("auprc")),
        )
        for strategy, entry in metrics["retrieval"].items()
    )
    notes = [
        "Precision: share of the forget set that is labeled a target. Score >= 0: retain items "
        "that are not anti-aligned with the queries."
    ]
    if any(entry.get("base_rate") in (0, 1) for entry in metrics["retrieval"].values()):
        notes.append("No AUROC and no AUPRC: all training examples have the same label.")
    notes += kernel_notes(metrics["settings"], metrics["retrieval"])
    return Table(columns, rows, tuple(notes))


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
    tables = _join(runs)
    has_non_sf = any(run["finetuned"]["non_sf_target"] is not None for run in runs)
    columns = (
        Column("Model"),
        Column("F, forget rate"),
        Column("R, retain rate"),
        *([Column("Non-SF, target")] if has_non_sf else []),
        Column("Distance"),
        Column("Precision"),
        Column("Below\nRandom", "right"),
        Column("Closer", "right"),
    )

    def cells(
        name: str, models: Sequence[ModelEntry], precision: Sequence[float], counts: Sequence[str]
    ) -> tuple[str, ...]:
        marked = [mean_of(model["non_sf_target"]) for model in models]
        return (
            name,
            _spread([mean_of(model["forget"]) for model in models]),
            _spread([mean_of(model["retain"]) for model in models]),
            *([_spread(marked)] if has_non_sf else []),
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
    kernel = kernel_notes(runs[0]["settings"], [strategy for _, strategy in tables[0]])
    return Table(columns, tuple(rows), (note, *kernel))


def _join(runs: Sequence[Metrics]) -> list[dict[tuple[str, str], MethodEntry]]:
    """Returns the last epoch of each algorithm and strategy, by run.

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
    return tables


def seeds_checks_table(runs: Sequence[Metrics]) -> Table:
    """Returns what stands behind the rates over several seeds, as mean [smallest, largest].

    Non-SF of normal queries, diversity, perplexity, what the seeds were judged, and TOFU's two
    figures. What no run has measured has no column; where some have not, the cell says so.

    Args:
      runs: as `seeds_table`.

    Raises:
      ValueError: as `seeds_table`.
    """
    tables = _join(runs)
    everything = [run["finetuned"] for run in runs]
    getters: list[tuple[str, Callable[[ModelEntry], float | None], Callable[..., str]]] = [
        ("Non-SF,\nnormal", lambda entry: mean_of(entry["non_sf_normal"]), _spread),
        ("Distinct-2", lambda entry: entry["distinct_2"], _spread),
        ("Repetition-4", lambda entry: entry["repetition_4"], _spread),
        *(
            (
                f"Perplexity,\n{name}",
                functools.partial(_mean_perplexity, name=name),
                _spread_perplexity,
            )
            for name in ("forget", "retain", "held-out")
        ),
        ("TOFU, forget\nquality", _forget_quality, _spread),
        ("TOFU, model\nutility", _model_utility, _spread),
    ]
    shown = [
        (title, get, spread)
        for title, get, spread in getters
        if any(get(entry) is not None for entry in everything)
    ]
    has_verdict = any("judgment" in entry for run in runs for entry in run["methods"])

    def cells(name: str, models: Sequence[ModelEntry]) -> tuple[str, ...]:
        spreads = []
        for _, get, spread in shown:
            values = [value for model in models if (value := get(model)) is not None]
            partial = f" ({len(values)} runs)" if 0 < len(values) < len(models) else ""
            spreads.append(spread(values) + partial)
        counts = judgment.count_verdicts(models)
        verdict = ", ".join(f"{count} {name}" for name, count in counts.items()) or _NOT_KNOWN
        return (name, *spreads, *([verdict] if has_verdict else []))

    rows: list[tuple[str, ...] | str] = [cells("Fine-tuned", everything)]
    if all("backbone" in run for run in runs):
        rows.append(cells("Backbone", [run["backbone"] for run in runs]))
    for algorithm in dict.fromkeys(name for name, _ in tables[0]):
        rows.append(algorithm_name(algorithm))
        rows += [
            cells(strategy_name(strategy), [found[algorithm, strategy] for found in tables])
            for name, strategy in tables[0]
            if name == algorithm
        ]
    columns = (
        Column("Model"),
        *(Column(title) for title, _, _ in shown),
        *([Column("Judged")] if has_verdict else []),
    )
    note = (
        f"Over the same {len(runs)} seeds and epochs, likewise. Judged: how many seeds have which "
        "judgment (the run's own report says why). Perplexity: geometric mean."
    )
    return Table(columns, tuple(rows), (note,))


def _mean_perplexity(entry: ModelEntry, *, name: str) -> float | None:
    found = entry.get("perplexity", {}).get(name)
    return found["mean"] if found else None


def _forget_quality(entry: ModelEntry) -> float | None:
    return entry["tofu"].get("forget_quality") if "tofu" in entry else None


def _model_utility(entry: ModelEntry) -> float | None:
    return entry["tofu"]["model_utility"] if "tofu" in entry else None


def _spread_perplexity(values: Sequence[float]) -> str:
    """Returns the geometric mean with the ends: one run that exploded does not hide the others."""
    if not values:
        return _NOT_KNOWN
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return format_perplexity(IntervalEntry(mean=mean, low=min(values), high=max(values)))


def _versus_random(
    entries: Sequence[MethodEntry], randoms: Sequence[MethodEntry | None]
) -> tuple[str, str]:
    below = [e["forget_minus_random"] for e in entries]
    closer = [
        entry["euclidean"] < random["euclidean"]
        for entry, random in zip(entries, randoms, strict=True)
        if random is not None
        and entry is not random
        and entry["euclidean"] is not None
        and random["euclidean"] is not None
    ]
    known = [difference for difference in below if difference is not None]
    if not known or not closer:
        return _NOT_KNOWN, _NOT_KNOWN
    num_below = sum(difference["high"] < 0 for difference in known)
    return f"{num_below} of {len(known)}", f"{sum(closer)} of {len(closer)}"


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return _NOT_KNOWN
    mean = sum(known) / len(known)
    entry = IntervalEntry(mean=mean, low=min(known), high=max(known))
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
