"""Which text of a query is traced follows one rule, for everything that reads queries."""

import contextlib
import dataclasses
import gc
import io
import json
import pathlib
import tempfile
import weakref
from unittest import mock

import linear_decoder
import pytest
from absl.testing import parameterized
from support import tiny_model_config

from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, SketchConfig
from raslik_jax.data import examples
from raslik_jax.data.contents import Conversation, Passage
from raslik_jax.data.examples import answered
from raslik_jax.data.tokens import tokenization
from raslik_jax.models import decode
from raslik_jax.run import artifacts
from raslik_jax.run.stages import generate
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.losses import BoundModel


def _query(name, output):
    return examples.make_example(f"Say {name}.", "", output)._replace(example_id=name)


class RetrievalQueriesTest(parameterized.TestCase):
    def _workspace(self, query_output, outputs, answers=None):
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        workspace = Workspace(root, Config(sketch=SketchConfig(query_output=query_output)))
        workspace.tokenizer = tokenization.train_bpe(["The sky is blue"] * 3, vocab_size=300)
        queries = {name: () for name in examples.QUERY_SETS}
        queries["retrieval"] = tuple(_query(name, text) for name, text in outputs.items())
        workspace.corpus = examples.Corpus((), (_query("t", "x"),), queries)
        if answers is not None:
            folder = root / "references" / "retrieval"
            folder.mkdir(parents=True)
            lines = [json.dumps({"id": name, "output": text}) for name, text in answers.items()]
            (folder / "finetuned.jsonl").write_text("\n".join(lines) + "\n")
        return workspace

    @parameterized.parameters(
        ("given", {"a": "bad", "b": "worse"}, {}, ["bad", "worse"]),
        ("given", {"a": "bad", "b": " "}, {"b": "own"}, ["bad", "own"]),
        ("own", {"a": "bad", "b": ""}, {"a": "one", "b": "two"}, ["one", "two"]),
        ("gold", {"a": "bad", "b": "worse"}, None, ["bad", "worse"]),
    )
    def test_a_given_output_is_traced_and_the_model_answers_the_rest(
        self, query_output, outputs, answers, traced
    ):
        workspace = self._workspace(query_output, outputs, answers)
        self.assertEqual([row.output for row in workspace.retrieval_queries()], traced)

    def test_only_queries_without_an_output_are_decoded(self):
        workspace = self._workspace("given", {"a": "bad", "b": ""})
        workspace.finetuned = {}
        workspace.with_adapter = lambda lora: BoundModel(linear_decoder.ADAPTED, lora, {})
        workspace.answer = lambda model, rows, what: [
            (f"to {row.example_id}", False) for row in rows
        ]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            generate.make_retrieval_answers(workspace, workspace.root)
        text = (workspace.root / "finetuned.jsonl").read_text()
        self.assertEqual(json.loads(text), {"id": "b", "output": "to b"})
        self.assertIn("1 of 1 own answers are cut at 128 tokens", said.getvalue())
        given = self._workspace("given", {"a": "bad"})  # has no model at all
        generate.make_retrieval_answers(given, given.root)
        self.assertEqual((given.root / "finetuned.jsonl").read_text(), "")

    def test_what_the_model_said_to_a_text_is_what_is_traced(self):
        workspace, content = self._workspace("own", {}), Passage("The sky is", "")
        workspace.template_name, workspace.end_ids = "plain", (0,)
        query = _query("a", "")._replace(content=content)
        ids = workspace.tokenizer.encode(" blue")
        with mock.patch.object(decode, "generate", return_value=[ids]):
            (said,) = workspace.generate(BoundModel(linear_decoder.ADAPTED, {}, {}), [query], "")
        traced = workspace.encode([answered(query, said)])
        self.assertEqual(traced.tokens[0].tolist()[-len(ids) - 1 :], [*ids, 0])

    def test_a_thought_that_the_template_leaves_out_is_told_of_every_query(self):
        workspace = self._workspace("given", {})
        source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        workspace.tokenizer = workspace.tokenizer._replace(chat_template=source)
        workspace.template_name = "chat"
        talk = Conversation(({"role": "user", "content": "sky"},))
        query = answered(_query("a", "")._replace(content=talk), "<think>is it</think>blue")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            workspace.encode([query], "queries")
        self.assertIn("leaves out the thought in 1 of 1 queries", said.getvalue())

    def test_a_run_without_its_template_is_of_an_earlier_version(self):
        workspace = self._workspace("given", {})
        with self.assertRaisesRegex(ValueError, "must be a run of this version, .* run it again"):
            workspace.template  # noqa: B018
        (workspace.root / "corpus").mkdir()
        (workspace.root / "corpus" / "template.txt").write_text("chat")
        self.assertEqual(workspace.template_name, "chat")

    def test_rows_with_one_prompt_are_asked_once(self):
        workspace = self._workspace("given", {})
        rows = [_query(name, "x") for name in "aab"]
        rows = [row._replace(example_id=f"{n}") for n, row in enumerate(rows)]
        folder = workspace.root / "retrieve" / "sizes"
        folder.mkdir(parents=True)
        for kind in ("target", "normal"):
            artifacts.measured_rows(examples.HELD_OUT, kind).write(folder, rows)
        workspace.config = replaced(workspace.config, {"retrieve.held_out": 0.2})
        workspace.template_name = "plain"
        for rows_of_split in workspace.evaluation_queries():
            self.assertEqual([row.example_id for row in rows_of_split], ["0", "2"])
        workspace.config = replaced(workspace.config, {"retrieve.held_out": 0.0})
        workspace.corpus.queries.update(test_target=tuple(rows), test_normal=tuple(rows[:2]))
        target, normal = workspace.evaluation_queries()
        self.assertEqual([row.example_id for row in (*target, *normal)], ["0", "2", "0"])

    def test_what_is_made_once_ends_with_its_workspace(self):
        workspace = self._workspace("given", {})
        make = mock.Mock(side_effect=lambda *_, **__: lambda: None)
        one, other = workspace.measure(make, "decoder"), workspace.measure(make, "decoder")
        self.assertIs(one, other)
        self.assertEqual(make.call_count, 1)
        self.assertIsNot(workspace.measure(make, "another"), one)
        kept = weakref.ref(one), weakref.ref(workspace)
        del one, other, workspace
        gc.collect()
        self.assertEqual([found() for found in kept], [None, None])

    def test_queries_with_an_empty_answer_are_left_out_and_told_once(self):
        workspace = self._workspace("own", {"a": "", "b": ""}, {"a": "\n", "b": "own"})
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for _ in range(2):
                self.assertEqual([row.example_id for row in workspace.retrieval_queries()], ["b"])
        self.assertEqual(
            said.getvalue().strip(),
            "1 of 2 queries have an empty answer and are left out: 'a'",
        )
        workspace = self._workspace("given", {"a": ""}, {"a": ""})
        with self.assertRaisesRegex(ValueError, "must have an answer to trace, got none.*'Say a.'"):
            workspace.retrieval_queries()

    def test_gold_needs_an_output_of_every_query(self):
        workspace = self._workspace("gold", {"a": "bad", "b": ""})
        with self.assertRaisesRegex(ValueError, "=gold needs outputs, got none for 'b'"):
            workspace.retrieval_queries()

    def test_the_default_is_the_given_output(self):
        fields = {field.name: field.default for field in dataclasses.fields(SketchConfig)}
        self.assertEqual(fields["query_output"], "given")


def test_answers_are_as_long_as_the_positions_allow_and_prompts_leave_room_for_one(
    tmp_path, capsys
):
    workspace, config = Workspace(tmp_path, Config()), tiny_model_config()  # 64 positions
    rows = [_query(name, "") for name in "abc"]
    workspace._check_room(config, rows, [[1] * 60, [1] * 63, [1] * 5])
    line = capsys.readouterr().err
    assert "3 of 3" in line and "at least 1 of" in line and "max_new_tokens=128" in line
    with pytest.raises(ValueError, match="'b' must have at most 63 tokens.* got 64: .*--prompt"):
        workspace._check_room(config, rows, [[1] * 60, [1] * 64, [1] * 5])
