"""What single rows do to others, and sets that are chosen by it, on the tiny run."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from raslik_jax.data.batches import make_batch, plan_rows
from raslik_jax.run.stages import acting, retrieve, unlearn
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch.loss import example_loss


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes the kinds of numbers
        yield


def test_weights_go_from_the_gradients_of_rows_into_the_step(tmp_path):
    root = shutil.copytree(tiny.finished_run(), tmp_path / "run")
    # As many coordinates as parameters: the sketch is the gradient.
    config = tiny.tiny_config("--retrieve.strategies=weighted", "--sketch.size=100000")
    workspace = Workspace(root, config)
    for name in ("row_effects", "step_effects", "weighted"):
        (root / "retrieve" / name).mkdir()
    acting.make_row_effects(workspace, root / "retrieve" / "row_effects")
    effect_NM = acting.read_scores(workspace, "row_effects")
    queries = workspace.retrieval_queries()
    influence_N = acting.read_scores(workspace, "influence")
    num_normal = effect_NM.shape[1] - len(queries)
    assert num_normal == (influence_N <= np.median(influence_N)).sum()

    # Gradients of the loss that is trained, of a few rows and of the queries, not normalized.
    rows = (*workspace.corpus.train[:4], *queries)
    encoded = workspace.encode(rows, "rows")
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
    np.testing.assert_allclose(
        effect_NM[:4, : len(queries)], expected, atol=1e-5 * np.abs(expected).max()
    )

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
