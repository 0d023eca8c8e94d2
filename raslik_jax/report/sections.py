"""The sections of the page: one record each with its facts and its template.

A section's facts are taken from stored runs here. Its template writes them. Templates of this room
are in `templates/`.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from raslik_jax.evaluate.words import word_pattern
from raslik_jax.report import (
    drawing,
    explorer,
    figures,
    names,
    notes,
    results,
    robustness,
)
from raslik_jax.report.facts import FORGET_PANEL, Experiment
from raslik_jax.report.tables import Table
from raslik_jax.report.tidy import Model, collect_models, has_steps, is_probed

# The limits of the page, so that its size stays bounded for any run.
LIMITS = {
    "target": 12,
    "normal": 6,
    "answer": 1500,
    "example": 400,
    "traced": 4,
    "tokens": 600,
    "few": 110,
}
_MAX_CHARACTERS = 1_500_000  # of all answers
_MAX_PANELS, _MAX_HISTOGRAMS = 12, 4
_RATES = {
    "forget": ("F", "forget rate (lower is better)"),
    "retain": ("R", "retain rate (higher is better)"),
}


# The parts of the page that are opened by a click, with what each one shows.
PARTS = {
    "evidence": ("Evidence", "the rows, their tokens and the chance of their scores"),
    "cost": ("Cost", "what else changed, before and after side by side"),
    "method": ("Method", "frontier, tables, training and settings"),
    "files": ("Files", "what this run wrote"),
}


class Section(NamedTuple):
    """A section of the page.

    Attributes:
      title: its heading.
      part: one of `PARTS`, or "" for a place before them.
      facts: function that returns the values for the template; if it returns none, the page leaves
        the section out.
      template: Jinja: a file of `templates/`, or the text itself.
      style: function that returns further style of the page; `script` returns further script.
    """

    title: str
    part: str
    facts: Callable[[Sequence[Experiment]], Mapping[str, Any]]
    template: str
    style: Callable[[], str] = str
    script: Callable[[], str] = str


def _styles(experiment: Experiment) -> dict[str, tuple[Markup, str]]:
    """Returns the mark and the printed name of each strategy."""
    styles = names.strategy_styles(experiment.strategies).items()
    return {
        name: (drawing.mark_svg(marker, color), names.strategy_name(name))
        for name, (color, marker) in styles
    }


def _references() -> dict[str, tuple[Markup, str]]:
    """Returns the mark and the printed name of each model before unlearning and of the ideal."""
    return {
        name: (drawing.mark_svg(marker, color, has_line=False), names.strategy_name(name))
        for name, (marker, _, color) in figures.REFERENCE_MARKS.items()
    }


def _each(
    experiments: Sequence[Experiment], show: Callable[[Experiment], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the facts of each experiment that has some, as `views` of a section."""
    shown = [(one, found) for one in experiments if (found := show(one))]
    views = [{"name": one.name, "first": one.of_seed(), **found} for one, found in shown]
    return {"views": views} if views else {}


def _figure(figure: Any, title: str, lead: str, text: str = "") -> dict[str, Any]:
    return {"svg": drawing.page_svg(figure, title), "lead": lead, "text": text}


def shorten(text: str, length: int) -> str:
    """Returns a text cut at a length and the number of characters left out."""
    if len(text) <= length:
        return text
    return f"{text[:length].rstrip()} … ({len(text) - length:,} characters more)"


# what happened ----------------------------------------------------------------------------------


def _story(experiment: Experiment) -> dict[str, Any]:
    found = experiment.runs[0].incident
    if not found:
        return {}
    missing = [notes.behavior_sentence(m) for m in experiment.metrics if not _is_shown(m)]
    return {"found": found, "missing": missing[:1]}


def _is_shown(metrics: Any) -> bool:
    """Returns whether the fine-tuned model shows the behavior, if this was measured."""
    return not (found := metrics.get("behavior")) or found["is_shown"]


def _evidence(experiment: Experiment) -> dict[str, Any]:
    found, rows, drawn = experiment.runs[0].incident, experiment.runs[0].explorer, []
    if not found:
        return {}
    if found.cut and rows:
        number, middle, edge, *_ = found.cut
        place = {"num_forget": number, "middle": middle, "edge": edge}
        figure = figures.draw_cut(rows.score_N, **place, frame=drawing.Frame(330))
        text = f"{number:,} of {len(rows.score_N):,} rows stand out."
        title = f"Scores of the rows of {experiment.name} in order. {text}"
        drawn = [_figure(figure, title, "The end of the rows that stand out.", text)]
    return {"found": found, "cut": drawn}


def _compare(experiment: Experiment) -> dict[str, Any]:
    found = experiment.runs[0].incident
    if not found or not found.wished:
        return {}
    wish = experiment.runs[0].config["retrieve"]["wished"]
    columns = found.cards, found.wished
    bad, count = found.traced[0].answer, len(found.traced)
    return {"bad": bad, "wish": wish, "columns": columns, "count": count}


def _files(experiment: Experiment) -> dict[str, Any]:
    found = experiment.runs[0].incident
    return {"downloads": found.downloads} if found and found.downloads else {}


def _all_rows(experiments: Sequence[Experiment]) -> dict[str, Any]:
    room = explorer.MOST_BYTES // max(1, sum(bool(one.runs[0].explorer) for one in experiments))

    def show(experiment: Experiment) -> dict[str, Any]:
        rows = experiment.runs[0].explorer
        return {"rows": explorer.pack(rows, room)} if rows else {}

    return _each(experiments, show)


# results ----------------------------------------------------------------------------------------


def _summary(experiments: Sequence[Experiment]) -> dict[str, Any]:
    def show(experiment: Experiment) -> dict[str, Any]:
        runs = experiment.metrics
        missing = [m for m in runs if not _is_shown(m)]
        told = [(m["seed"], notes.judgment_sentence(collect_models([m]))) for m in runs]
        first = experiment.runs[0].incident
        of = (f"Seed {runs[0]['seed']}." if len(runs) > 1 else "", first.which if first else "")
        whose = " ".join(filter(None, of))
        return {
            "missing": [(m["seed"], notes.behavior_sentence(m)) for m in missing[:1]],
            "judgments": [(seed, text) for seed, text in told if text],
            "costs": [*filter(None, (whose,)), *first.costs] if first and first.costs else [],
            "items": [*_summarized(experiment)],
        }

    return _each(experiments, show)


def _summarized(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yields the facts of the summary for an algorithm and the strategy of the report.

    Without F and R of all models it yields nothing.
    """
    models = collect_models(experiment.metrics)
    earlier = {model.strategy: model for model in models if not model.algorithm}
    for algorithm in dict.fromkeys(model.algorithm for model in models if model.algorithm):
        shown = [model for model in models if model.algorithm == algorithm]
        if any(len(one.values.get("euclidean", ())) < len(experiment.metrics) for one in shown):
            continue
        own = names.highlighted(model.strategy for model in shown)
        nearest = min(shown, key=lambda model: model.spread("euclidean")["mean"])
        after = next((model for model in shown if model.strategy == own), nearest)
        where = f"{experiment.name}, {names.algorithm_name(algorithm)}"
        drawn = [*shown, *(model for name, model in earlier.items() if name == "backbone")]
        yield {
            "algorithm": algorithm,
            "where": where,
            "strategy": after.strategy,
            "before": earlier["finetuned"],
            "after": after,
            "damaged": [model.strategy for model in shown if model.num_damaged],
            "figures": [_intervals(where, drawn, experiment.strategies, r) for r in _RATES],
        }


def _intervals(
    where: str, models: Sequence[Model], strategies: Sequence[str], rate: str
) -> dict[str, Any]:
    """Returns the figure of a rate of all models with its intervals."""
    letter, words = _RATES[rate]
    rows = {names.strategy_name(m.strategy): m.joined(rate) for m in models}
    styles = names.strategy_styles(strategies) | {"backbone": (drawing.INK, "")}
    lowest = min(row["low"] for row in rows.values())
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
    title = f"{letter} of every strategy, {where}"
    start_note = "" if start == 0 else f"The axis starts at {start:g}."
    return _figure(figure, title, f"{letter}, {words}.", start_note)


def _robustness(experiment: Experiment) -> dict[str, Any]:
    metrics = experiment.metrics[0]
    points = robustness.points_of(metrics)
    return {"points": points, "tables": robustness.tables_of(metrics)} if points else {}


def _validation(experiment: Experiment) -> dict[str, Any]:
    found = experiment.runs[0].validation
    return {"table": results.validation_table(found)} if found else {}


def _retrained(experiment: Experiment) -> dict[str, Any]:
    metrics = experiment.metrics[0]
    said = dict[str, str]()
    for one in metrics["methods"]:
        if text := one.get("judgment", {}).get("distance"):
            algorithm = names.algorithm_name(one["algorithm"])
            said[f"{names.strategy_name(one['strategy'])} with {algorithm}"] = text
    table = results.retrained_table(metrics)
    sentences = [f"{name}: {text}" if len(said) > 1 else text for name, text in said.items()]
    return {"table": table, "sentences": sentences} if table else {}


def _frontier(experiment: Experiment) -> dict[str, Any]:
    metrics = experiment.metrics[0]
    algorithms = dict.fromkeys(entry["algorithm"] for entry in metrics["methods"])
    if not algorithms or any(m["finetuned"]["euclidean"] is None for m in experiment.metrics):
        return {}
    panels = list(itertools.product(enumerate(experiment.metrics), algorithms))
    low, drawn = min(map(figures.lowest_retain, experiment.metrics)), []
    for (i, seed), algorithm in panels[:_MAX_PANELS]:
        frame = drawing.Frame(380)
        figure = figures.draw_frontier(seed, algorithm, retain_from=low, frame=frame)
        where = names.algorithm_name(algorithm) + experiment.of_seed(i)
        title = f"Frontier of {experiment.name}, {where}: F against R"
        drawn.append(_figure(figure, title, where))
    marks = [mark for name, mark in _references().items() if name in (*metrics, "ideal")]
    return {
        "legend": [*_styles(experiment).values(), *marks],
        "figures": drawn,
        "left_out": len(panels) - len(drawn),
        "epochs": results.results_table(metrics, epochs="all"),
        "has_steps": has_steps(metrics),
        "has_floor": "backbone" in metrics,
    }


def _tables(experiment: Experiment) -> dict[str, Any]:
    runs, others = experiment.metrics, list[Table]()
    first = results.results_table(runs[0])
    if len(runs) > 1:
        first, *others = results.tables_of(runs)
    return {"results": first, "seeds": others, "details": results.details(runs[0])}


def _retrieval(experiment: Experiment) -> dict[str, Any]:
    run, drawn = experiment.runs[0], []
    own, seeds = run.metrics["settings"].get("retrieve", {}), experiment.runs
    has_scores = bool(own.get("held_out")) or any(map(names.is_by_gradients, run.sets))
    is_reversed = functools.partial(names.reverses_scores, has_scores=has_scores)
    scored = [(one.metrics["seed"], one.explorer.distribution()) for one in seeds if one.explorer]
    for seed, found in scored[:_MAX_HISTOGRAMS]:
        figure = figures.draw_scores(**found, frame=drawing.Frame(330))
        sets = {name: found[name] for name in ("forget", "retain")}
        ends = [f"{name} {at[0]:.3g} to {at[1]:.3g}" for name, at in sets.items() if at]
        shaded = f" The sets are shaded: {' and '.join(ends)}." if ends else ""
        text = f"Seed {seed}.{shaded}"
        title = f"Retrieval scores of {experiment.name}. {text}"
        drawn.append(_figure(figure, title, "Scores of the training examples.", text))
    colors = ((drawing.TARGET_COLOR, "targets"), (drawing.OTHER_COLOR, "other examples"))
    marks = ((drawing.mark_svg("s", color, has_line=False), name) for color, name in colors)
    return {
        "table": results.retrieval_table(experiment.metrics[0]),
        "histograms": drawn,
        "left_out": len(scored) - len(drawn),
        "kinds": [*marks] if any(f["is_target_N"] is not None for _, f in scored) else [],
        "sets": run.sets,
        "highlighted": names.highlighted(run.sets),
        "opposed": [n for n in run.sets if "retain" in run.sets[n] and is_reversed(n)],
    }


def _answers(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Returns the first queries with every model's answer that fit into a number of characters."""
    share = _MAX_CHARACTERS // max(1, sum(bool(one.runs[0].answers) for one in experiments))
    return _each(experiments, lambda one: _side_by_side(one, share))


def _side_by_side(experiment: Experiment, budget: int) -> dict[str, Any]:
    run, legend = experiment.runs[0], {**_styles(experiment), **_references()}
    if not run.answers or not run.queries:
        return {}
    texts = [text for answers in run.answers.values() for text in answers.values()]
    # 160: what the markup around each answer takes.
    each = sum(min(len(text), LIMITS["answer"]) for text in texts) / max(1, len(texts)) + 160
    num = len(run.answers) * (LIMITS["target"] + LIMITS["normal"])
    share = min(1.0, budget / (each * num))
    chosen = [
        query
        for kind in ("target", "normal")
        for query in [q for q in run.queries if q.is_target == (kind == "target")][
            : max(1, int(LIMITS[kind] * share))
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
            text = shorten(answers.get(query.example_id, ""), LIMITS["answer"])
            pieces = split(text) if text.strip() else []
            heading = names.algorithm_name(algorithm) or "Before unlearning"
            groups.setdefault(heading, []).append((*legend[name], pieces))
        queries.append({"query": query, "groups": groups})
    probed = {is_probed(run.config, algorithm) for algorithm, _ in run.answers if algorithm}
    place = "the step that its probes chose" if probed == {True} else "its last step"
    place += ", or at the step that its probes chose" if probed == {True, False} else ""
    return {
        "place": "the epoch that was chosen for it" if run.metrics.get("chosen") else place,
        "has_marks": bool(run.marker_words),
        # The first target query at which the model was caught is shown first.
        "default": caught[0] if caught else 0,
        "queries": queries,
        "left_out": len(run.queries) - len(chosen),
    }


def _training(experiment: Experiment) -> dict[str, Any]:
    losses = experiment.runs[0].losses
    drawn = [
        _figure(
            figures.draw_losses(curves, experiment.strategies, frame=drawing.Frame(300)),
            f"Loss of {experiment.name}{experiment.of_seed()}, {panel}, over the steps",
            panel,
        )
        for panel, curves in losses.items()
    ]
    is_unlearned = any(panel.endswith(FORGET_PANEL) for panel in losses)
    legend = _styles(experiment).values()
    return {"is_unlearned": is_unlearned, "legend": legend, "figures": drawn} if drawn else {}


def _settings(experiment: Experiment) -> dict[str, Any]:
    config = experiment.runs[0].config
    plain = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    groups = {name: value for name, value in config.items() if isinstance(value, Mapping)}
    versions = experiment.metrics[0].get("versions", {})
    run = plain | {"seed": experiment.seeds}
    return {"settings": {"run": run, **groups, "versions": versions}}


def facts_of(experiments: Sequence[Experiment]) -> list[str]:
    """Returns the opening facts of the page, one a line; shared facts occur once."""

    def told(experiment: Experiment) -> Iterator[str]:
        run, corpus = experiment.runs[0], experiment.metrics[0].get("corpus", {})
        yield names.dataset_name(run.config)
        yield names.describe_model(run.config)
        if "train" in corpus:
            yield f"{corpus['train']:,} training examples, {corpus['targets']:,} labeled targets"
            yield (
                f"{corpus['target_queries']} target and {corpus['normal_queries']} normal "
                f"{corpus['query_split']} queries"
            )
        seeds = experiment.seeds
        yield f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"

    return list(dict.fromkeys(line for one in experiments for line in told(one) if line))


def _stored(
    title: str, part: str, show: Callable[[Experiment], Mapping[str, Any]], template: str
) -> Section:
    """Returns a section that shows each experiment separately."""
    return Section(title, part, lambda experiments: _each(experiments, show), template)


# By their anchors, in the order of the page.
SECTIONS: dict[str, Section] = {
    "story": _stored("What happened", "", _story, "story.html.jinja"),
    "incident": _stored("The rows behind it", "evidence", _evidence, "evidence.html.jinja"),
    "compare": _stored("Two answers", "evidence", _compare, "compare.html.jinja"),
    "explorer": Section(
        "All rows", "evidence", _all_rows, "explorer.html.jinja", explorer.style, explorer.script
    ),
    "retrieval": _stored("Retrieval", "evidence", _retrieval, "retrieval.html.jinja"),
    "validation": _stored(
        "Do the scores predict retraining?",
        "evidence",
        _validation,
        '{% from "templates/macros.html.jinja" import table %}{% for view in views %}'
        "{{ table(view.table, view.name ~ view.first) }}{% endfor %}",
    ),
    "summary": Section("Summary", "cost", _summary, "summary.html.jinja"),
    "retrained": _stored("Next to retraining", "cost", _retrained, "retrained.html.jinja"),
    "robustness": _stored("Does it stay forgotten?", "cost", _robustness, "robustness.html.jinja"),
    "answers": Section("Answers", "cost", _answers, "answers.html.jinja"),
    "frontier": _stored("Frontier", "method", _frontier, "frontier.html.jinja"),
    "tables": _stored("Tables", "method", _tables, "tables.html.jinja"),
    "training": _stored("Training", "method", _training, "training.html.jinja"),
    "settings": _stored("Settings", "method", _settings, "settings.html.jinja"),
    "files": _stored("What this run wrote", "files", _files, "files.html.jinja"),
}
