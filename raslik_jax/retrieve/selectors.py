"""The antipodal selector: from scores to disjoint forget and retain sets.

By count or by threshold. `find_cut` finds the count by a gap in the scores. NumPy, on the host.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.data.ordering import shuffled
from raslik_jax.data.words import refused
from raslik_jax.index.combine import best_positions

# Rows of pure noise that may be expected above the edge of the noise.
_NOISE_ROWS = 0.05
# Share of the scores, the lowest, that are taken to be unrelated.
_UNRELATED = 0.3
# Two groups of scores: the fewest in all, the least share of each, and how far the density has to
# fall between them.
FEWEST_IN_TWO, _LEAST_GROUP, _DEPTH = 40, 0.15, 2 / 3
# A gap below a group: the most probable by chance among all, the fewest gaps that its size is
# compared with, and the most that are tried.
_BY_CHANCE, _AROUND, _TRIED = 1e-3, 30, 64
# Below 40 scores: the width of a gap in ranges of the scores below it, and the fewest of these.
_RANGES, _FEWEST_BELOW = 1.5, 6
# Scores that differ by less than this share of their standard deviation are equal.
_EQUAL = 1e-5
# A behavior in a larger share of the rows is called common.
_COMMON = 0.2


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

    A score of minus infinity bars an example from that set. Ties are ordered by id, so the order of
    the rows changes nothing (Algorithm 1, line 5, with tau set by the counts).
    """
    _check_scores({"forget ": forget_N, "retain ": retain_N}, ids)
    forget = best_positions(forget_N, ids, num_forget, "num_forget")
    left_N = np.array(retain_N, np.float64)
    left_N[forget] = -np.inf
    name = f"num_retain next to the {num_forget} to forget"
    return Selection(forget=forget, retain=best_positions(left_N, ids, num_retain, name))


def spread_retain(
    retain_N: Float[np.ndarray, " N"], ids: Sequence[str], *, share: float, seed: int
) -> Float[np.ndarray, " N"]:
    """Returns retain scores whose best are drawn at random from a share of the examples.

    The share has the highest scores. All others follow it in their order, and a score of minus
    infinity stays. The examples of the highest scores may be of one kind. A model that retains them
    alone may change elsewhere. The draw follows the ids.
    """
    ranked = best_positions(retain_N, ids, int((retain_N > -np.inf).sum()), "scored").tolist()
    most = math.ceil(share * len(ranked))
    by_id = sorted(ranked[:most], key=lambda position: ids[position])
    order = [*shuffled(by_id, seed=seed, label="retained rows"), *ranked[most:]]
    spread_N = np.full_like(retain_N, -np.inf)
    spread_N[order] = np.linspace(1, 0, len(order))
    return spread_N


def select_by_threshold(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    *,
    forget_threshold: float,
    retain_threshold: float,
) -> Selection:
    """Returns F = {s_F >= tau_F} and R = {s_R >= tau_R}, best first (Algorithm 1, line 5).

    The paper's "Suggested thresholds" (Section 3.4) add z sigma_k of `noise.score_sigma` to each.
    It raises a ValueError if a set is empty or if an example passes both thresholds.
    """
    _check_scores({"forget ": forget_N, "retain ": retain_N}, ids)
    # In float64, so that a threshold of .1 means .1 and not the float32 next to it.
    scores = [np.asarray(score_N, np.float64) for score_N in (forget_N, retain_N)]
    thresholds = forget_threshold, retain_threshold
    passes = [score_N >= tau for score_N, tau in zip(scores, thresholds, strict=True)]
    both = np.flatnonzero(passes[0] & passes[1])
    if len(both):
        raise ValueError(
            f"thresholds must keep the sets apart, {len(both)} examples pass both "
            f"{forget_threshold=} and {retain_threshold=}, such as {ids[both[0]]}: raise one"
        )
    chosen = []
    for name, score_N, tau, is_chosen_N in zip(
        Selection._fields, scores, thresholds, passes, strict=True
    ):
        if not is_chosen_N.any():
            highest = score_N.max(initial=-np.inf)
            raise refused("set_empty", name=name, tau=tau, highest=highest)
        chosen.append(best_positions(score_N, ids, int(is_chosen_N.sum())))
    return Selection(*chosen)


@runtime_checkable
class Rule(Protocol):
    """The settings of a rule by which scores become sets: fields of `RetrieveConfig`."""

    @property
    def select(self) -> str: ...
    @property
    def num_forget(self) -> int: ...
    @property
    def num_retain(self) -> int: ...
    @property
    def retain_within(self) -> float: ...


class Cut(NamedTuple):
    """The end of the scores that stand out.

    The cut takes `num_forget` of the `num_out` above the noise, or none. `middle` and `edge` are
    the median and the highest score of the unrelated examples. `gap` is the distance from the last
    example of the cut to the first of the others.
    """

    num_forget: int
    middle: float
    edge: float
    gap: float
    num_out: int


def is_common(cut: Cut, count: int) -> bool:
    """Returns whether the cut takes more than a fifth of this number of examples."""
    return cut.num_forget > _COMMON * count


def noise_band(score_N: Float[np.ndarray, " N"], *, sigma: float = 0.0) -> tuple[float, float]:
    """Returns the middle of the unrelated scores and their upper edge.

    The lowest 30 % of the scores are assumed to be unrelated. Their edge is median + t spread. The
    spread is the median distance below the median, divided by that of a normal distribution, and at
    least sigma (the noise of the sketch). t is chosen so that of N noisy rows .05 are above the
    edge. It is a quantile of Student's t. A fifth of the unrelated examples are its degrees of
    freedom, because a standard deviation of so many values is as uncertain as that spread. All
    scores up to the edge are then taken as unrelated and give the next edge, until no score is
    added. Scores without a gap are all below the last edge.

    Scores of minus infinity do not count. It raises a ValueError if fewer than ten are left, or for
    scores that are not finite otherwise.
    """
    from scipy import special  # takes long to load

    _check_scores({"": score_N}, range(len(score_N)))
    ranked_N = np.sort(score_N[score_N > -np.inf].astype(np.float64))
    if len(ranked_N) < 10:
        raise refused("few_scores", got=len(ranked_N))
    edge = ranked_N[max(9, int(_UNRELATED * len(ranked_N))) - 1]
    count = 0
    while (below := int(np.searchsorted(ranked_N, edge, side="right"))) > count:
        count = below
        middle = float(np.median(ranked_N[:count]))
        under_M = middle - ranked_N[:count][ranked_N[:count] < middle]
        spread = float(np.median(under_M) / -special.ndtri(0.25)) if len(under_M) else 0.0
        reach = -float(special.stdtrit(count / 5, _NOISE_ROWS / len(ranked_N)))
        edge = max(edge, middle + reach * max(spread, sigma))
    return middle, float(edge)


def count_upper(score_N: Float[np.ndarray, " N"]) -> int:
    """Returns how many scores are above the valley between two groups; 0 for one group.

    The density (Gaussian kernels, Silverman's width, but by deciles in place of quartiles) has to
    fall below two thirds of the lower of the two peaks. Each group has at least .15 of the scores.
    Fewer than 40 scores are one group. By chance the density of 200 normal, skewed, heavy-tailed or
    uniform scores falls so low in less than 1 % of draws.
    """
    ranked_N = np.sort(score_N[score_N > -np.inf].astype(np.float64))
    count = len(ranked_N)
    if count < FEWEST_IN_TWO:
        return 0
    low, tenth, ninth, high = np.quantile(ranked_N, (0.005, 0.1, 0.9, 0.995))
    # Most rows may be alike, which makes quartiles equal, and a few far above the others.
    width = 0.9 * min(float(ranked_N.std()), (ninth - tenth) / 2.563) * count**-0.2
    if low == high or width <= 0:
        return 0
    number_B, edges = np.histogram(ranked_N, bins=2048, range=(low, high))
    place_B = (edges[:-1] + edges[1:]) / 2
    kernel = np.exp(-0.5 * ((place_B - place_B[len(place_B) // 2]) / width) ** 2)
    density_B = np.convolve(number_B, kernel, mode="same")
    left_B = np.maximum.accumulate(density_B)
    right_B = np.maximum.accumulate(density_B[::-1])[::-1]
    above_B = count - np.searchsorted(ranked_N, place_B)
    is_inside_B = np.abs(above_B / count - 0.5) <= 0.5 - _LEAST_GROUP
    # A slope that goes on to a valley beyond these shares is no valley.
    around_B = np.pad(density_B, 1, constant_values=np.inf)
    is_inside_B &= (density_B <= around_B[:-2]) & (density_B <= around_B[2:])
    depth_B = np.where(is_inside_B, density_B / np.minimum(left_B, right_B).clip(1e-300), np.inf)
    valley = int(depth_B.argmin())
    return int(above_B[valley]) if depth_B[valley] <= _DEPTH else 0


def count_apart(score_N: Float[np.ndarray, " N"], *, sigma: float = 0.0) -> int:
    """Returns how many scores are above a gap that is too wide to be one of the tail; 0 for none.

    In an exponential tail the k-th gap from above times k has the same exponential distribution for
    all k (Renyi 1953). Its mean is estimated from these products, those of the upper fifth but one
    or those just below k, whichever is larger. Equal scores, as of copies, count once. The widest
    gap of the upper fifth has to have a probability below .001 and to be four sigma wide. By chance
    it adds rows to `find_cut` in less than 1 % of draws of 40 to 5,000 normal, skewed, heavy-tailed
    or uniform scores. Fewer scores show no tail. A gap then has to be 1.5 times as wide as the
    range of all scores below it, which are .3 of all or more.
    """
    ranked_N = np.sort(score_N[score_N > -np.inf].astype(np.float64))[::-1]
    gap_M = -np.diff(ranked_N)
    # The last row of each score, and the gap below it.
    last_M = np.flatnonzero(gap_M > _EQUAL * (ranked_N.std() if len(gap_M) else 0))
    count, gap_M = len(last_M) + 1, gap_M[last_M]
    if count < FEWEST_IN_TWO:
        most = max(0, count - max(_FEWEST_BELOW, math.ceil(_UNRELATED * count)))
        range_M = ranked_N[last_M + 1] - ranked_N[-1:]
        is_apart_M = (gap_M >= _RANGES * range_M) & (gap_M >= 4 * sigma)
        return max((int(last) + 1 for last in last_M[:most][is_apart_M[:most]]), default=0)
    most = count // 5
    width_M = gap_M * np.arange(1, count)
    scale = float(np.sort(width_M[:most])[:-1].mean())
    found, least = 0, math.log(most / _BY_CHANCE)
    for place in np.argsort(-width_M[:most], kind="stable")[:_TRIED].tolist():
        around_M = width_M[place + 1 : place + 1 + max(_AROUND, place + 1)]
        times = width_M[place] / max(scale, float(around_M.mean()))
        if times > least and gap_M[place] >= 4 * sigma:
            found, least = int(last_M[place]) + 1, times
    return found


def find_cut(score_N: Float[np.ndarray, " N"], *, sigma: float = 0.0) -> Cut:
    """Returns the `Cut` of the examples that stand out: `num_forget` are above the widest gap.

    The gap is searched in the lower half of the examples above the noise band. In the upper half it
    is often below a few near copies of the query. If all scores form two groups, or a gap sets a
    group apart (`count_apart`), and that group has more examples, it stands out: the scores of a
    behavior with many rows are as wide as the unrelated scores, and the edge of the noise may be
    above those of a behavior. `sigma` is as for `noise_band`.
    """
    middle, edge = noise_band(score_N, sigma=sigma)
    ranked_N = np.sort(score_N[score_N > -np.inf].astype(np.float64))[::-1]
    above = int((ranked_N > edge).sum())
    upper = max(count_upper(score_N), count_apart(score_N, sigma=sigma))
    first = max(above - 1, 0) // 2
    gap_M = ranked_N[first:above] - ranked_N[first + 1 : above + 1]
    number = first + int(np.argmax(gap_M)) + 1 if above else 0
    if upper > number:
        number = upper
        middle, edge = float(np.median(ranked_N[upper:])), float(ranked_N[upper])
    gap = float(ranked_N[number - 1] - ranked_N[number]) if number else 0.0
    return Cut(number, middle, edge, gap, max(above, upper))


def _check_scores(
    scores: Mapping[str, Float[np.ndarray, " N"]], ids: Sequence[str] | range
) -> None:
    for name, score_N in scores.items():
        if np.shape(score_N) != (len(ids),):
            raise refused("scores_ids", name=name, count=len(ids), got=np.shape(score_N))
        where = np.flatnonzero(np.isnan(score_N) | (score_N == np.inf))
        if len(where):
            value = "NaN" if np.isnan(score_N[where[0]]) else "infinite"
            found = {"row": ids[where[0]], "value": value, "count": len(where)}
            raise refused("scores_finite", name=name, **found)


def summarize_selection(
    selection: Selection,
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    *,
    labels: Sequence[bool | None],
    margin: float = 0.01,
) -> dict[str, Any]:
    """Returns a summary of the chosen sets as JSON values.

    `labels` are is_target of every example. The margin is gamma, half the width of the neighborhood
    of a threshold.

    Returns:
      `num_forget`, `num_retain`; for each set a dict of `lowest` and `highest` score, the lowest is
      the threshold that gives the set; `near_threshold`, the examples within the margin of the
      threshold; `density`, their share per unit of score; `targets`, `non_targets`, `unlabeled`.
    """
    sizes = {"num_forget": len(selection.forget), "num_retain": len(selection.retain)}
    summary: dict[str, Any] = {**sizes, "margin": margin}
    for name, positions, score_N in zip(
        Selection._fields, selection, (forget_N, retain_N), strict=True
    ):
        part = summary[name] = {"lowest": None, "highest": None}
        if len(positions):
            chosen_M = score_N[positions].astype(np.float64)
            finite_N = score_N[np.isfinite(score_N)].astype(np.float64)
            part |= {"lowest": float(chosen_M.min()), "highest": float(chosen_M.max())}
            near = int((np.abs(finite_N - part["lowest"]) <= margin).sum())
            part |= {"near_threshold": near, "density": near / (2 * margin * len(finite_N))}
        found = [labels[i] for i in positions]
        kinds = {"targets": True, "non_targets": False, "unlabeled": None}
        part |= {kind: found.count(label) for kind, label in kinds.items()}
    return summary
