"""How well a ranking finds the labeled targets: pure functions, on the host, ties exact."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.retrieve.selection import Selection, select_by_count


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
    # Imported late: scipy.stats takes a second that no stage should pay.
    from scipy import stats

    return float(stats.spearmanr(first_N, second_N).statistic)


def auroc(scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the area under the ROC curve.

    The chance that a random target scores above a random other item, ties counting one half: the
    Mann-Whitney statistic over the number of pairs.

    Args:
      scores_N: higher is more target-like. NaN is refused, infinities are ordinary.
      is_target_N: the labels, at least one of each kind.

    Returns:
      A value from 0 to 1; 0.5 when all scores tie.

    Raises:
      ValueError: NaN scores, unequal lengths, or only one kind of label.

    Source: Mann and Whitney, 1947; Hanley and McNeil, 1982.
    """
    num_targets, num_others = _check_ranking(scores_N, is_target_N)
    if not num_others:
        raise ValueError("labels must be of both kinds for AUROC, got targets alone: leave it out")
    count_G, targets_G = _tie_groups(scores_N, is_target_N)
    others_G = count_G - targets_G
    others_below_G = num_others - np.cumsum(others_G)
    wins = (targets_G * (others_below_G + others_G / 2)).sum()
    return float(wins / (num_targets * num_others))


def auprc(scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the average precision, the area under the precision-recall curve.

    sum over thresholds of precision * (gain in recall); items with one score enter together, so
    no order among ties is favored. No interpolation, which would be too kind.

    Returns:
      A value above 0 and up to 1; the base rate when all scores tie, 1 when all are targets.

    Raises:
      ValueError: as `auroc`, but all may be targets.
    """
    num_targets, _ = _check_ranking(scores_N, is_target_N)
    count_G, targets_G = _tie_groups(scores_N, is_target_N)
    precision_G = np.cumsum(targets_G) / np.cumsum(count_G)
    return float((precision_G * targets_G).sum() / num_targets)


def precision_at(
    scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"], *, count: int
) -> float:
    """Returns the expected share of targets among the `count` best scored items.

    Items that tie across the cut are taken in random order, of which this is the exact mean; a
    selection that breaks ties by id has one of these orders.

    Raises:
      ValueError: as `auprc`, or a count that is not from 1 to N.
    """
    _check_ranking(scores_N, is_target_N)
    if not 1 <= count <= len(scores_N):
        raise ValueError(f"count must be from 1 to {len(scores_N)}, got {count}: ask for fewer")
    count_G, targets_G = _tie_groups(scores_N, is_target_N)
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


def _tie_groups(
    scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]]:
    """Returns items and targets of each group of equal scores, the best group first."""
    _, group_N, count_G = np.unique(scores_N, return_inverse=True, return_counts=True)
    targets_G = np.bincount(group_N[is_target_N], minlength=len(count_G))
    return count_G[::-1], targets_G[::-1]


def _check_ranking(
    scores_N: Float[np.ndarray, " scores"], is_target_N: Bool[np.ndarray, " labels"]
) -> tuple[int, int]:
    """Returns the numbers of targets and of others."""
    num_nan, num_targets = int(np.isnan(scores_N).sum()), int(is_target_N.sum())
    if len(scores_N) != len(is_target_N) or num_nan or not num_targets:
        raise ValueError(
            f"a ranking must have one score and one label per item and a target, got "
            f"{len(scores_N)} scores, {num_nan} of them NaN, and {len(is_target_N)} labels, "
            f"{num_targets} of them targets: check the sketches and the labels"
        )
    return num_targets, len(is_target_N) - num_targets
