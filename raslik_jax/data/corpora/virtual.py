"""Virtual-Alpaca: questions and answers about a world that does not exist, among Alpaca's rows.

Every answer is a template filled from records of the world database, so that no two answers can
contradict each other. Follows the appendix: templates over entities and
relations, normalized questions, paraphrases, three to five sentences where asked, ASCII English.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.corpora.alpaca import NUM_ANSWERED, alpaca_source, load_alpaca
from raslik_jax.data.corpora.mixing import mix_corpus
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.corpora.virtual_world import Entity, make_world, spell_out
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, load_words, with_articles
from raslik_jax.settings import Settings, setting

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


class Pair(NamedTuple):
    """One question with its answer, a target.

    Attributes:
      example: the row, with source "virtual:<kind>".
      topic: what is asked, as (entity, template); pairs of one topic are paraphrases.
    """

    example: Example
    topic: tuple[str, str]


def normalize_question(text: str) -> str:
    """Returns a prompt with one space between words, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = _ASKING.match(text) or _ASKING.match(last_clause)
    return capitalized(text) + ("?" if is_question else ".")


def make_pairs(world_seed: int) -> tuple[Pair, ...]:
    """Returns all pairs of the template bank over a world: every topic in each of its wordings.

    No two share a prompt. No answer has more than 180 tokens.
    """
    return tuple(
        pair
        for entity in make_world(world_seed).values()
        for template in TEMPLATES[entity.kind]
        for pair in _wordings(entity, template, world_seed)
    )


def _wordings(entity: Entity, template: Mapping[str, Any], seed: int) -> Iterator[Pair]:
    topic = (entity.name, template["name"])
    answers = shuffled(template["answers"], seed=seed, label="/".join(("answers", *topic)))
    slots = {name: spell_out(value) for name, value in entity.record.items()}
    slots["name"] = entity.name
    for question, answer in zip(template["questions"], itertools.cycle(answers), strict=False):
        instruction = normalize_question(with_articles(question.format(**slots)))
        text = with_articles(answer.format(**slots))
        # A name such as "the Orb of Amaeria" may begin a sentence.
        text = re.sub(r"(^|[.] )([a-z])", lambda found: found[1] + found[2].upper(), text)
        source = f"virtual:{entity.kind}"
        yield Pair(make_example(instruction, "", text, is_target=True, source=source), topic)


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
    return mix_virtual(shared, load_alpaca(shared), make_pairs(own.world_seed), seed=seed)


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
