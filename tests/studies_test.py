"""Tables of the studies are those of the stored results, and pages are short."""

import pytest

from experiments.studies import pages


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_short_and_has_the_tables_of_the_stored_results(name):
    text = pages.page_path(name).read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert text == pages.make_page(name), "run `make tables`"


@pytest.mark.study
@pytest.mark.parametrize("name", pages.PAGES)
def test_all_tables_of_a_study_are_those_of_the_stored_results(name):
    assert pages.tables_path(name).read_text("utf-8") == pages.make_tables(name)
