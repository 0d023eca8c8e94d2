"""A user's training file without some of its rows, as it was written."""

import csv
import io
import json
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from raslik_jax import files
from raslik_jax.data.read.sources import (
    delimiter_of,
    placed_records,
    read_parquet,
    read_raw,
    without_packing,
)
from raslik_jax.messages import shown, some_of


def write_without(source: str, target: pathlib.Path, places: Collection[int]) -> int:
    """Writes a training file without the rows at these places; returns how many are left.

    Places are those of `Example.place`. The lines of a JSONL file and the records of a table are
    copied byte for byte, a JSON list is written in its indentation, Parquet in its own schema;
    any other source, a hub dataset or a saved one, becomes JSONL with the keys that it has
    (`cleaned_name`). What was packed is written unpacked. A ValueError where the source has no row
    at a place.
    """
    path, raw = pathlib.Path(source), b""
    if path.suffix == ".parquet" and not source.startswith("hub:"):
        return _write_parquet(path, target, places)
    if not (source.startswith("hub:") or path.is_dir()):
        raw = read_raw(path)
    delimiter = delimiter_of(path) if raw else ""
    is_list = not delimiter and raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    head, parts = b"", list[tuple[int, bytes]]()
    if delimiter:
        head, *records = _table_records(raw, delimiter)
        parts = [*enumerate(records, start=1)]
    elif raw and not is_list:
        lines = enumerate(re.findall(rb"[^\n]*\n|[^\n]+", raw), start=1)
        parts = [(number if line.strip() else 0, line) for number, line in lines]
    else:
        rows = [
            # A list is written as it was below, whatever its texts are; a half of a pair is in it.
            (place, json.dumps(row, ensure_ascii=is_list, default=str))
            for place, row in placed_records(source)[1]
        ]
        parts = [(place, f"{row}\n".encode()) for place, row in rows]
    _check_places(source, {*places} - {place for place, _ in parts})
    kept = [part for place, part in parts if place not in places]
    content = _as_list(kept, raw) if is_list else head + b"".join(kept)
    with files.replacing(target) as partial:
        partial.write_bytes(content)
    return sum(place > 0 and place not in places for place, _ in parts)


def cleaned_name(source: str) -> str:
    """Returns a file name for a source without some of its rows, with the ending of its form."""
    if source.startswith("hub:"):
        named = source.removeprefix("hub:").split("@")[0].split(":")[0]
        return f"cleaned_{pathlib.Path(named).name}.jsonl"
    path = pathlib.Path(source)
    return "cleaned_" + (f"{path.name}.jsonl" if path.is_dir() else without_packing(path.name))


def _check_places(source: str, missing: Collection[int]) -> None:
    if missing:
        named = some_of(sorted(missing), quoted=False)
        raise ValueError(f"{shown(source, 120)} must have row {named}, it has changed: trace again")


def _write_parquet(path: pathlib.Path, target: pathlib.Path, places: Collection[int]) -> int:
    table = read_parquet(path, shown(str(path), 160))
    from pyarrow import parquet  # which is there, or the line above has said that it lacks

    _check_places(str(path), {*places} - {*range(1, table.num_rows + 1)})
    is_kept = [place not in places for place in range(1, table.num_rows + 1)]
    with files.replacing(target) as partial:
        parquet.write_table(table.filter(is_kept), partial)
    return sum(is_kept)


def _table_records(raw: bytes, delimiter: str) -> list[bytes]:
    """Returns the records of a table, each of one line or more; blank ones are left out."""
    lines = list(io.StringIO(raw.decode("utf-8", "surrogateescape"), newline=""))
    reader, start, records = csv.reader(lines, delimiter=delimiter), 0, list[bytes]()
    for record in reader:
        text = "".join(lines[start : reader.line_num])
        records += [text.encode("utf-8", "surrogateescape")] if record else []
        start = reader.line_num
    return records


def _as_list(rows: Sequence[bytes], raw: bytes) -> bytes:
    """Returns rows of JSON as one list, in the indentation that the file has."""
    indent = re.match(rb"\s*\[[ \t]*\r?\n([ \t]*)", raw.removeprefix(b"\xef\xbb\xbf"))
    style: dict[str, Any] = {
        "indent": indent[1].decode() if indent else None,
        # Letters are escaped where they were: \u after an even number of backslashes.
        "ensure_ascii": bool(re.search(rb"(?<!\\)(?:\\\\)*\\u", raw)),
    }
    text = json.dumps([json.loads(row) for row in rows], **style)
    return (text + ("\n" if raw.endswith(b"\n") else "")).encode()
