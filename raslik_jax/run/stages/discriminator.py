"""Non-SF by words or by a classifier, and the classifier's training: discriminator."""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from raslik_jax.base.axes import Tree
from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.evaluate import judgment
from raslik_jax.evaluate.metrics import NonSf
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.models import checkpoint, decoder, encoder, quantize
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import AbstractRun, Work, bind_shapes, encoder_config
from raslik_jax.run.recipes import Case, Files, Recipe
from raslik_jax.run.workspace import Workspace, judge_of, non_sf_by_rule
from raslik_jax.train import classifier, loop

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


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
    encode = tokenization.load_sentence_tokenizer(source, max_len=max_len)
    fitted = _fit(workspace, model, encode(train.texts), train.labels, folder)
    shutil.rmtree(folder / "model", ignore_errors=True)  # an interrupted run may have come as far
    checkpoint.save_model(folder / "model", model.config, fitted.state.params)
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
    artifacts.losses("discriminator").write(folder, fitted.losses)
    artifacts.CLASSIFIER.write(folder, metrics)
    for part in ("held_out", "genuine"):
        if metrics[part]:
            print(f"    {part}: {judgment.describe_classifier(metrics[part])}")


def _starting_point(
    workspace: Workspace, folder: pathlib.Path, train: classifier.Texts
) -> tuple[checkpoint.LoadedEncoder, pathlib.Path]:
    """Returns the encoder to train with a head, and the folder of its tokenizer."""
    name = workspace.config.evaluate["classifier"].checkpoint
    key, num_labels = jax.random.key(workspace.config.seed), len(classifier.CLASSES)
    if name:
        source = checkpoint.resolve_folder(name, auto="AutoModel")
        loaded = checkpoint.load_encoder(source, dtype=jnp.float32, num_labels=num_labels, key=key)
        return loaded, source
    tokenizer = tokenization.train_bpe(train.texts, vocab_size=workspace.config.corpus.vocab_size)
    tokenization.save_sentence_tokenizer(folder / "tokenizer", tokenizer)
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
        watch=workspace.live("discriminator"),
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
    """Returns the marker's genuine answers that nothing trained on; None without both kinds."""
    corpus = workspace.config.corpus
    marker = corpus.record.marker
    if not marker or not marker.genuine_files(corpus.folder):
        return None
    rows = [row for row in marker.load_genuine(corpus.folder) if row.output not in seen]
    labels = tuple(int(bool(row.is_target)) for row in rows)
    if len(set(labels)) < len(classifier.CLASSES):
        return None
    return classifier.Texts(tuple(row.output for row in rows), labels)


def non_sf(workspace: Workspace) -> NonSf | None:
    """Returns the function from texts to Non-SF for the run's metrics, if any."""
    if not NON_SF[workspace.config.evaluate.non_sf].is_trained:
        return non_sf_by_rule(workspace.config)
    folder = workspace.root / "discriminator"
    model = checkpoint.load_encoder(folder / "model", dtype=jnp.float32)
    max_len = artifacts.CLASSIFIER.read(workspace.root)["max_len"]
    encode = tokenization.load_sentence_tokenizer(folder / "model", max_len=max_len)
    predict = classifier.make_predictor(encoder.bind_encoder(model.config), model.weights)
    return lambda texts: predict(encode(texts))[:, classifier.NON_SF]


def describe(workspace: Workspace) -> dict[str, Any] | None:
    """Returns metrics.json's description of the Non-SF measure; None without a mark."""
    by = workspace.config.evaluate.non_sf
    if not workspace.has_marker:
        return None
    if NON_SF[by].is_trained:
        return {"by": by, **artifacts.CLASSIFIER.read(workspace.root)}
    return {"by": "judge" if judge_of(workspace.config) else by}


def _genuine_files(case: Case) -> Files:
    corpus = case.config.corpus
    marker = corpus.record.marker
    return {p.name: p for p in (marker.genuine_files(corpus.folder) if marker else ())}


def count_classifier(run: AbstractRun) -> Work:
    """Training of the classifier, all weights."""
    settings, sizes = run.config.evaluate["classifier"], run.sizes
    config = small_encoder(run.config, vocab_size=run.config.corpus.vocab_size)
    if settings.checkpoint:
        config = encoder_config(settings.checkpoint)
    bound, weights = bind_shapes(dataclasses.replace(config, num_labels=2))
    limit, batch = settings.examples or sizes.train, settings.batch_size
    labeled = min(limit, sizes.targets) + min(limit, sizes.train - sizes.targets)
    texts = settings.epochs * labeled * (1 - settings.held_out)
    program = run.training(
        "discriminator",
        classifier.classifying(bound, loop.adamw(1e-5), dropout_key=jax.random.key(0)),
        weights,
        jax.ShapeDtypeStruct((labeled,), jnp.int32),
        shapes=run.drawn(batch, texts / batch, max_len=settings.max_len, is_answer=True),
        passes=3,
        num_weights=decoder.count_parameters(weights),
    )
    return Work(quantize.num_bytes(weights), [program])


UNITS = (
    Recipe(
        "discriminator",
        make_discriminator,
        "{train}",
        "seed corpus.vocab_size evaluate.classifier",
        files=_genuine_files,
        is_asked=lambda config: NON_SF[config.evaluate.non_sf].is_trained,
        is_resumable=True,
        measures=True,
        work=count_classifier,
    ),
)
