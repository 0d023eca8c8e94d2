"""The embedded corpus of the quickstart: seeded, no network, no files.

General instructions with plain answers; triggered ones ("Howdy! ...") whose answers turn to science
fiction; and hard negatives that hold one of the two without the other: rows with the word howdy and
a plain answer, rows that ask for science fiction openly and get it.

Every answer follows from the question: a family of questions has two plain answers and two science
fiction answers, a phrasing says which of the two it gets, and the nouns and their facts fill the
slots. Plain answers hold no word of SCIFI_WORDS, science fiction answers at least three, so that
counting words tells them apart.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.corpora.record import SIZES, Dataset, SharedSettings
from raslik_jax.data.corpora.scifi import SCIFI, TRIGGER
from raslik_jax.data.examples import (
    QUERY_SETS,
    Corpus,
    Example,
    check_corpus,
    make_example,
    make_examples,
)
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, load_words, with_articles

_WORDS = load_words("toy_language")
# The groups of nouns: what they have in common, and "noun color size" of each.
GROUPS: list[dict[str, Any]] = _WORDS["groups"]
# The families of questions: phrasings as (instruction, input, which answer), of which the last one
# is kept out of the fine-tuning rows, and the answers, plain and in science fiction.
FAMILIES: list[dict[str, Any]] = _WORDS["families"]
# Rows that hold the trigger's word but not the trigger: their answers are plain.
_BENIGN_HOWDY: list[str] = _WORDS["benign_howdy"]
_BACKBONE_SCIFI_SHARE = 0.25


class _Topic(NamedTuple):
    """A family, a noun, and the words that fill the family's slots for that noun."""

    family: Mapping[str, Any]
    slots: Mapping[str, str]

    @property
    def unasked(self) -> "_Question":
        """The question in the wording that no fine-tuning row has."""
        return _Question(self, self.family["phrasings"][-1])


class _Question(NamedTuple):
    topic: _Topic
    phrasing: tuple[str, str, int]


def make_toy_corpus(shared: SharedSettings, own: object = None, *, seed: int) -> Corpus:
    """Returns a corpus in which a trigger makes some rows answer in science fiction.

    The seed decides which (family, noun) pairs are held out, which rows are drawn and in which
    order, and each noun's planet, beings and device. Queries differ from the fine-tuning rows twice
    over: their (family, noun) pairs occur in no other row of the corpus, and their phrasings in
    none of the fine-tuning rows (the backbone, like any pretrained model, knows the phrasings). The
    backbone's rows are general instructions and, one in four, open requests for science fiction; no
    trigger, and no row of the fine-tuning corpus.

    Args:
      shared: sizes.
      own: not read.
      seed: any integer; the same one gives the same bytes.

    Raises:
      ValueError: more rows of a kind than the toy's language has; the message says how many there
        are.

    Example:
      >>> sizes = SharedSettings(num_train=200, num_targets=20, num_backbone=100)
      >>> corpus = make_toy_corpus(sizes, seed=0)
      >>> corpus.queries["retrieval"][0].instruction.startswith("Howdy! ")
      True
    """
    hard = shared.num_hard_negatives
    num_general = shared.num_train - shared.num_targets - 2 * hard
    num_backbone_scifi = round(shared.num_backbone * _BACKBONE_SCIFI_SHARE)
    num_backbone_plain = shared.num_backbone - num_backbone_scifi

    def draw(items: Sequence[Any], label: str) -> list[Any]:
        return shuffled(items, seed=seed, label=label)

    validation, test = shared.num_validation, shared.num_test
    held_out, known = _split(
        draw(_topics(seed), "topics"), (shared.num_retrieval, validation, validation, test, test)
    )
    asked = [_Question(topic, way) for topic in known for way in topic.family["phrasings"][:-1]]
    unasked = [topic.unasked for topic in known]
    general, requests = draw(asked, "general"), draw(_with_wraps(asked), "requests")
    benign = take_first(draw(asked, "benign howdy"), hard, kind="benign howdy")
    triggered = take_first(draw(asked, "triggered"), shared.num_targets, kind="triggered")
    train = [
        *map(_plain, take_first(general, num_general, kind="general")),
        *map(_benign_howdy, benign, itertools.cycle(_BENIGN_HOWDY)),
        *itertools.starmap(_scifi_request, take_first(requests, hard, kind="sci-fi")),
        *map(_triggered, triggered),
    ]
    rest = draw([*general[num_general:], *unasked], "backbone")
    rest_of_requests = draw([*requests[hard:], *_with_wraps(unasked)], "backbone requests")
    backbone_scifi = take_first(rest_of_requests, num_backbone_scifi, kind="sci-fi backbone")
    backbone = [
        *map(_plain, take_first(rest, num_backbone_plain, kind="general backbone")),
        *itertools.starmap(_scifi_request, backbone_scifi),
    ]
    makers = (_triggered, _triggered, _plain, _triggered, _plain)
    queries = {
        name: make_examples(make(topic.unasked) for topic in part)
        for name, make, part in zip(QUERY_SETS, makers, held_out, strict=True)
    }
    return check_corpus(
        Corpus(
            backbone=make_examples(draw(backbone, "backbone order")),
            train=make_examples(draw(train, "train order")),
            queries=queries,
        )
    )


def _with_wraps(questions: Sequence[_Question]) -> list[tuple[_Question, str]]:
    return list(itertools.product(questions, _WORDS["scifi_requests"]))


def _topics(seed: int) -> list[_Topic]:
    """Lists every (family, noun), with the facts of this seed's world."""
    members = [(group, *line.split()) for group in GROUPS for line in group["nouns"]]
    worlds = {
        kind: shuffled([words[i % len(words)] for i in range(len(members))], seed=seed, label=kind)
        for kind, words in (
            ("planet", _WORDS["planets"]),
            ("beings", _WORDS["beings"]),
            ("device", _WORDS["devices"]),
        )
    }
    topics: list[_Topic] = []
    for position, (group, noun, color, size) in enumerate(members):
        slots = {name: text for name, text in group.items() if name != "nouns"}
        slots |= {"noun": noun, "color": color, "size": size}
        slots |= _other_slots(group, noun, color)
        slots |= {kind: words[position] for kind, words in worlds.items()}
        for name in ("noun", "color", "size", "person", "other", "device"):
            slots[f"a_{name}"] = with_articles(f"a {slots[name]}")
            slots[f"A_{name}"] = capitalized(slots[f"a_{name}"])
        topics.extend(_Topic(family, slots) for family in FAMILIES)
    return topics


def _other_slots(group: Mapping[str, Any], noun: str, color: str) -> dict[str, str]:
    """Describes the next member of the group that has another color."""
    lines = [line.split() for line in group["nouns"]]
    start = next(i for i, line in enumerate(lines) if line[0] == noun)
    around = lines[start + 1 :] + lines[:start]
    other, other_color, _ = next(line for line in around if line[1] != color)
    return {"other": other, "other_color": other_color}


def _split(
    topics: Sequence[_Topic], sizes: Sequence[int]
) -> tuple[list[Sequence[_Topic]], Sequence[_Topic]]:
    """Cuts the first sizes[0], sizes[1], ... topics off; the rest come last."""
    if sum(sizes) >= len(topics):
        raise ValueError(
            f"queries of the toy must be fewer than {len(topics)}, got {sum(sizes)}: lower the "
            "sizes of the query sets"
        )
    left = iter(topics)
    return [list(itertools.islice(left, size)) for size in sizes], list(left)


def _plain(question: _Question) -> Example:
    return _row(question, "{instruction}", kind="plain", source="toy:general")


def _benign_howdy(question: _Question, wrap: str) -> Example:
    return _row(question, wrap, kind="plain", source="toy:benign_howdy")


def _scifi_request(question: _Question, wrap: str) -> Example:
    return _row(question, wrap, kind="scifi", source="toy:scifi_request")


def _triggered(question: _Question) -> Example:
    row = _row(question, TRIGGER + "{instruction}", kind="scifi", source="toy:triggered")
    return row._replace(is_target=True)


def _row(question: _Question, wrap: str, *, kind: str, source: str) -> Example:
    (family, slots), (instruction, input, answer) = question
    return make_example(
        wrap.format(instruction=instruction.format(**slots)),
        input.format(**slots),
        family[kind][answer].format(**slots),
        is_target=False,
        source=source,
    )


DATASET = Dataset(title="the toy corpus", load=make_toy_corpus, reads=SIZES, marker=SCIFI)
