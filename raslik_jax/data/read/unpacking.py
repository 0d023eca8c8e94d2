"""The unpacked bytes of a file and their text, a part at a time."""

import codecs
import importlib
import itertools
import lzma
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raslik_jax.base import files
from raslik_jax.base.messages import shown

# A packed byte may become a thousand.
_CHUNK, _PACKED_CHUNK = 2**20, 2**14


def kind_of(path: pathlib.PurePath) -> str:
    """Returns the ending of a file's form without that of its packing."""
    return pathlib.PurePath(without_packing(path.name)).suffix.lower()


def without_packing(name: str) -> str:
    """Returns a file's name without the ending of its packing, if any."""
    return name.removesuffix(pathlib.PurePath(name).suffix) if is_packed(name) else name


def is_packed(name: str) -> bool:
    """Returns whether a file's name ends as those of packed files do."""
    return pathlib.PurePath(name).suffix.lower() in _STREAMS


def read_chunks(path: pathlib.Path) -> Iterator[str]:
    """Yields the text of a file in parts; refuses what is not UTF-8 by its line."""
    decoder, number, is_begin = codecs.getincrementaldecoder("utf-8")(), 1, True
    for chunk in itertools.chain(unpacked(path), (b"",)):
        if is_begin:
            check_head(path, chunk[:256])
            is_begin = False
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            number += error.object.count(b"\n", 0, error.start)
            raise files.not_utf8(path, number, error) from None
        number += chunk.count(b"\n")
        if text:
            yield text


def check_head(path: pathlib.Path, head: bytes) -> None:
    """Refuses a file that begins as another kind of file does."""
    name = shown(str(path), 160)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{name} must hold rows, got a pointer of Git LFS: run git lfs pull")
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        is_text = head[1::2].count(0) > len(head) // 3 or head[::2].count(0) > len(head) // 3
        mend = "convert it, as with iconv -f UTF-16 -t UTF-8" if is_text else "export its rows"
        got = "UTF-16" if is_text else "a binary file"
        must = "must be JSON, JSONL, CSV or TSV in UTF-8"
        raise ValueError(f"{name}:1 {must}, got {got}: {mend}")


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


_STREAMS: dict[str, Callable[[], Any]] = {
    ".xz": lzma.LZMADecompressor,
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: importlib.import_module("zstandard").ZstdDecompressor().decompressobj(),
}
