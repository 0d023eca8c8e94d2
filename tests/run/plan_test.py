"""What decides a unit's result: a setting or an input file changes these units and no other."""

import ast
import pathlib
from typing import Any

import pytest

from raslik_jax.base.settings import leaves, replaced
from raslik_jax.config import Config, CorpusConfig, RetrieveConfig, config_from_json, to_json
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.report import writing
from raslik_jax.retrieve.strategies import STRATEGIES, Strategy
from raslik_jax.run.artifacts import TEMPLATE, TOKENIZER
from raslik_jax.run.manifests import Hashes
from raslik_jax.run.plan import plan_units, run
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages.scores import SCORES
from raslik_jax.run.workspace import Workspace


def _config(root: pathlib.Path) -> Config:
    """A run of own rows on own checkpoints, with every optional unit."""
    (root / "model").mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (root / "model" / file).write_text(file)
    for name in ("train", "queries", "words"):
        (root / f"{name}.jsonl").write_text(name)
    values = to_json(Config())
    values["corpus"] |= {
        "dataset": "records",
        "records": {
            "train_file": str(root / "train.jsonl"),
            "queries_file": str(root / "queries.jsonl"),
        },
    }
    values["backbone"]["checkpoint"] = str(root / "model")
    values["retrieve"]["strategies"] = ["raslik_f", "raslik"]
    values["unlearn"]["algorithms"] = ["ga_gdr"]
    values["evaluate"]["marker_words"] = str(root / "words.jsonl")
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
        for unit in plan_units(config, Workspace(root / "run", config), more=writing.UNITS)
    }


def test_a_model_is_its_files_at_the_top_and_a_dataset_all_of_them(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "a.safetensors").write_text("a")
    empty = Hashes().of_content(tmp_path)
    (tmp_path / "runs" / "b.json").write_text("b")
    whole = Hashes().of_content(tmp_path)
    assert whole != empty
    (tmp_path / "config.json").write_text("{}")
    model = Hashes().of_content(tmp_path)
    (tmp_path / "runs" / "b.json").write_text("c")
    assert Hashes().of_content(tmp_path) == model
    (tmp_path / "a.safetensors").write_text("b")
    assert Hashes().of_content(tmp_path) != model


def _changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


# Names of units below stand for all that begin so. Every setting changes "evaluate" too, whose
# metrics carry all settings.
_MODEL = (
    "finetune references/retrieval references/evaluation references/perplexity sketch "
    "retrieve/queries unlearn/ generate/"
)
_GRADIENTS = "sketch retrieve/queries"
_LIKELIHOOD = "references/perplexity generate/perplexity"
# By setting and another value of it: the units that it changes.
_DECIDES = {
    ("corpus.data_dir", "x"): "",
    ("corpus.vocab_size", 300): "corpus",
    ("corpus.max_len", 256): f"corpus retrieve/sizes {_MODEL}",
    ("backbone.dtype", "bfloat16"): _MODEL,
    ("backbone.revision", "main"): f"corpus {_MODEL}",
    ("finetune.checkpoint_steps", 5): "",
    ("finetune.epochs", 2): "finetune",
    ("finetune.lora_rank", 2): _MODEL,
    ("references.max_new_tokens", 64): "references/retrieval references/evaluation generate/raslik",
    ("references.query_split", "validation"): "references/evaluation references/perplexity "
    "generate/ report",
    ("sketch.loss", "next_token"): _GRADIENTS,
    ("sketch.batch_tokens", 64): f"{_GRADIENTS} {_LIKELIHOOD} references/evaluation generate/",
    ("sketch.size", 64): "sketch retrieve/queries",
    ("sketch.dtype", "bfloat16"): "sketch",
    ("sketch.query_output", "own"): "references/retrieval retrieve/queries retrieve/influence "
    f"retrieve/raslik {_LIKELIHOOD}",
    ("retrieve.center", False): "retrieve/influence",
    ("retrieve.aggregate", "common"): "retrieve/influence",
    ("retrieve.num_forget", 3): "retrieve/sizes",
    ("unlearn.ga_gdr.learning_rate", 1.0): "unlearn/",
    ("unlearn.retain_weight", 2.0): "unlearn/",
    ("unlearn.epochs", 2): "unlearn/ generate/",
    ("unlearn.probe.steps", 5): "unlearn/ evaluate report",
    ("unlearn.probe.rows", 5): "",
    ("retrieve.held_out", 0.5): "retrieve/sizes references/evaluation references/perplexity "
    "generate/ report",
    ("evaluate.bootstrap_resamples", 100): "",
    ("evaluate.perplexity_examples", 5): _LIKELIHOOD,
}
# What the metrics alone are taken with, what a run by other settings reads, and what decides which
# units there are.
_ELSEWHERE = (
    "name backbone. unlearn.choice "
    "evaluate.bootstrap_resamples evaluate.non_sf retrieve.strategies "
    "unlearn.algorithms evaluate.traced retrieve.null_prompts "
    "retrieve.token_rows retrieve.wished evaluate.robustness"
).split()


def _named(units: dict[str, Any], names: str) -> set[str]:
    return {unit for unit in units for name in names.split() if f"{unit}$".startswith(name)}


def test_unrelated_prompts_are_of_the_index_and_what_they_say_of_the_queries(tmp_path):
    config = _config(tmp_path)
    null = replaced(config, {"retrieve.null_prompts": 9})
    before, after = _decided(config, tmp_path), _decided(null, tmp_path)
    assert after.keys() - before.keys() == {"retrieve/null", "retrieve/chance"}
    assert _changed(before, after) == {"retrieve/null", "retrieve/chance", "evaluate", "report"}
    shown = _decided(replaced(config, {"retrieve.token_rows": 9}), tmp_path)
    assert _changed(before, shown) == {"retrieve/tokens", "evaluate", "report"}
    # Another answer is traced with the same scores of unrelated prompts.
    other = _decided(replaced(null, {"sketch.query_output": "own"}), tmp_path)
    assert "retrieve/null" not in _changed(after, other)
    assert "retrieve/chance" in _changed(after, other)


def test_a_setting_changes_these_units_and_no_other(tmp_path):
    config = _config(tmp_path)
    before = _decided(config, tmp_path)
    found = {
        case: _changed(before, _decided(replaced(config, dict([case])), tmp_path))
        for case in _DECIDES
    }
    expected = {case: _named(before, names) | {"evaluate"} for case, names in _DECIDES.items()}
    assert {k: v for k, v in found.items() if v != expected[k]} == {}


def test_what_renders_text_reads_the_settled_template(tmp_path):
    """Rows decide what auto means, so a query's sketch may change with them."""
    reads = {name: unit[1] for name, unit in _decided(_config(tmp_path), tmp_path).items()}
    rendering = [name for name, files in reads.items() if TOKENIZER.path in files]
    assert {"retrieve/queries", "references/evaluation", "sketch"} < {*rendering}
    assert all(TEMPLATE.path in reads[name] for name in rendering)


def test_sizes_that_no_strategy_reads_are_not_those_of_one_that_does(tmp_path):
    config = replaced(_config(tmp_path), {"retrieve.num_forget": 20, "retrieve.select": "count"})
    given, both = (
        _decided(replaced(config, {"retrieve.strategies": names}), tmp_path)
        for names in (("given",), ("given", "raslik"))
    )
    assert "retrieve/sizes" in _changed(given, both)


def test_a_template_counts_by_its_name_whatever_folders_are_called_so(tmp_path, monkeypatch):
    found = {name: Config(corpus=CorpusConfig(template=name)) for name in ("brief", "plain")}
    for name in found:
        (tmp_path / name).mkdir()
    before = {name: _decided(config, tmp_path) for name, config in found.items()}
    monkeypatch.chdir(tmp_path)
    after = {name: _decided(config, tmp_path) for name, config in found.items()}
    assert after == before
    assert "corpus" in _changed(after["brief"], after["plain"])
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    config = Config(corpus=CorpusConfig(template="mine.jinja"))
    assert "corpus.template" in plan_units(config, Workspace(tmp_path, config))[0].files


def test_asking_the_traced_prompts_adds_units_and_makes_no_model_again(tmp_path):
    config = _config(tmp_path)
    before = _decided(config, tmp_path)
    asked = _decided(replaced(config, {"evaluate.traced": True}), tmp_path)
    variants = [f"generate/traced-{name}-ga_gdr" for name in ("raslik_f", "raslik")]
    assert asked.keys() - before.keys() == {"retrieve/traced", *variants}
    assert _changed(before, asked) == {"retrieve/traced", *variants, "evaluate", "report"}


def test_measures_of_robustness_add_units_of_their_own_settings_and_make_no_model_again(tmp_path):
    config = _config(tmp_path)
    before = _decided(config, tmp_path)
    asked = replaced(config, {"evaluate.robustness": [*ROBUSTNESS]})
    after, places = _decided(asked, tmp_path), ("raslik_f", "raslik")
    units = {
        name: {
            f"generate/robustness-{name}-{place}{of}" for place in places for of in ("", "-ga_gdr")
        }
        for name in ROBUSTNESS
    }
    assert after.keys() - before.keys() == set().union(*units.values())
    assert _changed(before, after) == set().union(*units.values(), {"evaluate", "report"})
    other = _decided(replaced(asked, {"evaluate.relearn.steps": 3}), tmp_path)
    assert _changed(after, other) == units["relearn"] | {"evaluate"}
    fewer = _decided(replaced(asked, {"evaluate.robustness_rows": 3}), tmp_path)
    assert _changed(after, fewer) == set().union(*units.values(), {"evaluate"})


def test_every_setting_of_what_is_chosen_decides_some_unit(tmp_path):
    config = replaced(_config(tmp_path), {"unlearn.probe.steps": 1})
    units = plan_units(config, Workspace(tmp_path, config), more=writing.UNITS)
    named = {name for unit in units for name in (*unit.settings, *unit.files)}
    idle = {
        leaf.name
        for leaf in leaves(config)
        if leaf.metadata["decides"]
        and leaf.name not in named
        and not leaf.name.startswith(tuple(_ELSEWHERE))
        and (not leaf.member or _is_chosen(config, leaf.name))
    }
    assert idle == set()


def _is_chosen(config: Config, name: str) -> bool:
    stage, member, _ = name.split(".")
    return member in getattr(config, stage).chosen()


@pytest.mark.parametrize(
    ("strategies", "select", "made"),
    [
        (("random", "bm25"), "count", ""),
        (("random", "bm25"), "gap", "sketch retrieve/queries retrieve/influence"),
        (("raslik_f",), "count", "sketch retrieve/queries retrieve/influence"),
    ],
)
def test_what_the_chosen_strategies_need_is_computed_and_no_more(strategies, select, made):
    config = Config(retrieve=RetrieveConfig(strategies=strategies, select=select))
    units = [unit.name for unit in plan_units(config, Workspace(pathlib.Path("/none"), config))]
    scores = ("sketch", "retrieve/queries", *(f"retrieve/{need}" for need in SCORES))
    assert [name for name in units if name in scores] == made.split()
    for unit in plan_units(config, Workspace(pathlib.Path("/none"), config)):
        assert all(read.startswith(tuple(units)) for read in unit.reads)


def test_a_strategy_is_not_called_as_scores_are_whose_folder_its_sets_would_replace():
    assert not {*SCORES} & {*STRATEGIES}


def test_scores_of_a_strategys_own_take_a_row_of_the_table(monkeypatch):
    unit = Recipe("retrieve/lengths", lambda workspace, folder: None, "{rows}")
    monkeypatch.setitem(SCORES, "lengths", (unit,))
    monkeypatch.setitem(
        STRATEGIES, "short", Strategy("Short", STRATEGIES["raslik"].score, ("lengths",))
    )
    config = Config(retrieve=RetrieveConfig(strategies=("short",)))
    units = {u.name: u for u in plan_units(config, Workspace(pathlib.Path("/none"), config))}
    assert units["retrieve/lengths"].reads == ("corpus/train.jsonl", "corpus/train.npz")
    assert "retrieve/lengths" in units["retrieve/short"].reads
    assert "sketch" not in units


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("train.jsonl", "corpus"),
        ("queries.jsonl", "corpus"),
        ("words.jsonl", "references/evaluation evaluate report"),
        ("model/tokenizer.json", f"corpus {_MODEL}"),
        ("model/model.safetensors", _MODEL),
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


def test_an_adapter_of_elsewhere_counts_by_its_weights_and_not_by_how_one_would_be_trained(
    tmp_path,
):
    config = _config(tmp_path)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt"):
        (folder / name).write_text(name)
    config = replaced(config, {"backbone.adapter": str(folder)})
    before = _decided(config, tmp_path)
    assert before["finetune"][1] == (TOKENIZER.path, TEMPLATE.path)
    for name in ("epochs", "lora_rank"):
        with pytest.raises(ValueError, match=f"--finetune.{name} has no effect with --backbone.ad"):
            replaced(config, {f"finetune.{name}": 5})
    for name, value in (("finetune.epochs", 0), ("seed", 5), ("backbone.adapter_revision", "v2")):
        other = _decided(replaced(config, {name: value}), tmp_path)
        assert ("finetune" in _changed(before, other)) == (name != "finetune.epochs")
    with pytest.raises(ValueError, match="--backbone.adapter_revision needs an --backbone.adapter"):
        replaced(config, {"backbone.adapter": "", "backbone.adapter_revision": "v2"})
    # Only a model that is given whole has a base elsewhere.
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "model.safetensors").write_text("before")
    based = {"backbone.adapter": "", "finetune.epochs": 0}
    based = replaced(config, based | {"references.base": str(tmp_path / "before")})
    compared = _decided(based, tmp_path)
    (tmp_path / "before" / "model.safetensors").write_text("another")
    names = "references/evaluation references/perplexity generate/perplexity"
    assert _changed(compared, _decided(based, tmp_path)) == _named(compared, names)
    # Without one, a fresh adapter of the shape asked for is made.
    whole = replaced(config, {"backbone.adapter": "", "finetune.epochs": 0})
    before_whole = _decided(whole, tmp_path)
    for name, is_read in (("lora_rank", True), ("batch_size", False)):
        other = _decided(replaced(whole, {f"finetune.{name}": 5}), tmp_path)
        assert ("finetune" in _changed(before_whole, other)) == is_read
    (folder / "optimizer.pt").write_text("another")
    assert _changed(before, _decided(config, tmp_path)) == set()
    (folder / "adapter_model.safetensors").write_text("another")
    assert _changed(before, _decided(config, tmp_path)) == _named(before, _MODEL)
    # Its own tokenizer decides the rows; what follows reads what the corpus keeps of it.
    for name in ("chat_template.jinja", "tokenizer.json", "added_tokens.json"):
        before = _decided(config, tmp_path)
        (folder / name).write_text(name)
        assert _changed(before, _decided(config, tmp_path)) == _named(before, "corpus")


def test_training_reads_rows_and_model_alone_and_queries_answer_for_themselves(tmp_path):
    reads = {name: unit[1] for name, unit in _decided(_config(tmp_path), tmp_path).items()}
    rows = "corpus/train.jsonl", "corpus/train.npz"
    assert reads["finetune"] == (*rows, TOKENIZER.path, TEMPLATE.path)
    assert reads["sketch"] == (*reads["finetune"], "finetune/adapter")
    for name in ("references/retrieval", "retrieve/queries"):
        assert "corpus/retrieval.jsonl" in reads[name]
    for name in ("unlearn/raslik-ga_gdr", "generate/raslik-ga_gdr"):
        assert not any("retrieval" in path for path in reads[name])


def test_a_corpus_that_later_stages_cannot_take_replaces_nothing(tmp_path, capsys):
    """A refused --update leaves the corpus, and what was made from it, as they were."""
    small = {"num_train": 40, "num_targets": 8, "num_backbone": 60, "num_retrieval": 2}
    small |= {"num_validation": 2, "num_test": 2, "vocab_size": 300, "max_len": 256}
    small |= {"template": "brief"}
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
