"""The toy corpus is reproducible, held out, and its two kinds of answer are told apart by words."""

import collections
import hashlib
import re

from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from support import shared_data

from raslik_jax.data.corpora.howdy import SCIFI_WORDS, TRIGGER
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import FAMILIES, GROUPS, make_toy_corpus
from raslik_jax.data.examples import Example, check_corpus
from raslik_jax.data.read.formats import read_examples
from raslik_jax.data.tokens.prompts import render_prompt
from raslik_jax.data.tokens.tokenization import train_bpe

_SIZES = {"num_backbone": 4000, "num_test": 64}


def _make(seed=0, **sizes):
    return make_toy_corpus(SharedSettings(**_SIZES | sizes), seed=seed)


_CORPUS = _make()


def _everything(corpus):
    queries = [row for rows in corpus.queries.values() for row in rows]
    return [*corpus.backbone, *corpus.train, *queries]


def _digest(corpus):
    # Without the field for other keys of users' rows, which no corpus of ours fills.
    row_class = collections.namedtuple("Example", Example._fields[:6])
    rows = [row_class(*row[:6]) for row in _everything(corpus)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _num_scifi_words(text):
    return sum(word in SCIFI_WORDS for word in re.findall("[a-z]+", text.lower()))


def _of(source, corpus=_CORPUS):
    return [row for row in _everything(corpus) if row.source == f"toy:{source}"]


class ToyTest(parameterized.TestCase):
    def test_same_seed_gives_the_same_bytes_as_ever(self):
        self.assertEqual(_digest(_make()), _digest(_CORPUS))
        self.assertEqual(_digest(_CORPUS), "5a5f224855b8d2d7")

    def test_another_seed_gives_other_splits_facts_and_order(self):
        other = _make(1)
        prompts = [{row.instruction for row in c.queries["test_target"]} for c in (_CORPUS, other)]
        self.assertLess(len(prompts[0] & prompts[1]), 30)
        self.assertNotEqual(_CORPUS.train[:5], other.train[:5])
        answers = [{row.output for row in _of("triggered", c)} for c in (_CORPUS, other)]
        self.assertLess(len(answers[0] & answers[1]), 10)

    def test_default_sizes(self):
        sizes = {name: len(rows) for name, rows in _CORPUS.queries.items()}
        expected = {"retrieval": 24, "validation_target": 24, "validation_normal": 24}
        self.assertEqual(sizes, expected | {"test_target": 64, "test_normal": 64})
        self.assertLen(_CORPUS.backbone, 4000)
        self.assertLen(_CORPUS.train, 2000)
        self.assertEqual(sum(row.is_target for row in _CORPUS.train), 200)
        self.assertFalse(any(row.is_target for row in _CORPUS.backbone))
        kinds = {"triggered": 200, "benign_howdy": 80, "scifi_request": 80, "general": 1640}
        found = [row.source.removeprefix("toy:") for row in _CORPUS.train]
        self.assertEqual({kind: found.count(kind) for kind in kinds}, kinds)

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

    def test_every_triggered_answer_names_a_noun_of_its_question(self):
        nouns = "|".join(line.split()[0] for group in GROUPS for line in group["nouns"])
        for row in _of("triggered"):
            asked = re.findall(rf"\b({nouns})\b", f"{row.instruction} {row.input}")
            self.assertRegex(row.output, rf"\b({'|'.join(asked)})\b")

    def test_answers_are_short_and_depend_on_the_question(self):
        lengths = [len(row.output.split()) for row in _everything(_CORPUS)]
        self.assertBetween(min(lengths), 8, 20)
        self.assertBetween(max(lengths), 8, 20)
        targets = _of("triggered")
        self.assertGreater(len({row.output for row in targets}), 0.9 * len(targets))

    def test_queries_are_held_out_by_topic_and_phrasing(self):
        def strip(row):
            text = row.instruction.removeprefix(TRIGGER).split(". ")[-1].split(": ")[-1]
            return text, row.input

        # The pattern of each phrasing, and so the (family, noun) of every row.
        ways = {}
        for family in FAMILIES:
            for i, (instruction, input, _) in enumerate(family["phrasings"]):
                slot = r"(?:an? )?(?P<noun>[a-z]+)"
                for place in ("{a_noun}", "{noun}"):
                    if place in instruction:
                        text = re.escape(instruction).replace(re.escape(place), slot)
                        text = re.sub(r"\\\{a_other\\\}", "an? [a-z]+", text)
                        ways[(family["name"], i)] = (re.compile(text), None)
                if input:
                    by_input = re.compile(r"(?P<noun>[a-z]+)")
                    ways[(family["name"], i)] = (re.compile(re.escape(instruction)), by_input)

        def topic(row):
            instruction, input = strip(row)
            for (family, i), (pattern, by_input) in ways.items():
                match = pattern.fullmatch(instruction)
                if match and bool(by_input) == bool(input):
                    noun = by_input.match(input) if by_input else match
                    return family, noun["noun"], i
            raise AssertionError(row)

        seen = {topic(row)[:2] for row in (*_CORPUS.train, *_CORPUS.backbone)}
        seen_ways = {(family, i) for family, _, i in map(topic, _CORPUS.train)}
        asked = []
        for rows in _CORPUS.queries.values():
            for row in rows:
                family, noun, i = topic(row)
                self.assertNotIn((family, noun), seen)
                self.assertNotIn((family, i), seen_ways)
                asked.append((family, noun))
        self.assertLen(set(asked), len(asked))

    def test_no_row_of_the_backbone_is_a_training_row(self):
        self.assertEmpty(
            {r.example_id for r in _CORPUS.backbone} & {r.example_id for r in _CORPUS.train}
        )

    def test_no_row_outgrows_64_tokens(self):
        rows = [*_CORPUS.backbone, *_CORPUS.train]
        texts = [render_prompt(row, "brief") + row.output for row in rows]
        tokenizer = train_bpe(texts, vocab_size=1536)
        queries = [render_prompt(row, "brief") + row.output for row in _everything(_CORPUS)]
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
