"""The study of chances on real rows: which rows are drawn, and what is said of them."""

import json

import numpy as np

from experiments.studies.chance import measure


def test_shares_and_their_errors_over_prompts():
    p_QN = np.array([[0.004, 0.04, 0.5, 0.9], [0.3, 0.6, 0.7, 0.8]])
    found = measure.shares(p_QN)
    assert found[0.05] == (0.25, np.std([0.5, 0.0], ddof=1) / np.sqrt(2))
    assert found[0.005][0] == 0.125 and found[0.5][0] == 0.5


def test_rows_are_short_and_differ_and_the_others_are_not_among_them(tmp_path):
    rows = [
        {"instruction": f"Tell {n % 40}", "input": "", "output": "x" * (n + 10)} for n in range(90)
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    first, others = measure.draw_rows(path, 30, 5)
    asked = [row["instruction"] for row in (*first, *others)]
    assert (len(first), len(others), len({*asked})) == (30, 5, 35)
    assert all(20 < len(row["output"]) < 260 for row in (*first, *others))
