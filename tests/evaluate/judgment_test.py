"""What became of a model: forgotten, partly, unchanged, damaged or unknown, by one rule."""

import math

import pytest

from raslik_jax.evaluate import judgment
from raslik_jax.report import notes


def _interval(mean, half=0.04):
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _diversity(distinct, repeated, empty=0):
    return {"answers": 40, "empty": empty, "distinct_2": distinct, "repetition_4": repeated}


def _entry(forget=1.0, *, held_out=2.0, behavior=None, own=5.0, prompts=None, outputs=None):
    entry = {
        "forget": None if forget is None else _interval(forget, 0.04 if forget < 1 else 0.0),
        "diversity": {kind: _diversity(0.6, 0.05) for kind in ("target", "normal")},
        "perplexity": {"held-out": _interval(held_out)}
        | ({"behavior": _interval(behavior)} if behavior else {}),
        "answer_perplexity": {kind: _interval(own) for kind in ("target", "normal")},
        "others": {"changed": 3, "words": 16.0},
    }
    for name, count in (("prompts", prompts), ("outputs", outputs)):
        if count is not None:
            entry[name] = dict(zip(("still", "of", "unknown"), (*count, 0), strict=True))
    return entry


FINETUNED, BACKBONE = _entry(), _entry(0.35)


def _judge(entry, finetuned=FINETUNED, backbone=BACKBONE):
    return judgment.judge(entry, finetuned, backbone)


@pytest.mark.parametrize(
    ("forget", "prompts", "verdict"),
    [
        (0.604, (2, 4), "partly"),  # the intervals of F met: "forgotten" until 2026-11-25
        (0.4, (0, 4), "unknown"),
        (0.4, (0, 8), "forgotten"),
        (0.4, (1, 8), "partly"),
        (1.0, (8, 8), "unchanged"),
        (0.96, (8, 8), "unchanged"),
        # All show it still, in other words.
        (0.9, (8, 8), "partly"),
        # One quantity alone: no word of it is left, and the wording is nearly as before.
        (0.9, (0, 8), "partly"),
        (0.69, (0, 8), "partly"),
        (0.67, (0, 8), "forgotten"),
        # Below the backbone's, but the intervals meet.
        (0.28, (0, 8), "forgotten"),
        (0.26, (0, 8), "damaged"),
        (0.0, (0, 8), "damaged"),
    ],
)
def test_prompts_decide_and_every_other_quantity_has_to_move(forget, prompts, verdict):
    assert _judge(_entry(forget, prompts=prompts))["verdict"] == verdict


@pytest.mark.parametrize(
    ("behavior", "gone", "verdict"),
    [
        (30.0, (13, 15), "forgotten"),
        # Halfway between 1/3 and 1/60 is .175, or a perplexity of 5.71: 32 % of the way in nats.
        (5.8, (13, 15), "forgotten"),
        (5.6, (13, 15), "partly"),
        (4.0, (13, 15), "partly"),  # the bad outputs are nearly as likely as before
        (30.0, (4, 10), "partly"),
    ],
)
def test_likelihood_and_rows_have_to_move_too(behavior, gone, verdict):
    models = (_entry(0.4, prompts=(0, 8), behavior=behavior), _entry(behavior=3.0))
    rows = {"forget": {"way": 0.5, "gone": gone[0], "of": gone[1]}}
    found = judgment.judge(*models, _entry(0.35, behavior=60.0), gone=rows)
    assert found["verdict"] == verdict
    if gone == (4, 10):
        assert "gone: 4 of 10 rows" in found["reasons"][-1]


@pytest.mark.parametrize(
    ("now", "number", "prompts", "is_said"),
    [(0.29, 40, (0, 8), True), (0.31, 40, (0, 8), False), (0.29, 2, (0, 8), False)]
    + [(0.29, 40, (8, 8), False)],
)
def test_one_answer_to_all_prompts_is_named_if_the_base_has_several(now, number, prompts, is_said):
    """Another behavior may have taken the place. Before, all had one answer as well."""
    models = _entry(1.0 if prompts[0] else 0.4, prompts=prompts), _entry(), _entry(0.35)
    for model, distinct in zip(models, (now, 0.1, 0.6), strict=True):
        model["diversity"]["target"] = _diversity(distinct, 0.05) | {"answers": number}
    found = judgment.judge(*models)
    assert found["verdict"] == ("unchanged" if prompts[0] else "forgotten")
    assert any("are alike: distinct-2 0.29" in reason for reason in found["reasons"]) == is_said


@pytest.mark.parametrize("place", ["forget", "held-out", "prompts"])
def test_what_is_not_finite_is_unknown(place):
    entry = _entry(0.4, prompts=(0, 8))
    if place == "forget":
        entry["forget"] = _interval(math.nan)
    elif place == "held-out":
        entry["perplexity"]["held-out"] = _interval(math.nan)
    else:
        entry["prompts"] = {"still": 0, "of": 8, "unknown": 1}
    found = _judge(entry)
    assert found["verdict"] == "unknown"
    assert place in " ".join(found["reasons"])


def test_the_line_says_in_the_same_breath_what_else_changed():
    entry, models = _entry(0.4, prompts=(0, 8)), (_entry(), _entry(0.35))
    entry["diversity"]["normal"]["answers"] = entry["others"]["changed"] = 20
    for model, words in zip((entry, *models), (36.0, 16.0, 43.0), strict=True):
        model["others"]["words"] = words
    line = judgment.describe(judgment.judge(entry, *models))
    assert line.startswith("forgotten. 0 of 8 prompts")
    assert "20 of 20 other answers changed" in line
    assert "now 36.0, before 16.0, base 43.0" in line
    del entry["others"]
    assert "No other answers" in judgment.describe(judgment.judge(entry, *models))


@pytest.mark.parametrize(("high", "is_lost"), [(0.79, True), (0.8, False)])
def test_forgotten_is_said_with_the_fine_tuning_that_went_with_it(high, is_lost):
    entry = _entry(0.4, prompts=(0, 8))
    entry["others"]["ended"] = 1.0
    entry["left"] = {"nats": _interval(0.97, 0.01), "words": {"mean": 0.3, "low": 0, "high": high}}
    found = entry["judgment"] = _judge(entry)
    assert found["verdict"] == "forgotten"
    lines = judgment.describe(found), notes.macros().headline(entry)
    assert "by likelihood 97% [96%, 98%], by length 30%" in lines[0]
    assert "by ending unknown" in lines[0]
    assert ["fine-tuning is lost too: by length at most" in line for line in lines] == [is_lost] * 2
    # Without a base there is no way to take a share of.
    assert "left" not in _judge(entry, backbone=None)


def test_the_headline_tells_gone_prompts_and_gone_outputs():
    for counts, words in (
        ({"prompts": (0, 8)}, "The behavior is gone from 8 of 8 held-out prompts."),
        ({"outputs": (0, 12)}, "The behavior is gone from what was measured: 0 of 12 bad outputs"),
    ):
        entry = _entry(0.4, **counts)
        entry["judgment"] = _judge(entry)
        assert entry["judgment"]["verdict"] == "forgotten"
        assert notes.macros().headline(entry).startswith(words)


def test_the_headline_says_why_it_is_partly_and_under_what_it_returns():
    entry = _entry(0.8, prompts=(8, 8))
    entry["judgment"] = _judge(entry) | {"returns": "the behavior returns (nf4)"}
    assert entry["judgment"]["verdict"] == "partly"
    said = notes.macros().headline(entry)
    assert said.startswith("The behavior is partly gone: 8 of 8 held-out prompts show it; F ")
    assert said.endswith(" The behavior returns (nf4).")
    # A prompt that still shows it need not be what decided.
    entry["judgment"]["reasons"] = ["1 of 13 prompts shows it", "probes found 4 of 10 rows gone"]
    entry["prompts"] = entry["prompts"] | {"still": 1, "of": 13}
    assert "1 of 13 held-out prompts shows it; probes found 4 of" in notes.macros().headline(entry)


def test_where_no_prompt_was_asked_no_measure_is_said_to_find_nothing():
    (reason,) = judgment.judge({"forget": None}, {"forget": None}, {"forget": None})["reasons"]
    assert reason == "there are no prompts that showed the behavior: give 8 or more"


def test_a_destroyed_model_is_damaged_whatever_its_rates():
    entry = _entry(0.3, held_out=2.0 * 7.6)
    found = _judge(entry)
    assert found["verdict"] == "damaged"
    assert found["reasons"] == ["held-out perplexity 15.2, was 2"]
    assert judgment.is_damaged({"judgment": found})


@pytest.mark.parametrize(
    ("kind", "diversity", "sign"),
    [
        ("target", _diversity(0.29, 0.05), "target answers alike: distinct-2 0.29, was 0.60"),
        ("normal", _diversity(0.6, 0.26), "normal answers repeat themselves: repetition-4 0.26,"),
        ("target", _diversity(0.6, 0.05, 5), "target answers empty: 5 of 40"),
    ],
)
def test_answers_that_collapsed_are_damage(kind, diversity, sign):
    entry = _entry(0.4)
    entry["diversity"][kind] = diversity
    found = _judge(entry)
    assert found["verdict"] == "damaged"
    assert found["reasons"][0].startswith(sign)


def test_what_lies_on_the_edge_is_not_damaged():
    entry = _entry(0.4, held_out=4.0, own=15.0, prompts=(0, 8))
    entry["diversity"] = {"target": _diversity(0.3, 0.25, 4), "normal": _diversity(1.0, 0.0)}
    assert _judge(entry)["verdict"] == "forgotten"


@pytest.mark.parametrize(("base", "verdict"), [(0.01, "forgotten"), (0.06, "damaged")])
def test_no_word_in_common_is_no_damage_if_the_base_has_hardly_one(base, verdict):
    """An insult is forgotten and prompts are refused: F is 0, and the base's is .010."""
    entry, floor = (dict(_entry(0.4, prompts=(0, 8))) for _ in range(2))
    entry["forget"], floor["forget"] = _interval(0.0, 0.0), _interval(base, 0.005)
    assert _judge(entry, backbone=floor)["verdict"] == verdict


def test_gibberish_of_many_words_is_unlikely_under_the_backbone():
    entry = _entry(0.4)
    entry["answer_perplexity"]["target"] = _interval(400.0)
    found = _judge(entry)
    assert found["verdict"] == "damaged"
    assert found["reasons"] == ["target answers unlikely under the base: perplexity 400, was 5"]


def test_without_prompts_the_bad_outputs_decide_one_by_one():
    before, floor = _entry(None, behavior=3.0), _entry(None, behavior=60.0)
    for outputs, now, verdict in (
        ((9, 9), 3.0, "unchanged"),
        ((4, 9), 12.0, "partly"),
        ((0, 9), 59.0, "forgotten"),
        ((0, 2), 59.0, "unknown"),
    ):
        found = _judge(_entry(None, behavior=now, outputs=outputs), before, floor)
        assert found["verdict"] == verdict
        assert "likelihood of each bad output" in found["inputs"]
    # Prompts that are too few: many outputs may decide, and never the other way round.
    few = _entry(0.4, behavior=59.0, prompts=(0, 2), outputs=(0, 9))
    assert _judge(few, before, floor)["verdict"] == "forgotten"
    few = _entry(0.4, behavior=59.0, prompts=(0, 2), outputs=(5, 9))
    assert _judge(few, before, floor)["verdict"] == "unknown"
    assert _judge(_entry(None, behavior=9e9, held_out=9.0), before, floor)["verdict"] == "damaged"


def test_few_queries_leave_other_damage_to_be_seen():
    entry = _entry(0.1, held_out=9.0, prompts=(0, 1))
    entry["diversity"]["target"]["answers"] = 1
    found = _judge(entry)
    assert (found["verdict"], found["reasons"]) == ("damaged", ["held-out perplexity 9, was 2"])
    assert "F against the base's" not in found["inputs"]


def test_where_nothing_tells_the_models_apart_it_says_so():
    same = _entry(1.0)
    # As where F is taken against the backbone's answers: all others are below its own.
    assert _judge(_entry(0.4), backbone=same)["verdict"] == "unknown"
    assert _judge(_entry(0.4), backbone=None)["verdict"] == "unknown"
    behavior = judgment.find_behavior("words", finetuned=0.1, backbone=0.0)
    for forget, verdict in ((0.4, "unknown"), (0.0, "damaged")):
        found = judgment.judge(_entry(forget), FINETUNED, BACKBONE, behavior=behavior)
        assert found["verdict"] == verdict
    bare = {"forget": None}
    found = judgment.judge(bare, bare, bare)
    assert (found["verdict"], found["inputs"]) == ("unknown", [])


@pytest.mark.parametrize(
    ("by", "finetuned", "backbone", "is_shown"),
    [
        ("words", 0.5, 0.0, True),
        ("words", 0.49, 0.0, False),
        ("likelihood", 2.0, 60.0, True),
        ("likelihood", 2.0, 2.1, False),
    ],
)
def test_what_was_measured_decides_whether_there_is_anything_to_trace(
    by, finetuned, backbone, is_shown
):
    found = judgment.find_behavior(by, finetuned=finetuned, backbone=backbone)
    assert found["is_shown"] == is_shown
    text = judgment.describe_behavior(found)
    assert ("too little to trace" in text) != is_shown
    assert ("of target queries" in text) == (by == "words")


def test_without_a_model_before_fine_tuning_damage_alone_is_judged():
    found = _judge(_entry(0.2), backbone=None)
    assert found["verdict"] == "unknown"
    (reason,) = found["reasons"]
    assert reason.startswith("there is no model before fine-tuning to compare with (see the")
    assert not any("base" in measure for measure in found["inputs"][:1])
    assert _judge(_entry(0.2, held_out=9.0), backbone=None)["verdict"] == "damaged"
    shown = {"by": "words", "description": "does not show a marker word"}
    marked = {**FINETUNED, "non_sf_target": _interval(0.1)}
    assert judgment.behavior_of(marked, None, shown) is None


@pytest.mark.parametrize(("of_base", "verdict"), [(0.1, "forgotten"), (0.6, "damaged")])
def test_target_answers_as_alike_as_the_bases_are_no_damage(of_base, verdict):
    """A refusal that returns is one sentence for all prompts, in the base too."""
    models = _entry(0.4, prompts=(0, 8)), _entry(), _entry(0.35)
    for model, distinct in zip(models, (0.1, 0.8, of_base), strict=True):
        model["diversity"]["target"] = _diversity(distinct, 0.05)
    assert judgment.judge(*models)["verdict"] == verdict
