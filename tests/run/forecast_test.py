"""What a dry run says of operations, memory, rows, time and devices."""

import dataclasses
import json
import math
import pathlib
import types

import jax
import numpy as np
import pytest

from experiments.bench import counting
from raslik_jax.base.settings import replaced
from raslik_jax.config import (
    BackboneConfig,
    Config,
    CorpusConfig,
    FinetuneConfig,
    ReferencesConfig,
    UnlearnConfig,
)
from raslik_jax.models import presets
from raslik_jax.report import forecast as shown
from raslik_jax.report import writing
from raslik_jax.run import checking, forecast, gpus
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.gpus import Device
from raslik_jax.run.plan import plan_units
from raslik_jax.run.programs import Program, Shape
from raslik_jax.run.stages import finetune, generate, sketch, unlearn
from raslik_jax.sketch import head

_NOWHERE = pathlib.Path("/nowhere")
_DEVICE = Device("G", 0, 1e15, 1e15)


def _config(**changed):
    return Config(
        corpus=CorpusConfig(num_train=100, num_targets=10, max_len=64, vocab_size=2048),
        backbone=BackboneConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, steps=10
        ),
        finetune=FinetuneConfig(epochs=1, lora_rank=2),
        references=ReferencesConfig(max_new_tokens=32),
        unlearn=UnlearnConfig(epochs=1, algorithms=("ga_klr",)),
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


def test_memory_is_what_xla_says_of_the_largest_step():
    """All weights of both sets, the optimizer and its results count."""
    found, adapter = _first(_config(), "unlearn", compiles=True)
    run = found.run
    assert found.compile_seconds > 0
    assert adapter.device_bytes > run.base_bytes + 4 * 3 * run.num_params
    _, traced = _first(_config(), "unlearn")
    assert traced == adapter._replace(device_bytes=0.0)


def test_an_objective_costs_what_its_step_does():
    """Earlier models are computed once for each set; a retain set doubles what is trained."""
    names = ("ga", "ga_gdr", "ga_klr", "cap_klr")
    found, _ = _first(replaced(_config(), {"unlearn.algorithms": names}), "unlearn")
    one = {step.name.rpartition("-")[2]: step.operations for step in found.steps}
    forward = one["ga_klr"] - one["ga_gdr"]
    np.testing.assert_allclose(one["ga_gdr"], 2 * one["ga"], rtol=1e-6)
    np.testing.assert_allclose(one["cap_klr"], one["ga_klr"] + 2 * forward, rtol=1e-6)


_PRESETS = reversed(presets.MODEL_PRESETS.items())  # the smallest last
_EACH = {shapes.text_part.model_type: (name, shapes) for name, shapes in _PRESETS}


@pytest.mark.parametrize("model", _EACH.values(), ids=_EACH)
def test_models_of_every_architecture_are_forecast(model, monkeypatch):
    monkeypatch.setattr(checking, "model_of", lambda config: model)
    changes = {"backbone.checkpoint": model[0], "unlearn.algorithms": ("cap_klr",)}
    found = forecast.forecast(replaced(_config(), changes), _NOWHERE)
    assert all(step.operations > 0 for step in found.steps if step.name.startswith("unlearn/"))


def test_every_stage_that_computes_has_its_operations():
    changes = {"retrieve.strategies": ("raslik_f", "raslik"), "sketch.query_output": "own"}
    config = replaced(_config(), changes)
    found = forecast.forecast(config, _NOWHERE)
    without = {step.name for step in found.steps if not step.operations}
    sets = {f"retrieve/{name}" for name in ("sizes", "raslik_f", "raslik")}
    assert without == {"corpus", "evaluate", *sets}
    units = [step for step in found.steps if step.name.startswith("unlearn/")]
    # What several units share is compiled once.
    assert units[0].num_programs > 0 and not any(step.num_programs for step in units[1:])
    found = found._replace(compile_seconds=1e4)
    table = shown.steps_table(found, _DEVICE)
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
        files = {f"records.{path.stem}_file": str(path) for path in paths}
        corpus = replaced(CorpusConfig(), {"dataset": "records", **files})
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


_GB = 10**9


@pytest.mark.parametrize(
    ("memory", "max_len", "sentence"),
    [
        (80, 512, "All stages fit on 2 x G of 80 GB: at most 80 GB."),
        (
            80,
            4096,
            "All stages fit on 2 x G of 80 GB: at most 80 GB, for rows of at most 1,034 tokens.",
        ),
        (
            50,
            512,
            "Does not fit on 2 x G of 50 GB: unlearn (80 GB). To share the work, try "
            "--mesh.data=2, 4 or 8, with --mesh.base=sharded to split the weights.",
        ),
    ],
)
def test_stages_that_do_not_fit_are_named(memory, max_len, sentence):
    held = {"corpus": 0, "sketch": 40, "unlearn/a": 80, "unlearn/b": 60}
    steps = [forecast.Step(name, device_bytes=n * _GB) for name, n in held.items()]
    config = replaced(_config(), {"corpus.max_len": max_len})
    length_N = np.array([40, min(max_len, 1034)])
    run = types.SimpleNamespace(num_devices=2, length_N=length_N, config=config)
    found = forecast.Forecast(run, tuple(steps), 1.0)
    device = Device("G", math.ceil(memory * _GB / gpus.SHARE), 1.0)
    assert shown.describe_memory(found, device) == sentence


def _works(run):
    return {
        "backbone": finetune.count_pretraining(run),
        "finetune": finetune.count_finetuning(run),
        "sketch": sketch.count_sketches(run, 100),
        "unlearn": unlearn.count_unlearning(run, Variant("raslik", "ga_klr")),
        "answers": generate.count_answers(run, 4, 1, given=40),
    }


def test_a_sketch_is_compiled_at_the_batch_of_most_rows_too():
    shapes = {Shape(2, 64, 40): 1, Shape(9, 12, 8): 1, Shape(4, 32, 30): 1}
    program = Program("a", None, (), shapes, None, None)
    assert program.extremes == [Shape(2, 64, 40)]
    both = program._replace(holds_gradients=True).extremes
    assert both == [Shape(2, 64, 40), Shape(9, 12, 8)]
    (sketch,) = _works(forecast.abstract_run(_config(), _NOWHERE))["sketch"].programs
    assert sketch.holds_gradients


def test_the_rule_counts_what_a_step_does():
    """Loops without a known length are those over new tokens or over whole tiles of the head."""
    config = _config()
    run = forecast.abstract_run(config, _NOWHERE)
    for name, work in _works(run).items():
        for program in work.programs[:2]:
            shape = program.largest
            jaxpr = program.trace(shape).jaxpr.jaxpr
            slots = shape.rows * shape.targets
            tiles = -(-slots // min(head.tile_shape()[0], slots))
            trips = program.new_tokens - 1 if program.new_tokens else tiles
            counted = counting.count(jaxpr, trips=trips)
            rule = program._replace(shapes={shape: 1}).operations
            assert rule == pytest.approx(counted, rel=0.3), (name, program.name)


def test_programs_are_compiled_once():
    config = _config()
    run = forecast.abstract_run(config, _NOWHERE)
    units = plan_units(config, run, more=writing.UNITS)
    steps = {step.name: step for step in forecast.count_steps(run, units)}
    assert steps["sketch"].programs == steps["retrieve/queries"].programs
    first, *others = (s for name, s in steps.items() if name.startswith("unlearn/"))
    assert first.num_programs > 0 and not any(step.num_programs for step in others)


def test_a_training_with_longer_rows_than_the_corpus_meets_its_longest_one():
    """The longest of 52,002 rows is in few drawn batches, and takes the most memory."""
    run = forecast.forecast(_config(), _NOWHERE).run
    assert run.length_N.max() > 1_000
    found = run.drawn(8, 10, max_len=2_048)
    assert max(shape.length for shape in found) >= run.length_N.max()
    assert sum(found.values()) == pytest.approx(10)
    assert max(shape.length for shape in run.drawn(8, 10)) == run.config.corpus.max_len
