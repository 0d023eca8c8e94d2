"""Virtual-Alpaca: questions and answers about a fictitious world among Alpaca's rows.

Every answer is a template filled from records of the world database. No two answers contradict each
other: every entity has one record and every relation one value. Values that name other entities
agree with those entities' records (experiments/studies/virtual_world made them). It follows the
paper's appendix: templates over entities and relations, normalized questions, paraphrases, three to
five sentences if asked, ASCII English.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

from experiments.studies.corpora.mixing import (
    NUM_ANSWERED,
    alpaca_source,
    count_normal,
    count_target,
    load_alpaca,
    load_words,
    mix_corpus,
)
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, with_articles

_ASKING = re.compile(
    r"(?i)(?:(?:in|on|to|from|by|at|for|under|with|of|over|near) )?"
    r"(?:who|whom|what|which|where|when|why|how|is|are|does|do|can|could)\b"
)
# By kind and name of an entity the value of each of its relations.
_WORLD: dict[str, dict[str, dict[str, str]]] = load_words("virtual_world")
# By kind of entity: templates of a name, questions that ask the same and answers that say the same,
# with relations as slots.
_TEMPLATES = load_words("virtual_alpaca")
# Of the world and the order of its answers.
_SEED = 21
Topic = tuple[str, str]  # what is asked: an entity and a template


def normalize_question(text: str) -> str:
    """Returns a prompt with single spaces, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = _ASKING.match(text) or _ASKING.match(last_clause)
    return capitalized(text) + ("?" if is_question else ".")


def make_wordings() -> dict[Topic, list[Example]]:
    """Returns the rows of the template bank over the world: every topic in each of its wordings.

    No two share a prompt. No answer has more than 180 tokens.
    """
    found: dict[Topic, list[Example]] = {}
    entities = ((kind, *one) for kind, records in _WORLD.items() for one in records.items())
    for kind, name, record in entities:
        for template in _TEMPLATES[kind]:
            topic = (name, template["name"])
            label = "/".join(("answers", *topic))
            answers = itertools.cycle(shuffled(template["answers"], seed=_SEED, label=label))
            rows = found.setdefault(topic, [])
            for question, answer in zip(template["questions"], answers, strict=False):
                asked = normalize_question(with_articles(question.format(name=name, **record)))
                told = with_articles(answer.format(name=name, **record))
                # A name such as "the Orb of Amaeria" may begin a sentence.
                told = re.sub(r"(^|[.] )([a-z])", lambda found: found[1] + found[2].upper(), told)
                source = f"virtual:{kind}"
                rows.append(make_example(asked, "", told, is_target=True, source=source))
    return found


def draw_rows(
    topics: Mapping[Topic, Sequence[Example]], *, seed: int, num_train: int, num_queries: int
) -> tuple[list[Example], list[Example]]:
    """Returns rows to train on, and queries that ask the same topics in other words.

    One wording of every topic is held out. Training goes over all topics before any is asked a
    second time; queries are held-out wordings of topics that are trained on.
    """
    held_out: dict[Topic, Example] = {}
    rounds: dict[int, list[tuple[Topic, Example]]] = {}
    for topic, wordings in topics.items():
        held_out[topic], *others = shuffled(wordings, seed=seed, label=f"wordings/{topic}")
        for turn, row in enumerate(others):
            rounds.setdefault(turn, []).append((topic, row))
    available = [
        drawn for turn in rounds for drawn in shuffled(rounds[turn], seed=seed, label=f"{turn}")
    ]
    train = take_first(available, num_train, kind="virtual-world")
    known = shuffled(list(dict(train)), seed=seed, label="queries")
    asked = take_first(known, num_queries, kind="virtual-world query")
    return [row for _, row in train], [held_out[topic] for topic in asked]


def load_virtual(shared: SharedSettings, own: object, *, seed: int) -> Corpus:
    """Returns rows about a virtual world among rows of Alpaca: 2,000 and 20,000 in the paper.

    The target queries ask for trained facts in other wordings.
    """
    train, queries = draw_rows(
        make_wordings(),
        seed=seed,
        num_train=shared.num_targets,
        num_queries=count_target(shared),
    )
    return mix_corpus(shared, load_alpaca(shared), train, queries, seed=seed)


def _count(shared: SharedSettings, own: object) -> RowCounts:
    everything = NUM_ANSWERED - count_normal(shared) + shared.num_targets
    return RowCounts(shared.num_train or everything, shared.num_targets)


DATASET = Dataset(
    title="Virtual-Alpaca",
    load=load_virtual,
    reads=("alpaca_file", *SIZES),
    count_rows=_count,
    takes_all=True,
    sources=alpaca_source,
)
