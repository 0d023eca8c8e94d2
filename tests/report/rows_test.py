"""All rows as Parquet: what the table holds, and what the card beside it says."""

import json
import re

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


def _write(root, config, set_of):
    rows.write_rows((root / rows.PLACE).parent, root, config, set_of)
    return rows.PLACE


def test_the_table_has_every_row_with_what_was_found_of_it(root):
    place = _write(root, sample_run.config(), {"row3": "forget", "row4": "held-out"})
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


def test_the_card_says_what_is_in_the_table(root):
    place = _write(root, sample_run.config(), {"row3": "forget", "row4": "forget"})
    card = (root / place).with_name("README.md").read_text()
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert "data_files: rows.parquet" in head
    assert json.loads(re.search("pretty_name: (.*)", head)[1]).startswith("sample: ")
    assert (
        "60 rows of a training file, each with how far" in text and "Sets: forget 2 rows." in text
    )
    assert "- Query 0?\n- Query 1?\n" in text
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert named == parquet.read_table(root / place).column_names


def test_what_was_not_computed_is_neither_in_the_table_nor_in_the_card(root):
    for folder in ("influence", "chance"):
        for path in (root / "retrieve" / folder).iterdir():
            path.unlink()
    place = _write(root, sample_run.config(), {})
    names = parquet.read_table(root / place).column_names
    assert not {"score", "sigma", "p", "q"} & {*names}
    card = (root / place).with_name("README.md").read_text()
    assert "without scores" in card and "Sets:" not in card and "order by place" in card


def test_texts_of_rows_are_no_markup_in_the_card(root):
    hostile = "<script>alert(1)</script> | [x](http://y)\n# head"
    path = root / "corpus" / "retrieval.jsonl"
    path.write_text(json.dumps({"id": "q", "instruction": hostile, "output": "so"}) + "\n")
    config = sample_run.config(name='a"b\n---\n<i>')
    card = (root / _write(root, config, {})).with_name("README.md").read_text()
    assert "<script>" not in card and "[x](http" not in card and "\n# head" not in card
    assert card.count("\n---\n") == 1 and "<i>" not in card.partition("\n---\n")[2]
