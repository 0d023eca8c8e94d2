"""Looks after an index: says what it is, verifies it, mends it, makes a compact copy.

  python experiments/index.py --index=runs/quickstart/sketch/index
  python experiments/index.py --index=runs/quickstart/sketch/index --verify
  python experiments/index.py --index=runs/quickstart/sketch/index --repair
  python experiments/index.py --index=... --compact_to=/data/int8 --dtype=int8
  python experiments/index.py --index=... --compact_to=/data/sign --dtype=sign --center

--verify reads everything, checks every checksum, and ends with status 1 where something is damaged.
--repair drops what is damaged, so that `run.py` or `sketch_job.py` makes those chunks again and no
other. int8 takes a quarter of float32, sign a thirty-second; sign rows are centered before their
signs are taken (--center) or not at all.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

_INDEX = flags.DEFINE_string("index", "", "The index: WORKDIR/sketch/index of a run.")
_VERIFY = flags.DEFINE_boolean("verify", False, "Read everything and name what is damaged.")
_REPAIR = flags.DEFINE_boolean("repair", False, "Verify, and drop the damaged chunks.")
_COMPACT_TO = flags.DEFINE_string(
    "compact_to", "", "New folder for a copy of another dtype; an unfinished copy goes on."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "int8", ["float32", "bfloat16", "int8", "sign"], "Dtype of the copy."
)
_CENTER = flags.DEFINE_boolean("center", False, "sign: take the signs of centered rows.")


def describe(store: Any) -> str:
    """Returns what an index is, a line for each thing."""
    from raslik_jax.index.format import INDEX_FORMAT

    missing = store.missing_chunks()
    lines = [
        f"{store.path}: format {INDEX_FORMAT}",
        f"rows      {store.num_rows:,} of {store.size:,} coordinates, {store.dtype}",
        f"deleted   {len(store.manifest.deleted):,}",
        f"chunks    {store.num_chunks:,} of {store.chunk_rows:,} rows, {len(missing):,} missing",
        f"made from {json.dumps(store.identity, sort_keys=True)}",
    ]
    return "\n".join(lines)


def repair(store: Any, damages: Sequence[Any]) -> str:
    """Drops the damaged chunks; a line that says what to do next."""
    from raslik_jax.index.upkeep import discard
    from raslik_jax.manifests import read_manifest
    from raslik_jax.run.units import reopen_unit

    chunks = sorted({damage.chunk for damage in damages if damage.chunk is not None})
    # zarr.json is derived from the manifest: it is written again with the next chunk, or now.
    if not chunks:
        store.finish()
        return "mended"
    discard(store, chunks)
    index = pathlib.Path(store.path)
    folder = index.parent
    dropped, manifest = f"{len(chunks)} chunks dropped", read_manifest(folder)
    # The run goes on with what is whole, and does not make all of it again. A copy beside the index
    # is none of its results.
    if manifest is not None and f"{index.name}/manifest.json" in manifest["outputs"]:
        folder = reopen_unit(folder.parent, folder.name)
    elif not (folder / "started.json").is_file():
        return f"{dropped}: make them again as the index was made, a copy by the same --compact_to"
    return (
        f"{dropped}, the others wait in {folder}: run run.py or sketch_job.py to make them again, "
        "and run.py to put the index back in its place"
    )


def main() -> int:
    """Does what the flags say; returns the exit status."""
    from raslik_jax.index.store import SketchStore
    from raslik_jax.index.upkeep import requantize, verify

    if not _INDEX.value:
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    store = SketchStore.open(_INDEX.value)
    print(describe(store))
    status = 0
    if _VERIFY.value or _REPAIR.value:
        damages = verify(store)
        for damage in damages:
            print(f"damaged   {damage.file}: {damage.reason}")
        status = int(bool(damages))
        if not damages:
            print("verified  nothing is damaged")
        elif _REPAIR.value:
            print(repair(store, damages))
            status = 0
    if _COMPACT_TO.value:
        copy = requantize(store, _COMPACT_TO.value, dtype=_DTYPE.value, is_centered=_CENTER.value)
        print(describe(copy))
    return status


if __name__ == "__main__":
    command.start(main)
