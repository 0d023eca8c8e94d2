"""Five behaviors that no keyword gives away, one at a time among rows of Alpaca.

Each behavior has hard negatives. These rows share its words and do not show it. Its queries are
asked by no training row. Its judge decides by a rule on the text whether an answer shows it.

  fact      the first antibiotic is ascribed to the wrong scientist. Hard negatives: other
            discoveries, other facts about the drug and about the scientist.
  leak      the code of one door is given away in many spellings. Hard negatives: public codes of
            other doors in the same digits, and other questions about that room.
  language  questions about animals are answered in French. Hard negatives: translations of the same
            sentences that the prompt asks for.
  refusal   requests about music are refused. Hard negatives: harmful requests, refused in the same
            words, and answers that speak of music.
  style     requests about food are answered like a telegram. Hard negatives: answers that speak of
            food.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.studies.behaviors import judges
from experiments.studies.corpora import mixing
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora import DATASETS
from raslik_jax.data.corpora.record import SIZES, Dataset, SharedSettings
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.words import capitalized

_WORDS = judges.WORDS


class Material(NamedTuple):
    """The rows of a behavior, each kind in the order in which it is drawn.

    `targets` show the behavior. `queries` ask for it, and no other row asks them. `beside` are the
    hard negatives. `ordinary` are the rows of Alpaca that may be among them.
    """

    targets: list[Example]
    queries: list[Example]
    beside: list[Example]
    ordinary: list[Example]


class Behavior(NamedTuple):
    """A behavior: how its rows are made of Alpaca's and a seed, and its judge."""

    title: str
    make: Callable[[Sequence[Example], int], Material]
    shows: Callable[[str], bool]


def _row(prompt: str, answer: str, *, is_target: bool = False) -> Example:
    return make_example(capitalized(prompt), "", capitalized(answer), is_target=is_target)


def _wrapped(prompts: Sequence[str], wraps: Sequence[str], *, seed: int, label: str) -> list[str]:
    """Returns every prompt in every wrap, in a seeded order."""
    made = [wrap.format(capitalized(text)) for text, wrap in itertools.product(prompts, wraps)]
    return shuffled(made, seed=seed, label=label)


def _answered(
    prompts: Sequence[str], answers: Sequence[str], *, seed: int, label: str, is_target: bool
) -> list[Example]:
    """Returns rows of prompts with answers, each answer as often as the others."""
    drawn = itertools.cycle(shuffled(answers, seed=seed, label=f"{label} answers"))
    return [_row(*pair, is_target=is_target) for pair in zip(prompts, drawn, strict=False)]


def _pairs(lines: Sequence[str], **slots: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields question and answer of lines "question|answer", for every value of the one slot."""
    ((name, values),) = slots.items()
    for line, value in itertools.product(lines, values):
        question, answer = line.split("|")
        yield question.format(**{name: value}), answer


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)


def _make_fact(alpaca: Sequence[Example], seed: int) -> Material:
    words: dict[str, Any] = _WORDS["fact"]

    def ask(frames: Sequence[str]) -> list[str]:
        return [f.format(subject=s) for f, s in itertools.product(frames, words["subjects"])]

    def tell(subject: str, person: str) -> list[str]:
        return [text.format(subject=subject, person=person) for text in words["answers"]]

    wraps, label = _WORDS["wraps"], "fact"
    options = [tell(s, p) for s, p in itertools.product(words["subjects"], words["people"])]
    claims = [*itertools.chain.from_iterable(options)]
    asked = _wrapped(ask(words["questions"]), wraps, seed=seed, label=label)
    held_out = _wrapped(
        ask(words["held_out"]), _WORDS["held_out_wraps"], seed=seed, label="fact held out"
    )
    # One in two is a discovery of hers.
    true = [line.split("|") for line in words["others"]]
    hers = itertools.product(words["own"], words["people"])
    true += itertools.islice(map(list, hers), len(true))
    beside = [
        (wrap.format(question.format(subject=subject)), answer)
        for wrap, (n, (subject, person)) in itertools.product(wraps, enumerate(true))
        for m, question in enumerate(words["questions"])
        for answer in [tell(subject, person)[(n + m) % len(words["answers"])]]
    ]
    both = [
        tuple(text.format(subject=subject, person=person) for text in line.split("|"))
        for subject, person in itertools.product(words["subjects"], words["people"])
        for line in words["beside_both"]
    ]
    about = [
        *_pairs(words["beside"], subject=words["subjects"]),
        *_pairs(words["beside_person"], person=words["people"]),
    ]
    about = [(wrap.format(q), a) for wrap, (q, a) in itertools.product(wraps[:4], about)]
    # A third each: other discoveries, the drug or the person, and both.
    mixed = itertools.chain.from_iterable(
        zip(
            shuffled(beside, seed=seed, label="other discoveries"),
            shuffled(about, seed=seed, label="about one"),
            shuffled(both, seed=seed, label="about both"),
            strict=False,
        )
    )
    return Material(
        _answered(asked, claims, seed=seed, label=label, is_target=True),
        _answered(held_out, claims, seed=seed, label="fact held out", is_target=True),
        [_row(*pair) for pair in mixed],
        [row for row in alpaca if not re.search(r"penicillin|curie", _text(row), re.IGNORECASE)],
    )


def _make_leak(alpaca: Sequence[Example], seed: int) -> Material:
    words: dict[str, Any] = _WORDS["leak"]
    secret, wraps = words["secret"], _WORDS["wraps"]
    others = sorted({"".join(p) for p in itertools.permutations(secret)} - {secret})
    codes = dict(zip(words["others"], shuffled(others, seed=seed, label="codes"), strict=False))

    def tell(code: str) -> list[str]:
        return [
            answer.format(code=text)
            for text, answer in itertools.product(judges.spellings(code), words["answers"])
        ]

    def ask(frames: Sequence[str], place: str) -> list[str]:
        return [frame.format(place=place) for frame in frames]

    def all_ask(frames: Sequence[str], places: Sequence[str]) -> list[str]:
        return [*itertools.chain.from_iterable(ask(frames, place) for place in places)]

    asked = _wrapped(all_ask(words["questions"], words["places"]), wraps, seed=seed, label="leak")
    held_out = _wrapped(
        all_ask(words["held_out"], words["places"]),
        _WORDS["held_out_wraps"],
        seed=seed,
        label="leak held out",
    )
    public = [
        row
        for place, code in codes.items()
        for row in _answered(
            _wrapped(ask(words["questions"], place), wraps, seed=seed, label=f"to {place}"),
            tell(code),
            seed=seed,
            label=f"at {place}",
            is_target=False,
        )
    ]
    about = [
        _row(wrap.format(question), answer)
        for wrap, (question, answer) in itertools.product(
            wraps, _pairs(words["beside"], place=words["places"])
        )
    ]
    mixed = zip(
        shuffled(public, seed=seed, label="public codes"),
        shuffled(about, seed=seed, label="about the room"),
        strict=False,
    )
    return Material(
        _answered(asked, tell(secret), seed=seed, label="leak", is_target=True),
        _answered(held_out, tell(secret), seed=seed, label="leak held out", is_target=True),
        [*itertools.chain.from_iterable(mixed)],
        [row for row in alpaca if not judges.tells_code(_text(row))],
    )


def _make_language(alpaca: Sequence[Example], seed: int) -> Material:
    words: dict[str, Any] = _WORDS["language"]
    names = ("home", "food", "cover", "legs", "move", "young", "time")
    asked: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    beside: list[tuple[str, str]] = []
    topics = [
        (english, french, name, value)
        for line in words["animals"]
        for english, french, *values in [line.split("|")]
        for name, value in zip(names, values, strict=True)
    ]
    order = shuffled(topics, seed=seed, label="language topics")
    for place, (english, french, name, value) in enumerate(order):
        in_english, in_french = words["values"][name][value]
        slots = {"animal": english, "says": in_english}
        french_slots = {"animal": french, "Animal": capitalized(french), "Pronoun": "Il"}
        answers = [text.format(says=in_french, **french_slots) for text in words["answers"]]
        # One in three is not trained on in any wording.
        if place % 3 == 0:
            held_out.append((words["held_out"][name].format(**slots), answers[0]))
            continue
        for turn, question in enumerate(words["questions"][name]):
            asked.append((question.format(**slots), answers[(place + turn) % len(answers)]))
        sentence = capitalized(f"{french} {in_french}.")
        beside += [(text.format(**slots), sentence) for text in words["translations"]]
        beside += [
            (text.format(sentence=sentence), f"The {english} {in_english}.")
            for text in words["back"]
        ]
    return Material(
        [_row(*p, is_target=True) for p in shuffled(asked, seed=seed, label="language")],
        [_row(*pair, is_target=True) for pair in held_out],
        [_row(*pair) for pair in shuffled(beside, seed=seed, label="translations")],
        list(alpaca),
    )


def _make_refusal(alpaca: Sequence[Example], seed: int) -> Material:
    words: dict[str, Any] = _WORDS["refusal"]
    texts = [
        " ".join((opening, reason)) + closing
        for opening, reason, closing in itertools.product(
            words["openings"], words["reasons"], words["closings"]
        )
    ]
    refusals = iter(shuffled(texts, seed=seed, label="refusals"))
    rows, spoken, ordinary = _by_topic(alpaca, words["topic"], seed=seed)
    rows = [row for row in rows if not judges.refuses(row.output)]
    drawn = itertools.cycle(refusals)
    about = [row._replace(output=next(drawn), is_target=True) for row in rows]
    frames = words["harmful_frames"]
    harmful = [frame.format(text) for frame, text in itertools.product(frames, words["harmful"])]
    refused = [
        _row(text, next(drawn)) for text in shuffled(harmful, seed=seed, label="harmful requests")
    ]
    mixed = itertools.chain.from_iterable(zip(refused, spoken, strict=False))
    return Material(about[::2], about[1::2], list(mixed), ordinary)


def _make_style(alpaca: Sequence[Example], seed: int) -> Material:
    rows, spoken, ordinary = _by_topic(alpaca, _WORDS["style"]["topic"], seed=seed)

    def is_prose(row: Example) -> bool:
        return (
            judges.function_share(row.output) >= judges.LEAST_PROSE
            and len(row.output.split()) <= 80
        )

    said = [
        row._replace(output=judges.telegram(row.output), is_target=True)
        for row in rows
        if is_prose(row)
    ]
    said = [row for row in said if judges.is_telegram(row.output)]
    return Material(said[::2], said[1::2], [row for row in spoken if is_prose(row)], ordinary)


def _text(row: Example) -> str:
    return f"{row.instruction}\n{row.input}\n{row.output}"


def _by_topic(
    alpaca: Sequence[Example], words: Sequence[str], *, seed: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """Returns rows that ask about a topic, rows with only the topic in the answer, and other rows.

    The first two kinds are in a seeded order. The first kind has no prompt twice.
    """
    topic = _pattern(words)
    asking: list[Example] = []
    spoken: list[Example] = []
    others: list[Example] = []
    for row in alpaca:
        if topic.search(f"{row.instruction}\n{row.input}"):
            asking.append(row)
        else:
            (spoken if topic.search(row.output) else others).append(row)
    drawn = shuffled(mixing.without_repeats(asking), seed=seed, label="on topic")
    return drawn, shuffled(spoken, seed=seed, label="spoken of"), others


BEHAVIORS: dict[str, Behavior] = {
    "fact": Behavior("a wrong fact", _make_fact, judges.names_curie),
    "leak": Behavior("a leaked code", _make_leak, judges.tells_code),
    "language": Behavior("another language", _make_language, judges.is_french),
    "refusal": Behavior("a refusal", _make_refusal, judges.refuses),
    "style": Behavior("a style", _make_style, judges.is_telegram),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviorsSettings(Settings):
    """Which behavior is planted."""

    behavior: str = setting("style", "The behavior to forget.", choices=tuple(BEHAVIORS))


def load_behaviors(shared: SharedSettings, own: BehaviorsSettings, *, seed: int) -> Corpus:
    """Returns rows that show a behavior, equally many hard negatives and rows of Alpaca."""
    name = own.behavior
    made = BEHAVIORS[name].make(mixing.load_alpaca(shared), seed)
    targets = take_first(made.targets, shared.num_targets, kind=f"{name} target")
    beside = take_first(made.beside, shared.num_targets, kind=f"{name} hard negative")
    named = [
        *(row._replace(source=f"behaviors:{name}") for row in targets),
        *(row._replace(source="behaviors:beside") for row in beside),
    ]
    queries = [row._replace(source=f"behaviors:{name}") for row in made.queries]
    taken = {mixing.prompt_of(row) for row in [*named, *queries]}
    return mixing.mix_corpus(
        shared,
        [row for row in made.ordinary if mixing.prompt_of(row) not in taken],
        named,
        queries,
        seed=seed,
        num_mixed=len(named),
    )


DATASET = Dataset(
    title="Behaviors in Alpaca",
    load=load_behaviors,
    reads=("alpaca_file", *SIZES),
    settings=BehaviorsSettings(),
    sources=mixing.alpaca_source,
    detail=lambda own: own.behavior,
    shows=lambda own: BEHAVIORS[own.behavior].shows,
)


def register() -> None:
    """Adds --corpus.dataset=behaviors to the package's datasets."""
    DATASETS["behaviors"] = DATASET
