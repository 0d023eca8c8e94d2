"""Upkeep of an index: verify it, drop damage."""

from collections.abc import Iterable
from typing import NamedTuple

from raslik_jax.index.format import checksum, record_file
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
