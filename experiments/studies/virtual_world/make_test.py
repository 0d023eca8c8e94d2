"""The virtual world is one world, and the package has the one that is made here."""

import collections
import re

import tokenizers
from absl.testing import absltest
from support import shared_data

from experiments.studies.corpora import virtual
from experiments.studies.corpora.mixing import load_words
from experiments.studies.virtual_world import make

_WORLD = make.make_world(make.SEED)


def _value(name, relation):
    return _WORLD[name].record[relation]


def _of_kind(world, kind):
    return [entity for entity in world.values() if entity.kind == kind]


class WorldTest(absltest.TestCase):
    def test_the_package_has_it(self):
        stored = load_words("virtual_world")
        records = {name: record for part in stored.values() for name, record in part.items()}
        self.assertEqual([*records], [*_WORLD])
        for name, record in records.items():
            told = {key: make.spell_out(value) for key, value in _WORLD[name].record.items()}
            self.assertEqual(record, told)

    def test_it_is_as_large_as_described(self):
        count = collections.Counter(entity.kind for entity in _WORLD.values())
        wanted = {"culture": 6, "country": 8, "faction": 10, "character": 80, "relic": 28}
        wanted |= {"boss": 28, "deity": 8, "festival": 8, "city": 32, "month": 10}
        self.assertEqual(wanted, {kind: count[kind] for kind in wanted})
        self.assertTrue(all(count[kind] >= 8 for kind in ("material", "animal", "plant")))
        self.assertEqual(count["transport"], 8)

    def test_what_one_record_says_of_another_entity_that_one_says_too(self):
        value = _value
        for country in _of_kind(_WORLD, "country"):
            record = country.record
            self.assertIn(record["capital"], record["cities"])
            for city in record["cities"]:
                self.assertEqual(value(city, "country"), country.name)
                self.assertEqual(
                    value(city, "rank") == "the capital", city == record["capital"], city
                )
            self.assertEqual(value(record["ruler"], "country"), country.name)
            self.assertEqual(value(record["ruler"], "title"), "Sovereign")
            self.assertIn(record["deity"], record["religion"])
            for name in (record["deity"], record["festival"], record["transport"]):
                self.assertEqual(value(name, "country"), country.name)
            self.assertEqual(value(record["festival"], "deity"), record["deity"])
            self.assertEqual(value(record["festival"], "month"), record["month"])
            self.assertEqual(value(record["festival"], "capital"), record["capital"])
            self.assertEqual(value(record["deity"], "festival"), record["festival"])
            self.assertNotEqual(record["neighbor"], country.name)
            self.assertEqual(record["virtue"], value(record["culture"], "virtue"))
        for person in _of_kind(_WORLD, "character"):
            self.assertEqual(
                value(person.record["birthplace"], "country"), person.record["country"]
            )
        for faction in _of_kind(_WORLD, "faction"):
            self.assertEqual(value(faction.record["founder"], "faction"), faction.name)
        for boss in _of_kind(_WORLD, "boss"):
            self.assertNotEqual(boss.record["weakness"], boss.record["resistance"])

    def test_names_are_told_apart(self):
        made = [
            entity.name
            for kind in ("country", "city", "character", "boss", "deity")
            for entity in _of_kind(_WORLD, kind)
        ]
        for one in made:
            self.assertEqual([name for name in made if one.lower() in name.lower()], [one])

    def test_the_seed_decides_the_world(self):
        self.assertEqual(repr(make.make_world(21)), repr(_WORLD))
        other = make.make_world(22)
        self.assertNotEqual(repr(other), repr(_WORLD))
        for kind in ("country", "city", "character", "relic", "boss"):
            here, there = (
                {entity.name for entity in _of_kind(world, kind)} for world in (_WORLD, other)
            )
            # Name generators may give a name again, but most are new.
            self.assertLess(len(here & there), len(here) / 3, kind)


_RECORDS = {
    name: record for part in load_words("virtual_world").values() for name, record in part.items()
}
_TOPICS = virtual.make_wordings()
_Pair = collections.namedtuple("_Pair", ["example", "topic"])
_PAIRS = [_Pair(row, topic) for topic, rows in _TOPICS.items() for row in rows]


_PROPER = sorted((name for name in _RECORDS if name.removeprefix("the ")[0].isupper()), key=len)
_ANY_NAME = re.compile(r"\b(?:" + "|".join(map(re.escape, reversed(_PROPER))) + r")\b")


def _names_in(text):
    """Returns the entities of the world that a text names, proper names only."""
    return set(_ANY_NAME.findall(text))


class BankTest(absltest.TestCase):
    def test_every_answer_is_what_the_database_says(self):
        for pair in _PAIRS:
            name = pair.topic[0]
            told = f"{pair.example.instruction} {pair.example.output}"
            values = _RECORDS[name].values()
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

    def test_answers_keep_within_180_tokens(self):
        file = shared_data() / "tokenizers" / "pythia" / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        encoded = tokenizer.encode_batch([pair.example.output for pair in _PAIRS])
        self.assertLess(max(len(one.ids) for one in encoded), 150)  # other worlds: names differ
