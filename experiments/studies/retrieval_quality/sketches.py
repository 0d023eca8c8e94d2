"""The quality of every sketch of one pass, beside the exact kernel."""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from experiments.studies import rankings
from experiments.studies.gradients import Combination
from experiments.studies.retrieval_quality.labels import QUALITY, KernelScores, Labels, mean_of
from raslik_jax.files import read_array, read_json, write_json
from raslik_jax.index import search
from raslik_jax.index.store import SketchStore
from raslik_jax.index.upkeep import requantize
from raslik_jax.run.exact_gradients import project_rows
from raslik_jax.settings import Settings, setting
from raslik_jax.sketch import projections
from raslik_jax.sketch.families import PROJECTIONS

Dtype = Literal["float32", "bfloat16", "int8", "sign"]
# How the queries are combined, and what the label of a dtype then ends with.
_COMBINED: dict[Combination, str] = {"mean": "", "common": ", common"}


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


def read_gram(folder: pathlib.Path) -> np.ndarray | None:
    """Returns the products of the unit rows of the largest binned sketch, if there is one."""
    path = folder / "gram.npy"
    return read_array(path) if path.is_file() else None


@dataclasses.dataclass
class SketchTrial:
    """What the sketches of one pass are made from.

    Attributes:
      options: which sketches.
      sizes: their Ks.
      labels: of the training examples.
      queries: positions of the queries behind them.
      exact: scores of the exact kernel.
      open_vectors: gives the gradients; called when a sketch is missing.
      folder: where results are kept.
      seed: of the run.
      center: whether scores are centered.
    """

    options: Options
    sizes: Sequence[int]
    labels: Labels
    queries: np.ndarray
    exact: KernelScores
    open_vectors: Callable[[], np.ndarray]
    folder: pathlib.Path
    seed: int
    center: bool
    vectors: np.ndarray | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields one record for all projection seeds of a family, size, dtype and combination."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fields = (*QUALITY, "spearman", "error")
        for family in self.options.families:
            dtypes = self.options.dtypes if family == "binned" else ("float32",)
            for size in self.sizes:
                if family == "dense_rademacher" and size > self.options.dense_max_size:
                    continue
                seeds = range(self.options.projection_seeds)
                draws = [self.entries(family, size, draw, dtypes) for draw in seeds]
                if None in draws:
                    continue  # larger than the gradients
                for combine, ending in _COMBINED.items():
                    _, best = self.labels.judge(self.exact.combine(combine))
                    for dtype in dtypes:
                        members = [draw[dtype + ending] for draw in draws if draw]
                        sets = [entry["forget"] for entry in members]
                        near = [rankings.jaccard(chosen, best.forget) for chosen in sets]
                        yield {
                            "family": family,
                            "size": size,
                            "dtype": dtype,
                            "combine": combine,
                            "jaccard_seeds": rankings.mean_jaccard(sets),
                            "jaccard_exact": float(np.mean(near)),
                            **mean_of(members, fields),
                        }

    def entries(
        self, family: str, size: int, draw: int, dtypes: Sequence[str]
    ) -> dict[str, Any] | None:
        """Returns the entries of one sketch, kept or made; None where K is above P."""
        path = self.folder / f"{family}-{size}-{draw}.json"
        kept = read_json(path) if path.is_file() else {}
        if {dtype + ending for dtype in dtypes for ending in _COMBINED.values()} <= set(kept):
            return kept
        self.vectors = self.open_vectors() if self.vectors is None else self.vectors
        if size > self.vectors.shape[1]:
            return None
        start = time.monotonic()
        projection = projections.init_projection(
            self.seed + 1000 * draw, family, self.vectors.shape[1], size
        )
        sketch_MK = project_rows(self.vectors, projection)
        if family == "binned" and draw == 0:
            norm_M = np.maximum(np.linalg.norm(sketch_MK, axis=1), 1e-30)
            unit_MK = sketch_MK / norm_M[:, None]
            np.save(self.folder / "gram.npy", unit_MK @ unit_MK.T, allow_pickle=False)
        made = dict(self.index_entries(sketch_MK, dtypes))
        write_json(path, made)
        print(f"    {path.stem}: {time.monotonic() - start:.1f} s", flush=True)
        return made

    def index_entries(
        self, sketch_MK: np.ndarray, dtypes: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields how good the scores of an index of each dtype are, and how near the exact ones."""
        norm_M = np.linalg.norm(sketch_MK, axis=1)
        unit_MK = sketch_MK / np.where(norm_M > 0, norm_M, 1)[:, None]
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            store = SketchStore.create(
                pathlib.Path(folder) / "float32",
                identity={},
                ids=self.labels.ids,
                size=unit_MK.shape[1],
                dtype="float32",
                chunk_rows=1024,
            )
            for chunk in store.missing_chunks():
                span = store.chunk_positions(chunk)
                store.write_chunk(chunk, unit_MK[span], norm_M[span])
            store.finish()
            for dtype in dtypes:
                copy = store
                if dtype != "float32":
                    copy = requantize(
                        store,
                        pathlib.Path(folder) / dtype,
                        dtype=dtype,
                        is_centered=self.center and dtype == "sign",
                    )
                for combine, ending in _COMBINED.items():
                    score_N = search.score_store(
                        copy, unit_MK[self.queries], center=self.center, aggregate=combine
                    ).astype(np.float64)
                    exact_N = self.exact.combine(combine)
                    quality, chosen = self.labels.judge(score_N)
                    yield (
                        dtype + ending,
                        {
                            **quality,
                            "spearman": rankings.rank_correlation(score_N, exact_N),
                            "error": float(np.sqrt(np.mean((score_N - exact_N) ** 2))),
                            "forget": chosen.forget.tolist(),
                        },
                    )
