"""The rises of an unlearned answer on the tiny model."""

import jax
import numpy as np
import tiny

from experiments.studies.curvature import others
from raslik_jax.models import decoder
from raslik_jax.run import plan
from raslik_jax.run.stages import sketch
from raslik_jax.train import losses


def test_the_answer_that_is_unlearned_rises_and_so_does_its_own_row(monkeypatch):
    monkeypatch.setattr(others, "_AT_A_TIME", 7)
    monkeypatch.setattr(others, "RATE", 1e-2)
    monkeypatch.setattr(others, "RISE", 0.1)
    workspace = plan.open_run(tiny.traced_run() / "run", "corpus", "finetune")
    rows = workspace.corpus.train[:10]
    lora, bound = sketch.sketched_adapter(workspace), workspace.sketch_model.decoder
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        given = (workspace, lora, bound, rows, rows[8:])
        rise_NQ, steps = others.unlearned_answers(*given)
        assert rise_NQ.shape == (10, 2)
        np.testing.assert_array_equal(rise_NQ.argmax(axis=0), [8, 9])
        assert all(0 < number < others.MOST_STEPS for number in steps)
        assert (rise_NQ[[8, 9], [0, 1]] >= others.RISE - 1e-5).all()
        encoded = workspace.encode(rows, "rows", targets="response")
        own = decoder.bind(workspace.model.graphdef)
        model = losses.BoundModel(own, lora, workspace.model.base)
        alone = [
            float(losses.nll_by_example(losses.Outputs(model, one))[0])
            for one in others.make_batches(encoded, 1)
        ]
        together = np.concatenate(
            [
                losses.nll_by_example(losses.Outputs(model, one))
                for one in others.make_batches(encoded, 7)
            ]
        )
        np.testing.assert_allclose(together[:10], alone, rtol=1e-4)
