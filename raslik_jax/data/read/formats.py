"""Rows of files and of hub datasets as examples, or refused with their place.

Text is Unicode text. A NUL character and half of a surrogate pair are refused. So are a key that
occurs twice in a row, NaN and Infinity.
"""

import itertools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from raslik_jax.base.messages import listed_problems, shown, some_of
from raslik_jax.data.examples import (
    NO_EXTRA,
    TEXTS,
    WRITTEN_KEYS,
    Example,
    example_of,
    name_examples,
    prompt_of,
)
from raslik_jax.data.read.fields import Row
from raslik_jax.data.read.rows import FIELDS, FORMATS, detect_format
from raslik_jax.data.read.sources import Place, placed_records, shown_source
from raslik_jax.data.read.turns import FLAGS
from raslik_jax.data.read.unread import check_columns

# --corpus.records.format may also be this: the keys of the rows show the format.
AUTO = "auto"
_MAX_DEPTH = 50
_BAD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_fields(text: str) -> dict[str, str]:
    """Returns the field map that a setting such as "input=context" describes."""
    entries = [entry.partition("=") for entry in text.split(",")] if text else []
    fields = {name.strip(): key.strip() for name, _, key in entries}
    if not all((*fields, *fields.values())):
        raise ValueError(
            f"fields must be like instruction=question,output=answer, got {shown(text)}: correct it"
        )
    if not len(entries) == len(fields) == len(set(fields.values())):
        raise ValueError(f"fields must name each field and key once, got {shown(text)}")
    _field_keys(fields)
    return fields


def _field_keys(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the key of every field under a field map that renames keys and keeps the rest."""
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(f"fields must name fields of {', '.join(FIELDS)}, got {some_of(unknown)}")
    keys = {name: name for name in FIELDS if name not in fields.values()} | dict(fields)
    for name in ("instruction", "output"):
        if name not in keys:
            raise ValueError(
                f"fields must leave a key to {name!r}, whose own key is given to another "
                "field: name both"
            )
    return keys


def read_examples(
    source: str | os.PathLike[str],
    *,
    fields: Mapping[str, str] | None = None,
    name: str = "",
    format: str = "alpaca",
    needs_output: bool = True,
    most: int | None = None,
    check: Callable[[Example], object] = lambda row: None,
) -> tuple[Example, ...]:
    """Returns the rows of files, a folder or a hub dataset as examples.

    `pieces.read_pieces` lists the forms of a file and `sources.source_files` the files of a source.
    Blank lines are skipped. Files with the endings .xz, .gz and .zst are unpacked.

    Args:
      source: a path, several with commas, a pattern, or `hub:OWNER/NAME[:CONFIG][@SPLIT]` (split
        "train" unless given), where a folder that the package `datasets` reads may replace
        OWNER/NAME.
      fields: which key of a row holds which field of an example, where it is not that of FIELDS.
        Without an input a row has an empty one. All other keys are kept as the example's `extra`.
      name: the source of every example whose row does not name its own.
      format: a name of `rows.FORMATS`, or "auto" for the one that the keys of all rows show.
      needs_output: False is for queries: a row may do without an answer, which is then empty, and
        one that has not the keys of the format is of the format that its keys show.
      most: reads so many rows of the beginning alone.
      check: raises ValueError for a row that the caller cannot use.
    """
    fields = fields or {}
    keys = _field_keys(fields)
    unseen = set(fields.values()) if needs_output and most is None else set()
    own_format = ""

    def read(record: dict[str, Any], place: Place) -> Example:
        nonlocal own_format
        row = Row(record, keys)
        check_columns(row)
        kind = _format_of(row, format, own_format, needs_output)
        own_format = own_format or kind
        found = _example_of(row, kind, name, needs_output)
        found = found._replace(place=place.number, file=place.file)
        check(found)
        unseen.difference_update(record)
        return found

    found = _read_rows(source, read, most=most)
    if unseen:
        raise ValueError(
            f"fields must name keys that rows have, got {some_of(sorted(unseen))}, which no "
            f"row of {shown_source(source)} has: correct the key"
        )
    if needs_output:
        _mute(found)
    _name(found, keys.get("id", ""))
    return tuple(found)


def _read_rows(
    source: str | os.PathLike[str],
    read: Callable[[dict[str, Any], Place], Example],
    *,
    most: int | None = None,
) -> list[Example]:
    """Returns the content of each row and its place; refuses other values and empty files."""
    found: list[Example] = []
    problems: list[str] = []
    for place, record in itertools.islice(placed_records(source), most):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError(f"a row must be an object, got {shown(record, 40)}")
            found.append(read(record, place))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ValueError(listed_problems(problems, "correct or remove these rows"))
    if not found:
        raise ValueError(f"{shown_source(source)} must hold at least one row, got none")
    return found


def _name(rows: list[Example], key: str) -> None:
    """Gives rows their ids: those of the file where they are unique, else of the content.

    Ids of the file are texts or whole numbers. Others stay a column of the user's own, `key`.
    """
    given = [row.example_id for row in rows if row.example_id]
    are_unique = len({*given}) == len(given)
    of_content = name_examples(row for row in rows if not (are_unique and row.example_id))
    for number, row in enumerate(rows):  # in place, as there may be millions
        if not (are_unique and row.example_id):
            rows[number] = next(of_content)
        elif key in row.extra:
            extra = {name: value for name, value in row.extra.items() if name != key}
            rows[number] = row._replace(extra=extra)


def _mute(rows: list[Example]) -> None:
    """Mutes rows with a loss flag of 0 in a column.

    A column of such a name has flags if all its values are 0 and 1, or false and true, with at
    least one 1. Any other one, such as measured losses, is the user's own.
    """
    for name in FLAGS:
        values = {number: row.extra[name] for number, row in enumerate(rows) if name in row.extra}
        off = [number for number, value in values.items() if value in (0, "0", "false")]
        num_on = sum(value in (1, "1", "true") for value in values.values())
        num_blank = sum(value == "" for value in values.values())
        if num_on and len(off) + num_on + num_blank == len(values):
            for number in off:
                rows[number] = rows[number]._replace(is_muted=True)


def read_written(path: str | os.PathLike[str]) -> tuple[Example, ...]:
    """Returns the rows of a file of `write_examples` with their places in the user's own file."""
    keys = {name: name for name in FIELDS}

    def read(record: dict[str, Any], place: Place) -> Example:
        format = FORMATS[record.get("row_format", "alpaca")]
        texts = record.get("row_texts") or [record.get(name, "") for name in TEXTS]
        row = example_of(format.read(Row(record, keys), bool(texts[2])).content)
        if texts != [*row[1:4]]:  # as of ids; equal texts are kept once
            row = row._replace(instruction=texts[0], input=texts[1], output=texts[2])
        taken = WRITTEN_KEYS.union(format.names)
        extra = {key: value for key, value in record.items() if key not in taken}
        return row._replace(
            example_id=record["id"],
            is_target=record.get("is_target"),
            source=record.get("source") or "",
            place=record.get("place", 0),
            file=record.get("place_file", ""),
            is_muted=record.get("row_is_muted", False),
            extra=extra | record.get("row_columns", {}) or NO_EXTRA,
        )

    return tuple(_read_rows(path, read))


def what_it_says(record: Mapping[str, Any], fields: Mapping[str, str] = {}) -> tuple[str, ...]:
    """Returns prompt and answer of a user's row or one of `write_examples`, to compare.

    It is () for a row of no format under the field map.
    """
    row = Row(record, _field_keys(fields))
    try:
        format = record.get("row_format") or detect_format(row)
        found = example_of(FORMATS[str(format)].read(row, False).content)
    except (KeyError, ValueError):
        return ()
    asked, more, answer = map(str, record.get("row_texts") or found[1:4])
    return says(found._replace(instruction=asked, input=more, output=answer))


def says(row: Example) -> tuple[str, ...]:
    """Returns prompt and answer of an example, to compare."""
    return (*prompt_of(row), row.output)


def _format_of(row: Row, asked: str, before: str, needs_output: bool) -> str:
    """Returns the format of a row: the requested one, or that of this row and those before."""
    # Texts cannot be asked: their queries are of another format.
    if asked != AUTO and (needs_output or FORMATS[asked].claim(row)):
        return asked
    own = detect_format(row)
    if before and own != before:
        raise ValueError(f"a file must have rows of one format, got {own} after {before}: split it")
    return own


def _example_of(row: Row, format: str, source: str, needs_output: bool) -> Example:
    """Returns the example of a row; its id is empty if the row has none."""
    parts = FORMATS[format].read(row, needs_output)
    label, origin = _label_of(row), row.get("source")
    # A column of ours that holds another kind of value is the user's own. Ids may repeat.
    taken = {"is_target"} if label is not None or not row.has("is_target") else set()
    taken |= {"source"} if isinstance(origin, str) else set()
    own = {row.keys[field] for field in (*FORMATS[format].names, *taken) if field in row.keys}
    extra = {k: v for k, v in row.record.items() if k not in own and v is not None}
    found = example_of(parts.content)._replace(
        example_id=_id_of(row.get("id")),
        is_target=label,
        source=origin if isinstance(origin, str) else source,
        extra=extra or NO_EXTRA,
        is_muted=parts.is_muted,
    )
    content = parts.content._asdict()
    content.pop("options", None)
    _check_texts([*found[:4], found.source, extra, *content.values()])
    return found


def _id_of(value: Any) -> str:
    """Returns the id that a row names; empty for none and for a value that can be no id."""
    return str(value).strip() if isinstance(value, str) or type(value) is int else ""


def _label_of(row: Row) -> bool | None:
    """Returns whether a row is labeled as a target; a column of another kind is the user's own."""
    value = row.get("is_target")
    if isinstance(value, str):  # as a cell of a table is
        value = {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(value, bool):
        return value
    if value not in (None, "") and row.keys["is_target"] != "is_target":
        raise row.problem("is_target", "be true, false or null")
    return None


def _check_texts(value: Any, depth: int = 0) -> None:
    """Raises a ValueError if a nested text is none that UTF-8 and C can hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a row must have at most {_MAX_DEPTH} nested levels, got more")
    if isinstance(value, str):
        if bad := _BAD_TEXT.search(value):
            raise ValueError(f"a text must have whole characters other than NUL, got {bad[0]!r}")
    elif isinstance(value, dict):
        _check_texts([*value.keys(), *value.values()], depth)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, depth + 1)
