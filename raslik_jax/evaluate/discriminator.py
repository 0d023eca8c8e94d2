"""The Non-SF discriminator: a text classifier of answers, trained on the labels of the corpus.

A BERT-like encoder with a classification head learns to tell answers of the behavior to forget
from the others; Non-SF of an answer is the probability it gives to the others. Training follows
the paper: AdamW behind clipping at 1, a rate that falls linearly to zero, no weight decay, all
weights (appendix "Non-SF Discriminator"; what it does not name is the default of transformers'
`Trainer`, which it used). Texts are padded to the next of a few lengths instead of all to the
longest: masks are exact, so this changes the time and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.data.batches import DUMMY_ROW, training_batches
from raslik_jax.data.ordering import shuffled
from raslik_jax.evaluate import judgment
from raslik_jax.models.encoder import Encoder
from raslik_jax.progress import progress as progress_bar
from raslik_jax.train import finetune

# Class 0 is what Non-SF is the probability of, class 1 the behavior to forget.
CLASSES = ("non-sf", "sci-fi")
NON_SF = 0
# Padded lengths: each is compiled once.
_LENGTHS = (16, 32, 64, 128, 256)

Predictor = Callable[[Sequence[Sequence[int]]], Float[np.ndarray, "N C"]]


class Texts(NamedTuple):
    """Labeled texts: `labels` holds positions in CLASSES."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


class TextBatch(NamedTuple):
    """Padded token ids; a row whose `is_real_B` is False is there for the shape only."""

    tokens_BL: Int[Array, "B L"]
    mask_BL: Bool[Array, "B L"]
    label_B: Int[Array, " B"]
    is_real_B: Bool[Array, " B"]


class TrainState(NamedTuple):
    """Weights, optimizer state and the number of steps taken."""

    weights: Tree
    opt_state: optax.OptState
    step: Array


Step = Callable[[TrainState, TextBatch], tuple[TrainState, Array]]


class Progress(NamedTuple):
    """How far a training has come: its state and the loss of every step, in nats a text."""

    state: TrainState
    losses: Float[np.ndarray, " S"]


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
            "two or more different answers of each class wanted to train a classifier, came "
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


def make_step(
    encoder: Encoder, tx: optax.GradientTransformation, *, dropout_key: jax.Array
) -> Step:
    """Returns a step down the mean cross-entropy of a batch's real rows, all weights moving.

    Args:
      encoder: bound, with a classification head.
      tx: the optimizer.
      dropout_key: of the encoder's own dropout rates; folded with the number of the step.
    """

    def loss_fn(weights: Tree, batch: TextBatch, key: jax.Array) -> Array:
        keys_B = jax.random.split(key, batch.tokens_BL.shape[0])
        logits_BC = jax.vmap(encoder.classify, in_axes=(None, 0, 0, 0))(
            weights, batch.tokens_BL, batch.mask_BL, keys_B
        )
        nll_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch.label_B)
        real_B = batch.is_real_B.astype(jnp.float32)
        return jnp.sum(nll_B * real_B) / jnp.sum(real_B)

    def step(state: TrainState, batch: TextBatch) -> tuple[TrainState, Array]:
        key = jax.random.fold_in(dropout_key, state.step)
        loss, grads = jax.value_and_grad(loss_fn)(state.weights, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        return TrainState(weights, opt_state, state.step + 1), loss

    return step


def make_optimizer(
    learning_rate: float, *, num_texts: int, batch_size: int, num_epochs: int
) -> optax.GradientTransformation:
    """Returns AdamW as the paper has it; its rate falls from here to zero over all steps."""
    num_steps = finetune.num_steps_of(num_texts, batch_size=batch_size, num_epochs=num_epochs)
    rate = finetune.learning_rate(learning_rate, num_steps, schedule="linear", warmup=0.0)
    return finetune.adamw(rate, weight_decay=0.0, clip=1.0)


def start_fit(weights: Tree, tx: optax.GradientTransformation) -> Progress:
    """Returns a training that has not taken a step yet."""
    return Progress(TrainState(weights, tx.init(weights), jnp.zeros((), jnp.int32)), np.zeros(0))


def fit(
    encoder: Encoder,
    start: Progress,
    tokens: Sequence[Sequence[int]],
    labels: Sequence[int],
    *,
    tx: optax.GradientTransformation,
    batch_size: int,
    num_epochs: int,
    seed: int,
    after_epoch: Callable[[Progress], None] | None = None,
    progress: str = "",
) -> Progress:
    """Returns a classifier after so many epochs over the texts.

    Args:
      encoder: bound, with a classification head.
      start: from `start_fit`, or what an earlier training of the same settings gave to
        `after_epoch`; the result is then that of an undisturbed training.
      tokens: ids of each text, with the encoder's special tokens.
      labels: their classes.
      tx: from `make_optimizer`.
      batch_size: texts a step; the last step of an epoch may have fewer.
      num_epochs: passes over the texts in all, each in an order that seed and epoch decide.
      seed: of the orders and of dropout.
      after_epoch: is given the progress after every epoch.
      progress: text before the progress bar; empty for silence.

    Raises:
      ValueError: a loss or a weight is not finite, or a text is longer than the encoder takes.
    """
    per_epoch = finetune.num_steps_of(len(tokens), batch_size=batch_size, num_epochs=1)
    done = len(start.losses)
    step = jax.jit(make_step(encoder, tx, dropout_key=jax.random.key(seed)))
    state, losses = start.state, list(start.losses)
    bar = progress_bar(None, progress, total=per_epoch * num_epochs - done)
    for epoch in range(done // per_epoch, num_epochs):
        values: list[Array] = []
        for rows in training_batches(len(tokens), batch_size, seed=seed, epoch=epoch):
            state, value = step(state, _pad(encoder, tokens, rows, labels))
            values.append(value)
            bar.update(1)
        found, flag = [float(value) for value in values], "--evaluate.classifier_learning_rate"
        name = "the classifier's training"
        finetune.check_finite(np.asarray(found), what=name, step=len(losses) + 1, rate_flag=flag)
        losses += found
        finetune.check_weights(state.weights, what=name, step=len(losses), rate_flag=flag)
        if after_epoch is not None:
            after_epoch(Progress(state, np.asarray(losses)))
    bar.close()
    return Progress(state, np.asarray(losses))


def make_predictor(
    encoder: Encoder, weights: Tree, *, batch_size: int = 32, progress: str = ""
) -> Predictor:
    """Returns the function from token ids of texts to the probability of each class.

    It compiles once for each padded length and keeps that for later calls.

    Args:
      encoder: bound, with a classification head.
      weights: its weights.
      batch_size: texts at a time.
      progress: text before the progress bar; empty for silence.
    """

    @jax.jit
    def probabilities(weights: Tree, batch: TextBatch) -> Float[Array, "B C"]:
        classify = jax.vmap(encoder.classify, in_axes=(None, 0, 0))
        return jax.nn.softmax(classify(weights, batch.tokens_BL, batch.mask_BL))

    def predict(tokens: Sequence[Sequence[int]]) -> Float[np.ndarray, "N C"]:
        probability_NC = np.zeros((len(tokens), encoder.config.num_labels))
        # Neighbors in length share a batch, so that little is padded.
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        bar = progress_bar(None, progress, total=len(tokens), unit="text")
        for start in range(0, len(tokens), batch_size):
            rows = np.full(batch_size, DUMMY_ROW, np.int64)
            part = order[start : start + batch_size]
            rows[: len(part)] = part
            batch = _pad(encoder, tokens, rows, [0] * len(tokens))
            probability_NC[part] = np.asarray(probabilities(weights, batch))[: len(part)]
            bar.update(len(part))
        bar.close()
        return probability_NC

    return predict


def _pad(
    encoder: Encoder, tokens: Sequence[Sequence[int]], rows: np.ndarray, labels: Sequence[int]
) -> TextBatch:
    """Returns these texts at the least padded length that holds all of them."""
    limit = encoder.config.max_length
    longest = max(len(tokens[row]) for row in rows if row != DUMMY_ROW)
    if longest > limit:
        raise ValueError(
            f"texts of at most {limit} tokens wanted, came one of {longest}: cut them when "
            "tokenizing"
        )
    width = min(next((edge for edge in _LENGTHS if edge >= longest), limit), limit)
    tokens_BL = np.full((len(rows), width), encoder.config.pad_token_id, np.int32)
    mask_BL = np.zeros((len(rows), width), bool)
    mask_BL[:, 0] = True  # a dummy row has a token too, or its softmax is of nothing
    label_B = np.zeros(len(rows), np.int32)
    for place, row in enumerate(rows):
        if row != DUMMY_ROW:
            tokens_BL[place, : len(tokens[row])] = tokens[row]
            mask_BL[place, : len(tokens[row])] = True
            label_B[place] = labels[row]
    return TextBatch(
        jnp.asarray(tokens_BL),
        jnp.asarray(mask_BL),
        jnp.asarray(label_B),
        jnp.asarray(rows != DUMMY_ROW),
    )


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
