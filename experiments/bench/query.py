"""Measures how fast an index answers, against a plain NumPy read of the same bytes.

Makes an index of random rows, then, dtype by dtype and for each number of queries: the scores of
all rows, streamed from the memory map, and in the same run a plain NumPy read of that memory map
(the sum of its words). Checks a sample of the scores against float64 first.

  python experiments/bench/query.py --rows=4096 --size=65536
  python experiments/bench/query.py --rows=52000 --dtypes=bfloat16 --folder=/data/bench --json

52,000 rows of size 65,536 take 13.6 GB in float32 and 6.8 in bfloat16, on disk and in the page
cache; the folder is removed at the end.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
query (one for each dtype and number of queries): dtype, queries, row_bytes (of whole chunks),
  index_bytes (of all files), seconds_made (writing the index), seconds_scores (scores of all rows),
  seconds_numpy_read (on one core; all medians), gb_per_s (of the scores), numpy_gb_per_s,
  share_of_numpy.
"""

import dataclasses
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line
from raslik_jax.base.files import check_new_folder
from raslik_jax.base.settings import setting
from raslik_jax.index import search
from raslik_jax.index.store import SketchStore

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    rows: int = setting(4096, "Rows of the index, for example the paper's 52,000.", low=1)
    size: int = setting(65536, "Coordinates of a sketch.", low=1)
    dtypes: tuple[Dtype, ...] = setting(get_args(Dtype), "Dtypes of the rows.")
    queries: tuple[int, ...] = setting((1, 2, 4, 8), "Numbers of queries.", low=1)
    chunk_rows: int = setting(512, "Rows of a chunk.", low=1)
    folder: str = setting("", "New or empty folder for the index (default: a temporary one).")
    repeats: int = setting(7, "Number of measurements. The median is reported.", low=1)


def make_index(options: Options, path: Path, dtype: str) -> SketchStore:
    """Returns an index of random unit rows.

    Every chunk holds the first one's, their coordinates moved round: far cheaper than new rows.
    """
    random = np.random.default_rng(options.seed)
    base = random.standard_normal((options.chunk_rows, options.size), dtype=np.float32)
    base += 0.5 * random.standard_normal(options.size, dtype=np.float32)  # a shared direction
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    store = SketchStore.create(
        path,
        identity={"made_by": "bench_query"},
        ids=[f"{row:09d}" for row in range(options.rows)],
        size=options.size,
        dtype=dtype,
        chunk_rows=options.chunk_rows,
    )
    for chunk in store.missing_chunks():
        span = store.chunk_positions(chunk)
        rows = np.roll(base, 17 * chunk, axis=1)[: span.stop - span.start]
        store.write_chunk(chunk, rows, np.ones(len(rows), np.float32))
    store.finish()
    return store


def check(store: SketchStore, query_QK: np.ndarray) -> None:
    """Raises where a sample of the scores is not what the dtype's definition gives in NumPy."""
    score_N = search.score_store(store, query_QK, center=True)
    unit_QK = query_QK / np.linalg.norm(query_QK, axis=1, keepdims=True)
    sample = np.linspace(0, store.num_rows - 1, 16).astype(int)
    row_MK, moved_QK = store.rows(sample) - store.mean_K, unit_QK - store.mean_K
    cosine_MQ = row_MK @ moved_QK.T / np.linalg.norm(row_MK, axis=1, keepdims=True)
    expected = np.mean(cosine_MQ / np.linalg.norm(moved_QK, axis=1), axis=1)
    worst = float(np.abs(score_N[sample] - expected).max())
    if worst > 1e-5:
        raise ValueError(
            f"scores of {store.dtype} rows must agree with NumPy to 1e-5, got an error of {worst}: "
            "nothing was timed"
        )


def measure_dtype(options: Options, path: Path, dtype: str) -> Iterator[Line]:
    """Yields the lines of one dtype, and removes its index."""
    store, (made, _) = harness.timed(functools.partial(make_index, options, path, dtype))
    blocks = [store.read_array("rows", chunk) for chunk in range(store.num_chunks)]
    size = sum(block.nbytes for block in blocks)
    index_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    random = np.random.default_rng(options.seed + 1)
    all_queries = random.standard_normal((max(options.queries), options.size))
    check(store, all_queries[:1])
    for number in options.queries:
        about: Any = {"store": store, "query_QK": all_queries[:number], "center": True}
        calls: dict[str, Callable[[], Any]] = {
            "scores": functools.partial(search.score_store, **about),
            "numpy_read": lambda: [block.reshape(-1).view("u8").sum() for block in blocks],
        }
        taken = harness.take_turns(calls, options.repeats)
        seconds = {name: found.median() for name, found in taken.items()}
        yield {
            "stage": "query",
            "dtype": dtype,
            "queries": number,
            "row_bytes": size,
            "index_bytes": index_bytes,
            "seconds_made": made,
            **{f"seconds_{name}": value for name, value in seconds.items()},
            "gb_per_s": size / seconds["scores"] / 1e9,
            "numpy_gb_per_s": size / seconds["numpy_read"] / 1e9,
            "share_of_numpy": seconds["numpy_read"] / seconds["scores"],
        }
    shutil.rmtree(path)


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    if options.folder:
        check_new_folder(options.folder)
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as inside:
        for dtype in options.dtypes:
            yield from measure_dtype(options, Path(inside) / dtype, dtype)


if __name__ == "__main__":
    harness.start(Options(), measure)
