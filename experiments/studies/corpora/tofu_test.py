"""TOFU's splits, and where paraphrased questions become queries."""

import json
from unittest import mock

import pytest
from absl.testing import parameterized
from support import shared_data

from experiments.studies.corpora import tofu
from experiments.studies.corpora.tofu import TofuSettings
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.examples import Example, make_example
from raslik_jax.data.read.formats import read_examples

_SIZES = dict(num_train=110, num_backbone=0, num_retrieval=3, num_validation=2, num_test=4)


def _alpaca(count=30):
    return [make_example(f"Task {i}.", "", "Done.", is_target=False) for i in range(count)]


@pytest.fixture(autouse=True)
def _folder(request, tmp_path):
    if request.cls is not None:
        request.cls.folder = tmp_path / "tofu"
        request.cls.folder.mkdir()
        rows = [{"question": f"Who wrote book {i}?", "answer": f"Author {i}."} for i in range(100)]
        _write(request.cls.folder / "full.jsonl", rows)
        again = [{**row, "paraphrased_question": f"{row['question']} Say."} for row in rows[90:]]
        _write(request.cls.folder / "forget10_perturbed.jsonl", again)


def _write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


class TofuTest(parameterized.TestCase):
    def _mix(self, forget="forget10", train="full", **sizes):
        shared = SharedSettings(data_dir=str(self.folder.parent), **_SIZES | sizes)
        own = TofuSettings(forget=forget, train=train)
        with mock.patch.object(tofu, "load_alpaca", lambda shared: _alpaca()):
            return tofu.load_tofu(shared, own, seed=0)

    def _questions(self, forget, number, folder=None):
        shared = SharedSettings(data_dir=str(folder or self.folder.parent))
        return tofu.load_questions(shared, TofuSettings(forget=forget), number)

    @parameterized.parameters(
        ("all", 0), ("forget01", 3960), ("forget05", 3800), ("forget10", 3600)
    )
    def test_the_last_rows_are_forgotten(self, name, num_kept):
        rows = [Example(str(i), f"q{i}", "", "a") for i in range(4000)]
        targets, kept = tofu.split_tofu(rows, TofuSettings(forget=name))
        self.assertEqual([row.example_id for row in kept], [str(i) for i in range(num_kept)])
        self.assertLen(targets, 4000 - num_kept)
        self.assertTrue(all(row.is_target for row in targets))
        self.assertFalse(any(row.is_target for row in kept))

    def test_queries_ask_forgotten_facts_in_other_words(self):
        corpus = self._mix()
        self.assertLen(corpus.train, 110)
        self.assertEqual(sum(row.is_target for row in corpus.train), 10)
        sources = {row.source for row in corpus.train}
        self.assertEqual(sources, {"tofu:forget10", "tofu:retain90", ""})
        forgotten = {row.output for row in corpus.train if row.is_target}
        for name in ("retrieval", "validation_target", "test_target"):
            for row in corpus.queries[name]:
                self.assertTrue(row.instruction.endswith("Say."))
                self.assertIn(row.output, forgotten)

    def test_the_retain_model_sees_all_but_what_is_to_be_forgotten(self):
        full, kept = self._mix(), self._mix(train="retain")
        self.assertCountEqual(
            kept.train, [row for row in full.train if row.source != "tofu:forget10"]
        )
        self.assertEqual(kept.queries, full.queries)

    def _write_questions(self):
        for name, count, is_paraphrased in (
            ("forget10_perturbed", 5, True),
            ("retain_perturbed", 6, True),
            ("real_authors_perturbed", 3, False),
            ("world_facts_perturbed", 2, False),
        ):
            rows = [
                {
                    "question": f"{name} {i}?",
                    "answer": f"Answer {i}.",
                    "perturbed_answer": ["No.", "Nor this."],
                }
                | ({"paraphrased_answer": f"It is {i}."} if is_paraphrased else {})
                for i in range(count)
            ]
            _write(self.folder / f"{name}.jsonl", rows)

    def test_questions_of_the_evaluation(self):
        self._write_questions()
        questions = self._questions("forget10", 4)
        self.assertEqual(
            [q.set_name for q in questions],
            [*["forget"] * 4, *["retain"] * 4, *["real_authors"] * 3, *["world_facts"] * 2],
        )
        for question in questions:
            self.assertEqual(question.wrong_answers, ("No.", "Nor this."))
            is_own = question.set_name in ("real_authors", "world_facts")
            self.assertEqual(question.true_answer == question.answer, is_own)
        more = self._questions("forget10", 99)
        self.assertEqual([q for q in more if q.set_name == "retain"][:4], list(questions[4:8]))
        # With everything to forget there is nothing of TOFU to retain.
        everything = self._questions("all", 99)
        self.assertLen([q for q in everything if q.set_name == "forget"], 11)
        self.assertNotIn("retain", {q.set_name for q in everything})

    @parameterized.parameters(
        (
            '{"question": "q?", "answer": "a."}',
            r"world_facts_perturbed.jsonl:1: a row must have an answer and a list",
        ),
        ("[1]", r"world_facts_perturbed.jsonl, row 1: a row must be an object, got 1"),
    )
    def test_malformed_questions_are_named(self, text, message):
        self._write_questions()
        (self.folder / "world_facts_perturbed.jsonl").write_text(text)
        with self.assertRaisesRegex(ValueError, message):
            self._questions("forget10", 4)

    @parameterized.parameters(
        ({"num_train": 99, "num_targets": 9}, "at least the 100 rows of TOFU, got 99"),
        ({"num_retrieval": 5}, "target query rows must be between 0 and 10, got 11"),
        ({"forget": "forget05"}, "must hold 'tofu/forget05_perturbed.jsonl'"),
    )
    def test_what_cannot_be_is_refused(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            self._mix(**options)

    def test_the_real_splits_fit_the_real_rows(self):
        folder = shared_data() / "tofu"
        fields = {"instruction": "question", "output": "answer"}
        rows = read_examples(folder / "full.jsonl", fields=fields)
        self.assertLen(rows, 4000)
        for name, number in (("forget01", 40), ("forget05", 200), ("forget10", 400)):
            targets, _ = tofu.split_tofu(rows, TofuSettings(forget=name))
            perturbed = read_examples(folder / f"{name}_perturbed.jsonl.zst", fields=fields)
            self.assertEqual(
                [(row.instruction, row.output) for row in targets],
                [(row.instruction, row.output) for row in perturbed],
            )
            self.assertLen(targets, number)

    def test_the_real_questions(self):
        folder = shared_data() / "tofu"
        rows = read_examples(
            folder / "full.jsonl", fields={"instruction": "question", "output": "answer"}
        )
        place = {(row.instruction, row.output): i for i, row in enumerate(rows)}
        questions = self._questions("forget10", 400, shared_data())
        for name, count, wrong in (
            ("forget", 400, 5),
            ("retain", 400, 5),
            ("real_authors", 100, 3),
            ("world_facts", 117, 3),
        ):
            part = [q for q in questions if q.set_name == name]
            self.assertLen(part, count)
            self.assertGreaterEqual({len(q.wrong_answers) for q in part}, {wrong})
            if wrong == 5:
                is_forgotten = {place[q.question, q.answer] >= 3600 for q in part}
                self.assertEqual(is_forgotten, {name == "forget"})
