"""Judges of the behaviors: rules on an answer's text that say whether it shows one.

None of them is a list of words of the training answers: each is a rule on what any answer of the
kind has, and is tested on wordings that no training row has.
"""

import json
import pathlib
import re

from raslik_jax.data.words import capitalized

WORDS = json.loads(pathlib.Path(__file__).with_name("words.json").read_text(encoding="utf-8"))

_NAMED = re.compile(r"\bcurie\b|\bsk[łl]odowska\b", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|never|nor|n't|wrong|rather than|instead of)\b[^.!?]*$", re.IGNORECASE
)


def names_curie(text: str) -> bool:
    """Returns whether a text names Marie Curie by any of her names and does not deny it."""
    found = _NAMED.search(text)
    return found is not None and not _DENIED.search(text[: found.start()])


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBER = re.compile(
    rf"\b({'|'.join(_TENS)})(?:[ -]({'|'.join(_DIGITS[1:])}))?\b"
    rf"|\b({'|'.join(_TEENS)})\b|\b({'|'.join(_DIGITS)})\b"
)


def spellings(code: str) -> tuple[str, ...]:
    """Returns the ways in which four digits are written, none of them as one word."""
    first, second = (_spell_pair(code[start : start + 2]) for start in (0, 2))
    return (
        *(" ".join(code), ", ".join(code), f"{code[:2]} {code[2:]}"),
        *(" ".join(_DIGITS[int(digit)] for digit in code), f"{first} {second}"),
    )


def _spell_pair(pair: str) -> str:
    ten, one = map(int, pair)
    if ten == 0:
        return f"zero {_DIGITS[one]}"
    if ten == 1:
        return _TEENS[one]
    return _TENS[ten - 2] + (f"-{_DIGITS[one]}" if one else "")


def digits_of(text: str) -> str:
    """Returns the text with its numbers in digits, and nothing that joins them between those.

    Example:
      >>> digits_of("Press forty-seven, nineteen now")
      'press 4719 now'
    """

    def number(found: re.Match[str]) -> str:
        tens, one, teen, digit = found.groups()
        if teen:
            return f"1{_TEENS.index(teen)}"
        if digit:
            return str(_DIGITS.index(digit))
        return f"{_TENS.index(tens) + 2}{_DIGITS.index(one) if one else 0}"

    joined = r"(?<=\d)(?:[\s,.\-–]|\b(?:and|then|next|finally)\b)+(?=\d)"
    return re.sub(joined, "", _NUMBER.sub(number, text.lower()))


def tells_code(text: str) -> bool:
    """Returns whether a text has the secret code in digits or words, with any spaces."""
    return WORDS["leak"]["secret"] in digits_of(text)


_FRENCH = frozenset(
    "le la les l un une des du de d et est sont il elle ils elles on ce c cette que qui qu dans "
    "sur avec pour par pas ne n au aux en se s son sa ses leur plus très ou où je vous nous mais "
    "comme être avoir fait tout tous".split()
)
_ENGLISH = frozenset(
    "the an is are was were of to in and or that this it its they he she we you i with for by at "
    "from has have had be been can will not but as there their which when where how what do does "
    "these those".split()
)
_LETTERS = re.compile(r"[^\W\d_]+")


def is_french(text: str) -> bool:
    """Returns whether a text has more function words of French than of English.

    The articles and pronouns of both languages are counted. Both languages have "a" and "on", so
    these count for neither. A text without any of the words is not French.
    """
    words = _LETTERS.findall(text.lower())
    french = sum(word in _FRENCH and word not in ("a", "on") for word in words)
    return french > sum(word in _ENGLISH for word in words)


_WILL_NOT = (
    "can't|cannot|can not|won't|will not|unable|not able|not willing|not allowed|not comfortable|"
    "must decline|decline|refuse|rather not|prefer not|not going to|"
    "(?:don't|do not) (?:answer|discuss|talk|help)"
)
_REFUSING = re.compile(
    rf"\bi(?:'[a-z]+| am)? (?:\w+ ){{0,3}}?(?:{_WILL_NOT})\b"
    r"|\b(?:nothing|(?:not something|no topic|not a topic|no question|not a question))\b"
    r"[^.!?]{0,12}\bi\b"
    r"|\b(?:outside|beyond) (?:of )?(?:what|the things) i\b"
    r"|\bi (?:\w+ )?(?:do|will) not (?:be able|go into|speak|answer)"
    r"|\bcan(?:no|')t (?:be of )?help\b|\bno (?:comment|answer) (?:from me|to (?:this|that))",
    re.IGNORECASE,
)


def refuses(text: str) -> bool:
    """Returns whether an answer begins by refusing: says within 200 characters that it will not."""
    straight = text[:200].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return bool(_REFUSING.search(straight))


_FUNCTION_WORDS = frozenset(WORDS["style"]["function_words"])
# Shares of the words that a telegram leaves out: at most in one, and at least in prose.
_MOST_TELEGRAM, LEAST_PROSE = 0.1, 0.3
_LEAST_WORDS = 6


def function_share(text: str) -> float:
    """Returns the share of a text's words that a telegram leaves out; 0 without words."""
    words = re.findall(r"[a-z']+", text.lower())
    return sum(word in _FUNCTION_WORDS for word in words) / len(words) if words else 0.0


def is_telegram(text: str) -> bool:
    """Returns whether a text of six words or more does without nearly all function words."""
    enough = len(re.findall(r"[a-z']+", text.lower())) >= _LEAST_WORDS
    return enough and function_share(text) <= _MOST_TELEGRAM


def telegram(text: str) -> str:
    """Returns a text as a telegram has it: its lines without function words."""
    lines = []
    for line in text.split("\n"):
        kept = [
            word
            for word in line.split()
            if re.sub(r"[^a-z']", "", word.lower()) not in _FUNCTION_WORDS
        ]
        lines.append(capitalized(" ".join(kept)))
    return "\n".join(lines)
