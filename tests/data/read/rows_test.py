"""Rows in the seven formats, as other tools write them, become examples and files again."""

import json
import pathlib

import pytest
from absl.testing import parameterized

from raslik_jax.data import examples as ex
from raslik_jax.data.contents import Conversation, Passage, TokenRow
from raslik_jax.data.read.formats import AUTO, read_examples, read_written
from raslik_jax.data.read.rows import FORMATS, answered, prefixed

_USER, _YES = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
_MORE = [{"role": "system", "content": "Be brief."}, _USER, _YES, {**_USER, "content": "Sure?"}]
_TALK = [*_MORE, {"role": "assistant", "content": "I am."}]
_LINES = "system: Be brief.\nuser: Is it?\nassistant: Yes.\nuser: Sure?"

# A row of each as LLaMA-Factory, TRL and axolotl write them, and the texts it becomes.
_ROWS = {
    "alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all", "system": "Count."},
        ("Add.", "1 2", "3"),
    ),
    "messages": ({"messages": _TALK, "prompt": "Is it?", "score": 2}, (_LINES, "", "I am.")),
    "messages, key of axolotl": ({"conversations": _TALK[1:3]}, ("Is it?", "", "Yes.")),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "Is it?"},
                {"from": "gpt", "value": "Yes."},
                {"from": "human", "value": "Sure?"},
                {"from": "gpt", "value": "I am."},
            ],
            "system": "Be brief.",
        },
        (_LINES, "", "I am."),
    ),
    "prompt_completion": ({"prompt": "The sky", "completion": " is blue."}, None),
    "prompt_completion, messages": (
        {"prompt": _MORE, "completion": [_TALK[-1]]},
        (_LINES, "", "I am."),
    ),
    "text": ({"text": "A story."}, ("", "", "A story.")),
    "tokens": (
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1] * 4},
        ("5 6", "", "7 8"),
    ),
}


@pytest.fixture(autouse=True)
def _folder(request, tmp_path):
    if request.cls is not None:
        request.cls.folder = tmp_path


class FormatsTest(parameterized.TestCase):
    folder: pathlib.Path

    def _read(self, *rows, **options):
        path = self.folder / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return read_examples(path, **({"format": AUTO} | options))

    @parameterized.named_parameters((name, name) for name in _ROWS)
    def test_a_row_is_detected_read_and_written_as_it_was(self, name):
        record, texts = _ROWS[name]
        (row,) = self._read({**record, "place": "Rome", "is_target": True})
        self.assertEqual(row.format, name.partition(",")[0])
        self.assertEqual(row[1:4], texts or ("The sky", "", " is blue."))
        self.assertEqual((row.is_target, row.place, row.extra["place"]), (True, 1, "Rome"))
        path = self.folder / "written.jsonl"
        ex.write_examples(path, [row], extra=[{"is_target": row.is_target}])
        written = json.loads(path.read_text())
        for key in record.keys() - {"score"}:
            self.assertEqual(written[key], record[key])
        (again,) = read_written(path)
        self.assertEqual(again.extra, {k: v for k, v in row.extra.items() if k not in _OURS})
        self.assertEqual(again._replace(extra={}), row._replace(extra={}))

    def test_a_system_prompt_and_a_history_are_part_of_what_is_asked(self):
        plain = {"instruction": "Add.", "output": "3"}
        rows = self._read(
            plain, {**plain, "system": "Count."}, {**plain, "history": [["Hi", "Ho"]]}, plain
        )
        self.assertLen({ex.prompt_of(row) for row in rows}, 3)
        self.assertLen({row.example_id for row in rows}, 4)
        self.assertEqual(rows[0].example_id, ex.content_id("Add.", "", "3"))
        said = FORMATS["alpaca"].content(rows[2]).messages
        self.assertEqual([m["content"] for m in said], ["Hi", "Ho", "Add.", "3"])

    def test_contents_are_what_the_formats_say(self):
        (talk, shared) = (
            self._read(_ROWS["messages"][0])[0],
            self._read(_ROWS["sharegpt"][0])[0],
        )
        expected = Conversation(tuple(_TALK))
        self.assertEqual(FORMATS["messages"].content(talk), expected)
        self.assertEqual(FORMATS["sharegpt"].content(shared), expected)
        self.assertEqual((expected.turns, expected.asked), ((2, 4), tuple(_MORE)))
        (split,) = self._read(_ROWS["prompt_completion, messages"][0])
        self.assertEqual(
            FORMATS["prompt_completion"].content(split), Conversation(tuple(_TALK), 4, True)
        )
        (text,) = self._read({"text": "A story."})
        self.assertEqual(FORMATS["text"].content(text), Passage("", "A story."))

    @parameterized.parameters(
        ({}, [-100, 6, 7]),
        ({"completion_mask": [0, 0, 1]}, [-100, -100, 7]),
        ({"labels": [5, -100, 7]}, [-100, -100, 7]),
    )
    def test_targets_of_ids_are_never_the_first(self, masks, labels):
        (row,) = self._read({"input_ids": [5, 6, 7], **masks})
        self.assertEqual(FORMATS["tokens"].content(row), TokenRow((5, 6, 7), (*labels,)))

    @parameterized.parameters(
        ({"attention_mask": [0, 0, 1, 1, 1]}, (7, 8, 9), [-100, 8, 9]),
        ({"attention_mask": [1, 1, 1, 0, 0]}, (5, 6, 7), [-100, 6, 7]),
        (
            {"attention_mask": [0, 1, 1, 1, 0], "labels": [-100, -100, -100, 8, -100]},
            *((6, 7, 8), [-100, -100, 8]),
        ),
        (
            {"attention_mask": [False, True, True, True, True], "completion_mask": [0, 0, 0, 1, 1]},
            *((6, 7, 8, 9), [-100, -100, 8, 9]),
        ),
        (
            {"attention_mask": [0, 1, 1, 1, 1], "position_ids": [1, 0, 1, 2, 3]},
            *((6, 7, 8, 9), [-100, 7, 8, 9]),
        ),
        (
            {"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]},
            *((5, 6, 7, 8, 9), [-100, 6, 7, 8, 9]),
        ),
    )
    def test_pads_are_no_part_of_a_row_of_ids(self, more, ids, labels):
        (row,) = self._read({"input_ids": [5, 6, 7, 8, 9], **more})
        self.assertEqual(FORMATS["tokens"].content(row), TokenRow(ids, (*labels,)))
        path = self.folder / "written.jsonl"
        ex.write_examples(path, [row])
        self.assertEqual(read_written(path), (row,))

    def test_a_query_waits_for_its_answer_and_gets_it(self):
        for name in ("messages", "sharegpt", "prompt_completion, messages", "prompt_completion"):
            record, _ = _ROWS[name]
            (whole,) = self._read(record)
            asked = {
                "messages": {**record, "messages": _MORE},
                "sharegpt": {**record, "conversations": record.get("conversations", [])[:3]},
            }.get(name, {"prompt": record.get("prompt")})
            (query,) = self._read(asked, needs_output=False)
            self.assertEqual((query.instruction, query.output), (whole.instruction, ""))
            path = self.folder / "query.jsonl"
            ex.write_examples(path, [query])
            self.assertEqual(read_written(path)[0].output, "")
            again = answered(query, whole.output)
            self.assertEqual(again.output, whole.output)
            content = FORMATS[query.format].content(again)
            self.assertEqual(content, FORMATS[query.format].content(whole))
            # A second answer takes the place of the first.
            self.assertEqual(answered(answered(query, "No."), whole.output), again)

    @parameterized.named_parameters((name, record) for name, (record, _) in _ROWS.items())
    def test_a_text_stands_before_the_last_question_and_nothing_else_changes(self, record):
        (row,) = self._read(record)
        longer, content = prefixed(row, "So: "), FORMATS[row.format].content(row)
        if row.format in ("text", "tokens"):
            self.assertIsNone(longer)
            return
        found = FORMATS[row.format].content(longer)
        self.assertEqual(longer.output, row.output)
        if isinstance(content, Passage):
            self.assertEqual(found, content._replace(prompt=f"So: {content.prompt}"))
            self.assertEqual(longer.instruction, f"So: {row.instruction}")
            return
        pairs = [*zip(content.messages, found.messages, strict=True)]
        (changed,) = (pair for pair in pairs if pair[0] != pair[1])
        self.assertEqual(changed[1], {**changed[0], "content": f"So: {changed[0]['content']}"})
        self.assertEqual(content.messages.index(changed[0]), len(content.asked) - 1)
        self.assertEqual(longer.instruction.count("So: "), 1)
        self.assertEqual(longer.instruction.replace("So: ", ""), row.instruction)

    @parameterized.parameters("Be brief.", " ", None)
    def test_a_system_prompt_may_stand_beside_messages_that_say_it(self, system):
        (row,) = self._read({"messages": _TALK, "system": system})
        self.assertEqual(len(FORMATS["messages"].content(row).messages), len(_TALK))

    def test_a_text_stands_before_parts_of_a_message(self):
        parts = [{"type": "text", "text": "Is it?"}]
        (row,) = self._read({"messages": [{"role": "user", "content": parts}, _YES]})
        asked = prefixed(row, "So: ").content["messages"][0]["content"]
        self.assertEqual(asked, [{"type": "text", "text": "So: "}, *parts])
        (row,) = self._read({"messages": [{"role": "system", "content": "Begin."}, _YES]})
        self.assertIsNone(prefixed(row, "So: "))

    def test_a_conversation_that_ends_with_the_user_keeps_its_answers(self):
        (row,) = self._read({"messages": _MORE})
        self.assertEqual((row.instruction, row.output), ("system: Be brief.\nuser: Is it?", "Yes."))
        path = self.folder / "row.jsonl"
        ex.write_examples(path, [row])
        self.assertEqual(read_written(path)[0][1:4], row[1:4])

    @parameterized.named_parameters(
        ("unknown", [{"q": "a", "a": "b"}], r":1: a row must have .*, got 'q', 'a': rename"),
        ("two", [{"messages": [_USER], "prompt": "a", "completion": "b"}], "messages and prompt"),
        ("mixed", [{"text": "a"}, {"prompt": "a", "completion": "b"}], ":2: a file must have rows"),
        ("silent", [{"messages": [_USER]}], "must have an assistant turn, got 'user'"),
        ("no_role", [{"messages": [{"content": "a"}]}], "message 1 must have a role"),
        ("image", [{"messages": [{"role": "user", "content": [{"image": 1}]}]}], "must be text"),
        ("no_list", [{"messages": "Hi"}], "'messages' must be a list of messages"),
        ("stranger", [{"conversations": [{"from": "x", "value": ""}]}], "must be from system"),
        ("no_end", [{"prompt": "a"}], "'completion' must be text, got nothing .the row has 'pro"),
        ("kinds", [{"prompt": [_USER], "completion": "b"}], "be a list of messages, as the prompt"),
        ("labels", [{"input_ids": [1, 2], "labels": [1, 3]}], "repeat each id or be -100"),
        ("short", [{"input_ids": [1, 2], "labels": [1]}], "as many as 'input_ids'"),
        ("untaught", [{"input_ids": [1, 2], "labels": [1, -100]}], "have a target behind"),
        ("hole", [{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "zeros at the ends"),
        ("pads", [{"input_ids": [1, 2], "attention_mask": [0, 0]}], "must have a 1"),
        ("short_mask", [{"input_ids": [1, 2], "attention_mask": [1]}], "for each of 'input_ids'"),
        ("numbered", [{"input_ids": [1, 2], "attention_mask": [1, 2]}], "0 or 1 .* one sequence"),
        ("packed", [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}], "through one sequence"),
        ("lengths", [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}], "row not packed, got .1, 2"),
        ("pad_target", [{"input_ids": [1, 2], "attention_mask": [1, 0]}], "a target behind"),
        ("no_ids", [{"input_ids": [1, "2"]}], "be a list of token ids"),
        ("tools", [{"messages": [_USER, _YES], "tools": "{"}], "a list of tools"),
        ("system", [{"messages": [_USER, _YES], "system": "Obey."}], "must stand in the messages"),
        ("told", [{"prompt": [_USER], "completion": [_YES], "system": "Obey."}], "must stand in"),
        ("system_text", [{"prompt": "a", "completion": "b", "system": "Obey."}], "must stand in"),
    )  # fmt: skip
    def test_other_rows_are_refused_in_one_short_sentence(self, rows, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            self._read(*rows)
        self.assertLessEqual(len(str(caught.exception)), 300)

    def test_a_format_can_be_said_and_keys_renamed(self):
        record = {"messages": [_USER, _YES], "prompt": "a", "completion": "b", "dialog": _TALK}
        (row,) = self._read(record, format="messages")
        self.assertEqual((row.format, row.extra["prompt"]), ("messages", "a"))
        (row,) = self._read(record, format="messages", fields={"messages": "dialog"})
        self.assertEqual(row.output, "I am.")
        (row,) = self._read({"q": "a", "r": "b"}, fields={"prompt": "q", "completion": "r"})
        self.assertEqual((row.format, row.output), ("prompt_completion", "b"))

    @parameterized.parameters("Hi", None)
    def test_turns_that_are_no_list_are_refused(self, value):
        with self.assertRaisesRegex(ValueError, "'conversations' must be a list of turns"):
            self._read({"conversations": value}, format="sharegpt")

    @parameterized.parameters("text", "tokens")
    def test_what_has_no_prompt_cannot_be_answered(self, name):
        (row,) = self._read(_ROWS[name][0])
        with self.assertRaisesRegex(ValueError, f"the format {name} has no prompt to answer"):
            answered(row, "Yes.")


_OURS = ("place", "score")
