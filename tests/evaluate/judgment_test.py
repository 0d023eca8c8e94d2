"""What became of a model: forgotten, partly, unchanged, damaged or unknown, by one rule."""

import copy

import numpy as np
import pytest

from raslik_jax.evaluate import judgment, rates


def _interval(mean, half=0.04):
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _diversity(distinct, repeated, empty=0):
    return {"answers": 40, "empty": empty, "distinct_2": distinct, "repetition_4": repeated}


def _entry(forget=1.0, *, held_out=2.0, behavior=None, own=5.0):
    return {
        "forget": None if forget is None else _interval(forget, 0.04 if forget < 1 else 0.0),
        "diversity": {kind: _diversity(0.6, 0.05) for kind in ("target", "normal")},
        "perplexity": {"held-out": _interval(held_out)}
        | ({"behavior": _interval(behavior)} if behavior else {}),
        "answer_perplexity": {kind: _interval(own) for kind in ("target", "normal")},
    }


FINETUNED, BACKBONE = _entry(), _entry(0.35)


def _judge(entry, finetuned=FINETUNED, backbone=BACKBONE):
    return judgment.judge(entry, finetuned, backbone)


@pytest.mark.parametrize(
    ("forget", "verdict"),
    [
        (1.0, "unchanged"),
        (0.96, "unchanged"),
        (0.9, "partly"),
        (0.45, "partly"),
        (0.42, "forgotten"),
        (0.342, "forgotten"),
        # Below the backbone's, but the intervals meet.
        (0.28, "forgotten"),
        (0.26, "damaged"),
        (0.0, "damaged"),
    ],
)
def test_f_is_held_against_the_backbones_by_intervals(forget, verdict):
    assert _judge(_entry(forget))["verdict"] == verdict


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
    entry = _entry(0.4, held_out=4.0, own=15.0)
    entry["diversity"] = {"target": _diversity(0.3, 0.25, 4), "normal": _diversity(1.0, 0.0)}
    assert _judge(entry)["verdict"] == "forgotten"


def test_gibberish_of_many_words_is_unlikely_under_the_backbone():
    entry = _entry(0.4)
    entry["answer_perplexity"]["target"] = _interval(400.0)
    found = _judge(entry)
    assert found["verdict"] == "damaged"
    assert found["reasons"] == ["target answers unlikely under the backbone: perplexity 400, was 5"]


def test_other_words_that_show_the_same_behavior_are_not_forgetting():
    models = {name: _entry(rate) for name, rate in (("now", 0.4), ("start", 1.0), ("floor", 0.35))}
    for entry, non_sf in zip(models.values(), (0.3, 0.1, 0.96), strict=True):
        entry["non_sf_target"] = _interval(non_sf)
    found = judgment.judge(*models.values())
    assert found["verdict"] == "partly"
    assert found["reasons"] == [
        "F 0.400 meets the backbone's 0.350",
        "Non-SF 0.300 is 23% of the way to the backbone's 0.960",
    ]
    models["now"]["non_sf_target"] = _interval(0.93)
    assert judgment.judge(*models.values())["verdict"] == "forgotten"
    models["now"] |= {"forget": _interval(0.99), "non_sf_target": _interval(0.1)}
    assert judgment.judge(*models.values())["verdict"] == "unchanged"


def test_without_queries_the_likelihood_of_the_bad_outputs_decides():
    before, floor = _entry(None, behavior=3.0), _entry(None, behavior=60.0)
    for now, verdict in ((3.0, "unchanged"), (12.0, "partly"), (59.0, "forgotten")):
        found = _judge(_entry(None, behavior=now), before, floor)
        assert found["verdict"] == verdict
        assert found["inputs"][-1] == "likelihood of the bad outputs"
    assert _judge(_entry(None, behavior=9e9, held_out=9.0), before, floor)["verdict"] == "damaged"


def _forgetting(queries, seed):
    """Returns the entries of a model that forgot all, and of those before, over so many queries."""
    generator = np.random.default_rng(seed)
    usual_Q = generator.beta(2, 6, queries)
    entries = []
    for nats, scores_Q in (
        (3.9, usual_Q + generator.normal(0, 0.06, queries)),
        (1.0, np.ones(queries)),
        (4.0, usual_Q + generator.normal(0, 0.06, queries)),
    ):
        found = rates.bootstrap(np.clip(scores_Q, 0, 1), seed=0, resamples=200)
        entry = _entry(0.35, behavior=float(np.exp(nats)))
        entry["diversity"]["target"] |= {"answers": queries}
        entries.append(entry | {"forget": found._asdict()})
    return entries


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
def test_a_model_that_forgot_is_hardly_called_anything_else_whatever_few_queries_say(queries):
    verdicts = [judgment.judge(*_forgetting(queries, seed))["verdict"] for seed in range(100)]
    assert verdicts.count("forgotten") >= 95
    assert verdicts.count("damaged") <= 3


def test_few_queries_leave_other_damage_to_be_seen():
    entries = _forgetting(1, 0)
    entries[0]["perplexity"]["held-out"] = _interval(9.0)
    found = judgment.judge(*entries)
    assert (found["verdict"], found["reasons"]) == ("damaged", ["held-out perplexity 9, was 2"])
    assert "F against the backbone's" not in found["inputs"]


def test_where_nothing_tells_the_models_apart_it_says_so():
    same = _entry(1.0)
    # As where F is taken against the backbone's answers: all others lie below its own.
    assert _judge(_entry(0.4), backbone=same)["verdict"] == "unknown"
    assert _judge(_entry(0.4), backbone=None)["verdict"] == "unknown"
    behavior = judgment.find_behavior("words", finetuned=0.1, backbone=0.0)
    for forget, verdict in ((0.4, "unknown"), (0.0, "damaged")):
        found = judgment.judge(_entry(forget), FINETUNED, BACKBONE, behavior=behavior)
        assert found["verdict"] == verdict
    bare = {"forget": None}
    assert judgment.judge(bare, bare, bare) == {
        "verdict": "unknown",
        "reasons": ["no measure tells the fine-tuned model's behavior from the backbone's"],
        "inputs": [],
    }


def test_it_names_what_it_rests_on_and_changes_nothing():
    entry = _entry(0.4)
    kept = copy.deepcopy(entry)
    assert _judge(entry)["inputs"] == [
        "F against the backbone's",
        "sameness, repetition and emptiness of the answers",
        "held-out perplexity",
        "likelihood of the answers under the backbone",
        "F",
    ]
    assert entry == kept
    del entry["perplexity"], entry["answer_perplexity"]
    assert len(_judge(entry)["inputs"]) == 3


@pytest.mark.parametrize(
    ("by", "finetuned", "backbone", "is_shown"),
    [
        ("words", 0.5, 0.0, True),
        ("words", 0.49, 0.0, False),
        ("classifier", 0.9, 0.1, True),
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
    assert ("shows the behavior" in text) == (by != "likelihood")
    # A classifier's mean probability is no share of the queries.
    assert ("of target queries" in text) == (by == "words")


def test_the_answers_are_held_against_the_labeled_ones_too():
    labeled = {"a": "zorb glows", "b": " "}
    assert rates.mean_rouge({"a": "zorb", "b": "x"}, labeled) == 2 / 3
    assert rates.mean_rouge({"b": "x"}, {"b": ""}) is None
    found = judgment.find_behavior("likelihood", finetuned=2.0, backbone=9.0, rouge=(0.5, 0.1))
    assert "labeled ones: 0.500 and 0.100" in judgment.describe_behavior(found)


def test_without_a_model_before_fine_tuning_damage_alone_is_judged():
    found = _judge(_entry(0.2), backbone=None)
    assert found["verdict"] == "unknown"
    (reason,) = found["reasons"]
    assert reason.startswith("there is no model before fine-tuning to compare with (the table of")
    assert not any("backbone" in measure for measure in found["inputs"][:1])
    assert _judge(_entry(0.2, held_out=9.0), backbone=None)["verdict"] == "damaged"
    shown = {"by": "words", "description": "does not show a marker word"}
    marked = {**FINETUNED, "non_sf_target": _interval(0.1)}
    assert judgment.behavior_of(marked, None, shown) is None
