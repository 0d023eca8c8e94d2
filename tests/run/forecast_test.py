"""What a dry run says of operations, memory, rows and time, held against XLA and against a run."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from raslik_jax.base.settings import replaced
from raslik_jax.config import (
    BackboneConfig,
    Config,
    CorpusConfig,
    EvaluateConfig,
    FinetuneConfig,
    ReferencesConfig,
    UnlearnConfig,
)
from raslik_jax.run import forecast, programs
from raslik_jax.run.workspace import Workspace

_NOWHERE = pathlib.Path("/nowhere")


def _config(parameters="lora", **changed):
    return Config(
        corpus=CorpusConfig(num_train=100, num_targets=10, max_len=64, vocab_size=2048),
        backbone=BackboneConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, steps=10
        ),
        finetune=FinetuneConfig(epochs=1, lora_rank=2),
        references=ReferencesConfig(max_new_tokens=32),
        unlearn=UnlearnConfig(epochs=1, parameters=parameters, algorithms=("ga_klr",)),
        **changed,
    )


def _first(config, stage, **options):
    """The forecast of a stage, and its first unit."""
    found = forecast.forecast(config, _NOWHERE, stages=(stage,), **options)
    return found, found.steps[0]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        yield


@pytest.mark.parametrize(
    ("stage", "parameters"),
    [
        ("unlearn", "all"),
        pytest.param("unlearn", "lora", marks=pytest.mark.heavy),
        pytest.param("finetune", "lora", marks=pytest.mark.heavy),
        pytest.param("sketch", "lora", marks=pytest.mark.heavy),
    ],
)
def test_traced_memory_is_near_what_xla_says_of_the_same_step(stage, parameters):
    """Logits, both sets, the optimizer and its results count, and so do all weights."""
    config = _config(parameters)
    _, traced = _first(config, stage)
    assert traced.memory == "traced"
    found, compiled = _first(config, stage, compiles=True)
    assert compiled.memory == "XLA"
    assert 0.7 < traced.device_bytes / compiled.device_bytes < 1.5
    assert found.compile_seconds > 0
    assert any("compiled for cpu" in note for note in found.notes)


def test_unlearning_in_all_weights_counts_all_of_them():
    few, many = (_first(_config(name), "unlearn") for name in ("lora", "all"))
    more = many[1].device_bytes - few[1].device_bytes
    # Weights and two moments of all, in float32.
    assert more > 4 * 3 * (many[0].run.num_weights - many[0].run.num_params)
    assert many[1].disk_bytes >= 4 * many[0].run.num_weights
    assert many[1].operations > 1.2 * few[1].operations


def test_an_objective_costs_what_its_step_does():
    """The reference speaks for NPO and for a KL; a retain set doubles what is differentiated."""
    names = ("ga", "npo", "ga_gdr", "ga_klr", "npo_klr")
    config = dataclasses.replace(
        _config(), unlearn=dataclasses.replace(_config().unlearn, algorithms=names)
    )
    found, _ = _first(config, "unlearn")
    one = {step.name.rpartition("-")[2]: step.operations for step in found.steps}
    forward = one["npo"] - one["ga"]
    np.testing.assert_allclose(one["ga_gdr"], 2 * one["ga"], rtol=1e-6)
    np.testing.assert_allclose(one["ga_klr"], one["ga_gdr"] + forward, rtol=1e-6)
    np.testing.assert_allclose(one["npo_klr"], one["ga_klr"] + forward, rtol=1e-6)


def test_shapes_that_are_not_traced_cost_as_if_they_were():
    run = programs.AbstractRun(_config(), Workspace(_NOWHERE, _config()))
    (program,) = run.finetuning().programs
    lengths = [(length, part) for length in (16, 24, 48, 64) for part in (1, 2)]
    shapes = {programs.Shape(16, length, length // part): 1.0 for length, part in lengths}
    program, few = program._replace(shapes=shapes), dict(list(shapes.items())[:2])
    exact_S2 = np.array([program.cost_of(shape)[:2] for shape in shapes])
    found = programs.find_costs([program, program._replace(shapes=few)])
    np.testing.assert_allclose(program.total(found), exact_S2.sum(axis=0), rtol=2e-2)
    np.testing.assert_allclose([*found.values()], exact_S2[[1, 0, 3, 2, 5, 4, 7, 6]], rtol=5e-2)


def test_runs_that_differ_in_data_alone_share_what_is_traced():
    costs = {}
    first, _ = _first(_config(), "finetune", costs=costs)
    traced = {name: cost_of.cache_info().misses for name, cost_of in costs.items()}
    more = dataclasses.replace(_config().corpus, num_train=200)
    _, second = _first(dataclasses.replace(_config(), corpus=more), "finetune", costs=costs)
    assert traced == {name: cost_of.cache_info().misses for name, cost_of in costs.items()}
    assert second.operations > 1.8 * first.steps[0].operations


def test_every_stage_that_computes_has_its_operations():
    classified = {"non_sf": "classifier", "classifier.checkpoint": ""}
    config = _config(evaluate=replaced(EvaluateConfig(), classified))
    config = dataclasses.replace(
        config,
        retrieve=dataclasses.replace(config.retrieve, strategies=("embedding", "exact")),
        sketch=dataclasses.replace(config.sketch, query_output="own", diagnose=8),
    )
    found = forecast.forecast(config, _NOWHERE)
    without = {step.name for step in found.steps if not step.operations}
    assert without == {
        "corpus",
        "retrieve/sizes",
        *(f"retrieve/{name}" for name in ("embedding", "exact")),
        "evaluate",
        "report",
    }
    units = [step for step in found.steps if step.name.startswith("unlearn/")]
    # What several units share is compiled once.
    assert units[0].num_programs > 0 and not any(step.num_programs for step in units[1:])
    found = found._replace(compile_seconds=1e4)
    table = forecast.steps_table(found, flops_per_second=1e15, bytes_per_second=1e15)
    assert " h" in "".join(next(row for row in table.rows if row[0].startswith("unlearn/")))


class TestRecords:
    def _run(self, tmp_path, queries, stages=("corpus",), **retrieve):
        rows = [
            {"instruction": f"say {n}", "output": f"number {n}", "is_target": n < 3}
            for n in range(20)
        ]
        paths = tmp_path / "train.jsonl", tmp_path / "queries.jsonl"
        for path, lines in zip(paths, (rows, queries), strict=True):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = _config()
        corpus = replaced(
            CorpusConfig(),
            {
                "dataset": "records",
                "records.train_file": str(paths[0]),
                "records.queries_file": str(paths[1]),
            },
        )
        settings = dataclasses.replace(config.retrieve, **retrieve)
        config = dataclasses.replace(config, corpus=corpus, retrieve=settings)
        return forecast.forecast(config, tmp_path / "run", stages=stages)

    def test_rows_and_queries_are_those_of_the_files(self, tmp_path):
        queries = [
            {"instruction": "what is bad", "split": "retrieval"},
            {"instruction": "and what else", "output": "this", "split": "retrieval"},
            {"instruction": "how is it", "split": "test_normal"},
        ]
        found = self._run(tmp_path, queries)
        assert found.run.sizes == (20, 3, 3, 3)
        assert found.run.queries == {"retrieval": 2, "test_target": 0, "test_normal": 1}

    def test_what_only_measures_is_left_out_where_the_run_leaves_it_out(self, tmp_path):
        asked = [{"instruction": "what is bad", "output": "this", "split": "retrieval"}]
        held = {"instruction": "how is it", "split": "test_normal"}
        stages = ("corpus", "evaluate")
        found = self._run(tmp_path, asked, stages)
        assert [step.name for step in found.steps] == ["corpus"]
        found = self._run(tmp_path, [*asked, held], stages)
        assert [step.name for step in found.steps] == ["corpus", "evaluate"]

    def test_a_corpus_that_the_stages_cannot_take_is_refused(self, tmp_path):
        queries = [{"instruction": "what is bad", "split": "retrieval"}]
        with pytest.raises(ValueError, match="at most 20 training examples"):
            self._run(tmp_path, queries, ("retrieve",), num_forget=15, num_retain=6)
