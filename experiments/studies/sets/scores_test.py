"""What single rows do to others, and sets that are chosen by it, on the tiny run."""

import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.studies.sets import strategies
from raslik_jax.evaluate.likelihood import Likelihood
from raslik_jax.models import checkpoint
from raslik_jax.run.stages import scores
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import gradients
from raslik_jax.train import loop

pytestmark = pytest.mark.usefixtures("members")


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes the kinds of numbers
        yield


@pytest.fixture
def loaded(monkeypatch):
    """The formats in which a base was loaded, one by one."""
    formats, load = [], checkpoint.load_model

    def noted(*names, base_format, **options):
        formats.append(base_format)
        return load(*names, base_format=base_format, **options)

    monkeypatch.setattr(checkpoint, "load_model", noted)
    return formats


def _workspace(folder, *flags):
    """Returns the tiny run, of whose rows the second and third token count too.

    As the first answer of a conversation does, before the last one.
    """
    root = shutil.copytree(tiny.finished_run(), folder / "run")
    workspace = Workspace(root, tiny.tiny_config(*flags))
    rows = workspace.train_rows
    masks = rows.target_masks()
    for is_target in masks:
        is_target[1:3] = True
    workspace.train_rows = rows._replace(masks=masks, start_N=np.ones_like(rows.start_N))
    return workspace


def _make(workspace, name, make):
    """Returns what a unit of scores writes."""
    (workspace.root / "retrieve" / name).mkdir()
    make(workspace, workspace.root / "retrieve" / name)
    return scores.read_scores(workspace, name)


def _counts(tokens, is_target):
    """Returns how often each token id counts: a gradient that needs no model."""
    return np.bincount(tokens[is_target], minlength=400).astype(np.float32)


@pytest.mark.parametrize("max_len", [0, 24])
def test_mean_effects_are_of_all_that_a_step_trains(tmp_path, monkeypatch, max_len):
    workspace = _workspace(tmp_path, f"--unlearn.max_len={max_len}")

    def sketch(batch):
        parts = np.asarray(batch.tokens_BL), np.asarray(batch.target_mask_BL)
        counts_BV = np.stack([*map(_counts, *parts)])
        norm_B = np.linalg.norm(counts_BV, axis=1)
        unit_BV = counts_BV / np.maximum(norm_B, 1)[:, None]
        return gradients.Sketches(jnp.asarray(unit_BV), jnp.asarray(norm_B))

    monkeypatch.setattr(strategies, "sketch_steps", lambda run: (run, sketch))
    effect_N2 = _make(workspace, "step_effects", strategies.make_step_effects)
    queries, rows = workspace.encode(workspace.retrieval_queries()), workspace.train_rows
    trained = rows.cut(max_len or 96)
    assert (trained.lengths_N < rows.lengths_N).any() == bool(max_len)
    query_QV, row_NV, trained_NV = (
        np.stack([*map(_counts, part.tokens, part.target_masks())])
        for part in (queries, rows, trained)
    )
    influence_N = scores.read_scores(workspace, "influence")
    normal_V = row_NV[influence_N <= np.median(influence_N)].mean(0)
    expected_N2 = trained_NV @ np.stack([query_QV.mean(0), normal_V], axis=1)
    np.testing.assert_allclose(effect_N2, expected_N2, rtol=1e-5)


def test_damage_is_what_answers_lose_in_the_trial(tmp_path, loaded, monkeypatch):
    flags = "--retrieve.strategies=trial", "--retrieve.trial.rows=3", "--retrieve.trial.steps=2"
    workspace = _workspace(tmp_path, *flags)

    ends = slice(-3, None), slice(3)

    def fit(algorithm, params, frozen, draw, *, num_steps, **options):
        assert frozen.base is workspace.model.base and num_steps == 2
        _, name, sets = draw.args
        order = np.argsort(scores.read_scores(workspace, "influence"))
        ids = [{workspace.corpus.train[row].example_id for row in order[part]} for part in ends]
        assert (name, [set(part.ids) for part in sets]) == (strategies.TRIAL, ids)
        after = jax.tree.map(lambda leaf: leaf + 1.0, params)
        return types.SimpleNamespace(state=algorithm.init(after))

    def likelihood_of(model, encoded):
        size = sum(float(leaf.sum()) for leaf in jax.tree.leaves(model.lora))
        return Likelihood(size * np.arange(len(encoded.ids)), encoded.num_targets_N)

    monkeypatch.setattr(loop, "fit", fit)
    workspace.likelihood_of = likelihood_of
    damage_N = _make(workspace, "damage", strategies.make_damage)
    assert loaded == [None]
    grown = sum(leaf.size for leaf in jax.tree.leaves(workspace.finetuned))
    np.testing.assert_allclose(damage_N, grown * np.arange(len(damage_N)), rtol=1e-5)
