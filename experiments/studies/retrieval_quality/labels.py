"""The labels of a corpus, and what they say of scores."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.gradients import Combination
from experiments.studies.rankings import Quality, measure_ranking
from raslik_jax.data.examples import Example
from raslik_jax.index.combine import aggregate_scores
from raslik_jax.retrieve.selectors import Selection

QUALITY = tuple(Quality.__annotations__)


class KernelScores(NamedTuple):
    """The scores of each query, and the cosines between the queries."""

    score_QN: np.ndarray
    gram_QQ: np.ndarray

    def some(self, queries: slice | np.ndarray) -> "KernelScores":
        """Returns those of some queries."""
        return KernelScores(self.score_QN[queries], self.gram_QQ[queries][:, queries])

    def combine(self, how: Combination) -> np.ndarray:
        """Returns one score for each example."""
        return aggregate_scores(self.score_QN, how, self.gram_QQ)


class Labels(NamedTuple):
    """The ids of the training examples and which are targets."""

    ids: list[str]
    is_target_N: np.ndarray

    @classmethod
    def of(cls, train: Sequence[Example]) -> "Labels":
        """Returns those of a corpus."""
        return cls(
            [row.example_id for row in train], np.array([bool(row.is_target) for row in train])
        )

    def judge(self, score_N: np.ndarray) -> tuple[Quality, Selection]:
        """Returns the quality of a ranking and its sets."""
        return measure_ranking(score_N, self.is_target_N, self.ids)

    def quality(self, score_N: np.ndarray) -> Quality:
        """Returns the quality of a ranking."""
        return self.judge(score_N)[0]


def mean_of(
    entries: Sequence[Mapping[str, Any]], fields: Sequence[str] = QUALITY
) -> dict[str, float | None]:
    """Returns the mean of some fields; None where they are None."""
    return {
        field: None
        if entries[0][field] is None
        else float(np.mean([entry[field] for entry in entries]))
        for field in fields
    }
