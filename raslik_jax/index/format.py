"""The format of an index on disk: its manifest, its seals and the layout of its files.

The files of its folder:

    manifest.json      the description of the index and its inputs; written last at creation
    ids.json           ids in sketching order
    rows/ norms/ lengths/ sums/    zarr3 arrays, one file per chunk of whole rows
    commits/<i>.json   the commit record of chunk i, written after everything else of the chunk:
                       its checksums, and that of the manifest it was made for

A chunk file is the raw row block, little endian. A reader maps it into memory. A sketch is
noise: zstd would save 22 % and take 20 times as long to read. The last chunk is padded with zero
rows. Nothing depends on time or process: interrupted runs end with the same bytes.
"""

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from raslik_jax.base.files import check_shape
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import flat

INDEX_FORMAT = 5
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MANIFEST, IDS = "manifest.json", "ids.json"
_SHAPE = {
    "size": int,
    "dtype": str,
    "chunk_rows": int,
    "identity": {str: object},
    "num_rows": int,
    "ids_sha256": str,
}
_RECORD = {"chunk": int, "rows": int, "index": str, "checksums": {str: int}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of an index, as `SketchStore.create` gives it."""

    size: int
    dtype: str
    chunk_rows: int
    identity: Mapping[str, Any]
    num_rows: int
    ids_sha256: str

    def settings(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        fields = dataclasses.fields(self)
        return {"index_format": INDEX_FORMAT} | {f.name: getattr(self, f.name) for f in fields}

    def seal(self) -> bytes:
        """Returns the content of the manifest's file."""
        return sealed(self.settings())

    @functools.cached_property
    def origin(self) -> str:
        """A hash of the manifest, which the commit record of each chunk repeats."""
        return sha256(json_bytes(self.settings()))[:16]

    @functools.cached_property
    def spans(self) -> tuple[slice, ...]:
        """The positions of each chunk, written or not."""
        starts = range(0, self.num_rows, self.chunk_rows)
        return tuple(slice(a, min(a + self.chunk_rows, self.num_rows)) for a in starts)

    @functools.cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of one chunk of every array."""
        column = ((self.chunk_rows,), np.dtype(np.float32))
        return {
            "rows": ((self.chunk_rows, self.size), DTYPES[self.dtype]),
            "norms": column,
            "lengths": column,
            "sums": ((1, self.size), np.dtype(np.int64)),
        }

    def chunk_file(self, array: str, chunk: int) -> str:
        """Returns the name of the file of a chunk of an array."""
        return f"{array}/c/{chunk}" + "/0" * (len(self.arrays[array][0]) - 1)

    def zarr_files(self) -> dict[str, bytes]:
        """Returns the zarr.json of every array, for other readers: a function of the manifest."""
        files = {"zarr.json": json_bytes({"zarr_format": 3, "node_type": "group"})}
        for name, (shape, dtype) in self.arrays.items():
            codec: dict[str, Any] = {"name": "bytes"}
            if dtype.itemsize > 1:
                codec["configuration"] = {"endian": "little"}
            files[f"{name}/zarr.json"] = json_bytes(
                {
                    "zarr_format": 3,
                    "node_type": "array",
                    "shape": [shape[0] * len(self.spans), *shape[1:]],
                    "data_type": dtype.name,
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
                    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                    "fill_value": 0,
                    "codecs": [codec],
                }
            )
        return files

    def seal_record(self, chunk: int, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Returns the commit record of a chunk with these arrays."""
        sums = {name: checksum(values) for name, values in arrays.items()}
        rows = self.spans[chunk].stop - self.spans[chunk].start
        return sealed({"chunk": chunk, "rows": rows, "index": self.origin, "checksums": sums})

    def read_record(self, chunk: int, value: bytes | None, path: str) -> dict[str, int]:
        """Returns the checksums of a commit record; a ValueError if it belongs to another chunk."""
        file = f"{path}/{record_file(chunk)}"
        record = unsealed(value or b"", file)
        check_shape(record, _RECORD, file)
        span = self.spans[chunk]
        if (record["chunk"], record["rows"]) != (chunk, span.stop - span.start):
            raise ValueError(f"{file} is of another chunk")
        if record["index"] != self.origin:
            raise ValueError(f"{file} is of an index of other settings or rows")
        return record["checksums"]


def record_file(chunk: int) -> str:
    """Returns the name of the file of a chunk's commit record."""
    return f"commits/{chunk}.json"


def read_manifest(value: bytes, path: str) -> Manifest:
    """Returns the manifest in a file of the index at `path`; refuses other formats and damage."""
    file = f"{path}/{MANIFEST}"
    record = unsealed(value, file)
    found = record.pop("index_format", None)
    if found != INDEX_FORMAT:
        raise ValueError(
            f"the index {path} was made by another version (index_format {shown(found)}, this "
            f"version reads {INDEX_FORMAT}): sketch again"
        )
    check_shape(record, _SHAPE, file)
    return Manifest(**record)


def check_settings(manifest: Manifest, ids: Sequence[str]) -> None:
    """Raises a ValueError if an index cannot have these settings."""
    size, dtype, rows = manifest.size, manifest.dtype, manifest.chunk_rows
    distinct = len(set(ids))
    for is_right, message in (
        (
            0 < distinct == len(ids),
            (f"ids must all differ, got {distinct} different ones of {len(ids)}"),
        ),
        (dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}"),
        (size >= 1, f"size must be at least 1, got {size}"),
        (1 <= rows <= 2**20, f"chunk_rows must be 1 to 2^20, got {rows}"),
    ):
        if not is_right:
            raise ValueError(f"an index cannot be made: {message}")


def refuse_differences(path: str, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the fields that differ from the requested index."""
    stored, given = flat(stored), flat(given)
    differing = [
        f"{name} (index: {shown(stored.get(name, 'absent'), 24)}, "
        f"asked for: {shown(given.get(name, 'absent'), 24)})"
        for name in sorted(stored | given)
        if (name in stored) != (name in given) or stored[name] != given[name]
    ]
    if differing:
        raise ValueError(
            f"the index {path} was made from something else: {'; '.join(differing[:5])}: use the "
            "settings that made it, or another path"
        )


def sha256(value: bytes) -> str:
    """Returns the SHA-256 of some bytes as hex digits."""
    return hashlib.sha256(value).hexdigest()


def json_bytes(value: Any) -> bytes:
    """Returns a value as canonical JSON."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def sealed(record: Mapping[str, Any]) -> bytes:
    """Returns the record as JSON with a checksum of itself that reveals a flipped byte."""
    return json_bytes({**record, "crc32": zlib.crc32(json_bytes(record))})


def unsealed(value: bytes, file: str) -> dict[str, Any]:
    """Returns a record that was sealed; a ValueError if a byte of it has changed."""
    try:
        record = json.loads(value)
        del record["crc32"]
        is_whole = value == sealed(record)  # bytes: a flip inside white space is damage too
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged: it is not a JSON record with its checksum") from None
    if not is_whole:
        raise ValueError(f"{file} is damaged: its content does not match its checksum")
    return record


def checksum(values: np.ndarray) -> int:
    """Returns the CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data)
