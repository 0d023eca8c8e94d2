"""The chance of a score: its place among the scores that unrelated prompts give the same row.

The noise of the sketch (`noise`) is another question. sigma says how far a sketched cosine is from
the exact one. Chance says how often the exact cosine with an unrelated prompt is as high. NumPy on
the host.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.index.combine import Aggregate, query_weights
from raslik_jax.retrieve.selectors import find_cut

# Fewer unrelated prompts say nothing of a row.
FEWEST_PROMPTS = 10
# Rows with a q of at most this are counted as found.
LEVEL = 0.05
_BLOCK_ROWS = 4096
# A group has at most this share of the prompts: larger ones are too much alike.
_LARGEST_GROUP = 0.25
# Each step of the search for alike prompts looks at so many times fewer neighbors.
_NARROWER = 1.5


class Chance(NamedTuple):
    """Each row's score among those of unrelated prompts; NaN for rows without a score.

    `higher_N` of `prompts_N` prompts score the row at least as high; p = (1 + higher) / (1 +
    prompts). q is the expected share of false finds among this row and all rows that stand out
    more.
    """

    higher_N: Float[np.ndarray, " N"]
    prompts_N: Float[np.ndarray, " N"]
    p_N: Float[np.ndarray, " N"]
    q_N: Float[np.ndarray, " N"]


# What each value is called where there is one row.
NAMES = tuple(name.removesuffix("_N") for name in Chance._fields)


class Finds(NamedTuple):
    """Rows whose q is at most a level, and how many of them are expected by chance."""

    found: int
    expected: float


def related_prompts(
    score_N: Float[np.ndarray, " N"], position_M: Int[np.ndarray, " M"]
) -> Bool[np.ndarray, " M"]:
    """Returns the prompts that are not unrelated: their own rows stand out for the traced answer.

    If the corpus has more rows of the behavior, some of the drawn prompts show the behavior too. A
    corpus of fewer than ten rows keeps all prompts.
    """
    if int((score_N > -np.inf).sum()) < 10:
        return np.zeros(len(position_M), bool)
    number = find_cut(score_N).num_out
    return score_N[position_M] >= np.sort(score_N)[::-1][number - 1 : number].min(initial=np.inf)


def without_own_share(null_NM: Float[np.ndarray, "N M"], count: int) -> Float[np.ndarray, "N M"]:
    """Returns scores of prompts drawn from `count` rows, centered on the mean of the others.

    A row is a part of the mean mu, but the traced answer is not. On average the centered cosine of
    two unrelated rows is therefore -1 / (count - 1) and not 0. The mean without row m is farther
    from m by h = |m - mu| / (count - 1), in the same direction. If all rows are equally far from
    the mean, a cosine s becomes (s + h) / |1 + 2 s h + h^2|^(1/2).
    """
    share = 1 / max(count - 1, 1)
    square_NM = 1 + 2 * share * null_NM + share**2
    return (null_NM + share) / np.sqrt(np.maximum(square_NM, 1e-12))


def group_prompts(
    null_NM: Float[np.ndarray, "N M"],
    position_M: Int[np.ndarray, " M"],
    gram_QQ: Float[np.ndarray, "Q Q"],
    aggregate: Aggregate,
    *,
    seed: int,
) -> Float[np.ndarray, "N G"]:
    """Returns the scores of every row with groups of Q prompts.

    A score of Q queries is a (weighted) mean, so it is compared with means of Q prompts. Averaging
    raises the share of a direction that all prompts have (uncentered scores), and it does so in
    both. Each prompt begins one group. The other prompts of the group are drawn from its nearest
    neighbors, so that the prompts of a group are as similar as the queries. Queries of one length
    or language are then compared with prompts of one length or language. A group of one prompt is
    the prompt.

    M prompts represent all possible ones. Their groups overlap, so the variance of means of Q
    prompts is too small by the factor (M + Q) (M - 1) / ((M + 1) (M - Q)). The scores are spread
    about each row's mean by the root of this factor.

    Args:
      null_NM: scores of single prompts, NaN for a prompt with its own row and copies of it.
      position_M: the rows that serve as prompts.
      gram_QQ: cosines between the queries.

    Returns:
      One column per prompt; no column if Q is above a quarter of M. The prompt of a row does not
      count for that row.
    """
    count, total = len(gram_QQ), len(position_M)
    if count == 1:
        return null_NM
    if count > _LARGEST_GROUP * total:
        return null_NM[:, :0]
    known_NM = np.nan_to_num(null_NM.astype(np.float64), nan=0.0)
    gram_MM = np.nan_to_num(null_NM[position_M].astype(np.float64), nan=1.0)
    gram_MM = (gram_MM + gram_MM.T) / 2
    weight_MG = _draw_groups(gram_MM, gram_QQ, aggregate, seed)
    product_MG = gram_MM @ weight_MG
    square_G = (weight_MG * product_MG).sum(axis=0)
    score_NG = known_NM @ (weight_MG / np.sqrt(np.maximum(square_G, 1e-12))).astype(np.float64)
    # A row that serves as a prompt is left out of its groups, which are shorter without it.
    left_MG = square_G - 2 * weight_MG * product_MG + weight_MG**2
    own_R, prompt_R = np.nonzero(np.isnan(null_NM))
    factor_MG = np.sqrt(square_G / np.maximum(left_MG, 1e-12))
    np.multiply.at(score_NG, own_R, factor_MG[prompt_R])
    spread = (total + count) * (total - 1) / ((total + 1) * (total - count))
    mean_N1 = score_NG.mean(axis=1, keepdims=True)
    return mean_N1 + np.sqrt(spread) * (score_NG - mean_N1)


def _draw_groups(
    gram_MM: Float[np.ndarray, "M M"],
    gram_QQ: Float[np.ndarray, "Q Q"],
    aggregate: Aggregate,
    seed: int,
) -> Float[np.ndarray, "M M"]:
    """Returns the weights of the prompts in every group, a column for each."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 3]))
    total, count = len(gram_MM), len(gram_QQ)
    weight_MG, enough = np.zeros((total, total)), direction_length(gram_QQ, aggregate)
    for first in range(total):
        near_M = np.argsort(-gram_MM[first], kind="stable")
        near_M, number = near_M[near_M != first], total - 1
        while True:
            others = generator.permutation(near_M[:number])[: count - 1]
            group = np.append(others, first)
            part_QQ = gram_MM[np.ix_(group, group)]
            if number == count - 1 or direction_length(part_QQ, aggregate) >= enough:
                break
            number = max(count - 1, int(number / _NARROWER))
        weight_MG[group, first] = query_weights(part_QQ, aggregate)
    return weight_MG


def direction_length(gram_QQ: Float[np.ndarray, "Q Q"], aggregate: Aggregate) -> float:
    """Returns |sum_q w_q u_q|: a score over it is the cosine with one direction."""
    weight_Q = query_weights(gram_QQ, aggregate)
    return float(np.sqrt(max(weight_Q @ gram_QQ @ weight_Q, 1e-12)))


def compare(score_N: Float[np.ndarray, " N"], null_NM: Float[np.ndarray, "N M"]) -> Chance:
    """Returns each row's chance from its scores with M unrelated prompts, NaN if none.

    p compares a row with its own M scores. It is at least 1 / (M + 1), and it is valid if the
    traced prompt is like the others. For q this resolution is too coarse: by the correction of
    Benjamini and Hochberg over N rows, no row passes unless N / (M + 1) / q rows do. Scores are
    therefore standardized by the mean and the spread of each row over the prompts (for a prompt's
    own row, over the other prompts). All N M standardized scores are one distribution. This assumes
    that rows differ in mean and spread and not in the shape of their tails. Rows with similar
    prompts have long tails, which raise the q of the others (docs/notes/retrieve.md has
    measurements).
    """
    is_row_N, count = score_N > -np.inf, len(score_N)
    higher_N, prompts_N, z_N = np.zeros(count), np.zeros(count), np.zeros(count)
    # Thirty million values of the null make one distribution as well as more do.
    pool, step = list[np.ndarray](), max(1, null_NM.size // 2**25)
    for start in range(0, count, _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        null_BM, own_B1 = null_NM[part].astype(np.float64), score_N[part, None].astype(np.float64)
        is_pair_BM = ~np.isnan(null_BM) & is_row_N[part, None]
        null_BM = np.where(is_pair_BM, null_BM, 0.0)
        own_B1 = np.where(is_row_N[part, None], own_B1, 0.0)
        count_B1 = is_pair_BM.sum(axis=1, keepdims=True)
        sum_B1, square_B1 = (np.sum(x, axis=1, keepdims=True) for x in (null_BM, null_BM**2))
        higher_N[part] = ((null_BM >= own_B1) & is_pair_BM).sum(axis=1)
        prompts_N[part] = count_B1[:, 0]
        z_N[part] = _standardized(own_B1, sum_B1, square_B1, count_B1)[:, 0]
        others_BM = sum_B1 - null_BM, square_B1 - null_BM**2, count_B1 - 1
        z_BM = _standardized(null_BM, *others_BM).astype(np.float32)
        is_drawn_B = np.random.default_rng(start).random(len(z_BM)) < 1 / step
        pool.append(z_BM[is_drawn_B][is_pair_BM[is_drawn_B]])
    if not is_row_N.any() or prompts_N[is_row_N].min() < FEWEST_PROMPTS:
        return Chance(*np.full((len(Chance._fields), count), np.nan))
    z_M = np.sort(np.concatenate(pool))
    above_N = len(z_M) - np.searchsorted(z_M, z_N.astype(np.float32), side="left")
    q_N = np.full(count, np.nan)
    q_N[is_row_N] = adjust((1 + above_N[is_row_N]) / (1 + len(z_M)))
    higher_N[~is_row_N] = prompts_N[~is_row_N] = np.nan
    return Chance(higher_N, prompts_N, (1 + higher_N) / (1 + prompts_N), q_N)


def _standardized(
    value: np.ndarray, total: np.ndarray, square: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Returns values less the mean of `count` others over their spread; 0 if there is none."""
    count = np.maximum(count, 2)
    mean = total / count
    variance = np.maximum(square / count - mean**2, 0) * count / (count - 1)
    return np.where(variance > 1e-12, (value - mean) / np.sqrt(np.maximum(variance, 1e-12)), 0.0)


def adjust(p_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns Benjamini and Hochberg's q of p-values: min over p' >= p of N p' / rank of p'."""
    order = np.argsort(-p_N, kind="stable")
    rank_N = np.arange(len(p_N), 0, -1)
    q_N = np.empty(len(p_N))
    q_N[order] = np.minimum.accumulate(np.minimum(p_N[order] * len(p_N) / rank_N, 1.0))
    return q_N


def count_finds(chance: Chance, level: float = LEVEL) -> Finds:
    """Returns how many rows have a q of at most a level, and how many of them by chance."""
    found_M = chance.q_N[chance.q_N <= level]  # NaN is not
    return Finds(len(found_M), float(len(found_M) * found_M.max(initial=0.0)))


def in_words(higher: float, prompts: float, p: float, q: float) -> str:
    """Returns the chance of one row in words; "" if it is unknown."""
    if np.isnan(p):
        return ""
    return f"{higher:.0f} of {prompts:.0f} unrelated prompts score this high; p {p:.2g}, q {q:.2g}"


def sentence(chance: Chance) -> str:
    """Returns the sentence about a run's chances for terminal and page, "" if there is none."""
    known_N = chance.prompts_N[~np.isnan(chance.prompts_N)]
    if not len(known_N):
        return ""
    finds = count_finds(chance)
    compared = f"compared with {int(known_N.max())} unrelated prompts of the training file"
    if not finds.found:
        lowest = f"the lowest is {np.nanmin(chance.q_N):.3g}"
        return f"{compared}, no row has q <= {LEVEL:g} ({lowest})"
    # Not "stands out": this phrase is for the gap in the scores.
    rows = "1 row has" if finds.found == 1 else f"{finds.found:,} rows have"
    by_chance = f"By chance about {finds.expected:.2g} rows would have such a q"
    return f"{compared}, {rows} q <= {LEVEL:g}. {by_chance}"
