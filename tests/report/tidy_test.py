"""The tidy table: every number of a run once, and the models that are read from it."""

import sample_metrics

from raslik_jax.report import tidy


def test_everything_that_was_measured_has_one_row():
    metrics = sample_metrics.sample_metrics()
    rows = tidy.tidy([metrics])
    places = [(row.strategy, row.algorithm, row.step, row.metric) for row in rows]
    assert len(set(places)) == len(rows)
    assert {(row.run, row.seed) for row in rows} == {(metrics["name"], metrics["seed"])}
    entry = metrics["methods"][-1]
    own = {
        row.metric: row
        for row in rows
        if row[2:5] == (entry["strategy"], entry["algorithm"], entry["epoch"])
    }
    assert own["forget"].value == entry["forget"]
    assert (own["pareto"].value, own["pareto"].low) == (entry["pareto"], None)
    held_out = entry["perplexity"]["held-out"]
    assert own["perplexity/held-out"].mean == held_out["mean"]
    retrieved = metrics["retrieval"][entry["strategy"]]
    assert own["retrieval/num_forget"].mean == retrieved["num_forget"]
    assert {row.step for row in rows if row.strategy == "finetuned"} == {0}


def test_models_of_several_seeds_hold_the_rows_of_each():
    runs = [sample_metrics.sample_metrics() | {"seed": seed} for seed in (3, 4)]
    models = {(m.strategy, m.algorithm): m for m in tidy.collect_models(runs)}
    last = max(entry["epoch"] for entry in runs[0]["methods"])
    for entry in runs[0]["methods"]:
        model = models[entry["strategy"], entry["algorithm"]]
        assert model.epochs == (last, last)
        if entry["epoch"] == last:
            assert model.values["forget"] == [entry["forget"]] * 2
