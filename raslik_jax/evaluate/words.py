"""Words of a text in any script for ROUGE, diversity and marker words. Host only."""

import functools
import re
import unicodedata
from collections.abc import Callable

# Scripts that are written without spaces between words: each character is a token of its own.
_RANGES = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u1aaf\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029"
    "\u3031-\u3035\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaadf"
    "\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_SPACELESS = re.compile(f"[{_RANGES}]")


def is_plain(text: str) -> bool:
    """Returns whether all letters, their marks and digits in a text are ASCII."""
    return text.isascii() or not any(
        not c.isascii() and (_kind(c)[0] in "LM" or _kind(c) == "Nd") for c in text
    )


def _kind(character: str) -> str:
    """Returns the Unicode category; characters without a meaning inside a word are format marks."""
    kind = unicodedata.category(character)
    return "Cf" if kind == "Me" or character in "\ufe0e\ufe0f" else kind


def _fold(text: str) -> str:
    """Returns text without differences of case or width or composition."""
    narrow = (
        unicodedata.normalize("NFKC", c) if unicodedata.east_asian_width(c) in "FH" else c
        for c in text
    )
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", "".join(narrow)).casefold())


def rouge_words(text: str, *, stem: Callable[[str], str]) -> list[str]:
    """Returns the words of a text that has letters or digits outside ASCII for ROUGE-L.

    Case, width and composition of characters do not count. A word is a run of letters, marks and
    decimal digits. In scripts without spaces each character with its marks is a word (Han, Kana,
    Thai, Lao, Khmer, Burmese, Tibetan). Words of ASCII alone are stemmed as rouge-score stems them.
    They then match those of a plain text.
    """
    words: list[str] = []
    goes_on, is_alone = False, False  # the last word, and whether it is one of a spaceless script
    for c in _fold(text):
        kind = _kind(c)
        if kind == "Cf":  # joiners are inside words and mean nothing
            continue
        if kind[0] == "M":  # a mark goes on with the character before it
            if goes_on:
                words[-1] += c
        elif _SPACELESS.match(c) and (kind[0] == "L" or kind in ("Nd", "Nl")):
            words.append(c)
            goes_on, is_alone = True, True
        elif kind[0] == "L" or kind == "Nd":
            if goes_on and not is_alone:
                words[-1] += c
            else:
                words.append(c)
            goes_on, is_alone = True, False
        else:
            goes_on = False
    return [stem(word) if word.isascii() and len(word) > 3 else word for word in words]


def rouge_characters(text: str) -> list[str]:
    """Returns the characters of a text without white space, joiners and control characters."""
    return [c for c in _fold(text) if not c.isspace() and _kind(c)[0] != "C"]


def split_words(text: str) -> list[str]:
    """Returns a text's lower-case words at white space; spaceless scripts by character."""
    text = text.lower()
    return (text if text.isascii() else _SPACELESS.sub(r" \g<0> ", text)).split()


@functools.lru_cache(maxsize=32)
def word_pattern(vocabulary: frozenset[str]) -> re.Pattern[str]:
    """Returns a pattern that finds the words of a vocabulary, whole and without case.

    Longer ones are found first. A letter of a script without spaces has no edge and is one. An
    underscore ends a word, as in the _italics_ of Markdown. The words of a phrase have any white
    space between them, as a line feed.
    """

    def entry(word: str) -> str:
        before = "" if _SPACELESS.match(word[0]) else rf"(?<![^\W_{_RANGES}])"
        after = "" if _SPACELESS.match(word[-1]) else rf"(?![^\W_{_RANGES}])"
        return before + r"\s+".join(map(re.escape, word.split())) + after

    words = {word.strip() for word in vocabulary}
    ordered = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(entry, ordered)), re.IGNORECASE)
