"""What each unit does: the programs that it calls, what it leaves on disk.

A function of a run in the abstract and of what the unit's own function takes; none has arithmetic
for what a program does.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json
from raslik_jax.evaluate import likelihood, perplexity
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.models import decode, decoder, encoder, quantize
from raslik_jax.parallel import meshes
from raslik_jax.retrieve.embeddings import embedding_step
from raslik_jax.run.programs import AbstractRun, Program, Work, platform_of
from raslik_jax.run.stages import (
    backbone,
    chance,
    corpus,
    discriminator,
    finetune,
    generate,
    references,
    retrieve,
    robustness,
    scores,
    sketch,
    tokens,
    unlearn,
)
from raslik_jax.sketch import projections
from raslik_jax.train import classifier, loop, steps
from raslik_jax.train.objectives import OBJECTIVES

# The encoder of a name that is no folder: RoBERTa base, which has BERT base's layers.
_BASE_ENCODER: encoder.EncoderConfig = encoder.RobertaConfig(
    vocab_size=50_265,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=514,
    type_vocab_size=1,
    pad_token_id=1,
)


def pretraining(run: AbstractRun) -> Work:
    """Training of a backbone, all weights."""
    settings = run.config.backbone
    graphdef, _, base = decoder.abstract(run.model.decoder.config, None)
    algorithm = backbone.pretraining(run.config, decoder.bind(graphdef))
    shapes = run.drawn(settings.batch_size, settings.steps)
    program = run.training("backbone", algorithm, base, {}, shapes=shapes, passes=3)
    return Work(run.base_bytes, [program])


def finetuning(run: AbstractRun) -> Work:
    """Training of the adapter, of which some are kept along the way."""
    settings, model = run.config.finetune, run.model
    program = run.training(
        "finetune",
        finetune.finetuning(run.workspace, num_steps=1),
        model.initial,
        model.base,
        shapes=run.epochs_of(settings, run.sizes.train),
        passes=2 + settings.remat,
    )
    return Work(4.0 * (2 + settings.trajectory_points) * run.num_params, [program])


def unlearning(run: AbstractRun, strategy: str, name: str) -> Work:
    """An objective on an adapter or on all weights, kept after every epoch."""
    settings, model = run.config.unlearn, run.model
    params: Tree = model.initial
    kept, is_whole = 4 * run.num_params, settings.parameters == "all"
    if is_whole:
        kept = run.base_bytes
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.base
        )
    objective = OBJECTIVES[name]
    reads_retain = objective.retain is not None
    forwards = len(objective.reads_reference) + objective.reads_backbone
    program = run.training(
        f"unlearn/{name}",
        run.workspace.unlearning(name, 1e-5),
        params,
        steps.Frozen(base=model.base, reference=model.initial),
        shapes=run.epochs_of(settings, max(run.sizes.forget, run.sizes.retain)),
        batch=lambda shape: (shape.batch, shape.batch if reads_retain else None),
        passes=(2 + settings.remat + is_whole) * (1 + reads_retain) + forwards,
    )
    return Work(settings.epochs * kept, [program])


def answering(run: AbstractRun, prompts: int, models: int) -> Work:
    """Greedy answers of some models to prompts as long as Alpaca's."""
    settings, model = run.config.references, run.model
    rows = min(settings.decode_batch_size, 1 << max(prompts - 1, 0).bit_length())
    ends: Any = {"end_ids": np.zeros(8, np.int32), "pad_id": np.int32(0)}
    program = run.program(
        "decode",
        decode.generate_batch,
        model.initial,
        model.base,
        shapes=run.prompts(prompts, rows),
        trips=settings.max_new_tokens - 1,
        new_tokens=settings.max_new_tokens,
        static={"decoder": model.decoder, "max_new_tokens": settings.max_new_tokens, **ends},
    )
    return Work(500.0 * models * prompts, [program] * models)


def likelihoods(run: AbstractRun, rows: int) -> Program:
    """The likelihood of given answers."""
    model = run.model
    step, shapes = likelihood.likelihood_step(model.decoder), run.planned(rows, num_buckets=2)
    return run.program("likelihood", step, model.initial, model.base, shapes=shapes)


def perplexities(run: AbstractRun, models: int) -> Work:
    """Likelihoods of some rows under each model, and of its own answers."""
    rows = len(perplexity.SETS) * run.config.evaluate.perplexity_examples + run.num_measured
    return Work(100.0 * models * rows, [likelihoods(run, rows)] * models)


def traced(run: AbstractRun, models: int) -> Work:
    """Answers to the traced prompts, and the likelihood of the traced answers."""
    rows = run.queries["retrieval"]
    work = answering(run, rows, models)
    return work._replace(programs=[*work.programs, *[likelihoods(run, rows)] * models])


def questions(run: AbstractRun, models: int) -> Work:
    """The dataset's own questions: answers, and the likelihood of given ones."""
    asked, given = run.config.corpus.count_questions(run.config.evaluate.questions)
    work = answering(run, asked, models)
    return work._replace(programs=[*work.programs, *[likelihoods(run, given)] * models])


def sketching(
    run: AbstractRun, rows: int, disk_bytes: int | float = 0, *, is_exact: bool = False
) -> Work:
    """Gradients of rows, projected; the exact kernel takes them for the mean and the scores."""
    settings, workspace = run.config.sketch, run.workspace
    family, size, passes = settings.projection, run.sketch_size, 1
    if is_exact:
        family, size, passes = "binned", run.num_flat, 1 + run.config.retrieve.center
    projection = jax.eval_shape(lambda: projections.init_projection(0, family, run.num_flat, size))
    adapters = (run.model.initial,) * run.num_adapters
    differentiated = functools.partial(sketch.differentiated, workspace)
    with meshes.traced_for(platform_of(run.mesh)):
        program_tokens = sketch.program_tokens(workspace.sketch_model.decoder.config)
    planned: Any = {"num_buckets": settings.num_buckets, "targets": settings.targets}
    program = run.program(
        f"sketch {family} {size}",
        sketch.sketch_step(workspace),
        projection,
        *jax.eval_shape(differentiated, adapters, workspace.sketch_model.base),
        shapes=run.planned(rows, program_tokens=program_tokens, **planned),
        passes=2 * run.num_adapters,
    )
    return Work(disk_bytes, [program] * passes)


def scoring(run: AbstractRun, queries: int, columns: int) -> Work:
    """Cosines of the index's rows with queries, of which so many columns are kept."""
    rows, products = run.sizes.train, 2.0 * run.sketch_size * queries
    return Work(4.0 * rows * columns, [], rows * products, run.index_bytes)


def null(run: AbstractRun) -> Work:
    """Scores with rows that stand for unrelated prompts."""
    count = min(run.config.retrieve.null_prompts, run.sizes.train)
    return scoring(run, count, count)


def classifying(run: AbstractRun) -> Work:
    """Training of the classifier, all weights."""
    settings, sizes = run.config.evaluate["classifier"], run.sizes
    config = discriminator.small_encoder(run.config, vocab_size=run.config.corpus.vocab_size)
    if settings.checkpoint:
        config = _encoder_config(settings.checkpoint)
    bound, weights = _bind_shapes(dataclasses.replace(config, num_labels=2))
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


def embedding(run: AbstractRun) -> Work:
    """Sentence vectors of the training examples' prompts."""
    rows, name = run.sizes.train, run.config.retrieve["embedding"].checkpoint
    bound, weights = _bind_shapes(_encoder_config(name))
    program = run.program(
        "embedding",
        embedding_step(bound),
        weights,
        shapes=run.prompts(rows, min(rows, 64)),
        num_weights=decoder.count_parameters(weights),
    )
    return Work(4.0 * 768 * rows, [program])


def _encoder_config(name: str) -> encoder.EncoderConfig:
    path, config = pathlib.Path(name) / "config.json", _BASE_ENCODER
    if name and path.is_file():
        fields = read_json(path, {"model_type": str})
        config = encoder.ENCODERS[fields["model_type"]].config.from_hf(fields)
    return dataclasses.replace(config, pooling="cls")


def _bind_shapes(config: encoder.EncoderConfig) -> tuple[encoder.Encoder, Tree]:
    key = jax.random.key(0)
    make = functools.partial(encoder.init_encoder, config, key=key, dtype=jnp.float32)
    return encoder.bind_encoder(config), jax.eval_shape(make)


def attacking(run: AbstractRun, attack: robustness.Attack) -> Work:
    """A measure of robustness, on one model or on both before unlearning."""
    name, config, models = attack.measure, run.config, 1 if attack.algorithm else 2
    taken = ROBUSTNESS[name].cost(config.evaluate[name])
    rows, count = config.evaluate.robustness_rows, models * taken.readings
    work = answering(run, min(rows, run.num_measured), count + models * taken.answers)
    found = [*work.programs, *[likelihoods(run, rows)] * (count + models * taken.given)]
    found += [likelihoods(run, taken.texts)] * models if taken.texts else []
    if taken.steps:
        own = config.unlearn
        bound, held = run.model.decoder_for(remat=own.remat), own.micro_batch_size or own.batch_size
        training = robustness.relearning(bound, 1e-3, held)
        shapes = run.drawn(taken.rows, models * taken.steps)
        # The adapter is folded into the weights, which are quantized no more.
        found.append(run.training(name, training, run.model.initial, run.plain, shapes=shapes))
    return work._replace(programs=found)


def _of_models(work: Callable[[AbstractRun, int], Work]) -> Callable[..., Work]:
    """Returns the work on a variant's model of every epoch, or on both models before unlearning."""
    return lambda run, variant: work(run, len(run.workspace.epochs(*variant)) if variant else 2)


# By the function that makes a unit, with that one's arguments; others work on the host alone.
WORK: dict[Callable[..., None], Callable[..., Work]] = {
    corpus.make_corpus: lambda run: Work(500.0 * run.sizes.train),
    backbone.make_backbone: pretraining,
    finetune.make_adapter: finetuning,
    finetune.adopt_model: lambda run: Work(8.0 * run.num_params),
    references.make_retrieval_answers: lambda run: answering(run, run.num_answered, 1),
    references.make_references: lambda run: answering(run, run.num_measured, 2),
    references.make_perplexities: lambda run: perplexities(run, 2),
    discriminator.make_discriminator: classifying,
    sketch.make_index: lambda run: sketching(run, run.sizes.train, run.index_bytes),
    sketch.make_query_sketches: lambda run: sketching(
        run, run.queries["retrieval"], 4.0 * run.sketch_size * run.queries["retrieval"]
    ),
    sketch.make_diagnosis: lambda run: sketching(run, run.config.sketch.diagnose),
    scores.make_scores: lambda run: scoring(run, run.queries["retrieval"], 1),
    chance.make_null: null,
    chance.make_chance: lambda run: Work(32.0 * run.sizes.train),
    # A gradient, and the transpose of one, which takes two: for a row and for the answer.
    tokens.make_tokens: lambda run: sketching(run, 6 * run.config.retrieve.token_rows),
    scores.make_embeddings: embedding,
    scores.make_exact_scores: lambda run: sketching(
        run, run.sizes.train, 4.0 * run.sizes.train, is_exact=True
    ),
    retrieve.make_sizes: lambda run: Work(100.0),
    retrieve.make_sets: lambda run, strategy: Work(500.0 * (run.sizes.forget + run.sizes.retain)),
    unlearn.unlearn: lambda run, variant: unlearning(run, *variant),
    generate.write_answers: _of_models(
        lambda run, models: answering(run, run.num_measured, models)
    ),
    generate.write_perplexities: _of_models(perplexities),
    scores.make_traced: lambda run: traced(run, 2),
    generate.write_traced: _of_models(traced),
    generate.write_questions: _of_models(questions),
    robustness.write_robustness: attacking,
}
