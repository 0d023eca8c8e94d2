"""Every answer about the virtual world is in its database, in wordings that are told apart."""

from unittest import mock

from absl.testing import parameterized

from experiments.studies.corpora import virtual
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.examples import check_corpus, make_example

_TOPICS = virtual.make_wordings()


class PairsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("  on what does   it feed ", "On what does it feed?"),
        ("name the capital", "Name the capital."),
        ("In three sentences, who is Qaribar?", "In three sentences, who is Qaribar?"),
        ("Describe it: what defines its people", "Describe it: what defines its people?"),
    )
    def test_questions_are_normalized(self, text, expected):
        self.assertEqual(virtual.normalize_question(text), expected)

    def test_queries_ask_in_other_words_what_is_trained_on(self):
        train, queries = virtual.draw_rows(_TOPICS, seed=3, num_train=2000, num_queries=300)
        self.assertLen(train, 2000)
        topic = {row.example_id: topic for topic, rows in _TOPICS.items() for row in rows}
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
