"""Rows of files and of hub datasets as examples, or refused with their place.

Text is Unicode text: a NUL character and half of a surrogate pair are refused, as is a key that
stands twice in a row, NaN and Infinity.
"""

import importlib
import json
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raslik_jax import files
from raslik_jax.data.examples import Example, check_unique_ids, make_examples
from raslik_jax.messages import listed_problems, one_line, shown, some_of

# The key of a row that holds each field of an example, unless a field map names another.
FIELDS = ("instruction", "input", "output", "id", "is_target", "source")
_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")
# Parts of a conversation that no template renders: left out, they would change what was asked.
_CHAT_KEYS = ("system", "history")
_MAX_DEPTH = 50
_BAD_TEXT = re.compile("[\0\ud800-\udfff]")


def parse_fields(text: str) -> dict[str, str]:
    """Returns the field map that a setting such as "input=context" describes."""
    entries = [entry.partition("=") for entry in text.split(",")] if text else []
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
    """Returns the key of every field under a field map, which renames keys and keeps the rest."""
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(
            f"a field map must name fields of {', '.join(FIELDS)}, got {some_of(unknown)}"
        )
    keys = {name: name for name in FIELDS if name not in fields.values()} | dict(fields)
    for name in ("instruction", "output"):
        if name not in keys:
            raise ValueError(
                f"a field map must leave a key to {name!r}, got its own for another: name both"
            )
    return keys


def read_examples(
    source: str | os.PathLike[str],
    *,
    fields: Mapping[str, str] | None = None,
    name: str = "",
    needs_output: bool = True,
    check: Callable[[Example], object] = lambda row: None,
) -> tuple[Example, ...]:
    """Returns the rows of a JSON list, a JSONL file or a hub dataset as examples.

    A file whose first character is "[" is one JSON list of objects, any other has one object per
    line; blank lines are skipped. The endings .xz, .gz and .zst are unpacked on the way.

    Args:
      source: a path, or `hub:OWNER/NAME[:CONFIG][@SPLIT]` (split "train" unless given), where a
        folder that the package `datasets` reads may stand for OWNER/NAME.
      fields: which key of a row holds which field of an example, where it is not that of FIELDS.
        Without an input a row has an empty one; without an id it is named by its text. All other
        keys are kept as the example's `extra`.
      name: the source of every example whose row does not name its own.
      needs_output: False is for queries: a row may do without an output, which is then empty.
      check: raises ValueError for a row that the caller cannot use.
    """
    fields = fields or {}
    keys = _field_keys(fields)
    origin = shown(str(source), 160).strip("'\"")
    found: list[Example] = []
    problems: list[str] = []
    unseen = set(fields.values()) if needs_output else set()
    separator, records = placed_records(source)
    for place, record in records:
        try:
            row = _example_from_record(record, keys, name, needs_output)._replace(place=place)
            check(row)
        except ValueError as error:
            problems.append(f"{origin}{separator}{place}: {error}")
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


def read_written(path: str | os.PathLike[str]) -> tuple[Example, ...]:
    """Returns the rows of a file of `write_examples`, with their places in the user's own file."""
    return tuple(
        row._replace(
            place=row.extra.get("place", 0),
            extra={key: value for key, value in row.extra.items() if key != "place"},
        )
        for row in read_examples(path)
    )


def _example_from_record(
    record: Any, keys: Mapping[str, str], source: str, needs_output: bool
) -> Example:
    """Returns the example of a row, its id empty where the row has none."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, got {shown(record, 40)}")

    def problem(key: str, must: str, value: Any) -> ValueError:
        got = "nothing" if value is None else shown(value, 40)
        return ValueError(f"{key!r} must {must}, got {got}")

    texts: dict[str, Any] = {"input": "", "id": "", "source": source} | (
        {} if needs_output else {"output": ""}
    )
    for name in ("instruction", "input", "output", "id", "source"):
        value = record.get(keys[name]) if name in keys else None
        if name == "id" and type(value) is int:
            value = str(value)
        value = texts.get(name) if value is None else value
        if not isinstance(value, str):
            raise problem(keys[name], "be text", value)
        texts[name] = value
        if name == "instruction" and not value.strip():
            raise problem(keys[name], "hold text", value)
    is_target = record.get(keys["is_target"]) if "is_target" in keys else None
    if not isinstance(is_target, bool | None):
        raise problem(keys["is_target"], "be true, false or null", is_target)
    taken = set(keys.values())
    extra = {k: value for k, value in record.items() if k not in taken and value is not None}
    for key in _CHAT_KEYS:
        value = extra.pop(key, "")
        if value.strip() if isinstance(value, str) else value != []:
            mend = "no template renders it, put it into the instruction"
            raise ValueError(f"{problem(key, 'be empty', value)}: {mend}")
    _check_texts([*texts.values(), extra])
    return Example(texts.pop("id").strip(), is_target=is_target, extra=extra, **texts)


def _check_texts(value: Any, depth: int = 0) -> None:
    """Raises a ValueError where a text, however deep, is none that UTF-8 and C can hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a row must not be nested deeper than {_MAX_DEPTH} levels, got more")
    if isinstance(value, str) and (bad := _BAD_TEXT.search(value)):
        raise ValueError(f"a text must have whole characters other than NUL, got {bad[0]!r}")
    if isinstance(value, Mapping):
        _check_texts([*value.keys(), *value.values()], depth)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, depth + 1)


def placed_records(source: str | os.PathLike[str]) -> tuple[str, Iterator[tuple[int, Any]]]:
    """Returns what stands between a source and a place in it, and the rows with their places.

    That is ":" for a file of lines and ", row " for any other. A place counts from 1, blank lines
    too; a line that is no JSON is the ValueError that says so. Sources are as in `read_examples`.
    """
    if str(source).startswith("hub:"):
        return ", row ", enumerate(_hub_rows(str(source)), start=1)
    text = _read_text(pathlib.Path(source))
    if text.lstrip().startswith("["):
        origin = shown(str(source), 160).strip("'\"")
        return ", row ", enumerate(files.parse_json(text, origin), start=1)

    def lines() -> Iterator[tuple[int, Any]]:
        # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    yield number, files.parse_json(line, "a row")
            except ValueError as error:
                yield number, error

    return ":", lines()


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
    name, config, split = asked.groups()
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
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
            is_missing = isinstance(error, ImportError)
            mend = "install raslik-jax[data]" if is_missing else "fetch it again"
            raise ValueError(
                f"{shown(str(path), 160)} cannot be unpacked ({shown(str(error))}): {mend}"
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


_STREAMS: dict[str, Callable[[], Any]] = {
    ".xz": lzma.LZMADecompressor,
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: importlib.import_module("zstandard").ZstdDecompressor().decompressobj(),
}
