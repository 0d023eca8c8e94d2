"""The toy's model: it is small, and its rows are the demo's."""

import json
import pathlib

from absl.testing import absltest

from raslik_jax.data import toy_model
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import make_toy_corpus

_FOLDER = pathlib.Path(toy_model.__file__).parent / "toy_model"


class ToyModelTest(absltest.TestCase):
    def test_the_files_are_small(self):
        self.assertEqual(toy_model.model_folder(), _FOLDER)
        self.assertLess(sum(p.stat().st_size for p in _FOLDER.rglob("*.*")), 3_000_000)

    def test_the_base_is_of_a_million_parameters_in_bfloat16(self):
        config = json.loads((_FOLDER / "base" / "config.json").read_text())
        self.assertEqual(config["dtype"], "bfloat16")
        self.assertEqual(config["model_type"], "gpt_neox")

    def test_its_rows_are_of_the_demo_and_its_base_saw_none_of_them(self):
        corpus = toy_model.load_corpus()
        demo = make_toy_corpus(SharedSettings(num_backbone=4000), seed=0)
        rows, of_demo, of_base = (
            {(row.instruction, row.input, row.output) for row in part}
            for part in (corpus.train, demo.train, demo.backbone)
        )
        self.assertLen(corpus.train, 1000)
        self.assertEqual(sum(bool(row.is_target) for row in corpus.train), 100)
        self.assertLessEqual(rows, of_demo)
        self.assertFalse(rows & of_base)

    def test_the_prompt_is_the_first_that_no_row_has(self):
        corpus = toy_model.load_corpus()
        self.assertEqual(corpus.queries["retrieval"][0].instruction, toy_model.PROMPT)
        self.assertNotIn(toy_model.PROMPT, {row.instruction for row in corpus.train})
