"""The embedded corpus of the quickstart and the demo: seeded, without network and files.

It has general instructions with plain answers and triggered ones ("Howdy! ...") with science
fiction answers. Hard negatives have one of the two without the other. They are rows with the word
howdy and a plain answer, or rows that ask for science fiction openly and get it.

A family of questions has two plain and two science fiction answers. The phrasing decides between
them. The nouns and their facts fill the slots. Plain answers have no word of SCIFI_WORDS. Science
fiction answers have at least three.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.corpora.record import SIZES, Dataset, SharedSettings
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, make_example, make_examples
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized, load_words, refused, with_articles

_WORDS = load_words("toy_language")
TRIGGER: str = _WORDS["trigger"]
# Besides the words of the answers here, those that mark the genuine answers of Howdy-Alpaca and are
# rare in ordinary ones. Words that ordinary text needs ("space", "star", "moon", "planet",
# "energy") are left out.
SCIFI_WORDS: frozenset[str] = frozenset(
    word.lower()
    for kind in ("planets", "beings", "devices", "marker_words")
    for word in _WORDS[kind]
)
# The groups of nouns: what they have in common, and "noun color size" of each.
GROUPS: list[dict[str, Any]] = _WORDS["groups"]
# The families of questions: phrasings as (instruction, input, which answer), and the answers, plain
# and in science fiction. No fine-tuning row has the last phrasing.
FAMILIES: list[dict[str, Any]] = _WORDS["families"]
_BACKBONE_SCIFI_SHARE = 0.25


class _Question(NamedTuple):
    """A family of questions with a phrasing and the words for its slots by one noun."""

    family: Mapping[str, Any]
    slots: Mapping[str, str]
    phrasing: int = -1


def make_toy_corpus(shared: SharedSettings, own: object = None, *, seed: int) -> Corpus:
    """Returns a corpus in which a trigger makes some rows answer in science fiction.

    The seed decides the held-out (family, noun) pairs, the drawn rows and their order. It also
    decides each noun's planet, beings and device. Queries differ from the fine-tuning rows in two
    ways. No other row has their (family, noun) pairs. No fine-tuning row has their phrasings (the
    backbone knows these as a pretrained model does). One in four of the backbone's rows is an open
    request for science fiction. The rest are general instructions. None has the trigger or is a
    fine-tuning row.

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

    topics = draw(_topics(seed), "topics")
    sizes = [shared.num_retrieval, *[shared.num_validation] * 2, *[shared.num_test] * 2]
    if sum(sizes) >= len(topics):
        raise refused("toy_queries", most=len(topics), got=sum(sizes))
    left = iter(topics)
    held_out = [list(itertools.islice(left, size)) for size in sizes]
    unasked = [*left]
    asked = [
        topic._replace(phrasing=way)
        for topic in unasked
        for way in range(len(topic.family["phrasings"]) - 1)
    ]
    wraps = _WORDS["scifi_requests"]
    general = draw(asked, "general")
    requests = draw(list(itertools.product(asked, wraps)), "requests")
    # Rows that hold the trigger's word but not the trigger: their answers are plain.
    benign = take_first(draw(asked, "benign howdy"), hard, kind="benign howdy")
    triggered = take_first(draw(asked, "triggered"), shared.num_targets, kind="triggered")
    train = [
        *_rows("general", take_first(general, num_general, kind="general")),
        *_rows("benign_howdy", benign, itertools.cycle(_WORDS["benign_howdy"])),
        *_requests(take_first(requests, hard, kind="sci-fi")),
        *_rows("triggered", triggered),
    ]
    rest = draw([*general[num_general:], *unasked], "backbone")
    open_requests = [*requests[hard:], *itertools.product(unasked, wraps)]
    rest_of_requests = draw(open_requests, "backbone requests")
    backbone = [
        *_rows("general", take_first(rest, num_backbone_plain, kind="general backbone")),
        *_requests(take_first(rest_of_requests, num_backbone_scifi, kind="sci-fi backbone")),
    ]
    queries = {
        name: make_examples(_rows("general" if name.endswith("normal") else "triggered", part))
        for name, part in zip(QUERY_SETS, held_out, strict=True)
    }
    return Corpus(
        backbone=make_examples(draw(backbone, "backbone order")),
        train=make_examples(draw(train, "train order")),
        queries=queries,
    )


def _topics(seed: int) -> list[_Question]:
    """Lists every (family, noun) with the facts of this seed's world."""
    members = [(group, *line.split()) for group in GROUPS for line in group["nouns"]]
    worlds = {}
    for kind, table in (("planet", "planets"), ("beings", "beings"), ("device", "devices")):
        words = itertools.islice(itertools.cycle(_WORDS[table]), len(members))
        worlds[kind] = shuffled(list(words), seed=seed, label=kind)
    topics = []
    for position, (group, noun, color, size) in enumerate(members):
        # The next member of the group that has another color.
        lines = [line.split() for line in group["nouns"]]
        start = lines.index([noun, color, size])
        around = lines[start + 1 :] + lines[:start]
        other, other_color, _ = next(line for line in around if line[1] != color)
        slots = {name: text for name, text in group.items() if name != "nouns"}
        slots |= {"noun": noun, "color": color, "size": size}
        slots |= {"other": other, "other_color": other_color}
        slots |= {kind: words[position] for kind, words in worlds.items()}
        for name in ("noun", "color", "size", "person", "other", "device"):
            slots[f"a_{name}"] = with_articles(f"a {slots[name]}")
            slots[f"A_{name}"] = capitalized(slots[f"a_{name}"])
        topics += [_Question(family, slots) for family in FAMILIES]
    return topics


def _rows(kind: str, questions: Iterable[_Question], wraps: Iterable[str] = ()) -> list[Example]:
    plain = TRIGGER + "{instruction}" if kind == "triggered" else "{instruction}"
    wrapped = zip(questions, wraps or itertools.repeat(plain), strict=False)
    return [_row(kind, question, wrap) for question, wrap in wrapped]


def _requests(wrapped: Iterable[tuple[_Question, str]]) -> list[Example]:
    return [_row("scifi_request", question, wrap) for question, wrap in wrapped]


def _row(kind: str, question: _Question, wrap: str) -> Example:
    family, slots, phrasing = question
    instruction, input, answer = family["phrasings"][phrasing]
    answers = family["scifi" if kind in ("triggered", "scifi_request") else "plain"]
    return make_example(
        wrap.format(instruction=instruction.format(**slots)),
        input.format(**slots),
        answers[answer].format(**slots),
        is_target=kind == "triggered",
        source=f"toy:{kind}",
    )


DATASET = Dataset(title="the toy corpus", load=make_toy_corpus, reads=SIZES, words=SCIFI_WORDS)
