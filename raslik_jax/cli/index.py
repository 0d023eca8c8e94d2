"""Describes an index, verifies it or repairs it.

  raslik index --index=runs/quickstart/sketch/index
  raslik index --index=runs/quickstart/sketch/index --verify
  raslik index --index=runs/quickstart/sketch/index --repair

--verify reads everything, checks every checksum and ends with status 1 if it finds damage. --repair
deletes damaged chunks. `raslik run` then makes only these chunks again.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raslik_jax.base.settings import Settings, setting

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.index.store import SketchStore
    from raslik_jax.index.upkeep import Damage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The index and the work on it."""

    index: str = setting("", "Folder of the index: WORKDIR/sketch/index of a run.")
    verify: bool = setting(False, "Read the whole index and list damaged parts.")
    repair: bool = setting(False, "Verify, and delete the damaged chunks.")


def run(options: Options) -> int:
    """Describes an index and does the requested work; returns the exit status."""
    from raslik_jax.index.format import INDEX_FORMAT
    from raslik_jax.index.store import SketchStore
    from raslik_jax.index.upkeep import verify

    if not options.index:
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    store, status = SketchStore.open(options.index), 0
    missing = len(store.missing_chunks())
    print(f"{store.path}: format {INDEX_FORMAT}")
    print(f"rows      {store.num_rows:,} of {store.size:,} coordinates, {store.dtype}")
    print(f"chunks    {store.num_chunks:,} of {store.chunk_rows:,} rows, {missing:,} missing")
    print(f"made from {json.dumps(store.identity, sort_keys=True)}")
    if options.verify or options.repair:
        damages = verify(store)
        for damage in damages:
            print(f"damaged   {damage.file}: {damage.reason}")
        if not damages:
            print("verified  nothing is damaged")
        elif options.repair:
            line, status = _repair(store, damages)
            print(line)
        else:
            status = 1
    return status


def _repair(store: "SketchStore", damages: "Sequence[Damage]") -> tuple[str, int]:
    """Drops the damaged chunks; returns a line with the next command and the exit status."""
    from raslik_jax.index.upkeep import discard
    from raslik_jax.run.manifests import read_manifest
    from raslik_jax.run.units import reopen_unit

    chunks = sorted({damage.chunk for damage in damages if damage.chunk is not None})
    discard(store, chunks)
    index, folder = pathlib.Path(store.path), pathlib.Path(store.path).parent
    dropped, manifest = f"{len(chunks)} chunks dropped", read_manifest(folder)
    # zarr.json is derived from the manifest: it is written again with the next chunk, or now.
    if not chunks:
        store.finish()
        return "mended", 0
    # The run goes on with the whole chunks and does not make all of them again.
    if manifest is not None and f"{index.name}/manifest.json" in manifest["outputs"]:
        folder = reopen_unit(folder.parent, folder.name)
    elif not (folder / "started.json").is_file():
        return f"{dropped}: make them again with the command that made the index", 0
    how = "`raslik run` makes the dropped chunks again and puts the index back"
    return f"{dropped}. The other chunks are in {folder}: {how}", 0
