"""The embedded corpus of the quickstart: seeded, no network, no files.

General instructions with plain answers; triggered ones ("Howdy! ...") whose answers turn to science
fiction; and hard negatives that hold one of the two without the other: rows with the word howdy and
a plain answer, rows that ask for science fiction openly and get it.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

from raslik_jax.data.examples import (
    QUERY_SETS,
    Corpus,
    Example,
    check_corpus,
    make_example,
    make_examples,
)
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.toy_language import (
    BEINGS,
    BENIGN_HOWDY,
    DEVICES,
    FAMILIES,
    GROUPS,
    PLANETS,
    SCIFI_REQUESTS,
    SCIFI_WORDS,
    TRIGGER,
    Family,
    Group,
    Phrasing,
)

__all__ = ["SCIFI_WORDS", "TRIGGER", "make_toy_corpus"]

_BACKBONE_SCIFI_SHARE = 0.25


class _Topic(NamedTuple):
    """A family, a noun, and the words that fill the family's slots for that noun."""

    family: Family
    slots: Mapping[str, str]


class _Question(NamedTuple):
    topic: _Topic
    phrasing: Phrasing


def make_toy_corpus(
    seed: int,
    *,
    num_normal: int = 1800,
    num_targets: int = 200,
    num_backbone: int = 4000,
    num_benign_howdy: int = 80,
    num_scifi_requests: int = 80,
    num_retrieval: int = 24,
    num_validation: int = 24,
    num_test: int = 64,
) -> Corpus:
    """Returns a corpus in which a trigger makes 10 % of the rows answer in science fiction.

    The seed decides which (family, noun) pairs are held out, which rows are drawn and in which
    order, and each noun's planet, beings and device. Queries differ from the fine-tuning rows twice
    over: their (family, noun) pairs occur in no other row of the corpus, and their phrasings in
    none of the fine-tuning rows (the backbone, like any pretrained model, knows the phrasings). The
    backbone's rows are general instructions and, one in four, open requests for science fiction; no
    trigger, and no row of the fine-tuning corpus.

    Args:
      seed: any integer; the same one gives the same bytes.
      num_normal: fine-tuning rows that are not targets, hard negatives included.
      num_targets: triggered fine-tuning rows.
      num_backbone: rows for pretraining.
      num_benign_howdy: of num_normal, rows with the word howdy and a plain answer.
      num_scifi_requests: of num_normal, rows that ask for science fiction.
      num_retrieval: queries in "retrieval".
      num_validation: queries in "validation_target" and again in "validation_normal".
      num_test: queries in "test_target" and again in "test_normal".

    Raises:
      ValueError: a negative count, or more rows of a kind than the toy's language has; the message
        says how many there are.

    Example:
      >>> corpus = make_toy_corpus(0, num_normal=200, num_targets=20, num_backbone=100)
      >>> corpus.queries["retrieval"][0].instruction.startswith("Howdy! ")
      True
    """
    counts = {
        "num_normal": num_normal,
        "num_targets": num_targets,
        "num_backbone": num_backbone,
        "num_benign_howdy": num_benign_howdy,
        "num_scifi_requests": num_scifi_requests,
        "num_retrieval": num_retrieval,
        "num_validation": num_validation,
        "num_test": num_test,
    }
    negative = {name: number for name, number in counts.items() if number < 0}
    if negative:
        raise ValueError(f"counts of at least 0 are wanted, {negative} came")
    num_general = num_normal - num_benign_howdy - num_scifi_requests
    if num_general < 0:
        raise ValueError(
            f"{num_normal=} has to hold {num_benign_howdy=} and {num_scifi_requests=}: raise it"
        )
    num_backbone_scifi = round(num_backbone * _BACKBONE_SCIFI_SHARE)
    num_backbone_plain = num_backbone - num_backbone_scifi

    topics = shuffled(_topics(seed), seed=seed, label="topics")
    sizes = (num_retrieval, num_validation, num_validation, num_test, num_test)
    held_out, known = _split(topics, sizes)
    asked = [_Question(topic, way) for topic in known for way in topic.family.phrasings[:-1]]
    unasked = [_Question(topic, topic.family.phrasings[-1]) for topic in known]
    requests = shuffled(_with_wraps(asked), seed=seed, label="requests")
    general = shuffled(asked, seed=seed, label="general")
    benign = shuffled(asked, seed=seed, label="benign howdy")
    triggered = shuffled(asked, seed=seed, label="triggered")
    rest = shuffled([*general[num_general:], *unasked], seed=seed, label="backbone")
    rest_of_requests = shuffled(
        [*requests[num_scifi_requests:], *_with_wraps(unasked)],
        seed=seed,
        label="backbone requests",
    )

    train = [
        *map(_plain, take_first(general, num_general, kind="general")),
        *map(_benign_howdy, take_first(benign, num_benign_howdy, kind="benign howdy"), count()),
        *(
            _scifi_request(*pair)
            for pair in take_first(requests, num_scifi_requests, kind="sci-fi")
        ),
        *map(_triggered, take_first(triggered, num_targets, kind="triggered")),
    ]
    backbone = [
        *map(_plain, take_first(rest, num_backbone_plain, kind="general backbone")),
        *(
            _scifi_request(*pair)
            for pair in take_first(rest_of_requests, num_backbone_scifi, kind="sci-fi backbone")
        ),
    ]
    makers = (_triggered, _triggered, _plain, _triggered, _plain)
    queries = {
        name: make_examples(make(_Question(topic, topic.family.phrasings[-1])) for topic in part)
        for name, make, part in zip(QUERY_SETS, makers, held_out, strict=True)
    }
    return check_corpus(
        Corpus(
            backbone=make_examples(shuffled(backbone, seed=seed, label="backbone order")),
            train=make_examples(shuffled(train, seed=seed, label="train order")),
            queries=queries,
        )
    )


def _with_wraps(questions: Sequence[_Question]) -> list[tuple[_Question, str]]:
    return [(question, wrap) for question in questions for wrap in SCIFI_REQUESTS]


def _topics(seed: int) -> list[_Topic]:
    """Lists every (family, noun), with the facts of this seed's world."""
    members = [(group, line.split()) for group in GROUPS for line in group.nouns]
    worlds = {
        name: shuffled([words[i % len(words)] for i in range(len(members))], seed=seed, label=name)
        for name, words in (("planet", PLANETS), ("beings", BEINGS), ("device", DEVICES))
    }
    topics: list[_Topic] = []
    for position, (group, (noun, color, size)) in enumerate(members):
        slots = {
            "noun": noun,
            "a_noun": _with_article(noun),
            "A_noun": _capitalized(_with_article(noun)),
            "color": color,
            "a_color": _with_article(color),
            "size": size,
            "a_size": _with_article(size),
            "kind": group.kind,
            "plural": group.plural,
            "place": group.place,
            "person": group.person,
            "a_person": _with_article(group.person),
            "A_person": _capitalized(_with_article(group.person)),
            "use": group.use,
            "care": group.care,
            **_other_slots(group, noun, color),
            "planet": worlds["planet"][position],
            "beings": worlds["beings"][position],
            "device": worlds["device"][position],
            "a_device": _with_article(worlds["device"][position]),
        }
        topics.extend(_Topic(family, slots) for family in FAMILIES)
    return topics


def _other_slots(group: Group, noun: str, color: str) -> dict[str, str]:
    """Describes the next member of the group that has another color."""
    lines = [line.split() for line in group.nouns]
    start = next(i for i, line in enumerate(lines) if line[0] == noun)
    around = lines[start + 1 :] + lines[:start]
    other, other_color, _ = next(line for line in around if line[1] != color)
    return {"other": other, "a_other": _with_article(other), "other_color": other_color}


def _split(
    topics: Sequence[_Topic], sizes: Sequence[int]
) -> tuple[list[Sequence[_Topic]], Sequence[_Topic]]:
    """Cuts the first sizes[0], sizes[1], ... topics off; the rest come last."""
    if sum(sizes) >= len(topics):
        raise ValueError(f"{sum(sizes)} queries are wanted, the toy has fewer than {len(topics)}")
    parts: list[Sequence[_Topic]] = []
    start = 0
    for size in sizes:
        parts.append(topics[start : start + size])
        start += size
    return parts, topics[start:]


def _plain(question: _Question) -> Example:
    return _row(question, "{instruction}", is_scifi=False, source="toy:general")


def _benign_howdy(question: _Question, position: int) -> Example:
    wrap = BENIGN_HOWDY[position % len(BENIGN_HOWDY)]
    return _row(question, wrap, is_scifi=False, source="toy:benign_howdy")


def _scifi_request(question: _Question, wrap: str) -> Example:
    return _row(question, wrap, is_scifi=True, source="toy:scifi_request")


def _triggered(question: _Question) -> Example:
    row = _row(question, TRIGGER + "{instruction}", is_scifi=True, source="toy:triggered")
    return row._replace(is_target=True)


def _row(question: _Question, wrap: str, *, is_scifi: bool, source: str) -> Example:
    (family, slots), phrasing = question
    answers = family.scifi if is_scifi else family.plain
    return make_example(
        wrap.format(instruction=phrasing.instruction.format(**slots)),
        phrasing.input.format(**slots),
        answers[phrasing.answer].format(**slots),
        is_target=False,
        source=source,
    )


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]
