"""The quality of a ranking for labeled targets: pure functions on the host, exact with ties."""

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.data.words import refused


def auroc(scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the area under the ROC curve; 0.5 when all scores tie.

    It is the chance that a random target scores above a random other item with ties as one half:
    the Mann-Whitney statistic over the number of pairs (Hanley and McNeil, 1982).
    """
    num_targets, num_others = check_ranking(scores_N, is_target_N)
    if not num_others:
        raise ValueError("labels must be of both kinds for AUROC, got targets alone: leave it out")
    count_G, targets_G = tie_groups(scores_N, is_target_N)
    others_G = count_G - targets_G
    others_below_G = num_others - np.cumsum(others_G)
    wins = (targets_G * (others_below_G + others_G / 2)).sum()
    return float(wins / (num_targets * num_others))


def auprc(scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the average precision, the area under the precision-recall curve.

    It is the sum over thresholds of precision * (gain in recall) without interpolation, which would
    be too high. Items with one score enter together, so no order among ties is favored. It is the
    base rate when all scores tie and 1 when all items are targets.
    """
    num_targets, _ = check_ranking(scores_N, is_target_N)
    count_G, targets_G = tie_groups(scores_N, is_target_N)
    precision_G = np.cumsum(targets_G) / np.cumsum(count_G)
    return float((precision_G * targets_G).sum() / num_targets)


def tie_groups(
    scores_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]]:
    """Returns items and targets of each group of equal scores; the best group first."""
    _, group_N, count_G = np.unique(scores_N, return_inverse=True, return_counts=True)
    targets_G = np.bincount(group_N[is_target_N], minlength=len(count_G))
    return count_G[::-1], targets_G[::-1]


def check_ranking(
    scores_N: Float[np.ndarray, " scores"], is_target_N: Bool[np.ndarray, " labels"]
) -> tuple[int, int]:
    """Returns the numbers of targets and of others of a ranking that may have infinities."""
    if is_target_N.dtype != bool:  # numbers would be positions
        raise refused("ranking_labels", got=is_target_N.dtype)
    num_nan, num_targets = int(np.isnan(scores_N).sum()), int(is_target_N.sum())
    if len(scores_N) != len(is_target_N) or num_nan or not num_targets:
        got = {"scores": len(scores_N), "nan": num_nan, "labels": len(is_target_N)}
        raise refused("ranking", **got, targets=num_targets)
    return num_targets, len(is_target_N) - num_targets
