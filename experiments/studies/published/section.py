"""The paper's tables in the page of a run that repeats one, and in the terminal.

  python experiments/studies/raslik.py published
  python experiments/studies/raslik.py published --runs=runs/howdy-0,runs/howdy-1

The command prints the published tables, each compared with its own rates. With --runs it prints
those that the runs repeat, next to the results of the runs.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.published import blocks, published
from raslik_jax.base.settings import Settings, setting
from raslik_jax.report import facts, tables
from raslik_jax.report.sections import SECTIONS, Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which tables are printed."""

    runs: tuple[str, ...] = setting((), "Work directories of runs.")


def run(options: Options) -> None:
    """Prints the tables."""
    paper = published.read_blocks()
    stored = facts.group_runs([facts.read_facts(pathlib.Path(one)) for one in options.runs])
    found = [block for one in stored for block in blocks.make_blocks(one, paper)]
    shown = found if options.runs else blocks.published_only(paper)
    print("\n\n".join(tables.render_terminal(blocks.lay_out(block)) for block in shown))


def _facts(experiments: Sequence[facts.Experiment]) -> Mapping[str, Any]:
    """Returns the blocks of the page's runs that the paper has too."""
    paper = published.read_blocks()
    found = [block for one in experiments for block in blocks.make_blocks(one, paper)]
    return {"tables": shown} if (shown := [blocks.lay_out(b) for b in found if b.paper]) else {}


SECTION = Section(
    "The paper",
    "method",
    _facts,
    '{% from "templates/macros.html.jinja" import table %}'
    "{% for one in tables %}{{ table(one, one.title) }}{% endfor %}",
)


def register() -> None:
    """Adds the section to the page."""
    SECTIONS["paper"] = SECTION
