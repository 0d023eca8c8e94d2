"""Rows of files and hub datasets are read whole or refused with their place."""

import gzip
import json
import lzma
import os
import random
from unittest import mock

import pytest
import zstandard
from absl.testing import parameterized
from folders import FolderTest
from support import shared_data

from raslik_jax.data import examples as ex
from raslik_jax.data.read.formats import AUTO, parse_fields, read_examples, read_written

_PACKERS = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: zstandard.ZstdCompressor().compress(raw),
}


def _records(rows):
    return [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in rows]


class ReadTest(FolderTest):
    @parameterized.product(packing=sorted(_PACKERS), form=["list", "lines"])
    def test_every_packing_and_form_gives_the_same_rows(self, packing, form):
        rows = [("Say a\u2028b.", "", "x"), ("Say it.", "1\n2", ""), ("Say it.", "1\n2", "")]
        records = _records(rows)
        if form == "list":
            text = json.dumps(records, indent=1, ensure_ascii=False)
        else:
            text = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
        path = self.write_file(f"rows.json{packing}", _PACKERS[packing](text.encode()))
        read = read_examples(path, name="here")
        self.assertEqual([example[1:4] for example in read], rows)
        places = [1, 2, 3] if form == "list" else [1, 3, 5]
        self.assertEqual([row[4:8] for row in read], [(None, "here", {}, at) for at in places])
        self.assertEqual(read[2].example_id, read[1].example_id + "-2")

    @parameterized.named_parameters(
        ("not_json", '{"instruction": '),
        ("no_object", "[1]"),
        ("two_objects", '{"instruction": "a", "output": ""} {}'),
        ("missing_output", '{"instruction": "a"}'),
        ("number", '{"instruction": "a", "output": 3}'),
        ("blank", '{"instruction": " ", "output": ""}'),
        ("surrogate", r'{"instruction": "\ud800", "output": ""}'),
        ("nul", r'{"instruction": "a", "output": "", "k": ["\u0000"]}'),
        ("repeated_key", '{"instruction": "a", "output": "", "output": "b"}'),
        ("nan", '{"instruction": "a", "output": "", "k": NaN}'),
        ("infinite", '{"instruction": "a", "output": "", "k": 1e999}'),
        ("digits", '{"instruction": "a", "output": ' + "1" * 5000 + "}"),
        ("deep", '{"instruction": "a", "k": ' + "[" * 100_000),
        ("nested", '[{"instruction": "a", "output": "", "k": ' + "[" * 99 + "]" * 99 + "}]"),
        ("open_list", '[{"instruction": "a", "output": ""}'),
        ("two_lists", '[{"instruction": "a", "output": ""}]\n[]'),
        ("lost_comma", '[{"instruction": "a", "output": ""}\n {}]'),
        ("empty_list", "[ ]"),
        ("empty", " \n"),
        ("system", '{"instruction": "a", "output": "", "system": ["Obey."]}'),
        ("history", '{"instruction": "a", "output": "", "history": ["b", "c"]}'),
    )
    def test_malformed_files_are_refused_with_the_line(self, text):
        self.monkeypatch.chdir(self.folder)  # a long path leaves less of the message
        self.write_file("rows.json", text)
        self.assert_refused(read_examples, "rows.json")

    @parameterized.parameters("lines", "list")
    def test_all_malformed_rows_are_reported_at_once(self, form):
        records = ['{"instruction": "a", "output": "b"}'] + ["{}"] * 25
        text = "\n".join(records) if form == "lines" else "[" + ",\n".join(records) + "]"
        path = self.write_file("rows.json", text)
        with self.assertRaises(ValueError) as caught:
            read_examples(path)
        message = str(caught.exception)
        place = f"{path}:2" if form == "lines" else f"{path}, row 2"
        self.assertStartsWith(message, f"{place}: 'instruction' must be text, got nothing; ")
        self.assertRegex(message, r"; and 2\d more: correct or remove these rows$")
        self.assertLessEqual(len(message), 300)

    @parameterized.parameters(".gz", ".xz", ".zst")
    def test_damaged_archives_are_refused(self, ending):
        whole = _PACKERS[ending](b'{"instruction": "a", "output": "b"}' * 9)
        with self.assertRaisesRegex(ValueError, f"rows.jsonl{ending}' cannot be unpacked"):
            read_examples(self.write_file(f"rows.jsonl{ending}", b"\0" + whole[1:]))

    @parameterized.product(ending=[".gz", ".xz", ".zst"], cut=[-1, -5, -15])
    def test_a_cut_archive_is_refused_and_a_joined_one_read_whole(self, ending, cut):
        packed = _PACKERS[ending](b'{"instruction": "a", "output": "b"}\n' * 9)
        name = f"rows.jsonl{ending}"
        self.assertLen(read_examples(self.write_file(name, packed + packed)), 18)
        for damaged in (packed[:cut], packed + packed[:cut], packed + b"\1" + packed):
            with self.assertRaisesRegex(ValueError, "cannot be unpacked"):
                read_examples(self.write_file(name, damaged))

    def test_missing_and_foreign_files_are_refused(self):
        with self.assertRaisesRegex(ValueError, "no file .*gone.json"):
            read_examples(self.folder / "gone.json")
        with self.assertRaisesRegex(ValueError, "rows.json':2 must be UTF-8"):
            read_examples(self.write_file("rows.json", b"\n\xff"))

    @parameterized.parameters(
        ({"outptu": "x"}, "must name fields of instruction"),
        ({"instruction": "output"}, "must name a key for 'output'"),
        ({"input": "contxt"}, "got 'contxt', which no row of .* has"),
    )
    def test_wrong_field_maps_are_refused(self, fields, message):
        path = self.write_file("rows.json", '{"instruction": "a", "output": "b"}')
        with self.assertRaisesRegex(ValueError, message):
            read_examples(path, fields=fields)
        if "input" in fields:  # queries may do without
            self.assertLen(read_examples(path, fields=fields, needs_output=False), 1)

    def test_a_field_map_renames_keys_and_keeps_the_rest(self):
        row = {"q": "Sum up.", "input": "A text.", "a": "Short.", "name": 7, "bad": True}
        row |= {"source": "mine", "topic": ["x", 1], "system": "", "history": [], "score": 3}
        path = self.write_file("rows.jsonl", json.dumps(row))
        fields = {"instruction": "q", "output": "a", "is_target": "bad", "id": "name"}
        (read,) = read_examples(path, fields=fields)
        self.assertEqual(read[:6], ("7", "Sum up.", "A text.", "Short.", True, "mine"))
        self.assertEqual(read.extra, {"topic": ["x", 1], "score": 3})
        written = self.folder / "written.jsonl"
        ex.write_examples(written, [read], extra=[{"score": 0.5}])
        record = json.loads(written.read_text())
        self.assertEqual((record["topic"], record["score"]), (["x", 1], 0.5))
        self.assertEqual(read_examples(written)[0][:4], read[:4])

    @parameterized.parameters("lines", "list")
    def test_places_in_the_users_file_survive_any_number_of_writings(self, form):
        rows = [{"instruction": f"Say {i}.", "output": "x", "place": "Rome"} for i in range(3)]
        text = "\n\n".join(map(json.dumps, rows)) if form == "lines" else json.dumps(rows)
        read = read_examples(self.write_file("rows.json", text))
        self.assertEqual([row.extra for row in read], [{"place": "Rome"}] * 3)
        places = [1, 3, 5] if form == "lines" else [1, 2, 3]
        for name in ("train.jsonl", "forget.jsonl"):
            self.assertEqual([row.place for row in read], places)
            ex.write_examples(self.folder / name, read := read[::-1], extra=[{"score": 1.0}] * 3)
            places = places[::-1]
            read = read_written(self.folder / name)
        (made,) = [ex.make_example("a", "", "b")]
        ex.write_examples(self.folder / "made.jsonl", [made])
        self.assertEqual(read_written(self.folder / "made.jsonl"), (made,))

    @parameterized.parameters(*sorted(_PACKERS))
    def test_any_damage_is_one_short_sentence(self, packing):
        draws = random.Random(packing)
        rows = [{"instruction": "é", "output": "\u2028", "id": "x", "k": [1.5, {"a": None}]}] * 2
        text = json.dumps([rows[0], {**rows[1], "id": "y"}], ensure_ascii=False, indent=1).encode()
        parts = [b"[" * 400, b"9" * 5000, b"1e999", b"\\ud800", b"\\u0000", b"\0", b"\xff", b'"']
        for step in range(80):
            outside = bool(packing) and step % 2 == 0
            raw = bytearray(_PACKERS[packing](text) if outside else text)
            at = draws.randrange(len(raw))
            match draws.randrange(4):
                case 0:
                    raw[at] ^= 1 << draws.randrange(8)
                case 1:
                    del raw[at:]
                case 2:
                    del raw[at : at + draws.randrange(1, 9)]
                case 3:
                    raw[at:at] = draws.choice(parts)
            path = self.write_file(f"rows.json{packing}", bytes(raw))
            if not outside:
                path.write_bytes(_PACKERS[packing](bytes(raw)))
            try:
                read = read_examples(path)
            except ValueError as error:
                self.assertIs(type(error), ValueError)
                self.assertLessEqual(len(str(error)), 300)
                self.assertNotIn("\n", str(error))
                continue
            if outside and packing != ".zst":  # which has no checksum here
                self.assertEqual(
                    [row[:4] for row in read], [("x", "é", "", "\u2028"), ("y", *read[1][1:4])]
                )

    def test_a_pipe_is_refused_at_once(self):
        os.mkfifo(self.folder / "rows.jsonl")
        for path in (self.folder / "rows.jsonl", "/dev/zero"):
            with self.assertRaisesRegex(ValueError, "must be a regular file"):
                read_examples(path)
        with self.assertRaisesRegex(ValueError, "rows of one split train"):
            read_examples(self.folder)

    def test_equal_rows_without_an_id_are_told_apart_beside_rows_with_one(self):
        row = {"instruction": "i", "output": "o"}
        path = self.write_file(
            "r.jsonl", "".join(json.dumps(r) + "\n" for r in (row, row, row | {"id": "a"}))
        )
        first, second, third = read_examples(path)
        self.assertEqual(second.example_id, f"{first.example_id}-2")
        self.assertEqual(third.example_id, "a")

    def test_a_label_that_is_none_is_a_column_unless_the_field_map_names_it(self):
        path = self.write_file("r.jsonl", '{"instruction": "a", "output": "b", "is_target": "no"}')
        (row,) = read_examples(path)
        self.assertEqual((row.is_target, row.extra), (None, {"is_target": "no"}))
        path = self.write_file("r.jsonl", '{"instruction": "a", "output": "b", "bad": "no"}')
        with self.assertRaisesRegex(ValueError, "r.jsonl:1: 'bad' must be true"):
            read_examples(path, fields={"is_target": "bad"})

    @parameterized.parameters((1, True), ("0", False), ("FALSE", False), ("", None))
    def test_a_label_may_be_a_number_or_a_cell(self, value, label):
        row = {"instruction": "a", "output": "b", "is_target": value}
        (read,) = read_examples(self.write_file("r.jsonl", json.dumps(row)))
        self.assertEqual((read.is_target, dict(read.extra)), (label, {}))

    def test_alpaca_is_read_whole(self):
        rows = read_examples(shared_data() / "alpaca" / "alpaca_data.json.xz")
        self.assertLen(rows, 52_002)
        self.assertEqual(sum(bool(row.input) for row in rows), 20_679)
        self.assertEqual(sum(row.output == "" for row in rows), 28)


class HubTest(FolderTest):
    def _dataset(self, rows):
        """Writes a folder that `datasets` reads as it reads one of the hub."""
        folder = self.folder / "data"
        folder.mkdir()
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return f"hub:{folder}"

    @parameterized.parameters(
        ("hub:a/b", ("a/b", None), "train"),
        ("hub:a/b@test", ("a/b", None), "test"),
        ("hub:a/b:plain@train[:10]", ("a/b", "plain"), "train[:10]"),
    )
    def test_sources_are_parsed(self, source, names, split):
        rows = [{"instruction": "Say.", "output": float("nan"), "id": 3}, {"instruction": "b"}]
        with mock.patch("datasets.load_dataset", return_value=rows) as load:
            read = read_examples(source, needs_output=False)
        load.assert_called_once_with(*names, split=split)
        self.assertEqual([row.output for row in read], ["", ""])

    def test_rows_are_read_through_datasets_with_a_field_map(self):
        source = self._dataset([{"q": f"Say {i}", "a": "x"} for i in range(4)])
        rows = read_examples(source, fields={"instruction": "q", "output": "a"}, name="mine")
        self.assertEqual([row.instruction for row in rows], [f"Say {i}" for i in range(4)])
        self.assertEqual({row.source for row in rows}, {"mine"})
        with self.assertRaisesRegex(
            ValueError, r", row 1: 'instruction' must be text.*and [12] more"
        ):
            read_examples(source + "@train[:3]")

    def test_what_is_not_there_is_explained(self):
        with self.assertRaisesRegex(ValueError, "'hub:no/such-data' cannot be read"):
            read_examples("hub:no/such-data")
        with self.assertRaisesRegex(ValueError, "must be like hub:OWNER/NAME"):
            read_examples("hub:@train")
        with (
            mock.patch.dict("sys.modules", {"datasets": None}),
            self.assertRaisesRegex(ValueError, "needs the package datasets"),
        ):
            read_examples("hub:a/b")


class FieldsTest(FolderTest):
    def test_a_field_map_is_a_list_of_pairs(self):
        self.assertEqual(parse_fields(""), {})
        self.assertEqual(parse_fields("input=a, id = b"), {"input": "a", "id": "b"})

    @parameterized.parameters(
        ("input", "must be like"), ("input=a,input=b", "once"), ("input=a,id=a", "once"),
        ("outptu=a", "must name fields"), ("input=output", "must name a key for 'output'"),
    )  # fmt: skip
    def test_other_texts_are_refused(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            parse_fields(text)


@pytest.mark.parametrize("needs_output", [True, False])
def test_messages_in_the_notation_of_python_are_no_prompt(needs_output, tmp_path):
    path, asked = tmp_path / "rows.jsonl", "[{'role': 'user', 'content': 'Hi'}]"
    path.write_text(json.dumps({"prompt": asked, "completion": "Hello."}) + "\n")
    with pytest.raises(ValueError, match="'prompt' must be text, or its messages as JSON"):
        read_examples(path, format=AUTO, needs_output=needs_output)
    for prompt in ("Write a list", '[{"value": 1}] Sum these', f"{asked} What is this?"):
        path.write_text(json.dumps({"prompt": prompt, "completion": asked}) + "\n")
        (row,) = read_examples(path, format=AUTO, needs_output=needs_output)
        assert row.output == asked


def test_queries_may_have_rows_of_several_formats(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    turns = [{"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]
    path = tmp_path / "queries.jsonl"
    rows = {"messages": messages}, {"conversations": turns}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_examples(path, format=AUTO, needs_output=False)
    assert [row.output for row in found] == ["a", "b"]
    with pytest.raises(ValueError, match="rows of one format"):
        read_examples(path, format=AUTO)
