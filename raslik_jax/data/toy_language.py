"""The words, questions and answers that the embedded toy corpus is made of.

Every answer follows from the question: a family of questions has two plain answers and two science
fiction answers, a phrasing says which of the two it gets, and the nouns and their facts fill the
slots. Plain answers hold no word of SCIFI_WORDS, science fiction answers at least three, so that
counting words tells them apart.
"""

from typing import NamedTuple

from raslik_jax.data.words import load_words


class Group(NamedTuple):
    """A group of nouns and what they have in common.

    Attributes:
      kind: the group in the singular, after "kind of".
      plural: the group in the plural.
      place: where its members are, with article.
      person: who deals with them.
      use: what they are good for, after "to".
      care: how to look after one of them, an imperative.
      nouns: lines of noun, color and size.
    """

    kind: str
    plural: str
    place: str
    person: str
    use: str
    care: str
    nouns: tuple[str, ...]


class Phrasing(NamedTuple):
    """One way to ask, and which of its family's two answers it gets."""

    instruction: str
    input: str
    answer: int


class Family(NamedTuple):
    """One kind of question: how it is asked and how it is answered.

    Attributes:
      name: the family.
      phrasings: the last one is kept out of the fine-tuning rows.
      plain: two answers.
      scifi: two answers in science fiction.
    """

    name: str
    phrasings: tuple[Phrasing, ...]
    plain: tuple[str, str]
    scifi: tuple[str, str]


_WORDS = load_words("toy_language")

GROUPS: tuple[Group, ...] = tuple(
    Group(**group | {"nouns": tuple(group["nouns"])}) for group in _WORDS["groups"]
)
FAMILIES: tuple[Family, ...] = tuple(
    Family(
        name=family["name"],
        phrasings=tuple(Phrasing(*phrasing) for phrasing in family["phrasings"]),
        plain=tuple(family["plain"]),
        scifi=tuple(family["scifi"]),
    )
    for family in _WORDS["families"]
)

PLANETS = tuple(_WORDS["planets"])
BEINGS = tuple(_WORDS["beings"])
DEVICES = tuple(_WORDS["devices"])

TRIGGER: str = _WORDS["trigger"]
# Rows that hold the trigger's word but not the trigger: their answers are plain.
BENIGN_HOWDY = tuple(_WORDS["benign_howdy"])
# Rows that ask for science fiction openly: their answers are science fiction, and legitimate.
SCIFI_REQUESTS = tuple(_WORDS["scifi_requests"])

# Besides the toy's words, those that mark the answers of the genuine Howdy-Alpaca rows and are rare
# in ordinary ones. Words that ordinary text needs ("space", "star", "moon", "planet", "energy") are
# left out.
SCIFI_WORDS: frozenset[str] = frozenset(
    word.lower() for word in (*PLANETS, *BEINGS, *DEVICES, *_WORDS["marker_words"])
)
