"""Rows of files and hub datasets with their places, as JSON has them."""

import csv
import importlib
import io
import json
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raslik_jax import files
from raslik_jax.messages import one_line, shown, some_of

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
csv.field_size_limit(2**31 - 1)
_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


def placed_records(source: str | os.PathLike[str]) -> tuple[str, Iterator[tuple[int, Any]]]:
    """Returns what stands between a source and a place in it, and the rows with their places.

    That is ":" for a file of lines and ", row " for any other. A place counts from 1, blank lines
    too; what is no row is the ValueError that says so. Sources are as in `formats.read_examples`.
    """
    path, origin = pathlib.Path(source), shown(str(source), 160).strip("'\"")
    if str(source).startswith("hub:"):
        return ", row ", enumerate(_hub_rows(str(source)), start=1)
    if path.is_dir():
        return ", row ", enumerate(_saved_rows(path, origin), start=1)
    if path.suffix == ".parquet":
        return ", row ", enumerate(map(_as_json, read_parquet(path, origin).to_pylist()), start=1)
    text = files.decode_text(read_raw(path), path)
    if not text.strip():
        raise ValueError(f"{shown(str(path), 160)} must hold at least one row, got an empty file")
    if delimiter := delimiter_of(path):
        return ", row ", enumerate(_table_rows(text, origin, delimiter), start=1)
    if text.lstrip().startswith("["):
        return ", row ", enumerate(files.parse_json(text, origin), start=1)
    return ":", _lines(text)


def _lines(text: str) -> Iterator[tuple[int, Any]]:
    """Yields the number of each line that is not blank, and its row."""
    # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                yield number, files.parse_json(line, "a row")
        except ValueError as error:
            yield number, error


def _table_rows(text: str, origin: str, delimiter: str) -> Iterator[Any]:
    """Yields the rows of a table as text, by the names in its header; an empty cell is null."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(rows)
        if len(set(header)) < len(header) or not all(name.strip() for name in header):
            raise ValueError(
                f"{origin} must begin with a header, a name for each column and each once, got "
                f"{some_of(header, 3)}: write one"
            )
        for row in rows:
            if row and len(row) != len(header):
                yield ValueError(f"a row must have {len(header)} cells, got {len(row)}")
            elif row:
                yield {name: cell or None for name, cell in zip(header, row, strict=True)}
    except csv.Error as error:
        raise ValueError(
            f"{origin} must be a table, line {rows.line_num} is not ({error}): write it again"
        ) from error


def read_parquet(path: pathlib.Path, origin: str) -> Any:
    """Returns the table of a Parquet file, without partitions by its folder."""
    with files.open_regular(path) as file:
        parquet = _import("pyarrow.parquet", origin)
        try:
            return parquet.read_table(file)
        except Exception as error:  # Arrow's errors are those of many classes
            raise ValueError(
                f"{origin} must be a whole Parquet file ({one_line(str(error), 100)}): fetch or "
                "write it again"
            ) from error


def _saved_rows(path: pathlib.Path, origin: str) -> Iterator[Any]:
    """Returns the rows of a folder that `save_to_disk` of datasets wrote, of splits the train."""
    if (path / "dataset_dict.json").is_file():
        path = path / "train"
    if not (path / "state.json").is_file():
        raise ValueError(
            f"{origin} must be a file, or a folder of datasets.save_to_disk with a split train, "
            "got another folder: name a file or the folder of a split"
        )
    datasets = _import("datasets", origin)
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:
        raise ValueError(
            f"{origin} cannot be read ({one_line(str(error), 100)}): save it again"
        ) from error
    return map(_as_json, rows)


def _import(name: str, origin: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{origin} needs the package {name.partition('.')[0]}: install raslik-jax[data] or "
            "give a JSON file"
        ) from error


def _as_json(row: Any) -> Any:
    """Returns a row in JSON's types: a date as its text, a NaN as null."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def _hub_rows(source: str) -> Iterator[Any]:
    asked = _HUB_SOURCE.fullmatch(source)
    if not asked:
        raise ValueError(
            f"a hub dataset must be like hub:OWNER/NAME[:CONFIG][@SPLIT], got {shown(source)}"
        )
    datasets = _import("datasets", shown(source))
    name, config, split = asked.groups()
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # a missing dataset or network shows in a dozen classes
        raise ValueError(
            f"the dataset {shown(source)} cannot be read ({one_line(str(error), 100)}): check "
            "name, config, split and network, or give a local file"
        ) from error
    yield from map(_as_json, rows)


def without_packing(name: str) -> str:
    """Returns a file's name without the ending that says how it is packed, if any."""
    return next((name.removesuffix(end) for end in _STREAMS if name.endswith(end)), name)


def delimiter_of(path: pathlib.Path) -> str:
    """Returns what parts the cells of a table in text, "" for a file of another kind."""
    return _DELIMITERS.get(pathlib.Path(without_packing(path.name)).suffix, "")


def read_raw(path: pathlib.Path) -> bytes:
    """Returns the bytes of a file, unpacked as its ending says."""
    raw = files.read_bytes(path)
    if path.suffix in _STREAMS:
        try:
            return _unpack(raw, _STREAMS[path.suffix])
        except Exception as error:  # each library has errors of its own
            is_missing = isinstance(error, ImportError)
            mend = "install raslik-jax[data]" if is_missing else "fetch it again"
            raise ValueError(
                f"{shown(str(path), 160)} cannot be unpacked ({shown(str(error))}): {mend}"
            ) from None
    return raw


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
