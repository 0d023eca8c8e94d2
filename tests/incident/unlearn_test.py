"""`raslik unlearn`: the command that was stopped goes on, and what is a user's own stays."""

import json

import pytest

from raslik_jax.base import files
from raslik_jax.base.settings import SettingsError, replaced
from raslik_jax.config import Config, to_json
from raslik_jax.data.examples import make_example, write_examples
from raslik_jax.data.read import sources
from raslik_jax.incident import configuring, exporting, making, unlearn
from raslik_jax.report import rows as rows_lib
from raslik_jax.run import artifacts, manifests
from raslik_jax.run.plan import plan_units
from raslik_jax.run.workspace import Workspace


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A traced run whose model costs nothing; what is made of it, and where it is stopped."""
    root, train = tmp_path / "incident", tmp_path / "train.jsonl"
    (root / "retrieve" / "raslik").mkdir(parents=True)
    train.write_text("".join(f'{{"instruction": "q{n}", "output": "a"}}\n' for n in range(3)))
    rows = [make_example(f"q{n}", "", "a")._replace(place=n + 1) for n in range(3)]
    for name, row in (("forget", rows[1]), ("retain", rows[2])):
        write_examples(root / "retrieve" / "raslik" / f"{name}.jsonl", [row])
    files.write_json(root / "retrieve" / "raslik" / "summary.json", {})
    (root / "corpus").mkdir()
    write_examples(root / "corpus" / "train.jsonl", rows)
    manifest = {"format": manifests.FORMAT, "key": "", "settings": {}, "reads": {}, "seconds": 0}
    own = {"corpus.dataset": "records", "retrieve.strategies": ("raslik",)}
    own |= {"unlearn.algorithms": ("ga_gdr",), "retrieve.held_out": 0.0, "evaluate.traced": False}
    own |= {"corpus.records.train_file": str(train), "corpus.records.queries_file": str(train)}
    config = replaced(Config(), own)
    (unit,) = (one for one in plan_units(config, Workspace(root, config)) if one.name == "corpus")
    manifest |= {"files": {what: files.hash_file(path) for what, path in unit.files.items()}}
    files.write_json(root / "corpus" / "manifest.json", manifest | {"outputs": {}})
    files.write_json(root / "config.json", to_json(config))
    made = []

    def make(*args, stages, **how):
        made.append(stages)
        if made[-1] == ("report",) and len(made) == 2:
            raise KeyboardInterrupt

    def export_model(root, of, out, **how):
        out.mkdir()
        (out / "README.md").write_text("the card")
        return out

    monkeypatch.setattr(unlearn, "make_config", lambda options: replaced(Config(), own))
    monkeypatch.setattr(making, "make", make)
    monkeypatch.setattr(exporting, "export_model", export_model)
    monkeypatch.setattr(rows_lib, "write_rows", lambda folder, *args: folder.mkdir())
    return root, made


@pytest.mark.parametrize("is_named", [True, False])
def test_the_command_that_was_stopped_in_the_report_goes_on(work, tmp_path, is_named):
    root, made = work
    cleaned = tmp_path / "left.jsonl" if is_named else root / "cleaned_train.jsonl"
    given = {"run": str(root), "out": str(tmp_path / "clean")}
    given |= {"cleaned_train_file": str(cleaned)} if is_named else {}
    with pytest.raises(KeyboardInterrupt):
        unlearn.unlearn(**given)
    for _ in range(2):
        left = unlearn.unlearn(**given)
    assert made[1] == made[-1] == ("report",) and len(made) == 6
    assert (tmp_path / "clean" / "README.md").read_text() == "the card"
    assert [line[17:19] for line in cleaned.read_text().splitlines()] == ["q0", "q2"]
    assert f"1 rows that were found, 2 left: {cleaned}" in str(left)
    cleaned.write_text("mine")
    with pytest.raises(ValueError, match=f"must name a new file, .*{cleaned.name}' exists"):
        unlearn.unlearn(**given)
    cleaned.unlink()
    (tmp_path / "clean" / "README.md").write_text("mine")
    with pytest.raises(ValueError, match="clean' must be a new or empty directory"):
        unlearn.unlearn(**given)
    assert len(made) == 6


def test_a_row_that_is_named_but_too_long_to_be_unlearned_is_not_in_the_cleaned_file(work):
    root = work[0]
    named = {"named": [artifacts.TRAIN.read(root)[0].example_id]}
    (root / "retrieve" / "raslik" / "summary.json").write_text(json.dumps(named))
    cleaned = root / "cleaned_train.jsonl"
    unlearn._clean(unlearn.make_config(None), root, "raslik", cleaned)
    assert [line[17:19] for line in cleaned.read_text().splitlines()] == ["q2"]


def test_a_training_file_that_is_gone_loses_no_rows_of_the_others(work, tmp_path):
    path = work[0] / "corpus" / "manifest.json"
    manifest = files.read_json(path)
    unlearn._check_unchanged(unlearn.make_config(None), work[0])
    manifest["files"] |= {"train_file/more.jsonl": "0" * 64}
    files.write_json(path, manifest)
    with pytest.raises(
        ValueError, match="train_file/more.jsonl' must be unchanged since the trace"
    ):
        unlearn.unlearn(run=str(work[0]), out=str(tmp_path / "clean"))
    assert work[1] == []


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_training_file_that_changed_loses_no_wrong_rows(work, tmp_path, monkeypatch, when):
    train, made = tmp_path / "train.jsonl", work[1]

    def change(*args, **how):
        made.append("")
        train.write_text('{"instruction": "new", "output": "a"}\n' + train.read_text())

    if when == "before":
        change()
        made.clear()
    else:
        monkeypatch.setattr(making, "make", change)
    with pytest.raises(
        ValueError, match="train.jsonl' must be unchanged since the trace, it has chang"
    ):
        unlearn.unlearn(run=str(work[0]), out=str(tmp_path / "clean"))
    assert len(made) == (when == "while")
    assert not (work[0] / "cleaned_train.jsonl").exists()


def test_a_hub_dataset_that_changed_loses_no_wrong_rows(work, tmp_path, monkeypatch):
    rows = [{"id": f"{n}", "instruction": f"q{n}", "output": "a"} for n in range(3)]
    monkeypatch.setattr(sources, "_hub_rows", lambda source: iter(rows))
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"instruction": "q", "output": "a", "split": "retrieval"}\n')
    source = {"corpus.records.train_file": "hub:me/rows", "corpus.records.queries_file": str(asked)}
    config = replaced(unlearn.make_config(None), source)
    monkeypatch.setattr(unlearn, "make_config", lambda options: config)
    read = config.corpus.load(seed=0).train
    artifacts.TRAIN.write(work[0] / "corpus", read)
    manifest = files.read_json(work[0] / "corpus" / "manifest.json")
    (unit,) = (
        one for one in plan_units(config, Workspace(work[0], config)) if one.name == "corpus"
    )
    manifest["files"] = {what: files.hash_file(path) for what, path in unit.files.items()}
    files.write_json(work[0] / "corpus" / "manifest.json", manifest)
    unlearn._check_unchanged(config, work[0])
    rows[1]["instruction"] = "new"  # under the same id
    with pytest.raises(ValueError, match="hub:me/rows must have the rows of the trace"):
        unlearn.unlearn(run=str(work[0]), out=str(tmp_path / "clean"))
    assert work[1] == []


def test_a_run_that_was_copied_or_moved_asks_what_it_has_traced(work):
    first, query = work[0].with_name("first") / "queries.jsonl", work[0] / "queries.jsonl"
    first.parent.mkdir()
    query.write_text("of both")

    def queries_file(of):
        recorded = {"corpus": {"dataset": "records", "records": {"queries_file": str(of)}}}
        return configuring.with_own_query(recorded, work[0])["corpus"]["records"]["queries_file"]

    assert queries_file(first) == str(query)  # it was moved
    first.write_text("of another answer, by now")
    assert queries_file(first) == str(query)
    query.write_text("not what the corpus was made of")
    assert queries_file(first) == str(query)  # it is refused, as in the folder where it was made
    assert queries_file(work[0] / "mine.jsonl") == str(work[0] / "mine.jsonl")


def test_the_models_folder_holds_no_training_file(tmp_path):
    inside = f"{tmp_path}/clean/../clean/left.jsonl"
    with pytest.raises(SettingsError, match="--cleaned_train_file must be outside --out"):
        unlearn.UnlearnOptions(run="x", out=f"{tmp_path}/clean", cleaned_train_file=inside)
