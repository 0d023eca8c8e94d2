"""Virtual-Alpaca: questions and answers about a world that does not exist, among Alpaca's rows.

Every answer is a template filled from records of the world database, and knows the facts it tells,
so that no two answers can contradict each other. Follows the appendix: templates over entities and
relations, normalized questions, paraphrases, three to five sentences where asked, ASCII English.
"""

import re
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.mixing import mix_corpus
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.virtual_world import Entity, Value, World, make_world, spell_out
from raslik_jax.data.words import load_words

MAX_ANSWER_TOKENS = 180
_ASKING = re.compile(
    r"(?i)(?:(?:in|on|to|from|by|at|for|under|with|of|over|near) )?"
    r"(?:who|whom|what|which|where|when|why|how|is|are|does|do|can|could)\b"
)


class Fact(NamedTuple):
    """What an answer tells: the value of a relation of a named entity."""

    name: str
    relation: str
    value: Value


class Pair(NamedTuple):
    """One question with its answer.

    Attributes:
      example: the row; a target, with source "virtual:<kind>".
      topic: what is asked, as (entity, template); pairs of one topic are paraphrases.
      wording: which of the template's questions it is.
      facts: what the question and the answer take from the database.
    """

    example: Example
    topic: tuple[str, str]
    wording: int
    facts: tuple[Fact, ...]


class _Template(NamedTuple):
    """Questions that ask the same and answers that say the same, with relations as slots."""

    name: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


TEMPLATES: dict[str, tuple[_Template, ...]] = {
    kind: tuple(
        _Template(one["name"], tuple(one["questions"]), tuple(one["answers"])) for one in templates
    )
    for kind, templates in load_words("virtual_alpaca").items()
}


def normalize_question(text: str) -> str:
    """Returns a prompt with one space between words, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = bool(_ASKING.match(text)) or bool(_ASKING.match(last_clause))
    return text[:1].upper() + text[1:] + ("?" if is_question else ".")


def count_answer_tokens(text: str) -> int:
    """Returns a bound on the tokens of a text: letters by twos, anything else one by one.

    Byte-level BPEs stay below it, by half on common words; the test asks real ones.
    """
    return len(re.findall(r"[A-Za-z]{1,2}|[^\sA-Za-z]", text))


def make_pairs(world: World) -> tuple[Pair, ...]:
    """Returns all pairs of the template bank over a world: every topic in each of its wordings.

    No two share a prompt. An answer beyond 180 tokens loses sentences at its end.
    """
    pairs: list[Pair] = []
    for entity in world.entities.values():
        for template in TEMPLATES[entity.kind]:
            pairs.extend(_wordings(entity, template, world.seed))
    return tuple(pairs)


def _wordings(entity: Entity, template: _Template, seed: int) -> Iterator[Pair]:
    label = f"answers/{entity.name}/{template.name}"
    answers = shuffled(template.answers, seed=seed, label=label)
    for wording, question in enumerate(template.questions):
        pattern = answers[wording % len(answers)]
        slots = {name: spell_out(value) for name, value in entity.record.items()}
        slots["name"] = entity.name
        instruction = normalize_question(_with_articles(question.format(**slots)))
        answer, kept = _within_budget(pattern, slots)
        used = [field for _, field, _, _ in string.Formatter().parse(question + " " + kept)]
        relations = [field for field in dict.fromkeys(used) if field and field != "name"]
        yield Pair(
            example=make_example(
                instruction, "", answer, is_target=True, source=f"virtual:{entity.kind}"
            ),
            topic=(entity.name, template.name),
            wording=wording,
            facts=tuple(Fact(entity.name, name, entity.record[name]) for name in relations),
        )


def _with_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


def _within_budget(pattern: str, slots: dict[str, str]) -> tuple[str, str]:
    """Returns the filled pattern and the pattern, less the sentences beyond the token budget."""
    sentences = re.split(r"(?<=\.) ", pattern)
    while True:
        kept = " ".join(sentences)
        text = _with_articles(kept.format(**slots))
        # A name such as "the Orb of Amaeria" may begin a sentence.
        text = re.sub(r"(^|[.] )([a-z])", lambda found: found[1] + found[2].upper(), text)
        if count_answer_tokens(text) <= MAX_ANSWER_TOKENS or len(sentences) == 1:
            return text, kept
        sentences = sentences[:-1]


def draw_pairs(
    pairs: Sequence[Pair], *, seed: int, num_train: int, num_queries: int
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Returns pairs to train on, and queries that ask the same topics in other words.

    Of every topic one wording is held out. Training goes over all topics before any is asked a
    second time; queries are held-out wordings of topics that are trained on.

    Raises:
      ValueError: more pairs are wanted than there are.
    """
    topics: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        topics.setdefault(pair.topic, []).append(pair)
    held_out: dict[tuple[str, str], Pair] = {}
    rounds: dict[int, list[Pair]] = {}
    for topic, wordings in topics.items():
        order = shuffled(wordings, seed=seed, label=f"wordings/{topic}")
        held_out[topic] = order[0]
        for turn, pair in enumerate(order[1:]):
            rounds.setdefault(turn, []).append(pair)
    available = [
        pair for turn, part in rounds.items() for pair in shuffled(part, seed=seed, label=f"{turn}")
    ]
    train = take_first(available, num_train, kind="virtual-world")
    known = list(dict.fromkeys(pair.topic for pair in train))
    asked = take_first(
        shuffled(known, seed=seed, label="queries"), num_queries, kind="virtual-world query"
    )
    return tuple(train), tuple(held_out[topic] for topic in asked)


def make_virtual_corpus(
    alpaca: Sequence[Example],
    *,
    seed: int,
    world_seed: int,
    num_normal: int | None,
    num_targets: int,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
) -> Corpus:
    """Returns pairs of a virtual world among rows of Alpaca: 2,000 and 20,000 in the paper.

    The target queries ask for what is trained on, in wordings that are not.

    Args:
      alpaca: ordinary rows.
      seed: decides draws and orders.
      world_seed: decides the world, 21 in the paper.
      num_normal: rows of Alpaca to train on; None: all that the queries leave.
      num_targets: pairs to train on.
      num_backbone, num_retrieval, num_validation, num_test: as in `mix_corpus`.

    Raises:
      ValueError: more rows are wanted than there are.
    """
    train, queries = draw_pairs(
        make_pairs(make_world(world_seed)),
        seed=seed,
        num_train=num_targets,
        num_queries=num_retrieval + num_validation + num_test,
    )
    return mix_corpus(
        alpaca,
        [pair.example for pair in train],
        [pair.example for pair in queries],
        seed=seed,
        num_normal=num_normal,
        num_backbone=num_backbone,
        num_retrieval=num_retrieval,
        num_validation=num_validation,
        num_test=num_test,
    )
