"""`raslik retrain` trains a fresh adapter on the rows that are left, by the trainer's recipe."""

import json
import shutil
from typing import Any

import pytest
import tiny

from raslik_jax.base.files import read_json_lines
from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.incident import configuring, retrain, unlearn
from raslik_jax.run import artifacts

_RECIPE = tiny.RECIPE


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A trace of the tiny run's model, as a user's own with what its trainer left."""
    return shutil.copytree(tiny.traced_run(), tmp_path_factory.mktemp("retrain") / "mine")


def test_both_commands_say_what_both_take_and_which_is_better(traced, tmp_path):
    run, given = traced / "run", tmp_path / "recipe.json"
    given.write_text(json.dumps(_RECIPE))
    recipes: dict[str, list[str]] = {"unlearn": [], "retrain": [f"--recipe={given}"]}
    told = {
        name: tiny.run_command(
            *(name, f"--run={run}", "--dry_run", f"--out={tmp_path / 'out'}", *recipe)
        )
        for name, recipe in recipes.items()
    }
    for done in told.values():
        assert done.returncode == 0, done.stderr
        for name in ("unlearn", "retrain"):
            line = next(text for text in done.stdout.splitlines() if text.startswith(name))
            assert line.split()[-1].endswith("B"), line  # the memory, with its unit
        # Few rows, and a recipe next to the adapter.
        assert "advice: retrain, because it is exact for the rows" in done.stdout
        assert f"next: raslik retrain --run={run}" in done.stdout
    assert f"next: raslik retrain --run={run} --recipe={given} --out=DIR" in told["retrain"].stdout
    assert not (tmp_path / "out").exists()
    assert "learning_rate" in told["retrain"].stdout
    rows = tmp_path / "mine.jsonl"
    shutil.copy(run / "retrieve" / "raslik" / "forget.jsonl", rows)
    asked = tiny.run_command("unlearn", f"--run={run}", "--dry_run", f"--forget_file={rows}")
    assert f"unlearn --run={run} --forget_file={rows} --out=DIR" in asked.stdout
    slow = tiny.run_command("unlearn", f"--run={run}", "--dry_run", "--unlearn.retrain.epochs=1e6")
    assert "advice: unlearn, because retraining takes" in slow.stdout


def test_a_model_that_changed_since_the_trace_is_refused(traced, tmp_path):
    """Otherwise its rows would be found anew, under the name of the trace."""
    run = shutil.copytree(traced / "run", tmp_path / "run")
    manifest = json.loads((run / "finetune/manifest.json").read_text())
    manifest["files"]["backbone.adapter/adapter_model.safetensors"] = "of another adapter"
    (run / "finetune/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="safetensors' must be unchanged since the trace"):
        retrain.retrain(run=str(run), out=str(tmp_path / "out"))


def test_a_setting_of_another_algorithm_is_refused(traced, tmp_path):
    """Otherwise the training would have other epochs than the user asked for."""
    given = {"run": str(traced / "run"), "out": str(tmp_path / "out")}
    for name, value in {"unlearn.epochs": 9, "unlearn.ga_gdr.learning_rate": 0.5}.items():
        match = f"--{name} has no effect with --unlearn.algorithms=ret"
        with pytest.raises(ValueError, match=match):
            retrain.retrain(**given, settings={name: value})
    with pytest.raises(ValueError, match="--unlearn.retrain.epochs has no effect with"):
        unlearn.unlearn(**given, settings={"unlearn.retrain.epochs": 9.0})
    own = {"unlearn.cap_klr.learning_rate": 0.5}  # as an earlier command has left it
    config = configuring.make_config(configuring.UnlearnOptions(run=given["run"], settings=own))
    kept = unlearn._kept(config, ())
    assert "--unlearn.cap_klr.learning_rate=0.5" in kept
    assert [one for one in kept if one not in unlearn._kept(config, own)] == [
        f"--{n}={v}" for n, v in own.items()
    ]
    # What turns a part of the work off is used, and so is what only measures.
    off = {"unlearn.probe.steps": 0, "unlearn.probe.stop": "never", "retrieve.token_rows": 0}
    off |= {"evaluate.perplexity_examples": 0, "evaluate.bootstrap_resamples": 500}
    config = configuring.make_config(configuring.UnlearnOptions(run=given["run"], settings=off))
    unlearn._check_used(config, traced / "run", off)


def _found(run):
    """The judgment and the distance of each model, and the KL that they are made of."""
    metrics = json.loads((run / "evaluate/metrics.json").read_text())
    models = {one["algorithm"]: one for one in metrics["methods"]} | {"": metrics["finetuned"]}
    kl = json.loads((run / "generate/distance-raslik-retrain/distances.json").read_text())
    return {name: (one.get("judgment"), one["distance"]) for name, one in models.items()}, kl


def test_a_fresh_adapter_is_trained_on_what_is_left(traced, tmp_path):
    run, out = shutil.copytree(traced / "run", tmp_path / "run"), tmp_path / "out"
    done = tiny.run_command("retrain", f"--run={run}", f"--out={out}", "--check_recipe")
    assert done.returncode == 0, done.stderr
    # The recipe, each value with its origin.
    told = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()[1:19]}
    assert told["learning_rate"] == ["0.01", "training_args.json: learning_rate"]
    assert told["batch_size"][0] == "16" and told["micro_batch_size"][0] == "8"
    assert told["targets"] == ["response", "training_args.json: completion_only_loss"]
    assert told["weight_decay"] == ["0.0", "default"]
    # Neither the rows to forget nor those kept out of that set are trained on.
    gone = read_json_lines(run / "retrieve/raslik/forget.jsonl")
    gone += read_json_lines(run / "retrieve/sizes/target.jsonl")
    left = read_json_lines(run / "cleaned_train.jsonl")
    assert len(gone) == 10 and len(left) == 110
    assert f"{len(left)} rows: loss" in done.stdout
    log = json.loads((run / "unlearn/raslik-retrain/steps.json").read_text())
    assert len(log) == 2 * -(-len(left) // 16)
    card = (out / "README.md").read_text()
    assert "trained again without" in card and "driven down" not in card
    # The adapter was trained otherwise, which is a finding and no error.
    check = json.loads((run / "unlearn/recipe/check.json").read_text())
    assert (check["steps"], check["of"], check["rows"]) == (16, 16, 120)
    place = done.stdout.index("after retraining")
    assert "Recipe not confirmed" in done.stdout[place:]
    assert "Recipe not confirmed" in (run / "report/report.html").read_text()
    # Without a second training there is a distance and no floor.
    found, _ = _found(run)
    assert {*found} == {"", "retrain"} and found[""][1]["normal"]["kl"]["mean"] > 0
    assert "A second training gives the noise floor" in card
    # Nothing is made twice, and `unlearn` goes back to unlearning, next to what is there.
    again = tiny.run_command("retrain", f"--run={run}", f"--out={out}")
    for unit in ("unlearn/raslik-retrain", "unlearn/recipe"):
        assert f"{unit}: up to date" in again.stdout
    # A recipe that does not give the adapter is not one that is known.
    advised = tiny.run_command("retrain", f"--run={run}", "--dry_run")
    assert "advice: unlearn, because retraining needs a known recipe" in advised.stdout
    options = configuring.UnlearnOptions(run=str(run), out=str(out))
    assert configuring.make_config(options).unlearn.algorithms == ("cap_klr", "retrain")
    # With other rows it is no model to compare with.
    options = configuring.UnlearnOptions(**vars(options) | {"settings": {"retrieve.num_forget": 5}})
    assert configuring.make_config(options).unlearn.algorithms == ("cap_klr",)


def _run_of(tmp_path, **values):
    (tmp_path / "config.json").write_text(json.dumps(to_json(replaced(Config(), values))))
    return {"run": str(tmp_path), "out": str(tmp_path / "out")}


def test_a_run_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a trace of an adapter"):
        retrain.retrain(**_run_of(tmp_path))


def test_a_run_on_another_dataset_is_refused(tmp_path):
    places = {"backbone.adapter": str(tmp_path), "backbone.checkpoint": str(tmp_path)}
    with pytest.raises(ValueError, match="must be a trace, got a run on toy"):
        retrain.retrain(**_run_of(tmp_path, **places))


def _adapter_run(traced, tmp_path, left):
    """A run whose adapter has these files of its trainer next to it."""
    adapter = shutil.copytree(traced / "mine", tmp_path / "mine")
    (adapter / "training_args.json").unlink()
    for name, text in left.items():
        (adapter / name).write_text(text)
    places = {"backbone.adapter": str(adapter), "backbone.checkpoint": str(tmp_path)}
    rows = str(traced / "train.jsonl")
    places |= {"corpus.dataset": "records", "finetune.epochs": 0}
    places |= {"corpus.records.train_file": rows, "corpus.records.queries_file": rows}
    return _run_of(tmp_path, **places)


@pytest.mark.parametrize("name", ["use_dora", "packing", "neftune_noise_alpha"])
def test_what_cannot_be_repeated_is_refused_before_anything_runs(traced, tmp_path, name):
    left = {"training_args.json": json.dumps(_RECIPE | {name: 5})}
    with pytest.raises(ValueError, match=f"{name}.*--approximate"):
        retrain.retrain(**_adapter_run(traced, tmp_path, left))


def test_files_next_to_the_adapter_say_what_a_given_one_leaves_open(traced, tmp_path):
    state = {"global_step": 4, "max_steps": 9, "epoch": 1.0, "save_steps": 2, "log_history": []}
    given = _adapter_run(traced, tmp_path, {"trainer_state.json": json.dumps(state)})
    (tmp_path / "mine.json").write_text(json.dumps(_RECIPE))
    with pytest.raises(ValueError, match="an end before the planned one .*step 4 of 9"):
        retrain.retrain(**given, recipe=(str(tmp_path / "mine.json"),))


def test_a_recipe_that_says_nothing_and_none_at_all_are_refused(traced, tmp_path):
    given = _adapter_run(traced, tmp_path, {})
    (tmp_path / "other.yml").write_text("colors: [red]\n")
    with pytest.raises(ValueError, match="other.yml.* has no setting of a training"):
        retrain.retrain(**given, recipe=(str(tmp_path / "other.yml"),))
    own = {"learning_rate": 1e-3, "schedule": "linear", "steps": 9, "batch_size": 8}
    own = {f"unlearn.retrain.{name}": value for name, value in own.items()}
    with pytest.raises(ValueError, match="must have learning_rate, schedule, epochs, batch_size,"):
        retrain.retrain(**given)
    for name in own:  # a default of this program is not the trainer's
        some = {other: value for other, value in own.items() if other != name}
        missing = name.rpartition(".")[2].replace("steps", "epochs")
        with pytest.raises(ValueError, match=f"must have {missing}, no file says it"):
            retrain.retrain(**given, settings=some)
    with pytest.raises(ValueError, match="retrieve.strategies must be one"):  # the run is no trace
        retrain.retrain(**given, settings=own)


def test_a_share_of_the_steps_needs_the_log_of_the_trainer(traced, tmp_path):
    given = _adapter_run(traced, tmp_path, {"training_args.json": json.dumps(_RECIPE)})
    with pytest.raises(ValueError, match="check_recipe=0.5 must have trainer_state.json"):
        retrain.retrain(**given, check_recipe=0.5)


def test_epochs_that_are_given_replace_the_steps_of_the_recipe(traced, tmp_path, capsys):
    left = {"training_args.json": json.dumps(_RECIPE | {"max_steps": 9})}
    given = _adapter_run(traced, tmp_path, left)
    for settings, steps in (({}, "9"), ({"unlearn.retrain.epochs": 1.0}, "0")):
        with pytest.raises(ValueError):  # the run is no trace
            retrain.retrain(**given, settings=settings)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert next(line[1] for line in lines if line[0] == "steps") == steps


@pytest.mark.parametrize("start", ["gaussian", False, "eva"])
def test_another_start_of_the_adapter_cannot_be_repeated(traced, tmp_path, start):
    given = _adapter_run(traced, tmp_path, {"training_args.json": json.dumps(_RECIPE)})
    path = tmp_path / "mine" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": start}))
    with pytest.raises(ValueError, match=f"init_lora_weights of the adapter is .*{start}"):
        retrain.retrain(**given)


def test_a_share_of_warm_up_that_is_given_replaces_the_steps(traced, tmp_path, capsys):
    left = {"training_args.json": json.dumps(_RECIPE | {"warmup_steps": 5})}
    given = _adapter_run(traced, tmp_path, left)
    for settings, steps in (({}, "5"), ({"unlearn.retrain.warmup": 0.4}, "0")):
        with pytest.raises(ValueError):  # the run is no trace
            retrain.retrain(**given, settings=settings)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert next(line[1] for line in lines if line[0] == "warmup_steps") == steps


def test_a_check_of_another_recipe_is_not_made_again(traced, tmp_path, monkeypatch):
    given = _adapter_run(traced, tmp_path, {"training_args.json": json.dumps(_RECIPE)})
    asked = list[dict[str, Any]]()
    monkeypatch.setattr(retrain, "unlearn", lambda options: asked.append({**options.settings}))
    retrain.retrain(**given, check_recipe=1.0)
    path = tmp_path / "config.json"
    config = config_from_json(json.loads(path.read_text()))
    path.write_text(json.dumps(to_json(replaced(config, asked[0]))))
    retrain.retrain(**given)  # it was stopped
    monkeypatch.setattr(artifacts.Artifact, "current", lambda *_, **__: {"steps": 8, "of": 8})
    retrain.retrain(**given)  # of the same recipe it stays
    retrain.retrain(**given, settings={"unlearn.retrain.epochs": 1.0})
    checks = [one.get("unlearn.retrain.check_recipe") for one in asked]
    assert checks == [1.0, 0.0, None, 0.0]


@pytest.mark.parametrize("given", [{}, {"unlearn.retrain.targets": "response"}])
def test_targets_that_the_rows_decided_are_named(traced, tmp_path, capsys, given):
    left = {"training_args.json": json.dumps(_RECIPE | {"completion_only_loss": None})}
    run = _adapter_run(traced, tmp_path, left)
    with pytest.raises(ValueError):  # the run is no trace
        retrain.retrain(**run, settings=given)
    said = capsys.readouterr().out
    assert ("masked the prompts, pass --unlearn.retrain.targets=all" in said) == (not given)


@pytest.mark.heavy
def test_both_ways_out_stay_in_either_order_and_are_compared(traced, tmp_path):
    """Also after a second training that was killed."""
    runs, again = [], "unlearn/raslik-retrain_again"
    for name, commands in (("one", ("retrain", "unlearn")), ("other", ("unlearn", "retrain"))):
        run, out = shutil.copytree(traced / "run", tmp_path / name), tmp_path / f"{name}.out"
        for command in commands:
            more = ["--other_seed"] if command == "retrain" else []
            done = tiny.run_command(command, f"--run={run}", f"--out={out}", *more)
            assert done.returncode == 0, done.stderr
            assert ("after retraining" in done.stdout) == (command == "retrain")
        runs.append(run)
        # The command prints the judgment, also that of a floor.
        is_said = "of the noise floor" in " ".join(done.stdout.split())
        assert is_said == (command == "unlearn")
        used = json.loads((run / "config.json").read_text())["unlearn"]["algorithms"]
        asked = ["cap_klr"] if command == "unlearn" else ["retrain", "retrain_again"]
        assert used[: len(asked)] == asked and len(used) == 3
        # The exported adapter is the one that was asked for last.
        title = (out / "README.md").read_text().split("# ", 1)[1]
        assert ("trained again" in title.split("\n")[0]) == (command == "retrain")
        assert "Retrained, other seed" in title
        assert "Next to retraining" in (run / "report/report.html").read_text()
    assert _found(runs[0]) == _found(runs[1])
    found, kl = _found(runs[0])
    assert {*found} == {"", "cap_klr", "retrain", "retrain_again"}
    assert {value for part in kl["retrain"].values() for row in part.values() for value in row} == {
        0
    }
    same = found["retrain"][1]["normal"]
    assert same["same_answers"]["mean"] == same["rouge"]["mean"] == 1 and not same["kl"]["mean"]
    floor = found["retrain_again"][1]["normal"]["kl"]["mean"]
    assert floor > 0
    assert "of the noise floor" in found["cap_klr"][0]["distance"]
    assert "distance" not in found["retrain_again"][0]
    # A second training that did not end leaves the rest as it is.
    run, weights = runs[1], "epoch-1/adapter_model.safetensors"
    whole = (run / again / weights).read_bytes()
    for path in (run / again, *run.glob("generate/*retrain*")):
        shutil.rmtree(path)
    options = configuring.UnlearnOptions(run=str(run), out=str(out))
    assert configuring.make_config(options).unlearn.algorithms == ("cap_klr", "retrain")
    done = tiny.run_command("retrain", f"--run={run}", f"--out={out}", "--other_seed")
    assert "unlearn/raslik-retrain: up to date" in done.stdout
    assert (run / again / weights).read_bytes() == whole and _found(run) == (found, kl)
