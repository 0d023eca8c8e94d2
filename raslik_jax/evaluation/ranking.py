"""How well a ranking finds the labelled targets: pure functions, on the host, ties exact."""

import numpy as np
from jaxtyping import Bool, Float, Int


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
        raise ValueError("items that are no target wanted, but all are: AUROC needs both kinds")
    count_G, targets_G = _tie_groups(scores_N, is_target_N)
    others_G = count_G - targets_G
    others_below_G = num_others - np.cumsum(others_G)
    wins = (targets_G * (others_below_G + others_G / 2)).sum()
    return float(wins / (num_targets * num_others))


def auprc(scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the average precision, the area under the precision-recall curve.

    sum over thresholds of precision * (gain in recall); items with one score enter together, so
    no order among ties is favoured. No interpolation, which would be too kind.

    Args:
      scores_N: higher is more target-like. NaN is refused.
      is_target_N: the labels, at least one target.

    Returns:
      A value above 0 and up to 1; the base rate when all scores tie, 1 when all are targets.

    Raises:
      ValueError: NaN scores, unequal lengths, or no target.
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

    Args:
      scores_N: higher is more target-like. NaN is refused.
      is_target_N: the labels, at least one target.
      count: how many items are taken, from 1 to N.

    Returns:
      A value from 0 to 1; the base rate for count = N or when all scores tie.

    Raises:
      ValueError: NaN scores, unequal lengths, no target, or a count out of range.
    """
    _check_ranking(scores_N, is_target_N)
    if not 1 <= count <= len(scores_N):
        raise ValueError(f"a count from 1 to {len(scores_N)} wanted, came {count=}: ask for fewer")
    count_G, targets_G = _tie_groups(scores_N, is_target_N)
    before_G = np.cumsum(count_G) - count_G
    taken_G = np.clip(count - before_G, 0, count_G)
    return float((targets_G * (taken_G / count_G)).sum() / count)


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
    if len(scores_N) != len(is_target_N):
        raise ValueError(
            f"one label per score wanted, came {len(scores_N)} scores and {len(is_target_N)} "
            "labels: pair them by id first"
        )
    if np.isnan(scores_N).any():
        raise ValueError(
            f"scores wanted, but {int(np.isnan(scores_N).sum())} of {len(scores_N)} are NaN: "
            "check the sketches of those items"
        )
    num_targets = int(is_target_N.sum())
    if not num_targets:
        raise ValueError(
            f"at least one target wanted among {len(scores_N)} labels, none came: "
            "a ranking cannot be judged without"
        )
    return num_targets, len(is_target_N) - num_targets
