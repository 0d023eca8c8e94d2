"""The files of the peer, its sums over sets, and the agreement of its scores with trainings."""

import json

import numpy as np

from experiments.studies.replay import ekfac, measure
from raslik_jax.data.tokens import encoding


def test_labels_are_ids_of_the_answer_alone(tmp_path):
    rows = encoding.encode_rows([[5, 6, 7], [8, 9]], pad_id=0)._replace(start_N=np.array([2, 1]))
    ekfac.write_tokens(tmp_path / "rows.jsonl", rows)
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
    ]


def test_sums_are_those_of_the_sets_that_the_study_draws(capsys):
    score_NQ = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    sets = measure.draw_sets(40, 10, 5)
    change = [[sum(float(score_NQ[row, place]) for row in one) for place in (0, 1)] for one in sets]
    found = {"sets of 10": {"change": change}, "loss": [1.0, 2.0]}
    sums = ekfac.add_sums(score_NQ, found)
    assert [*sums] == ["sets of 10"]
    np.testing.assert_allclose(sums["sets of 10"]["ekfac"], change, rtol=1e-5)
    ekfac.print_correlations(found["sets of 10"] | sums["sets of 10"])
    assert capsys.readouterr().out == "  ekfac: 1.000 [1.00, 1.00], by answer 1.000, 1.000\n"
