"""The rows of one file with their places and texts: read in parts, written back exactly."""

import contextlib
import csv
import datetime
import decimal
import importlib
import io
import itertools
import json
import lzma
import math
import pathlib
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raslik_jax.base import files
from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.data.words import by_word, load_words, refused

csv.field_size_limit(2**31 - 1)
_OWN_SEPARATOR = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# Spreadsheets name the separator in a line before the header.
_NAMED_SEPARATOR = re.compile(r"sep=(.)\r?\n?")
_LINES = (".jsonl", ".ndjson")
ENDINGS = (".json", *_LINES, *_OWN_SEPARATOR, ".parquet")
_VISIBLE = re.compile(r"[^ \t\r\n]|\Z")
_PLAIN = json.JSONDecoder()
# A packed byte may become a thousand.
_CHUNK, _PACKED_CHUNK = 2**20, 2**14
_STREAMS: dict[str, Callable[[], Any]] = {
    ".xz": lzma.LZMADecompressor,
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: importlib.import_module("zstandard").ZstdDecompressor().decompressobj(),
}
_BATCH = 1024
# A column of files that no model here reads.
MEDIA = re.compile(rf"({'|'.join(load_words('row_keys')['media'])})s?")
_ROLES = by_word(load_words("row_keys")["roles"])
# A row, or what is wrong with it.
Row = dict[str, Any] | ValueError


class Piece(NamedTuple):
    """A row of a file, or text around rows: the texts of all pieces are the file.

    Attributes:
      place: line in a file of lines, else number among the rows, from 1; 0 for text around rows.
      record: the row in JSON's types, or the ValueError that explains why it is no row.
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
    Parquet. A text that begins with "[" is a JSON list. One object alone is a row. Any other text
    has an object on each line.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        rows = enumerate(read_batches(path, origin), start=1)
        return ", row ", (Piece(number, row) for number, row in rows)
    lines = read_lines(path)
    if kind in _OWN_SEPARATOR:
        return ", row ", _table_pieces(lines, origin, _OWN_SEPARATOR[kind])
    taken, begin = list[str](), list[str]()
    for line in lines:
        taken.append(line)
        begin += filter(None, (line.strip("\ufeff \t\r\n"),))
        if len(begin) == 2 or begin and begin[0][0] == "[":
            break
    lines = itertools.chain(taken, lines)
    if begin and begin[0][0] == "[":
        return ", row ", _list_pieces("".join(lines), origin)
    if kind in _LINES or not (begin and begin[0][0] == "{") or _has_more(*begin):
        return ":", _line_pieces(lines)
    taken = [*lines]
    record = _single_object(taken, origin)
    if record is None:
        return ":", _line_pieces(taken)
    return ", row ", iter((Piece(1, record, "".join(taken)),))


# JSON --------------------------------------------------------------------------------------------


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


def _has_more(first: str, *more: str) -> bool:
    """Returns whether rows follow a first line that is an object or a damaged object."""
    try:
        _PLAIN.decode(first)
        return bool(more)
    except json.JSONDecodeError as error:
        return error.pos < len(first)  # else the line ends too early
    except RecursionError:
        return True


def _single_object(lines: list[str], origin: str) -> Any:
    """Returns the only object of a text; None if the text is none."""
    try:
        return files.parse_json("".join(lines).lstrip("\ufeff"), origin)
    except ValueError as error:
        if "Extra data" in str(error):
            raise refused("objects_over_lines", origin=origin) from None
        if len(lines) == 1:
            return None
        raise


def _list_pieces(text: str, origin: str) -> Iterator[Piece]:
    """Yields the rows of a JSON list."""

    def skip(at: int) -> int:
        found = _VISIBLE.search(text, at)
        return found.start() if found else at

    def problem(reason: str, at: int) -> ValueError:
        line = text.count("\n", 0, at) + 1
        return ValueError(f"{origin} must be JSON, line {line} is not ({reason}): correct it")

    at = end = skip(text.index("[") + 1)
    yield Piece(0, text=text[:at])
    is_over = text.startswith("]", at)
    for number in itertools.count(1):
        if is_over:
            break
        before = end
        try:
            record, end = _value(text, at)
        except json.JSONDecodeError as error:
            raise problem(error.msg, error.pos) from None
        except RecursionError:
            raise problem("it is nested too deeply", at) from None
        yield Piece(number, record, text[at:end], text[before:at])
        at = skip(end)
        is_over = text.startswith("]", at)
        if not is_over and not text.startswith(",", at):
            raise problem("Expecting ',' delimiter", at)
        at = at if is_over else skip(at + 1)
    if (last := skip(at + 1)) < len(text):
        raise problem("Extra data", last)
    yield Piece(0, text=text[end:])


def _value(text: str, at: int) -> tuple[Any, int]:
    """Returns a value, or a ValueError with the defect, and its end."""
    try:
        return files.JSON.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's own decoder reads it
        return ValueError(f"a row must be JSON, got {error}"), _PLAIN.raw_decode(text, at)[1]


# tables ------------------------------------------------------------------------------------------


def _table_pieces(lines: Iterator[str], origin: str, own: str) -> Iterator[Piece]:
    """Yields the rows of a table: its cells are texts by the names in the header."""
    # Old files end their lines in a carriage return alone.
    lines = itertools.chain.from_iterable(
        io.StringIO(line, newline="") if "\r" in line[:-2] else (line,) for line in lines
    )
    begin = next(lines, "")
    named = _NAMED_SEPARATOR.fullmatch(begin.lstrip("\ufeff"))
    if named:
        yield Piece(0, text=begin)
        begin = next(lines, "")
    lines, texts = itertools.tee(lines)
    texts = itertools.chain((begin,), texts)
    lines = itertools.chain((begin.lstrip("\ufeff"),), lines)
    mark, lines = (named[1], lines) if named else _separator_of(lines, origin, own)
    reader = csv.reader(lines, delimiter=mark, strict=True)
    number = num_lines = 0
    try:
        # Pandas writes its index without a name, and names such a column so.
        names = enumerate(next(reader, []))
        header = [name if name.strip() else f"Unnamed: {number}" for number, name in names]
        yield Piece(0, text="".join(itertools.islice(texts, reader.line_num)))
        if len({*header}) < len(header):
            raise refused("table_header", origin=origin, got=some_of(header, 3))
        num_lines = reader.line_num
        for row in reader:
            number += bool(row)
            record: Any = dict(zip(header, row, strict=False))
            if len(row) != len(header):
                record = ValueError(f"a row must have {len(header)} cells, got {len(row)}")
            text = "".join(itertools.islice(texts, reader.line_num - num_lines))
            num_lines = reader.line_num
            yield Piece(number if row else 0, record, text)
    except csv.Error as error:
        line = reader.line_num + bool(named)
        raise refused("table_broken", origin=origin, line=line, error=error) from error


def _separator_of(lines: Iterator[str], origin: str, own: str) -> tuple[str, Iterator[str]]:
    """Returns the separator of a table's cells, by its header and first row; and all lines."""
    possible, fitting = list[str](), dict[str, int]()
    for mark in _SEPARATORS:
        again, lines = itertools.tee(lines)
        reader = csv.reader(again, delimiter=mark, strict=True)
        with contextlib.suppress(csv.Error):
            size = len(next(reader, []))
            if size > 1:
                possible.append(mark)
                if len(next(filter(None, reader), [""] * size)) == size:
                    fitting[mark] = size
    if len(fitting) > 1:
        named = " or ".join(f"{_SEPARATORS[mark]} ({size})" for mark, size in fitting.items())
        raise refused("table_separators", origin=origin, got=named)
    found = [*fitting] or possible
    return (own if own in found or not found else found[0]), lines


# Parquet and packages ----------------------------------------------------------------------------


def read_batches(path: pathlib.Path, origin: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file and holds a batch at a time."""
    with opened_parquet(path, origin) as table:
        for batch in table.iter_batches(_BATCH):
            columns = {}
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    columns[name] = column.to_pylist()
                except Exception as error:  # of Arrow
                    why = one_line(str(error), 100)
                    raise refused(
                        "column_unread", column=shown(name), origin=origin, error=why
                    ) from error
            for row in zip(*columns.values(), strict=True):
                yield json_row(dict(zip(columns, row, strict=True)))


@contextlib.contextmanager
def opened_parquet(path: pathlib.Path, origin: str) -> Iterator[Any]:
    """Yields a Parquet file whose errors name it; refuses two columns of one name."""
    parquet = import_package("pyarrow.parquet", origin)

    def damaged(error: Exception) -> ValueError:
        why = one_line(str(error), 100)
        return ValueError(f"{origin} must be a whole Parquet file ({why}): fetch or write it again")

    with contextlib.ExitStack() as held:
        if without_packing(path.name) != path.name:
            file: Any = io.BytesIO(b"".join(unpacked(path)))
        else:
            file = held.enter_context(files.open_regular(path))
            check_head(path, file.peek(256)[:256].replace(b"\0", b""))
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
        except Exception as error:  # Arrow's errors are those of many classes
            raise damaged(error) from error
        if len({*names}) < len(names):
            raise refused("columns_twice", origin=origin, got=some_of(names))
        try:
            yield table
        except (OSError, import_package("pyarrow", origin).ArrowException) as error:
            raise damaged(error) from error


def import_package(name: str, origin: str) -> Any:
    """Returns a module of an optional package; if it is missing, says which to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise refused("package", origin=origin, package=name.partition(".")[0]) from error


def json_row(row: Mapping[str, Any]) -> Row:
    """Returns a row in JSON's types, or the error that names the column of another value."""
    found = {}
    for name, value in row.items():
        try:
            found[name] = _as_json(value)
        except ValueError as error:
            if kind := MEDIA.fullmatch(name):
                return refused("media", kind=kind[1], column=name)
            return ValueError(f"the column {shown(name)} {error}")
    return found


def _as_json(value: Any) -> Any:
    """Returns a value in JSON's types: bytes as their text, NaN as null, a date in ISO's form."""
    match value:
        case None | str() | int():
            return value
        case float() if math.isinf(value):
            raise ValueError(f"must have finite numbers, got {value}: write null in its place")
        case float():
            return None if math.isnan(value) else value
        case [*_] if value and all(isinstance(one, tuple) and len(one) == 2 for one in value):
            return _as_json(dict(value))  # a map
        case [*_]:
            return [_as_json(one) for one in value]
        case dict() if all(isinstance(name, str) for name in value):
            # A table gives each object the keys of all others, with null. Messages keep their text.
            role, speaker = value.get("role"), value.get("from")
            speaker = speaker.decode("utf-8", "replace") if isinstance(speaker, bytes) else speaker
            is_said = isinstance(role, str | bytes) or _ROLES.get(str(speaker))
            own = {"content", "value"} if is_said else {}
            return {n: _as_json(one) for n, one in value.items() if one is not None or n in own}
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                got = f"the bytes {shown(value, 40)}: leave it out or write it as text"
                raise ValueError(f"must have text in UTF-8, got {got}") from None
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta() | uuid.UUID():
            return str(value)
        case decimal.Decimal() if value.is_finite():
            near = int(value) if value == value.to_integral_value() else float(value)
            return near if decimal.Decimal(str(near)) == value else str(value)
    got = type(value).__name__
    raise ValueError(f"must have text, numbers, dates, lists or structs, got {got}: leave it out")


# bytes -------------------------------------------------------------------------------------------


def kind_of(path: pathlib.PurePath) -> str:
    """Returns the ending of a file's form without that of its packing."""
    return pathlib.PurePath(without_packing(path.name)).suffix.lower()


def without_packing(name: str) -> str:
    """Returns a file's name without the ending of its packing, if any."""
    ending = pathlib.PurePath(name).suffix
    return name.removesuffix(ending) if ending.lower() in _STREAMS else name


def read_lines(path: pathlib.Path) -> Iterator[str]:
    """Yields the lines of a file with their line feeds; refuses a line that is not UTF-8."""
    for number, line in enumerate(_lines(path), start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise files.not_utf8(path, number, error) from None


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    # Not splitlines() of the text: a JSON string may hold U+2028 and other line ends of Unicode.
    begun: list[bytes] = []
    for number, chunk in enumerate(unpacked(path)):
        if number == 0:
            check_head(path, chunk[:256])
        first, *more = chunk.split(b"\n")
        begun.append(first)
        for line in more:
            yield b"".join(begun) + b"\n"
            begun = [line]
    if any(begun):
        yield b"".join(begun)


def check_head(path: pathlib.Path, head: bytes) -> None:
    """Refuses a file that begins like another kind of file."""
    name = shown(str(path), 160)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{name} must hold rows, got a pointer of Git LFS: run git lfs pull")
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        is_text = max(head[1::2].count(0), head[::2].count(0)) > len(head) // 3
        mend = "convert it, as with iconv -f UTF-16 -t UTF-8" if is_text else "export its rows"
        raise refused("file_binary", name=name, got=("a binary file", "UTF-16")[is_text], mend=mend)


def unpacked(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the bytes of a file, unpacked by its ending; no part is empty."""
    start = _STREAMS.get(path.suffix.lower())
    with files.open_regular(path) as file:
        chunks = iter(lambda: file.read(_PACKED_CHUNK if start else _CHUNK), b"")
        if start is None:
            yield from chunks
            return
        try:
            yield from filter(None, _streams(chunks, start))
        except (OSError, GeneratorExit):
            raise
        except Exception as error:  # each library has errors of its own
            is_missing = isinstance(error, ImportError)
            mend = "install raslik-jax[data]" if is_missing else "fetch it again"
            name = shown(str(path), 160)
            raise ValueError(f"{name} cannot be unpacked ({shown(str(error))}): {mend}") from None


def _streams(chunks: Iterator[bytes], start: Callable[[], Any]) -> Iterator[bytes]:
    """Yields all streams of an archive; readers of files would drop a damaged second one."""
    stream = None
    for raw in chunks:
        while raw:
            # Zeros fill up .xz between streams.
            raw = raw.lstrip(b"\0") if stream is None else raw
            if raw:
                stream = stream or start()
                yield stream.decompress(raw)
                raw, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream:
        raise EOFError("it ends too early")
