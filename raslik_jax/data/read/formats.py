"""Rows of files and of hub datasets as examples, or refused with their place.

Text is Unicode text. A NUL character and half of a surrogate pair are refused. So are a key that
occurs twice in a row, NaN and Infinity.
"""

import collections
import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raslik_jax.base.messages import listed_problems, shown, some_of
from raslik_jax.base.progress import progress
from raslik_jax.data.examples import (
    NO_EXTRA,
    TEXTS,
    WRITTEN_KEYS,
    Example,
    name_examples,
    prompt_of,
)
from raslik_jax.data.read.rows import FIELDS, FLAGS, FORMATS, Row, detect_format, unread_columns
from raslik_jax.data.read.sources import placed_records, shown_source
from raslik_jax.data.words import flag_of, refused

# --corpus.records.format may also be this: the keys of the rows show the format.
AUTO = "auto"
_MAX_DEPTH = 50
_BAD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_fields(text: str) -> dict[str, str]:
    """Returns the field map that a setting such as "input=context" describes."""
    entries = [entry.partition("=") for entry in text.split(",")] if text else []
    fields = {name.strip(): key.strip() for name, _, key in entries}
    if not all((*fields, *fields.values())):
        raise refused("fields_form", got=shown(text))
    if not len(entries) == len(fields) == len(set(fields.values())):
        raise ValueError(f"fields must name each field and key once, got {shown(text)}")
    _field_keys(fields)
    return fields


def _field_keys(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the key of every field under a field map that renames keys and keeps the rest."""
    if unknown := [name for name in fields if name not in FIELDS]:
        raise ValueError(f"fields must name fields of {', '.join(FIELDS)}, got {some_of(unknown)}")
    keys = {name: name for name in FIELDS if name not in fields.values()} | dict(fields)
    for name in ("instruction", "output"):
        if name not in keys:
            raise refused("fields_taken", field=name)
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
      fields: keys of a row by the field of an example, if they differ from FIELDS. A row without an
        input has an empty one. All other keys are kept as the example's `extra`.
      name: source of the examples whose rows name none.
      format: a name of `rows.FORMATS`, or "auto" for the one that the keys of all rows show.
      needs_output: False is for queries. A row may then lack an answer, and its output is empty. A
        row without the keys of the format has the format that its keys show.
      most: number of first rows to read; None for all.
      check: function that raises a ValueError for a row that the caller cannot use.
    """
    fields = fields or {}
    keys = _field_keys(fields)
    unseen = set(fields.values()) if needs_output and most is None else set()
    own_format = ""
    plain = set() if needs_output else keys.keys() - fields.values()

    def read(record: dict[str, Any], file: str, place: int) -> Example:
        nonlocal own_format
        own = {n: n if n in plain and key not in record else key for n, key in keys.items()}
        row, kind = Row(record, own), format
        for problem in unread_columns(row):
            raise problem
        # Texts cannot be asked: their queries are of another format.
        if format == AUTO or not (needs_output or FORMATS[format].claim(row)):
            kind = detect_format(row)
            if needs_output and own_format and kind != own_format:
                raise refused("formats_mixed", kind=kind, before=own_format)
        own_format = own_format or kind
        found = _example_of(row, kind, name, needs_output)
        found = found._replace(place=place, file=file)
        check(found)
        unseen.difference_update(record)
        return found

    found = _read_rows(source, read, most=most)
    if unseen:
        got = some_of(sorted(unseen))
        raise refused("fields_unseen", got=got, source=shown_source(source))
    if needs_output:
        _mute(found)
    # Ids of the file count where they are unique. Otherwise they stay a column of the user's own.
    given = [row.example_id for row in found if row.example_id]
    are_unique, key = len({*given}) == len(given), keys.get("id", "")
    of_content = name_examples(row for row in found if not (are_unique and row.example_id))
    for number, row in enumerate(found):  # in place, as there may be millions
        if not (are_unique and row.example_id):
            found[number] = next(of_content)
        elif key in row.extra:
            extra = {name: value for name, value in row.extra.items() if name != key}
            found[number] = row._replace(extra=extra)
    return tuple(found)


def _read_rows(
    source: str | os.PathLike[str],
    read: Callable[[dict[str, Any], str, int], Example],
    *,
    most: int | None = None,
) -> list[Example]:
    """Returns the content of each row and its place; refuses other values and empty files."""
    found: list[Example] = []
    problems: list[str] = []
    placed = itertools.islice(placed_records(source), most)
    for file, place, where, record in progress(placed, "rows", unit="row"):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError(f"a row must be an object, got {shown(record, 40)}")
            found.append(read(record, file, place))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise ValueError(listed_problems(problems, "correct or remove these rows"))
    if not found:
        raise ValueError(f"{shown_source(source)} must hold at least one row, got none: add one")
    return found


def _example_of(row: Row, format: str, source: str, needs_output: bool) -> Example:
    """Returns the example of a row; its id is empty if the row has none."""
    found = FORMATS[format].read(row, needs_output)
    label, origin, name = row.get("is_target"), row.get("source"), row.get("id")
    if label == "" or flag_of(label) is not None:
        label = flag_of(label)
    if not isinstance(label, bool | None) and row.keys["is_target"] != "is_target":
        raise row.problem("is_target", "be true, false or null")
    # A column of ours that holds another kind of value is the user's own. Ids may repeat.
    taken = {"is_target": isinstance(label, bool | None), "source": isinstance(origin, str)}
    names = [*FORMATS[format].names, *(one for one, is_ours in taken.items() if is_ours)]
    own = {row.keys[field] for field in names if field in row.keys}
    extra = {k: v for k, v in row.record.items() if k not in own and v is not None}
    found = found._replace(
        example_id=str(name).strip() if isinstance(name, str) or type(name) is int else "",
        is_target=label if taken["is_target"] else None,
        source=origin if isinstance(origin, str) else source,
        extra=extra or NO_EXTRA,
    )
    _check_texts([*found[:4], found.source, extra, *(found.content or ())])
    return found


def _check_texts(value: Any, depth: int = 0) -> None:
    """Raises a ValueError if a nested text has a NUL character or half of a surrogate pair."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a row must have at most {_MAX_DEPTH} nested levels, got more")
    if isinstance(value, str):
        if bad := _BAD_TEXT.search(value):
            raise ValueError(f"a text must be valid Unicode without NUL, got {bad[0]!r}")
    elif isinstance(value, dict):
        _check_texts([*value.keys(), *value.values()], depth)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, depth + 1)


def _mute(rows: list[Example]) -> None:
    """Mutes rows with a loss flag of 0 in a column.

    A column of such a name has flags if all its values are 0 and 1, or false and true, with at
    least one 1. Any other column of this name, such as measured losses, is a column of the user.
    """
    for flags in _flags(rows).values():
        if _are_flags(flags.values()):
            for number in (number for number, counts in flags.items() if not counts):
                rows[number] = rows[number]._replace(is_muted=True)


def _flags(rows: Sequence[Example]) -> dict[str, dict[int, bool | None]]:
    """Returns for each column with the name of a loss flag its values by row; None for no flag."""
    found = {}
    for name in FLAGS:
        held = ((n, row.extra[name]) for n, row in enumerate(rows) if name in row.extra)
        found[name] = {number: flag_of(value) for number, value in held if value != ""}
    return found


def describe_columns(rows: Sequence[Example]) -> str:
    """Returns which columns may change the training and are not read; "" if none.

    They have sentences, or the name of a loss flag and a 0 that mutes no row.
    """
    found = ((name, [*flags.values()]) for name, flags in _flags(rows).items())
    other = [name for name, flags in found if False in flags and not _are_flags(flags)]
    has = "values other than 0 and 1, or no 1: its rows with 0 count too"
    lines = [f"the column {some_of(other, 3)} has {has}"] if other else []
    texts = collections.Counter[str]()  # more with several words than without
    for name, value in (item for row in rows for item in row.extra.items()):
        if isinstance(value, str) and value.strip():
            texts[name] += 1 if len(value.split()) > 1 else -1
    if unread := [name for name, count in texts.items() if count > 0]:
        mend = "map it with --corpus.records.fields if it is a part of the prompt"
        lines.append(f"the text of the column {some_of(unread, 3)} is not trained on: {mend}")
    return "\n    ".join(lines)


def _are_flags(values: Collection[bool | None]) -> bool:
    return True in values and None not in values


# rows that were written --------------------------------------------------------------------------


def read_written(path: str | os.PathLike[str]) -> tuple[Example, ...]:
    """Returns the rows of a file of `write_examples` with their places in the user's own file."""
    keys = {name: name for name in FIELDS}

    def read(record: dict[str, Any], *_: object) -> Example:
        format = FORMATS[record.get("row_format", "alpaca")]
        texts = record.get("row_texts") or [record.get(name, "") for name in TEXTS]
        row = format.read(Row(record, keys), bool(texts[2]))
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


def what_it_says(record: Mapping[str, Any], fields: Any, needs_output: bool) -> tuple[str, ...]:
    """Returns prompt and answer of a user's row or one of `write_examples`, to compare.

    It is () for a row of no format under the field map. `needs_output` is that of `read_examples`.
    """
    row = Row(record, _field_keys(fields))
    try:
        found = FORMATS[str(record.get("row_format") or detect_format(row))].read(row, needs_output)
    except (KeyError, ValueError):
        return ()
    asked, more, answer = map(str, record.get("row_texts") or found[1:4])
    return says(found._replace(instruction=asked, input=more, output=answer))


def says(row: Example) -> tuple[str, ...]:
    """Returns prompt and answer of an example, to compare."""
    return (*prompt_of(row), row.output)
