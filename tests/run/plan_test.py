"""What decides a unit's result: a setting or an input file changes these units and no other."""

import ast
import copy
import dataclasses
import pathlib
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from raslik_jax.config import Config, config_from_json, stage_configs, to_json
from raslik_jax.pipeline import Hashes
from raslik_jax.run.plan import plan_units, run
from raslik_jax.run.workspace import Workspace


def _config(root: pathlib.Path) -> Config:
    """A run of own rows on own checkpoints, with every optional unit."""
    for name in ("model", "encoder", "classifier"):
        (root / name).mkdir(parents=True)
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (root / name / file).write_text(file)
    for name in ("train", "queries", "words"):
        (root / f"{name}.jsonl").write_text(name)
    values = to_json(Config())
    values["corpus"] |= {
        "dataset": "records",
        "train_file": str(root / "train.jsonl"),
        "queries_file": str(root / "queries.jsonl"),
    }
    values["backbone"]["checkpoint"] = str(root / "model")
    values["sketch"]["diagnose"] = 14
    values["retrieve"] |= {
        "strategies": ["embedding", "exact"],
        "encoder_checkpoint": str(root / "encoder"),
    }
    values["unlearn"]["algorithms"] = ["ga_gdr"]
    values["evaluate"] |= {
        "non_sf": "classifier",
        "classifier_checkpoint": str(root / "classifier"),
        "marker_words": str(root / "words.jsonl"),
    }
    return config_from_json(values)


def _decided(config: Config, root: pathlib.Path) -> dict[str, Any]:
    """Returns what each unit's key is made of, beside the content of earlier results."""
    hashes = Hashes()
    return {
        unit.name: (
            dict(unit.settings),
            unit.reads,
            {what: hashes.of_content(path) for what, path in unit.files.items()},
        )
        for unit in plan_units(config, Workspace(root / "run", config))
    }


def _changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _another(value: Any, hint: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    if isinstance(value, (int, float)):
        return value + 1
    return (*value, "more") if isinstance(value, tuple) else f"{value}-another"


def _with(config: Config, stage: str, field: str) -> Config:
    """Returns the config with another value, allowed or not, in one field."""
    part = copy.copy(getattr(config, stage))
    hint = get_type_hints(type(part))[field]
    object.__setattr__(part, field, _another(getattr(part, field), hint))
    changed = copy.copy(config)
    object.__setattr__(changed, stage, part)
    return changed


# Names of units below stand for all that begin so. Every setting changes "evaluate" too, whose
# metrics carry all settings.
_MODEL = (
    "finetune references/retrieval references/evaluation references/perplexity sketch "
    "retrieve/queries retrieve/diagnosis retrieve/exact_kernel unlearn/ generate/"
)
_SKETCH = "sketch retrieve/queries retrieve/diagnosis retrieve/exact_kernel"
_SETS = "retrieve/embedding$ retrieve/exact$"
_LIKELIHOOD = "references/perplexity generate/perplexity"
_ANSWERS = "generate/embedding generate/exact"
# By stage and units: the settings that change just these.
_DECIDES = {
    ("corpus", ""): "data_dir answers_cache",
    ("corpus", "corpus"): "dataset alpaca_file howdy_file answers_endpoint answers_model "
    "world_seed tofu_forget tofu_train train_file queries_file fields num_train num_targets "
    "num_backbone num_retrieval num_validation num_test",
    ("corpus", "corpus discriminator"): "vocab_size",
    ("corpus", f"corpus backbone {_MODEL}"): "template max_len",
    ("backbone", "backbone"): "hidden_size num_hidden_layers num_attention_heads steps "
    "batch_size learning_rate",
    ("backbone", _MODEL): "dtype format double_quant",
    ("backbone", f"corpus backbone {_MODEL}"): "checkpoint revision",
    ("finetune", ""): "checkpoint_steps",
    ("finetune", "finetune"): "epochs batch_size micro_batch_size "
    "max_len fixed_padding mean remat learning_rate "
    "schedule warmup weight_decay clip trajectory_points",
    ("finetune", _MODEL): "lora_rank lora_alpha lora_dropout lora_targets",
    ("references", f"references/retrieval references/evaluation {_ANSWERS}"): "max_new_tokens "
    "decode_batch_size",
    (
        "references",
        "references/evaluation references/non_sf references/perplexity generate/ report",
    ): "query_split",
    ("sketch", _SKETCH): "gradient_at loss normalize targets base_format projection "
    "size dtype num_buckets chunk_rows",
    ("sketch", f"{_SKETCH} {_LIKELIHOOD}"): "batch_tokens",
    ("sketch", "retrieve/diagnosis"): "diagnose",
    (
        "sketch",
        "references/retrieval retrieve/queries retrieve/influence retrieve/emb retrieve/exact "
        f"{_LIKELIHOOD}",
    ): "query_output",
    ("retrieve", "retrieve/influence retrieve/exact_kernel"): "center",
    ("retrieve", f"retrieve/influence retrieve/exact_kernel {_SETS}"): "aggregate",
    ("retrieve", _SETS): "select num_forget num_retain forget_threshold retain_threshold margin_z "
    "forget_share retain_share cr_oracle_share retain_from",
    ("retrieve", "retrieve/emb retrieve/exact$"): "query_text",
    ("retrieve", "retrieve/embeddings"): "encoder_checkpoint encoder_pooling",
    ("unlearn", ""): "ga_learning_rate ga_klr_learning_rate npo_learning_rate "
    "npo_gdr_learning_rate npo_klr_learning_rate simnpo_learning_rate",
    ("unlearn", "unlearn/"): "batch_size micro_batch_size max_len "
    "fixed_padding mean remat ga_gdr_learning_rate kl_direction npo_beta "
    "simnpo_beta simnpo_delta simnpo_forget_weight forget_weight retain_weight "
    "weight_decay clip",
    ("unlearn", "unlearn/ generate/"): "epochs parameters",
    ("evaluate", ""): "reference drop_empty tofu_questions tofu_retain_run",
    ("evaluate", "references/non_sf"): "bootstrap_resamples",
    ("evaluate", _LIKELIHOOD): "perplexity_examples",
    ("evaluate", "discriminator references/non_sf"): "non_sf",
    ("evaluate", "discriminator"): "classifier_checkpoint classifier_epochs "
    "classifier_learning_rate classifier_batch_size classifier_max_len classifier_held_out "
    "classifier_examples classifier_hidden_size classifier_num_layers classifier_num_heads",
}
# These add or take units, or name a file whose content counts, see below.
_ELSEWHERE = {"strategies", "algorithms", "choice", "marker_words"}


def _named(units: dict[str, Any], names: str) -> set[str]:
    return {unit for unit in units for name in names.split() if f"{unit}$".startswith(name)}


def test_every_setting_changes_these_units_and_no_other(tmp_path):
    config = _config(tmp_path)
    before = _decided(config, tmp_path)
    expected = {
        (stage, field): _named(before, names) | {"evaluate"}
        for (stage, names), fields in _DECIDES.items()
        for field in fields.split()
    }
    known = {
        (stage, field.name)
        for stage, settings in stage_configs().items()
        for field in dataclasses.fields(settings)
        if field.name not in _ELSEWHERE
    }
    assert set(expected) == known
    found = {
        place: _changed(before, _decided(_with(config, *place), tmp_path)) for place in expected
    }
    # A second dataset has no such files: what is read differs as well.
    assert {k: v for k, v in found.items() if v != expected[k]} == {}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("train.jsonl", "corpus"),
        ("queries.jsonl", "corpus"),
        ("words.jsonl", "references/evaluation evaluate report"),
        ("model/tokenizer.json", f"corpus backbone {_MODEL}"),
        ("model/model.safetensors", f"backbone {_MODEL}"),
        ("encoder/model.safetensors", "retrieve/embeddings"),
        ("classifier/config.json", "discriminator"),
    ],
)
def test_every_file_counts_by_its_content_for_these_units_and_no_other(tmp_path, file, names):
    config = _config(tmp_path)
    before = _decided(config, tmp_path)
    (tmp_path / file).write_text("others")
    assert _changed(before, _decided(config, tmp_path)) == _named(before, names)
    # The same content under another name is the same.
    moved = tmp_path / "moved"
    values = str(to_json(config)).replace(str(tmp_path), str(moved))
    (tmp_path / "all").mkdir()
    for path in list(tmp_path.iterdir()):
        if path.name != "all":
            path.rename(tmp_path / "all" / path.name)
    (tmp_path / "all").rename(moved)
    again = _decided(config_from_json(ast.literal_eval(values)), moved)
    assert _changed(before, again) - {"evaluate"} == _named(before, names) - {"evaluate"}


def test_training_reads_rows_and_model_alone_and_queries_answer_for_themselves(tmp_path):
    reads = {name: unit[1] for name, unit in _decided(_config(tmp_path), tmp_path).items()}
    assert reads["finetune"] == ("corpus/train.jsonl", "corpus/tokenizer")
    assert reads["sketch"] == (*reads["finetune"], "finetune/adapter")
    for name in ("references/retrieval", "retrieve/queries"):
        assert "corpus/retrieval.jsonl" in reads[name]
    for name in ("unlearn/exact-ga_gdr", "generate/exact-ga_gdr"):
        assert not any("retrieval" in path for path in reads[name])


def test_a_corpus_that_later_stages_cannot_take_replaces_nothing(tmp_path, capsys):
    """A refused --update leaves the corpus, and what was made from it, as they were."""
    small = {
        "num_train": 40,
        "num_targets": 8,
        "num_backbone": 60,
        "num_retrieval": 2,
        "num_validation": 2,
        "num_test": 2,
        "vocab_size": 300,
        "max_len": 256,
        "template": "brief",
    }
    values = to_json(Config())
    values["corpus"] |= small
    values["references"]["max_new_tokens"] = 16
    run(config_from_json(values), tmp_path, stages=("corpus",))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    values["corpus"]["num_train"] = 44
    values["retrieve"] |= {"num_forget": 40, "num_retain": 20}
    capsys.readouterr()
    with pytest.raises(
        ValueError, match="--retrieve.num_forget and --retrieve.num_retain must be at most 44"
    ):
        run(config_from_json(values), tmp_path, stages=("corpus", "retrieve"))
    assert "will be made again: corpus" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
