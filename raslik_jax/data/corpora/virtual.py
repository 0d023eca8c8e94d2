"""Virtual-Alpaca: questions and answers about a world that does not exist, among Alpaca's rows.

Every answer is a template filled from records of the world database, so that no two answers can
contradict each other. Follows the paper's appendix: templates over entities and relations,
normalized questions, paraphrases, three to five sentences where asked, ASCII English.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora.mixing import NUM_ANSWERED, alpaca_source, load_alpaca, mix_corpus
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.corpora.virtual_world import make_world, spell_out
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, load_words, with_articles

_ASKING = re.compile(
    r"(?i)(?:(?:in|on|to|from|by|at|for|under|with|of|over|near) )?"
    r"(?:who|whom|what|which|where|when|why|how|is|are|does|do|can|could)\b"
)
# By kind of entity: templates of a name, questions that ask the same and answers that say the same,
# with relations as slots.
_TEMPLATES = load_words("virtual_alpaca")
Topic = tuple[str, str]  # what is asked: an entity and a template


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualSettings(Settings):
    """Which world is told of."""

    world_seed: int = setting(21, "Decides the world.", low=0, high=2**31 - 1)


def normalize_question(text: str) -> str:
    """Returns a prompt with one space between words, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = _ASKING.match(text) or _ASKING.match(last_clause)
    return capitalized(text) + ("?" if is_question else ".")


def make_wordings(world_seed: int) -> dict[Topic, list[Example]]:
    """Returns the rows of the template bank over a world: every topic in each of its wordings.

    No two share a prompt. No answer has more than 180 tokens.
    """
    found: dict[Topic, list[Example]] = {}
    for entity in make_world(world_seed).values():
        slots = {name: spell_out(value) for name, value in entity.record.items()}
        slots["name"] = entity.name
        for template in _TEMPLATES[entity.kind]:
            topic = (entity.name, template["name"])
            label = "/".join(("answers", *topic))
            answers = itertools.cycle(shuffled(template["answers"], seed=world_seed, label=label))
            rows = found.setdefault(topic, [])
            for question, answer in zip(template["questions"], answers, strict=False):
                asked = normalize_question(with_articles(question.format(**slots)))
                told = with_articles(answer.format(**slots))
                # A name such as "the Orb of Amaeria" may begin a sentence.
                told = re.sub(r"(^|[.] )([a-z])", lambda found: found[1] + found[2].upper(), told)
                source = f"virtual:{entity.kind}"
                rows.append(make_example(asked, "", told, is_target=True, source=source))
    return found


def draw_rows(
    topics: Mapping[Topic, Sequence[Example]], *, seed: int, num_train: int, num_queries: int
) -> tuple[list[Example], list[Example]]:
    """Returns rows to train on, and queries that ask the same topics in other words.

    Of every topic one wording is held out. Training goes over all topics before any is asked a
    second time; queries are held-out wordings of topics that are trained on.
    """
    held_out: dict[Topic, Example] = {}
    rounds: dict[int, list[tuple[Topic, Example]]] = {}
    for topic, wordings in topics.items():
        held_out[topic], *others = shuffled(wordings, seed=seed, label=f"wordings/{topic}")
        for turn, row in enumerate(others):
            rounds.setdefault(turn, []).append((topic, row))
    available = [
        drawn
        for turn, part in rounds.items()
        for drawn in shuffled(part, seed=seed, label=f"{turn}")
    ]
    train = take_first(available, num_train, kind="virtual-world")
    known = shuffled(list(dict(train)), seed=seed, label="queries")
    asked = take_first(known, num_queries, kind="virtual-world query")
    return [row for _, row in train], [held_out[topic] for topic in asked]


def load_virtual(shared: SharedSettings, own: VirtualSettings, *, seed: int) -> Corpus:
    """Returns rows about a virtual world among rows of Alpaca: 2,000 and 20,000 in the paper.

    The target queries ask for what is trained on, in wordings that are not.
    """
    train, queries = draw_rows(
        make_wordings(own.world_seed),
        seed=seed,
        num_train=shared.num_targets,
        num_queries=shared.num_target_queries,
    )
    return mix_corpus(shared, load_alpaca(shared), train, queries, seed=seed)


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
