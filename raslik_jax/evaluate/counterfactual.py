"""QLD and LDS: whether the scores of rows predict an answer's loss after training without the rows.

QLD is a difference of two losses: after retraining without the rows of the highest scores, minus
after retraining without random rows. LDS is the linear datamodeling score. It correlates the loss
after retraining on random subsets with the sum of the scores of the rows in each subset. The
correlation is Spearman's. The source is Park et al. 2023, "TRAK" (arXiv:2303.14186), Section 2.
"""

import itertools
import math

import numpy as np
from jaxtyping import Float

from raslik_jax.data.ordering import shuffled
from raslik_jax.data.words import refused
from raslik_jax.evaluate.rates import Interval

_DRAWS = 2000
_TAIL = 0.025  # of a 95 % interval on each side


def rise(nll_SQ: Float[np.ndarray, "S Q"], other_SQ: Float[np.ndarray, "S Q"]) -> Interval:
    """Returns the mean of nll - other with Student's 95 % interval over seeds.

    A row of both arrays belongs to one seed. The interval is that of paired differences. The mean
    over queries is taken first, because they share the noise of a seed.

    Args:
      nll_SQ: nats a token of each query after the trainings with two or more seeds.
      other_SQ: the same after the other trainings.
    """
    from scipy import special  # it takes long to load

    rise_S = (nll_SQ - other_SQ).mean(axis=1)
    count = len(rise_S)
    half = special.stdtrit(count - 1, 1 - _TAIL) * rise_S.std(ddof=1) / np.sqrt(count)
    mean = float(rise_S.mean())
    return Interval(mean=mean, low=mean - float(half), high=mean + float(half))


def correlations(
    predicted_SQ: Float[np.ndarray, "S Q"], nll_SQ: Float[np.ndarray, "S Q"]
) -> Float[np.ndarray, " Q"]:
    """Returns Spearman's correlation of prediction and likelihood over subsets, by query.

    It is 0 if either is the same for all subsets. Ties have their mean rank.
    """
    return _pearson(*_ranks(predicted_SQ, nll_SQ))


def _ranks(*parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranks over subsets of predictions and of likelihoods."""
    from scipy import stats  # it takes a second to load

    predicted_SQ, nll_SQ = parts
    return stats.rankdata(predicted_SQ, axis=0), stats.rankdata(-nll_SQ, axis=0)


def _pearson(one_SQ: np.ndarray, other_SQ: np.ndarray) -> np.ndarray:
    one_SQ, other_SQ = (part - part.mean(axis=0) for part in (one_SQ, other_SQ))
    spread_Q = np.sqrt((one_SQ**2).sum(axis=0) * (other_SQ**2).sum(axis=0))
    found_Q: np.ndarray = (one_SQ * other_SQ).sum(axis=0) / np.maximum(spread_Q, 1e-12)
    return found_Q


def lds(
    predicted_SQ: Float[np.ndarray, "S Q"],
    nll_SQ: Float[np.ndarray, "S Q"],
    minus_SQ: Float[np.ndarray, "S Q"] | None = None,
    *,
    seed: int = 0,
) -> Interval:
    """Returns the mean correlation over queries with its 95 % bootstrap interval.

    Each draw takes subsets and queries with replacement. Ranks are those among all subsets. Equal
    seeds give equal draws for all predictions. With another prediction in `minus_SQ` the result is
    the difference of the two.

    Args:
      predicted_SQ: predicted likelihood of each query after training on each subset.
      nll_SQ: nats a token of each query after this training.
    """
    parts = [predicted_SQ] if minus_SQ is None else [predicted_SQ, minus_SQ]
    ranks = [_ranks(part, nll_SQ) for part in parts]
    generator, draws = np.random.default_rng(seed), []
    for _ in range(_DRAWS):
        subsets, queries = (generator.integers(size, size=size) for size in nll_SQ.shape)
        drawn = [[part[subsets][:, queries] for part in pair] for pair in ranks]
        draws.append([_pearson(*pair).mean() for pair in drawn])
    means = [float(_pearson(*pair).mean()) for pair in ranks]
    found_R = np.array(draws) @ [1, -1][: len(parts)]
    low, high = np.quantile(found_R, [_TAIL, 1 - _TAIL])
    return Interval(mean=means[0] - sum(means[1:]), low=float(low), high=float(high))


def draw_subsets(
    num_rows: int, *, number: int, share: float, group: int, seed: int
) -> list[np.ndarray]:
    """Returns the sorted positions of the rows that random subsets keep.

    Rows are drawn in groups of `group` neighbors. All subsets keep the same number of groups. It is
    a `share` of them and at least one. All differ. Raises a ValueError if there are too few.
    """
    count = -(-num_rows // group)
    kept = max(1, round(share * count))
    if (possible := math.comb(count, kept)) < number:
        raise refused("subsets", groups=count, kept=kept, possible=possible, number=number)
    found: dict[tuple[int, ...], None] = {}
    for place in itertools.count():
        if len(found) >= number:
            break
        drawn = shuffled(range(count), seed=seed, label=f"subset {place}")[:kept]
        found[tuple(sorted(drawn))] = None
    group_N = np.arange(num_rows) // group
    return [np.flatnonzero(np.isin(group_N, drawn)) for drawn in found]
