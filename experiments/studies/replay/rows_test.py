"""The scores of a replayed trace, next to trainings whose row has another factor."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny

from experiments.studies.replay import rows
from raslik_jax.run import artifacts

_LESS, _ROWS = 0.02, 4


def test_the_scores_are_what_trainings_with_other_factors_say(tmp_path, capsys):
    run = shutil.copytree(tiny.traced_run() / "run", tmp_path / "run")
    recipe, out = tmp_path / "training_args.json", tmp_path / "replay.jsonl"
    recipe.write_text(json.dumps(tiny.RECIPE | {"learning_rate": 2e-4}))
    options = rows.Options(run=str(run), out=str(out), recipe=(str(recipe),), check=1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows.run(options)
        printed = capsys.readouterr().out.splitlines()
        training = rows.open_training(options)
        train, ones_N = training.trainer(), np.ones(len(training.rows.ids))
        score = {one["id"]: one["score"] for one in map(json.loads, out.open())}
        assert [*score] == [row.example_id for row in artifacts.TRAIN.read(run)]
        score_N = np.array([score[name] for name in training.rows.ids])[:, 0]
        best = np.argsort(-score_N)
        for place in [*best[:_ROWS], *best[-_ROWS:]]:
            few_N = np.where(np.arange(len(ones_N)) == place, _LESS, 0.0)
            high, low = train(ones_N - few_N)[0], train(ones_N + few_N)[0]
            # A loss of 6 nats is rounded to 5e-7, and the training is not linear.
            error = 4 * np.spacing(high) / (2 * _LESS) + 0.1 * abs(score_N[place])
            assert abs((high - low) / (2 * _LESS) - score_N[place]) < error
        rise = train(np.arange(len(ones_N)) != best[0])[0] - train(ones_N)[0]
    first = next(line for line in printed if training.rows.ids[best[0]] in line).split()
    assert [float(x) for x in first[:2]] == [round(float(x), 4) for x in (score_N[best[0]], rise)]


def test_a_replay_needs_its_flags_and_a_trace(tmp_path):
    with pytest.raises(ValueError, match="--out must be given"):
        rows.run(rows.Options(run=str(tmp_path)))
    with pytest.raises(ValueError, match="give the folder of a trace"):
        rows.run(rows.Options(run=str(tmp_path), out=str(tmp_path / "replay.jsonl")))
