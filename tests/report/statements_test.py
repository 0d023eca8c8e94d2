"""What the page says in its summary and above its rows, from numbers written out."""

import numpy as np
import pytest

from raslik_jax.report import explorer, facts, incident, notes, statements, tables
from raslik_jax.report.tidy import Model


def _interval(mean, low, high):
    return {"mean": mean, "low": low, "high": high}


def _model(**values):
    named = {name.replace("__", "/"): list(found) for name, found in values.items()}
    rates = {"forget": [_interval(0.3127, 0.28, 0.35)], "retain": [_interval(0.9761, 0.95, 0.99)]}
    number = max((len(found) for found in named.values()), default=1)
    return Model("raslik", "ga_gdr", (4,) * number, rates | named)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(-0.2, -0.3, -0.001)], "F is clearly lower: -0.200 [-0.300, -0.001]."),
        ([(0.2, 0.001, 0.3)], "F is clearly higher: +0.200 [+0.001, +0.300]."),
        # Zero is an end of the interval: it is not clear.
        ([(-0.2, -0.4, 0.0)], "F cannot be told apart: -0.200 [-0.400, +0.000]."),
        (
            [(-0.2, -0.3, -0.1), (0.2, 0.1, 0.3), (-0.1, -0.3, 0.1), (-0.2, -0.3, -0.1)],
            "F is lower in 2 and higher in 1 of 4 seeds, by the whole interval.",
        ),
    ],
)
def test_a_rate_is_clearly_another_where_its_whole_interval_is_on_one_side(intervals, expected):
    found = [_interval(*one) for one in intervals]
    assert statements.versus_random("F", found) == expected


@pytest.mark.parametrize(("queries", "told"), [(2, False), (3, True)])
def test_one_or_two_queries_tell_no_rate_apart(queries, told):
    seeds = _model(
        forget_minus_random=[_interval(-0.2, -0.2, -0.2)], diversity__target__answers=[queries]
    )
    points = dict(statements.summary_points(_model(), seeds, "the gold answers"))
    expected = "F is clearly lower: -0.200 [-0.200, -0.200]."
    few = "F cannot be told apart by so few queries."
    assert points["Against a random set."] == (expected if told else few)


def test_the_summary_says_what_is_left_what_it_cost_and_how_it_was_judged():
    seeds = _model(
        judgment__verdict=["partly"],
        judgment__reasons=["F is above the backbone's"],
        forget_minus_random=[_interval(-0.2, -0.3, -0.1)],
        retain_minus_random=[_interval(0.0, -0.1, 0.1)],
    )
    assert statements.summary_points(_model(), seeds, "the gold answers") == [
        (
            "What is left.",
            "Answers to target queries share 31 % of the wording of the gold answers "
            "(F 0.313 [0.28, 0.35]).",
        ),
        ("Judgment.", "Partly: F is above the backbone's."),
        (
            "The cost.",
            "Answers to normal queries share 97.6 % of the wording of the gold answers "
            "(R 0.976 [0.95, 0.99]).",
        ),
        (
            "Against a random set.",
            "F is clearly lower: -0.200 [-0.300, -0.100]. "
            "R cannot be told apart: +0.000 [-0.100, +0.100].",
        ),
    ]
    leads = [lead for lead, _ in statements.summary_points(_model(), _model(), "")]
    assert leads == ["What is left.", "The cost."]


def test_seeds_are_counted_by_their_verdicts():
    seeds = _model(judgment__verdict=["partly", "damaged", "partly"])
    assert statements.judged_sentence(seeds) == "Of 3 seeds: 2 partly, 1 damaged."


def test_damage_names_the_sets():
    assert statements.damage_sentence([]) == ""
    assert statements.damage_sentence(["raslik", "random"]) == (
        "Damaged by unlearning the sets of RASLIK, Random: a low F is no merit there. Read the "
        "answers below."
    )


def test_rows_that_are_left_out_and_texts_that_are_cut_are_counted():
    shown = explorer.Packed("", 1000, 1000, 0, 0, True, (), (), 1, (), "raslik")
    assert statements.rows_sentence(shown) == (
        "All 1,000 training examples with their scores. Sets are those of RASLIK."
    )
    some = shown._replace(num_rows=51_000, num_shown=43_000, num_cut=7)
    assert statements.rows_sentence(some) == (
        "The 43,000 rows at both ends of the ranking, two thirds of them the highest; 8,000 of "
        "51,000 between them are left out, and counted in the picture. Sets are those of RASLIK. 7 "
        "very long texts are cut."
    )
    fewer = some._replace(num_unscored=2_000)
    assert (
        "6,000 of 51,000 between them are left out, and counted in the picture. 2,000 without "
        "a score are left out too. Sets" in statements.rows_sentence(fewer)
    )
    assert statements.rows_sentence(fewer._replace(num_unscored=8_000)).startswith(
        "43,000 of 51,000 training examples with their scores; the other 8,000, which have none, "
        "are left out. Sets"
    )


def _card(sigma=None, chance=""):
    return incident.Card("asked", "said", 1, 0.5, sigma, chance, "forget", 0)


def test_noise_is_told_where_a_row_has_it_and_chance_where_it_stands_below():
    assert statements.noise_sentence([_card(), _card(chance="2 of 99")]) == ""
    noise = (
        "± is the noise of the sketch: how far the score may be off because gradients were "
        "compressed."
    )
    assert statements.noise_sentence([_card(), _card(0.01)]) == noise
    assert statements.noise_sentence([_card(0.01, "2 of 99"), _card()]) == (
        f"{noise} How often unrelated prompts reach it is another matter, and stands below it."
    )


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            [{"backbone": {}}, {}],
            "An F below the backbone's, the dotted line, forgets nothing more.",
        ),
        ([{"backbone": {}, "reference": "gold"}], "The dotted line is the backbone's F."),
        ([{}], "arcs join points at equal distance from it."),
    ],
)
def test_the_dotted_line_is_told_where_there_is_one(shown, expected):
    shown = [{"methods": [], **one} for one in shown]
    assert statements.frontier_sentence(shown).endswith(expected)


def test_only_what_was_measured_over_epochs_is_told_so():
    of_epoch = [{"strategy": "raslik", "algorithm": "ga_gdr", "epoch": epoch} for epoch in (1, 2)]
    several, one = ({"methods": methods} for methods in (of_epoch, of_epoch[1:]))
    assert "Small markers are epochs" in statements.frontier_sentence([one, several])
    alone = statements.frontier_sentence([one])
    assert alone.startswith("Each line runs from the fine-tuned model to the one after unlearning")
    assert "epoch" not in alone


def test_looks_of_tables_are_told_by_their_columns():
    def table(*titles):
        return tables.Table(tuple(map(tables.Column, titles)), ())

    rates = "F: forget rate, lower is better. R: retain rate, higher is better."
    gray = "As in the paper: methods that are not Pareto-optimal are gray"
    assert statements.tables_sentence([]) == ""
    assert statements.tables_sentence([table("F", "Distance")]) == f"{gray}. {rates}"
    assert statements.tables_sentence([table("F", "Non-SF"), table("D_mah")]) == (
        f"{gray}; among the others, the two best D_mah and Non-SF have a blue ground. {rates}"
    )


def test_scores_of_retain_sets_are_told_where_raslik_has_one():
    own = "What each strategy chose from the training examples. Scores are each strategy's own."
    assert statements.retrieval_sentence([{"random": {"retain": ()}, "raslik": {}}]) == own
    assert statements.retrieval_sentence([{"random": {}}, {"raslik": {"retain": ()}}]) == (
        f"{own} In the retain set of RASLIK, the higher a score, the more an example pulls the "
        "other way."
    )


def test_sets_lie_between_their_ends():
    sample = facts.ScoreSample(np.zeros(3), None, (0.2221, 0.665), (-0.125, -0.035))
    assert statements.ends_sentence(sample) == (
        "Shaded: where the sets lie, forget 0.222 to 0.665 and retain -0.125 to -0.035."
    )
    assert statements.ends_sentence(sample._replace(forget=None, retain=None)) == ""


def test_answers_are_of_the_last_epoch_or_of_the_kept_step():
    run = facts.Facts({"settings": {}}, (), {}, {}, None, {}, frozenset())
    assert statements.answers_sentence(run) == (
        "The answers of all models to the same query, each method at its last epoch."
    )
    assert statements.answers_sentence(run._replace(metrics=run.metrics | {"chosen": True})) == (
        "The answers of all models to the same query, each method at the epoch that was chosen for "
        "it."
    )
    probed = {"settings": {"unlearn": {"probe": {"stop": "forgotten"}}}}
    assert statements.answers_sentence(
        run._replace(metrics=probed, marker_words=frozenset({"star"}))
    ) == (
        "The answers of all models to the same query, each method at the step that its probes "
        "chose. Words that mark the behavior are highlighted."
    )


def test_losses_that_are_meant_to_rise_are_told_where_there_are_some():
    both = (
        "Faint: every step, of long curves means of neighboring ones. Strong: the running mean "
        "over a twentieth of the steps."
    )
    assert statements.training_sentence({"Fine-tuning": {}}) == both
    assert statements.training_sentence({"GA_GDR, forget set": {}}) == (
        f"{both} In unlearning the loss of the forget set is meant to rise."
    )


@pytest.mark.parametrize(
    ("target", "normal", "expected"),
    [
        (12, 40, ""),
        (4, 40, " Those over 4 queries are too narrow: about 81% hold the true mean."),
        (40, 11, " Those over 11 queries are too narrow: about 90% hold the true mean."),
        (1, 4, " That over a single query has no width."),
        (0, 40, ""),
        (0, 0, ""),
    ],
)
def test_intervals_over_few_queries_are_told_as_too_narrow(target, normal, expected):
    metrics = {"corpus": {"target_queries": target, "normal_queries": normal}}
    found = notes.brackets_sentence(metrics)
    assert found == f"Brackets: 95 % bootstrap interval over queries.{expected}"
