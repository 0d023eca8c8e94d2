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
            "The answer cost the model 0.50 nats a token before unlearning, 2.40 after: it "
            "went 95% of the way to the base (2.50), and 40% counts as forgotten.",
        ),
        # Fine-tuning made it hardly likelier: there is nothing to be gone.
        ((0.49, 0.5, 0.51), "0.51 after; the base finds it about as likely (0.50)."),
        (
            (0.5, 2.5, 1.1),
            "1.10 after: it went 30% of the way to the base (2.50), which is not forgotten, as "
            "that takes 40%.",
        ),
        ((0.5, 2.5, 0.4), "it went 0% of the way"),
        ((0.5, None, 2.0), "2.00 after; what it was before fine-tuning is not known."),
        ((2.5, 0.5, 2.4), "2.40 after; the base finds it about as likely (0.50)."),
        ((0.5, 2.5, None), None),
    ],
)
def test_what_is_left_is_told_by_the_judgments_rule(levels, expected):
    found = traced.forgotten_sentence([_traced(*levels)])
    assert (expected in found) if expected else found == ""


def test_one_broken_token_does_not_make_an_answer_gone():
    nats = {"before": (0.1, 0.1, 0.1), "base": (3.0, 3.0, 3.0), "now": (0.1, 0.1, 12.0)}
    said = [traced.Said(m, "", sum(of) / 3, of) for m, of in nats.items()]
    found = traced.forgotten_sentence([traced.Traced("what is it?", "a moon", tuple(said))])
    # The mean is beyond the base's; two tokens of three are as they were.
    assert (
        "unlearning, 4.07 after: it went 33% of the way to the base (3.00), which is not" in found
    )


def test_an_answer_that_is_gone_alone_is_not_called_forgotten():
    found = traced.forgotten_sentence([_traced(0.5, 2.5, 2.4)], is_all=False)
    assert "it went 95% of the way to the base (2.50), which alone is not enough." in found
    assert "forgotten" not in found


def test_several_answers_are_told_by_their_means():
    both = [_traced(0.5, 2.5, 2.5), _traced(1.5, 3.5, 3.3)]
    expected = "The 2 answers cost the model 1.00 nats a token before unlearning, 2.90 after: "
    expected += "they went 95% of the way to the base (3"
    assert expected in traced.forgotten_sentence(both)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        # Four spreads of .5 above 1: what the model draws itself hardly ever costs so much.
        ((3.0, 5.0), ""),
        ((3.1, 5.0), "(3.10 nats a token under the model, 5.00 under the base): it would hardly"),
        (
            (3.1, None),
            "(3.10 nats a token under the model): it would hardly say so, answers that it draws "
            "itself cost 1.00 +- 0.50 there (check prompt, template, adapter).",
        ),
        ((1.0, 1.09), "the base says it as readily"),  # log 1.1 = .0953
        ((1.0, 1.1), ""),
        ((1.0, None), ""),
    ],
)
def test_an_answer_that_tells_little_is_doubted(levels, expected):
    found = traced.doubt_sentence([_traced(*levels, 5.0, drawn=(1.0, 0.5))])
    assert (expected in found) if expected else found == ""


def test_without_what_the_model_draws_no_answer_is_called_unlikely():
    assert traced.doubt_sentence([_traced(9.0, 12.0, 12.0)]) == ""


def test_the_doubted_answer_of_several_is_named():
    both = [_traced(nll, 5.0, 5.0, drawn=(1.0, 0.5)) for nll in (1.0, 4.1)]
    assert traced.doubt_sentence(both).startswith("Of traced answer 2 (4.10")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("others lose too much", "ended because other rows lost too much"),
        ("diverged", "because the training diverged"),
        ("", "because its epochs were over"),
        ("forgotten", None),
        (None, None),  # nothing was to end it
    ],
)
def test_unlearning_that_ended_too_early_is_told_as_not_forgotten(end, why):
    levels = [{"forget": nats, "kept": 2.0} for nats in (0.5, 0.9, 1.7)]
    probes = [{"step": 5 * n, "levels": level, "answers": {}} for n, level in enumerate(levels)]
    one = {"strategy": "raslik", "algorithm": "ga_gdr", "probes": probes}
    one |= {"goals": {"forget": {"start": 0.5, "end": 2.5}}, "rows": {}}
    one |= {"backbone": {"forget": 2.5, "kept": 2.0}}
    probes = [one if end is None else one | {"kept": 5, "end": end}]
    found = traced.ending_sentence(probes, "raslik", "ga_gdr")
    if why is None:
        assert found == ""
    else:
        assert found.startswith("Not forgotten: unlearning")
        assert why in found
        assert "step 5 is kept, 20% of the way to the base where 40% is enough" in found
    assert traced.ending_sentence(probes, "raslik", "ga_klr") == ""


@pytest.mark.parametrize(
    ("backbone", "told"),
    [
        (2.5, "39% of the way to the base where 40% is enough"),  # and not 40%
        (0.5, "0.79 nats a token less likely where 0.80 are enough"),
    ],
)
def test_how_far_is_told_by_what_the_goals_are(backbone, told):
    probes = [{"step": 5, "levels": {"forget": 1.292}, "answers": {}}]
    one = {"strategy": "raslik", "algorithm": "ga_gdr", "probes": probes, "kept": 5, "end": ""}
    one |= {"goals": {"forget": {"start": 0.5, "end": 2.5}}, "rows": {}}
    found = traced.ending_sentence([one | {"backbone": {"forget": backbone}}], "raslik", "ga_gdr")
    assert told in found
