"""Measures whether retrieval finds the examples that taught the behavior, for all its settings.

  python experiments/studies/retrieval_quality/measure.py --runs=runs/seed-0,runs/seed-1 \\
    --out=runs/quality

The runs are work directories that differ in their seed. Their stages corpus, backbone, finetune and
references are finished. The command only reads them. It makes whole gradients once for each of
--passes (ADAPTER/LOSS/TOKENS). Centering, normalization, queries and sketches follow from them. A
killed job continues. For each run --out gets records.json. Over all runs it gets summary.json,
tables.md and figures. --report_only joins the records that exist.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np

from experiments.studies import gradients, kernels, reports
from experiments.studies.kernels import Grams, KernelScores
from experiments.studies.rankings import mean_of
from experiments.studies.retrieval_quality import report, sketches, strategies
from raslik_jax.base.files import read_array
from raslik_jax.base.settings import setting
from raslik_jax.cli import command
from raslik_jax.index.combine import Aggregate

DEFAULT_PASSES = (
    "finetuned/unshifted/response",
    "finetuned/next_token/response",
    "initial/next_token/response",
    "finetuned/unshifted/all",
    "finetuned/next_token/all",
    "initial/next_token/all",
    "initial/unshifted/response",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(gradients.Options, sketches.Options):
    """Options of the study."""

    out: str = setting("runs/retrieval_quality", "Where results and gradients go.")
    passes: tuple[str, ...] = setting(
        DEFAULT_PASSES,
        "Gradients to make, as ADAPTER/LOSS/TOKENS; the run's own is added if it is missing.",
    )
    num_queries: tuple[int, ...] = setting(
        (1, 5, 20, 40), "Numbers of queries; all of them are always added.", low=1
    )
    draws: int = setting(20, "Random subsets of queries for each number.", low=1)
    encoder_checkpoint: str = setting("", "Encoder of the embedding baseline.")
    keep: tuple[str, ...] = setting((), "Passes whose gradients stay on disk (4 P bytes a row).")

    def passes_named(self) -> tuple[str, ...]:
        return *self.passes, *self.keep


class Choice(NamedTuple):
    """The settings of a kernel without the combination of its queries."""

    kernel: str
    centering: str
    normalize: str
    query: str


class Trial:
    """One run: its gradients and what is measured on them."""

    def __init__(self, options: Options, root: pathlib.Path):
        self.options, self.out = options, pathlib.Path(options.out) / root.name
        self.gradients = gradients.RunGradients(options, root, self.out)
        self.labels, self.config = self.gradients.labels, self.gradients.config
        self.num_train, self.own = self.gradients.num_train, self.gradients.own
        self.sketches = self.out / "sketches" / self.gradients.default.replace("/", "-")

    def own_scores(self, gram_MM: np.ndarray) -> KernelScores:
        """Returns the scores at the run's own setting."""
        gram_MM = gram_MM.astype(np.float64)
        if self.config.retrieve.center:
            gram_MM = kernels.center(gram_MM, self.num_train)
        return kernels.kernel_scores(gram_MM, self.num_train, self.own)

    def records(self) -> Iterator[dict[str, Any]]:
        """Makes what is missing and yields what is measured."""
        options, default, grams = self.options, self.gradients.default, {}
        names = dict.fromkeys([*options.passes, default])
        for number, name in enumerate(names, start=1):
            start, keep = time.monotonic(), name in options.keep
            grams[name] = self.gradients.grams(name, keep=keep or name == default)
            if name == default:
                exact = self.own_scores(grams[name].vector_MM)
                trial = sketches.Trial(self.gradients, exact, self.sketches)
                yield from trial.records(options, options.sketch_sizes)
                if not keep:
                    self.gradients.drop(name)
            seconds = time.monotonic() - start
            print(f"  [{number}/{len(names)}] {name}: {seconds:.0f} s", flush=True)
        yield from self.kernel_records(grams)
        yield from self.strategy_records(grams[default])

    def kernel_records(self, grams: Mapping[str, Grams]) -> Iterator[dict[str, Any]]:
        """Yields what the exact kernel gives, for every choice."""
        num_train = self.num_train
        for normalize in ("vector", "per_tensor"):
            scores: dict[Choice, KernelScores] = {}
            for name, gram in grams.items():
                gram_MM = getattr(gram, f"{normalize}_MM").astype(np.float64)
                centered_MM = kernels.center(gram_MM, num_train)
                variants = {"plain": gram_MM, "centered": centered_MM}
                if normalize == "vector":
                    deflated = kernels.deflate(centered_MM, num_train, _DEFLATED)
                    variants |= {f"less {rank} directions": m for rank, m in deflated.items()}
                for centering, matrix_MM in variants.items():
                    for query in ("own", "gold"):
                        choice = Choice(name, centering, normalize, query)
                        queries = self.gradients.queries(query)
                        scores[choice] = kernels.kernel_scores(matrix_MM, num_train, queries)
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
        counts = {total}
        if is_main and choice.centering in _CENTERINGS:
            counts |= {n for n in self.options.num_queries if n < total}
        for count in sorted(counts):
            subsets = self.query_subsets(total, count)
            for combine in get_args(Aggregate):
                found: list[dict[str, float]] = []
                for subset in subsets:
                    combined = [part.some(subset).combine(combine) for part in parts]
                    score_N = combined[0] if len(combined) == 1 else kernels.z_sum(combined)
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
        generator = np.random.default_rng([self.config.seed, count])
        return [generator.choice(total, count, replace=False) for _ in range(draws)]

    def strategy_records(self, grams: Grams) -> Iterator[dict[str, Any]]:
        """Yields every strategy at the run's own settings, and rankings without a model."""
        exact = self.own_scores(grams.vector_MM)
        path = self.sketches / "gram.npy"
        sketched = self.own_scores(read_array(path)) if path.is_file() else exact
        checkpoint, sentence_QN = self.options.encoder_checkpoint, None
        if checkpoint:
            path = self.out / "sentence_cosines.npy"
            sentence_QN = strategies.sentence_cosines(self.gradients, checkpoint, path)
        field = strategies.Field(self.gradients, exact, sketched, sentence_QN)
        for count in (n for n in self.options.num_queries if n < len(self.own)):
            yield from field.query_records(self.query_subsets(len(self.own), count))
        yield from field.records()
        length_M = self.gradients.encode("response").num_targets_N.astype(np.float64)
        quality = self.labels.quality(length_M[: self.num_train])
        yield {"table": "strategy", "strategy": "longest response", **quality}


def main(options: Options) -> None:
    if not options.runs:
        raise ValueError("--runs must be a list of work directories, got none")
    out = pathlib.Path(options.out)
    runs = {root.name: root for root in map(pathlib.Path, options.runs)}

    def measure_run(name: str) -> list[dict[str, Any]]:
        trial = Trial(options, runs[name])
        header = {"run": name, "name": trial.config.name, "seed": trial.config.seed}
        return [header | record for record in trial.records()]

    found = reports.measure_runs(options, "records.json", measure_run, runs)
    report.write_report([record for records in found for record in records], out)
    print((out / "tables.md").read_text())


if __name__ == "__main__":
    command.start(main, Options(), when_stopped=command.GOES_ON)
