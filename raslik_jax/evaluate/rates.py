"""Forget and retain rates of generated text, with intervals: pure functions of texts.

A rate is the mean ROUGE-L F1 of a model's outputs against those of the fine-tuned model before
unlearning, paired by query id. On target queries it is the forget rate F (lower is better), on
normal queries the retain rate R (higher is better). All of it runs on the host; no JAX.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.evaluate import words

# Resampled values held at once by the bootstrap: 32 MB of indices, whatever the sizes asked for.
_BLOCK = 1 << 22


class Interval(NamedTuple):
    """A mean with its percentile bootstrap interval.

    Attributes:
      mean: the plain mean of the values, not the mean of the resamples.
      low: the lower end.
      high: the upper end. With a single value, or equal ones, low = mean = high.
    """

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """A mean paired difference with its percentile bootstrap interval.

    Attributes:
      mean: mean of (values - baseline) over the pairs.
      low: the lower end.
      high: the upper end; an interval that does not reach 0 holds the two apart.
      share_below_zero: share of resamples whose mean difference is strictly negative.
    """

    mean: float
    low: float
    high: float
    share_below_zero: float


class PairScores(NamedTuple):
    """ROUGE-L F1 of predictions paired with references by id.

    Attributes:
      ids: the ids of the pairs, sorted, so that no result depends on the order of a file.
      rouge_Q: ROUGE-L F1 of each pair, from 0 to 1, in the order of `ids`.
      num_empty: predictions that are empty or blank, dropped ones included.
      num_empty_references: references that are empty or blank; each of their pairs scores 0.
    """

    ids: tuple[str, ...]
    rouge_Q: Float[np.ndarray, " Q"]
    num_empty: int
    num_empty_references: int


def rouge_l_f1(prediction: str, reference: str) -> float:
    """Returns the ROUGE-L F1 of one pair with Porter stemming.

    F1 = 2PR / (P + R), P and R the length of the longest common subsequence of stemmed, lower-case
    alphanumeric words over the number of words of the prediction and of the reference. The
    rouge-score package computes it; only its stemmer is cached here, which changes no value.

    Its own tokenizer knows ASCII alone and finds no word in Chinese, Russian or Arabic text. A text
    with letters or digits outside ASCII is split by `words.rouge_words` instead: words where the
    script has spaces, characters where it has none. Two texts without any word (emoji, marks) are
    compared by their characters.

    Args:
      prediction: the generated text.
      reference: the text it is held against.

    Returns:
      A value from 0 to 1: 1 for equal texts that are not blank; 0 when one side has a word and the
      other has none, or either is blank.

    Source: Lin, 2004, "ROUGE: a package for automatic evaluation of summaries"; rouge-score 0.1.2.
    """
    return float(_rouge(prediction, reference).fmeasure)


def rouge_l_recall(prediction: str, reference: str) -> float:
    """Returns the ROUGE-L recall of one pair with Porter stemming, TOFU's ROUGE.

    Length of the longest common subsequence of stemmed words over the number of words of the
    reference: what the prediction says beside it costs nothing. Words are those of `rouge_l_f1`.

    Args:
      prediction: the generated text.
      reference: the text it is held against.

    Returns:
      A value from 0 to 1; the edges are those of `rouge_l_f1`.
    """
    return float(_rouge(prediction, reference).recall)


def _rouge(prediction: str, reference: str) -> Any:
    tokenize, by_words, by_characters = _rouge_scorers()
    has_words = tokenize(prediction) or tokenize(reference)
    return (by_words if has_words else by_characters).score(reference, prediction)["rougeL"]


@functools.cache
def _rouge_scorers() -> tuple[Callable[[str], list[str]], Any, Any]:
    # Imported late: rouge_score pulls in nltk, most of a second that no other stage should pay.
    from nltk.stem import porter
    from rouge_score import rouge_scorer, tokenize

    stem = functools.lru_cache(maxsize=1 << 16)(porter.PorterStemmer().stem)
    stemmer = SimpleNamespace(stem=stem)

    # Whole texts are cached too: every method is held against the same references.
    @functools.lru_cache(maxsize=1 << 12)
    def split(text: str) -> list[str]:
        if words.is_plain(text):
            return tokenize.tokenize(text, stemmer)
        return words.rouge_words(text, stem=stem)

    def scorer(tokenizer: Callable[[str], list[str]]) -> Any:
        return rouge_scorer.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=tokenizer))

    return split, scorer(split), scorer(words.rouge_characters)


def score_pairs(
    predictions: Mapping[str, str], references: Mapping[str, str], *, drop_empty: bool = False
) -> PairScores:
    """Returns the ROUGE-L F1 of every prediction against the reference of the same id.

    The paper filters empty predictions and then truncates both lists to the shorter one, which
    pairs every later prediction with a wrong reference. Here an empty prediction is a pair that
    scores 0, and is counted.

    Args:
      predictions: generated text by query id.
      references: reference text by query id, of exactly the same ids.
      drop_empty: leave out pairs with an empty prediction, the reference with it, as the paper
        means to do.

    Returns:
      The scores in order of id. If every prediction is empty, all scores are 0.

    Raises:
      ValueError: an id on one side only, no pair at all, or nothing left after dropping.
    """
    missing, extra = references.keys() - predictions.keys(), predictions.keys() - references.keys()
    if missing or extra:
        raise ValueError(
            "predictions wanted for exactly the ids of the references, "
            f"but {len(missing)} are missing ({_first(missing)}) and {len(extra)} have no reference"
            f" ({_first(extra)}): generate and compare on the same queries"
        )
    if not references:
        raise ValueError("at least one pair of texts wanted, none came: name the queries to score")
    empty = {example_id for example_id, text in predictions.items() if not text.strip()}
    ids = tuple(sorted(references.keys() - empty if drop_empty else references))
    if not ids:
        raise ValueError(
            f"all {len(references)} predictions are empty, so none is left to score: "
            "set drop_empty=False, which counts each as 0"
        )
    rouge_Q = np.array([rouge_l_f1(predictions[i], references[i]) for i in ids], np.float64)
    num_empty_references = sum(not text.strip() for text in references.values())
    return PairScores(ids, rouge_Q, len(empty), num_empty_references)


def mean_rouge(predictions: Mapping[str, str], references: Mapping[str, str]) -> float | None:
    """Returns the mean ROUGE-L F1 against the references that are not blank; None without any."""
    given = {name: text for name, text in references.items() if text.strip()}
    if not given:
        return None
    return float(np.mean([rouge_l_f1(predictions[name], given[name]) for name in sorted(given)]))


def _first(ids: Collection[str]) -> str:
    shown = ", ".join(sorted(ids)[:5])
    return shown + (", ..." if len(ids) > 5 else "") if ids else "none"


def bootstrap_interval(
    values_Q: Float[np.ndarray, " Q"],
    *,
    seed: int,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Returns the mean of the values with its percentile bootstrap interval.

    The ends are the (1 - level)/2 and (1 + level)/2 quantiles of the means of `resamples` draws of
    Q values with replacement; appendix "ROUGE-L based forget/retain rates" of the paper. Its
    coverage falls a little short for few values: .93 to .94 was measured at Q = 30, .945 to .95 at
    Q = 120, for a level of .95.

    Args:
      values_Q: one value per query, at least one.
      seed: of the resampling. Equal seeds draw equal positions, so the intervals of several
        methods on the same queries move together.
      resamples: number of draws, at least 1.
      level: share of the distribution inside, between 0 and 1.

    Returns:
      The interval; a single value gives one of zero width, which claims nothing.

    Raises:
      ValueError: no value, a value that is not finite, or an option out of range.

    Source: Efron and Tibshirani, 1993, "An introduction to the bootstrap", chapter 13.
    """
    means = _resampled_means(values_Q, seed=seed, resamples=resamples)
    low, high = _percentiles(means, level)
    return Interval(float(values_Q.mean()), low, high)


def paired_bootstrap(
    values_Q: Float[np.ndarray, " Q"],
    baseline_Q: Float[np.ndarray, " Q"],
    *,
    seed: int,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Difference:
    """Returns the mean paired difference to a baseline, with its bootstrap interval.

    Resamples queries, not values: both models answered the same ones, and a query that is easy for
    one tends to be easy for the other, so the difference is known better than either mean.

    Args:
      values_Q: one value per query.
      baseline_Q: the baseline's values of the same queries, in the same order.
      seed: of the resampling.
      resamples: number of draws, at least 1.
      level: share of the distribution inside, between 0 and 1.

    Returns:
      mean(values - baseline) and its interval; all 0 for a baseline compared with itself.

    Raises:
      ValueError: as `bootstrap_interval`, or unequal numbers of values.
    """
    if values_Q.shape != baseline_Q.shape:
        raise ValueError(
            f"paired values wanted, but {len(values_Q)} came with {len(baseline_Q)} of the "
            "baseline: pair both by query id first"
        )
    difference_Q = values_Q - baseline_Q
    means = _resampled_means(difference_Q, seed=seed, resamples=resamples)
    low, high = _percentiles(means, level)
    return Difference(float(difference_Q.mean()), low, high, float((means < 0).mean()))


def bootstrap_ratio(
    numerator_Q: Float[np.ndarray, " Q"],
    denominator_Q: Float[np.ndarray, " Q"],
    *,
    seed: int,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Returns a ratio of two sums over the same queries with its percentile bootstrap interval.

    sum(numerator) / sum(denominator), such as nats over tokens; a query keeps its two values
    together when it is drawn.

    Args:
      numerator_Q: one value per query, at least one.
      denominator_Q: one positive value per query.
      seed: of the resampling.
      resamples: number of draws, at least 1.
      level: share of the distribution inside, between 0 and 1.

    Returns:
      The interval, with the plain ratio as its mean.

    Raises:
      ValueError: as `bootstrap_interval`; unequal numbers of values, or a denominator that is not
        positive.
    """
    if numerator_Q.shape != denominator_Q.shape or not (denominator_Q > 0).all():
        raise ValueError(
            f"one positive denominator for each of {len(numerator_Q)} values wanted, came "
            f"{len(denominator_Q)} of which {int((denominator_Q <= 0).sum())} are not positive: "
            "leave out queries without any token"
        )
    # One seed and one number of values draw the same positions twice.
    over, under = (
        _resampled_means(values_Q, seed=seed, resamples=resamples)
        for values_Q in (numerator_Q, denominator_Q)
    )
    low, high = _percentiles(over / under, level)
    return Interval(float(numerator_Q.sum() / denominator_Q.sum()), low, high)


def _resampled_means(
    values_Q: Float[np.ndarray, " Q"], *, seed: int, resamples: int
) -> Float[np.ndarray, " draws"]:
    if not len(values_Q) or not np.isfinite(values_Q).all():
        raise ValueError(
            f"finite values wanted to resample, came {len(values_Q)} values of which "
            f"{int((~np.isfinite(values_Q)).sum())} are not finite: check the scores first"
        )
    if resamples < 1:
        raise ValueError(f"at least one resample wanted, came {resamples=}: use 1000 or more")
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(values_Q))
    means = [
        values_Q[generator.integers(len(values_Q), size=(count, len(values_Q)))].mean(1)
        for count in _split(resamples, rows)
    ]
    return np.concatenate(means)


def _split(total: int, largest: int) -> list[int]:
    return [largest] * (total // largest) + ([total % largest] if total % largest else [])


def _percentiles(means: Float[np.ndarray, " draws"], level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"a level between 0 and 1 wanted, came {level=}: 0.95 is the paper's")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def contains_word(texts: Sequence[str], *, vocabulary: Collection[str]) -> Bool[np.ndarray, " Q"]:
    """Returns which texts contain a word of the vocabulary.

    Words are compared whole and without case: "star" is not found in "start" or "stars", so the
    vocabulary lists the forms it wants. An entry may have several words ("black hole") or marks. In
    scripts without spaces an entry is found anywhere.

    Args:
      texts: generated texts.
      vocabulary: words or phrases, none of them blank.

    Returns:
      One truth value per text; False for an empty text.

    Raises:
      ValueError: an empty vocabulary or a blank entry (which every text would contain).
    """
    if not vocabulary or any(not word.strip() for word in vocabulary):
        raise ValueError(
            f"a vocabulary of words wanted, came {len(vocabulary)} entries of which "
            f"{sum(not word.strip() for word in vocabulary)} are blank: give at least one word"
        )
    pattern = words.word_pattern(frozenset(vocabulary))
    return np.array([pattern.search(text) is not None for text in texts], np.bool_)


def non_sf_by_words(
    texts: Sequence[str], *, vocabulary: Collection[str]
) -> Float[np.ndarray, " Q"]:
    """Returns 1 for each text without a science-fiction word and 0 for each with one.

    A stand-in for the paper's Non-SF probability, which a trained classifier gives. Its mean is 1
    minus the science-fiction word rate. Collapsed or empty text holds no such word and reads 1.0,
    so it means something only beside the retain rate and the diversity of the text.

    Args:
      texts: generated texts.
      vocabulary: science-fiction words, in every form that counts.

    Returns:
      One value per text, in the order given.

    Raises:
      ValueError: as `contains_word`.
    """
    return 1.0 - contains_word(texts, vocabulary=vocabulary).astype(np.float64)


def distinct_ngrams(texts: Sequence[str], *, n: int) -> float:
    """Returns the share of distinct n-grams among all n-grams of the texts (distinct-n).

    Words are split at white space, in lower case (characters, in scripts without spaces); no n-gram
    crosses from one text to the next. Falls toward 0 when a model answers everything alike, and
    also with the amount of text: compare only models that answered the same queries.

    Args:
      texts: generated texts.
      n: words per n-gram, at least 1.

    Returns:
      A value from 0 to 1; 0 when no text has n words.

    Raises:
      ValueError: n below 1.

    Source: Li et al., 2016, "A diversity-promoting objective function" (arXiv 1510.03055).
    """
    ngrams = [ngram for text in texts for ngram in _ngrams(text, n)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def repeated_ngrams(texts: Sequence[str], *, n: int) -> float:
    """Returns the mean share of a text's n-grams that it has said before (seq-rep-n).

    1 - (distinct n-grams / n-grams) within each text, averaged over texts of at least n words.
    Rises toward 1 when generation is stuck in a loop.

    Args:
      texts: generated texts.
      n: words per n-gram, at least 1.

    Returns:
      A value from 0 to 1; 0 when no text has n words.

    Raises:
      ValueError: n below 1.

    Source: Welleck et al., 2020, "Neural text generation with unlikelihood training" (arXiv
    1908.04319).
    """
    shares = [1 - len(set(ngrams)) / len(ngrams) for text in texts if (ngrams := _ngrams(text, n))]
    return float(np.mean(shares)) if shares else 0.0


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n-grams of at least one word wanted, came {n=}: use 1 or more")
    found = words.split_words(text)
    return [tuple(found[start : start + n]) for start in range(len(found) - n + 1)]
