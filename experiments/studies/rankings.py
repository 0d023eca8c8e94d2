"""How well a ranking and the sets from its ends find the labeled targets, for the studies."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.evaluate.ranking import auprc, auroc
from raslik_jax.retrieve.selectors import Selection, select_by_count

# What `Labels.judge` measures; retain_positive is the share of the retain set with a score of 0 or
# above, which is not anti-aligned, below_zero the share of all items with a score below 0.
QUALITY = ("precision", "auroc", "auprc", "targets_in_retain", "retain_positive", "below_zero")


class Labels(NamedTuple):
    """The ids of the training examples and which are targets."""

    ids: Sequence[str]
    is_target_N: Bool[np.ndarray, " N"]

    def judge(self, forget_N: Float[np.ndarray, " N"]) -> tuple[dict[str, float], Selection]:
        """Returns the quality of a ranking by the labels, and of the sets from its two ends.

        The ranking has s_F = -s_R. Both sets have as many items as there are targets, so precision
        equals recall.
        """
        is_target_N, count = self.is_target_N, int(self.is_target_N.sum())
        area = auroc(forget_N, is_target_N)
        chosen = select_by_count(forget_N, -forget_N, self.ids, num_forget=count, num_retain=count)
        values = (
            is_target_N[chosen.forget].mean(),
            area,
            auprc(forget_N, is_target_N),
            is_target_N[chosen.retain].mean(),
            (forget_N[chosen.retain] >= 0).mean(),
            (forget_N < 0).mean(),
        )
        return dict(zip(QUALITY, map(float, values), strict=True)), chosen

    def quality(self, forget_N: Float[np.ndarray, " N"]) -> dict[str, float]:
        """Returns what the labels say of a ranking."""
        return self.judge(forget_N)[0]


def mean_of(
    entries: Sequence[Mapping[str, Any]], fields: Sequence[str] = QUALITY
) -> dict[str, float | None]:
    """Returns the mean of some fields; None where they are None."""
    columns = {field: [entry[field] for entry in entries] for field in fields}
    return {f: None if v[0] is None else float(np.mean(v)) for f, v in columns.items()}


def jaccard(first: Collection[Any], second: Collection[Any]) -> float:
    """Returns the size of the intersection over that of the union; 1 for two empty sets."""
    one, other = set(map(int, first)), set(map(int, second))
    return len(one & other) / len(one | other) if one | other else 1.0


def mean_jaccard(sets: Sequence[Collection[Any]]) -> float:
    """Returns the mean Jaccard index over all pairs of two or more sets, 1 for identical ones."""
    return float(np.mean([jaccard(*pair) for pair in itertools.combinations(sets, 2)]))
