"""The test by drawn answers, on a bench whose models are lists of answers."""

from types import SimpleNamespace

import numpy as np

from experiments.studies.own_model import sampling
from raslik_jax.data.examples import make_example
from raslik_jax.evaluate.robustness.record import Asked


def _bench(monkeypatch, prompts, non_sf):
    rows = [make_example(f"q{n}", "", "a fish") for n in range(prompts)]
    asked = Asked(rows, rows, {row.example_id: "a fish" for row in rows})

    def generate(model, rows, what, *, most, drawing=None):
        greedy, drawn = model
        return [one for texts in drawn for one in texts] if drawing else greedy

    monkeypatch.setattr(sampling, "SAMPLES", 2)
    return SimpleNamespace(
        asked=asked,
        workspace=SimpleNamespace(generate=generate),
        fresh=lambda model: model,
        non_sf=non_sf,
        bootstrap={"seed": 0, "resamples": 100},
    )


def _judge(texts):
    return np.array([float("fish" not in text) for text in texts])


def test_the_worst_of_some_samples_counts(monkeypatch):
    bench = _bench(monkeypatch, 2, _judge)
    model = ["a cat", "a dog"], [["a fish", "a cat"], ["a dog", "dogs"]]
    found = sampling.measure(bench, model, None)
    rates = {one["condition"]: (one["forget"]["mean"], one["shown"]["mean"]) for one in found}
    assert rates == {
        "greedy": (0.5, 0.0),
        "each sample": (0.5, 0.25),  # F is 1, .5, .5 and 0
        "worst of all samples": (0.75, 0.5),
    }
    assert [one["samples"] for one in found] == [1, 2, 2]
    assert sampling.tell({"now": found, "backbone": found}) == "now 0.50, backbone 0.50"


def test_without_a_judge_f_counts_and_without_prompts_nothing(monkeypatch):
    bench = _bench(monkeypatch, 1, None)
    found = sampling.measure(bench, (["a cat"], [["a fish", "no"]]), None)
    assert {one["shown"] for one in found} == {None}
    assert sampling.tell({"now": found}) == "now 1.00"
    assert sampling.measure(_bench(monkeypatch, 0, None), ([], []), None) == []
