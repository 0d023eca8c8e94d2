"""Rows that a file names by their places, where the training rows are in several files."""

import json

import pytest

from raslik_jax.data.read.formats import AUTO, read_examples
from raslik_jax.retrieve.named import find_rows, with_copies


def test_a_place_counts_in_its_file(tmp_path):
    for name in ("a", "b"):
        rows = [{"instruction": "q", "output": f"{name}{n}"} for n in (1, 2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = read_examples(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    asked = tmp_path / "forget.jsonl"
    asked.write_text(json.dumps({"place_file": "b.jsonl", "place": 1}) + "\n")
    assert find_rows(rows, str(asked), flag="--forget_file", fields={}) == [2]
    asked.write_text(json.dumps({"place": 1}) + "\n")
    with pytest.raises(ValueError, match="--forget_file .* line 1 "):
        find_rows(rows, str(asked), flag="--forget_file", fields={})


def test_an_id_counts_only_with_the_text_of_its_line(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    texts = ["fine 1", "bad 3", "bad 4", "fine 5"]
    given = [{"id": n, "instruction": "q", "output": text} for n, text in enumerate(texts)]
    asked = write("forget.jsonl", given[1:3])
    later = [row | {"id": n} for n, row in enumerate(given[1:])]  # a row less, numbered again
    rows = read_examples(write("train.jsonl", later))
    found = find_rows(rows, asked, flag="--forget_file", fields={})
    assert [rows[place].output for place in found] == ["bad 3", "bad 4"]
    gone = {"id": 0, "instruction": "q", "output": "gone"}
    for changed in (gone, {"id": 9}, {"id": 1, "instruction": "another"}):
        with pytest.raises(ValueError, match="--forget_file .* line 1 "):
            find_rows(rows, write("one.jsonl", [changed]), flag="--forget_file", fields={})
    for line in ({}, {"instruction": "q"}, {"instruction": "q", "output": " bad 4\n"}):
        named = write("named.jsonl", [{"id": 1} | line])
        assert find_rows(rows, named, flag="--forget_file", fields={}) == [1]


def test_rows_of_a_format_that_is_forced_are_found_by_id(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [{"id": n, "instruction": "q", "output": "a", "text": f"t{n}"} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_examples(str(path), format="text")
    assert find_rows(rows, str(path), flag="--forget_file", fields={}) == [0, 1, 2]


def test_a_training_row_that_ends_with_a_question_is_found(tmp_path):
    talk = [("user", "q"), ("assistant", "a"), ("user", "r")]
    messages = [{"role": role, "content": text} for role, text in talk]
    other = [messages[2], messages[1]]
    for name, lines in (("all", [other, messages]), ("one", [messages]), ("no", [talk])):
        rows = "".join(json.dumps({"messages": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    rows = read_examples(f"{tmp_path}/all.jsonl", format=AUTO)
    found = find_rows(rows, f"{tmp_path}/one.jsonl", flag="--forget_file", fields={})
    assert [rows[place].place for place in found] == [2]
    with pytest.raises(ValueError, match="--forget_file .* line 1 "):
        find_rows(rows, f"{tmp_path}/no.jsonl", flag="--forget_file", fields={})


def test_copies_are_rows_that_teach_the_same(tmp_path):
    """Also under ids of their own; a row with another answer is none."""
    said = [("q", "a"), ("q", "b"), ("q", "a"), ("r", "a"), ("q", "a")]
    lines = [{"id": n, "instruction": q, "output": a} for n, (q, a) in enumerate(said)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_examples(f"{tmp_path}/a.jsonl")
    assert [row.example_id for row in rows] == list("01234")
    assert with_copies(rows, [2, 3]) == [2, 3, 0, 4]
    assert with_copies(rows, [1]) == [1]
