"""How well a ranking and the sets from its ends find the labeled targets, for the studies."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float

from raslik_jax.evaluate.ranking import auprc, auroc, check_ranking, tie_groups
from raslik_jax.retrieve.selectors import Selection, select_by_count


class Quality(TypedDict):
    """What the labels say of one ranking and of the two sets taken from its ends.

    Both sets have as many items as there are targets, so precision is recall, too.

    Attributes:
      precision: share of targets in the forget set.
      recall_twice: share of all targets among the best twice as many.
      auroc, auprc: of the forget ranking.
      targets_in_retain: share of targets in the retain set.
      retain_positive: share of the retain set with a score of 0 or above: not anti-aligned.
      below_zero: share of all items with a score below 0.
    """

    precision: float
    recall_twice: float
    auroc: float
    auprc: float
    targets_in_retain: float
    retain_positive: float
    below_zero: float


def measure_ranking(
    forget_N: Float[np.ndarray, " N"],
    is_target_N: Bool[np.ndarray, " N"],
    ids: Sequence[str],
) -> tuple[Quality, Selection]:
    """Returns the quality of both ends of a ranking, and the sets it gives.

    Args:
      forget_N: s_F; s_R is its negative.
      is_target_N: the labels, at least one of each kind.
      ids: break ties.

    Raises:
      ValueError: as `auroc`, or targets that are more than half of the items, so that two sets of
        their number overlap.
    """
    count = int(is_target_N.sum())
    area = auroc(forget_N, is_target_N)
    chosen = select_by_count(forget_N, -forget_N, ids, num_forget=count, num_retain=count)
    twice = min(2 * count, len(ids))
    quality = Quality(
        precision=float(is_target_N[chosen.forget].mean()),
        recall_twice=precision_at(forget_N, is_target_N, count=twice) * twice / count,
        auroc=area,
        auprc=auprc(forget_N, is_target_N),
        targets_in_retain=float(is_target_N[chosen.retain].mean()),
        retain_positive=float((forget_N[chosen.retain] >= 0).mean()),
        below_zero=float((forget_N < 0).mean()),
    )
    return quality, chosen


def jaccard(first: Collection[Any], second: Collection[Any]) -> float:
    """Returns the size of the intersection over that of the union; 1 for two empty sets."""
    one, other = set(map(int, first)), set(map(int, second))
    return len(one & other) / len(one | other) if one | other else 1.0


def mean_jaccard(sets: Sequence[Collection[Any]]) -> float:
    """Returns the mean Jaccard index over all pairs of sets, 1 for identical ones.

    Raises:
      ValueError: fewer than two sets.
    """
    if len(sets) < 2:
        raise ValueError(f"sets to compare must be two or more, got {len(sets)}: run more seeds")
    pairs = [jaccard(one, other) for one, other in itertools.combinations(sets, 2)]
    return sum(pairs) / len(pairs)


def rank_correlation(first_N: Float[np.ndarray, " N"], second_N: Float[np.ndarray, " N"]) -> float:
    """Returns Spearman's correlation, ties sharing their mean rank; NaN where all tie."""
    return float(scipy.stats.spearmanr(first_N, second_N).statistic)


def precision_at(
    scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"], *, count: int
) -> float:
    """Returns the expected share of targets among the `count` best scored items.

    Items that tie across the cut are taken in random order, of which this is the exact mean; a
    selection that breaks ties by id has one of these orders.

    Raises:
      ValueError: as `auprc`, or a count that is not from 1 to N.
    """
    check_ranking(scores_N, is_target_N)
    if not 1 <= count <= len(scores_N):
        raise ValueError(f"count must be from 1 to {len(scores_N)}, got {count}: ask for fewer")
    count_G, targets_G = tie_groups(scores_N, is_target_N)
    before_G = np.cumsum(count_G) - count_G
    taken_G = np.clip(count - before_G, 0, count_G)
    return float((targets_G * (taken_G / count_G)).sum() / count)


def join_records(
    records: Sequence[Mapping[str, Any]], *, by: Sequence[str], values: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns mean, least and largest value of the records that agree in some fields.

    Args:
      records: flat entries, such as one for each seed and setting.
      by: the fields that a group agrees in; a record without one of them is left out.
      values: the fields to join; a value of None or NaN does not count.

    Returns:
      One entry a group, in the order of their first records: the fields of `by`, `count`, and for
      each value a dict of mean, low and high, or None where no record has it.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for record in records:
        if all(name in record for name in by):
            groups.setdefault(tuple(record[name] for name in by), []).append(record)
    joined = []
    for key, members in groups.items():
        entry: dict[str, Any] = dict(zip(by, key, strict=True)) | {"count": len(members)}
        for name in values:
            found = [member.get(name) for member in members]
            known = [value for value in found if value is not None and not math.isnan(value)]
            entry[name] = None
            if known:
                mean = sum(known) / len(known)
                entry[name] = {"mean": mean, "low": min(known), "high": max(known)}
        joined.append(entry)
    return joined
