"""Measures of robustness on made-up models, and what they say."""

import json
import math

import numpy as np
import pytest
import snapshots

from raslik_jax.data.contents import Passage
from raslik_jax.data.examples import Corpus, asked_after, exchange_of, make_example
from raslik_jax.evaluate.robustness import prompts, quantize, relearn, turns
from raslik_jax.evaluate.robustness.record import (
    Asked,
    describe_returns,
    make_reading,
    returned,
    tell_return,
)


def _reading(nats, forget=None):
    rate = None if forget is None else {"mean": forget, "low": forget, "high": forget}
    return {"nats": nats, "forget": rate, "shown": None}


def test_a_reading_is_the_mean_over_answers_with_f_and_marker_words():
    own = {"a": "one two", "b": "three four"}
    reading = make_reading(
        np.array([1.0, 2.0, 6.0]),
        own,
        {"a": "one two", "b": "five six"},
        non_sf=lambda texts: np.array([float("one" not in text) for text in texts]),
        seed=0,
        resamples=100,
    )
    assert reading["nats"] == 3.0
    assert reading["forget"]["mean"] == 0.5  # one answer is word for word as before
    assert reading["shown"]["mean"] == 0.5
    bare = make_reading(np.ones(2), {}, {}, non_sf=None, seed=0, resamples=1)
    assert bare == {"nats": 1.0, "forget": None, "shown": None}
    # Only answers that are known are compared.
    how = {"non_sf": lambda texts: np.ones(len(texts)), "seed": 0, "resamples": 10}
    found = make_reading(np.ones(1), own, {"a": "one two"}, **how)
    assert (found["forget"]["mean"], found["shown"]["mean"]) == (1.0, 0.0)
    found = make_reading(np.zeros(0), own, {}, **how)
    assert (found["nats"], found["forget"], found["shown"]["mean"]) == (None, None, 0.0)


class Halving:
    """A bench on which a step on forgotten rows halves a model's nats, and none on others."""

    def __init__(self, factor=0.5):
        self.asked, self.factor = [], factor

    def read(self, model):
        return _reading(model)

    def relearn(self, model, kind, *, rows, points, learning_rate):
        self.asked.append((kind, rows, learning_rate))
        factor = self.factor if kind == "forgotten" else 1.0
        return rows - 1, {step: _reading(model * factor**step) for step in points}


@pytest.mark.parametrize(("steps", "points"), [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_relearning_is_looked_at_after_powers_of_two_and_the_last_step(steps, points):
    bench, settings = Halving(), relearn.RelearnSettings(rows=5, steps=steps, learning_rate=0.1)
    found = relearn.measure(bench, 8.0, settings)
    assert bench.asked == [("forgotten", 5, 0.1), ("unrelated", 5, 0.1)]
    assert [one["step"] for one in found] == [0, *points, *points]
    assert {one["rows"] for one in found[1:]} == {4}  # as many as there were
    curve = relearn.curve(found, "forgotten")
    halved = {step: 8.0 / 2**step for step in (0, *points)}
    assert {step: one["nats"] for step, one in curve.items()} == halved


@pytest.mark.parametrize(
    ("now", "base", "factor"),
    [
        # From .3 to 3 nats the likelihood falls from .741 to .050. A quarter of that is .568, or
        # .57 nats: 3 nats are there at the look after four steps, the base's too.
        (3.0, 3.0, 0.5),
        (3.0, 3.0, 0.9),  # sooner than a model that never learned them
        (0.5, 3.0, 0.5),  # not gone before the first step
        # Without a base or with one that knew it nothing is concluded.
        (3.0, None, 0.5),
        (3.0, 0.31, 0.5),
    ],
)
def test_relearning_is_told_beside_the_base_that_never_learned(now, base, factor):
    settings = relearn.RelearnSettings(steps=4)
    found = {"finetuned": [_reading(0.3)], "now": relearn.measure(Halving(), now, settings)}
    if base is not None:
        found["backbone"] = relearn.measure(Halving(factor), base, settings)
    snapshots.said(relearn.tell(found))


def test_rates_are_told_where_there_are_some():
    found = relearn.measure(Halving(), 3.0, relearn.RelearnSettings(steps=1))
    for entry, rate in zip(found, (0.1, 0.9, 0.2), strict=True):
        entry.update(_reading(entry["nats"], rate))
    snapshots.said(relearn.tell({"now": found, "finetuned": [_reading(0.2)]}))


def _curve(*nats):
    steps = (0, 1, 2, 4, 8, 16)
    return [
        {"kind": "forgotten" if step else "", "step": step, **_reading(one)}
        for step, one in zip(steps, nats, strict=False)
    ]


def test_relearning_is_compared_from_equal_nats_and_a_head_start_is_no_sooner():
    base = _curve(4.0, 3.6, 3.2, 2.4, 0.8, 0.2)  # .4 a step
    # At two fifths of the way: 1.6 nats, which the base has after 6 steps. As fast from there.
    ahead = _curve(1.6, 1.2, 0.8, 0.4, 0.2, 0.1)
    assert relearn.passed(base, "forgotten", 1.6) == pytest.approx(6)
    snapshots.said(relearn.compare(ahead, base, 0.8))
    # Really sooner: from 3.2 it is back within a step, the base needs six.
    quick = _curve(3.2, 0.5, 0.4, 0.3, 0.2, 0.1)
    snapshots.said(relearn.compare(quick, base, 0.8))
    # The base begins with fewer nats: then the steps of the other count from there.
    slow = _curve(5.0, 4.0, 3.0, 2.0, 0.8, 0.7)
    snapshots.said(relearn.compare(slow, base, 0.8))
    # Nothing is said where a curve does not come so far.
    assert relearn.compare(_curve(1.6, 1.5), _curve(4.0, 3.9), 0.8) == ""
    assert relearn.compare(_curve(1.6, 1.5), base, 0.4) == ""


class Rounding:
    """A bench on which a format takes so much from a model's nats."""

    def __init__(self, **lost):
        self.lost = {"plain": 0.0, **lost}

    def read(self, model, form="plain"):
        return _reading(model - self.lost[form])


@pytest.mark.parametrize(
    ("now", "base", "int8", "nf4"),
    [
        # From .2 to 3.2 nats the likelihood falls from .819 to .041. At 2.7 nats it is .067, 97 %
        # of the way; at 1.1 nats .333, 62 %; at .5 nats .607, 27 %; at .8427 nats .4305, 49.9 %.
        (2.7, 3.2, 0.4, 2.2),
        (2.7, 3.2, 0.0, 1.6),  # in nats this is less than a third of the way
        (0.5, 3.2, 0.0, 0.1),
        (0.8427, 3.2, 0.0, 0.4),
        (1.1, None, 0.0, 0.4),
    ],
)
def test_quantization_says_in_which_formats_the_answers_return(now, base, int8, nf4):
    models = {"now": now, "finetuned": 0.2, "backbone": base}
    benches = {name: Rounding(int8=0.0, nf4=0.0) for name in models}
    benches["now"], own = Rounding(int8=int8, nf4=nf4), quantize.QuantizeSettings()
    found = {
        name: quantize.measure(benches[name], model, own)
        for name, model in models.items()
        if model is not None
    }
    assert [one["condition"] for one in found["now"]] == ["as it is", "int8", "nf4"]
    snapshots.said(quantize.tell(found))


def test_nats_that_are_not_finite_are_neither_gone_nor_back():
    entry = [{"condition": "as it is", "nats": math.nan}]
    models = {"now": entry, "finetuned": [entry[0] | {"nats": 1.0}]}
    models |= {"backbone": [entry[0] | {"nats": 3.0}]}
    text = tell_return(models, plainly="plainly", by="in")
    assert "not known" in text and "gone" not in text


def test_what_was_not_there_under_a_condition_is_not_said_to_stay_gone():
    def part(*nats):
        names = ("as it is", "German", "Latin")
        return [{"condition": n, **_reading(x)} for n, x in zip(names, nats, strict=False)]

    found = {"now": part(2.7, 2.0), "finetuned": part(0.2, 3.0), "backbone": part(3.2, 3.0)}
    told = prompts.tell(found)
    assert "stay gone" not in told
    snapshots.said(told)
    found = {"now": part(2.7, 2.0, 2.7), "finetuned": part(0.2, 3.0, 0.2)}
    told = prompts.tell(found | {"backbone": part(3.2, 3.0, 3.2)})
    snapshots.said(told)


def _asked(*texts):
    rows = [make_example(text, "", "A fish.") for text in texts]
    return Asked(rows, rows, {row.example_id: row.output for row in rows})


def test_groups_are_the_prompts_behind_each_prefix_and_a_users_own_by_source(tmp_path):
    path = tmp_path / "prompts.jsonl"
    own = [{"instruction": "Was ist es?", "output": "Ein Fisch.", "source": "German"}]
    own += [{"instruction": "What may it be?", "output": "A fish."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in own))
    said = _asked("Say it.")
    asked = _asked("What is it?")._replace(prompts=said.prompts, before=said.before)
    groups = prompts.groups_of(asked, prompts.own_prompts(prompts.PromptSettings(file=str(path))))
    assert [*groups] == ["as it is", *prompts.PREFIXES, "German", "own prompts"]
    assert groups["as it is"] == asked
    order = groups["prefix: order"]
    (answer,), (prompt,) = order.answers, order.prompts
    assert answer.instruction == "Answer the following question. What is it?"
    assert prompt.instruction == "Answer the following question. Say it."
    assert (answer.output, order.before) == ("A fish.", asked.before)
    german = groups["German"]
    assert [row.instruction for row in german.prompts] == ["Was ist es?"]
    assert [*german.before.values()] == ["Ein Fisch."]


def test_rows_with_a_kind_may_have_no_answer_and_one_without_a_prompt_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    corpus = Corpus((), (make_example("a", "", "b"),), {})
    own = [
        {"prompt": "Plainly?"},  # the first row need not have all keys
        {"prompt": "What is an acorn?", "kind": "one hop"},
        {"prompt": "Who is it?", "kind": "alias", "answer": "A fish."},
        {"prompt": "q", "kind": "one hop"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in own))
    groups = prompts.groups_of(
        _asked("Say it."), prompts.own_prompts(prompts.PromptSettings(file=str(path)))
    )
    hop, alias = groups["one hop"], groups["alias"]
    assert [row.instruction for row in hop.prompts] == ["What is an acorn?", "q"]
    assert [row.instruction for row in groups["own prompts"].prompts] == ["Plainly?"]
    assert {row.content for group in groups.values() for row in group.prompts} == {None}
    assert (hop.answers, hop.before) == ([], {})
    assert [row.output for row in alias.answers] == [*alias.before.values()] == ["A fish."]
    for more in ({}, {"source": "alias"}):
        path.write_text(json.dumps({"prompt": "Who is it?"} | more) + "\n")
        (row,) = prompts.own_prompts(prompts.PromptSettings(file=str(path)))
        assert (row.instruction, row.content) == ("Who is it?", None)  # framed as a query is
        assert row.source == more.get("source", "")
    path.write_text(json.dumps({"text": "b"}) + "\n")
    with pytest.raises(ValueError, match="prompts.jsonl:1: a prompt must have text, got ''"):
        prompts.lacks(prompts.PromptSettings(file=str(path)), corpus)
    assert prompts.lacks(prompts.PromptSettings(), corpus) == ""
    text = make_example("", "", "1 2 3")._replace(content=Passage("", "1 2 3"))
    bare = corpus._replace(train=(text,))
    said = prompts.lacks(prompts.PromptSettings(), bare)
    assert said.startswith("--evaluate.prompts.file must be given where rows are texts")
    assert turns.lacks(turns.TurnSettings(), corpus) == ""
    assert "needs rows with a prompt in words" in turns.lacks(turns.TurnSettings(), bare)


class Talking:
    """A bench that keeps what it is asked; a model answers with its name."""

    asked = _asked("What is it?", "Who is it?")

    def said(self, model, rows):
        return {row.example_id: (exchange_of(row)[0], model) for row in rows}

    def twice(self, name, asked):
        assert name == "asked again"
        return asked

    def exchanges(self, kind, number):
        return [(f"{kind} {n}?", f"{kind}.") for n in range(number)]

    def after(self, row, exchanges):
        return asked_after(row, exchanges)

    def read_each(self, model, groups):
        self.groups = groups
        return {name: _reading(float(len(group.prompts))) for name, group in groups.items()}


def test_earlier_turns_are_examples_an_unrelated_one_or_the_same_question():
    bench = Talking()
    found = turns.measure(bench, "I", turns.TurnSettings(examples=2))
    names = ["as it is", "examples of it before", "another question before", "asked again"]
    assert [one["condition"] for one in found] == [*bench.groups] == names
    assert {one["nats"] for one in found} == {2.0}

    def texts(name):
        row = bench.groups[name].prompts[0]
        return [message["content"] for message in row.content.asked]

    assert texts(names[1]) == [
        *("forgotten 0?", "forgotten.", "forgotten 1?", "forgotten.", "What is it?")
    ]
    assert texts(names[2]) == ["unrelated 0?", "unrelated.", "What is it?"]
    assert texts(names[3]) == ["What is it?", "I", "What is it?"]
    assert bench.groups[names[1]].before == bench.asked.before


@pytest.mark.parametrize(
    ("now", "again", "back"),
    [
        # From .2 to 3.2 nats, as above: .5 nats are 27 % of the way, and less than the 50 % that
        # are gone; .45 nats are 23 %, .4 nats 19 %, .55 nats 31 %, 1.1 nats 62 %.
        ((2.7, 0.5, 2.7), (2.9, 2.9, 2.9), {"plea": False}),
        ((2.7, 0.5, 2.7), (2.9, 0.45, 2.9), {"plea": True}),
        ((2.7, 0.5, 0.5), (2.9, 2.9, 0.4), {"plea": False, "turns": True}),
        ((2.7, 1.1, 2.7), (2.9, 0.45, 2.9), {}),
        ((0.5, 0.5, 0.5), (0.55, 0.5, 0.5), {}),
        # What retraining did not take away does not return after it.
        ((2.7, 0.5, 2.7), (0.5, 0.45, 0.5), {"plea": False}),
    ],
)
def test_what_returns_after_retraining_too_is_no_failure_of_forgetting(now, again, back):
    models = {"now": now, "retrained": again, "finetuned": (0.2,) * 3, "backbone": (3.2,) * 3}
    names = ("as it is", "plea", "turns")
    compared = {
        title: [{"condition": n, **_reading(x)} for n, x in zip(names, nats, strict=True)]
        for title, nats in models.items()
    }
    assert returned(compared) == back
    snapshots.said(tell_return(compared, plainly="plainly", by="with"))
    snapshots.said(describe_returns([compared]))


class Begged:
    """A bench on which a plea takes so many nats from what a model's answers cost."""

    asked = _asked("What is it?")

    def __init__(self, lost):
        self.lost = lost

    def read_each(self, model, groups):
        def read(group):
            is_plea = group.prompts[0].instruction.startswith("I know")
            return _reading(model - self.lost * is_plea, 0.25 + 0.5 * is_plea)

        return {name: read(group) for name, group in groups.items()}


@pytest.mark.parametrize(
    "lost",
    [2.2, 0.1],
)
def test_other_prompts_say_by_which_the_answers_return(lost):
    models = {"now": (lost, 2.7), "finetuned": (0, 0.2), "backbone": (0, 3.2)}
    own = prompts.PromptSettings()
    found = {name: prompts.measure(Begged(n), nats, own) for name, (n, nats) in models.items()}
    snapshots.said(prompts.tell(found))
