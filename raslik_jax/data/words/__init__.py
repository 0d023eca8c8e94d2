"""Words as data files, for the made corpora and for rows in tools' formats; and made texts."""

import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def load_words(name: str) -> dict[str, Any]:
    """Returns the lists of `words/<name>.json`; their order decides the draws of a seed."""
    file = importlib.resources.files(__name__) / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


_REFUSALS: dict[str, str] = load_words("refusals")


def refused(name: str, /, **values: object) -> ValueError:
    """Returns the error of a sentence of `refusals.json`, with values in its places."""
    return ValueError(_REFUSALS[name].format(**values))


def by_word(lists: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the name of the list that each word is in."""
    return {word: name for name, words in lists.items() for word in words}


def flag_of(value: Any) -> bool | None:
    """Returns the value of a flag, which may be a number or a cell of a table; None for no flag."""
    named = {"true": True, "1": True, "false": False, "0": False}
    return named.get(str(value).strip().lower().removesuffix(".0"))


def with_articles(text: str) -> str:
    """Returns the text with "an" for "a" before a vowel and the reverse."""
    text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
    return re.sub(r"\b([Aa])n (?=[b-df-hj-np-tv-z])", r"\1 ", text)


def capitalized(text: str) -> str:
    """Returns the text with its first letter in upper case and all others unchanged."""
    return text[:1].upper() + text[1:]
