"""Text from data, made safe and short for messages and logs."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

MAX_MESSAGE = 300
_T = TypeVar("_T")


def is_unseen(character: str) -> bool:
    """Returns whether a character acts and is not shown; line feed and tab are allowed.

    Such characters are escape sequences, direction marks, Unicode line ends and lone surrogates.
    The two joiners are part of words and emoji.
    """
    kind = unicodedata.category(character)
    return kind in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t\u200c\u200d"


def printable(text: str) -> str:
    """Returns the text with every character that `is_unseen` as its escape, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if is_unseen(c) else c for c in text)


def one_line(text: str, limit: int = 0) -> str:
    """Returns the text in one printable line that ends in "..." at the limit; 0 for no limit."""
    line = printable(" ".join(text.split()))
    return line if not limit or len(line) <= limit else line[: limit - 3] + "..."


def shown(value: Any, limit: int = 60) -> str:
    """Returns how a value from data or settings is quoted in a message: its short repr."""
    # Of a long text only the beginning is turned into its repr.
    head = value[: limit + 1] if isinstance(value, (str, bytes)) else value
    try:
        return one_line(repr(head), limit)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        return f"a {type(value).__name__}"


def chosen(name: str, value: str, known: Mapping[str, _T]) -> _T:
    """Returns the value of a word; a word that is not known is refused with the known ones."""
    if value not in known:
        must = f"{name} must be one of {', '.join(known)}"
        raise ValueError(f"{must}, got {shown(value)}: correct it")
    return known[value]


def some_of(names: Iterable[Any], limit: int = 5, *, quoted: bool = True) -> str:
    """Returns the first few of many names and the number of the others."""
    listed = [str(name) for name in names]
    first = [shown(name, 40) if quoted else one_line(name, 160) for name in listed[:limit]]
    text = ", ".join(first)
    return text + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def listed_problems(problems: Sequence[str], mend: str = "") -> str:
    """Returns the problems that fit into a message, the number of others and what to do."""
    rest = f": {mend}" if mend else ""
    text = one_line(problems[0], max(MAX_MESSAGE - len(rest) - 20, 40))
    for number, problem in enumerate(problems[1:], start=1):
        more = f"; and {len(problems) - number} more"
        longer = f"{text}; {one_line(problem)}"
        if len(longer) + len(more) + len(rest) > MAX_MESSAGE:
            return text + more + rest
        text = longer
    return text + rest


def bounded(text: str) -> str:
    """Returns a printable message that a terminal can show; a long one is cut in the middle."""
    text = printable(text)
    if len(text) <= MAX_MESSAGE:
        return text
    # The end of a message says what to do.
    half = (MAX_MESSAGE - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
