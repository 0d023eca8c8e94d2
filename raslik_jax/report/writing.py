"""From metrics to the tables and the page: report."""

import pathlib

from raslik_jax.report import facts, page, results, tables
from raslik_jax.run import artifacts
from raslik_jax.run.recipes import Case, Files, Recipe, variants_of
from raslik_jax.run.stages.evaluate import reads_of_results
from raslik_jax.run.workspace import Workspace


def report(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the tables of the terminal and the page."""
    stored = facts.read_facts(workspace.root)
    metrics = stored.metrics
    shown = results.retrieval_table(metrics), results.results_table(metrics)
    artifacts.TABLE.write(folder, "\n\n".join(map(tables.render_terminal, shown)) + "\n")
    artifacts.PAGE.write(folder, page.render(facts.group_runs([stored])))


# The page's part on retrieval and the traced answers.
_DRAWN = ("influence", "traced", "chance", "tokens", "sizes", "wished")


def _reads(case: Case) -> str:
    shown = [*(f"retrieve/{name}" for name in _DRAWN), artifacts.OWN_ANSWERS.unit]
    trained = ["backbone", "finetune"] if case.config.finetunes else ["backbone"]
    drawn = [name for name in shown if name in case.names]
    drawn += [artifacts.losses(name).path for name in trained if name in case.names]
    drawn += [artifacts.steps(variant).path for variant in variants_of(case.config)]
    return " ".join([reads_of_results(case), "evaluate", artifacts.RETRIEVAL.path, *drawn])


def _files(case: Case) -> Files:
    """Returns the files of commands in the work directory that the page shows too."""
    root = case.workspace.root
    left = (artifacts.EXPORTS, artifacts.VALIDATION)
    return {one.path: one.place(root) for one in left if one.is_there(root)}


UNITS = (
    Recipe(
        "report",
        report,
        _reads,
        "evaluate.marker_words",
        values=lambda case: {"forms": ["html"]},
        files=_files,
        is_alone=True,
        measures=True,
    ),
)
