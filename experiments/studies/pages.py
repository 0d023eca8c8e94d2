"""Writes the tables of the studies again, from the stored results.

  python experiments/studies/pages.py --pages=geometry,theorem

Without --pages, the command writes all of them. `make tables` runs it.

A study's page.py has `page_tables`. This function returns makers of tables by name. All tables of a
study go to tables.md in its folder. A page of docs/studies has the tables that it names between
marks.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

_HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parents[1]))

from experiments.studies.behaviors import page as behaviors
from experiments.studies.corpora import paper
from experiments.studies.counterfactual import page as counterfactual
from experiments.studies.geometry import page as geometry
from experiments.studies.gpu import page as gpu
from experiments.studies.mixed_file import page as mixed_file
from experiments.studies.own_model import page as own_model
from experiments.studies.precise import page as precise
from experiments.studies.quickstart import page as quickstart
from experiments.studies.replay import page as replay
from experiments.studies.retrieval_quality import page as retrieval_quality
from experiments.studies.sets import page as sets
from experiments.studies.smollm2 import page as smollm2
from experiments.studies.speed import page as speed
from experiments.studies.theorem import page as theorem
from experiments.studies.ways_out import page as ways_out
from experiments.studies.which_gradient import page as which_gradient
from experiments.studies.which_method import page as which_method
from raslik_jax.base.files import write_text
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

_MARKED = re.compile(r"(<!-- table: ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)


class Page(NamedTuple):
    """A page of docs/studies.

    Attributes:
      folder: has the stored results, and tables.md.
      tables: returns functions that make the tables, by name.
    """

    folder: str
    tables: Callable[[], Mapping[str, Callable[[], str]]]


PAGES = {
    "behaviors": Page("behaviors", behaviors.page_tables),
    "counterfactual": Page("counterfactual", counterfactual.page_tables),
    "geometry": Page("geometry", geometry.page_tables),
    "gpu": Page("gpu", gpu.page_tables),
    "mixed_file": Page("mixed_file", mixed_file.page_tables),
    "own_model": Page("own_model", own_model.page_tables),
    "precise": Page("precise", precise.page_tables),
    "quickstart": Page("quickstart", quickstart.page_tables),
    "replay": Page("replay", replay.page_tables),
    "retrieval_quality": Page("retrieval_quality", retrieval_quality.page_tables),
    "sets": Page("sets", sets.page_tables),
    "smollm2": Page("smollm2", smollm2.page_tables),
    "speed": Page("speed", speed.page_tables),
    "theorem": Page("theorem", theorem.page_tables),
    "ways_out": Page("ways_out", ways_out.page_tables),
    "which_gradient": Page("which_gradient", which_gradient.page_tables),
    "which_method": Page("which_method", which_method.page_tables),
}


def page_path(name: str) -> pathlib.Path:
    """Returns the file of a page."""
    return _HERE.parents[1] / "docs" / "studies" / f"{name}.md"


def tables_path(name: str) -> pathlib.Path:
    """Returns the file of all tables of a page's study."""
    return _HERE / PAGES[name].folder / "tables.md"


@paper.registered()
def make_page(name: str) -> str:
    """Returns a page with the tables that it names, as the stored results have them.

    Raises:
      KeyError: the page names a table that the study does not make.
    """
    text, made = page_path(name).read_text("utf-8"), PAGES[name].tables()
    return _MARKED.sub(lambda at: f"{at[1]}\n{made[at[2]]().strip()}\n\n{at[3]}", text)


@paper.registered()
def make_tables(name: str) -> str:
    """Returns all tables of a page's study as one text."""
    head = f"# Tables of docs/studies/{name}.md\n\n`make tables` writes this file.\n"
    made = PAGES[name].tables().items()
    return head + "".join(f"\n## {title}\n\n{table().strip()}\n" for title, table in made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which pages are written."""

    pages: tuple[str, ...] = setting(tuple(PAGES), "Names of pages.", choices=tuple(PAGES))


def main(options: Options) -> None:
    """Writes pages and their files of tables."""
    for name in options.pages:
        write_text(page_path(name), make_page(name))
        write_text(tables_path(name), make_tables(name))


if __name__ == "__main__":
    command.start(main, Options())
