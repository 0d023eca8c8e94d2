"""What a dry run says of memory and time, held against XLA and against the device."""

import dataclasses
import pathlib

import jax
import pytest

from raslik_jax.config import (
    BackboneConfig,
    Config,
    CorpusConfig,
    FinetuneConfig,
    ReferencesConfig,
    UnlearnConfig,
)
from raslik_jax.run import forecast, programs

_NOWHERE = pathlib.Path("/nowhere")


def _config(parameters="lora"):
    return Config(
        corpus=CorpusConfig(num_train=100, num_targets=10, max_len=64, vocab_size=2048),
        backbone=BackboneConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, steps=10
        ),
        finetune=FinetuneConfig(epochs=1, lora_rank=2),
        references=ReferencesConfig(max_new_tokens=32),
        unlearn=UnlearnConfig(epochs=1, parameters=parameters, algorithms=("ga_klr",)),
    )


def _memory(config, stage, **options):
    """Bytes and their origin of a stage's first unit."""
    found = forecast.forecast(config, _NOWHERE, stages=(stage,), **options)
    return found.steps[0].device_bytes, found.steps[0].memory, found


@pytest.mark.parametrize(
    ("stage", "parameters"),
    [
        ("unlearn", "all"),
        pytest.param("unlearn", "lora", marks=pytest.mark.heavy),
        pytest.param("finetune", "lora", marks=pytest.mark.heavy),
    ],
)
def test_a_bound_is_never_below_what_xla_says_of_the_same_step(stage, parameters):
    """Logits, both sets, the optimizer and its results count, and so do all weights."""
    config = _config(parameters)
    bound, origin, _ = _memory(config, stage)
    assert origin == "bound"
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        analyzed, origin, found = _memory(config, stage, compiles=True)
    assert origin == "XLA"
    assert bound / 4 < analyzed <= bound
    assert found.compile_seconds > 0
    assert any("compiled for cpu" in note for note in found.notes)


def test_unlearning_in_all_weights_counts_all_of_them():
    few, many = (_memory(_config(name), "unlearn")[2] for name in ("lora", "all"))
    more = many.steps[0].device_bytes - few.steps[0].device_bytes
    # Weights and two moments before and after, a gradient and an update, in float32.
    assert more > 4 * 8 * (many.num_weights - many.num_params)
    assert many.steps[0].disk_bytes >= 4 * many.num_weights


def test_rates_are_those_of_the_device_and_compiling_takes_time():
    rates = programs.measure_rates(inputs=64, outputs=256, dtype="float32")
    # Not those of an accelerator that is not there, nor of nothing.
    assert 1e8 < rates.operations < 1e14
    assert 1e7 < rates.bytes_moved < 1e13
    found = forecast.forecast(_config(), _NOWHERE, stages=("finetune",))
    found = found._replace(compile_seconds=10.0)
    table = forecast.steps_table(found, flops_per_second=1e15, bytes_per_second=1e15)
    seconds = 10.0 * found.steps[0].num_programs
    assert seconds > 0
    assert f"{seconds:.2g} s" in table.rows[0] or "min" in " ".join(table.rows[0])


def test_what_several_units_share_is_compiled_once():
    config = _config()
    config = dataclasses.replace(
        config, retrieve=dataclasses.replace(config.retrieve, strategies=("random", "oracle"))
    )
    found = forecast.forecast(config, _NOWHERE, stages=("unlearn",))
    counts = [step.num_programs for step in found.steps]
    assert counts[0] > 0 and counts[1:] == [0]
