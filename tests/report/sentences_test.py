"""What the page says in its summary and above its rows, from numbers written out."""

import re

import pytest
from snapshots import said

from raslik_jax.data.examples import Example
from raslik_jax.report import incident, notes, page, tables
from raslik_jax.report.sections import SECTIONS
from raslik_jax.report.tidy import Model


def _interval(mean, low, high):
    return {"mean": mean, "low": low, "high": high}


def _model(**values):
    named = {name.replace("__", "/"): list(found) for name, found in values.items()}
    rates = {"forget": [_interval(0.3127, 0.28, 0.35)], "retain": [_interval(0.9761, 0.95, 0.99)]}
    number = max((len(found) for found in named.values()), default=1)
    return Model("raslik", "ga_gdr", (4,) * number, rates | named)


@pytest.mark.parametrize(
    ("intervals", "word"),
    [
        ([(-0.2, -0.3, -0.001)], "clearly lower"),
        ([(0.2, 0.001, 0.3)], "clearly higher"),
        # Zero is an end of the interval: it is not clear.
        ([(-0.2, -0.4, 0.0)], "does not differ clearly"),
        (
            [(-0.2, -0.3, -0.1), (0.2, 0.1, 0.3), (-0.1, -0.3, 0.1), (-0.2, -0.3, -0.1)],
            "lower in 2 and higher in 1 of 4 seeds",
        ),
    ],
)
def test_a_rate_is_clearly_another_where_its_whole_interval_is_on_one_side(intervals, word):
    model = _model(forget_minus_random=[_interval(*one) for one in intervals])
    found = notes.macros().versus_random(model, "F", "forget", "target")
    assert word in found
    said(found)


def _shown(name, **view):
    """Returns the text of a section that shows one experiment, without its markup."""
    every = {"name": "run", "first": "", "figures": [], "left_out": 0, "legend": [], "table": None}
    html = page.make_template(SECTIONS[name]).render(views=[every | view])
    return " ".join(re.sub("<[^>]*>", "", html).split())


def _summary(model, **item):
    item |= {"algorithm": "ga_gdr", "strategy": "raslik", "before": model, "after": model}
    parts = dict.fromkeys(("missing", "judgments", "costs"), ())
    item = {"damaged": [], "figures": [], **item}
    return _shown("summary", items=[item], **parts)


def test_the_summary_says_what_is_left_what_it_cost_and_how_it_was_judged():
    seeds = _model(
        judgment__verdict=["partly"],
        judgment__reasons=["F is above the backbone's"],
        forget_minus_random=[_interval(-0.2, -0.3, -0.1)],
        retain_minus_random=[_interval(0.0, -0.1, 0.1)],
    )
    few = _model(
        forget_minus_random=[_interval(-0.2, -0.2, -0.2)],
        retain_minus_random=[_interval(-0.2, -0.2, -0.2)],
    )
    for model in (seeds, few, _model()):
        said(_summary(model))
    for number, told in ((2, False), (3, True)):  # one or two queries tell no rate apart
        few.values["diversity/target/answers"] = [number]
        assert ("F is clearly lower" in _summary(few)) == told


def test_seeds_and_damaged_sets_are_counted():
    seeds = _model(judgment__verdict=["partly", "damaged", "partly"])
    said(_summary(seeds, damaged=["raslik", "random"]))


def test_rows_that_are_left_out_and_texts_that_are_cut_are_counted():
    counts = {"num_shown": 1000, "num_rows": 1000, "num_unscored": 0, "left_out": 0, "num_cut": 0}
    shown = counts | {
        "queries": (),
        "sets": (),
        "has_labels": True,
        "strategy": "raslik",
        "text": "",
    }
    some = shown | {"num_rows": 51_000, "num_shown": 43_000, "left_out": 8_000, "num_cut": 7}
    for one in (
        shown,
        some,
        some | {"num_unscored": 2_000, "left_out": 6_000},
        some | {"num_unscored": 8_000, "left_out": 0},
    ):
        said(_shown("explorer", rows=one).partition("Columns:")[0])


_ROW = Example("q", "asked", "", "said", place=1)


def _card(sigma=None, chance=""):
    return incident.Card(_ROW, 0.5, sigma, chance, "forget")


def test_noise_is_told_where_a_row_has_it_and_chance_where_it_stands_below():
    for cards in (
        [_card(), _card(chance="2 of 99")],
        [_card(), _card(0.01)],
        [_card(0.01, "2 of 99"), _card()],
    ):
        found = {"cards": cards, "chances": (), "traced": ()}
        said(_shown("incident", found=found, cut=()))


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("has_floor", [True, False])
def test_the_frontier_is_told_by_what_is_drawn(has_steps, has_floor):
    empty = tables.Table((), ())
    said(_shown("frontier", has_steps=has_steps, has_floor=has_floor, epochs=empty))


def test_sets_are_told_by_what_they_have():
    for opposed in ([], ["raslik"], ["given", "bm25"]):
        parts = {"histograms": [], "kinds": [], "sets": {}, "highlighted": "", "opposed": opposed}
        said(_shown("retrieval", table=tables.Table((), ()), **parts))


def test_answers_and_losses_are_told_by_the_run():
    for has_marks in (True, False):
        shown = {"place": "its last epoch", "has_marks": has_marks, "queries": []}
        said(_shown("answers", **shown))
    for is_unlearned in (True, False):
        said(_shown("training", is_unlearned=is_unlearned))


@pytest.mark.parametrize(
    ("target", "normal", "is_told"),
    [(12, 40, False), (4, 40, True), (40, 11, True), (1, 4, True), (0, 40, False), (0, 0, False)],
)
def test_intervals_over_few_queries_are_told_as_too_narrow(target, normal, is_told):
    found = notes.macros().brackets({"target_queries": target, "normal_queries": normal})
    assert (found != "Brackets: 95 % bootstrap interval over queries.") == is_told
    said(found)
