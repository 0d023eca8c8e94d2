"""The rows of one file with their places and texts: read in parts, written back exactly."""

import contextlib
import csv
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raslik_jax.base import files
from raslik_jax.base.messages import some_of
from raslik_jax.data.read.columns import read_batches
from raslik_jax.data.read.rows import COMMON, FIELDS
from raslik_jax.data.read.unpacking import kind_of, read_chunks

csv.field_size_limit(2**31 - 1)
_OWN_SEPARATOR = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# Spreadsheets name the separator in a line before the header.
_NAMED_SEPARATOR = re.compile(r"sep=(.)\r?\n?")
_LINES = (".jsonl", ".ndjson")
ENDINGS = (".json", *_LINES, *_OWN_SEPARATOR, ".parquet")
_ROW_KEYS = frozenset(FIELDS) - {*COMMON}
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = json.JSONDecoder()


class Piece(NamedTuple):
    """A row of a file, or text around rows: the texts of all pieces are the file.

    Attributes:
      place: line in a file of lines, else number among the rows, from 1; 0 for text around rows.
      record: the row as JSON has it, or the ValueError that says why it is none.
      text: its characters in the file; "" in files that are no text.
      separator: the characters between it and an earlier row.
    """

    place: int
    record: Any = None
    text: str = ""
    separator: str = ""


def read_pieces(path: pathlib.Path, origin: str) -> tuple[str, Iterator[Piece]]:
    """Returns the text between a file's name and a place in it, and the pieces of the file.

    That text is ":" for a file of lines and ", row " for any other. The ending names a table or
    Parquet. A text that begins with "[" is a JSON list. One object alone is a row or has a list of
    rows. Any other text has an object on each line.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        rows = enumerate(read_batches(path, origin), start=1)
        return ", row ", (Piece(number, row) for number, row in rows)
    chunks = read_chunks(path)
    if kind in _OWN_SEPARATOR:
        return ", row ", _table_pieces(_lines_of(chunks), origin, _OWN_SEPARATOR[kind])
    begin, chunks = _peek(chunks)
    if begin and begin[0].startswith("["):
        return ", row ", _list_pieces(chunks, origin)
    lines = _lines_of(chunks)
    if kind in _LINES or not (begin and begin[0].startswith("{")):
        return ":", _line_pieces(lines)
    text, record = _single_object(lines, origin)
    if record is None:
        return ":", _line_pieces(text)
    return ", row ", _object_pieces("".join(text), record, origin)


def _lines_of(chunks: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a text with their line feeds."""
    # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
    begun: list[str] = []
    for chunk in chunks:
        first, *more = chunk.split("\n")
        begun.append(first)
        for line in more:
            yield "".join(begun) + "\n"
            begun = [line]
    if any(begun):
        yield "".join(begun)


def _peek(parts: Iterator[str], count: int = 1) -> tuple[list[str], Iterator[str]]:
    """Returns the first parts with more than space, stripped, and all parts again."""
    taken, found = list[str](), list[str]()
    for part in parts:
        taken.append(part)
        found += filter(None, (part.strip("\ufeff \t\r\n"),))
        if len(found) == count:
            break
    return found, itertools.chain(taken, parts)


def _line_pieces(lines: Iterable[str]) -> Iterator[Piece]:
    """Yields each line; blank ones are text around rows."""
    for number, line in enumerate(lines, start=1):
        row = line.lstrip("\ufeff") if number == 1 else line
        if not row.strip():
            yield Piece(0, text=line)
            continue
        try:
            record = files.parse_json(row, "a row")
        except ValueError as error:
            record = error
        yield Piece(number, record, line)


# JSON --------------------------------------------------------------------------------------------


class _Scanner:
    """The values of a JSON text. It holds one at a time."""

    def __init__(self, chunks: Iterator[str], origin: str):
        self._chunks, self._origin = chunks, origin
        self._text, self._at, self._line = "", 0, 1

    def _more(self) -> bool:
        """Reads at least as much as is held; returns whether there was any."""
        parts, length = [self._text[self._at :]], 0
        self._line += self._text.count("\n", 0, self._at)
        while length < max(len(parts[0]), 1) and (chunk := next(self._chunks, "")):
            parts.append(chunk)
            length += len(chunk)
        self._text, self._at = "".join(parts), 0
        return length > 0

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        return text

    def space(self) -> str:
        """Returns the next white space; then a character is held or the text ends."""
        found = ""
        while True:
            match = _SPACE.match(self._text, self._at)
            found += self._take(match.end() if match else self._at)
            if self._at < len(self._text) or not self._more():
                return found

    def next_is(self, mark: str) -> bool:
        """Returns whether a mark comes next; then it passes the mark."""
        is_next = self._text.startswith(mark, self._at)
        self._at += len(mark) if is_next else 0
        return is_next

    def value(self) -> tuple[Any, str]:
        """Returns the next value (or the ValueError about it) and its text."""
        while True:
            try:
                value, end = files.JSON.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                raise self.problem(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                value, end = self._skipped(error)
            if end < len(self._text) or not self._more():
                return value, self._take(end)

    def _skipped(self, error: Exception) -> tuple[ValueError, int]:
        """Returns the problem of a value that Python's own decoder can read, and its end."""
        while True:
            try:
                end = _PLAIN.raw_decode(self._text, self._at)[1]
                return ValueError(f"a row must be JSON, got {error}"), end
            except json.JSONDecodeError as plain:
                if not self._more():
                    raise self.problem(plain.msg, plain.pos) from None
            except RecursionError:
                raise self.problem("it is nested too deeply") from None

    def end(self) -> str:
        """Returns the white space at the end; refuses more text."""
        space = self.space()
        if self._at < len(self._text):
            raise self.problem("Extra data")
        return space

    def problem(self, reason: str, at: int | None = None) -> ValueError:
        """Returns the error of a place in the text, by its line."""
        line = self._line + self._text.count("\n", 0, self._at if at is None else at)
        return ValueError(f"{self._origin} must be JSON, line {line} is not ({reason}): correct it")


def _list_pieces(chunks: Iterator[str], origin: str) -> Iterator[Piece]:
    """Yields the rows of a JSON list."""
    begin = next(chunks)
    mark = "\ufeff" if begin.startswith("\ufeff") else ""
    scanner = _Scanner(itertools.chain((begin.removeprefix(mark),), chunks), origin)
    head = mark + scanner.space()
    scanner.next_is("[")
    yield Piece(0, text=f"{head}[{scanner.space()}")
    between = after = ""
    if not scanner.next_is("]"):
        for number in itertools.count(1):
            record, text = scanner.value()
            yield Piece(number, record, text, between)
            after = scanner.space()
            if scanner.next_is("]"):
                break
            if not scanner.next_is(","):
                raise scanner.problem("Expecting ',' delimiter")
            between = f"{after},{scanner.space()}"
    yield Piece(0, text=f"{after}]{scanner.end()}")


def _single_object(
    lines: Iterator[str], origin: str
) -> tuple[Iterator[str], dict[str, Any] | None]:
    """Returns a text and its only object; None if an object is on each line."""
    (first, *more), lines = _peek(lines, 2)
    try:
        _PLAIN.decode(first)
        is_row = bool(more)
    except json.JSONDecodeError as error:
        is_row = error.pos < len(first)  # the line is damaged, it does not end too early
    except RecursionError:
        is_row = True
    if is_row:
        return lines, None
    text = [*lines]
    try:
        record = files.parse_json("".join(text).lstrip("\ufeff"), origin)
    except ValueError as error:
        if "Extra data" in str(error):
            raise ValueError(
                f"{origin} must have one object on each line or one list, got objects over several "
                "lines: write JSONL, as with jq -c ."
            ) from None
        if len(text) == 1:
            return iter(text), None
        raise
    return iter(text), record


def _object_pieces(text: str, record: dict[str, Any], origin: str) -> Iterator[Piece]:
    """Yields the rows of a list within an object, or the object as the only row."""
    key = _key_of_rows(record, origin)
    if key is None:
        yield Piece(1, record, text)
        return
    start, end = _span_of(text, key)
    yield Piece(0, text=text[:start])
    yield from _list_pieces(iter((text[start:end],)), origin)
    yield Piece(0, text=text[end:])


def _key_of_rows(record: Mapping[str, Any], origin: str) -> str | None:
    """Returns the key of the list of rows in an object; None where the object is a row."""
    columns = [*record.values()]
    is_by_number = [isinstance(one, dict) and [*one][:1] == ["0"] for one in columns]
    is_texts = [isinstance(one, list) and {*map(type, one)} == {str} for one in columns]
    if columns and (all(is_by_number) or all(is_texts)):
        raise ValueError(
            f"{origin} must have rows, got columns {some_of(record)}: write rows, as with "
            'DataFrame.to_json(FILE, orient="records", lines=True)'
        )
    if _ROW_KEYS & record.keys():
        return None
    lists = [
        name
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    ]
    if len(lists) > 1 and "train" not in lists:
        raise ValueError(
            f"{origin} must have one list of rows, got {some_of(lists)}: call that of the training "
            "rows train, or write it alone"
        )
    return ("train" if "train" in lists else lists[0]) if lists else None


def _span_of(text: str, key: str) -> tuple[int, int]:
    """Returns where the value of a key begins and ends in the text of an object."""

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    at = text.index("{") + 1
    while True:
        name, at = _PLAIN.raw_decode(text, skip(at))
        start = skip(skip(at) + 1)
        at = _PLAIN.raw_decode(text, start)[1]
        if name == key:
            return start, at
        at = skip(at) + 1


# tables ------------------------------------------------------------------------------------------


def _table_pieces(lines: Iterator[str], origin: str, own: str) -> Iterator[Piece]:
    """Yields the rows of a table: its cells are texts by the names in the header."""
    begin = next(lines, "")
    named = _NAMED_SEPARATOR.fullmatch(begin.lstrip("\ufeff"))
    if named:
        yield Piece(0, text=begin)
    lines = lines if named else itertools.chain((begin,), lines)
    mark, lines = (named[1], lines) if named else _separator_of(lines, origin, own)
    taken: list[str] = []
    reader = csv.reader(_fed(lines, taken), delimiter=mark, strict=True)
    try:
        header = next(reader, [])
        yield Piece(0, text=_emptied(taken))
        if len({*header}) < len(header) or not all(name.strip() for name in header):
            raise ValueError(
                f"{origin} must begin with a header, a name for each column and each once, got "
                f"{some_of(header, 3)}: write one"
            )
        number = 0
        for row in reader:
            number += bool(row)
            record: Any = dict(zip(header, row, strict=False))
            if len(row) != len(header):
                record = ValueError(f"a row must have {len(header)} cells, got {len(row)}")
            yield Piece(number if row else 0, record, _emptied(taken))
    except csv.Error as error:
        line = reader.line_num + bool(named)
        raise ValueError(
            f"{origin} must be a table, line {line} is not ({error}): write it again"
        ) from error


def _emptied(parts: list[str]) -> str:
    """Returns the parts as one text and empties the list."""
    text = "".join(parts)
    parts.clear()
    return text


def _fed(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    """Yields lines to a reader of tables and notes those that it has taken."""
    for number, line in enumerate(lines):
        taken.append(line)
        line = line.lstrip("\ufeff") if number == 0 else line
        # Old files end their lines in a carriage return alone.
        yield from io.StringIO(line, newline="") if "\r" in line[:-2] else (line,)


def _separator_of(lines: Iterator[str], origin: str, own: str) -> tuple[str, Iterator[str]]:
    """Returns the separator of a table's cells, by its header and first row; and all lines."""
    taken, possible, fitting = list[str](), dict[str, list[str]](), dict[str, list[str]]()
    for mark in _SEPARATORS:
        again, lines = itertools.tee(lines)
        reader = csv.reader(_fed(again, taken), delimiter=mark, strict=True)
        with contextlib.suppress(csv.Error):
            header = next(reader, [])
            if len(header) > 1:
                possible[mark] = header
                if len(next(filter(None, reader), header)) == len(header):
                    fitting[mark] = header
    if len(fitting) > 1:
        named = " or ".join(f"{_SEPARATORS[m]} ({len(names)})" for m, names in fitting.items())
        raise ValueError(
            f"{origin} must show by its header what separates the columns, got {named}: leave one "
            "of these characters out of the names"
        )
    found = fitting or possible
    return (own if own in found or not found else next(iter(found))), lines
