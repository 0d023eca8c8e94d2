"""Rows of files and of hub datasets as examples, or refused with file and line.

What a row may hold. Text is Unicode text: a NUL character and half of a surrogate pair are refused,
as is a key that stands twice in a row, NaN and Infinity.
"""

import json
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raslik_jax import files
from raslik_jax.data.examples import NO_EXTRA, Example, check_unique_ids, make_examples
from raslik_jax.messages import listed_problems, one_line, shown, some_of

# The key of a row that holds each field of an example, unless a field map names another.
FIELDS = ("instruction", "input", "output", "id", "is_target", "source")
_HUB = "hub:"
_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")
# Parts of a conversation that no template renders: left out, they would change what was asked.
_CHAT_KEYS = ("system", "history")
_MAX_DEPTH = 50
_BAD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_fields(text: str) -> dict[str, str]:
    """Returns the field map that a setting describes, empty for an empty text.

    Raises:
      ValueError: an entry without "=", a field or key that stands twice, or what `read_examples`
        refuses.
    """
    if not text:
        return {}
    entries = [entry.partition("=") for entry in text.split(",")]
    fields = {name.strip(): key.strip() for name, _, key in entries}
    if not all((*fields, *fields.values())):
        raise ValueError(
            f"a field map must be like instruction=question,output=answer, got {shown(text)}"
        )
    if not len(entries) == len(fields) == len(set(fields.values())):
        raise ValueError(f"a field map must name each field and key once, got {shown(text)}")
    _field_keys(fields)
    return fields


def _field_keys(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the key of every field under a field map, which renames keys and keeps the rest.

    A key that the map gives to one field is no longer that of another: with input=output there has
    to be another key for the output.
    """
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(
            f"a field map must name fields of {', '.join(FIELDS)}, got {some_of(unknown)}"
        )
    taken = set(fields.values())
    keys = {name: name for name in FIELDS if name not in taken} | dict(fields)
    for name in ("instruction", "output"):
        if name not in keys:
            raise ValueError(
                f"a field map must leave a key to {name!r}, got its own for another field: "
                f"name the key of {name!r} too"
            )
    return keys


def read_examples(
    source: str | os.PathLike[str],
    *,
    fields: Mapping[str, str] | None = None,
    name: str = "",
    needs_output: bool = True,
    check: Callable[[Example], None] | None = None,
) -> tuple[Example, ...]:
    """Returns the rows of a JSON list, a JSONL file or a hub dataset as examples.

    A file whose first character is "[" is one JSON list of objects, any other has one object per
    line; blank lines are skipped. The endings .xz, .gz and .zst are unpacked on the way.

    Args:
      source: a path, or `hub:OWNER/NAME[:CONFIG][@SPLIT]` (split "train" unless given), where a
        folder that the package `datasets` reads may stand for OWNER/NAME.
      fields: which key of a row holds which field of an example, where it is not that of FIELDS.
        Every row has an instruction and an output. Without its input key, or with null there, a
        row has an empty input; without an id it is named by its text. All other keys are kept as
        the example's `extra`.
      name: the source of every example whose row does not name its own.
      needs_output: False is for queries: a row may do without an output, which is then empty.
      check: raises ValueError for a row that the caller cannot use; it is reported like the others.

    Raises:
      ValueError: the file is missing, no regular file, empty, cannot be unpacked or is not UTF-8;
        there is no such dataset, or no way to it; a field map that names unknown fields, leaves no
        key to instruction or output, or names a key that no row has; malformed rows, the first few
        with file and line.
    """
    fields = fields or {}
    keys = _field_keys(fields)
    origin = shown(str(source), 160).strip("'\"")
    found: list[Example] = []
    problems: list[str] = []
    unseen = set(fields.values()) if needs_output else set()
    for line, record in _numbered_records(source):
        try:
            row = _example_from_record(record, keys, name, needs_output)
            if check is not None:
                check(row)
        except ValueError as error:
            problems.append(f"{origin}:{line}: {error}")
            continue
        unseen.difference_update(record)
        found.append(row)
    if problems:
        raise ValueError(listed_problems(problems, "correct or remove these rows"))
    if not found:
        raise ValueError(f"{origin} must hold at least one row, got none")
    if unseen:
        raise ValueError(
            f"a field map must name keys that rows have, got {some_of(sorted(unseen))}, which no "
            f"row of {origin} has: correct the key"
        )
    unnamed = iter(make_examples(row for row in found if not row.example_id))
    found = [row if row.example_id else next(unnamed) for row in found]
    check_unique_ids(found, origin)
    return tuple(found)


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of a JSON list or JSONL file, unpacked as `read_examples` does.

    Raises:
      ValueError: the file is missing, cannot be unpacked, or has a record that is no JSON object.
    """
    origin = shown(str(path), 160).strip("'\"")
    for line, record in _numbered_records(path):
        try:
            yield line, _object(record)
        except ValueError as error:
            raise ValueError(f"{origin}:{line}: {error}: correct the row") from None


def _numbered_records(source: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yields (line or row number, parsed record), or a ValueError where one cannot be parsed."""
    if str(source).startswith(_HUB):
        yield from enumerate(_hub_rows(str(source)), start=1)
        return
    text = _read_text(pathlib.Path(source))
    yield from (_list_records if text.lstrip().startswith("[") else _line_records)(text)


def _object(record: Any) -> dict[str, Any]:
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, got {shown(record, 40)}")
    return record


def _example_from_record(
    record: Any, keys: Mapping[str, str], source: str, needs_output: bool
) -> Example:
    """Returns the example of a row, its id empty where the row has none."""
    record = _object(record)
    texts = {"input": "", "id": "", "source": source} | ({} if needs_output else {"output": ""})
    for name in ("instruction", "input", "output", "id", "source"):
        value = record.get(keys[name]) if name in keys else None
        if name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        value = texts.get(name) if value is None else value
        if not isinstance(value, str):
            raise ValueError(f"{keys[name]!r} must be text, got {_short(value)}")
        texts[name] = value
        if name == "instruction" and not value.strip():
            raise ValueError(f"{keys[name]!r} must hold text, got {_short(value)}")
    is_target = record.get(keys["is_target"]) if "is_target" in keys else None
    if not isinstance(is_target, bool | None):
        raise ValueError(
            f"{keys['is_target']!r} must be true, false or null, got {_short(is_target)}"
        )
    taken = set(keys.values())
    extra = {k: value for k, value in record.items() if k not in taken and value is not None}
    for key in _CHAT_KEYS:
        value = extra.pop(key, "")
        if value.strip() if isinstance(value, str) else value != []:
            raise ValueError(
                f"{key!r} must be empty, got {_short(value)}: no template renders it, put it into "
                "the instruction"
            )
    _check_texts([*texts.values(), extra])
    name = texts.pop("id").strip()
    return Example(name, is_target=is_target, extra=extra or NO_EXTRA, **texts)


def _short(value: Any) -> str:
    return "nothing" if value is None else shown(value, 40)


def _check_texts(value: Any, depth: int = 0) -> None:
    """Raises a ValueError where a text, however deep, is none that UTF-8 and C can hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a row must not be nested deeper than {_MAX_DEPTH} levels, got more")
    if isinstance(value, str):
        bad = None if value.isascii() and "\0" not in value else _BAD_TEXT.search(value)
        if bad:
            raise ValueError(
                "a text must have no NUL character, got one"
                if bad[0] == "\0"
                else "a text must have whole characters, got half a pair"
            )
    elif isinstance(value, Mapping):
        _check_texts([*value.keys(), *value.values()], depth)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, depth + 1)


# Reading ------------------------------------------------------------------------------------------


def _hub_rows(source: str) -> Iterator[Any]:
    asked = _HUB_SOURCE.fullmatch(source)
    if not asked:
        raise ValueError(
            f"a hub dataset must be like hub:OWNER/NAME[:CONFIG][@SPLIT], got {shown(source)}"
        )
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{shown(source)} needs the package datasets: install raslik-jax[data] or give a file"
        ) from error
    try:
        rows = datasets.load_dataset(
            asked["name"], asked["config"], split=asked["split"] or "train"
        )
    except Exception as error:  # a missing dataset or network shows in a dozen classes
        raise ValueError(
            f"the dataset {shown(source)} cannot be read ({one_line(str(error), 100)}): check "
            "name, config, split and network, or give a local file"
        ) from error
    # In JSON's types: a date as its text, a NaN as null.
    for row in rows:
        yield json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def _read_text(path: pathlib.Path) -> str:
    """Returns the text of a UTF-8 file, unpacked as its ending says."""
    raw = files.read_bytes(path)
    if path.suffix in _STREAMS:
        try:
            raw = _unpack(raw, _STREAMS[path.suffix])
        except Exception as error:  # each library has errors of its own
            raise ValueError(
                f"{shown(str(path), 160)} cannot be unpacked ({shown(str(error))}): fetch it again"
            ) from None
    text = files.decode_text(raw, path)
    if not text.strip():
        raise ValueError(f"{shown(str(path), 160)} must hold at least one row, got an empty file")
    return text


def _unpack(raw: bytes, start: Callable[[], Any]) -> bytes:
    """Returns all streams of an archive; readers of files would drop a damaged second one."""
    parts = []
    while raw:
        stream = start()
        parts.append(stream.decompress(raw))
        if not stream.eof:
            raise EOFError("it ends too early")
        raw = stream.unused_data.lstrip(b"\0")  # which fill up .xz between streams
    return b"".join(parts)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise OSError("the package zstandard is missing: install raslik-jax[data]") from None
    return zstandard.ZstdDecompressor().decompressobj()


_STREAMS: dict[str, Callable[[], Any]] = {
    ".xz": lzma.LZMADecompressor,
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": _zstandard,
}


def _line_records(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record, end = files.decode_json(line, _skip_space(line, 0))
        except ValueError as error:
            yield number, ValueError(f"a row must be JSON, got something else ({error})")
            continue
        if line[end:].strip():
            record = ValueError(f"a row must be one object, got more text at column {end + 1}")
        yield number, record


def _list_records(text: str) -> Iterator[tuple[int, Any]]:
    """Parses a JSON list row by row, so that every row knows its line."""
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    has_row = text[position : position + 1] != "]"
    while has_row:
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = files.decode_json(text, position)
        except ValueError as error:
            yield line, ValueError(f"a row must be JSON, got something else ({error})")
            return
        yield line, record
        position = _skip_space(text, position)
        has_row = text[position : position + 1] == ","
        if has_row:
            position = _skip_space(text, position + 1)
    line += text.count("\n", counted, position)
    if text[position : position + 1] != "]":
        yield line, ValueError("the list must end with ']' or go on with ',', got neither")
    elif text[position + 1 :].strip():
        yield line, ValueError("the file must end with the list, got more text")


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r"):
        position += 1
    return position
