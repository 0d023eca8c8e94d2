"""The sketch index: unit sketches, their norms and ids, read and written chunk by chunk.

`raslik_jax.index.format` says what lies on disk, `raslik_jax.index.upkeep` verifies, repairs and
changes an index.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Shaped

from raslik_jax.index import rows as rows_lib
from raslik_jax.index.format import (
    MANIFEST,
    Manifest,
    center_bytes,
    check_settings,
    checksum,
    make_segment,
    read_manifest,
    refuse_differences,
    refuse_other_ids,
)
from raslik_jax.index.place import Place
from raslik_jax.messages import some_of

_CLEARING_ATTEMPTS = 5  # of claims that other jobs are dropping meanwhile
_OPEN_MAPS = 256  # each memory map holds a file descriptor; the usual limit is 1,024


class SketchStore:
    """An index of N unit sketches of size K, in sketching order.

    Made by `SketchStore.create` (which also resumes) or `SketchStore.open`.

    Example:
      store = SketchStore.create(path, identity={"model": "..."}, ids=ids, size=4096)
      for chunk in store.missing_chunks():
        store.write_chunk(chunk, *sketch(store.chunk_ids(chunk)))
    """

    def __init__(self, place: Place, manifest: Manifest, ids: tuple[str, ...]):
        """Use `create` or `open`."""
        self.place = place
        self.manifest = manifest
        self._ids = ids
        self._maps: dict[int, np.ndarray] = {}
        self._records: dict[int, dict[str, int]] = {}  # checksums of the chunks that are there
        self._checked: set[tuple[str, int]] = set()  # what was held against its checksum

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
          dtype: a key of `format.DTYPES`.
          chunk_rows: rows of one chunk: what one commit, one claim and one kill are worth.
          rotation_seed: key of the sign flips before int8 or sign quantization.
          center_K: for `sign` only: the mean to subtract before the signs are taken, which makes
            this an index of centered cosines. Centering cannot come after the sign.

        Raises:
          ValueError: an argument is not usable, the index at `path` was made with others, or
            `path` holds files that are no index.
        """
        place = Place(path)
        segment, ids_bytes = make_segment(ids)
        center = None if center_K is None else center_bytes(center_K)
        manifest = Manifest(
            size=size,
            dtype=dtype,
            chunk_rows=chunk_rows,
            rotation_seed=rotation_seed if dtype in ("int8", "sign") else None,
            center_sha256=None if center is None else hashlib.sha256(center).hexdigest(),
            identity=json.loads(json.dumps(dict(identity), allow_nan=False)),
            segments=(segment,),
        )
        check_settings(manifest, ids, center_K)
        found = place.look(MANIFEST)
        if found.value is None:
            files = {"ids/0.json": ids_bytes} | ({} if center is None else {"center": center})
            _refuse_foreign_files(place, files | manifest.zarr_files())
            for file, value in (files | manifest.zarr_files()).items():
                place.write(file, value)
            # Absent when looked for; should another job have made it since, its word stands.
            place.write(MANIFEST, manifest.seal(), if_equal=found.generation)
        store = cls.open(path)
        refuse_differences(place.path, store.manifest.settings(), manifest.settings())
        refuse_other_ids(place.path, store.ids, tuple(ids))
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
        place = Place(path)
        if place.local is not None:
            file = place.local / MANIFEST
            if os.path.lexists(file) and not file.is_file():  # a FIFO never ends
                raise ValueError(f"{file} must be a regular file: correct the path")
        value = place.read(MANIFEST)
        if value is None:
            raise ValueError(
                f"{place.path} must be an index, it has no manifest.json: correct the path"
            )
        manifest = read_manifest(value, place.path)
        if identity is not None:
            given = json.loads(json.dumps(dict(identity), allow_nan=False))
            refuse_differences(place.path, manifest.identity, given)
        ids: list[str] = []
        for number, segment in enumerate(manifest.segments):
            file_bytes = place.read(f"ids/{number}.json") or b""
            if hashlib.sha256(file_bytes).hexdigest() != segment.ids_sha256:
                raise ValueError(
                    f"{place.path}/ids/{number}.json is damaged: its content does not match the "
                    "manifest"
                )
            ids += json.loads(file_bytes)
        return cls(place, manifest, tuple(ids))

    # ------------------------------------------------------------------ what it is

    @property
    def path(self) -> str:
        """Where the index is."""
        return self.place.path

    @property
    def identity(self) -> dict[str, Any]:
        """What the rows were made from."""
        return json.loads(json.dumps(self.manifest.identity))

    @property
    def size(self) -> int:
        """K, coordinates of a sketch."""
        return self.manifest.size

    @property
    def dtype(self) -> str:
        """How rows are stored: a key of `format.DTYPES`."""
        return self.manifest.dtype

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk."""
        return self.manifest.chunk_rows

    @property
    def rotation_seed(self) -> int:
        """Key of the rotation; 0 where rows are not rotated."""
        return self.manifest.rotation_seed or 0

    @functools.cached_property
    def center_K(self) -> Float64[np.ndarray, " K"] | None:
        """What was subtracted from the rows before their signs were taken, if anything."""
        expected = self.manifest.center_sha256
        if expected is None:
            return None
        value = self.place.read("center") or b""
        if hashlib.sha256(value).hexdigest() != expected:
            raise ValueError(
                f"{self.path}/center is damaged: its content does not match the manifest"
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
        return len(self.manifest.chunks)

    def chunk_positions(self, chunk: int) -> slice:
        """Returns which positions of `ids` a chunk holds."""
        return self.manifest.chunks[chunk].span

    def chunk_ids(self, chunk: int) -> tuple[str, ...]:
        """Returns the ids of a chunk's rows, in order."""
        return self._ids[self.chunk_positions(chunk)]

    @functools.cached_property
    def is_live_N(self) -> Bool[np.ndarray, " N"]:
        """Which rows are not deleted."""
        deleted = frozenset(self.manifest.deleted)
        return np.array([example_id not in deleted for example_id in self._ids], bool)

    @functools.cached_property
    def is_eligible_N(self) -> Bool[np.ndarray, " N"]:
        """Which rows can be found: not deleted, and of a gradient that is not zero."""
        return self.is_live_N & (self.lengths > 0)

    # ------------------------------------------------------------------ writing

    def missing_chunks(self) -> tuple[int, ...]:
        """Returns the chunks without a commit record of this index, ascending: what is to do."""
        there = self.place.names("commits")
        committed = [i for i in range(self.num_chunks) if _record_file(i) in there]
        self._records = {i: self._records[i] for i in committed if i in self._records}
        unread = [i for i in committed if i not in self._records]
        values = self.place.read_many([_record_file(i) for i in unread])
        for chunk, value in zip(unread, values, strict=True):
            with contextlib.suppress(ValueError):  # damaged or of another index: to be made again
                self._records[chunk] = self.read_record(chunk, value)
        return tuple(i for i in range(self.num_chunks) if i not in self._records)

    def require_complete(self) -> None:
        """Raises a ValueError that says what is missing, where a chunk is."""
        missing = self.missing_chunks()
        if missing:
            raise ValueError(
                f"the index {self.path} must be complete, it lacks {len(missing)} of its "
                f"{self.num_chunks} chunks (first: {missing[0]}): finish sketching before reading "
                "it"
            )

    def require_current(self, chunk: int) -> None:
        """Raises a ValueError where the index on disk is not the one that was opened."""
        value = self.place.read(MANIFEST)
        chunks = () if value is None else read_manifest(value, self.path).chunks
        if chunks[chunk : chunk + 1] != (self.manifest.chunks[chunk],):
            raise ValueError(
                f"the index {self.path} was replaced or removed while this process worked on it: "
                "nothing more is written; start again to work on the new one"
            )

    def write_chunk(
        self, chunk: int, rows_CK: Float[np.ndarray, "C K"], norms_C: Float[np.ndarray, " C"]
    ) -> None:
        """Writes and commits one chunk; a kill at any moment leaves it whole or missing.

        The commit record is written last. Writing a chunk again is allowed: with the same rows
        nothing changes, not even for a moment.

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
        ids = self.chunk_ids(chunk)
        if rows_CK.shape != (len(ids), self.size) or norms_C.shape != (len(ids),):
            raise ValueError(
                f"chunk {chunk} of {self.path} must have rows of shape {(len(ids), self.size)} and "
                f"as many norms, got {rows_CK.shape} and {norms_C.shape}"
            )
        rows_CK = np.ascontiguousarray(rows_CK, np.float32)
        rows_lib.check_rows(rows_CK, norms_C, ids)
        arrays = rows_lib.encode_chunk(self.manifest, rows_CK, norms_C, self.center_K)
        record, record_file = self.manifest.seal_record(chunk, arrays), _record_file(chunk)
        self.require_current(chunk)
        if self.place.read(record_file) not in (None, record):
            self.place.delete(record_file)  # missing until all of the other bytes are there
        self.forget(chunk)
        try:
            for name, values in arrays.items():
                self.place.write(self.manifest.chunk_file(name, chunk), values.tobytes())
            self.require_current(chunk)
            self.place.write(record_file, record)
        except OSError:
            # Where another process made the same chunk and finished the index, it has cleared away
            # the files that this one was writing: the chunk is there, and that is all that counts.
            if self.place.read(record_file) != record:
                raise

    def finish(self) -> None:
        """Clears away what killed or waiting jobs left; to be called when no chunk is missing.

        Raises:
          ValueError: a chunk is missing.
        """
        self.require_complete()
        for file, value in self.manifest.zarr_files().items():
            if self.place.read(file) != value:
                self.place.write(file, value)
        # Others may be finishing, and dropping claims, at the same time.
        for attempt in range(_CLEARING_ATTEMPTS):
            try:
                self.place.delete_folder("claims")
                break
            except OSError:
                if attempt == _CLEARING_ATTEMPTS - 1:
                    raise
        self.place.clear_unfinished()

    def forget(self, chunk: int) -> None:
        """Forgets what was read of a chunk, and what was derived from all of them."""
        self._maps.pop(chunk, None)
        self._records.pop(chunk, None)
        self._checked -= {(name, chunk) for name in self.manifest.arrays}
        for name in ("is_eligible_N", "norms", "lengths", "scales", "mean_K"):
            self.__dict__.pop(name, None)

    # ------------------------------------------------------------------ reading

    def read_record(self, chunk: int, value: bytes | None) -> dict[str, int]:
        """Returns the checksums of a chunk; ValueError where the record is not of this chunk."""
        file = f"{self.path}/{_record_file(chunk)}"
        return self.manifest.read_record(chunk, value or b"", file)

    def read_array(self, name: str, chunk: int) -> np.ndarray:
        """Returns a chunk of an array, with the zeros that pad it to `chunk_rows`.

        It is held against the checksum of its commit record when this object reads it for the first
        time; one in a cloud store each time.

        Raises:
          ValueError: the chunk is missing or damaged.
        """
        file = self.manifest.chunk_file(name, chunk)
        if chunk not in self._records:
            self._records[chunk] = self.read_record(chunk, self.place.read(_record_file(chunk)))
        try:
            values = self.place.map(file, *self.manifest.arrays[name])
            if (name, chunk) not in self._checked:
                if self._records[chunk].get(name) != checksum(values):
                    raise ValueError("its content does not match its checksum")
                if self.place.local is not None:
                    self._checked.add((name, chunk))
        except ValueError as error:
            raise ValueError(
                f"{self.path}/{file} is damaged: {error}; have the chunk made again "
                f"(experiments/index.py --index={self.path} --repair)"
            ) from None
        return values

    def stored_chunk(self, chunk: int) -> Shaped[np.ndarray, "C _"]:
        """Returns a chunk's rows as stored, padded to `chunk_rows`; a local one is memory-mapped.

        Raises:
          ValueError: the chunk is missing or damaged.
        """
        if chunk in self._maps:
            return self._maps[chunk]
        stored = self.read_array("rows", chunk)
        if self.place.local is not None and len(self._maps) < _OPEN_MAPS:
            self._maps[chunk] = stored
        return stored

    def rows(self, positions: Sequence[int] | np.ndarray) -> Float32[np.ndarray, "M K"]:
        """Returns the rows at `positions` of `ids` as float32 sketches, rotated back if need be.

        Signs come back as unit vectors that share the signs, so only their direction means much.

        Raises:
          ValueError: their chunk is missing or damaged.
        """
        position_M = np.asarray(positions, np.int64)
        starts = np.array([chunk.span.start for chunk in self.manifest.chunks])
        chunks_M = np.searchsorted(starts, position_M, side="right") - 1
        rows_MK = np.empty((len(position_M), self.size), np.float32)
        for chunk in np.unique(chunks_M):
            here = np.flatnonzero(chunks_M == chunk)
            stored = self._decoded(int(chunk), position_M[here] - starts[chunk])
            rows_MK[here] = rows_lib.unrotated(self.manifest, stored)
        return rows_MK

    def _decoded(self, chunk: int, offsets: np.ndarray) -> np.ndarray:
        """Returns rows of a chunk as float32, in the coordinates they are stored in."""
        scales = "scales" if self.dtype == "int8" else "lengths"
        scale_C = self.read_array(scales, chunk)[offsets]
        return rows_lib.decode_rows(self.manifest, self.stored_chunk(chunk)[offsets], scale_C)

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

    def _column(self, name: str) -> np.ndarray:
        self.require_complete()
        return np.concatenate(
            [
                self.read_array(name, i)[: chunk.span.stop - chunk.span.start]
                for i, chunk in enumerate(self.manifest.chunks)
            ]
        )

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
                f"the index must have a mean, {self.path} holds 1-bit rows: take that of the finer "
                "index they were made from (center_K, when they are centered)"
            )
        self.require_complete()

        def live_sum(number: int, span: slice) -> np.ndarray:
            sum_W = self.read_array("sums", number)[0]
            dead = np.flatnonzero(~self.is_live_N[span])
            if not len(dead):
                return sum_W
            return sum_W - rows_lib.fixed_point_sum(self._decoded(number, dead))

        sums = (live_sum(i, chunk.span) for i, chunk in enumerate(self.manifest.chunks))
        count = int(self.is_live_N.sum())
        mean_W = rows_lib.mean_of_sums(sums, self.manifest.stored_size, count)
        return rows_lib.unrotated(self.manifest, mean_W[None])[0]


def _record_file(chunk: int) -> str:
    return f"commits/{chunk}.json"


def _refuse_foreign_files(place: Place, own: Mapping[str, bytes]) -> None:
    """Raises a ValueError where the place of a new index holds anything but its own files.

    Its own are those that a creation that was killed, or is at work, has left.
    """
    names = place.names()
    if MANIFEST in names:  # another process was faster
        return
    foreign = [n for n in sorted(names) if n not in own or place.read(n) != own[n]]
    if foreign:
        raise ValueError(
            f"an index must have a new or empty folder, {place.path} has no manifest.json and "
            f"holds {some_of(foreign, 3)}: give another path, or delete what is there"
        )
