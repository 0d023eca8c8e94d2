"""A report as one self-contained HTML page: stored runs in, text out.

Nothing is loaded from anywhere: styles and script are inline and allowed by their hashes alone, so
that even text that got past the escaping could not run. Without the script all of it can be read.
"""

import base64
import hashlib
import importlib.resources
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from raslik_jax.evaluate import judgment
from raslik_jax.evaluate.summary import IntervalEntry, MethodEntry, Metrics, rate_of
from raslik_jax.evaluate.words import word_pattern
from raslik_jax.report import blocks as blocks_lib
from raslik_jax.report import charts, published, runs, tables
from raslik_jax.report.markup import Markup, element, escape, join

# What the page shows at most, so that its size stays bounded whatever was run.
_MAX_TARGET, _MAX_NORMAL = 12, 6
_MAX_CHARACTERS = 1_500_000
_MAX_ANSWER, _MAX_EXAMPLE = 1500, 400
_MAX_PANELS = 12
_NO_VALUE = "–"


class Limits(NamedTuple):
    """How many queries of an experiment are shown, after the page's share of text."""

    num_target: int
    num_normal: int


_GENERATOR = element("meta", name="generator", content="raslik_jax")


def is_page(head: bytes) -> bool:
    """Returns whether a file that begins so is a page that `render` wrote."""
    return _GENERATOR.encode() in head


def render(
    experiments: Sequence[runs.Experiment],
    *,
    paper: Sequence[published.PublishedBlock] = (),
    show_paper: bool = False,
    title: str = "",
) -> str:
    """Returns the page of some experiments.

    Args:
      experiments: stored runs, grouped; where there are several seeds, tables and summary take all
        of them, and answers, examples and curves are those of the first.
      paper: the published blocks, set beside the runs that repeat one.
      show_paper: add all of them at the end, each held against its own rates.
      title: the heading; by default the experiments' names.

    Returns:
      A whole HTML document. Equal runs give equal bytes.

    Raises:
      ValueError: as `blocks.make_blocks`.
    """
    style, script = (
        importlib.resources.files("raslik_jax.report").joinpath(name).read_text()
        for name in ("page.css", "page.js")
    )
    found = [(e, blocks_lib.make_blocks(e, paper)) for e in experiments]
    heading = title or " · ".join(e.name for e in experiments) or "The paper's tables"
    sections = [
        ("summary", "Summary", _summary(found)),
        ("frontier", "Frontier", _frontiers(experiments)),
        ("tables", "Tables", _tables(found)),
        ("retrieval", "Retrieval", _retrieval(experiments)),
        ("answers", "Answers", _answers(experiments)),
        ("training", "Training", _training(experiments)),
        ("settings", "Settings", _settings(experiments)),
        ("paper", "The paper", _paper(paper) if show_paper else Markup("")),
    ]
    sections = [section for section in sections if section[2]]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _GENERATOR,
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{heading}: unlearning report"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the results", href="#main", class_="skip"),
        _header(experiments, heading),
        element(
            "nav",
            element(
                "ul",
                *(element("li", element("a", name, href=f"#{key}")) for key, name, _ in sections),
            ),
            aria_label="Sections",
        ),
        element(
            "main",
            *(
                element(
                    "section",
                    element("h2", name, id=f"{key}-title"),
                    content,
                    id=key,
                    aria_labelledby=f"{key}-title",
                )
                for key, name, content in sections
            ),
            id="main",
            tabindex="-1",
        ),
        _footer(),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _header(experiments: Sequence[runs.Experiment], heading: str) -> Markup:
    facts = []
    for experiment in experiments:
        run = experiment.runs[0]
        corpus = run.metrics.get("corpus", {})
        facts += [blocks_lib.describe_dataset(run.config), blocks_lib.describe_model(run.config)]
        if "train" in corpus:
            facts.append(
                f"{corpus['train']:,} training examples, {corpus['targets']:,} labeled targets"
            )
            facts.append(
                f"{corpus['target_queries']} target and {corpus['normal_queries']} normal "
                f"{corpus['query_split']} queries"
            )
        seeds = ", ".join(map(str, experiment.seeds))
        facts.append(f"{'seed' if len(experiment.seeds) == 1 else 'seeds'} {seeds}")
    return element(
        "header",
        element("h1", heading),
        element(
            "p",
            "What each strategy retrieved, what the model forgot of it, and what that cost.",
            class_="lead",
        ),
        element("ul", *(element("li", fact) for fact in dict.fromkeys(facts)), class_="facts"),
    )


def _footer() -> Markup:
    return element(
        "footer",
        element(
            "p",
            "Made by raslik_jax from stored runs; nothing on this page was computed by a model "
            "again, and it loads nothing from anywhere. Limits: the first "
            f"{_MAX_TARGET} target and {_MAX_NORMAL} normal queries of an experiment, fewer where "
            f"answers are long; {_MAX_ANSWER:,} characters of an answer and {_MAX_EXAMPLE} of a "
            "training example; what is left out is counted where it is left out.",
        ),
    )


def _strategies(metrics: Metrics) -> list[str]:
    return list(dict.fromkeys(entry["strategy"] for entry in metrics["methods"]))


# Summary


def _summary(found: Sequence[tuple[runs.Experiment, Sequence[blocks_lib.Block]]]) -> Markup:
    parts: list[str] = []
    for experiment, blocks in found:
        parts += _doubts(experiment)
        parts += _judgments(experiment)
        for block in blocks:
            parts.append(_summary_of_block(experiment, block, is_alone=len(found) == 1))
    return join(*parts)


def _doubts(experiment: runs.Experiment) -> list[Markup]:
    """Returns what has to be known before any figure is read."""
    found = [
        m for m in experiment.metrics if (entry := m.get("behavior")) and not entry["is_shown"]
    ]
    if not found:
        return []
    which = f" (seed {found[0]['seed']})" if len(experiment.seeds) > 1 else ""
    text = (
        f"{experiment.name}{which}: {tables.behavior_sentence(found[0])} F measures change here, "
        "not forgetting."
    )
    return [element("p", text, class_="warn")]


def _judgments(experiment: runs.Experiment) -> list[Markup]:
    """Returns what became of the models, for each seed that was judged."""
    items = []
    for seed in experiment.metrics:
        text = tables.judgment_sentence(seed, tables.last_epochs(seed["methods"]))
        if text:
            which = f"Seed {seed['seed']}. " if len(experiment.seeds) > 1 else ""
            items.append(element("p", f"{which}{text}", class_="intro"))
    return items


def _highlight(block: blocks_lib.Block) -> blocks_lib.BlockRow | None:
    """Returns the row that the summary speaks of: RASLIK's, or the one nearest to the ideal."""
    rows = [row for row in block.rows if row.ours]
    named = [row for row in rows if row.strategy == "raslik"]
    near = sorted(rows, key=lambda row: row.ours.euclidean if row.ours else 0.0)
    return next(iter([*named, *near]), None)


def _summary_of_block(
    experiment: runs.Experiment, block: blocks_lib.Block, *, is_alone: bool
) -> Markup:
    row = _highlight(block)
    if row is None or row.ours is None:
        return Markup("")
    ours = row.ours
    before = {
        name: blocks_lib.spread(known)
        for name in ("forget", "retain", "non_sf_target")
        if (known := [e for m in experiment.metrics if (e := m["finetuned"][name])])
    }
    name = tables.strategy_name(row.strategy)
    where = tables.algorithm_name(block.algorithm) if is_alone else block.title
    tiles = [
        _tile("F, forget rate", before["forget"], ours.forget, "lower is better"),
        _tile("R, retain rate", before["retain"], ours.retain, "higher is better"),
    ]
    if ours.non_sf:
        tiles.append(
            _tile("Non-SF, target", before["non_sf_target"], ours.non_sf, "higher is better")
        )
    points = _points(experiment, block, row.strategy, ours)
    warnings = _warnings(block)
    return join(
        element("h3", f"{where}, with the sets of {name}"),
        element("dl", *tiles, class_="tiles"),
        element(
            "ul",
            *(element("li", element("b", f"{lead}. "), text) for lead, text in points),
            class_="points",
        ),
        *(element("p", text, class_="warn") for text in warnings),
        element("div", *_forests(experiment, block), class_="grid"),
    )


def _tile(name: str, before: IntervalEntry, after: IntervalEntry, direction: str) -> Markup:
    return element(
        "div",
        element("dt", name, element("span", f" ({direction})")),
        element(
            "dd",
            element("small", f"{before['mean']:.3f} → "),
            element("span", "to ", class_="unseen"),
            f"{after['mean']:.3f}",
            class_="big",
        ),
        element("dd", f"{after['low']:.2f} to {after['high']:.2f}", class_="small"),
    )


def _points(
    experiment: runs.Experiment,
    block: blocks_lib.Block,
    strategy: str,
    ours: blocks_lib.Measured,
) -> list[tuple[str, str]]:
    """Returns in words what was forgotten and what it cost, each by its interval."""
    metrics = experiment.metrics
    reference = metrics[0].get("reference", "finetuned")
    of_whom = tables.REFERENCES.get(reference, reference)
    forget, retain = (tables.format_interval(rate) for rate in (ours.forget, ours.retain))
    points = [
        (
            "What is left",
            f"Answers to target queries share {100 * ours.forget['mean']:.0f} % of the wording of "
            f"{of_whom} (F {forget}).",
        )
    ]
    chosen = [
        entry
        for seed in metrics
        for entry in tables.last_epochs(seed["methods"])
        if (entry["algorithm"], entry["strategy"]) == (block.algorithm, strategy)
    ]
    verdict = _judged(chosen)
    if verdict:
        points.append(("Judgment", verdict))
    points.append(
        (
            "The cost",
            f"Answers to normal queries share {100 * ours.retain['mean']:.1f} % of the wording of "
            f"{of_whom} (R {retain}).",
        )
    )
    random = [
        text
        for letter, differences in (
            ("F", [entry.get("forget_minus_random") for entry in chosen]),
            ("R", [entry.get("retain_minus_random") for entry in chosen]),
        )
        if (text := _versus_random(letter, [d for d in differences if d]))
    ]
    if random:
        points.append(("Against a random set", " ".join(random)))
    return points


def _versus_random(letter: str, differences: Sequence[IntervalEntry]) -> str:
    below = sum(difference["high"] < 0 for difference in differences)
    above = sum(difference["low"] > 0 for difference in differences)
    if not differences:
        return ""
    if len(differences) > 1:
        return (
            f"{letter} is lower in {below} and higher in {above} of {len(differences)} seeds, by "
            "the whole interval."
        )
    size = tables.format_interval(differences[0], signed=True)
    if below or above:
        return f"{letter} is clearly {'lower' if below else 'higher'}: {size}."
    return f"{letter} cannot be told apart: {size}."


def _judged(entries: Sequence[MethodEntry]) -> str:
    """Returns what became of a model, why if it is one, or how many seeds have which verdict."""
    if len(entries) == 1 and "judgment" in entries[0]:
        found = entries[0]["judgment"]
        return f"{found['verdict'].capitalize()}: {'; '.join(found['reasons'])}."
    counts = judgment.count_verdicts(entries)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"Of {sum(counts.values())} seeds: {words}." if counts else ""


def _warnings(block: blocks_lib.Block) -> list[str]:
    damaged = [
        tables.strategy_name(row.strategy) for row in block.rows if row.ours and row.ours.damaged
    ]
    if not damaged:
        return []
    return [
        f"Damaged by unlearning the sets of {', '.join(damaged)}: a low F is no merit there. Read "
        "the answers below."
    ]


def _forests(experiment: runs.Experiment, block: blocks_lib.Block) -> list[Markup]:
    """Returns the two figures of F and R with their intervals."""
    measured = [(row.strategy, row.ours) for row in block.rows if row.ours]
    strategies = _strategies(experiment.metrics[0])
    figures = []
    panels: tuple[tuple[Literal["forget", "retain"], str, str], ...] = (
        ("forget", "F", "forget rate (lower is better)"),
        ("retain", "R", "retain rate (higher is better)"),
    )
    for rate, letter, words in panels:
        rows = [
            (
                tables.strategy_name(name),
                getattr(ours, rate),
                charts.color_class(name, strategies),
            )
            for name, ours in measured
        ]
        floor = None
        if all("backbone" in seed for seed in experiment.metrics):
            entry = blocks_lib.spread([rate_of(s["backbone"], rate) for s in experiment.metrics])
            rows.append(("Backbone", entry, ""))
            floor = entry["mean"] if rate == "forget" else None
        lowest = min(entry["low"] for _, entry, _ in rows)
        low = 0.0 if rate == "forget" or lowest < 0.5 else min(0.9, int(lowest * 10) / 10)
        title = f"{letter} of every strategy, {block.title}"
        note = "" if low == 0 else f" The axis starts at {low:g}."
        figures.append(
            _figure(
                charts.forest(rows, label=f"{letter}, {words}", title=title, low=low, floor=floor),
                element("b", f"{letter}, {words}."),
                note,
            )
        )
    return figures


def _figure(svg: Markup, *caption: str) -> Markup:
    return element("figure", element("figcaption", *caption), svg)


# Frontier


def _frontiers(experiments: Sequence[runs.Experiment]) -> Markup:
    parts: list[str] = [
        element(
            "p",
            "Each path runs over the epochs, from the fine-tuned model at the top. Small markers "
            "are epochs; the large one is the last, filled if Pareto-optimal, with its 95 % "
            "intervals as bars. Best is the star at the bottom right; arcs join points at equal "
            "distance from it. An F below the backbone's, the dotted line, forgets nothing more.",
            class_="intro",
        )
    ]
    for experiment in experiments:
        metrics = experiment.metrics[0]
        algorithms = list(dict.fromkeys(entry["algorithm"] for entry in metrics["methods"]))
        if not algorithms or any(m["finetuned"]["euclidean"] is None for m in experiment.metrics):
            continue
        panels = list(itertools.product(experiment.metrics, algorithms))
        x_low = min(map(charts.lowest_retain, experiment.metrics))
        figures = []
        for seed, algorithm in panels[:_MAX_PANELS]:
            name = tables.algorithm_name(algorithm)
            where = f"{name}, seed {seed['seed']}" if len(experiment.seeds) > 1 else name
            title = f"Frontier of {experiment.name}, {where}: F against R over the epochs"
            panel = charts.frontier(seed, algorithm, title, x_low=x_low)
            figures.append(_figure(panel, element("b", where)))
        parts.append(element("h3", experiment.name))
        parts.append(_legend(metrics, with_references=True))
        parts.append(element("div", *figures, class_="grid"))
        if len(panels) > _MAX_PANELS:
            parts.append(_note(f"{len(panels) - _MAX_PANELS} more panels are left out."))
        parts.append(
            _folded(
                "Every epoch in numbers"
                + (f" (seed {metrics['seed']})" if len(experiment.seeds) > 1 else ""),
                _table(
                    tables.results_table(metrics, epochs="all"), f"{experiment.name}, all epochs"
                ),
            )
        )
    return join(*parts) if len(parts) > 1 else Markup("")


def _legend(metrics: Metrics, *, with_references: bool) -> Markup:
    strategies = _strategies(metrics)
    items = [
        element("li", charts.legend_mark(name, strategies), tables.strategy_name(name))
        for name in strategies
    ]
    names = [("finetuned", "Fine-tuned"), ("backbone", "Backbone"), ("ideal", "Ideal")]
    items += [
        element("li", charts.reference_mark(key), name)
        for key, name in names
        if with_references and (key != "backbone" or "backbone" in metrics)
    ]
    return element("ul", *items, class_="legend", aria_label="Legend")


def _note(text: str) -> Markup:
    return element("p", text, class_="intro")


def _folded(summary: str, *content: str, is_open: bool = False) -> Markup:
    return element("details", element("summary", summary), *content, open=is_open)


# Tables


def _table(table: tables.Table, caption: str) -> Markup:
    """Returns a table of plain text; the first cell of each row is its heading."""
    titles = [column.title.replace("\n", " ") for column in table.columns]
    rows = []
    for row in table.rows:
        if isinstance(row, str):
            heading = element("th", row, scope="rowgroup", colspan=len(titles))
            rows.append(element("tr", heading))
        else:
            rows.append(
                element(
                    "tr",
                    element("th", row[0], scope="row"),
                    *(element("td", _with_range(cell)) for cell in row[1:]),
                )
            )
    return join(
        _scroll(
            caption,
            element("thead", element("tr", *(element("th", t, scope="col") for t in titles))),
            element("tbody", *rows),
        ),
        _notes(table.notes),
    )


def _scroll(caption: str, *content: str) -> Markup:
    """Returns a table in a box that scrolls by itself, also by keyboard."""
    return element(
        "div",
        element("table", element("caption", element("span", caption)), *content),
        class_="scroll",
        role="region",
        tabindex="0",
        aria_label=caption,
    )


def _with_range(cell: str) -> Markup:
    """Returns a cell with what stands in brackets made quiet."""
    number, bracket, rest = cell.partition(" [")
    if not bracket:
        return escape(_NO_VALUE if cell == "-" else cell)
    return join(number, element("span", f" [{rest}", class_="range"))


def _notes(notes: Iterable[str]) -> Markup:
    items = [element("li", note) for note in notes]
    return element("ul", *items, class_="notes") if items else Markup("")


def _block_table(block: blocks_lib.Block, strategies: Sequence[str]) -> Markup:
    grid = blocks_lib.lay_out(block)
    num_paper = len(grid.columns) - 1 - grid.num_ours
    lines = []
    if grid.num_ours and num_paper:
        lines.append(
            element(
                "tr",
                element("td"),
                element("th", "Ours", scope="colgroup", colspan=grid.num_ours),
                element("th", "The paper", scope="colgroup", colspan=num_paper, class_="paper"),
            )
        )
    edge = grid.num_ours + 1 if grid.num_ours else 0
    lines.append(
        element(
            "tr",
            *(
                element("th", name, scope="col", class_="paper" if edge and i == edge else None)
                for i, name in enumerate(grid.columns)
            ),
        )
    )
    rows = []
    for row, cells in zip(block.rows, grid.rows, strict=True):
        head = element(
            "th",
            charts.legend_mark(row.strategy, [*strategies, row.strategy]),
            cells[0].text,
            scope="row",
            class_="gray" if cells[0].is_gray else None,
        )
        rest = []
        for i, cell in enumerate(cells[1:], start=1):
            classes = [
                name
                for name, holds in (
                    ("gray", cell.is_gray),
                    ("best", cell.is_best),
                    ("paper", bool(edge) and i == edge),
                )
                if holds
            ]
            said = element("span", ", among the two best", class_="unseen")
            rest.append(
                element(
                    "td",
                    _with_range(cell.text),
                    blocks_lib.MARKS[cell.mark],
                    said if cell.is_best else "",
                    class_=" ".join(classes) or None,
                )
            )
        rows.append(element("tr", head, *rest))
    return join(
        _scroll(block.title, element("thead", *lines), element("tbody", *rows)),
        _notes(grid.notes),
    )


def _tables(found: Sequence[tuple[runs.Experiment, Sequence[blocks_lib.Block]]]) -> Markup:
    parts: list[str] = [
        element(
            "p",
            "As in the paper: methods that are not Pareto-optimal are gray; among the others, the "
            "two best D_mah and Non-SF have a blue ground. F: forget rate, lower is better. "
            "R: retain rate, higher is better.",
            class_="intro",
        )
    ]
    for experiment, blocks in found:
        parts.append(element("h3", experiment.name))
        strategies = _strategies(experiment.metrics[0])
        parts += [_block_table(block, strategies) for block in blocks]
        metrics = experiment.metrics[0]
        several = len(experiment.seeds) > 1
        which = f" (seed {metrics['seed']})" if several else ""
        more = [
            ("All seeds in one table", tables.seeds_table(experiment.metrics) if several else None),
            (
                "What stands behind the rates, all seeds",
                tables.seeds_checks_table(experiment.metrics) if several else None,
            ),
            (f"Forgetting or damage{which}", tables.checks_table(metrics)),
            (f"Perplexity{which}", tables.perplexity_table(metrics)),
            (f"TOFU's own metrics{which}", tables.tofu_table(metrics)),
            (
                f"Every distance to the ideal{which}",
                tables.distances_table(metrics) if metrics["finetuned"]["euclidean"] else None,
            ),
        ]
        parts += [_folded(name, _table(table, name)) for name, table in more if table]
    return join(*parts) if len(parts) > 1 else Markup("")


# Retrieval


def _retrieval(experiments: Sequence[runs.Experiment]) -> Markup:
    if not experiments:
        return Markup("")
    parts: list[str] = [
        _note(
            "What each strategy chose from the training examples. Scores are each strategy's own; "
            "in a retain set, the higher, the more an example pulls the other way. Random's are "
            "draws."
        )
    ]
    for experiment in experiments:
        run = experiment.runs[0]
        parts.append(element("h3", experiment.name))
        which = f", seed {run.metrics['seed']}" if len(experiment.seeds) > 1 else ""
        caption = f"What each strategy retrieved{which}"
        parts.append(_table(tables.retrieval_table(run.metrics), caption))
        figures = [
            _figure(
                charts.histogram(
                    seed.scores,
                    f"Histogram of the retrieval scores of {experiment.name}, "
                    f"seed {seed.metrics['seed']}, with the ends that the sets take",
                ),
                element("b", "Scores of the training examples"),
                f", seed {seed.metrics['seed']}. Shaded: the ends that RASLIK takes, "
                f"up to {seed.scores.retain_threshold:.3g} and from "
                f"{seed.scores.forget_threshold:.3g}.",
            )
            for seed in experiment.runs[:4]
            if seed.scores
        ]
        if figures:
            if any(
                r.scores is not None and r.scores.is_target_N is not None for r in experiment.runs
            ):
                parts.append(
                    element(
                        "ul",
                        *(
                            element("li", _swatch(class_), name)
                            for name, class_ in (
                                ("targets", "c-d55e00"),
                                ("other examples", "c-0072b2"),
                            )
                        ),
                        class_="legend",
                        aria_label="Legend",
                    )
                )
            parts.append(element("div", *figures, class_="grid"))
        parts += [
            _folded(
                f"Examples of {tables.strategy_name(strategy)}{which}",
                _example_sets(sets),
                is_open=strategy == "raslik",
            )
            for strategy, sets in run.sets.items()
            if sets
        ]
    return join(*parts)


def _swatch(class_: str) -> Markup:
    box = element("rect", x="4", y="2", width="18", height="12", class_="area")
    return element("svg", box, viewBox="0 0 26 16", class_=f"mark {class_}", aria_hidden="true")


def _example_sets(sets: Mapping[str, runs.ItemSet]) -> Markup:
    columns = []
    for kind, found in sets.items():
        items = []
        for row in found.rows:
            chip = {True: "target", False: "other", None: "no label"}[row.is_target]
            items.append(
                element(
                    "li",
                    element(
                        "p",
                        f"score {row.score:.4f}",
                        element("span", chip, class_="chip"),
                        class_="score",
                    ),
                    element("p", _cut(row.text, _MAX_EXAMPLE), class_="asked"),
                    element("p", _cut(row.output, _MAX_EXAMPLE)),
                )
            )
        columns.append(
            element(
                "div",
                element("h4", f"{kind.capitalize()} set: {len(items)} of {found.num_rows:,}"),
                element("ol", *items, class_="examples"),
            )
        )
    return element("div", *columns, class_="columns")


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length].rstrip()} … ({len(text) - length:,} characters more)"


# Answers


def _answers(experiments: Sequence[runs.Experiment]) -> Markup:
    shown = [e for e in experiments if e.runs[0].answers and e.runs[0].queries]
    if not shown:
        return Markup("")
    parts: list[str] = [
        element(
            "p",
            "The answers of all models to the same query, at each method's last epoch. Words that "
            "mark the behavior are highlighted.",
            class_="intro",
        )
    ]
    for number, experiment in enumerate(shown):
        run = experiment.runs[0]
        which = f", seed {run.metrics['seed']}" if len(experiment.seeds) > 1 else ""
        parts.append(element("h3", f"{experiment.name}{which}"))
        parts.append(_side_by_side(run, number, _MAX_CHARACTERS // len(shown)))
    return join(*parts)


def _side_by_side(run: runs.StoredRun, number: int, budget: int) -> Markup:
    """Returns one part per query, and the control that the script shows to choose between them."""
    limits = _limits(run, budget)
    chosen = [
        *[query for query in run.queries if query.is_target][: limits.num_target],
        *[query for query in run.queries if not query.is_target][: limits.num_normal],
    ]
    pattern = word_pattern(run.marker_words) if run.marker_words else None
    default = _default_query(run, chosen, pattern)
    options: dict[str, list[Markup]] = {"Target queries": [], "Normal queries": []}
    items = []
    for i, query in enumerate(chosen):
        kind = "Target queries" if query.is_target else "Normal queries"
        line = " ".join(query.text.split())
        label = f"{i + 1}. {line[:90]}{'…' if len(line) > 90 else ''}"
        options[kind].append(element("option", label, value=str(i), selected=i == default))
        items.append(
            element(
                "div",
                element("h4", f"{kind.split()[0]} query {i + 1} of {len(chosen)}"),
                element("p", _cut(query.text, _MAX_ANSWER), class_="prompt"),
                *_answer_groups(run, query, pattern),
                data_item=True,
            )
        )
    key = f"query-{number}"
    control = element(
        "div",
        element("label", "Query", for_=key),
        element(
            "select",
            *(element("optgroup", *found, label=name) for name, found in options.items() if found),
            id=key,
            autocomplete="off",
        ),
        element("button", "Previous", type="button", data_step="-1"),
        element("button", "Next", type="button", data_step="1"),
        class_="chooser",
        hidden=True,
    )
    left_out = len(run.queries) - len(chosen)
    note = _note(f"{left_out} more queries are not shown here.") if left_out else Markup("")
    return element("div", control, *items, note, data_switch=True)


def _limits(run: runs.StoredRun, budget: int) -> Limits:
    """Returns how many queries fit into so many characters, by the mean length of answers."""
    lengths = [
        min(len(text), _MAX_ANSWER) for texts in run.answers.values() for text in texts.values()
    ]
    # 160: what the markup around each answer takes.
    each = (sum(lengths) / max(1, len(lengths)) + 160) * len(run.answers)
    share = min(1.0, budget / (each * (_MAX_TARGET + _MAX_NORMAL)))
    return Limits(max(1, int(_MAX_TARGET * share)), max(1, int(_MAX_NORMAL * share)))


def _default_query(
    run: runs.StoredRun, chosen: Sequence[runs.Query], pattern: re.Pattern[str] | None
) -> int:
    """Returns the first target query at which the model was caught, or the first query."""
    before = run.answers.get(("", "finetuned"), {})
    for i, query in enumerate(chosen):
        if pattern and query.is_target and pattern.search(before.get(query.example_id, "")):
            return i
    return 0


def _answer_groups(
    run: runs.StoredRun, query: runs.Query, pattern: re.Pattern[str] | None
) -> list[Markup]:
    strategies = _strategies(run.metrics)
    parts = []
    for algorithm in dict.fromkeys(name for name, _ in run.answers):
        cards = []
        for name, model in ((m, run.answers[m]) for m in run.answers if m[0] == algorithm):
            key = name[1]
            if algorithm:
                mark = charts.legend_mark(key, strategies)
                label = tables.strategy_name(key)
            else:
                mark = charts.reference_mark(key)
                label = {"finetuned": "Fine-tuned", "backbone": "Backbone"}[key]
            text = model.get(query.example_id, "")
            said = (
                element("p", _highlighted(_cut(text, _MAX_ANSWER), pattern), class_="said")
                if text.strip()
                else element("p", "(empty)", class_="said nothing")
            )
            cards.append(element("li", element("p", mark, label, class_="who"), said))
        heading = tables.algorithm_name(algorithm) if algorithm else "Before unlearning"
        parts += [element("h5", heading), element("ul", *cards, class_="answers")]
    return parts


def _highlighted(text: str, pattern: re.Pattern[str] | None) -> Markup:
    if pattern is None:
        return escape(text)
    parts: list[str] = []
    end = 0
    for found in pattern.finditer(text):
        parts += [text[end : found.start()], element("mark", found.group())]
        end = found.end()
    return join(*parts, text[end:])


# Training and settings


def _training(experiments: Sequence[runs.Experiment]) -> Markup:
    parts: list[str] = []
    for experiment in experiments:
        run = experiment.runs[0]
        if not run.losses:
            continue
        strategies = _strategies(run.metrics)
        which = f", seed {run.metrics['seed']}" if len(experiment.seeds) > 1 else ""
        figures = [
            _figure(
                charts.losses(
                    curves, strategies, f"Loss of {experiment.name}{which}, {panel}, over the steps"
                ),
                element("b", panel),
            )
            for panel, curves in run.losses.items()
        ]
        parts += [
            element("h3", f"{experiment.name}{which}"),
            element(
                "p",
                "Faint: every step. Strong: the running mean over a twentieth of the steps. In "
                "unlearning the loss of the forget set is meant to rise.",
                class_="intro",
            ),
            _legend(run.metrics, with_references=False),
            element("div", *figures, class_="grid"),
        ]
    return join(*parts)


def _settings(experiments: Sequence[runs.Experiment]) -> Markup:
    parts: list[str] = []
    for experiment in experiments:
        run = experiment.runs[0]
        plain = {k: v for k, v in run.config.items() if not isinstance(v, Mapping)}
        plain["seed"] = ", ".join(map(str, experiment.seeds))
        groups = {
            "run": plain,
            **{k: v for k, v in run.config.items() if isinstance(v, Mapping)},
            "versions": run.versions,
        }
        parts += [
            element("h3", experiment.name),
            element(
                "div",
                *(
                    element(
                        "div",
                        element("h4", name),
                        element(
                            "dl",
                            *itertools.chain.from_iterable(
                                (element("dt", key), element("dd", _value(value)))
                                for key, value in values.items()
                            ),
                        ),
                    )
                    for name, values in groups.items()
                    if values
                ),
                class_="settings",
            ),
        ]
    if parts:
        parts.insert(
            0,
            _note(
                "Names are the flags of experiments/run.py; run.flags in the work directory "
                "repeats the run."
            ),
        )
    return join(*parts)


def _value(value: object) -> str:
    if isinstance(value, str):
        return value or _NO_VALUE
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value)


def _paper(paper: Sequence[published.PublishedBlock]) -> Markup:
    num_wrong = sum(row.is_wrong_flag for block in paper for row in block.rows)
    return join(
        _note(
            f"The paper's {len(paper)} blocks, each held against itself: D_mah is computed again "
            f"from the printed F and R. In {sum(not block.follows for block in paper)} blocks (†) "
            f"it cannot follow from them; {num_wrong} Pareto flags (‡) contradict the printed "
            "rates."
        ),
        element(
            "div",
            *(
                element("div", _block_table(block, [row.strategy for row in block.rows]))
                for block in blocks_lib.published_only(paper)
            ),
            class_="columns",
        ),
    )
