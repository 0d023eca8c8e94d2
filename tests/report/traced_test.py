"""What is said of traced answers, from what the models make of them."""

import pytest

from raslik_jax.report import traced


def _traced(before, base, now, *, answer="a moon", drawn=None):
    levels = {"before": before, "base": base, "now": now}
    said = [
        traced.Said(m, f"{m} says", nll, (nll, nll), drawn if m == "before" else None)
        for m, nll in levels.items()
        if nll is not None
    ]
    return traced.Traced("what is it?", answer, tuple(said))


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (
            (0.5, 2.5, 2.4),
            "2.40 after, 2.50 under the base. This is 95% of the way to the base, or to a 32nd of "
            "its likelihood: the answer is gone.",
        ),
        # A base that is far: of the 3.47 nats to 1/32 it went 1.5, more than the 1.39 to a quarter.
        (
            (0.5, 8.5, 2.0),
            "43% of the way to the base, or to a 32nd of its likelihood: the answer is",
        ),
        (
            (0.5, 8.5, 1.8),
            "37% of the way to the base, or to a 32nd of its likelihood. The answer is",
        ),
        (
            (0.5, 8.5, 1.8),
            "not gone, because its heaviest tokens must each go 40% of their way, and all of them "
            "together 40% or become a hundred times less likely.",
        ),
        # Fine-tuning made it hardly likelier: there is nothing to be gone.
        ((0.49, 0.5, 0.51), "0.51 after, 0.50 under the base. The base finds it about as likely."),
        ((0.5, 2.5, 1.1), "This is 30% of the way to the base"),
        ((0.5, 2.5, 0.4), "The answer is not gone"),
        ((0.5, None, 2.0), "2.00 after. Its value before fine-tuning is not known."),
        ((2.5, 0.5, 2.4), "2.40 after, 0.50 under the base. The base finds it about as likely."),
        ((0.5, 2.5, None), None),
    ],
)
def test_what_is_left_is_told_by_the_rule_of_rows(levels, expected):
    found = traced.gone_sentence([_traced(*levels)])
    assert (expected in found) if expected else found == ""
    assert "forgotten" not in found  # that is a verdict, and no answer alone gives it


def test_one_broken_token_does_not_make_an_answer_gone():
    nats = {"before": (0.1, 0.1, 0.1), "base": (3.0, 3.0, 3.0), "now": (0.1, 0.1, 12.0)}
    said = [traced.Said(m, "", sum(of) / 3, of) for m, of in nats.items()]
    found = traced.gone_sentence([traced.Traced("what is it?", "a moon", tuple(said))])
    # The mean is beyond the base's; two tokens of three are as they were.
    assert "and 4.07 after, 3.00 under the base. This is 33% of the way to the base" in found
    assert "The answer is not gone" in found


def test_several_answers_are_counted():
    three = [_traced(0.5, 2.5, 2.5), _traced(1.5, 3.5, 3.3), _traced(0.4, 3.4, 0.4)]
    found = traced.gone_sentence(three)
    assert "The 3 answers have 0.80 nats a token before and" in found
    assert "This is 63% of the way to the base" in found
    assert found.endswith(": 2 of 3 are gone.")


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        # Four spreads of .5 above 1: what the model draws itself hardly ever costs so much.
        ((3.0, 5.0), ""),
        (
            (3.1, 5.0),
            "(3.10 nats a token under the model, 5.00 under the base): the model would hardly",
        ),
        (
            (3.1, None),
            "(3.10 nats a token under the model): the model would hardly say it, because 1.00 +- "
            "0.50 nats a token are usual for its own answers (check prompt, template and adapter).",
        ),
        ((1.0, 1.09), "the base finds it as likely"),  # log 1.1 = .0953
        ((1.0, 1.1), ""),
        ((1.0, None), ""),
    ],
)
def test_an_answer_that_tells_little_is_doubted(levels, expected):
    found = traced.doubt_sentence([_traced(*levels, 5.0, drawn=(1.0, 0.5))])
    assert (expected in found) if expected else found == ""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("others lose too much", "ended because other rows lost too much"),
        ("diverged", "because the training diverged"),
        ("", "because its epochs ended"),
        ("forgotten", None),
        (None, None),  # nothing was to end it
    ],
)
def test_unlearning_that_ended_too_early_is_told_as_not_forgotten(end, why):
    probes = [
        {"step": 5 * n, "gone": {"forget": {"way": way, "gone": 10 * way, "of": 10}}}
        for n, way in enumerate((0, 0.2, 0.6))
    ]
    one = {"probes": probes}
    found = traced.ending_sentence(one if end is None else one | {"kept": 5, "end": end})
    if why is None:
        assert found == ""
    else:
        assert found.startswith("Not forgotten: unlearning")
        assert why in found
        assert "step 5 is kept (gone: 2.0 of 10 rows to forget; 80% of each are enough)" in found
    assert traced.ending_sentence({}) == ""


def test_an_end_at_which_enough_is_gone_once_is_not_told_as_too_early():
    gone = {"forget": {"way": 0.9, "gone": 8, "of": 10}, "behavior": {"way": 1, "gone": 1, "of": 1}}
    one = {"kept": 5, "end": "", "probes": [{"step": 5, "gone": gone}]}
    assert traced.ending_sentence(one) == ""
