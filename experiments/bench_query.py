"""Measures how fast an index answers, against a plain NumPy read of the same bytes.

Makes an index of random rows, then, dtype by dtype and for each number of queries: both poles over
all rows, streamed from the memory map, and in the same run a plain NumPy read of that memory map
(the sum of its words). Checks a sample of the scores against float64 first.

  python experiments/bench_query.py --rows=4096 --size=65536
  python experiments/bench_query.py --rows=52000 --dtypes=int8,bfloat16 --folder=/data/bench --json

52,000 rows of size 65,536 take 13.6 GB in float32, 6.8 in bfloat16, 3.4 in int8 and 0.43 as signs,
on disk and in the page cache; the folder is removed at the end.
"""

import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402
from raslik_jax.messages import shown  # noqa: E402

DTYPES = ("float32", "bfloat16", "int8", "sign")

_ROWS = flags.DEFINE_integer("rows", 4096, "Rows of the index, the paper's 52,000 say.", 1)
_SIZE = flags.DEFINE_integer("size", 65536, "Coordinates of a sketch.", 1)
_DTYPES = command.define_list("dtypes", DTYPES, "Dtypes of the rows to measure.", DTYPES)
_QUERIES = command.define_list("queries", [1, 2, 4, 8], "Numbers of queries to measure.", int)
_CENTER = flags.DEFINE_boolean("center", True, "Centered cosine (signs are made centered then).")
_AGGREGATE = flags.DEFINE_enum(
    "aggregate",
    "mean",
    ["mean", "mean_rank", "common"],
    "What one score is made of several queries.",
)
_TOP = flags.DEFINE_integer("top", 5000, "Rows wanted from the top (at most all).", 0)
_BOTTOM = flags.DEFINE_integer("bottom", 2000, "Rows wanted from the bottom (at most all).", 0)
_CHUNK_ROWS = flags.DEFINE_integer("chunk_rows", 512, "Rows of a chunk.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Measurements, of which the median is reported.", 1)
_FOLDER = flags.DEFINE_string(
    "folder", "", "New or empty folder where the index is made (default: a temporary one)."
)
_JSON = flags.DEFINE_boolean("json", False, "Print a JSON line per measurement, no table.")


def make_index(path: str, dtype: str) -> Any:
    """Returns an index of random unit rows.

    Every chunk holds the first one's rows, their coordinates moved round: as good as new rows for
    timing, and far cheaper than drawing billions of Gaussians.
    """
    import numpy as np

    from raslik_jax.index.store import SketchStore

    random = np.random.default_rng(0)
    base = random.standard_normal((_CHUNK_ROWS.value, _SIZE.value), dtype=np.float32)
    base += 0.5 * random.standard_normal(_SIZE.value, dtype=np.float32)  # a shared direction
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    # Signs of centered rows need the mean first; any vector of its length will do for timing.
    center = base.astype(np.float64).mean(axis=0) if dtype == "sign" and _CENTER.value else None
    store = SketchStore.create(
        path,
        identity={"made_by": "bench_query"},
        ids=[f"{row:09d}" for row in range(_ROWS.value)],
        size=_SIZE.value,
        dtype=dtype,
        chunk_rows=_CHUNK_ROWS.value,
        center_K=center,
    )
    for chunk in store.missing_chunks():
        span = store.chunk_positions(chunk)
        rows = np.roll(base, 17 * chunk, axis=1)[: span.stop - span.start]
        store.write_chunk(chunk, rows, np.ones(len(rows), np.float32))
    store.finish()
    return store


def check(store: Any, query_QK: Any) -> None:
    """Raises where a sample of the scores is not what the dtype's definition gives in NumPy."""
    import numpy as np

    from raslik_jax.index import quantize, search

    scores = np.asarray(search.score_store(store, query_QK, center=_CENTER.value).forget_N)
    sample = np.linspace(0, store.num_rows - 1, 16).astype(int)
    if store.dtype == "sign":
        direction = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True)
        direction = direction - (store.center_K if _CENTER.value else 0)
        seed = store.rotation_seed
        bits = quantize.rotate(direction.astype(np.float32), seed=seed)[0] > 0
        packed = next(store.blocks()).stored[:16]
        sample = np.arange(len(packed))
        is_set = np.unpackbits(packed, axis=1, bitorder="little") == 1
        expected = np.cos(np.pi * np.mean(is_set != bits, axis=1))
    else:
        mean = store.mean_K if _CENTER.value else None
        expected = search.exact_scores(store.rows(sample), query_QK, mean)
    worst = float(np.abs(scores[sample] - expected).max())
    if worst > 1e-5:
        raise ValueError(f"scores of {store.dtype} rows are off by {worst}, more than 1e-5")


def median_seconds(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns each function's median time, after one call of each to warm up.

    They take turns, so that whatever else the machine does slows all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(_REPEATS.value + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def read_in(pool: ThreadPoolExecutor | None, blocks: Sequence[Any]) -> list[int]:
    """Reads the blocks with plain NumPy, here or in a pool; the sums of their 64-bit words."""

    def read(block: Any) -> int:
        return int(block.reshape(-1).view("u8").sum())

    return [read(block) for block in blocks] if pool is None else list(pool.map(read, blocks))


def measure(path: str, dtype: str) -> list[dict[str, Any]]:
    """Returns the measurements of one dtype, and removes its index."""
    import jax
    import numpy as np

    from raslik_jax.index import search

    start = time.perf_counter()
    store = make_index(path, dtype)
    made = time.perf_counter() - start
    blocks = [store.stored_chunk(chunk) for chunk in range(store.num_chunks)]
    files = sorted(file for file in Path(path).rglob("*") if file.is_file())
    random = np.random.default_rng(1)
    most = max(_QUERIES.value)
    all_queries = random.standard_normal((most, _SIZE.value))
    check(store, all_queries[:1])

    found = []
    for number in _QUERIES.value:
        query_QK = all_queries[:number]
        options: Any = {"center": _CENTER.value, "aggregate": _AGGREGATE.value}
        tails = {
            "k_forget": min(_TOP.value, store.num_rows),
            "k_retain": min(_BOTTOM.value, store.num_rows),
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            medians = median_seconds(
                {
                    "scores": functools.partial(search.score_store, store, query_QK, **options),
                    "both_tails": functools.partial(
                        search.search_store, store, query_QK, **tails, **options
                    ),
                    "numpy_read": functools.partial(read_in, None, blocks),
                    "numpy_read_all_cores": functools.partial(read_in, pool, blocks),
                }
            )
        size = sum(block.nbytes for block in blocks)
        found.append(
            {
                "dtype": dtype,
                "rows": store.num_rows,
                "size": store.size,
                "queries": number,
                "center": _CENTER.value,
                "aggregate": _AGGREGATE.value,
                "row_bytes": size,
                "index_bytes": sum(file.stat().st_size for file in files),
                "seconds_made": round(made, 3),
                **{f"seconds_{name}": round(value, 4) for name, value in medians.items()},
                "gb_per_s": round(size / medians["scores"] / 1e9, 2),
                "numpy_gb_per_s": round(size / medians["numpy_read"] / 1e9, 2),
                "share_of_numpy": round(medians["numpy_read"] / medians["scores"], 3),
                "repeats": _REPEATS.value,
                "device": jax.devices()[0].device_kind,
                "cpus": os.cpu_count(),
                "jax": jax.__version__,
            }
        )
    shutil.rmtree(path)
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the measurements as a table."""
    columns = {
        "dtype": "dtype",
        "queries": "queries",
        "row GB": "row_bytes",
        "scores s": "seconds_scores",
        "both tails s": "seconds_both_tails",
        "NumPy read s": "seconds_numpy_read",
        "GB/s": "gb_per_s",
        "NumPy GB/s": "numpy_gb_per_s",
        "share": "share_of_numpy",
    }
    rows = [list(columns)]
    for result in results:
        cells = [result[name] for name in columns.values()]
        cells[2] = f"{cells[2] / 1e9:.3f}"
        rows.append([str(cell) for cell in cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def main() -> None:
    if _FOLDER.value:
        folder = Path(_FOLDER.value)
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise ValueError(
                f"--folder must be new or empty, {shown(str(folder), 120)} holds something: give "
                "another"
            )
    else:
        folder = Path(tempfile.mkdtemp())
    results = []
    try:
        for dtype in _DTYPES.value:
            for result in measure(str(folder / f"bench-{dtype}"), dtype):
                results.append(result)
                if _JSON.value:
                    print(json.dumps(result), flush=True)
    finally:
        for dtype in _DTYPES.value:
            shutil.rmtree(folder / f"bench-{dtype}", ignore_errors=True)
        if not _FOLDER.value:
            shutil.rmtree(folder, ignore_errors=True)
    if not _JSON.value:
        one = results[0]
        print(f"{one['rows']:,} x {one['size']:,}, {one['device']}, {one['cpus']} CPUs, "
              f"jax {one['jax']}, median of {one['repeats']}")  # fmt: skip
        print(table(results))


if __name__ == "__main__":
    command.start(main)
