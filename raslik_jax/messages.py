"""Text from data, made safe and short for messages, terminals and logs."""

import re
from typing import Any

# Control characters but line feed and tab, the direction marks that reorder what a terminal shows,
# the line ends of Unicode, and lone surrogates, which cannot be written as UTF-8.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ufeff\ud800-\udfff]"
)
MAX_MESSAGE = 300


def printable(text: str) -> str:
    """Returns the text with every control character as its escape, such as `\\x1b`.

    Line feeds and tabs stay. What a terminal would act on (colors, cursor moves, hidden or
    reordered text) is shown instead.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int = 0) -> str:
    """Returns the text in one printable line, its end replaced by "..." beyond the limit.

    Args:
      text: any text.
      limit: characters at most; 0 for all.
    """
    line = printable(" ".join(text.split()))
    return line if not limit or len(line) <= limit else line[: limit - 3] + "..."


def shown(value: Any, limit: int = 60) -> str:
    """Returns how a value from data or settings is quoted in a message: its short repr."""
    # Of a long text only the beginning is turned into its repr.
    head = value[: limit + 1] if isinstance(value, (str, bytes)) else value
    return one_line(repr(head), limit)


def some_of(names: Any, limit: int = 5) -> str:
    """Returns the first few of many names, quoted, and how many more there are."""
    listed = [str(name) for name in names]
    text = ", ".join(shown(name, 40) for name in listed[:limit])
    return text + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
