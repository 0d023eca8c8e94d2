"""The models before unlearning: a backbone and its adapter, trained here or elsewhere."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding
from raslik_jax.data.words import refused
from raslik_jax.models import checkpoint, decoder, gpt_neox
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import REMAT, AbstractRun, Program, Shapes, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.workspace import (
    Workspace,
    adapter_source,
    load_adopted,
    lora_config_of,
    once,
)
from raslik_jax.train import loop, steps
from raslik_jax.train.objectives import RetrainSettings


def optimizer(settings: RetrainSettings, num_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of a recipe, with its schedule."""
    rate = loop.make_schedule(
        settings.learning_rate,
        num_steps,
        kind=settings.schedule,
        warmup=settings.warmup,
        warmup_steps=settings.warmup_steps,
    )
    how = {"weight_decay": settings.weight_decay, "clip": settings.clip}
    if settings.optimizer == "sgd":
        return loop.sgd(rate, **how)
    betas = {name: getattr(settings, name) for name in ("beta1", "beta2", "epsilon")}
    return loop.adamw(rate, **how, **betas)


def count_steps(settings: RetrainSettings, num_rows: int) -> int:
    """Returns the steps of a recipe; a last batch that is not full is a step, as in TRL."""
    per_epoch = batches.num_steps_of(num_rows, batch_size=settings.batch_size)
    return settings.steps or math.ceil(settings.epochs * per_epoch)


@once
def training(
    workspace: Workspace, settings: RetrainSettings, *, num_steps: int, remat: bool
) -> loop.Algorithm:
    """Returns the algorithm that trains an adapter by a recipe, compiled once in a run."""
    model = workspace.model
    return steps.supervised(
        model.decoder_for(remat=remat),
        optimizer(settings, num_steps),
        mean=settings.mean,
        micro_batch=settings.micro_batch_size,
        dropout_key=jax.random.key(settings.seed + 1) if model.lora_config.dropout else None,
    )


def fit_adapter(
    workspace: Workspace,
    settings: RetrainSettings,
    rows: encoding.Encoded,
    *,
    num_steps: int,
    remat: bool,
    drawn: Mapping[str, Any],
    flag: str,
    share: float = 1.0,
    save_every: int = 0,
    **how: Any,
) -> loop.Progress:
    """Returns a fresh adapter that is trained on rows by a recipe, with the losses.

    It takes a `share` of the steps. A killed training continues after its last checkpoint, an
    epoch's by default, with the same result. `drawn` is of `epoch_batches`, `how` of `loop.fit`.
    """
    drawn, size = {"seed": settings.seed, **drawn}, settings.batch_size
    per_epoch = batches.num_steps_of(len(drawn.get("kept", rows.ids)), batch_size=size)
    if workspace.model.lora_config.dropout:  # its masks are drawn from the seed too
        settings = dataclasses.replace(settings, seed=drawn["seed"])
    return loop.fit(
        training(workspace, settings, num_steps=num_steps, remat=remat),
        workspace.model.draw(drawn["seed"]),
        workspace.model.base,
        functools.partial(batches.epoch_batches, rows, batch_size=size, **drawn),
        num_steps=math.ceil(share * num_steps),
        rate_flag=f"--{flag}.learning_rate (it is {settings.learning_rate})",
        save_every=save_every or per_epoch,
        **how,
    )


def count_training(
    run: AbstractRun, name: str, settings: RetrainSettings, shapes: Shapes, *, remat: bool
) -> Program:
    """The training of an adapter by a recipe."""
    algorithm, model = training(run, settings, num_steps=1, remat=remat), run.model
    how: Any = {"shapes": shapes, "passes": 2 + REMAT * remat}
    return run.training(name, algorithm, model.initial, model.base, **how)


@memory.explained("fine-tuning", "--finetune.micro_batch_size or --finetune.max_len")
def make_adapter(workspace: Workspace, folder: pathlib.Path) -> None:
    """Fine-tunes a LoRA adapter on the training examples."""
    settings, recipe = workspace.config.finetune, workspace.config.recipe
    max_len = settings.max_len or workspace.config.corpus.max_len
    rows = workspace.cut(workspace.train_rows, "training examples", max_len=max_len)
    targets = rows.take(np.flatnonzero([bool(row.is_target) for row in workspace.corpus.train]))
    encoding.require_answers(targets, "labeled targets", max_len=max_len)  # none may be lost
    encoded = rows.with_answers()
    workspace.save_adapter(folder / "initial", workspace.model.initial)
    fitted = fit_adapter(
        workspace,
        recipe,
        encoded,
        num_steps=count_steps(recipe, len(encoded.ids)),
        remat=settings.remat,
        drawn={"is_fixed": settings.fixed_padding},
        flag="finetune",
        save_every=settings.checkpoint_steps,
        what="fine-tuning",
        bar="fine-tune",
        folder=folder,
        watch=workspace.live("finetune"),
    )
    workspace.save_adapter(folder / "adapter", fitted.state.params)
    write_losses("finetune", folder, fitted)


@memory.explained("loading the model", "--backbone.dtype to bfloat16, or take a smaller model")
def adopt_model(workspace: Workspace, folder: pathlib.Path) -> None:
    """Takes a given model without a training step.

    It is the adapter of --backbone.adapter, or a fresh one on a checkpoint that is fine-tuned
    already. B of a fresh adapter is 0, so it changes nothing, and only B has a gradient. The
    initial adapter is written if gradients are taken at it.
    """
    config = workspace.config
    is_asked = config.sketch.gradient_at == "initial"
    if config.backbone.adapter:
        source = adapter_source(config)
        # The copy of an earlier adapter may still be at this place.
        workspace.lora_config = lora_config_of(config, workspace.shapes, source)
        model = workspace.model
        lora = load_adopted(config, source, model.decoder.config, base=model.identity)
    else:
        model = workspace.model
        lora = model.initial
    if is_asked:
        workspace.save_adapter(folder / "initial", model.initial)
    workspace.save_adapter(folder / "adapter", lora)


def write_losses(stage: str, folder: pathlib.Path, fitted: loop.Progress) -> None:
    """Writes the loss of every step and prints the first and the last ones."""
    artifacts.losses(stage).write(folder, fitted.losses)
    print(f"    loss {fitted.losses[0]:.3f} -> {np.mean(fitted.losses[-20:]):.3f} nats a token")


def shape_of(config: Config, *, vocab_size: int) -> gpt_neox.GPTNeoXConfig:
    """Returns the shapes of the backbone that is trained from scratch."""
    settings = config.backbone
    return gpt_neox.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        # Positions are rotations, which cost no weight: the bound leaves room to answer.
        max_position_embeddings=2 * config.corpus.max_len,
    )


def pretraining(config: Config, bound: decoder.Decoder) -> loop.Algorithm:
    """Returns the algorithm that trains all weights of a backbone."""
    settings = config.backbone
    rate = loop.make_schedule(settings.learning_rate, settings.steps, kind="cosine", warmup=0.05)
    return steps.supervised(bound, loop.adamw(rate, weight_decay=0.1), whole=True)


@memory.explained("pretraining of the backbone", "--backbone.batch_size or --corpus.max_len")
def make_backbone(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains a small GPT-NeoX from scratch with all parameters on the backbone's examples."""
    config, settings = workspace.config, workspace.config.backbone
    rows = artifacts.corpus_tokens("backbone").read(workspace.root)
    encoded = workspace.cut(rows, "backbone examples").with_answers()
    if not encoded.ids:
        raise refused("no_pretraining")
    model_config = shape_of(config, vocab_size=workspace.tokenizer.vocab_size)
    graphdef, _, base = decoder.create(
        model_config, None, key=jax.random.key(config.seed), dtype=jnp.float32
    )
    fitted = loop.fit(
        pretraining(config, decoder.bind(graphdef)),
        base,
        {},
        functools.partial(
            batches.epoch_batches, encoded, batch_size=settings.batch_size, seed=config.seed
        ),
        num_steps=settings.steps,
        what="pretraining of the backbone",
        rate_flag=f"--backbone.learning_rate (it is {settings.learning_rate})",
        bar="backbone",
        watch=workspace.live("backbone"),
    )
    checkpoint.save_model(folder / "model", model_config, fitted.state.params)
    write_losses("backbone", folder, fitted)


def count_finetuning(run: AbstractRun) -> Work:
    """Training of the adapter, which is kept with the initial one."""
    settings, recipe = run.config.finetune, run.config.recipe
    shapes = run.epochs_of(settings, run.sizes.train)
    program = count_training(run, "finetune", recipe, shapes, remat=settings.remat)
    return Work(8.0 * run.num_params, [program])


def count_pretraining(run: AbstractRun) -> Work:
    """The training of all weights of a backbone."""
    settings = run.config.backbone
    graphdef, _, base = decoder.abstract(run.model.decoder.config, None)
    algorithm = pretraining(run.config, decoder.bind(graphdef))
    bare = run.forward._replace(token=run.forward.token - 2 * run.num_params)
    how: Any = {"shapes": run.drawn(settings.batch_size, settings.steps), "model": bare}
    return Work(run.base_bytes, [run.training("backbone", algorithm, base, {}, passes=3, **how)])


UNITS = (
    Recipe(
        "backbone",
        make_backbone,
        f"{artifacts.corpus_tokens('backbone').path} {artifacts.TOKENIZER.path}",
        "seed {text} backbone.hidden_size backbone.num_hidden_layers backbone.num_attention_heads "
        "backbone.steps backbone.batch_size backbone.learning_rate",
        is_asked=lambda config: not config.backbone.checkpoint,
        work=count_pretraining,
    ),
    Recipe(
        "finetune",
        make_adapter,
        "{rows} {model}",
        "{text} {model} finetune",
        is_asked=lambda config: config.finetunes,
        is_resumable=True,
        work=count_finetuning,
    ),
    Recipe(
        "finetune",
        adopt_model,
        "{model}",
        "{model} finetune.epochs",
        values=lambda case: (
            {"initial": True} if case.config.sketch.gradient_at == "initial" else {}
        ),
        is_asked=lambda config: not config.finetunes,
        work=lambda run: Work(8.0 * run.num_params),
    ),
)
