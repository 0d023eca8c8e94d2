"""The sketch index on disk: unit sketches, their norms, ids, and a manifest that guards them.

Layout of an index, local folder or `gs://`, `s3://` prefix alike:

    manifest.json      what the index is, what it was made from, and which ids are marked deleted;
                       written last at creation
    ids/<s>.json       ids of segment s (one per creation or append), in sketching order
    rows/ norms/ lengths/ scales/ sums/    zarr3 arrays, one file per chunk of whole rows
    center             what 1-bit rows had subtracted before their signs were taken
    commits/<i>.json   the commit record of chunk i, written after everything else of the chunk:
                       its checksums, and that of the manifest it was made for
    claims/            of running jobs only, see `raslik_jax.index.claims`

Codecs are `bytes` (little endian) and `crc32c`: no compression (a sketch is noise: zstd saves 22 %
and costs 20 times the read), no sharding. So a chunk file is the raw row block and four more bytes,
and a local reader maps it into memory; everything else goes through TensorStore.

Every segment begins with a new chunk: an append touches no old file. The price is that the last
chunk of a segment is padded with zero rows on disk.

Nothing in an index depends on time, process or order of work, so any number of interrupted or
concurrent runs end with the same bytes. No lock is held while a file is written: each write goes to
a name of its own and is renamed, so a process that is stopped in the middle holds up no other.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Float, Float32, Float64, Shaped

from raslik_jax.files import check_shape
from raslik_jax.index.quantize import (
    pack_signs,
    quantize_int8,
    rotate,
    rotated_size,
    unpack_signs,
    unrotate,
)
from raslik_jax.messages import shown, some_of

INDEX_FORMAT = 2
# How rows are stored, each with the NumPy dtype of its array. "int8" has a scale per row, "sign" is
# one bit a coordinate, eight of them a byte; both after the rotation of `quantize.rotate`.
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "sign": np.dtype(np.uint8),
}

# Chunk sums are integers in units of 2^-40: integer addition is associative, so the mean of a store
# is the same bits whatever the chunks, their order, or the path of appends and deletions.
_SUM_SCALE = float(2**40)
_LOW_BITS = 20
_UNIT_TOLERANCE = 1e-3
_CLEARING_ATTEMPTS = 5  # of claims that other jobs are dropping meanwhile
_OPEN_MAPS = 256  # each memory map holds a file descriptor; the usual limit is 1,024
# With locks, one stopped process would block all that write the same file, for ever.
_CONTEXT = ts.Context({"file_io_locking": {"mode": "none"}})
_UNFINISHED = ".__lock"  # how TensorStore's names of unfinished writes end
_MANIFEST = {
    "size": int,
    "dtype": str,
    "chunk_rows": int,
    "rotation_seed": (int, None),
    "center_sha256": (str, None),
    "identity": {str: object},
    "segments": [{"rows": int, "ids_sha256": str}],
    "deleted": [str],
}
_RECORD = {"chunk": int, "rows": int, "index": str, "checksums": {str: int}}


class Block(NamedTuple):
    """One chunk as a reader sees it: which rows, and their stored form.

    Attributes:
        positions: the rows' positions in `ids`.
        stored: the rows as stored, one per position; a read-only memory map for a local index.
    """

    positions: slice
    stored: Shaped[np.ndarray, "C _"]


class Damage(NamedTuple):
    """One damaged file of an index; `chunk` is None where it belongs to no chunk."""

    chunk: int | None
    file: str
    reason: str


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _sealed(record: Mapping[str, Any]) -> bytes:
    """The record as JSON with a checksum of itself, so that a flipped byte is noticed."""
    return _json_bytes({**record, "crc32": zlib.crc32(_json_bytes(record))})


def _unsealed(value: bytes, file: str) -> dict[str, Any]:
    try:
        record = json.loads(value)
        seal = record.pop("crc32")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} is damaged: it is no sealed JSON record.") from None
    # Bytes, not values: a flip inside white space is damage too.
    if zlib.crc32(_json_bytes(record)) != seal or value != _sealed(record):
        raise ValueError(f"{file} is damaged: its contents do not match its checksum.")
    return record


def _origins(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """For each segment the checksum of the manifest as it was when the segment came.

    Neither a later append nor a deletion changes it: it says for which index a chunk was made.
    """
    kept = {name: value for name, value in manifest.items() if name not in ("segments", "deleted")}
    segments = manifest["segments"]
    return tuple(
        hashlib.sha256(_json_bytes({**kept, "segments": segments[: n + 1]})).hexdigest()[:16]
        for n in range(len(segments))
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        fields: dict[str, Any] = {}
        for key, inner in value.items():
            fields |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        return fields
    return {prefix: value}


def _refuse_differences(path: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    stored, wanted = _flatten(stored), _flatten(wanted)
    differing = [
        f"{name} (index: {shown(stored.get(name, 'absent'), 24)}, "
        f"asked for: {shown(wanted.get(name, 'absent'), 24)})"
        for name in sorted(stored | wanted)
        if (name in stored) != (name in wanted) or stored[name] != wanted[name]
    ]
    if differing:
        raise ValueError(
            f"the index {path} was made for something else: {'; '.join(differing[:5])}: use the "
            "settings it was made with, or another path"
        )


def _fixed_point(rows_CK: np.ndarray) -> np.ndarray:
    """Rows as integers in units of 2^-40."""
    return np.rint(rows_CK.astype(np.float64) * _SUM_SCALE).astype(np.int64)


def _fixed_point_sum(rows_CK: np.ndarray) -> np.ndarray:
    total_K = np.zeros(rows_CK.shape[1], np.int64)
    for start in range(0, len(rows_CK), 16):  # a few rows at a time stay in the cache
        total_K += _fixed_point(rows_CK[start : start + 16]).sum(axis=0)
    return total_K


def _row_lengths(rows_CK: np.ndarray) -> np.ndarray:
    lengths_C = np.empty(len(rows_CK), np.float64)
    for start in range(0, len(rows_CK), 16):
        part = rows_CK[start : start + 16].astype(np.float64)
        lengths_C[start : start + 16] = np.sqrt(np.einsum("ck,ck->c", part, part))
    return lengths_C


def _from_int8(values_CW: np.ndarray, scale_C: np.ndarray) -> np.ndarray:
    return values_CW.astype(np.float32) * scale_C[:, None]


class SketchStore:
    """An index of N unit sketches of size K, in sketching order.

    Made by `SketchStore.create` (which also resumes) or `SketchStore.open`.

    Example:
        store = SketchStore.create(path, identity={"model": "..."}, ids=ids, size=4096)
        for chunk in store.missing_chunks():
            store.write_chunk(chunk, *sketch(store.chunk_ids(chunk)))
    """

    def __init__(self, path: str, manifest: Mapping[str, Any], ids: tuple[str, ...]):
        """Use `create` or `open`."""
        self._path = path
        self._local = None if "://" in path else Path(path)
        self._kv = _key_value_store(path)
        self._maps: dict[int, np.ndarray] = {}
        self._arrays: dict[str, ts.TensorStore] = {}
        self._records: dict[int, dict[str, Any]] = {}  # commit records that were read and are ours
        self._checked: set[int] = set()  # chunks whose rows were held against their checksum
        self._use(manifest, ids)

    def _use(self, manifest: Mapping[str, Any], ids: tuple[str, ...]) -> None:
        self._manifest = manifest
        self._ids = ids
        spans: list[slice] = []
        segments: list[int] = []
        start = 0
        for number, segment in enumerate(manifest["segments"]):
            end = start + segment["rows"]
            spans += [
                slice(a, min(a + self.chunk_rows, end)) for a in range(start, end, self.chunk_rows)
            ]
            segments += [number] * (len(spans) - len(segments))
            start = end
        self._spans = tuple(spans)
        self._segments = tuple(segments)  # of each chunk
        self._origins = _origins(manifest)
        self._arrays.clear()  # their shapes may have grown
        self._forget_cached()

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        *,
        identity: Mapping[str, Any],
        ids: Sequence[str],
        size: int,
        dtype: str = "float32",
        chunk_rows: int = 512,
        rotation_seed: int = 0,
        center_K: Float64[np.ndarray, " K"] | None = None,
    ) -> "SketchStore":
        """Returns the index at `path`, made if it is not there, opened if it is the same one.

        Resuming is calling this again with the same arguments. Safe to call from many processes
        at once.

        Args:
            path: a local folder, or a prefix that TensorStore knows (`gs://...`, `s3://...`).
            identity: JSON values that say what the rows were made from: hashes of base weights,
                adapter, tokenizer and template, loss, normalization, projection, ...
            ids: one id per row, in sketching order, all different.
            size: K, coordinates of a sketch.
            dtype: a key of `DTYPES`.
            chunk_rows: rows of one chunk: what one commit, one claim and one kill are worth.
            rotation_seed: key of the sign flips before int8 or sign quantization.
            center_K: for `sign` only: the mean to subtract before the signs are taken, which makes
                this an index of centered cosines. Centering cannot come after the sign.

        Raises:
            ValueError: an argument is not usable, the index at `path` was made with others, or
                `path` holds files that are no index.
        """
        path = _clean_path(path)
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"An index needs one or more ids that all differ, and got {len(ids)} of which "
                f"{len(set(ids))} differ; make them unique."
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, not {dtype!r}.")
        if size < 1 or not 1 <= chunk_rows <= 2**20:
            raise ValueError(
                f"size must be at least 1 and chunk_rows 1 to 2^20, not {size=}, {chunk_rows=}."
            )
        if center_K is not None and (dtype != "sign" or center_K.shape != (size,)):
            raise ValueError(
                f"center_K of shape {(size,)} is for dtype 'sign', not {dtype!r} and shape "
                f"{center_K.shape}; other rows are centered when they are scored."
            )
        if dtype == "int8" and rotated_size(size) > 2**17:
            raise ValueError(
                f"int8 rows take a size up to 131,072, where sums of 8-bit products still fit 32 "
                f"bits, not {size=}; use bfloat16."
            )
        settings = {
            "index_format": INDEX_FORMAT,
            "size": size,
            "dtype": dtype,
            "chunk_rows": chunk_rows,
            "rotation_seed": rotation_seed if dtype in ("int8", "sign") else None,
            "center_sha256": None if center_K is None else _center_hash(center_K),
            "identity": _as_json(identity),
        }
        kv = _key_value_store(path)
        if not kv.read("manifest.json").result().state == "value":
            segment, ids_bytes = _make_segment(ids)
            manifest = {**settings, "segments": [segment], "deleted": []}
            store = cls(path, manifest, tuple(ids))
            files = {"ids/0.json": ids_bytes}
            if center_K is not None:
                files["center"] = center_K.astype("<f8").tobytes()
            store._refuse_foreign_files(files | store._metadata())
            for file, value in files.items():
                store._put_bytes(file, value)
            store._put_metadata()
            # Absent when looked for; should another job have made it since, its word stands.
            absent = kv.read("manifest.json").result().stamp.generation
            store._put_bytes("manifest.json", _sealed(manifest), if_equal=absent)
        store = cls.open(path)
        stored = {name: store._manifest[name] for name in settings}
        _refuse_differences(path, stored, settings)
        if store.ids != tuple(ids):
            raise ValueError(_ids_differ(path, store.ids, tuple(ids)))
        return store

    @classmethod
    def open(
        cls, path: str | os.PathLike, *, identity: Mapping[str, Any] | None = None
    ) -> "SketchStore":
        """Returns the index at `path`; refuses it when `identity` is given and differs anywhere.

        Raises:
            ValueError: no index is there, it is damaged, its format is not ours, or a field of
                its identity differs (each differing field is named with both values).
        """
        path = _clean_path(path)
        kv = _key_value_store(path)
        local = Path(path, "manifest.json")
        if (
            "://" not in path and os.path.lexists(local) and not local.is_file()
        ):  # a FIFO never ends
            raise ValueError(f"{path}/manifest.json must be a regular file: correct the path")
        read = kv.read("manifest.json").result()
        if read.state != "value":
            raise ValueError(f"{path} must be an index, it has no manifest.json: correct the path")
        manifest = _unsealed(read.value, f"{path}/manifest.json")
        if manifest.get("index_format") != INDEX_FORMAT:
            raise ValueError(
                f"the index {path} was made by another version (index_format "
                f"{shown(manifest.get('index_format'))}, this version reads {INDEX_FORMAT}): "
                "sketch again"
            )
        check_shape(manifest, _MANIFEST, f"{path}/manifest.json")
        if identity is not None:
            _refuse_differences(path, manifest["identity"], _as_json(identity))
        ids: list[str] = []
        for number, segment in enumerate(manifest["segments"]):
            value = kv.read(f"ids/{number}.json").result().value
            if hashlib.sha256(value).hexdigest() != segment["ids_sha256"]:
                raise ValueError(
                    f"{path}/ids/{number}.json is damaged: its contents do not match the manifest."
                )
            ids += json.loads(value)
        return cls(path, manifest, tuple(ids))

    # ------------------------------------------------------------------ what it is

    @property
    def path(self) -> str:
        """Where the index is."""
        return self._path

    @property
    def index_format(self) -> int:
        """The format's number."""
        return self._manifest["index_format"]

    @property
    def identity(self) -> dict[str, Any]:
        """What the rows were made from."""
        return json.loads(json.dumps(self._manifest["identity"]))

    @property
    def size(self) -> int:
        """K, coordinates of a sketch."""
        return self._manifest["size"]

    @property
    def dtype(self) -> str:
        """How rows are stored: a key of `DTYPES`."""
        return self._manifest["dtype"]

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk."""
        return self._manifest["chunk_rows"]

    @property
    def is_rotated(self) -> bool:
        """Whether rows are stored after the rotation of `quantize.rotate`."""
        return self.dtype in ("int8", "sign")

    @property
    def rotation_seed(self) -> int:
        """Key of the rotation."""
        return self._manifest["rotation_seed"]

    @functools.cached_property
    def center_K(self) -> Float64[np.ndarray, " K"] | None:
        """What was subtracted from the rows before their signs were taken, if anything."""
        wanted = self._manifest["center_sha256"]
        if wanted is None:
            return None
        value = self._kv.read("center").result().value
        if hashlib.sha256(value).hexdigest() != wanted:
            raise ValueError(
                f"{self._path}/center is damaged: its contents do not match the manifest."
            )
        return np.frombuffer(value, "<f8")

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all rows in sketching order, deleted ones included."""
        return self._ids

    @property
    def num_rows(self) -> int:
        """N, deleted rows included."""
        return len(self._ids)

    @property
    def num_chunks(self) -> int:
        """Chunks, written or not."""
        return len(self._spans)

    def chunk_positions(self, chunk: int) -> slice:
        """Returns which positions of `ids` a chunk holds."""
        return self._spans[chunk]

    def chunk_ids(self, chunk: int) -> tuple[str, ...]:
        """Returns the ids of a chunk's rows, in order."""
        return self._ids[self._spans[chunk]]

    def chunk_origin(self, chunk: int) -> str:
        """Returns the checksum of the manifest that a chunk is made for."""
        return self._origins[self._segments[chunk]]

    @property
    def deleted_ids(self) -> frozenset[str]:
        """Ids marked deleted."""
        return frozenset(self._manifest["deleted"])

    @functools.cached_property
    def is_live_N(self) -> Bool[np.ndarray, " N"]:
        """Which rows are not deleted."""
        deleted = self.deleted_ids
        return np.array([example_id not in deleted for example_id in self._ids], bool)

    @functools.cached_property
    def is_eligible_N(self) -> Bool[np.ndarray, " N"]:
        """Which rows can be found: not deleted, and of a gradient that is not zero."""
        return self.is_live_N & (self.lengths > 0)

    # ------------------------------------------------------------------ writing

    def missing_chunks(self) -> tuple[int, ...]:
        """Returns the chunks without a commit record of this index, ascending: what is to do."""
        there = self._committed_chunks()
        self._records = {chunk: self._records[chunk] for chunk in there & self._records.keys()}
        unread = {
            chunk: self._kv.read(f"commits/{chunk}.json") for chunk in there - self._records.keys()
        }
        for chunk, read in unread.items():
            with contextlib.suppress(ValueError):  # damaged or of another index: to be made again
                self._records[chunk] = self._own_record(chunk, read.result().value)
        return tuple(chunk for chunk in range(self.num_chunks) if chunk not in self._records)

    def _committed_chunks(self) -> set[int]:
        """Chunks that have a commit record, whosever it is."""
        keys = self._kv.list(ts.KvStore.KeyRange("commits/", "commits0")).result()
        names = {key.decode() for key in keys}
        return {chunk for chunk in range(self.num_chunks) if f"commits/{chunk}.json" in names}

    def _own_record(self, chunk: int, value: bytes) -> dict[str, Any]:
        """The commit record of a chunk; ValueError where it is damaged or not of this index."""
        file = f"{self._path}/commits/{chunk}.json"
        record = _unsealed(value, file)
        check_shape(record, _RECORD, file)
        span = self._spans[chunk]
        if (record["chunk"], record["rows"]) != (chunk, span.stop - span.start):
            raise ValueError(f"{file} is of another chunk")
        if record["index"] != self.chunk_origin(chunk):
            raise ValueError(f"{file} is of an index of other settings or rows")
        return record

    def require_current(self, chunk: int) -> None:
        """Raises a ValueError where the index on disk is not the one that was opened."""
        read = self._kv.read("manifest.json").result()
        if read.state == "value":
            manifest = _unsealed(read.value, f"{self._path}/manifest.json")
            origins, segment = _origins(manifest), self._segments[chunk]
            if origins[segment : segment + 1] == (self.chunk_origin(chunk),):
                return
        raise ValueError(
            f"the index {self._path} was replaced or removed while this process worked on it: "
            "nothing more is written; start again to work on the new one"
        )

    def write_chunk(
        self, chunk: int, rows_CK: Float[np.ndarray, "C K"], norms_C: Float[np.ndarray, " C"]
    ) -> None:
        """Writes and commits one chunk; a kill at any moment leaves it whole or missing.

        Every file appears by an atomic rename after fsync, the commit record last. Writing a
        chunk again is allowed: with the same rows nothing changes, not even for a moment.

        Args:
            chunk: which one.
            rows_CK: the unit sketches of `chunk_ids(chunk)`, in order; a zero gradient's is zero.
            norms_C: each sketch's norm before it was made a unit vector.

        Raises:
            ValueError: wrong shape, a value that is not finite, or a row that is no unit vector;
                the index on disk was replaced by one of other settings meanwhile.
            OSError: the disk is full or the write failed. The chunk is still missing then, and can
                be written when there is space.
        """
        span = self._spans[chunk]
        count = span.stop - span.start
        if rows_CK.shape != (count, self.size) or norms_C.shape != (count,):
            raise ValueError(
                f"Chunk {chunk} of {self._path} takes rows of shape {(count, self.size)} and as "
                f"many norms, and got {rows_CK.shape} and {norms_C.shape}."
            )
        rows_CK = np.ascontiguousarray(rows_CK, np.float32)
        lengths_C = _row_lengths(rows_CK)
        wanted_C = np.where(norms_C > 0, 1.0, 0.0)
        is_wrong_C = ~(np.abs(lengths_C - wanted_C) <= _UNIT_TOLERANCE) | ~np.isfinite(norms_C)
        if is_wrong_C.any():
            first = int(np.argmax(is_wrong_C))
            raise ValueError(
                f"{int(is_wrong_C.sum())} rows of chunk {chunk} of {self._path} are neither unit "
                "vectors with a positive norm nor zero with norm 0; the first is "
                f"{self._ids[span.start + first]!r} of length {lengths_C[first]} and norm "
                f"{norms_C[first]}. Check the gradients for values that are not finite."
            )
        arrays = self._encode(rows_CK, np.asarray(norms_C, np.float32))
        record = self._commit_record(chunk, arrays)
        key = f"commits/{chunk}.json"
        self.require_current(chunk)
        existing = self._kv.read(key).result()
        if existing.state == "value" and existing.value != record:
            self._delete_key(key)  # other bytes than before: missing until all of them are there
        self._forget_cached(chunk)
        try:
            if not self._arrays:
                self._put_metadata()
            for name, values in arrays.items():
                self._put_array(name, chunk, values)
            self.require_current(chunk)
            self._put_bytes(key, record)
        except OSError:
            # Where another process made the same chunk and finished the index, it has cleared away
            # the files that this one was writing: the chunk is there, and that is all that counts.
            if self._kv.read(key).result().value != record:
                raise

    def append(self, ids: Sequence[str]) -> tuple[int, ...]:
        """Returns the new chunks that now wait for rows of `ids`; old chunks are not touched.

        Raises:
            ValueError: an id is in the index already (deleted or not), or twice in `ids`.
        """
        self._refuse_centered("append to")
        known = set(self._ids)
        clashing = [i for i in ids if i in known]
        if clashing or not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"Appending to {self._path} takes new ids that all differ, and got {len(ids)} of "
                f"which {len(set(ids))} differ and {len(clashing)} are in the index already "
                f"{clashing[:5]}; leave those out."
            )
        old_chunks = self.num_chunks
        segment, ids_bytes = _make_segment(ids)
        segments = self._manifest["segments"]
        self._refuse_changed()
        self._put_bytes(f"ids/{len(segments)}.json", ids_bytes)
        manifest = {**self._manifest, "segments": [*segments, segment]}
        self._put_bytes("manifest.json", _sealed(manifest))
        self._use(manifest, (*self._ids, *ids))
        self._put_metadata()  # derived from the manifest: after a kill here the next writer does it
        return tuple(range(old_chunks, self.num_chunks))

    def delete(self, ids: Iterable[str]) -> None:
        """Marks rows deleted: they leave the mean and every search, their bytes stay.

        Raises:
            ValueError: an id is not in the index, or no row would be left.
        """
        self._refuse_centered("delete from")
        wanted = set(ids)
        unknown = sorted(wanted - set(self._ids))
        if unknown:
            raise ValueError(
                f"{len(unknown)} of the ids to delete are not in the index {self._path}: "
                f"{unknown[:5]}; nothing was deleted."
            )
        deleted = wanted | self.deleted_ids
        if len(deleted) == self.num_rows:
            raise ValueError(f"Deleting every row of {self._path} would leave no index.")
        self._refuse_changed()
        manifest = {**self._manifest, "deleted": sorted(deleted)}
        self._put_bytes("manifest.json", _sealed(manifest))
        self._use(manifest, self._ids)

    def _refuse_changed(self) -> None:
        """Raises a ValueError where another process has changed the manifest since it was read."""
        if self._kv.read("manifest.json").result().value != _sealed(self._manifest):
            raise ValueError(
                f"the index {self._path} was changed since it was opened: open it again"
            )

    # ------------------------------------------------------------------ reading

    def require_complete(self) -> None:
        """Raises a ValueError that says what is missing, where a chunk is."""
        missing = self.missing_chunks()
        if missing:
            raise ValueError(
                f"The index {self._path} lacks {len(missing)} of its {self.num_chunks} chunks "
                f"(first: {missing[0]}); finish sketching before reading it."
            )

    def blocks(self) -> Iterator[Block]:
        """Yields the chunks in order, each with its rows as stored.

        Raises:
            ValueError: a chunk is missing or damaged.
        """
        self.require_complete()
        for chunk, span in enumerate(self._spans):
            yield Block(span, self.stored_chunk(chunk)[: span.stop - span.start])

    def rows(self, positions: Sequence[int] | np.ndarray) -> Float32[np.ndarray, "M K"]:
        """Returns the rows at `positions` of `ids` as float32 sketches, rotated back if need be.

        Signs come back as unit vectors that share the signs, so only their direction means much.

        Raises:
            ValueError: their chunk is missing or damaged.
        """
        wanted_M = np.asarray(positions, np.int64)
        starts = np.array([span.start for span in self._spans])
        chunks_M = np.searchsorted(starts, wanted_M, side="right") - 1
        rows_MK = np.empty((len(wanted_M), self.size), np.float32)
        for chunk in np.unique(chunks_M):
            here = np.flatnonzero(chunks_M == chunk)
            rows_M = self._decode_stored(int(chunk), wanted_M[here] - starts[chunk])
            if self.is_rotated:
                rows_M = unrotate(rows_M, size=self.size, seed=self.rotation_seed)
            rows_MK[here] = rows_M
        return rows_MK

    def stored_chunk(self, chunk: int) -> Shaped[np.ndarray, "C _"]:
        """Returns a chunk as stored, with the zero rows that pad it to `chunk_rows`.

        A local chunk is memory-mapped, and held against the checksum of its commit record when this
        object reads it for the first time; one in a cloud store is read and checked each time.

        Raises:
            ValueError: the chunk is missing or damaged.
        """
        if self._local is None:
            return self._checked_array("rows", chunk)
        if chunk in self._maps:
            return self._maps[chunk]
        shape, dtype = self._array_layout("rows")
        name = self._chunk_file("rows", chunk)
        file = self._local / name
        expected = int(np.prod(shape)) * dtype.itemsize + 4
        actual = file.stat().st_size if file.exists() else None
        if actual != expected:
            raise self._damaged(name, f"it must have {expected} bytes, it has {actual}")
        mapped = np.memmap(file, dtype, mode="r", shape=shape)
        if chunk not in self._checked:
            self._check_array("rows", chunk, mapped)
            self._checked.add(chunk)
        if len(self._maps) < _OPEN_MAPS:
            self._maps[chunk] = mapped
        return mapped

    def _checked_array(self, name: str, chunk: int) -> np.ndarray:
        """One chunk of an array, held against the checksum of its commit record."""
        values = self._read_array(name, chunk)
        self._check_array(name, chunk, values)
        return values

    def _check_array(self, name: str, chunk: int, values: np.ndarray) -> None:
        if chunk not in self._records:
            value = self._kv.read(f"commits/{chunk}.json").result().value
            self._records[chunk] = self._own_record(chunk, value)
        if self._records[chunk]["checksums"].get(name) != _checksum(values):
            reason = "its content does not match its checksum"
            raise self._damaged(self._chunk_file(name, chunk), reason)

    def _damaged(self, file: str, reason: str) -> ValueError:
        return ValueError(
            f"{self._path}/{file} is damaged: {reason}; have the chunk made again "
            f"(experiments/index.py --index={self._path} --repair)"
        )

    @functools.cached_property
    def norms(self) -> Float32[np.ndarray, " N"]:
        """Norm of each sketch before normalization."""
        return self._column("norms")

    @functools.cached_property
    def lengths(self) -> Float32[np.ndarray, " N"]:
        """Length of each row as stored: 1 but for rounding, 0 for a zero gradient."""
        return self._column("lengths")

    @functools.cached_property
    def scales(self) -> Float32[np.ndarray, " N"]:
        """Scale of each int8 row."""
        return self._column("scales")

    @functools.cached_property
    def mean_K(self) -> Float64[np.ndarray, " K"]:
        """Mean of the live rows as stored, rounded once.

        A function of the set of live rows alone: appends and deletions lead to the very bits
        that an index made of the remaining rows would give (chunk sums are kept as integers).

        Raises:
            ValueError: a chunk is missing, or the rows are signs, which have no mean.
        """
        if self.dtype == "sign":
            raise ValueError(
                f"The index {self._path} holds 1-bit rows, which have no mean; take that of the "
                "finer index they were made from (center_K, when they are centered)."
            )
        self.require_complete()
        live = int(self.is_live_N.sum())
        high_K = np.zeros(self._stored_size, np.int64)
        low_K = np.zeros(self._stored_size, np.int64)
        mask = (1 << _LOW_BITS) - 1
        for chunk, span in enumerate(self._spans):
            total_K = self._checked_array("sums", chunk)[0]
            dead = np.flatnonzero(~self.is_live_N[span])
            if len(dead):
                total_K = total_K - _fixed_point_sum(self._decode_stored(chunk, dead))
            # Two words: one would overflow at 8 million rows that share a coordinate.
            high_K += total_K >> _LOW_BITS
            low_K += total_K & mask
        high_K += low_K >> _LOW_BITS
        total = high_K.astype(np.float64) * 2.0**_LOW_BITS + (low_K & mask).astype(np.float64)
        mean = total / _SUM_SCALE / live
        if not self.is_rotated:
            return mean
        return unrotate(mean[None], size=self.size, seed=self.rotation_seed)[0]

    # ------------------------------------------------------------------ looking after it

    def verify(self) -> tuple[Damage, ...]:
        """Returns what is damaged, after reading everything and checking every checksum.

        Missing chunks are no damage. To have damaged chunks made again: `discard` them, then write
        what `missing_chunks` names.
        """
        damages: list[Damage] = []
        for file, value in self._metadata().items():
            read = self._kv.read(file).result()
            if read.state != "value" or read.value != value:
                damages.append(Damage(None, file, "differs from what the manifest says"))
        wanted = self._manifest["center_sha256"]
        if wanted and hashlib.sha256(self._kv.read("center").result().value).hexdigest() != wanted:
            damages.append(Damage(None, "center", "differs from what the manifest says"))
        for chunk in sorted(self._committed_chunks()):
            damages += self._verify_chunk(chunk)
        return tuple(damages)

    def discard(self, chunks: Iterable[int]) -> None:
        """Drops the commit records of `chunks`, which makes them missing."""
        for chunk in chunks:
            self._delete_key(f"commits/{chunk}.json")
            self._forget_cached(chunk)

    def finish(self) -> None:
        """Clears away what killed or waiting jobs left; to be called when no chunk is missing.

        Raises:
            ValueError: a chunk is missing.
        """
        self.require_complete()
        self._put_metadata()
        self._clear_claims()
        if self._local is not None:
            # Of killed processes, or of one whose chunk another made: `write_chunk` copes.
            # Not rglob, which fails where another finishing job removes a folder under its feet.
            for folder, _, names in os.walk(self._local):
                for name in names:
                    if name.endswith(_UNFINISHED):
                        Path(folder, name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a slow job may be looking at its claim
                (self._local / "claims").rmdir()

    def _clear_claims(self) -> None:
        """Deletes all claims; others may be finishing, and dropping theirs, at the same time."""
        for attempt in range(_CLEARING_ATTEMPTS):
            try:
                with _explained(self._path, "claims"):
                    self._kv.delete_range(ts.KvStore.KeyRange("claims/", "claims0")).result()
                return
            except OSError:
                if attempt == _CLEARING_ATTEMPTS - 1:
                    raise

    # ------------------------------------------------------------------ claims, for claims.py

    def read_claim(self, chunk: int) -> ts.KvStore.ReadResult:
        """Returns the claim on a chunk: state `value` or `missing`, value, generation."""
        return self._kv.read(f"claims/{chunk}.json").result()

    def take_claim(self, chunk: int, value: bytes, seen: ts.KvStore.ReadResult) -> bytes | None:
        """Returns the generation of a claim in the place of what was seen, None if that is gone."""
        if self._local is None or seen.state == "value":
            return self.write_claim(chunk, value, seen.stamp.generation)
        # Exclusive creation: of many jobs that start at once one has the chunk, without a lock.
        path = self._local / "claims" / f"{chunk}.json"
        with _explained(self._path, f"claims/{chunk}.json"):
            path.parent.mkdir(exist_ok=True)
            try:
                with path.open("xb") as file:
                    file.write(value)
            except FileExistsError:
                return None
        return self.read_claim(chunk).stamp.generation

    def write_claim(self, chunk: int, value: bytes, generation: bytes | None) -> bytes | None:
        """Returns the generation written, or None when the claim was not of `generation`."""
        if self._is_gone():
            return None
        return self._put_bytes(f"claims/{chunk}.json", value, if_equal=generation) or None

    def drop_claim(self, chunk: int, generation: bytes | None = None) -> None:
        """Removes the claim on a chunk, if it is of `generation` where one is given."""
        if self._is_gone():
            return
        self._delete_key(f"claims/{chunk}.json", if_equal=generation)

    def _is_gone(self) -> bool:
        """Whether a local index was moved away: TensorStore would make its folders again."""
        return self._local is not None and not (self._local / "manifest.json").exists()

    # ------------------------------------------------------------------ layout

    @property
    def _stored_size(self) -> int:
        """Numbers a stored row stands for."""
        return rotated_size(self.size) if self.is_rotated else self.size

    def _array_layout(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of one chunk of an array."""
        width = self._stored_size // 8 if self.dtype == "sign" else self._stored_size
        return {
            "rows": ((self.chunk_rows, width), DTYPES[self.dtype]),
            "norms": ((self.chunk_rows,), np.dtype(np.float32)),
            "lengths": ((self.chunk_rows,), np.dtype(np.float32)),
            "scales": ((self.chunk_rows,), np.dtype(np.float32)),
            "sums": ((1, self._stored_size), np.dtype(np.int64)),
        }[name]

    @property
    def _array_names(self) -> tuple[str, ...]:
        scales = ("scales",) if self.dtype == "int8" else ()
        sums = () if self.dtype == "sign" else ("sums",)
        return ("rows", "norms", "lengths", *scales, *sums)

    def _metadata(self) -> dict[str, bytes]:
        """The zarr.json of every array: a function of the manifest."""
        files = {"zarr.json": _json_bytes({"zarr_format": 3, "node_type": "group"})}
        for name in self._array_names:
            shape, dtype = self._array_layout(name)
            codec: dict[str, Any] = {"name": "bytes"}
            if dtype.itemsize > 1:
                codec["configuration"] = {"endian": "little"}
            files[f"{name}/zarr.json"] = _json_bytes(
                {
                    "zarr_format": 3,
                    "node_type": "array",
                    "shape": [shape[0] * self.num_chunks, *shape[1:]],
                    "data_type": dtype.name,
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
                    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                    "fill_value": 0,
                    "codecs": [codec, {"name": "crc32c"}],
                }
            )
        return files

    def _encode(self, rows_CK: np.ndarray, norms_C: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of one chunk, padded to whole chunks."""
        arrays: dict[str, np.ndarray] = {"norms": norms_C}
        if self.dtype == "int8":
            values_CW, scale_C = quantize_int8(rotate(rows_CK, seed=self.rotation_seed))
            arrays |= {"rows": values_CW, "scales": scale_C}
            seen_CW = _from_int8(values_CW, scale_C)
        elif self.dtype == "sign":
            is_zero_C = norms_C == 0
            if self.center_K is not None:
                rows_CK = (rows_CK - self.center_K).astype(np.float32)
                rows_CK[is_zero_C] = 0  # a zero gradient has no direction, centered or not
            rotated_CW = rotate(rows_CK, seed=self.rotation_seed)
            arrays["rows"] = pack_signs(rotated_CW, seed=self.rotation_seed)
            seen_CW = np.where(is_zero_C, np.float32(0), np.float32(1))[:, None]
        else:
            arrays["rows"] = seen_CW = rows_CK.astype(DTYPES[self.dtype])
        arrays["lengths"] = _row_lengths(seen_CW).astype(np.float32)
        padded = {}
        for name in self._array_names:
            if name == "sums":
                padded[name] = _fixed_point_sum(seen_CW)[None]
                continue
            shape, dtype = self._array_layout(name)
            padded[name] = np.zeros(shape, dtype)
            padded[name][: len(arrays[name])] = arrays[name]
        return padded

    def _decode_stored(self, chunk: int, offsets: np.ndarray) -> np.ndarray:
        """Rows as float32, in the coordinates they are stored in."""
        stored = self.stored_chunk(chunk)[offsets]
        if self.dtype == "sign":
            return unpack_signs(stored)
        if self.dtype == "int8":
            return _from_int8(stored, self._checked_array("scales", chunk)[offsets])
        return stored.astype(np.float32)

    def _commit_record(self, chunk: int, arrays: Mapping[str, np.ndarray]) -> bytes:
        span = self._spans[chunk]
        return _sealed(
            {
                "chunk": chunk,
                "rows": span.stop - span.start,
                "index": self.chunk_origin(chunk),
                "checksums": {name: _checksum(values) for name, values in arrays.items()},
            }
        )

    def _verify_chunk(self, chunk: int) -> list[Damage]:
        damages = []
        record_file = f"commits/{chunk}.json"
        arrays: dict[str, np.ndarray] = {}
        for name in self._array_names:
            try:
                arrays[name] = self._read_array(name, chunk)
            except ValueError as error:
                damages.append(Damage(chunk, self._chunk_file(name, chunk), str(error)))
        try:
            record = self._own_record(chunk, self._kv.read(record_file).result().value)
        except ValueError as error:
            return [*damages, Damage(chunk, record_file, str(error))]
        for name, values in arrays.items():
            if record["checksums"].get(name) != _checksum(values):
                reason = "differs from the commit record's checksum"
                damages.append(Damage(chunk, self._chunk_file(name, chunk), reason))
        return damages

    # ------------------------------------------------------------------ files

    def _chunk_file(self, name: str, chunk: int) -> str:
        dimensions = len(self._array_layout(name)[0])
        return "/".join([name, "c", str(chunk), *["0"] * (dimensions - 1)])

    def _array(self, name: str) -> ts.TensorStore:
        if name not in self._arrays:
            spec = {
                "driver": "zarr3",
                "kvstore": _kvstore_spec(self._path, f"{name}/"),
                # zarr.json is for other readers; the manifest says the same and is checked.
                "metadata": json.loads(self._metadata()[f"{name}/zarr.json"]),
                "assume_metadata": True,
                "store_data_equal_to_fill_value": True,  # a chunk of zeros is a chunk all the same
            }
            self._arrays[name] = ts.open(spec, context=_CONTEXT).result()
        return self._arrays[name]

    def _read_array(self, name: str, chunk: int) -> np.ndarray:
        """One chunk through TensorStore; ValueError when it is absent or its checksum is wrong."""
        length = self._array_layout(name)[0][0]
        file = self._chunk_file(name, chunk)
        # An absent chunk would be read as zeros.
        try:
            if not len(self._kv.list(ts.KvStore.KeyRange(file, file + "\0")).result()):
                raise ValueError(f"{file} is not there")
            array = self._array(name)
            return array[chunk * length : (chunk + 1) * length].read().result()
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(f"{self._path}/{file} cannot be read: {error}") from None

    def _put_array(self, name: str, chunk: int, values: np.ndarray) -> None:
        length = len(values)
        with _explained(self._path, self._chunk_file(name, chunk)):
            array = self._array(name)
            array[chunk * length : (chunk + 1) * length].write(values).result()

    def _put_bytes(self, key: str, value: bytes, if_equal: bytes | None = None) -> bytes:
        """Writes a file whole or not at all; its generation, empty when `if_equal` was not met."""
        with _explained(self._path, key):
            return self._kv.write(key, value, if_equal=if_equal).result().generation

    def _delete_key(self, key: str, if_equal: bytes | None = None) -> None:
        with _explained(self._path, key):
            self._kv.write(key, None, if_equal=if_equal).result()

    def _refuse_foreign_files(self, own: Mapping[str, bytes]) -> None:
        """Raises a ValueError where the place of a new index holds anything but its own files.

        Its own are those that a creation that was killed, or is at work, has left.
        """
        keys = {key.decode() for key in self._kv.list().result()}
        if "manifest.json" in keys:  # another process was faster
            return
        foreign = [
            key
            for key in sorted(keys)
            if not key.endswith(_UNFINISHED)
            and (key not in own or self._kv.read(key).result().value != own[key])
        ]
        if foreign:
            raise ValueError(
                f"an index must have a new or empty folder, {self._path} has no manifest.json and "
                f"holds {some_of(foreign, 3)}: give another path, or delete what is there"
            )

    def _put_metadata(self) -> None:
        for file, value in self._metadata().items():
            read = self._kv.read(file).result()
            if read.state != "value" or read.value != value:
                self._put_bytes(file, value)

    def _column(self, name: str) -> np.ndarray:
        self.require_complete()
        return np.concatenate(
            [self._checked_array(name, i)[: s.stop - s.start] for i, s in enumerate(self._spans)]
        )

    def _refuse_centered(self, what: str) -> None:
        if self._manifest["center_sha256"] is not None:
            raise ValueError(
                f"One cannot {what} {self._path}: its bits are of centered rows, and the mean "
                f"would "
                "move; change the finer index and make this one from it again."
            )

    def _forget_cached(self, *chunks: int) -> None:
        """Forgets what was derived from the rows, and all that is known of these chunks."""
        self._maps.clear()
        for chunk in chunks:
            self._records.pop(chunk, None)
            self._checked.discard(chunk)
        for name in ("is_live_N", "is_eligible_N", "norms", "lengths", "scales", "mean_K"):
            self.__dict__.pop(name, None)


class _explained:
    """Turns a failed write into an OSError that says what happened and what to do."""

    def __init__(self, path: str, key: str):
        self._path, self._key = path, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, ValueError | OSError | RuntimeError):
            return
        full = "No space left" in str(error) or "quota" in str(error).lower()
        advice = "free some space" if full else "look at the cause"
        raise OSError(
            errno.ENOSPC if full else errno.EIO,
            f"{'No space left' if full else 'Failed'} writing {self._key} of the index "
            f"{self._path}: what was committed is safe; {advice} and start again ({error})",
        ) from None


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data)


def _clean_path(path: str | os.PathLike) -> str:
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else os.path.abspath(text)


def _kvstore_spec(path: str, prefix: str = "") -> Any:
    if "://" in path:
        return f"{path}/{prefix}"
    return {"driver": "file", "path": f"{path}/{prefix}"}


def _key_value_store(path: str) -> ts.KvStore:
    return ts.KvStore.open(_kvstore_spec(path), context=_CONTEXT).result()


def _center_hash(center_K: np.ndarray) -> str:
    return hashlib.sha256(center_K.astype("<f8").tobytes()).hexdigest()


def requantize(
    source: SketchStore,
    path: str | os.PathLike,
    *,
    dtype: str,
    is_centered: bool = False,
    chunk_rows: int | None = None,
    rotation_seed: int = 0,
) -> SketchStore:
    """Returns a coarser copy of a finished index; interrupted, it goes on where it stopped.

    Rows deleted from `source` are left out.

    Args:
        source: the finer index.
        path: of the copy.
        dtype: of the copy.
        is_centered: for `sign`: take the signs of row minus `source.mean_K`.
        chunk_rows: of the copy; by default that of `source`.
        rotation_seed: of the copy's rotation.
    """
    positions = np.flatnonzero(source.is_live_N)
    store = SketchStore.create(
        path,
        identity=source.identity,
        ids=[source.ids[i] for i in positions],
        size=source.size,
        dtype=dtype,
        chunk_rows=chunk_rows or source.chunk_rows,
        rotation_seed=rotation_seed,
        center_K=source.mean_K if is_centered else None,
    )
    for chunk in store.missing_chunks():
        wanted = positions[store.chunk_positions(chunk)]
        rows_CK, lengths_C = source.rows(wanted), source.lengths[wanted]
        # What was rounded once is a unit vector no longer; int8 and sign do not care, but the
        # store does.
        rows_CK /= np.where(lengths_C > 0, lengths_C, 1)[:, None]
        store.write_chunk(chunk, rows_CK, source.norms[wanted])
    store.finish()
    return store


def _make_segment(ids: Sequence[str]) -> tuple[dict[str, Any], bytes]:
    value = _json_bytes(list(ids))
    return {"rows": len(ids), "ids_sha256": hashlib.sha256(value).hexdigest()}, value


def _as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(identity), allow_nan=False))


def _ids_differ(path: str, stored: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    if len(stored) != len(wanted):
        what = f"it has {len(stored)} ids, and {len(wanted)} were given"
    else:
        first = next(i for i, (a, b) in enumerate(zip(stored, wanted, strict=True)) if a != b)
        what = f"its id {first} is {stored[first]!r}, and {wanted[first]!r} was given"
    return (
        f"The index {path} was made for other rows: {what}. "
        "Use append for new rows, or another path."
    )
