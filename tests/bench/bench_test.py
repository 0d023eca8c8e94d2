"""The benchmarks measure a tiny model, check themselves, and document every key they print."""

import ast
import dataclasses
import importlib
import json
import pathlib
import re

import jax
import pytest
from absl import flags
from support import tiny_model_config

from experiments.bench import decode, harness, kernels, query, sketch, unlearn
from raslik_jax.cli import setting_flags
from raslik_jax.models import presets
from raslik_jax.report import tables

_SMALL = {"model": "tiny", "length": 16, "batch_tokens": 32, "repeats": 1, "size": 512}


@pytest.fixture(autouse=True)
def _tiny_preset(monkeypatch):
    monkeypatch.setitem(presets.MODEL_PRESETS, "tiny", tiny_model_config())


def _measure(module, capsys, **options):
    """Returns the lines by stage, each documented; what is printed shows them."""
    lines = harness.run(module.Options(**options), module.measure)
    text = ast.get_docstring(ast.parse(pathlib.Path(module.__file__).read_text()))
    for stage, (line, *_) in lines.items():
        if stage == "setup":
            line = line.keys() - options.keys() - set(vars(module.Options()))
        for key in set(line) - {"stage"}:
            assert re.search(rf"\b{key}\b", text), f"{stage}: {key}"
        assert re.search(rf"\b{stage}\b", text), stage
    shown = "".join(map(tables.render_terminal, harness.line_tables(lines)))
    assert "jax 0." in shown
    return lines


def test_sketches_are_measured_stage_by_stage(capsys):
    lines = _measure(sketch, capsys, **_SMALL, micro_tokens=16)
    stages = "setup plan check shape matmul projection summary"
    assert list(lines) == stages.split()
    (summary,), (plan,), (check,) = lines["summary"], lines["plan"], lines["check"]
    assert summary["examples_per_s"] > 0
    assert check["worst_cosine"] > 0.99999
    assert plan["rows"] == 2
    # One line of progress a stage.
    said = capsys.readouterr().err
    for text in ("drawing", "checking", "warming up: sketch 16", "repetition 1"):
        assert text in said


@pytest.mark.parametrize(
    "options",
    [
        {"family": "dense_rademacher", "operand": "bfloat16", "dtype": "bfloat16"},
        {"remat": True},
        {"length": 0, "max_len": 48, "batch_tokens": 96, "num_buckets": 2},
    ],
    ids=["dense", "remat", "alpaca"],
)
@pytest.mark.heavy
def test_other_families_and_the_real_lengths_run(capsys, options):
    lines = _measure(sketch, capsys, **(_SMALL | options))
    assert lines["summary"][0]["share_of_matmul"] > 0


def test_queries_are_measured_by_dtype_against_numpy_and_nothing_is_left(capsys, tmp_path):
    folder = tmp_path / "index"
    sizes = {"rows": 100, "size": 128, "chunk_rows": 32, "repeats": 1, "queries": (1, 3)}
    lines = _measure(query, capsys, **sizes, folder=str(folder))["query"]
    assert [(line["dtype"], line["queries"]) for line in lines] == [
        (d, q) for d in ("float32", "bfloat16") for q in (1, 3)
    ]
    # Whole chunks: 4 of 32 rows.
    assert [line["row_bytes"] for line in lines[::2]] == [65536, 32768]
    assert all(line["share_of_numpy"] > 0 for line in lines)
    assert list(folder.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be a new or empty directory"):
        list(query.measure(query.Options(rows=10, size=64, folder=str(tmp_path))))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_decoding_is_measured_both_ways_to_the_same_tokens(capsys):
    sizes = {"prompts": 4, "prompt_tokens": (5, 9), "batch_size": 2, "new_tokens": 3, "alone": 2}
    lines = _measure(decode, capsys, model="tiny", **sizes)
    assert lines["summary"][0]["equal_tokens"] == 1.0
    assert lines["summary"][0]["speedup"] > 0
    assert "4 of 4: batched" in capsys.readouterr().err


def test_kernels_are_checked_before_they_are_measured(capsys, monkeypatch):
    sizes = {"params": 4096, "size": 256, "batch": 4, "rows": 40, "tail": 5, "tokens": 64}
    sizes |= {"lengths": (16,), "heads": 2, "side": 64, "dense": (4,), "repeats": 1}
    lines = _measure(kernels, capsys, **sizes)
    assert list(lines) == "setup check signs product copy binned tails attention dense".split()
    assert all(line["worst"] <= line["bound"] for line in lines["check"])
    assert lines["signs"][0]["inner_over_sigma"] == pytest.approx(1, abs=0.2)
    monkeypatch.setattr(kernels.kernels, "dense_sums", lambda x_BP, size, **_: x_BP[:, :size])
    with pytest.raises(
        ValueError, match="dense bfloat16, integers must agree .* nothing was timed"
    ):
        list(kernels.measure(kernels.Options(**sizes)))


@pytest.mark.study
def test_each_algorithm_is_measured_beside_plain_training(capsys):
    sizes = {"batch_size": 2, "length": 16, "repeats": 2, "lora_rank": 2}
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        lines = _measure(unlearn, capsys, model="tiny", **sizes, algorithms=("ga_gdr", "ga_klr"))
    plain, _, ga_klr = lines["step"]
    assert [line["name"] for line in lines["step"]] == ["lora", "ga_gdr", "ga_klr"]
    assert (plain["ratio"], plain["cpu_ratio"]) == (1.0, 1.0)
    # A step of GA_KLR is two passes and one of the reference, half as dear, less of adapters.
    operations = [line["tflops"] * line["seconds"] for line in (plain, ga_klr)]
    assert operations[1] / operations[0] == pytest.approx(1.25, abs=0.1)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (sketch, {"model": "guess"}, "--model must be one of pythia-14m"),
        (sketch, {"length": 1}, "--length must be 0 or at least 2, got 1"),
        (query, {"dtypes": ("float16",)}, "--dtypes must be a list of names from float32"),
        (query, {"queries": (2, 2)}, "--queries must be a list of numbers, each different"),
        (query, {"queries": (0,)}, "--queries must be a list of numbers, each at least 1"),
        (unlearn, {"algorithms": ("guess",)}, "--algorithms must be a list of names from ga, "),
        (unlearn, {"micro_batch_size": 3}, "--micro_batch_size must divide --batch_size=4"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(module, options, message):
    with pytest.raises(ValueError, match=message):
        module.Options(**options)


def test_what_only_the_bench_can_know_is_refused_too():
    with pytest.raises(ValueError, match="K must be 1 to P"):
        list(sketch.measure(sketch.Options(**(_SMALL | {"size": 10**6}))))


@pytest.mark.parametrize("module", [decode, kernels, query, sketch, unlearn])
def test_every_option_is_a_flag(module):
    values, defaults = flags.FlagValues(), module.Options()
    setting_flags.define(defaults, values)
    values(["bench", "--json"])
    assert setting_flags.read(defaults, values) == dataclasses.replace(defaults, json=True)


@pytest.mark.parametrize("name", ["sketch", "kernels", "query", "decode", "unlearn"])
def test_lines_are_json(name, capsys):
    module = importlib.import_module(f"experiments.bench.{name}")
    harness.run(module.Options(json=True), lambda options: iter([{"stage": "x", "value": 1.5}]))
    setup, line = map(json.loads, capsys.readouterr().out.splitlines())
    assert setup["stage"] == "setup" and setup["json"] is True
    assert line == {"stage": "x", "value": 1.5}
