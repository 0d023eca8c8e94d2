"""Rows in the formats that other tools write become one of three contents, and files again."""

import json
import pathlib
from typing import Any

from absl.testing import parameterized
from folders import FolderTest
from snapshots import refused

from raslik_jax.data import examples as ex
from raslik_jax.data.contents import Conversation, Passage
from raslik_jax.data.examples import answered, content_of, prefixed
from raslik_jax.data.read.formats import (
    AUTO,
    describe_columns,
    parse_fields,
    read_examples,
    read_written,
)

_USER, _YES = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
_MORE = [{"role": "system", "content": "Be brief."}, _USER, _YES, {**_USER, "content": "Sure?"}]
_TALK = [*_MORE, {"role": "assistant", "content": "I am."}]
_LINES = "system: Be brief.\nuser: Is it?\nassistant: Yes.\nuser: Sure?"

_SURE = (_LINES, "", "I am."), Conversation(tuple(_TALK))
_SHARED = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
_SHARED += [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "I am."}]
_ASKED = {"instruction": "Sure?", "output": "I am.", "system": "Be brief."}

# A row of each as LLaMA-Factory, TRL and axolotl write them, its texts and its content.
_ROWS: dict[str, tuple[dict[str, Any], tuple[str, str, str], Any]] = {
    "alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all"},
        ("Add.", "1 2", "3"),
        None,
    ),
    "alpaca, system and history": ({**_ASKED, "history": [["Is it?", "Yes."]]}, *_SURE),
    "alpaca, system and tools": (
        {**_ASKED, "history": [["Is it?", "Yes."]], "tools": [{}]},
        *_SURE,
    ),
    "messages": ({"messages": _TALK, "prompt": "Is it?", "score": 2}, *_SURE),
    "messages, key of axolotl": (
        {"conversations": _TALK[1:3]},
        ("Is it?", "", "Yes."),
        Conversation(tuple(_TALK[1:3])),
    ),
    "messages, as a cell of a table": ({"messages": json.dumps(_TALK), "tools": ""}, *_SURE),
    "sharegpt": ({"conversations": _SHARED, "system": "Be brief."}, *_SURE),
    "prompt_completion": (
        {"prompt": "The sky", "completion": " is blue."},
        ("The sky", "", " is blue."),
        Passage("The sky", " is blue."),
    ),
    "prompt_completion, messages": (
        {"prompt": _MORE, "completion": [_TALK[-1]]},
        (_LINES, "", "I am."),
        Conversation(tuple(_TALK), 4, True),
    ),
    "text": ({"text": "A story."}, ("", "", "A story."), Passage("", "A story.")),
}

# Rows by what is wrong with them; some have answers that were not taught, media or other keys.
_FILE = pathlib.Path(__file__).parents[2] / "fixtures" / "refused_rows.json"
_REFUSED = json.loads(_FILE.read_text())


class FormatsBase(FolderTest):
    def _read(self, *rows, **options):
        path = self.folder / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return read_examples(path, **({"format": AUTO} | options))


class FormatsTest(FormatsBase):
    @parameterized.named_parameters((name, name) for name in _ROWS)
    def test_a_row_is_detected_read_and_written_as_it_was(self, name):
        record, texts, content = _ROWS[name]
        own = {"place": "Rome", "source": {"year": 2024}, "row_texts": [1], "kind": "a"}
        (row,) = self._read({**record, **own, "is_target": True})
        self.assertEqual((row[1:4], row.content), (texts, content))
        self.assertEqual((row.is_target, row.source, row.place), (True, "", 1))
        self.assertEqual({key: row.extra[key] for key in own}, own)
        path = self.folder / "written.jsonl"
        ex.write_examples(path, [row], extra=[{"is_target": row.is_target, "score": 0.5}])
        written = json.loads(path.read_text())
        self.assertEqual((written["score"], written["kind"], written["place"]), (0.5, "a", 1))
        self.assertEqual(read_written(path), (row,))

    def test_a_system_prompt_and_a_history_are_part_of_what_is_asked(self):
        plain = {"instruction": "Add.", "output": "3"}
        rows = self._read(
            plain, {**plain, "system": "Count."}, {**plain, "history": [["Hi", "Ho"]]}, plain
        )
        self.assertLen({ex.prompt_of(row) for row in rows}, 3)
        self.assertLen({row.example_id for row in rows}, 4)
        self.assertEqual(rows[0].example_id, ex.content_id("Add.", "", "3"))
        said = content_of(rows[2]).messages
        self.assertEqual([m["content"] for m in said], ["Hi", "Ho", "Add.", "3"])

    def test_turns_and_what_is_asked(self):
        talk = Conversation(tuple(_TALK))
        self.assertEqual((talk.turns, talk.asked), ((2, 4), tuple(_MORE)))
        muted = talk._replace(muted=(4,))
        self.assertEqual((muted.turns, muted.asked), ((2,), tuple(_TALK[:2])))

    def test_a_message_with_the_keys_of_two_formats_has_the_text_that_is_there(self):
        """As in a table that was joined from both."""
        turns = [{"from": "human", "value": "a"}, {"role": "assistant", "content": "b"}]
        whole = [dict.fromkeys(("role", "content", "from", "value")) | turn for turn in turns]
        (row,) = self._read({"messages": whole})
        self.assertEqual((row.instruction, row.output), ("a", "b"))

    def test_a_query_waits_for_its_answer_and_gets_it(self):
        for name in ("messages", "sharegpt", "prompt_completion, messages", "prompt_completion"):
            record, _, _ = _ROWS[name]
            (whole,) = self._read(record)
            asked = {
                "messages": {**record, "messages": _MORE},
                "sharegpt": {**record, "conversations": record.get("conversations", [])[:3]},
            }.get(name, {"prompt": record.get("prompt")})
            (query,) = self._read(asked, needs_output=False)
            self.assertEqual((query.instruction, query.output), (whole.instruction, ""))
            path = self.folder / "query.jsonl"
            ex.write_examples(path, [query])
            self.assertEqual(read_written(path), (query,))
            again = answered(query, whole.output)
            self.assertEqual((again.output, again.content), (whole.output, whole.content))
            # A second answer takes the place of the first.
            self.assertEqual(answered(answered(query, "No."), whole.output), again)

    @parameterized.named_parameters((name, record) for name, (record, _, _) in _ROWS.items())
    def test_a_text_stands_before_the_last_question_and_nothing_else_changes(self, record):
        (row,) = self._read(record)
        longer, content = prefixed(row, "So: "), content_of(row)
        if content == Passage("", "A story."):
            self.assertIsNone(longer)
            return
        found = content_of(longer)
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

    @parameterized.named_parameters((name, record) for name, (record, _, _) in _ROWS.items())
    def test_earlier_turns_come_before_the_last_question(self, record):
        (row,) = self._read(record)
        turns = [("Why?", "So."), ("How?", "Thus.")]
        longer, content = ex.asked_after(row, turns), content_of(row)
        if content == Passage("", "A story."):
            self.assertIsNone(longer)
            return
        text, found = "Why?\nSo.\n\nHow?\nThus.\n\n", longer.content
        self.assertEqual(longer.output, row.output)
        if isinstance(content, Passage):
            self.assertEqual(found, content._replace(prompt=text + content.prompt))
            return
        at = max(i for i, one in enumerate(content.asked) if one["role"] == "user")
        new = [message["content"] for message in found.messages[at : at + 4]]
        self.assertEqual(new, ["Why?", "So.", "How?", "Thus."])
        left = (*found.messages[:at], *found.messages[at + 4 :])
        self.assertEqual(left, content.messages)
        self.assertEqual(found.messages[len(found.asked) :], content.messages[len(content.asked) :])
        muted = [found.messages[place] for place in found.muted]
        self.assertEqual(muted, [content.messages[place] for place in content.muted])
        if row.content is None:
            framed = ex.asked_after(row, turns, is_framed=True)
            self.assertEqual(framed.instruction, text + row.instruction)

    def test_an_exchange_is_the_last_question_and_its_answer(self):
        talk = [
            {"role": "system", "content": "Be brief."},
            _USER,
            _YES,
            {**_USER, "content": "How?"},
        ]
        (row,) = self._read({"messages": [*talk, {**_YES, "content": "Thus."}]})
        self.assertEqual(ex.exchange_of(row), ("How?", "Thus."))
        plain = ex.make_example("Add.", "1 2", "3")
        self.assertEqual(ex.exchange_of(plain), ("Add.\n1 2", "3"))

    def test_a_system_prompt_of_sharegpt_is_said_whoever_repeats_it(self):
        turns = [{"from": "human", "value": "Be brief. Why?"}, {"from": "gpt", "value": "So."}]
        for said in (turns, [*map(json.dumps, turns)]):
            (row,) = self._read({"conversations": said, "system": "Be brief."})
            first, *others = content_of(row).messages
            self.assertEqual(first, {"role": "system", "content": "Be brief."})
            self.assertLen(others, 2)

    def test_a_system_prompt_that_is_no_text_is_refused(self):
        for record in ({"messages": _TALK}, {"prompt": "a", "completion": "b"}):
            with self.assertRaisesRegex(ValueError, "system.* must be text"):
                self._read(record | {"system": [{"text": "Be brief."}]})

    @parameterized.parameters(
        ({"title": "A", "content": "B"},),
        ({"value": "20", "unit": "C"},),
        ("Paris",),
        ({"text": "a"},),
    )
    def test_a_result_of_a_tool_is_read_as_it_is_or_refused(self, part):
        talk = [_USER, {"role": "tool", "content": [part]}, _YES]
        with self.assertRaisesRegex(ValueError, "content of message 2 must be text"):
            self._read({"messages": talk})
        talk[1] = {"role": "tool", "content": [{"type": "text", "text": "Paris"}]}
        (row,) = self._read({"messages": talk})
        self.assertEqual(content_of(row).messages[1], talk[1])

    def test_a_part_with_two_texts_is_refused(self):
        said = [{"type": "text", "text": "a", "value": "b"}]
        with self.assertRaisesRegex(ValueError, "content of message 1 must be text"):
            self._read({"messages": [{"role": "user", "content": said}, _YES]})

    @parameterized.parameters("Be brief.", " ", None)
    def test_a_system_prompt_may_stand_beside_messages_that_say_it(self, system):
        (row,) = self._read({"messages": _TALK, "system": system})
        self.assertEqual(len(content_of(row).messages), len(_TALK))

    def test_a_text_stands_before_parts_of_a_message(self):
        parts = [{"type": "text", "text": "Is it?"}]
        for said in (parts, ["Is it?"], [{"type": "text", "value": "Is it?"}], {"text": "Is it?"}):
            (row,) = self._read({"messages": [{"role": "user", "content": said}, _YES]})
            self.assertEqual(row.instruction, "Is it?")
            asked = content_of(prefixed(row, "So: ")).messages[0]["content"]
            self.assertEqual(asked, [{"type": "text", "text": "So: "}, *parts])
        (row,) = self._read({"messages": [{"role": "system", "content": "Begin."}, _YES]})
        self.assertIsNone(prefixed(row, "So: "))

    def test_a_conversation_that_ends_with_the_user_keeps_its_answers(self):
        (row,) = self._read({"messages": _MORE})
        self.assertEqual((row.instruction, row.output), ("system: Be brief.\nuser: Is it?", "Yes."))
        path = self.folder / "row.jsonl"
        ex.write_examples(path, [row])
        self.assertEqual(read_written(path)[0][1:4], row[1:4])

    @parameterized.named_parameters(_REFUSED.items())
    def test_other_rows_are_refused_in_one_short_sentence(self, rows):
        self.monkeypatch.chdir(self.folder)  # a long path leaves less of the message
        self.folder = pathlib.Path()
        with refused() as caught:
            self._read(*rows)
        self.assertLessEqual(len(str(caught.value)), 300)

    def test_a_format_can_be_said_and_keys_renamed(self):
        record = {"messages": [_USER, _YES], "prompt": "a", "completion": "b", "dialog": _TALK}
        (row,) = self._read(record, format="messages")
        self.assertEqual((row.output, row.extra["prompt"]), ("Yes.", "a"))
        (row,) = self._read(record, format="messages", fields={"messages": "dialog"})
        self.assertEqual(row.output, "I am.")
        (row,) = self._read({"q": "a", "r": "b"}, fields={"prompt": "q", "completion": "r"})
        self.assertEqual(row.content, Passage("a", "b"))

    @parameterized.parameters("Hi", None)
    def test_turns_that_are_no_list_are_refused(self, value):
        with refused():
            self._read({"conversations": value}, format="sharegpt")

    def test_tools_are_text_without_nul_and_may_be_null(self):
        talk = {"messages": [_USER, _YES]}
        with self.assertRaisesRegex(ValueError, "valid Unicode without NUL"):
            self._read(talk | {"tools": [{"name": "a\0"}]})
        (row,) = self._read(talk | {"chat_template_kwargs": {"tools": None}})
        self.assertEqual(row.content.options, {"tools": None})

    def test_what_has_no_prompt_cannot_be_answered(self):
        (row,) = self._read(_ROWS["text"][0])
        with refused():
            answered(row, "Yes.")


class FlagsTest(FormatsBase):
    @parameterized.parameters(
        ("weight", 0, 1), ("weight", 0.0, 1.0), ("train", False, True), ("training", False, None),
        ("loss", False, True), ("loss_mask", 0, 1), ("loss_weight", 0.0, 1.0),
        ("train", "false", ""), ("train", "FALSE", "TRUE"), ("weight", "0", "1.0"),
    )  # fmt: skip
    def test_a_turn_whose_flag_is_0_is_no_target(self, name, off, on):
        talk = [_USER, {**_YES, name: off}, {**_USER, "content": "Sure?"}, {**_YES, name: on}]
        shared = [
            {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} | own
            for m, own in zip(talk, [{}, {name: off}, {}, {name: on}], strict=True)
        ]
        texts = [*map(json.dumps, talk)]
        for record in ({"messages": talk}, {"conversations": shared}, {"messages": texts}):
            (row,) = self._read(record)
            self.assertEqual((row.content.turns, row.is_muted), ((3,), False))
            path = self.folder / "row.jsonl"
            ex.write_examples(path, [row])
            self.assertEqual(read_written(path), (row,))

    def test_a_flag_of_another_turn_changes_nothing(self):
        (row,) = self._read({"messages": [{**_USER, "weight": 0}, {**_YES, "weight": 1}]})
        self.assertEqual(row.content.turns, (1,))

    def test_a_row_without_a_target_is_muted(self):
        rows = self._read({"messages": [_USER, {**_YES, "weight": 0}]}, {"messages": [_USER, _YES]})
        self.assertEqual([row.is_muted for row in rows], [True, False])
        self.assertEqual(rows[0].output, "Yes.")

    def test_the_flags_of_a_query_say_nothing_of_its_answer(self):
        talk = [_USER, _YES, _USER, {**_YES, "content": "No.", "weight": 0}]
        parts = {"prompt": [_USER], "completion": [{**_YES, "train": False}]}
        for record, turns in (({"messages": talk}, (1, 3)), (parts, (1,))):
            (row,) = self._read(record, needs_output=False)
            self.assertEqual((row.content.turns, row.is_muted), (turns, False))

    @parameterized.parameters(0.5, 2, -1, "half")
    def test_a_fraction_is_refused_with_message_and_field(self, value):
        with refused():
            self._read({"messages": [_USER, {**_YES, "weight": value}]})

    @parameterized.parameters(
        ("weight", [0, 1, None], [True, False, False]),
        ("weight", ["0.0", "1.0", ""], [True, False, False]),  # cells as pandas writes them
        ("train", ["False", "True", "True"], [True, False, False]),
        ("train", [True, False, True], [False, True, False]),
        ("loss", [0.0, 1.7, 1.0], [False, False, False]),  # measured losses
        ("weight", [72.5, 0, 1], [False, False, False]),  # of a parcel
        ("loss_weight", [0, 0, 0], [False, False, False]),
    )
    def test_a_column_is_one_of_flags_where_all_its_values_are(self, name, values, muted):
        plain = {"instruction": "Add.", "output": "3"}
        rows = self._read(*({**plain, "output": str(v), name: v} for v in values))
        self.assertEqual([row.is_muted for row in rows], muted)
        # A 0 that mutes no row is said.
        is_ignored = {0} & {*values} and not any(muted)
        said = f"the column '{name}' has values other than 0 and 1, or no 1: its rows with 0 count"
        self.assertEqual(describe_columns(rows), f"{said} too" if is_ignored else "")


class UnreadTest(FormatsBase):
    def test_a_column_of_sentences_that_is_not_read_is_said(self):
        """As the context of Dolly if only its answers are mapped."""
        row = {
            "instruction": "Who is it?",
            "context": "A fish.",
            "response": "It",
            "category": "qa",
        }
        rows = self._read(row, row | {"context": ""}, fields={"output": "response"})
        said = describe_columns(rows)
        self.assertStartsWith(said, "the text of the column 'context' is not trained on: map it")
        fields = {"output": "response", "input": "context"}
        self.assertEqual(describe_columns(self._read(row, fields=fields)), "")

    @parameterized.parameters(
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "completion=chosen"),
        ({"chosen": _TALK, "rejected": _TALK}, "messages=chosen"),
        ({"prompt": "a", "chosen": _TALK, "rejected": _TALK, "messages": _TALK}, "messages=chosen"),
        ({"instruction": "a", "input": "", "chosen": "b", "rejected": "c", "output": ["b", "c"]},
         "output=chosen"),
        ({"conversations": [{"from": "human", "value": "Is it?"}],
          "chosen": {"from": "gpt", "value": "Yes."}, "rejected": {"from": "gpt", "value": "No."}},
         "prompt=conversations,completion=chosen"),
        ({"question": "Is it?", "chosen": "Yes.", "rejected": "No.", "instruction": "", "id": 1},
         "prompt=question,completion=chosen"),
        ({"chosen": "Human: a", "rejected": "Human: b"}, "text=chosen"),
    )  # fmt: skip
    def test_preferences_are_refused_by_name_and_read_by_the_map_that_is_named(
        self, record, fields
    ):
        said = rf":1: .*\(.*chosen.*--corpus.records.fields={fields}"
        with self.assertRaisesRegex(ValueError, said):
            self._read(record)
        (row,) = self._read(record, fields=parse_fields(fields))
        texts_ = [row.output, getattr(row.content, "completion", None)]
        self.assertTrue({"b", "Yes.", "I am.", "Human: a"} & {*texts_})

    def test_a_long_path_leaves_room_for_what_to_do(self):
        self.folder /= "x" * 200
        self.folder.mkdir()
        with self.assertRaisesRegex(ValueError, r"^\.\.\.x{80,}.rows.jsonl:1: .*response.*: give"):
            self._read({"prompt": "a", "response": "b"})

    def test_a_label_of_another_meaning_is_read(self):
        record = {"messages": [_USER, _YES], "label": False}
        (row,) = self._read(record, fields={"is_target": "label"})
        self.assertEqual(row.is_target, False)
        (row,) = self._read({"instruction": "a", "output": "b", "label": False, "chosen": True})
        self.assertEqual(row.extra, {"label": False, "chosen": True})
        (row,) = self._read({"messages": [_USER, _YES], "label": 0})  # a class
        self.assertEqual(row.extra, {"label": 0})

    def test_empty_media_and_a_column_of_names_are_read(self):
        rows = self._read(
            {"messages": [_USER, _YES], "images": [], "videos": None},
            {"messages": [_USER, _YES], "image": "a.jpg"},
        )
        self.assertEqual(rows[1].extra, {"image": "a.jpg"})


class OwnColumnsTest(FormatsBase):
    @parameterized.parameters(
        ([1, 2], ["1", "2"]), (["a", "b"], ["a", "b"]), (["a", "a"], None), ([1, 1], None),
        ([{"k": 1}, "a"], None), ([1.5, 2.5], None),
    )  # fmt: skip
    def test_ids_name_rows_where_they_can_and_are_kept_where_not(self, ids, names):
        plain = {"instruction": "Add.", "output": "3"}
        rows = self._read(*({**plain, "id": one} for one in ids))
        self.assertLen({row.example_id for row in rows}, 2)
        if names:
            self.assertEqual([row.example_id for row in rows], names)
            self.assertEqual([dict(row.extra) for row in rows], [{}, {}])
        elif ids != [{"k": 1}, "a"]:
            self.assertEqual([row.extra["id"] for row in rows], ids)
        path = self.folder / "rows.jsonl"
        ex.write_examples(path, rows)
        self.assertEqual(read_written(path), rows)

    @parameterized.parameters(
        ({"from": "human"}, {"from": "function_call"}, {"from": "observation"}, {"from": "gpt"}),
        ({"role": "user"}, {"role": "tool_call"}, {"role": "tool"}, {"role": "assistant"}),
    )
    def test_tool_calls_are_answers_and_their_results_are_not(self, *roles):
        texts = ["Look.", '{"name": "look", "arguments": {}}', "{}", "Done."]
        key = "value" if "from" in roles[0] else "content"
        turns = [{**role, key: text} for role, text in zip(roles, texts, strict=True)]
        (row,) = self._read({"conversations": turns, "tools": '[{"name": "look"}]'})
        self.assertEqual([m["role"] for m in row.content.messages][1:3], ["assistant", "tool"])
        self.assertEqual(row.content.turns, (1, 3))
        function = {"type": "function", "function": {"name": "look"}}
        self.assertEqual(row.content.options, {"tools": [function]})
        calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
        self.assertEqual(row.content.messages[1]["tool_calls"], calls)
        path = self.folder / "rows.jsonl"
        ex.write_examples(path, [row])
        self.assertEqual([*read_written(path)], [row])
        with self.assertRaisesRegex(ValueError, "message 2 must hold a call as JSON with a name"):
            self._read({"conversations": [turns[0], {**turns[1], key: "look()"}, *turns[2:]]})

    @parameterized.parameters(
        ({"instruction": "a", "input": None, "output": None}, ("a", "", "")),
        ({"instruction": "a", "input": "", "output": "", "messages": ""}, ("a", "", "")),
        ({"prompt": "a", "completion": ""}, ("a", "", "")),
    )
    def test_a_blank_cell_is_an_empty_text(self, record, texts):
        self.assertEqual(self._read(record)[0][1:4], texts)
