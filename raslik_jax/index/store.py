"""The sketch index: unit sketches, norms and ids, read and written chunk by chunk.

`raslik_jax.index.format` has the layout on disk.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from raslik_jax.base.messages import some_of
from raslik_jax.index import rows as rows_lib
from raslik_jax.index.format import (
    IDS,
    MANIFEST,
    Manifest,
    check_settings,
    checksum,
    json_bytes,
    read_manifest,
    record_file,
    refuse_differences,
    sha256,
)
from raslik_jax.index.place import Place


class SketchStore:
    """An index of N unit sketches of size K, in sketching order.

    `SketchStore.create` makes or resumes one, and `SketchStore.open` opens a stored one. `ids`,
    `num_rows` and `num_chunks` include missing rows.

    Example:
      store = SketchStore.create(path, identity={"model": "..."}, ids=ids, size=4096)
      for chunk in store.missing_chunks():
        store.write_chunk(chunk, *sketch(store.ids[store.chunk_positions(chunk)]))
    """

    def __init__(self, place: Place, manifest: Manifest, ids: tuple[str, ...]):
        """Use `create` or `open`."""
        self.path, self.place, self.manifest, self.ids = place.path, place, manifest, ids
        self.identity: dict[str, Any] = dict(manifest.identity)
        self.size, self.dtype = manifest.size, manifest.dtype
        self.chunk_rows = manifest.chunk_rows
        self.num_rows, self.num_chunks = len(ids), len(manifest.spans)
        self._records: dict[int, dict[str, int]] = {}  # checksums of the chunks that are there
        self._checked: set[tuple[str, int]] = set()  # what was held against its checksum
        self._columns: dict[str, np.ndarray] = {}

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
    ) -> "SketchStore":
        """Returns the index at `path`: a new one, or the same one if it is there.

        To resume call this again with the same arguments. Many processes may call it at once.

        Args:
          path: its folder.
          identity: JSON values, mostly hashes, that identify the inputs of the rows.
          ids: one id per row, in sketching order, all different.
          size: K, coordinates of a sketch.
          dtype: a key of `format.DTYPES`.
          chunk_rows: rows of one chunk. A commit writes one chunk, and a kill loses one.
        """
        place = Place(path)
        files = {IDS: json_bytes(list(ids))}
        manifest = Manifest(
            size=size,
            dtype=dtype,
            chunk_rows=chunk_rows,
            identity=json.loads(json.dumps(dict(identity), allow_nan=False)),
            num_rows=len(ids),
            ids_sha256=sha256(files[IDS]),
        )
        check_settings(manifest, ids)
        found = place.look(MANIFEST)
        if found.value is None:
            files |= manifest.zarr_files()
            # The files of a killed or a running creation belong to this index.
            names = place.names()
            foreign = [n for n in sorted(names) if n not in files or place.read(n) != files[n]]
            if foreign and MANIFEST not in names:  # with one, another process was faster
                raise ValueError(
                    f"an index must have a new or empty folder, {place.path} has no "
                    f"manifest.json and holds {some_of(foreign, 3)}: give another path, or move "
                    "these files"
                )
            for file, value in files.items():
                place.write(file, value)
            # Absent at the look; the manifest of another job that made it since counts.
            place.write(MANIFEST, manifest.seal(), if_equal=found.generation)
        store = cls.open(path)
        refuse_differences(place.path, store.manifest.settings(), manifest.settings())
        return store

    @classmethod
    def open(cls, path: str | os.PathLike) -> "SketchStore":
        """Returns the index at `path`; refuses one that is damaged or of another format."""
        place = Place(path)
        file = place.folder / MANIFEST
        if os.path.lexists(file) and not file.is_file():  # a FIFO never ends
            raise ValueError(f"{file} must be a regular file: correct the path")
        value = place.read(MANIFEST)
        if value is None:
            raise ValueError(
                f"{place.path} must be an index, but has no manifest.json: correct the path"
            )
        manifest = read_manifest(value, place.path)
        ids = place.read(IDS) or b""
        if sha256(ids) != manifest.ids_sha256:
            raise ValueError(
                f"{place.path}/{IDS} is damaged: its content does not match the manifest"
            )
        return cls(place, manifest, tuple(json.loads(ids)))

    def chunk_positions(self, chunk: int) -> slice:
        """Returns which positions of `ids` a chunk holds."""
        return self.manifest.spans[chunk]

    def positions_of(self, ids: Iterable[str]) -> Int[np.ndarray, " M"]:
        """Returns the rows of examples by their ids, which must all be in the index."""
        place = {example_id: row for row, example_id in enumerate(self.ids)}
        return np.array([place[example_id] for example_id in ids], np.int64)

    @functools.cached_property
    def is_eligible_N(self) -> Bool[np.ndarray, " N"]:
        """Which rows can be found: those with a gradient that is not zero."""
        return self.column("lengths") > 0

    def missing_chunks(self) -> tuple[int, ...]:
        """Returns the chunks without a commit record of this index, ascending: the work left."""
        there = self.place.names("commits")
        committed = [i for i in range(self.num_chunks) if record_file(i) in there]
        self._records = {i: self._records[i] for i in committed if i in self._records}
        for chunk in (i for i in committed if i not in self._records):
            value = self.place.read(record_file(chunk))
            with contextlib.suppress(ValueError):  # damaged or of another index: to be made again
                self._records[chunk] = self.manifest.read_record(chunk, value, self.path)
        return tuple(i for i in range(self.num_chunks) if i not in self._records)

    def require_complete(self) -> None:
        """Raises a ValueError that names the missing chunks, if there are any."""
        missing = self.missing_chunks()
        if missing:
            raise ValueError(
                f"the index {self.path} must be complete, it lacks {len(missing)} of its "
                f"{self.num_chunks} chunks (first: {missing[0]}): finish sketching first"
            )

    def require_current(self) -> None:
        """Raises a ValueError if the index on disk is not the one that was opened."""
        if self.place.read(MANIFEST) != self.manifest.seal():
            raise ValueError(
                f"the index {self.path} was replaced or removed while this process worked on it: "
                "start again to work on the new one"
            )

    def write_chunk(
        self, chunk: int, rows_CK: Float[np.ndarray, "C K"], norms_C: Float[np.ndarray, " C"]
    ) -> None:
        """Writes and commits one chunk; a kill at any moment leaves it whole or missing.

        The commit record is written last. A chunk may be written again. The same rows change
        nothing. `norms_C` are the lengths of the rows before they became unit vectors, 0 for a zero
        row. After a failed write (OSError) the chunk is still missing.
        """
        ids = self.ids[self.chunk_positions(chunk)]
        if rows_CK.shape != (len(ids), self.size) or norms_C.shape != (len(ids),):
            raise ValueError(
                f"chunk {chunk} of {self.path} must have rows of shape {(len(ids), self.size)} and "
                f"as many norms, got {rows_CK.shape} and {norms_C.shape}"
            )
        rows_CK = np.ascontiguousarray(rows_CK, np.float32)
        rows_lib.check_rows(rows_CK, norms_C, ids)
        arrays = rows_lib.encode_chunk(self.manifest, rows_CK, norms_C)
        record, file = self.manifest.seal_record(chunk, arrays), record_file(chunk)
        self.require_current()
        if self.place.read(file) not in (None, record):
            self.place.write(file, None)  # missing until all of the other bytes are there
        self._forget(chunk)
        for name, values in arrays.items():
            self.place.write(self.manifest.chunk_file(name, chunk), values.tobytes())
        self.require_current()
        self.place.write(file, record)

    def finish(self) -> None:
        """Deletes the unfinished files of other jobs; refuses if a chunk is missing."""
        self.require_complete()
        self.place.clear_unfinished()

    def _forget(self, chunk: int) -> None:
        """Forgets a chunk's content that was read and values that were derived from all chunks."""
        self._records.pop(chunk, None)
        self._checked -= {(name, chunk) for name in self.manifest.arrays}
        self._columns.clear()
        for name in ("is_eligible_N", "mean_K"):
            self.__dict__.pop(name, None)

    def read_array(self, name: str, chunk: int) -> np.ndarray:
        """Returns a chunk of an array, with the zeros that pad it to `chunk_rows`.

        A chunk is mapped into memory. Its checksum is compared with that of its commit record at
        the first read. It raises a ValueError if the chunk is missing or damaged.
        """
        file = self.manifest.chunk_file(name, chunk)
        if chunk not in self._records:
            record = self.place.read(record_file(chunk))
            self._records[chunk] = self.manifest.read_record(chunk, record, self.path)
        try:
            values = self.place.map(file, *self.manifest.arrays[name])
            if (name, chunk) not in self._checked:
                if self._records[chunk].get(name) != checksum(values):
                    raise ValueError("its content does not match its checksum")
                self._checked.add((name, chunk))
        except ValueError as error:
            raise ValueError(
                f"{self.path}/{file} is damaged ({error}): move the index away and make it again"
            ) from None
        return values

    def rows(self, positions: Sequence[int] | np.ndarray) -> Float32[np.ndarray, "M K"]:
        """Returns the rows at `positions` of `ids` as float32 sketches; refuses other positions."""
        position_M, last = np.asarray(positions), self.num_rows - 1
        is_known = (
            position_M.dtype.kind in "iu" and ((position_M >= 0) & (position_M <= last)).all()
        )
        if position_M.size and not is_known:
            raise ValueError(f"positions must be integers from 0 to {last}: give those of `ids`")
        position_M = position_M.astype(np.int64)
        starts = np.array([span.start for span in self.manifest.spans])
        chunks_M = np.searchsorted(starts, position_M, side="right") - 1
        rows_MK = np.empty((len(position_M), self.size), np.float32)
        for chunk in np.unique(chunks_M):
            here = np.flatnonzero(chunks_M == chunk)
            rows_MK[here] = self.read_array("rows", int(chunk))[position_M[here] - starts[chunk]]
        return rows_MK

    def column(self, name: str) -> Float32[np.ndarray, " N"]:
        """Returns one number per row.

        `norms` are the lengths before rows became unit vectors. `lengths` are those of stored rows:
        1 up to rounding, 0 for a zero gradient.
        """
        if name not in self._columns:
            self.require_complete()
            self._columns[name] = np.concatenate(
                [
                    self.read_array(name, i)[: span.stop - span.start]
                    for i, span in enumerate(self.manifest.spans)
                ]
            )
        return self._columns[name]

    @functools.cached_property
    def mean_K(self) -> Float64[np.ndarray, " K"]:
        """Mean of the eligible rows as stored, rounded once; 0 if there are none.

        A row without a gradient has no direction and does not count.
        """
        self.require_complete()
        sums = (self.read_array("sums", chunk)[0] for chunk in range(self.num_chunks))
        return rows_lib.mean_of_sums(sums, max(1, int(self.is_eligible_N.sum())))
