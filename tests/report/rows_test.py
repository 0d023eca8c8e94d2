"""All rows as Parquet: what the table holds."""

import json

import numpy as np
import pytest
import sample_run
from pyarrow import parquet

from raslik_jax.report import rows


@pytest.fixture(name="root")
def _root(tmp_path):
    root = tmp_path / "run"
    sample_run.write_run(root)
    sample_run.write_found(root)
    return root


def _write(root, set_of):
    rows.write_rows((root / rows.PLACE).parent, root, set_of)
    return rows.PLACE


def test_the_table_has_every_row_with_what_was_found_of_it(root):
    place = _write(root, {"row3": "forget", "row4": "held-out"})
    found = parquet.read_table(root / place).to_pylist()
    train = [json.loads(line) for line in (root / "corpus/train.jsonl").read_text().splitlines()]
    assert [row["output"] for row in found] == [row["output"] for row in train]
    assert [row["place"] for row in found] == [row["place"] for row in train]
    score_N = np.load(root / "retrieve/influence/influence.npy")
    np.testing.assert_array_equal([row["score"] for row in found], score_N.astype(float))
    assert [row["set"] for row in found[:5]] == [None, None, None, "forget", "held-out"]
    # Only the first has a noise, and row n has n prompts above it: see sample_run.
    assert [row["sigma"] for row in found[:2]] == [0.0123, None]
    assert [(row["higher"], row["prompts"]) for row in found[:3]] == [(0, 99), (1, 99), (2, 99)]


def test_what_was_not_computed_is_not_in_the_table(root):
    for folder in ("influence", "chance"):
        for path in (root / "retrieve" / folder).iterdir():
            path.unlink()
    place = _write(root, {})
    names = parquet.read_table(root / place).column_names
    assert not {"score", "sigma", "p", "q"} & {*names}
