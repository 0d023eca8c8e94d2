"""Upkeep of an index: verify it, drop damage, make a compact copy."""

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from raslik_jax.index.format import (
    checksum,
    coarser_dtypes,
    record_file,
)
from raslik_jax.index.store import SketchStore


class Damage(NamedTuple):
    """One damaged file of an index; `chunk` is None if it belongs to no chunk."""

    chunk: int | None
    file: str
    reason: str


def verify(store: SketchStore) -> tuple[Damage, ...]:
    """Returns the damaged files. It reads everything and checks every checksum.

    Missing chunks are no damage. `discard` damaged chunks to make them again.
    """
    damages = [
        Damage(None, file, "differs from the manifest")
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
                    damages.append(Damage(chunk, file, "differs from its checksum"))
            except ValueError as error:
                damages.append(Damage(chunk, file, str(error)))
    return tuple(damages)


def discard(store: SketchStore, chunks: Iterable[int]) -> None:
    """Drops the commit records of `chunks`, so that they are missing."""
    for chunk in chunks:
        store.place.write(record_file(chunk), None)
        store.forget(chunk)


def requantize(
    source: SketchStore,
    path: str | os.PathLike,
    *,
    dtype: str,
    is_centered: bool = False,
    chunk_rows: int | None = None,
    rotation_seed: int = 0,
) -> SketchStore:
    """Returns a coarser copy of a finished index; an interrupted copy is continued.

    `is_centered` is for `sign`: it takes the signs of each row minus `source.mean_K`. `chunk_rows`
    is that of `source` unless given. A dtype that is not coarser is refused: rows are no better
    than their source, and signs have no other form.
    """
    if dtype not in (coarser := coarser_dtypes(source.dtype)):
        raise ValueError(
            f"a copy must be of a coarser dtype than the {source.dtype} of {source.path} "
            f"({', '.join(coarser) or 'none is'}), got {dtype}: make it from a finer index"
        )
    store = SketchStore.create(
        path,
        identity=source.identity,
        ids=source.ids,
        size=source.size,
        dtype=dtype,
        chunk_rows=chunk_rows or source.chunk_rows,
        rotation_seed=rotation_seed,
        center_K=source.mean_K if is_centered else None,
    )
    for chunk in store.missing_chunks():
        span = store.chunk_positions(chunk)
        rows_CK = source.rows(np.arange(span.start, span.stop))
        lengths_C = source.column("lengths")[span]
        # A rounded vector has no unit length. int8 and sign do not need it, but the store does.
        rows_CK /= np.where(lengths_C > 0, lengths_C, 1)[:, None]
        store.write_chunk(chunk, rows_CK, source.column("norms")[span])
    store.finish()
    return store
