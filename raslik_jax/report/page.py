"""A report as one self-contained HTML page: stored runs in, text out.

The template `page.html.jinja` lays out what the functions here gather. Nothing is loaded from
anywhere: styles and script are inline and allowed by their hashes alone, so that even text that got
past the escaping could not run. Without the script all of it can be read.
"""

import base64
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from raslik_jax.evaluate.metrics import IntervalEntry
from raslik_jax.report import blocks as blocks_lib
from raslik_jax.report import drawing, figures, names, notes, published, results, runs, tables
from raslik_jax.report.answers import (
    LIMITS,
    MAX_CHARACTERS,
    reference_legend,
    shorten,
    side_by_side,
    strategies_of,
    strategy_legend,
)
from raslik_jax.report.records import REFERENCES, Model, collect_models

# What the page shows at most, beside the limits of its texts.
_MAX_PANELS, _MAX_HISTOGRAMS = 12, 4
_FOLDER = pathlib.Path(__file__).parent
_GENERATOR = '<meta name="generator" content="raslik_jax">'


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
    found = [(e, blocks_lib.make_blocks(e, paper)) for e in experiments]
    shown = [e for e in experiments if e.runs[0].answers and e.runs[0].queries]
    share = MAX_CHARACTERS // max(1, len(shown))
    template = _environment().get_template("page.html.jinja")
    return template.render(
        heading=title or " · ".join(e.name for e in experiments) or "The paper's tables",
        facts=list(dict.fromkeys(itertools.chain.from_iterable(map(_facts, experiments)))),
        generator=Markup(_GENERATOR),
        limits=LIMITS,
        summary=[_summary(e, blocks, is_alone=len(found) == 1) for e, blocks in found],
        frontiers=list(filter(None, map(_frontier, experiments))),
        tables=[_tables(e, blocks) for e, blocks in found],
        retrieval=[_retrieval(e) for e in experiments],
        answers=[{"name": e.name + _of_first(e), **side_by_side(e.runs[0], share)} for e in shown],
        training=[_training(e) for e in experiments if e.runs[0].losses],
        settings=[_settings(e) for e in experiments],
        paper=_paper(paper) if show_paper else {},
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Control and direction marks become visible; then what is no markup is escaped.
        finalize=lambda value: tables.visible(value) if type(value) is str else value,
    )
    environment.globals.update(
        as_cell=tables.as_cell,
        column_groups=tables.column_groups,
        shorten=shorten,
        digest=_digest,
        script=Markup((_FOLDER / "page.js").read_text(encoding="utf-8")),
        stylesheet=_stylesheet,
    )
    return environment


def _stylesheet(body: str) -> Markup:
    """Returns the page's style with the colors of its figures, in light and in dark."""
    colors = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6})\)", body)))
    light = "".join(f"--c-{color}:#{color};" for color in colors)
    dark = "".join(f"--c-{color}:{drawing.dark_color('#' + color)};" for color in colors)
    screen = "@media screen and (prefers-color-scheme: dark)"
    palette = f":root{{{light}}}\n{screen}{{:root{{{dark}}}}}\n"
    return Markup(palette + (_FOLDER / "page.css").read_text(encoding="utf-8"))


def _digest(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")


def _facts(experiment: runs.Experiment) -> list[str]:
    run = experiment.runs[0]
    corpus = run.metrics.get("corpus", {})
    dataset = run.config.get("corpus", {}).get("dataset", "")
    facts = [names.dataset_name(dataset), blocks_lib.describe_model(run.config)]
    if "train" in corpus:
        facts += [
            f"{corpus['train']:,} training examples, {corpus['targets']:,} labeled targets",
            f"{corpus['target_queries']} target and {corpus['normal_queries']} normal "
            f"{corpus['query_split']} queries",
        ]
    seeds = ", ".join(map(str, experiment.seeds))
    return [*facts, f"{'seed' if len(experiment.seeds) == 1 else 'seeds'} {seeds}"]


def _of_first(experiment: runs.Experiment, before: str = ", ", after: str = "") -> str:
    """Returns which seed something is of, where there are several."""
    first = f"seed {experiment.seeds[0]}"
    return f"{before}{first}{after}" if len(experiment.seeds) > 1 else ""


# summary ----------------------------------------------------------------------------------------


def _summary(
    experiment: runs.Experiment, blocks: Sequence[blocks_lib.Block], *, is_alone: bool
) -> dict[str, Any]:
    doubts = [
        m for m in experiment.metrics if (entry := m.get("behavior")) and not entry["is_shown"]
    ]
    judgments = [
        (f"Seed {seed['seed']}. " if len(experiment.seeds) > 1 else "") + text
        for seed in experiment.metrics
        if (text := notes.judgment_sentence(results.methods_of(collect_models([seed]))))
    ]
    warnings = []
    if doubts:
        which = f" (seed {doubts[0]['seed']})" if len(experiment.seeds) > 1 else ""
        warnings = [
            f"{experiment.name}{which}: {notes.behavior_sentence(doubts[0])} F measures change "
            "here, not forgetting."
        ]
    return {
        "warnings": warnings,
        "judgments": judgments,
        "blocks": [_summary_of_block(experiment, block, is_alone) for block in blocks],
    }


def _summary_of_block(
    experiment: runs.Experiment, block: blocks_lib.Block, is_alone: bool
) -> dict[str, Any]:
    """Returns what the summary says of a block: of the strategy that is asked about."""
    strategy = names.highlighted(block.ours) or min(
        block.ours, key=lambda name: block.ours[name].values["euclidean"][0].value
    )
    models = {(m.algorithm, m.strategy): m for m in collect_models(experiment.metrics)}
    after, seeds = block.ours[strategy], models[block.algorithm, strategy]
    tiles = [
        {
            "name": name,
            "before": blocks_lib.spread(models["", "finetuned"].intervals(metric))["mean"],
            "after": after.intervals(metric)[0],
        }
        for name, metric in (
            ("F, forget rate (lower is better)", "forget"),
            ("R, retain rate (higher is better)", "retain"),
            ("Non-SF, target (higher is better)", "non_sf_target"),
        )
        if after.get(metric)
    ]
    damaged = [
        names.strategy_name(n) for n, m in block.ours.items() if m.values["num_damaged"][0].value
    ]
    where = names.algorithm_name(block.algorithm) if is_alone else block.title
    return {
        "title": f"{where}, with the sets of {names.strategy_name(strategy)}",
        "tiles": tiles,
        "points": _points(after, seeds, notes.answers_taken_against(experiment.metrics[0])),
        "damaged": ", ".join(damaged),
        "figures": _intervals(block, models.get(("", "backbone")), experiment),
    }


def _points(after: Model, seeds: Model, of_whom: str) -> list[tuple[str, str]]:
    """Returns in words what was forgotten and what it cost, each by its interval."""
    forget, retain = (after.intervals(rate)[0] for rate in ("forget", "retain"))
    verdicts = seeds.verdicts()
    if len(seeds.epochs) == 1:
        judged = [
            f"{verdict.capitalize()}: {seeds.values['judgment/reasons'][0].value}."
            for verdict in verdicts
        ]
    else:
        words = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        judged = [f"Of {sum(verdicts.values())} seeds: {words}."] if verdicts else []
    random = [
        _versus_random(letter, differences)
        for letter, rate in (("F", "forget"), ("R", "retain"))
        if (differences := seeds.intervals(f"{rate}_minus_random"))
    ]
    return [
        (
            "What is left",
            f"Answers to target queries share {100 * forget['mean']:.0f} % of the wording of "
            f"{of_whom} (F {tables.format_interval(forget)}).",
        ),
        *(("Judgment", text) for text in judged),
        (
            "The cost",
            f"Answers to normal queries share {100 * retain['mean']:.1f} % of the wording of "
            f"{of_whom} (R {tables.format_interval(retain)}).",
        ),
        *([("Against a random set", " ".join(random))] if random else []),
    ]


def _versus_random(letter: str, differences: Sequence[IntervalEntry]) -> str:
    below = sum(difference["high"] < 0 for difference in differences)
    above = sum(difference["low"] > 0 for difference in differences)
    if len(differences) > 1:
        return (
            f"{letter} is lower in {below} and higher in {above} of {len(differences)} seeds, by "
            "the whole interval."
        )
    size = tables.format_interval(differences[0], signed=True)
    if below or above:
        return f"{letter} is clearly {'lower' if below else 'higher'}: {size}."
    return f"{letter} cannot be told apart: {size}."


def _intervals(
    block: blocks_lib.Block, backbone: Model | None, experiment: runs.Experiment
) -> list[dict[str, Any]]:
    """Returns the two figures of F and R with their intervals."""
    styles = names.strategy_styles(strategies_of(experiment.metrics[0]))
    colors = {names.strategy_name(name): styles[name][0] for name in block.ours}
    found = []
    for rate, letter, words in (
        ("forget", "F", "forget rate (lower is better)"),
        ("retain", "R", "retain rate (higher is better)"),
    ):
        rows = {
            names.strategy_name(name): {"": block.ours[name].intervals(rate)[0]}
            for name in block.strategies
            if name in block.ours
        }
        floor = None
        if backbone:
            entry = blocks_lib.spread(backbone.intervals(rate))
            rows[REFERENCES["backbone"]] = {"": entry}
            floor = entry["mean"] if rate == "forget" else None
        lowest = min(entry["low"] for row in rows.values() for entry in row.values())
        start = 0.0 if rate == "forget" or lowest < 0.5 else min(0.9, int(lowest * 10) / 10)
        figure = figures.draw_intervals(
            rows,
            xlabel=f"{letter}, {words}",
            colors=colors | {REFERENCES["backbone"]: drawing.INK},
            start=start,
            floor=floor,
            frame=drawing.Frame(56 + 27 * len(rows), left=104, right=58, top=8, bottom=48),
        )
        title = f"{letter} of every strategy, {block.title}"
        note = "" if start == 0 else f"The axis starts at {start:g}."
        found.append(_figure(figure, title, f"{letter}, {words}.", note))
    return found


def _figure(figure: Any, title: str, lead: str, text: str = "") -> dict[str, Any]:
    return {"svg": drawing.page_svg(figure, title), "lead": lead, "text": text}


# other sections ---------------------------------------------------------------------------------


def _frontier(experiment: runs.Experiment) -> dict[str, Any]:
    """Returns the panels of every seed and algorithm; nothing without F and R."""
    metrics = experiment.metrics[0]
    algorithms = list(dict.fromkeys(entry["algorithm"] for entry in metrics["methods"]))
    if not algorithms or any(m["finetuned"]["euclidean"] is None for m in experiment.metrics):
        return {}
    panels = list(itertools.product(experiment.metrics, algorithms))
    low = min(map(figures.lowest_retain, experiment.metrics))
    found = []
    for seed, algorithm in panels[:_MAX_PANELS]:
        figure = figures.draw_frontier(seed, [algorithm], retain_from=low, frame=drawing.Frame(380))
        where = names.algorithm_name(algorithm)
        where += f", seed {seed['seed']}" if len(experiment.seeds) > 1 else ""
        title = f"Frontier of {experiment.name}, {where}: F against R over the epochs"
        found.append(_figure(figure, title, where))
    return {
        "name": experiment.name,
        "legend": strategy_legend(strategies_of(metrics)) + reference_legend(metrics),
        "figures": found,
        "left_out": len(panels) - len(found),
        "which": _of_first(experiment, " (", ")"),
        "table": results.results_table(metrics, epochs="all"),
    }


def _block_table(block: blocks_lib.Block, strategies: Sequence[str]) -> dict[str, Any]:
    # Of each strategy alone: what the paper has beside a run takes no color from it.
    marks = [
        drawing.mark_svg(*reversed(names.strategy_styles([*strategies, name])[name]))
        for name in block.strategies
    ]
    return {"table": blocks_lib.lay_out(block), "marks": marks}


def _tables(experiment: runs.Experiment, blocks: Sequence[blocks_lib.Block]) -> dict[str, Any]:
    metrics, which = experiment.metrics[0], _of_first(experiment, " (", ")")
    more = []
    if len(experiment.seeds) > 1:
        more = [
            ("All seeds in one table", results.seeds_table(experiment.metrics)),
            (
                "What stands behind the rates, all seeds",
                results.seeds_checks_table(experiment.metrics),
            ),
        ]
    of_first = (
        ("Forgetting or damage", results.checks_table(metrics)),
        ("Perplexity", results.perplexity_table(metrics)),
        ("TOFU's own metrics", results.tofu_table(metrics)),
        ("Every distance to the ideal", results.distances_table(metrics)),
    )
    more += [(f"{name}{which}", table) for name, table in of_first if table]
    strategies = strategies_of(metrics)
    shown = [_block_table(block, strategies) for block in blocks]
    return {"name": experiment.name, "blocks": shown, "more": more}


def _retrieval(experiment: runs.Experiment) -> dict[str, Any]:
    run = experiment.runs[0]
    histograms = []
    for seed in experiment.runs[:_MAX_HISTOGRAMS]:
        number, scores = seed.metrics["seed"], seed.scores
        if scores is None:
            continue
        figure = figures.draw_scores(**scores._asdict(), frame=drawing.Frame(330))
        title = f"Histogram of the retrieval scores of {experiment.name}, seed {number}, with the "
        text = (
            f"Seed {number}. Shaded: the ends that the sets take, up to "
            f"{scores.retain_threshold:.3g} and from {scores.forget_threshold:.3g}."
        )
        histograms.append(
            _figure(
                figure, f"{title}ends that the sets take", "Scores of the training examples.", text
            )
        )
    labeled = [run.scores for run in experiment.runs if run.scores]
    kinds = (("targets", drawing.TARGET_COLOR), ("other examples", drawing.OTHER_COLOR))
    return {
        "name": experiment.name,
        "which": _of_first(experiment),
        "table": results.retrieval_table(run.metrics),
        "figures": histograms,
        "legend": [
            (drawing.mark_svg("s", color, has_line=False), name)
            for name, color in kinds
            if any(scores.is_target_N is not None for scores in labeled)
        ],
        "sets": [
            {
                "name": names.strategy_name(strategy),
                "is_open": strategy == names.highlighted(run.sets),
                "kinds": sets,
            }
            for strategy, sets in run.sets.items()
            if sets
        ],
    }


def _training(experiment: runs.Experiment) -> dict[str, Any]:
    run, name = experiment.runs[0], experiment.name + _of_first(experiment)
    strategies = strategies_of(run.metrics)
    found = []
    for panel, curves in run.losses.items():
        figure = figures.draw_losses({panel: curves}, strategies, frame=drawing.Frame(300))
        found.append(_figure(figure, f"Loss of {name}, {panel}, over the steps", panel))
    return {"name": name, "legend": strategy_legend(strategies), "figures": found}


def _settings(experiment: runs.Experiment) -> dict[str, Any]:
    run = experiment.runs[0]
    plain = {k: v for k, v in run.config.items() if not isinstance(v, Mapping)}
    groups = {
        "run": plain | {"seed": list(experiment.seeds)},
        **{k: v for k, v in run.config.items() if isinstance(v, Mapping)},
        "versions": run.versions,
    }
    shown = {
        name: {key: _value(value) for key, value in values.items()}
        for name, values in groups.items()
        if values
    }
    return {"name": experiment.name, "groups": shown}


def _value(value: object) -> str:
    if isinstance(value, str):
        return value or "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value)


def _paper(paper: Sequence[published.PublishedBlock]) -> dict[str, Any]:
    rows = [row for block in paper for row in block.rows.values()]
    return {
        "num_wrong": sum(row.values["is_wrong"][0].value for row in rows),
        "num_not_following": sum(not block.follows for block in paper),
        "blocks": [_block_table(b, b.strategies) for b in blocks_lib.published_only(paper)],
    }
