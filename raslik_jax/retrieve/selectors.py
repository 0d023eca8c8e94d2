"""The antipodal selector: from scores to disjoint forget and retain sets.

Four rules of one signature live in SELECTORS: by count, by threshold, by threshold with a safety
margin of z standard deviations of the sketch, and by quantile. NumPy, on the host.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Selection(NamedTuple):
    """Positions of the chosen examples in the corpus, best first; the two never overlap."""

    forget: Int[np.ndarray, " F"]
    retain: Int[np.ndarray, " R"]


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
    depend on the order of the rows (Algorithm 1, line 5, with tau set by the counts).

    Args:
      forget_N: s_F, higher is more aligned with the query.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      num_forget: size of the forget set.
      num_retain: size of the retain set.

    Raises:
      ValueError: a score is NaN or infinite, the lengths differ, or more is asked for than there
        is.
    """
    _check_scores(forget_N, retain_N, ids)
    if num_forget < 0 or num_retain < 0:
        raise ValueError(f"counts must be at least 0, got {num_forget=} and {num_retain=}")
    eligible = int((forget_N > -np.inf).sum())
    if num_forget > eligible:
        raise ValueError(
            f"num_forget must be at most the {eligible} eligible examples, got {num_forget}: ask "
            "for fewer"
        )
    forget = _best(forget_N, ids)[:num_forget]
    left_N = retain_N.copy()
    left_N[forget] = -np.inf
    eligible = int((left_N > -np.inf).sum())
    if num_retain > eligible:
        raise ValueError(
            f"num_retain must be at most the {eligible} eligible examples that {num_forget} to "
            f"forget leave, got {num_retain}: ask for fewer"
        )
    return Selection(forget=forget, retain=_best(left_N, ids)[:num_retain])


def select_by_threshold(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    forget_threshold: float,
    retain_threshold: float,
) -> Selection:
    """Returns F = {s_F >= tau_F} and R = {s_R >= tau_R}, best first (Algorithm 1, line 5).

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      forget_threshold: tau_F, a cosine for influence scores.
      retain_threshold: tau_R; an example is retained where s_F is at most -tau_R.

    Raises:
      ValueError: a score is NaN or infinite; a threshold is not finite; a set is empty; the
        thresholds overlap, that is, an example passes both.
    """
    thresholds = {"forget_threshold": forget_threshold, "retain_threshold": retain_threshold}
    return select_by_margin(forget_N, retain_N, ids, **thresholds, sigma=0.0, z=0.0)


def select_by_margin(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    forget_threshold: float,
    retain_threshold: float,
    sigma: float,
    z: float,
) -> Selection:
    """Returns the sets of the thresholds tau* + z sigma_k (Section 3.4, "Suggested thresholds").

    An example enters a set where its sketched score clears the cosine tau* by z standard
    deviations of the sketch.

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      forget_threshold: tau_F*, a cosine of the unsketched gradients.
      retain_threshold: tau_R*, likewise.
      sigma: sigma_k, of `noise.score_sigma`.
      z: the normal quantile z_{1 - delta}, 1.645 for delta = 0.05.

    Raises:
      ValueError: as `select_by_threshold`; sigma is negative or not finite; z is not finite.
    """
    _check_scores(forget_N, retain_N, ids)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(
            f"sigma must be finite and at least 0, got {sigma}: estimate it again from finite "
            "sketches"
        )
    thresholds = {"forget_threshold": forget_threshold, "retain_threshold": retain_threshold}
    for name, value in {**thresholds, "z": z}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    # In float64, so that a threshold of .1 means .1 and not the float32 next to it.
    scores = [score_N.astype(np.float64) for score_N in (forget_N, retain_N)]
    passes = [
        score_N >= threshold + z * sigma
        for score_N, threshold in zip(scores, thresholds.values(), strict=True)
    ]
    both = np.flatnonzero(passes[0] & passes[1])
    if len(both):
        raise ValueError(
            f"thresholds must keep the sets apart, {len(both)} examples pass both "
            f"{forget_threshold=} and {retain_threshold=}, such as {ids[both[0]]}: raise one"
        )
    for name, score_N, is_chosen_N in zip(("forget", "retain"), scores, passes, strict=True):
        if not is_chosen_N.any():
            highest = f"{score_N.max():.6g}" if len(score_N) else "none"
            raise ValueError(
                f"the {name} set must have an example, none clears {name}_threshold="
                f"{thresholds[f'{name}_threshold']} with {z=}, the highest score is {highest}: "
                "lower it"
            )
    found = (
        _best(np.where(is_chosen_N, score_N, -np.inf), ids)[: is_chosen_N.sum()]
        for score_N, is_chosen_N in zip(scores, passes, strict=True)
    )
    return Selection(*found)


def select_by_quantile(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    forget_share: float,
    retain_share: float,
) -> Selection:
    """Returns the sets whose thresholds are empirical quantiles of the scores.

    tau_F is the (1 - forget_share) quantile of the scores that are not barred, tau_R likewise; of
    examples that tie at it as many are taken as the share has room for, by id, so that sizes are
    stable (Section 3.4).

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      forget_share: share of the eligible examples to forget, in (0, 1].
      retain_share: share of the eligible examples to retain, in (0, 1].

    Raises:
      ValueError: as `select_by_count`; a share outside (0, 1]; shares that overlap, with a sum
        above 1; a set is empty.
    """
    _check_scores(forget_N, retain_N, ids)
    shares = {"forget": forget_share, "retain": retain_share}
    if not all(0 < share <= 1 for share in shares.values()):
        raise ValueError(
            f"shares must be above 0 and at most 1, got {forget_share=}, {retain_share=}"
        )
    if forget_share + retain_share > 1 + 1e-9:
        raise ValueError(
            f"shares must be at most 1 together, got {forget_share=} and {retain_share=}: lower one"
        )
    counts = {
        f"num_{name}": share_count(name, shares[name], int((score_N > -np.inf).sum()))
        for name, score_N in (("forget", forget_N), ("retain", retain_N))
    }
    return select_by_count(forget_N, retain_N, ids, **counts)


def share_count(name: str, share: float, eligible: int) -> int:
    """Returns how many examples a share of the eligible ones is.

    Args:
      name: of the set, "forget" or "retain", for the error.
      share: in (0, 1].
      eligible: examples that are not barred.

    Raises:
      ValueError: it is none.
    """
    # The small addend turns .29 * 100 = 28.999999999999996 into 29.
    count = math.floor(share * eligible + 1e-9)
    if not count:
        raise ValueError(
            f"--retrieve.{name}_share must be one example or more, got {share} of {eligible} that "
            "can be chosen: raise it"
        )
    return count


SELECTORS: dict[str, Callable[..., Selection]] = {
    "count": select_by_count,
    "threshold": select_by_threshold,
    "margin": select_by_margin,
    "quantile": select_by_quantile,
}


def _check_scores(
    forget_N: Float[np.ndarray, " N"], retain_N: Float[np.ndarray, " N"], ids: Sequence[str]
) -> None:
    if not len(forget_N) == len(retain_N) == len(ids):
        raise ValueError(
            f"each example must have a forget score, a retain score and an id, got "
            f"{len(forget_N)}, {len(retain_N)} and {len(ids)}"
        )
    for name, score_N in (("forget", forget_N), ("retain", retain_N)):
        where = np.flatnonzero(np.isnan(score_N) | (score_N == np.inf))
        if len(where):
            value = "NaN" if np.isnan(score_N[where[0]]) else "infinite"
            raise ValueError(
                f"the {name} score of example {ids[where[0]]} is {value} "
                f"({len(where)} such): sketch again from a model with finite weights"
            )


def _best(score_N: Float[np.ndarray, " N"], ids: Sequence[str]) -> Int[np.ndarray, " N"]:
    """Returns all positions, best first, ties by id."""
    return np.lexsort((np.asarray(ids, dtype=np.str_), -score_N))


# what was chosen ---------------------------------------------------------------------------------


def summarize_selection(
    selection: Selection,
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    *,
    labels: Sequence[bool | None],
    texts: Sequence[Any],
    margin: float = 0.01,
) -> dict[str, Any]:
    """Returns what was chosen, as JSON values.

    Args:
      selection: the two sets.
      forget_N: the scores they were chosen by, s_F.
      retain_N: s_R.
      labels: is_target of every example.
      texts: anything hashable per example that is equal where two examples read the same.
      margin: gamma, half the width of the neighborhood of a threshold.

    Returns:
      `num_forget`, `num_retain`; for each set a dict of `lowest` and `highest` score, the lowest
      being the threshold that gives the set; `near_threshold`, examples within the margin of it, in
      the set or not; `density`, these per example and unit of score; `near_threshold_scaled` and
      `density_scaled`, the same with scores divided by their largest absolute value, after the
      paper's [-1, 1]; `duplicates`, items whose text is in the set before; `targets`,
      `non_targets` and `unlabeled`. `texts_in_both`: texts that are to be forgotten and retained at
      once.
    """
    chosen_texts = [[texts[i] for i in positions] for positions in selection]
    summary: dict[str, Any] = {
        "num_forget": len(selection.forget),
        "num_retain": len(selection.retain),
        "margin": margin,
        "texts_in_both": len({*chosen_texts[0]} & {*chosen_texts[1]}),
    }
    for name, positions, score_N, words in zip(
        ("forget", "retain"), selection, (forget_N, retain_N), chosen_texts, strict=True
    ):
        found = [labels[i] for i in positions]
        summary[name] = {
            **_summarize_scores(score_N, positions, margin),
            "duplicates": len(words) - len(set(words)),
            "targets": found.count(True),
            "non_targets": found.count(False),
            "unlabeled": found.count(None),
        }
    return summary


def _summarize_scores(
    score_N: Float[np.ndarray, " N"], positions: Int[np.ndarray, " M"], margin: float
) -> dict[str, Any]:
    chosen_M = score_N[positions].astype(np.float64)
    if not len(chosen_M):
        return {"lowest": None, "highest": None}
    finite_N = score_N[np.isfinite(score_N)].astype(np.float64)
    lowest, largest = float(chosen_M.min()), float(np.abs(finite_N).max())
    part: dict[str, Any] = {"lowest": lowest, "highest": float(chosen_M.max())}
    for suffix, scale in (("", 1.0), ("_scaled", largest or 1.0)):
        near = int((np.abs(finite_N - lowest) <= margin * scale).sum())
        part[f"near_threshold{suffix}"] = near
        part[f"density{suffix}"] = near / (2 * margin * len(finite_N))
    return part
