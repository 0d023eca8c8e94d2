"""Every strategy at a run's own settings, with as many items as there are targets."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.retrieval_quality.labels import KernelScores, Labels, mean_of
from raslik_jax import settings as settings_lib
from raslik_jax.data.examples import Example
from raslik_jax.evaluate import ranking
from raslik_jax.files import read_array
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Bm25Settings, Request, Scores
from raslik_jax.run.stages.retrieve import sentence_vectors
from raslik_jax.run.workspace import Workspace
from raslik_jax.settings import Settings


class Entry(NamedTuple):
    """A strategy and what it looks at.

    Attributes:
      strategy: its name.
      request: what it looks at, but for scores.
      by_query: whether its ranking depends on the queries.
      draws: how often it is drawn, with other seeds; more than once where it is random.
      is_common: whether the queries count by what they share.
      settings: its own, where they are not the record's.
      cosine_QN: of sentence vectors, where it needs them.
    """

    strategy: str
    request: Request
    by_query: bool = True
    draws: int = 1
    is_common: bool = False
    settings: Settings | None = None
    cosine_QN: np.ndarray | None = None


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
        """Returns the strategies by the names of their rows; one of vectors needs an encoder."""
        count = int(self.labels.is_target_N.sum())
        train = self.workspace.corpus.train
        base = Request(
            examples=train,
            is_eligible_N=np.ones(len(train), bool),
            seed=self.workspace.config.seed,
            retain_from="non_target",
            queries=self.queries,
            num_forget=count,
            num_retain=count,
        )
        # What is drawn at random is the mean of 20 draws; raslik_f forgets what raslik does.
        found = {
            name: Entry(name, base, by_query=False, draws=20)
            for name in ("random", "oracle", "cr_50", "raslik_f")
        }
        found |= {name: Entry(name, base) for name in ("raslik", "exact", "bm25")}
        found["exact, queries by what they share"] = Entry("exact", base, is_common=True)
        answers = Bm25Settings(query_text="prompt_and_output")
        found["bm25, answers too"] = Entry("bm25", base, settings=answers)
        for name in ("random", "oracle", "raslik_f"):
            found[f"{name}, any retain"] = found[name]._replace(strategy=f"{name}_anywhere")
        if encoder_checkpoint:
            cosine_QN = self.sentence_cosines(encoder_checkpoint)
            found["embedding"] = Entry("embedding", base, cosine_QN=cosine_QN)
        return found

    def sentence_cosines(self, encoder_checkpoint: str) -> np.ndarray:
        """Returns the cosines of the queries with the examples, made if they are not there."""
        path = self.out / "sentence_cosines.npy"
        if not path.is_file() or len(read_array(path)) != len(self.queries):
            changes = {"strategies": ["embedding"], "embedding.checkpoint": encoder_checkpoint}
            changes = {f"retrieve.{name}": value for name, value in changes.items()}
            config = settings_lib.replaced(self.workspace.config, changes)
            changed = type(self.workspace)(self.workspace.root, config)
            example_NE, query_QE = sentence_vectors(changed, self.queries)
            np.save(path, query_QE @ example_NE.T, allow_pickle=False)
        return read_array(path)

    def score(self, entry: Entry, subset_Q: np.ndarray, seed: int) -> Scores:
        """Returns a strategy's scores by some of the queries."""
        record = STRATEGIES[entry.strategy]
        exact = self.scores.some(subset_Q).combine("common" if entry.is_common else "mean")
        found = {
            "influence": self.sketched_QN[subset_Q].mean(axis=0),
            "exact_kernel": exact,
        }
        if entry.cosine_QN is not None:
            found["embeddings"] = entry.cosine_QN[subset_Q].mean(axis=0)
        return record.score(
            entry.request._replace(
                seed=seed,
                settings=entry.settings or record.settings,
                queries=tuple(self.queries[query] for query in subset_Q),
                scores=found,
            )
        )

    def query_records(
        self, entries: Mapping[str, Entry], subsets: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        """Yields the mean quality over subsets of the queries."""
        for name, entry in entries.items():
            if not entry.by_query:
                continue
            seed = entry.request.seed
            found = [
                self.labels.quality(self.score(entry, subset_Q, seed).forget_N)
                for subset_Q in subsets
            ]
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
        influence_N, all_Q = self.sketched_QN.mean(axis=0), np.arange(len(self.queries))
        for name, entry in entries.items():
            request = entry.request
            found: list[dict[str, float | None]] = []
            for draw in range(entry.draws):
                scores = self.score(entry, all_Q, request.seed + draw)
                chosen = select_by_count(
                    *scores,
                    self.labels.ids,
                    num_forget=request.num_forget,
                    num_retain=request.num_retain,
                )
                quality: dict[str, float | None] = {
                    "precision": is_target_N[chosen.forget].mean(),
                    "targets_in_retain": is_target_N[chosen.retain].mean(),
                    "retain_positive": (influence_N[chosen.retain] >= 0).mean(),
                    "auroc": None,
                    "auprc": None,
                }
                if STRATEGIES[entry.strategy].ranks_all:
                    quality["auroc"] = ranking.auroc(scores.forget_N, is_target_N)
                    quality["auprc"] = ranking.auprc(scores.forget_N, is_target_N)
                found.append(quality)
            yield {"table": "strategy", "strategy": name, **mean_of(found, tuple(found[0]))}
