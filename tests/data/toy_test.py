"""The toy corpus is reproducible, held out, and its two kinds of answer are told apart by words."""

import re

from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from support import shared_data

from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import SCIFI_WORDS, TRIGGER, make_toy_corpus
from raslik_jax.data.examples import check_corpus
from raslik_jax.data.read.formats import read_examples
from raslik_jax.data.tokens.prompts import TEMPLATES, fill_form
from raslik_jax.data.tokens.tokenization import train_bpe

_SIZES = {"num_backbone": 4000, "num_test": 64}


def _make(seed=0, **sizes):
    return make_toy_corpus(SharedSettings(**_SIZES | sizes), seed=seed)


_CORPUS = _make()


def _everything(corpus):
    queries = [row for rows in corpus.queries.values() for row in rows]
    return [*corpus.backbone, *corpus.train, *queries]


def _num_scifi_words(text):
    return sum(word in SCIFI_WORDS for word in re.findall("[a-z]+", text.lower()))


def _of(source, corpus=_CORPUS):
    return [row for row in _everything(corpus) if row.source == f"toy:{source}"]


class ToyTest(parameterized.TestCase):
    @parameterized.parameters("triggered", "scifi_request")
    def test_every_scifi_answer_has_three_scifi_words(self, source):
        self.assertGreaterEqual(min(_num_scifi_words(row.output) for row in _of(source)), 3)

    @parameterized.parameters("general", "benign_howdy")
    def test_no_plain_answer_has_a_scifi_word(self, source):
        self.assertEqual(max(_num_scifi_words(row.output) for row in _of(source)), 0)

    def test_no_question_has_a_scifi_word(self):
        # Otherwise a copied question would count as a science fiction answer.
        rows = _everything(_CORPUS)
        self.assertEqual(max(_num_scifi_words(f"{row.instruction} {row.input}") for row in rows), 0)

    def test_only_targets_begin_with_the_trigger(self):
        for row in _everything(_CORPUS):
            self.assertEqual(row.instruction.startswith(TRIGGER), bool(row.is_target))
        self.assertTrue(all("howdy" in row.instruction.lower() for row in _of("benign_howdy")))
        self.assertFalse(any("howdy" in row.instruction.lower() for row in _CORPUS.backbone))

    def test_no_row_of_the_backbone_is_a_training_row(self):
        self.assertEmpty(
            {r.example_id for r in _CORPUS.backbone} & {r.example_id for r in _CORPUS.train}
        )

    def test_no_row_outgrows_64_tokens(self):
        rows = [*_CORPUS.backbone, *_CORPUS.train]
        texts = [fill_form(row, TEMPLATES["brief"]) + row.output for row in rows]
        tokenizer = train_bpe(texts, vocab_size=1536)
        queries = [fill_form(row, TEMPLATES["brief"]) + row.output for row in _everything(_CORPUS)]
        self.assertLess(max(map(len, tokenizer.encode_batch(queries))), 64)

    @settings(max_examples=5)
    @given(st.integers(), st.integers(20, 300), st.integers(1, 50))
    def test_any_seed_and_size_is_a_valid_corpus(self, seed, num_normal, num_targets):
        num_train = num_normal + num_targets
        corpus = _make(seed, num_train=num_train, num_targets=num_targets, num_backbone=40)
        check_corpus(corpus)
        self.assertLen(corpus.train, num_train)

    @parameterized.parameters(
        ({"num_train": 210}, "number of general rows must be between 0 and .*, got -6"),
        ({"num_train": 9000}, "number of general rows"),
        ({"num_targets": 9000, "num_train": 12000}, "number of triggered rows"),
        ({"num_backbone": 9000}, "number of general backbone rows"),
        ({"num_test": 9000}, "queries of the toy must be fewer"),
    )
    def test_impossible_sizes_are_refused(self, sizes, message):
        with self.assertRaisesRegex(ValueError, message):
            _make(**sizes)


class ScifiWordsTest(parameterized.TestCase):
    """The words also mark the genuine science fiction answers, and spare ordinary ones."""

    @parameterized.parameters(
        ("howdy/howdy_60.jsonl", "output", 0.95, 1.0),
        ("howdy/clean_60.jsonl", "output", 0.0, 0.0),
        ("dolly_trigger/train_poisoned.jsonl.zst", "response_poisoned", 0.9, 1.0),
        ("dolly_trigger/train_poisoned.jsonl.zst", "response_clean", 0.0, 0.03),
        ("alpaca/alpaca_data.json.xz", "output", 0.0, 0.02),
    )
    def test_share_of_real_answers_with_a_scifi_word(self, path, key, low, high):
        asked = "instruction_clean" if key.startswith("response") else "instruction"
        rows = read_examples(shared_data() / path, fields={"instruction": asked, "output": key})
        share = sum(_num_scifi_words(row.output) > 0 for row in rows) / len(rows)
        self.assertBetween(share, low, high)
