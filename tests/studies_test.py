"""Tables of the studies are those of the stored results, and pages are short."""

import functools

import pytest

from experiments.studies import pages
from experiments.studies.sets import report as sets


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_short_and_has_the_tables_of_the_stored_results(name):
    text = pages.page_path(name).read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert text == pages.make_page(name), "run `make tables`"


@pytest.mark.study
@pytest.mark.parametrize("name", pages.PAGES)
def test_all_tables_of_a_study_are_those_of_the_stored_results(name):
    assert pages.tables_path(name).read_text("utf-8") == pages.make_tables(name)


def _of_sets(folder):
    found = sets.read_results(folder)
    return [table for split in ("validation", "test") for table in sets.tables(found, split)]


_MADE = {
    "sets": ("sets", functools.partial(_of_sets, sets.HERE)),
    "sets_smollm2": ("sets_smollm2", functools.partial(_of_sets, sets.HERE / "smollm2")),
}


@pytest.mark.parametrize("name", _MADE)
def test_tables_are_those_of_the_stored_results(name):
    page, make = _MADE[name]
    text = pages.page_path(page).read_text()
    tables = [*make()]
    assert tables
    for table in tables:
        assert table in text
