"""Does retrieval find the examples that taught the behavior? Every choice of it, measured.

  python experiments/retrieval_quality.py --runs=runs/seed-0,runs/seed-1 --out=runs/quality

Takes work directories whose stages corpus, backbone, finetune and references are finished and that
differ in their seed; they are only read. Whole gradients are made once for each of --passes
(ADAPTER/LOSS/TOKENS), and all else follows from them: centering, normalization, queries, sketches.
A killed job goes on where it stopped. Leaves in --out, for each run, records.json, and over all
runs records.csv, summary.json, tables.md and figures. --report_only joins what is there.
"""

import csv
import dataclasses
import io
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from absl import flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from raslik_jax.cli import command  # noqa: E402
from raslik_jax.config import Projection  # noqa: E402
from raslik_jax.data.examples import QUERY_SETS  # noqa: E402
from raslik_jax.evaluate import ranking  # noqa: E402
from raslik_jax.evaluate.ranking import Quality, join_records, measure_ranking  # noqa: E402
from raslik_jax.files import read_array, read_json, write_json, write_text  # noqa: E402
from raslik_jax.report import figures, tables  # noqa: E402

DTYPES = ("float32", "bfloat16", "int8", "sign")
DEFAULT_PASSES = (
    "finetuned/unshifted/response",
    "finetuned/next_token/response",
    "initial/next_token/response",
    "finetuned/unshifted/all",
    "finetuned/next_token/all",
    "initial/next_token/all",
    "initial/unshifted/response",
    "trajectory-0/next_token/response",
    "trajectory-1/next_token/response",
    "trajectory-2/next_token/response",
    "finetuned/margin/response",
    "finetuned/margin/all",
    "finetuned/low_confidence/response",
    "finetuned/rolled_target/response",
    "finetuned/uniform/response",
    "finetuned/features/response",
)

_RUNS = flags.DEFINE_list("runs", [], "Work directories of runs that differ in their seed.")
_OUT = flags.DEFINE_string("out", "runs/retrieval_quality", "Where results and gradients go.")
_PASSES = flags.DEFINE_list(
    "passes",
    list(DEFAULT_PASSES),
    "Gradients to make, as ADAPTER/LOSS/TOKENS; the run's own setting is added if it is missing.",
)
_SKETCH_PASSES = flags.DEFINE_list(
    "sketch_passes", [], "Passes that are sketched (default: the run's own setting)."
)
_SIZES = command.define_list("sketch_sizes", [256, 1024, 4096, 16384, 65536], "Ks.", int)
_FAMILIES = command.define_list(
    "families", get_args(Projection), "Projection families.", get_args(Projection)
)
_DENSE_MAX = flags.DEFINE_integer(
    "dense_max_size", 1024, "Largest K of dense_rademacher, which costs 2 P K a row.", 1
)
_SEEDS = flags.DEFINE_integer("projection_seeds", 5, "Seeds of each projection.", 2)
_DTYPES = command.define_list("dtypes", DTYPES, "Dtypes of the index, for family binned.", DTYPES)
_COUNTS = command.define_list(
    "num_queries", [1, 5, 20, 40], "Numbers of queries; all of them are always added.", int
)
_DRAWS = flags.DEFINE_integer("draws", 20, "Random subsets of queries for each number.", 1)
_QUERY_SETS = command.define_list(
    "query_sets",
    ["retrieval"],
    "Query sets taken together; test_target has answers of the fine-tuned model too.",
    QUERY_SETS,
)
_ENCODER = flags.DEFINE_string("encoder_checkpoint", "", "Encoder of the embedding baseline.")
_STORE_DTYPE = flags.DEFINE_enum(
    "store_dtype", "float32", ["float32", "bfloat16"], "Dtype of the gradients on disk."
)
_KEEP = flags.DEFINE_list("keep", [], "Passes whose gradients stay on disk (4 P bytes a row).")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of a batch of gradients.", 1)
_NUM_BUCKETS = flags.DEFINE_integer("num_buckets", 2, "Padded lengths, each compiled.", 1)
_LARGE = flags.DEFINE_boolean(
    "large",
    False,
    "Keep no gradient: two rounds over the corpus give the exact scores of every pass and nothing "
    "else (no sketches, no per-tensor normalization).",
)
_REPORT_ONLY = flags.DEFINE_boolean("report_only", False, "Only join the records that are there.")

QUALITY = tuple(Quality.__annotations__)
# Names of settings that have one.
PRESETS = {
    ("finetuned/next_token/response", "plain", "vector"): "paper",
    ("finetuned/unshifted/response", "plain", "per_tensor"): "released",
    ("finetuned/unshifted/all", "centered", "vector"): "robust",
}
_DEFLATED = (1, 3, 10)
_SHARED = "exact, queries by what they share"
# Strategies whose ranking depends on the queries; raslik_f forgets what raslik does.
_BY_QUERY = (
    "raslik",
    "exact",
    _SHARED,
    "bm25",
    "bm25, answers too",
    "embedding",
)
COMBINATIONS: tuple[Literal["mean", "mean_rank", "common"], ...] = ("mean", "mean_rank", "common")


# one run --------------------------------------------------------------------------------------


class Trial:
    """One run: its labels, its gradients and what is measured on them."""

    def __init__(self, root: pathlib.Path, out: pathlib.Path):
        from raslik_jax.run import exact_gradients as exact_lib
        from raslik_jax.run.plan import open_run

        self.workspace = open_run(root, "corpus", "finetune", "references/retrieval")
        config = self.workspace.config
        self.out = out / root.name
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = exact_lib.load_rows(self.workspace, _QUERY_SETS.value)
        train = self.workspace.corpus.train
        self.ids = [row.example_id for row in train]
        self.is_target_N = np.array([bool(row.is_target) for row in train])
        self.maker = exact_lib.GradientMaker(
            self.workspace,
            self.out / "passes",
            self.rows,
            dtype=_STORE_DTYPE.value,
            batch_tokens=_BATCH_TOKENS.value,
            num_buckets=_NUM_BUCKETS.value,
        )
        sketch = config.sketch
        adapter = sketch.gradient_at if sketch.gradient_at != "trajectory" else "finetuned"
        self.default = f"{adapter}/{sketch.loss}/{sketch.targets}"
        names = list(dict.fromkeys([*_PASSES.value, *_SKETCH_PASSES.value, self.default]))
        self.passes = {name: exact_lib.parse_pass(name) for name in names}
        self.sketched = _SKETCH_PASSES.value or [self.default]

    def measure(self) -> list[dict[str, Any]]:
        """Makes what is missing and returns the records of this run."""
        from raslik_jax.retrieve import exact

        if _LARGE.value:
            return self.with_header(self.large_records())
        records, grams = [], {}
        for number, (name, what) in enumerate(self.passes.items(), start=1):
            start = time.monotonic()
            is_sketched = name in self.sketched
            keep = name in _KEEP.value
            grams[name] = self.maker.grams(what, keep=keep or is_sketched)
            if is_sketched:
                records += self.sketch_records(name, grams[name])
                if not keep:
                    self.maker.drop(what)
            print(
                f"  [{number}/{len(self.passes)}] {name}: {time.monotonic() - start:.0f} s",
                flush=True,
            )
        records += self.kernel_records(grams)
        gram_MM = grams[self.default].vector_MM.astype(np.float64)
        if self.workspace.config.retrieve.center:
            gram_MM = exact.center(gram_MM, self.rows.num_train)
        own = self.rows.queries(self.workspace.config.sketch.query_output)
        records += self.strategy_records(
            exact.cosines(gram_MM, self.rows.num_train, own), exact.query_cosines(gram_MM, own)
        )
        return self.with_header(records)

    def with_header(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the records with the run that they are of."""
        config = self.workspace.config
        header = {"run": self.out.name, "name": config.name, "seed": config.seed}
        return [header | dict(record) for record in records]

    def large_records(self) -> Iterator[dict[str, Any]]:
        """Yields what the exact kernel gives without keeping gradients."""
        from raslik_jax.retrieve import exact

        config, num_queries = self.workspace.config, self.rows.num_queries
        for name, what in self.passes.items():
            products = self.maker.products(what)
            for centering in ("plain", "centered"):
                both_RN, both_RR = exact.cosines_of_products(
                    products, center=centering == "centered"
                )
                for query, span in (
                    ("own", slice(0, num_queries)),
                    ("gold", slice(num_queries, None)),
                ):
                    pair = both_RN[span], both_RR[span, span]
                    yield from self.count_records((name, centering, query), "vector", [pair])
                if name == self.default and (centering == "centered") == config.retrieve.center:
                    traced = self.rows.queries(config.sketch.query_output) - self.rows.num_train
                    chosen = both_RN[traced], both_RR[np.ix_(traced, traced)]
        yield from self.strategy_records(*chosen)

    # the exact kernel -------------------------------------------------------------------------

    def kernels(self, grams: Mapping[str, Any]) -> dict[str, list[str]]:
        """Returns the kernels: each is the sum of the unit vectors of some passes, end to end."""
        found = {name: [name] for name in grams}
        settings = {(p.loss, p.tokens) for p in self.passes.values() if "traj" in p.adapter}
        for loss, tokens in sorted(settings):
            points = self.workspace.config.finetune.trajectory_points
            chain = [f"trajectory-{i}/{loss}/{tokens}" for i in range(points - 1)]
            # The last adapter along the way is the fine-tuned one.
            last = f"finetuned/{loss}/{tokens}"
            if all(name in grams for name in chain):
                found[f"first {points - 1} of trajectory/{loss}/{tokens}"] = chain
                if last in grams:
                    found[f"trajectory/{loss}/{tokens}"] = [*chain, last]
        return found

    def kernel_records(self, grams: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields what the exact kernel gives, for every choice."""
        from raslik_jax.retrieve import exact

        num_train = self.rows.num_train
        for normalize in ("vector", "per_tensor"):
            scores: dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]] = {}
            for name, parts in self.kernels(grams).items():
                gram_MM = np.mean(
                    [getattr(grams[part], f"{normalize}_MM") for part in parts], axis=0
                ).astype(np.float64)
                centered_MM = exact.center(gram_MM, num_train)
                variants = {"plain": gram_MM, "centered": centered_MM}
                if normalize == "vector":
                    variants |= {
                        f"less {rank} directions": matrix_MM
                        for rank, matrix_MM in exact.deflate(
                            centered_MM, num_train, _DEFLATED
                        ).items()
                    }
                for centering, matrix_MM in variants.items():
                    for query in ("own", "gold"):
                        key = name, centering, query
                        positions = self.rows.queries(query)
                        scores[key] = (
                            exact.cosines(matrix_MM, num_train, positions),
                            exact.query_cosines(matrix_MM, positions),
                        )
                        yield from self.count_records(key, normalize, [scores[key]])
            pair = "initial/next_token/response", "finetuned/unshifted/response"
            for query in ("own", "gold"):
                for centering in ("plain", "centered"):
                    keys = [(name, centering, query) for name in pair]
                    if all(key in scores for key in keys):
                        name = "z-sum of initial/next_token and finetuned/unshifted"
                        pairs = [scores[key] for key in keys]
                        yield from self.count_records((name, centering, query), normalize, pairs)
        for name, found in grams.items():
            quality, _ = measure_ranking(
                np.asarray(found.norm_M[:num_train], np.float64), self.is_target_N, self.ids
            )
            yield {"table": "norm", "kernel": name, **quality}

    def count_records(
        self,
        key: tuple[str, str, str],
        normalize: str,
        parts: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> Iterator[dict[str, Any]]:
        """Yields the mean quality over random subsets of queries, for each number of them.

        A part is the scores of each query and the cosines between the queries; several parts are
        brought to one scale and summed.
        """
        from raslik_jax.retrieve import exact
        from raslik_jax.retrieve.strategies import aggregate_scores

        total = len(parts[0][0])
        counts = [total]
        if normalize == "vector" and key[1] in ("plain", "centered") and key[2] == "own":
            counts = sorted({count for count in _COUNTS.value if count < total} | {total})
        for count in counts:
            subsets = self.query_subsets(total, count)
            for combine in COMBINATIONS:
                found: list[dict[str, Any]] = []
                for subset in subsets:
                    combined = [
                        aggregate_scores(score_QN[subset], combine, gram_QQ[np.ix_(subset, subset)])
                        for score_QN, gram_QQ in parts
                    ]
                    score_N = combined[0] if len(combined) == 1 else exact.z_sum(combined)
                    quality, _ = measure_ranking(score_N, self.is_target_N, self.ids)
                    found.append(dict(quality))
                kernel, centering, query = key
                yield {
                    "table": "kernel",
                    "kernel": kernel,
                    "centering": centering,
                    "normalize": normalize,
                    "query": query,
                    "combine": combine,
                    "num_queries": count,
                    "is_all": count == total,
                    **{name: float(np.mean([entry[name] for entry in found])) for name in QUALITY},
                    "least_auprc": min(entry["auprc"] for entry in found),
                }

    # strategies -------------------------------------------------------------------------------

    def strategy_records(
        self, score_QN: np.ndarray, gram_QQ: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """Yields every strategy at the run's own settings, and rankings without a model."""
        from raslik_jax.index.combine import common_weights
        from raslik_jax.retrieve.selection import select_by_count
        from raslik_jax.retrieve.strategies import RANKING_STRATEGIES, STRATEGIES, Request, Vectors
        from raslik_jax.run.stages.retrieving import make_embeddings

        workspace, num_train = self.workspace, self.rows.num_train
        config = workspace.config
        own = self.rows.queries(config.sketch.query_output)
        exact_N = score_QN.mean(axis=0)
        found_QN = None if _LARGE.value else self.largest_sketch_scores(own)
        sketched_QN = score_QN if found_QN is None else found_QN
        train = self.workspace.corpus.train
        queries = tuple(self.rows.examples[position] for position in own)
        count = int(self.is_target_N.sum())
        base = Request(
            examples=train,
            influence_N=sketched_QN.mean(axis=0),
            seed=config.seed,
            retain_from="non_target",
            queries=queries,
            num_forget=count,
            num_retain=count,
            exact_N=exact_N,
        )
        entries: dict[str, Request] = {
            name: base
            for name in ("random", "oracle", "cr_50", "raslik_f", "raslik", "exact", "bm25")
        }
        common_N = common_weights(gram_QQ) @ score_QN
        entries[_SHARED] = base._replace(exact_N=common_N)
        entries["bm25, answers too"] = base._replace(query_text="prompt_and_output")
        entries |= {f"{n}, any retain": base for n in ("random", "oracle", "raslik_f")}
        if _ENCODER.value:
            folder = self.out / "embeddings"
            folder.mkdir(exist_ok=True)
            replaced = dataclasses.replace(
                config,
                retrieve=dataclasses.replace(
                    config.retrieve, encoder_checkpoint=_ENCODER.value, query_text="prompt"
                ),
            )
            made = folder / "queries.npy"
            if not made.is_file() or len(read_array(made)) != len(queries):
                changed = type(workspace)(workspace.root, replaced)
                make_embeddings(changed, folder, queries=queries)
            parts = [read_array(folder / f"{name}.npy") for name in ("examples", "queries")]
            entries["embedding"] = base._replace(vectors=Vectors(*parts))

        def of_subset(name: str, subset_Q: np.ndarray) -> Request:
            request, vectors = entries[name], entries[name].vectors
            exact_N = score_QN[subset_Q].mean(axis=0)
            if name == _SHARED:
                exact_N = common_weights(gram_QQ[np.ix_(subset_Q, subset_Q)]) @ score_QN[subset_Q]
            return request._replace(
                influence_N=sketched_QN[subset_Q].mean(axis=0),
                exact_N=exact_N,
                queries=tuple(queries[query] for query in subset_Q),
                vectors=vectors and vectors._replace(query_QE=vectors.query_QE[subset_Q]),
            )

        for num in (count for count in _COUNTS.value if count < len(queries)):
            for name in (name for name in entries if name in _BY_QUERY):
                qualities: list[dict[str, Any]] = []
                for subset_Q in self.query_subsets(len(queries), num):
                    scores = STRATEGIES[name.split(",")[0]](of_subset(name, subset_Q))
                    quality, _ = measure_ranking(scores.forget_N, self.is_target_N, self.ids)
                    qualities.append(dict(quality))
                yield {
                    "table": "strategy_queries",
                    "strategy": name,
                    "num_queries": num,
                    **{field: float(np.mean([q[field] for q in qualities])) for field in QUALITY},
                    "least_auprc": min(q["auprc"] for q in qualities),
                }
        for name, request in entries.items():
            strategy = name.replace(", any retain", "_anywhere").split(",")[0]
            # What is drawn at random is the mean of 20 draws.
            draws = 1 if strategy in ("raslik", "exact", "bm25", "embedding") else 20
            found = []
            for draw in range(draws):
                scores = STRATEGIES[strategy](request._replace(seed=request.seed + draw))
                chosen = select_by_count(*scores, self.ids, num_forget=count, num_retain=count)
                ranks = strategy in RANKING_STRATEGIES
                found.append(
                    {
                        "precision": self.is_target_N[chosen.forget].mean(),
                        "targets_in_retain": self.is_target_N[chosen.retain].mean(),
                        "retain_positive": (base.influence_N[chosen.retain] >= 0).mean(),
                        "auroc": ranking.auroc(scores.forget_N, self.is_target_N)
                        if ranks
                        else None,
                        "auprc": ranking.auprc(scores.forget_N, self.is_target_N)
                        if ranks
                        else None,
                    }
                )
            yield {"table": "strategy", "strategy": name} | {
                field: None
                if found[0][field] is None
                else float(np.mean([entry[field] for entry in found]))
                for field in found[0]
            }
        encoded = workspace.encode(self.rows.examples)
        length_M = encoded.num_targets_N.astype(np.float64)
        nearness_N = -np.abs(length_M[:num_train] - length_M[own].mean())
        for name, score_N in (
            ("length near the queries'", nearness_N),
            ("longest response", length_M[:num_train]),
        ):
            quality, _ = measure_ranking(score_N, self.is_target_N, self.ids)
            yield {"table": "strategy", "strategy": name, **quality}

    def largest_sketch_scores(self, own: np.ndarray) -> np.ndarray | None:
        """Returns the cosines by the default's largest binned sketch, if there is one."""
        from raslik_jax.retrieve import exact

        path = self.out / "sketches" / self.passes[self.default].folder / "gram.npy"
        if not path.is_file():
            return None
        gram_MM = read_array(path).astype(np.float64)
        if self.workspace.config.retrieve.center:
            gram_MM = exact.center(gram_MM, self.rows.num_train)
        return exact.cosines(gram_MM, self.rows.num_train, own)

    def query_subsets(self, total: int, count: int) -> list[np.ndarray]:
        """Returns random subsets of the queries; where they are few, every single one of them."""
        if count == total:
            return [np.arange(total)]
        if count == 1 and total <= 4 * _DRAWS.value:
            return [np.array([query]) for query in range(total)]
        generator = np.random.default_rng([self.workspace.config.seed, count])
        return [generator.choice(total, count, replace=False) for _ in range(_DRAWS.value)]

    # sketches ---------------------------------------------------------------------------------

    def sketch_records(self, name: str, grams: Any) -> list[dict[str, Any]]:
        """Returns the quality of every sketch of one pass, one record for all projection seeds."""
        from raslik_jax.index.combine import common_weights
        from raslik_jax.retrieve import exact
        from raslik_jax.run.exact_gradients import project_rows
        from raslik_jax.sketch import projections

        config, num_train = self.workspace.config, self.rows.num_train
        folder = self.out / "sketches" / self.passes[name].folder
        folder.mkdir(parents=True, exist_ok=True)
        center = config.retrieve.center
        gram_MM = grams.vector_MM.astype(np.float64)
        if center:
            gram_MM = exact.center(gram_MM, num_train)
        own = self.rows.queries(config.sketch.query_output)
        score_QN = exact.cosines(gram_MM, num_train, own)
        # The exact scores by the mean, and by what the queries have in common.
        best = [
            score_QN.mean(axis=0),
            common_weights(exact.query_cosines(gram_MM, own)) @ score_QN,
        ]
        vectors: np.ndarray | None = None
        records = []
        for family in _FAMILIES.value:
            for size in _SIZES.value:
                if family == "dense_rademacher" and size > _DENSE_MAX.value:
                    continue
                found: dict[str, list[dict[str, Any]]] = {}
                for draw in range(_SEEDS.value):
                    path = folder / f"{family}-{size}-{draw}.json"
                    dtypes = _DTYPES.value if family == "binned" else ["float32"]
                    wanted = [*dtypes, *(f"{dtype}, common" for dtype in dtypes)]
                    entries = read_json(path) if path.is_file() else {}
                    if not set(wanted) <= set(entries):
                        if vectors is None:
                            vectors = self.maker.vectors(self.passes[name])
                        if size > vectors.shape[1]:
                            break
                        start = time.monotonic()
                        projection = projections.init_projection(
                            config.seed + 1000 * draw, family, vectors.shape[1], size
                        )
                        sketch_MK = project_rows(vectors, projection)
                        made = self.score_dtypes(sketch_MK, own, center, dtypes)
                        if family == "binned" and draw == 0:
                            norm_M = np.maximum(np.linalg.norm(sketch_MK, axis=1), 1e-30)
                            unit_MK = sketch_MK / norm_M[:, None]
                            np.save(folder / "gram.npy", unit_MK @ unit_MK.T, allow_pickle=False)
                        entries = {
                            dtype: self.sketch_entry(score_N, best["common" in dtype])
                            for dtype, score_N in made.items()
                        }
                        write_json(path, entries)
                        seconds = time.monotonic() - start
                        print(f"    {family} K = {size} seed {draw}: {seconds:.1f} s", flush=True)
                    for dtype in wanted:
                        found.setdefault(dtype, []).append(entries[dtype])
                for dtype, members in found.items():
                    sets = [entry["forget"] for entry in members]
                    _, exact_sets = measure_ranking(
                        best["common" in dtype], self.is_target_N, self.ids
                    )
                    records.append(
                        {
                            "table": "sketch",
                            "kernel": name,
                            "family": family,
                            "size": size,
                            "dtype": dtype.split(",")[0],
                            "combine": "common" if "," in dtype else "mean",
                            "jaccard_seeds": ranking.mean_jaccard(sets),
                            "jaccard_exact": float(
                                np.mean([ranking.jaccard(s, exact_sets.forget) for s in sets])
                            ),
                            **{
                                field: float(np.mean([entry[field] for entry in members]))
                                for field in (*QUALITY, "spearman", "error")
                            },
                        }
                    )
        return records

    def sketch_entry(self, score_N: np.ndarray, exact_N: np.ndarray) -> dict[str, Any]:
        """Returns the quality of one sketch's scores and how near they are to the exact ones."""
        quality, chosen = measure_ranking(score_N, self.is_target_N, self.ids)
        return {
            **quality,
            "spearman": ranking.rank_correlation(score_N, exact_N),
            "error": float(np.sqrt(np.mean((score_N - exact_N) ** 2))),
            "forget": chosen.forget.tolist(),
        }

    def score_dtypes(
        self, sketch_MK: np.ndarray, own: np.ndarray, center: bool, dtypes: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Returns the mean scores from an index of each dtype, float64."""
        from raslik_jax.index import search
        from raslik_jax.index.store import SketchStore
        from raslik_jax.index.upkeep import requantize

        norm_M = np.linalg.norm(sketch_MK, axis=1)
        unit_MK = sketch_MK / np.where(norm_M > 0, norm_M, 1)[:, None]
        found = {}
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            store = SketchStore.create(
                pathlib.Path(folder) / "float32",
                identity={},
                ids=self.ids,
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
                        is_centered=center and dtype == "sign",
                    )
                aggregates: dict[str, search.Aggregate] = {
                    dtype: "mean",
                    f"{dtype}, common": "common",
                }
                for name, aggregate in aggregates.items():
                    scores = search.score_store(
                        copy, unit_MK[own], center=center, aggregate=aggregate
                    )
                    found[name] = np.asarray(scores.forget_N).astype(np.float64)
        return found


# all runs -------------------------------------------------------------------------------------


def _cell(entry: Mapping[str, float] | None) -> str:
    if entry is None:
        return "-"
    if entry["low"] == entry["high"]:
        return f"{entry['mean']:.3f}"
    return tables.format_interval(dict(entry), end_decimals=3)  # type: ignore[arg-type]


def _table(
    entries: Sequence[Mapping[str, Any]], by: Mapping[str, str], values: Mapping[str, str]
) -> str:
    columns = (*map(tables.Column, by.values()), tables.Column("seeds", "right"))
    columns += tuple(map(tables.Column, values.values()))
    rows = tuple(
        (
            *(str(entry[name]) for name in by),
            str(entry["count"]),
            *(_cell(entry[name]) for name in values),
        )
        for entry in entries
    )
    return tables.render_markdown(tables.Table(columns, rows))


SHOWN = {
    "auprc": "auPRC",
    "auroc": "auROC",
    "precision": "precision",
    "targets_in_retain": "targets in retain",
}


def summarize(records: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the records joined over seeds, by table."""
    kernel = ["kernel", "centering", "normalize", "query", "combine"]

    def of(table: str) -> list[Mapping[str, Any]]:
        return [record for record in records if record["table"] == table]

    whole = [record for record in of("kernel") if record["is_all"]]
    joined = {
        "strategies": join_records(
            of("strategy"), by=["strategy"], values=[*SHOWN, "retain_positive"]
        ),
        "strategy_queries": join_records(
            of("strategy_queries"),
            by=["strategy", "num_queries"],
            values=[*QUALITY, "least_auprc"],
        ),
        "kernels": join_records(whole, by=kernel, values=QUALITY),
        "queries": join_records(
            of("kernel"), by=[*kernel, "num_queries"], values=[*QUALITY, "least_auprc"]
        ),
        "sketches": join_records(
            of("sketch"),
            by=["kernel", "family", "size", "dtype", "combine"],
            values=[*QUALITY, "jaccard_seeds", "jaccard_exact", "spearman", "error"],
        ),
        "norms": join_records(of("norm"), by=["kernel"], values=QUALITY),
    }
    for entry in joined["kernels"]:
        named = PRESETS.get((entry["kernel"], entry["centering"], entry["normalize"]), "")
        entry["preset"] = named if entry["combine"] == "mean" else ""
    return joined


def _is_main(entry: Mapping[str, Any]) -> bool:
    return (entry["normalize"], entry["query"], entry["combine"]) == ("vector", "own", "mean")


def write_tables(
    joined: Mapping[str, list[dict[str, Any]]], seeds: Sequence[int], out: pathlib.Path
) -> None:
    """Writes tables.md."""
    kernels = joined["kernels"]

    def value(entry: Mapping[str, Any]) -> float:
        return -entry["auprc"]["mean"]

    plain = ("plain", "centered")
    own = [e for e in kernels if e["normalize"] == "vector" and e["query"] == "own"]
    ranked = sorted((entry for entry in own if _is_main(entry)), key=value)
    main = sorted((entry for entry in own if entry["centering"] in plain), key=value)
    best = {entry["kernel"] for entry in main[:4]} | {name for name, _, _ in PRESETS}
    further = [e for e in ranked if e["kernel"] in best and e["centering"] not in plain]
    options = [e for e in kernels if e["kernel"] in best and e["centering"] in plain]
    top = [(e["kernel"], e["centering"]) for e in main[:4]] + [k[:2] for k in PRESETS]
    counts = [
        entry
        for entry in joined["queries"]
        if (entry["normalize"], entry["query"]) == ("vector", "own")
        and (entry["kernel"], entry["centering"]) in top
    ]
    shown = SHOWN | {"below_zero": "scores below 0"}
    parts = [
        f"Seeds {', '.join(map(str, seeds))}; mean [least, largest] over them.",
        "## Strategies, at the run's own settings",
        _table(
            joined["strategies"],
            {"strategy": "strategy"},
            SHOWN | {"retain_positive": "retain, score >= 0"},
        ),
        "## Strategies by the number of queries",
        "Mean over random subsets; least: the worst subset. What is drawn at random or by labels "
        "depends on no query.",
        _table(
            joined["strategy_queries"],
            {"strategy": "strategy", "num_queries": "queries"},
            {"auprc": "auPRC", "least_auprc": "least auPRC", "precision": "precision"},
        ),
        "## Exact kernel: which gradient, and what is taken away from it",
        "All queries, the model's own answers, cosine of whole gradients; best auPRC first.",
        _table(
            main, {"kernel": "kernel", "centering": "centering", "combine": "queries by"}, shown
        ),
        "## More than the mean taken away: the largest principal directions of the centered rows",
        _table(further, {"kernel": "kernel", "centering": "centering"}, shown),
        "## Normalization and the answers of the queries",
        _table(
            options,
            {
                "kernel": "kernel",
                "centering": "centering",
                "normalize": "normalize",
                "query": "query",
                "combine": "queries by",
                "preset": "preset",
            },
            SHOWN,
        ),
        "## Number of queries",
        "Mean over random subsets; least: the worst subset.",
        _table(
            counts,
            {
                "kernel": "kernel",
                "centering": "centering",
                "combine": "queries by",
                "num_queries": "queries",
            },
            {"auprc": "auPRC", "least_auprc": "least auPRC", "precision": "precision"},
        ),
        "## Sketches",
        _table(
            joined["sketches"],
            {
                "kernel": "kernel",
                "family": "family",
                "size": "K",
                "dtype": "dtype",
                "combine": "queries by",
            },
            {
                "auprc": "auPRC",
                "precision": "precision",
                "targets_in_retain": "targets in retain",
                "jaccard_seeds": "Jaccard of forget sets, between seeds",
                "jaccard_exact": "with the exact set",
                "spearman": "rank correlation with the exact kernel",
                "error": "rms error of a score",
            },
        ),
        "## Norm of the gradient alone",
        _table(joined["norms"], {"kernel": "gradient"}, SHOWN),
    ]
    write_text(out / "tables.md", "\n\n".join(parts) + "\n")


def write_figures(joined: Mapping[str, list[dict[str, Any]]], out: pathlib.Path) -> None:
    """Writes the figures, each as PNG and SVG."""
    rows: dict[str, dict[str, Any]] = {}
    main = [e for e in joined["kernels"] if _is_main(e) and e["centering"] in ("plain", "centered")]
    for entry in sorted(main, key=lambda entry: -entry["auprc"]["mean"]):
        rows.setdefault(entry["kernel"], {})[entry["centering"]] = entry["auprc"]
    figure = figures.draw_dots(rows, xlabel="auPRC of the forget ranking", title="Which gradient")
    figures.save_figure(figure, out / "kernels")

    best = [name for name in rows if "z-sum" not in name][:3]
    names = {*best, *(name for name, _, _ in PRESETS)}
    by_kernel: dict[str, dict[str, list[Any]]] = {}
    for entry in joined["queries"]:
        is_shown = (entry["normalize"], entry["query"]) == ("vector", "own")
        is_shown &= entry["combine"] in ("mean", "common") and entry["centering"] == "centered"
        if is_shown and entry["kernel"] in names:
            points = by_kernel.setdefault(entry["kernel"], {}).setdefault(entry["combine"], [])
            points.append((float(entry["num_queries"]), entry["auprc"]))
    figure = figures.draw_curves(by_kernel, xlabel="queries", ylabel="auPRC, centered", log_x=True)
    figures.save_figure(figure, out / "queries")

    panels: dict[str, dict[str, list[Any]]] = {"auPRC": {}, "Jaccard with the exact set": {}}
    for entry in joined["sketches"]:
        if entry["combine"] != "mean":
            continue
        label = f"{entry['family']}, {entry['dtype']}"
        for panel, field in zip(panels, ("auprc", "jaccard_exact"), strict=True):
            if entry["kernel"] == joined["sketches"][0]["kernel"]:
                panels[panel].setdefault(label, []).append((float(entry["size"]), entry[field]))
    if joined["sketches"]:
        figure = figures.draw_curves(panels, xlabel="K", ylabel="", log_x=True)
        figures.save_figure(figure, out / "sketches")


def write_report(records: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Writes records.csv, summary.json, tables.md and the figures."""
    fields = list(dict.fromkeys(name for record in records for name in record))
    lines = io.StringIO()
    writer = csv.DictWriter(lines, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(out / "records.csv", lines.getvalue())
    joined = summarize(records)
    write_json(out / "summary.json", joined)
    write_tables(joined, sorted({int(record["seed"]) for record in records}), out)
    write_figures(joined, out)


def main() -> None:
    if not _RUNS.value:
        raise ValueError("work directories wanted as --runs=DIR,DIR, none came")
    command.require("matplotlib")
    roots = [pathlib.Path(run) for run in _RUNS.value]
    if len({root.name for root in roots}) < len(roots):
        raise ValueError(f"runs of different names wanted, came {[r.name for r in roots]}")
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity(logging.WARNING)
    if not _REPORT_ONLY.value:
        import jax

        # Programs are the same for all seeds, and for a job that goes on after a kill.
        jax.config.update("jax_compilation_cache_dir", str((out / "compiled").resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        for root in roots:
            print(f"{root}:", flush=True)
            records = Trial(root, out).measure()
            write_json(out / root.name / "records.json", records)
    records = [record for root in roots for record in read_json(out / root.name / "records.json")]
    write_report(records, out)
    print((out / "tables.md").read_text())


if __name__ == "__main__":
    command.start(main, when_stopped="stopped; the same command goes on from here")
