"""What is said of traced answers, from what the models make of them."""

import pytest
from snapshots import said

from raslik_jax.report import traced
from raslik_jax.run.artifacts import TracedAnswer


def _row(nats, drawn=(None, None)):
    return TracedAnswer("q", "a moon", sum(nats) / len(nats), nats, "it says", *drawn)


def _told(*answers, drawn=(None, None)):
    """The results for answers by their nats before, under the base and now; None: no model."""
    levels = zip(("before", "base", "now"), zip(*answers, strict=True), strict=True)
    return {
        model: [_row((nll, nll), drawn if model == "before" else (None, None)) for nll in rows]
        for model, rows in levels
        if None not in rows
    }


@pytest.mark.parametrize(
    "levels",
    [
        (0.5, 2.5, 2.4),
        # A base that is far: of the 3.47 nats to 1/32 it went 1.5, more than the 1.39 to a quarter.
        (0.5, 8.5, 2.0),
        (0.5, 8.5, 1.8),
        # Fine-tuning made it hardly likelier: there is nothing to be gone.
        (0.49, 0.5, 0.51),
        *((0.5, 2.5, 1.1), (0.5, 2.5, 0.4), (0.5, None, 2.0), (2.5, 0.5, 2.4)),
    ],
)
def test_what_is_left_is_told_by_the_rule_of_rows(levels):
    found = traced.gone_sentence(_told(levels))
    assert "forgotten" not in found  # that is a verdict, and no answer alone gives it
    said(found)


def test_nothing_is_told_of_what_the_model_does_not_say_now():
    assert traced.gone_sentence(_told((2.5, 0.5, None))) == ""


def test_one_broken_token_does_not_make_an_answer_gone():
    nats = {"before": (0.1, 0.1, 0.1), "base": (3.0, 3.0, 3.0), "now": (0.1, 0.1, 12.0)}
    found = traced.gone_sentence({model: [_row(of)] for model, of in nats.items()})
    # The mean is beyond the base's; two tokens of three are as they were.
    assert "and 4.07 after, 3.00 under the base. The loss moved 33% toward the base" in found
    assert "The answer is not gone" in found


def test_several_answers_are_counted():
    found = traced.gone_sentence(_told((0.5, 2.5, 2.5), (1.5, 3.5, 3.3), (0.4, 3.4, 0.4)))
    assert "The 3 answers have 0.80 nats a token before and" in found
    assert "The loss moved 63% toward the base" in found
    assert found.endswith(": 2 of 3 are gone.")


@pytest.mark.parametrize(
    ("levels", "is_doubted"),
    [
        # Four spreads of .5 above 1: what the model draws itself hardly ever costs so much.
        ((3.0, 5.0), False),
        ((3.1, 5.0), True),
        ((3.1, None), True),
        ((1.0, 1.09), True),  # the base finds it as likely: log 1.1 = .0953
        ((1.0, 1.1), False),
        ((1.0, None), False),
    ],
)
def test_an_answer_that_tells_little_is_doubted(levels, is_doubted):
    found = traced.doubt_sentence(_told((*levels, 5.0), drawn=(1.0, 0.5)))
    assert bool(found) == is_doubted
    said(found)


# None: nothing was to end it.
@pytest.mark.parametrize(
    "end", ["others lose too much", "no progress", "diverged", "", "forgotten", None]
)
def test_unlearning_that_ended_too_early_is_told_as_not_forgotten(end):
    probes = [
        {"step": 5 * n, "gone": {"forget": {"way": way, "gone": 10 * way, "of": 10}}}
        for n, way in enumerate((0, 0.2, 0.6))
    ]
    one = {"probes": probes}
    found = traced.ending_sentence(one if end is None else one | {"kept": 5, "end": end})
    assert found.startswith("Not forgotten: ") == (end not in ("forgotten", None))
    said(found)
    assert traced.ending_sentence({}) == ""


def test_an_end_at_which_enough_is_gone_once_is_not_told_as_too_early():
    gone = {"forget": {"way": 0.9, "gone": 8, "of": 10}, "behavior": {"way": 1, "gone": 1, "of": 1}}
    one = {"kept": 5, "end": "", "probes": [{"step": 5, "gone": gone}]}
    assert traced.ending_sentence(one) == ""
