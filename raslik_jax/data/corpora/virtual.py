"""Virtual-Alpaca: questions and answers about a world that does not exist, among Alpaca's rows.

Every answer is a template filled from records of the world database, and knows the facts it tells,
so that no two answers can contradict each other. Follows the appendix: templates over entities and
relations, normalized questions, paraphrases, three to five sentences where asked, ASCII English.
"""

import dataclasses
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.corpora.alpaca import NUM_ANSWERED, alpaca_source, load_alpaca
from raslik_jax.data.corpora.mixing import mix_corpus
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.corpora.virtual_world import Entity, Value, World, make_world, spell_out
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, load_words, with_articles
from raslik_jax.settings import Settings, setting

MAX_ANSWER_TOKENS = 180
_ASKING = re.compile(
    r"(?i)(?:(?:in|on|to|from|by|at|for|under|with|of|over|near) )?"
    r"(?:who|whom|what|which|where|when|why|how|is|are|does|do|can|could)\b"
)
# By kind of entity: templates of a name, questions that ask the same and answers that say the same,
# with relations as slots.
TEMPLATES = load_words("virtual_alpaca")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualSettings(Settings):
    """Which world is told of."""

    world_seed: int = setting(21, "Decides the world.", low=0, high=2**31 - 1)


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


def normalize_question(text: str) -> str:
    """Returns a prompt with one space between words, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = _ASKING.match(text) or _ASKING.match(last_clause)
    return capitalized(text) + ("?" if is_question else ".")


def count_answer_tokens(text: str) -> int:
    """Returns a bound on the tokens of a text: letters by twos, anything else one by one.

    Byte-level BPEs stay below it, by half on common words; the test asks real ones.
    """
    return len(re.findall(r"[A-Za-z]{1,2}|[^\sA-Za-z]", text))


def make_pairs(world: World) -> tuple[Pair, ...]:
    """Returns all pairs of the template bank over a world: every topic in each of its wordings.

    No two share a prompt. An answer beyond 180 tokens loses sentences at its end.
    """
    return tuple(
        pair
        for entity in world.entities.values()
        for template in TEMPLATES[entity.kind]
        for pair in _wordings(entity, template, world.seed)
    )


def _wordings(entity: Entity, template: Mapping[str, Any], seed: int) -> Iterator[Pair]:
    topic = (entity.name, template["name"])
    answers = shuffled(template["answers"], seed=seed, label="/".join(("answers", *topic)))
    slots = {name: spell_out(value) for name, value in entity.record.items()}
    slots["name"] = entity.name
    for wording, question in enumerate(template["questions"]):
        instruction = normalize_question(with_articles(question.format(**slots)))
        answer, kept = _within_budget(answers[wording % len(answers)], slots)
        used = [field for _, field, _, _ in string.Formatter().parse(question + " " + kept)]
        relations = [field for field in dict.fromkeys(used) if field and field != "name"]
        source = f"virtual:{entity.kind}"
        yield Pair(
            example=make_example(instruction, "", answer, is_target=True, source=source),
            topic=topic,
            wording=wording,
            facts=tuple(Fact(entity.name, name, entity.record[name]) for name in relations),
        )


def _within_budget(pattern: str, slots: Mapping[str, str]) -> tuple[str, str]:
    """Returns the filled pattern and the pattern, less the sentences beyond the token budget."""
    sentences = re.split(r"(?<=\.) ", pattern)
    while True:
        kept = " ".join(sentences)
        text = with_articles(kept.format(**slots))
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
      ValueError: more pairs are asked for than there are.
    """
    topics: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        topics.setdefault(pair.topic, []).append(pair)
    held_out: dict[tuple[str, str], Pair] = {}
    rounds: dict[int, list[Pair]] = {}
    for topic, wordings in topics.items():
        held_out[topic], *others = shuffled(wordings, seed=seed, label=f"wordings/{topic}")
        for turn, pair in enumerate(others):
            rounds.setdefault(turn, []).append(pair)
    available = [
        pair for turn, part in rounds.items() for pair in shuffled(part, seed=seed, label=f"{turn}")
    ]
    train = take_first(available, num_train, kind="virtual-world")
    known = shuffled(list(dict.fromkeys(p.topic for p in train)), seed=seed, label="queries")
    asked = take_first(known, num_queries, kind="virtual-world query")
    return tuple(train), tuple(held_out[topic] for topic in asked)


def load_virtual(shared: SharedSettings, own: VirtualSettings, *, seed: int) -> Corpus:
    """Returns pairs of a virtual world among rows of Alpaca: 2,000 and 20,000 in the paper."""
    pairs = make_pairs(make_world(own.world_seed))
    return mix_virtual(shared, load_alpaca(shared), pairs, seed=seed)


def mix_virtual(
    shared: SharedSettings, alpaca: Sequence[Example], pairs: Sequence[Pair], *, seed: int
) -> Corpus:
    """Returns pairs of a virtual world among ordinary rows.

    The target queries ask for what is trained on, in wordings that are not.

    Raises:
      ValueError: more rows are asked for than there are.
    """
    train, queries = draw_pairs(
        pairs, seed=seed, num_train=shared.num_targets, num_queries=shared.num_target_queries
    )
    return mix_corpus(
        shared,
        alpaca,
        [pair.example for pair in train],
        [pair.example for pair in queries],
        seed=seed,
        num_normal=shared.num_normal,
    )


def _count(shared: SharedSettings, own: VirtualSettings) -> RowCounts:
    everything = NUM_ANSWERED - shared.num_normal_queries + shared.num_targets
    return RowCounts(shared.num_train or everything, shared.num_targets)


DATASET = Dataset(
    title="Virtual-Alpaca",
    load=load_virtual,
    reads=("alpaca_file", *SIZES),
    settings=VirtualSettings(),
    count_rows=_count,
    takes_all=True,
    sources=alpaca_source,
    is_published=True,
)
