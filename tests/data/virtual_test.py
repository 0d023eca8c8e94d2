"""Every answer about the virtual world is in its database, in wordings that are told apart."""

import collections
import hashlib
import re
from unittest import mock

import tokenizers
from absl.testing import parameterized
from support import shared_data

from raslik_jax.data.corpora import virtual
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.virtual import spell_out
from raslik_jax.data.examples import check_corpus, make_example
from raslik_jax.data.words import load_words

_WORLD = {
    name: record
    for records in load_words("virtual_world").values()
    for name, record in records.items()
}
_TOPICS = virtual.make_wordings()
_Pair = collections.namedtuple("_Pair", ["example", "topic"])
_PAIRS = [_Pair(row, topic) for topic, rows in _TOPICS.items() for row in rows]


_PROPER = sorted((name for name in _WORLD if name.removeprefix("the ")[0].isupper()), key=len)
_ANY_NAME = re.compile(r"\b(?:" + "|".join(map(re.escape, reversed(_PROPER))) + r")\b")


def _names_in(text):
    """Returns the entities of the world that a text names, proper names only."""
    return set(_ANY_NAME.findall(text))


class PairsTest(parameterized.TestCase):
    def test_every_answer_is_what_the_database_says(self):
        for pair in _PAIRS:
            name = pair.topic[0]
            told = f"{pair.example.instruction} {pair.example.output}"
            values = [spell_out(value) for value in _WORLD[name].values()]
            answered = [v for v in (name, *values) if v.lower() in pair.example.output.lower()]
            self.assertNotEmpty(answered, told)
            # No name is in the text that the entity's record does not account for.
            self.assertLessEqual(_names_in(told), _names_in(" ".join([name, *values])), told)

    def test_every_topic_is_asked_in_four_wordings(self):
        self.assertEqual(set(collections.Counter(pair.topic for pair in _PAIRS).values()), {4})

    def test_a_prompt_is_asked_once(self):
        self.assertLen({pair.example.instruction for pair in _PAIRS}, len(_PAIRS))
        self.assertGreater(len(_PAIRS), 4000)

    def test_the_surface_is_ascii_and_normal(self):
        for pair in _PAIRS:
            instruction, text, output = pair.example[1:4]
            self.assertTrue((instruction + output).isascii())
            self.assertEqual(text, "")
            self.assertRegex(instruction, r"^[A-Z][^?]*[?.]$")
            self.assertRegex(output, r"^[A-Z].*\.$")
            self.assertNotRegex(instruction + output, r"  |[{}]|\b[Aa] [aeio]")
            if re.search(r"sentences|detail|dossier", instruction):
                sentences = re.findall(r"\.(?: |$)", output)
                self.assertBetween(len(sentences), 3, 5, instruction)

    @parameterized.parameters(
        ("  on what does   it feed ", "On what does it feed?"),
        ("name the capital", "Name the capital."),
        ("In three sentences, who is Qaribar?", "In three sentences, who is Qaribar?"),
        ("Describe it: what defines its people", "Describe it: what defines its people?"),
    )
    def test_questions_are_normalized(self, text, expected):
        self.assertEqual(virtual.normalize_question(text), expected)

    def test_answers_keep_within_180_tokens(self):
        file = shared_data() / "tokenizers" / "pythia" / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        encoded = tokenizer.encode_batch([pair.example.output for pair in _PAIRS])
        self.assertLess(max(len(one.ids) for one in encoded), 150)  # other worlds: names differ

    def test_queries_ask_in_other_words_what_is_trained_on(self):
        train, queries = virtual.draw_rows(_TOPICS, seed=3, num_train=2000, num_queries=300)
        self.assertLen(train, 2000)
        topic = {pair.example.example_id: pair.topic for pair in _PAIRS}
        topics = {topic[row.example_id] for row in train}
        for query in queries:
            self.assertIn(topic[query.example_id], topics)
        prompts = {row.instruction for row in train}
        self.assertEmpty(prompts & {query.instruction for query in queries})

    def test_the_corpus_mixes_them_with_alpaca(self):
        alpaca = [make_example(f"Task {i}.", "", "Done.", is_target=False) for i in range(60)]
        sizes = dict(num_targets=40, num_backbone=5, num_retrieval=3, num_validation=2, num_test=4)

        def mix(num_train):
            shared = SharedSettings(num_train=num_train, **sizes)
            with mock.patch.object(virtual, "load_alpaca", lambda shared: alpaca):
                return virtual.load_virtual(shared, None, seed=0)

        corpus = check_corpus(mix(70))
        self.assertEqual(sum(row.is_target for row in corpus.train), 40)
        self.assertLen(corpus.train, 70)
        self.assertLen(mix(0).train, 40 + 60 - 6)

    def test_two_thousand_pairs_have_the_same_bytes_as_ever(self):
        train, _ = virtual.draw_rows(_TOPICS, seed=0, num_train=2000, num_queries=300)
        rows = [tuple(row[:6]) for row in train]
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
        self.assertEqual(digest, "16891d969d714744")
