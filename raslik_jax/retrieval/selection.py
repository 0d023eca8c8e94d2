"""The antipodal selector: from scores to disjoint forget and retain sets."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Selection(NamedTuple):
    """Positions of the chosen examples in the corpus, best first; the two never overlap."""

    forget: Int[np.ndarray, " F"]
    retain: Int[np.ndarray, " R"]


def _ranking(score_N: Float[np.ndarray, " N"], ids: Sequence[str]) -> Int[np.ndarray, " N"]:
    """Returns positions by falling score; equal scores by id."""
    return np.lexsort((np.asarray(ids), -score_N))


def select_by_count(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    num_forget: int,
    num_retain: int,
) -> Selection:
    """Returns the best of both rankings: first the forget set, then the retain set of the rest.

    A score of minus infinity bars an example from that set. Ties go by id, so the result does not
    depend on the order of the rows (Algorithm 1, line 5, with tau set by the wanted counts).

    Args:
      forget_N: s_F, higher is more aligned with the query.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      num_forget: examples wanted in the forget set.
      num_retain: examples wanted in the retain set.

    Raises:
      ValueError: a score is NaN, the two lengths differ, or more is asked for than there is.
    """
    if not len(forget_N) == len(retain_N) == len(ids):
        raise ValueError(
            f"one forget score, retain score and id per example wanted, "
            f"got {len(forget_N)}, {len(retain_N)} and {len(ids)}"
        )
    for name, score_N in (("forget", forget_N), ("retain", retain_N)):
        if np.isnan(score_N).any():
            (where,) = np.nonzero(np.isnan(score_N))
            raise ValueError(
                f"the {name} score of example {ids[where[0]]} is NaN "
                f"({len(where)} such): sketch again from a model with finite weights"
            )
    eligible_F = forget_N > -np.inf
    if num_forget > eligible_F.sum():
        raise ValueError(
            f"num_forget={num_forget} examples wanted, {eligible_F.sum()} are eligible: ask for fewer"
        )
    forget = _ranking(forget_N, ids)[:num_forget]
    is_free_N = retain_N > -np.inf
    is_free_N[forget] = False
    if num_retain > is_free_N.sum():
        raise ValueError(
            f"num_retain={num_retain} examples wanted beside {num_forget} to forget, "
            f"{is_free_N.sum()} are eligible: ask for fewer"
        )
    order = _ranking(retain_N, ids)
    return Selection(forget=forget, retain=order[is_free_N[order]][:num_retain])
