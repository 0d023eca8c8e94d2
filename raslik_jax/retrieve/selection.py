"""The antipodal selector: from scores to disjoint forget and retain sets.

Four rules of one signature live in SELECTORS: by count, by threshold, by threshold with a safety
margin of z standard deviations of the sketch, and by quantile. Host code on NumPy arrays with clear
errors; `positions_by_count` and `pass_thresholds` beneath them take JAX arrays too, under jit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.config import RetrieveConfig


class Selection(NamedTuple):
    """Positions of the chosen examples in the corpus, best first; the two never overlap."""

    forget: Int[np.ndarray, " F"]
    retain: Int[np.ndarray, " R"]


# what can be jitted ----------------------------------------------------------------------------


def positions_by_count(
    forget_N: Float[Any, " N"],
    retain_N: Float[Any, " N"],
    id_rank_N: Int[Any, " N"],
    *,
    num_forget: int,
    num_retain: int,
) -> tuple[Int[Any, " F"], Int[Any, " R"]]:
    """Returns the positions of the best of both rankings: first forget, then retain of the rest.

    Works on NumPy and JAX arrays alike, and under jit with the two counts static. Checks nothing:
    see `select_by_count`.

    Args:
      forget_N: s_F; retain_N: s_R.
      id_rank_N: place of each example in the order of ids, the tie-breaker.
      num_forget: examples in the forget set.
      num_retain: examples in the retain set.
    """
    xp = forget_N.__array_namespace__()
    order_N = xp.lexsort((id_rank_N, -forget_N))
    is_forgotten_N = xp.argsort(order_N) < num_forget
    retain = xp.lexsort((id_rank_N, -retain_N, is_forgotten_N))[:num_retain]
    return order_N[:num_forget], retain


def pass_thresholds(
    forget_N: Float[Any, " N"],
    retain_N: Float[Any, " N"],
    forget_threshold: Any,
    retain_threshold: Any,
) -> tuple[Bool[Any, " N"], Bool[Any, " N"]]:
    """Returns who is in F = {s_F >= tau_F} and in R = {s_R >= tau_R} (Algorithm 1, line 5).

    Works on NumPy and JAX arrays alike. A threshold is one number, or one for each example.
    """
    return forget_N >= forget_threshold, retain_N >= retain_threshold


# the rules -------------------------------------------------------------------------------------


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
      ValueError: a score is NaN or infinite, the lengths differ, or more is asked for than there
        is.
    """
    _check_scores(forget_N, retain_N, ids)
    if num_forget < 0 or num_retain < 0:
        raise ValueError(f"counts of at least 0 wanted, came {num_forget=} and {num_retain=}")
    eligible = int((forget_N > -np.inf).sum())
    if num_forget > eligible:
        raise ValueError(
            f"num_forget={num_forget} examples wanted, {eligible} are eligible: ask for fewer"
        )
    forget, retain = positions_by_count(
        forget_N, retain_N, _id_ranks(ids), num_forget=num_forget, num_retain=num_retain
    )
    is_free_N = retain_N > -np.inf
    is_free_N[forget] = False
    if num_retain > is_free_N.sum():
        raise ValueError(
            f"num_retain={num_retain} examples wanted beside {num_forget} to forget, "
            f"{is_free_N.sum()} are eligible: ask for fewer"
        )
    return Selection(forget=forget, retain=retain)


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
    return select_by_margin(
        forget_N,
        retain_N,
        ids,
        forget_threshold=forget_threshold,
        retain_threshold=retain_threshold,
        sigma=0.0,
        z=0.0,
    )


def select_by_margin(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    forget_threshold: float,
    retain_threshold: float,
    sigma: float | Float[np.ndarray, " N"],
    z: float,
) -> Selection:
    """Returns the sets of the thresholds tau* + z sigma_k (Section 3.4, "Suggested thresholds").

    An example enters a set where its sketched score clears the wanted cosine tau* by z standard
    deviations of the sketch.

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R = -s_F for the antipodal search.
      ids: example ids, the tie-breaker.
      forget_threshold: tau_F*, the wanted cosine of the unsketched gradients.
      retain_threshold: tau_R*, likewise.
      sigma: sigma_k, one for all or one for each example, of `score_sigma`.
      z: the normal quantile z_{1 - delta}, 1.645 for delta = 0.05.

    Raises:
      ValueError: as `select_by_threshold`; sigma is negative or not finite; z is not finite.
    """
    _check_scores(forget_N, retain_N, ids)
    sigma_N = np.broadcast_to(np.asarray(sigma, np.float64), forget_N.shape)
    if not (np.isfinite(sigma_N).all() and (sigma_N >= 0).all()):
        raise ValueError(
            f"standard deviations of at least 0 wanted, came sigma from {sigma_N.min()} to "
            f"{sigma_N.max()}: estimate it again from finite sketches"
        )
    numbers = {"forget_threshold": forget_threshold, "retain_threshold": retain_threshold, "z": z}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"a finite {name} wanted, came {value}")
    # In float64, so that a threshold of .1 means .1 and not the float32 next to it.
    forget_N, retain_N = forget_N.astype(np.float64), retain_N.astype(np.float64)
    is_forget_N, is_retain_N = pass_thresholds(
        forget_N, retain_N, forget_threshold + z * sigma_N, retain_threshold + z * sigma_N
    )
    both = np.flatnonzero(is_forget_N & is_retain_N)
    if len(both):
        raise ValueError(
            f"thresholds that keep the sets apart wanted, {len(both)} examples pass both "
            f"{forget_threshold=} and {retain_threshold=}, such as {ids[both[0]]}: raise one"
        )
    for name, is_chosen_N, score_N in (
        ("forget", is_forget_N, forget_N),
        ("retain", is_retain_N, retain_N),
    ):
        if not is_chosen_N.any():
            highest = f"{score_N.max():.6g}" if len(score_N) else "none"
            raise ValueError(
                f"examples to {name} wanted, none clears {name}_threshold="
                f"{numbers[f'{name}_threshold']} with {z=}, the highest score is {highest}: "
                "lower it"
            )
    id_rank_N = _id_ranks(ids)
    forget = np.lexsort((id_rank_N, -forget_N, ~is_forget_N))[: is_forget_N.sum()]
    retain = np.lexsort((id_rank_N, -retain_N, ~is_retain_N))[: is_retain_N.sum()]
    return Selection(forget=forget, retain=retain)


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
        raise ValueError(f"shares above 0, 1 at most wanted, came {forget_share=}, {retain_share=}")
    if forget_share + retain_share > 1 + 1e-9:
        raise ValueError(
            f"shares that keep the sets apart wanted, {forget_share=} and {retain_share=} sum to "
            "more than 1: lower one"
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
            f"--{name}_share must be one example or more, got {share} of {eligible} that can be "
            "chosen: raise it"
        )
    return count


SELECTORS: dict[str, Callable[..., Selection]] = {
    "count": select_by_count,
    "threshold": select_by_threshold,
    "margin": select_by_margin,
    "quantile": select_by_quantile,
}


def set_counts(settings: RetrieveConfig, num_targets: int) -> tuple[int, int]:
    """Returns the sizes of the forget and the retain set that --retrieve.select=count asks for.

    Args:
      settings: num_forget and num_retain; 0 stands for the number of targets, and for num_forget.
      num_targets: labeled targets that can be chosen.

    Raises:
      ValueError: num_forget is 0 and there are no targets.
    """
    num_forget = settings.num_forget or num_targets
    if not num_forget:
        raise ValueError(
            "--retrieve.num_forget must be given where no training example is a labeled target"
        )
    return num_forget, settings.num_retain or num_forget


def select_sets(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    settings: RetrieveConfig,
    *,
    num_targets: int,
    sigma: float | None = None,
) -> Selection:
    """Returns the sets that a run's settings choose (--retrieve.select and its options).

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R, likewise.
      ids: example ids, the tie-breaker.
      settings: the rule and its options.
      num_targets: see `set_counts`.
      sigma: sigma_k, for --retrieve.select=margin.

    Raises:
      ValueError: see the rules.
    """
    options: dict[str, Any] = {}
    if settings.select == "count":
        counts = set_counts(settings, num_targets)
        options = dict(zip(("num_forget", "num_retain"), counts, strict=True))
    elif settings.select == "quantile":
        options = {"forget_share": settings.forget_share, "retain_share": settings.retain_share}
    else:
        options = {
            "forget_threshold": settings.forget_threshold,
            "retain_threshold": settings.retain_threshold,
        }
        if settings.select == "margin":
            options |= {"z": settings.margin_z, "sigma": sigma}
    return SELECTORS[settings.select](forget_N, retain_N, ids, **options)


def _check_scores(
    forget_N: Float[np.ndarray, " N"], retain_N: Float[np.ndarray, " N"], ids: Sequence[str]
) -> None:
    if not len(forget_N) == len(retain_N) == len(ids):
        raise ValueError(
            f"one forget score, retain score and id per example wanted, "
            f"got {len(forget_N)}, {len(retain_N)} and {len(ids)}"
        )
    for name, score_N in (("forget", forget_N), ("retain", retain_N)):
        where = np.flatnonzero(np.isnan(score_N) | (score_N == np.inf))
        if len(where):
            value = "NaN" if np.isnan(score_N[where[0]]) else "infinite"
            raise ValueError(
                f"the {name} score of example {ids[where[0]]} is {value} "
                f"({len(where)} such): sketch again from a model with finite weights"
            )


def _id_ranks(ids: Sequence[str]) -> Int[np.ndarray, " N"]:
    """Returns the place of each example in the order of ids."""
    ranks = np.empty(len(ids), np.int64)
    ranks[np.argsort(np.asarray(ids, dtype=np.str_), kind="stable")] = np.arange(len(ids))
    return ranks


# the noise of the sketch -----------------------------------------------------------------------


def check_agreement(
    query_QK: Float[np.ndarray, "Q K"],
    ids: Sequence[str],
    mean_K: Float[np.ndarray, " K"] | None = None,
) -> Float[np.ndarray, "Q Q"]:
    """Returns the cosines g_ij between the queries, if they do not point apart.

    Scores are means over queries. Where queries point against each other, that mean is of nothing:
    what is aligned with one is anti-aligned with another. Unrelated queries have mean directions
    of squared length 1 / Q; refused is what falls below half of that.

    Args:
      query_QK: sketches of the queries.
      ids: their ids, for the error.
      mean_K: mean sketch of the corpus where scores are centered.

    Raises:
      ValueError: a sketch is zero or not finite, or the queries point apart, naming those that
        do most.
    """
    direction_QK = _directions(query_QK, mean_K)
    bad = np.flatnonzero(~(np.linalg.norm(direction_QK, axis=1) > 0))
    if len(bad):
        raise ValueError(
            f"queries with a direction wanted, the sketches of {[ids[i] for i in bad[:5]]} are zero"
            " or not finite: look at the answers they were sketched from"
        )
    gram_QQ = direction_QK @ direction_QK.T
    if gram_QQ.mean() < 0.5 / len(gram_QQ):
        worst = np.argsort(gram_QQ.sum(axis=1), kind="stable")[:3]
        raise ValueError(
            f"queries of one behavior wanted, their {len(gram_QQ)} sketches point apart (mean "
            f"direction of squared length {gram_QQ.mean():.3g}, {1 / len(gram_QQ):.3g} is "
            f"unrelated); most of all {[ids[i] for i in worst]}: trace them one by one"
        )
    return gram_QQ


def query_cosines(
    row_MK: Float[np.ndarray, "M K"],
    query_QK: Float[np.ndarray, "Q K"],
    mean_K: Float[np.ndarray, " K"] | None = None,
) -> Float[np.ndarray, "M Q"]:
    """Returns the (centered) cosines of rows with every query, rho of `score_sigma`."""
    return _directions(row_MK, mean_K) @ _directions(query_QK, mean_K).T


def score_sigma(
    query_gram_QQ: Float[np.ndarray, "Q Q"], rho_NQ: Float[np.ndarray, "N Q"], p: float
) -> Float[np.ndarray, " N"]:
    """Returns sigma_k, the standard deviation of each row's mean cosine over Q queries.

    The root of (p / Q^2) sum_ij [ g_ij (1 - rho_i^2 - rho_j^2) - rho_i rho_j
    + (rho_i rho_j / 2) (1 + g_ij^2 + rho_i^2 + rho_j^2) ]: all queries share one sketch, so it is
    neither 1 / sqrt(K) nor 1 / sqrt(Q K). First order in p, without the diagonal terms: they lower
    the noise of heavy-tailed gradients, by an amount that sketches do not tell (two sketches show
    the same products whether a bin holds one large coordinate or many small ones). So this is the
    noise of gradients whose weight is spread out, and an upper bound for all others.

    Args:
      query_gram_QQ: cosines between the queries, of `check_agreement`; of the centered sketches
        where scores are centered.
      rho_NQ: cosines of the rows with the queries, likewise.
      p: probability that two coordinates meet, about 1 / K.

    Source: expansion of Li and Li, KDD 2023, arXiv 2302.03505; `influence.theory` has it row by
    row.
    """
    gram_QQ, rho_NQ = np.asarray(query_gram_QQ, np.float64), np.asarray(rho_NQ, np.float64)
    sum_N, square_NQ = rho_NQ.sum(axis=1), rho_NQ**2
    terms_N = gram_QQ.sum() - 2 * square_NQ @ gram_QQ.sum(axis=1) - 0.5 * sum_N**2
    terms_N += 0.5 * np.sum((rho_NQ @ gram_QQ**2) * rho_NQ, axis=1)
    terms_N += (square_NQ * rho_NQ).sum(axis=1) * sum_N
    # Exactly parallel vectors have no variance; rounding may leave -1e-17.
    return np.sqrt(np.maximum(p * terms_N, 0)) / rho_NQ.shape[1]


def _directions(
    vector_MK: Float[np.ndarray, "M K"], mean_K: Float[np.ndarray, " K"] | None
) -> Float[np.ndarray, "M K"]:
    """Returns unit vectors, less the mean and at length 1 again where there is one."""
    unit_MK = np.asarray(vector_MK, np.float64)
    for shift_K in (None, mean_K):
        if shift_K is not None:
            unit_MK = unit_MK - np.asarray(shift_K, np.float64)
        length_M1 = np.linalg.norm(unit_MK, axis=1, keepdims=True)
        unit_MK = unit_MK / np.where(length_M1 > 0, length_M1, 1.0)
    return unit_MK


# what was chosen -------------------------------------------------------------------------------


def summarize_selection(
    selection: Selection,
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    *,
    influence_N: Float[np.ndarray, " N"] | None = None,
    labels: Sequence[bool | None] | None = None,
    texts: Sequence[Any] | None = None,
    margin: float = 0.01,
) -> dict[str, Any]:
    """Returns what was chosen, as JSON values.

    Args:
      selection: the two sets.
      forget_N: the scores they were chosen by, s_F.
      retain_N: s_R.
      influence_N: s_F of the antipodal search where the scores are of another strategy; tells how
        many retain items are not anti-aligned. None: forget_N.
      labels: is_target of every example.
      texts: anything hashable per example that is equal where two examples read the same.
      margin: gamma, half the width of the neighborhood of a threshold.

    Returns:
      `num_forget`, `num_retain`; `retain_scored_positive`, retain items with influence >= 0; for
      each set a dict of `lowest` and `highest` score, the lowest being the threshold that gives
      the set; `near_threshold`, examples within the margin of it, in the set or not; `density`,
      these per example and unit of score; `near_threshold_scaled` and `density_scaled`, the same
      with scores divided by their largest absolute value, after the paper's [-1, 1]; `duplicates`,
      items whose text is in the set before; with labels `targets`, `non_targets` and `unlabeled`.
      `texts_in_both`: texts that are to be forgotten and retained at once. None where unknown.
    """
    influence_N = forget_N if influence_N is None else influence_N
    chosen_texts = [
        None if texts is None else [texts[i] for i in positions] for positions in selection
    ]
    summary: dict[str, Any] = {
        "num_forget": len(selection.forget),
        "num_retain": len(selection.retain),
        "retain_scored_positive": int((influence_N[selection.retain] >= 0).sum()),
        "margin": margin,
        "texts_in_both": None
        if texts is None
        else len({*(chosen_texts[0] or ())} & {*(chosen_texts[1] or ())}),
    }
    for name, positions, score_N, words in zip(
        ("forget", "retain"), selection, (forget_N, retain_N), chosen_texts, strict=True
    ):
        part = _summarize_scores(score_N, positions, margin)
        part["duplicates"] = None if words is None else len(words) - len(set(words))
        if labels is not None:
            found = [labels[i] for i in positions]
            part["targets"], part["non_targets"] = found.count(True), found.count(False)
            part["unlabeled"] = found.count(None)
        summary[name] = part
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
