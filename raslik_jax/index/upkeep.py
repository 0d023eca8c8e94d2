"""Upkeep of an index: verify it, drop damage, append, delete, make a compact copy."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.base.messages import some_of
from raslik_jax.index.format import (
    MANIFEST,
    checksum,
    coarser_dtypes,
    ids_file,
    make_segment,
    record_file,
)
from raslik_jax.index.store import SketchStore


class Damage(NamedTuple):
    """One damaged file of an index; `chunk` is None where it belongs to no chunk."""

    chunk: int | None
    file: str
    reason: str


def verify(store: SketchStore) -> tuple[Damage, ...]:
    """Returns what is damaged, after reading everything and checking every checksum.

    Missing chunks are no damage. To have damaged ones made again, `discard` them.
    """
    damages = [
        Damage(None, file, "differs from what the manifest says")
        for file, value in store.manifest.zarr_files().items()
        if store.place.read(file) != value
    ]
    try:
        _ = store.center_K
    except ValueError as error:
        damages.append(Damage(None, "center", str(error)))
    there = store.place.names("commits")
    for chunk in range(store.num_chunks):
        file = record_file(chunk)
        if file not in there:
            continue
        try:
            checksums = store.manifest.read_record(chunk, store.place.read(file), store.path)
        except ValueError as error:
            damages.append(Damage(chunk, file, str(error)))
            continue
        for name, (shape, dtype) in store.manifest.arrays.items():
            file = store.manifest.chunk_file(name, chunk)
            try:
                # Read here, whatever the store has read and checked before.
                if checksums.get(name) != checksum(store.place.map(file, shape, dtype)):
                    damages.append(Damage(chunk, file, "differs from the commit record's checksum"))
            except ValueError as error:
                damages.append(Damage(chunk, file, str(error)))
    return tuple(damages)


def discard(store: SketchStore, chunks: Iterable[int]) -> None:
    """Drops the commit records of `chunks`, so that they are missing."""
    for chunk in chunks:
        store.place.write(record_file(chunk), None)
        store.forget(chunk)


def append(store: SketchStore, ids: Sequence[str]) -> SketchStore:
    """Returns the index with rows for `ids` that are still missing; old chunks stay.

    It refuses ids of the index (deleted or not), an index that was changed since it was opened and
    bits of centered rows.
    """
    known = set(store.ids)
    clashing = [i for i in ids if i in known]
    if clashing or not ids or len(set(ids)) != len(ids):
        raise ValueError(
            f"ids to append to {store.path} must be new and all differ, got {len(ids)} of which "
            f"{len(set(ids))} differ and {len(clashing)} are in the index already "
            f"({some_of(clashing)}): leave those out"
        )
    segment, value = make_segment(ids)
    segments = store.manifest.segments
    files = {ids_file(len(segments), segment): value}
    return _changed(store, files, segments=(*segments, segment))


def delete(store: SketchStore, ids: Iterable[str]) -> SketchStore:
    """Returns the index with rows marked deleted: they leave the mean and every search.

    Their bytes stay. It refuses unknown ids, all ids and everything that `append` refuses.
    """
    given = set(ids)
    unknown = sorted(given - set(store.ids))
    if unknown:
        raise ValueError(
            f"ids to delete must be in the index {store.path}, {len(unknown)} are not "
            f"({some_of(unknown)}): nothing was deleted"
        )
    deleted = given | set(store.manifest.deleted)
    if len(deleted) == store.num_rows:
        raise ValueError(f"a row of {store.path} must be left, got the ids of all to delete")
    return _changed(store, {}, deleted=tuple(sorted(deleted)))


def _changed(store: SketchStore, files: Mapping[str, bytes], **changes: Any) -> SketchStore:
    """Writes files and then the manifest with these changes."""
    if store.manifest.center_sha256 is not None:
        raise ValueError(
            f"{store.path} must not be changed in place, its bits are of centered rows and the "
            "mean would move: change the finer index and make this one from it again"
        )
    refusal = f"the index {store.path} was changed since it was opened: open it again"
    found = store.place.look(MANIFEST)
    if found.value != store.manifest.seal():
        raise ValueError(refusal)
    for file, value in files.items():
        store.place.write(file, value)
    manifest = dataclasses.replace(store.manifest, **changes)
    # Of two changes at once the later finds another generation here.
    if not store.place.replace(MANIFEST, manifest.seal(), if_equal=found.generation):
        raise ValueError(refusal)
    return SketchStore.open(store.path)


def requantize(
    source: SketchStore,
    path: str | os.PathLike,
    *,
    dtype: str,
    is_centered: bool = False,
    chunk_rows: int | None = None,
    rotation_seed: int = 0,
) -> SketchStore:
    """Returns a coarser copy of a finished index; after a stop it goes on at the same place.

    Rows deleted from `source` are left out. `is_centered` is for `sign`: it takes the signs of row
    minus `source.mean_K`. `chunk_rows` is that of `source` unless given. A dtype that is not
    coarser is refused: rows are no better than their source, and signs have no other form.
    """
    if dtype not in (coarser := coarser_dtypes(source.dtype)):
        raise ValueError(
            f"a copy must be of a coarser dtype than the {source.dtype} of {source.path} "
            f"({', '.join(coarser) or 'none is'}), got {dtype}: make it from a finer index"
        )
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
        of_source = positions[store.chunk_positions(chunk)]
        rows_CK, lengths_C = source.rows(of_source), source.column("lengths")[of_source]
        # A rounded vector has no unit length. int8 and sign do not need it, but the store does.
        rows_CK /= np.where(lengths_C > 0, lengths_C, 1)[:, None]
        store.write_chunk(chunk, rows_CK, source.column("norms")[of_source])
    store.finish()
    return store
