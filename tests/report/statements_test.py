"""What the page says in its summary and above its rows, from numbers written out."""

import numpy as np
import pytest
from snapshots import said

from raslik_jax.report import explorer, facts, incident, notes, statements
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
    found = statements.versus_random("F", [_interval(*one) for one in intervals])
    assert word in found
    said(found)


def test_the_summary_says_what_is_left_what_it_cost_and_how_it_was_judged():
    seeds = _model(
        judgment__verdict=["partly"],
        judgment__reasons=["F is above the backbone's"],
        forget_minus_random=[_interval(-0.2, -0.3, -0.1)],
        retain_minus_random=[_interval(0.0, -0.1, 0.1)],
    )
    few = _model(forget_minus_random=[_interval(-0.2, -0.2, -0.2)])
    for model in (seeds, few, _model()):
        said("\n".join(map(" ".join, statements.summary_points(model, "gold answers"))))
    for number, told in ((2, False), (3, True)):  # one or two queries tell no rate apart
        few.values["diversity/target/answers"] = [number]
        points = dict(statements.summary_points(few, "gold answers"))
        assert ("clearly lower" in points["Against a random set."]) == told


def test_seeds_and_damaged_sets_are_counted():
    said(statements.judged_sentence(_model(judgment__verdict=["partly", "damaged", "partly"])))
    assert statements.damage_sentence([]) == ""
    said(statements.damage_sentence(["raslik", "random"]))


def test_rows_that_are_left_out_and_texts_that_are_cut_are_counted():
    shown = explorer.Packed("", 1000, 1000, 0, 0, True, (), (), 1, (), "raslik")
    some = shown._replace(num_rows=51_000, num_shown=43_000, num_cut=7)
    for one in (shown, some, some._replace(num_unscored=2_000), some._replace(num_unscored=8_000)):
        said(statements.rows_sentence(one))


def _card(sigma=None, chance=""):
    return incident.Card("asked", "said", 1, 0.5, sigma, chance, "forget", 0)


def test_noise_is_told_where_a_row_has_it_and_chance_where_it_stands_below():
    assert statements.noise_sentence([_card(), _card(chance="2 of 99")]) == ""
    said(statements.noise_sentence([_card(), _card(0.01)]))
    said(statements.noise_sentence([_card(0.01, "2 of 99"), _card()]))


def test_the_frontier_is_told_by_what_is_drawn():
    of_epoch = [{"strategy": "raslik", "algorithm": "ga_gdr", "epoch": epoch} for epoch in (1, 2)]
    several, one = ({"methods": methods} for methods in (of_epoch, of_epoch[1:]))
    for shown in (
        [one, several],
        [one],
        [one | {"backbone": {}}, one],
        [one | {"backbone": {}, "reference": "gold"}],
    ):
        said(statements.frontier_sentence(shown))


def test_sets_and_scores_are_told_by_what_they_have():
    said(statements.retrieval_sentence([{"random": {"retain": ()}, "raslik": {}}]))
    said(statements.retrieval_sentence([{"random": {}}, {"raslik": {"retain": ()}}]))
    sample = facts.ScoreSample(np.zeros(3), None, (0.2221, 0.665), (-0.125, -0.035))
    said(statements.ends_sentence(sample))
    assert statements.ends_sentence(sample._replace(forget=None, retain=None)) == ""


def test_answers_and_losses_are_told_by_the_run():
    run = facts.Facts({"settings": {}}, (), {}, {}, None, {}, frozenset())
    probed = {"settings": {"unlearn": {"probe": {"stop": "forgotten"}}}}
    for one in (
        run,
        run._replace(metrics=run.metrics | {"chosen": True}),
        run._replace(metrics=probed, marker_words=frozenset({"star"})),
    ):
        said(statements.answers_sentence(one))
    for panel in ("Fine-tuning", "GA_GDR, forget set"):
        said(statements.training_sentence({panel: {}}))


@pytest.mark.parametrize(
    ("target", "normal", "is_told"),
    [(12, 40, False), (4, 40, True), (40, 11, True), (1, 4, True), (0, 40, False), (0, 0, False)],
)
def test_intervals_over_few_queries_are_told_as_too_narrow(target, normal, is_told):
    found = notes.brackets_sentence(
        {"corpus": {"target_queries": target, "normal_queries": normal}}
    )
    assert (found != "Brackets: 95 % bootstrap interval over queries.") == is_told
    said(found)
