"""The answers of the fine-tuned model and the backbone before anything is unlearned."""

import pathlib
from typing import Any

from raslik_jax.evaluate import judgment, perplexity
from raslik_jax.run import artifacts, memory
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import generate
from raslik_jax.run.workspace import (
    Workspace,
    judge_of,
    non_sf_by_rule,
    queries_to_answer,
)


@memory.decoding
def make_retrieval_answers(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model to queries without an output."""
    queries = workspace.corpus.queries["retrieval"]
    rows = queries_to_answer(queries, workspace.config.sketch.query_output)
    outputs = []
    if rows:
        model = workspace.with_adapter(workspace.finetuned)
        outputs = workspace.generate(model, rows, "queries")
    generate.write_outputs(artifacts.OWN_ANSWERS, folder, rows, outputs)
    print(f"    the model answers {len(rows):,} of {len(queries):,} queries. The others have one")


@memory.decoding
def make_references(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of both models to the queries of the measurement."""
    generate.write_answers(workspace, None, folder)
    if not workspace.has_backbone:
        print("    there is no model before fine-tuning to compare with: only damage can be judged")
        return
    target, _ = workspace.evaluation_queries()
    measure = non_sf_by_rule(workspace.config)
    if measure is None or not target:
        return
    shares: dict[str, Any] = {}
    for name in ("finetuned", "backbone"):
        answers = artifacts.answers(name).read_in(folder)
        shares[name] = 1 - float(measure([answers[row.example_id] for row in target]).mean())
    by = "judge" if judge_of(workspace.config) else "words"
    print(f"    {judgment.describe_behavior(judgment.find_behavior(by, **shares))}")


@memory.likelihoods
def make_perplexities(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the likelihoods for both models and reports the evidence of the behavior."""
    generate.write_perplexities(workspace, None, folder)
    if workspace.has_marker or not workspace.has_backbone:
        return
    found = {
        name: perplexity.perplexity(
            artifacts.perplexities(name).read_in(folder)["sets"]["behavior"], seed=0, resamples=1
        )
        for name in ("finetuned", "backbone")
    }
    means: dict[str, Any] = {name: interval["mean"] for name, interval in found.items() if interval}
    if len(means) == 2:
        behavior = judgment.find_behavior("likelihood", **means)
        print(f"    {judgment.describe_behavior(behavior)}")


UNITS = (
    Recipe(
        "references/retrieval",
        make_retrieval_answers,
        f"{artifacts.RETRIEVAL.path} {{finetuned}}",
        "{decoding} sketch.query_output",
        writes=generate.ANSWERS_FORMAT,
        work=lambda run: generate.count_answers(run, run.num_answered, 1),
    ),
    Recipe(
        "references/evaluation",
        make_references,
        "{measured} {finetuned}",
        "{likelihood} {decoding} references.query_split references.base evaluate.marker_words",
        writes=generate.MEASURED_FORMAT,
        measures=True,
        work=lambda run: generate.count_measured(run, 2),
    ),
    Recipe(
        "references/perplexity",
        make_perplexities,
        "{drawn} references/evaluation {finetuned}",
        "{perplexity}",
        is_asked=lambda config: config.evaluate.perplexity_examples,
        measures=True,
        work=lambda run: generate.count_perplexities(run, 2),
    ),
)
