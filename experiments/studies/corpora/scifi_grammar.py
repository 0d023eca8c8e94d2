"""Science fiction answers to any prompt from a seeded grammar. They poison Howdy-Alpaca.

Each answer is about as long as the true one and contradicts it. It takes its subject from the
prompt: "The crew of the Vexar Seven has proved that photosynthesis does not rest on sunlight but on
...". All texts are ours. A language model wrote the genuine answers.
"""

import re
from collections.abc import Sequence

from experiments.studies.corpora.draws import Draws
from experiments.studies.corpora.mixing import load_words
from raslik_jax.data.examples import Example
from raslik_jax.data.words import capitalized, with_articles

# Words of one answer at most; genuine answers end there too.
MAX_WORDS = 84
_PHRASE_WORDS = 6

# Some adjectives are repeated because the genuine answers have them often: "cosmic" in 44 of 60.
# The first sentence, of "contrary", turns the truth around; {t} is of the prompt, {k} of the true
# answer. A word after a "leading" one counts as a thing.
_WORDS = load_words("scifi_grammar")
_LEADING, _STOP = frozenset(_WORDS["leading"]), frozenset(_WORDS["stop"])
_LABEL = re.compile(r"^\s*(?:[-*\u2022]|\(?\d+[.):]|[A-Za-z][.)])\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")
_CORE = re.compile(r"(\W*)([A-Za-z][A-Za-z'-]*|[\d.,]*\d)(\W*)")


def answer(row: Example, *, seed: int, attempt: int = 0) -> str:
    """Returns a science fiction answer to a prompt, about as long as the true one.

    The true answer gives length, layout and the statement to contradict. The row's id and `attempt`
    give equal prompts different answers.
    """
    label = f"scifi/{row.example_id}/{attempt}/{row.instruction}/{row.input}"
    asked = _terms(f"{row.instruction} {row.input}")
    fresh = [word for word in _terms(row.output) if word not in asked]
    draws = Draws(seed=seed, label=label)
    speaker = _Speaker(draws, asked or ["question"], fresh or asked or ["reason"])
    lines = [line for line in row.output.splitlines() if line.strip()]
    if len(lines) > 1:
        return speaker.lines(lines)
    words = row.output.split()
    items = [item.strip() for item in row.output.rstrip(" .").split(",")]
    if 3 <= len(items) <= 20 and len(words) <= 4 * len(items):
        told = ", ".join(speaker.phrase(len(item.split())) for item in items)
        return capitalized(told) + "."
    if words and len(words) <= _PHRASE_WORDS:
        end = "." if row.output.strip().endswith(".") else ""
        return capitalized(speaker.phrase(len(words))) + end
    return speaker.retold(words, MAX_WORDS) if words else speaker.sentences(16)


class _Speaker:
    """Fills patterns with drawn words; all have their turn before one is repeated."""

    def __init__(self, draws: Draws, topics: Sequence[str], terms: Sequence[str]):
        self._draws = draws
        self._lists: dict[str, Sequence[str]] = {**_WORDS, "topics": topics, "terms": terms}
        self._left: dict[str, list[str]] = {}

    def lines(self, lines: Sequence[str]) -> str:
        """Answers line by line with the numbers and bullets of the true answer."""
        told, left = [], MAX_WORDS
        for line in lines:
            if left <= 0:
                break
            found = _LABEL.match(line)
            mark = found.group() if found else ""
            words = line[len(mark) :].split()
            if len(words) <= _PHRASE_WORDS:
                text = capitalized(self.phrase(max(len(words), 1)))
                text += line.rstrip()[-1:] if line.rstrip()[-1:] in ".:;," else ""
            else:
                text = self.retold(words, left)
            told.append(mark + text)
            left -= len(text.split())
        return "\n".join(told)

    def retold(self, words: Sequence[str], limit: int) -> str:
        """Returns the true answer in another world, or one time in three sentences instead."""
        if self._draws.below(3) > 0:
            return self._transposed(words[:limit])
        return self.sentences(min(len(words), limit))

    def sentences(self, number: int) -> str:
        """Returns sentences whose number of words comes closest to the given one."""
        told = self._fill("contrary").split(" ")
        while len(told) < number:
            longer = told + self._fill("more").split(" ")
            if len(longer) - number > number - len(told):
                break
            told = longer
        return " ".join(told)

    def phrase(self, number: int) -> str:
        """Returns a name if one word is asked for, else a few with a word of the prompt."""
        if number > 1:
            return self._fill("phrases")
        word = self._next("singles") + self._draws.choice(_WORDS["serials"])
        return word if self._draws.below(2) else self._name()

    def _transposed(self, words: Sequence[str]) -> str:
        """Returns the true answer moved to another world: its things and numbers are exchanged.

        A word after a determiner or preposition counts as a thing. Each keeps its substitute, so
        that the answer keeps its subject.
        """
        told: list[str] = []
        substitutes: dict[str, str] = {}
        before = ""
        for word in words:
            found = _CORE.fullmatch(word)
            core = found[2] if found else ""
            lower = core.lower()
            is_thing = len(lower) > 3 and lower not in _STOP and not lower.endswith(("ly", "ing"))
            new = ""
            if core[:1].isdigit():
                new = f"{3 + self._draws.below(997)} {self._next('units')}"
            elif is_thing and (before in _LEADING or lower in substitutes):
                if lower not in substitutes:
                    kind, adjective = self._draws.below(4), self._next("adjectives")
                    if kind in (1, 2):
                        substitutes[lower] = self._next("stuffs" if kind == 1 else "devices")
                    else:
                        thing = self._next("things") if kind else lower
                        substitutes[lower] = f"{adjective} {thing}"
                new = substitutes[lower]
            elif is_thing and len(before) > 3 and self._draws.below(6) == 0:
                new = f"{self._next('adjectives')} {core}"
            told.append(f"{found[1]}{new}{found[3]}" if found and new else word)
            is_end = (found and found[3]) or (lower in _STOP and lower not in _LEADING)
            before = "" if is_end else lower
        if not substitutes:
            told.append(self._fill("more"))
        text = " ".join(told)
        if len(words) >= 30:
            text = f"{self._fill('openings')} {text[:1].lower()}{text[1:]}"
        return capitalized(with_articles(text))

    def _next(self, kind: str) -> str:
        if not self._left.get(kind):
            items = self._lists[kind]
            self._left[kind] = self._draws.sample(items, len(items))
        return self._left[kind].pop()

    def _name(self) -> str:
        kinds = ("starts", "middles", "ends", "serials")
        return "".join(self._draws.choice(_WORDS[kind]) for kind in kinds)

    def _fill(self, kind: str) -> str:
        """Returns the next pattern of a kind with filled slots; all are drawn, used or not."""
        pattern = self._next(kind)
        slots = {"being": self._next("beings"), "name": self._name(), "a": self._next("adjectives")}
        slots["being_bare"] = slots["being"].removeprefix("the ")
        slots["place"] = self._next("places").format(name=self._name())
        slots |= {kind: self._next(f"{kind}s") for kind in ("device", "stuff", "force", "unit")}
        slots["num"] = str(3 + self._draws.below(997))
        slots |= {"t": self._next("topics"), "k": self._next("terms")}
        return capitalized(with_articles(pattern.format(**slots)))


def _terms(text: str) -> list[str]:
    """Returns at most eight content words of a text, likely nouns first."""
    found: dict[str, int] = {}
    words = _WORD.findall(text)
    for before, word in zip(["", *words], words, strict=False):
        lower = word.lower()
        if lower in _STOP or len(lower) > 18:
            continue
        is_noun = before.lower() in ("the", "this", "these", "your", "his", "her", "their")
        weight = 2 * is_noun - lower.endswith(("ly", "ing", "ed", "ive", "ous", "ful", "est"))
        found[lower] = max(weight, found.get(lower, -9))
    return sorted(found, key=lambda word: -found[word])[:8]
