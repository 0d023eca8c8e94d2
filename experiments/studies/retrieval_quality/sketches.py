"""The quality of every sketch of one pass, compared with the exact kernel."""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import scipy.stats

from experiments.studies import rankings
from experiments.studies.gradients import RunGradients, project_rows
from experiments.studies.kernels import KernelScores
from experiments.studies.rankings import QUALITY, mean_of
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.index import search
from raslik_jax.index.combine import Aggregate
from raslik_jax.index.store import SketchStore
from raslik_jax.sketch import projections
from raslik_jax.sketch.families import PROJECTIONS

# The stored records of int8 and 1-bit rows are of a version whose index had these.
Dtype = Literal["float32", "bfloat16"]
# How the queries are combined, and what the label of a dtype then ends with.
_COMBINED: dict[Aggregate, str] = {"mean": "", "common": ", common"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which sketches are made."""

    families: tuple[str, ...] = setting(
        tuple(PROJECTIONS), "Projection families.", family=PROJECTIONS
    )
    dense_max_size: int = setting(
        1024, "Largest K of dense_rademacher, which costs 2 P K a row.", low=1
    )
    projection_seeds: int = setting(5, "Seeds of each projection.", low=2)
    dtypes: tuple[Dtype, ...] = setting(get_args(Dtype), "Dtypes of the index, for family binned.")


class Trial:
    """The sketches of the run's own pass, kept in a folder."""

    def __init__(self, made: RunGradients, exact: KernelScores, folder: pathlib.Path):
        self.made, self.exact, self.folder = made, exact, folder
        self.labels, self.center = made.labels, made.config.retrieve.center
        # Opened, or made, when a sketch is missing.
        self.open_vectors = functools.cache(lambda: made.vectors(made.default))
        folder.mkdir(parents=True, exist_ok=True)

    def records(self, options: Options, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields one record for all projection seeds of a family, size, dtype and combination."""
        fields = (*QUALITY, "spearman", "error")
        for family in options.families:
            dtypes = options.dtypes if family == "binned" else ("float32",)
            for size in sizes:
                if family == "dense_rademacher" and size > options.dense_max_size:
                    continue
                seeds = range(options.projection_seeds)
                draws = [self._entries(family, size, draw, dtypes) for draw in seeds]
                if not all(draws):
                    continue  # larger than the gradients
                for combine, ending in _COMBINED.items():
                    _, best = self.labels.judge(self.exact.combine(combine))
                    for dtype in dtypes:
                        members = [draw[dtype + ending] for draw in draws]
                        sets = [entry["forget"] for entry in members]
                        near = [rankings.jaccard(chosen, best.forget) for chosen in sets]
                        yield {
                            "table": "sketch",
                            "kernel": self.made.default,
                            "family": family,
                            "size": size,
                            "dtype": dtype,
                            "combine": combine,
                            "jaccard_seeds": rankings.mean_jaccard(sets),
                            "jaccard_exact": float(np.mean(near)),
                            **mean_of(members, fields),
                        }

    def _entries(self, family: str, size: int, draw: int, dtypes: Sequence[str]) -> dict[str, Any]:
        """Returns the entries of one sketch, kept or made; none where K is above P."""
        path = self.folder / f"{family}-{size}-{draw}.json"
        kept = read_json(path) if path.is_file() else {}
        if {dtype + ending for dtype in dtypes for ending in _COMBINED.values()} <= set(kept):
            return kept
        vectors_MP, start = self.open_vectors(), time.monotonic()
        if size > vectors_MP.shape[1]:
            return {}
        projection = projections.init_projection(
            self.made.config.seed + 1000 * draw, family, vectors_MP.shape[1], size
        )
        sketch_MK = project_rows(vectors_MP, projection)
        norm_M = np.linalg.norm(sketch_MK, axis=1)
        unit_MK = sketch_MK / np.where(norm_M > 0, norm_M, 1)[:, None]
        if family == "binned" and draw == 0:
            np.save(self.folder / "gram.npy", unit_MK @ unit_MK.T, allow_pickle=False)
        made = dict(self._index_entries(unit_MK, norm_M, dtypes))
        write_json(path, made)
        print(f"    {path.stem}: {time.monotonic() - start:.1f} s", flush=True)
        return made

    def _index_entries(
        self, unit_MK: np.ndarray, norm_M: np.ndarray, dtypes: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields how good the scores of an index of each dtype are, and how near the exact ones."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for dtype in dtypes:
                store = SketchStore.create(
                    pathlib.Path(folder) / dtype,
                    identity={},
                    ids=self.labels.ids,
                    size=unit_MK.shape[1],
                    dtype=dtype,
                    chunk_rows=1024,
                )
                for chunk in store.missing_chunks():
                    span = store.chunk_positions(chunk)
                    store.write_chunk(chunk, unit_MK[span], norm_M[span])
                store.finish()
                for combine, ending in _COMBINED.items():
                    score_N = search.score_store(
                        store, unit_MK[self.made.own], center=self.center, aggregate=combine
                    ).astype(np.float64)
                    exact_N = self.exact.combine(combine)
                    quality, chosen = self.labels.judge(score_N)
                    yield (
                        dtype + ending,
                        {
                            **quality,
                            "spearman": float(scipy.stats.spearmanr(score_N, exact_N).statistic),
                            "error": float(np.sqrt(np.mean((score_N - exact_N) ** 2))),
                            "forget": chosen.forget.tolist(),
                        },
                    )
