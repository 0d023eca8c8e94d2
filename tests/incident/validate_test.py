"""`raslik validate`: retrainings without rows, which go on after a kill and compile twice."""

import functools
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from scipy import stats
from snapshots import refused, said

import raslik_jax
from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, to_json
from raslik_jax.data import batches
from raslik_jax.evaluate import counterfactual
from raslik_jax.incident import configuring
from raslik_jax.report import facts, results, sections, tables
from raslik_jax.run import artifacts, manifests, plan
from raslik_jax.run.stages import finetune
from raslik_jax.run.stages import validate as stage
from raslik_jax.run.workspace import Workspace

_SEEDS, _SUBSETS, _TOP = 2, 8, 12


def _traced(folder):
    """Returns a trace to validate, and another tool's scores of its rows: those of the trace."""
    run = shutil.copytree(tiny.traced_run() / "run", folder / "run")
    shutil.copy(artifacts.INFLUENCE.place(run), folder / "other.npy")
    return {"run": run, "scores": (str(folder / "other.npy"),)}


def _validate(given, **named):
    # Rankings: the trace's, BM25, random rows, the other tool's; and all rows.
    sizes = {"retrainings": 5 * _SEEDS + _SUBSETS, "seeds": _SEEDS, "top": str(_TOP)}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return raslik_jax.validate(**{**sizes, **given, **named})


def _results(run):
    paths = sorted(path for path in (run / "validate").rglob("*.json") if "losses" in path.name)
    paths.append(artifacts.VALIDATION.place(run))
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    given = _traced(tmp_path_factory.mktemp("validate"))
    run, (scores,) = given["run"], given["scores"]
    # The answer that was traced is read in the copy.
    before = configuring.with_own_query(artifacts.CONFIG.read(run), run)
    flags = [f"--run={run}", f"--scores={scores}"]
    flags += [f"--retrainings={5 * _SEEDS + _SUBSETS}", f"--seeds={_SEEDS}", f"--top={_TOP}"]
    done = tiny.run_command("validate", *flags)
    assert done.returncode == 0, done.stderr
    assert "18 retrainings on 120 rows" in done.stdout
    assert artifacts.CONFIG.read(run) == before
    found = artifacts.VALIDATION.read(run)
    return raslik_jax.ValidateResult(workdir=run, found=found, text=done.stdout)


def test_scores_are_judged_by_losses_after_retraining(validated):
    root, found = validated.workdir, validated.found
    (query,) = found["queries"]
    number = found["rows"]

    def losses(name):
        file = root / f"validate/{name}/losses.json"
        return json.loads(file.read_text())[query]

    seeds = [tiny.RECIPE["seed"] + n for n in range(_SEEDS)]
    nll = {
        name: [losses(f"{name}-{_TOP}-{seed}") for seed in seeds] for name in found["qld"]["nll"]
    }
    for name in ("raslik", "bm25_answers", "other"):
        rise_S = np.subtract(nll[name], nll["random"])
        assert found["qld"]["rise"][name]["mean"] == pytest.approx(rise_S.mean())
        rise_S = np.subtract(nll[name], nll["nothing"])
        assert found["qld"]["over_nothing"][name]["mean"] == pytest.approx(rise_S.mean())
    assert found["qld"]["noise"] == pytest.approx(np.std(nll["nothing"], ddof=1))
    assert len({*nll["nothing"], *nll["random"]}) == 4  # other rows, other seeds
    # What another tool says as the trace does is judged alike, to the bit.
    assert nll["other"] == nll["raslik"]
    kept = counterfactual.draw_subsets(number, number=_SUBSETS, share=0.5, group=1, seed=0)
    score_N = artifacts.INFLUENCE.read(root)
    sums = [score_N[rows].sum(dtype=np.float64) for rows in kept]
    np.testing.assert_allclose(found["predicted"]["raslik"], np.array(sums)[:, None], rtol=1e-5)
    said_S = [-losses(f"subset-{n}-{seeds[0]}") for n in range(_SUBSETS)]
    for name in ("raslik", "other"):
        expected = stats.spearmanr(sums, said_S).statistic
        assert found["lds"]["score"][name]["mean"] == pytest.approx(expected)
    assert not [*root.rglob("adapter*.safetensors")][1:]  # but that of the trace


def _is_trained_on(root, name, kept):
    """Returns whether a retraining was left with the training rows that have these ids."""
    ids = [row.example_id for row in artifacts.TRAIN.read(root)]
    manifest = json.loads((root / f"validate/{name}/manifest.json").read_text())
    expected = manifests.content_hash({"rows": [one for one in ids if one in kept]})
    return manifest["settings"]["kept"] == expected


def test_a_retraining_is_without_the_first_rows_of_its_ranking(validated):
    root = validated.workdir
    ids = [row.example_id for row in artifacts.TRAIN.read(root)]
    ranked = stage.rank(plan.open_run(root, "corpus", "finetune", "retrieve/influence"))
    scores = dict.fromkeys(("raslik", "other"), artifacts.INFLUENCE.read(root))
    scores["bm25_answers"] = ranked["bm25_answers"].score_N
    for name, seed in itertools.product(scores, range(_SEEDS)):
        # Equal scores are ordered by id.
        order = sorted(zip((-scores[name]).tolist(), ids, strict=True))
        kept = {one for _, one in order[_TOP:]}
        assert _is_trained_on(root, f"{name}-{_TOP}-{tiny.RECIPE['seed'] + seed}", kept)


def test_a_subset_is_trained_on_the_rows_that_were_drawn(validated):
    root = validated.workdir
    ids = [row.example_id for row in artifacts.TRAIN.read(root)]
    drawn = counterfactual.draw_subsets(len(ids), number=_SUBSETS, share=0.5, group=1, seed=0)
    for number, rows in enumerate(drawn):
        kept = {ids[row] for row in rows}
        assert _is_trained_on(root, f"subset-{number}-{tiny.RECIPE['seed']}", kept)


def test_a_validation_that_was_killed_ends_with_the_same_bytes(validated, tmp_path, monkeypatch):
    shutil.copytree(validated.workdir.parent, tmp_path, dirs_exist_ok=True)
    run, limit, own = tmp_path / "run", [10], batches.epoch_batches
    given = {"run": run, "scores": (str(tmp_path / "other.npy"),)}
    whole = _results(run)
    for name in ("random-12-3", "subset-1-3", "results"):
        shutil.rmtree(run / "validate" / name)

    def until_killed(*args, **how):
        for batch in own(*args, **how):
            limit[0] -= 1
            if limit[0] < 0:  # in the second epoch
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(batches, "epoch_batches", until_killed)
        with pytest.raises(KeyboardInterrupt):
            _validate(given)
    assert (run / ".making/validate/random-12-3/resume/7").is_dir()
    traces, training = [], finetune.training

    @functools.cache
    def counted(workspace, settings, *, num_steps, remat):
        algorithm = training(workspace, settings, num_steps=num_steps, remat=remat)

        def step(*args):
            traces.append(num_steps)
            return algorithm.step(*args)

        return algorithm._replace(step=step)

    monkeypatch.setattr(finetune, "training", counted)
    _validate(given)
    # All rows but 12 of 120, and half of them, for two epochs of 16 rows a step.
    assert traces == [14, 8]
    assert _results(run) == whole
    # More of them add to those that are there.
    _validate(given, retrainings=5 * _SEEDS + _SUBSETS + 1)
    more = _results(run)
    new = "validate/subset-8-3/losses.json", "validate/results/found.json"
    assert {name for name in more if more[name] != whole.get(name)} == {*new}


def test_the_results_for_other_scores_are_not_shown(validated, tmp_path):
    run = shutil.copytree(validated.workdir, tmp_path / "run")
    manifest = run / "retrieve" / "influence" / "manifest.json"
    found = json.loads(manifest.read_text())
    for output in found["outputs"].values():
        output["sha256"] = "of other scores"
    manifest.write_text(json.dumps(found))
    assert artifacts.VALIDATION.current(run) is None


def test_a_moved_run_is_validated_and_its_kept_adapters_stay(validated, tmp_path):
    shutil.copytree(validated.workdir.parent, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    config = json.loads((run / "config.json").read_text())
    config["corpus"]["records"]["queries_file"] = str(tmp_path / "gone" / "queries.jsonl")
    (run / "config.json").write_text(json.dumps(config))
    given = {"run": run, "scores": (str(tmp_path / "other.npy"),)}
    _validate(given, keep=True)
    kept = {path: path.stat().st_mtime_ns for path in run.glob("validate/subset-*/adapter/*")}
    assert len({path.parent for path in kept}) == _SUBSETS
    _validate(given)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_the_table_is_on_the_page(validated):
    found = artifacts.VALIDATION.current(validated.workdir)
    assert tables.render_terminal(results.validation_table(found)) in str(validated)
    run = facts.Facts({}, (), {}, {}, {}, frozenset(), validation=found)
    run = run._replace(metrics={"name": "mine", "seed": 0})
    shown = sections.SECTIONS["validation"].facts([facts.Experiment((run,))])
    assert shown["views"][0]["table"] == results.validation_table(found)
    interval = {"mean": 0.25, "low": -0.125, "high": 0.625}
    qld = {"rise": {"raslik": interval}, "noise": 0.0625}
    qld["over_nothing"] = dict.fromkeys(("raslik", "random"), interval)
    lds = {"score": {"raslik": interval, "random": interval}}
    made_up = {"titles": {"raslik": "RASLIK", "random": "Random"}, "rows": 250, "top": 3}
    made_up |= {"seeds": 3, "subsets": 20, "share": 0.5}
    for part in ({"qld": qld, "lds": lds}, {"qld": qld}, {"lds": lds}):
        said(tables.render_terminal(results.validation_table(made_up | part)))


@pytest.mark.parametrize("retrainings", [9, 11, 12])
def test_too_few_retrainings_are_refused(validated, retrainings):
    named = {"scores": (str(validated.workdir.parent / "other.npy"),), "retrainings": retrainings}
    with refused():
        _validate({"run": validated.workdir, **named})


def test_the_trace_is_ranked_after_rows_were_given(validated):
    """As after `raslik unlearn --forget_file`, whose strategy ranks nothing."""
    workspace = plan.open_run(validated.workdir, "corpus", "finetune", "retrieve/influence")
    traced = stage.rank(workspace)
    config = replaced(workspace.config, {"retrieve.strategies": ("given",)})
    given = stage.rank(Workspace(validated.workdir, config))
    assert [*given] == [*traced] == ["raslik", "bm25_answers", "random"]
    np.testing.assert_array_equal(given["raslik"].score_N, traced["raslik"].score_N)


def test_scores_of_other_rows_are_refused(validated, tmp_path):
    ids = [row.example_id for row in artifacts.TRAIN.read(validated.workdir)]
    texts = {
        "short.jsonl": [{"id": name, "score": 0.5} for name in ids[2:]],
        "wide.jsonl": [{"id": name, "score": [0.5, 0.1]} for name in ids],
        "ragged.jsonl": [{"id": name, "score": [0.5] * (1 + n % 2)} for n, name in enumerate(ids)],
    }
    texts["twice.jsonl"] = [{"id": name, "score": 0.5} for name in (*ids, ids[0])]
    for name, rows in texts.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.save(tmp_path / "few.npy", np.zeros(3))
    np.save(tmp_path / "nan.npy", np.full(len(ids), np.nan))
    np.save(tmp_path / "raslik.npy", np.zeros(len(ids)))
    np.save(tmp_path / "one.npy", np.zeros(()))
    for name in (*texts, "few.npy", "one.npy", "nan.npy", "raslik.npy"):
        with refused():
            _validate({"run": validated.workdir, "scores": (str(tmp_path / name),)})


def test_what_is_no_trace_of_an_adapter_with_a_recipe_is_refused(tmp_path):
    adapter = shutil.copytree(tiny.traced_run() / "mine", tmp_path / "mine")
    (adapter / "training_args.json").unlink()
    rows = str(tiny.traced_run() / "train.jsonl")
    own = {"corpus.records.train_file": rows, "corpus.records.queries_file": rows}
    own |= {"corpus.dataset": "records", "finetune.epochs": 0}
    cases = itertools.product(({}, {"backbone.adapter": str(adapter)}), ({}, own))
    for place, (model, corpus) in enumerate(cases):
        run = tmp_path / str(place)
        run.mkdir()
        if corpus or not model:
            values = {"backbone.checkpoint": str(tmp_path), **model, **corpus}
            (run / "config.json").write_text(json.dumps(to_json(replaced(Config(), values))))
        with refused():
            raslik_jax.validate(run=run)
    for named in (
        {"top": "0"},
        {"top": "100%"},
        {"seeds": 1},
        {"run": run, "settings": {"sketch.size": 8}},
        {},
    ):
        with refused():
            raslik_jax.validate(**named)
