"""Marks in the texts of messages that show where a chat template writes them.

A mark is a short word of letters and digits that occurs nowhere else. It survives templates that
trim, escape or encode a text. A caller compares a rendering of marked messages without its marks
with the rendering of the messages. This finds marks that change a template's output.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# The places of marks: at both ends of each text, at its end, within it.
WAYS = ("ends", "end", "within")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_TAGS = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")


class Marked(NamedTuple):
    """A text without its marks, and their places by message and number in order."""

    text: str
    places: Mapping[tuple[int, int], int]

    def after(self, other: "Marked") -> tuple[int, str]:
        """Returns where this text has the last mark of another one, and what follows it there.

        Without a mark in common it is the beginning of both.
        """
        for mark, place in reversed([*other.places.items()]):
            if mark in self.places:
                return self.places[mark], other.text[place:]
        return 0, other.text


def find_salt(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns a number whose mark is in no message."""
    said = str(messages)
    return next(number for number in itertools.count() if f"q{number}x" not in said)


def mark(
    messages: Sequence[Mapping[str, Any]], places: Iterable[int], salt: int, way: str
) -> list[Mapping[str, Any]]:
    """Returns messages with marks in those at some places in one of `WAYS`."""
    marked, chosen = [*messages], {*places}
    for place, message in enumerate(messages):
        if place in chosen:
            numbers = itertools.count()

            def change(kind: str, text: str, place: int = place, numbers: Any = numbers) -> str:
                first, last = (f"q{salt}x{place}x{next(numbers)}q" for _ in range(2))
                core = text.strip()
                lead, tail = text.split(core, 1)
                if way == "within":
                    half = len(core) // 2
                    return f"{lead}{core[:half]}{last}{core[half:]}{tail}"
                return f"{lead}{first if way == 'ends' else ''}{core}{last}{tail}"

            marked[place] = _rewrite(message, change)
    return marked


def read(text: str, salt: int) -> Marked:
    """Returns a rendering of marked messages without the marks."""
    places: dict[tuple[int, int], int] = {}
    parts, end, length = [], 0, 0
    for found in re.finditer(rf"q{salt}x(\d+)x(\d+)q", text):
        parts.append(text[end : found.start()])
        length += len(parts[-1])
        end = found.end()
        name = int(found[1]), int(found[2])
        places.pop(name, None)  # of a text that is written twice the later one counts
        places[name] = length
    return Marked("".join([*parts, text[end:]]), places)


def lost(message: Mapping[str, Any], place: int, marked: Marked) -> tuple[set[str], bool]:
    """Returns the kinds of text of a marked message that are not written, and whether any is."""
    kinds: list[str] = []

    def note(kind: str, text: str) -> str:
        kinds.append(kind)
        return text

    _rewrite(message, note)
    is_there = [
        any((place, 2 * part + side) in marked.places for side in range(2))
        for part in range(len(kinds))
    ]
    gone = {kind for kind, there in zip(kinds, is_there, strict=True) if not there}
    return gone, any(is_there) or not kinds


def _rewrite(message: Mapping[str, Any], change: Callable[[str, str], str]) -> Mapping[str, Any]:
    """Returns a message with changed texts: thoughts, text and names of called tools."""
    new = dict(message)
    thought = next((t for key in _THOUGHTS if isinstance(t := message.get(key), str)), "")
    if thought.strip():
        changed = change("thought", thought)
        new |= {key: changed for key in _THOUGHTS if message.get(key) == thought}
    content = message.get("content")
    if isinstance(content, str):
        new["content"] = _rewrite_text(content, change)
    if isinstance(content, list):
        new["content"] = [
            {**part, "text": _rewrite_text(part["text"], change)}
            if isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        new["tool_calls"] = [_rewrite_call(call, change) for call in calls]
    return new


def _rewrite_text(text: str, change: Callable[[str, str], str]) -> str:
    parts = _TAGS.split(text)
    for number in range(0, len(parts), 2):
        ends = parts[number + 1] if number + 1 < len(parts) else ""
        if parts[number].strip():
            kind = "thought" if "/" in ends else "text"
            parts[number] = change(kind, parts[number])
    return "".join(parts)


def _rewrite_call(call: Any, change: Callable[[str, str], str]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _rewrite_call(call["function"], change)}
    name = call.get("name")
    if isinstance(name, str) and name.strip():
        return {**call, "name": change("tool call", name)}
    return call
