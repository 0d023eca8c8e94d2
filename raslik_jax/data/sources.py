"""Rows of files and hub datasets with their places, as JSON has them."""

import importlib
import json
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raslik_jax import files
from raslik_jax.messages import one_line, shown

_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


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
