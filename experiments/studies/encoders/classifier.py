"""The Non-SF discriminator: a text classifier of answers, trained on the labels of the corpus.

A BERT-like encoder with a classification head separates answers of the behavior to forget from the
others. Non-SF of an answer is its probability of the others. Training follows the paper: AdamW
behind clipping at 1, a rate that falls linearly to zero, no weight decay, all weights (appendix
"Non-SF Discriminator"). All else is the default of transformers' `Trainer`, which the paper used.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from experiments.studies.encoders.encoder import Encoder, real_tokens
from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch, map_rows, plan_by_length
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import encode_rows
from raslik_jax.parallel import meshes
from raslik_jax.train import loop, losses

# Class 0 is what Non-SF is the probability of, class 1 the behavior to forget.
CLASSES = ("non-sf", "sci-fi")
NON_SF = 0
Predictor = Callable[[Sequence[Sequence[int]]], Float[np.ndarray, "N C"]]


class Texts(NamedTuple):
    """Labeled texts; labels are positions in CLASSES."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


def label_texts(texts: Sequence[str], is_target: Sequence[bool | None]) -> Texts:
    """Returns the distinct texts with one label that are not blank, in their first order."""
    found: dict[str, set[bool]] = {}
    for text, target in zip(texts, is_target, strict=True):
        if text.strip() and target is not None:
            found.setdefault(text, set()).add(bool(target))
    kept = {text: int(labels == {True}) for text, labels in found.items() if len(labels) == 1}
    counts = np.bincount(list(kept.values()), minlength=len(CLASSES))
    if counts.min() < 2:
        raise ValueError(
            f"a classifier must have two different answers of each class, got {counts[1]} of "
            f"targets and {counts[0]} of others: label rows or set --evaluate.non_sf=words"
        )
    return Texts(tuple(kept), tuple(kept.values()))


def split_texts(texts: Texts, *, held_out: float, limit: int = 0, seed: int) -> tuple[Texts, Texts]:
    """Returns the texts to train on and the held-out texts in seeded order, split by class.

    A class of two or more texts loses a held-out share: at least one, and one is left. `limit` is
    per class and before splitting; 0 for all.
    """
    train: list[tuple[str, int]] = []
    held: list[tuple[str, int]] = []
    for label, name in enumerate(CLASSES):
        rows = [row for row in zip(*texts, strict=True) if row[1] == label]
        rows = shuffled(rows, seed=seed, label=f"discriminator {name}")[: limit or None]
        count = min(max(round(held_out * len(rows)), 1), len(rows) - 1)
        train += rows[count:]
        held += rows[:count]
    return Texts(*zip(*train, strict=True)), Texts(*zip(*held, strict=True))


def classifying(
    encoder: Encoder, tx: optax.GradientTransformation, *, dropout_key: jax.Array
) -> loop.Algorithm:
    """Returns the algorithm that minimizes the mean cross-entropy of a batch over all weights.

    Its frozen input is the labels of all texts. The encoder has a classification head and its own
    dropout rates. Their key is folded with the number of the step.
    """

    def prepare(label_N: Array, batch: Batch, step: Array) -> Any:
        key = jax.random.fold_in(dropout_key, step)
        parts = batch, jax.random.split(key, batch.tokens_BL.shape[0])

        total = jnp.sum(losses.row_weights(batch, "examples"))

        def of_part(weights: Tree, label_N: Array, part: tuple[Batch, Array]) -> tuple[Array, None]:
            rows, keys_B = part
            logits_BC = jax.vmap(encoder.classify, in_axes=(None, 0, 0, 0))(
                weights, rows.tokens_BL, real_tokens(rows), keys_B
            )
            nll_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_N[rows.row_B])
            return losses.weighted_mean(nll_B, rows, total=total), None

        return of_part, parts

    return loop.make_algorithm(prepare, tx)


def make_predictor(
    encoder: Encoder, weights: Tree, *, batch_size: int = 32, bar: str = ""
) -> Predictor:
    """Returns the function from token ids of texts to the probability of each class.

    It compiles once for each padded length; `bar` is empty for none.
    """
    config, weights = encoder.config, meshes.place(weights)

    def of_rows(weights: Tree, batch: Batch) -> Float[Array, "B C"]:
        classify = jax.vmap(encoder.classify, in_axes=(None, 0, 0))
        return jax.nn.softmax(classify(weights, batch.tokens_BL, real_tokens(batch)))

    @jax.jit
    def probabilities(weights: Tree, batch: Batch) -> Float[Array, "B C"]:
        return meshes.by_rows(of_rows, weights, rows=batch)

    def predict(tokens: Sequence[Sequence[int]]) -> Float[np.ndarray, "N C"]:
        if not tokens:
            return np.zeros((0, config.num_labels))
        encoded = encode_rows(tokens, pad_id=config.pad_token_id, limit=config.max_length)
        plans = plan_by_length(encoded, batch_size=batch_size)
        found_NC = map_rows(functools.partial(probabilities, weights), encoded, plans, bar=bar)
        return found_NC.astype(np.float64)

    return predict


def macro_f1(hits: Sequence[int], counts: Sequence[int]) -> float:
    """Returns the mean over both classes of F1 = 2 TP / (2 TP + FP + FN).

    `hits` of a class's `counts` texts (at least one) were named rightly.
    """
    scores = [
        2 * hit / (count + hit + other - other_hit)
        for hit, count, other_hit, other in zip(hits, counts, hits[::-1], counts[::-1], strict=True)
    ]
    return float(np.mean(scores))


def measure(predict: Predictor, encode: Callable[..., Any], texts: Texts) -> Mapping[str, Any]:
    """Returns how well a classifier separates texts of both classes, as metrics.json has it.

    It has counts, macro-F1 and Non-SF by class. `encode` maps texts to token ids.
    """
    probability_NC, label_N = predict(encode(texts.texts)), np.asarray(texts.labels)
    is_right_N = probability_NC.argmax(1) == label_N
    own_CN = [label_N == label for label in range(len(CLASSES))]
    counts = [int(own_N.sum()) for own_N in own_CN]
    hits = [int(is_right_N[own_N].sum()) for own_N in own_CN]
    return {
        "texts": dict(zip(CLASSES, counts, strict=True)),
        "macro_f1": macro_f1(hits, counts),
        "non_sf": {
            name: float(probability_NC[own_N, NON_SF].mean())
            for name, own_N in zip(CLASSES, own_CN, strict=True)
        },
    }
