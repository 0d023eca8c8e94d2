"""The Non-SF discriminator: a text classifier of answers, trained on the labels of the corpus.

A BERT-like encoder with a classification head learns to tell answers of the behavior to forget
from the others; Non-SF of an answer is the probability it gives to the others. Training follows
the paper: AdamW behind clipping at 1, a rate that falls linearly to zero, no weight decay, all
weights (appendix "Non-SF Discriminator"; what it does not name is the default of transformers'
`Trainer`, which it used). Texts are padded to the next rung of the ladder instead of all to the
longest: masks are exact, so this changes the time and nothing else.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from raslik_jax.axes import Tree
from raslik_jax.data.batches import Batch, map_rows, plan_by_length, real_tokens
from raslik_jax.data.encoding import encode_rows
from raslik_jax.data.ordering import shuffled
from raslik_jax.evaluate import judgment
from raslik_jax.models.encoder import Encoder
from raslik_jax.train import loop, losses

# Class 0 is what Non-SF is the probability of, class 1 the behavior to forget.
CLASSES = ("non-sf", "sci-fi")
NON_SF = 0
Predictor = Callable[[Sequence[Sequence[int]]], Float[np.ndarray, "N C"]]


class Texts(NamedTuple):
    """Labeled texts: `labels` holds positions in CLASSES."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


def label_texts(texts: Sequence[str], is_target: Sequence[bool | None]) -> Texts:
    """Returns the distinct texts that have one label, in the order of their first occurrence.

    Blank texts, texts without a label and texts that occur with both labels say nothing about a
    class and are left out.

    Raises:
      ValueError: fewer than two texts of a class are left, too few to train and to measure on.
    """
    found: dict[str, set[bool]] = {}
    for text, target in zip(texts, is_target, strict=True):
        if text.strip() and target is not None:
            found.setdefault(text, set()).add(bool(target))
    kept = {text: int(labels == {True}) for text, labels in found.items() if len(labels) == 1}
    counts = np.bincount(list(kept.values()), minlength=len(CLASSES))
    if counts.min() < 2:
        raise ValueError(
            "a classifier must have two or more different answers of each class, got "
            f"{counts[1]} of labeled targets and {counts[0]} of other rows: label the training "
            "rows, or measure with --evaluate.non_sf=words"
        )
    return Texts(tuple(kept), tuple(kept.values()))


def split_texts(texts: Texts, *, held_out: float, limit: int = 0, seed: int) -> tuple[Texts, Texts]:
    """Returns the texts to train on and the held-out texts, in seeded order, split by class.

    Args:
      texts: labeled texts, two or more of each class.
      held_out: share of each class that is held out; one text at least, and one is left.
      limit: texts of a class at most, before splitting; 0 for all.
      seed: decides which.
    """
    parts: tuple[list[int], list[int]] = ([], [])
    for label, name in enumerate(CLASSES):
        rows = [row for row, own in enumerate(texts.labels) if own == label]
        rows = shuffled(rows, seed=seed, label=f"discriminator {name}")[: limit or None]
        count = min(max(round(held_out * len(rows)), 1), len(rows) - 1)
        parts[0].extend(rows[count:])
        parts[1].extend(rows[:count])
    train, held = (
        Texts(tuple(texts.texts[row] for row in part), tuple(texts.labels[row] for row in part))
        for part in parts
    )
    return train, held


def classifying(
    encoder: Encoder, tx: optax.GradientTransformation, *, dropout_key: jax.Array
) -> loop.Algorithm:
    """Returns the algorithm that minimizes the mean cross-entropy of a batch, all weights moving.

    What it reads beside are the labels of all texts.

    Args:
      encoder: bound, with a classification head.
      tx: the optimizer.
      dropout_key: of the encoder's own dropout rates; folded with the number of the step.
    """

    def prepare(label_N: Array, batch: Batch, step: Array) -> Any:
        key = jax.random.fold_in(dropout_key, step)
        parts = batch, jax.random.split(key, batch.tokens_BL.shape[0])

        def of_part(weights: Tree, part: tuple[Batch, Array]) -> tuple[Array, None]:
            rows, keys_B = part
            logits_BC = jax.vmap(encoder.classify, in_axes=(None, 0, 0, 0))(
                weights, rows.tokens_BL, real_tokens(rows), keys_B
            )
            nll_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_N[rows.row_B])
            return losses.weighted_mean(nll_B, rows), None

        return of_part, parts

    return loop.make_algorithm(prepare, tx)


def make_predictor(
    encoder: Encoder, weights: Tree, *, batch_size: int = 32, bar: str = ""
) -> Predictor:
    """Returns the function from token ids of texts to the probability of each class.

    It compiles once for each padded length and keeps that for later calls.

    Args:
      encoder: bound, with a classification head.
      weights: its weights.
      batch_size: texts at a time.
      bar: text before the progress bar; empty for silence.
    """
    config = encoder.config

    @jax.jit
    def probabilities(weights: Tree, batch: Batch) -> Float[Array, "B C"]:
        classify = jax.vmap(encoder.classify, in_axes=(None, 0, 0))
        return jax.nn.softmax(classify(weights, batch.tokens_BL, real_tokens(batch)))

    def predict(tokens: Sequence[Sequence[int]]) -> Float[np.ndarray, "N C"]:
        if not tokens:
            return np.zeros((0, config.num_labels))
        encoded = encode_rows(tokens, pad_id=config.pad_token_id, limit=config.max_length)
        plans = plan_by_length(encoded, batch_size=batch_size)
        found_NC = map_rows(functools.partial(probabilities, weights), encoded, plans, bar=bar)
        return found_NC.astype(np.float64)

    return predict


def macro_f1(labels: Sequence[int], predicted: Sequence[int]) -> float:
    """Returns the mean over the classes of F1 = 2 TP / (2 TP + FP + FN).

    A class that occurs neither among the labels nor among the predictions counts as 0, so a sample
    of one class alone cannot reach 1.

    Source: scikit-learn's `f1_score(average="macro")`, over all of CLASSES.
    """
    label_N, predicted_N = np.asarray(labels), np.asarray(predicted)
    scores = []
    for own in range(len(CLASSES)):
        hits = int(((label_N == own) & (predicted_N == own)).sum())
        named = int((label_N == own).sum() + (predicted_N == own).sum())
        scores.append(2 * hits / named if named else 0.0)
    return float(np.mean(scores))


def macro_f1_interval(hits: Sequence[int], counts: Sequence[int]) -> tuple[float, float]:
    """Returns a 95 % interval of macro-F1 from the texts of each class that were named rightly.

    The share of a class that is named rightly has the posterior Beta(hits + 1/2, misses + 1/2),
    Jeffreys' for a binomial; macro-F1 follows from the two shares. A bootstrap over so few texts
    would give a perfect score no width at all.

    Args:
      hits: by class.
      counts: texts of each class, one at least.

    Source: Brown, Cai and DasGupta, 2001, "Interval estimation for a binomial proportion".
    """
    generator = np.random.default_rng(0)
    shares = [
        generator.beta(hit + 0.5, count - hit + 0.5, 10_000)
        for hit, count in zip(hits, counts, strict=True)
    ]
    right = [share * count for share, count in zip(shares, counts, strict=True)]
    scores = [
        2 * right[own] / (counts[own] + right[own] + counts[1 - own] - right[1 - own])
        for own in range(len(CLASSES))
    ]
    low, high = np.quantile(np.mean(scores, axis=0), [0.025, 0.975])
    return float(low), float(high)


def measure(predict: Predictor, encode: Callable[..., Any], texts: Texts) -> Mapping[str, Any]:
    """Returns how well a classifier tells labeled texts apart, as metrics.json holds it.

    Args:
      predict: from `make_predictor`.
      encode: from texts to token ids.
      texts: labeled texts, none of them trained on.

    Returns:
      Counts, macro-F1 with its interval, accuracy, Non-SF by class, and a warning where a class has
      too few texts to say much.
    """
    probability_NC = predict(encode(texts.texts))
    predicted = probability_NC.argmax(1).tolist()
    label_N = np.asarray(texts.labels)
    counts = [int((label_N == own).sum()) for own in range(len(CLASSES))]
    hits = [
        int(((label_N == own) & (np.asarray(predicted) == own)).sum())
        for own in range(len(CLASSES))
    ]
    low, high = macro_f1_interval(hits, counts)
    warning = judgment.warn_of_few(dict(zip(CLASSES, counts, strict=True)))
    return {
        "texts": dict(zip(CLASSES, counts, strict=True)),
        "macro_f1": macro_f1(texts.labels, predicted),
        "macro_f1_low": low,
        "macro_f1_high": high,
        **({"warning": warning} if warning else {}),
        "accuracy": float((label_N == np.asarray(predicted)).mean()),
        "non_sf": {
            name: float(probability_NC[label_N == label, NON_SF].mean())
            for label, name in enumerate(CLASSES)
        },
    }
