"""What single rows do to others, and sets that are chosen by it, on the tiny run."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from raslik_jax.data.batches import make_batch, plan_rows
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import join
from raslik_jax.evaluate.likelihood import Likelihood
from raslik_jax.models import checkpoint
from raslik_jax.run.stages import acting, retrieve, unlearn
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import gradients
from raslik_jax.sketch.loss import example_loss
from raslik_jax.train import loop


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
    return acting.read_scores(workspace, name)


def test_weights_go_from_the_gradients_of_rows_into_the_step(tmp_path, loaded):
    # As many coordinates as parameters: the sketch is the gradient.
    flags = "--retrieve.strategies=weighted", "--sketch.size=100000"
    workspace = _workspace(tmp_path, *flags)
    root = workspace.root
    effect_NM = _make(workspace, "row_effects", acting.make_row_effects)
    queries = workspace.encode(workspace.retrieval_queries())
    influence_N = acting.read_scores(workspace, "influence")
    normal = np.flatnonzero(influence_N <= np.median(influence_N)).tolist()
    assert effect_NM.shape == (len(influence_N), len(queries.ids) + len(normal))

    # Gradients of the loss that is trained, not normalized: of a few rows, the queries and all that
    # counts of the normal rows.
    normal = np.array(shuffled(normal, seed=0, label="normal rows"))
    parts = workspace.train_rows.take(np.arange(4)), queries, workspace.train_rows.take(normal)
    encoded = join([part.cut(96) for part in parts])
    rows = encoded.ids
    batch = make_batch(encoded, plan_rows(encoded, np.arange(len(rows))))

    model, finetuned = workspace.model, workspace.finetuned

    @jax.jit
    @jax.vmap
    def gradient(tokens_L, is_target_L):
        def loss(lora):
            options = {"num_targets": batch.num_targets}
            return example_loss(model.decoder, lora, model.base, tokens_L, is_target_L, **options)

        leaves = jax.tree.leaves(jax.grad(loss)(finetuned))
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    found = np.float64(gradient(jnp.asarray(batch.tokens_BL), jnp.asarray(batch.target_mask_BL)))
    found = found[: len(rows)]
    expected = found[:4] @ found[4:].T
    np.testing.assert_allclose(effect_NM[:4], expected, atol=1e-5 * np.abs(expected).max())
    workspace.sketch_model  # noqa: B018  loads no other
    assert loaded == [None]

    (root / "retrieve" / "weighted").mkdir()
    retrieve.make_sets(workspace, "weighted", root / "retrieve" / "weighted")
    for kind in ("forget", "retain"):
        lines = (root / "retrieve" / "weighted" / f"{kind}.jsonl").read_text().splitlines()
        written = [json.loads(line) for line in lines]
        weights = [row["weight"] for row in written]
        assert 1 < len(weights) <= 12 and min(weights) > 0
        np.testing.assert_allclose(np.mean(weights), 1.0)
        ratios = np.array(weights) / [row["score"] for row in written]
        np.testing.assert_allclose(ratios, ratios[0])
        encoded = unlearn.read_set(workspace, "weighted", kind)
        assert encoded.ids == tuple(row["id"] for row in written)
        np.testing.assert_allclose(encoded.weight_N, weights)
    folder = root / "unlearn" / "weighted-ga_gdr"
    folder.mkdir()
    unlearn.unlearn(workspace, "weighted", "ga_gdr", folder)
    log = json.loads((folder / "steps.json").read_text())
    assert all(np.isfinite(step["loss"]) for step in log)


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

    monkeypatch.setattr(acting, "_acting", lambda run: (run, sketch))
    effect_N2 = _make(workspace, "step_effects", acting.make_step_effects)
    queries, rows = workspace.encode(workspace.retrieval_queries()), workspace.train_rows
    trained = rows.cut(max_len or 96)
    assert (trained.lengths_N < rows.lengths_N).any() == bool(max_len)
    query_QV, row_NV, trained_NV = (
        np.stack([*map(_counts, part.tokens, part.target_masks())])
        for part in (queries, rows, trained)
    )
    influence_N = acting.read_scores(workspace, "influence")
    normal_V = row_NV[influence_N <= np.median(influence_N)].mean(0)
    expected_N2 = trained_NV @ np.stack([query_QV.mean(0), normal_V], axis=1)
    np.testing.assert_allclose(effect_N2, expected_N2, rtol=1e-5)


def test_damage_is_what_answers_lose_in_the_trial(tmp_path, loaded, monkeypatch):
    flags = "--retrieve.strategies=trial", "--retrieve.trial.rows=3", "--retrieve.trial.steps=2"
    workspace = _workspace(tmp_path, *flags, "--unlearn.parameters=all")

    ends = slice(-3, None), slice(3)

    def fit(algorithm, params, frozen, draw, *, num_steps, **options):
        assert frozen.base is workspace.model.base and num_steps == 2
        _, name, sets = draw.args
        order = np.argsort(acting.read_scores(workspace, "influence"))
        ids = [{workspace.corpus.train[row].example_id for row in order[part]} for part in ends]
        assert (name, [set(part.ids) for part in sets]) == (acting.TRIAL, ids)
        after = jax.tree.map(lambda leaf: leaf + 1.0, params)
        return types.SimpleNamespace(state=algorithm.init(after))

    def likelihood_of(model, encoded):
        size = sum(float(leaf.sum()) for leaf in jax.tree.leaves(model.lora))
        return Likelihood(size * np.arange(len(encoded.ids)), encoded.num_targets_N)

    monkeypatch.setattr(loop, "fit", fit)
    workspace.likelihood_of = likelihood_of
    damage_N = _make(workspace, "damage", acting.make_damage)
    assert loaded == [None]
    grown = sum(leaf.size for leaf in jax.tree.leaves(workspace.finetuned))
    np.testing.assert_allclose(damage_N, grown * np.arange(len(damage_N)), rtol=1e-5)
