"""Ids follow the text; written rows are read again; query sets are held out."""

import json

import numpy as np
from absl.testing import parameterized
from folders import FolderTest
from hypothesis import given
from hypothesis import strategies as st

from raslik_jax.data import examples as ex
from raslik_jax.data.read.formats import read_examples

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_NONBLANK = _TEXT.filter(lambda text: bool(text.strip()))
_ROWS = st.lists(st.tuples(_NONBLANK, _TEXT, _TEXT), min_size=1, max_size=8)


class IdsTest(parameterized.TestCase):
    def test_id_is_the_one_written_down(self):
        # Ids are in every index on disk: they must never change.
        self.assertEqual(ex.content_id("Name it.", "", "A cat."), "3f40fcb2e27c100d")

    def test_moving_a_word_between_fields_changes_the_id(self):
        self.assertNotEqual(ex.content_id("a b", "", "c"), ex.content_id("a", "b", "c"))

    def test_duplicates_are_numbered_in_order(self):
        row = ex.make_example("Name it.", "", "A cat.")
        other = ex.make_example("Name it.", "", "A dog.")
        ids = [example.example_id for example in ex.make_examples([row, other, row, row])]
        name = row.example_id
        self.assertEqual(ids, [name, other.example_id, f"{name}-2", f"{name}-3"])

    @given(_ROWS)
    def test_ids_are_unique_and_follow_the_text(self, rows):
        made = ex.make_examples(ex.make_example(*row) for row in rows)
        self.assertEqual(len({example.example_id for example in made}), len(rows))
        for example, row in zip(made, rows, strict=True):
            self.assertEqual(example.example_id.split("-")[0], ex.content_id(*row))


class WriteTest(FolderTest):
    def test_what_is_written_is_read_again_with_its_ids(self):
        rows = ex.make_examples([ex.make_example("Say \u2028.", "", "\n")] * 2)
        path = self.folder / "set.jsonl"
        ex.write_examples(path, rows, extra=[{"score": 0.5}, {"score": -0.5}])
        self.assertEqual([row[:6] for row in read_examples(path)], [row[:6] for row in rows])
        first = json.loads(path.read_text().split("\n")[0])
        self.assertEqual(list(first), ["instruction", "input", "output", "id", "score"])

    def test_bad_extras_leave_the_old_file(self):
        path = self.folder / "set.jsonl"
        path.write_text("old")
        with self.assertRaisesRegex(ValueError, "must be finite numbers"):
            ex.write_examples(path, [ex.make_example("a", "", "b")], extra=[{"score": np.nan}])
        self.assertEqual(path.read_text(), "old")
        self.assertLen(list(self.folder.iterdir()), 1)


class CheckCorpusTest(parameterized.TestCase):
    def _corpus(self, **changes):
        queries = {
            name: ex.make_examples([ex.make_example(name, "", "x")]) for name in ex.QUERY_SETS
        }
        corpus = ex.Corpus(
            backbone=(ex.make_example("clean", "", "x"),),
            train=(ex.make_example("row", "", "x"),),
            queries=queries,
        )
        return corpus._replace(**changes)

    def test_disjoint_sets_pass(self):
        corpus = self._corpus()
        self.assertIs(ex.check_corpus(corpus), corpus)

    @parameterized.parameters("clean", "row", "test_target", " row ")
    def test_a_shared_prompt_is_refused_whatever_its_answer(self, prompt):
        corpus = self._corpus()
        corpus.queries["retrieval"] = (ex.make_example(prompt, "", "another answer"),)
        with self.assertRaisesRegex(ValueError, "must not be in other sets"):
            ex.check_corpus(corpus)

    def test_missing_sets_and_repeated_ids_are_refused(self):
        with self.assertRaisesRegex(ValueError, "at least one training row"):
            ex.check_corpus(self._corpus(train=()))
        with self.assertRaisesRegex(ValueError, "query sets"):
            ex.check_corpus(self._corpus(queries={}))
        row = ex.make_example("row", "", "x")
        with self.assertRaisesRegex(ValueError, "more than once in the training rows"):
            ex.check_corpus(self._corpus(train=(row, row)))
