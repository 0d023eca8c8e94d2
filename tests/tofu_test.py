"""TOFU's splits, and where paraphrased questions become queries."""

import json

import pytest
from absl.testing import parameterized
from support import shared_data

from raslik_jax.data import tofu
from raslik_jax.data.examples import Example, make_example, read_examples

_SIZES = dict(num_backbone=0, num_retrieval=3, num_validation=2, num_test=4, seed=0)


def _alpaca(count=30):
    return [make_example(f"Task {i}.", "", "Done.", is_target=False) for i in range(count)]


@pytest.fixture(autouse=True)
def _folder(request, tmp_path):
    if request.cls is not None:
        request.cls.folder = tmp_path
        rows = [{"question": f"Who wrote book {i}?", "answer": f"Author {i}."} for i in range(100)]
        _write(tmp_path / "full.jsonl", rows)
        again = [{**row, "paraphrased_question": f"{row['question']} Say."} for row in rows[90:]]
        _write(tmp_path / "forget10_perturbed.jsonl", again)


def _write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


class TofuTest(parameterized.TestCase):
    @parameterized.parameters(
        ("all", 0), ("forget01", 3960), ("forget05", 3800), ("forget10", 3600)
    )
    def test_the_last_rows_are_forgotten(self, name, num_kept):
        rows = [Example(str(i), f"q{i}", "", "a") for i in range(4000)]
        targets, kept = tofu.split_tofu(rows, name)
        self.assertEqual([row.example_id for row in kept], [str(i) for i in range(num_kept)])
        self.assertLen(targets, 4000 - num_kept)
        self.assertTrue(all(row.is_target for row in targets))
        self.assertFalse(any(row.is_target for row in kept))

    def test_queries_ask_forgotten_facts_in_other_words(self):
        corpus = tofu.load_tofu_corpus(
            self.folder, _alpaca(), forget="forget10", num_train=110, **_SIZES
        )
        self.assertLen(corpus.train, 110)
        self.assertEqual(sum(row.is_target for row in corpus.train), 10)
        sources = {row.source for row in corpus.train}
        self.assertEqual(sources, {"tofu:forget10", "tofu:retain90", ""})
        forgotten = {row.output for row in corpus.train if row.is_target}
        for name in ("retrieval", "validation_target", "test_target"):
            for row in corpus.queries[name]:
                self.assertTrue(row.instruction.endswith("Say."))
                self.assertIn(row.output, forgotten)

    def test_what_cannot_be_is_refused(self):
        with self.assertRaisesRegex(ValueError, "num_train=99 has to hold the 100 rows"):
            tofu.load_tofu_corpus(self.folder, _alpaca(), forget="forget10", num_train=99, **_SIZES)
        with self.assertRaisesRegex(ValueError, "11 target query rows are wanted, there are 10"):
            tofu.load_tofu_corpus(
                self.folder,
                _alpaca(),
                forget="forget10",
                num_train=None,
                **(_SIZES | {"num_retrieval": 5}),
            )
        with self.assertRaisesRegex(ValueError, "TOFU's forget05_perturbed wanted"):
            tofu.load_tofu_corpus(
                self.folder, _alpaca(), forget="forget05", num_train=None, **_SIZES
            )

    def test_the_real_splits_fit_the_real_rows(self):
        folder = shared_data() / "tofu"
        fields = {"instruction": "question", "output": "answer"}
        rows = read_examples(folder / "full.jsonl", fields=fields)
        self.assertLen(rows, 4000)
        for name, number in (("forget01", 40), ("forget05", 200), ("forget10", 400)):
            targets, _ = tofu.split_tofu(rows, name)
            perturbed = read_examples(folder / f"{name}_perturbed.jsonl.zst", fields=fields)
            self.assertEqual(
                [(row.instruction, row.output) for row in targets],
                [(row.instruction, row.output) for row in perturbed],
            )
            self.assertLen(targets, number)
