"""Tables, Parquet files and saved datasets are read as JSON is, or refused in one sentence."""

import contextlib
import datetime
import decimal
import gzip
import itertools
import json
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.base.settings import replaced
from raslik_jax.data.corpora import CorpusConfig
from raslik_jax.data.examples import write_examples
from raslik_jax.data.read.formats import AUTO, read_examples, read_written
from raslik_jax.data.read.sources import placed_records

_TALK = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]


class SourcesTest(FolderTest):
    def _refused(self, path, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            read_examples(path, format=AUTO)
        self.assertLessEqual(len(str(caught.exception)), 300)

    @parameterized.parameters(".csv", ".tsv", ".csv.gz")
    def test_a_table_has_texts_by_its_header(self, ending):
        text = """instruction,output,is_target,topic
Add.,"3, or
three",True,
Say.,"He said ""no"".",false,talk
"""
        text = text.replace(",", "\t") if ending == ".tsv" else text
        content = gzip.compress(text.encode()) if ending.endswith("gz") else text
        rows = read_examples(self.write_file(f"rows{ending}", content), format=AUTO)
        comma = "\t" if ending == ".tsv" else ","
        self.assertEqual([row.output for row in rows], [f"3{comma} or\nthree", 'He said "no".'])
        self.assertEqual([row.is_target for row in rows], [True, False])
        self.assertEqual([row.extra for row in rows], [{"topic": ""}, {"topic": "talk"}])
        self.assertEqual([row.place for row in rows], [1, 2])

    @parameterized.named_parameters(
        ("no_header", "Add 2 and 2.,4\nSay no.,no\n", "row 1: a row must have 'instruction'"),
        ("same_names", "text,text\na,b\n", "must begin with a header"),
        ("cells", "text,id\na,1,2\n", "row 1: a row must have 2 cells, got 3"),
        ("quotes", 'text\n"a" b\n', "must be a table, line 2 is not"),
        ("empty", "text\n", "at least one row"),
    )
    def test_a_damaged_table_is_refused(self, text, message):
        self._refused(self.write_file("rows.csv", text), message)

    def test_parquet_is_read_whole_and_refused_when_cut(self):
        table = pa.table({"messages": [_TALK, _TALK], "weight": [float("nan"), 1.0]})
        path = self.folder / "rows.parquet"
        pyarrow.parquet.write_table(table, path)
        rows = read_examples(path, format=AUTO)
        self.assertEqual([row.output for row in rows], ["Yes.", "Yes."])
        self.assertEqual([*rows[0].content.messages], _TALK)
        self.assertEqual([row.extra for row in rows], [{}, {"weight": 1.0}])
        self.assertEqual([row.place for row in rows], [1, 2])
        raw = path.read_bytes()
        for cut in (b"", raw[:-9], raw[9:], raw[: len(raw) // 2]):
            self._refused(self.write_file("cut.parquet", cut), "must be a whole Parquet file")

    def test_a_saved_dataset_is_read_and_its_train_split(self):
        records = [{"prompt": "The sky", "completion": " is blue."}] * 2
        saved = datasets.Dataset.from_list(records)
        saved.save_to_disk(str(self.folder / "one"))
        datasets.DatasetDict(train=saved).save_to_disk(str(self.folder / "dict"))
        for name in ("one", "dict"):
            rows = read_examples(self.folder / name, format=AUTO)
            self.assertEqual(
                [(row.output, row.place) for row in rows], [(" is blue.", 1), (" is blue.", 2)]
            )
        datasets.DatasetDict(test=saved).save_to_disk(str(self.folder / "other"))
        self._refused(self.folder / "other", "must have a split train, got .test.: give the folder")
        (path,) = (self.folder / "one").glob("*.arrow")
        path.write_bytes(path.read_bytes()[:99])
        self._refused(self.folder / "one", "cannot be read")

    def test_a_library_that_is_not_there_is_named(self):
        path = self.write_file("rows.parquet", b"")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
            self._refused(path, "needs the package pyarrow: install raslik-jax.data.")

    def test_a_column_without_a_name_is_the_users_own(self):
        path = self.write_file("rows.csv", ",text,\n0,a,\n1,b,x\n")  # pandas writes its index so
        rows = read_examples(path, format=AUTO)
        self.assertEqual([row.output for row in rows], ["a", "b"])
        self.assertEqual(rows[1].extra, {"Unnamed: 0": "1", "Unnamed: 2": "x"})

    @parameterized.parameters(",", ";", "\t", "|")
    def test_the_header_shows_what_separates_cells(self, mark):
        cells = [["instruction", "output"], ["q", '"a; b, c\td|e"'], ["r", ""]]
        text = "\ufeff" + "".join(mark.join(row) + "\r\n" for row in cells)
        for begin in ("", f"sep={mark}\r\n"):
            rows = read_examples(self.write_file("rows.csv", begin + text), format=AUTO)
            self.assertEqual([row.output for row in rows], ["a; b, c\td|e", ""])
            self.assertEqual([row.place for row in rows], [1, 2])

    def test_a_header_of_two_readings_is_refused(self):
        self._refused(self.write_file("rows.csv", "text,a|b\nx,y|z\n"), "commas .2. or bars .2.")
        path = self.write_file("rows.csv", "text,note (a|b)\nx,y\n")
        self.assertEqual(read_examples(path, format=AUTO)[0].extra, {"note (a|b)": "y"})

    @parameterized.parameters(
        ("utf-16", 1, "UTF-16"), ("utf-16-le", 1, "UTF-16"), ("cp1252", 3, "WINDOWS-1252")
    )
    def test_text_in_another_encoding_is_refused_with_its_line(self, encoding, line, name):
        for ending, text in (
            (".csv", "instruction,output\nq,a\nq,\u00e4\n"),
            (".jsonl", '{"text": "a"}\n\n{"text": "\u00e4"}\n'),
        ):
            path = self.write_file(f"rows{ending}", text.encode(encoding))
            self._refused(path, f"rows{ending}':{line} .*iconv -f {name} -t UTF-8")

    def test_an_object_alone_is_a_row(self):
        row = {"instruction": "q", "output": "a"}
        for indent in (None, 2):
            path = self.write_file("rows.json", json.dumps({"messages": _TALK}, indent=indent))
            self.assertEqual([r.output for r in read_examples(path, format=AUTO)], ["Yes."])
        for held, message in (
            ({"data": [row]}, "row 1: a row must have .*, got 'data': name its keys"),
            ({name: ["q", "r"] for name in row}, "'instruction' must be text, got .'q', 'r'."),
        ):
            self._refused(self.write_file("rows.json", json.dumps(held)), message)
        several = json.dumps(row, indent=1) * 2
        self._refused(self.write_file("rows.json", several), "one object on each line")

    def test_each_row_of_a_list_is_refused_by_its_number(self):
        good = '{"instruction": "q", "output": "a"}'
        for bad, message in (('{"a": NaN}', "NaN"), ('{"a": 1, "a": 2}', "'a' twice"), ("3", "3")):
            path = self.write_file("rows.json", f"[{good}, {bad}, {good}, {bad}]")
            self._refused(path, f"json, row 2: .*{message}.*(; and 1 more|, row 4)")

    def test_nulls_that_a_table_adds_are_left_out_and_a_message_keeps_its_text(self):
        said = {
            "role": "assistant",
            "content": None,
            "call": {"from": "Paris", "value": None, "b": 1},
        }
        asked = {"role": "user", "content": "q", "call": {"from": None, "value": 2, "b": None}}
        path = self.folder / "rows.parquet"
        table = pa.table({"messages": [[asked, said], [asked, said]], "output": ["a", "b"]})
        pyarrow.parquet.write_table(table, path)
        (_, _, _, found), *_ = placed_records(path)
        asked["call"], said["call"] = {"value": 2}, {"from": "Paris", "b": 1}
        self.assertEqual(found["messages"], [asked, said])

    def test_values_of_parquet_are_json_or_refused_by_row_and_column(self):
        binary, when = pa.binary(), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
        columns = {
            "instruction": pa.array([b"q", "\u00e4".encode()], binary),
            "output": pa.array(["a", "b"]).dictionary_encode(),
            "note": pa.array(["k", None], pa.large_string()),
            "when": pa.array([when, None]),
            "cost": pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00")]),
            "many": pa.array([decimal.Decimal("12345678901234567.125"), None]),
            "parts": pa.array([[{"role": None, "raw": [b"z"]}], []]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
        path = self.folder / "rows.parquet"
        pyarrow.parquet.write_table(pa.table(columns), path)
        first, second = read_examples(path, format=AUTO)
        self.assertEqual([first.instruction, second.instruction], ["q", "\u00e4"])
        expected = {"note": "k", "when": "2026-01-02T00:00:00+00:00", "cost": 1.5}
        expected |= {"many": "12345678901234567.125", "map": {"k": 1}}
        self.assertEqual(first.extra, expected | {"parts": [{"raw": ["z"]}]})
        self.assertEqual(second.extra, {"cost": 2, "parts": []})
        for name, bad in (
            ("output", pa.array([b"a", b"\xff"], binary)),
            ("extra", pa.array([1.0, float("inf")])),
            ("extra", pa.array([None, [{"raw": b"\xff"}]])),
        ):
            pyarrow.parquet.write_table(pa.table(columns | {name: bad}), path)
            self._refused(path, f"rows.parquet, row 2: the column '{name}' must have")
        picture = pa.array([{"bytes": b"\xff", "path": None}] * 2)  # as `datasets` stores one
        pyarrow.parquet.write_table(pa.table(columns | {"image": picture}), path)
        self._refused(path, "row 1: rows with images .image. must be left out")

    def test_git_lfs_pointers_and_urls_are_refused(self):
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        for ending in ("parquet", "jsonl", "csv"):
            self._refused(self.write_file(f"rows.{ending}", pointer), "run git lfs pull")
        for url in ("http://a.b/c.jsonl", "s3://a/b", "hf://datasets/a/b"):
            self._refused(url, f"got the URL '{url}'")

    def test_a_file_is_read_no_further_than_asked(self):
        row = '{"instruction": "q", "output": "%s"}' % ("a" * 1000)
        path = self.write_file("a.jsonl", "\n".join([row] * 20_000))
        tracemalloc.start()
        with contextlib.closing(placed_records(path)) as rows:
            found = sum(1 for _ in itertools.islice(rows, 19_000))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertEqual(found, 19_000)
        self.assertLess(most, 8_000_000)


class FoldersTest(FolderTest):
    def _write(self, *names):
        """Writes a file of two rows by each name; the rows say where they are."""
        for name in names:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"instruction": "q", "output": f"{name}:{n}"} for n in (1, 2)]
            lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
            if path.suffix == ".parquet":
                pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
            elif path.suffix == ".gz":
                path.write_bytes(gzip.compress(lines))
            else:
                path.write_bytes(lines)

    def _files(self, source):
        """Returns the files that the rows come from; each row says the same."""
        rows = read_examples(source, format=AUTO)
        self.assertEqual([f"{row.file}:{row.place}" for row in rows], [row.output for row in rows])
        return list(dict.fromkeys(row.file for row in rows))

    @parameterized.parameters(".parquet", ".jsonl", ".jsonl.gz")
    def test_the_shards_of_the_split_train_are_read_in_order(self, ending):
        shards = [f"data/train-{n:05}-of-00012{ending}" for n in range(12)]
        self._write(*shards[::-1], f"data/test-00000-of-00001{ending}", ".cache/train.jsonl")
        self.assertEqual(self._files(self.folder), shards)
        (self.folder / shards[2]).unlink()
        for source in (self.folder, f"{self.folder}/data/train-*{ending}"):
            with self.assertRaisesRegex(ValueError, f"got 11 without 'train-00002.*{ending}'"):
                read_examples(source, format=AUTO)

    def test_a_shard_with_a_hash_in_its_name_is_missed_too(self):
        shards = [f"train-0000{n}-of-00002-{n}09b74b3ef9c3b56.jsonl" for n in range(2)]
        self._write(*shards)
        self.assertEqual(self._files(self.folder), shards)
        (self.folder / shards[1]).unlink()
        with self.assertRaisesRegex(ValueError, r"got 1 without 'train-00001-of-00002-\*\.jsonl'"):
            read_examples(self.folder, format=AUTO)

    @parameterized.parameters(
        (("train.jsonl", "test.jsonl", "valid.jsonl"), ["train.jsonl"]),
        (("part-10.jsonl", "part-9.jsonl"), ["part-9.jsonl", "part-10.jsonl"]),
        (("train/1.jsonl", "train/0.jsonl", "test/0.jsonl"), ["train/0.jsonl", "train/1.jsonl"]),
        (("a/train-1-of-2.jsonl", "a/train-2-of-2.jsonl", "a/dev.json"), None),
    )
    def test_a_split_is_known_by_file_or_folder(self, names, expected):
        self._write(*names)
        (self.folder / "dataset_info.json").write_text("{}")
        self.assertEqual(self._files(self.folder), expected or [*names[:2]])

    @parameterized.parameters(
        (("test.jsonl",), "got 'test'"),
        (("train_sft-0-of-1.jsonl", "train_gen-0-of-1.jsonl"), "got 'train_gen', 'train_sft'"),
        (("en/train.jsonl", "fr/train.jsonl"), "in one folder, got 'en', 'fr'"),
        (("train.jsonl", "train.parquet"), "in one form, got '.jsonl', '.parquet'"),
        (("train.jsonl", "train.jsonl.gz"), "must be given once"),
        (("train-0-of-2.jsonl", "train-0-of-3.jsonl"), "of one set, got of 2 and of 3"),
        (("notes.txt",), "got no file of rows"),
    )
    def test_a_folder_of_two_readings_is_refused(self, names, message):
        self._write(*names)
        with self.assertRaisesRegex(ValueError, message) as caught:
            read_examples(self.folder, format=AUTO)
        self.assertLessEqual(len(str(caught.exception)), 300)

    def test_several_files_are_named_by_commas_and_patterns(self):
        self._write("b.jsonl", "a.jsonl", "in/c-2.jsonl", "in/c-10.jsonl")
        at = self.folder
        self.assertEqual(self._files(f"{at}/b.jsonl,{at}/a.jsonl"), ["b.jsonl", "a.jsonl"])
        found = self._files(f"{at}/in/c-*.jsonl,{at}/a.jsonl")
        self.assertEqual(found, ["in/c-2.jsonl", "in/c-10.jsonl", "a.jsonl"])
        for source, message in (
            (f"{at}/a.jsonl,{at}/a.jsonl", "each file once"),
            (f"{at}/a.jsonl,{at}/no.jsonl", "no file .*no.jsonl"),
            (f"{at}/no-*.jsonl", "must match a file"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                read_examples(source, format=AUTO)
        (at / "a.jsonl").write_text('{"text": 1}\n')
        with self.assertRaisesRegex(ValueError, "a.jsonl:1: "):
            read_examples(f"{at}/b.jsonl,{at}/a.jsonl", format=AUTO)

    def test_the_place_is_written_and_read_again(self):
        self._write("train-0-of-2.jsonl", "train-1-of-2.jsonl")
        rows = read_examples(self.folder, format=AUTO)
        write_examples(self.folder / "written.jsonl", rows)
        self.assertEqual(read_written(self.folder / "written.jsonl"), rows)

    def test_all_files_that_are_read_decide_the_corpus(self):
        self._write("train-0-of-2.jsonl", "train-1-of-2.jsonl", "test.jsonl")

        def names():
            own = {"train_file": str(self.folder), "queries_file": str(self.folder / "q.txt")}
            own = {f"records.{name}": path for name, path in own.items()}
            config = replaced(CorpusConfig(), {"dataset": "records", **own})
            return {name: path.name for name, path in config.source_files().items()}

        expected = {f"train_file/{n}/train-{n}-of-2.jsonl": f"train-{n}-of-2.jsonl" for n in (0, 1)}
        self.assertEqual(names(), expected)
