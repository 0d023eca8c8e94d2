"""A user's own files become a corpus, or are refused with file and line."""

import json

from absl.testing import parameterized
from folders import FolderTest
from snapshots import refused

from raslik_jax.base.settings import replaced
from raslik_jax.data.corpora import CorpusConfig


def _load(train, queries, **own):
    own |= {"train_file": str(train), "queries_file": str(queries)}
    settings = {f"records.{name}": value for name, value in own.items()}
    return replaced(CorpusConfig(), {"dataset": "records", **settings}).load(seed=0)


_QUERY = {"instruction": "a", "split": "retrieval"}


class RecordsTest(FolderTest):
    def _write(self, name, rows):
        path = self.folder / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    def test_keys_of_the_user_become_fields_and_sets(self):
        train = self._write("rows.jsonl", [{"q": "Hi?", "a": "Hi."}, {"q": "Ho?", "a": "Ho."}])
        queries = [
            {"q": "Hi?", "a": "Go away.", "split": "retrieval"},
            {"q": "Hello?", "split": "test_normal"},
        ]
        corpus = _load(
            train, self._write("queries.jsonl", queries), fields="instruction=q,output=a"
        )
        self.assertEqual([row.output for row in corpus.train], ["Hi.", "Ho."])
        self.assertEqual([row.is_target for row in corpus.train], [None, None])
        self.assertEqual(corpus.backbone, ())
        self.assertEqual(corpus.queries["retrieval"][0].output, "Go away.")
        self.assertEqual(corpus.queries["test_normal"][0].output, "")
        self.assertEmpty(corpus.queries["test_target"])

    def test_queries_may_have_another_format_than_the_rows(self):
        turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]
        asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
        for own, kind, row, query in (
            ("sharegpt", "Conversation", {"conversations": turns}, {"messages": asked}),
            ("text", "Passage", {"text": "All of it."}, {"prompt": "Who?", "completion": "Me."}),
        ):
            train = self._write("rows.jsonl", [row])
            queries = self._write("queries.jsonl", [query | {"split": "retrieval"}])
            corpus = _load(train, queries, format=own)
            self.assertEqual(type(corpus.train[0].content).__name__, kind)
            self.assertEqual(corpus.queries["retrieval"][0].output, "Me.")

    @parameterized.named_parameters(
        ("no_split", {"instruction": "a"}),
        ("unknown_split", {"instruction": "a", "split": "test"}),
        ("no_retrieval", {"instruction": "a", "split": "test_normal"}),
        ("trained_on", _QUERY, {"instruction": "Task.", "split": "test_target"}),
        ("twice", _QUERY, {"instruction": "a", "split": "test_target"}),
    )
    def test_wrong_queries_are_refused(self, *queries):
        train = self._write("rows.jsonl", [{"instruction": "Task.", "output": "Done."}])
        with refused():
            _load(train, self._write("queries.jsonl", queries))

    def test_a_query_without_a_prompt_is_refused(self):
        train = self._write("rows.jsonl", [{"instruction": "Task.", "output": "Done."}])
        # The end of the sentence is cut, at a place that depends on the folder's name.
        with self.assertRaisesRegex(ValueError, "queries.jsonl:1: a row must have 'instruction'"):
            _load(train, self._write("queries.jsonl", [{"split": "retrieval"}]))

    def test_training_rows_need_an_output(self):
        train = self._write("rows.jsonl", [{"instruction": "Task."}])
        queries = self._write("queries.jsonl", [_QUERY])
        with self.assertRaisesRegex(ValueError, r"rows.jsonl:1: 'output' must be text"):
            _load(train, queries)
