"""A training file without some of its rows is the same file, less those rows."""

import datetime
import gzip
import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from raslik_jax.data.read.cleaning import cleaned_name, write_without
from raslik_jax.data.read.formats import read_examples

_ROWS = [{"output": f"a{n} \u2028é", "instruction": "q", "x": n} for n in range(5)]


def _without(tmp_path, name, raw, places):
    source, target = tmp_path / name, tmp_path / "cleaned"
    source.write_bytes(raw)
    left = write_without(str(source), target, {("", place) for place in places})
    return left, target.read_bytes()


@pytest.mark.parametrize("end", [b"\n", b""])
def test_lines_are_kept_byte_for_byte(tmp_path, end):
    lines = [json.dumps(row, ensure_ascii=n % 2 == 0).encode() for n, row in enumerate(_ROWS)]
    lines[3] = b"  " + lines[3].replace(b": ", b":") + b"\r"
    raw = b"\xef\xbb\xbf" + b"\n".join([*lines[:2], b"", *lines[2:]]) + end
    # Line 3 is blank, so that the third row stands in line 4.
    places = [row.place for row in _read(tmp_path, raw)]
    assert places == [1, 2, 4, 5, 6]
    left, found = _without(tmp_path, "rows.jsonl", raw, {2, 5})
    assert left == 3
    assert found == b"\xef\xbb\xbf" + b"\n".join([lines[0], b"", lines[2], lines[4]]) + end


def _read(tmp_path, raw):
    (tmp_path / "read.jsonl").write_bytes(raw)
    return read_examples(tmp_path / "read.jsonl")


def test_packed_lines_are_written_unpacked(tmp_path):
    lines = [json.dumps(row).encode() + b"\n" for row in _ROWS]
    raw = gzip.compress(b"".join(lines))
    assert _without(tmp_path, "rows.jsonl.gz", raw, {1}) == (4, b"".join(lines[1:]))


def test_what_zstandard_packed_is_written_as_it_was(tmp_path):
    lines = [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in _ROWS]
    raw = zstandard.compress(b"".join(lines))
    assert _without(tmp_path, "rows.jsonl.zst", raw, {1}) == (4, b"".join(lines[1:]))


def test_parquet_keeps_its_schema(tmp_path):
    path, target = tmp_path / "rows.parquet", tmp_path / "left.parquet"
    rows = [row | {"day": datetime.date(2026, 1, row["x"] + 1), "score": None} for row in _ROWS]
    fields = [(k, pyarrow.string()) for k in ("output", "instruction")]
    fields += [("x", pyarrow.int8()), ("day", pyarrow.date32()), ("score", pyarrow.float32())]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields, metadata={"by": "us"}))
    pyarrow.parquet.write_table(table, path)
    assert write_without(str(path), target, {("", 2), ("", 3)}) == 3
    assert pyarrow.parquet.read_table(target).equals(table.take([0, 3, 4]), check_metadata=True)
    with pytest.raises(ValueError, match="must have row 6"):
        write_without(str(path), target, {("", 6)})


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_a_list_keeps_its_indentation_keys_and_order(tmp_path, indent):
    raw = json.dumps(_ROWS, indent=indent, ensure_ascii=False).encode()
    _, found = _without(tmp_path, "rows.json", raw, {1, 5})
    assert found == json.dumps(_ROWS[1:4], indent=indent, ensure_ascii=False).encode()


def test_records_of_csv_may_go_over_lines(tmp_path):
    raw = b'instruction,output\r\nq,"a\r\nb"\r\n\r\n"q ""2""",c\r\nq3,d\r\n'
    left, found = _without(tmp_path, "rows.csv", raw, {2})
    assert (left, found) == (2, b'instruction,output\r\nq,"a\r\nb"\r\n\r\nq3,d\r\n')


def test_a_cell_of_tsv_may_be_long(tmp_path):
    long = b"a" * 140_000  # the limit of the csv module is 131,072
    raw = b"instruction\toutput\nq\t" + long + b"\nq2\tb\n"
    assert _without(tmp_path, "rows.tsv", raw, {2})[1] == raw.removesuffix(b"q2\tb\n")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/a.tsv", "a.tsv"),
        ("train.v2.csv.gz", "train.v2.csv"),
        ("my.data.json.zst", "my.data.json"),
        ("rows.parquet", "rows.parquet"),
        ("data@2/train@v2.csv", "train@v2.csv"),
        ("hub:owner/my.rows@train", "my.rows.jsonl"),
        ("hub:owner/my.rows:en@train", "my.rows.jsonl"),
    ],
)
def test_the_cleaned_file_is_called_for_what_it_holds(source, name):
    assert cleaned_name(source) == f"cleaned_{name}"


def test_a_saved_dataset_becomes_lines(tmp_path):
    (tmp_path / "saved.v1").mkdir()
    (tmp_path / "saved.v1" / "state.json").touch()
    assert cleaned_name(str(tmp_path / "saved.v1")) == "cleaned_saved.v1.jsonl"


def test_letters_are_escaped_where_they_were_and_a_table_may_begin_with_a_bracket(tmp_path):
    rows = [{"output": "C:\\users é"}, {"output": "b"}]
    for ensure_ascii in (False, True):
        raw = json.dumps(rows, ensure_ascii=ensure_ascii).encode()
        expected = json.dumps(rows[:1], ensure_ascii=ensure_ascii).encode()
        assert _without(tmp_path, "rows.json", raw, {2}) == (1, expected)
    half = rb'[{"output": "a"}, {"output": "\ud83d"}]'  # of a pair, which no text can hold
    assert _without(tmp_path, "rows.json", half, {1}) == (1, rb'[{"output": "\ud83d"}]')
    table = b"[id],output\n1,a\n2,b\n"
    assert _without(tmp_path, "rows.csv", table, {1}) == (1, table.replace(b"1,a\n", b""))


def test_a_row_that_is_not_there_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ValueError, match="must have row 7, but the file has changed: trace again"):
        _without(tmp_path, "rows.jsonl", b'{"instruction": "q", "output": "a"}\n', {1, 7})
    assert not (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_several_files_become_a_folder(tmp_path, packed):
    lines = [json.dumps(row).encode() + b"\n" for row in _ROWS]
    names = [f"data/train-{n}-of-2.jsonl{'.gz' if packed else ''}" for n in (0, 1)]
    (tmp_path / "source" / "data").mkdir(parents=True)
    for name, part in zip(names, (lines[:2], lines[2:]), strict=True):
        raw = b"".join(part)
        (tmp_path / "source" / name).write_bytes(gzip.compress(raw) if packed else raw)
    (tmp_path / "source" / "data" / "test.jsonl").write_bytes(lines[0])
    for source in (tmp_path / "source", ",".join(str(tmp_path / "source" / n) for n in names)):
        rows = read_examples(source)
        folder, target = "" if "," in str(source) else "data/", tmp_path / "cleaned"
        assert cleaned_name(str(source)) == f"cleaned_{'source' if folder else 'data'}"
        found = {(row.file, row.place) for row in (rows[1], rows[2])}
        assert write_without(str(source), target, found) == 3
        left = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*.jsonl")}
        expected = {f"{folder}train-0-of-2.jsonl": lines[0]}
        assert left == expected | {f"{folder}train-1-of-2.jsonl": b"".join(lines[3:])}
        with pytest.raises(
            ValueError, match="must have row .*train-1-of-2.*:9, but the file has changed"
        ):
            write_without(str(source), tmp_path / "no", {(rows[2].file, 9)})
        assert not (tmp_path / "no").exists()
        shutil.rmtree(target)


@pytest.mark.parametrize("packing", ["zstd", "snappy", "brotli", "lz4", "gzip", "none"])
def test_groups_and_packing_of_parquet_are_kept(packing, tmp_path):
    path, target = tmp_path / "rows.parquet", tmp_path / "left.parquet"
    table = pyarrow.table({"output": ["a"] * 10})
    with pyarrow.parquet.ParquetWriter(path, table.schema, compression=packing) as writer:
        writer.write_table(table, row_group_size=4)
        writer.write_table(table[:0])  # a group without rows
    assert pyarrow.parquet.ParquetFile(path).metadata.num_row_groups == 4
    packed = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).compression
    assert write_without(str(path), target, {("", 5)}) == 9
    found = pyarrow.parquet.ParquetFile(target).metadata
    assert [found.row_group(n).num_rows for n in range(3)] == [4, 3, 2]
    assert found.row_group(0).column(0).compression == packed
