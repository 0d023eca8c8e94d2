"""Every strategy at a run's own settings, with as many items as there are targets."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.studies import randomized
from experiments.studies.corpora import paper
from experiments.studies.encoders.embedding import sentence_vectors
from experiments.studies.gradients import RunGradients
from experiments.studies.kernels import KernelScores
from experiments.studies.rankings import mean_of
from raslik_jax.base import settings as settings_lib
from raslik_jax.base.files import read_array
from raslik_jax.evaluate import ranking
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Bm25Settings, Request, Scores
from raslik_jax.run.workspace import Workspace

# Means of 20 draws of what is random; no ranking of theirs is one of the queries', and RASLIK-F
# forgets what RASLIK does.
_RANDOM = ("random", "oracle", "cr_50", "raslik_f")
_DRAWS = 20
# BM25 by other settings.
_BM25_ANSWERS = "bm25, answers too"


class Field(NamedTuple):
    """The rows and scores of one run from which the strategies choose."""

    made: RunGradients
    exact: KernelScores
    sketched: KernelScores  # by the largest sketch
    sentence_QN: Float[np.ndarray, "Q N"] | None  # of `sentence_cosines`

    def ranked(self) -> list[str]:
        """Returns the rows whose ranking depends on the queries."""
        names = ["raslik", "exact", "bm25", _BM25_ANSWERS]
        return names + (["embedding"] if self.sentence_QN is not None else [])

    def score(self, name: str, subset_Q: Int[np.ndarray, " R"], draw: int = 0) -> Scores:
        """Returns a row's scores by some of the queries."""
        record = (STRATEGIES | randomized.MEMBERS)[name.split(",")[0]]
        made, count = self.made, int(self.made.labels.is_target_N.sum())
        scores = {
            "influence": self.sketched.score_QN[subset_Q].mean(axis=0),
            "exact_kernel": self.exact.some(subset_Q).combine("mean"),
        }
        if self.sentence_QN is not None:
            scores["embeddings"] = self.sentence_QN[subset_Q].mean(axis=0)
        with_answers = Bm25Settings(query_text="prompt_and_output")
        return record.score(
            Request(
                examples=made.examples[: made.num_train],
                is_eligible_N=np.ones(made.num_train, bool),
                seed=made.config.seed + draw,
                num_forget=count,
                num_retain=count,
                settings=with_answers if name == _BM25_ANSWERS else record.settings,
                queries=tuple(made.traced[query] for query in subset_Q),
                scores=scores,
            )
        )

    def query_records(self, subsets: Sequence[Int[np.ndarray, " R"]]) -> Iterator[dict[str, Any]]:
        """Yields the mean quality over subsets of the queries."""
        for name in self.ranked():
            found = [self.made.labels.quality(self.score(name, part).forget_N) for part in subsets]
            yield {
                "table": "strategy_queries",
                "strategy": name,
                "num_queries": len(subsets[0]),
                **mean_of(found),
                "least_auprc": min(quality["auprc"] for quality in found),
            }

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields the quality of both sets with all queries."""
        ids, is_target_N = self.made.labels
        influence_N, count = self.sketched.score_QN.mean(axis=0), int(is_target_N.sum())
        for name in (*_RANDOM, *self.ranked(), *randomized.ANYWHERE):
            found: list[dict[str, float | None]] = []
            for draw in range(1 if name in self.ranked() else _DRAWS):
                scores = self.score(name, np.arange(len(self.made.traced)), draw)
                chosen = select_by_count(*scores, ids, num_forget=count, num_retain=count)
                ranks = (STRATEGIES | randomized.MEMBERS)[name.split(",")[0]].ranks_all
                forget_N = scores.forget_N
                found.append(
                    {
                        "precision": is_target_N[chosen.forget].mean(),
                        "targets_in_retain": is_target_N[chosen.retain].mean(),
                        "retain_positive": (influence_N[chosen.retain] >= 0).mean(),
                        "auroc": ranking.auroc(forget_N, is_target_N) if ranks else None,
                        "auprc": ranking.auprc(forget_N, is_target_N) if ranks else None,
                    }
                )
            title = name.replace("_anywhere", ", any retain")
            yield {"table": "strategy", "strategy": title, **mean_of(found, tuple(found[0]))}


def sentence_cosines(
    made: RunGradients, checkpoint: str, path: pathlib.Path
) -> Float[np.ndarray, "Q N"]:
    """Returns the cosines of the queries' and examples' sentence vectors, kept in a file."""
    if not path.is_file() or len(read_array(path)) != len(made.traced):
        changes = {
            "retrieve.strategies": ["embedding"],
            "retrieve.embedding.checkpoint": checkpoint,
        }
        with paper.registered():
            config = settings_lib.replaced(made.config, changes)
            workspace = Workspace(made.workspace.root, config)
            example_NE, query_QE = sentence_vectors(workspace, made.traced)
        np.save(path, query_QE @ example_NE.T, allow_pickle=False)
    return read_array(path)
