"""A report as one self-contained HTML page: stored runs in, text out.

The template `page.html.jinja` writes and lays out what the functions here gather. Nothing is loaded
from anywhere: styles and script are inline and allowed by their hashes alone, so that even text
that got past the escaping could not run. Without the script all of it can be read.
"""

import base64
import functools
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from raslik_jax.evaluate.words import word_pattern
from raslik_jax.report import blocks as blocks_lib
from raslik_jax.report import (
    drawing,
    explorer,
    figures,
    names,
    notes,
    results,
    robustness,
    statements,
    tables,
)
from raslik_jax.report.published import PublishedBlock
from raslik_jax.report.records import Model, collect_models
from raslik_jax.report.runs import Experiment, ScoreSample, StoredRun

# What the page shows at most, so that its size stays bounded whatever was run.
_LIMITS = {"target": 12, "normal": 6, "answer": 1500, "example": 400, "traced": 4, "tokens": 600}
_MAX_CHARACTERS = 1_500_000  # of all answers
_MAX_PANELS, _MAX_HISTOGRAMS = 12, 4
_GENERATOR = '<meta name="generator" content="raslik_jax">'


def is_page(head: bytes) -> bool:
    """Returns whether a file that begins so is a page that `render` wrote."""
    return _GENERATOR.encode() in head


def render(
    experiments: Sequence[Experiment],
    *,
    paper: Sequence[PublishedBlock] = (),
    show_paper: bool = False,
    title: str = "",
    is_served: bool = False,
    findings: Mapping[str, str] = {},
) -> str:
    """Returns the page of some experiments, a whole HTML document; equal runs give equal bytes.

    Args:
      experiments: stored runs, grouped; where there are several seeds, tables and summary take all
        of them, and answers, examples and curves are those of the first.
      paper: the published blocks, set beside the runs that repeat one.
      show_paper: add all of them at the end, each held against its own rates.
      title: the heading; by default the experiments' names.
      is_served: with a box to ask an index; see `serving`. As a file the page asks nobody.
      findings: by the name of a run, why it found no row (`retrieve.finding`).
    """
    share = _MAX_CHARACTERS // max(1, sum(bool(e.runs[0].answers) for e in experiments))
    room = explorer.MOST_BYTES // max(1, sum(bool(e.runs[0].explorer) for e in experiments))
    views = [_view(experiment, paper, share) for experiment in experiments]
    for experiment, view in zip(experiments, views, strict=True):
        rows = experiment.runs[0].explorer
        view["explorer"] = explorer.pack(rows, room) if rows else None
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            heading=title
            or " · ".join([*(e.name for e in experiments), *findings])
            or "The paper's tables",
            experiments=views,
            paper=paper,
            is_served=is_served,
            findings=findings,
            num_wrong=sum(row.value("is_wrong") for block in paper for row in block.rows.values()),
            printed=[
                _block_table(block, block.strategies) for block in blocks_lib.published_only(paper)
            ]
            if show_paper
            else [],
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = names.make_environment(
        autoescape=True,
        # Control and direction marks become visible; then what is no markup is escaped.
        finalize=lambda value: tables.visible(value) if type(value) is str else value,
    )
    environment.globals.update(
        as_cell=tables.as_cell,
        behavior_sentence=notes.behavior_sentence,
        answers_sentence=statements.answers_sentence,
        damage_sentence=statements.damage_sentence,
        frontier_sentence=statements.frontier_sentence,
        noise_sentence=statements.noise_sentence,
        retrieval_sentence=statements.retrieval_sentence,
        tables_sentence=statements.tables_sentence,
        training_sentence=statements.training_sentence,
        rows_sentence=statements.rows_sentence,
        summary_points=statements.summary_points,
        column_groups=tables.column_groups,
        digest=_digest,
        dataset_name=names.dataset_name,
        generator=Markup(_GENERATOR),
        interval=tables.format_interval,
        kinds=[
            (drawing.mark_svg("s", drawing.TARGET_COLOR, has_line=False), "targets"),
            (drawing.mark_svg("s", drawing.OTHER_COLOR, has_line=False), "other examples"),
        ],
        limits=_LIMITS,
        page_script=_script,
        shorten=_shorten,
        stylesheet=_stylesheet,
    )
    return environment


def _stylesheet(body: str, has_explorer: bool) -> Markup:
    """Returns the page's style with the colors of its figures, in light and in dark."""
    colors = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6})\)", body)))
    light = "".join(f"--c-{color}:#{color};" for color in colors)
    dark = "".join(f"--c-{color}:{drawing.dark_color('#' + color)};" for color in colors)
    screen = "@media screen and (prefers-color-scheme: dark)"
    palette = f":root{{{light}}}\n{screen}{{:root{{{dark}}}}}\n"
    grid = explorer.style() if has_explorer else ""
    return Markup(palette + grid + (names.FOLDER / "page.css").read_text(encoding="utf-8"))


def _script(is_served: bool, has_explorer: bool) -> Markup:
    """Returns the page's script, with those of the explorer and the box where there are some."""
    own, *more = (
        (names.FOLDER / name).read_text(encoding="utf-8")
        for name in ("page.js", *(["ask.js"] if is_served else []))
    )
    return Markup("".join([own, *([explorer.script()] if has_explorer else []), *more]))


def _digest(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")


def _shorten(text: str, length: int) -> str:
    """Returns a text cut at a length, and how much was left out."""
    if len(text) <= length:
        return text
    return f"{text[:length].rstrip()} … ({len(text) - length:,} characters more)"


def _view(experiment: Experiment, paper: Sequence[PublishedBlock], share: int) -> dict[str, Any]:
    """Returns what the template shows of an experiment."""
    run, metrics = experiment.runs[0], experiment.metrics[0]
    blocks = blocks_lib.make_blocks(experiment, paper)
    strategies = list(dict.fromkeys(entry["strategy"] for entry in metrics["methods"]))
    legend = {
        name: (drawing.mark_svg(marker, color), names.strategy_name(name))
        for name, (color, marker) in names.strategy_styles(strategies).items()
    }
    references = {
        name: (drawing.mark_svg(marker, color, has_line=False), names.strategy_name(name))
        for name, (marker, _, color) in figures.REFERENCE_MARKS.items()
    }
    return {
        "run": run,
        "experiment": experiment,
        "name": experiment.name,
        "first": experiment.of_seed(),
        "started_from": blocks_lib.describe_model(run.config),
        "legend": legend,
        "references": [references[name] for name in references if name in (*metrics, "ideal")],
        "judgments": [
            (seed["seed"], notes.judgment_sentence(collect_models([seed])))
            for seed in experiment.metrics
        ],
        "against": notes.answers_taken_against(metrics),
        "incident": run.incident,
        "cut": _cut_figure(experiment),
        "summary": [_summary(experiment, block, strategies) for block in blocks],
        "frontier": _frontier(experiment),
        "epochs": results.results_table(metrics, epochs="all"),
        "blocks": [_block_table(block, strategies) for block in blocks],
        "seeds": results.tables_of(experiment.metrics) if experiment.runs[1:] else [],
        "details": results.details(metrics),
        "robustness": {
            "points": robustness.points_of(metrics),
            "tables": robustness.tables_of(metrics),
        },
        "retrieved": results.retrieval_table(metrics),
        "histograms": [
            _histogram(experiment.name, seed.metrics["seed"], seed.scores)
            for seed in experiment.runs[:_MAX_HISTOGRAMS]
            if seed.scores
        ],
        "highlighted": names.highlighted(run.sets),
        "answers": _side_by_side(run, share, legend | references),
        "training": [
            _figure(
                figures.draw_losses({panel: curves}, strategies, frame=drawing.Frame(300)),
                f"Loss of {experiment.name}{experiment.of_seed()}, {panel}, over the steps",
                panel,
            )
            for panel, curves in run.losses.items()
        ],
        "settings": {
            "run": {k: v for k, v in run.config.items() if not isinstance(v, Mapping)}
            | {"seed": experiment.seeds},
            **{k: v for k, v in run.config.items() if isinstance(v, Mapping)},
            "versions": metrics.get("versions", {}),
        },
    }


def _cut_figure(experiment: Experiment) -> list[dict[str, Any]]:
    """Returns the picture of where the scores end that stand out, where a rule cut there."""
    found = experiment.runs[0].incident
    if not found or not found.cut:
        return []
    figure = figures.draw_cut(**found.cut._asdict(), frame=drawing.Frame(330))
    text = f"{found.cut.num_forget:,} of {len(found.cut.score_N):,} rows stand out."
    title = f"Scores of the rows of {experiment.name} in order. {text}"
    return [_figure(figure, title, "Where the rows that stand out end.", text)]


def _figure(figure: Any, title: str, lead: str, text: str = "") -> dict[str, Any]:
    return {"svg": drawing.page_svg(figure, title), "lead": lead, "text": text}


def _block_table(block: blocks_lib.Block, strategies: Sequence[str]) -> dict[str, Any]:
    # Of each strategy alone: what the paper has beside a run takes no color from it.
    marks = [
        drawing.mark_svg(*reversed(names.strategy_styles([*strategies, name])[name]))
        for name in block.strategies
    ]
    return {"table": blocks_lib.lay_out(block), "marks": marks}


def _summary(
    experiment: Experiment, block: blocks_lib.Block, strategies: Sequence[str]
) -> dict[str, Any]:
    """Returns what the summary says of a block: of the strategy that is asked about."""
    strategy = names.highlighted(block.ours) or min(
        block.ours, key=lambda name: block.ours[name].value("euclidean")
    )
    models = {(m.algorithm, m.strategy): m for m in collect_models(experiment.metrics)}
    shown = [block.ours[name] for name in block.strategies if name in block.ours]
    shown += [model for place, model in models.items() if place == ("", "backbone")]
    return {
        "block": block,
        "strategy": strategy,
        "before": models["", "finetuned"],
        "after": block.ours[strategy],
        "seeds": models[block.algorithm, strategy],
        "damaged": [name for name, model in block.ours.items() if model.value("num_damaged")],
        "figures": [_intervals(block, shown, strategies, rate) for rate in ("forget", "retain")],
    }


def _intervals(
    block: blocks_lib.Block, models: Sequence[Model], strategies: Sequence[str], rate: str
) -> dict[str, Any]:
    """Returns the figure of a rate of all models with its intervals."""
    letter, words = {
        "forget": ("F", "forget rate (lower is better)"),
        "retain": ("R", "retain rate (higher is better)"),
    }[rate]
    rows = {names.strategy_name(m.strategy): {"": m.joined(rate)} for m in models}
    styles = names.strategy_styles(strategies) | {"backbone": (drawing.INK, "")}
    lowest = min(row[""]["low"] for row in rows.values())
    start = 0.0 if rate == "forget" or lowest < 0.5 else min(0.9, int(lowest * 10) / 10)
    has_floor = models[-1].strategy == "backbone" and rate == "forget"
    figure = figures.draw_intervals(
        rows,
        xlabel=f"{letter}, {words}",
        colors={names.strategy_name(m.strategy): styles[m.strategy][0] for m in models},
        start=start,
        floor=models[-1].joined(rate)["mean"] if has_floor else None,
        frame=drawing.Frame(56 + 27 * len(rows), left=104, right=58, top=8, bottom=48),
    )
    title = f"{letter} of every strategy, {block.title}"
    start_note = "" if start == 0 else f"The axis starts at {start:g}."
    return _figure(figure, title, f"{letter}, {words}.", start_note)


def _frontier(experiment: Experiment) -> dict[str, Any]:
    """Returns the panels of every seed and algorithm; nothing without F and R."""
    algorithms = dict.fromkeys(entry["algorithm"] for entry in experiment.metrics[0]["methods"])
    if not algorithms or any(m["finetuned"]["euclidean"] is None for m in experiment.metrics):
        return {}
    panels = list(itertools.product(enumerate(experiment.metrics), algorithms))
    low = min(map(figures.lowest_retain, experiment.metrics))
    found = []
    for (i, seed), algorithm in panels[:_MAX_PANELS]:
        figure = figures.draw_frontier(seed, [algorithm], retain_from=low, frame=drawing.Frame(380))
        where = names.algorithm_name(algorithm) + experiment.of_seed(i)
        title = f"Frontier of {experiment.name}, {where}: F against R"
        found.append(_figure(figure, title, where))
    return {"figures": found, "left_out": len(panels) - len(found)}


def _histogram(name: str, seed: int, scores: ScoreSample) -> dict[str, Any]:
    figure = figures.draw_scores(**scores._asdict(), frame=drawing.Frame(330))
    text = f"Seed {seed}. {statements.ends_sentence(scores)}".strip()
    title = f"Retrieval scores of {name}. {text}"
    return _figure(figure, title, "Scores of the training examples.", text)


def _side_by_side(
    run: StoredRun, budget: int, legend: Mapping[str, tuple[Markup, str]]
) -> dict[str, Any]:
    """Returns some queries with every model's answer, as many as fit into so many characters."""
    if not run.answers or not run.queries:
        return {}
    texts = [text for answers in run.answers.values() for text in answers.values()]
    # 160: what the markup around each answer takes.
    each = sum(min(len(text), _LIMITS["answer"]) for text in texts) / max(1, len(texts)) + 160
    num = len(run.answers) * (_LIMITS["target"] + _LIMITS["normal"])
    share = min(1.0, budget / (each * num))
    chosen = [
        query
        for kind in ("target", "normal")
        for query in [q for q in run.queries if q.is_target == (kind == "target")][
            : max(1, int(_LIMITS[kind] * share))
        ]
    ]
    pattern = word_pattern(run.marker_words).pattern if run.marker_words else None
    # The group makes `split` keep the words that mark the behavior, at the odd places.
    split = re.compile(f"({pattern})", re.IGNORECASE).split if pattern else lambda text: [text]
    before = run.answers.get(("", "finetuned"), {})
    caught = [
        place
        for place, query in enumerate(chosen)
        if query.is_target and len(split(before.get(query.example_id, ""))) > 1
    ]
    queries = []
    for query in chosen:
        groups: dict[str, list[Any]] = {}
        for (algorithm, name), answers in run.answers.items():
            text = _shorten(answers.get(query.example_id, ""), _LIMITS["answer"])
            pieces = split(text) if text.strip() else []
            heading = names.algorithm_name(algorithm) or "Before unlearning"
            groups.setdefault(heading, []).append((*legend[name], pieces))
        queries.append({"query": query, "groups": groups})
    # The first target query at which the model was caught is shown first.
    default = caught[0] if caught else 0
    return {"default": default, "queries": queries, "left_out": len(run.queries) - len(chosen)}
