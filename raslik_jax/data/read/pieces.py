"""The rows of one file with their places and texts: read in parts, written back exactly."""

import contextlib
import csv
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from raslik_jax.base import files
from raslik_jax.base.messages import some_of
from raslik_jax.data.read.columns import read_batches
from raslik_jax.data.read.unpacking import kind_of, read_chunks

csv.field_size_limit(2**31 - 1)
_OWN_SEPARATOR = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# Spreadsheets name the separator in a line before the header.
_NAMED_SEPARATOR = re.compile(r"sep=(.)\r?\n?")
_LINES = (".jsonl", ".ndjson")
ENDINGS = (".json", *_LINES, *_OWN_SEPARATOR, ".parquet")
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

    The text is ":" for a file of lines and ", row " for any other. The ending names a table or
    Parquet. A text that begins with "[" is a JSON list. One object alone is a row. Any
    other text has an object on each line.
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
        return ", row ", _list_pieces("".join(chunks), origin)
    lines = _lines_of(chunks)
    if kind in _LINES or not (begin and begin[0].startswith("{")):
        return ":", _line_pieces(lines)
    text, record = _single_object(lines, origin)
    if record is None:
        return ":", _line_pieces(text)
    return ", row ", iter((Piece(1, record, "".join(text)),))


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


def _list_pieces(text: str, origin: str) -> Iterator[Piece]:
    """Yields the rows of a JSON list."""

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    def problem(reason: str, at: int) -> ValueError:
        line = text.count("\n", 0, at) + 1
        return ValueError(f"{origin} must be JSON, line {line} is not ({reason}): correct it")

    def value(at: int) -> tuple[Any, int]:
        """Returns a value, or the ValueError that says what is wrong with it, and its end."""
        try:
            try:
                return files.JSON.raw_decode(text, at)
            except json.JSONDecodeError:
                raise
            except ValueError as error:  # Python's own decoder reads it
                return ValueError(f"a row must be JSON, got {error}"), _PLAIN.raw_decode(text, at)[
                    1
                ]
        except json.JSONDecodeError as error:
            raise problem(error.msg, error.pos) from None
        except RecursionError:
            raise problem("it is nested too deeply", at) from None

    at = end = skip(text.index("[") + 1)
    yield Piece(0, text=text[:at])
    is_over = text.startswith("]", at)
    for number in itertools.count(1):
        if is_over:
            break
        before, (record, end) = end, value(at)
        yield Piece(number, record, text[at:end], text[before:at])
        at = skip(end)
        is_over = text.startswith("]", at)
        if not is_over and not text.startswith(",", at):
            raise problem("Expecting ',' delimiter", at)
        at = at if is_over else skip(at + 1)
    if (last := skip(at + 1)) < len(text):
        raise problem("Extra data", last)
    yield Piece(0, text=text[end:])


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
            f"{origin} must have one separator in its header, got {named}: leave the other "
            "characters out of the names"
        )
    found = fitting or possible
    return (own if own in found or not found else next(iter(found))), lines
