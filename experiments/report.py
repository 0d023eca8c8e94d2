"""Stored runs joined into the paper's tables, with its published figures beside them, and a page.

  python experiments/report.py --runs=runs/quickstart-0,runs/quickstart-1,runs/quickstart-2
  python experiments/report.py --runs=runs/howdy,runs/virtual --published --out=report

Reads nothing but the work directories. Runs that differ in their seed alone become one experiment:
a cell is then the mean over the seeds with the smallest and the largest in brackets; of a single
run it has the 95 % bootstrap interval over queries. With --out it
writes report.html, tables.md, tables.csv and tables.tex; of files of these names only those of an
earlier report are replaced.
"""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax import files  # noqa: E402
from raslik_jax.cli import command  # noqa: E402
from raslik_jax.messages import shown  # noqa: E402
from raslik_jax.report import blocks, page, published, results, runs, tables  # noqa: E402

_RUNS = flags.DEFINE_list("runs", [], "Work directories of runs.")
_FORMAT = flags.DEFINE_enum(
    "format", "terminal", ["terminal", "markdown", "csv", "latex"], "Form of what is printed."
)
_OUT = flags.DEFINE_string("out", "", "Folder for the page and the tables in every form.")
_PUBLISHED = flags.DEFINE_bool(
    "published", False, "Add the paper's own tables, each held against its own rates."
)
_TABLES = {"tables.md": "markdown", "tables.csv": "csv", "tables.tex": "latex"}
_EXAMPLES = flags.DEFINE_integer(
    "examples", 8, "Examples of each forget and retain set that the page shows.", lower_bound=0
)


def _render(
    form: str, experiments: Sequence[runs.Experiment], found: Sequence[blocks.Block]
) -> str:
    laid_out = [blocks.lay_out(block) for block in found]
    if form == "csv":
        return tables.render_csv(blocks.csv_table(found)).rstrip("\n")
    if form == "latex":
        return tables.LATEX_PREAMBLE + "\n\n".join(map(tables.render_latex, laid_out))
    is_markdown = form == "markdown"
    render = tables.render_markdown if is_markdown else tables.render_terminal
    parts = []
    for experiment in experiments:
        if len(experiments) > 1:
            name = (tables.escape_markdown if is_markdown else tables.visible)(experiment.name)
            parts.append(f"## {name}" if is_markdown else name)
        parts += map(render, results.tables_of(experiment.metrics))
    return "\n\n".join([*parts, *map(render, laid_out)])


def _write(folder: pathlib.Path, html: str, texts: Mapping[str, str]) -> None:
    """Writes the page and the tables; of what is there only an earlier report is replaced."""
    own = folder / "report.html"
    is_own = own.is_file() and page.is_page(own.read_bytes()[:4096])
    foreign = [name for name in ("report.html", *texts) if os.path.lexists(folder / name)]
    if foreign and not is_own:
        raise ValueError(
            f"--out must be a folder without {foreign[0]} or of an earlier report, got "
            f"{shown(str(folder), 160)}: choose another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The page first: it tells that what follows is of a report.
    for name, text in {"report.html": html, **texts}.items():
        files.write_text(folder / name, text)


def main() -> None:
    if not (_RUNS.value or _PUBLISHED.value):
        raise ValueError("--runs must name work directories, got none: give --runs=DIR,DIR")
    paper = published.read_blocks()
    experiments = runs.group_runs(
        [runs.read_run(pathlib.Path(run), num_rows=_EXAMPLES.value) for run in _RUNS.value]
    )
    found = [block for e in experiments for block in blocks.make_blocks(e, paper)]
    if _PUBLISHED.value:
        found += blocks.published_only(paper)
    if _OUT.value:
        html = page.render(experiments, paper=paper, show_paper=_PUBLISHED.value)
        texts = {name: _render(form, experiments, found) + "\n" for name, form in _TABLES.items()}
        _write(pathlib.Path(_OUT.value), html, texts)
    print(_render(_FORMAT.value, experiments, found))


if __name__ == "__main__":
    command.start(main)
