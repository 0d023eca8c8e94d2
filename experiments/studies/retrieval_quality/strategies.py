"""Every strategy at a run's own settings, with as many items as there are targets."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.retrieval_quality.labels import KernelScores, Labels, mean_of
from raslik_jax.data.examples import Example
from raslik_jax.evaluate import ranking
from raslik_jax.files import read_array
from raslik_jax.retrieve.selection import select_by_count
from raslik_jax.retrieve.strategies import RANKING_STRATEGIES, STRATEGIES, Request, Vectors
from raslik_jax.run.stages.retrieving import make_embeddings
from raslik_jax.run.workspace import Workspace


class Entry(NamedTuple):
    """A strategy and what it looks at.

    Attributes:
      strategy: its name.
      request: what it looks at with all queries.
      by_query: whether its ranking depends on the queries.
      draws: how often it is drawn, with other seeds; more than once where it is random.
      is_common: whether the queries count by what they share.
    """

    strategy: str
    request: Request
    by_query: bool = True
    draws: int = 1
    is_common: bool = False


class Field(NamedTuple):
    """What the strategies of one run choose from.

    Attributes:
      workspace: of the run.
      labels: of its training examples.
      queries: the retrieval queries.
      scores: by the exact kernel.
      sketched_QN: by the largest sketch.
      out: folder for sentence vectors.
    """

    workspace: Workspace
    labels: Labels
    queries: tuple[Example, ...]
    scores: KernelScores
    sketched_QN: np.ndarray
    out: pathlib.Path

    def entries(self, encoder_checkpoint: str) -> dict[str, Entry]:
        """Returns the strategies by the names of their rows; one of vectors wants an encoder."""
        count = int(self.labels.is_target_N.sum())
        base = Request(
            examples=self.workspace.corpus.train,
            influence_N=self.sketched_QN.mean(axis=0),
            seed=self.workspace.config.seed,
            retain_from="non_target",
            queries=self.queries,
            num_forget=count,
            num_retain=count,
            exact_N=self.scores.combine("mean"),
        )
        common = base._replace(exact_N=self.scores.combine("common"))
        answers = base._replace(query_text="prompt_and_output")
        # What is drawn at random is the mean of 20 draws; raslik_f forgets what raslik does.
        found = {
            name: Entry(name, base, by_query=False, draws=20)
            for name in ("random", "oracle", "cr_50", "raslik_f")
        }
        found |= {name: Entry(name, base) for name in ("raslik", "exact", "bm25")}
        found["exact, queries by what they share"] = Entry("exact", common, is_common=True)
        found["bm25, answers too"] = Entry("bm25", answers)
        for name in ("random", "oracle", "raslik_f"):
            found[f"{name}, any retain"] = found[name]._replace(strategy=f"{name}_anywhere")
        if encoder_checkpoint:
            vectors = self.vectors(encoder_checkpoint)
            found["embedding"] = Entry("embedding", base._replace(vectors=vectors))
        return found

    def vectors(self, encoder_checkpoint: str) -> Vectors:
        """Returns the sentence vectors, made if they are not there."""
        folder, config = self.out / "embeddings", self.workspace.config
        folder.mkdir(exist_ok=True)
        made = folder / "queries.npy"
        if not made.is_file() or len(read_array(made)) != len(self.queries):
            retrieve = dataclasses.replace(
                config.retrieve, encoder_checkpoint=encoder_checkpoint, query_text="prompt"
            )
            replaced = dataclasses.replace(config, retrieve=retrieve)
            changed = type(self.workspace)(self.workspace.root, replaced)
            make_embeddings(changed, folder, queries=self.queries)
        return Vectors(*(read_array(folder / f"{name}.npy") for name in ("examples", "queries")))

    def query_records(
        self, entries: Mapping[str, Entry], subsets: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        """Yields the mean quality over subsets of the queries."""
        for name, entry in entries.items():
            if not entry.by_query:
                continue
            found = []
            for subset_Q in subsets:
                vectors = entry.request.vectors
                request = entry.request._replace(
                    influence_N=self.sketched_QN[subset_Q].mean(axis=0),
                    exact_N=self.scores.some(subset_Q).combine(
                        "common" if entry.is_common else "mean"
                    ),
                    queries=tuple(self.queries[query] for query in subset_Q),
                    vectors=vectors and vectors._replace(query_QE=vectors.query_QE[subset_Q]),
                )
                found.append(self.labels.quality(STRATEGIES[entry.strategy](request).forget_N))
            yield {
                "table": "strategy_queries",
                "strategy": name,
                "num_queries": len(subsets[0]),
                **mean_of(found),
                "least_auprc": min(quality["auprc"] for quality in found),
            }

    def records(self, entries: Mapping[str, Entry]) -> Iterator[dict[str, Any]]:
        """Yields the quality of both sets with all queries."""
        is_target_N = self.labels.is_target_N
        for name, (strategy, request, _, draws, _) in entries.items():
            found: list[dict[str, float | None]] = []
            for draw in range(draws):
                scores = STRATEGIES[strategy](request._replace(seed=request.seed + draw))
                chosen = select_by_count(
                    *scores,
                    self.labels.ids,
                    num_forget=request.num_forget,
                    num_retain=request.num_retain,
                )
                quality: dict[str, float | None] = {
                    "precision": is_target_N[chosen.forget].mean(),
                    "targets_in_retain": is_target_N[chosen.retain].mean(),
                    "retain_positive": (request.influence_N[chosen.retain] >= 0).mean(),
                    "auroc": None,
                    "auprc": None,
                }
                if strategy in RANKING_STRATEGIES:
                    quality["auroc"] = ranking.auroc(scores.forget_N, is_target_N)
                    quality["auprc"] = ranking.auprc(scores.forget_N, is_target_N)
                found.append(quality)
            yield {"table": "strategy", "strategy": name, **mean_of(found, tuple(found[0]))}
