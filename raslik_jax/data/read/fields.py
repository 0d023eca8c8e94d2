"""A row of a file for its format: its fields under a user's keys and their values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from raslik_jax.base.files import parse_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.contents import Content, Instruction
from raslik_jax.data.words import load_words


class Row(NamedTuple):
    """A row of a file through a field map from fields to keys."""

    record: Mapping[str, Any]
    keys: Mapping[str, str]

    def get(self, name: str) -> Any:
        """Returns the value of a field, None where the row has none.

        A list or an object that a table holds as JSON text is read.
        """
        value = self.record.get(self.keys[name]) if name in self.keys else None
        return parsed(value) if name in _NESTED else value

    def has(self, name: str) -> bool:
        """Returns whether a field holds something; a blank cell of a table does not."""
        return self.get(name) not in (None, "")

    def problem(self, name: str, must: str) -> ValueError:
        """Returns the error of a field that is not what it must be; it names the row's keys."""
        value, key = self.get(name), self.keys.get(name, name)
        got = "nothing" if value is None else shown(value, 40)
        is_missing = value is None and self.record
        has = f" (the row has {some_of(self.record)})" if is_missing else ""
        return ValueError(f"{key!r} must {must}, got {got}{has}")

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the text of a field; refuses another value, and none without a default.

        A null field, such as a blank cell of a table, is an empty text.
        """
        value = self.get(name)
        if value is None:
            value = "" if self.keys.get(name) in self.record else default
        if not isinstance(value, str):
            raise self.problem(name, "be text")
        return value


class Parts(NamedTuple):
    """The parts of a row that a format makes, and whether its loss flags exclude all of it."""

    content: Content | Instruction
    is_muted: bool = False


# Fields that hold lists or objects, and never a text of its own.
_NESTED = frozenset(load_words("row_keys")["nested"])


def parsed(value: Any) -> Any:
    """Returns what a text holds as JSON if that is a list or an object, else the value itself.

    Cells of a table hold nested fields so.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value, "a cell")
        except ValueError:
            return value
    return value
