"""From metrics to tables and figures: report."""

import pathlib
from typing import Any

from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report import drawing, figures, names, page, published, results, runs
from raslik_jax.report.records import REFERENCES
from raslik_jax.report.tables import escape_markdown, render_markdown, render_terminal
from raslik_jax.run.workspace import Workspace

# Target and normal queries whose answers the report shows side by side.
_SHOWN = {True: 6, False: 3}


def report(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the tables of the terminal and of report.md, the figures, and the page."""
    stored = runs.read_run(workspace.root)
    metrics = stored.metrics
    drawn = _draw(stored)
    for name, figure in drawn.items():
        drawing.save_figure(figure, folder / name)
    retrieval, last = results.retrieval_table(metrics), results.results_table(metrics)
    (folder / "table.txt").write_text(f"{render_terminal(retrieval)}\n\n{render_terminal(last)}\n")
    prompts = {
        query.example_id: query.text
        for is_target, most in _SHOWN.items()
        for query in [q for q in stored.queries if q.is_target == is_target][:most]
    }
    answers = {
        f"{names.strategy_name(strategy)} {names.algorithm_name(algorithm)}"
        if algorithm
        else REFERENCES[strategy].lower(): texts
        for (algorithm, strategy), texts in stored.answers.items()
    }
    sections = (
        (f"# {escape_markdown(metrics['name'])}", _corpus_line(metrics)),
        ("## Retrieval", retrieval),
        ("", "![Scores of the training examples](scores.png)" if "scores" in drawn else ""),
        ("## Forgetting and retention", last),
        ("", "![The frontier over epochs](frontier.png)" if "frontier" in drawn else ""),
        ("## Every epoch", results.results_table(metrics, epochs="all")),
        ("## Forgetting or damage", results.checks_table(metrics)),
        ("## Perplexity", results.perplexity_table(metrics)),
        ("## TOFU's own metrics", results.tofu_table(metrics)),
        ("## Distances to the ideal", results.distances_table(metrics)),
        (
            "## Answers side by side",
            results.completions_table(prompts, answers) if prompts else None,
        ),
        ("## Training", "![Loss curves](losses.png)"),
    )
    parts = [
        (title, content if isinstance(content, str) else render_markdown(content))
        for title, content in sections
        if content
    ]
    text = "\n\n".join(part for section in parts for part in section if part)
    (folder / "report.md").write_text(text + "\n")
    html = page.render(runs.group_runs([stored]), paper=published.read_blocks())
    (folder / "report.html").write_text(html)


def _draw(stored: runs.StoredRun) -> dict[str, Any]:
    strategies = list(stored.metrics["retrieval"])
    drawn = {"losses": figures.draw_losses(stored.losses, strategies)}
    if stored.metrics["finetuned"]["euclidean"] is not None:
        drawn["frontier"] = figures.draw_frontier(stored.metrics)
    if stored.scores:
        drawn["scores"] = figures.draw_scores(**stored.scores._asdict())
    return drawn


def _corpus_line(metrics: Metrics) -> str:
    corpus = metrics["corpus"]
    return (
        f"Seed {metrics['seed']}; {corpus['train']:,} training examples, {corpus['targets']:,} of "
        f"them labeled targets; measured on {corpus['target_queries']} target and "
        f"{corpus['normal_queries']} normal {corpus['query_split']} queries."
    )
