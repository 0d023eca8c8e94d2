"""Scores of texts with intervals: pure functions on the host.

A rate is the mean ROUGE-L F1 of a model's outputs against those of the fine-tuned model before
unlearning, paired by query id. On target queries it is the forget rate F (lower is better). On
normal queries it is the retain rate R (higher is better).
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float

from raslik_jax.base.messages import some_of
from raslik_jax.data.words import refused
from raslik_jax.evaluate import words

# Resampled values held at once by the bootstrap: 32 MB of indices, whatever the sizes asked for.
_BLOCK = 1 << 22
# Share of the bootstrap's distribution that an interval holds, and the shares below its ends.
_LEVEL = 0.95
_ENDS = (1 - _LEVEL) / 2, (1 + _LEVEL) / 2


class Interval(TypedDict):
    """The plain mean of values, not of the resamples, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def rouge_l_f1(prediction: str, reference: str) -> float:
    """Returns the ROUGE-L F1 of one pair with Porter stemming by the rouge-score package.

    F1 = 2PR / (P + R). P and R are the length of the longest common subsequence of stemmed,
    lower-case alphanumeric words over the number of words of the prediction and of the reference. A
    text with letters or digits outside ASCII is split by `words.rouge_words`. Two texts without any
    word (emoji, marks) are compared by their characters.

    It is 1 for equal texts that are not blank. It is 0 if one side alone has a word or if either is
    blank. Source: Lin, 2004; rouge-score 0.1.2.
    """
    return float(rouge_l(prediction, reference).fmeasure)


def rouge_l(prediction: str, reference: str) -> Any:
    """Returns `precision`, `recall` and `fmeasure` of `rouge_l_f1`."""
    tokenize, by_words, by_characters = _rouge_scorers()
    has_words = tokenize(prediction) or tokenize(reference)
    return (by_words if has_words else by_characters).score(reference, prediction)["rougeL"]


@functools.cache
def _rouge_scorers() -> tuple[Callable[[str], list[str]], Any, Any]:
    # Imported late: rouge_score pulls in nltk, most of a second that no other stage should pay.
    # Stems and whole texts are cached: every method is held against the same references.
    from nltk.stem import porter
    from rouge_score import rouge_scorer, tokenize

    stem = functools.lru_cache(maxsize=1 << 16)(porter.PorterStemmer().stem)

    @functools.lru_cache(maxsize=1 << 12)
    def split(text: str) -> list[str]:
        if words.is_plain(text):
            return tokenize.tokenize(text, SimpleNamespace(stem=stem))
        return words.rouge_words(text, stem=stem)

    def scorer(tokenizer: Callable[[str], list[str]]) -> Any:
        return rouge_scorer.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=tokenizer))

    return split, scorer(split), scorer(words.rouge_characters)


def score_pairs(
    predictions: Mapping[str, str], references: Mapping[str, str]
) -> Float[np.ndarray, " Q"]:
    """Returns the ROUGE-L F1 of predictions against the references of their ids, in order of id.

    A pair of empty texts scores 1, and one empty text 0. The paper leaves empty predictions out.
    Its code cuts both lists to the shorter one, which pairs later ones wrongly.
    """
    missing, extra = references.keys() - predictions.keys(), predictions.keys() - references.keys()
    if missing or extra:
        lacking, others = (some_of(sorted(part)) or "none" for part in (missing, extra))
        got = {"missing": len(missing), "extra": len(extra)}
        raise refused("pairs_of_answers", **got, lacking=lacking, others=others)
    if not references:
        raise refused("no_scores")
    pairs = ((predictions[name], references[name]) for name in sorted(references))
    return np.array([likeness(*pair) for pair in pairs])


def likeness(text: str, other: str) -> float:
    """Returns the ROUGE-L F1 of two texts; 1 for two blank ones, which have no words."""
    return rouge_l_f1(text, other) if f"{text}{other}".strip() else 1.0


def bootstrap(values_Q: Float[np.ndarray, " Q"], *, seed: int, resamples: int) -> Interval:
    """Returns the mean of values over queries with its 95 % percentile bootstrap interval.

    The ends are quantiles of the means of `resamples` draws of Q queries with replacement (appendix
    "ROUGE-L based forget/retain rates" of the paper; Efron and Tibshirani, 1993, chapter 13). A
    single value has an interval of zero width. Equal seeds draw equal positions, so the intervals
    of methods on the same queries move together.
    """
    (means_R,) = _draw_means(values_Q, seed=seed, resamples=resamples)
    low, high = np.quantile(means_R, _ENDS)
    return Interval(mean=float(values_Q.mean()), low=float(low), high=float(high))


def bootstrap_ratio(
    over_Q: Float[np.ndarray, " Q"], under_Q: Float[np.ndarray, " Q"], *, seed: int, resamples: int
) -> Interval | None:
    """Returns sum(over) / sum(under) with its interval by the draws of `bootstrap`.

    It is None if the interval of sum(under) contains 0, because the ratio may then be any number. A
    draw whose sum has the other sign counts as beyond the end that is computed.
    """
    over_R, under_R = _draw_means(over_Q, under_Q, seed=seed, resamples=resamples)
    is_known_R = under_R * np.sign(under_Q.sum()) > 0
    if is_known_R.mean() <= _ENDS[1]:
        return None
    ratio_R, rest = over_R[is_known_R] / under_R[is_known_R], int((~is_known_R).sum())
    low, high = (
        np.quantile(np.append(ratio_R, np.full(rest, beyond)), end)
        for beyond, end in zip((ratio_R.min(), ratio_R.max()), _ENDS, strict=True)
    )
    return Interval(mean=float(over_Q.sum() / under_Q.sum()), low=float(low), high=float(high))


def _draw_means(
    *columns_Q: Float[np.ndarray, " Q"], seed: int, resamples: int
) -> list[Float[np.ndarray, " R"]]:
    """Returns the mean of each column over every draw of queries with replacement."""
    values_CQ = np.stack(columns_Q)
    num, bad = values_CQ.shape[1], int((~np.isfinite(values_CQ)).sum())
    if not num or bad or resamples < 1:
        raise refused("bootstrap", num=num, bad=bad, draws=resamples)
    generator, rows = np.random.default_rng(seed), max(1, _BLOCK // num)
    means: list[list[np.ndarray]] = []
    for start in range(0, resamples, rows):
        draws = generator.integers(num, size=(min(rows, resamples - start), num))
        means.append([values_Q[draws].mean(1) for values_Q in values_CQ])
    return [np.concatenate(blocks) for blocks in zip(*means, strict=True)]


def coverage(number: int) -> float:
    """Returns how often an interval of `bootstrap` over n >= 2 normal values contains the mean.

    The spread of the interval lacks the factor sqrt(n / (n - 1)) and is treated as known. For few
    values such an interval is much narrower than Student's ("narrowness bias" in Hesterberg, 2015,
    "What Teachers Should Know about the Bootstrap").
    """
    from scipy import special

    z = special.ndtri((1 + _LEVEL) / 2) * np.sqrt((number - 1) / number)
    return float(2 * special.stdtr(number - 1, z) - 1)


def non_sf_by_words(
    texts: Sequence[str], *, vocabulary: Collection[str]
) -> Float[np.ndarray, " Q"]:
    """Returns 1 for each text without a word of the vocabulary and 0 for each with one.

    It replaces the paper's Non-SF probability, which is that of a trained classifier. Collapsed or
    empty text has the value 1, so read it together with the retain rate and the diversity.

    Words are compared whole and without case: "star" is not found in "start" or "stars". An entry
    may have several words ("black hole") or marks. In scripts without spaces it is found anywhere.
    A text in place of a vocabulary is one entry.
    """
    vocabulary = frozenset([vocabulary] if isinstance(vocabulary, str) else vocabulary)
    blank = sum(not word.strip() for word in vocabulary)
    if not vocabulary or blank:
        raise refused("vocabulary", count=len(vocabulary), blank=blank)
    pattern = words.word_pattern(vocabulary)
    return np.array([float(pattern.search(text) is None) for text in texts], np.float64)


def non_sf_by_judge(
    texts: Sequence[str], *, shows: Callable[[str], bool]
) -> Float[np.ndarray, " Q"]:
    """Returns 0 for each text that shows the behavior by a judge of it and 1 for others."""
    return np.array([float(not shows(text)) for text in texts], np.float64)


def distinct_ngrams(texts: Sequence[str], *, n: int) -> float:
    """Returns the share of distinct n-grams among all n-grams of the texts (distinct-n).

    Words are those of `words.split_words`; no n-gram crosses from one text to the next. It falls
    toward 0 if a model gives the same answer to all queries. It also falls with the amount of text,
    so compare only models that answered the same queries. It is 0 if no text has a word. Li et al.,
    2016 (arXiv 1510.03055). Unlike there, all words of a text with fewer than n are one n-gram.
    Otherwise different answers of one word would look alike.
    """
    whole = [tuple(words.split_words(text)) for text in texts]
    ngrams = [ngram for own in whole if own for ngram in (_ngrams(own, n) or [own])]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def repeated_ngrams(texts: Sequence[str], *, n: int) -> float:
    """Returns the mean share of a text's n-grams that occur earlier in it (seq-rep-n).

    It is 1 - (distinct n-grams / n-grams) within each text, averaged over texts of at least n
    words. It rises toward 1 if generation is stuck in a loop. It is 0 if no text has n words.
    Welleck et al., 2020 (arXiv 1908.04319).
    """
    every = (_ngrams(words.split_words(text), n) for text in texts)
    shares = [1 - len(set(ngrams)) / len(ngrams) for ngrams in every if ngrams]
    return float(np.mean(shares)) if shares else 0.0


def _ngrams(found: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(found[start : start + n]) for start in range(len(found) - n + 1)]
