"""Tables, Parquet files and saved datasets are read as JSON is, or refused in one sentence."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.data.read.formats import AUTO, read_examples

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
        self.assertEqual([row.extra for row in rows], [{}, {"topic": "talk"}])
        self.assertEqual([row.place for row in rows], [1, 2])

    @parameterized.named_parameters(
        ("no_header", "Add 2 and 2.,4\nSay no.,no\n", "row 1: a row must have 'instruction'"),
        ("same_names", "text,text\na,b\n", "must begin with a header"),
        ("no_name", "text,\na,b\n", "must begin with a header"),
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
        self._refused(self.folder / "other", "with a split train, got another folder")
        (path,) = (self.folder / "one").glob("*.arrow")
        path.write_bytes(path.read_bytes()[:99])
        self._refused(self.folder / "one", "cannot be read")

    def test_a_library_that_is_not_there_is_named(self):
        path = self.write_file("rows.parquet", b"")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
            self._refused(path, "needs the package pyarrow: install raslik-jax.data.")

    def test_numbers_and_json_lines_are_unchanged(self):
        path = self.write_file("rows.jsonl", "\n" + json.dumps({"text": "a"}))
        (row,) = read_examples(path, format=AUTO)
        self.assertEqual((row.output, row.place), ("a", 2))
