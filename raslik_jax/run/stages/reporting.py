"""From metrics to tables and figures: report."""

import pathlib
from collections.abc import Mapping
from typing import Any

from raslik_jax.data.examples import Example
from raslik_jax.report import figures, page, published, runs, tables
from raslik_jax.report.markup import escape_markdown
from raslik_jax.run.workspace import Workspace

# Queries whose answers the report shows side by side.
_SHOWN_TARGET, _SHOWN_NORMAL = 6, 3


def report(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the tables of the terminal and of report.md, the figures, and the page."""
    config, stored = workspace.config, runs.read_run(workspace.root)
    metrics = stored.metrics
    target, normal = workspace.evaluation_queries()
    shown = [row.example_id for row in (*target[:_SHOWN_TARGET], *normal[:_SHOWN_NORMAL])]
    answers = {
        "fine-tuned": workspace.answers("references", "evaluation", "finetuned.jsonl"),
        "backbone": workspace.answers("references", "evaluation", "backbone.jsonl"),
    }
    for algorithm in config.unlearn.algorithms:
        for strategy in config.retrieve.strategies:
            label = f"{tables.strategy_name(strategy)} {tables.algorithm_name(algorithm)}"
            last = f"epoch-{workspace.epochs(strategy, algorithm)[-1]}.jsonl"
            answers[label] = workspace.answers("generate", f"{strategy}-{algorithm}", last)
    prompts_by_id = {row.example_id: _question(row) for row in (*target, *normal)}

    images = {
        "losses": figures.draw_losses(
            {
                panel: {tables.strategy_name(label): curve for label, curve in curves.items()}
                for panel, curves in stored.losses.items()
            }
        ),
    }
    has_frontier = metrics["finetuned"]["euclidean"] is not None
    if has_frontier:
        images["frontier"] = figures.draw_frontier(metrics)
    if stored.scores:
        images["scores"] = figures.draw_scores(
            stored.scores.score_N,
            stored.scores.is_target_N,
            forget_threshold=stored.scores.forget_threshold,
            retain_threshold=stored.scores.retain_threshold,
        )
    for name, figure in images.items():
        figures.save_figure(figure, folder / name)
    results, retrieval = tables.results_table(metrics), tables.retrieval_table(metrics)
    (folder / "table.txt").write_text(
        f"{tables.render_terminal(retrieval)}\n\n{tables.render_terminal(results)}\n"
    )
    sections = (
        (f"# {escape_markdown(config.name)}", f"Seed {config.seed}; {_corpus_line(metrics)}"),
        ("## Retrieval", tables.render_markdown(retrieval)),
        ("", "![Scores of the training examples](scores.png)" if stored.scores else ""),
        ("## Forgetting and retention", tables.render_markdown(results)),
        ("", "![The frontier over epochs](frontier.png)" if has_frontier else ""),
        ("## Every epoch", tables.render_markdown(tables.results_table(metrics, epochs="all"))),
        ("## Forgetting or damage", tables.render_markdown(tables.checks_table(metrics))),
        *_section("## Perplexity", tables.perplexity_table(metrics)),
        *_section("## TOFU's own metrics", tables.tofu_table(metrics)),
        *_section(
            "## Distances to the ideal", tables.distances_table(metrics) if has_frontier else None
        ),
        *_section(
            "## Answers side by side",
            tables.completions_by_prompt(prompts_by_id, answers, ids=shown) if shown else None,
        ),
        ("## Training", "![Loss curves](losses.png)"),
    )
    text = "\n\n".join(part for section in sections for part in section if part)
    (folder / "report.md").write_text(text + "\n")
    html = page.render(runs.group_runs([stored]), paper=published.read_blocks())
    (folder / "report.html").write_text(html)


def _section(title: str, table: tables.Table | None) -> list[tuple[str, str]]:
    """Returns the section of a table, nothing where there is none."""
    return [] if table is None else [(title, tables.render_markdown(table))]


def _question(row: Example) -> str:
    return f"{row.instruction} {row.input}".strip()


def _corpus_line(metrics: Mapping[str, Any]) -> str:
    corpus = metrics["corpus"]
    return (
        f"{corpus['train']:,} training examples, {corpus['targets']:,} of them labeled targets; "
        f"measured on {corpus['target_queries']} target and {corpus['normal_queries']} normal "
        f"{corpus['query_split']} queries."
    )
