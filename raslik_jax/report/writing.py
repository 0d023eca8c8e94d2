"""From metrics to tables and figures: report."""

import pathlib

from raslik_jax.evaluate import summary
from raslik_jax.report import (
    drawing,
    facts,
    figures,
    names,
    page,
    published,
    results,
    robustness,
    tables,
)
from raslik_jax.run import artifacts
from raslik_jax.run.recipes import Case, Files, Recipe, variants_of
from raslik_jax.run.stages.evaluate import reads_of_results
from raslik_jax.run.workspace import Workspace

# Target and normal queries whose answers the report shows side by side.
_SHOWN = {True: 6, False: 3}


def report(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the tables of the terminal and of report.md, the figures and the page."""
    stored = facts.read_facts(workspace.root)
    metrics, corpus = stored.metrics, stored.metrics["corpus"]
    drawn = {"losses": figures.draw_losses(stored.losses, list(metrics["retrieval"]))}
    if metrics["finetuned"]["euclidean"] is not None:
        drawn["frontier"] = figures.draw_frontier(metrics)
    if stored.scores:
        drawn["scores"] = figures.draw_scores(**stored.scores._asdict())
    for name, figure in drawn.items():
        drawing.save_figure(figure, folder / name)
    retrieval, last = results.retrieval_table(metrics), results.results_table(metrics)
    texts = [tables.render_terminal(table) for table in (retrieval, last)]
    artifacts.TABLE.write(folder, "\n\n".join(texts) + "\n")
    every, answers = results.results_table(metrics, epochs="all"), _answers(stored)
    parts: list[str | tables.Table] = [
        f"# {tables.escape_markdown(metrics['name'])}",
        f"Seed {metrics['seed']}; {corpus['train']:,} training examples, {corpus['targets']:,} of "
        f"them labeled targets; measured on {corpus['target_queries']} target and "
        f"{corpus['normal_queries']} normal {corpus['query_split']} queries.",
        *("## Retrieval", retrieval),
        *(["![Scores of the training examples](scores.png)"] if "scores" in drawn else []),
        *("## Forgetting and retention", last),
        *(["![The frontier over epochs](frontier.png)"] if "frontier" in drawn else []),
        *("## Every epoch", every),
        *(
            part
            for title, table in results.details(metrics).items()
            for part in (f"## {title}", table)
        ),
        *_robustness(metrics),
        *(("## The traced prompts", traced) if (traced := _traced(workspace)).rows else ()),
        *(("## Answers side by side", answers) if answers.rows else ()),
        *("## Training", "![Loss curves](losses.png)"),
    ]
    texts = [part if isinstance(part, str) else tables.render_markdown(part) for part in parts]
    artifacts.REPORT.write(folder, "\n\n".join(texts) + "\n")
    html = page.render(facts.group_runs([stored]), paper=published.read_blocks())
    artifacts.PAGE.write(folder, html)


def _robustness(metrics: summary.Metrics) -> list[str | tables.Table]:
    """Returns in words and in tables whether it stays forgotten; nothing without measures."""
    points = [
        f"- **{lead}**: {tables.escape_markdown(text)}"
        for lead, text in robustness.points_of(metrics)
    ]
    parts: list[str | tables.Table] = []
    for title, table in robustness.tables_of(metrics).items():
        parts += [f"### {title}", table]
    return ["## Does it stay forgotten?", "\n".join(points), *parts] if points else []


def _traced(workspace: Workspace) -> tables.Table:
    """Returns what every model makes of the traced prompts; without rows where none was asked."""
    names_of = {"finetuned": "before unlearning", "backbone": "backbone"}
    root, rows = workspace.root, list[tuple[str, ...] | str]()
    if not workspace.config.evaluate.traced:
        return tables.Table((), ())
    files = {title: artifacts.traced(name) for name, title in names_of.items()}
    for strategy in workspace.config.retrieve.strategies:
        for algorithm in workspace.config.unlearn.algorithms:
            last = workspace.epochs(strategy, algorithm)[-1]
            title = f"{names.strategy_name(strategy)} {names.algorithm_name(algorithm)}"
            files[title] = artifacts.traced(last, artifacts.Variant(strategy, algorithm))
    # Not every run knows a model before fine-tuning.
    found = {title: told for title, file in files.items() if (told := file.find(root))}
    for place, one in enumerate(next(iter(found.values()))):
        rows.append(f"> {one.traced}")
        rows += [
            (title, f"{told[place].nll:.2f}", told[place].output.strip() or "(empty)")
            for title, told in found.items()
        ]
    columns = ("Model", "Nats a token of the traced answer", "Own answer")
    return tables.Table(tuple(map(tables.Column, columns)), tuple(rows))


def _answers(stored: facts.Facts) -> tables.Table:
    """Returns the answers of all models one below the other under their prompt."""
    rows: list[tuple[str, ...] | str] = []
    for is_target, most in _SHOWN.items():
        for query in [q for q in stored.queries if q.is_target == is_target][:most]:
            rows.append(f"> {query.text}")
            for (algorithm, strategy), texts in stored.answers.items():
                name = names.strategy_name(strategy)
                name = f"{name} {names.algorithm_name(algorithm)}" if algorithm else name.lower()
                rows.append((name, texts[query.example_id].strip() or "(empty)"))
    return tables.Table((tables.Column("Model"), tables.Column("Answer")), tuple(rows))


# The page's part on retrieval and the traced answers.
_DRAWN = ("influence", "traced", "chance", "tokens", "sizes")


def _reads(case: Case) -> str:
    shown = [*(f"retrieve/{name}" for name in _DRAWN), artifacts.OWN_ANSWERS.unit]
    trained = ["backbone", "finetune"] if case.config.finetunes else ["backbone"]
    drawn = [name for name in shown if name in case.names]
    drawn += [artifacts.losses(name).path for name in trained if name in case.names]
    drawn += [artifacts.steps(variant).path for variant in variants_of(case.config)]
    return " ".join([reads_of_results(case), "evaluate", artifacts.RETRIEVAL.path, *drawn])


def _files(case: Case) -> Files:
    """Returns what commands have left in the work directory that the page shows too."""
    root = case.workspace.root
    left = (artifacts.EXPORTS, artifacts.VALIDATION)
    return {one.path: one.place(root) for one in left if one.is_there(root)}


UNITS = (
    Recipe(
        "report",
        report,
        _reads,
        "evaluate.marker_words",
        values=lambda case: {"forms": ["markdown", "html"]},
        files=_files,
        is_shared=False,
        is_alone=True,
        measures=True,
    ),
)
