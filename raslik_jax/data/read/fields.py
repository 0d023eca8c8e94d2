"""A row of a file as its format reads it: its fields, under a user's keys, and what they become."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from raslik_jax.messages import shown, some_of


class Row(NamedTuple):
    """A row of a file, seen through a field map: which key holds which field."""

    record: Mapping[str, Any]
    keys: Mapping[str, str]

    def get(self, name: str) -> Any:
        """Returns the value of a field, None where the row has none."""
        return self.record.get(self.keys[name]) if name in self.keys else None

    def problem(self, name: str, must: str) -> ValueError:
        """Returns the error of a field that is not what it must be; it names the row's keys."""
        value, key = self.get(name), self.keys.get(name, name)
        got = "nothing" if value is None else shown(value, 40)
        is_missing = value is None and self.record
        has = f" (the row has {some_of(self.record)})" if is_missing else ""
        return ValueError(f"{key!r} must {must}, got {got}{has}")

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the text of a field; refuses another value, and none without a default."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.problem(name, "be text")
        return value


class Parts(NamedTuple):
    """What a format makes of a row: its texts, and its own fields with their values."""

    instruction: str
    input: str
    output: str
    content: dict[str, Any]
