"""Does retrieval find the examples that taught the behavior? Every choice of it, measured.

  python experiments/studies/retrieval_quality/measure.py --runs=runs/seed-0,runs/seed-1 \\
    --out=runs/quality

Takes work directories whose stages corpus, backbone, finetune and references are finished and that
differ in their seed; they are only read. Whole gradients are made once for each of --passes
(ADAPTER/LOSS/TOKENS), and all else follows from them: centering, normalization, queries, sketches.
A killed job goes on where it stopped. Leaves in --out, for each run, records.json, and over all
runs records.csv, summary.json, tables.md and figures. --report_only joins what is there.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import numpy as np
from absl import logging

from experiments.studies import gradients
from experiments.studies.rankings import Quality
from experiments.studies.retrieval_quality import report, sketches, strategies
from experiments.studies.retrieval_quality.labels import KernelScores, Labels, mean_of
from raslik_jax.cli import command
from raslik_jax.files import read_json, write_json
from raslik_jax.retrieve import exact
from raslik_jax.run import exact_gradients
from raslik_jax.settings import setting

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
_DEFLATED = (1, 3, 10)
_SUMMED = ("initial/next_token/response", "finetuned/unshifted/response")
_CENTERINGS = ("plain", "centered")
_COMBINATIONS = get_args(gradients.Combination)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(gradients.Options, sketches.Options):
    """Options of the study."""

    out: str = setting("runs/retrieval_quality", "Where results and gradients go.")
    passes: tuple[str, ...] = setting(
        DEFAULT_PASSES,
        "Gradients to make, as ADAPTER/LOSS/TOKENS; the run's own is added if it is missing.",
    )
    sketch_passes: tuple[str, ...] = setting(
        (), "Passes that are sketched (default: the run's own setting)."
    )
    num_queries: tuple[int, ...] = setting(
        (1, 5, 20, 40), "Numbers of queries; all of them are always added.", low=1
    )
    draws: int = setting(20, "Random subsets of queries for each number.", low=1)
    encoder_checkpoint: str = setting("", "Encoder of the embedding baseline.")
    keep: tuple[str, ...] = setting((), "Passes whose gradients stay on disk (4 P bytes a row).")
    large: bool = setting(
        False,
        "Keep no gradient: two rounds over the corpus give the exact scores of every pass and "
        "nothing else (no sketches, no per-tensor normalization).",
    )


class Choice(NamedTuple):
    """What a kernel is, beside how its queries are combined."""

    kernel: str
    centering: str
    normalize: str
    query: str


class Trial:
    """One run: its labels, its gradients and what is measured on them."""

    def __init__(self, options: Options, root: pathlib.Path):
        self.options = options
        self.out = pathlib.Path(options.out) / root.name
        self.out.mkdir(parents=True, exist_ok=True)
        self.workspace, self.rows, self.maker = gradients.open_gradients(options, root, self.out)
        self.labels = Labels.of(self.workspace.corpus.train)
        self.default = gradients.own_pass(self.workspace.config)
        names = dict.fromkeys([*options.passes, *options.sketch_passes, self.default])
        self.passes = {name: exact_gradients.parse_pass(name) for name in names}
        self.own = self.rows.queries(self.workspace.config.sketch.query_output)

    def kernel_scores(self, gram_MM: np.ndarray, queries: np.ndarray) -> KernelScores:
        """Returns what a Gram matrix says of some queries."""
        return KernelScores(
            exact.cosines(gram_MM, self.rows.num_train, queries),
            exact.query_cosines(gram_MM, queries),
        )

    def own_scores(self, gram_MM: np.ndarray) -> KernelScores:
        """Returns the scores at the run's own setting."""
        gram_MM = gram_MM.astype(np.float64)
        if self.workspace.config.retrieve.center:
            gram_MM = exact.center(gram_MM, self.rows.num_train)
        return self.kernel_scores(gram_MM, self.own)

    def measure(self) -> list[dict[str, Any]]:
        """Makes what is missing and returns the records of this run."""
        config = self.workspace.config
        found = self.large_records() if self.options.large else self.all_records()
        header = {"run": self.out.name, "name": config.name, "seed": config.seed}
        return [header | record for record in found]

    def all_records(self) -> Iterator[dict[str, Any]]:
        """Yields what is measured on kept gradients."""
        grams = {}
        sketched = self.options.sketch_passes or (self.default,)
        for number, (name, what) in enumerate(self.passes.items(), start=1):
            start = time.monotonic()
            keep = name in self.options.keep
            grams[name] = self.maker.grams(what, keep=keep or name in sketched)
            if name in sketched:
                yield from self.sketch_records(name, grams[name])
                if not keep:
                    self.maker.drop(what)
            seconds = time.monotonic() - start
            print(f"  [{number}/{len(self.passes)}] {name}: {seconds:.0f} s", flush=True)
        yield from self.kernel_records(grams)
        scores = self.own_scores(grams[self.default].vector_MM)
        gram_MM = sketches.read_gram(self.sketch_folder(self.default))
        sketched_scores = scores if gram_MM is None else self.own_scores(gram_MM)
        yield from self.strategy_records(scores, sketched_scores)

    def large_records(self) -> Iterator[dict[str, Any]]:
        """Yields what the exact kernel gives without keeping gradients."""
        config, num_queries = self.workspace.config, self.rows.num_queries
        spans = {"own": slice(0, num_queries), "gold": slice(num_queries, None)}
        for name, what in self.passes.items():
            products = self.maker.products(what)
            for centering in _CENTERINGS:
                both = KernelScores(
                    *exact.cosines_of_products(products, center=centering == "centered")
                )
                for query, span in spans.items():
                    choice = Choice(name, centering, "vector", query)
                    yield from self.count_records(choice, [both.some(span)])
                if name == self.default and (centering == "centered") == config.retrieve.center:
                    scores = both.some(self.own - self.rows.num_train)
        yield from self.strategy_records(scores, scores)

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
        num_train = self.rows.num_train
        for normalize in ("vector", "per_tensor"):
            scores: dict[Choice, KernelScores] = {}
            for name, parts in self.kernels(grams).items():
                gram_MM = np.mean(
                    [getattr(grams[part], f"{normalize}_MM") for part in parts], axis=0
                ).astype(np.float64)
                centered_MM = exact.center(gram_MM, num_train)
                variants = {"plain": gram_MM, "centered": centered_MM}
                if normalize == "vector":
                    deflated = exact.deflate(centered_MM, num_train, _DEFLATED)
                    variants |= {f"less {rank} directions": m for rank, m in deflated.items()}
                for centering, matrix_MM in variants.items():
                    for query in ("own", "gold"):
                        choice = Choice(name, centering, normalize, query)
                        scores[choice] = self.kernel_scores(matrix_MM, self.rows.queries(query))
                        yield from self.count_records(choice, [scores[choice]])
            for query in ("own", "gold"):
                for centering in _CENTERINGS:
                    parts_of = [Choice(name, centering, normalize, query) for name in _SUMMED]
                    if all(choice in scores for choice in parts_of):
                        summed = parts_of[0]._replace(kernel=report.Z_SUM)
                        yield from self.count_records(summed, [scores[c] for c in parts_of])
        for name, found in grams.items():
            norm_N = np.asarray(found.norm_M[:num_train], np.float64)
            yield {"table": "norm", "kernel": name, **self.labels.quality(norm_N)}

    def count_records(
        self, choice: Choice, parts: Sequence[KernelScores]
    ) -> Iterator[dict[str, Any]]:
        """Yields the mean quality over random subsets of queries, for each number of them.

        Several parts are brought to one scale and summed.
        """
        total = len(parts[0].score_QN)
        is_main = choice.normalize == "vector" and choice.query == "own"
        counts = [total]
        if is_main and choice.centering in _CENTERINGS:
            counts = sorted({n for n in self.options.num_queries if n < total} | {total})
        for count in counts:
            subsets = self.query_subsets(total, count)
            for combine in _COMBINATIONS:
                found: list[Quality] = []
                for subset in subsets:
                    combined = [part.some(subset).combine(combine) for part in parts]
                    score_N = combined[0] if len(combined) == 1 else exact.z_sum(combined)
                    found.append(self.labels.quality(score_N))
                yield {
                    "table": "kernel",
                    **choice._asdict(),
                    "combine": combine,
                    "num_queries": count,
                    "is_all": count == total,
                    **mean_of(found),
                    "least_auprc": min(entry["auprc"] for entry in found),
                }

    def query_subsets(self, total: int, count: int) -> list[np.ndarray]:
        """Returns random subsets of the queries; where they are few, every single one of them."""
        draws = self.options.draws
        if count == total:
            return [np.arange(total)]
        if count == 1 and total <= 4 * draws:
            return [np.array([query]) for query in range(total)]
        generator = np.random.default_rng([self.workspace.config.seed, count])
        return [generator.choice(total, count, replace=False) for _ in range(draws)]

    # strategies and sketches ------------------------------------------------------------------

    def strategy_records(
        self, scores: KernelScores, sketched: KernelScores
    ) -> Iterator[dict[str, Any]]:
        """Yields every strategy at the run's own settings, and rankings without a model."""
        queries = tuple(self.rows.examples[position] for position in self.own)
        field = strategies.Field(
            self.workspace, self.labels, queries, scores, sketched.score_QN, self.out
        )
        entries = field.entries(self.options.encoder_checkpoint)
        for count in (n for n in self.options.num_queries if n < len(queries)):
            subsets = self.query_subsets(len(queries), count)
            yield from field.query_records(entries, subsets)
        yield from field.records(entries)
        encoded = self.workspace.encode(self.rows.examples)
        length_M = encoded.num_targets_N.astype(np.float64)
        length_N = length_M[: self.rows.num_train]
        nearness_N = -np.abs(length_N - length_M[self.own].mean())
        for name, score_N in (
            ("length near the queries'", nearness_N),
            ("longest response", length_N),
        ):
            yield {"table": "strategy", "strategy": name, **self.labels.quality(score_N)}

    def sketch_folder(self, name: str) -> pathlib.Path:
        """Returns where the sketches of a pass are."""
        return self.out / "sketches" / self.passes[name].folder

    def sketch_records(self, name: str, grams: exact.Grams) -> Iterator[dict[str, Any]]:
        """Yields the quality of every sketch of one pass."""
        config = self.workspace.config
        bench = sketches.SketchTrial(
            self.options,
            self.options.sketch_sizes,
            self.labels,
            self.own,
            self.own_scores(grams.vector_MM),
            lambda: self.maker.vectors(self.passes[name]),
            self.sketch_folder(name),
            seed=config.seed,
            center=config.retrieve.center,
        )
        return ({"table": "sketch", "kernel": name, **entry} for entry in bench.records())


def main(options: Options) -> None:
    if not options.runs:
        raise ValueError("--runs must be a list of work directories, got none")
    command.require("matplotlib")
    logging.set_verbosity(logging.WARNING)
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    roots = [pathlib.Path(run) for run in options.runs]
    if not options.report_only:
        # Programs are the same for all seeds, and for a job that goes on after a kill.
        jax.config.update("jax_compilation_cache_dir", str((out / "compiled").resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        for root in roots:
            print(f"{root}:", flush=True)
            write_json(out / root.name / "records.json", Trial(options, root).measure())
    records = [record for root in roots for record in read_json(out / root.name / "records.json")]
    report.write_report(records, out)
    print((out / "tables.md").read_text())


if __name__ == "__main__":
    command.start(main, Options(), when_stopped="stopped; the same command goes on from here")
