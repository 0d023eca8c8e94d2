"""Non-SF by a classifier that is trained on the labeled answers: --evaluate.non_sf=classifier."""

import copy
import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.studies.corpora import howdy
from experiments.studies.encoders import checkpoint, classifier, encoder
from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.evaluate.metrics import NonSf
from raslik_jax.evaluate.non_sf import NonSfMeasure
from raslik_jax.models import decoder, quantize
from raslik_jax.models.storage import resolve_folder
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import AbstractRun, Forward, Work
from raslik_jax.run.recipes import Case, Files, Recipe
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop

METRICS = artifacts.Artifact("references/classifier", "metrics.json", read_json, write_json)
# Parts of the measurements; datasets with genuine rows; texts of a class from which on a score says
# something.
_PARTS = ("held_out", "genuine")
_GENUINE = ("howdy", "howdy_small")
LEAST_TEXTS = 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Settings):
    """Training of a classifier on the answers of the training examples."""

    checkpoint: str = setting(
        "FacebookAI/roberta-base",
        "RoBERTa or BERT checkpoint to start from, a directory or hub name; empty: a small BERT "
        "from scratch, which needs a learning rate near 1e-3.",
        is_path=True,
        is_hub=True,
        auto="AutoModel",
    )
    epochs: int = setting(3, "Passes over the answers.", low=1)
    learning_rate: float = setting(
        2e-5, "Learning rate of AdamW at the first step. It falls linearly to zero.", above=0
    )
    batch_size: int = setting(16, "Answers a step.", low=1)
    max_len: int = setting(256, "Most tokens of an answer. Longer ones are cut at the end.", low=8)
    held_out: float = setting(
        0.1, "Share of the answers of each class that measure its macro-F1.", above=0, below=1
    )
    examples: int = setting(
        0, "Most answers of each class, held-out ones included; 0: all.", zero_or=2
    )
    hidden_size: int = setting(64, "From scratch: embedding width.", low=1, multiple_of="num_heads")
    num_layers: int = setting(2, "From scratch: layers.", low=1)
    num_heads: int = setting(4, "From scratch: attention heads.", low=1)


@memory.explained(
    "the classifier's training", "--evaluate.classifier.batch_size or --evaluate.classifier.max_len"
)
def make_discriminator(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains the classifier on answers of the training examples; saves and measures it."""
    settings, rows = workspace.config.evaluate["classifier"], workspace.corpus.train
    train, held_out = classifier.split_texts(
        classifier.label_texts([row.output for row in rows], [row.is_target for row in rows]),
        held_out=settings.held_out,
        limit=settings.examples,
        seed=workspace.config.seed,
    )
    model, source = _starting_point(workspace, folder, train)
    max_len = min(settings.max_len, model.config.max_length)
    if max_len < settings.max_len:
        own, given = f"its checkpoint has {max_len} positions", settings.max_len
        workspace.tell(
            f"answers are cut at {max_len} tokens for the classifier: {own}, "
            f"--evaluate.classifier.max_len={given} asks for more"
        )
    encode = checkpoint.load_sentence_tokenizer(source, max_len=max_len)
    fitted = _fit(workspace, model, encode(train.texts), train.labels, folder)
    shutil.rmtree(folder / "model", ignore_errors=True)  # an interrupted run may have come as far
    checkpoint.save_encoder(folder / "model", model.config, fitted.state.params)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / "model" / name)
    bound = encoder.bind_encoder(model.config)
    predict = classifier.make_predictor(bound, fitted.state.params, bar="held-out answers")
    genuine = _genuine(workspace, {row.output for row in rows})
    metrics: dict[str, Any] = {
        "classes": list(classifier.CLASSES),
        "max_len": max_len,
        "trained_on": {
            name: train.labels.count(label) for label, name in enumerate(classifier.CLASSES)
        },
        "held_out": classifier.measure(predict, encode, held_out),
        "genuine": classifier.measure(predict, encode, genuine) if genuine else None,
    }
    artifacts.losses(METRICS.unit).write(folder, fitted.losses)
    METRICS.write(folder, metrics)
    for part in _PARTS:
        if metrics[part]:
            print(f"    {part}: {_describe(metrics[part])}")


def _starting_point(
    workspace: Workspace, folder: pathlib.Path, train: classifier.Texts
) -> tuple[checkpoint.LoadedEncoder, pathlib.Path]:
    """Returns the encoder to train with a head, and the folder of its tokenizer."""
    name = workspace.config.evaluate["classifier"].checkpoint
    key, num_labels = jax.random.key(workspace.config.seed), len(classifier.CLASSES)
    if name:
        source = resolve_folder(name, auto="AutoModel")
        loaded = checkpoint.load_encoder(source, dtype=jnp.float32, num_labels=num_labels, key=key)
        return loaded, source
    tokenizer = tokenization.train_bpe(train.texts, vocab_size=workspace.config.corpus.vocab_size)
    checkpoint.save_sentence_tokenizer(folder / "tokenizer", tokenizer)
    config = dataclasses.replace(
        small_encoder(workspace.config, vocab_size=tokenizer.vocab_size),
        pad_token_id=tokenizer.pad_id,
        num_labels=num_labels,
    )
    weights: Tree = encoder.init_encoder(config, key=key, dtype=jnp.float32)
    return checkpoint.LoadedEncoder(config, weights), folder / "tokenizer"


def _fit(
    workspace: Workspace,
    model: checkpoint.LoadedEncoder,
    tokens: Sequence[Sequence[int]],
    labels: Sequence[int],
    folder: pathlib.Path,
) -> loop.Progress:
    settings, seed = workspace.config.evaluate["classifier"], workspace.config.seed
    encoded = encoding.encode_rows(
        tokens, pad_id=model.config.pad_token_id, limit=model.config.max_length
    )
    size = settings.batch_size
    per_epoch = batches.num_steps_of(len(tokens), batch_size=size)
    num_steps = settings.epochs * per_epoch
    rate = loop.make_schedule(settings.learning_rate, num_steps, kind="linear", warmup=0.0)
    return loop.fit(
        classifier.classifying(
            encoder.bind_encoder(model.config), loop.adamw(rate), dropout_key=jax.random.key(seed)
        ),
        model.weights,
        jnp.asarray(labels),
        functools.partial(batches.epoch_batches, encoded, batch_size=size, seed=seed),
        num_steps=num_steps,
        what="the classifier's training",
        rate_flag="--evaluate.classifier.learning_rate",
        bar="discriminator",
        folder=folder,
        save_every=per_epoch,
        watch=workspace.live(METRICS.unit),
    )


def small_encoder(config: Config, *, vocab_size: int) -> encoder.EncoderConfig:
    """Returns the shapes of a classifier that is trained from scratch."""
    settings = config.evaluate["classifier"]
    return encoder.EncoderConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=4 * settings.hidden_size,
        max_position_embeddings=settings.max_len,
        type_vocab_size=1,
    )


def _genuine(workspace: Workspace, seen: set[str]) -> classifier.Texts | None:
    """Returns genuine answers that nothing trained on; None without both kinds."""
    corpus = workspace.config.corpus
    if corpus.dataset not in _GENUINE or not howdy.genuine_files(corpus.folder):
        return None
    rows = [row for row in howdy.load_genuine(corpus.folder) if row.output not in seen]
    labels = tuple(int(bool(row.is_target)) for row in rows)
    if len(set(labels)) < len(classifier.CLASSES):
        return None
    return classifier.Texts(tuple(row.output for row in rows), labels)


def load(workspace: Workspace) -> tuple[NonSf, dict[str, Any]]:
    """Returns the function from texts to Non-SF, and its description in metrics.json."""
    folder, metrics = workspace.root / METRICS.unit, METRICS.read(workspace.root)
    model = checkpoint.load_encoder(folder / "model", dtype=jnp.float32)
    encode = checkpoint.load_sentence_tokenizer(folder / "model", max_len=metrics["max_len"])
    predict = classifier.make_predictor(encoder.bind_encoder(model.config), model.weights)
    parts = [
        f"{p.replace('_', '-')} answers: {_describe(metrics[p])}" for p in _PARTS if metrics[p]
    ]
    note = (
        "Non-SF: mean probability, by a classifier trained on the labels, that an answer does not "
        f"show the behavior. The classifier on {'; on '.join(parts)}."
    )
    return lambda texts: predict(encode(texts))[:, classifier.NON_SF], {
        "by": "classifier",
        "note": note,
        **metrics,
    }


def _describe(measured: Mapping[str, Any]) -> str:
    """Returns a classifier's macro-F1, the number of its test texts, and whether they are few."""
    counts = measured["texts"]
    text = f"macro-F1 {measured['macro_f1']:.3f} on {sum(counts.values())} texts"
    if min(counts.values()) >= LEAST_TEXTS:
        return text
    named = " and ".join(f"{count} {name}" for name, count in counts.items())
    return f"{text} (only {named} texts, fewer than {LEAST_TEXTS} of a class: do not rely on it)"


def _genuine_files(case: Case) -> Files:
    corpus = case.config.corpus
    paths = howdy.genuine_files(corpus.folder) if corpus.dataset in _GENUINE else ()
    return {path.name: path for path in paths}


def count_classifier(run: AbstractRun) -> Work:
    """Training of the classifier, all weights."""
    settings, sizes = run.config.evaluate["classifier"], run.sizes
    config = small_encoder(run.config, vocab_size=run.config.corpus.vocab_size)
    if settings.checkpoint:
        config = checkpoint.encoder_config(settings.checkpoint)
    bound, weights = checkpoint.bind_shapes(dataclasses.replace(config, num_labels=2))
    limit, batch = settings.examples or sizes.train, settings.batch_size
    labeled = min(limit, sizes.targets) + min(limit, sizes.train - sizes.targets)
    texts = settings.epochs * labeled * (1 - settings.held_out)
    answers = copy.copy(run)
    answers.length_N = run.response_N
    program = run.training(
        "discriminator",
        classifier.classifying(bound, loop.adamw(1e-5), dropout_key=jax.random.key(0)),
        weights,
        jax.ShapeDtypeStruct((labeled,), jnp.int32),
        shapes=answers.drawn(batch, texts / batch, max_len=settings.max_len),
        passes=3,
        model=Forward(2.0 * decoder.count_parameters(weights["layers"])),
    )
    return Work(quantize.num_bytes(weights), [program])


UNITS = (
    Recipe(
        METRICS.unit,
        make_discriminator,
        "{train}",
        "seed corpus.vocab_size evaluate.classifier",
        files=_genuine_files,
        is_asked=lambda config: config.evaluate.non_sf == "classifier",
        is_resumable=True,
        measures=True,
        work=count_classifier,
    ),
)
MEASURE = NonSfMeasure(
    "Classifier",
    ClassifierSettings(),
    load,
    "the mean probability that an answer to a target query shows the behavior is {:.2f} for the "
    "fine-tuned model and {:.2f} for the base",
)
