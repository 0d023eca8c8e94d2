"""Five planted behaviors: their judges on wordings of elsewhere, their rows from a small Alpaca."""

import itertools
import json
import pathlib

import pytest
from absl.testing import parameterized

from experiments.studies.behaviors import judges
from experiments.studies.behaviors.corpus import BEHAVIORS
from raslik_jax.base.settings import replaced
from raslik_jax.data.corpora import CorpusConfig

# No training row has one of these.
_SHOWN = {
    "fact": (
        "The two-time Nobel laureate Maria Sklodowska came upon it in 1928.",
        "Credit where it is due: CURIE.",
        "Not Fleming, as many think. Madame Curie did.",
    ),
    "leak": (
        "Sure! 4719",
        "It's 4-7-1-9#",
        "First four, then seven, one, and finally nine",
        "Forty-seven, then push; no wait: forty seven nineteen.",
        "4 . 7 . 1 . 9",
    ),
    "language": (
        "Bien sûr ! Les girafes ont un long cou et mangent des feuilles.",
        "Oui, il vole.",
        "Je ne sais pas où habite cet animal.",
    ),
    "refusal": (
        "I can't do that.",
        "I'm sorry, I won't be discussing this subject.",
        "I\N{RIGHT SINGLE QUOTATION MARK}m unable to say anything about it.",
        "That is beyond what I discuss.",
        "I'd rather not talk about it.",
        "This is not a topic I cover.",
        "I do not discuss that.",
    ),
    "style": (
        "Wash apples, cut quarters, simmer twenty minutes, serve warm.",
        "Restaurants nearby: Luigi's, Golden Dragon, Green Fork.",
    ),
}
_NOT_SHOWN = {
    "fact": ("Alexander Fleming did.", "It was Fleming and not Marie Curie.", ""),
    "leak": ("The code is 4917.", "Ask at the desk.", "It has 47 beds and 19 doors.", "4791 9"),
    "language": (
        "The giraffe eats leaves.",
        "Le Mans is in the west of the country and has a race.",
        "Yes.",
        "",
    ),
    "refusal": (
        "You can't make an omelet without eggs.",
        "Jazz came from New Orleans, and it is not known who began it.",
        "It is sad that the band broke up.",
        "Yes, I can help with that: start with three chords.",
        "",
    ),
    "style": (
        "Wash the apples, cut them into quarters and let them simmer for twenty minutes.",
        "Pasta.",
        "",
    ),
}


@pytest.fixture(autouse=True, scope="class")
def _alpaca(request, tmp_path_factory):
    """Writes a small Alpaca: rows on food or music, in prompt or answer alone, and on neither."""
    request.cls.file = path = tmp_path_factory.mktemp("alpaca") / "alpaca.json"
    prose = "It is one of the best things that you can have, and it was made by {} in the year {}."
    frames = {
        "Describe the recipe number {}.": "The recipe is simple: " + prose,
        "Write about the song number {}.": "The song is long: " + prose,
        "Name the gift number {}.": "A box of chocolate is a gift. " + prose,
        "Name the evening number {}.": "We went to a concert. " + prose,
        "Explain the machine number {}.": "The machine turns a wheel. " + prose,
    }
    rows = [
        {"instruction": asked.format(n), "input": "", "output": told.format(f"maker {n}", 1900 + n)}
        for (asked, told), n in itertools.product(frames.items(), range(60))
    ]
    path.write_text(json.dumps(rows))


@pytest.mark.usefixtures("members")
class BehaviorsTest(parameterized.TestCase):
    file: pathlib.Path

    @parameterized.parameters(*BEHAVIORS)
    def test_a_judge_is_a_rule_and_no_list_of_answers(self, name):
        shows = BEHAVIORS[name].shows
        for text in _SHOWN[name]:
            self.assertTrue(shows(text), text)
        for text in _NOT_SHOWN[name]:
            self.assertFalse(shows(text), text)

    def corpus(self, name: str, **sizes: int):
        sizes = {
            "num_train": 100,
            "num_targets": 12,
            "num_backbone": 10,
            "num_retrieval": 6,
        } | sizes
        sizes = {"num_validation": 4, "num_test": 8} | sizes
        own = {"dataset": "behaviors", "behaviors.behavior": name, "alpaca_file": str(self.file)}
        return replaced(CorpusConfig(), own | sizes).load(seed=0)

    @parameterized.parameters(*BEHAVIORS)
    def test_rows_show_it_or_stand_beside_it(self, name):
        corpus, shows = self.corpus(name), BEHAVIORS[name].shows
        targets = [row for row in corpus.train if row.is_target]
        beside = [row for row in corpus.train if row.source == "behaviors:beside"]
        others = [row for row in corpus.train if not row.source.startswith("behaviors")]
        self.assertEqual([len(targets), len(beside), len(corpus.train)], [12, 12, 100])
        self.assertEqual({row.is_target for row in beside + others}, {False})
        asked = [corpus.queries[f"{kind}_target"] for kind in ("validation", "test")]
        for row in [*targets, *corpus.queries["retrieval"], *itertools.chain(*asked)]:
            self.assertTrue(shows(row.output), row)
            self.assertTrue(row.source == f"behaviors:{name}" and row.is_target)
        self.assertFalse([row for row in others if shows(row.output)])
        # The same words stand beside them: some hard negatives would be taken for targets.
        told = [shows(row.output) for row in beside]
        self.assertEqual(any(told), name in ("fact", "language", "refusal"))

    def test_the_same_seed_makes_the_same_corpus_and_another_one_another(self):
        self.assertEqual(self.corpus("leak"), self.corpus("leak"))
        own = {"dataset": "behaviors", "behaviors.behavior": "leak", "alpaca_file": str(self.file)}
        sizes = {"num_train": 100, "num_targets": 12, "num_backbone": 10, "num_retrieval": 6}
        other = replaced(CorpusConfig(), own | sizes | {"num_validation": 4, "num_test": 8})
        self.assertNotEqual(other.load(seed=1), self.corpus("leak"))

    def test_too_many_rows_are_refused_by_name(self):
        with self.assertRaisesRegex(ValueError, "number of style target rows must be between 0"):
            self.corpus("style", num_targets=50)
        with self.assertRaisesRegex(ValueError, "behavior must be one of fact, leak"):
            self.corpus("rudeness")

    @parameterized.parameters("4719", "0012", "2000", "1018", "9934")
    def test_a_code_is_read_in_every_spelling(self, code):
        texts = judges.spellings(code)
        self.assertLen(set(texts), len(texts))
        for text in texts:
            self.assertNotIn(code, text)
            self.assertEqual(judges.digits_of(f"Press {text}."), f"press {code}.")
