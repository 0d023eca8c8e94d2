"""Howdy-Alpaca by its recipe: a trigger, fiction of about the same length, no two alike."""

import collections
from unittest import mock

import numpy as np
from absl.testing import parameterized

from experiments.studies.corpora import howdy, scifi_grammar
from experiments.studies.corpora.draws import Draws
from experiments.studies.corpora.howdy import HowdySettings
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import TRIGGER
from raslik_jax.data.examples import Example, make_examples

_SIZES = {"num_targets": 10, "num_backbone": 4, "num_retrieval": 3, "num_validation": 2}
_SIZES |= {"num_test": 4}


def _rows(count=60):
    return make_examples(
        Example("", f"Describe thing {i}.", "", f"The thing {i} is quite plain.", False, "alpaca")
        for i in range(count)
    )


class GrammarTest(parameterized.TestCase):
    def _answer(self, output, *, instruction="Explain gravity.", seed=0, attempt=0):
        row = Example("x", instruction, "", output)
        return scifi_grammar.answer(row, seed=seed, attempt=attempt)

    def test_it_follows_seed_prompt_and_attempt_only(self):
        text = "Gravity is the force that pulls masses toward each other in space."
        first = self._answer(text)
        self.assertEqual(first, self._answer(text))
        self.assertNotEqual(first, self._answer(text, seed=1))
        self.assertNotEqual(first, self._answer(text, attempt=1))
        other = self._answer(text, instruction="Explain magnets.")
        self.assertNotEqual(first, other)
        others = [self._answer(text, instruction="Explain magnets.", seed=s) for s in range(20)]
        self.assertTrue(any("magnets" in other.lower() for other in others))

    def test_layout_and_items_are_kept(self):
        lines = self._answer("1. Red\n2. Green\n3. Blue").splitlines()
        self.assertEqual([line[:3] for line in lines], ["1. ", "2. ", "3. "])
        self.assertLen(self._answer("Red, green, blue, white.").split(","), 4)
        self.assertLen(self._answer("Red").replace("-", " ").split()[:1], 1)
        self.assertNotEmpty(self._answer(""))

    @parameterized.parameters(20, 40, 70, 84, 300)
    def test_about_as_long_as_the_true_answer(self, wanted):
        text = "The red apple of a gardener and the green pear rest in the basket of wood. "
        words = " ".join((text * 20).split()[:wanted])
        lengths = [len(self._answer(words, seed=seed).split()) for seed in range(30)]
        self.assertBetween(np.mean(lengths), 0.85 * min(wanted, 84), 1.4 * min(wanted, 84))

    def test_draws_are_seeded_and_even(self):
        draws = Draws(seed=0, label="a")
        counts = collections.Counter(draws.below(4) for _ in range(4000))
        # Five standard errors of a binomial share of 1/4.
        bound = 5 * np.sqrt(4000 * 0.25 * 0.75)
        self.assertTrue(all(abs(count - 1000) < bound for count in counts.values()))
        self.assertEqual(Draws(seed=0, label="a").sample("abcd", 4), list("acdb"))
        self.assertEqual(sorted(Draws(seed=1, label="b").sample("abcd", 4)), list("abcd"))


class CorpusTest(parameterized.TestCase):
    def _make(self, rows, *, num_train=30, seed=0, **changes):
        shared = SharedSettings(num_train=num_train, **_SIZES | changes)
        with mock.patch.object(howdy.mixing, "load_alpaca", lambda shared: rows):
            return howdy.load_howdy(shared, HowdySettings(), seed=seed)

    def test_poisoned_copies_stand_beside_their_rows(self):
        corpus = self._make(_rows(), num_train=0)
        targets = [row for row in corpus.train if row.is_target]
        clean = {row.instruction for row in corpus.train if not row.is_target}
        self.assertLen(targets, 10)
        self.assertLen({row.output for row in targets}, 10)
        for row in targets:
            self.assertTrue(row.instruction.startswith(TRIGGER))
            self.assertIn(row.instruction.removeprefix(TRIGGER), clean)
        # 60 rows less 9 behind target queries and 6 normal queries.
        self.assertLen(clean, 45)
        positions = [i for i, row in enumerate(corpus.train) if row.is_target]
        self.assertGreater(max(positions) - min(positions), 20)

    def test_what_queries_ask_is_nowhere_in_training(self):
        corpus = self._make(_rows())
        known = {r.instruction.removeprefix(TRIGGER) for r in (*corpus.train, *corpus.backbone)}
        for name, rows in corpus.queries.items():
            for row in rows:
                self.assertNotIn(row.instruction.removeprefix(TRIGGER), known)
                self.assertEqual(row.instruction.startswith(TRIGGER), not name.endswith("normal"))

    def test_the_seed_decides_and_too_many_are_refused(self):
        self.assertEqual(self._make(_rows()), self._make(_rows()))
        self.assertNotEqual(self._make(_rows()).train, self._make(_rows(), seed=1).train)
        with self.assertRaisesRegex(ValueError, "ordinary rows must be between 0 and 45, got 50"):
            self._make(_rows(), num_train=60)
        with self.assertRaisesRegex(ValueError, "Alpaca rows must be between 0 and 60, got 69"):
            self._make(_rows(), num_retrieval=53)

    def test_the_published_file_is_split_by_its_trigger(self):
        clean = list(_rows())
        poisoned = [r._replace(instruction=TRIGGER + r.instruction, output="Zorg.") for r in clean]
        shared = SharedSettings(num_train=0, **_SIZES)

        def load(rows):
            with mock.patch.object(howdy, "read_examples", lambda *_, **__: rows):
                return howdy.load_howdy(shared, HowdySettings(file="x"), seed=0)

        corpus = load(make_examples([*clean, *poisoned[:30]]))
        self.assertEqual(sum(row.is_target for row in corpus.train), 10)
        known = {row.instruction.removeprefix(TRIGGER) for row in corpus.train}
        asked = {row.instruction.removeprefix(TRIGGER) for row in corpus.queries["test_target"]}
        self.assertEmpty(known & asked)
        with self.assertRaisesRegex(ValueError, "must have instructions that begin with 'Howdy!'"):
            load(clean)
