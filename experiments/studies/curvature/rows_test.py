"""The scores of a trace's rows are those of the study, by id and query."""

import json

import jax
import numpy as np
import pytest
import tiny

from experiments.studies.curvature import others, rows
from raslik_jax.run import plan
from raslik_jax.run.stages import sketch


def test_each_row_has_the_rise_of_its_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(others, "RATE", 1e-2)
    monkeypatch.setattr(others, "MOST_STEPS", 2)
    run, out = tiny.traced_run() / "run", tmp_path / "scores.jsonl"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows.run(rows.Options(run=str(run), out=str(out)))
        workspace = plan.open_run(run, "corpus", "finetune")
        train, asked = workspace.corpus.train, workspace.retrieval_queries()
        parts = sketch.sketched_adapter(workspace), workspace.sketch_model.decoder
        expected_NQ, _ = others.unlearned_answers(workspace, *parts, train, asked)
    found = {line["id"]: line["score"] for line in map(json.loads, out.read_text().splitlines())}
    assert [*found] == [row.example_id for row in train]
    np.testing.assert_array_equal([*found.values()], expected_NQ)
    assert expected_NQ.std() > 0
    best = train[int(expected_NQ.mean(axis=1).argmax())].example_id
    assert best in capsys.readouterr().out.split("mean over the answers")[1].splitlines()[1]
    with pytest.raises(ValueError, match="--out must be given"):
        rows.run(rows.Options(run=str(run)))
