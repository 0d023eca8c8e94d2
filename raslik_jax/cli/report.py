"""Joins stored runs into a page and tables.

  raslik report --run=runs/incident
  raslik report --runs=runs/demo-0,runs/demo-1,runs/demo-2
  raslik report --runs=runs/demo,runs/other --out=report

The command reads only the work directories. Runs that differ only in their seed become one
experiment. A cell is then the mean over the seeds, with the smallest and the largest in brackets.
For a single run brackets are the 95 % bootstrap interval over queries. With --out the command
writes report.html, tables.md and tables.csv. It replaces only files of an earlier report.
tables.csv has a row for each run, strategy, algorithm, step and metric.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Literal

from raslik_jax.base import files
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora import describe_unregistered
from raslik_jax.incident import making
from raslik_jax.report import facts, page, results, tables, tidy
from raslik_jax.run import artifacts, written

Form = Literal["terminal", "markdown", "csv"]
_FILES: dict[str, Form] = {"tables.md": "markdown", "tables.csv": "csv"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The runs to join and the form of the result."""

    run: str = setting("", "Work directory of a run.")
    runs: tuple[str, ...] = setting((), "Work directories of several runs.")
    format: Form = setting("terminal", "Format of the printed tables.")
    out: str = setting("", "Folder for the page and for the tables in every format.")
    examples: int = setting(
        8, "Number of examples of each forget and retain set on the page.", low=0
    )


def run(options: Options) -> None:
    """Prints the tables and writes them with the page if there is a folder for them."""
    named = [options.run, *options.runs] if options.run else options.runs
    if not named:
        raise ValueError("--run or --runs must name work directories, got none: give --run=DIR")
    if options.out:
        making.require("matplotlib")
    findings = {run: why for run in named if (why := artifacts.read_finding(pathlib.Path(run)))}
    measured = [pathlib.Path(run) for run in named if run not in findings]
    stored = [facts.read_facts(run, num_rows=options.examples) for run in measured]
    experiments = facts.group_runs(stored)
    if options.out:
        # The page first: it marks the other files as those of a report.
        texts = {artifacts.PAGE.file: page.render(experiments, findings=findings)}
        texts |= {name: _render(form, experiments) + "\n" for name, form in _FILES.items()}
        root = pathlib.Path(named[0]) if len(named) == 1 else None
        _write(pathlib.Path(options.out), texts, root)
    if line := describe_unregistered(run.config.get("corpus", {}) for run in stored):
        print(line, file=sys.stderr)
    for name, text in findings.items():
        print(f"{name} found no row: {text}", file=sys.stderr if options.format == "csv" else None)
    if stored:
        print(_render(options.format, experiments))


def _render(form: Form, experiments: Sequence[facts.Experiment]) -> str:
    if form == "csv":
        # Runs of one name may differ in settings, which the name of an experiment has.
        rows = [
            row._replace(run=experiment.name)
            for experiment in experiments
            for row in tidy.tidy(experiment.metrics)
        ]
        return tables.render_csv(tidy.data_table(rows)).rstrip("\n")
    render, name = tables.render_terminal, tables.visible
    if form == "markdown":
        render, name = tables.render_markdown, lambda text: f"## {tables.escape_markdown(text)}"
    parts = []
    for experiment in experiments:
        parts += [name(experiment.name)] if len(experiments) > 1 else []
        parts += map(render, results.tables_of(experiment.metrics))
    return "\n\n".join(parts)


def _write(folder: pathlib.Path, texts: dict[str, str], root: pathlib.Path | None) -> None:
    """Writes the page and the tables; replaces only files of an earlier report.

    The work directory of a single run records the written files.
    """
    written.check_outside(folder, "--out", root)
    own = folder / artifacts.PAGE.file
    is_own = own.is_file() and page.is_page(own.read_bytes()[:4096])
    foreign = [name for name in texts if os.path.lexists(folder / name)]
    if foreign and not is_own:
        must = f"be a folder of an earlier report, or one without {foreign[0]}"
        raise ValueError(f"--out must {must}, got {shown(str(folder), 160)}: choose another")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if root:
            written.write_bytes(root, folder / name, text.encode())
        else:
            files.write_text(folder / name, text)
