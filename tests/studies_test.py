"""Tables of the studies are those of the stored results, and pages are short."""

import functools
import pathlib

import pytest

from experiments.studies import pages
from experiments.studies.sets import report as sets
from raslik_jax.report import results
from raslik_jax.report.tables import render_markdown
from raslik_jax.run.artifacts import read_metrics


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_short_and_has_the_tables_of_the_stored_results(name):
    text = pages.page_path(name).read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert text == pages.make_page(name), "run `make tables`"


@pytest.mark.study
@pytest.mark.parametrize("name", pages.PAGES)
def test_all_tables_of_a_study_are_those_of_the_stored_results(name):
    assert pages.tables_path(name).read_text("utf-8") == pages.make_tables(name)


_STORED = pathlib.Path(pages.__file__).parent


def _of_sets(folder):
    found = sets.read_results(folder)
    return [table for split in ("validation", "test") for table in sets.tables(found, split)]


def _of_runs(*names):
    """Tables of single runs of the study on SmolLM2, and of several over their seeds."""
    found = [read_metrics(_STORED / "smollm2" / name) for name in names]
    if len(found) > 1:
        return [render_markdown(results.seeds_table(found))]
    made = [results.retrieval_table(*found), results.results_table(*found)]
    if names != ("smallest",):
        made += [results.checks_table(*found), results.measured_table(*found, "perplexity")]
    return map(render_markdown, made)


_MADE = {
    "sets": ("sets", functools.partial(_of_sets, sets.HERE)),
    "sets_smollm2": ("sets_smollm2", functools.partial(_of_sets, sets.HERE / "smollm2")),
    "seed 0": ("smollm2", functools.partial(_of_runs, "seed-0/test")),
    "seed 1": ("smollm2", functools.partial(_of_runs, "seed-1/test")),
    "seeds": ("smollm2", functools.partial(_of_runs, "seed-0/test", "seed-1/test")),
    "smallest cell": ("smollm2", functools.partial(_of_runs, "smallest")),
}


@pytest.mark.parametrize("name", _MADE)
def test_tables_are_those_of_the_stored_results(name):
    page, make = _MADE[name]
    text = pages.page_path(page).read_text()
    tables = [*make()]
    assert tables
    for table in tables:
        assert table in text
